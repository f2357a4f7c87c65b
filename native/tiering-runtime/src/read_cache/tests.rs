//! The cache over a store in memory whose answers can be held back and spoilt.

#![allow(clippy::single_range_in_vec_init)] // a list of one range is meant

use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use tokio::task::JoinHandle;

use super::*;
use crate::clock::Clock;
use crate::remote_tier::gate::Gate;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Larger than everything that is read.
const PLENTY: u64 = 64 << 20;

struct World {
    memory: Arc<MemoryTier>,
    faults: Arc<Faulty>,
    gate: Arc<Gate>,
    stats: Arc<Stats>,
    read_memory: ReadMemory,
    cache: ReadCache,
    object: Arc<str>,
    bytes: Bytes,
}

fn pattern(length: usize, seed: usize) -> Bytes {
    (0..length)
        .map(|at| ((at * 31 + at / 251 + seed) % 256) as u8)
        .collect()
}

impl World {
    /// An object of so many bytes.
    fn new(length: usize, open: bool, capacity_bytes: u64, disk: Option<(&Path, u64)>) -> Self {
        let memory = Arc::new(MemoryTier::new());
        let bytes = pattern(length, 7);
        memory.insert("object", bytes.clone());
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<_>));
        let gate = Gate::new(Arc::clone(&faults) as Arc<_>, open);
        let stats = Arc::new(Stats::default());
        // The cache may keep it all, and never makes anybody wait.
        let read_memory = ReadMemory::new(capacity_bytes, Clock::start(), Arc::clone(&stats));
        let cache = ReadCache::new(
            Arc::clone(&gate) as Arc<_>,
            read_memory.clone(),
            disk,
            Arc::clone(&stats),
        );
        Self {
            memory,
            faults,
            gate,
            stats,
            read_memory,
            cache,
            object: Arc::from("object"),
            bytes,
        }
    }

    fn range(&self, range: Range<usize>) -> RangeRead {
        (self.cache).range(
            1,
            &self.object,
            range.start as u64..range.end as u64,
            CacheUse::Allowed,
        )
    }

    async fn read(&self, range: Range<usize>) -> Result<Bytes, StoreErrorKind> {
        collect(self.range(range)).await
    }

    fn asked(&self) -> Vec<Range<u64>> {
        self.gate
            .asked()
            .into_iter()
            .map(|(_, range)| range)
            .collect()
    }
}

async fn collect(mut read: RangeRead) -> Result<Bytes, StoreErrorKind> {
    let mut whole = Vec::new();
    while let Some(piece) = read.next(&|| ()).await {
        whole.extend_from_slice(&piece.map_err(|error| error.kind())?);
    }
    Ok(whole.into())
}

fn spawn(read: RangeRead) -> JoinHandle<Result<Bytes, StoreErrorKind>> {
    tokio::spawn(collect(read))
}

#[tokio::test]
async fn blocks_that_are_missing_come_with_one_request_and_are_kept() {
    let world = World::new(5 * BLOCK + 100, true, PLENTY, None);
    assert_eq!(
        world.read(BLOCK + 5..3 * BLOCK + 7).await,
        Ok(world.bytes.slice(BLOCK + 5..3 * BLOCK + 7))
    );
    assert_eq!(world.asked(), [BLOCK_BYTES..4 * BLOCK_BYTES]);
    // What is missing on both sides of it, and no more.
    let end = world.bytes.len();
    assert_eq!(world.read(0..end).await, Ok(world.bytes.clone()));
    assert_eq!(
        world.asked()[1..],
        [0..BLOCK_BYTES, 4 * BLOCK_BYTES..6 * BLOCK_BYTES]
    );
    assert_eq!(world.read(9..end).await, Ok(world.bytes.slice(9..end)));
    assert_eq!(world.asked().len(), 3);
    assert_eq!(world.stats.read_cache_misses.get(), 6);
    assert_eq!(world.stats.read_cache_hits.get(), 3 + 6);
    assert_eq!(world.stats.read_fetched_bytes.get(), end as i64);
}

