//! The byte budget of all readers of a node, and one reader's share of it.
//!
//! Owns the count, the order and the division. Of the node's read memory one part is for what readers have on their way and
//! have not handed on, the other for what they share in the cache. In the first part it is first come, first served, so a reader
//! that waits is served before one that asks again, and nobody may hold more than its fair share of what is there, however fast
//! it is. The little that every reader may use without asking, so that none ever stands still ([`FLOOR_BYTES`]), is taken from
//! the cache's part. So the whole is kept to as long as the readers' floors fit into the cache's part; each reader beyond that
//! costs its floor, and a chunk that is larger than a floor costs its length, because it has to be here as a whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::read_cache::BLOCK_BYTES;
use crate::stats::Stats;

/// Of the node's read memory this part is the cache's: 1/2.
const CACHE_SHARE: u64 = 2;

/// The first request of a reader, for which it needs no permission: two blocks, so that one that begins at the end of a block
/// has at least a whole one.
pub(crate) const FLOOR_BYTES: u64 = 2 * BLOCK_BYTES;

/// The budget. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ReadMemory {
    semaphore: Arc<Semaphore>,
    capacity_bytes: u64,
    cache_bytes: u64,
    /// Readers, and those of them that hold memory of the budget or wait for it.
    readers: Arc<AtomicUsize>,
    contenders: Arc<AtomicUsize>,
    stats: Arc<Stats>,
}

impl ReadMemory {
    /// A budget of so many bytes, the cache's part included.
    pub(crate) fn new(total_bytes: u64, stats: Arc<Stats>) -> Self {
        let cache_bytes = total_bytes / CACHE_SHARE;
        let permits = usize::try_from(total_bytes - cache_bytes)
            .unwrap_or(usize::MAX)
            .clamp(1, Semaphore::MAX_PERMITS);
        Self {
            semaphore: Arc::new(Semaphore::new(permits)),
            capacity_bytes: permits as u64,
            cache_bytes,
            readers: Arc::default(),
            contenders: Arc::default(),
            stats,
        }
    }

    /// Bytes that nobody holds.
    #[cfg(test)]
    pub(crate) fn available_bytes(&self) -> u64 {
        self.semaphore.available_permits() as u64
    }

    /// Bytes for all readers, without the cache's part.
    pub(crate) const fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes that the cache may keep now.
    pub(crate) fn cache_bytes(&self) -> u64 {
        let floors = (self.readers.load(Ordering::Relaxed) as u64).saturating_mul(FLOOR_BYTES);
        self.cache_bytes.saturating_sub(floors)
    }

    /// What one of those who want memory may hold.
    pub(super) fn fair_bytes(&self) -> u64 {
        let contenders = self.contenders.load(Ordering::Relaxed).max(1) as u64;
        self.capacity_bytes / contenders
    }

    /// A reader begins.
    pub(super) fn share(&self) -> Share {
        self.readers.fetch_add(1, Ordering::Relaxed);
        self.stats.read_memory_reserved_bytes.add(FLOOR_BYTES);
        Share {
            memory: self.clone(),
            permit: None,
            granted_bytes: 0,
            is_waiting: false,
            is_contending: false,
        }
    }

    /// As many permits as a request can get: one that is larger than everything would otherwise wait for ever.
    fn permits(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.min(self.capacity_bytes)).unwrap_or(u32::MAX)
    }
}

/// What one reader holds; given back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    memory: ReadMemory,
    permit: Option<OwnedSemaphorePermit>,
    /// What the machine counts; more than the permits only after a request that was larger than the budget.
    granted_bytes: u64,
    is_waiting: bool,
    is_contending: bool,
}

impl Share {
    /// At once, if there is enough and nobody waits for it.
    pub(super) fn try_reserve(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let semaphore = Arc::clone(&self.memory.semaphore);
        semaphore
            .try_acquire_many_owned(self.memory.permits(bytes))
            .ok()
    }

