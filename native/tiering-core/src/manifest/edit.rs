//! Edits: a manifest grows at its end and shrinks at its beginning, and changes in no other way.

use log_format::manifest::{
    Entry, Kind, MAX_ENTRY_SIZE_BYTES, MAX_TOTAL_SIZE_BYTES, NO_TIMESTAMP, Root,
};

use crate::fragment_assembly::FragmentPlan;
use crate::mutants::mutant;

/// Why an edit is refused; the manifest is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The fragment does not start where the manifest ends: applying it would make a hole.
    #[error("fragment at {found} does not continue the manifest at {expected}")]
    NotContiguous {
        /// The manifest's next offset.
        expected: u64,
        /// The fragment's first offset.
        found: u64,
    },
    /// The fragment has no records, or a size that an entry cannot tell.
    #[error("fragment at {0} has an impossible range or size")]
    Impossible(u64),
    /// More entries than there are, or a group among them, whose size nobody knows here.
    #[error("the leading {0} entries cannot be dropped")]
    NotDroppable(usize),
}

/// Appends a fragment that is in the bucket under `uid`.
///
/// The first fragment of an empty manifest must continue it, too: a fragment that overtook its predecessors would otherwise
/// become the beginning of the stream.
pub fn append(root: &mut Root, plan: &FragmentPlan, uid: u32) -> Result<(), EditError> {
    if plan.first_offset != root.next_offset {
        return Err(EditError::NotContiguous {
            expected: root.next_offset,
            found: plan.first_offset,
        });
    }
    let total_size_bytes = root
        .total_size_bytes
        .saturating_add(u128::from(plan.size_bytes));
    let too_big = plan.size_bytes > MAX_ENTRY_SIZE_BYTES || total_size_bytes > MAX_TOTAL_SIZE_BYTES;
    if plan.next_offset <= plan.first_offset || too_big {
        return Err(EditError::Impossible(plan.first_offset));
    }
    if root.is_empty() {
        root.first_timestamp_ms = plan.first_timestamp_ms;
        root.first_last_timestamp_ms = plan.last_timestamp_ms;
    }
    root.entries.push(Entry {
        first_offset: plan.first_offset,
        first_timestamp_ms: plan.first_timestamp_ms,
        last_timestamp_ms: plan.last_timestamp_ms,
        kind: Kind::Fragment,
        size_bytes: plan.size_bytes,
        uid,
    });
    root.next_offset = plan.next_offset + u64::from(mutant!(NextOffsetOffByOne));
    root.total_size_bytes = total_size_bytes;
    Ok(())
}

/// Drops the `count` leading entries, which must be fragments, and gives them back. Dropping all leaves an empty manifest
/// that starts and ends at its next offset, so that tiering goes on where it was.
pub fn drop_leading(root: &mut Root, count: usize) -> Result<Vec<Entry>, EditError> {
    let refused = EditError::NotDroppable(count);
    let leading = root.entries.get(..count).ok_or(refused)?;
    if leading.iter().any(|entry| entry.kind != Kind::Fragment) {
        return Err(refused);
    }
    let dropped_bytes: u128 = leading
        .iter()
        .map(|entry| u128::from(entry.size_bytes))
        .sum();
    let total_size_bytes = root
        .total_size_bytes
        .checked_sub(dropped_bytes)
        .ok_or(refused)?;
    let dropped: Vec<Entry> = root.entries.drain(..count).collect();
    if !mutant!(RetainKeepsTotal) {
        root.total_size_bytes = total_size_bytes;
    }
    match root.entries.first() {
        Some(first) => {
            root.first_offset = first.first_offset;
            root.first_timestamp_ms = first.first_timestamp_ms;
            root.first_last_timestamp_ms = match first.kind {
                Kind::Fragment => first.last_timestamp_ms,
                Kind::Group | Kind::KiloGroup | Kind::MegaGroup => NO_TIMESTAMP,
            };
        }
        None => {
            root.first_offset = root.next_offset;
            root.first_timestamp_ms = NO_TIMESTAMP;
            root.first_last_timestamp_ms = NO_TIMESTAMP;
        }
    }
    Ok(dropped)
}

