//! Groups: one mutator at a time, in every order of completion. `hang` is the finding that a group whose upload died stopped
//! everything for ever.

use super::*;
use crate::manifest::rebalance;
use log_format::manifest::{Entry, Group};

fn small() -> Settings {
    Settings {
        rebalance_threshold: 3,
        ..settings()
    }
}

fn bytes(max_bytes: u64) -> Event {
    Event::RetentionChanged(RetentionBound {
        max_bytes: Some(max_bytes),
        max_age_ms: None,
    })
}

fn group_object(kind: Kind, first_offset: u64, uid: u32) -> StoredObject {
    StoredObject::Group {
        kind,
        first_offset,
        uid,
    }
}

impl Rig {
    #[track_caller]
    fn take<T>(&mut self, what: fn(&Effect) -> Option<T>) -> T {
        let found = self
            .effects
            .iter()
            .enumerate()
            .find_map(|(at, effect)| Some((at, what(effect)?)));
        let (at, taken) = found.unwrap_or_else(|| panic!("not asked for: {:?}", self.effects));
        self.effects.remove(at);
        taken
    }

    #[track_caller]
    fn take_put_group(&mut self) -> (u64, Arc<Group>) {
        self.take(|effect| match effect {
            Effect::PutGroup {
                generation, group, ..
            } => Some((*generation, Arc::clone(group))),
            _ => None,
        })
    }

    #[track_caller]
    fn put_group(&mut self, outcome: Result<u32, Failure>) -> Arc<Group> {
        let (generation, group) = self.take_put_group();
        self.send(Event::GroupPut {
            generation,
            outcome,
        });
        group
    }

    #[track_caller]
    fn take_get_group(&mut self) -> (u64, StoredObject) {
        self.take(|effect| match *effect {
            Effect::GetGroup {
                generation,
                kind,
                first_offset,
                uid,
            } => Some((generation, group_object(kind, first_offset, uid))),
            _ => None,
        })
    }

    #[track_caller]
    fn get_group(&mut self, outcome: Result<Group, Failure>) -> StoredObject {
        let (generation, object) = self.take_get_group();
        self.send(Event::GroupRead {
            generation,
            outcome,
        });
        object
    }

    fn asks_for(&self, what: fn(&Effect) -> bool) -> bool {
        self.effects.iter().any(what)
    }

    /// What the operator sees now; forgets what he was told.
    pub(super) fn problem_now(&mut self) -> Option<&'static str> {
        self.effects
            .retain(|effect| !matches!(effect, Effect::Problem { .. }));
        self.machine.status().problem.map(|problem| problem.kind)
    }

    fn persists(&self) -> bool {
        self.asks_for(|effect| matches!(effect, Effect::PutRoot { .. }))
    }

    fn rebalances(&self) -> bool {
        self.asks_for(|effect| matches!(effect, Effect::PutGroup { .. }))
    }

    #[track_caller]
    fn persist_as(&mut self, uid: u32) -> Arc<Root> {
        let revision = self.machine.status().revision;
        let root = self.put_root(Ok(uid));
        self.commit(
            (uid, revision),
            CommitOutcome::Committed {
                revision: revision + 1,
            },
        );
        let published = self.take(|effect| match effect {
            Effect::Publish { root, .. } => Some(Arc::clone(root)),
            _ => None,
        });
        assert_eq!(published, root);
        root
    }

    #[track_caller]
    fn take_deleted(&mut self) -> Vec<StoredObject> {
        self.take(|effect| match effect {
            Effect::Delete { objects } => Some(objects.clone()),
            _ => None,
        })
    }
}

/// Three fragments of a stream that has two more: a group is on its way.
fn rebalancing() -> Rig {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20, 20]));
    rig.drain(110, 0);
    rig.upload(3);
    assert!(rig.rebalances());
    rig
}

