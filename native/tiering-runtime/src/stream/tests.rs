//! A stream from segment files to objects, over a store in memory, with a shell and a metadata store made of a variable.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use log_format::manifest::{Entry, Group, Kind, Root};
use log_format::{crc, fragment};
use tempfile::TempDir;
use tiering_core::replica_reader::{Activity, Pointer};

use super::*;
use crate::engine::Engine;
use crate::local_log::test_log::{TestChunk, TestLog};
use crate::remote_tier::StoreErrorKind;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::settings::Config;

const SOON: Duration = Duration::from_secs(30);
const STREAM: &str = "__s_1";

struct Sink(Sender<StreamPush>);

impl StreamSink for Sink {
    fn push(&self, push: StreamPush) {
        // The test may be over.
        drop(self.0.send(push));
    }
}

/// Everything around a stream.
struct World {
    engine: Engine,
    memory: Arc<MemoryTier>,
    faults: Arc<Faulty>,
    directory: TempDir,
    log: TestLog,
    pointer: Option<Pointer>,
    anchored: bool,
}

/// One opened stream and what it pushes.
struct Opened {
    handle: StreamHandle,
    pushes: Receiver<StreamPush>,
}

impl World {
    fn new(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config {
            bucket: "bucket".to_owned(),
            cluster: "test cluster".to_owned(),
            fragment_size_bytes: 10_000,
            persist_threshold: 1,
            persist_interval_ms: 10,
            ..Config::default()
        };
        change(&mut config);
        let memory = Arc::new(MemoryTier::new());
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<_>));
        let engine = Engine::open_with(config, Arc::clone(&faults) as Arc<_>).expect("opened");
        let directory = tempfile::tempdir().expect("a directory");
        let log = TestLog::create(directory.path(), 0);
        Self {
            engine,
            memory,
            faults,
            directory,
            log,
            pointer: None,
            anchored: false,
        }
    }

    fn open(&self, epoch: u64) -> Opened {
        let (sender, pushes) = mpsc::channel();
        let config = StreamConfig {
            stream_id: STREAM.to_owned(),
            directory: self.directory.path().to_owned(),
            epoch,
            queue: "büro".to_owned(),
            vhost: "/".to_owned(),
        };
        let handle = self
            .engine
            .open_stream(config, Arc::new(Sink(sender)))
            .expect("open");
        Opened { handle, pushes }
    }

    fn tell_committed(&self, stream: &Opened, local_first_chunk_id: u64) {
        let committed_chunk_id = Some(self.log.last_chunk_id());
        let local_first_chunk_id = Some(local_first_chunk_id);
        stream
            .handle
            .event(StreamEvent::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            })
            .expect("taken");
    }

    fn answer(&mut self, stream: &Opened, push: &StreamPush) {
        let answer = match push {
            StreamPush::ReadPointer => StreamEvent::Pointer(
                self.pointer
                    .map_or(PointerRead::NotFound, PointerRead::Found),
            ),
            StreamPush::WriteAnchor => {
                self.anchored = true;
                StreamEvent::Anchor { ok: true }
            }
            StreamPush::CommitPointer {
                epoch,
                uid,
                expected_revision,
            } => {
                let current = self.pointer.map_or(0, |pointer| pointer.revision);
                StreamEvent::PointerCommitted(if current == *expected_revision {
                    let revision = current + 1;
                    self.pointer = Some(Pointer {
                        epoch: *epoch,
                        uid: *uid,
                        revision,
                    });
                    CommitOutcome::Committed { revision }
                } else {
                    CommitOutcome::Conflict
                })
            }
            _ => return,
        };
        // A stream that has stopped meanwhile takes no answer.
        stream.handle.event(answer).ok();
    }

    /// Answers questions until a push fits; gives back all that came, the fitting one last.
    fn until(&mut self, stream: &Opened, fits: impl Fn(&StreamPush) -> bool) -> Vec<StreamPush> {
        let mut seen = Vec::new();
        loop {
            let push = stream.pushes.recv_timeout(SOON);
            let push = push.unwrap_or_else(|_| {
                panic!("never came, only {seen:?}; {:?}", stream.handle.status())
            });
            self.answer(stream, &push);
            seen.push(push.clone());
            if fits(&push) {
                return seen;
            }
        }
    }

    fn until_persisted(&mut self, stream: &Opened, next_offset: u64) -> Range {
        let seen = self.until(
            stream,
            |push| matches!(push, StreamPush::Range(range) if range.next_offset >= next_offset),
        );
        match seen.last() {
            Some(StreamPush::Range(range)) => {
                assert_eq!(range.pointer, self.pointer, "what other nodes are told");
                *range
            }
            other => panic!("not a range: {other:?}"),
        }
    }

    fn root(&self) -> Root {
        let pointer = self.pointer.expect("persisted");
        let key = self
            .engine
            .shared()
            .keys
            .root(STREAM, pointer.epoch, pointer.uid);
        Root::decode(&self.memory.object(&key).expect("stored").bytes).expect("a root")
    }

    /// The fragments of a tree, from its first offset on.
    fn leaves(&self, entries: &[Entry], floor: u64, leaves: &mut Vec<Entry>) {
        for (number, entry) in entries.iter().enumerate() {
            let next = entries.get(number + 1);
            if next.is_some_and(|next| next.first_offset <= floor) {
                continue;
            }
            if entry.kind == Kind::Fragment {
                leaves.push(*entry);
                continue;
            }
            let keys = &self.engine.shared().keys;
            let key = keys.group(STREAM, entry.kind, entry.first_offset, entry.uid);
            let object = self.memory.object(&key).expect("stored");
            let group = Group::decode(entry.kind, &object.bytes).expect("a group");
            assert_eq!(
                object.metadata.get("first-offset"),
                Some(&entry.first_offset.to_string())
            );
            self.leaves(&group.entries, floor, leaves);
        }
    }

    /// Every object of the manifest is, byte for byte, what the log has.
    fn assert_faithful(&self) {
        let root = self.root();
        assert_eq!(root.check(), Ok(()));
        let mut entries = Vec::new();
        self.leaves(&root.entries, root.first_offset, &mut entries);
        entries.retain(|entry| entry.first_offset >= root.first_offset);
        let total_bytes: u128 = entries
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum();
        assert_eq!(total_bytes, root.total_size_bytes);
        let mut chunks = self
            .log
            .chunks
            .iter()
            .filter(|chunk| chunk.header.chunk_id >= root.first_offset)
            .peekable();
        for (number, entry) in entries.iter().enumerate() {
            let end = entries
                .get(number + 1)
                .map_or(root.next_offset, |entry| entry.first_offset);
            let (mut bytes, mut index, mut count) = (fragment::HEADER.to_vec(), Vec::new(), 0u32);
            assert_eq!(
                chunks.peek().map(|chunk| chunk.header.chunk_id),
                Some(entry.first_offset)
            );
            while let Some(chunk) = chunks.next_if(|chunk| chunk.header.chunk_id < end) {
                let record = fragment::FragmentIndexRecord {
                    offset: chunk.header.chunk_id,
                    timestamp_ms: chunk.header.timestamp_ms,
                    position: u32::try_from(bytes.len() - fragment::HEADER_BYTES).expect("small"),
                };
                index.extend_from_slice(&record.encode());
                bytes.extend_from_slice(&chunk.bytes);
                count += 1;
            }
            assert_eq!(
                entry.size_bytes,
                (bytes.len() - fragment::HEADER_BYTES) as u64
            );
            bytes.extend_from_slice(&index);
            let key = self
                .engine
                .shared()
                .keys
                .fragment(STREAM, entry.first_offset, entry.uid);
            let object = self.memory.object(&key).expect("stored");
            assert!(
                object.bytes == bytes,
                "fragment {} is not what the log has",
                entry.first_offset
            );
            assert_eq!(crc::crc32(&object.bytes), crc::crc32(&bytes));
            let metadata = |name: &str| object.metadata.get(name).map(String::as_str);
            assert_eq!(metadata("stream"), Some(STREAM));
            assert_eq!(metadata("queue"), Some("b%C3%BCro"));
            assert_eq!(metadata("cluster"), Some("test%20cluster"));
            assert_eq!(metadata("next-offset"), Some(end.to_string().as_str()));
            assert_eq!(metadata("chunks"), Some(count.to_string().as_str()));
            assert_eq!(
                metadata("data-size"),
                Some(entry.size_bytes.to_string().as_str())
            );
        }
        let known = self.engine.manifests().resolved(STREAM).expect("published");
        assert_eq!(*known.root, root);
    }
}

