//! The byte budget of all readers of a node, and one reader's share of it.
//!
//! Owns the count and the order: first come, first served, so a reader that waits is served before one that asks again.
//! Does not own the little that every reader may use without asking; the machine keeps to that by itself.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The budget. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ReadMemory {
    semaphore: Arc<Semaphore>,
    capacity_bytes: u64,
}

impl ReadMemory {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        let permits = usize::try_from(capacity_bytes)
            .unwrap_or(usize::MAX)
            .clamp(1, Semaphore::MAX_PERMITS);
        Self {
            semaphore: Arc::new(Semaphore::new(permits)),
            capacity_bytes: permits as u64,
        }
    }

    /// Bytes that nobody holds.
    #[cfg(test)]
    pub(crate) fn available_bytes(&self) -> u64 {
        self.semaphore.available_permits() as u64
    }

    pub(super) fn share(&self) -> Share {
        Share {
            memory: self.clone(),
            permit: None,
            granted_bytes: 0,
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
        &self,
        bytes: u64,
    ) -> impl Future<Output = Option<OwnedSemaphorePermit>> + Send + 'static {
        let semaphore = Arc::clone(&self.memory.semaphore);
        let permits = self.memory.permits(bytes);
        async move { semaphore.acquire_many_owned(permits).await.ok() }
    }

    /// The memory that was reserved is held now.
    pub(super) fn grant(&mut self, permit: OwnedSemaphorePermit, bytes: u64) {
        self.granted_bytes = self.granted_bytes.saturating_add(bytes);
        match &mut self.permit {
            Some(held) => held.merge(permit),
            None => self.permit = Some(permit),
        }
    }

    pub(super) fn release(&mut self, bytes: u64) {
        self.granted_bytes = self.granted_bytes.saturating_sub(bytes);
        let Some(permit) = &mut self.permit else {
            return;
        };
        let keep = usize::try_from(self.granted_bytes).unwrap_or(usize::MAX);
        if keep == 0 {
            self.permit = None;
        } else if let Some(surplus) = permit.num_permits().checked_sub(keep) {
            drop(permit.split(surplus));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_released_or_dropped_is_there_for_the_next() {
        let memory = ReadMemory::new(100);
        let mut share = memory.share();
        let permit = share.try_reserve(70).expect("enough");
        share.grant(permit, 70);
        assert!(memory.share().try_reserve(31).is_none());
        share.release(50);
        assert_eq!(memory.available_bytes(), 80);
        drop(share);
        assert_eq!(memory.available_bytes(), 100);
    }

    #[tokio::test]
    async fn the_first_to_wait_is_the_first_to_be_served() {
        let memory = ReadMemory::new(100);
        let (mut first, second) = (memory.share(), memory.share());
        let permit = first.try_reserve(100).expect("enough");
        first.grant(permit, 100);
        let mut waiting = Box::pin(second.reserve(60));
        assert!(futures_poll(&mut waiting).is_none());
        first.release(50);
        assert!(
            memory.share().try_reserve(10).is_none(),
            "what is free belongs to who waits"
        );
        first.release(50);
        assert!(futures_poll(&mut waiting).flatten().is_some());
    }

    #[tokio::test]
    async fn a_request_larger_than_everything_gets_everything() {
        let memory = ReadMemory::new(100);
        let mut share = memory.share();
        let permit = share.reserve(1_000_000).await.expect("everything");
        share.grant(permit, 1_000_000);
        assert_eq!(memory.available_bytes(), 0);
        share.release(999_980);
        assert_eq!(memory.available_bytes(), 80);
    }

    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