/// A root with these entries, and what the first of them holds: groups of two groups of two, each fragment ten records and
/// ten bytes; uids are a hundred per height and the first offset.
fn grown() -> (Root, Vec<Group>) {
    let entry = |kind: Kind, number: u64, count: u64| Entry {
        first_offset: 10 * number,
        first_timestamp_ms: 10 * number as i64,
        last_timestamp_ms: 10 * (number + count) as i64 - 1,
        kind,
        size_bytes: if kind == Kind::Fragment { 10 } else { 0 },
        uid: 100 * u32::from(kind.to_byte()) + number as u32,
    };
    let group = |kind: Kind, number: u64, count: u64| {
        let below = kind.below().unwrap();
        let entries: Vec<Entry> = (0..2)
            .map(|child| entry(below, number + child * count, count))
            .collect();
        Group {
            kind,
            first_offset: 10 * number,
            first_timestamp_ms: 10 * number as i64,
            entries,
        }
    };
    let root = Root {
        first_offset: 0,
        next_offset: 60,
        first_timestamp_ms: 0,
        first_last_timestamp_ms: 9,
        total_size_bytes: 60,
        entries: vec![
            entry(Kind::KiloGroup, 0, 4),
            entry(Kind::Fragment, 4, 1),
            entry(Kind::Fragment, 5, 1),
        ],
    };
    root.check().unwrap();
    (
        root,
        vec![
            group(Kind::KiloGroup, 0, 2),
            group(Kind::Group, 0, 1),
            group(Kind::Group, 2, 1),
        ],
    )
}

#[test]
fn a_run_becomes_a_group_and_the_persist_includes_it() {
    let mut rig = rebalancing();
    assert!(!rig.persists(), "waits for the rebalance");
    let group = rig.put_group(Ok(50));
    assert_eq!(group.entries.len(), 3);
    let root = rig.persist_as(100);
    assert_eq!(root.entries.len(), 1);
    assert_eq!(
        (root.entries[0].kind, root.entries[0].uid),
        (Kind::Group, 50)
    );
    assert_eq!(
        (root.first_offset, root.next_offset, root.total_size_bytes),
        (0, 60, 20 + 2 * CHUNK_BYTES as u128)
    );
    let counters = rig.machine.counters();
    assert_eq!(
        (counters.groups_created, counters.kilo_groups_created),
        (1, 0)
    );
}

#[test]
fn what_is_appended_while_a_group_is_on_its_way_is_kept() {
    let mut rig = rebalancing();
    rig.upload(4);
    rig.upload(5);
    assert_eq!(rig.machine.status().manifest_entries, 5);
    rig.put_group(Ok(50));
    let root = rig.persist_as(100);
    let starts: Vec<u64> = root
        .entries
        .iter()
        .map(|entry| entry.first_offset)
        .collect();
    assert_eq!(starts, [0, 60, 80]);
    assert_eq!(root.next_offset, 100);
}

#[test]
fn hang_a_group_whose_upload_died_is_tried_again_and_persisting_goes_on_meanwhile() {
    let mut rig = rebalancing();
    rig.upload(4);
    rig.put_group(Err(transient()));
    // The edits are due, and the rebalance waits for its retry: it must not stand in the way.
    let root = rig.persist_as(100);
    assert_eq!(root.entries.len(), 4);
    rig.wait_until_due();
    rig.put_group(Ok(50));
    assert_eq!(rig.machine.status().manifest_entries, 2);
    rig.wait_until_due();
    rig.persist_as(101);
}

#[test]
fn hang_a_group_upload_that_never_answers_does_not_block_for_ever_and_its_late_answer_is_ignored() {
    let mut rig = rebalancing();
    let (lost, _) = rig.take_put_group();
    rig.upload(4);
    rig.wait(179_999);
    assert!(!rig.persists());
    rig.wait(1);
    assert!(rig.persists(), "an idle stream strands no edit");
    rig.persist_as(100);
    rig.send(Event::GroupPut {
        generation: lost,
        outcome: Ok(50),
    });
    assert_eq!(rig.machine.status().manifest_entries, 4);
    rig.wait_until_due();
    let (second, _) = rig.take_put_group();
    rig.send(Event::GroupPut {
        generation: lost,
        outcome: Ok(50),
    });
    assert!(rig.machine.status().rebalance_in_flight);
    rig.send(Event::GroupPut {
        generation: second,
        outcome: Ok(51),
    });
    rig.send(Event::GroupPut {
        generation: second,
        outcome: Ok(52),
    });
    assert_eq!(rig.machine.manifest.entries[0].uid, 51);
    assert_eq!(rig.machine.counters().groups_created, 1);
}

