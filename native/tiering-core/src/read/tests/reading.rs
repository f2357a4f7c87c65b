use super::world::*;
use crate::read::*;

/// Fragments of many chunks of 48 + 152 bytes (more or less a filter and a trailer).
fn long_stream(fragments: usize, chunks: usize) -> World {
    World::new(0, &vec![vec![(1, 152); chunks]; fragments])
}

fn started(world: World, settings: Settings) -> Run {
    let mut run = Run::new(world, settings, Start::Offset(0));
    run.answer_truly(What::Manifest);
    run
}

#[test]
fn one_small_request_comes_first_and_no_more_until_something_is_consumed() {
    let mut run = started(
        long_stream(2, 100),
        Settings {
            first_request_bytes: 1000,
            ..small_requests()
        },
    );
    assert_eq!(run.ranges(), [(0, 8, 1008)]);
    run.answer_truly(What::Range);
    assert!(!run.queue.is_empty());
    assert_eq!(run.ranges().len(), 1);
    assert_eq!(
        run.reader.poll_timeout(),
        None,
        "an idle reader has no timer"
    );
}

fn small_requests() -> Settings {
    Settings {
        read_request_bytes: 2000,
        read_ahead_bytes: 8000,
        ..small()
    }
}

#[test]
fn depth_grows_while_the_consumer_keeps_up_and_stays_within_its_limits() {
    let mut run = started(long_stream(3, 200), small_requests());
    let mut deepest = 0;
    for _ in 0..400 {
        deepest = deepest.max(run.requests.len());
        assert!(run.requests.len() <= 4);
        if run
            .requests
            .iter()
            .any(|request| request.what == What::Range)
        {
            run.answer_truly(What::Range);
        }
        run.consume();
    }
    assert!(deepest >= 3, "only {deepest} requests at once");
    assert!(
        run.ranges()
            .iter()
            .all(|(_, start, end)| end - start <= 2000)
    );
    assert!(
        run.max_outstanding <= 8000 + 150 + 204,
        "{} bytes",
        run.max_outstanding
    );
}

#[test]
fn the_next_fragment_is_fetched_before_this_one_is_through() {
    let mut run = started(long_stream(3, 20), small_requests());
    while run.delivered.len() < 15 {
        run.answer_truly(What::Range);
        run.consume();
    }
    assert!(
        run.requests.iter().any(|request| request.object.0 == 20),
        "{:?}",
        run.requests
    );
}

#[test]
fn answers_out_of_order_are_held_until_their_turn() {
    let mut run = started(long_stream(1, 200), small_requests());
    let mut turned = 0;
    while run.queue.take(u64::MAX) == ReadOutcome::Wait || turned < 5 {
        run.consume();
        if run.finish.is_some() {
            break;
        }
        let Some(request) = run.requests.last().cloned() else {
            continue;
        };
        turned += usize::from(run.requests.len() > 1);
        let outcome = run.truth(&request);
        run.answer(&request, outcome);
    }
    assert!(turned >= 5);
    run.queue.drain_taken();
}

#[test]
fn a_chunk_larger_than_the_read_ahead_is_read() {
    let world = World::new(0, &[vec![(1, 10), (1, 9_000), (1, 10)]]);
    let mut run = Run::new(world, small(), Start::Offset(0));
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 3 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
    assert!(
        run.max_outstanding <= 9_048 + 150 + 100 + 400,
        "{}",
        run.max_outstanding
    );
}

#[test]
fn what_is_taken_back_is_fetched_again_when_the_consumer_asks_and_not_before() {
    for take in 0..12 {
        let mut run = started(long_stream(6, 4), small_requests());
        for _ in 0..4 {
            run.answer_truly(What::Range);
            if run.queue.len() < 8 {
                run.consume();
            }
        }
        for _ in 0..take {
            let ReadOutcome::Chunk { bytes, .. } = run.queue.take(u64::MAX) else {
                break;
            };
            run.delivered.push_back(bytes.to_bytes());
        }
        let asked_before = run.asked.len();
        run.take_back(false);
        assert_eq!(run.reader.outstanding_bytes(), 0);
        assert!(run.requests.is_empty() && run.reader.poll_timeout().is_none());
        run.handle(Event::Tick);
        assert_eq!(run.asked.len(), asked_before, "nobody has asked");
        run.handle(Event::Wanted);
        assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 24 });
        assert_eq!(run.delivered(), run.world.chunks_from(0), "after {take}");
    }
}

