//! How readers end, and that nothing of them stays behind.

use super::world::*;
use super::*;

#[test]
fn dropping_the_handle_cancels_everything() {
    let world = World::new(10, false, |_| ());
    world.publish();
    let reader = world.reader(Start::Offset(0));
    world.gate.wait_running(1);
    assert_eq!(world.stat("remote_readers"), 1);
    drop(reader);
    world.gate.wait_running(0);
}

#[test]
fn closing_the_engine_ends_its_readers() {
    let world = World::new(10, false, |_| ());
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    world.gate.wait_running(1);
    assert_eq!(reader.take(), ReadOutcome::Wait);
    world.engine.close();
    world.gate.wait_running(0);
    reader.await_wake();
    assert!(matches!(
        reader.take(),
        ReadOutcome::Failed {
            kind: FailureKind::Unavailable,
            ..
        }
    ));
    assert!(
        world
            .engine
            .open_reader(
                STREAM,
                Start::Offset(0),
                Arc::new(WakeUps(Mutex::new(mpsc::channel().0)))
            )
            .is_err()
    );
}

#[test]
fn engines_that_are_closed_under_load_end_with_all_that_is_theirs() {
    const CLOSES: u32 = 1_000;
    const ENOUGH: Duration = Duration::from_secs(10);
    let began = std::time::Instant::now();
    let (mut closes, mut served) = (0, 0);
    while closes < CLOSES && began.elapsed() < ENOUGH {
        let world = World::new(400, true, |config| config.read_memory_bytes = 1 << 20);
        world.publish();
        let mut readers: Vec<Reader> = (0..8)
            .map(|number| world.reader(Start::Offset(number * 40)))
            .collect();
        // At another moment each time.
        for _ in 0..closes % 5 {
            readers[0]
                .wake_ups
                .recv_timeout(Duration::from_millis(1))
                .ok();
            readers[0].take();
        }
        world.engine.close();
        for reader in &mut readers {
            // To the end of the stream, or to that of the engine; nobody is forgotten.
            reader.run_to_the_end();
            served += reader.read.len();
        }
        let shared = Arc::downgrade(world.engine.shared());
        drop((readers, world));
        until("the engine's memory is given back", || {
            shared.strong_count() == 0
        });
        closes += 1;
    }
    assert!(
        closes >= 50 && served > 0,
        "{closes} closes, {served} chunks"
    );
}

#[test]
fn a_closed_reader_says_so() {
    let world = World::new(10, false, |_| ());
    world.publish();
    let mut reader = world.reader(Start::Offset(0));
    reader.handle.close();
    assert!(matches!(
        reader.take(),
        ReadOutcome::Failed {
            kind: FailureKind::Unavailable,
            ..
        }
    ));
    assert!(reader.wake_ups.try_recv().is_err());
}

/// Waits until something holds that other threads bring about.
fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

#[test]
fn ten_thousand_readers_that_come_and_go_leave_nothing_behind() {
    const CYCLES: usize = 10_000;
    let world = World::new(2000, false, |config| {
        config.read_memory_bytes = 64 << 20;
    });
    world.publish();
    let runtime = world.engine.runtime().expect("open");
    let alive = || runtime.metrics().num_alive_tasks();
    let tasks_before = alive();
    let descriptors_before = open_descriptors();
    // Killed while the store does not answer, each at another place, up to a hundred at a time.
    let mut readers = std::collections::VecDeque::new();
    for cycle in 0..CYCLES / 2 {
        readers.push_back(world.reader(Start::Offset(cycle as u64 % 2000)));
        if readers.len() > 100 {
            readers.pop_front();
        }
    }
    world.gate.wait_at_least(1);
    drop(readers);
    world.gate.wait_running(0);
    assert_eq!(world.stat("chunks_served_remote"), 0);
    // Killed with chunks that nobody took.
    world.gate.open.add_permits(1 << 20);
    for cycle in 0..CYCLES / 2 {
        let mut reader = world.reader(Start::Offset(cycle as u64 % 2000));
        while matches!(reader.handle.read(u64::MAX), ReadOutcome::Wait) {
            reader.await_wake();
        }
    }
    assert!(world.stat("chunks_served_remote") >= CYCLES as i64 / 2);
    until("readers are gone", || world.stat("remote_readers") == 0);
    until("memory is given back", || {
        world.stat("read_memory_reserved_bytes") == 0
    });
    until("tasks are gone", || alive() <= tasks_before);
    world.gate.wait_running(0);
    let shared = world.engine.shared();
    assert_eq!(shared.read_cache.pending(), 0);
    until("only the cache keeps something", || {
        world.stat("read_memory_used_bytes") <= world.stat("read_cache_bytes")
    });
    assert!(shared.read_memory.used_bytes() <= shared.read_memory.capacity_bytes());
    assert_eq!(world.stat("readers_waiting_for_memory"), 0);
    assert!(
        open_descriptors() <= descriptors_before + 8,
        "descriptors of tests that run beside this one"
    );
}
