//! Cuts the data of a chunk into its entries, as sub-binaries of the given binary.
//!
//! Owns the bound on the work of one call. The layout itself is `log_format::chunk`'s.

use log_format::chunk::{EntryKind, next_entry};
use rustler::{Binary, Encoder, Env, NifResult, Term};

use crate::{atoms, errors};

/// Most entries in one answer, whatever the caller asks for: about 50 us of work.
const MAX_ENTRIES_PER_CALL: usize = 1024;

/// At most `max` of the `num_left` entries from `position` on, the first of which has `offset`.
///
/// Fails as a whole: an entry is only handed out with everything in front of it intact.
pub(crate) fn chunk_entries<'a>(
    env: Env<'a>,
    data: Binary<'a>,
    position: usize,
    offset: u64,
    num_left: u64,
    max: usize,
) -> NifResult<Term<'a>> {
    let (mut position, mut offset, mut num_left) = (position, offset, num_left);
    let mut entries = Vec::with_capacity(max.min(MAX_ENTRIES_PER_CALL).min(num_left as usize));
    while num_left > 0 && entries.len() < max.min(MAX_ENTRIES_PER_CALL) {
        let Ok(Some((entry, next_position, next_offset))) =
            next_entry(data.as_slice(), position, offset)
        else {
            return Ok(errors::refused(env, atoms::corrupt()));
        };
        entries.push(match entry.kind {
            EntryKind::Simple(range) => {
                (entry.offset, data.make_subbinary(range.start, range.len())?).encode(env)
            }
            EntryKind::Batch {
                num_records,
                compression,
                uncompressed_bytes,
                data: range,
            } => {
                let records = data.make_subbinary(range.start, range.len())?;
                let batch = (
                    atoms::batch(),
                    num_records,
                    compression,
                    uncompressed_bytes,
                    records,
                );
                (entry.offset, batch).encode(env)
            }
        });
        (position, offset) = (next_position, next_offset);
        num_left -= 1;
    }
    Ok((entries, position, offset, num_left).encode(env))
}
