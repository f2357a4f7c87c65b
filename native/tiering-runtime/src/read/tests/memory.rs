//! Many readers, and the memory and the fetches that they share.

use super::world::*;
use super::*;

#[test]
fn ten_readers_stay_within_the_memory_of_the_node_and_none_starves() {
    const MEMORY_BYTES: u64 = 2 << 20;
    let world = World::new(6000, true, |config| {
        config.read_request_size_bytes = 1 << 20;
        config.read_ahead_bytes = 1 << 20;
        config.read_memory_bytes = MEMORY_BYTES;
    });
    world.publish();
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                let mut reader = world.reader(Start::Offset(0));
                assert_eq!(
                    reader.run_to_the_end(),
                    ReadOutcome::Local { next_offset: 6000 }
                );
                assert!(reader.read == world.chunks);
            });
        }
    });
    let most = world.gate.most_running_bytes.load(Ordering::SeqCst);
    assert!(most <= MEMORY_BYTES, "{most} bytes at once");
    world.gate.wait_running(0);
    until("readers are gone", || world.stat("remote_readers") == 0);
    assert_eq!(world.stat("read_memory_reserved_bytes"), 0);
    until("only the cache keeps something", || {
        let used = world.stat("read_memory_used_bytes");
        used <= MEMORY_BYTES as i64 && used <= world.stat("read_cache_bytes")
    });
}

#[test]
fn ten_readers_of_one_history_fetch_it_once() {
    let world = World::new(6000, true, |_| ());
    world.publish();
    std::thread::scope(|scope| {
        for number in 0..10 {
            let world = &world;
            scope.spawn(move || {
                let mut reader = world.reader(Start::Offset(number));
                reader.run_to_the_end();
                assert!(reader.read == world.chunks[number as usize..]);
            });
        }
    });
    let objects: usize = [(0, 1), (3000, 2)]
        .iter()
        .filter_map(|(offset, uid)| world.memory.object(&fragment_key(*offset, *uid)))
        .map(|object| object.bytes.len())
        .sum();
    let fetched = world.stat("read_fetched_bytes");
    assert!(
        fetched * 10 <= 12 * objects as i64,
        "{fetched} bytes fetched of {objects}"
    );
    assert!(world.stat("read_delivered_bytes") > 9 * fetched);
    assert!(world.stat("read_cache_hits") + world.stat("read_cache_joins") > 0);
}

#[test]
fn readers_whose_consumers_sleep_do_not_stop_the_others() {
    let world = World::new(6000, true, |config| {
        config.read_request_size_bytes = 256 << 10;
        config.read_ahead_bytes = 1 << 20;
        config.read_memory_bytes = 1 << 20;
    });
    world.publish();
    let mut sleepers: Vec<Reader> = (0..5).map(|_| world.reader(Start::Offset(0))).collect();
    for sleeper in &mut sleepers {
        while sleeper.read.len() < 1500 {
            if sleeper.take() == ReadOutcome::Wait {
                sleeper.await_wake();
            }
        }
    }
    let mut reader = world.reader(Start::Offset(0));
    assert_eq!(
        reader.run_to_the_end(),
        ReadOutcome::Local { next_offset: 6000 }
    );
    assert!(reader.read == world.chunks);
}

/// Consumers that were given two chunks and then give no credit: the setting is kept to, the cache stays, and whoever asks goes on.
#[test]
fn resting_readers_stay_within_the_setting_and_go_on_when_they_ask() {
    const MEMORY_BYTES: u64 = 16 << 20;
    const READERS: u64 = 100;
    let world = World::of_chunks(1 << 20, 24, true, |config| {
        config.read_memory_bytes = MEMORY_BYTES;
        config.read_ahead_bytes = 8 << 20;
        config.read_request_size_bytes = 1 << 20;
    });
    world.publish();
    let mut readers: Vec<Reader> = (0..READERS)
        .map(|number| world.reader(Start::Offset(number % 20)))
        .collect();
    let mut most = 0;
    let mut take_two = |reader: &mut Reader| {
        let end = reader.read.len() + 2;
        while reader.read.len() < end {
            match reader.handle.read(u64::MAX) {
                ReadOutcome::Chunk { bytes, .. } => reader.read.push(bytes.to_bytes()),
                ReadOutcome::Wait => reader.await_wake(),
                other => panic!("{other:?}"),
            }
            most = most.max(world.stat("read_memory_used_bytes"));
        }
    };
    for round in 0..2 {
        for (number, reader) in readers.iter_mut().enumerate() {
            take_two(reader);
            let start = number % 20;
            let end = start + 2 * (round + 1);
            assert!(reader.read == world.chunks[start..end], "reader {number}");
        }
        let kept = world.stat("read_cache_bytes");
        assert!(kept > 8 << 20, "the cache keeps {kept} bytes");
    }
    assert!(most <= MEMORY_BYTES as i64, "{most} bytes");
    assert!(world.stat("readers_taken_back") > 0, "memory was short");
}