/// The part of a manifest below this offset. The last fragment that is left may hold more than that: its object stays as it is.
#[must_use]
pub fn cut_back(root: &Root, next_offset: u64) -> Root {
    let entries: Vec<_> = root
        .entries
        .iter()
        .filter(|entry| entry.first_offset < next_offset)
        .copied()
        .collect();
    if entries.is_empty() || next_offset <= root.first_offset {
        return Root::empty_at(next_offset);
    }
    let dropped: u128 = root
        .entries
        .iter()
        .filter(|entry| entry.first_offset >= next_offset)
        .map(|entry| u128::from(entry.size_bytes))
        .sum();
    Root {
        next_offset: next_offset.min(root.next_offset),
        total_size_bytes: root.total_size_bytes.saturating_sub(dropped),
        entries,
        ..root.clone()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::manifest::invariants;
    use proptest::prelude::*;

    /// A plan with nothing to send, for tests of what happens around it.
    pub(crate) fn plan(first_offset: u64, next_offset: u64, size_bytes: u64) -> FragmentPlan {
        FragmentPlan {
            first_offset,
            next_offset,
            first_timestamp_ms: first_offset as i64,
            last_timestamp_ms: next_offset as i64 - 1,
            size_bytes,
            payload_bytes: size_bytes,
            chunk_count: 1,
            spans: Vec::new(),
            index: Vec::new(),
            chunks_crc: 0,
        }
    }

    pub(crate) fn root_of(start: u64, lengths: &[u64]) -> Root {
        let mut root = Root::empty_at(start);
        for (uid, length) in lengths.iter().enumerate() {
            let fragment = plan(root.next_offset, root.next_offset + length, 10);
            append(&mut root, &fragment, uid as u32).unwrap();
        }
        root
    }

    #[test]
    fn bug_2_a_fragment_that_overtook_its_predecessors_is_refused_on_an_empty_manifest_too() {
        let mut root = Root::empty_at(0);
        let error = EditError::NotContiguous {
            expected: 0,
            found: 10,
        };
        assert_eq!(append(&mut root, &plan(10, 20, 5), 1), Err(error));
        assert_eq!(root, Root::empty_at(0));
    }

    #[test]
    fn impossible_fragments_are_refused() {
        let mut root = Root::empty_at(5);
        assert_eq!(
            append(&mut root, &plan(5, 5, 1), 1),
            Err(EditError::Impossible(5))
        );
        assert_eq!(
            append(&mut root, &plan(5, 6, 1 << 40), 1),
            Err(EditError::Impossible(5))
        );
        assert_eq!(root, Root::empty_at(5));
    }

    #[test]
    fn dropping_everything_keeps_the_place() {
        let mut root = root_of(5, &[10, 10]);
        let dropped = drop_leading(&mut root, 2).unwrap();
        assert_eq!(
            dropped
                .iter()
                .map(|entry| entry.first_offset)
                .collect::<Vec<_>>(),
            [5, 15]
        );
        assert_eq!(root, Root::empty_at(25));
        assert_eq!(drop_leading(&mut root, 1), Err(EditError::NotDroppable(1)));
    }

    #[test]
    fn groups_are_not_dropped_here() {
        let mut root = root_of(5, &[10, 10]);
        root.entries[1].kind = Kind::Group;
        let before = root.clone();
        assert_eq!(drop_leading(&mut root, 2), Err(EditError::NotDroppable(2)));
        assert_eq!(root, before);
        drop_leading(&mut root, 1).unwrap();
        assert_eq!(root.first_last_timestamp_ms, NO_TIMESTAMP);
    }

    proptest! {
        #[test]
        fn every_edit_keeps_the_manifest_well_formed(start in 0u64..1000, edits in prop::collection::vec((any::<bool>(), 1u64..50, 0u64..1000), 0..60)) {
            let mut root = Root::empty_at(start);
            for (grow, length, size) in edits {
                let before = root.clone();
                if grow {
                    let fragment = plan(root.next_offset, root.next_offset + length, size);
                    prop_assert!(append(&mut root, &fragment, 0).is_ok());
                    prop_assert!(invariants::contiguous_advance(&before, &root));
                } else {
                    let count = (length as usize).min(root.entries.len());
                    prop_assert_eq!(drop_leading(&mut root, count).unwrap(), &before.entries[..count]);
                }
                prop_assert_eq!(root.check(), Ok(()));
                prop_assert!(invariants::prefix_monotonicity(&before, &root));
                prop_assert!(invariants::accounting(&root) && invariants::ordering(&root));
            }
        }
    }
}
