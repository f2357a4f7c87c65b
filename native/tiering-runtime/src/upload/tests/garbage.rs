//! After any trouble, the bucket holds what the manifest names, and nothing else.

use std::collections::BTreeSet;

use super::*;

impl World {
    /// Keys of everything that the pointer leads to.
    fn reachable(&self) -> BTreeSet<String> {
        let keys = &self.engine.shared().keys;
        let pointer = self.pointer.expect("persisted");
        let root = self.root();
        let mut leaves = Vec::new();
        self.leaves(&root.entries, root.first_offset, &mut leaves);
        let mut reachable: BTreeSet<String> = leaves
            .iter()
            .map(|entry| keys.fragment(STREAM, entry.first_offset, entry.uid))
            .collect();
        reachable.insert(keys.root(STREAM, pointer.epoch, pointer.uid));
        reachable
    }

    /// Deletions come last, nobody waits for them. The root before stays until the next persist, for who is still reading it.
    fn until_nothing_else_is_stored(&self) {
        let reachable = self.reachable();
        let start = std::time::Instant::now();
        loop {
            let there: BTreeSet<String> = self.memory.keys().into_iter().collect();
            let more: Vec<_> = there.symmetric_difference(&reachable).collect();
            let is_root = |key: &&String| key.contains("/root.") && there.contains(*key);
            if more.len() <= 1 && more.iter().all(is_root) {
                return;
            }
            assert!(start.elapsed() < SOON, "not as it should be: {more:?}");
            std::thread::yield_now();
        }
    }
}

/// All of its log is in the bucket, and nothing else.
fn durable() -> (World, Opened) {
    let mut world = World::new(|_| ());
    fill(&mut world.log);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    cut_until(&mut world, &stream);
    world.until_nothing_else_is_stored();
    (world, stream)
}

fn lose(world: &World, key_part: &str, times: u32) {
    for _ in 0..times {
        let fault = Fault::lose_answer(Operation::Put, StoreErrorKind::Connection);
        world.faults.inject(fault.on(key_part));
    }
}

fn retain(stream: &Opened, max_bytes: u64) {
    let bound = RetentionBound {
        max_bytes: Some(max_bytes),
        max_age_ms: None,
    };
    let taken = stream.handle.event(UploadEvent::Retention(bound));
    taken.expect("taken");
}

fn until_retained(world: &mut World, stream: &Opened, max_bytes: u64) {
    world.until(
        stream,
        |push| matches!(push, UploadPush::Range(range, _) if range.total_size_bytes <= u128::from(max_bytes)),
    );
}

#[test]
fn what_was_stored_and_not_answered_is_the_same_object_when_it_is_sent_again() {
    let mut world = World::new(|_| ());
    world.log.append_many(40, 500);
    lose(&world, ".fragment", 3);
    let stream = world.open(1);
    world.tell_committed(&stream, 0);
    cut_until(&mut world, &stream);
    world.assert_faithful();
    let puts: Vec<String> = world
        .faults
        .requests()
        .into_iter()
        .filter(|(operation, key)| *operation == Operation::Put && key.ends_with(".fragment"))
        .map(|(_, key)| key)
        .collect();
    let different: BTreeSet<&String> = puts.iter().collect();
    assert!(puts.len() >= different.len() + 3, "{puts:?}");
    world.until_nothing_else_is_stored();
}

#[test]
fn a_root_that_was_stored_and_not_answered_does_not_stay() {
    let mut world = World::new(|_| ());
    let stream = world.open(1);
    for _ in 0..4 {
        lose(&world, "root", 2);
        world.log.append_many(40, 500);
        world.tell_committed(&stream, 0);
        cut_until(&mut world, &stream);
    }
    world.assert_faithful();
    world.until_nothing_else_is_stored();
}

#[test]
fn a_deletion_that_is_refused_is_a_problem_and_done_once_it_is_allowed() {
    let (mut world, stream) = durable();
    let fault = Fault::fail(Operation::Delete, StoreErrorKind::AccessDenied);
    world.faults.inject(fault.times(u32::MAX));
    let before = stream.handle.status().counters.fragments_deleted;
    retain(&stream, 30_000);
    let seen = world.until(&stream, |push| {
        matches!(push, UploadPush::Problem { kind: "delete", .. })
    });
    assert!(
        matches!(seen.last(), Some(UploadPush::Problem { text, .. }) if text.contains("access_denied")),
        "{seen:?}"
    );
    let status = stream.handle.status();
    assert!(status.deletions_waiting > 0);
    assert_eq!(status.counters.fragments_deleted, before, "none is gone");
    let stats = &world.engine.shared().stats;
    assert_eq!(
        stats.deletions_waiting.get(),
        i64::try_from(status.deletions_waiting).expect("few")
    );
    world.faults.heal();
    world.until(&stream, |push| {
        matches!(push, UploadPush::Recovered { kind: "delete" })
    });
    world.until_nothing_else_is_stored();
    wait_until(|| stream.handle.status().deletions_waiting == 0);
    let status = stream.handle.status();
    assert!(status.counters.fragments_deleted > before);
    assert_eq!(status.machine.problem, None);
    assert_eq!(world.engine.shared().stats.deletions_waiting.get(), 0);
}

#[test]
fn what_is_refused_within_a_success_is_tried_again() {
    let (mut world, stream) = durable();
    world.faults.inject(Fault::refuse_first().times(2));
    retain(&stream, 30_000);
    until_retained(&mut world, &stream, 30_000);
    world.until_nothing_else_is_stored();
    let stats = &world.engine.shared().stats;
    assert_eq!(stats.objects_delete_failed.get(), 2, "its path ran");
}

#[test]
fn a_deletion_whose_task_dies_is_tried_again() {
    let (mut world, stream) = durable();
    world.faults.inject(Fault::panic(Operation::Delete));
    retain(&stream, 30_000);
    until_retained(&mut world, &stream, 30_000);
    world.until_nothing_else_is_stored();
    assert_eq!(world.engine.shared().stats.tasks_lost.get(), 1);
}

#[test]
fn a_stream_that_is_closed_is_no_longer_in_the_gauge() {
    let (mut world, stream) = durable();
    let fault = Fault::fail(Operation::Delete, StoreErrorKind::AccessDenied);
    world.faults.inject(fault.times(u32::MAX));
    retain(&stream, 30_000);
    world.until(&stream, |push| {
        matches!(push, UploadPush::Problem { kind: "delete", .. })
    });
    drop(stream);
    let stats = &world.engine.shared().stats;
    wait_until(|| stats.deletions_waiting.get() == 0);
}
