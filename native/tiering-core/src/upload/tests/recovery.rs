//! When local log and manifest no longer meet.

use super::*;

fn lost() -> Failure {
    Failure::NotFound("segment".to_owned())
}

#[track_caller]
fn recovered(rig: &mut Rig, kind: Recovery, from_offset: u64, to_offset: u64) {
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Recovered {
            kind,
            from_offset,
            to_offset
        }
    );
}

#[test]
fn bug_15_a_trimmed_segment_does_not_stall_the_stream_for_ever() {
    let mut rig = Rig::persisted();
    rig.drain(50, 0);
    let (generation, reference, _) = rig.take_transfer();
    rig.committed(100, 80);
    // The transfer has its file open and may still make it; what follows is gone in any case.
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 80);
    assert_eq!(rig.take_scan().1, 80);
    rig.transfer_done((generation, reference), Ok(3));
    assert_eq!(rig.machine.status().manifest_next_offset, 80);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 1);
}

#[test]
fn a_floor_below_what_is_in_transfers_gives_them_a_chance() {
    let mut rig = Rig::persisted();
    rig.drain(50, 0);
    let (generation, reference, _) = rig.take_transfer();
    rig.committed(60, 60);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
    assert_eq!(rig.take_scan().1, 60);
    rig.transfer_done((generation, reference), Ok(3));
    assert_eq!(rig.machine.status().manifest_next_offset, 60);
}

#[test]
fn a_transfer_whose_segment_is_gone_is_given_up_only_by_a_recovery() {
    let mut rig = Rig::persisted();
    rig.drain(50, 0);
    let (generation, reference, _) = rig.take_transfer();
    rig.committed(60, 60);
    rig.transfer_done((generation, reference), Err(lost()));
    rig.take_scan();
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 60);
}

#[test]
fn a_floor_that_is_told_after_the_failure_counts_too() {
    let mut rig = Rig::persisted();
    rig.drain(50, 0);
    let (generation, reference, _) = rig.take_transfer();
    rig.transfer_done((generation, reference), Err(lost()));
    assert_eq!(rig.problem(), Some("transfer"));
    rig.committed(60, 60);
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 60);
    assert_eq!(rig.take_scan().1, 60);
    assert_eq!(rig.problem(), None);
}

#[test]
fn chunks_in_the_making_that_are_trimmed_are_noticed_before_they_are_cut() {
    let mut rig = Rig::persisted();
    rig.drain(40, 0);
    assert_eq!(rig.machine.status().assembly_first_offset, Some(40));
    rig.committed(40, 50);
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 50);
}

#[test]
fn the_scan_notices_what_the_atomics_have_not_told_yet() {
    let mut rig = Rig::persisted();
    rig.committed(90, 0);
    rig.end_scan(ScanEnd::LocalAhead {
        local_first_offset: 70,
    });
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 70);
    assert_eq!(rig.take_scan().1, 70);
}

#[test]
fn bug_22_the_old_manifest_stays_published_until_something_after_the_gap_is_durable() {
    let mut rig = Rig::persisted();
    rig.committed(80, 80);
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 80);
    rig.scan();
    rig.quiet();
    assert_eq!(rig.machine.status().persisted_next_offset, 40);
    assert_eq!(rig.machine.poll_timeout(), None, "nothing to persist yet");
    rig.drain(90, 80);
    rig.upload(3);
    let root = rig.put_root(Ok(101));
    assert_eq!(
        (root.first_offset, root.next_offset),
        (80, 100),
        "at once, without waiting for threshold or interval"
    );
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published(), (root, 2));
    // bug 21: nothing of the old manifest is left behind.
    assert_eq!(rig.deleted(), [fragment(0, 1), fragment(20, 2)]);
}

