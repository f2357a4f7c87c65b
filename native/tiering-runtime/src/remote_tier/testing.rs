//! A remote tier in memory and a wrapper that injects faults, for tests of this crate and of the ones above.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;

use super::{
    DeleteOutcome, Described, FolderPage, KEYS_MAX, ListPage, ListedObject, ObjectMeta, PutBody,
    PutRequest, RangeSink, RemoteTier, StoreError, StoreErrorKind, StoreFuture,
};

/// One stored object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    /// Its bytes.
    pub bytes: Bytes,
    /// Its user metadata.
    pub metadata: BTreeMap<String, String>,
    /// When it was stored, by the clock of the store.
    pub modified_ms: i64,
}

/// A store in memory that verifies checksums like a good one.
#[derive(Debug, Default)]
pub struct MemoryTier {
    objects: Mutex<BTreeMap<String, StoredObject>>,
    now_ms: AtomicI64,
    changed: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failure<T>(kind: StoreErrorKind, text: &str) -> Result<T, StoreError> {
    Err(StoreError::new(kind, text))
}

impl MemoryTier {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the clock of the store, which stands still otherwise.
    pub fn set_clock(&self, now_ms: i64) {
        self.now_ms.store(now_ms, Ordering::Relaxed);
    }

    /// All keys, in byte order.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        lock(&self.objects).keys().cloned().collect()
    }

    /// One object.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<StoredObject> {
        lock(&self.objects).get(key).cloned()
    }

    /// Stores bytes without a request.
    pub fn insert(&self, key: &str, bytes: impl Into<Bytes>) {
        let object = StoredObject {
            bytes: bytes.into(),
            metadata: BTreeMap::new(),
            modified_ms: self.now_ms.load(Ordering::Relaxed),
        };
        lock(&self.objects).insert(key.to_owned(), object);
        self.changed.notify_waiters();
    }

    /// Gives an object a piece of metadata without a request.
    pub fn describe(&self, key: &str, name: &str, value: &str) {
        if let Some(object) = lock(&self.objects).get_mut(key) {
            object.metadata.insert(name.to_owned(), value.to_owned());
        }
    }

    /// Removes an object without a request.
    pub fn remove(&self, key: &str) {
        lock(&self.objects).remove(key);
        self.changed.notify_waiters();
    }

    /// Completes once `holds` is true of the keys.
    pub async fn wait_for(&self, mut holds: impl FnMut(&[String]) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if holds(&self.keys()) {
                return;
            }
            changed.await;
        }
    }

    async fn store(&self, request: PutRequest) -> Result<(), StoreError> {
        let expected_bytes = request.body.len_bytes();
        let bytes = match request.body {
            PutBody::Bytes(bytes) => bytes,
            PutBody::Source(source) => {
                let mut frames = source.open();
                let mut bytes = BytesMut::new();
                while let Some(frame) = frames.recv().await {
                    bytes.extend_from_slice(&frame?);
                }
                bytes.freeze()
            }
        };
        if bytes.len() as u64 != expected_bytes {
            return failure(
                StoreErrorKind::LocalRead,
                "the body does not have the length that was announced",
            );
        }
        if log_format::crc::crc32(&bytes) != request.crc32 {
            return failure(StoreErrorKind::Checksum, "400 BadDigest");
        }
        let metadata = request
            .metadata
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let object = StoredObject {
            bytes,
            metadata,
            modified_ms: self.now_ms.load(Ordering::Relaxed),
        };
        lock(&self.objects).insert(request.key, object);
        self.changed.notify_waiters();
        Ok(())
    }

    fn load(&self, key: &str) -> Result<StoredObject, StoreError> {
        self.object(key)
            .map_or_else(|| failure(StoreErrorKind::NotFound, "404 NoSuchKey"), Ok)
    }
}

