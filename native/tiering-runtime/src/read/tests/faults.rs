//! What the store does wrong, and what its answers are worth.

use super::world::*;
use super::*;

#[test]
fn faults_of_the_store_are_borne() {
    // An odd number in each fragment, so that the flipped bit is in the middle of a chunk's data.
    let world = World::new(102, true, |_| ());
    world.publish();
    world
        .faults
        .inject(Fault::fail(Operation::GetRange, StoreErrorKind::Throttled));
    world.faults.inject(Fault::panic(Operation::GetRange));
    world.faults.inject(Fault::fail(
        Operation::GetRange,
        StoreErrorKind::AccessDenied,
    ));
    world.faults.inject(Fault::flip_bit(Operation::GetRange));
    let mut reader = world.reader(Start::Offset(0));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 102 }
    );
    assert!(reader.read == world.chunks);
    assert_eq!(world.stat("range_retries"), 4);
    assert_eq!(world.stat("chunk_crc_mismatches"), 1);
    assert_eq!(world.stat("tasks_lost"), 1);
}

/// An ingress without backends, for as many answers as used to end a reader as `lost`, and more.
#[test]
fn review_f9_a_404_that_nobody_has_signed_is_waited_out() {
    let world = World::new(100, true, |_| ());
    world.publish();
    world
        .faults
        .inject(Fault::fail(Operation::GetRange, StoreErrorKind::Bare404).times(8));
    // A listing that the same ingress answers proves nothing either.
    world
        .faults
        .inject(Fault::fail(Operation::List, StoreErrorKind::Bare404).times(4));
    let mut reader = world.reader(Start::Offset(0));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 100 }
    );
    assert!(reader.read == world.chunks);
    assert_eq!(world.stat("readers_lost"), 0);
    assert_eq!(world.stat("places_lost"), 0);
    assert_eq!(world.stat("request_errors_bare_404"), 8 + 4);
    assert_eq!(world.stat("list_requests"), 8);
}

#[test]
fn an_archived_object_is_an_alarm_until_it_is_restored() {
    let world = World::new(100, true, |_| ());
    world.publish();
    let key = fragment_key(50, 2);
    world.faults.inject(
        Fault::fail(Operation::GetRange, StoreErrorKind::Archived)
            .on(&key)
            .times(u32::MAX),
    );
    let mut reader = world.reader(Start::Offset(0));
    // The second request is the answer to the first one's failure.
    let deadline = std::time::Instant::now() + SOON;
    while world.stat("request_errors_archived") < 2 {
        assert!(std::time::Instant::now() < deadline, "asked again");
        assert_eq!(reader.take(), ReadOutcome::Wait);
        std::thread::yield_now();
    }
    assert_eq!(world.stat("places_archived"), 1);
    world.faults.heal();
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 100 }
    );
    assert!(reader.read == world.chunks);
    assert_eq!(world.stat("places_archived"), 0, "restored");
}

#[test]
fn damage_that_stays_ends_the_reader_loudly() {
    let world = World::new(100, true, |_| ());
    let key = fragment_key(50, 2);
    let mut object = world.memory.object(&key).expect("there").bytes.to_vec();
    object[100] ^= 1;
    world.memory.insert(&key, object);
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    assert!(matches!(
        reader.run_to_the_end(),
        ReadOutcome::Failed {
            kind: FailureKind::Corrupt,
            ..
        }
    ));
    assert!(reader.read == world.chunks[..50]);
    assert_eq!(world.stat("readers_failed"), 1);
    assert_eq!(world.stat("readers_corrupt"), 1);
    assert_eq!(world.stat("read_refetches_past_cache"), 1);
    assert_eq!(world.stat("places_corrupt"), 1);
    // Restored: the next reader comes past the place, and the alarm is over.
    object_restored(&world, &key);
    let mut reader = world.reader(Start::Offset(50));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 100 }
    );
    assert_eq!(world.stat("places_corrupt"), 0);
}

fn object_restored(world: &World, key: &str) {
    let mut object = world.memory.object(key).expect("there").bytes.to_vec();
    object[100] ^= 1;
    world.memory.insert(key, object);
}

#[test]
fn bytes_that_were_spoilt_on_the_way_are_fetched_past_the_cache_once_and_nobody_sees_them() {
    let world = World::new(102, true, |_| ());
    world.publish();
    // The middle of the first object is in the data of a chunk.
    world.faults.inject(Fault::flip_bit(Operation::GetRange));
    let mut readers: Vec<Reader> = (0..3).map(|_| world.reader(Start::Offset(0))).collect();
    for reader in &mut readers {
        assert_eq!(
            reader.run_to_the_end(),
            ReadOutcome::Local { next_offset: 102 }
        );
        assert!(reader.read == world.chunks);
    }
    assert!(world.stat("chunk_crc_mismatches") >= 1);
    assert!(world.stat("read_refetches_past_cache") >= 1);
    assert_eq!(world.stat("readers_corrupt"), 0);
    // What is in the cache now is right.
    let mismatches = world.stat("chunk_crc_mismatches");
    let mut reader = world.reader(Start::Offset(0));
    reader.run_to_the_end();
    assert!(reader.read == world.chunks);
    assert_eq!(world.stat("chunk_crc_mismatches"), mismatches);
}

#[test]
fn an_answer_that_breaks_off_costs_what_was_missing() {
    let world = World::new(2000, true, |_| ());
    world.publish();
    let object = world.memory.object(&fragment_key(0, 1)).expect("there");
    let fault = Fault::break_off(Operation::GetRange, 300 << 10).on(&fragment_key(0, 1));
    world.faults.inject(fault);
    let mut reader = world.reader(Start::Offset(0));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 2000 }
    );
    assert!(reader.read == world.chunks);
    assert_eq!(world.stat("range_retries"), 1);
    let both = 2 * object.bytes.len() as i64;
    // A block at most came twice.
    assert!(world.stat("read_fetched_bytes") <= both + (256 << 10));
}