#[test]
fn bug_22_recoveries_that_follow_each_other_wait_longer_and_longer() {
    let mut rig = Rig::persisted();
    let mut floor = 100;
    let mut waited = Vec::new();
    for _ in 0..12 {
        rig.effects.clear();
        let before = rig.now;
        rig.committed(floor + 50, floor);
        while !rig
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Recovered { .. }))
        {
            rig.wait_until_due();
        }
        waited.push(rig.now - before);
        floor += 1_000;
    }
    assert_eq!(waited[0], 0);
    assert!(waited[1] >= 500 && waited[1] <= 1_000);
    assert!(waited[11] >= 30_000);
    rig.now += 1_000_000;
    rig.effects.clear();
    rig.committed(floor + 50, floor);
    assert_eq!(
        rig.machine.counters().local_log_ahead_recoveries,
        13,
        "a quiet time makes the next one quick again"
    );
}

#[test]
fn a_recovery_waits_for_the_persist_under_way_and_uses_the_floor_of_then() {
    let mut rig = Rig::with_two_fragments();
    let Effect::PutRoot { generation, .. } = rig.next() else {
        panic!()
    };
    rig.committed(200, 100);
    rig.quiet();
    rig.committed(200, 130);
    rig.send(Event::RootPut {
        generation,
        outcome: Ok(100),
    });
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 130);
    assert_eq!(rig.take_scan().1, 130);
    assert_eq!(
        rig.machine.status().revision,
        1,
        "the old revision: the next persist replaces it"
    );
}

#[test]
fn bug_89_a_log_that_lost_its_end_is_noticed_by_the_first_look_even_if_nothing_new_is_committed() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(20, 10);
    let (_, from, up_to, ..) = rig.take_scan();
    assert_eq!((from, up_to), (40, 20));
}

/// The part of `root_of(0, &[20, 20])` below 10, where the local log starts.
fn common_part() -> Root {
    let root = root_of(0, &[20, 20]);
    Root {
        next_offset: 10,
        total_size_bytes: root.entries[0].size_bytes.into(),
        entries: vec![root.entries[0]],
        ..root
    }
}

#[test]
fn bug_85_of_a_remote_timeline_that_is_no_more_only_what_the_local_log_has_is_given_up() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(20, 10);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 10,
        local_next_offset: 30,
    });
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 10);
    assert_eq!(
        rig.next(),
        Effect::Publish {
            root: Arc::new(common_part()),
            revision: 7,
            confirmed: true,
            pointer: None
        },
        "local retention must not trim by the old one, and no other node may use what the pointer names"
    );
    let root = rig.put_root(Ok(101));
    assert_eq!(*root, common_part());
    assert_eq!(rig.take_scan().1, 10);
    rig.commit((101, 7), CommitOutcome::Committed { revision: 8 });
    assert_eq!(rig.published(), (root, 8));
    // Acknowledged records that only the bucket has stay there.
    rig.quiet();
    let counters = rig.machine.counters();
    assert_eq!(
        (
            counters.remote_tier_ahead_recoveries,
            counters.local_log_ahead_recoveries
        ),
        (1, 0)
    );
}

#[test]
fn nothing_is_trimmed_before_the_local_log_has_shown_where_it_goes_on() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    let may_trim = |rig: &Rig| {
        rig.last_published
            .as_ref()
            .map(|(_, _, confirmed)| *confirmed)
    };
    assert_eq!(may_trim(&rig), Some(false));
    rig.committed(50, 30);
    assert_eq!(may_trim(&rig), Some(false));
    rig.scan();
    assert_eq!(may_trim(&rig), Some(true));
}

#[test]
fn the_first_scan_is_told_what_is_in_front_of_the_place_and_no_later_one() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(50, 10);
    assert_eq!(rig.front_timestamp_ms(), Some(39));
    // A scan that failed has shown nothing.
    rig.end_scan(ScanEnd::Failed {
        reason: "half a header".to_owned(),
    });
    rig.wait_until_due();
    assert_eq!(rig.front_timestamp_ms(), Some(39));
    rig.scan();
    rig.upload(3);
    rig.committed(60, 10);
    assert_eq!(rig.front_timestamp_ms(), None);
}

#[test]
fn nothing_is_compared_with_a_manifest_that_has_nothing() {
    let mut rig = Rig::resumed(&Root::empty_at(40));
    rig.committed(50, 10);
    assert_eq!(rig.front_timestamp_ms(), None);
    let mut rig = Rig::fresh();
    rig.committed(50, 10);
    assert_eq!(rig.front_timestamp_ms(), None);
}

