//! A tiered stream that exists as arithmetic only: fragments of 64 MiB whose bytes are made when they are asked for.
//!
//! Owns which bytes an object of it holds and the manifest that names them. Does not own how they are served.

use std::ops::Range;

use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType, HEADER_BYTES};
use log_format::crc;
use log_format::fragment::{self, FragmentIndexRecord, INDEX_RECORD_BYTES};
use log_format::manifest::{Entry, Kind, Root};

/// Chunks of a fragment. Each holds one record, so a fragment spans as many offsets.
pub const CHUNKS: u64 = 1024;
/// Bytes of a chunk.
const CHUNK_BYTES: u64 = 65_536;
/// Chunk bytes of a fragment.
pub const DATA_BYTES: u64 = CHUNKS * CHUNK_BYTES;
/// Where the index begins in an object.
pub const DATA_END: u64 = fragment::HEADER_BYTES as u64 + DATA_BYTES;
/// Length of an object.
const OBJECT_BYTES: u64 = DATA_END + CHUNKS * INDEX_RECORD_BYTES as u64;

/// The one chunk's data that all of them share.
#[derive(Debug, Clone)]
pub struct Layout {
    data: Bytes,
    data_crc: u32,
}

impl Layout {
    /// Makes the data: one entry, not compressed.
    pub fn new() -> Self {
        let length = CHUNK_BYTES as usize - HEADER_BYTES;
        let mut data = Vec::with_capacity(length);
        data.extend_from_slice(&(length as u32 - 4).to_be_bytes());
        data.extend((4..length as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8));
        Self {
            data_crc: crc::crc32(&data),
            data: data.into(),
        }
    }

    fn header(&self, chunk_id: u64) -> [u8; HEADER_BYTES] {
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp_ms: timestamp_ms(chunk_id),
            epoch: 1,
            chunk_id,
            data_crc: self.data_crc,
            data_bytes: self.data.len() as u32,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        header.encode()
    }

    /// The bytes of that part of the object whose first record is `first_offset`, in pieces; ends where the object ends.
    pub fn pieces(&self, first_offset: u64, range: Range<u64>) -> Vec<Bytes> {
        let (mut at, end) = (range.start, range.end.min(OBJECT_BYTES));
        let mut pieces = Vec::new();
        while at < end {
            let (whole, within) = self.piece(first_offset, at);
            let until = whole.len().min(within + (end - at) as usize);
            at += (until - within) as u64;
            pieces.push(whole.slice(within..until));
        }
        pieces
    }

    /// The piece that holds byte `at`, and where in it that is.
    fn piece(&self, first_offset: u64, at: u64) -> (Bytes, usize) {
        let Some(at_data) = at.checked_sub(fragment::HEADER_BYTES as u64) else {
            return (Bytes::from_static(&fragment::HEADER), at as usize);
        };
        if at >= DATA_END {
            return (index(first_offset), (at - DATA_END) as usize);
        }
        let (number, within) = (at_data / CHUNK_BYTES, (at_data % CHUNK_BYTES) as usize);
        match within.checked_sub(HEADER_BYTES) {
            Some(within) => (self.data.clone(), within),
            None => {
                let header = self.header(first_offset + number);
                (Bytes::copy_from_slice(&header), within)
            }
        }
    }
}

/// A record a millisecond.
pub fn timestamp_ms(offset: u64) -> i64 {
    i64::try_from(offset).unwrap_or(i64::MAX)
}

fn index(first_offset: u64) -> Bytes {
    let records = (0..CHUNKS).flat_map(|number| {
        let record = FragmentIndexRecord {
            offset: first_offset + number,
            timestamp_ms: timestamp_ms(first_offset + number),
            position: (number * CHUNK_BYTES) as u32,
        };
        record.encode()
    });
    records.collect()
}

/// The manifest of the first `fragments` fragments.
pub fn root(fragments: u64) -> Root {
    let entries = (0..fragments).map(|number| Entry {
        first_offset: number * CHUNKS,
        first_timestamp_ms: timestamp_ms(number * CHUNKS),
        last_timestamp_ms: timestamp_ms((number + 1) * CHUNKS - 1),
        kind: Kind::Fragment,
        size_bytes: DATA_BYTES,
        uid: 1,
    });
    Root {
        first_offset: 0,
        next_offset: fragments * CHUNKS,
        first_timestamp_ms: 0,
        first_last_timestamp_ms: timestamp_ms(CHUNKS - 1),
        total_size_bytes: u128::from(fragments * DATA_BYTES),
        entries: entries.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_an_object_gives_the_same_bytes() {
        let layout = Layout::new();
        let whole = layout.pieces(2048, 0..u64::MAX).concat();
        assert_eq!(whole.len() as u64, OBJECT_BYTES);
        for range in [
            0..1,
            5..70,
            8..56,
            65_000..200_000,
            DATA_END - 9..DATA_END + 45,
        ] {
            let part = layout.pieces(2048, range.clone()).concat();
            assert!(
                part == whole[range.start as usize..range.end as usize],
                "{range:?}"
            );
        }
        let second = &whole[8 + CHUNK_BYTES as usize..];
        let header = ChunkHeader::decode(second).expect("a header");
        assert_eq!(header.chunk_id, 2049);
        assert_eq!(
            header.data_crc,
            crc::crc32(&second[48..CHUNK_BYTES as usize])
        );
    }
}
