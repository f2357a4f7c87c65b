//! Keeping the root small: runs of entries move into groups, groups into kilo-groups, kilo-groups into mega-groups.
//!
//! A run of `threshold` entries of one kind is always moved, so no kind has more than `threshold - 1` entries for long. Four
//! kinds of 1,023 entries would be 139 kB, so there is a second rule: a root that passes [`REBALANCE_ROOT_BYTES`] gives up its
//! longest run, full or not. At the default threshold that makes groups of about 500 entries at least, so mega-groups alone would
//! fill the root only after more than 10^10 fragments. What is uploaded while a group is on its way is held back before the root passes
//! [`MAX_ROOT_BYTES`].

use log_format::manifest::{ENTRY_BYTES, Entry, Group, HEADER_BYTES, Kind, Root};

/// No root is longer, unless it was found so, or has nothing but mega-groups to give up.
pub const MAX_ROOT_BYTES: usize = 64 << 10;
/// A root that is longer gives up its longest run.
pub const REBALANCE_ROOT_BYTES: usize = 56 << 10;
/// As many entries as a root may have.
pub const MAX_ROOT_ENTRIES: usize = (MAX_ROOT_BYTES - HEADER_BYTES) / ENTRY_BYTES;
/// From so many entries on, the longest run goes.
pub const REBALANCE_ROOT_ENTRIES: usize = (REBALANCE_ROOT_BYTES - HEADER_BYTES) / ENTRY_BYTES;
/// The largest threshold: groups stay as small as the root.
pub const MAX_THRESHOLD: usize = 1_024;

/// Entries of one kind that follow each other in a root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of the first one.
    pub position: usize,
    /// How many.
    pub length: usize,
    /// What a group of them is.
    pub kind: Kind,
}

/// The run to be moved into a group next, if any: the first that has reached the threshold, or the longest if the root is too
/// long. A run of mega-groups stays.
#[must_use]
pub fn next_run(entries: &[Entry], threshold: usize) -> Option<Run> {
    let threshold = threshold.clamp(2, MAX_THRESHOLD);
    if entries.len() < threshold {
        return None;
    }
    let mut longest: Option<Run> = None;
    let mut position = 0;
    for run in entries.chunk_by(|one, next| one.kind == next.kind) {
        let kind = run.first().and_then(|entry| entry.kind.above());
        if let Some(kind) = kind {
            let length = run.len().min(threshold);
            let found = Run {
                position,
                length,
                kind,
            };
            if length == threshold {
                return Some(found);
            }
            if longest.is_none_or(|longest| longest.length < length) {
                longest = Some(found);
            }
        }
        position += run.len();
    }
    longest.filter(|run| run.length > 1 && entries.len() > REBALANCE_ROOT_ENTRIES)
}

/// The group of a run.
#[must_use]
pub fn group_of(root: &Root, run: Run) -> Option<Group> {
    let entries = root
        .entries
        .get(run.position..run.position.checked_add(run.length)?)?;
    let first = entries.first()?;
    Some(Group {
        kind: run.kind,
        first_offset: first.first_offset,
        first_timestamp_ms: first.first_timestamp_ms,
        entries: entries.to_vec(),
    })
}