#[test]
fn a_log_that_lost_its_end_and_has_grown_past_it_is_uploaded_again_from_its_first_offset() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(90, 10);
    rig.end_scan(ScanEnd::Diverged {
        local_first_offset: 10,
    });
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 10);
    assert_eq!(rig.published(), (Arc::new(common_part()), 7));
    assert_eq!(*rig.put_root(Ok(101)), common_part());
    assert_eq!(rig.front_timestamp_ms(), None, "its last fragment has more");
    assert_eq!(rig.take_scan().1, 10);
    rig.commit((101, 7), CommitOutcome::Committed { revision: 8 });
    rig.published();
    rig.quiet();
    assert_eq!(rig.machine.counters().remote_tier_ahead_recoveries, 1);
}

#[test]
fn a_log_that_has_met_the_manifest_is_not_given_up_because_of_a_damaged_file() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.drain(50, 10);
    rig.effects.clear();
    rig.committed(90, 10);
    for _ in 0..2 {
        rig.end_scan(ScanEnd::Diverged {
            local_first_offset: 10,
        });
        rig.wait_until_due();
    }
    let status = rig.machine.status();
    assert_eq!(status.manifest_next_offset, 40);
    assert_eq!(status.problem.map(|problem| problem.kind), Some("scan"));
    assert_eq!(rig.machine.counters().remote_tier_ahead_recoveries, 0);
}

/// Found by the model: the group was persisted and published as if the local log had been looked at.
#[test]
fn a_manifest_that_is_persisted_before_the_local_log_is_looked_at_is_not_trimmed_by() {
    let settings = Settings {
        rebalance_threshold: 2,
        ..settings()
    };
    let mut rig = Rig::resumed_with(settings, &root_of(0, &[20; 8]));
    let may_trim = |rig: &Rig| {
        rig.last_published
            .as_ref()
            .map(|(_, _, confirmed)| *confirmed)
    };
    let put = rig
        .effects
        .iter()
        .position(|effect| matches!(effect, Effect::PutGroup { .. }));
    let Effect::PutGroup { generation, .. } = rig.effects.remove(put.expect("a group")) else {
        panic!()
    };
    rig.send(Event::GroupPut {
        generation,
        outcome: Ok(90),
    });
    while !rig
        .effects
        .iter()
        .any(|effect| matches!(effect, Effect::PutRoot { .. }))
    {
        let again = rig
            .effects
            .iter()
            .position(|effect| matches!(effect, Effect::PutGroup { .. }));
        if let Some(Effect::PutGroup { generation, .. }) = again.map(|at| rig.effects.remove(at)) {
            rig.send(Event::GroupPut {
                generation,
                outcome: Ok(91),
            });
        } else {
            rig.wait_until_due();
        }
    }
    rig.put_root(Ok(101));
    rig.commit((101, 7), CommitOutcome::Committed { revision: 8 });
    let published = rig
        .last_published
        .as_ref()
        .map(|(_, revision, _)| *revision);
    assert_eq!((published, may_trim(&rig)), (Some(8), Some(false)));
    rig.effects.clear();
    rig.committed(200, 100);
    rig.scan();
    assert_eq!(may_trim(&rig), Some(true));
}

#[test]
fn a_log_that_lost_its_end_and_is_otherwise_all_there_is_uploaded_again_and_destroys_nothing() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(0, 0);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 0,
        local_next_offset: 1,
    });
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 0);
    assert_eq!(rig.published(), (Arc::new(Root::empty_at(0)), 7));
    rig.put_root(Ok(101));
    rig.take_scan();
    rig.commit((101, 7), CommitOutcome::Committed { revision: 8 });
    rig.published();
    rig.quiet();
}

