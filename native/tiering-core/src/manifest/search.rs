//! Finding the entry of an offset or of a time, by binary search.

use log_format::manifest::{Entry, Root};

/// An entry, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Number of the entry in the root.
    pub index: usize,
    /// The entry.
    pub entry: Entry,
    /// Offset after its last record: where the next entry starts, or the manifest ends.
    pub end_offset: u64,
}

/// The entry that has `offset`; `None` outside the manifest's range.
#[must_use]
pub fn by_offset(root: &Root, offset: u64) -> Option<Found> {
    if offset < root.first_offset || offset >= root.next_offset {
        return None;
    }
    let after = root
        .entries
        .partition_point(|entry| entry.first_offset <= offset);
    at(root, after.checked_sub(1)?)
}

/// The first entry that may have a chunk written at or after `timestamp_ms`; `None` if all are older.
///
/// Timestamps come from wall clocks, which may step back between entries; the answer is then one of the possible ones.
#[must_use]
pub fn by_timestamp(root: &Root, timestamp_ms: i64) -> Option<Found> {
    at(
        root,
        root.entries
            .partition_point(|entry| entry.last_timestamp_ms < timestamp_ms),
    )
}

/// The entry with this number.
#[must_use]
pub fn at(root: &Root, index: usize) -> Option<Found> {
    let entry = *root.entries.get(index)?;
    let next = root.entries.get(index + 1);
    Some(Found {
        index,
        entry,
        end_offset: next.map_or(root.next_offset, |next| next.first_offset),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::edit::tests::root_of;
    use proptest::prelude::*;

    #[test]
    fn edges() {
        let root = root_of(10, &[5, 5]);
        assert_eq!(by_offset(&root, 9), None);
        assert_eq!(
            by_offset(&root, 14).map(|found| (found.index, found.end_offset)),
            Some((0, 15))
        );
        assert_eq!(
            by_offset(&root, 15).map(|found| (found.index, found.end_offset)),
            Some((1, 20))
        );
        assert_eq!(by_offset(&root, 20), None);
        // Last timestamps are 14 and 19.
        assert_eq!(
            by_timestamp(&root, i64::MIN).map(|found| found.index),
            Some(0)
        );
        assert_eq!(by_timestamp(&root, 15).map(|found| found.index), Some(1));
        assert_eq!(by_timestamp(&root, 20), None);
        assert_eq!(by_offset(&Root::empty_at(7), 7), None);
    }

    proptest! {
        #[test]
        fn agrees_with_a_linear_search(start in 0u64..100, lengths in prop::collection::vec(1u64..20, 0..30), offset in 0u64..700) {
            let root = root_of(start, &lengths);
            let linear = (0..lengths.len()).filter_map(|index| at(&root, index)).find(|found| {
                (found.entry.first_offset..found.end_offset).contains(&offset)
            });
            prop_assert_eq!(by_offset(&root, offset), linear);
        }
    }
}
