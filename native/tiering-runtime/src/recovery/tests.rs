//! What comes back from a bucket in memory, and what is said about the rest.

use bytes::Bytes;
use log_format::crc;
use log_format::key::KeySpace;
use log_format::manifest::{Entry, Group, Kind};

use super::*;
use crate::engine::Engine;
use crate::object_metadata;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::remote_tier::{PutBody, PutRequest, RemoteTier};
use crate::settings::Config;

const STREAM: &str = "__s_1";

struct World {
    engine: Engine,
    memory: Arc<MemoryTier>,
    faults: Arc<Faulty>,
    keys: KeySpace,
    runtime: tokio::runtime::Runtime,
}

fn about() -> AboutStream {
    AboutStream {
        stream_id: STREAM.to_owned(),
        vhost: Some("/".to_owned()),
        queue: Some("büro".to_owned()),
        arguments: Some("AAAA".to_owned()),
        cluster: Some("rabbit@there".to_owned()),
    }
}

const fn entry(kind: Kind, first_offset: u64, uid: u32) -> Entry {
    Entry {
        first_offset,
        first_timestamp_ms: first_offset as i64,
        last_timestamp_ms: first_offset as i64 + 9,
        kind,
        size_bytes: match kind {
            Kind::Fragment => 100,
            _ => 0,
        },
        uid,
    }
}

/// A root of fragments of ten records each.
fn root_of(entries: Vec<Entry>, next_offset: u64) -> Root {
    let first = entries.first().expect("one");
    // A group has three fragments.
    let fragments = entries.iter().map(|entry| match entry.kind {
        Kind::Fragment => 100,
        _ => 300,
    });
    Root {
        first_offset: first.first_offset,
        next_offset,
        first_timestamp_ms: first.first_timestamp_ms,
        first_last_timestamp_ms: first.last_timestamp_ms,
        total_size_bytes: fragments.sum(),
        entries,
    }
}

fn fragments(count: u64) -> Root {
    let entries = (0..count).map(|n| entry(Kind::Fragment, n * 10, 7));
    root_of(entries.collect(), count * 10)
}

impl World {
    fn new() -> Self {
        let memory = Arc::new(MemoryTier::new());
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<_>));
        let config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        Self {
            keys: KeySpace::new(&config.prefix),
            engine: Engine::open_with(config, Arc::clone(&faults) as Arc<_>).expect("opened"),
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime"),
            memory,
            faults,
        }
    }

    fn put(&self, key: String, bytes: Vec<u8>, metadata: Vec<(&'static str, String)>) {
        let bytes = Bytes::from(bytes);
        let request = PutRequest {
            key,
            crc32: crc::crc32(&bytes),
            body: PutBody::Bytes(bytes),
            metadata,
        };
        self.runtime
            .block_on(self.memory.put(request))
            .expect("stored");
    }

    fn put_root(&self, history: RootHistory, uid: u32, root: &Root) -> String {
        let key = self.keys.root(STREAM, history.epoch, uid);
        let metadata = object_metadata::root(&about(), root.next_offset, &history);
        self.put(key.clone(), root.encode(), metadata);
        key
    }

    /// A fragment of ten chunks' worth of nothing, with an index of one record.
    fn put_fragment(&self, first_offset: u64, uid: u32, epoch: u64) {
        let mut bytes = vec![0; 108];
        bytes.extend(first_offset.to_be_bytes());
        bytes.extend((first_offset as i64 + 1_000).to_be_bytes());
        bytes.extend(0_u32.to_be_bytes());
        let metadata = vec![
            ("vhost", "/".to_owned()),
            ("queue", "b%C3%BCro".to_owned()),
            ("epoch", epoch.to_string()),
            ("next-offset", (first_offset + 10).to_string()),
            ("data-size", "100".to_owned()),
            ("chunks", "1".to_owned()),
        ];
        self.put(
            self.keys.fragment(STREAM, first_offset, uid),
            bytes,
            metadata,
        );
    }

    fn inspect(&self, depth: Depth) -> Result<Found, RecoveryError> {
        self.runtime
            .block_on(inspect(self.engine.shared(), STREAM, depth))
    }

    fn adopt(&self) -> Adopted {
        self.runtime
            .block_on(adopt(self.engine.shared(), &about()))
            .expect("adopted")
    }
}