#[test]
fn hang_a_group_that_is_refused_for_ever_is_told_and_stalls_nothing_but_itself() {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20, 20, 20]));
    for uid in 0..10 {
        rig.put_group(Err(forbidden()));
        assert_eq!(rig.problem_now(), Some("group"));
        rig.drain(70 + 20 * uid, 0);
        rig.upload(uid as u32 + 10);
        while !rig.persists() {
            rig.wait_until_due();
            if rig.rebalances() {
                rig.put_group(Err(forbidden()));
            }
        }
        rig.persist_as(100 + uid as u32);
        rig.effects.clear();
        while !rig.rebalances() {
            rig.wait_until_due();
        }
    }
    assert_eq!(rig.machine.status().persisted_next_offset, 260);
    assert_eq!(
        rig.machine.status().problem.map(|problem| problem.kind),
        Some("group")
    );
    rig.put_group(Ok(50));
    assert_eq!(rig.machine.status().problem, None);
}

#[test]
fn bug_71_a_rebalance_waits_for_the_persist_under_way() {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20]));
    rig.drain(110, 0);
    rig.upload(3);
    rig.wait(2_000);
    assert!(rig.persists());
    rig.upload(4);
    rig.upload(5);
    assert!(!rig.rebalances());
    let root = rig.persist_as(100);
    assert_eq!(root.entries.len(), 2);
    assert_eq!(rig.put_group(Ok(50)).entries.len(), 3);
    assert_eq!(rig.persist_as(101).entries.len(), 2);
}

#[test]
fn bug_71_retention_that_comes_in_the_middle_of_a_rebalance_waits_and_then_happens() {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20, 20, 20]));
    rig.send(bytes(15));
    assert_eq!(
        rig.machine.status().manifest_first_offset,
        0,
        "the run must stay where it is"
    );
    assert_eq!(rig.machine.poll_timeout(), Some(180_000));
    let group = rig.put_group(Ok(50));
    assert_eq!(
        rig.get_group(Ok((*group).clone())),
        group_object(Kind::Group, 0, 50)
    );
    assert_eq!(rig.machine.status().manifest_first_offset, 40);
    let root = rig.persist_as(100);
    assert_eq!(
        (
            root.first_offset,
            root.first_last_timestamp_ms,
            root.total_size_bytes
        ),
        (40, 59, 10)
    );
    assert_eq!(rig.take_deleted(), [fragment(0, 0), fragment(20, 1)]);
}

#[test]
fn bug_71_retention_inside_a_group_waits_for_the_persist_under_way() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.drain(90, 0);
    rig.upload(3);
    rig.upload(4);
    assert!(rig.persists());
    rig.send(bytes(645));
    assert!(!rig.asks_for(|effect| matches!(effect, Effect::GetGroup { .. })));
    rig.persist_as(100);
    rig.get_group(Ok(groups[0].clone()));
    rig.get_group(Ok(groups[1].clone()));
    assert_eq!(rig.machine.status().manifest_first_offset, 10);
}

#[test]
fn bug_68_a_fragment_inside_groups_expires_and_is_deleted_after_the_persist() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(50));
    assert_eq!(
        rig.get_group(Ok(groups[0].clone())),
        group_object(Kind::KiloGroup, 0, 200)
    );
    assert_eq!(
        rig.get_group(Ok(groups[1].clone())),
        group_object(Kind::Group, 0, 100)
    );
    rig.quiet();
    rig.wait_until_due();
    let root = rig.persist_as(100);
    assert_eq!(root.entries.len(), 3, "no group is rewritten");
    assert_eq!(
        (
            root.first_offset,
            root.first_timestamp_ms,
            root.first_last_timestamp_ms,
            root.total_size_bytes
        ),
        (10, 10, 19, 50)
    );
    assert_eq!(rig.take_deleted(), [fragment(0, 0)]);
}

#[test]
fn bug_72_the_leading_group_is_read_once() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(50));
    rig.get_group(Ok(groups[0].clone()));
    rig.get_group(Ok(groups[1].clone()));
    rig.send(bytes(40));
    assert_eq!(
        rig.get_group(Ok(groups[2].clone())),
        group_object(Kind::Group, 20, 102),
        "the next leaf, and no group twice"
    );
    rig.send(bytes(30));
    assert_eq!(
        rig.machine.status().manifest_first_offset,
        20,
        "two edits are being persisted"
    );
    rig.persist_as(100);
    assert_eq!(rig.machine.status().manifest_first_offset, 30);
    assert_eq!(
        rig.take_deleted(),
        [
            fragment(0, 0),
            fragment(10, 1),
            group_object(Kind::Group, 0, 100)
        ]
    );
}

