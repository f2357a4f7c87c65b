//! Faults of the field that the other files here have no test of: `bug_N` is row N of docs/INVARIANTS.md, `review_` a finding of
//! a review. And: every predicate of `promises` can fail.

use super::*;
use crate::manifest::invariants as manifest;

/// The world after a crash in the middle of uploads: what is up but in no manifest, and what never went up.
#[test]
fn bug_4_a_crash_in_mid_upload_leaves_no_hole() {
    let mut before = Rig::persisted();
    before.drain(90, 0);
    let transfers: Vec<_> = (0..3).map(|_| before.take_transfer()).collect();
    // The later two get through, the first does not; then the node dies.
    for (generation, transfer, _) in &transfers[1..] {
        before.transfer_done((*generation, *transfer), Ok(9));
    }
    assert_eq!(before.machine.status().manifest_next_offset, 40);

    let mut after = Rig::resumed(&root_of(0, &[20, 20]));
    after.drain(90, 0);
    let mut at = 40;
    for _ in 0..3 {
        let (_, _, plan) = after.take_transfer();
        assert_eq!(
            plan.first_offset, at,
            "from the persisted end, not from what is new"
        );
        at = plan.next_offset;
    }
    assert_eq!(at, 100);
}

#[test]
fn bug_20_what_is_persisted_before_a_gap_is_given_up_only_when_something_after_it_is_durable() {
    let mut rig = Rig::persisted();
    rig.committed(200, 200);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 1);
    for round in 0..20 {
        // Nothing after the gap gets through for a long time: what is before it is still published and not deleted.
        assert!(
            !rig.effects
                .iter()
                .any(|effect| matches!(effect, Effect::Publish { .. } | Effect::Delete { .. })),
            "round {round}"
        );
        assert_eq!(rig.machine.status().persisted_next_offset, 40);
        rig.wait(10_000);
    }
}

#[test]
fn bug_21_a_recovery_leaves_no_orphans_neither_named_ones_nor_ones_that_waited_for_their_turn() {
    let mut rig = Rig::persisted();
    rig.drain(90, 0);
    let (_, _, _) = rig.take_transfer();
    let (generation, second, plan) = rig.take_transfer();
    assert_eq!(plan.first_offset, 60);
    rig.transfer_done((generation, second), Ok(5));
    rig.effects.clear();
    rig.committed(200, 200);
    rig.drain(210, 200);
    let at = rig
        .effects
        .iter()
        .position(|effect| matches!(effect, Effect::Transfer { .. }));
    rig.effects.drain(..at.unwrap());
    rig.upload(6);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    rig.published();
    assert_eq!(
        rig.deleted(),
        [fragment(0, 1), fragment(20, 2), fragment(60, 5)]
    );
}

#[test]
fn bug_23_every_persist_that_moves_the_end_is_published_whatever_the_order_of_completions() {
    // Local retention follows what is published; a fragment that completed out of order must move it, too.
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    let first = rig.take_transfer();
    let second = rig.take_transfer();
    rig.transfer_done((second.0, second.1), Ok(4));
    rig.transfer_done((first.0, first.1), Ok(3));
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published().0.next_offset, 80);
}

#[test]
fn bug_39_what_does_not_continue_the_manifest_never_enters_it() {
    // A scan that repeats, skips or goes back is refused as a whole from there on; the machine looks again.
    for wrong in [0, 30, 60] {
        let mut rig = Rig::persisted();
        rig.committed(90, 0);
        let (generation, from, ..) = rig.take_scan();
        assert_eq!(from, 40);
        let chunks = vec![chunk(40), chunk(wrong)];
        let end = ScanEnd::CaughtUp;
        rig.send(Event::Scanned {
            generation,
            batch: ScanBatch { chunks, end },
        });
        assert_eq!(rig.machine.status().assembly_next_offset, Some(50));
        rig.wait_until_due();
        assert_eq!(rig.take_scan().1, 50, "after chunk {wrong}");
    }
}

#[test]
fn bug_39_a_hole_is_noticed_at_the_start_of_a_scan_and_right_after_a_cut_too() {
    for (chunks, good) in [(vec![60], 40), (vec![40, 50, 70], 60)] {
        let mut rig = Rig::persisted();
        rig.committed(90, 0);
        let (generation, ..) = rig.take_scan();
        let chunks = chunks.into_iter().map(chunk).collect();
        let end = ScanEnd::CaughtUp;
        rig.send(Event::Scanned {
            generation,
            batch: ScanBatch { chunks, end },
        });
        assert_eq!(rig.machine.status().assembly_first_offset, None);
        rig.effects.clear();
        rig.wait_until_due();
        assert_eq!(rig.take_scan().1, good);
    }
}

