//! A wrapper that tries retryable failures again, a few times, with growing pauses.
//!
//! For requests that no machine retries: listings and deletions. Uploads and remote reads go to the store below this wrapper,
//! because their machines own the retries and the timing.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tracing::{Instrument, debug_span};

use super::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutRequest, RemoteTier, StoreError,
    StoreFuture,
};
use crate::clock::random_uid;
use crate::stats::Stats;

/// How often and when to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryingPolicy {
    /// Attempts in all, the first included.
    pub attempts_max: u32,
    /// Pause after the first failure; doubles each time, and half of each pause is random.
    pub base_delay: Duration,
    /// Longest pause.
    pub max_delay: Duration,
}

impl Default for RetryingPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 4,
            base_delay: Duration::from_millis(50),
            max_delay: Duration::from_secs(2),
        }
    }
}

impl RetryingPolicy {
    fn delay(&self, failures: u32) -> Duration {
        let full = self
            .base_delay
            .saturating_mul(1 << failures.saturating_sub(1).min(16))
            .min(self.max_delay);
        let half = full / 2;
        half + half.mul_f64(f64::from(random_uid()) / f64::from(u32::MAX))
    }
}

/// Tries again what is worth it.
pub struct Retrying {
    inner: Arc<dyn RemoteTier>,
    policy: RetryingPolicy,
    stats: Arc<Stats>,
}

impl Retrying {
    /// Wraps a store.
    pub fn new(inner: Arc<dyn RemoteTier>, policy: RetryingPolicy, stats: Arc<Stats>) -> Self {
        Self {
            inner,
            policy,
            stats,
        }
    }

    async fn retry<T, F, Attempt>(&self, mut attempt: F) -> Result<T, StoreError>
    where
        F: FnMut() -> Attempt,
        Attempt: Future<Output = Result<T, StoreError>>,
    {
        let mut failures = 0;
        loop {
            let span = debug_span!("attempt", attempt = failures + 1);
            // Within the span already when the request is made: its own span belongs to it.
            let request = span.in_scope(&mut attempt);
            match request.instrument(span).await {
                Err(error) if error.is_retryable() && failures + 1 < self.policy.attempts_max => {
                    failures += 1;
                    self.stats.request_retries.increment();
                    tokio::time::sleep(self.policy.delay(failures)).await;
                }
                outcome => return outcome,
            }
        }
    }
}

impl RemoteTier for Retrying {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        Box::pin(self.retry(move || self.inner.put(request.clone())))
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        Box::pin(self.retry(move || self.inner.get(key, max_bytes)))
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        Box::pin(self.retry(move || self.inner.get_described(key, max_bytes)))
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(self.retry(move || self.inner.get_range(key, range.clone())))
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(self.retry(move || self.inner.head(key)))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        Box::pin(self.retry(move || self.inner.list(prefix, token, max_keys)))
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        Box::pin(self.retry(move || self.inner.list_folders(prefix, token)))
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        Box::pin(self.retry(move || self.inner.delete(keys)))
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        Box::pin(self.retry(move || self.inner.probe()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::StoreErrorKind;
    use super::super::testing::{Fault, Faulty, MemoryTier, Operation};
    use super::*;

    fn tier(fault: Fault) -> (Retrying, Arc<Stats>) {
        let stats = Arc::new(Stats::default());
        let faulty = Arc::new(Faulty::new(Arc::new(MemoryTier::new())));
        faulty.inject(fault);
        (
            Retrying::new(faulty, RetryingPolicy::default(), Arc::clone(&stats)),
            stats,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_passing_failure_is_not_seen() {
        let (tier, stats) = tier(Fault::fail(Operation::Probe, StoreErrorKind::Server).times(3));
        assert_eq!(tier.probe().await, Ok(()));
        assert_eq!(stats.request_retries.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lasting_failure_ends_and_a_refusal_is_not_repeated() {
        let (tier, stats) = tier(Fault::fail(Operation::Probe, StoreErrorKind::Server).times(4));
        assert_eq!(
            tier.probe().await.map_err(|e| e.kind()),
            Err(StoreErrorKind::Server)
        );
        assert_eq!(stats.request_retries.get(), 3);

        let (tier, stats) =
            self::tier(Fault::fail(Operation::Probe, StoreErrorKind::AccessDenied).times(1));
        assert_eq!(
            tier.probe().await.map_err(|e| e.kind()),
            Err(StoreErrorKind::AccessDenied)
        );
        assert_eq!(stats.request_retries.get(), 0);
    }
}