#[test]
fn what_the_driver_was_not_given_yet_is_taken_back_too() {
    let mut run = started(long_stream(1, 20), small());
    let request = run.requests[0].clone();
    let bytes = run.truth(&request).expect("there");
    let id = request.id;
    // Chunks are cut, and their effects are not taken: the memory is wanted back at this very moment.
    run.requests.clear();
    let outcome = Ok(bytes);
    (run.reader).handle(run.now_ms, Event::Fetched { id, outcome });
    let (first, wanted) = (None, true);
    run.handle(Event::TakenBack { first, wanted });
    assert!(run.queue.is_empty());
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 20 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn our_own_queue_is_no_fault_of_the_store() {
    let mut run = started(long_stream(1, 20), small());
    let request = run.requests[0].clone();
    for _ in 0..5 {
        run.now_ms += 50_000;
        run.handle(Event::Alive { id: request.id });
        assert!(run.finish.is_none());
    }
    // Of an answer that nobody waits for it says nothing.
    run.now_ms += 50_000;
    run.handle(Event::Alive { id: 1_000 });
    run.now_ms += 10_000;
    run.handle(Event::Tick);
    assert!(matches!(
        run.finish,
        Some(Finish::Failed {
            kind: FailureKind::Unavailable,
            ..
        })
    ));
}

#[test]
fn the_local_log_is_named_only_when_everything_was_consumed() {
    let mut run = started(World::new(0, &[vec![(1, 10)]]), small());
    run.answer_truly(What::Range);
    assert!(run.requests.is_empty() && run.finish.is_none());
    assert_eq!(run.consume(), ReadOutcome::Wait);
    run.answer_truly(What::Manifest);
    assert_eq!(run.consume(), ReadOutcome::Local { next_offset: 1 });
    assert!(run.reader.is_finished());
    assert_eq!(run.reader.poll_timeout(), None);
}

#[test]
fn a_manifest_that_grew_meanwhile_is_followed() {
    let mut run = started(long_stream(1, 3), small());
    run.answer_truly(What::Range);
    run.world.append(&[(4, 30), (4, 30)]);
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 11 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn an_answer_that_is_not_waited_for_is_ignored() {
    let mut run = started(long_stream(1, 20), small());
    run.handle(Event::Fetched {
        id: 999,
        outcome: Ok(bytes::Bytes::from_static(b"whatever")),
    });
    run.handle(Event::Manifest {
        id: 999,
        view: ManifestView::Unknown,
    });
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 20 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
    run.handle(Event::Fetched {
        id: 1,
        outcome: Ok(bytes::Bytes::new()),
    });
}

#[test]
fn no_more_than_the_allowed_number_of_chunks_is_cut_ahead() {
    let settings = Settings {
        max_ready_chunks: 3,
        first_request_bytes: 400,
        ..small()
    };
    let mut run = started(World::new(0, &[vec![(1, 0); 40]]), settings);
    run.answer_truly(What::Range);
    assert_eq!(run.queue.len(), 3);
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 40 });
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn a_fragment_that_the_manifest_names_only_in_part_is_read_that_far() {
    for (start, settings) in [(0, small_requests()), (7, small_requests()), (0, small())] {
        let mut world = long_stream(2, 20);
        let expected: Vec<_> = world
            .chunks_from(start)
            .into_iter()
            .take(10 - usize::try_from(start).expect("small"))
            .collect();
        world.cut_back(10);
        let mut run = Run::new(world, settings, Start::Offset(start));
        let outcome = run.run_to_the_end();
        assert_eq!(outcome, ReadOutcome::Local { next_offset: 10 });
        assert_eq!(run.delivered(), expected);
    }
}

#[test]
fn what_follows_a_fragment_named_in_part_is_read_from_the_next_one() {
    let mut world = long_stream(1, 20);
    let before: Vec<_> = world.chunks_from(0).into_iter().take(10).collect();
    world.chunks.truncate(10);
    world.cut_back(10);
    world.append(&[(1, 90); 5]);
    let after = world.chunks_from(10);
    assert_eq!(after.len(), 5);
    let mut run = Run::new(world, small_requests(), Start::Offset(0));
    assert_eq!(run.run_to_the_end(), ReadOutcome::Local { next_offset: 15 });
    assert_eq!(run.delivered(), [before, after].concat());
}

#[test]
fn parts_are_served_as_they_come() {
    let mut run = started(long_stream(1, 200), small_requests());
    let request = run.take_request(What::Range);
    run.requests.push(request.clone());
    assert!(request.end - request.start < 200);
    run.answer_in_part(&request, 100);
    assert!(run.queue.is_empty());
    // The rest of the first range is not the whole first chunk either; the second range is, before it has ended.
    run.answer_truly(What::Range);
    let request = run.requests[0].clone();
    run.answer_in_part(&request, 100);
    assert_eq!(run.queue.len(), 1, "the first chunk is there");
    assert_eq!(run.requests.len(), 1, "and its range goes on");
    assert_eq!(
        run.run_to_the_end(),
        ReadOutcome::Local { next_offset: 200 }
    );
    assert_eq!(run.delivered(), run.world.chunks_from(0));
}

#[test]
fn ranges_end_at_the_blocks_that_all_readers_share() {
    const BLOCK: u64 = 500;
    let settings = Settings {
        first_request_bytes: 1000,
        block_bytes: BLOCK,
        ..small_requests()
    };
    for start in [0, 7, 33] {
        let mut run = Run::new(long_stream(2, 50), settings, Start::Offset(start));
        assert_eq!(
            run.run_to_the_end(),
            ReadOutcome::Local { next_offset: 100 }
        );
        assert_eq!(run.delivered(), run.world.chunks_from(start));
        let ends = [0, 50].map(|first_offset| {
            run.world
                .root()
                .entries
                .iter()
                .find(|entry| entry.first_offset == first_offset)
                .map_or(0, |entry| 8 + entry.size_bytes)
        });
        for (_, from, to) in run.ranges() {
            assert!(
                to % BLOCK == 0 || ends.contains(&to),
                "{from}..{to} of {ends:?}"
            );
        }
    }
}

#[test]
fn a_reader_s_share_bounds_what_it_fetches_ahead() {
    let mut run = started(long_stream(3, 200), small_requests());
    run.handle(Event::Share { bytes: 2000 });
    assert_eq!(
        run.run_to_the_end(),
        ReadOutcome::Local { next_offset: 600 }
    );
    assert!(
        run.max_outstanding <= 2000 + 150 + 204,
        "{}",
        run.max_outstanding
    );
}

#[test]
fn one_record_costs_one_request_wherever_it_is() {
    let settings = Settings {
        first_request_bytes: 2000,
        block_bytes: 1000,
        read_request_bytes: 4000,
        read_ahead_bytes: 16_000,
        ..small()
    };
    for offset in 0..60 {
        let mut run = Run::new(long_stream(2, 60), settings, Start::Offset(offset));
        run.answer_truly(What::Manifest);
        if offset > 0 {
            run.answer_truly(What::Index);
        }
        run.answer_truly(What::Range);
        assert!(matches!(
            run.queue.take(u64::MAX),
            ReadOutcome::Chunk { .. }
        ));
        run.report_consumed();
        // At the very end of the fragment there are few chunks in it, and one is most of them.
        if offset < 55 {
            assert_eq!(run.ranges().len(), 1, "{offset}");
        }
        assert_eq!(
            run.run_to_the_end(),
            ReadOutcome::Local { next_offset: 120 }
        );
    }
}
