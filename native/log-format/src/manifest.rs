//! Manifests: which offsets are durable in the bucket, and in which objects.
//!
//! A root, or a [`Group`] of entries taken out of it (what leads from one root to the next is a [`RootEdit`]):
//!
//! ```text
//! 0   4   magic "OSIR" root; "OSIG", "OSIK", "OSIM" group, kilo-group, mega-group
//! 4   4   version u32 = 1
//! 8   8   first offset u64
//! 16  8   next offset u64                        (0 in a group)
//! 24  8   first timestamp i64, ms                (-1 = none)
//! 32  8   last timestamp of the first fragment   (-1 = none; 0 in a group)
//! 40  9   2 zero bits, total size u70            (0 in a group); chunk bytes of all fragments
//! 49  -   entries of 34 bytes to the end of the object:
//!     0   8   first offset u64
//!     8   8   first timestamp i64, ms
//!     16  8   last timestamp i64, ms
//!     24  1   kind u8: 0 fragment, 1 group, 2 kilo-group, 3 mega-group
//!     25  5   size u40: chunk bytes (0 for groups)
//!     30  4   random part of the object's key u32
//! ```
//!
//! An entry ends where the next one begins, the last one at the next offset: a manifest has no holes.

mod edit;
mod group;

pub use edit::{Change, MAX_EDIT_BYTES, RootEdit};
pub use group::Group;

use crate::bytes::{array, i64_at, u8_at, u32_at, u64_at};

/// Length of the header of roots and groups.
pub const HEADER_BYTES: usize = 49;
/// Length of one entry.
pub const ENTRY_BYTES: usize = 34;
/// Largest size that an entry can tell.
pub const MAX_ENTRY_SIZE_BYTES: u64 = (1 << 40) - 1;
/// Largest total size that a root can tell.
pub const MAX_TOTAL_SIZE_BYTES: u128 = (1 << 70) - 1;
/// Timestamp of what does not exist.
pub const NO_TIMESTAMP: i64 = -1;

/// What an entry names. The number is the height in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A fragment.
    Fragment = 0,
    /// A group of fragments.
    Group = 1,
    /// A group of groups.
    KiloGroup = 2,
    /// A group of kilo-groups.
    MegaGroup = 3,
}

impl Kind {
    /// From the byte in an entry.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Fragment),
            1 => Some(Self::Group),
            2 => Some(Self::KiloGroup),
            3 => Some(Self::MegaGroup),
            _ => None,
        }
    }

    /// The byte in an entry.
    #[must_use]
    pub fn to_byte(self) -> u8 {
        self as u8
    }

    /// One height up: what a group of these is. Nothing is above a mega-group.
    #[must_use]
    pub fn above(self) -> Option<Self> {
        Self::from_byte(self.to_byte() + 1)
    }

    /// One height down: what a group of this kind holds. Nothing is below a fragment.
    #[must_use]
    pub fn below(self) -> Option<Self> {
        self.to_byte().checked_sub(1).and_then(Self::from_byte)
    }
}

/// One object of a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its first offset.
    pub first_offset: u64,
    /// Timestamp of its first chunk.
    pub first_timestamp_ms: i64,
    /// Timestamp of its last chunk.
    pub last_timestamp_ms: i64,
    /// What it is.
    pub kind: Kind,
    /// Chunk bytes of a fragment, below 2^40; 0 for groups.
    pub size_bytes: u64,
    /// Random part of its key.
    pub uid: u32,
}

/// The root of a stream's manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// First offset that is durable. Can be inside the first entry if that is a group.
    pub first_offset: u64,
    /// Offset after the last durable one.
    pub next_offset: u64,
    /// Timestamp of the first chunk, -1 if there is none.
    pub first_timestamp_ms: i64,
    /// Timestamp of the last chunk of the first fragment, -1 if there is none.
    pub first_last_timestamp_ms: i64,
    /// Chunk bytes of all fragments, below 2^70.
    pub total_size_bytes: u128,
    /// The objects, in offset order.
    pub entries: Vec<Entry>,
}

