//! Edits: what leads from one persisted root to a later one, as a writer's node sends it to the nodes of replicas. Never stored.
//!
//! ```text
//! 0   4   magic "OSIE"
//! 4   4   version u32 = 1
//! 8   41  first offset, next offset, first timestamp, last timestamp of the first fragment, total size:
//!         of the root that it leads to, as in that root
//! 49  4   CRC-32 of all bytes of the root that it leads to
//! 53  -   changes to the end, in the order of their positions:
//!     0   4     number of the first entry that is taken out, in the root that it starts from u32
//!     4   4     how many are taken out u32
//!     8   4     how many are put in their place u32
//!     12  34*n  these
//! ```

use super::{
    ENTRY_BYTES, Entry, HEADER_BYTES, Root, RootError, check_entries, decode_entries,
    decode_header, encode_header,
};
use crate::bytes::u32_at;

const MAGIC: &[u8; 4] = b"OSIE";
const CRC_BYTES: usize = 4;
/// Position and two counts.
const CHANGE_BYTES: usize = 12;
/// Most bytes of an edit: whatever changes more is fetched as a root.
pub const MAX_EDIT_BYTES: usize = 16 << 10;

/// Some entries that are replaced by others, or by none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Number of the first entry that is taken out, in the root that the edit starts from.
    pub position: u32,
    /// How many are taken out.
    pub length: u32,
    /// What comes in their place.
    pub entries: Vec<Entry>,
}

/// A decoded edit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootEdit {
    /// The root that it leads to, without its entries.
    pub header: Root,
    /// CRC-32 of all bytes of that root.
    pub root_crc: u32,
    /// What becomes of the entries, in the order of their positions.
    pub changes: Vec<Change>,
}

impl RootEdit {
    /// Reads an edit. Whether it fits a root shows only with that root.
    pub fn decode(bytes: &[u8]) -> Result<Self, RootError> {
        if bytes.len() > MAX_EDIT_BYTES {
            return Err(RootError::TooLong(bytes.len()));
        }
        let (header, rest) = decode_header(bytes, MAGIC)?;
        let (Some(root_crc), Some(mut rest)) = (u32_at(rest, 0), rest.get(CRC_BYTES..)) else {
            return Err(RootError::TooShort);
        };
        let (mut changes, mut at) = (Vec::new(), 0u32);
        while !rest.is_empty() {
            let (change, behind) = Change::decode(rest)?;
            if change.position < at {
                return Err(RootError::Order(changes.len()));
            }
            at = change.position.saturating_add(change.length);
            changes.push(change);
            rest = behind;
        }
        Ok(Self {
            header,
            root_crc,
            changes,
        })
    }

    /// Writes the edit.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = encode_header(&self.header, MAGIC, 0);
        bytes.extend(self.root_crc.to_be_bytes());
        for change in &self.changes {
            change.encode_to(&mut bytes);
        }
        bytes
    }

    /// Length of what [`Self::encode`] writes.
    #[must_use]
    pub fn encoded_bytes(&self) -> usize {
        let changes = self.changes.iter();
        let entries: usize = changes.map(|change| change.entries.len()).sum();
        HEADER_BYTES + CRC_BYTES + CHANGE_BYTES * self.changes.len() + ENTRY_BYTES * entries
    }
}

