use bytes::Bytes;
use log_format::manifest::Kind;

use super::world::*;
use crate::failure::Failure;
use crate::read::*;

fn stream() -> World {
    World::new(
        0,
        &[vec![(1, 100); 20], vec![(1, 100); 20], vec![(1, 100); 20]],
    )
}

fn started(world: World) -> Run {
    let mut run = Run::new(world, small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    run
}

fn transient() -> Failure {
    Failure::Transient("503 SlowDown".to_owned())
}

/// Answers and consumes until there are at least this many requests for ranges at once.
fn until_deep(run: &mut Run, depth: usize) {
    while run
        .requests
        .iter()
        .filter(|request| request.what == What::Range)
        .count()
        < depth
    {
        run.answer_truly(What::Range);
        run.consume();
    }
}

fn kind_of(outcome: ReadOutcome) -> FailureKind {
    match outcome {
        ReadOutcome::Failed { kind, .. } => kind,
        other => panic!("{other:?} is no failure"),
    }
}

#[test]
fn only_the_range_that_failed_is_asked_for_again() {
    let mut run = started(stream());
    until_deep(&mut run, 2);
    let before = run.ranges();
    let others: Vec<Request> = run.requests[1..].to_vec();
    let failed = run.requests[0].clone();
    run.answer(&failed, Err(transient()));
    assert_eq!(run.requests, others);
    assert!(
        run.reader
            .poll_timeout()
            .is_some_and(|at| at > run.now_ms && at <= run.now_ms + 100)
    );
    run.sleep();
    let again = run.ranges()[before.len()..].to_vec();
    assert_eq!(again[0], (failed.object.0, failed.start, failed.end));
    assert_eq!(run.reader.counters().range_retries, 1);
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_short_answer_is_kept_and_only_its_rest_asked_for() {
    let mut run = started(stream());
    let request = run.take_request(What::Range);
    let bytes = run.truth(&request).expect("there");
    run.answer(&request, Ok(bytes.slice(..bytes.len() - 9)));
    run.sleep();
    let rest = run.ranges()[1];
    assert_eq!(rest, (0, request.end - 9, request.end));
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn empty_and_oversized_answers_count_as_faults() {
    let mut run = started(stream());
    let request = run.take_request(What::Range);
    run.answer(&request, Ok(Bytes::new()));
    run.sleep();
    let request = run.take_request(What::Range);
    run.answer(&request, Ok(Bytes::from(vec![0; 10_000])));
    run.sleep();
    assert_eq!(run.reader.counters().range_retries, 2);
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn faults_are_borne_for_the_deadline_and_no_longer() {
    for failure in [transient(), Failure::Stalled("403 AccessDenied".to_owned())] {
        let mut run = started(stream());
        while run.now_ms < 50_000 {
            run.fail(What::Range, failure.clone());
            run.sleep();
        }
        run.run_to_the_end();
        assert_eq!(run.delivered(), run.world.chunks_from(0));

        let mut run = started(stream());
        while run.finish.is_none() {
            if run
                .requests
                .iter()
                .any(|request| request.what == What::Range)
            {
                run.fail(What::Range, failure.clone());
            }
            run.sleep();
        }
        assert_eq!(kind_of(run.consume()), FailureKind::Unavailable);
        assert_eq!(run.now_ms, 60_000);
    }
}

#[test]
fn an_answer_that_never_comes_ends_at_the_deadline() {
    let mut run = started(stream());
    run.sleep();
    assert_eq!(run.now_ms, 60_000);
    assert_eq!(kind_of(run.consume()), FailureKind::Unavailable);
}

#[test]
fn a_consumer_with_chunks_to_take_has_no_deadline() {
    let mut run = started(stream());
    run.answer_truly(What::Range);
    assert!(!run.queue.is_empty());
    assert_eq!(run.reader.poll_timeout(), None);
    run.now_ms = 10_000_000;
    run.handle(Event::Tick);
    assert_eq!(run.finish, None);
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_request_without_an_answer_does_not_end_a_reader_whose_consumer_has_chunks() {
    let mut run = started(stream());
    until_deep(&mut run, 2);
    let first = run.requests[0].clone();
    let outcome = run.truth(&first);
    run.answer(&first, outcome);
    assert!(!run.queue.is_empty() && !run.requests.is_empty());
    run.now_ms = 10_000_000;
    run.handle(Event::Tick);
    assert_eq!(run.finish, None);
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_store_in_trouble_is_asked_less_at_once() {
    let settings = Settings {
        read_request_bytes: 200,
        read_ahead_bytes: 16_000,
        ..small()
    };
    let mut run = Run::new(stream(), settings, Start::Offset(0));
    run.answer_truly(What::Manifest);
    until_deep(&mut run, 4);
    while let Some(request) = run.requests.first().cloned() {
        run.answer(&request, Err(transient()));
    }
    run.now_ms += 200;
    run.handle(Event::Tick);
    let again = run.requests.len();
    run.answer_truly(What::Range);
    assert!(
        run.requests.len() < again,
        "no new one in place of the one that came"
    );
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_chunk_with_a_wrong_crc_is_fetched_again_once() {
    let mut run = started(stream());
    let request = run.take_request(What::Range);
    let mut bytes = run.truth(&request).expect("there").to_vec();
    bytes[60] ^= 1;
    run.answer(&request, Ok(bytes.into()));
    assert!(run.queue.is_empty());
    assert_eq!(run.reader.counters().chunk_crc_mismatches, 1);
    assert_eq!(
        run.past_cache, 1,
        "what is asked for again is not taken from a cache"
    );
    run.run_to_the_end();
    assert_eq!(run.reader.counters().refetches_past_cache, 1);
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_chunk_that_stays_wrong_is_never_delivered() {
    let mut world = stream();
    let mut object = world.objects[&(0, 1)].to_vec();
    object[8 + 3 * 150 + 60] ^= 1;
    world.objects.insert((0, 1), object.into());
    let mut run = started(world);
    assert_eq!(kind_of(run.run_to_the_end()), FailureKind::Corrupt);
    let counters = run.reader.counters();
    assert_eq!(counters.chunk_crc_mismatches, 2);
    assert_eq!(counters.refetches_past_cache, 1);
    assert_eq!((counters.corrupt_ends, counters.lost_ends), (1, 0));
    assert_eq!(
        run.delivered(),
        run.world.chunks_from(0)[..run.delivered.len()]
    );
    assert_eq!(run.delivered.len(), 3);
}

#[test]
fn without_verification_the_data_is_passed_on_as_it_is() {
    let mut world = stream();
    let mut object = world.objects[&(0, 1)].to_vec();
    object[8 + 60] ^= 1;
    world.objects.insert((0, 1), object.into());
    let mut run = Run::new(
        world,
        Settings {
            verify_crc: false,
            ..small()
        },
        Start::Offset(0),
    );
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 60 });
}

#[test]
fn what_the_store_calls_damaged_is_asked_for_again_once() {
    let corrupt = || Failure::Corrupt("checksum".to_owned());
    let mut run = started(stream());
    run.fail(What::Range, corrupt());
    run.sleep();
    run.fail(What::Range, corrupt());
    assert_eq!(kind_of(run.consume()), FailureKind::Corrupt);
}

#[test]
fn retention_under_a_reader_repositions_it_to_the_first_offset() {
    let mut run = started(stream());
    run.answer_truly(What::Range);
    run.consume();
    let read = run.delivered.len();
    run.world.expire(2);
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 60 });
    assert_eq!(run.reader.counters().repositions, 1);
    assert_eq!(header_of(&run.delivered[read]).chunk_id, 40);
}

#[test]
fn what_came_before_the_object_was_gone_is_still_served() {
    let mut run = started(stream());
    until_deep(&mut run, 3);
    let last = run
        .requests
        .iter()
        .max_by_key(|request| (request.object.0, request.start))
        .cloned()
        .expect("two");
    run.answer(&last, Err(Failure::NotFound("gone".to_owned())));
    let held: u64 = run
        .requests
        .iter()
        .map(|request| request.end - request.start)
        .sum();
    assert!(held > 0, "the request in front goes on");
    let first_new = run.asked.len();
    run.answer_truly(What::Range);
    assert_eq!(
        run.asked.len(),
        first_new,
        "nothing is asked for past what is gone"
    );
    run.run_to_the_end();
    assert_eq!(
        run.delivered(),
        run.world.chunks_from(0),
        "the manifest still named it, and it came back"
    );
}

#[test]
fn an_object_that_the_manifest_keeps_naming_is_lost_and_said_so() {
    let mut world = stream();
    world.objects.remove(&(20, 2));
    let mut run = started(world);
    assert_eq!(kind_of(run.run_to_the_end()), FailureKind::Lost);
    assert_eq!(run.delivered(), run.world.chunks_from(0)[..20]);
    assert!(
        (8_000..20_000).contains(&run.now_ms),
        "after {} ms",
        run.now_ms
    );
}

#[test]
fn a_manifest_that_ends_below_the_reader_sends_it_to_the_local_log() {
    let mut run = started(stream());
    run.answer_truly(What::Range);
    run.consume();
    let next_offset = run.delivered.len() as u64;
    run.world.expire(3);
    assert_eq!(
        run.run_to_the_end(),
        ReadOutcome::Local { next_offset },
        "the local log may still have what the manifest lost"
    );
}

#[test]
fn a_group_that_was_rewritten_is_found_through_the_new_manifest() {
    let mut world = stream();
    world.rebalance(Kind::Group, 2);
    let mut run = Run::new(world, small(), Start::Offset(5));
    run.answer_truly(What::Manifest);
    let group = run.take_request(What::Group);
    let old = run.world.objects.remove(&group.object).expect("there");
    run.answer(&group, Err(Failure::NotFound("gone".to_owned())));
    run.world.objects.insert(group.object, old);
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 60 });
    assert_eq!(run.delivered(), run.world.chunks_from(5));
}

#[test]
fn a_damaged_group_is_fetched_again_once() {
    let mut world = stream();
    world.rebalance(Kind::Group, 2);
    let mut run = Run::new(world, small(), Start::Offset(5));
    run.answer_truly(What::Manifest);
    for _ in 0..2 {
        let group = run.take_request(What::Group);
        run.answer(&group, Ok(Bytes::from_static(b"OSIG no group")));
        if run.finish.is_none() {
            run.sleep();
        }
    }
    assert_eq!(kind_of(run.consume()), FailureKind::Corrupt);
}

#[test]
fn a_fragment_cut_anew_inside_a_delivered_chunk_is_refused() {
    let mut run = started(stream());
    run.answer_truly(What::Range);
    run.consume();
    let next_offset = run.delivered.len() as u64;
    assert!(next_offset > 0);
    let request = run.take_request(What::Range);
    // The same offsets in other chunks: another timeline of the log.
    let other = World::new(0, &[vec![(60, 100)]]);
    run.world.objects = other.objects;
    run.world.root = other.root;
    run.answer(&request, Err(Failure::NotFound("gone".to_owned())));
    assert_eq!(kind_of(run.run_to_the_end()), FailureKind::Corrupt);
}

#[test]
fn only_the_wrong_chunk_is_fetched_past_the_cache() {
    let mut run = started(stream());
    let request = run.take_request(What::Range);
    let mut bytes = run.truth(&request).expect("there").to_vec();
    bytes[60] ^= 1;
    run.answer(&request, Ok(bytes.into()));
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
    assert!(run.past_cache <= 2, "{}", run.past_cache);
    assert!(run.ranges().len() > 4);
}

#[test]
fn what_came_of_a_range_before_it_broke_is_not_asked_for_again() {
    let mut run = started(stream());
    let request = run.requests[0].clone();
    run.answer_in_part(&request, 37);
    run.fail(What::Range, Failure::Transient("broken off".to_owned()));
    run.sleep();
    assert_eq!(
        run.ranges(),
        [
            (0, request.start, request.end),
            (0, request.start + 37, request.end)
        ]
    );
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));
    assert_eq!(run.reader.counters().range_retries, 1);
}

