//! Scanning and cutting.

use super::*;

fn failed() -> ScanEnd {
    ScanEnd::Failed {
        reason: "unreadable".to_owned(),
    }
}

#[test]
fn an_empty_stream_starts_at_the_local_floor() {
    let mut rig = Rig::fresh();
    rig.send(Event::Committed {
        committed_chunk_id: None,
        local_first_chunk_id: None,
    });
    rig.quiet();
    rig.committed(70, 50);
    assert_eq!(rig.take_scan().1, 50);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
}

#[test]
fn a_floor_that_moves_before_anything_is_read_is_no_recovery() {
    let mut rig = Rig::fresh();
    rig.committed(70, 50);
    rig.end_scan(ScanEnd::LocalAhead {
        local_first_offset: 60,
    });
    assert_eq!(rig.take_scan().1, 60);
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
}

#[test]
fn cuts_at_the_size_target_and_leaves_the_rest_in_the_making() {
    let mut rig = Rig::fresh();
    rig.drain(40, 0);
    let status = rig.machine.status();
    assert_eq!(
        (status.assembly_first_offset, status.assembly_next_offset),
        (Some(40), Some(50))
    );
    assert_eq!(
        (status.assembly_chunks, status.assembly_payload_bytes),
        (1, 100)
    );
    assert_eq!(status.log_next_offset, 50);
    assert_eq!(status.transfers_waiting, 2, "held for the anchor");
    assert_eq!(rig.machine.counters().chunks_scanned, 5);
}

#[test]
fn cuts_at_the_chunk_limit() {
    let mut rig = Rig::fresh_with(Settings {
        fragment_max_chunks: 1,
        ..settings()
    });
    rig.drain(10, 0);
    rig.write_anchor();
    assert_eq!(rig.take_transfer().2.chunk_count, 1);
    assert_eq!(rig.take_transfer().2.chunk_count, 1);
}

#[test]
fn cuts_before_a_position_would_not_fit_32_bits() {
    let mut rig = Rig::fresh_with(Settings {
        fragment_size_bytes: u64::MAX,
        ..settings()
    });
    rig.committed(10, 0);
    let (generation, ..) = rig.take_scan();
    let mut chunks = vec![chunk(0), chunk(10)];
    chunks[0].header.data_bytes = u32::MAX - 100;
    rig.send(Event::Scanned {
        generation,
        batch: ScanBatch {
            chunks,
            end: ScanEnd::CaughtUp,
        },
    });
    assert_eq!(rig.machine.status().assembly_first_offset, Some(10));
}

#[test]
fn bug_109_a_slow_stream_is_cut_by_age_since_arrival() {
    let mut rig = Rig::fresh_with(Settings {
        fragment_max_age_ms: 5_000,
        ..settings()
    });
    rig.now = 100;
    rig.drain(0, 0);
    rig.quiet();
    assert_eq!(rig.machine.poll_timeout(), Some(5_100));
    rig.wait(4_999);
    rig.quiet();
    rig.wait(1);
    assert_eq!(rig.machine.counters().age_cuts, 1);
    rig.write_anchor();
    assert_eq!(rig.take_transfer().2.next_offset, 10);
}

#[test]
fn without_an_age_limit_nothing_is_cut_by_time() {
    let mut rig = Rig::fresh();
    rig.drain(0, 0);
    assert_eq!(rig.machine.poll_timeout(), None);
}

#[test]
fn a_requested_cut_takes_all_that_is_committed() {
    let mut rig = Rig::fresh();
    rig.committed(0, 0);
    rig.send(Event::CutRequested);
    rig.scan();
    rig.write_anchor();
    assert_eq!(rig.take_transfer().2.next_offset, 10);
    rig.send(Event::CutRequested);
    rig.quiet();
}

#[test]
fn scanning_waits_while_the_queue_is_full_and_goes_on_when_it_is_not() {
    let mut rig = Rig::fresh();
    rig.drain(1_000, 0);
    rig.write_anchor();
    let transfers: Vec<_> = (0..4).map(|_| rig.take_transfer()).collect();
    rig.quiet();
    assert_eq!(rig.machine.status().transfers_in_flight, 4);
    let (generation, reference, _) = transfers[0].clone();
    rig.transfer_done((generation, reference), Ok(1));
    let (_, from, up_to, max_chunks, max_bytes) = rig.take_scan();
    assert_eq!((from, up_to), (80, 1_000));
    assert!(
        max_bytes <= 200 && max_chunks <= 100,
        "one fragment's worth"
    );
}

