//! Which manifest a replica's node ends up with, over a store in memory.

use std::sync::mpsc;

use log_format::key::KeySpace;
use log_format::manifest::{Entry, Kind};

use super::*;
use crate::engine::Engine;
use crate::remote_tier::StoreErrorKind;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::settings::Config;

const SOON: Duration = Duration::from_secs(60);
const STREAM: &str = "__s_1";

struct World {
    engine: Engine,
    memory: Arc<MemoryTier>,
    faults: Arc<Faulty>,
}

const fn pointer(epoch: u64, uid: u32, revision: u64) -> Pointer {
    Pointer {
        epoch,
        uid,
        revision,
    }
}

/// One fragment of `[0, next_offset)`.
fn root(next_offset: u64) -> Root {
    Root {
        first_offset: 0,
        next_offset,
        first_timestamp_ms: 1,
        first_last_timestamp_ms: 2,
        total_size_bytes: 100,
        entries: vec![Entry {
            first_offset: 0,
            first_timestamp_ms: 1,
            last_timestamp_ms: 2,
            kind: Kind::Fragment,
            size_bytes: 100,
            uid: 9,
        }],
    }
}

impl World {
    fn new() -> Self {
        let memory = Arc::new(MemoryTier::new());
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<dyn RemoteTier>));
        let config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        let engine =
            Engine::open_with(config, Arc::clone(&faults) as Arc<dyn RemoteTier>).expect("opened");
        engine.manifests().mark_pending(STREAM);
        Self {
            engine,
            memory,
            faults,
        }
    }

    fn key(pointer: Pointer) -> String {
        KeySpace::new(&Config::default().prefix).root(STREAM, pointer.epoch, pointer.uid)
    }

    fn store(&self, pointer: Pointer, root: &Root) {
        self.memory.insert(&Self::key(pointer), root.encode());
    }

    fn resolve(&self, pointer: Option<Pointer>) -> Result<ManifestRange, ResolveError> {
        let (sender, receiver) = mpsc::channel();
        self.engine
            .resolve_manifest(STREAM, pointer, move |outcome| {
                sender.send(outcome).expect("received");
            })
            .expect("open");
        receiver.recv_timeout(SOON).expect("an answer")
    }

    fn known(&self) -> Option<(u64, u64, u64)> {
        self.engine
            .manifests()
            .resolved(STREAM)
            .map(|manifest| (manifest.epoch, manifest.revision, manifest.root.next_offset))
    }

    fn stat(&self, name: &str) -> i64 {
        self.engine
            .stats()
            .into_iter()
            .find_map(|(row, value)| (row == name).then_some(value))
            .expect("a row of that name")
    }
}

#[test]
fn the_newer_manifest_wins_and_the_stale_one_is_counted() {
    let world = World::new();
    let (old, new) = (pointer(1, 10, 4), pointer(2, 20, 5));
    world.store(old, &root(50));
    world.store(new, &root(70));
    assert_eq!(
        world.resolve(Some(old)).map(|range| range.next_offset),
        Ok(50)
    );
    let range = world.resolve(Some(new)).expect("resolved");
    assert_eq!(
        (
            range.next_offset,
            range.revision,
            range.epoch,
            range.pointer
        ),
        (70, 5, 2, Some(new))
    );
    assert_eq!(
        world.resolve(Some(old)),
        Err(ResolveError::Unusable(Unusable::Stale))
    );
    assert_eq!(
        world.resolve(None),
        Err(ResolveError::Unusable(Unusable::Stale)),
        "nothing persisted is older than anything"
    );
    assert_eq!(world.known(), Some((2, 5, 70)));
    assert_eq!(world.stat("manifests_stale"), 2);
    assert_eq!(world.stat("manifests_resolved"), 2);
    assert_eq!(world.stat("get_requests"), 2, "stale ones are not fetched");
}

#[test]
fn what_is_known_is_told_without_a_request() {
    let world = World::new();
    let pointer = pointer(1, 10, 4);
    world.store(pointer, &root(50));
    let first = world.resolve(Some(pointer));
    assert_eq!(world.resolve(Some(pointer)), first);
    assert_eq!(world.stat("get_requests"), 1);
}

#[test]
fn nothing_persisted_is_an_empty_manifest() {
    let world = World::new();
    let range = world.resolve(None).expect("resolved");
    assert_eq!(
        (
            range.first_offset,
            range.next_offset,
            range.revision,
            range.fragments
        ),
        (0, 0, 0, 0)
    );
    assert_eq!(world.known(), Some((0, 0, 0)));
}

#[test]
fn a_corrupt_root_is_refused() {
    let world = World::new();
    let pointer = pointer(1, 10, 4);
    let mut bytes = root(50).encode();
    bytes.truncate(bytes.len() - 1);
    world.memory.insert(&World::key(pointer), bytes);
    assert!(matches!(
        world.resolve(Some(pointer)),
        Err(ResolveError::Corrupt(_))
    ));
    assert_eq!(world.known(), None, "still pending");
    assert_eq!(world.stat("manifest_resolve_failures"), 1);
}

#[test]
fn a_root_that_is_not_there_is_told_at_once_and_can_be_asked_for_again() {
    let world = World::new();
    let pointer = pointer(1, 10, 4);
    let missing = world.resolve(Some(pointer)).expect_err("not there");
    assert_eq!(missing.name(), "not_found");
    assert_eq!(world.stat("get_requests"), 1);
    assert_eq!(world.known(), None);
    world.store(pointer, &root(50));
    assert!(world.resolve(Some(pointer)).is_ok());
    assert_eq!(world.known(), Some((1, 4, 50)));
}

#[test]
fn a_failure_that_passes_is_not_seen() {
    let world = World::new();
    let pointer = pointer(1, 10, 4);
    world.store(pointer, &root(50));
    world
        .faults
        .inject(Fault::fail(Operation::Get, StoreErrorKind::Server).times(2));
    assert!(world.resolve(Some(pointer)).is_ok());
    assert_eq!(world.stat("get_requests"), 3);
}

#[test]
fn a_stream_forgotten_or_never_marked_is_not_brought_back() {
    let world = World::new();
    world.engine.manifests().forget(STREAM);
    let pointer = pointer(1, 10, 4);
    world.store(pointer, &root(50));
    assert_eq!(
        world.resolve(Some(pointer)),
        Err(ResolveError::Unusable(Unusable::Unknown))
    );
    assert_eq!(world.engine.manifests().get(STREAM), None);
}

#[test]
fn a_stream_written_here_is_left_to_its_writer() {
    let world = World::new();
    world.engine.manifests().take(STREAM);
    let pointer = pointer(1, 10, 4);
    world.store(pointer, &root(50));
    assert_eq!(
        world.resolve(Some(pointer)).map_err(|error| error.name()),
        Err("written_here")
    );
    assert_eq!(world.known(), None);
}
