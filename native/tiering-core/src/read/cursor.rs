//! Walks the fragments of one manifest snapshot, from a place to its end.
//!
//! Owns the descent through groups, which it names and is given. Does not own fetching, nor what is inside a fragment.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Kind, Root};

use super::effect::{FragmentRef, GroupRef};
use super::event::Start;
/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// This fragment.
    Fragment(FragmentRef),
    /// Unknown until this group is [provided](FragmentCursor::provide).
    NeedGroup(GroupRef),
    /// The snapshot ends.
    End,
}

#[derive(Debug)]
enum Entries {
    Root(Arc<Root>),
    Group(Vec<Entry>),
}

impl Entries {
    fn as_slice(&self) -> &[Entry] {
        match self {
            Self::Root(root) => &root.entries,
            Self::Group(entries) => entries,
        }
    }
}

#[derive(Debug)]
struct Level {
    entries: Entries,
    index: usize,
    end_offset: u64,
}

/// A place in a snapshot.
#[derive(Debug)]
pub(super) struct FragmentCursor {
    levels: Vec<Level>,
    seek: Start,
    /// Offsets below this are gone, also where an immutable group still names them.
    floor_offset: u64,
}

impl FragmentCursor {
    /// At the fragment that holds the place. The caller has checked that the place is inside the manifest.
    pub(super) fn new(root: Arc<Root>, seek: Start) -> Self {
        let floor_offset = root.first_offset;
        let end_offset = root.next_offset;
        let mut cursor = Self {
            levels: Vec::new(),
            seek,
            floor_offset,
        };
        cursor.enter(Entries::Root(root), end_offset);
        cursor
    }

    /// The next fragment; asking again after `NeedGroup` or `End` gives the same.
    pub(super) fn step(&mut self) -> Step {
        loop {
            let Some(level) = self.levels.last_mut() else {
                return Step::End;
            };
            let entries = level.entries.as_slice();
            let Some(entry) = entries.get(level.index).copied() else {
                self.levels.pop();
                if let Some(parent) = self.levels.last_mut() {
                    parent.index += 1;
                }
                continue;
            };
            if entry.kind != Kind::Fragment {
                return Step::NeedGroup(GroupRef {
                    kind: entry.kind,
                    first_offset: entry.first_offset,
                    uid: entry.uid,
                });
            }
            let next_offset = entries
                .get(level.index + 1)
                .map_or(level.end_offset, |next| next.first_offset);
            level.index += 1;
            self.seek = Start::Offset(next_offset);
            return Step::Fragment(FragmentRef {
                first_offset: entry.first_offset,
                next_offset,
                first_timestamp_ms: entry.first_timestamp_ms,
                data_bytes: entry.size_bytes,
                uid: entry.uid,
            });
        }
    }