fn history(recoveries: u64, epoch: u64, follows: u64) -> RootHistory {
    RootHistory {
        recoveries,
        epoch,
        follows,
        abandoned: None,
    }
}

#[test]
fn every_stream_that_has_objects_is_found_once() {
    let world = World::new();
    for key in ["a_1/data/x", "a_1/metadata/y", "b/data/x", "c/z"] {
        world.memory.insert(&format!("rabbitmq/stream/{key}"), "1");
    }
    // Neither a stream nor below the prefix.
    world.memory.insert("rabbitmq/stream/file", "1");
    world.memory.insert("rabbitmq/other/d/data/x", "1");
    let found = world.runtime.block_on(streams(world.engine.shared(), None));
    let ids = ["a_1", "b", "c"].map(str::to_owned).to_vec();
    assert_eq!(found, Ok((ids, None)));
}

#[test]
fn the_newest_root_is_used_and_tells_how_its_stream_was_declared() {
    let world = World::new();
    world.put_root(history(0, 3, 8), 1, &fragments(4));
    world.put_root(history(0, 3, 9), 2, &fragments(5));
    // Of a writer that was deposed: stored last.
    world.memory.set_clock(1_000);
    world.put_root(history(0, 2, 99), 3, &fragments(3));
    let found = world.inspect(Depth::Root).expect("found");
    assert_eq!(found.about, about());
    assert_eq!(found.root, Some(RootName { epoch: 3, uid: 2 }));
    assert_eq!((found.first_offset, found.next_offset), (0, 50));
    assert_eq!((found.lost_up_to, found.passed_over), (None, vec![]));
}

#[test]
fn a_damaged_root_is_passed_over_and_what_it_had_is_said() {
    let world = World::new();
    world.put_root(history(0, 3, 8), 1, &fragments(4));
    let damaged = world.put_root(history(0, 3, 9), 2, &fragments(5));
    let metadata = world.memory.object(&damaged).expect("there").metadata;
    world.memory.insert(&damaged, "damaged");
    for (name, value) in metadata {
        world.memory.describe(&damaged, &name, &value);
    }
    let found = world.inspect(Depth::Root).expect("found");
    assert_eq!(found.root, Some(RootName { epoch: 3, uid: 1 }));
    assert_eq!((found.next_offset, found.lost_up_to), (40, Some(50)));
    let keys: Vec<_> = found.passed_over.iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [&damaged]);
}

#[test]
fn a_store_that_does_not_answer_is_no_reason_to_take_an_older_root() {
    let world = World::new();
    world.put_root(history(0, 3, 8), 1, &fragments(4));
    let newest = world.put_root(history(0, 3, 9), 2, &fragments(5));
    world.faults.inject(
        Fault::fail(Operation::Get, StoreErrorKind::AccessDenied)
            .on(&newest)
            .times(1),
    );
    let refused = world.inspect(Depth::Root).expect_err("refused");
    assert_eq!(refused.name(), StoreErrorKind::AccessDenied.name());
}