fn fill(log: &mut TestLog) {
    use log_format::chunk::ChunkType;
    for round in 0..4u8 {
        log.append_many(40, 500);
        log.append(&TestChunk {
            filter: vec![round; 16],
            ..TestChunk::user(100, vec![7; 20_000])
        });
        log.append(&TestChunk {
            trailer: vec![round; 90],
            ..TestChunk::user(3, vec![8; 300])
        });
        log.append(&TestChunk {
            chunk_type: ChunkType::TrackingDelta,
            ..TestChunk::user(1, vec![9; 30])
        });
        log.roll();
    }
    log.append_many(5, 100);
}

#[test]
fn committed_chunks_become_faithful_objects() {
    let mut world = World::new(|_| ());
    fill(&mut world.log);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    stream.handle.event(StreamEvent::Cut).expect("taken");
    let next_offset = world.log.next_offset;
    let rest_is_cut = loop {
        let range = world.until_persisted(&stream, 1);
        if range.next_offset == next_offset {
            break range;
        }
        stream.handle.event(StreamEvent::Cut).expect("taken");
    };
    assert!(world.anchored);
    assert_eq!((rest_is_cut.first_offset, rest_is_cut.epoch), (0, 1));
    world.assert_faithful();
    assert!(world.root().entries.len() > 5);
    let status = stream.handle.status();
    assert_eq!(status.machine.persisted_next_offset, next_offset);
    assert_eq!(status.machine.activity, Activity::Draining);
    assert_eq!(status.machine.problem, None);
}