    /// The group that `step` asked for. An error means that the group does not fit its place.
    pub(super) fn provide(&mut self, group: Group) -> Result<(), &'static str> {
        let Some(level) = self.levels.last() else {
            return Err("no group was asked for");
        };
        let entries = level.entries.as_slice();
        let Some(entry) = entries.get(level.index) else {
            return Err("no group was asked for");
        };
        let end_offset = entries
            .get(level.index + 1)
            .map_or(level.end_offset, |next| next.first_offset);
        if group.kind != entry.kind || group.first_offset != entry.first_offset {
            return Err("the group is another one than its entry says");
        }
        if group
            .entries
            .last()
            .is_none_or(|last| last.first_offset >= end_offset)
        {
            return Err("the group reaches past its entry");
        }
        self.enter(Entries::Group(group.entries), end_offset);
        Ok(())
    }

    fn enter(&mut self, entries: Entries, end_offset: u64) {
        let slice = entries.as_slice();
        let holds = |offset: u64| {
            slice
                .partition_point(|entry| entry.first_offset <= offset)
                .saturating_sub(1)
        };
        let index = match self.seek {
            Start::Offset(offset) => holds(offset.max(self.floor_offset)),
            Start::Timestamp(timestamp_ms) => slice
                .partition_point(|entry| entry.last_timestamp_ms < timestamp_ms)
                .max(holds(self.floor_offset)),
        };
        self.levels.push(Level {
            entries,
            index,
            end_offset,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::manifest::edit::{self, tests::plan};
    use crate::manifest::rebalance;

    fn entry(first_offset: u64, kind: Kind) -> Entry {
        let timestamp = i64::try_from(first_offset).unwrap_or(i64::MAX);
        Entry {
            first_offset,
            first_timestamp_ms: timestamp,
            last_timestamp_ms: timestamp + 9,
            kind,
            size_bytes: u64::from(kind == Kind::Fragment) * 100,
            uid: 1,
        }
    }

    fn root(first_offset: u64, next_offset: u64, entries: Vec<Entry>) -> Arc<Root> {
        Arc::new(Root {
            first_offset,
            next_offset,
            first_timestamp_ms: 0,
            first_last_timestamp_ms: 9,
            total_size_bytes: 100,
            entries,
        })
    }

    fn group(kind: Kind, offsets: &[u64]) -> Group {
        let below = Kind::from_byte(kind.to_byte() - 1).expect("a group kind");
        Group {
            kind,
            first_offset: offsets[0],
            first_timestamp_ms: 0,
            entries: offsets.iter().map(|offset| entry(*offset, below)).collect(),
        }
    }

    fn fragment_range(step: Step) -> (u64, u64) {
        match step {
            Step::Fragment(fragment) => (fragment.first_offset, fragment.next_offset),
            other => panic!("{other:?} instead of a fragment"),
        }
    }

    #[test]
    fn an_offset_is_found_in_the_last_entry_at_or_below_it() {
        let flat = root(
            0,
            30,
            vec![
                entry(0, Kind::Fragment),
                entry(10, Kind::Fragment),
                entry(20, Kind::Fragment),
            ],
        );
        for (offset, found) in [(0, (0, 10)), (9, (0, 10)), (10, (10, 20)), (29, (20, 30))] {
            let mut cursor = FragmentCursor::new(Arc::clone(&flat), Start::Offset(offset));
            assert_eq!(fragment_range(cursor.step()), found);
        }
    }

    #[test]
    fn groups_are_descended_and_left_again() {
        let root = root(
            0,
            60,
            vec![entry(0, Kind::KiloGroup), entry(40, Kind::Fragment)],
        );
        let mut cursor = FragmentCursor::new(root, Start::Offset(25));
        assert!(matches!(
            cursor.step(),
            Step::NeedGroup(GroupRef {
                kind: Kind::KiloGroup,
                ..
            })
        ));
        cursor
            .provide(group(Kind::KiloGroup, &[0, 20]))
            .expect("fits");
        assert!(matches!(
            cursor.step(),
            Step::NeedGroup(GroupRef {
                kind: Kind::Group,
                first_offset: 20,
                ..
            })
        ));
        cursor.provide(group(Kind::Group, &[20, 30])).expect("fits");
        assert_eq!(fragment_range(cursor.step()), (20, 30));
        assert_eq!(fragment_range(cursor.step()), (30, 40));
        assert_eq!(fragment_range(cursor.step()), (40, 60));
        assert_eq!(cursor.step(), Step::End);
        assert_eq!(cursor.step(), Step::End);
    }

    #[test]
    fn what_retention_took_out_of_a_leading_group_is_skipped() {
        for seek in [Start::Offset(0), Start::Offset(20), Start::Timestamp(0)] {
            let mut cursor = FragmentCursor::new(root(20, 40, vec![entry(0, Kind::Group)]), seek);
            assert!(matches!(cursor.step(), Step::NeedGroup(_)));
            cursor
                .provide(group(Kind::Group, &[0, 10, 20, 30]))
                .expect("fits");
            assert_eq!(fragment_range(cursor.step()), (20, 30));
        }
    }

    #[test]
    fn a_timestamp_is_found_in_the_first_entry_that_reaches_it() {
        let flat = root(
            0,
            30,
            vec![
                entry(0, Kind::Fragment),
                entry(10, Kind::Fragment),
                entry(20, Kind::Fragment),
            ],
        );
        for (timestamp_ms, found) in [(-5, (0, 10)), (9, (0, 10)), (10, (10, 20)), (29, (20, 30))] {
            let mut cursor = FragmentCursor::new(Arc::clone(&flat), Start::Timestamp(timestamp_ms));
            assert_eq!(fragment_range(cursor.step()), found);
        }
        let mut past = FragmentCursor::new(flat, Start::Timestamp(30));
        assert_eq!(past.step(), Step::End);
    }

    #[test]
    fn only_the_place_is_found_by_time_and_what_follows_by_offset() {
        let mut cursor = FragmentCursor::new(
            root(
                0,
                40,
                vec![entry(0, Kind::Fragment), entry(20, Kind::Group)],
            ),
            Start::Timestamp(9),
        );
        assert_eq!(fragment_range(cursor.step()), (0, 20));
        assert!(matches!(cursor.step(), Step::NeedGroup(_)));
        let mut stepped_back = group(Kind::Group, &[20, 30]);
        stepped_back.entries[0].last_timestamp_ms = 3;
        cursor.provide(stepped_back).expect("fits");
        assert_eq!(fragment_range(cursor.step()), (20, 30));
    }

    #[test]
    fn a_group_that_does_not_fit_its_place_is_refused() {
        let mut cursor = FragmentCursor::new(
            root(
                0,
                30,
                vec![entry(0, Kind::Group), entry(20, Kind::Fragment)],
            ),
            Start::Offset(0),
        );
        assert!(matches!(cursor.step(), Step::NeedGroup(_)));
        assert!(
            cursor.provide(group(Kind::Group, &[0, 10, 20])).is_err(),
            "reaches into its neighbour"
        );
        assert!(
            cursor.provide(group(Kind::Group, &[5, 10])).is_err(),
            "starts elsewhere"
        );
        assert!(
            cursor.provide(group(Kind::KiloGroup, &[0])).is_err(),
            "another height"
        );
        cursor.provide(group(Kind::Group, &[0, 10])).expect("fits");
    }

    /// A random tree, its groups by uid, and its fragments from the first offset on with where each ends.
    type Tree = (Arc<Root>, BTreeMap<u32, Group>, Vec<(Entry, u64)>);

    fn tree(threshold: usize, lengths: &[u64], expired: usize) -> Tree {
        let mut root = Root::empty_at(7);
        let (mut groups, mut flat) = (BTreeMap::new(), Vec::new());
        for (number, length) in lengths.iter().enumerate() {
            let end_offset = root.next_offset + length;
            let plan = plan(root.next_offset, end_offset, 100);
            let uid = u32::try_from(number).expect("small");
            edit::append(&mut root, &plan, uid).expect("fits");
            flat.push((*root.entries.last().expect("appended"), end_offset));
            while let Some(run) = rebalance::next_run(&root.entries, threshold) {
                let group = rebalance::group_of(&root, run).expect("there");
                let uid = 1_000 + u32::try_from(groups.len()).expect("small");
                edit::replace(&mut root, run.position, &group, uid).expect("fits");
                groups.insert(uid, group);
            }
        }
        // Retention that has not used up the leading group.
        let second = root
            .entries
            .get(1)
            .map_or(root.next_offset, |entry| entry.first_offset);
        flat.drain(..expired.min(flat.len() - 1));
        if flat[0].0.first_offset < second && root.entries[0].kind != Kind::Fragment {
            root.first_offset = flat[0].0.first_offset;
        } else {
            flat = Vec::new();
        }
        (Arc::new(root), groups, flat)
    }

    proptest! {
        #[test]
        fn trees_are_searched_and_walked_as_a_flat_list_is(
            threshold in 2usize..6,
            lengths in prop::collection::vec(1u64..5, 1..90),
            expired in 0usize..20,
            place in 0u64..500,
            by_time: bool,
        ) {
            let (root, groups, flat) = tree(threshold, &lengths, expired);
            prop_assume!(!flat.is_empty());
            let place = root.first_offset + place % (root.next_offset - root.first_offset);
            let time = i64::try_from(place).expect("small") - 2;
            let (seek, expected) = if by_time {
                let first = flat.iter().position(|(entry, _)| entry.last_timestamp_ms >= time);
                (Start::Timestamp(time), first)
            } else {
                let first = flat.iter().position(|(entry, end)| (entry.first_offset..*end).contains(&place));
                (Start::Offset(place), first)
            };
            let expected = &flat[expected.unwrap_or(flat.len())..];
            let height = root.entries.iter().map(|entry| entry.kind.to_byte()).max().unwrap_or(0);
            let mut cursor = FragmentCursor::new(Arc::clone(&root), seek);
            let (mut found, mut reads, mut reads_to_first) = (Vec::new(), BTreeSet::new(), None);
            loop {
                match cursor.step() {
                    Step::NeedGroup(group) => {
                        prop_assert!(reads.insert(group.uid), "a group is read twice");
                        cursor.provide(groups[&group.uid].clone()).expect("fits");
                    }
                    Step::Fragment(fragment) => {
                        reads_to_first.get_or_insert(reads.len());
                        found.push((fragment.first_offset, fragment.next_offset, fragment.uid));
                    }
                    Step::End => break,
                }
            }
            let expected: Vec<_> = expected.iter().map(|(entry, end)| (entry.first_offset, *end, entry.uid)).collect();
            prop_assert_eq!(found, expected);
            prop_assert!(reads_to_first.unwrap_or(0) <= usize::from(height), "one path");
        }
    }
}
