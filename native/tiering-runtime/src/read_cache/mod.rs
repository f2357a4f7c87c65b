//! What readers of this node have fetched, shared by all of them: each byte is asked for once.
//!
//! Owns blocks of fragments (in memory, and on disk if there is a place for them), fragment indexes and groups, and the
//! requests that bring them. Does not own what is read when (the machine does), who gets memory (`read_memory` does; the cache
//! gives up what nobody uses whenever somebody needs it), nor whether the bytes are right: the machine checks them, and asks
//! *past the cache* when they are not. What is asked for past the cache is not kept.
//!
//! Objects are cut into blocks of [`BLOCK_BYTES`], counted from the object's first byte, so that what two readers want
//! coincides whatever each of them wants. Blocks that are missing and follow each other are brought by one request. Objects
//! never change, so nothing is ever out of date; those that were deleted are pushed out by what is read.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use tiering_core::read::CacheUse;
use tokio::sync::Semaphore;

use crate::buffer_pool::{BUFFER_BYTES, BufferPool};
use crate::read_memory::{Evict, ReadMemory};
use crate::remote_tier::{RemoteTier, StoreError, StoreErrorKind};
use crate::stats::Stats;

mod disk;
mod fetch;
mod flights;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use disk::DISK_THREADS_MAX;
use disk::Disk;
use flights::{Booking, Flights, Seat};
use store::{Held, Store};

/// Length of every block but an object's last. Small enough that a single record costs little, large enough that the
/// bookkeeping of a block is nothing beside its bytes.
pub(crate) const BLOCK_BYTES: u64 = BUFFER_BYTES as u64;

/// Requests of all readers together. Who has to wait for its turn waits in order; that is no fault of the store.
const REQUESTS_MAX: usize = 256;

/// The share of the memory that indexes and groups may have, which are small and decide how fast a reader attaches.
const LOOKUPS_SHARE: u64 = 8;

/// The share of the memory that may wait empty for the next block, and the most that may (16 MiB).
const IDLE_SHARE: u64 = 16;
const IDLE_BLOCKS_MAX: u64 = 64;

/// Which part of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    Block(u64),
    /// From here to the end.
    Index(u64),
    Whole,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PartKey {
    object: Arc<str>,
    part: Part,
}

/// What is here and what is on its way, under one lock, so that a part is always one of the two from when it is asked for.
#[derive(Debug)]
struct State {
    flights: Flights,
    blocks: Store,
    lookups: Store,
}

/// The cache of a node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ReadCache {
    inner: Arc<Inner>,
}

struct Inner {
    state: Mutex<State>,
    tier: Arc<dyn RemoteTier>,
    memory: ReadMemory,
    disk: Option<Disk>,
    requests: Semaphore,
    /// Memory of blocks that were pushed out, for those that come: a fresh one costs more than all else that is done to it.
    pool: Arc<BufferPool>,
    stats: Arc<Stats>,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while the lock is held, so a poisoned state is still a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_cached(&self, state: &State) {
        self.stats
            .read_cache_bytes
            .set(state.blocks.bytes() + state.lookups.bytes());
    }
}

impl Evict for Inner {
    fn evict(&self, bytes: u64) -> u64 {
        let gone = {
            let mut state = self.lock();
            let mut gone = state.blocks.evict(bytes);
            let missing = bytes.saturating_sub(store::bytes_of(&gone));
            if missing > 0 {
                gone.extend(state.lookups.evict(missing));
            }
            self.count_cached(&state);
            gone
        };
        // Giving memory back to the system takes time, in which others need the lock.
        store::bytes_of(&gone)
    }
}

impl ReadCache {
    /// A cache over `tier` that keeps what `memory` has room for, and so much below `disk`.
    pub(crate) fn new(
        tier: Arc<dyn RemoteTier>,
        memory: ReadMemory,
        disk: Option<(&Path, u64)>,
        stats: Arc<Stats>,
    ) -> Self {
        let state = State {
            flights: Flights::default(),
            // What it keeps is given up whenever somebody needs the memory.
            blocks: Store::new(u64::MAX),
            lookups: Store::new(memory.capacity_bytes() / LOOKUPS_SHARE),
        };
        let inner = Arc::new(Inner {
            state: Mutex::new(state),
            tier,
            disk: disk.map(|(path, bytes)| Disk::new(path, bytes, Arc::clone(&stats))),
            requests: Semaphore::new(REQUESTS_MAX),
            pool: Arc::new(BufferPool::keeping(idle_blocks(memory.capacity_bytes()))),
            memory,
            stats,
        });
        let cache: Weak<Inner> = Arc::downgrade(&inner);
        inner.memory.set_cache(cache);
        Self { inner }
    }