#[tokio::test]
async fn ten_that_want_the_same_wait_for_one_request() {
    let world = World::new(3 * BLOCK, false, PLENTY, None);
    let readers: Vec<_> = (0..10)
        .map(|number| spawn(world.range(number..3 * BLOCK)))
        .collect();
    world.gate.until_running(|running| running == 1).await;
    world.gate.open.add_permits(1);
    for (number, reader) in readers.into_iter().enumerate() {
        let read = reader.await.expect("ended");
        assert_eq!(read, Ok(world.bytes.slice(number..)));
    }
    assert_eq!(world.asked().len(), 1);
    assert_eq!(world.stats.read_cache_joins.get(), 9 * 3);
    assert_eq!(world.cache.pending(), 0);
}

#[tokio::test]
async fn the_one_who_asked_may_go_and_those_who_joined_get_their_bytes() {
    let world = World::new(3 * BLOCK, false, PLENTY, None);
    let first = world.range(0..3 * BLOCK);
    let second = spawn(world.range(BLOCK..2 * BLOCK));
    world.gate.until_running(|running| running == 1).await;
    drop(first);
    world.gate.open.add_permits(1);
    assert_eq!(
        second.await.expect("ended"),
        Ok(world.bytes.slice(BLOCK..2 * BLOCK))
    );
    assert_eq!(world.asked().len(), 1);
}

#[tokio::test]
async fn when_the_last_one_goes_the_request_is_given_up_and_the_next_one_asks_anew() {
    let world = World::new(3 * BLOCK, false, PLENTY, None);
    let readers: Vec<_> = (0..3).map(|_| world.range(0..3 * BLOCK)).collect();
    world.gate.until_running(|running| running == 1).await;
    drop(readers);
    // Whether or not the task has been dropped by now.
    let next = spawn(world.range(0..BLOCK));
    world.gate.until_running(|running| running == 1).await;
    world.gate.open.add_permits(1);
    assert_eq!(next.await.expect("ended"), Ok(world.bytes.slice(0..BLOCK)));
    assert_eq!(world.asked().len(), 2);
    world.gate.until_running(|running| running == 0).await;
    assert_eq!(world.cache.pending(), 0);
}

#[tokio::test]
async fn an_error_is_told_to_all_who_wait_and_to_nobody_after() {
    let world = World::new(BLOCK, false, PLENTY, None);
    (world.faults).inject(Fault::fail(Operation::GetRange, StoreErrorKind::Throttled));
    let readers: Vec<_> = (0..3).map(|_| spawn(world.range(0..BLOCK))).collect();
    world.gate.until_running(|running| running == 1).await;
    world.gate.open.add_permits(10);
    for reader in readers {
        let read = reader.await.expect("ended");
        assert_eq!(read, Err(StoreErrorKind::Throttled));
    }
    assert_eq!(world.read(0..BLOCK).await, Ok(world.bytes.clone()));
    assert_eq!(world.asked().len(), 2);
}

#[tokio::test]
async fn a_task_that_dies_is_a_failure_that_passes() {
    let world = World::new(BLOCK, true, PLENTY, None);
    world.faults.inject(Fault::panic(Operation::GetRange));
    let read = world.read(0..BLOCK).await;
    assert!(read.is_err_and(StoreErrorKind::is_retryable));
    assert_eq!(world.stats.tasks_lost.get(), 1);
    assert_eq!(world.cache.pending(), 0);
    assert_eq!(world.read(0..BLOCK).await, Ok(world.bytes.clone()));
}

