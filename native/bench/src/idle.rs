//! What is left of a stream, and of a reader, when nothing happens: memory that is not given back, and requests.
//!
//! Memory is what was allocated and not freed, counted at the allocator: the process's own size also holds what the allocator
//! keeps for later.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tiering_core::upload::{CommitOutcome, PointerRead};
use tiering_runtime::engine::Engine;
use tiering_runtime::read::Start;
use tiering_runtime::upload::{UploadConfig, UploadEvent, UploadHandle, UploadPush, UploadSink};

use crate::bare::Target;
use crate::corpus::Corpus;
use crate::endpoint::Seen;
use crate::layout::{self, DATA_BYTES};
use crate::reading::{Consumer, engine};
use crate::row::print;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<std::alloc::System> = &INSTRUMENTED_SYSTEM;

const RUNS: usize = 3;
/// Streams that have been there before, so that what belongs to the engine is allocated already.
const WARM_UP: usize = 50;
const STREAMS: usize = 1_000;
const READERS: usize = 100;
const QUIET: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(120);
/// The promise.
const STREAM_BYTES_MAX: f64 = 16_384.0;

type Failed = Box<dyn std::error::Error>;

/// Streams, then readers.
pub fn run(directory: &Path, target: &Target) -> Result<(), Failed> {
    let corpus = Corpus {
        chunks: 16,
        data_bytes: 8_000,
        segment_bytes: 1 << 20,
    };
    let place = directory.join("idle");
    corpus.write(&place)?;
    let (mut stream_bytes, mut stream_requests) = (Vec::new(), Vec::new());
    let (mut reader_bytes, mut reader_requests) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let (bytes, requests) = streams(&place, corpus, target)?;
        stream_bytes.push(bytes);
        stream_requests.push(requests);
        let (bytes, requests) = readers(target)?;
        reader_bytes.push(bytes);
        reader_requests.push(requests);
    }
    std::fs::remove_dir_all(&place)?;
    print(
        &format!("idle stream, of {STREAMS}: native memory"),
        "bytes",
        &stream_bytes,
        Some(("at most 16 KiB", STREAM_BYTES_MAX)),
    );
    print(
        &format!("{STREAMS} idle streams: requests"),
        "a minute",
        &stream_requests,
        None,
    );
    print(
        &format!("reader whose consumer rests, of {READERS}: native memory"),
        "bytes",
        &reader_bytes,
        None,
    );
    print(
        &format!("{READERS} readers whose consumers rest: requests"),
        "a minute",
        &reader_requests,
        None,
    );
    Ok(())
}

struct Sink {
    number: usize,
    pushes: Sender<(usize, UploadPush)>,
}

impl UploadSink for Sink {
    fn push(&self, push: UploadPush) {
        self.pushes.send((self.number, push)).ok();
    }
}

/// Bytes of each stream that has tiered everything and waits, and requests a minute of all.
fn streams(place: &Path, corpus: Corpus, target: &Target) -> Result<(f64, f64), Failed> {
    let mut config = target.config();
    config.fragment_size_bytes = 32 << 10;
    config.persist_interval_ms = 100;
    let engine = Engine::open(config)?;
    let (sender, pushes) = channel();
    let mut handles = Vec::with_capacity(STREAMS + WARM_UP);
    open(&engine, place, corpus, WARM_UP, &sender, &mut handles)?;
    settle(corpus, &pushes, &handles, 0)?;
    let before = live_bytes();
    open(&engine, place, corpus, STREAMS, &sender, &mut handles)?;
    settle(corpus, &pushes, &handles, WARM_UP)?;
    let requests = requests_a_minute(target)?;
    // Whatever came with the end of the last uploads is over by now.
    let bytes = (live_bytes() - before) / STREAMS as f64;
    Ok((bytes, requests))
}

