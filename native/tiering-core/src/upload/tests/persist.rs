//! Root, then pointer; and everything that can be unknown in between.

use super::*;

#[test]
fn nothing_is_published_or_deleted_before_the_pointer_is_committed() {
    let mut rig = Rig::with_two_fragments();
    let root = rig.put_root(Ok(100));
    assert_eq!(root.next_offset, 40);
    assert_eq!(rig.machine.status().persisted_next_offset, 0);
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published(), (root, 1));
    rig.quiet();
    let status = rig.machine.status();
    assert_eq!((status.persisted_next_offset, status.revision), (40, 1));
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn one_edit_is_persisted_after_the_interval() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    rig.upload(1);
    rig.quiet();
    rig.wait(1_999);
    rig.quiet();
    rig.wait(1);
    assert_eq!(rig.put_root(Ok(100)).next_offset, 20);
}

#[test]
fn edits_that_arrive_during_a_persist_stay_and_are_persisted_next() {
    let mut rig = Rig::with_two_fragments();
    rig.drain(50, 0);
    let Effect::PutRoot {
        generation, root, ..
    } = rig.next()
    else {
        panic!()
    };
    rig.upload(3);
    rig.send(Event::RootPut {
        generation,
        outcome: Ok(100),
    });
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(
        rig.published(),
        (root, 1),
        "the snapshot, not what memory has by now"
    );
    assert_eq!(rig.machine.status().edits_since_persist, 1);
    rig.wait_until_due();
    assert_eq!(
        rig.now, 2_000,
        "counted from the edit, not from the end of the persist"
    );
    assert_eq!(rig.put_root(Ok(101)).next_offset, 60);
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published().1, 2);
    rig.quiet();
}

#[test]
fn a_replaced_root_stays_for_one_more_persist_so_that_who_was_told_of_it_can_fetch_it() {
    let mut rig = Rig::persisted();
    let mut deleted = Vec::new();
    for revision in 1..4_u32 {
        rig.drain(u64::from(30 + 20 * revision), 0);
        rig.upload(2 + revision);
        rig.wait_until_due();
        rig.put_root(Ok(100 + revision));
        rig.commit(
            (100 + revision, u64::from(revision)),
            CommitOutcome::Committed {
                revision: u64::from(revision) + 1,
            },
        );
        assert_eq!(rig.published().1, u64::from(revision) + 1);
        if revision > 1 {
            deleted.extend(rig.deleted());
        }
        rig.quiet();
    }
    assert_eq!(deleted, [root_object(100), root_object(101)]);
    // What another one has persisted meanwhile has a root of its own; ours goes when it is nobody's any more.
    rig.drain(110, 0);
    rig.upload(8);
    rig.wait_until_due();
    rig.put_root(Ok(104));
    rig.commit((104, 4), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 5)));
    rig.answer_root(Ok(root_of(0, &[20; 6])));
    rig.published();
    rig.effects.clear();
    assert_eq!(rig.machine.persist.replaced, Some(root_object(102)));
}

#[test]
fn only_one_persist_is_under_way() {
    let mut rig = Rig::with_two_fragments();
    rig.drain(110, 0);
    let Effect::PutRoot { .. } = rig.next() else {
        panic!()
    };
    for uid in 3..6 {
        rig.upload(uid);
    }
    rig.wait(5_000);
    assert!(
        !rig.effects
            .iter()
            .any(|effect| matches!(effect, Effect::PutRoot { .. }))
    );
}

#[test]
fn the_live_root_is_not_deleted_when_chance_gives_the_same_key_again() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(100));
    rig.commit((100, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published().1, 2);
    rig.quiet();
}

#[test]
fn a_root_that_cannot_be_written_is_tried_again_with_all_edits() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Err(transient()));
    rig.quiet();
    rig.wait_until_due();
    rig.put_root(Err(forbidden()));
    assert_eq!(
        rig.problem(),
        Some("persist"),
        "told after the first that will not pass"
    );
    for _ in 0..20 {
        rig.wait_until_due();
        rig.put_root(Err(forbidden()));
        rig.quiet();
    }
    rig.wait_until_due();
    assert_eq!(rig.put_root(Ok(100)).entries.len(), 2);
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
    assert_eq!(rig.problem(), None);
    assert_eq!(rig.machine.counters().persists_failed, 22);
}