/// Why bytes are not a manifest, or a manifest is not well-formed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RootError {
    /// Fewer than [`HEADER_BYTES`].
    #[error("manifest is shorter than its header")]
    TooShort,
    /// Not what it should be.
    #[error("manifest starts with another magic")]
    Magic,
    /// A version that we do not know; never to be taken for an empty manifest.
    #[error("unknown manifest version {0}")]
    Version(u32),
    /// An edit of more than [`MAX_EDIT_BYTES`].
    #[error("edit of {0} bytes is longer than one may be")]
    TooLong(usize),
    /// The bits in front of the total size are not zero.
    #[error("manifest's total size does not fit 70 bits")]
    TotalSize,
    /// The entries are not a multiple of 34 bytes.
    #[error("manifest ends inside an entry ({0} bytes too many)")]
    PartialEntry(usize),
    /// An entry of an unknown kind.
    #[error("manifest entry {entry} has unknown kind {kind}")]
    Kind {
        /// Number of the entry, from 0.
        entry: usize,
        /// Its kind.
        kind: u8,
    },
    /// The first offset is above the next offset.
    #[error("manifest's first offset is above its next offset")]
    Range,
    /// No entries although there are offsets, or the other way round.
    #[error("manifest's entries and range do not agree on whether it is empty")]
    Emptiness,
    /// An entry is out of order, or outside the range.
    #[error("manifest entry {0} is out of order")]
    Order(usize),
    /// Sizes do not add up to the total.
    #[error("manifest's sizes do not add up to its total size")]
    Sizes,
    /// A size does not fit its field.
    #[error("manifest entry {0} has a size that does not fit 40 bits, or is a group with a size")]
    EntrySize(usize),
}

impl Entry {
    /// Reads the entry at the start of `bytes`; the error is an unknown kind, `None` too few bytes.
    fn decode(bytes: &[u8]) -> Option<Result<Self, u8>> {
        let [s0, s1, s2, s3, s4] = array::<5>(bytes, 25)?;
        let (first_offset, first_timestamp_ms, last_timestamp_ms) =
            (u64_at(bytes, 0)?, i64_at(bytes, 8)?, i64_at(bytes, 16)?);
        let (kind, uid) = (u8_at(bytes, 24)?, u32_at(bytes, 30)?);
        Some(match Kind::from_byte(kind) {
            Some(kind) => {
                let size_bytes = u64::from_be_bytes([0, 0, 0, s0, s1, s2, s3, s4]);
                Ok(Self {
                    first_offset,
                    first_timestamp_ms,
                    last_timestamp_ms,
                    kind,
                    size_bytes,
                    uid,
                })
            }
            None => Err(kind),
        })
    }

    fn encode_to(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.first_offset.to_be_bytes());
        bytes.extend(self.first_timestamp_ms.to_be_bytes());
        bytes.extend(self.last_timestamp_ms.to_be_bytes());
        bytes.push(self.kind.to_byte());
        let [_, _, _, size @ ..] = self.size_bytes.min(MAX_ENTRY_SIZE_BYTES).to_be_bytes();
        bytes.extend(size);
        bytes.extend(self.uid.to_be_bytes());
    }
}

fn decode_entries(bytes: &[u8]) -> Result<Vec<Entry>, RootError> {
    let chunks = bytes.chunks_exact(ENTRY_BYTES);
    if !chunks.remainder().is_empty() {
        return Err(RootError::PartialEntry(chunks.remainder().len()));
    }
    chunks
        .enumerate()
        .filter_map(|(number, chunk)| {
            Some(Entry::decode(chunk)?.map_err(|kind| RootError::Kind {
                entry: number,
                kind,
            }))
        })
        .collect()
}

/// The header fields of a root or group whose magic and version are right, and the bytes after them.
fn decode_header<'a>(bytes: &'a [u8], magic: &[u8; 4]) -> Result<(Root, &'a [u8]), RootError> {
    if bytes.get(0..4).is_some_and(|found| found != magic) {
        return Err(RootError::Magic);
    }
    match u32_at(bytes, 4) {
        Some(1) => {}
        Some(version) => return Err(RootError::Version(version)),
        None => return Err(RootError::TooShort),
    }
    let fields = || {
        let mut total = [0; 16];
        total[7..].copy_from_slice(&array::<9>(bytes, 40)?);
        let root = Root {
            first_offset: u64_at(bytes, 8)?,
            next_offset: u64_at(bytes, 16)?,
            first_timestamp_ms: i64_at(bytes, 24)?,
            first_last_timestamp_ms: i64_at(bytes, 32)?,
            total_size_bytes: u128::from_be_bytes(total),
            entries: Vec::new(),
        };
        Some((root, bytes.get(HEADER_BYTES..)?))
    };
    let (root, rest) = fields().ok_or(RootError::TooShort)?;
    if root.total_size_bytes > MAX_TOTAL_SIZE_BYTES {
        Err(RootError::TotalSize)
    } else {
        Ok((root, rest))
    }
}