#[test]
fn bug_57_a_deleted_stream_sends_nothing_more_and_cancels_what_is_under_way() {
    // The first answer that says so is that of the compare-and-swap.
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    rig.published();
    rig.drain(90, 0);
    rig.upload(3);
    rig.upload(4);
    let in_flight = rig.take_transfer();
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::NotFound);
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Stop {
            reason: StopReason::Deleted
        }
    );
    rig.transfer_done((in_flight.0, in_flight.1), Ok(5));
    rig.committed(500, 0);
    rig.wait(1_000_000);
    rig.quiet();
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn bug_74_an_idle_stream_publishes_its_range_when_it_is_resolved() {
    let root = root_of(10, &[20, 20]);
    // `resumed` asserts that this is the first effect after the answer.
    let rig = Rig::resumed(&root);
    let status = rig.machine.status();
    assert_eq!(
        (
            status.manifest_first_offset,
            status.persisted_next_offset,
            status.revision
        ),
        (10, 50, 7)
    );
}

#[test]
fn bug_75_edits_are_persisted_in_the_order_in_which_they_were_made() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    let during = rig.put_root(Ok(101));
    // While the compare-and-swap is under way the manifest grows and shrinks.
    let commit = rig.next();
    rig.drain(110, 0);
    rig.upload(5);
    rig.take_transfer();
    rig.effects.insert(0, commit);
    rig.send(Event::RetentionChanged(RetentionBound {
        max_bytes: Some(3 * 2 * CHUNK_BYTES),
        max_age_ms: None,
    }));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published(), (Arc::clone(&during), 2));
    // What retention drops is still named by what was persisted.
    rig.quiet_of_deletes();
    let next = rig.put_root(Ok(102));
    assert!(
        manifest::prefix_monotonicity(&during, &next) && next.first_offset > during.first_offset
    );
    rig.commit((102, 2), CommitOutcome::Committed { revision: 3 });
    assert_eq!(rig.published().1, 3);
    assert_eq!(
        rig.deleted(),
        [fragment(0, 1), fragment(20, 2), root_object(100)]
    );
}

#[test]
fn bug_122_the_first_fragment_after_a_restart_knows_its_size_and_its_checksum() {
    let first = {
        let mut rig = Rig::fresh();
        rig.drain(30, 0);
        rig.write_anchor();
        rig.take_transfer();
        rig.take_transfer().2
    };
    let mut rig = Rig::resumed(&root_of(0, &[20]));
    rig.drain(30, 0);
    let again = rig.take_transfer().2;
    assert_eq!(again, first, "as if there had been no restart");
    assert_eq!(
        (again.size_bytes, again.chunk_count),
        (2 * CHUNK_BYTES, 2),
        "all chunks are counted, the last one too"
    );
    assert_eq!(
        again.spans.iter().map(|s| s.end - s.start).sum::<u64>(),
        again.size_bytes
    );
}

#[test]
fn review_a_task_that_dies_without_a_word_blocks_nothing_for_ever() {
    // Whatever is asked and never answered is given up at its deadline, and everything that waited for it goes on.
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    let mut asked = Vec::new();
    for _ in 0..40 {
        let effects = std::mem::take(&mut rig.effects);
        for effect in effects {
            // Roots are put, but nobody says so; and so on.
            asked.push(std::mem::discriminant(&effect));
        }
        rig.wait_until_due();
    }
    assert!(asked.len() > 5, "asked again and again");
    // The store and its tasks come back.
    loop {
        if let Some(at) = rig
            .effects
            .iter()
            .position(|effect| matches!(effect, Effect::PutRoot { .. }))
        {
            rig.effects.drain(..at);
            break;
        }
        rig.wait_until_due();
    }
    let root = rig.put_root(Ok(110));
    assert_eq!(root.next_offset, 80, "every edit is still there");
    rig.commit((110, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.machine.status().persisted_next_offset, 80);
}

#[test]
fn review_a_reference_that_nobody_knows_is_not_taken_for_the_oldest() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    let (generation, first, _) = rig.take_transfer();
    rig.take_transfer();
    for reference in [first.wrapping_sub(1), first + 2, 0, u64::MAX] {
        rig.transfer_done((generation, reference), Ok(77));
        rig.transfer_done((generation, reference), Err(forbidden()));
    }
    let status = rig.machine.status();
    assert_eq!(
        (status.manifest_next_offset, status.transfers_in_flight),
        (40, 2)
    );
    assert_eq!(status.stalled_offset, None);
}