    /// When those who asked before have been served.
    pub(super) fn reserve(
        &mut self,
        bytes: u64,
    ) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + 'static {
        self.waits(true);
        let semaphore = Arc::clone(&self.memory.semaphore);
        let permits = self.memory.permits(bytes);
        async move { semaphore.acquire_many_owned(permits).await.ok() }
    }

    /// The memory that was reserved is held now.
    pub(super) fn grant(&mut self, permit: OwnedSemaphorePermit, bytes: u64) {
        (self.memory.stats.read_memory_reserved_bytes).add(permit.num_permits() as u64);
        self.granted_bytes = self.granted_bytes.saturating_add(bytes);
        match &mut self.permit {
            Some(held) => held.merge(permit),
            None => self.permit = Some(permit),
        }
        self.waits(false);
    }

    pub(super) fn release(&mut self, bytes: u64) {
        self.granted_bytes = self.granted_bytes.saturating_sub(bytes);
        let keep = usize::try_from(self.granted_bytes).unwrap_or(usize::MAX);
        if let Some(permit) = &mut self.permit {
            let surplus = permit.num_permits().saturating_sub(keep);
            drop(permit.split(surplus));
            (self.memory.stats.read_memory_reserved_bytes).subtract(surplus as u64);
        }
        if keep == 0 {
            self.permit = None;
        }
        self.contends();
    }

    fn waits(&mut self, is_waiting: bool) {
        let gauge = &self.memory.stats.readers_waiting_for_memory;
        match (self.is_waiting, is_waiting) {
            (false, true) => gauge.increment(),
            (true, false) => gauge.subtract(1),
            (true, true) | (false, false) => {}
        }
        self.is_waiting = is_waiting;
        self.contends();
    }

    fn contends(&mut self) {
        let is_contending = self.is_waiting || self.granted_bytes > 0;
        match (self.is_contending, is_contending) {
            (false, true) => drop(self.memory.contenders.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.memory.contenders.fetch_sub(1, Ordering::Relaxed)),
            (true, true) | (false, false) => {}
        }
        self.is_contending = is_contending;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release(u64::MAX);
        self.waits(false);
        self.memory.readers.fetch_sub(1, Ordering::Relaxed);
        (self.memory.stats.read_memory_reserved_bytes).subtract(FLOOR_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A budget of 100 bytes for readers.
    fn memory() -> (ReadMemory, Arc<Stats>) {
        let stats = Arc::new(Stats::default());
        (ReadMemory::new(200, Arc::clone(&stats)), stats)
    }

    #[tokio::test]
    async fn what_is_released_or_dropped_is_there_for_the_next() {
        let (memory, stats) = memory();
        let mut share = memory.share();
        let permit = share.try_reserve(70).expect("enough");
        share.grant(permit, 70);
        assert!(memory.share().try_reserve(31).is_none());
        share.release(50);
        assert_eq!(memory.available_bytes(), 80);
        assert_eq!(
            stats.read_memory_reserved_bytes.get(),
            FLOOR_BYTES as i64 + 20
        );
        drop(share);
        assert_eq!(memory.available_bytes(), 100);
        assert_eq!(stats.read_memory_reserved_bytes.get(), 0);
    }

    #[tokio::test]
    async fn the_first_to_wait_is_the_first_to_be_served() {
        let (memory, stats) = memory();
        let (mut first, mut second) = (memory.share(), memory.share());
        let permit = first.try_reserve(100).expect("enough");
        first.grant(permit, 100);
        let mut waiting = Box::pin(second.reserve(60));
        assert!(futures_poll(&mut waiting).is_none());
        assert_eq!(stats.readers_waiting_for_memory.get(), 1);
        first.release(50);
        assert!(
            memory.share().try_reserve(10).is_none(),
            "what is free belongs to who waits"
        );
        first.release(50);
        assert!(futures_poll(&mut waiting).flatten().is_some());
        drop(waiting);
        drop(second);
        assert_eq!(stats.readers_waiting_for_memory.get(), 0);
    }

    #[tokio::test]
    async fn a_request_larger_than_everything_gets_everything() {
        let (memory, _) = memory();
        let mut share = memory.share();
        let permit = share.reserve(1_000_000).await.expect("everything");
        share.grant(permit, 1_000_000);
        assert_eq!(memory.available_bytes(), 0);
        share.release(999_980);
        assert_eq!(memory.available_bytes(), 80);
    }

    #[tokio::test]
    async fn who_wants_memory_shares_it_and_who_does_not_takes_nothing_from_the_others() {
        let (memory, _) = memory();
        let mut shares: Vec<Share> = (0..4).map(|_| memory.share()).collect();
        assert_eq!(memory.fair_bytes(), 100, "four readers that hold nothing");
        for share in shares.iter_mut().take(2) {
            let permit = share.try_reserve(10).expect("enough");
            share.grant(permit, 10);
        }
        assert_eq!(memory.fair_bytes(), 50);
        let waiting = shares[2].reserve(90);
        assert_eq!(memory.fair_bytes(), 33);
        drop(waiting);
        shares.clear();
        assert_eq!(memory.fair_bytes(), 100);
    }

    #[test]
    fn floors_come_out_of_the_cache_s_part() {
        let stats = Arc::new(Stats::default());
        let memory = ReadMemory::new(8 * FLOOR_BYTES, stats);
        assert_eq!(memory.cache_bytes(), 4 * FLOOR_BYTES);
        let shares: Vec<Share> = (0..3).map(|_| memory.share()).collect();
        assert_eq!(memory.cache_bytes(), FLOOR_BYTES);
        let more: Vec<Share> = (0..3).map(|_| memory.share()).collect();
        assert_eq!(memory.cache_bytes(), 0);
        drop((shares, more));
        assert_eq!(memory.cache_bytes(), 4 * FLOOR_BYTES);
    }

    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
