//! Groups: entries moved out of the root so that it stays small. Written once, never changed.

use super::{
    Entry, Kind, NO_TIMESTAMP, Root, RootError, check_entries, decode_entries, decode_header,
    encode_header,
};

/// A decoded group object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its height: never [`Kind::Fragment`].
    pub kind: Kind,
    /// First offset of its first entry when it was made.
    pub first_offset: u64,
    /// First timestamp of its first entry when it was made.
    pub first_timestamp_ms: i64,
    /// Entries of the height below, in offset order.
    pub entries: Vec<Entry>,
}

impl Group {
    /// Reads a group of this kind; anything else, also a group of another height, is an error.
    pub fn decode(kind: Kind, bytes: &[u8]) -> Result<Self, RootError> {
        let (header, rest) = decode_header(bytes, magic(kind).ok_or(RootError::Magic)?)?;
        let group = Self {
            kind,
            first_offset: header.first_offset,
            first_timestamp_ms: header.first_timestamp_ms,
            entries: decode_entries(rest)?,
        };
        group.check()?;
        Ok(group)
    }

    /// Writes the group.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let header = Root {
            first_offset: self.first_offset,
            next_offset: 0,
            first_timestamp_ms: self.first_timestamp_ms,
            first_last_timestamp_ms: 0,
            total_size_bytes: 0,
            entries: Vec::new(),
        };
        // A group of kind Fragment does not pass `check`; it must still not be written under a magic that reads as something.
        let mut bytes = encode_header(
            &header,
            magic(self.kind).unwrap_or(b"OSI?"),
            self.entries.len(),
        );
        for entry in &self.entries {
            entry.encode_to(&mut bytes);
        }
        bytes
    }

    /// Whether the group is well-formed: some entries, in order, each one height below.
    pub fn check(&self) -> Result<(), RootError> {
        let Some(first) = self.entries.first() else {
            return Err(RootError::Emptiness);
        };
        if first.first_offset != self.first_offset {
            return Err(RootError::Order(0));
        }
        for (number, entry) in self.entries.iter().enumerate() {
            if Some(entry.kind) != self.kind.below() {
                return Err(RootError::Kind {
                    entry: number,
                    kind: entry.kind.to_byte(),
                });
            }
        }
        check_entries(&self.entries)
    }

    /// Timestamp of the last chunk in it, -1 if it has no entries.
    #[must_use]
    pub fn last_timestamp_ms(&self) -> i64 {
        self.entries
            .last()
            .map_or(NO_TIMESTAMP, |entry| entry.last_timestamp_ms)
    }
}

fn magic(kind: Kind) -> Option<&'static [u8; 4]> {
    match kind {
        Kind::Fragment => None,
        Kind::Group => Some(b"OSIG"),
        Kind::KiloGroup => Some(b"OSIK"),
        Kind::MegaGroup => Some(b"OSIM"),
    }
}