/// Found by the simulator (seed 40018): limits of size and of chunks, each kept by itself, made more fragments than allowed.
#[test]
fn a_scan_that_makes_more_fragments_than_there_is_room_for_is_taken_up_to_there() {
    let mut rig = Rig::fresh();
    rig.committed(190, 0);
    let (generation, ..) = rig.take_scan();
    let chunks = (0..20).map(|number| chunk(number * RECORDS)).collect();
    let end = ScanEnd::CaughtUp;
    rig.send(Event::Scanned {
        generation,
        batch: ScanBatch { chunks, end },
    });
    let status = rig.machine.status();
    assert_eq!(status.transfers_waiting, 4);
    assert_eq!(status.log_next_offset, 191);
    rig.write_anchor();
    let (generation, reference, _) = rig.take_transfer();
    rig.transfer_done((generation, reference), Ok(1));
    assert!(
        rig.effects.iter().any(|effect| matches!(
            effect,
            Effect::Scan {
                from_offset: 80,
                ..
            }
        )),
        "goes on where it stopped"
    );
}

#[test]
fn a_hole_in_a_batch_is_never_skipped() {
    let mut rig = Rig::fresh();
    rig.committed(50, 0);
    let (generation, ..) = rig.take_scan();
    let chunks = vec![chunk(0), chunk(20)];
    rig.send(Event::Scanned {
        generation,
        batch: ScanBatch {
            chunks,
            end: ScanEnd::CaughtUp,
        },
    });
    assert_eq!(rig.machine.status().assembly_next_offset, Some(10));
    rig.wait_until_due();
    assert_eq!(
        rig.take_scan().1,
        10,
        "what was right is kept, the rest looked at again"
    );
}

#[test]
fn uncommitted_chunks_are_refused() {
    let mut rig = Rig::fresh();
    rig.committed(0, 0);
    let (generation, ..) = rig.take_scan();
    let chunks = vec![chunk(0), chunk(10)];
    rig.send(Event::Scanned {
        generation,
        batch: ScanBatch {
            chunks,
            end: ScanEnd::CaughtUp,
        },
    });
    assert_eq!(rig.machine.status().assembly_next_offset, Some(10));
}

#[test]
fn a_failing_scan_is_retried_with_back_off_and_told_from_the_second_time() {
    let mut rig = Rig::fresh();
    rig.committed(50, 0);
    rig.end_scan(failed());
    rig.quiet();
    rig.wait_until_due();
    rig.end_scan(failed());
    assert_eq!(rig.problem(), Some("scan"));
    for _ in 0..20 {
        rig.wait_until_due();
        rig.end_scan(failed());
        rig.quiet();
    }
    rig.wait_until_due();
    rig.scan();
    assert!(rig.effects.contains(&Effect::Problem { problem: None }));
    assert_eq!(rig.machine.status().problem, None);
}

#[test]
fn an_empty_log_waits_and_is_never_a_reason_to_give_up() {
    let mut rig = Rig::resumed(&root_of(0, &[20]));
    rig.committed(50, 0);
    for _ in 0..50 {
        rig.end_scan(ScanEnd::Empty);
        rig.quiet();
        rig.wait_until_due();
    }
    rig.scan();
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
}

#[test]
fn a_scan_that_claims_success_without_progress_does_not_spin() {
    let mut rig = Rig::fresh();
    rig.committed(50, 0);
    rig.end_scan(ScanEnd::CaughtUp);
    rig.quiet();
    rig.wait_until_due();
    rig.end_scan(ScanEnd::More);
    assert_eq!(rig.problem(), Some("scan"));
    rig.quiet();
}

#[test]
fn a_lost_scan_is_repeated_and_its_late_answer_ignored() {
    let mut rig = Rig::fresh();
    rig.committed(10, 0);
    let (lost, ..) = rig.take_scan();
    rig.wait(60_000);
    rig.wait_until_due();
    rig.scan();
    let before = rig.machine.status();
    rig.send(Event::Scanned {
        generation: lost,
        batch: scan_of(0, 10, 9, 999),
    });
    assert_eq!(rig.machine.status(), before);
}

#[test]
fn limits_of_nothing_do_not_stall_the_machine() {
    let nothing = Backoff {
        base_ms: 0,
        cap_ms: 0,
    };
    let retry = RetryPolicy {
        transient: nothing,
        stalled: nothing,
        control: nothing,
        recovery: nothing,
    };
    let settings = Settings {
        fragment_size_bytes: 0,
        fragment_max_chunks: 0,
        fragment_max_age_ms: 0,
        persist_threshold: 0,
        persist_interval_ms: 0,
        rebalance_threshold: 0,
        max_in_flight_transfers: 0,
        max_waiting_index_bytes: 0,
        transfer_deadline_ms: 0,
        answer_deadline_ms: 0,
        scan_max_chunks: 0,
        retry,
        proof: Proof::default(),
    };
    let mut rig = Rig::fresh_with(settings);
    rig.drain(0, 0);
    rig.write_anchor();
    rig.upload(1);
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
}
