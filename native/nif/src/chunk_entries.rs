//! Cuts the data of a chunk into its entries, as sub-binaries of what is given; the data may be in parts.
//!
//! Owns the bound on the work of one call. The layout itself is `log_format::chunk`'s.

use std::collections::VecDeque;

use log_format::chunk::{ENTRY_HEAD_BYTES, Entry, EntryKind, entry_bytes, next_entry};
use rustler::{Binary, Encoder, Env, NifResult, OwnedBinary, Term};

use crate::{atoms, errors};

/// Most entries in one answer, whatever the caller asks for: about 50 us of work.
const MAX_ENTRIES_PER_CALL: usize = 1024;

/// At most `max` of the `num_left` entries from `position` on, the first of which has `offset`. `data` is a binary, or a list of
/// binaries that are one after the other; an entry that begins in one and ends in another is copied.
///
/// Fails as a whole: an entry is only handed out with everything in front of it intact.
pub(crate) fn chunk_entries<'a>(
    env: Env<'a>,
    data: Term<'a>,
    position: usize,
    offset: u64,
    num_left: u64,
    max: usize,
) -> NifResult<Term<'a>> {
    let mut spread = Spread::new(data, position)?;
    let (mut offset, mut num_left) = (offset, num_left);
    let max = max.min(MAX_ENTRIES_PER_CALL);
    let mut entries = Vec::with_capacity(max.min(num_left as usize));
    while num_left > 0 && entries.len() < max {
        let Some((entry, bytes, next_offset)) = spread.next(env, offset)? else {
            return Ok(errors::refused(env, atoms::corrupt()));
        };
        entries.push(entry_term(env, entry, bytes)?);
        offset = next_offset;
        num_left -= 1;
    }
    Ok((entries, spread.position(), offset, num_left).encode(env))
}

fn entry_term<'a>(env: Env<'a>, entry: Entry, bytes: Binary<'a>) -> NifResult<Term<'a>> {
    Ok(match entry.kind {
        EntryKind::Simple(range) => (
            entry.offset,
            bytes.make_subbinary(range.start, range.len())?,
        )
            .encode(env),
        EntryKind::Batch {
            num_records,
            compression,
            uncompressed_bytes,
            data: range,
        } => {
            let records = bytes.make_subbinary(range.start, range.len())?;
            let batch = (
                atoms::batch(),
                num_records,
                compression,
                uncompressed_bytes,
                records,
            );
            (entry.offset, batch).encode(env)
        }
    })
}

/// A place in binaries that are one after the other.
struct Spread<'a> {
    /// From the one that the place is in on, that one first.
    parts: VecDeque<Binary<'a>>,
    /// Bytes in front of those.
    before: usize,
    /// In the first.
    place: usize,
}

impl<'a> Spread<'a> {
    fn new(data: Term<'a>, position: usize) -> NifResult<Self> {
        let parts: Vec<Binary<'a>> = match data.decode::<Binary<'a>>() {
            Ok(one) => vec![one],
            Err(_) => data.decode()?,
        };
        let mut spread = Self {
            parts: parts.into(),
            before: 0,
            place: position,
        };
        spread.settle();
        Ok(spread)
    }

    const fn position(&self) -> usize {
        self.before + self.place
    }

    /// The place is in the first part, or at the end of the last.
    fn settle(&mut self) {
        while let Some(front) = self.parts.front()
            && self.parts.len() > 1
            && self.place >= front.len()
        {
            self.before += front.len();
            self.place -= front.len();
            self.parts.pop_front();
        }
    }

    /// The entry here, the bytes that its ranges are in, and the offset of the one after it; `None` if it is not whole.
    fn next(&mut self, env: Env<'a>, offset: u64) -> NifResult<Option<(Entry, Binary<'a>, u64)>> {
        let Some(front) = self.parts.front() else {
            return Ok(None);
        };
        if let Ok(Some((entry, next, next_offset))) =
            next_entry(front.as_slice(), self.place, offset)
        {
            let front = *front;
            self.place = next;
            self.settle();
            return Ok(Some((entry, front, next_offset)));
        }
        if self.parts.len() == 1 {
            return Ok(None);
        }
        let mut head = [0; ENTRY_HEAD_BYTES];
        let head_bytes = self.copy_to(&mut head);
        let Some(length) = head.get(..head_bytes).and_then(entry_bytes) else {
            return Ok(None);
        };
        if length > self.left() {
            return Ok(None);
        }
        let mut whole = OwnedBinary::new(length);
        self.copy_to(whole.as_mut_slice());
        let whole = whole.release(env);
        self.place += length;
        self.settle();
        Ok(match next_entry(whole.as_slice(), 0, offset) {
            Ok(Some((entry, _, next_offset))) => Some((entry, whole, next_offset)),
            _ => None,
        })
    }

    /// Bytes from here to the end.
    fn left(&self) -> usize {
        let all: usize = self.parts.iter().map(|part| part.len()).sum();
        all.saturating_sub(self.place)
    }

    /// As many of the bytes from here on as fit; returns how many.
    fn copy_to(&self, target: &mut [u8]) -> usize {
        let mut copied = 0;
        let mut from = self.place;
        for part in &self.parts {
            let bytes = part.as_slice().get(from..).unwrap_or_default();
            from = from.saturating_sub(part.len());
            let length = bytes.len().min(target.len() - copied);
            target[copied..copied + length].copy_from_slice(&bytes[..length]);
            copied += length;
        }
        copied
    }
}
