//! Osiris index files: one record per chunk of the segment of the same name.
//!
//! ```text
//! 0   4   magic "OSII"
//! 4   4   version u32 = 1
//! 8   -   records of 29 bytes:
//!     0   8   chunk id u64
//!     8   8   timestamp i64, ms
//!     16  8   epoch u64
//!     24  4   position of the chunk in the segment file u32
//!     28  1   chunk type u8
//! ```

use crate::bytes::{i64_at, u8_at, u32_at, u64_at};
use crate::chunk::ChunkType;

/// First eight bytes of every index file.
pub const INDEX_HEADER: [u8; 8] = *b"OSII\0\0\0\x01";
/// Position of the first record in an index file.
pub const HEADER_BYTES: usize = 8;
/// Length of one record.
pub const RECORD_BYTES: usize = 29;

/// Where one chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexRecord {
    /// Offset of the chunk's first record.
    pub chunk_id: u64,
    /// When it was written, by the writer's wall clock.
    pub timestamp_ms: i64,
    /// Epoch of the writer.
    pub epoch: u64,
    /// Byte position of the chunk's header in the segment file.
    pub position: u32,
    /// What the chunk holds.
    pub chunk_type: ChunkType,
}

/// Why 29 bytes are not an index record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IndexRecordError {
    /// Fewer than [`RECORD_BYTES`].
    #[error("index record is shorter than 29 bytes")]
    TooShort,
    /// Not one of the known types.
    #[error("unknown chunk type {0} in an index record")]
    ChunkType(u8),
}

impl IndexRecord {
    /// Reads the record at the start of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, IndexRecordError> {
        let fields = || {
            Some((
                u64_at(bytes, 0)?,
                i64_at(bytes, 8)?,
                u64_at(bytes, 16)?,
                u32_at(bytes, 24)?,
                u8_at(bytes, 28)?,
            ))
        };
        let (chunk_id, timestamp_ms, epoch, position, kind) =
            fields().ok_or(IndexRecordError::TooShort)?;
        let chunk_type = ChunkType::from_byte(kind).ok_or(IndexRecordError::ChunkType(kind))?;
        Ok(Self {
            chunk_id,
            timestamp_ms,
            epoch,
            position,
            chunk_type,
        })
    }

    /// Writes the record.
    #[must_use]
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0..8].copy_from_slice(&self.chunk_id.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.timestamp_ms.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.position.to_be_bytes());
        bytes[28] = self.chunk_type.to_byte();
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(chunk_id: u64, timestamp_ms: i64, epoch: u64, position: u32, kind in 0u8..3) {
            let chunk_type = ChunkType::from_byte(kind).unwrap();
            let record = IndexRecord { chunk_id, timestamp_ms, epoch, position, chunk_type };
            prop_assert_eq!(IndexRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = IndexRecord::decode(&bytes);
        }
    }
}