#[test]
fn groups_that_are_used_up_go_with_their_last_fragment() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(15));
    for group in groups {
        rig.get_group(Ok(group));
    }
    assert_eq!(
        rig.machine.status().manifest_first_offset,
        40,
        "one step at a time"
    );
    rig.send(Event::Tick);
    assert_eq!(rig.machine.status().manifest_first_offset, 50);
    let snapshot = rig.persist_as(100);
    if snapshot.first_offset < 50 {
        rig.wait_until_due();
        rig.persist_as(101);
    }
    let mut deleted = rig.take_deleted();
    if rig.asks_for(|effect| matches!(effect, Effect::Delete { .. })) {
        deleted.extend(rig.take_deleted());
    }
    let groups: Vec<_> = deleted
        .iter()
        .filter(|object| matches!(object, StoredObject::Group { .. }))
        .collect();
    assert_eq!(groups.len(), 3);
    assert!(deleted.contains(&fragment(40, 4)));
    assert_eq!(rig.machine.counters().groups_deleted, 3);
}

#[test]
fn retention_may_empty_a_manifest_of_groups() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(0));
    for group in groups {
        rig.get_group(Ok(group));
    }
    rig.send(Event::Tick);
    assert_eq!(rig.machine.status().manifest_entries, 0);
    rig.persist_as(100);
    if rig.machine.persist.edits > 0 {
        rig.wait_until_due();
        rig.persist_as(101);
    }
    assert_eq!(*rig.machine.persisted, Root::empty_at(60));
}

#[test]
fn what_waits_for_its_deletion_is_bounded_and_retention_goes_on_after_a_persist() {
    const FRAGMENTS: u64 = 1_024;
    let entry = |kind: Kind, number: u64, last: u64| Entry {
        first_offset: number,
        first_timestamp_ms: number as i64,
        last_timestamp_ms: last as i64,
        kind,
        size_bytes: u64::from(kind == Kind::Fragment),
        uid: number as u32,
    };
    let group = |first: u64| Group {
        kind: Kind::Group,
        first_offset: first,
        first_timestamp_ms: first as i64,
        entries: (first..first + FRAGMENTS)
            .map(|number| entry(Kind::Fragment, number, number))
            .collect(),
    };
    let firsts = [0, FRAGMENTS, 2 * FRAGMENTS];
    let root = Root {
        first_offset: 0,
        next_offset: 3 * FRAGMENTS,
        first_timestamp_ms: 0,
        first_last_timestamp_ms: 0,
        total_size_bytes: 3 * u128::from(FRAGMENTS),
        entries: firsts
            .map(|first| entry(Kind::Group, first, first + FRAGMENTS - 1))
            .to_vec(),
    };
    // The persist that makes room is not due by itself.
    let patient = Settings {
        persist_threshold: 100,
        persist_interval_ms: 1_000_000,
        ..settings()
    };
    let mut rig = Rig::confirmed_with(patient, &root);
    rig.send(bytes(0));
    // A group that is used up goes when it is known what comes first after it.
    for first in firsts {
        assert!(!rig.persists());
        rig.get_group(Ok(group(first)));
    }
    assert!(rig.persists());
    assert_eq!(rig.machine.status().manifest_first_offset, firsts[2]);
    rig.persist_as(100);
    assert!(rig.take_deleted().len() > 2 * FRAGMENTS as usize);
    assert_eq!(rig.machine.status().manifest_entries, 0);
}

#[test]
fn a_group_that_cannot_be_read_changes_nothing_and_persisting_goes_on() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(50));
    rig.get_group(Err(transient()));
    rig.quiet();
    rig.drain(90, 0);
    rig.upload(3);
    rig.upload(4);
    rig.persist_as(100);
    rig.wait_until_due();
    rig.get_group(Err(Failure::NotFound("gone".to_owned())));
    assert_eq!(rig.problem_now(), Some("group"));
    rig.wait_until_due();
    rig.get_group(Ok(groups[1].clone()));
    assert_eq!(
        rig.machine.counters().group_failures,
        3,
        "another group than the one that was asked for"
    );
    assert_eq!(rig.machine.status().manifest_first_offset, 0);
    rig.wait_until_due();
    rig.get_group(Ok(groups[0].clone()));
    assert_eq!(rig.problem_now(), None);
    rig.get_group(Ok(groups[1].clone()));
    rig.get_group(Ok(groups[2].clone()));
    assert_eq!(rig.machine.status().manifest_first_offset, 40);
}

