use log_format::manifest::{Kind, Root};
use std::sync::Arc;

use super::world::*;
use crate::read::*;

fn three_fragments() -> World {
    World::new(
        100,
        &[
            vec![(10, 50), (5, 60), (5, 70)],
            vec![(20, 80), (10, 90)],
            vec![(1, 40), (1, 40)],
        ],
    )
}

fn read_from(world: World, start: Start) -> (Run, ReadOutcome) {
    let mut run = Run::new(world, small(), start);
    let outcome = run.run_to_the_end();
    (run, outcome)
}

#[test]
fn every_offset_is_found_at_the_chunk_that_holds_it() {
    for offset in 100..152 {
        let (run, outcome) = read_from(three_fragments(), Start::Offset(offset));
        assert_eq!(outcome, ReadOutcome::Local { next_offset: 152 });
        assert_eq!(
            run.delivered(),
            run.world.chunks_from(offset),
            "offset {offset}"
        );
    }
}

#[test]
fn the_start_of_a_fragment_needs_no_index() {
    let (run, _) = read_from(three_fragments(), Start::Offset(120));
    assert_eq!(run.count(What::Index), 0);
    let (run, _) = read_from(three_fragments(), Start::Offset(121));
    assert_eq!(run.count(What::Index), 1);
}

#[test]
fn the_index_request_is_bounded_by_what_the_fragment_can_hold() {
    let run = {
        let mut run = Run::new(three_fragments(), small(), Start::Offset(149));
        run.answer_truly(What::Manifest);
        run
    };
    let index = &run.asked[0];
    let size = run.world.root().entries[1].size_bytes;
    assert_eq!((index.what, index.start), (What::Index, 8 + size));
    assert_eq!(index.end, index.start + 20 * (size / 48).min(30));
}

#[test]
fn a_timestamp_starts_at_the_first_chunk_that_is_new_enough() {
    for timestamp_ms in -5..=60 {
        let (run, outcome) = read_from(three_fragments(), Start::Timestamp(timestamp_ms));
        assert_eq!(outcome, ReadOutcome::Local { next_offset: 152 });
        let newer = run
            .world
            .chunks
            .iter()
            .filter(|chunk| chunk.header.timestamp_ms >= timestamp_ms);
        assert_eq!(
            run.delivered(),
            newer.map(|chunk| chunk.bytes.clone()).collect::<Vec<_>>(),
            "{timestamp_ms}"
        );
    }
}

#[test]
fn a_timestamp_newer_than_the_manifest_is_for_the_local_log() {
    let (run, outcome) = read_from(three_fragments(), Start::Timestamp(61));
    assert_eq!(outcome, ReadOutcome::Local { next_offset: 152 });
    assert!(run.asked.is_empty());
}

#[test]
fn an_offset_past_the_manifest_and_an_empty_manifest_are_for_the_local_log() {
    for offset in [152, 153, u64::MAX] {
        let (run, outcome) = read_from(three_fragments(), Start::Offset(offset));
        assert_eq!(
            outcome,
            ReadOutcome::Local {
                next_offset: offset
            }
        );
        assert!(run.asked.is_empty());
    }
    let mut world = World::new(100, &[]);
    world.root = Some(Arc::new(Root::empty_at(70)));
    assert_eq!(
        read_from(world.clone(), Start::Offset(70)).1,
        ReadOutcome::Local { next_offset: 70 }
    );
    assert_eq!(
        read_from(world.clone(), Start::Offset(60)).1,
        ReadOutcome::Local { next_offset: 60 }
    );
    assert_eq!(
        read_from(world, Start::Timestamp(0)).1,
        ReadOutcome::Local { next_offset: 70 }
    );
}

#[test]
fn an_offset_below_the_manifest_starts_at_its_first_offset() {
    let (run, _) = read_from(three_fragments(), Start::Offset(3));
    assert_eq!(run.delivered(), run.world.chunks_from(100));
    assert_eq!(
        run.reader.counters().repositions,
        0,
        "the reader did not skip anything that it was at"
    );
}