/// A disk was lost and nobody said where the log should begin (the hooks were not there).
#[test]
fn a_log_that_began_anew_below_what_is_durable_stalls_and_what_is_durable_is_kept() {
    for (chunk_id, first_offset) in [(0, 0), (90, 0), (0, 5)] {
        let durable = root_of(first_offset, &[20, 20]);
        let mut rig = Rig::resumed(&durable);
        rig.committed(chunk_id, 0);
        for _ in 0..20 {
            rig.end_scan(ScanEnd::Unrelated {
                local_first_offset: 0,
            });
            assert_eq!(rig.problem_now(), Some("lost_log"));
            rig.effects
                .retain(|effect| !matches!(effect, Effect::Problem { .. }));
            rig.quiet();
            rig.wait_until_due();
        }
        let (published, _, confirmed) = rig.last_published.clone().expect("published");
        assert_eq!((*published).clone(), durable);
        assert!(!confirmed, "nothing is trimmed by it");
        let status = rig.machine.status();
        assert_eq!(
            (status.manifest_first_offset, status.persisted_next_offset),
            (first_offset, durable.next_offset)
        );
        assert_eq!(rig.machine.counters().remote_tier_ahead_recoveries, 0);
    }
}

#[test]
fn an_empty_log_under_something_durable_is_told_and_gives_nothing_up() {
    let durable = root_of(0, &[20, 20]);
    let mut rig = Rig::resumed(&durable);
    let empty = Event::Committed {
        committed_chunk_id: None,
        local_first_chunk_id: None,
    };
    assert_eq!(rig.problem_now(), None, "not seen yet");
    rig.send(empty.clone());
    assert_eq!(rig.problem_now(), Some("lost_log"));
    rig.quiet();
    // The stream was restarted: another machine, whose log begins where what is durable ends.
    let mut rig = Rig::resumed(&durable);
    rig.committed(40, 40);
    assert_eq!(rig.problem_now(), None);
    rig.scan();
    assert_eq!(rig.problem_now(), None);
    assert_eq!(
        rig.last_published.map(|(_, _, confirmed)| confirmed),
        Some(true)
    );
    // Nothing is durable: nothing is wrong with an empty log.
    let mut rig = Rig::fresh();
    rig.send(empty);
    assert_eq!(rig.problem_now(), None);
    // The writer waits for its replicas: it has a log.
    let mut rig = Rig::resumed(&durable);
    rig.send(Event::Committed {
        committed_chunk_id: None,
        local_first_chunk_id: Some(40),
    });
    assert_eq!(rig.problem_now(), None);
}

#[test]
fn the_scan_is_given_the_oldest_chunk_whose_time_the_root_knows() {
    let durable = root_of(0, &[20, 20]);
    let witness = |rig: &Rig| match rig.effects.first() {
        Some(Effect::Scan { witness, .. }) => *witness,
        other => panic!("no scan but {other:?}"),
    };
    let expected = |entry: usize| {
        durable.entries.get(entry).map(|entry| Witness {
            chunk_id: entry.first_offset,
            timestamp_ms: entry.first_timestamp_ms,
            epoch: EPOCH,
        })
    };
    let mut rig = Rig::resumed(&durable);
    rig.committed(20, 0);
    assert_eq!(witness(&rig), expected(0));
    let mut inside = durable.clone();
    inside.entries[0].kind = Kind::Group;
    inside.entries[0].size_bytes = 0;
    inside.first_offset = 10;
    let mut rig = Rig::resumed(&inside);
    rig.committed(20, 0);
    assert_eq!(witness(&rig), expected(1), "the group begins below");
}

#[test]
fn only_an_older_beginning_shows_that_a_log_was_there_before() {
    let witness = Witness {
        chunk_id: 20,
        timestamp_ms: 20,
        epoch: 5,
    };
    let first = |chunk_id, timestamp_ms, epoch| ChunkHeader {
        timestamp_ms,
        epoch,
        ..chunk(chunk_id).header
    };
    assert!(witness.is_related_to(&first(20, 20, 9)), "the same chunk");
    assert!(!witness.is_related_to(&first(20, 19, 1)), "another chunk");
    assert!(witness.is_related_to(&first(0, 20, 5)));
    assert!(!witness.is_related_to(&first(0, 21, 5)), "a younger one");
    assert!(!witness.is_related_to(&first(0, 3, 6)), "a later writer's");
}

/// What is left of such a manifest joins the local log, whatever that is.
#[test]
fn a_log_that_begins_above_the_beginning_of_what_is_durable_cuts_it_back_as_before() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(20, 10);
    rig.end_scan(ScanEnd::Unrelated {
        local_first_offset: 10,
    });
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 10);
}

