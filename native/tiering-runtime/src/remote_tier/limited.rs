//! A wrapper that bounds how many small requests are under way at once.
//!
//! Owns the queue of requests that nobody else bounds: roots, groups, lists, deletions, probes. Ten thousand streams that start
//! together would else make as many connections. Who waits waits in order; the store's deadlines begin with the request. Fragments
//! have the governor, ranges the read cache's limit: they pass.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutBody, PutRequest, RangeSink,
    RemoteTier, StoreFuture,
};
use crate::stats::Stats;

/// Small requests of a node that are under way at once: what a few connections carry in a second at 100 ms each.
pub const CONTROL_REQUESTS_MAX: usize = 64;

/// Bounds what passes through.
pub struct Limited {
    inner: Arc<dyn RemoteTier>,
    turns: Semaphore,
    stats: Arc<Stats>,
}

impl Limited {
    /// Wraps a store: at most so many requests at once.
    pub fn new(inner: Arc<dyn RemoteTier>, requests_max: usize, stats: Arc<Stats>) -> Self {
        Self {
            inner,
            turns: Semaphore::new(requests_max.max(1)),
            stats,
        }
    }

    fn in_turn<'a, T: Send + 'a>(&'a self, request: StoreFuture<'a, T>) -> StoreFuture<'a, T> {
        Box::pin(async move {
            let turn = {
                let _waiting = self.stats.control_requests_waiting.hold();
                self.turns.acquire().await
            };
            let outcome = request.await;
            drop(turn);
            outcome
        })
    }
}

impl RemoteTier for Limited {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        match request.body {
            PutBody::Bytes(_) => self.in_turn(self.inner.put(request)),
            PutBody::Source(_) => self.inner.put(request),
        }
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.in_turn(self.inner.get(key, max_bytes))
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.in_turn(self.inner.get_described(key, max_bytes))
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        self.inner.get_range(key, range)
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        self.inner.stream_range(key, range, sink)
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.in_turn(self.inner.head(key))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.in_turn(self.inner.list(prefix, token, max_keys))
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.in_turn(self.inner.list_folders(prefix, token))
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.in_turn(self.inner.delete(keys))
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.in_turn(self.inner.probe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote_tier::Instrumented;
    use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};

    /// As many streams as a large node has, all of which ask at once.
    #[tokio::test]
    async fn five_thousand_requests_at_once_are_a_few_at_once_for_the_store() {
        const REQUESTS: usize = 5_000;
        let stats = Arc::new(Stats::default());
        let faults = Arc::new(Faulty::new(Arc::new(MemoryTier::new())));
        faults.inject(Fault::hang(Operation::Get).times(REQUESTS as u32));
        let counted = Arc::new(Instrumented::new(
            Arc::clone(&faults) as _,
            Arc::clone(&stats),
        ));
        let limited = Arc::new(Limited::new(
            counted,
            CONTROL_REQUESTS_MAX,
            Arc::clone(&stats),
        ));
        let tasks: Vec<_> = (0..REQUESTS)
            .map(|number| {
                let tier = Arc::clone(&limited);
                tokio::spawn(async move { tier.get(&format!("root {number}"), 100).await.is_ok() })
            })
            .collect();
        while stats.control_requests_waiting.get() < (REQUESTS - CONTROL_REQUESTS_MAX) as i64 {
            tokio::task::yield_now().await;
        }
        assert_eq!(stats.requests_in_flight.get(), CONTROL_REQUESTS_MAX as i64);
        // Ranges do not wait behind them, and who goes away makes room for the next.
        assert!(limited.get_range("none", 0..1).await.is_err());
        for task in &tasks[..100] {
            task.abort();
        }
        while faults.requests().len() < 2 * CONTROL_REQUESTS_MAX {
            tokio::task::yield_now().await;
        }
        assert_eq!(stats.requests_in_flight.get(), CONTROL_REQUESTS_MAX as i64);
        drop(tasks);
    }
}