#[test]
fn a_policy_that_is_relaxed_while_a_group_is_read_drops_nothing() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(50));
    rig.send(Event::RetentionChanged(RetentionBound::default()));
    rig.get_group(Ok(groups[0].clone()));
    rig.quiet();
    assert_eq!(rig.machine.status().manifest_first_offset, 0);
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn a_read_that_never_answers_is_made_again_and_its_late_answer_ignored() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.send(bytes(50));
    let (lost, _) = rig.take_get_group();
    rig.wait(180_000);
    assert_eq!(rig.problem_now(), Some("group"));
    rig.wait_until_due();
    rig.send(Event::GroupRead {
        generation: lost,
        outcome: Ok(groups[0].clone()),
    });
    rig.send(Event::GroupPut {
        generation: lost,
        outcome: Ok(1),
    });
    rig.get_group(Ok(groups[0].clone()));
    assert_eq!(rig.problem_now(), None);
    rig.get_group(Ok(groups[1].clone()));
}

#[test]
fn age_wakes_the_machine_for_a_leading_group_too() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.machine.set_time(rig.now, Ok(5_000));
    rig.send(Event::RetentionChanged(RetentionBound {
        max_bytes: None,
        max_age_ms: Some(10_000),
    }));
    assert_eq!(
        rig.machine.poll_timeout(),
        Some(5_010),
        "the oldest fragment ends at 9"
    );
    rig.quiet();
    rig.wait_until_due();
    rig.get_group(Ok(groups[0].clone()));
    rig.get_group(Ok(groups[1].clone()));
    assert_eq!(rig.machine.status().manifest_first_offset, 10);
    assert_eq!(rig.machine.poll_timeout(), Some(5_020));
}

#[test]
fn bug_75_the_beginning_moves_while_uploads_complete_and_nothing_is_mixed_up() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed_with(small(), &root);
    rig.drain(110, 0);
    rig.send(bytes(350));
    rig.upload(3);
    rig.get_group(Ok(groups[0].clone()));
    // The rebalance has its turn between two reads.
    let group = rig.put_group(Ok(70));
    assert_eq!(group.first_offset, 40);
    rig.upload(4);
    rig.persist_as(100);
    rig.get_group(Ok(groups[1].clone()));
    rig.get_group(Ok(groups[2].clone()));
    let manifest = &rig.machine.manifest;
    manifest.check().unwrap();
    let starts: Vec<u64> = manifest
        .entries
        .iter()
        .map(|entry| entry.first_offset)
        .collect();
    assert_eq!((manifest.first_offset, starts), (20, vec![0, 40, 80]));
}

#[test]
fn kilo_groups_and_mega_groups_follow() {
    let mut rig = Rig::confirmed_with(
        Settings {
            rebalance_threshold: 2,
            persist_threshold: 1_000,
            ..settings()
        },
        &root_of(0, &[20; 8]),
    );
    let mut uid = 50;
    let mut made = Vec::new();
    for _ in 0..7 {
        while !rig.rebalances() {
            // No more than a few groups wait for a persist.
            rig.persist_as(uid + 1_000);
        }
        uid += 1;
        made.push(rig.put_group(Ok(uid)).kind);
    }
    assert_eq!(made.iter().filter(|kind| **kind == Kind::Group).count(), 4);
    assert_eq!(made.last(), Some(&Kind::MegaGroup));
    assert_eq!(rig.machine.manifest.entries.len(), 1);
    let counters = rig.machine.counters();
    assert_eq!(
        (
            counters.groups_created,
            counters.kilo_groups_created,
            counters.mega_groups_created
        ),
        (4, 2, 1)
    );
}

#[test]
fn fragments_that_another_writer_s_group_may_hold_are_not_deleted_as_left_behind() {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20, 20]));
    rig.drain(60, 0);
    rig.upload(3);
    let group = rig.put_group(Ok(50));
    rig.put_root(Ok(101));
    rig.commit((101, 7), CommitOutcome::Unknown);
    // It was committed after all, and another machine of this epoch went on from it.
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 102, 9)));
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 102, 9)));
    let mut root = root_of(0, &[20, 20]);
    root.entries = vec![Entry {
        kind: Kind::Group,
        size_bytes: 0,
        uid: 50,
        last_timestamp_ms: 59,
        ..group.entries[0]
    }];
    root.next_offset = 60;
    root.total_size_bytes = 20 + CHUNK_BYTES as u128 * 2;
    rig.answer_root(Ok(root));
    rig.published();
    rig.drain(110, 0);
    rig.upload(6);
    rig.upload(7);
    rig.persist_as(103);
    let deleted = rig.take_deleted();
    assert!(
        !deleted.contains(&fragment(40, 3)) && !deleted.contains(&group_object(Kind::Group, 0, 50)),
        "{deleted:?}"
    );
}

