//! A chunk header as the map that `osiris_log:read_header/1` gives, key for key.

use log_format::chunk::{ChunkHeader, HEADER_BYTES};
use rustler::{Encoder, Env, NewBinary, NifResult, Term};

use crate::atoms;

/// The map; `bytes` are the 48 bytes that the header was read from, `position` is where they were read.
pub(crate) fn header_map<'a>(
    env: Env<'a>,
    header: &ChunkHeader,
    bytes: &[u8; HEADER_BYTES],
    position: u64,
) -> NifResult<Term<'a>> {
    // 48 bytes are a heap binary: a copy, and it keeps no chunk in memory.
    let header_data: Term<'a> = NewBinary::from_slice(env, bytes).into();
    let pairs = [
        (atoms::chunk_id(), header.chunk_id.encode(env)),
        (atoms::epoch(), header.epoch.encode(env)),
        (atoms::type_(), header.chunk_type.to_byte().encode(env)),
        (atoms::crc(), header.data_crc.encode(env)),
        (atoms::num_records(), header.num_records.encode(env)),
        (atoms::num_entries(), header.num_entries.encode(env)),
        (atoms::timestamp(), header.timestamp_ms.encode(env)),
        (atoms::data_size(), header.data_bytes.encode(env)),
        (atoms::trailer_size(), header.trailer_bytes.encode(env)),
        (atoms::header_data(), header_data),
        (atoms::filter_size(), header.filter_bytes.encode(env)),
        (atoms::position(), position.encode(env)),
        (
            atoms::next_position(),
            position.saturating_add(header.total_bytes()).encode(env),
        ),
    ];
    super::map(env, &pairs)
}