fn cut_until(world: &mut World, stream: &Opened) {
    let next_offset = world.log.next_offset;
    while world.pointer.is_none() || world.root().next_offset < next_offset {
        stream.handle.event(StreamEvent::Cut).expect("taken");
        world.until(stream, |push| matches!(push, StreamPush::Range(_)));
    }
}

#[test]
fn a_log_that_grows_is_followed_and_a_later_writer_goes_on() {
    let mut world = World::new(|_| ());
    let stream = world.open(1);
    world.until(
        &stream,
        |push| matches!(push, StreamPush::Range(range) if range.revision == 0),
    );
    for _ in 0..10 {
        world.log.append_many(30, 700);
        world.log.roll();
        world.tell_committed(&stream, 0);
        let next_offset = world.log.next_offset - 20;
        world.until_persisted(&stream, next_offset);
    }
    drop(stream);
    let before = world.root();
    world.log.append_many(10, 700);
    let stream = world.open(2);
    world.tell_committed(&stream, 0);
    let resolved = world.until_persisted(&stream, 1);
    assert!(resolved.next_offset >= before.next_offset);
    cut_until(&mut world, &stream);
    world.assert_faithful();
    assert_eq!(
        world.root().entries.get(..before.entries.len()),
        Some(before.entries.as_slice())
    );
    assert_eq!(world.pointer.map(|pointer| pointer.epoch), Some(2));
}

#[test]
fn faults_delay_and_never_lose() {
    let mut world = World::new(|_| ());
    fill(&mut world.log);
    for _ in 0..3 {
        world
            .faults
            .inject(Fault::panic(Operation::Put).on("fragment"));
        world.faults.inject(
            Fault::fail(Operation::Put, StoreErrorKind::Server)
                .on("fragment")
                .times(3),
        );
        world
            .faults
            .inject(Fault::lose_answer(Operation::Put, StoreErrorKind::Connection).on("fragment"));
        world
            .faults
            .inject(Fault::lose_answer(Operation::Put, StoreErrorKind::Timeout).on("root"));
        world.faults.inject(Fault::panic(Operation::Put).on("root"));
    }
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    cut_until(&mut world, &stream);
    world.assert_faithful();
    assert!(world.engine.shared().stats.tasks_lost.get() >= 3);
    assert_eq!(world.engine.shared().stats.transfers_in_flight.get(), 0);
}

#[test]
fn a_refusal_is_told_once_and_told_to_be_over() {
    let mut world = World::new(|_| ());
    world.log.append_many(40, 500);
    world
        .faults
        .inject(Fault::fail(Operation::Put, StoreErrorKind::AccessDenied).on("fragment"));
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    let seen = world.until(&stream, |push| {
        matches!(push, StreamPush::Recovered { kind: "transfer" })
    });
    let problems = seen.iter().filter(|push| matches!(push, StreamPush::Problem { kind: "transfer", text } if text.contains("access_denied")));
    assert_eq!(problems.count(), 1, "{seen:?}");
    cut_until(&mut world, &stream);
    world.assert_faithful();
}

