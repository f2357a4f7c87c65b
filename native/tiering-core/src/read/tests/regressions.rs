//! Faults of the field that the other files here have no test of (`bug_N` is row N of docs/INVARIANTS.md), and groups that a
//! reader meets on its way.

use std::sync::Arc;

use bytes::Bytes;
use log_format::fragment;
use log_format::manifest::{Entry, Group, Kind, Root};

use super::world::*;
use crate::failure::Failure;
use crate::read::*;

fn stream() -> World {
    World::new(0, &vec![vec![(1, 100); 20]; 4])
}

/// Four fragments in two groups beside each other: a reader of the first meets the second while it streams.
fn two_groups() -> World {
    in_two_groups(stream())
}

fn in_two_groups(mut world: World) -> World {
    let mut root = world.root().clone();
    let group = |world: &mut World, entries: &[Entry], uid: u32| {
        let group = Group {
            kind: Kind::Group,
            first_offset: entries[0].first_offset,
            first_timestamp_ms: entries[0].first_timestamp_ms,
            entries: entries.to_vec(),
        };
        world
            .objects
            .insert((group.first_offset, uid), Bytes::from(group.encode()));
        Entry {
            kind: Kind::Group,
            size_bytes: 0,
            uid,
            last_timestamp_ms: entries[1].last_timestamp_ms,
            ..entries[0]
        }
    };
    root.entries = vec![
        group(&mut world, &root.entries[..2], 100),
        group(&mut world, &root.entries[2..], 101),
    ];
    assert_eq!(root.check(), Ok(()));
    world.root = Some(Arc::new(root));
    world
}

/// Reads until the second group is asked for.
fn at_the_second_group() -> (Run, Request) {
    let mut run = Run::new(two_groups(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    run.answer_truly(What::Group);
    while !run
        .requests
        .iter()
        .any(|request| request.what == What::Group)
    {
        run.answer_truly(What::Range);
        run.consume();
    }
    let group = run.take_request(What::Group);
    assert_eq!(group.object, (40, 101));
    (run, group)
}

fn complete(run: Run) {
    complete_from(run, 0);
}

fn complete_from(mut run: Run, offset: u64) {
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 80 });
    assert_eq!(run.delivered(), run.world.chunks_from(offset));
}

#[track_caller]
fn failed(outcome: ReadOutcome, expected: FailureKind) -> String {
    match outcome {
        ReadOutcome::Failed { kind, text } if kind == expected => text,
        other => panic!("{other:?} is not {expected:?}"),
    }
}

#[test]
fn a_group_is_fetched_before_the_reader_has_come_to_it() {
    let (mut run, group) = at_the_second_group();
    assert!(
        run.delivered.len() < 40,
        "the first group is not through yet"
    );
    let truth = run.truth(&group);
    run.answer(&group, truth);
    complete(run);
}

#[test]
fn a_group_that_does_not_come_at_once_is_asked_for_again() {
    for failure in [
        Failure::Transient("503".to_owned()),
        Failure::Stalled("403".to_owned()),
        Failure::Corrupt("checksum".to_owned()),
    ] {
        let (mut run, group) = at_the_second_group();
        run.answer(&group, Err(failure));
        complete(run);
    }
}

#[test]
fn a_group_on_the_way_that_stays_damaged_ends_the_reader_after_what_is_right() {
    let (mut run, group) = at_the_second_group();
    run.world
        .objects
        .insert(group.object, Bytes::from_static(b"OSIG no group"));
    run.requests.push(group);
    failed(run.run_to_the_end(), FailureKind::Corrupt);
    let delivered = run.delivered();
    assert_eq!(delivered, run.world.chunks_from(0)[..delivered.len()]);
}

