//! Fragments: runs of whole chunks, as objects in the bucket.
//!
//! ```text
//! 0       4      magic "OSIF"
//! 4       4      version u32 = 1
//! 8       size   chunks, byte for byte as in the segment files
//! 8+size  20*n   index, one record per chunk:
//!     0   8   chunk id u64
//!     8   8   timestamp i64, ms
//!     16  4   position of the chunk u32, counted from the first chunk (not from the header)
//! ```
//!
//! There is no trailer: `size` is in the manifest's entry, and without it (or the object's metadata) the index cannot be found.

use crate::bytes::{i64_at, u32_at, u64_at};

/// First eight bytes of every fragment.
pub const HEADER: [u8; 8] = *b"OSIF\0\0\0\x01";
/// Length of [`HEADER`]; position of the first chunk in the object.
pub const HEADER_BYTES: usize = 8;
/// Length of one index record.
pub const INDEX_RECORD_BYTES: usize = 20;
/// Chunk bytes that a fragment can hold, since positions are 32 bits.
pub const MAX_SIZE_BYTES: u64 = u32::MAX as u64;

/// Where one chunk is in a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentIndexRecord {
    /// Chunk id: offset of its first record.
    pub offset: u64,
    /// When it was written, by the writer's wall clock.
    pub timestamp_ms: i64,
    /// Position from the first chunk of the fragment; in the object it is [`HEADER_BYTES`] further.
    pub position: u32,
}

impl FragmentIndexRecord {
    /// Writes the record.
    #[must_use]
    pub fn encode(&self) -> [u8; INDEX_RECORD_BYTES] {
        let mut bytes = [0; INDEX_RECORD_BYTES];
        bytes[0..8].copy_from_slice(&self.offset.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.timestamp_ms.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.position.to_be_bytes());
        bytes
    }

    /// Reads the record at the start of `bytes`; `None` if they are too few.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            offset: u64_at(bytes, 0)?,
            timestamp_ms: i64_at(bytes, 8)?,
            position: u32_at(bytes, 16)?,
        })
    }
}

/// Why an object is not a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// Fewer than [`HEADER_BYTES`].
    #[error("fragment is shorter than its header")]
    TooShort,
    /// Not a fragment.
    #[error("fragment starts with another magic")]
    Magic,
    /// A version that we do not know.
    #[error("unknown fragment version {0}")]
    Version(u32),
}

/// Why an index cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// No record: no fragment is written without a chunk.
    #[error("fragment index is empty")]
    Empty,
    /// Offsets or positions do not increase: searching it would give wrong places.
    #[error("fragment index record {record} is out of order")]
    OutOfOrder {
        /// Number of the record, from 0.
        record: usize,
    },
}

/// A decoded index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodedIndex {
    /// The records, offsets and positions strictly increasing; never empty.
    pub records: Vec<FragmentIndexRecord>,
    /// Bytes after the last whole record; tolerated, worth a warning if not 0.
    pub trailing_bytes: usize,
}

/// Checks the first eight bytes of a fragment.
pub fn check_header(bytes: &[u8]) -> Result<(), FragmentError> {
    let (Some(magic), Some(version)) = (bytes.get(0..4), u32_at(bytes, 4)) else {
        return Err(FragmentError::TooShort);
    };
    if magic != b"OSIF" {
        Err(FragmentError::Magic)
    } else if version != 1 {
        Err(FragmentError::Version(version))
    } else {
        Ok(())
    }
}

/// Reads an index: everything from `HEADER_BYTES + size` to the end of the object.
pub fn decode_index(bytes: &[u8]) -> Result<DecodedIndex, IndexError> {
    let mut records: Vec<FragmentIndexRecord> =
        Vec::with_capacity(bytes.len() / INDEX_RECORD_BYTES);
    let mut chunks = bytes.chunks_exact(INDEX_RECORD_BYTES);
    for record in chunks.by_ref().filter_map(FragmentIndexRecord::decode) {
        if let Some(last) = records.last()
            && (record.offset <= last.offset || record.position <= last.position)
        {
            return Err(IndexError::OutOfOrder {
                record: records.len(),
            });
        }
        records.push(record);
    }
    if records.is_empty() {
        return Err(IndexError::Empty);
    }
    Ok(DecodedIndex {
        records,
        trailing_bytes: chunks.remainder().len(),
    })
}

