//! A store in memory, and a shell and a metadata store made of a variable: everything around a stream.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use log_format::manifest::{Entry, Group, Kind, Root};
use log_format::{crc, fragment};
use tempfile::TempDir;
use tiering_core::upload::Pointer;

use super::super::*;
use super::follower::Follower;
use crate::engine::Engine;
use crate::local_log::test_log::{TestChunk, TestLog};
use crate::remote_tier::testing::{Faulty, MemoryTier};
use crate::settings::Config;

pub(super) const SOON: Duration = Duration::from_secs(30);
pub(super) const STREAM: &str = "__s_1";

pub(super) struct Sink(pub(super) Sender<UploadPush>);

impl UploadSink for Sink {
    fn push(&self, push: UploadPush) {
        // The test may be over.
        drop(self.0.send(push));
    }
}

/// Everything around a stream.
pub(super) struct World {
    pub(super) engine: Engine,
    pub(super) memory: Arc<MemoryTier>,
    pub(super) faults: Arc<Faulty>,
    pub(super) directory: TempDir,
    pub(super) log: TestLog,
    pub(super) pointer: Option<Pointer>,
    pub(super) anchored: bool,
    pub(super) follower: Option<Follower>,
}

/// One opened stream and what it pushes.
pub(super) struct Opened {
    pub(super) handle: UploadHandle,
    pub(super) pushes: Receiver<UploadPush>,
}

impl World {
    pub(super) fn new(change: impl FnOnce(&mut Config)) -> Self {
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
            follower: None,
        }
    }

    pub(super) fn open(&self, epoch: u64) -> Opened {
        let (sender, pushes) = mpsc::channel();
        let config = UploadConfig {
            stream_id: STREAM.to_owned(),
            directory: self.directory.path().to_owned(),
            epoch,
            queue: "büro".to_owned(),
            vhost: "/".to_owned(),
            arguments: String::new(),
        };
        let handle = self
            .engine
            .open_upload(config, Arc::new(Sink(sender)))
            .expect("open");
        Opened { handle, pushes }
    }

    pub(super) fn tell_committed(&self, stream: &Opened, local_first_chunk_id: u64) {
        let committed_chunk_id = Some(self.log.last_chunk_id());
        let local_first_chunk_id = Some(local_first_chunk_id);
        stream
            .handle
            .event(UploadEvent::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            })
            .expect("taken");
    }

    pub(super) fn answer(&mut self, stream: &Opened, push: &UploadPush) {
        let answer = match push {
            UploadPush::ReadPointer => UploadEvent::Pointer(
                self.pointer
                    .map_or(PointerRead::NotFound, PointerRead::Found),
            ),
            UploadPush::WriteAnchor => {
                self.anchored = true;
                UploadEvent::Anchor { ok: true }
            }
            UploadPush::CommitPointer {
                epoch,
                uid,
                expected_revision,
                ..
            } => {
                let current = self.pointer.map_or(0, |pointer| pointer.revision);
                UploadEvent::PointerCommitted(if current == *expected_revision {
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
            UploadPush::Range(range, edit) => {
                if let Some(follower) = &mut self.follower {
                    follower.hear(range, edit.as_ref());
                }
                return;
            }
            _ => return,
        };
        // A stream that has stopped meanwhile takes no answer.
        stream.handle.event(answer).ok();
    }

    /// Answers questions until a push fits; gives back all that came, the fitting one last.
    pub(super) fn until(
        &mut self,
        stream: &Opened,
        fits: impl Fn(&UploadPush) -> bool,
    ) -> Vec<UploadPush> {
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

    pub(super) fn until_persisted(&mut self, stream: &Opened, next_offset: u64) -> ManifestRange {
        let seen = self.until(
            stream,
            |push| matches!(push, UploadPush::Range(range, _) if range.next_offset >= next_offset),
        );
        match seen.last() {
            Some(UploadPush::Range(range, _)) => {
                assert_eq!(range.pointer, self.pointer, "what other nodes are told");
                *range
            }
            other => panic!("not a range: {other:?}"),
        }
    }

    pub(super) fn root(&self) -> Root {
        let pointer = self.pointer.expect("persisted");
        let key = self
            .engine
            .shared()
            .keys
            .root(STREAM, pointer.epoch, pointer.uid);
        Root::decode(&self.memory.object(&key).expect("stored").bytes).expect("a root")
    }

    /// The fragments of a tree, from its first offset on.
    pub(super) fn leaves(&self, entries: &[Entry], floor: u64, leaves: &mut Vec<Entry>) {
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
    pub(super) fn assert_faithful(&self) {
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

pub(super) fn fill(log: &mut TestLog) {
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

pub(super) fn cut_until(world: &mut World, stream: &Opened) {
    let next_offset = world.log.next_offset;
    while world.pointer.is_none() || world.root().next_offset < next_offset {
        stream.handle.event(UploadEvent::Cut).expect("taken");
        world.until(stream, |push| matches!(push, UploadPush::Range(..)));
    }
}

pub(super) fn wait_until(holds: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < SOON, "never happened");
        std::thread::yield_now();
    }
}

/// Objects of this kind by the end of their keys.
pub(super) fn stored(world: &World, suffix: &str) -> usize {
    let keys = world.memory.keys();
    keys.iter().filter(|key| key.ends_with(suffix)).count()
}

pub(super) fn grow(world: &mut World, stream: &Opened, fragments: usize) {
    for _ in 0..fragments {
        world.log.append_many(30, 700);
        world.log.roll();
        world.tell_committed(stream, 0);
        world.until_persisted(stream, world.log.next_offset - 20);
    }
    cut_until(world, stream);
}