#[test]
fn a_lost_root_upload_is_repeated_and_its_late_answer_is_not_taken_for_the_new_root() {
    let mut rig = Rig::with_two_fragments();
    let Effect::PutRoot {
        generation: lost, ..
    } = rig.next()
    else {
        panic!()
    };
    rig.drain(50, 0);
    rig.upload(3);
    rig.wait(180_000);
    assert_eq!(rig.problem(), Some("persist"));
    rig.wait_until_due();
    assert!(matches!(&rig.effects[0], Effect::PutRoot { root, .. } if root.next_offset == 60));
    // This key names the root without the third fragment: committing it and believing the third durable would lose it.
    rig.send(Event::RootPut {
        generation: lost,
        outcome: Ok(100),
    });
    assert_eq!(rig.effects.len(), 1);
    rig.put_root(Ok(101));
    rig.commit((101, 0), CommitOutcome::Committed { revision: 1 });
}

#[test]
fn conflict_drops_memory_and_goes_on_from_what_is_persisted() {
    let mut rig = Rig::persisted();
    rig.drain(80, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Conflict);
    rig.cancelled();
    assert_eq!(rig.machine.status().activity, Activity::Resolving);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 2)));
    rig.answer_root(Ok(root_of(0, &[20, 20, 20])));
    assert_eq!(rig.published().1, 2);
    let (_, from, ..) = rig.take_scan();
    assert_eq!(from, 60, "what the other persisted is not uploaded again");
    assert_eq!(rig.machine.counters().persist_conflicts, 1);
}

#[test]
fn results_from_before_a_conflict_are_dropped() {
    let mut rig = Rig::persisted();
    rig.drain(100, 0);
    rig.upload(3);
    rig.upload(4);
    let (generation, late, _) = rig.take_transfer();
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 100, 2)));
    rig.answer_root(Ok(root_of(0, &[20, 20])));
    rig.transfer_done((generation, late), Ok(5));
    assert_eq!(rig.machine.status().manifest_next_offset, 40);
}

#[test]
fn what_a_lost_race_left_behind_is_deleted_after_the_next_persist_and_not_before() {
    let mut rig = Rig::persisted();
    rig.drain(80, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Conflict);
    rig.cancelled();
    let mut root = root_of(0, &[20, 20, 20]);
    root.entries[2].uid = 3;
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 2)));
    rig.answer_root(Ok(root));
    rig.published();
    rig.scan();
    rig.upload(6);
    rig.quiet();
    rig.wait(2_000);
    rig.put_root(Ok(102));
    rig.commit((102, 2), CommitOutcome::Committed { revision: 3 });
    rig.published();
    let deleted = rig.deleted();
    assert_eq!(
        deleted,
        [fragment(60, 4), root_object(101)],
        "3 turned out to be persisted"
    );
}

#[test]
fn a_metadata_store_that_keeps_conflicting_is_not_asked_in_a_loop() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    let start = rig.now;
    for _ in 0..10 {
        rig.upload(3);
        rig.upload(4);
        rig.put_root(Ok(101));
        rig.commit((101, 1), CommitOutcome::Conflict);
        rig.cancelled();
        if rig.effects.is_empty() {
            rig.wait_until_due();
        }
        rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 100, 1)));
        rig.answer_root(Ok(root_of(0, &[20, 20])));
        rig.published();
        rig.scan();
    }
    assert!(rig.now - start > 10_000);
}

#[test]
fn bug_65_a_deposed_writer_stops_at_the_conflict() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH + 1, 9, 1)));
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Stop {
            reason: StopReason::Deposed
        }
    );
    rig.quiet();
}

#[test]
fn a_deleted_stream_is_not_brought_back() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::NotFound);
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Stop {
            reason: StopReason::Deleted
        }
    );
    rig.quiet();
}

#[test]
fn not_found_before_the_first_persist_resolves_again() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::NotFound);
    rig.cancelled();
    rig.answer_pointer(PointerRead::NotFound);
    assert_eq!(rig.published().1, 0);
    assert_eq!(rig.take_scan().1, 0);
}

#[test]
fn a_pointer_that_vanishes_between_conflict_and_resolve_means_deleted() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::NotFound);
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Stop {
            reason: StopReason::Deleted
        }
    );
}

#[test]
fn an_unknown_outcome_that_was_a_commit_is_recognised() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 100, 1)));
    assert_eq!(rig.published().1, 1);
    rig.quiet();
    assert_eq!(rig.machine.counters().persist_conflicts, 0);
}

#[test]
fn an_unknown_outcome_that_was_none_is_committed_again() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::NotFound);
    rig.quiet();
    rig.wait_until_due();
    rig.commit((100, 0), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::Unavailable);
    rig.wait_until_due();
    rig.answer_pointer(PointerRead::NotFound);
    assert_eq!(rig.problem(), Some("metadata"));
    rig.wait_until_due();
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
    assert_eq!(rig.problem(), None);
}

#[test]
fn an_unknown_commit_that_lands_after_the_look_is_recognised_at_the_conflict() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::NotFound);
    rig.wait_until_due();
    rig.commit((100, 0), CommitOutcome::Conflict);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 100, 1)));
    assert_eq!(rig.published().1, 1);
    assert_eq!(rig.machine.counters().persist_conflicts, 0);
}