/// Number of the last chunk that starts at or below `offset`; `None` if all start above it.
#[must_use]
pub fn search_by_offset(records: &[FragmentIndexRecord], offset: u64) -> Option<usize> {
    records
        .partition_point(|record| record.offset <= offset)
        .checked_sub(1)
}

/// Number of the first chunk written at or after `timestamp_ms`; `None` if all are older.
///
/// Timestamps come from a wall clock, which may step back; the answer is then one of the possible ones.
#[must_use]
pub fn search_by_timestamp(records: &[FragmentIndexRecord], timestamp_ms: i64) -> Option<usize> {
    let at = records.partition_point(|record| record.timestamp_ms < timestamp_ms);
    (at < records.len()).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(offset: u64, timestamp_ms: i64, position: u32) -> FragmentIndexRecord {
        FragmentIndexRecord {
            offset,
            timestamp_ms,
            position,
        }
    }

    #[test]
    fn headers() {
        assert_eq!(check_header(&HEADER), Ok(()));
        assert_eq!(
            check_header(b"OSIF\0\0\0\x02"),
            Err(FragmentError::Version(2))
        );
        assert_eq!(check_header(b"OSIR\0\0\0\x01"), Err(FragmentError::Magic));
        assert_eq!(check_header(b"OSIF"), Err(FragmentError::TooShort));
    }

    #[test]
    fn searches() {
        let records = [record(10, 100, 0), record(20, 200, 50), record(30, 200, 90)];
        assert_eq!(search_by_offset(&records, 9), None);
        assert_eq!(search_by_offset(&records, 10), Some(0));
        assert_eq!(search_by_offset(&records, 29), Some(1));
        assert_eq!(search_by_offset(&records, u64::MAX), Some(2));
        assert_eq!(search_by_timestamp(&records, i64::MIN), Some(0));
        assert_eq!(search_by_timestamp(&records, 101), Some(1));
        assert_eq!(search_by_timestamp(&records, 200), Some(1));
        assert_eq!(search_by_timestamp(&records, 201), None);
    }

    #[test]
    fn a_trailing_partial_record_is_tolerated_and_told() {
        let mut bytes = record(1, 2, 3).encode().to_vec();
        bytes.extend([9; 7]);
        assert_eq!(
            decode_index(&bytes),
            Ok(DecodedIndex {
                records: vec![record(1, 2, 3)],
                trailing_bytes: 7
            })
        );
        assert_eq!(decode_index(&bytes[..19]), Err(IndexError::Empty));
    }

    #[test]
    fn disorder_is_refused() {
        let bytes = [record(1, 0, 0).encode(), record(1, 0, 5).encode()].concat();
        assert_eq!(
            decode_index(&bytes),
            Err(IndexError::OutOfOrder { record: 1 })
        );
    }

    proptest! {
        #[test]
        fn index_round_trip(steps in prop::collection::vec((1u64..1000, any::<i64>(), 1u32..5000), 1..50)) {
            let (mut offset, mut position, mut records) = (0u64, 0u32, Vec::new());
            for (more, timestamp_ms, bytes) in steps {
                records.push(record(offset, timestamp_ms, position));
                offset += more;
                position += bytes;
            }
            let bytes: Vec<u8> = records.iter().flat_map(FragmentIndexRecord::encode).collect();
            prop_assert_eq!(decode_index(&bytes), Ok(DecodedIndex { records, trailing_bytes: 0 }));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), offset: u64, timestamp: i64) {
            let _ = check_header(&bytes);
            if let Ok(index) = decode_index(&bytes) {
                let _ = (search_by_offset(&index.records, offset), search_by_timestamp(&index.records, timestamp));
            }
        }
    }
}