#[test]
fn groups_are_fetched_on_the_way() {
    for offset in [100, 117, 121, 150] {
        let mut world = three_fragments();
        world.rebalance(Kind::Group, 2);
        world.rebalance(Kind::KiloGroup, 1);
        let (run, outcome) = read_from(world, Start::Offset(offset));
        assert_eq!(outcome, ReadOutcome::Local { next_offset: 152 });
        assert_eq!(run.delivered(), run.world.chunks_from(offset));
        assert_eq!(run.count(What::Group), if offset == 150 { 0 } else { 2 });
    }
}

#[test]
fn attaching_far_back_takes_three_requests() {
    let mut world = three_fragments();
    world.rebalance(Kind::Group, 2);
    let mut run = Run::new(world, small(), Start::Offset(116));
    run.answer_truly(What::Manifest);
    run.answer_truly(What::Group);
    run.answer_truly(What::Index);
    run.answer_truly(What::Range);
    assert!(!run.queue.is_empty());
    assert_eq!(run.asked.len(), 3);
}

/// Damages the index of the first fragment.
fn with_index(change: impl FnOnce(&mut Vec<u8>)) -> World {
    let mut world = three_fragments();
    let data_end = 8 + usize::try_from(world.root().entries[0].size_bytes).expect("small");
    let object = world.objects.get_mut(&(100, 1)).expect("there");
    let mut index = object.slice(data_end..).to_vec();
    change(&mut index);
    *object = [&object[..data_end], &index].concat().into();
    world
}

#[test]
fn an_unusable_index_is_fetched_again_and_then_done_without() {
    let worlds = [
        with_index(|index| index[0] ^= 0x40),
        with_index(|index| drop(index.drain(..20))),
        with_index(|index| index[40..48].copy_from_slice(&120_u64.to_be_bytes())),
        with_index(|index| index[56..60].copy_from_slice(&5000_u32.to_be_bytes())),
        with_index(|index| index.truncate(19)),
    ];
    for world in worlds {
        for offset in [115, 117] {
            let (run, outcome) = read_from(world.clone(), Start::Offset(offset));
            assert_eq!(outcome, ReadOutcome::Local { next_offset: 152 });
            assert_eq!(run.count(What::Index), 2);
            assert_eq!(run.reader.counters().indexes_unusable, 1);
            assert_eq!(
                run.delivered(),
                run.world.chunks_from(offset),
                "the chunks in front were skipped"
            );
        }
    }
}

#[test]
fn half_a_record_at_the_end_of_an_index_does_no_harm() {
    let (run, _) = read_from(
        with_index(|index| index.extend([1, 2, 3])),
        Start::Offset(117),
    );
    assert_eq!(run.count(What::Index), 1);
    assert_eq!(run.delivered(), run.world.chunks_from(117));
}

#[test]
fn an_unknown_manifest_is_waited_for_and_then_refused() {
    let mut world = three_fragments();
    let root = world.root.take();
    let mut run = Run::new(world, small(), Start::Offset(100));
    while run.now_ms < 20_000 {
        run.answer_truly(What::Manifest);
        run.sleep();
    }
    run.world.root = root.clone();
    assert_eq!(
        run.run_to_the_end(),
        ReadOutcome::Local { next_offset: 152 }
    );

    run.world.root = None;
    let mut run = Run::new(run.world, small(), Start::Offset(100));
    let outcome = run.run_to_the_end();
    assert!(
        matches!(
            outcome,
            ReadOutcome::Failed {
                kind: FailureKind::Unavailable,
                ..
            }
        ),
        "{outcome:?}"
    );
    assert!(
        (30_000..36_000).contains(&run.now_ms),
        "after {} ms",
        run.now_ms
    );
}