#[test]
fn damaged_local_bytes_never_become_an_object() {
    use std::os::unix::fs::FileExt;
    let mut world = World::new(|_| ());
    world.log.append_many(40, 500);
    let chunk = world.log.chunks[3].clone();
    let path = world
        .directory
        .path()
        .join(log_format::segment::file_name(chunk.segment_offset));
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .expect("opened");
    file.write_at(b"?", chunk.position + 100).expect("damaged");
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    let seen = world.until(&stream, |push| matches!(push, StreamPush::Problem { .. }));
    assert!(
        matches!(seen.last(), Some(StreamPush::Problem { kind: "transfer", text }) if text.contains("local_corrupt")),
        "{seen:?}"
    );
    assert!(
        !world
            .memory
            .keys()
            .iter()
            .any(|key| key.contains("/00000000000000000000.")),
        "{:?}",
        world.memory.keys()
    );
}

#[test]
fn a_stream_that_was_deleted_stops() {
    let mut world = World::new(|_| ());
    world.log.append_many(40, 500);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    world.until_persisted(&stream, 1);
    world.log.append_many(40, 500);
    world.tell_committed(&stream, 0);
    loop {
        match stream.pushes.recv_timeout(SOON).expect("a push") {
            StreamPush::CommitPointer { .. } => {
                stream
                    .handle
                    .event(StreamEvent::PointerCommitted(CommitOutcome::NotFound))
                    .expect("taken");
            }
            StreamPush::Stopped(reason) => {
                assert_eq!(reason, Stopped::Deleted);
                break;
            }
            other => world.answer(&stream, &other),
        }
    }
    assert_eq!(
        stream.pushes.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected),
        "nothing comes after it"
    );
    assert_eq!(
        stream.handle.event(StreamEvent::Cut),
        Err(EventError::Closed)
    );
    assert_eq!(stream.handle.status().machine.activity, Activity::Stopped);
}

#[test]
fn what_retention_took_first_is_told_and_left_out() {
    let mut world = World::new(|_| ());
    world.log.append_many(40, 500);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    cut_until(&mut world, &stream);
    drop(stream);
    world.log.append_many(40, 500);
    world.log.roll();
    world.log.append_many(40, 500);
    world.log.trim(80);
    let stream = world.open(2);
    world.tell_committed(&stream, 80);
    let seen = world.until(&stream, |push| matches!(push, StreamPush::Recovery { .. }));
    assert!(
        matches!(
            seen.last(),
            Some(StreamPush::Recovery {
                kind: Recovery::LocalLogAhead,
                to_offset: 80,
                ..
            })
        ),
        "{seen:?}"
    );
    world.until(&stream, |push| matches!(push, StreamPush::Range(range) if range.first_offset == 80 && range.next_offset > 80));
    assert_eq!(world.root().first_offset, 80);
    world.assert_faithful();
}

fn wait_until(holds: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "never happened");
        std::thread::yield_now();
    }
}

