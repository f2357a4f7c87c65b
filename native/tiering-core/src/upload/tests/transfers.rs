//! Anchor, order, retries, deadlines.

use super::*;

#[test]
fn no_object_before_the_anchor() {
    let mut rig = Rig::fresh();
    rig.drain(30, 0);
    let Effect::WriteAnchor { generation } = rig.next() else {
        panic!()
    };
    rig.quiet();
    assert_eq!(rig.machine.status().activity, Activity::Anchoring);
    rig.send(Event::AnchorWritten {
        generation,
        ok: false,
    });
    assert_eq!(rig.problem(), Some("anchor"));
    rig.wait_until_due();
    let Effect::WriteAnchor { generation: second } = rig.next() else {
        panic!()
    };
    rig.send(Event::AnchorWritten {
        generation,
        ok: true,
    });
    rig.quiet();
    rig.send(Event::AnchorWritten {
        generation: second,
        ok: true,
    });
    assert_eq!(rig.take_transfer().2.first_offset, 0);
    assert_eq!(rig.take_transfer().2.first_offset, 20);
    assert_eq!(rig.problem(), None);
    assert_eq!(rig.machine.counters().anchors_written, 1);
}

#[test]
fn a_lost_anchor_answer_is_asked_for_again() {
    let mut rig = Rig::fresh();
    rig.drain(30, 0);
    rig.next();
    rig.wait(60_000);
    assert_eq!(rig.problem(), Some("anchor"));
    rig.wait_until_due();
    rig.write_anchor();
    assert_eq!(rig.take_transfer().2.first_offset, 0);
}

#[test]
fn a_resumed_stream_has_its_anchor() {
    let mut rig = Rig::resumed(&root_of(0, &[20]));
    rig.drain(30, 0);
    assert_eq!(rig.take_transfer().2.first_offset, 20);
}

#[test]
fn bug_2_the_first_upload_to_finish_is_not_the_first_fragment() {
    let mut rig = Rig::fresh();
    rig.drain(50, 0);
    rig.write_anchor();
    let all: Vec<_> = (0..3).map(|_| rig.take_transfer()).collect();
    for late in [2, 1] {
        rig.transfer_done((all[late].0, all[late].1), Ok(late as u32));
        assert_eq!(rig.machine.status().manifest_next_offset, 0);
    }
    rig.transfer_done((all[0].0, all[0].1), Ok(0));
    assert_eq!(rig.machine.status().manifest_next_offset, 60);
    let uids: Vec<u32> = rig
        .put_root(Ok(9))
        .entries
        .iter()
        .map(|entry| entry.uid)
        .collect();
    assert_eq!(uids, [0, 1, 2]);
}

#[test]
fn bug_14_a_fragment_that_fails_is_never_given_up_nor_overtaken() {
    let mut rig = Rig::fresh();
    rig.drain(30, 0);
    rig.write_anchor();
    let (generation, first, plan) = rig.take_transfer();
    rig.upload(2);
    for round in 0..200 {
        rig.transfer_done((generation, first), Err(forbidden()));
        if round == 0 {
            assert_eq!(rig.problem(), Some("transfer"), "said once");
        }
        rig.quiet();
        assert_eq!(rig.machine.status().stalled_offset, Some(0));
        assert_eq!(rig.machine.status().manifest_next_offset, 0);
        let before = rig.now;
        rig.wait_until_due();
        assert!((500..=30_000).contains(&(rig.now - before)));
        assert_eq!(
            rig.take_transfer(),
            (generation, first, Arc::clone(&plan)),
            "the same fragment, the same reference"
        );
    }
    rig.transfer_done((generation, first), Ok(1));
    assert_eq!(rig.machine.status().manifest_next_offset, 40);
    assert_eq!(rig.machine.status().stalled_offset, None);
    assert_eq!(rig.machine.counters().stalled_retries, 200);
    assert!(rig.effects.contains(&Effect::Problem { problem: None }));
}