#[test]
fn review_an_answer_to_an_earlier_question_is_not_taken_for_this_one() {
    // A late answer of a former session carries another number: nothing is confirmed by it.
    let mut rig = Rig::with_two_fragments();
    let Effect::PutRoot { generation, .. } = rig.next() else {
        panic!()
    };
    rig.send(Event::PointerCommitted {
        generation,
        outcome: CommitOutcome::Committed { revision: 1 },
    });
    assert_eq!(rig.machine.status().persisted_next_offset, 0);
    rig.quiet();
    rig.send(Event::RootPut {
        generation: generation + 1,
        outcome: Ok(1),
    });
    rig.quiet();
}

#[test]
fn an_old_answer_of_the_metadata_store_does_not_take_a_resolve_back() {
    let mut rig = Rig::persisted();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Conflict);
    rig.cancelled();
    let failures = rig.machine.counters().resolution_failures;
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 99, 0)));
    assert_eq!(rig.problem(), Some("metadata"));
    assert_eq!(rig.machine.counters().resolution_failures, failures + 1);
    assert_eq!(
        rig.machine.status().revision,
        1,
        "what was persisted stays so"
    );
    rig.wait_until_due();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 102, 2)));
    rig.answer_root(Ok(root_of(0, &[20, 20, 20])));
    assert_eq!(rig.problem(), None);
    assert_eq!(rig.published().1, 2);
}

#[test]
fn a_root_that_does_not_come_is_asked_for_again_and_told_from_the_second_time() {
    let mut rig = Rig::with(settings());
    for round in 0..20 {
        rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
        let outcome = match round % 2 {
            1 => Err(forbidden()),
            _ => Err(transient()),
        };
        rig.answer_root(outcome);
        match round {
            1 => assert_eq!(rig.problem(), Some("manifest")),
            // The texts take turns, and each is one line of a log if it counts as another problem.
            _ => rig.quiet(),
        }
        rig.wait_until_due();
    }
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    rig.answer_root(Ok(root_of(0, &[20])));
    assert_eq!(rig.published().1, 7);
    assert_eq!(rig.problem(), None);
}

#[test]
fn each_promise_can_fail() {
    let rig = Rig::persisted();
    let machine = &rig.machine;
    let broken = |effect: &Effect| promises::broken_by(machine, effect);
    assert_eq!(
        broken(&Effect::Delete {
            objects: vec![fragment(20, 2)]
        }),
        ["deletion_set"]
    );
    assert_eq!(
        broken(&Effect::Delete {
            objects: vec![root_object(100)]
        }),
        ["deletion_set"]
    );
    assert!(
        broken(&Effect::Delete {
            objects: vec![fragment(20, 3), root_object(101)]
        })
        .is_empty()
    );
    let root = Arc::new(Root::empty_at(40));
    assert_eq!(
        broken(&Effect::Publish {
            root: Arc::clone(&root),
            revision: 1,
            confirmed: false,
            pointer: None,
        }),
        ["durability"]
    );
    let commit = |epoch, expected_revision| Effect::CommitPointer {
        generation: 0,
        epoch,
        uid: 1,
        next_offset: 0,
        expected_revision,
    };
    assert!(broken(&commit(EPOCH, 1)).is_empty());
    assert_eq!(broken(&commit(EPOCH - 1, 1)), ["epoch_monotonicity"]);
    assert_eq!(broken(&commit(EPOCH, 0)), ["edit_ordering"]);

    let fresh = Rig::fresh();
    let put = Effect::PutRoot {
        generation: 0,
        epoch: EPOCH,
        follows: 0,
        root,
    };
    assert_eq!(
        promises::broken_by(&fresh.machine, &put),
        ["anchor_ordering"]
    );
    assert!(!promises::Mark::of(machine).still_holds(&fresh.machine));

    let mut deposed = Rig::with(settings());
    deposed.answer_pointer(PointerRead::Found(pointer(EPOCH + 1, 1, 1)));
    assert!(promises::broken_by(&deposed.machine, &put).contains(&"nothing_after_the_end"));
}