impl Change {
    /// Reads the change at the start of `bytes`; gives back what is behind it.
    fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), RootError> {
        let [position, length, count] = [0, 4, 8].map(|at| u32_at(bytes, at));
        let (Some(position), Some(length), Some(count)) = (position, length, count) else {
            return Err(RootError::TooShort);
        };
        let split = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(ENTRY_BYTES))
            .and_then(|length| bytes.get(CHANGE_BYTES..)?.split_at_checked(length));
        let (entries, behind) = split.ok_or(RootError::TooShort)?;
        let entries = decode_entries(entries)?;
        check_entries(&entries)?;
        let change = Self {
            position,
            length,
            entries,
        };
        Ok((change, behind))
    }

    fn encode_to(&self, bytes: &mut Vec<u8>) {
        // An edit that is sent is far shorter; a count that is cut cannot be read.
        let count = u32::try_from(self.entries.len()).unwrap_or(u32::MAX);
        for field in [self.position, self.length, count] {
            bytes.extend(field.to_be_bytes());
        }
        for entry in &self.entries {
            entry.encode_to(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;
    use proptest::prelude::*;

    fn change(position: u32, length: u32, count: u64) -> Change {
        let entries = (0..count).map(|number| Entry {
            first_offset: 7 + number,
            first_timestamp_ms: 1,
            last_timestamp_ms: 2,
            kind: Kind::Fragment,
            size_bytes: 5,
            uid: 0xdead_beef,
        });
        Change {
            position,
            length,
            entries: entries.collect(),
        }
    }

    fn edit(changes: Vec<Change>) -> RootEdit {
        RootEdit {
            header: Root {
                first_offset: 7,
                next_offset: 9,
                first_timestamp_ms: 1,
                first_last_timestamp_ms: -1,
                total_size_bytes: 1 << 69,
                entries: Vec::new(),
            },
            root_crc: 0xcafe_f00d,
            changes,
        }
    }

    #[test]
    fn bytes_of_a_known_edit() {
        let edit = edit(vec![change(0, 2, 0), change(3, 0x0102_0304, 1)]);
        let bytes = edit.encode();
        assert_eq!(&bytes[..16], b"OSIE\0\0\0\x01\0\0\0\0\0\0\0\x07");
        assert_eq!(bytes[40..49], [0x20, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[49..53], [0xca, 0xfe, 0xf0, 0x0d]);
        assert_eq!(bytes[53..65], [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]);
        assert_eq!(bytes[65..77], [0, 0, 0, 3, 1, 2, 3, 4, 0, 0, 0, 1]);
        assert_eq!(bytes[77..85], 7u64.to_be_bytes());
        assert_eq!(bytes.len(), 77 + ENTRY_BYTES);
        assert_eq!(bytes.len(), edit.encoded_bytes());
        assert_eq!(RootEdit::decode(&bytes), Ok(edit));
    }

    #[test]
    fn what_is_no_edit_is_refused() {
        let bytes = edit(vec![change(3, 4, 2), change(7, 0, 0)]).encode();
        let ends = [53, 53 + 12 + 2 * ENTRY_BYTES];
        for cut in 0..bytes.len() {
            // Cut behind a change it is an edit of fewer changes; the checksum of the root tells.
            let whole = ends.contains(&cut);
            assert_eq!(
                RootEdit::decode(&bytes[..cut]).is_ok(),
                whole,
                "cut at {cut}"
            );
        }
        let with = |at: usize, byte: u8| {
            let mut changed = bytes.clone();
            changed[at] = byte;
            RootEdit::decode(&changed)
        };
        assert_eq!(with(3, b'R'), Err(RootError::Magic));
        assert_eq!(with(7, 2), Err(RootError::Version(2)));
        assert_eq!(with(40, 0x40), Err(RootError::TotalSize));
        assert_eq!(with(61, 0xff), Err(RootError::TooShort), "of more entries");
        let kind = RootError::Kind { entry: 0, kind: 4 };
        assert_eq!(with(65 + 24, 4), Err(kind));
        assert_eq!(with(65 + 7, 8), Err(RootError::Order(1)));
        assert_eq!(with(65 + 24, 1), Err(RootError::EntrySize(0)), "a group");
        assert_eq!(with(56, 4), Err(RootError::Order(1)), "changes overlap");
    }

    #[test]
    fn the_longest_edit_is_as_long_as_it_may_be() {
        let most = ((MAX_EDIT_BYTES - 65) / ENTRY_BYTES) as u64;
        assert!(RootEdit::decode(&edit(vec![change(0, 0, most)]).encode()).is_ok());
        let bytes = edit(vec![change(0, 0, most + 1)]).encode();
        let too_long = RootError::TooLong(bytes.len());
        assert_eq!(RootEdit::decode(&bytes), Err(too_long));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(root_crc: u32, changes in prop::collection::vec((0u32..9, 0u32..9, 0u64..4), 0..5)) {
            let mut at = 0;
            let changes = changes.into_iter().map(|(skipped, length, count)| {
                at += skipped + length;
                change(at - length, length, count)
            });
            let edit = RootEdit { root_crc, ..edit(changes.collect()) };
            prop_assert_eq!(RootEdit::decode(&edit.encode()), Ok(edit));
        }

        #[test]
        fn any_bytes_are_refused_or_are_what_would_be_written(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [&b"OSIE\0\0\0\x01"[..], &bytes].concat();
            if let Ok(edit) = RootEdit::decode(&bytes) {
                prop_assert_eq!(edit.encode(), bytes);
            }
        }
    }
}