#[test]
fn bug_58_passing_failures_are_retried_at_once_then_with_growing_waits() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    let (generation, first, _) = rig.take_transfer();
    rig.transfer_done((generation, first), Err(transient()));
    rig.take_transfer();
    let mut longest = 10;
    for round in 2..40 {
        rig.transfer_done((generation, first), Err(transient()));
        if round == 6 {
            assert_eq!(rig.problem(), Some("transfer"), "an outage is told");
        }
        rig.quiet();
        let before = rig.now;
        rig.wait_until_due();
        assert!((longest / 2..=longest).contains(&(rig.now - before)));
        longest = (longest * 2).min(5_000);
        rig.take_transfer();
    }
    assert_eq!(rig.machine.counters().transfer_retries, 39);
}

#[test]
fn bug_56_a_lost_result_is_asked_for_again_under_the_same_reference() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    let sent = rig.take_transfer();
    rig.wait(179_999);
    rig.quiet();
    rig.wait(1);
    assert_eq!(rig.take_transfer(), sent);
    assert_eq!(rig.problem(), Some("transfer"));
    rig.transfer_done((sent.0, sent.1), Ok(1));
    assert_eq!(rig.machine.status().manifest_next_offset, 20);
    rig.transfer_done((sent.0, sent.1), Ok(2));
    assert_eq!(rig.machine.counters().duplicates_ignored, 1);
    assert_eq!(rig.machine.status().manifest_next_offset, 20);
}

#[test]
fn a_duplicate_that_waits_for_its_turn_keeps_its_first_result() {
    let mut rig = Rig::fresh();
    rig.drain(30, 0);
    rig.write_anchor();
    let (generation, first, _) = rig.take_transfer();
    let (_, second, _) = rig.take_transfer();
    rig.transfer_done((generation, second), Ok(2));
    rig.transfer_done((generation, second), Ok(3));
    rig.transfer_done((generation, second), Err(forbidden()));
    rig.transfer_done((generation, first), Ok(1));
    let uids: Vec<u32> = rig
        .put_root(Ok(9))
        .entries
        .iter()
        .map(|entry| entry.uid)
        .collect();
    assert_eq!(uids, [1, 2]);
    assert_eq!(rig.machine.counters().duplicates_ignored, 2);
}

#[test]
fn an_unknown_reference_or_generation_changes_nothing() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    let (generation, first, _) = rig.take_transfer();
    rig.transfer_done((generation, 999), Ok(1));
    rig.transfer_done((generation + 1, first), Ok(1));
    rig.transfer_done((generation - 1, first), Ok(1));
    assert_eq!(rig.machine.status().manifest_next_offset, 0);
    assert_eq!(rig.machine.status().transfers_in_flight, 1);
}

#[test]
fn a_success_that_comes_after_its_own_failure_counts() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    let (generation, first, _) = rig.take_transfer();
    rig.transfer_done((generation, first), Err(forbidden()));
    rig.transfer_done((generation, first), Ok(1));
    assert_eq!(rig.machine.status().manifest_next_offset, 20);
    assert_eq!(rig.machine.status().problem, None);
}

#[test]
fn a_segment_that_is_not_found_but_not_trimmed_is_looked_for_again() {
    let mut rig = Rig::fresh();
    rig.drain(10, 0);
    rig.write_anchor();
    let (generation, first, _) = rig.take_transfer();
    rig.transfer_done(
        (generation, first),
        Err(Failure::NotFound("segment".to_owned())),
    );
    assert_eq!(rig.machine.counters().local_log_ahead_recoveries, 0);
    rig.wait_until_due();
    assert_eq!(rig.problem(), Some("transfer"));
    assert_eq!(rig.take_transfer().1, first);
}

