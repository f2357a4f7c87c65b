//! The memory that indexes of pending fragments take is one budget for the node.

use super::*;

/// Of all streams, in tests.
const BUDGET_BYTES: usize = 20_000;
/// What one scan may add.
const BATCH_BYTES: usize = 4_096 * 20;

#[test]
fn an_outage_leaves_the_node_s_index_memory_bounded_and_loses_nothing() {
    let mut world = World::new(|config| config.fragment_size_bytes = 1 << 30);
    world.log.append_many(10_000, 1);
    let fault = Fault::fail(Operation::Put, StoreErrorKind::Server);
    world.faults.inject(fault.times(u32::MAX));
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    world.until(&stream, |push| matches!(push, UploadPush::Problem { .. }));
    let status = stream.handle.status();
    assert!(status.counters.room_cuts > 0, "its path ran");
    let held_bytes = status.machine.index_bytes;
    assert!(held_bytes <= BUDGET_BYTES + BATCH_BYTES, "{held_bytes}");
    let stats = &world.engine.shared().stats;
    assert_eq!(
        stats.streams_index_bytes.get(),
        i64::try_from(held_bytes).expect("small")
    );
    world.faults.heal();
    cut_until(&mut world, &stream);
    world.assert_faithful();
    wait_until(|| stream.handle.status().machine.index_bytes == 0);
}
