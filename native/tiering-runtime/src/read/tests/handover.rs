//! Chunks reach the consumer, and it is woken as often as it waits.

use super::world::*;
use super::*;

#[test]
fn every_chunk_arrives_and_the_local_log_follows() {
    let world = World::new(3000, true, |_| ());
    world.publish();
    for start in [0, 1, 1234, 1500, 2999] {
        let mut reader = world.reader(Start::Offset(start));
        assert_eq!(
            reader.run_to_the_end(),
            ReadOutcome::Local { next_offset: 3000 }
        );
        assert!(
            reader.read == world.chunks[start as usize..],
            "from {start}"
        );
    }
    assert_eq!(world.stat("to_local_transitions"), 5);
    assert_eq!(
        world.stat("chunks_served_remote"),
        3000 + 2999 + 1766 + 1500 + 1
    );
    assert!(world.stat("read_ranges") > 0 && world.stat("read_bytes") > 3_000_000);
}

#[test]
fn a_slow_store_does_not_hold_a_read_up() {
    let world = World::new(10, false, |_| ());
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    world.gate.wait_running(1);
    assert_eq!(reader.take(), ReadOutcome::Wait);
    assert!(reader.wake_ups.try_recv().is_err());
    world.gate.open.add_permits(1_000);
    reader.await_wake();
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 10 }
    );
}

#[test]
fn every_wait_is_woken_once_and_nothing_else_wakes() {
    let world = World::new(4000, true, |_| ());
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 4000 }
    );
    assert!(
        reader.wake_ups.try_recv().is_err(),
        "no wake-up that nobody waited for"
    );
    assert_eq!(reader.wakes, reader.waits);
}

#[test]
fn a_chunk_that_is_not_committed_here_is_held_back() {
    let world = World::new(10, true, |_| ());
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    loop {
        match reader.handle.read(4) {
            ReadOutcome::Chunk { header, bytes, .. } => {
                reader.read.push(bytes.to_bytes());
                if header.chunk_id == 4 {
                    break;
                }
            }
            ReadOutcome::Wait => reader.await_wake(),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(reader.handle.read(4), ReadOutcome::Wait);
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 10 }
    );
    assert!(reader.read == world.chunks);
}

#[test]
fn a_manifest_that_is_pending_is_waited_for() {
    let world = World::new(10, true, |_| ());
    world.engine.manifests().mark_pending(STREAM);
    let mut reader = world.reader(Start::Timestamp(7));
    assert_eq!(reader.take(), ReadOutcome::Wait);
    world.publish();
    reader.await_wake();
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 10 }
    );
    assert_eq!(reader.read, world.chunks[7..]);
}