#[test]
fn a_hundred_thousand_completions_in_reverse_order_take_constant_stack() {
    const COUNT: u64 = 100_000;
    let settings = Settings {
        fragment_size_bytes: 1,
        max_in_flight_transfers: COUNT as usize,
        scan_max_chunks: COUNT as usize,
        persist_threshold: u32::MAX,
        ..settings()
    };
    let work = move || {
        let mut machine = UploadMachine::new(0, settings, EPOCH, 1);
        machine.handle(
            0,
            Event::PointerRead {
                generation: 2,
                outcome: PointerRead::Found(pointer(EPOCH, 1, 1)),
            },
        );
        machine.handle(
            0,
            Event::RootRead {
                generation: 3,
                outcome: Ok(Root::empty_at(0)),
            },
        );
        let committed_chunk_id = Some((COUNT - 1) * RECORDS);
        machine.handle(
            0,
            Event::Committed {
                committed_chunk_id,
                local_first_chunk_id: Some(0),
            },
        );
        let mut references = Vec::new();
        while let Some(effect) = machine.poll_effect() {
            match effect {
                Effect::Scan {
                    generation,
                    from_offset,
                    up_to_chunk_id,
                    max_chunks,
                    ..
                } => {
                    let batch = scan_of(from_offset, up_to_chunk_id, max_chunks, u64::MAX >> 1);
                    machine.handle(0, Event::Scanned { generation, batch });
                }
                Effect::Transfer {
                    generation,
                    transfer,
                    ..
                } => references.push((generation, transfer)),
                _ => {}
            }
        }
        assert_eq!(references.len() as u64, COUNT);
        for (generation, transfer) in references.into_iter().rev() {
            assert_eq!(machine.status().manifest_next_offset, 0);
            machine.handle(
                0,
                Event::TransferDone {
                    generation,
                    transfer,
                    outcome: Ok(1),
                },
            );
        }
        assert_eq!(machine.status().manifest_next_offset, COUNT * RECORDS);
    };
    #[allow(clippy::disallowed_methods, clippy::disallowed_types)]
    // A small stack is what this test is about.
    let thread = std::thread::Builder::new()
        .stack_size(128 * 1024)
        .spawn(work)
        .unwrap();
    thread.join().unwrap();
}

#[test]
fn the_node_s_room_for_indexes_is_kept_and_every_stream_gets_on() {
    let mut rig = Rig::fresh_with(Settings {
        fragment_size_bytes: 1 << 40,
        ..settings()
    });
    // All of it is taken by others: this stream may take one batch all the same, and sends what it has.
    rig.machine.set_index_room(0);
    rig.drain(30, 0);
    rig.write_anchor();
    assert!(rig.machine.status().index_bytes > 0);
    assert_eq!(rig.machine.counters().room_cuts, 1);
    assert_eq!(rig.machine.status().assembly_chunks, 0);
    rig.committed(500, 0);
    let scans = |rig: &Rig| {
        let is_scan = |effect: &&Effect| matches!(effect, Effect::Scan { .. });
        rig.effects.iter().filter(is_scan).count()
    };
    assert_eq!(scans(&rig), 0, "nothing more while that is on its way");
    // Nobody says when there is room again, so it looks by itself.
    rig.machine.set_index_room(usize::MAX);
    rig.wait_until_due();
    assert_eq!(scans(&rig), 1);
}

#[test]
fn an_outage_of_the_store_does_not_pile_up_the_indexes_of_tiny_chunks() {
    let mut rig = Rig::fresh_with(Settings {
        max_waiting_index_bytes: 40,
        ..settings()
    });
    rig.drain(30, 0);
    rig.write_anchor();
    let index_bytes = rig.machine.transfers.index_bytes();
    assert!(index_bytes >= 40, "{index_bytes} bytes wait");
    rig.committed(500, 0);
    assert!(
        !rig.effects
            .iter()
            .any(|effect| matches!(effect, Effect::Scan { .. })),
        "nothing more is scanned while they wait"
    );
}