#[test]
fn a_group_on_the_way_that_is_gone_is_looked_for_in_the_manifest_of_then() {
    let (mut run, group) = at_the_second_group();
    // Retention took the first group meanwhile, and the second was made anew.
    let bytes = run.world.objects.remove(&group.object).unwrap();
    run.world.objects.insert((40, 102), bytes);
    let mut root = run.world.root().clone();
    root.entries.remove(0);
    root.entries[0].uid = 102;
    (root.first_offset, root.first_timestamp_ms) = (40, root.entries[0].first_timestamp_ms);
    run.world.root = Some(Arc::new(root));
    run.answer(&group, Err(Failure::NotFound("gone".to_owned())));
    complete(run);
}

/// The log lost its end: the manifest ends inside the second fragment at 35, and goes on with what came after that.
fn cut_back_to_35() -> World {
    let longer = World::new(0, &[vec![(1, 100); 20], vec![(1, 100); 20]]);
    let mut world = World::new(0, &[20, 15, 20, 20].map(|chunks| vec![(1, 100); chunks]));
    let object = (20, 2);
    let whole = longer.objects.get(&object).expect("the second fragment");
    world.objects.insert(object, whole.clone());
    let mut root = world.root().clone();
    let cut = longer.root().entries[1];
    root.total_size_bytes += u128::from(cut.size_bytes - root.entries[1].size_bytes);
    root.entries[1] = cut;
    world.root = Some(Arc::new(root));
    world
}

#[test]
fn a_time_that_the_part_of_a_fragment_does_not_have_is_looked_for_behind_it() {
    // The whole object has it, the manifest's part of it ends before; chunk n is of time 10 n.
    let mut run = Run::new(cut_back_to_35(), small(), Start::Timestamp(380));
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 75 });
    assert_eq!(run.delivered(), run.world.chunks_from(38));
}

#[test]
fn an_object_that_goes_while_its_beginning_is_skipped_does_not_bring_the_beginning_back() {
    let mut run = Run::new(stream(), small(), Start::Offset(37));
    run.answer_truly(What::Manifest);
    // Without its index the fragment is read from its start.
    for _ in 0..2 {
        let index = run.take_request(What::Index);
        run.answer(&index, Err(Failure::Corrupt("checksum".to_owned())));
        if run.requests.is_empty() {
            run.sleep();
        }
    }
    run.answer_truly(What::Range);
    assert!(run.delivered.is_empty() && run.queue.is_empty());
    // It is written anew under another key.
    let bytes = run.world.objects.remove(&(20, 2)).expect("the fragment");
    run.world.objects.insert((20, 77), bytes);
    let mut root = run.world.root().clone();
    root.entries[1].uid = 77;
    run.world.root = Some(Arc::new(root));
    complete_from(run, 37);
}

