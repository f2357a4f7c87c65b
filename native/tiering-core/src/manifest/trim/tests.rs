//! Trees of random shape against a flat list of the same fragments.

use std::collections::BTreeMap;

use log_format::manifest::MAX_ENTRY_SIZE_BYTES;
use proptest::prelude::*;

use super::*;
use crate::manifest::cut_back::CutBack;
use crate::manifest::edit::{self, tests::plan};
use crate::manifest::{invariants, rebalance};

/// A manifest and its groups, beside the fragments that it should hold.
#[derive(Debug)]
pub(crate) struct Forest {
    pub(crate) root: Root,
    groups: BTreeMap<u32, Group>,
    cache: LeadingGroups,
    reads: usize,
    /// What a flat manifest would have: entries that are not expired.
    flat: Vec<Entry>,
    next_uid: u32,
}

impl Forest {
    pub(crate) fn new() -> Self {
        Self {
            root: Root::empty_at(0),
            groups: BTreeMap::new(),
            cache: LeadingGroups::default(),
            reads: 0,
            flat: Vec::new(),
            next_uid: 0,
        }
    }

    pub(crate) fn append(&mut self, length: u64, size_bytes: u64) {
        self.next_uid += 1;
        let next = self.root.next_offset;
        let plan = plan(next, next + length, size_bytes);
        edit::append(&mut self.root, &plan, self.next_uid).unwrap();
        self.flat.push(*self.root.entries.last().unwrap());
    }

    pub(crate) fn rebalance(&mut self, threshold: usize) {
        while let Some(run) = rebalance::next_run(&self.root.entries, threshold) {
            self.next_uid += 1;
            let group = rebalance::group_of(&self.root, run).unwrap();
            edit::replace(&mut self.root, run.position, &group, self.next_uid).unwrap();
            self.groups.insert(self.next_uid, group);
        }
    }

    fn look(&self, bound: RetentionBound, now: Option<i64>, durable: u64) -> Look {
        look(&self.root, &self.cache, bound, now, durable)
    }

    fn read(&mut self, entry: Entry) {
        self.reads += 1;
        let group = Arc::new(self.groups[&entry.uid].clone());
        self.cache.insert(entry, group).unwrap();
    }

    /// Retention until there is nothing to do, in the root and below; what went, in order.
    fn retain(
        &mut self,
        bound: RetentionBound,
        now: Option<i64>,
        durable: u64,
    ) -> Vec<(Entry, u64)> {
        let mut gone = Vec::new();
        loop {
            let persisted = self
                .root
                .entries
                .partition_point(|entry| entry.first_offset < durable);
            let count = leading_to_drop(
                &self.root.entries[..persisted],
                &self.root.entries[persisted..],
                self.root.total_size_bytes,
                bound,
                now,
            );
            if count > 0 {
                let dropped = edit::drop_leading(&mut self.root, count).unwrap();
                gone.extend(dropped.into_iter().map(|entry| (entry, 0)));
                continue;
            }
            match self.look(bound, now, durable) {
                Look::Keep => break,
                Look::Need(entry) => self.read(entry),
                Look::Trim(edit, trimmed) => {
                    edit::apply(&mut self.root, edit).unwrap();
                    for (entry, _) in &trimmed {
                        self.cache.remove(entry);
                    }
                    assert!(self.cache.len() <= MAX_CACHED);
                    gone.extend(trimmed);
                }
            }
            self.check();
        }
        self.check();
        gone
    }

    fn check(&self) {
        assert_eq!(self.root.check(), Ok(()));
        assert!(invariants::ordering(&self.root) && invariants::coverage(&self.root));
    }

    /// What a flat list keeps, by the same words.
    fn naive(&self, bound: RetentionBound, now: Option<i64>, durable: u64) -> Vec<Entry> {
        let mut left = self.flat.clone();
        loop {
            let total: u64 = left.iter().map(|entry| entry.size_bytes).sum();
            let Some(first) = left.first() else { break };
            let too_big = bound.max_bytes.is_some_and(|max| total > max);
            let too_old = bound.max_age_ms.is_some_and(|age| {
                now.is_some_and(|now| first.last_timestamp_ms + (age as i64) < now)
            });
            let too_old = too_old && left.len() > 1;
            if !(too_big || too_old) || first.first_offset >= durable {
                break;
            }
            left.remove(0);
        }
        left
    }

    /// Lets the oldest fragments expire, as far as the list goes.
    pub(crate) fn expire(&mut self, count: usize) {
        let left: u64 = self
            .flat
            .iter()
            .skip(count)
            .map(|entry| entry.size_bytes)
            .sum();
        // Fragments of no bytes would go with their predecessors or not, as they like.
        if self.flat.iter().all(|entry| entry.size_bytes > 0) {
            let durable = self.root.next_offset;
            self.retain(bytes(left), None, durable);
        }
    }