impl RemoteTier for MemoryTier {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        Box::pin(self.store(request))
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            let bytes = self.load(key)?.bytes;
            if bytes.len() as u64 > max_bytes {
                failure(StoreErrorKind::TooLarge, "too large")
            } else {
                Ok(bytes)
            }
        })
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        Box::pin(async move {
            let bytes = self.get(key, max_bytes).await?;
            let metadata = self.load(key)?.metadata;
            Ok(Described { bytes, metadata })
        })
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            let bytes = self.load(key)?.bytes;
            let len_bytes = bytes.len() as u64;
            if range.start >= range.end || range.start >= len_bytes {
                return failure(StoreErrorKind::InvalidRange, "416");
            }
            let end = range.end.min(len_bytes);
            Ok(bytes.slice(range.start as usize..end as usize))
        })
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move {
            let object = self.load(key)?;
            Ok(ObjectMeta {
                size_bytes: object.bytes.len() as u64,
                metadata: object.metadata,
            })
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        Box::pin(async move {
            let max_keys = max_keys.clamp(1, KEYS_MAX);
            let objects = lock(&self.objects);
            let mut listed: Vec<_> = objects
                .iter()
                .filter(|(key, _)| {
                    key.starts_with(prefix) && token.is_none_or(|token| key.as_str() > token)
                })
                .take(max_keys + 1)
                .map(|(key, object)| ListedObject {
                    key: key.clone(),
                    size_bytes: object.bytes.len() as u64,
                    modified_ms: Some(object.modified_ms),
                })
                .collect();
            let more = listed.len() > max_keys;
            listed.truncate(max_keys);
            let next_token = listed
                .last()
                .filter(|_| more)
                .map(|object| object.key.clone());
            Ok(ListPage {
                objects: listed,
                next_token,
            })
        })
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        Box::pin(async move {
            let folders = self.keys().into_iter().filter_map(|key| {
                let (folder, _) = key.strip_prefix(prefix)?.split_once('/')?;
                Some(format!("{prefix}{folder}/"))
            });
            let mut folders: Vec<_> = folders
                .filter(|folder| token.is_none_or(|token| folder.as_str() > token))
                .collect();
            folders.dedup();
            let more = folders.len() > KEYS_MAX;
            folders.truncate(KEYS_MAX);
            let next_token = folders.last().filter(|_| more).cloned();
            Ok(FolderPage {
                folders,
                next_token,
            })
        })
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        Box::pin(async move {
            if keys.len() > KEYS_MAX {
                return failure(StoreErrorKind::TooLarge, "too many keys");
            }
            keys.iter().for_each(|key| self.remove(key));
            Ok(DeleteOutcome {
                deleted: keys.len(),
                failed: Vec::new(),
            })
        })
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// The operations of a store, to aim faults at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// `put`
    Put,
    /// `get`
    Get,
    /// `get_range`
    GetRange,
    /// `head`
    Head,
    /// `list`
    List,
    /// `delete`
    Delete,
    /// `probe`
    Probe,
}

#[derive(Debug, Clone)]
enum Harm {
    /// The request is not made.
    Fail(StoreErrorKind),
    /// The request is made, its answer is lost.
    LoseAnswer(StoreErrorKind),
    /// The request never ends.
    Hang,
    /// The task that makes the request dies.
    Panic,
    /// The answer has one bit flipped.
    FlipBit,
    /// Deletions: the first key is refused within an answer that is a success.
    RefuseFirst,
    /// Streamed ranges: the answer breaks off after so many bytes.
    BreakOff(usize),
}

/// One fault: what it hits, what it does, how often.
#[derive(Debug, Clone)]
pub struct Fault {
    operation: Operation,
    key_part: String,
    harm: Harm,
    times: u32,
}

impl Fault {
    fn new(operation: Operation, harm: Harm) -> Self {
        Self {
            operation,
            key_part: String::new(),
            harm,
            times: 1,
        }
    }

    /// The request fails without reaching the store.
    #[must_use]
    pub fn fail(operation: Operation, kind: StoreErrorKind) -> Self {
        Self::new(operation, Harm::Fail(kind))
    }

    /// The first key of a deletion is refused within an answer that is a success.
    #[must_use]
    pub fn refuse_first() -> Self {
        Self::new(Operation::Delete, Harm::RefuseFirst)
    }

    /// The request is carried out but its answer is lost.
    #[must_use]
    pub fn lose_answer(operation: Operation, kind: StoreErrorKind) -> Self {
        Self::new(operation, Harm::LoseAnswer(kind))
    }

    /// The request never ends.
    #[must_use]
    pub fn hang(operation: Operation) -> Self {
        Self::new(operation, Harm::Hang)
    }

    /// The task panics.
    #[must_use]
    pub fn panic(operation: Operation) -> Self {
        Self::new(operation, Harm::Panic)
    }

    /// GETs: one bit in the middle of the answer is flipped.
    #[must_use]
    pub fn flip_bit(operation: Operation) -> Self {
        Self::new(operation, Harm::FlipBit)
    }

    /// Streamed ranges: the answer breaks off after so many bytes; other requests fail.
    #[must_use]
    pub fn break_off(operation: Operation, bytes: usize) -> Self {
        Self::new(operation, Harm::BreakOff(bytes))
    }

    /// Only for keys that contain this.
    #[must_use]
    pub fn on(mut self, key_part: &str) -> Self {
        key_part.clone_into(&mut self.key_part);
        self
    }

    /// How many requests it hits (1 if not said).
    #[must_use]
    pub fn times(mut self, times: u32) -> Self {
        self.times = times;
        self
    }
}

/// Injects faults into requests, in the order in which the faults were given.
pub struct Faulty {
    inner: Arc<dyn RemoteTier>,
    faults: Mutex<VecDeque<Fault>>,
    hits: Mutex<Vec<(Operation, String)>>,
}

