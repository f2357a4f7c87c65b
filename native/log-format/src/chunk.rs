//! Chunks: the unit of writing, committing, reading and tiering. A chunk is never split.
//!
//! ```text
//! 0   4 bit  magic 5
//!     4 bit  version 0
//! 1   1   chunk type u8: 0 user, 1 tracking delta, 2 tracking snapshot
//! 2   2   number of entries u16
//! 4   4   number of records u32 (an entry is one record or a sub-batch of them)
//! 8   8   timestamp i64, ms
//! 16  8   epoch u64
//! 24  8   chunk id u64: the offset of its first record
//! 32  4   CRC-32 of the data u32
//! 36  4   length of the data u32
//! 40  4   length of the trailer u32
//! 44  1   length of the filter u8
//! 45  3   reserved
//! 48  -   filter, data, trailer
//! ```
//!
//! The data of a user chunk is entries, back to back:
//!
//! ```text
//! simple      0   1 bit 0, 31 bit length; then the record
//! sub-batch   0   1 bit 1, 3 bit compression, 4 bit reserved
//!             1   2   number of records u16
//!             3   4   uncompressed length u32
//!             7   4   length u32
//!             11  -   the (compressed) records
//! ```

use std::ops::Range;

use crate::bytes::{i64_at, u8_at, u16_at, u32_at, u64_at};

/// Length of a chunk header.
pub const HEADER_BYTES: usize = 48;
/// Longest possible filter: a header read of `HEADER_BYTES + MAX_FILTER_BYTES` has header and filter in one go.
pub const MAX_FILTER_BYTES: usize = 255;

const MAGIC_AND_VERSION: u8 = 0x50;
const BATCH_HEADER_BYTES: usize = 11;

/// What a chunk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkType {
    /// Records of publishers.
    User,
    /// Changes of offset and deduplication tracking.
    TrackingDelta,
    /// All of the tracking.
    TrackingSnapshot,
}

impl ChunkType {
    /// From the byte in a header or an index record.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::User),
            1 => Some(Self::TrackingDelta),
            2 => Some(Self::TrackingSnapshot),
            _ => None,
        }
    }

    /// The byte in a header or an index record.
    #[must_use]
    pub fn to_byte(self) -> u8 {
        match self {
            Self::User => 0,
            Self::TrackingDelta => 1,
            Self::TrackingSnapshot => 2,
        }
    }
}

/// A decoded chunk header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// What the chunk holds.
    pub chunk_type: ChunkType,
    /// Entries in the data; a sub-batch is one.
    pub num_entries: u16,
    /// Records in the data; the next chunk's id is this one's plus this.
    pub num_records: u32,
    /// When it was written, by the writer's wall clock.
    pub timestamp_ms: i64,
    /// Epoch of the writer.
    pub epoch: u64,
    /// Offset of its first record.
    pub chunk_id: u64,
    /// CRC-32 of the data (not of header, filter or trailer).
    pub data_crc: u32,
    /// Length of the data.
    pub data_bytes: u32,
    /// Length of the trailer.
    pub trailer_bytes: u32,
    /// Length of the filter, which stands between header and data.
    pub filter_bytes: u8,
}

/// Why 48 bytes are not a chunk header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChunkHeaderError {
    /// Fewer than [`HEADER_BYTES`].
    #[error("chunk header is shorter than 48 bytes")]
    TooShort,
    /// Another magic, or a version that we do not know.
    #[error("chunk header starts with {0:#04x} instead of magic 5, version 0")]
    MagicOrVersion(u8),
    /// Not one of the known types.
    #[error("unknown chunk type {0}")]
    ChunkType(u8),
}

impl ChunkHeader {
    /// Reads the header at the start of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, ChunkHeaderError> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(ChunkHeaderError::TooShort);
        };
        if bytes[0] != MAGIC_AND_VERSION {
            return Err(ChunkHeaderError::MagicOrVersion(bytes[0]));
        }
        let chunk_type =
            ChunkType::from_byte(bytes[1]).ok_or(ChunkHeaderError::ChunkType(bytes[1]))?;
        let fields = || {
            Some(Self {
                chunk_type,
                num_entries: u16_at(bytes, 2)?,
                num_records: u32_at(bytes, 4)?,
                timestamp_ms: i64_at(bytes, 8)?,
                epoch: u64_at(bytes, 16)?,
                chunk_id: u64_at(bytes, 24)?,
                data_crc: u32_at(bytes, 32)?,
                data_bytes: u32_at(bytes, 36)?,
                trailer_bytes: u32_at(bytes, 40)?,
                filter_bytes: u8_at(bytes, 44)?,
            })
        };
        fields().ok_or(ChunkHeaderError::TooShort)
    }

    /// Writes the header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = MAGIC_AND_VERSION;
        bytes[1] = self.chunk_type.to_byte();
        bytes[2..4].copy_from_slice(&self.num_entries.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.num_records.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.timestamp_ms.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.epoch.to_be_bytes());
        bytes[24..32].copy_from_slice(&self.chunk_id.to_be_bytes());
        bytes[32..36].copy_from_slice(&self.data_crc.to_be_bytes());
        bytes[36..40].copy_from_slice(&self.data_bytes.to_be_bytes());
        bytes[40..44].copy_from_slice(&self.trailer_bytes.to_be_bytes());
        bytes[44] = self.filter_bytes;
        bytes
    }

    /// Id of the chunk after this one; `None` if it does not fit 64 bits (a damaged header).
    #[must_use]
    pub fn next_offset(&self) -> Option<u64> {
        self.chunk_id.checked_add(u64::from(self.num_records))
    }

    /// Length of the whole chunk: header, filter, data, trailer.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        HEADER_BYTES as u64
            + u64::from(self.filter_bytes)
            + u64::from(self.data_bytes)
            + u64::from(self.trailer_bytes)
    }

    /// Length of what precedes the data: header and filter.
    #[must_use]
    pub fn lead_bytes(&self) -> usize {
        HEADER_BYTES + usize::from(self.filter_bytes)
    }
}