#[test]
fn a_recovery_snapshot_without_edits_is_repeated_until_it_is_persisted() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(20, 10);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 10,
        local_next_offset: 30,
    });
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 10);
    rig.published();
    rig.put_root(Err(transient()));
    rig.take_scan();
    rig.wait_until_due();
    assert_eq!(*rig.put_root(Ok(101)), common_part());
}

#[test]
fn a_scan_that_contradicts_itself_gives_nothing_up() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(90, 10);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 10,
        local_next_offset: 40,
    });
    rig.wait_until_due();
    rig.end_scan(ScanEnd::LocalAhead {
        local_first_offset: 40,
    });
    assert_eq!(rig.problem(), Some("scan"));
    rig.wait_until_due();
    assert_eq!(rig.take_scan().1, 40);
}

#[test]
fn a_conflict_during_a_waiting_recovery_looks_again_before_giving_anything_up() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.committed(200, 100);
    rig.commit((100, 0), CommitOutcome::Conflict);
    rig.cancelled();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 9, 1)));
    rig.answer_root(Ok(root_of(0, &[20, 20, 40, 40])));
    rig.published();
    assert_eq!(
        rig.take_scan().1,
        120,
        "the other writer had it all: no gap"
    );
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
}

#[test]
fn no_scan_and_no_age_cut_while_a_recovery_waits() {
    let mut rig = Rig::fresh_with(Settings {
        fragment_max_age_ms: 10,
        ..settings()
    });
    rig.drain(30, 0);
    rig.write_anchor();
    rig.upload(1);
    rig.upload(2);
    rig.drain(40, 0);
    rig.committed(40, 50);
    rig.wait(1_000);
    let busy = rig
        .effects
        .iter()
        .all(|effect| matches!(effect, Effect::PutRoot { .. }));
    assert!(busy, "{:?}", rig.effects);
}

#[test]
fn a_local_log_that_moves_past_the_manifest_while_a_recovery_waits_leaves_no_hole() {
    let mut rig = Rig::with_two_fragments();
    let Effect::PutRoot { generation, .. } = rig.next() else {
        panic!()
    };
    rig.committed(50, 0);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 0,
        local_next_offset: 30,
    });
    // The recovery waits for the persist; meanwhile the log grows and is trimmed.
    rig.committed(200, 100);
    rig.send(Event::RootPut {
        generation,
        outcome: Ok(100),
    });
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    rig.published();
    recovered(&mut rig, Recovery::RemoteTierAhead, 40, 40);
    rig.published();
    rig.send(Event::Tick);
    // What was committed up to 100 is gone: that is another recovery, and it says so.
    assert_eq!(rig.machine.status().manifest_next_offset, 40);
    rig.put_root(Ok(101));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    while !rig
        .effects
        .iter()
        .any(|effect| matches!(effect, Effect::Recovered { .. }))
    {
        rig.wait_until_due();
    }
    assert_eq!(rig.machine.status().manifest_next_offset, 100);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 1);
}

/// Found by the simulator (seed 2649): the manifest, with what had just become durable, was given up for nothing.
#[test]
fn a_recovery_that_waits_is_called_off_when_the_lost_transfer_turns_out_to_have_arrived() {
    let mut rig = Rig::persisted();
    // One recovery, so that the next one waits.
    rig.committed(90, 80);
    recovered(&mut rig, Recovery::LocalLogAhead, 40, 80);
    rig.drain(100, 80);
    let (generation, reference, plan) = rig.take_transfer();
    rig.transfer_done((generation, reference), Err(lost()));
    rig.committed(plan.next_offset, plan.next_offset);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 1);
    // The answer of the try before, which had its file open in time.
    rig.transfer_done((generation, reference), Ok(7));
    let before = rig.machine.status().manifest_next_offset;
    assert_eq!(before, plan.next_offset);
    rig.wait(120_000);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 1);
    assert_eq!(rig.machine.status().manifest_next_offset, before);
    assert_eq!(rig.machine.status().manifest_first_offset, 80);
}