#[test]
fn a_group_that_is_on_its_way_when_the_manifests_part_of_a_fragment_ends_is_taken_back() {
    let world = cut_back_to_35();
    let mut run = Run::new(in_two_groups(world), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    run.answer_truly(What::Group);
    // The second group stays unanswered until the reader has cut all that the manifest names of the first.
    while run.requests.iter().any(|other| other.what == What::Range) {
        run.answer_truly(What::Range);
        run.consume();
    }
    assert_eq!(run.delivered.len(), 35);
    let asked: Vec<_> = run
        .asked
        .iter()
        .filter(|it| it.what == What::Group)
        .collect();
    assert_eq!(asked[1].object, (35, 101));
    assert!(
        run.requests
            .iter()
            .all(|other| other.what == What::Manifest)
    );
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 75 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_reader_that_ends_takes_back_what_it_asked_for() {
    let (mut run, group) = at_the_second_group();
    // Back among the requests: the reader must cancel it (the world checks that what is cancelled was running).
    run.requests.push(group.clone());
    while run.finish.is_none() {
        if run
            .requests
            .iter()
            .any(|request| request.what == What::Range)
        {
            run.fail(What::Range, Failure::Corrupt("checksum".to_owned()));
        } else {
            run.sleep();
        }
    }
    failed(run.consume(), FailureKind::Corrupt);
    assert_eq!(run.reader.poll_timeout(), None);
    run.answer(&group, Ok(Bytes::new()));
    assert_eq!(
        run.reader.poll_effect(),
        None,
        "a late answer changes nothing"
    );
}

#[test]
fn a_manifest_that_cannot_be_right_is_corrupt_and_not_a_place() {
    // Too small for one chunk header.
    let mut world = stream();
    let mut root = world.root().clone();
    root.total_size_bytes -= u128::from(root.entries[0].size_bytes) - 47;
    root.entries[0].size_bytes = 47;
    world.root = Some(Arc::new(root));
    let mut run = Run::new(world, small(), Start::Offset(0));
    let text = failed(run.run_to_the_end(), FailureKind::Corrupt);
    assert!(text.contains("47 bytes"), "{text}");

    // A group that starts after the offset that it is said to hold.
    let mut world = two_groups();
    let group = Group::decode(Kind::Group, &world.objects[&(40, 101)]).unwrap();
    let shifted = Group {
        first_offset: 60,
        entries: group.entries[1..].to_vec(),
        ..group
    };
    world
        .objects
        .insert((40, 101), Bytes::from(shifted.encode()));
    let mut run = Run::new(world, small(), Start::Offset(45));
    failed(run.run_to_the_end(), FailureKind::Corrupt);
    assert!(run.delivered.is_empty());
}

#[test]
fn bug_3_after_every_fragment_the_reader_goes_on_with_the_next_object_and_no_other() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.run_to_the_end();
    let mut objects: Vec<_> = run.asked.iter().map(|request| request.object).collect();
    objects.dedup();
    assert_eq!(objects, [(0, 1), (20, 2), (40, 3), (60, 4)]);
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn bug_7_a_request_that_timed_out_is_made_again_and_its_late_answer_is_not_taken() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    let first = run.take_request(What::Range);
    run.answer(&first, Err(Failure::Transient("timeout".to_owned())));
    let at_ms = run.reader.poll_timeout().expect("a time for the next try");
    assert!(at_ms > run.now_ms && at_ms < run.now_ms + 1_000, "soon");
    run.sleep();
    let second = run.take_request(What::Range);
    assert_eq!((second.start, second.end), (first.start, first.end));
    assert_ne!(second.id, first.id);
    run.answer(&first, Ok(Bytes::from_static(b"late, and not to be taken")));
    assert!(run.queue.is_empty());
    run.requests.push(second);
    complete(run);
}

#[test]
fn bug_47_a_reader_whose_consumer_is_fast_has_several_requests_on_their_way() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    let mut most = 0;
    while run.finish.is_none() && !run.requests.is_empty() {
        let ranges = run.requests.iter().filter(|it| it.what == What::Range);
        most = most.max(ranges.count());
        let request = run.requests[0].clone();
        let truth = run.truth(&request);
        run.answer(&request, truth);
        run.consume();
    }
    assert!(most >= 3, "{most} at once");
    complete(run);
}

#[test]
fn bug_91_wrong_bytes_are_counted_fetched_again_and_end_no_more_than_their_reader() {
    for stays in [false, true] {
        let mut run = Run::new(stream(), small(), Start::Offset(0));
        run.answer_truly(What::Manifest);
        let right = run.world.objects.clone();
        let object = run.world.objects.get_mut(&(0, 1)).expect("there");
        let mut wrong = object.to_vec();
        wrong[70] ^= 1;
        *object = Bytes::from(wrong);
        run.answer_truly(What::Range);
        assert_eq!(run.reader.counters().chunk_crc_mismatches, 1);
        assert!(run.queue.is_empty(), "none of it is delivered");
        if stays {
            failed(run.run_to_the_end(), FailureKind::Corrupt);
            assert!(run.reader.is_finished() && run.delivered.is_empty());
        } else {
            run.world.objects = right;
            complete(run);
        }
    }
}