/// What an entry of a chunk is; ranges are positions in the chunk's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    /// One record.
    Simple(Range<usize>),
    /// Several records, usually compressed together.
    Batch {
        /// How many.
        num_records: u16,
        /// Compression type, three bits: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd.
        compression: u8,
        /// Length after decompression, as the publisher said.
        uncompressed_bytes: u32,
        /// The records.
        data: Range<usize>,
    },
}

/// One entry of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Offset of its first record.
    pub offset: u64,
    /// What it is.
    pub kind: EntryKind,
}

/// Why the data of a chunk does not parse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// An entry reaches past the end of the data.
    #[error("entry at position {position} reaches past the end of the chunk's data")]
    Truncated {
        /// Where the entry starts.
        position: usize,
    },
    /// The offset does not fit 64 bits.
    #[error("entry at position {position} overflows the offset")]
    OffsetOverflow {
        /// Where the entry starts.
        position: usize,
    },
}

/// The entry at `position` of `data`, with the position and the offset of the one after it; `None` at the end.
pub fn next_entry(
    data: &[u8],
    position: usize,
    offset: u64,
) -> Result<Option<(Entry, usize, u64)>, EntryError> {
    if position == data.len() {
        return Ok(None);
    }
    let truncated = EntryError::Truncated { position };
    let first = u8_at(data, position).ok_or(truncated)?;
    let (kind, next_position, num_records) = if first & 0x80 == 0 {
        let length = u32_at(data, position).ok_or(truncated)?;
        let range = checked_range(data, position, 4, length).ok_or(truncated)?;
        let next = range.end;
        (EntryKind::Simple(range), next, 1)
    } else {
        let fields = || {
            let num_records = u16_at(data, position.checked_add(1)?)?;
            let uncompressed_bytes = u32_at(data, position.checked_add(3)?)?;
            let length = u32_at(data, position.checked_add(7)?)?;
            Some((
                num_records,
                uncompressed_bytes,
                checked_range(data, position, BATCH_HEADER_BYTES, length)?,
            ))
        };
        let (num_records, uncompressed_bytes, range) = fields().ok_or(truncated)?;
        let next = range.end;
        let compression = first >> 4 & 7;
        (
            EntryKind::Batch {
                num_records,
                compression,
                uncompressed_bytes,
                data: range,
            },
            next,
            u64::from(num_records),
        )
    };
    let next_offset = offset
        .checked_add(num_records)
        .ok_or(EntryError::OffsetOverflow { position })?;
    Ok(Some((Entry { offset, kind }, next_position, next_offset)))
}

/// First bytes of an entry from which its length can be told, whichever kind it is.
pub const ENTRY_HEAD_BYTES: usize = BATCH_HEADER_BYTES;

/// Length of the entry that begins with `head`; `None` if that does not say. [`ENTRY_HEAD_BYTES`] always do, and what is left
/// of the data if it is less.
#[must_use]
pub fn entry_bytes(head: &[u8]) -> Option<usize> {
    let (fixed, length) = if u8_at(head, 0)? & 0x80 == 0 {
        (4, u32_at(head, 0)?)
    } else {
        (BATCH_HEADER_BYTES, u32_at(head, 7)?)
    };
    usize::try_from(length).ok()?.checked_add(fixed)
}

/// The entries of a chunk's data. Stops after the first error.
pub fn entries(data: &[u8], chunk_id: u64) -> impl Iterator<Item = Result<Entry, EntryError>> + '_ {
    let mut state = Some((0, chunk_id));
    std::iter::from_fn(move || {
        let (position, offset) = state?;
        match next_entry(data, position, offset) {
            Ok(Some((entry, next_position, next_offset))) => {
                state = Some((next_position, next_offset));
                Some(Ok(entry))
            }
            Ok(None) => {
                state = None;
                None
            }
            Err(error) => {
                state = None;
                Some(Err(error))
            }
        }
    })
}