fn encode_header(root: &Root, magic: &[u8; 4], num_entries: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + ENTRY_BYTES * num_entries);
    bytes.extend(magic);
    bytes.extend(1u32.to_be_bytes());
    bytes.extend(root.first_offset.to_be_bytes());
    bytes.extend(root.next_offset.to_be_bytes());
    bytes.extend(root.first_timestamp_ms.to_be_bytes());
    bytes.extend(root.first_last_timestamp_ms.to_be_bytes());
    let [_, _, _, _, _, _, _, total @ ..] = root
        .total_size_bytes
        .min(MAX_TOTAL_SIZE_BYTES)
        .to_be_bytes();
    bytes.extend(total);
    bytes
}

impl Root {
    /// A manifest of nothing, at which tiering (re)starts.
    #[must_use]
    pub fn empty_at(offset: u64) -> Self {
        Self {
            first_offset: offset,
            next_offset: offset,
            first_timestamp_ms: NO_TIMESTAMP,
            first_last_timestamp_ms: NO_TIMESTAMP,
            total_size_bytes: 0,
            entries: Vec::new(),
        }
    }

    /// Whether no offset is durable.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Reads a root and checks that it is well-formed.
    pub fn decode(bytes: &[u8]) -> Result<Self, RootError> {
        let (mut root, rest) = decode_header(bytes, b"OSIR")?;
        root.entries = decode_entries(rest)?;
        root.check()?;
        Ok(root)
    }

    /// Writes the root. Only for one that passes [`Root::check`]: sizes that do not fit their fields are cut to the largest.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = encode_header(self, b"OSIR", self.entries.len());
        for entry in &self.entries {
            entry.encode_to(&mut bytes);
        }
        bytes
    }

    /// Whether the root is well-formed; linear in its entries.
    pub fn check(&self) -> Result<(), RootError> {
        if self.first_offset > self.next_offset {
            return Err(RootError::Range);
        }
        if self.total_size_bytes > MAX_TOTAL_SIZE_BYTES {
            return Err(RootError::TotalSize);
        }
        let (Some(first), Some(last)) = (self.entries.first(), self.entries.last()) else {
            return match (self.first_offset == self.next_offset, self.total_size_bytes) {
                (true, 0) => Ok(()),
                (true, _) => Err(RootError::Sizes),
                (false, _) => Err(RootError::Emptiness),
            };
        };
        if self.first_offset == self.next_offset {
            return Err(RootError::Emptiness);
        }
        // Retention moves the first offset into a leading group without rewriting it; a leading fragment is whole or gone.
        if first.first_offset > self.first_offset
            || first.kind == Kind::Fragment && first.first_offset != self.first_offset
        {
            return Err(RootError::Order(0));
        }
        check_entries(&self.entries)?;
        if last.first_offset >= self.next_offset {
            return Err(RootError::Order(self.entries.len() - 1));
        }
        let sum: u128 = self
            .entries
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum();
        let flat = self
            .entries
            .iter()
            .all(|entry| entry.kind == Kind::Fragment);
        if sum > self.total_size_bytes || flat && sum != self.total_size_bytes {
            return Err(RootError::Sizes);
        }
        Ok(())
    }
}

fn check_entries(entries: &[Entry]) -> Result<(), RootError> {
    for (number, entry) in entries.iter().enumerate() {
        if entry.size_bytes > MAX_ENTRY_SIZE_BYTES
            || entry.kind != Kind::Fragment && entry.size_bytes != 0
        {
            return Err(RootError::EntrySize(number));
        }
    }
    match entries
        .windows(2)
        .position(|pair| pair[0].first_offset >= pair[1].first_offset)
    {
        Some(number) => Err(RootError::Order(number + 1)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