    /// Reads a range of an object, which comes in pieces. Starts what is missing; dropping the answer gives it up, unless
    /// somebody else waits for it. Must be called on the engine's runtime.
    pub(crate) fn range(
        &self,
        reader: u64,
        object: &Arc<str>,
        range: Range<u64>,
        cache_use: CacheUse,
    ) -> RangeRead {
        let mut read = RangeRead {
            pieces: VecDeque::new(),
            position: range.start,
            end: range.end,
            is_new: true,
        };
        if range.is_empty() {
            return read;
        }
        let stats = &self.inner.stats;
        // Tasks are started, and what is forgotten is dropped, without the lock: see `Booking`.
        let mut departures = Vec::new();
        let (mut forgotten, mut on_disk) = (Vec::new(), Vec::new());
        let mut state = self.inner.lock();
        let mut missing: Vec<PartKey> = Vec::new();
        for number in range.start / BLOCK_BYTES..=(range.end - 1) / BLOCK_BYTES {
            let key = PartKey {
                object: Arc::clone(object),
                part: Part::Block(number),
            };
            if cache_use == CacheUse::Bypassed {
                forgotten.extend(state.blocks.remove(&key));
                on_disk.push(key.clone());
            } else if let Some(seat) = state.flights.join(&key) {
                stats.read_cache_joins.increment();
                departures.extend(self.book(
                    &mut state,
                    &mut read,
                    &mut missing,
                    CacheUse::Allowed,
                ));
                read.pieces.push_back(Piece::Coming(seat));
                continue;
            } else if let Some(bytes) = state.blocks.get(&key) {
                stats.read_cache_hits.increment();
                departures.extend(self.book(
                    &mut state,
                    &mut read,
                    &mut missing,
                    CacheUse::Allowed,
                ));
                read.pieces.push_back(Piece::Here(bytes));
                continue;
            } else if let Some(disk) = &self.inner.disk
                && disk.has(&key)
            {
                departures.extend(self.book(
                    &mut state,
                    &mut read,
                    &mut missing,
                    CacheUse::Allowed,
                ));
                let keys = vec![key];
                let (seats, booking) = state.flights.book(&self.inner, &keys, CacheUse::Allowed);
                read.pieces.extend(seats.into_iter().map(Piece::Coming));
                departures.push((booking, keys, Source::Disk));
                continue;
            }
            stats.read_cache_misses.increment();
            missing.push(key);
        }
        departures.extend(self.book(&mut state, &mut read, &mut missing, cache_use));
        drop(state);
        drop(forgotten);
        if let Some(disk) = &self.inner.disk {
            on_disk.iter().for_each(|key| disk.remove(key));
        }
        for (booking, keys, source) in departures {
            let inner = Arc::clone(&self.inner);
            booking.depart(|landing| fetch::bring(inner, reader, keys, source, landing));
        }
        read
    }

    /// Seats in one request for blocks that follow each other.
    fn book(
        &self,
        state: &mut State,
        read: &mut RangeRead,
        missing: &mut Vec<PartKey>,
        cache_use: CacheUse,
    ) -> Option<(Booking, Vec<PartKey>, Source)> {
        if missing.is_empty() {
            return None;
        }
        let keys = std::mem::take(missing);
        let (seats, booking) = state.flights.book(&self.inner, &keys, cache_use);
        read.pieces.extend(seats.into_iter().map(Piece::Coming));
        Some((booking, keys, Source::Store))
    }

    /// The index of a fragment: its bytes from `range.start` on, of which at most as many as the range has. Until it is here,
    /// `alive` is called now and then as long as the store is not to blame.
    pub(crate) async fn index(
        &self,
        reader: u64,
        object: &Arc<str>,
        range: Range<u64>,
        cache_use: CacheUse,
        alive: &(dyn Fn() + Sync),
    ) -> Result<Bytes, StoreError> {
        let length = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        let bytes = self
            .look_up(reader, object, Some(range), cache_use, alive)
            .await?;
        Ok(bytes.slice(..bytes.len().min(length)))
    }

    /// A group of manifest entries.
    pub(crate) async fn group(
        &self,
        reader: u64,
        object: &Arc<str>,
        cache_use: CacheUse,
        alive: &(dyn Fn() + Sync),
    ) -> Result<Bytes, StoreError> {
        self.look_up(reader, object, None, cache_use, alive).await
    }

    /// The index of a fragment that was stored just now: whoever attaches near the tail does not have to fetch it.
    pub(crate) fn remember_index(&self, object: &str, start: u64, index: &[u8]) {
        let Some(memory) = self.inner.memory.try_take(index.len() as u64) else {
            return;
        };
        let key = PartKey {
            object: Arc::from(object),
            part: Part::Index(start),
        };
        // A copy of megabytes is not made while others wait for the lock.
        let index = Held::plain(Bytes::copy_from_slice(index), memory);
        let mut state = self.inner.lock();
        let pushed_out = state.lookups.put(key, index);
        self.inner.count_cached(&state);
        drop(state);
        drop(pushed_out);
    }