    /// The log ends at `next_offset` now.
    pub(crate) fn cut_back(&mut self, next_offset: u64) {
        let mut cut = CutBack::new(&self.root, next_offset);
        self.root = loop {
            match cut.step() {
                Ok(root) => break root,
                Err(group) => cut.open(&self.group(group.uid)).unwrap(),
            }
        };
        self.flat = self.leaves();
        self.cache = LeadingGroups::default();
    }

    /// The fragments that the tree holds, from its first offset on.
    pub(crate) fn leaves(&self) -> Vec<Entry> {
        self.leaves_of(&self.root)
    }

    /// The fragments that another root over the same groups holds.
    pub(crate) fn leaves_of(&self, root: &Root) -> Vec<Entry> {
        fn walk(forest: &Forest, entries: &[Entry], leaves: &mut Vec<Entry>) {
            for entry in entries {
                match entry.kind {
                    Kind::Fragment => leaves.push(*entry),
                    _ => walk(forest, &forest.groups[&entry.uid].entries, leaves),
                }
            }
        }
        let mut leaves = Vec::new();
        walk(self, &root.entries, &mut leaves);
        leaves.retain(|leaf| leaf.first_offset >= root.first_offset);
        leaves
    }

    /// The group that an entry names.
    pub(crate) fn group(&self, uid: u32) -> Group {
        self.groups[&uid].clone()
    }
}

fn bytes(max_bytes: u64) -> RetentionBound {
    RetentionBound {
        max_bytes: Some(max_bytes),
        max_age_ms: None,
    }
}

/// Sixty-four fragments of ten bytes and ten records in one mega-group of fours.
fn mega() -> Forest {
    let mut forest = Forest::new();
    for _ in 0..64 {
        forest.append(10, 10);
        forest.rebalance(4);
    }
    assert_eq!(forest.root.entries.len(), 1);
    assert_eq!(forest.root.entries[0].kind, Kind::MegaGroup);
    forest
}

#[test]
fn bug_72_nothing_is_read_while_nothing_expires() {
    let forest = mega();
    assert_eq!(forest.look(bytes(640), None, 640), Look::Keep);
    let age = RetentionBound {
        max_bytes: None,
        max_age_ms: Some(1_000),
    };
    assert_eq!(forest.look(age, Some(1_009), 640), Look::Keep);
    assert_eq!(forest.look(age, None, 640), Look::Keep);
    assert!(matches!(forest.look(age, Some(1_010), 640), Look::Need(_)));
}

#[test]
fn bug_72_a_fragment_costs_one_path_once() {
    let mut forest = mega();
    for expired in 1..=3 {
        let gone = forest.retain(bytes(640 - 10 * expired), None, 640);
        assert_eq!(gone.len(), 1, "the fragment");
        assert_eq!(forest.root.first_offset, 10 * expired);
        assert_eq!(forest.reads, 3, "mega-group, kilo-group, group");
    }
    let gone = forest.retain(bytes(600), None, 640);
    assert_eq!(gone.len(), 2, "the last fragment of a group, and the group");
    assert_eq!(forest.reads, 4, "the group that comes first now");
}

#[test]
fn bug_68_the_last_fragment_takes_all_groups_with_it_and_the_manifest_is_empty() {
    let mut forest = mega();
    let gone = forest.retain(bytes(0), None, 640);
    assert_eq!(forest.root, Root::empty_at(640));
    let count = |kind| gone.iter().filter(|(entry, _)| entry.kind == kind).count();
    assert_eq!(
        [
            Kind::Fragment,
            Kind::Group,
            Kind::KiloGroup,
            Kind::MegaGroup
        ]
        .map(count),
        [64, 16, 4, 1]
    );
    assert_eq!(forest.reads, 21, "every group once");
    assert!(forest.cache.is_empty());
}

#[test]
fn one_look_takes_no_more_than_one_leaf() {
    let mut forest = mega();
    for _ in 0..3 {
        let Look::Need(entry) = forest.look(bytes(0), None, 640) else {
            panic!()
        };
        forest.read(entry);
    }
    // The leaf is used up, so what comes first afterwards has to be known before.
    let Look::Need(entry) = forest.look(bytes(0), None, 640) else {
        panic!()
    };
    forest.read(entry);
    let Look::Trim(edit, gone) = forest.look(bytes(0), None, 640) else {
        panic!()
    };
    assert_eq!(gone.len(), 5);
    assert_eq!(
        edit.beginning,
        Beginning {
            first_offset: 40,
            first_timestamp_ms: 40,
            first_last_timestamp_ms: 49
        }
    );
    assert_eq!(
        (edit.length, edit.entries.len()),
        (0, 0),
        "a group is never rewritten"
    );
}

#[test]
fn what_is_not_persisted_stays_also_inside_a_group() {
    let mut forest = mega();
    forest.retain(bytes(0), None, 30);
    assert_eq!(forest.root.first_offset, 30);
    assert_eq!(forest.root.total_size_bytes, 610);
}