impl Faulty {
    /// Wraps a store; without faults it changes nothing.
    pub fn new(inner: Arc<dyn RemoteTier>) -> Self {
        Self {
            inner,
            faults: Mutex::default(),
            hits: Mutex::default(),
        }
    }

    /// Adds a fault.
    pub fn inject(&self, fault: Fault) {
        lock(&self.faults).push_back(fault);
    }

    /// Drops all faults that are left.
    pub fn heal(&self) {
        lock(&self.faults).clear();
    }

    /// Every request that came this far.
    #[must_use]
    pub fn requests(&self) -> Vec<(Operation, String)> {
        lock(&self.hits).clone()
    }

    fn next_harm(&self, operation: Operation, key: &str) -> Option<Harm> {
        lock(&self.hits).push((operation, key.to_owned()));
        let mut faults = lock(&self.faults);
        let index = faults
            .iter()
            .position(|f| f.operation == operation && key.contains(&f.key_part))?;
        let fault = faults.get_mut(index)?;
        fault.times = fault.times.saturating_sub(1);
        let harm = fault.harm.clone();
        if fault.times == 0 {
            faults.remove(index);
        }
        Some(harm)
    }

    fn pass<'a, T: Send + 'a>(
        &'a self,
        operation: Operation,
        key: String,
        request: StoreFuture<'a, T>,
        flip: impl FnOnce(T) -> T + Send + 'a,
    ) -> StoreFuture<'a, T> {
        Box::pin(async move { harmed(self.next_harm(operation, &key), request, flip).await })
    }
}

async fn harmed<T>(
    harm: Option<Harm>,
    request: StoreFuture<'_, T>,
    flip: impl FnOnce(T) -> T,
) -> Result<T, StoreError> {
    match harm {
        None => request.await,
        Some(Harm::Fail(kind)) => failure(kind, "injected"),
        Some(Harm::LoseAnswer(kind)) => {
            request.await?;
            failure(kind, "injected, answer lost")
        }
        Some(Harm::Hang) => std::future::pending().await,
        #[allow(clippy::panic)]
        Some(Harm::Panic) => panic!("injected"),
        Some(Harm::FlipBit) => request.await.map(flip),
        Some(Harm::RefuseFirst | Harm::BreakOff(_)) => {
            failure(StoreErrorKind::Connection, "injected, broken off")
        }
    }
}

fn flip_bit(bytes: Bytes) -> Bytes {
    let mut bytes = BytesMut::from(bytes.as_ref());
    let middle = bytes.len() / 2;
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 1;
    }
    bytes.freeze()
}

impl RemoteTier for Faulty {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        let key = request.key.clone();
        self.pass(Operation::Put, key, self.inner.put(request), |()| ())
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.pass(
            Operation::Get,
            key.to_owned(),
            self.inner.get(key, max_bytes),
            flip_bit,
        )
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.pass(
            Operation::Get,
            key.to_owned(),
            self.inner.get_described(key, max_bytes),
            |answer| Described {
                bytes: flip_bit(answer.bytes),
                ..answer
            },
        )
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        self.pass(
            Operation::GetRange,
            key.to_owned(),
            self.inner.get_range(key, range),
            flip_bit,
        )
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let harm = self.next_harm(Operation::GetRange, key);
            let inner = self.inner.get_range(key, range);
            let bytes = match harm {
                Some(Harm::BreakOff(length)) => {
                    let bytes = inner.await?;
                    sink.push(bytes.slice(..length.min(bytes.len())));
                    return failure(StoreErrorKind::Connection, "injected, broken off");
                }
                harm => harmed(harm, inner, flip_bit).await?,
            };
            sink.push(bytes);
            Ok(())
        })
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.pass(
            Operation::Head,
            key.to_owned(),
            self.inner.head(key),
            |meta| meta,
        )
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.pass(
            Operation::List,
            prefix.to_owned(),
            self.inner.list(prefix, token, max_keys),
            |page| page,
        )
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.pass(
            Operation::List,
            prefix.to_owned(),
            self.inner.list_folders(prefix, token),
            |page| page,
        )
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        let key = keys.first().cloned().unwrap_or_default();
        Box::pin(async move {
            match (self.next_harm(Operation::Delete, &key), keys) {
                (Some(Harm::RefuseFirst), [refused, rest @ ..]) => {
                    let mut outcome = self.inner.delete(rest).await?;
                    (outcome.failed).push((refused.clone(), "AccessDenied: injected".to_owned()));
                    Ok(outcome)
                }
                (harm, _) => harmed(harm, self.inner.delete(keys), |outcome| outcome).await,
            }
        })
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.pass(Operation::Probe, String::new(), self.inner.probe(), |()| ())
    }
}