#[test]
fn what_is_named_is_compared_with_what_is_there_through_groups() {
    let world = World::new();
    let group = Group {
        kind: Kind::Group,
        first_offset: 0,
        first_timestamp_ms: 0,
        entries: (0..3).map(|n| entry(Kind::Fragment, n * 10, 7)).collect(),
    };
    let unreadable = entry(Kind::Group, 30, 8);
    let mut root = root_of(
        vec![
            entry(Kind::Group, 0, 5),
            unreadable,
            entry(Kind::Fragment, 50, 7),
            entry(Kind::Fragment, 60, 7),
        ],
        70,
    );
    // Retention has dropped what is below 10, and its object is gone.
    root.first_offset = 10;
    world.put(
        world.keys.group(STREAM, Kind::Group, 0, 5),
        group.encode(),
        vec![],
    );
    let broken = world.keys.group(STREAM, Kind::Group, 30, 8);
    world.put(broken.clone(), b"broken".to_vec(), vec![]);
    world.put_fragment(10, 7, 1);
    world.put_fragment(60, 7, 1);
    // Too short for what the manifest says of it.
    let short = world.keys.fragment(STREAM, 50, 7);
    world.memory.insert(&short, "short");
    // Nobody names it.
    world.put_fragment(20, 99, 1);
    world.put_root(history(0, 1, 1), 1, &root);
    let found = world.inspect(Depth::Objects).expect("found");
    let objects = found.objects.expect("looked at");
    assert_eq!(objects.named, 6);
    let mut affected: Vec<_> = objects
        .affected
        .iter()
        .map(|affected| (affected.first_offset, affected.next_offset, &affected.key))
        .collect();
    affected.sort_unstable();
    let missing = world.keys.fragment(STREAM, 20, 7);
    assert_eq!(
        affected,
        [(20, 30, &missing), (30, 50, &broken), (50, 60, &short)]
    );
    assert_eq!(objects.affected_count, 3);
    // The root itself, and the fragment that nobody names.
    assert_eq!((objects.unnamed, objects.unnamed_bytes > 0), (2, true));
}

#[test]
fn a_recovered_stream_begins_with_a_root_for_its_first_writer() {
    let world = World::new();
    world.put_root(history(0, 7, 3), 1, &fragments(4));
    let before = world.memory.keys();
    let adopted = world.adopt();
    assert_eq!((adopted.epoch, adopted.next_offset), (0, 40));
    assert_eq!(world.memory.keys().len(), before.len() + 1);
    // From now on this one is the newest, although its epoch is lower.
    let found = world.inspect(Depth::Root).expect("found");
    let name = RootName {
        epoch: 0,
        uid: adopted.uid,
    };
    assert_eq!((found.root, found.recoveries), (Some(name), 1));
    assert_eq!(found.about, about());
    // And once more, after the first writer has persisted.
    world.put_root(history(1, 1, 1), 5, &fragments(6));
    assert_eq!(world.adopt().next_offset, 60);
    assert_eq!(world.inspect(Depth::Root).expect("found").recoveries, 2);
}

#[test]
fn without_a_root_the_fragments_make_a_manifest() {
    let world = World::new();
    for (first_offset, uid, epoch) in [(0, 1, 1), (20, 2, 1), (30, 3, 1), (30, 4, 2), (40, 5, 2)] {
        world.put_fragment(first_offset, uid, epoch);
    }
    // One that broke off is none.
    world
        .memory
        .insert(&world.keys.fragment(STREAM, 50, 6), "1");
    world
        .memory
        .insert(&world.keys.root(STREAM, 2, 1), "damaged");
    let found = world.inspect(Depth::Objects).expect("found");
    assert_eq!(found.root, None);
    assert_eq!((found.first_offset, found.next_offset), (20, 50));
    assert_eq!(found.about.queue.as_deref(), Some("büro"));
    assert_eq!(found.passed_over.len(), 1);
    assert_eq!(found.objects.expect("looked at").affected, []);
    let adopted = world.adopt();
    assert_eq!((adopted.first_offset, adopted.next_offset), (20, 50));
    let found = world.inspect(Depth::Root).expect("found");
    assert_eq!((found.recoveries, found.next_offset), (1, 50));
}

#[test]
fn nothing_is_nothing() {
    let world = World::new();
    assert_eq!(
        world.inspect(Depth::Root).expect_err("nothing").name(),
        "nothing"
    );
}