#[test]
fn groups_that_a_lost_race_left_behind_are_deleted_with_what_they_hold() {
    let mut rig = Rig::confirmed_with(small(), &root_of(0, &[20, 20]));
    rig.drain(60, 0);
    rig.upload(3);
    rig.put_group(Ok(50));
    rig.put_root(Ok(101));
    rig.commit((101, 7), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 8)));
    rig.answer_root(Ok(root_of(0, &[20, 20])));
    rig.published();
    rig.drain(60, 0);
    rig.upload(6);
    rig.put_group(Ok(51));
    rig.persist_as(103);
    let deleted = rig.take_deleted();
    assert!(
        deleted.contains(&fragment(40, 3)) && deleted.contains(&group_object(Kind::Group, 0, 50)),
        "{deleted:?}"
    );
    assert!(!deleted.contains(&fragment(0, 0)));
}

#[test]
fn a_recovery_clears_the_groups_of_the_old_manifest_away_piece_by_piece() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.committed(100, 80);
    assert!(rig.asks_for(|effect| matches!(effect, Effect::Recovered { .. })));
    rig.effects
        .retain(|effect| matches!(effect, Effect::Scan { .. }));
    rig.drain(110, 80);
    assert!(
        !rig.asks_for(|effect| matches!(effect, Effect::GetGroup { .. })),
        "nothing is touched before the persist"
    );
    rig.upload(3);
    rig.persist_as(100);
    assert_eq!(rig.take_deleted(), [fragment(40, 4), fragment(50, 5)]);
    rig.get_group(Ok(groups[0].clone()));
    rig.get_group(Err(transient()));
    rig.wait_until_due();
    rig.get_group(Ok(groups[1].clone()));
    assert_eq!(
        rig.take_deleted(),
        [
            fragment(0, 0),
            fragment(10, 1),
            group_object(Kind::Group, 0, 100)
        ]
    );
    rig.get_group(Err(Failure::NotFound("gone".to_owned())));
    assert_eq!(
        rig.take_deleted(),
        [group_object(Kind::KiloGroup, 0, 200)],
        "last, when what it holds is gone"
    );
    assert!(!rig.machine.tree.has_work());
}

#[test]
fn a_recovery_in_the_middle_of_a_rebalance_forgets_it() {
    let mut rig = rebalancing();
    let (late, _) = rig.take_put_group();
    rig.committed(300, 200);
    assert!(rig.asks_for(|effect| matches!(effect, Effect::Recovered { .. })));
    rig.send(Event::GroupPut {
        generation: late,
        outcome: Ok(50),
    });
    assert_eq!(rig.machine.status().manifest_entries, 0);
}

#[test]
fn bug_70_uploads_are_held_back_before_the_root_is_too_long() {
    let lengths = vec![20; rebalance::MAX_ROOT_ENTRIES - 6];
    let mut rig = Rig::confirmed_with(
        Settings {
            rebalance_threshold: 1_024,
            ..settings()
        },
        &root_of(0, &lengths),
    );
    let (group, _) = rig.take_put_group();
    let end = rig.machine.manifest.next_offset;
    rig.drain(end + 200, 0);
    rig.upload(1);
    rig.upload(2);
    rig.quiet();
    assert_eq!(
        rig.machine.status().manifest_entries,
        rebalance::MAX_ROOT_ENTRIES - 4
    );
    rig.send(Event::GroupPut {
        generation: group,
        outcome: Ok(3),
    });
    assert!(
        rig.asks_for(|effect| matches!(effect, Effect::Scan { .. })),
        "and go on as soon as it is short again"
    );
}

#[test]
fn bug_70_a_root_that_another_program_left_long_is_cut_down() {
    let mut rig = Rig::confirmed_with(
        Settings {
            rebalance_threshold: 1_024,
            ..settings()
        },
        &root_of(0, &[20; 12_000]),
    );
    let mut uid = 0;
    for _ in 0..40 {
        uid += 1;
        if rig.rebalances() {
            rig.put_group(Ok(uid));
        } else if rig.persists() {
            rig.persist_as(10_000 + uid);
        } else if rig.machine.poll_timeout().is_some() {
            rig.wait_until_due();
        }
    }
    assert_eq!(
        rig.machine.status().manifest_entries,
        12_000 / 1_024 + 12_000 % 1_024
    );
    assert!(rig.machine.persisted.encode().len() < rebalance::MAX_ROOT_BYTES);
}