#[test]
fn an_archived_object_is_waited_for_and_somebody_is_called() {
    let archived = || Failure::Archived("restore it".to_owned());
    let mut run = started(stream());
    run.fail(What::Range, archived());
    assert_eq!(run.alarms, [(FailureKind::Archived, 0)]);
    run.sleep();
    // It is restored in time: nothing is missing.
    run.run_to_the_end();
    assert_eq!(run.delivered(), run.world.chunks_from(0));

    let mut run = started(stream());
    while run.finish.is_none() {
        if run
            .requests
            .iter()
            .any(|request| request.what == What::Range)
        {
            run.fail(What::Range, archived());
        }
        run.sleep();
    }
    assert_eq!(run.now_ms, 60_000, "as long as for any other trouble");
    match run.consume() {
        ReadOutcome::Failed { kind, text } => {
            assert_eq!(kind, FailureKind::Archived);
            assert_eq!(text, "restore it");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_lost_or_damaged_calls_somebody_to_the_place() {
    let mut run = Run::new(stream(), small(), Start::Offset(0));
    run.answer_truly(What::Manifest);
    while run.finish.is_none() {
        while !run.queue.is_empty() {
            run.consume();
        }
        match run.requests.first().cloned() {
            Some(request) if request.what == What::Manifest => run.answer_truly(What::Manifest),
            Some(request) if request.object.0 == 20 => {
                run.answer(&request, Err(Failure::NotFound("gone".to_owned())));
            }
            Some(request) => run.answer_truly(request.what),
            None => run.sleep(),
        }
    }
    assert_eq!(kind_of(run.consume()), FailureKind::Lost);
    assert_eq!(run.alarms, [(FailureKind::Lost, 20)]);
}