/// How many more fragments the root can take before it is too long; as many as you like if it has nothing to give up.
#[must_use]
pub fn room(entries: &[Entry], threshold: usize) -> usize {
    let room = MAX_ROOT_ENTRIES.saturating_sub(entries.len());
    // Below the second rule's limit there is room for more fragments than are ever under way at once.
    if entries.len() <= REBALANCE_ROOT_ENTRIES || next_run(entries, threshold).is_some() {
        room
    } else {
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::edit::{self, tests::root_of};
    use proptest::prelude::*;

    fn kinds(counts: [usize; 4]) -> Vec<Entry> {
        let by_height = [
            Kind::MegaGroup,
            Kind::KiloGroup,
            Kind::Group,
            Kind::Fragment,
        ];
        let kinds = by_height
            .into_iter()
            .zip(counts)
            .flat_map(|(kind, count)| std::iter::repeat_n(kind, count));
        kinds
            .enumerate()
            .map(|(number, kind)| Entry {
                first_offset: number as u64,
                first_timestamp_ms: 0,
                last_timestamp_ms: 0,
                kind,
                size_bytes: 0,
                uid: 0,
            })
            .collect()
    }

    fn run(position: usize, length: usize, kind: Kind) -> Option<Run> {
        Some(Run {
            position,
            length,
            kind,
        })
    }

    #[test]
    fn exactly_threshold_entries_from_the_start_of_the_run() {
        assert_eq!(next_run(&kinds([0, 0, 2, 3]), 4), None);
        assert_eq!(next_run(&kinds([0, 0, 2, 4]), 4), run(2, 4, Kind::Group));
        assert_eq!(next_run(&kinds([0, 1, 0, 9]), 4), run(1, 4, Kind::Group));
        assert_eq!(
            next_run(&kinds([0, 0, 4, 4]), 4),
            run(0, 4, Kind::KiloGroup)
        );
        assert_eq!(
            next_run(&kinds([0, 4, 0, 0]), 4),
            run(0, 4, Kind::MegaGroup)
        );
        assert_eq!(
            next_run(&kinds([9, 0, 0, 0]), 4),
            None,
            "there is nothing above"
        );
    }

    #[test]
    fn a_root_that_is_too_long_gives_up_its_longest_run_before_the_threshold() {
        let long = kinds([1, 0, 700, 1_000]);
        assert_eq!(next_run(&long, 1_024), run(701, 1_000, Kind::Group));
        assert_eq!(
            next_run(&kinds([1, 0, 623, 1_023]), 1_024),
            None,
            "exactly at the limit"
        );
        assert_eq!(next_run(&kinds([1_700, 0, 0, 0]), 1_024), None);
        assert_eq!(
            room(&kinds([2_000, 0, 0, 0]), 1_024),
            usize::MAX,
            "an upload is worth more than a short root"
        );
        assert_eq!(room(&long, 1_024), MAX_ROOT_ENTRIES - long.len());
    }

    #[test]
    fn limits_are_what_they_say() {
        assert_eq!(MAX_ROOT_ENTRIES, 1_926);
        let root = Root {
            entries: kinds([0, 0, 0, MAX_ROOT_ENTRIES]),
            ..Root::empty_at(0)
        };
        assert!(root.encode().len() <= MAX_ROOT_BYTES);
        assert!(MAX_ROOT_BYTES < root.encode().len() + ENTRY_BYTES);
    }

    proptest! {
        #[test]
        fn bug_70_the_root_stays_small_however_much_is_appended(threshold in 2usize..6, fragments in 1usize..400) {
            let mut root = Root::empty_at(0);
            for number in 0..fragments {
                let plan = edit::tests::plan(root.next_offset, root.next_offset + 3, 10);
                edit::append(&mut root, &plan, number as u32).unwrap();
                while let Some(run) = next_run(&root.entries, threshold) {
                    let group = group_of(&root, run).unwrap();
                    prop_assert_eq!(group.check(), Ok(()));
                    prop_assert_eq!(group.entries.len(), threshold);
                    let first = (root.first_offset, root.first_timestamp_ms, root.first_last_timestamp_ms, root.total_size_bytes);
                    edit::replace(&mut root, run.position, &group, 7).unwrap();
                    prop_assert_eq!(first, (root.first_offset, root.first_timestamp_ms, root.first_last_timestamp_ms, root.total_size_bytes));
                }
                prop_assert_eq!(root.check(), Ok(()));
            }
            let below_mega = root.entries.iter().filter(|entry| entry.kind != Kind::MegaGroup).count();
            prop_assert!(below_mega <= 3 * (threshold - 1));
        }
    }

    #[test]
    fn a_group_replaces_only_the_run_it_was_made_of() {
        let mut root = root_of(0, &[5; 6]);
        let group = group_of(
            &root,
            Run {
                position: 1,
                length: 3,
                kind: Kind::Group,
            },
        )
        .unwrap();
        let before = root.clone();
        assert_eq!(
            edit::replace(&mut root, 2, &group, 9),
            Err(edit::EditError::NotReplaceable(2))
        );
        assert_eq!(
            edit::replace(&mut root, 5, &group, 9),
            Err(edit::EditError::NotReplaceable(5))
        );
        assert_eq!(root, before);
        edit::replace(&mut root, 1, &group, 9).unwrap();
        assert_eq!(root.check(), Ok(()));
        assert_eq!(root.entries.len(), 4);
    }
}