#[test]
fn an_unknown_outcome_that_another_won_is_a_conflict() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 1)));
    rig.cancelled();
    assert_eq!(rig.machine.counters().persist_conflicts, 1);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 55, 1)));
}

#[test]
fn an_old_answer_of_the_metadata_store_does_not_undo_a_commit() {
    let mut rig = Rig::resumed(&root_of(0, &[20]));
    rig.drain(50, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 7), CommitOutcome::Unknown);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 60, 6)));
    rig.quiet();
    rig.wait_until_due();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 101, 8)));
    assert_eq!(rig.published().1, 8);
}

#[test]
fn a_commit_that_says_an_old_revision_is_looked_into() {
    let mut rig = Rig::resumed(&root_of(0, &[20]));
    rig.drain(50, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 7), CommitOutcome::Committed { revision: 7 });
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 101, 8)));
    assert_eq!(rig.published().1, 8);
}

#[test]
fn a_lost_commit_answer_is_looked_into_and_its_late_answer_ignored() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    let Effect::CommitPointer {
        generation: lost, ..
    } = rig.next()
    else {
        panic!()
    };
    rig.wait(60_000);
    rig.answer_pointer(PointerRead::NotFound);
    rig.wait_until_due();
    rig.send(Event::PointerCommitted {
        generation: lost,
        outcome: CommitOutcome::Conflict,
    });
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
    rig.send(Event::PointerCommitted {
        generation: lost,
        outcome: CommitOutcome::Committed { revision: 1 },
    });
    rig.quiet();
}

#[test]
fn a_failed_persist_that_clears_its_flag_re_arms_an_idle_stream() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    rig.upload(1);
    rig.wait(2_000);
    rig.put_root(Err(transient()));
    assert!(rig.machine.poll_timeout().is_some());
    rig.wait_until_due();
    rig.put_root(Ok(100));
}

/// A race is lost, and what is uploaded afterwards gets by chance the keys of what was uploaded before: 32 random bits collide.
#[test]
fn what_a_lost_race_left_is_not_deleted_if_the_manifest_names_the_same_key_by_now() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Conflict);
    rig.cancelled();
    // Another writer of this epoch has persisted nothing but its existence.
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 1)));
    rig.answer_root(Ok(Root::empty_at(0)));
    assert_eq!(rig.published().1, 1);
    rig.drain(30, 0);
    // The first has the key of its predecessor, the second has not.
    rig.upload(1);
    rig.upload(9);
    let root = rig.put_root(Ok(101));
    assert_eq!(
        root.entries
            .iter()
            .map(|entry| entry.uid)
            .collect::<Vec<_>>(),
        [1, 9]
    );
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published().1, 2);
    assert_eq!(rig.deleted(), [fragment(20, 2), root_object(100)]);
    rig.quiet();
}

/// The same of roots: the one that the lost race left has the key of the one that is live by now.
#[test]
fn a_root_of_a_lost_race_is_not_deleted_if_the_pointer_names_the_same_key_by_now() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 100, 1)));
    rig.answer_root(Ok(Root::empty_at(0)));
    assert_eq!(rig.published().1, 1);
    rig.drain(30, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published().1, 2);
    // Kept for one more persist, as every root that was replaced.
    assert_eq!(rig.deleted(), [fragment(0, 1), fragment(20, 2)]);
    rig.quiet();
}

#[test]
fn what_is_not_durable_is_known_by_its_age_and_its_bytes_wherever_it_is() {
    const FRAGMENT_BYTES: u64 = 2 * CHUNK_BYTES;
    let mut rig = Rig::persisted();
    // The rig's chunks have their ids as timestamps.
    let pending = |rig: &Rig| {
        let status = rig.machine.status();
        let bytes = (status.transfer_bytes, status.persist_bytes);
        (status.oldest_pending_timestamp_ms, bytes)
    };
    assert_eq!(pending(&rig), (None, (0, 0)));
    rig.drain(40, 0);
    assert_eq!(pending(&rig), (Some(40), (0, 0)));
    rig.drain(50, 0);
    assert_eq!(pending(&rig), (Some(40), (FRAGMENT_BYTES, 0)));
    rig.upload(3);
    assert_eq!(pending(&rig), (Some(40), (0, FRAGMENT_BYTES)));
    rig.drain(60, 0);
    assert_eq!(pending(&rig).0, Some(40));
    rig.wait(2_000);
    rig.put_root(Ok(101));
    assert_eq!(
        pending(&rig).0,
        Some(40),
        "not before the pointer is committed"
    );
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(pending(&rig), (Some(60), (0, 0)));
}