#[tokio::test]
async fn what_came_before_an_answer_broke_off_is_kept() {
    let world = World::new(4 * BLOCK, true, PLENTY, None);
    let fault = Fault::break_off(Operation::GetRange, 2 * BLOCK + 5);
    world.faults.inject(fault);
    let mut read = world.range(0..4 * BLOCK);
    for number in 0..2 {
        let piece = read.next(&|| ()).await.and_then(Result::ok);
        assert_eq!(
            piece,
            Some(world.bytes.slice(number * BLOCK..(number + 1) * BLOCK))
        );
    }
    assert!(read.next(&|| ()).await.is_some_and(|piece| piece.is_err()));
    assert!(read.next(&|| ()).await.is_none());
    assert_eq!(world.read(0..4 * BLOCK).await, Ok(world.bytes.clone()));
    assert_eq!(world.asked()[1..], [2 * BLOCK_BYTES..4 * BLOCK_BYTES]);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_get_on_is_a_timeout() {
    let world = World::new(BLOCK, true, PLENTY, None);
    world.faults.inject(Fault::hang(Operation::Get));
    world.gate.open.forget_permits(Semaphore::MAX_PERMITS);
    let read = world.read(0..BLOCK).await;
    assert_eq!(read, Err(StoreErrorKind::Timeout));
}

#[tokio::test]
async fn past_the_cache_is_past_what_is_kept_and_past_what_is_on_its_way_and_is_not_kept() {
    let world = World::new(2 * BLOCK, true, PLENTY, None);
    world.faults.inject(Fault::flip_bit(Operation::GetRange));
    let spoilt = world.read(0..2 * BLOCK).await.expect("read");
    assert_ne!(spoilt, world.bytes);
    assert_eq!(
        world.read(0..2 * BLOCK).await,
        Ok(spoilt),
        "nobody has noticed"
    );
    let past = (world.cache).range(1, &world.object, 0..2 * BLOCK_BYTES, CacheUse::Bypassed);
    assert_eq!(collect(past).await, Ok(world.bytes.clone()));
    assert_eq!(world.asked().len(), 2);
    assert_eq!(world.read(0..2 * BLOCK).await, Ok(world.bytes.clone()));
    assert_eq!(world.asked().len(), 3, "what was spoilt is gone");
}

#[tokio::test]
async fn memory_is_bounded_and_what_is_in_use_is_not_given_up() {
    let world = World::new(40 * BLOCK, true, 8 * BLOCK_BYTES, None);
    let first = world.read(0..BLOCK).await;
    let seen = (world.range(0..BLOCK).next(&|| ()).await).and_then(Result::ok);
    for number in 1..40 {
        let range = number * BLOCK..(number + 1) * BLOCK;
        assert_eq!(
            world.read(range.clone()).await,
            Ok(world.bytes.slice(range))
        );
        assert!(world.read_memory.used_bytes() <= 8 * BLOCK_BYTES);
    }
    assert!(world.stats.read_cache_bytes.get() > 5 * BLOCK as i64);
    assert_eq!(world.asked().len(), 40);
    // It was read longest ago, and somebody has it.
    assert_eq!(world.read(0..BLOCK).await, first);
    assert_eq!(world.asked().len(), 40);
    drop((seen, first));
    assert_eq!(world.read_memory.used_bytes(), 8 * BLOCK_BYTES);
}

#[tokio::test]
async fn an_index_is_looked_up_once_and_one_that_was_written_here_not_at_all() {
    let world = World::new(1000, true, PLENTY, None);
    for _ in 0..3 {
        let index = world
            .cache
            .index(1, &world.object, 900..2000, CacheUse::Allowed, &|| ())
            .await;
        assert_eq!(index, Ok(world.bytes.slice(900..)));
    }
    assert_eq!(world.asked().len(), 1);
    world
        .cache
        .remember_index("written", 77, &world.bytes[..40]);
    let index = world
        .cache
        .index(1, &Arc::from("written"), 77..117, CacheUse::Allowed, &|| ())
        .await;
    assert_eq!(index, Ok(world.bytes.slice(..40)));
    assert_eq!(world.asked().len(), 1);
    assert_eq!(world.stats.read_lookup_hits.get(), 3);
    // What turned out to be damaged is asked of the store.
    let index = world
        .cache
        .index(1, &world.object, 900..2000, CacheUse::Bypassed, &|| ())
        .await;
    assert_eq!(index, Ok(world.bytes.slice(900..)));
    assert_eq!(world.asked().len(), 2);
}

#[tokio::test]
async fn a_group_is_fetched_once_and_an_error_is_not_kept() {
    let world = World::new(1000, true, PLENTY, None);
    let group: Arc<str> = Arc::from("group");
    assert!(
        world
            .cache
            .group(1, &group, CacheUse::Allowed, &|| ())
            .await
            .is_err()
    );
    world.memory.insert("group", world.bytes.clone());
    for _ in 0..3 {
        let read = world
            .cache
            .group(1, &group, CacheUse::Allowed, &|| ())
            .await;
        assert_eq!(read, Ok(world.bytes.clone()));
    }
    let gets = world.faults.requests();
    assert_eq!(
        gets.iter()
            .filter(|(operation, _)| *operation == Operation::Get)
            .count(),
        2
    );
}

/// Waits until the disk has kept so many bytes.
async fn until_on_disk(world: &World, bytes: i64) {
    while world.stats.read_cache_disk_bytes.get() < bytes {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_memory_is_too_small_for_comes_from_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = Some((folder.path(), 100 * BLOCK_BYTES));
    let world = World::new(6 * BLOCK + 50, true, 7 * BLOCK_BYTES, disk);
    let forget = || world.cache.inner.evict(u64::MAX);
    let end = world.bytes.len();
    assert_eq!(world.read(0..end).await, Ok(world.bytes.clone()));
    until_on_disk(&world, end as i64).await;
    forget();
    assert_eq!(world.read(5..end).await, Ok(world.bytes.slice(5..)));
    assert_eq!(world.asked().len(), 1);
    assert_eq!(world.stats.read_cache_disk_hits.get(), 7);
    // A file that was damaged is noticed, forgotten, and fetched again.
    let mut damaged = 0;
    for entry in walk(folder.path()) {
        let mut bytes = std::fs::read(&entry).expect("read");
        bytes[3] ^= 1;
        std::fs::write(&entry, bytes).expect("written");
        damaged += 1;
    }
    assert_eq!(damaged, 7);
    forget();
    assert_eq!(world.read(0..end).await, Ok(world.bytes.clone()));
    assert_eq!(world.stats.read_cache_disk_errors.get(), 7);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_disk_is_bounded_and_what_an_earlier_life_left_is_deleted() {
    let folder = tempfile::tempdir().expect("a folder");
    for life in 0..2 {
        let disk = Some((folder.path(), 4 * BLOCK_BYTES));
        let world = World::new(16 * BLOCK, true, BLOCK_BYTES, disk);
        for number in 0..16 {
            let range = number * BLOCK..(number + 1) * BLOCK;
            assert_eq!(
                world.read(range.clone()).await,
                Ok(world.bytes.slice(range))
            );
            until_on_disk(&world, BLOCK as i64 * 4.min(number as i64 + 1)).await;
        }
        // The last deletions follow the count.
        while walk(folder.path()).len() > 4 {
            tokio::task::yield_now().await;
        }
        assert!(
            world.stats.read_cache_disk_bytes.get() <= 4 * BLOCK as i64,
            "{life}"
        );
        assert_eq!(world.stats.read_cache_disk_errors.get(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_cannot_be_used_does_no_harm() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let world = World::new(
        20 * BLOCK,
        true,
        20 * BLOCK_BYTES,
        Some((file.path(), PLENTY)),
    );
    for _ in 0..2 {
        let read = world.read(0..20 * BLOCK).await;
        assert_eq!(read, Ok(world.bytes.clone()));
        world.cache.inner.evict(u64::MAX);
    }
    while world.stats.read_cache_disk_errors.get() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.stats.read_cache_disk_bytes.get(), 0);
}

/// Lets every thread go that waits for a writer.
struct Fifos(Vec<std::path::PathBuf>);

impl Drop for Fifos {
    fn drop(&mut self) {
        use std::os::unix::fs::OpenOptionsExt;
        for file in &self.0 {
            // Not blocking: nobody may be waiting here.
            let mut writer = std::fs::OpenOptions::new();
            writer.write(true).custom_flags(0o4000).open(file).ok();
        }
    }
}

/// A FIFO in place of a block's file: opening it blocks its thread until the test writes to it.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_hangs_costs_its_cache_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = Some((folder.path(), 100 * BLOCK_BYTES));
    let world = World::new(20 * BLOCK, true, 20 * BLOCK_BYTES, disk);
    let end = world.bytes.len();
    assert_eq!(world.read(0..end).await, Ok(world.bytes.clone()));
    until_on_disk(&world, end as i64).await;
    let files = walk(folder.path());
    for file in &files {
        std::fs::remove_file(file).expect("removed");
        let made = std::process::Command::new("mkfifo").arg(file).status();
        assert!(made.expect("mkfifo").success());
    }
    let _fifos = Fifos(files);
    world.cache.inner.evict(u64::MAX);
    // Each block by somebody who goes away at once, and then all of them by one who stays.
    for number in 0..20 {
        let mut read = world.range(number * BLOCK..(number + 1) * BLOCK);
        let alive = || ();
        let next = read.next(&alive);
        tokio::time::timeout(std::time::Duration::from_millis(1), next)
            .await
            .ok();
    }
    let asked_before = world.asked().len();
    let read = tokio::time::timeout(std::time::Duration::from_secs(10), world.read(0..end));
    assert_eq!(
        read.await.expect("the store answers"),
        Ok(world.bytes.clone())
    );
    assert!(world.asked().len() > asked_before);
    assert_eq!(world.stats.read_cache_disk_unusable.get(), 1);
    assert_eq!(world.stats.read_cache_disk_bytes.get(), 0);
    let disk = world.cache.inner.disk.as_ref().expect("a disk");
    assert!(disk.threads_at_work() <= DISK_THREADS_MAX);
}

fn walk(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            files.extend(walk(&entry.path()));
        } else {
            files.push(entry.path());
        }
    }
    files
}

/// Says when it is dropped.
struct Marker(std::sync::mpsc::Sender<()>);

impl Drop for Marker {
    fn drop(&mut self) {
        // The test may be over.
        self.0.send(()).ok();
    }
}

/// A runtime that has begun to close drops a future where it is spawned: here, while a reader asks for what is missing.
#[test]
fn asking_on_a_runtime_that_is_being_closed_comes_back_and_leaves_nothing_behind() {
    const SOON: std::time::Duration = std::time::Duration::from_secs(5);
    for lookup in [false, true] {
        let world = World::new(8 * BLOCK, false, PLENTY, None);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let (is_asking, asks) = std::sync::mpsc::channel();
        let (closes, is_closing) = std::sync::mpsc::channel();
        let (came_back, is_back) = std::sync::mpsc::channel();
        let (dropped, is_dropped) = std::sync::mpsc::channel();
        let marker = Marker(dropped);
        runtime.spawn(async move {
            let _marker = marker;
            std::future::pending::<()>().await;
        });
        let (cache, object) = (world.cache.clone(), Arc::clone(&world.object));
        runtime.spawn(async move {
            is_asking.send(()).expect("the test waits");
            is_closing.recv().expect("the test goes on");
            if lookup {
                // In the same poll; the answer never comes.
                let index = cache.index(1, &object, 0..100, CacheUse::Allowed, &|| ());
                let waits = std::pin::pin!(index);
                let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                let _ = waits.poll(&mut context);
            } else {
                drop(cache.range(1, &object, 0..4 * BLOCK_BYTES, CacheUse::Allowed));
            }
            came_back.send(()).expect("the test waits");
        });
        asks.recv_timeout(SOON).expect("a thread asks");
        runtime.shutdown_background();
        is_dropped.recv_timeout(SOON).expect("tasks are dropped");
        closes.send(()).expect("the thread waits");
        is_back.recv_timeout(SOON).expect("no deadlock");
        assert_eq!(world.cache.pending(), 0);
        assert!(world.asked().is_empty());
    }
}

/// One step of a reader: a range, and after how many pieces it goes away.
#[derive(Debug, Clone)]
struct Step {
    start: usize,
    length: usize,
    cache_use: CacheUse,
    gives_up_after: Option<usize>,
}

fn steps() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let step = (
        0..6 * BLOCK,
        1..4 * BLOCK,
        prop::bool::weighted(0.1),
        prop::option::weighted(0.3, 0_usize..3),
    )
        .prop_map(|(start, length, bypassed, gives_up_after)| Step {
            start,
            length,
            cache_use: match bypassed {
                true => CacheUse::Bypassed,
                false => CacheUse::Allowed,
            },
            gives_up_after,
        });
    prop::collection::vec(prop::collection::vec(step, 1..6), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 50, ..ProptestConfig::default() })]

    /// Whatever ranges are read by whoever at the same time, whatever fails, whoever goes away: the bytes are the store's.
    #[test]
    fn the_cache_gives_the_bytes_that_the_store_gives(
        readers in steps(),
        faults in prop::collection::vec((0_usize..3, 0_usize..3 * BLOCK), 0..6),
        // The longest range of a step has five blocks.
        capacity_blocks in 6_u64..12,
        with_disk in any::<bool>(),
        length in 5 * BLOCK..5 * BLOCK + 2000,
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let folder = tempfile::tempdir().expect("a folder");
        let failed = AtomicU64::new(0);
        let faults_injected = faults.len() as u64;
        let outcome: Result<(), TestCaseError> = runtime.block_on(async {
            let disk = with_disk.then_some((folder.path(), 3 * BLOCK_BYTES));
            let world = Arc::new(World::new(length, true, capacity_blocks * BLOCK_BYTES, disk));
            for (kind, bytes) in faults {
                world.faults.inject(match kind {
                    0 => Fault::fail(Operation::GetRange, StoreErrorKind::Server),
                    1 => Fault::panic(Operation::GetRange),
                    _ => Fault::break_off(Operation::GetRange, bytes),
                });
            }
            let failed = &failed;
            let runs = readers.into_iter().map(|steps| {
                let world = Arc::clone(&world);
                async move {
                    for step in steps {
                        let range = step.start as u64..(step.start + step.length) as u64;
                        let truth = (world.memory).get_range("object", range.clone()).await;
                        let mut read = world.cache.range(1, &world.object, range, step.cache_use);
                        let (mut seen, mut pieces) = (Vec::new(), 0);
                        let ended = loop {
                            if step.gives_up_after == Some(pieces) {
                                break Ok(false);
                            }
                            pieces += 1;
                            match read.next(&|| ()).await {
                                Some(Ok(piece)) => seen.extend_from_slice(&piece),
                                Some(Err(error)) => break Err(error.kind()),
                                None => break Ok(true),
                            }
                        };
                        match (ended, truth) {
                            (Ok(true), Ok(truth)) => prop_assert_eq!(Bytes::from(seen), truth),
                            (Ok(false), Ok(truth)) => prop_assert!(truth.starts_with(&seen)),
                            (Err(kind), Ok(truth)) => {
                                // Only what was injected, and what came before is right.
                                prop_assert!(kind.is_retryable(), "{:?}", kind);
                                prop_assert!(truth.starts_with(&seen));
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                            (ended, Err(error)) => {
                                prop_assert!(seen.is_empty());
                                let same = ended == Err(error.kind());
                                let passing = ended.is_err_and(StoreErrorKind::is_retryable);
                                prop_assert!(same || passing || ended == Ok(false), "{:?}", ended);
                            }
                        }
                    }
                    Ok(())
                }
            });
            let tasks: Vec<_> = runs.map(Box::pin).collect();
            for outcome in join_all(tasks).await {
                outcome?;
            }
            // Everything that was asked for and given up is gone.
            world.gate.until_running(|running| running == 0).await;
            while world.cache.pending() > 0 {
                tokio::task::yield_now().await;
            }
            prop_assert!(world.stats.read_cache_bytes.get() as u64 <= capacity_blocks * BLOCK_BYTES);
            Ok(())
        });
        outcome?;
        prop_assert!(faults_injected > 0 || failed.load(Ordering::Relaxed) == 0);
    }
}

/// Runs futures beside each other on this task.
async fn join_all<T, F: Future<Output = T> + Unpin>(mut futures: Vec<F>) -> Vec<T> {
    let mut outcomes = Vec::new();
    std::future::poll_fn(|context| {
        futures.retain_mut(|future| match std::pin::Pin::new(future).poll(context) {
            std::task::Poll::Ready(outcome) => {
                outcomes.push(outcome);
                false
            }
            std::task::Poll::Pending => true,
        });
        match futures.is_empty() {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    outcomes
}