#[test]
fn bug_9_two_requests_in_a_row_that_time_out_are_borne() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    for _ in 0..2 {
        run.now_ms += 15_000;
        run.fail(What::Range, Failure::Transient("timeout".to_owned()));
        assert_eq!(
            run.consume(),
            ReadOutcome::Wait,
            "the connection only waits"
        );
        run.sleep();
    }
    complete(run);
}

#[test]
fn bug_10_what_came_before_a_failure_is_neither_lost_nor_delivered_twice() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    for round in 0..40 {
        let Some(request) = run
            .requests
            .iter()
            .find(|request| request.what == What::Range)
            .cloned()
        else {
            break;
        };
        // Half of the answers break off in the middle, with the consumer taking chunks in between.
        let bytes = run.truth(&request).unwrap();
        let length = if round % 2 == 0 {
            bytes.len() / 2
        } else {
            bytes.len()
        };
        run.answer(&request, Ok(bytes.slice(..length)));
        run.consume();
        while !run
            .requests
            .iter()
            .any(|request| request.what == What::Range)
            && run.reader.poll_timeout().is_some()
        {
            run.sleep();
        }
    }
    complete(run);
}

#[test]
fn bug_13_a_reader_that_waits_for_the_store_always_has_a_time_to_go_on_at() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    for _ in 0..1_000 {
        if run.finish.is_some() {
            break;
        }
        assert!(
            run.reader
                .poll_timeout()
                .is_some_and(|at| at >= run.now_ms && at <= run.now_ms + 60_000),
            "after a burst of refusals, too"
        );
        if run
            .requests
            .iter()
            .any(|request| request.what == What::Range)
        {
            run.fail(What::Range, Failure::Transient("pool busy".to_owned()));
        } else {
            run.sleep();
        }
    }
    failed(run.consume(), FailureKind::Unavailable);
}

#[test]
fn bug_77_a_reader_far_inside_the_expired_range_goes_on_at_the_oldest_fragment() {
    let mut run = Run::new(stream(), small(), Start::Offset(5));
    run.answer_truly(What::Manifest);
    run.world.expire(3);
    let outcome = run.run_to_the_end();
    assert_eq!(outcome, ReadOutcome::Local { next_offset: 80 });
    assert_eq!(header_of(&run.delivered()[0]).chunk_id, 60);
}

#[test]
fn bug_79_a_last_fragment_that_is_gone_ends_in_the_local_log_or_says_that_it_is_lost() {
    // Retention emptied the manifest.
    let mut run = Run::new(stream(), small(), Start::Offset(60));
    run.answer_truly(What::Manifest);
    let request = run.take_request(What::Range);
    run.world.objects.clear();
    run.world.root = Some(Arc::new(Root::empty_at(80)));
    run.answer(&request, Err(Failure::NotFound("gone".to_owned())));
    assert!(matches!(run.run_to_the_end(), ReadOutcome::Local { .. }));

    // The manifest keeps naming it.
    let mut world = stream();
    world.objects.remove(&(60, 4));
    let mut run = Run::new(world, small(), Start::Offset(60));
    failed(run.run_to_the_end(), FailureKind::Lost);
}

#[test]
fn bug_123_the_first_chunk_of_every_object_is_read_from_behind_the_header_of_a_fragment() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.run_to_the_end();
    for number in 0..4 {
        let first = run
            .ranges()
            .into_iter()
            .find(|(object, ..)| *object == 20 * number);
        assert_eq!(
            first.map(|(_, start, _)| start),
            Some(fragment::HEADER_BYTES as u64)
        );
    }
}

#[test]
fn a_reader_that_does_not_wait_for_anything_is_noticed() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    assert!(
        invariants::liveness(&run.reader),
        "the node answers what it knows of the manifest"
    );
    run.answer_truly(What::Manifest);
    assert!(invariants::violated(&run.reader).is_empty());
    run.take_back(false);
    assert!(invariants::violated(&run.reader).is_empty());
}