#[test]
fn dropping_the_handle_cancels_everything() {
    let mut world = World::new(|_| ());
    world.log.append_many(400, 500);
    world
        .faults
        .inject(Fault::hang(Operation::Put).times(u32::MAX));
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    world.until(&stream, |push| matches!(push, StreamPush::WriteAnchor));
    let stats = Arc::clone(&world.engine.shared().stats);
    wait_until(|| stats.transfers_in_flight.get() == 8 && stats.transfers_pending.get() > 0);
    let Opened { handle, pushes } = stream;
    drop(handle);
    wait_until(|| stats.streams_open.get() == 0);
    wait_until(|| {
        (
            stats.transfers_in_flight.get(),
            stats.transfers_pending.get(),
            stats.requests_in_flight.get(),
        ) == (0, 0, 0)
    });
    while pushes.recv_timeout(SOON).is_ok() {}
    assert_eq!(
        pushes.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
}

#[test]
fn a_transfer_that_hangs_is_sent_again() {
    let mut world = World::new(|config| config.transfer_deadline_ms = 50);
    world.log.append_many(40, 500);
    world
        .faults
        .inject(Fault::hang(Operation::Put).on("fragment"));
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    cut_until(&mut world, &stream);
    world.assert_faithful();
}

#[test]
fn closing_the_engine_ends_its_streams() {
    let world = World::new(|_| ());
    let stream = world.open(1);
    assert_eq!(
        stream.pushes.recv_timeout(SOON),
        Ok(StreamPush::ReadPointer)
    );
    world.engine.close();
    assert_eq!(
        stream.pushes.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
    assert_eq!(
        stream.handle.event(StreamEvent::Cut),
        Err(EventError::Closed)
    );
    let config = StreamConfig {
        stream_id: STREAM.to_owned(),
        directory: Path::new("x").to_owned(),
        epoch: 1,
        queue: String::new(),
        vhost: String::new(),
    };
    assert!(
        world
            .engine
            .open_stream(config, Arc::new(Sink(mpsc::channel().0)))
            .is_err()
    );
}

#[test]
fn a_full_queue_is_busy_and_the_committed_state_never_is() {
    let world = World::new(|_| ());
    let (blocked, block) = mpsc::channel::<()>();
    struct Stuck(std::sync::Mutex<Receiver<()>>);
    impl StreamSink for Stuck {
        fn push(&self, _push: StreamPush) {
            // Holds the driver until the test lets go.
            drop(self.0.lock().map(|block| block.recv()));
        }
    }
    let config = StreamConfig {
        stream_id: STREAM.to_owned(),
        directory: world.directory.path().to_owned(),
        epoch: 1,
        queue: String::new(),
        vhost: String::new(),
    };
    let handle = world
        .engine
        .open_stream(config, Arc::new(Stuck(std::sync::Mutex::new(block))))
        .expect("open");
    let mut taken = 0;
    let refused = loop {
        match handle.event(StreamEvent::Cut) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, EventError::Busy);
    assert!(taken >= 1024);
    let state = StreamEvent::Committed {
        committed_chunk_id: None,
        local_first_chunk_id: None,
    };
    assert_eq!(handle.event(state), Ok(()));
    drop(blocked);
}

/// Objects of this kind by the end of their keys.
fn stored(world: &World, suffix: &str) -> usize {
    let keys = world.memory.keys();
    keys.iter().filter(|key| key.ends_with(suffix)).count()
}

fn grow(world: &mut World, stream: &Opened, fragments: usize) {
    for _ in 0..fragments {
        world.log.append_many(30, 700);
        world.log.roll();
        world.tell_committed(stream, 0);
        world.until_persisted(stream, world.log.next_offset - 20);
    }
    cut_until(world, stream);
}

#[test]
fn a_root_is_rebalanced_into_faithful_groups_whatever_fails() {
    let mut world = World::new(|config| config.rebalance_threshold = 2);
    for fault in [
        Fault::panic(Operation::Put),
        Fault::fail(Operation::Put, StoreErrorKind::Throttled),
        Fault::lose_answer(Operation::Put, StoreErrorKind::Timeout),
    ] {
        world.faults.inject(fault.on("group"));
    }
    let stream = world.open(1);
    grow(&mut world, &stream, 12);
    world.until(&stream, |push| {
        matches!(push, StreamPush::Range(_))
            && stream.handle.status().counters.mega_groups_created > 0
    });
    world.assert_faithful();
    let status = stream.handle.status();
    assert!(
        status.counters.groups_created >= 4 && status.counters.kilo_groups_created >= 2,
        "{status:?}"
    );
    assert!(status.counters.group_failures > 0);
    assert!(world.engine.shared().stats.groups_uploaded.get() > 0);
    assert!(stored(&world, ".mgroup") > 0);

    // A later writer goes on from it.
    drop(stream);
    let stream = world.open(2);
    grow(&mut world, &stream, 4);
    world.assert_faithful();
}

#[test]
fn retention_takes_groups_away_with_what_they_hold() {
    let mut world = World::new(|config| config.rebalance_threshold = 2);
    let stream = world.open(1);
    grow(&mut world, &stream, 12);
    let total_bytes = u64::try_from(world.root().total_size_bytes).expect("small");
    world.faults.inject(
        Fault::fail(Operation::Get, StoreErrorKind::Server)
            .on("group")
            .times(2),
    );
    let half = RetentionBound {
        max_bytes: Some(total_bytes / 2),
        max_age_ms: None,
    };
    stream
        .handle
        .event(StreamEvent::Retention(half))
        .expect("taken");
    world.until(
        &stream,
        |push| matches!(push, StreamPush::Range(range) if range.total_size_bytes <= u128::from(total_bytes / 2)),
    );
    world.assert_faithful();
    assert!(world.root().first_offset > 0);

    let nothing = RetentionBound {
        max_bytes: Some(0),
        max_age_ms: None,
    };
    stream
        .handle
        .event(StreamEvent::Retention(nothing))
        .expect("taken");
    world.until(
        &stream,
        |push| matches!(push, StreamPush::Range(range) if range.first_offset == range.next_offset),
    );
    let status = stream.handle.status();
    assert!(status.counters.groups_deleted > 3, "{status:?}");
    // Deletions are the last thing of a persist; they are not waited for by anybody else.
    for _ in 0..1_000 {
        if stored(&world, "group") == 0 && stored(&world, ".fragment") == 0 {
            return;
        }
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(2));
    }
    panic!("left behind: {:?}", world.memory.keys());
}