#[test]
fn persist_is_not_starved_by_rebalances_that_follow_each_other() {
    let mut rig = Rig::confirmed_with(
        Settings {
            rebalance_threshold: 2,
            persist_threshold: 1,
            ..settings()
        },
        &root_of(0, &[20; 60]),
    );
    for round in 0..20 {
        rig.put_group(Ok(500 + round));
        assert!(rig.persists(), "its turn after each");
        rig.persist_as(1_000 + round);
    }
}

#[test]
fn a_log_that_lost_its_end_opens_the_groups_that_reach_past_it_and_keeps_what_is_in_front() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.committed(30, 25);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 25,
        local_next_offset: 40,
    });
    assert_eq!(
        rig.get_group(Ok(groups[0].clone())),
        group_object(Kind::KiloGroup, 0, 200)
    );
    rig.get_group(Err(transient()));
    assert_eq!(rig.machine.counters().remote_tier_ahead_recoveries, 0);
    rig.wait_until_due();
    assert_eq!(
        rig.get_group(Ok(groups[2].clone())),
        group_object(Kind::Group, 20, 102)
    );
    assert_eq!(rig.machine.counters().remote_tier_ahead_recoveries, 1);
    let root = rig.persist_as(100);
    let kept: Vec<_> = root
        .entries
        .iter()
        .map(|entry| (entry.kind, entry.first_offset))
        .collect();
    assert_eq!(kept, [(Kind::Group, 0), (Kind::Fragment, 20)]);
    assert_eq!((root.next_offset, root.total_size_bytes), (25, 30));
    rig.quiet_of_deletes();
}

fn gone() -> Failure {
    Failure::NotFound("404 NoSuchKey".to_owned())
}

/// A log that lost its end inside a group, which is asked for.
fn lost_inside_a_group() -> Rig {
    let (root, _) = grown();
    let mut rig = Rig::confirmed(&root);
    rig.committed(30, 25);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 25,
        local_next_offset: 40,
    });
    rig
}

impl Rig {
    fn was_given_up(&self) -> bool {
        let is_empty_root = |effect: &Effect| match effect {
            Effect::Publish { root, .. } | Effect::PutRoot { root, .. } => root.is_empty(),
            Effect::Abandoned { .. } => true,
            _ => false,
        };
        self.effects.iter().any(is_empty_root)
            || self.machine.counters().remote_tier_ahead_recoveries > 0
    }

    /// Answers the group's request, over and over, until there is as much proof as is wanted: less one answer.
    fn almost_prove(&mut self, failure: &Failure) {
        let Proof { answers, over_ms } = settings().proof;
        let begun = self.now;
        for _ in 1..answers {
            self.get_group(Err(failure.clone()));
            self.wait_until_due();
        }
        while self.now - begun < over_ms {
            self.get_group(Err(failure.clone()));
            self.wait_until_due();
        }
        assert!(!self.was_given_up());
        assert_eq!(self.problem_now(), Some("group"));
    }
}

#[test]
fn review_f1_one_answer_of_another_kind_after_an_outage_gives_no_history_up() {
    for failure in [gone(), Failure::Corrupt("no group".to_owned())] {
        let mut rig = lost_inside_a_group();
        for _ in 0..8 {
            rig.get_group(Err(transient()));
            rig.wait_until_due();
        }
        rig.get_group(Err(failure.clone()));
        assert!(!rig.was_given_up(), "{:?}", rig.effects);
        assert_eq!(rig.problem_now(), Some("group"));
        rig.wait_until_due();
        // Nor many of them in a short time.
        for _ in 0..30 {
            rig.get_group(Err(failure.clone()));
            assert!(!rig.was_given_up(), "{:?}", rig.effects);
            rig.wait_until_due();
        }
        // It comes back after all.
        let (_, groups) = grown();
        rig.get_group(Ok(groups[0].clone()));
        rig.get_group(Ok(groups[2].clone()));
        assert_eq!(rig.persist_as(100).next_offset, 25);
        assert_eq!(rig.problem_now(), None);
    }
}

