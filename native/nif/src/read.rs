//! Calls on a reader: chunks of the remote tier for one consumer.
//!
//! Owns the hand-over without a copy: the fetched memory of a chunk becomes binaries that share it.

use std::sync::Arc;

use log_format::chunk::{ChunkHeader, HEADER_BYTES};
use rustler::{Encoder, Env, LocalPid, NifResult, OwnedBinary, ResourceArc, Term};
use tiering_runtime::engine::Closed;
use tiering_runtime::read::{FailureKind, Parts, ReadOutcome, Wake};

use crate::codec::header::header_map;
use crate::codec::spec::StartTerm;
use crate::codec::{OffsetOrNone, string, text};
use crate::message::Mailbox;
use crate::owner;
use crate::resources::{ChunkResource, EngineResource, ReaderResource};
use crate::{atoms, errors};

/// Share of a chunk's bytes that the garbage collector of its reader is told of (see [`weigh`]).
const WEIGHT_DIVISOR: usize = 4;
/// The most it is told of at once.
const WEIGHT_BYTES_MAX: usize = 256 * 1024;
/// Chunks smaller than this weigh nothing: what the call puts on the heap is pressure enough.
const WEIGHTLESS_BYTES: usize = 4 * 1024;
/// Bytes that use up one percent of a process's turn.
const BYTES_PER_PERCENT: usize = 64 * 1024;

/// A consumer that waits, and the one who can make it let go of what it was handed.
struct Consumer {
    mailbox: Mailbox,
    engine_owner: Arc<Mailbox>,
}

impl Wake for Consumer {
    fn wake(&self) {
        self.mailbox.send_as_is();
    }

    fn call_in(&self) {
        let pid = self.mailbox.pid();
        (self.engine_owner).send(|env| (atoms::collect(), pid).encode(env));
    }
}

pub(crate) fn open<'a>(
    env: Env<'a>,
    engine: ResourceArc<EngineResource>,
    owner: LocalPid,
    wake: Term<'a>,
    stream_id: Term<'a>,
    start: StartTerm,
) -> NifResult<Term<'a>> {
    let stream_id = string(stream_id)?;
    let wake = Arc::new(Consumer {
        mailbox: Mailbox::new(owner, wake),
        engine_owner: Arc::clone(&engine.owner),
    });
    let reader = match engine.engine.open_reader(&stream_id, start.0, wake) {
        Ok(reader) => reader,
        Err(Closed) => return Ok(errors::refused(env, atoms::closed())),
    };
    let handle = ResourceArc::new(ReaderResource { reader });
    if !owner::bind(env, &handle, &owner) {
        return Ok(errors::refused(env, atoms::closed()));
    }
    Ok((atoms::ok(), handle).encode(env))
}

pub(crate) fn read(
    env: Env<'_>,
    handle: ResourceArc<ReaderResource>,
    max_chunk_id: OffsetOrNone,
) -> NifResult<Term<'_>> {
    let Some(max_chunk_id) = max_chunk_id.0 else {
        // Nothing is committed: as with a chunk that is held back, the log says when that changes.
        return Ok(atoms::wait().encode(env));
    };
    Ok(match handle.reader.read(max_chunk_id) {
        ReadOutcome::Chunk {
            header,
            position,
            bytes,
        } => chunk(env, &header, position, &bytes)?,
        ReadOutcome::Wait => atoms::wait().encode(env),
        ReadOutcome::Local { next_offset } => (atoms::local(), next_offset).encode(env),
        ReadOutcome::Failed { kind, text: reason } => {
            let kind = match kind {
                FailureKind::Corrupt => atoms::corrupt(),
                FailureKind::Lost => atoms::lost(),
                FailureKind::Unavailable => atoms::unavailable(),
                FailureKind::Archived => atoms::archived(),
                FailureKind::Bug => atoms::bug(),
            };
            (atoms::error(), kind, text(env, &reason)).encode(env)
        }
    })
}

pub(crate) fn close(env: Env<'_>, handle: ResourceArc<ReaderResource>) -> NifResult<Term<'_>> {
    handle.reader.close();
    Ok(atoms::ok().encode(env))
}

/// `{chunk, Header, Filter, Data, Trailer}`; Data is a list of binaries if it was fetched in parts.
fn chunk<'a>(
    env: Env<'a>,
    header: &ChunkHeader,
    position: u64,
    bytes: &Parts,
) -> NifResult<Term<'a>> {
    let length = bytes.len();
    let data_start = header.lead_bytes();
    let trailer_start = data_start.saturating_add(header.data_bytes as usize);
    let slices = (
        bytes.slice(0..HEADER_BYTES),
        bytes.slice(HEADER_BYTES..data_start),
        bytes.slice(data_start..trailer_start),
        bytes.slice(trailer_start..length),
    );
    let (Some(lead), Some(filter), Some(data), Some(trailer)) = slices else {
        return Ok(unfit(env));
    };
    let lead = lead.to_bytes();
    let Some(lead) = lead.first_chunk::<HEADER_BYTES>() else {
        return Ok(unfit(env));
    };
    if usize::try_from(header.total_bytes()) != Ok(length) {
        return Ok(unfit(env));
    }
    let header = header_map(env, header, lead, position)?;
    // Filter and trailer are small, and hardly ever in more than one part.
    let mut slices = vec![filter.to_bytes(), trailer.to_bytes()];
    slices.extend(data.iter().cloned());
    let count = slices.len();
    let chunk = ResourceArc::new(ChunkResource::new(slices, length));
    let binary = |index: usize| chunk.make_binary(env, move |chunk| chunk.slice(index));
    let data = match count {
        // No data at all is an empty binary, too.
        2 | 3 => binary(2).encode(env),
        _ => (2..count).map(binary).collect::<Vec<_>>().encode(env),
    };
    weigh(env, length);
    Ok((atoms::chunk(), header, binary(0), data, binary(1)).encode(env))
}

fn unfit(env: Env<'_>) -> Term<'_> {
    let reason = text(env, "the chunk is not as long as its header says");
    (atoms::error(), atoms::corrupt(), reason).encode(env)
}

/// Makes the caller feel the weight of the chunk. The VM counts a binary of ours as a few words, so that a process could
/// hold gigabytes of read chunks as garbage that it has no reason to collect, and it frees them when the process yields.
/// A binary that nobody sees and nobody writes to costs no memory but is counted, and the process's turn ends
/// as soon as if it had read the bytes itself.
fn weigh(env: Env<'_>, length: usize) {
    if length >= WEIGHTLESS_BYTES {
        OwnedBinary::new((length / WEIGHT_DIVISOR).min(WEIGHT_BYTES_MAX)).release(env);
    }
    let percent = i32::try_from(length / BYTES_PER_PERCENT)
        .unwrap_or(100)
        .clamp(1, 100);
    rustler::schedule::consume_timeslice(env, percent);
}