fn open(
    engine: &Engine,
    place: &Path,
    corpus: Corpus,
    count: usize,
    pushes: &Sender<(usize, UploadPush)>,
    handles: &mut Vec<UploadHandle>,
) -> Result<(), Failed> {
    for number in handles.len()..handles.len() + count {
        let config = UploadConfig {
            stream_id: format!("__idle_{number}"),
            directory: place.to_path_buf(),
            epoch: 1,
            queue: format!("idle {number}"),
            vhost: "/".to_owned(),
            arguments: String::new(),
        };
        let pushes = pushes.clone();
        let handle = engine.open_upload(config, Arc::new(Sink { number, pushes }))?;
        handle.event(UploadEvent::Committed {
            committed_chunk_id: Some(corpus.chunks - 1),
            local_first_chunk_id: Some(0),
        })?;
        handle.event(UploadEvent::Cut)?;
        handles.push(handle);
    }
    Ok(())
}

/// Answers as the shell does until every stream from the number `first` on has persisted everything.
fn settle(
    corpus: Corpus,
    pushes: &Receiver<(usize, UploadPush)>,
    handles: &[UploadHandle],
    first: usize,
) -> Result<(), Failed> {
    let mut settled = vec![false; handles.len()];
    settled.iter_mut().take(first).for_each(|is| *is = true);
    while settled.contains(&false) {
        let (number, push) = pushes.recv_timeout(PATIENCE)?;
        let Some(handle) = handles.get(number) else {
            continue;
        };
        let answer = match push {
            UploadPush::ReadPointer => UploadEvent::Pointer(PointerRead::NotFound),
            UploadPush::WriteAnchor => UploadEvent::Anchor { ok: true },
            UploadPush::CommitPointer {
                expected_revision, ..
            } => UploadEvent::PointerCommitted(CommitOutcome::Committed {
                revision: expected_revision + 1,
            }),
            UploadPush::Range(range, _) => {
                match settled.get_mut(number) {
                    Some(is) if range.next_offset == corpus.chunks => *is = true,
                    // What was cut by size is there; the rest is cut now.
                    _ => handle.event(UploadEvent::Cut)?,
                }
                continue;
            }
            UploadPush::Stopped(why) => return Err(format!("stream {number}: {why:?}").into()),
            _ => continue,
        };
        handle.event(answer)?;
    }
    Ok(())
}

/// Bytes of each reader that has given one chunk to a consumer who takes no more, and requests a minute of all.
fn readers(target: &Target) -> Result<(f64, f64), Failed> {
    let engine = engine(target, layout::root(READERS as u64))?;
    let attach = |count| -> Result<Vec<Consumer>, Failed> {
        let mut consumers = Vec::with_capacity(count);
        for _ in 0..count {
            let consumer = Consumer::attach(&engine, Start::Offset(1))?;
            consumer.next()?;
            consumers.push(consumer);
        }
        quiet(target)?;
        Ok(consumers)
    };
    let _warm = attach(2)?;
    let before = live_bytes();
    let consumers = attach(READERS)?;
    let requests = requests_a_minute(target)?;
    let bytes = (live_bytes() - before) / consumers.len() as f64;
    if bytes > DATA_BYTES as f64 {
        return Err("a reader that rests holds a whole fragment".into());
    }
    Ok((bytes, requests))
}

/// Waits until the endpoint is not asked any more.
fn quiet(target: &Target) -> Result<(), Failed> {
    let began = Instant::now();
    let mut last = u64::MAX;
    loop {
        let seen = Seen::at(&target.endpoint)?;
        if seen.get("open") == 0 && seen.get("requests") == last {
            return Ok(());
        }
        if began.elapsed() > PATIENCE {
            return Err("the endpoint does not come to rest".into());
        }
        last = seen.get("requests");
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn requests_a_minute(target: &Target) -> Result<f64, Failed> {
    quiet(target)?;
    Seen::reset(&target.endpoint)?;
    std::thread::sleep(QUIET);
    let requests = Seen::at(&target.endpoint)?.get("requests");
    Ok(requests as f64 * 60.0 / QUIET.as_secs_f64())
}

/// Allocated and not freed.
fn live_bytes() -> f64 {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated as f64 - stats.bytes_deallocated as f64
}