#[test]
fn an_outage_of_any_length_is_no_evidence_and_takes_back_what_there_was() {
    for passing in [
        transient(),
        forbidden(),
        Failure::Archived("archived".to_owned()),
    ] {
        let mut rig = lost_inside_a_group();
        for _ in 0..500 {
            rig.get_group(Err(passing.clone()));
            rig.wait_until_due();
        }
        rig.almost_prove(&gone());
        rig.get_group(Err(passing.clone()));
        rig.wait_until_due();
        rig.almost_prove(&gone());
        assert!(rig.now > 2 * settings().proof.over_ms);
    }
}

#[test]
fn history_that_is_proven_to_be_lost_is_given_up_and_its_root_stays_named() {
    let mut rig = lost_inside_a_group();
    rig.almost_prove(&gone());
    rig.effects
        .retain(|effect| matches!(effect, Effect::GetGroup { .. }));
    rig.get_group(Err(gone()));
    let (root, first_offset, next_offset) = rig.take(|effect| match *effect {
        Effect::Abandoned {
            root,
            first_offset,
            next_offset,
        } => Some((root, first_offset, next_offset)),
        _ => None,
    });
    assert_eq!((first_offset, next_offset), (0, 25));
    assert_eq!(root, root_object(70), "what the pointer names");
    assert_eq!(rig.problem_now(), None);
    assert_eq!(*rig.persist_as(100), Root::empty_at(25));
    rig.effects
        .retain(|effect| matches!(effect, Effect::Scan { .. } | Effect::Delete { .. }));
    rig.quiet_of_deletes();
    // Each persist deletes the root before the last one, but not this one.
    let mut deleted = Vec::new();
    for persist in 0..3 {
        rig.drain(25 + 40 * (persist + 1), 25);
        while rig.asks_for(|effect| matches!(effect, Effect::Transfer { .. })) {
            let (generation, transfer) = rig.take(|effect| match effect {
                Effect::Transfer {
                    generation,
                    transfer,
                    ..
                } => Some((*generation, *transfer)),
                _ => None,
            });
            rig.transfer_done((generation, transfer), Ok(5));
        }
        while !rig.persists() {
            rig.wait_until_due();
        }
        rig.persist_as(101 + persist as u32);
        while rig.asks_for(|effect| matches!(effect, Effect::Delete { .. })) {
            deleted.extend(rig.take_deleted());
        }
    }
    assert_eq!(deleted, [root_object(100), root_object(101)]);
    assert_eq!(rig.machine.counters().histories_abandoned, 1);
}

#[test]
fn what_an_earlier_recovery_has_condemned_is_pardoned_by_one_that_keeps_it() {
    let (root, groups) = grown();
    let mut rig = Rig::confirmed(&root);
    // The user's retention is ahead; nothing is persisted yet.
    rig.committed(100, 80);
    assert!(rig.asks_for(|effect| matches!(effect, Effect::Recovered { .. })));
    rig.effects
        .retain(|effect| matches!(effect, Effect::Scan { .. }));
    // And now the log has less than it has just reported.
    rig.committed(30, 25);
    rig.machine.request_reset(Recovery::RemoteTierAhead, 25);
    rig.send(Event::Tick);
    while rig.machine.counters().remote_tier_ahead_recoveries == 0 {
        match rig.asks_for(|effect| matches!(effect, Effect::GetGroup { .. })) {
            true => {
                let (generation, object) = rig.take_get_group();
                let group = match object {
                    StoredObject::Group { uid: 200, .. } => groups[0].clone(),
                    _ => groups[2].clone(),
                };
                rig.send(Event::GroupRead {
                    generation,
                    outcome: Ok(group),
                });
            }
            false => drop(rig.wait_until_due()),
        }
    }
    rig.persist_as(100);
    assert!(
        !rig.machine.tree.has_work(),
        "nothing is to be cleared away"
    );
}

#[test]
fn what_was_dropped_in_memory_only_and_is_back_after_a_recovery_is_not_deleted() {
    let mut rig = Rig::confirmed(&root_of(0, &[20, 20]));
    rig.send(bytes(15));
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
    rig.send(Event::RetentionChanged(RetentionBound::default()));
    rig.committed(30, 25);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 25,
        local_next_offset: 39,
    });
    let root = rig.persist_as(100);
    assert_eq!((root.first_offset, root.next_offset), (0, 25));
    rig.quiet_of_deletes();
}
