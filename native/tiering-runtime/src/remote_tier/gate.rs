//! A store whose ranged GETs can be held back, for tests of this crate.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, Semaphore};

use super::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutRequest, RangeSink, RemoteTier,
    StoreFuture,
};

const SOON: Duration = Duration::from_secs(30);

/// Lets ranged GETs through only while it is open; knows how many bytes are on their way.
pub(crate) struct Gate {
    inner: Arc<dyn RemoteTier>,
    /// One permit for each request that may go through.
    pub(crate) open: Semaphore,
    running: AtomicUsize,
    running_bytes: AtomicU64,
    /// Most bytes that were asked for at the same time.
    pub(crate) most_running_bytes: AtomicU64,
    asked: Mutex<Vec<(String, Range<u64>)>>,
    changed: Notify,
}

struct Passage<'a>(&'a Gate, u64);

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        self.0.running_bytes.fetch_sub(self.1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

impl Gate {
    pub(crate) fn new(inner: Arc<dyn RemoteTier>, open: bool) -> Arc<Self> {
        Arc::new(Self {
            inner,
            open: Semaphore::new(if open { Semaphore::MAX_PERMITS } else { 0 }),
            running: AtomicUsize::new(0),
            running_bytes: AtomicU64::new(0),
            most_running_bytes: AtomicU64::new(0),
            asked: Mutex::default(),
            changed: Notify::new(),
        })
    }

    fn enter(&self, bytes: u64) -> Passage<'_> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let now = self.running_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.most_running_bytes.fetch_max(now, Ordering::SeqCst);
        self.changed.notify_waiters();
        Passage(self, bytes)
    }

    /// Every ranged GET so far.
    pub(crate) fn asked(&self) -> Vec<(String, Range<u64>)> {
        self.asked.lock().expect("whole").clone()
    }

    /// Completes when so many requests are running.
    pub(crate) async fn until_running(&self, holds: impl Fn(usize) -> bool) {
        let wait = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if holds(self.running.load(Ordering::SeqCst)) {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(SOON, wait).await.expect("soon");
    }

    fn block_until_running(&self, holds: impl Fn(usize) -> bool) {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(self.until_running(holds));
    }

    /// Waits until this many requests are running. Not on a runtime.
    pub(crate) fn wait_running(&self, count: usize) {
        self.block_until_running(|running| running == count);
    }

    /// Waits until at least so many are.
    pub(crate) fn wait_at_least(&self, count: usize) {
        self.block_until_running(|running| running >= count);
    }
}

impl RemoteTier for Gate {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        self.inner.put(request)
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.inner.get(key, max_bytes)
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.inner.get_described(key, max_bytes)
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            let _passage = self.enter(range.end - range.start);
            (self.asked.lock().expect("whole")).push((key.to_owned(), range.clone()));
            self.open.acquire().await.expect("never closed").forget();
            self.inner.get_range(key, range).await
        })
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let _passage = self.enter(range.end - range.start);
            (self.asked.lock().expect("whole")).push((key.to_owned(), range.clone()));
            self.open.acquire().await.expect("never closed").forget();
            self.inner.stream_range(key, range, sink).await
        })
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.inner.head(key)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.inner.list(prefix, token, max_keys)
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.inner.list_folders(prefix, token)
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.inner.delete(keys)
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.inner.probe()
    }
}