    async fn look_up(
        &self,
        reader: u64,
        object: &Arc<str>,
        range: Option<Range<u64>>,
        cache_use: CacheUse,
        alive: &(dyn Fn() + Sync),
    ) -> Result<Bytes, StoreError> {
        let key = PartKey {
            object: Arc::clone(object),
            part: range
                .as_ref()
                .map_or(Part::Whole, |range| Part::Index(range.start)),
        };
        let stats = &self.inner.stats;
        let mut forgotten = None;
        let (seat, booking) = {
            let mut state = self.inner.lock();
            if cache_use == CacheUse::Bypassed {
                forgotten = state.lookups.remove(&key);
            } else if let Some(bytes) = state.lookups.get(&key) {
                stats.read_lookup_hits.increment();
                return Ok(bytes);
            }
            let joined = (cache_use == CacheUse::Allowed)
                .then(|| state.flights.join(&key))
                .flatten();
            match joined {
                Some(seat) => {
                    stats.read_cache_joins.increment();
                    (Some(seat), None)
                }
                None => {
                    stats.read_lookup_misses.increment();
                    let (mut seats, booking) = state.flights.book(&self.inner, &[key], cache_use);
                    (seats.pop(), Some(booking))
                }
            }
        };
        drop(forgotten);
        if let Some(booking) = booking {
            let inner = Arc::clone(&self.inner);
            let object = Arc::clone(object);
            booking.depart(|landing| fetch::lookup(inner, reader, object, range, landing));
        }
        match seat {
            Some(seat) => seat.landed(alive).await,
            None => Err(flights::lost()),
        }
    }

    /// Blocks, indexes and groups that are on their way.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.inner.lock().flights.len()
    }
}

/// What is left of a node's read memory for bytes when buffers wait empty for the next ones.
pub(crate) const fn budget_bytes(read_memory_bytes: u64) -> u64 {
    read_memory_bytes - idle_blocks(read_memory_bytes) as u64 * BLOCK_BYTES
}

/// Blocks whose memory is kept while nothing is in it.
const fn idle_blocks(capacity_bytes: u64) -> usize {
    let share = capacity_bytes / IDLE_SHARE / BLOCK_BYTES;
    if share < IDLE_BLOCKS_MAX {
        share as usize
    } else {
        IDLE_BLOCKS_MAX as usize
    }
}

/// Where a flight goes.
#[derive(Debug, Clone, Copy)]
enum Source {
    Store,
    Disk,
}

enum Piece {
    Here(Bytes),
    Coming(Seat),
}

/// A range that is being read; its pieces come in order.
pub(crate) struct RangeRead {
    pieces: VecDeque<Piece>,
    position: u64,
    end: u64,
    is_new: bool,
}

impl RangeRead {
    /// The next bytes. `None` after the last; before the range's end only where the object ends. Until they are here, `alive` is
    /// called now and then as long as the store is not to blame.
    pub(crate) async fn next(
        &mut self,
        alive: &(dyn Fn() + Sync),
    ) -> Option<Result<Bytes, StoreError>> {
        let Some(piece) = self.pieces.pop_front() else {
            // An empty range is an error of the caller, as it is for the store.
            return std::mem::take(&mut self.is_new).then(|| Err(outside()));
        };
        let is_first = std::mem::take(&mut self.is_new);
        let landed = match piece {
            Piece::Here(bytes) => Ok(bytes),
            Piece::Coming(seat) => seat.landed(alive).await,
        };
        let block = match landed {
            Ok(block) => block,
            Err(error) => {
                self.pieces.clear();
                // The object ends where the block before did.
                let ends_here = error.kind() == StoreErrorKind::InvalidRange && !is_first;
                return (!ends_here).then_some(Err(error));
            }
        };
        let block_start = self.position - self.position % BLOCK_BYTES;
        let wanted_end = self.end.min(block_start + BLOCK_BYTES);
        let block_end = block_start + block.len() as u64;
        let from = self.position;
        let to = wanted_end.min(block_end);
        if to < wanted_end {
            self.pieces.clear();
        }
        if to <= from {
            return is_first.then(|| Err(outside()));
        }
        self.position = to;
        // Both are inside the block, whose length is a usize.
        let (from, to) = ((from - block_start) as usize, (to - block_start) as usize);
        Some(Ok(block.slice(from..to)))
    }
}

fn outside() -> StoreError {
    StoreError::new(
        StoreErrorKind::InvalidRange,
        "the range is outside of the object",
    )
}
