//! A stream from segment files to objects: what is told, what is stored, what comes back after faults.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use tiering_core::upload::Activity;

use super::*;
use crate::remote_tier::StoreErrorKind;
use crate::remote_tier::testing::{Fault, Operation};

mod follower;
mod garbage;
mod room;
mod world;

use follower::Follower;
use world::*;

#[test]
fn committed_chunks_become_faithful_objects() {
    let mut world = World::new(|_| ());
    fill(&mut world.log);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    stream.handle.event(UploadEvent::Cut).expect("taken");
    let next_offset = world.log.next_offset;
    let rest_is_cut = loop {
        let range = world.until_persisted(&stream, 1);
        if range.next_offset == next_offset {
            break range;
        }
        stream.handle.event(UploadEvent::Cut).expect("taken");
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

#[test]
fn a_log_that_grows_is_followed_and_a_later_writer_goes_on() {
    let mut world = World::new(|_| ());
    let stream = world.open(1);
    world.until(
        &stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.revision == 0),
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
        matches!(push, UploadPush::Recovered { kind: "transfer" })
    });
    let problems = seen.iter().filter(|push| matches!(push, UploadPush::Problem { kind: "transfer", text } if text.contains("access_denied")));
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
    let seen = world.until(&stream, |push| matches!(push, UploadPush::Problem { .. }));
    assert!(
        matches!(seen.last(), Some(UploadPush::Problem { kind: "transfer", text }) if text.contains("local_corrupt")),
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
            UploadPush::CommitPointer { .. } => {
                stream
                    .handle
                    .event(UploadEvent::PointerCommitted(CommitOutcome::NotFound))
                    .expect("taken");
            }
            UploadPush::Stopped(reason) => {
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
        stream.handle.event(UploadEvent::Cut),
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
    let seen = world.until(&stream, |push| matches!(push, UploadPush::Recovery { .. }));
    assert!(
        matches!(
            seen.last(),
            Some(UploadPush::Recovery {
                kind: Recovery::LocalLogAhead,
                to_offset: 80,
                ..
            })
        ),
        "{seen:?}"
    );
    world.until(&stream, |push| matches!(push, UploadPush::Range(range, _) if range.first_offset == 80 && range.next_offset > 80));
    assert_eq!(world.root().first_offset, 80);
    world.assert_faithful();
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
    world.until(&stream, |push| matches!(push, UploadPush::WriteAnchor));
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
        Ok(UploadPush::ReadPointer)
    );
    world.engine.close();
    assert_eq!(
        stream.pushes.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
    assert_eq!(
        stream.handle.event(UploadEvent::Cut),
        Err(EventError::Closed)
    );
    let config = UploadConfig {
        stream_id: STREAM.to_owned(),
        directory: Path::new("x").to_owned(),
        epoch: 1,
        queue: String::new(),
        vhost: String::new(),
        arguments: String::new(),
    };
    assert!(
        world
            .engine
            .open_upload(config, Arc::new(Sink(mpsc::channel().0)))
            .is_err()
    );
}

#[test]
fn a_full_queue_is_busy_and_the_committed_state_never_is() {
    let world = World::new(|_| ());
    let (blocked, block) = mpsc::channel::<()>();
    struct Stuck(std::sync::Mutex<Receiver<()>>);
    impl UploadSink for Stuck {
        fn push(&self, _push: UploadPush) {
            // Holds the driver until the test lets go.
            drop(self.0.lock().map(|block| block.recv()));
        }
    }
    let config = UploadConfig {
        stream_id: STREAM.to_owned(),
        directory: world.directory.path().to_owned(),
        epoch: 1,
        queue: String::new(),
        vhost: String::new(),
        arguments: String::new(),
    };
    let handle = world
        .engine
        .open_upload(config, Arc::new(Stuck(std::sync::Mutex::new(block))))
        .expect("open");
    let mut taken = 0;
    let refused = loop {
        match handle.event(UploadEvent::Cut) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, EventError::Busy);
    assert!(taken >= 1024);
    let state = UploadEvent::Committed {
        committed_chunk_id: None,
        local_first_chunk_id: None,
    };
    assert_eq!(handle.event(state), Ok(()));
    drop(blocked);
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
        matches!(push, UploadPush::Range(..))
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
        .event(UploadEvent::Retention(half))
        .expect("taken");
    world.until(
        &stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.total_size_bytes <= u128::from(total_bytes / 2)),
    );
    world.assert_faithful();
    assert!(world.root().first_offset > 0);

    let nothing = RetentionBound {
        max_bytes: Some(0),
        max_age_ms: None,
    };
    stream
        .handle
        .event(UploadEvent::Retention(nothing))
        .expect("taken");
    world.until(
        &stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.first_offset == range.next_offset),
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

#[test]
fn nothing_goes_by_age_until_the_store_s_clock_agrees_and_the_newest_stays() {
    let mut world = World::new(|_| ());
    let stream = world.open(1);
    grow(&mut world, &stream, 4);
    let (fragments, newest) = (stored(&world, ".fragment"), world.root().entries.len() - 1);
    let newest = world.root().entries[newest];
    let hour = || {
        let hour = RetentionBound {
            max_bytes: None,
            max_age_ms: Some(3_600_000),
        };
        stream
            .handle
            .event(UploadEvent::Retention(hour))
            .expect("taken");
    };
    // The log is years old by every clock, and the store has not said the time.
    hour();
    let seen = world.until(&stream, |push| {
        matches!(push, UploadPush::Problem { kind: "clock", .. })
    });
    assert!(
        matches!(seen.last(), Some(UploadPush::Problem { text, .. }) if text.starts_with("no answer of the store"))
    );
    // It has another time, as it would after a step of this node's clock before it started.
    let timekeeper = Arc::clone(&world.engine.shared().timekeeper);
    let now_ms = || {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
        i64::try_from(since.expect("later").as_millis()).expect("small")
    };
    let day_ms = 24 * 3_600_000;
    timekeeper.store_says(now_ms() - 30 * day_ms);
    hour();
    wait_until(|| {
        let problem = stream.handle.status().machine.problem;
        problem.is_some_and(|problem| problem.text.contains("ahead of the store's"))
    });
    let status = stream.handle.status();
    assert_eq!(status.machine.manifest_first_offset, 0);
    assert_eq!(status.counters.fragments_deleted, 0);
    assert_eq!(stored(&world, ".fragment"), fragments);
    assert_eq!(world.engine.shared().stats.clock_in_doubt.get(), 1);

    timekeeper.store_says(now_ms());
    hour();
    let seen = world.until(
        &stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.first_offset > 0),
    );
    let over = |push: &&UploadPush| matches!(push, UploadPush::Recovered { kind: "clock" });
    assert_eq!(seen.iter().filter(over).count(), 1, "{seen:?}");
    assert_eq!(world.root().entries, [newest]);
    world.assert_faithful();
}

#[test]
fn who_hears_of_each_persist_fetches_a_root_once_and_knows_the_same_bytes() {
    let mut world = World::new(|config| config.rebalance_threshold = 2);
    world.follower = Some(Follower::new(&world.memory));
    let stream = world.open(1);
    grow(&mut world, &stream, 12);
    let counters = stream.handle.status().counters;
    assert!(counters.mega_groups_created > 0, "{counters:?}");
    let bound = RetentionBound {
        max_bytes: Some(u64::try_from(world.root().total_size_bytes / 2).expect("small")),
        max_age_ms: None,
    };
    stream
        .handle
        .event(UploadEvent::Retention(bound))
        .expect("taken");
    world.until(
        &stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.first_offset > 0),
    );
    drop(stream);
    // A later writer goes on from what is known.
    let stream = world.open(2);
    grow(&mut world, &stream, 2);
    let follower = world.follower.as_ref().expect("there");
    assert_eq!(follower.syncs, 1, "the first one");
    assert!(follower.edits > 10, "{}", follower.edits);
    assert_eq!(follower.root(), world.root().encode());
}

#[test]
fn an_abandoned_root_is_named_by_every_root_after_it() {
    let mut world = World::new(|_| ());
    let stream = world.open(1);
    grow(&mut world, &stream, 2);
    assert_eq!(stream.handle.status().abandoned_root, None);
    drop(stream);
    let pointer = world.pointer.expect("persisted");
    let name = format!("root.{}.{:08x}.manifest", pointer.epoch, pointer.uid);
    let roots = world.memory.keys();
    let key = roots
        .iter()
        .find(|key| key.ends_with(&name))
        .expect("there");
    world.memory.describe(key, "abandoned-root", "7.000000ab");
    let stream = world.open(2);
    grow(&mut world, &stream, 6);
    let shown = stream.handle.status().abandoned_root;
    assert!(
        shown.is_some_and(|key| key.ends_with("/metadata/root.7.000000ab.manifest")),
        "shown"
    );
    let later: Vec<_> = (world.memory.keys().into_iter())
        .filter(|key| key.contains("/metadata/root.2."))
        .collect();
    assert!(!later.is_empty());
    for key in later {
        let object = world.memory.object(&key).expect("there");
        assert_eq!(object.metadata["abandoned-root"], "7.000000ab", "{key}");
    }
}
