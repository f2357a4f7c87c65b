//! Readers over a store in memory whose answers can be held back.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::engine::Engine;
use crate::manifests::ResolvedManifest;
use crate::remote_tier::gate::Gate;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::remote_tier::{
    DeleteOutcome, Described, ListPage, ObjectMeta, PutRequest, RemoteTier, StoreErrorKind,
    StoreFuture,
};
use crate::settings::Config;
use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::crc::crc32;
use log_format::fragment::{FragmentIndexRecord, HEADER};
use log_format::key::KeySpace;
use log_format::manifest::{Entry, Kind, Root};

const SOON: Duration = Duration::from_secs(30);
const STREAM: &str = "__s_1";

struct WakeUps(Mutex<Sender<()>>);

impl Wake for WakeUps {
    fn wake(&self) {
        // The test may be over.
        self.0.lock().expect("whole").send(()).ok();
    }
}

/// An engine over a stream of two fragments of chunks of about 1 kB.
struct World {
    engine: Engine,
    memory: Arc<MemoryTier>,
    faults: Arc<Faulty>,
    gate: Arc<Gate>,
    root: Root,
    chunks: Vec<Bytes>,
}

struct Reader {
    handle: ReaderHandle,
    wake_ups: Receiver<()>,
    waits: usize,
    wakes: usize,
    read: Vec<Bytes>,
}

impl World {
    fn new(num_chunks: u64, open: bool, change: impl FnOnce(&mut Config)) -> Self {
        Self::of_chunks(1000, num_chunks, open, change)
    }

    fn of_chunks(
        chunk_bytes: u64,
        num_chunks: u64,
        open: bool,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let memory = Arc::new(MemoryTier::new());
        let (mut chunks, mut entries) = (Vec::new(), Vec::new());
        let half = num_chunks / 2;
        for (range, uid) in [(0..half, 1), (half..num_chunks, 2)] {
            entries.push(store_fragment(
                &memory,
                range,
                uid,
                chunk_bytes,
                &mut chunks,
            ));
        }
        let root = Root {
            first_offset: 0,
            next_offset: num_chunks,
            first_timestamp_ms: 0,
            first_last_timestamp_ms: entries[0].last_timestamp_ms,
            total_size_bytes: entries
                .iter()
                .map(|entry| u128::from(entry.size_bytes))
                .sum(),
            entries,
        };
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<_>));
        let gate = Gate::new(Arc::clone(&faults) as Arc<_>, open);
        let mut config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        change(&mut config);
        let engine = Engine::open_with(config, Arc::clone(&gate) as Arc<_>).expect("opened");
        Self {
            engine,
            memory,
            faults,
            gate,
            root,
            chunks,
        }
    }

    fn publish(&self) {
        let root = Arc::new(self.root.clone());
        self.engine.manifests().publish(
            STREAM,
            ResolvedManifest {
                root,
                revision: 1,
                epoch: 1,
                pointer: None,
            },
        );
    }

    fn reader(&self, start: Start) -> Reader {
        let (sender, wake_ups) = mpsc::channel();
        let handle = self
            .engine
            .open_reader(STREAM, start, Arc::new(WakeUps(Mutex::new(sender))))
            .expect("open");
        Reader {
            handle,
            wake_ups,
            waits: 0,
            wakes: 0,
            read: Vec::new(),
        }
    }

    fn stat(&self, name: &str) -> i64 {
        let rows = self.engine.stats();
        rows.iter()
            .find(|(row, _)| *row == name)
            .unwrap_or_else(|| panic!("no row {name}"))
            .1
    }
}

impl Reader {
    /// Takes what is there.
    fn take(&mut self) -> ReadOutcome {
        loop {
            match self.handle.read(u64::MAX) {
                // A copy: what is kept of a chunk keeps the memory that it lies in.
                ReadOutcome::Chunk { bytes, .. } => {
                    (self.read).push(Bytes::copy_from_slice(&bytes.to_bytes()));
                }
                outcome => {
                    self.waits += usize::from(outcome == ReadOutcome::Wait);
                    return outcome;
                }
            }
        }
    }

    fn await_wake(&mut self) {
        self.wake_ups.recv_timeout(SOON).expect("woken");
        self.wakes += 1;
    }

    fn run_to_the_end(&mut self) -> ReadOutcome {
        loop {
            match self.take() {
                ReadOutcome::Wait => self.await_wake(),
                outcome => return outcome,
            }
        }
    }
}