#[test]
fn a_beginning_inside_a_group_that_is_not_known_is_found_out() {
    let mut forest = mega();
    forest.root.first_last_timestamp_ms = NO_TIMESTAMP;
    let age = RetentionBound {
        max_bytes: None,
        max_age_ms: Some(1_000_000),
    };
    assert!(forest.retain(age, Some(0), 640).is_empty());
    assert_eq!(forest.root.first_last_timestamp_ms, 9);
}

#[test]
fn by_age_the_newest_fragment_stays_also_inside_a_group() {
    let mut forest = mega();
    let age = RetentionBound {
        max_bytes: None,
        max_age_ms: Some(0),
    };
    let gone = forest.retain(age, Some(1_000_000), 640);
    assert_eq!(forest.root.first_offset, 630);
    assert_eq!(forest.root.total_size_bytes, 10);
    let fragments = gone
        .iter()
        .filter(|(entry, _)| entry.kind == Kind::Fragment);
    assert_eq!(fragments.count(), 63);
}

#[test]
fn a_record_from_the_future_at_the_end_of_a_group_is_as_old_as_the_group_behind_it() {
    let mut forest = Forest::new();
    for number in 0..8 {
        forest.append(10, 10);
        if number == 3 {
            let last = forest.root.entries.last_mut().unwrap();
            last.last_timestamp_ms = 1 << 50;
            *forest.flat.last_mut().unwrap() = *last;
        }
    }
    forest.rebalance(4);
    assert_eq!(forest.root.entries.len(), 2, "two groups of four");
    let age = RetentionBound {
        max_bytes: None,
        max_age_ms: Some(100),
    };
    // Timestamps are offsets: the one behind it begins at 40.
    forest.retain(age, Some(140), 80);
    assert_eq!(forest.root.first_offset, 30);
    forest.retain(age, Some(141), 80);
    assert_eq!(forest.root.first_offset, 40);
    forest.retain(age, Some(1_000), 80);
    assert_eq!(forest.root.first_offset, 70);
}

#[test]
fn a_group_that_is_another_one_is_not_believed() {
    let forest = mega();
    let entry = forest.root.entries[0];
    let mut cache = LeadingGroups::default();
    for wrong in [
        Group {
            kind: Kind::KiloGroup,
            ..forest.group(entry.uid)
        },
        Group {
            first_offset: 7,
            ..forest.group(entry.uid)
        },
        Group {
            entries: vec![],
            ..forest.group(entry.uid)
        },
    ] {
        assert!(cache.insert(entry, Arc::new(wrong)).is_err());
    }
    assert!(cache.is_empty());
    cache
        .insert(entry, Arc::new(forest.group(entry.uid)))
        .unwrap();
    assert_eq!(cache.len(), 1);
}

#[derive(Debug, Clone)]
enum Step {
    Append(u64, u64),
    Rebalance,
    Retain(Option<u64>, Option<u64>, i64, u64),
    Forget,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (1u64..4, prop_oneof![0u64..10, Just(MAX_ENTRY_SIZE_BYTES)]).prop_map(|(length, size)| Step::Append(length, size)),
        6 => Just(Step::Rebalance),
        2 => (prop::option::of(0u64..300), prop::option::of(0u64..100), 0i64..300, 0u64..400)
            .prop_map(|(bytes, age, now, durable)| Step::Retain(bytes, age, now, durable)),
        1 => Just(Step::Forget),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #[test]
    fn a_tree_expires_as_a_flat_list_does(threshold in 2usize..6, steps in steps()) {
        let mut forest = Forest::new();
        for step in steps {
            match step {
                Step::Append(length, size) => forest.append(length, size),
                Step::Rebalance => forest.rebalance(threshold),
                Step::Forget => forest.cache = LeadingGroups::default(),
                Step::Retain(max_bytes, max_age_ms, now, durable) => {
                    let bound = RetentionBound { max_bytes, max_age_ms };
                    let expected = forest.naive(bound, Some(now), durable);
                    let gone = forest.retain(bound, Some(now), durable);
                    let fragments = gone.iter().filter(|(entry, _)| entry.kind == Kind::Fragment);
                    let dropped = forest.flat.len() - expected.len();
                    prop_assert_eq!(fragments.map(|(entry, _)| *entry).collect::<Vec<_>>(), &forest.flat[..dropped]);
                    prop_assert!(gone.iter().all(|(entry, end)| *end == 0 || *end > entry.first_offset && *end <= forest.root.first_offset));
                    forest.flat = expected;
                }
            }
            forest.check();
            prop_assert_eq!(forest.leaves(), &forest.flat[..]);
            let total: u128 = forest.flat.iter().map(|entry| u128::from(entry.size_bytes)).sum();
            prop_assert_eq!(forest.root.total_size_bytes, total, "accounting drifted");
            if let Some(first) = forest.flat.first() {
                let told = (forest.root.first_offset, forest.root.first_timestamp_ms, forest.root.first_last_timestamp_ms);
                prop_assert_eq!(told, (first.first_offset, first.first_timestamp_ms, first.last_timestamp_ms));
            }
        }
    }
}