fn checked_range(data: &[u8], position: usize, header: usize, length: u32) -> Option<Range<usize>> {
    let start = position.checked_add(header)?;
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    (end <= data.len()).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = ChunkHeader> {
        (
            (
                0u8..3,
                any::<u16>(),
                any::<u32>(),
                any::<i64>(),
                any::<u64>(),
            ),
            (
                any::<u64>(),
                any::<u32>(),
                any::<u32>(),
                any::<u32>(),
                any::<u8>(),
            ),
        )
            .prop_map(
                |(
                    (kind, num_entries, num_records, timestamp_ms, epoch),
                    (chunk_id, data_crc, data_bytes, trailer_bytes, filter_bytes),
                )| {
                    ChunkHeader {
                        chunk_type: ChunkType::from_byte(kind).unwrap(),
                        num_entries,
                        num_records,
                        timestamp_ms,
                        epoch,
                        chunk_id,
                        data_crc,
                        data_bytes,
                        trailer_bytes,
                        filter_bytes,
                    }
                },
            )
    }

    fn simple(body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_be_bytes(), body].concat()
    }

    fn batch(num_records: u16, compression: u8, uncompressed: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x80 | compression << 4];
        bytes.extend(num_records.to_be_bytes());
        bytes.extend(uncompressed.to_be_bytes());
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn bytes_of_a_known_header() {
        let header = ChunkHeader {
            chunk_type: ChunkType::TrackingSnapshot,
            num_entries: 1,
            num_records: 2,
            timestamp_ms: -3,
            epoch: 4,
            chunk_id: 5,
            data_crc: 6,
            data_bytes: 7,
            trailer_bytes: 8,
            filter_bytes: 9,
        };
        let mut expected = vec![0x50, 2, 0, 1, 0, 0, 0, 2];
        expected.extend((-3i64).to_be_bytes());
        expected.extend([
            0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 8, 9,
            0, 0, 0,
        ]);
        assert_eq!(header.encode().to_vec(), expected);
        assert_eq!(header.next_offset(), Some(7));
        assert_eq!(header.total_bytes(), 48 + 9 + 7 + 8);
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        assert_eq!(
            ChunkHeader::decode(&[0x50; 47]),
            Err(ChunkHeaderError::TooShort)
        );
        assert_eq!(
            ChunkHeader::decode(&[0x51; 48]),
            Err(ChunkHeaderError::MagicOrVersion(0x51))
        );
        assert_eq!(
            ChunkHeader::decode(&[0x50; 48]),
            Err(ChunkHeaderError::ChunkType(0x50))
        );
    }

    #[test]
    fn entries_carry_offsets_over_sub_batches() {
        let data = [simple(b"a"), batch(3, 2, 99, b"xyz"), simple(b"")].concat();
        let found: Vec<_> = entries(&data, 10).collect::<Result<_, _>>().unwrap();
        assert_eq!(
            found[0],
            Entry {
                offset: 10,
                kind: EntryKind::Simple(4..5)
            }
        );
        let kind = EntryKind::Batch {
            num_records: 3,
            compression: 2,
            uncompressed_bytes: 99,
            data: 16..19,
        };
        assert_eq!(found[1], Entry { offset: 11, kind });
        assert_eq!(
            found[2],
            Entry {
                offset: 14,
                kind: EntryKind::Simple(23..23)
            }
        );
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn a_cut_off_entry_is_an_error_once() {
        let data = simple(b"abc");
        let found: Vec<_> = entries(&data[..6], 0).collect();
        assert_eq!(found, vec![Err(EntryError::Truncated { position: 0 })]);
        assert_eq!(
            next_entry(&data, 8, 0),
            Err(EntryError::Truncated { position: 8 })
        );
        assert_eq!(
            next_entry(&data, 0, u64::MAX),
            Err(EntryError::OffsetOverflow { position: 0 })
        );
    }

    proptest! {
        #[test]
        fn header_round_trip(header in any_header()) {
            prop_assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), position: usize, offset: u64) {
            let _ = ChunkHeader::decode(&bytes);
            let _ = next_entry(&bytes, position, offset);
            for entry in entries(&bytes, offset).flatten() {
                let (EntryKind::Simple(range) | EntryKind::Batch { data: range, .. }) = entry.kind;
                prop_assert!(bytes.get(range).is_some());
            }
        }

        #[test]
        fn entries_give_back_what_was_put_in(bodies in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 0..20)) {
            let data: Vec<u8> = bodies.iter().flat_map(|(sub, body)| if *sub { batch(2, 1, 5, body) } else { simple(body) }).collect();
            let found: Vec<Vec<u8>> = entries(&data, 0).map(|entry| match entry.unwrap().kind {
                EntryKind::Simple(range) | EntryKind::Batch { data: range, .. } => data[range].to_vec(),
            }).collect();
            prop_assert_eq!(found, bodies.into_iter().map(|(_, body)| body).collect::<Vec<_>>());
        }
    }
}