fn store_fragment(
    memory: &MemoryTier,
    offsets: Range<u64>,
    uid: u32,
    chunk_bytes: u64,
    chunks: &mut Vec<Bytes>,
) -> Entry {
    let (mut object, mut index) = (HEADER.to_vec(), Vec::new());
    for offset in offsets.clone() {
        let data: Vec<u8> = (0..chunk_bytes + offset % 7)
            .map(|byte| (byte * 31 + offset) as u8)
            .collect();
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp_ms: offset as i64,
            epoch: 1,
            chunk_id: offset,
            data_crc: crc32(&data),
            data_bytes: data.len() as u32,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        let position = (object.len() - HEADER.len()) as u32;
        index.extend(
            FragmentIndexRecord {
                offset,
                timestamp_ms: offset as i64,
                position,
            }
            .encode(),
        );
        let chunk = [&header.encode()[..], &data].concat();
        object.extend(&chunk);
        chunks.push(chunk.into());
    }
    let size_bytes = (object.len() - HEADER.len()) as u64;
    object.extend(index);
    memory.insert(&fragment_key(offsets.start, uid), object);
    Entry {
        first_offset: offsets.start,
        first_timestamp_ms: offsets.start as i64,
        last_timestamp_ms: offsets.end as i64 - 1,
        kind: Kind::Fragment,
        size_bytes,
        uid,
    }
}

fn fragment_key(first_offset: u64, uid: u32) -> String {
    KeySpace::new("rabbitmq/stream").fragment(STREAM, first_offset, uid)
}

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

/// A store over a long line.
struct Far(Arc<dyn RemoteTier>);

impl RemoteTier for Far {
    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            self.0.get_range(key, range).await
        })
    }

    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        self.0.put(request)
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.0.get(key, max_bytes)
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.0.get_described(key, max_bytes)
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.0.head(key)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.0.list(prefix, token, max_keys)
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.0.delete(keys)
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.0.probe()
    }
}

struct Woken(tokio::sync::Notify);

impl Wake for Woken {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// Reads from `start` to the end; returns the time that it took, in virtual milliseconds.
async fn read_over_a_long_line(pause: bool) -> u128 {
    let world = World::of_chunks(64 << 10, 600, true, |config| {
        config.read_memory_bytes = 8 << 20;
        config.read_ahead_bytes = 8 << 20;
        config.read_request_size_bytes = 1 << 20;
    });
    let config = Config {
        bucket: "bucket".to_owned(),
        read_memory_bytes: 8 << 20,
        read_ahead_bytes: 8 << 20,
        read_request_size_bytes: 1 << 20,
        ..Config::default()
    };
    let far = Arc::new(Far(Arc::clone(&world.memory) as Arc<_>));
    let engine = Engine::open_with(config, far).expect("opened");
    let root = Arc::new(world.root.clone());
    let (revision, epoch, pointer) = (1, 1, None);
    let manifest = ResolvedManifest {
        root,
        revision,
        epoch,
        pointer,
    };
    engine.manifests().publish(STREAM, manifest);
    // On this runtime, whose time is virtual.
    let open = |start: u64| {
        let woken = Arc::new(Woken(tokio::sync::Notify::new()));
        let wake = Arc::clone(&woken) as Arc<dyn Wake>;
        let shared = Arc::clone(engine.shared());
        let outlet = Arc::new(handle::Outlet::new(shared.clock, wake));
        let driver = driver::Driver::new(shared, STREAM, Start::Offset(start), Arc::clone(&outlet));
        tokio::spawn(driver.run());
        (outlet, woken)
    };
    let read = async |(outlet, woken): &(Arc<handle::Outlet>, Arc<Woken>), until: usize| {
        let mut chunks = 0;
        while chunks < until {
            match outlet.take(u64::MAX) {
                ReadOutcome::Chunk { .. } => chunks += 1,
                ReadOutcome::Wait => woken.0.notified().await,
                _ => break,
            }
        }
        chunks
    };
    let held = |engine: &Engine| engine.shared().stats.read_memory_reserved_bytes.get();
    // Each may have half of it ahead.
    let paused: Vec<_> = [0, 150].into_iter().filter(|_| pause).map(open).collect();
    for first in &paused {
        assert_eq!(read(first, 80).await, 80);
    }
    if pause {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let held = held(&engine);
        assert!(held > 6 << 20, "those that are paused hold {held}");
    }
    let second = open(301);
    let began = tokio::time::Instant::now();
    assert_eq!(read(&second, usize::MAX).await, 299);
    let took = began.elapsed().as_millis();
    // They go on where they were.
    for (first, left) in paused.iter().zip([520, 370]) {
        assert_eq!(read(first, usize::MAX).await, left);
    }
    took
}

#[tokio::test(start_paused = true)]
async fn paused_readers_that_hold_all_cost_another_less_than_half_of_its_rate() {
    let alone_ms = read_over_a_long_line(false).await;
    let beside_ms = read_over_a_long_line(true).await;
    assert!(alone_ms > 500, "{alone_ms} ms");
    assert!(
        beside_ms <= 2 * alone_ms,
        "{beside_ms} instead of {alone_ms} ms"
    );
}

/// Waits until something holds that other threads bring about.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + SOON;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

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
