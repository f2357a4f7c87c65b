//! Start-up: what is persisted, and what an unknown answer never becomes.

use super::*;

#[test]
fn a_new_stream_is_published_empty_at_once() {
    let rig = Rig::fresh();
    rig.quiet();
    assert_eq!(
        rig.machine.poll_timeout(),
        None,
        "an idle machine waits for nothing"
    );
    assert_eq!(rig.machine.status().activity, Activity::Draining);
}

#[test]
fn bug_1_a_known_stream_goes_on_at_its_persisted_end() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(90, 0);
    let (_, from, up_to, ..) = rig.take_scan();
    assert_eq!((from, up_to), (40, 90));
}

#[test]
fn an_unavailable_metadata_store_is_asked_again_and_never_taken_for_an_empty_stream() {
    let mut rig = Rig::with(settings());
    for _ in 0..40 {
        rig.answer_pointer(PointerRead::Unavailable);
        while !matches!(rig.effects.first(), Some(Effect::ReadPointer { .. })) {
            if rig.effects.is_empty() {
                let before = rig.now;
                let at = rig.wait_until_due();
                assert!(at - before <= 30_000);
            } else {
                assert_eq!(rig.problem(), Some("metadata"));
            }
        }
    }
    assert_eq!(rig.machine.counters().resolution_failures, 40);
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 1, 1)));
    assert!(matches!(rig.next(), Effect::GetRoot { .. }));
    assert_eq!(rig.problem(), None);
}

#[test]
fn a_corrupt_or_unknown_root_stops_everything_but_trying_again() {
    let mut rig = Rig::with(settings());
    rig.committed(90, 0);
    let start = rig.now;
    for round in 0..100 {
        rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
        rig.answer_root(Err(Failure::Corrupt(
            "unknown manifest version 2".to_owned(),
        )));
        if round == 0 {
            assert_eq!(rig.problem(), Some("manifest"), "said once");
        }
        rig.quiet();
        rig.wait_until_due();
    }
    assert!(rig.now - start > 60 * 15_000, "backs off");
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    rig.answer_root(Ok(root_of(0, &[20])));
    assert_eq!(rig.published().1, 7);
}

#[test]
fn a_root_that_is_not_well_formed_counts_as_corrupt() {
    let mut rig = Rig::with(settings());
    let mut root = root_of(0, &[20, 20]);
    root.total_size_bytes += 1;
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    rig.answer_root(Err(Failure::NotFound("gone".to_owned())));
    rig.quiet();
    rig.wait_until_due();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    rig.answer_root(Ok(root));
    assert_eq!(rig.problem(), Some("manifest"));
    rig.quiet();
}

#[test]
fn a_missing_root_means_an_old_pointer_which_is_read_again() {
    let mut rig = Rig::with(settings());
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    rig.answer_root(Err(Failure::NotFound("replaced and deleted".to_owned())));
    rig.quiet();
    rig.wait_until_due();
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 71, 8)));
    rig.answer_root(Ok(root_of(0, &[20])));
    assert_eq!(rig.published().1, 8);
}

#[test]
fn bug_65_a_writer_with_a_lower_epoch_stands_down() {
    let mut rig = Rig::with(settings());
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH + 1, 70, 7)));
    rig.cancelled();
    assert_eq!(
        rig.next(),
        Effect::Stop {
            reason: StopReason::Deposed
        }
    );
    assert_eq!(rig.machine.poll_timeout(), None);
    rig.committed(90, 0);
    rig.send(Event::CutRequested);
    rig.quiet();
    assert_eq!(rig.machine.status().activity, Activity::Stopped);
}

#[test]
fn lost_answers_are_asked_for_again_and_late_ones_are_ignored() {
    let mut rig = Rig::with(settings());
    let Effect::ReadPointer { generation: lost } = rig.next() else {
        panic!()
    };
    rig.wait(60_000);
    assert_eq!(rig.problem(), Some("metadata"));
    rig.wait_until_due();
    assert!(matches!(rig.effects[0], Effect::ReadPointer { .. }));
    rig.send(Event::PointerRead {
        generation: lost,
        outcome: PointerRead::NotFound,
    });
    assert_eq!(
        rig.effects.len(),
        1,
        "an answer of a minute ago may be wrong by now"
    );
    rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
    assert!(matches!(rig.next(), Effect::GetRoot { .. }));
    assert_eq!(rig.problem(), None);
    rig.wait(180_000);
    assert_eq!(rig.problem(), Some("manifest"));
}
