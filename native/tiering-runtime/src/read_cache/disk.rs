//! Blocks on this node's disk, for when memory is too small for what is read again.
//!
//! Owns a folder with a file for each block, and knows by itself what is in it: nothing is believed that an earlier life of the
//! node, or anybody else, has left there, and what is read is compared with a checksum that was taken before it was written. Does
//! not own correctness: a file that is gone, short or damaged is a block that is not here.
//!
//! Writing is never waited for. What cannot be written soon enough is not written.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use log_format::crc::crc32;
use lru::LruCache;
use tokio::sync::Semaphore;

use super::PartKey;
use crate::clock::random_u64;
use crate::stats::Stats;

/// The folder below the configured one; everything in it is ours to delete.
const FOLDER: &str = "rabbitmq-stream-s3-blocks";

/// Blocks that wait to be written; beyond them blocks are not written.
pub(super) const WRITES_WAITING_MAX: usize = 32;

/// Threads that write and delete, and that read. A thread that hangs in the disk counts until it comes back, so a disk that does
/// not answer costs these and no other.
const WRITERS: usize = 4;
const READERS: usize = 8;
/// All of them.
pub(crate) const DISK_THREADS_MAX: usize = WRITERS + READERS;

/// A disk that takes longer for a block is slower than the store, and is left alone.
const DEADLINE: Duration = Duration::from_secs(2);

/// After so many failures in a row the disk is left alone.
const FAILURES_MAX: u32 = 16;

/// Folders that files are spread over.
const FOLDERS: u64 = 256;

#[derive(Debug, Clone, Copy)]
struct Slot {
    file: u64,
    len_bytes: u64,
    crc: u32,
}

#[derive(Debug)]
struct Index {
    slots: LruCache<PartKey, Slot>,
    bytes: u64,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    prepared: Once,
    usable: AtomicBool,
    capacity_bytes: u64,
    index: Mutex<Index>,
    last_file: AtomicU64,
    failures: AtomicU32,
    stats: Arc<Stats>,
}

/// The blocks on disk.
#[derive(Debug)]
pub(super) struct Disk {
    shared: Arc<Shared>,
    waiting: Arc<Semaphore>,
    writers: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

impl Disk {
    /// Keeps at most so many bytes below `path`. Touches no file yet.
    pub(super) fn new(path: &Path, capacity_bytes: u64, stats: Arc<Stats>) -> Self {
        let life = format!("{:016x}", random_u64());
        Self {
            shared: Arc::new(Shared {
                folder: path.join(FOLDER).join(life),
                prepared: Once::new(),
                usable: AtomicBool::new(true),
                capacity_bytes,
                index: Mutex::new(Index {
                    slots: LruCache::unbounded(),
                    bytes: 0,
                }),
                last_file: AtomicU64::new(0),
                failures: AtomicU32::new(0),
                stats,
            }),
            waiting: Arc::new(Semaphore::new(WRITES_WAITING_MAX)),
            writers: Arc::new(Semaphore::new(WRITERS)),
            readers: Arc::new(Semaphore::new(READERS)),
        }
    }

    /// Whether the block should be here.
    pub(super) fn has(&self, key: &PartKey) -> bool {
        self.shared.is_usable() && self.shared.lock().slots.contains(key)
    }

    /// Threads that read, write or delete.
    #[cfg(test)]
    pub(super) fn threads_at_work(&self) -> usize {
        DISK_THREADS_MAX - self.readers.available_permits() - self.writers.available_permits()
    }

    /// The block, if it is here and as it was, and the disk answers soon.
    pub(super) async fn read(&self, key: &PartKey) -> Option<Bytes> {
        let slot = *self.shared.lock().slots.get(key)?;
        // Busy with others for so long, it is no faster than the store.
        let turn = tokio::time::timeout(DEADLINE, Arc::clone(&self.readers).acquire_owned());
        let turn = turn.await.ok()?.ok()?;
        let shared = Arc::clone(&self.shared);
        // A task of its own: whoever asked may be gone long before the disk answers, and that it does not is noticed all the same.
        let read = tokio::spawn(async move {
            let at_work = Arc::clone(&shared);
            let read = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                at_work.read(slot)
            });
            let read = tokio::time::timeout(DEADLINE, read).await;
            if read.is_err() {
                shared.leave_alone();
            }
            read
        });
        match read.await.ok()? {
            Ok(Ok(Ok(bytes))) => Some(bytes),
            Ok(Ok(Err(_)) | Err(_)) => {
                self.shared.stats.read_cache_disk_errors.increment();
                self.remove(key);
                None
            }
            Err(_) => None,
        }
    }

    /// Writes the block, soon, or not at all.
    pub(super) fn write(&self, key: PartKey, bytes: Bytes) {
        if !self.shared.is_usable() || self.has(&key) {
            return;
        }
        let Ok(waiting) = Arc::clone(&self.waiting).try_acquire_owned() else {
            self.shared.stats.read_cache_disk_skipped.increment();
            return;
        };
        self.work(move |shared| {
            let _waiting = waiting;
            shared.keep(key, &bytes);
        });
    }

    /// Forgets the block.
    pub(super) fn remove(&self, key: &PartKey) {
        let gone = self.shared.lock().take(key);
        if let Some(slot) = gone {
            self.shared.count();
            self.work(move |shared| shared.delete(slot));
        }
    }

    /// Does something on a thread that writes, if the disk answers.
    fn work(&self, work: impl FnOnce(&Shared) + Send + 'static) {
        let (shared, writers) = (Arc::clone(&self.shared), Arc::clone(&self.writers));
        tokio::spawn(async move {
            let turn = loop {
                let turn = Arc::clone(&writers).acquire_owned();
                let turn = tokio::time::timeout(DEADLINE, turn).await;
                if !shared.is_usable() {
                    return;
                }
                if let Ok(turn) = turn {
                    break turn;
                }
            };
            let at_work = Arc::clone(&shared);
            let done = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                work(&at_work);
            });
            // A task that dies ends with its runtime, and then nobody waits.
            if tokio::time::timeout(DEADLINE, done).await.is_err() {
                shared.leave_alone();
            }
        });
    }
}

impl Index {
    fn take(&mut self, key: &PartKey) -> Option<Slot> {
        let slot = self.slots.pop(key)?;
        self.bytes -= slot.len_bytes;
        Some(slot)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Index> {
        // Nothing panics while the lock is held, so a poisoned index is still a whole one.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_usable(&self) -> bool {
        self.usable.load(Ordering::Relaxed)
    }

    /// From now on nothing is read, written or deleted. What is there is deleted by the next life.
    fn leave_alone(&self) {
        if self.usable.swap(false, Ordering::Relaxed) {
            let folder = self.folder.display();
            tracing::warn!(%folder, "the disk of the read cache fails or hangs: reads go to the store from now on");
        }
        self.stats.read_cache_disk_unusable.set(1);
        let slots = {
            let mut index = self.lock();
            index.bytes = 0;
            std::mem::replace(&mut index.slots, LruCache::unbounded())
        };
        drop(slots);
        self.count();
    }

    fn count(&self) {
        self.stats.read_cache_disk_bytes.set(self.lock().bytes);
    }

    fn path(&self, file: u64) -> PathBuf {
        let folder = self.folder.join(format!("{:02x}", file % FOLDERS));
        folder.join(format!("{file:016x}"))
    }

    /// Deletes what earlier lives have left, once.
    fn prepare(&self) {
        self.prepared.call_once(|| {
            let Some(parent) = self.folder.parent() else {
                return;
            };
            for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
                // What cannot be deleted now is tried again by the next life.
                fs::remove_dir_all(entry.path()).ok();
            }
        });
    }

    fn read(&self, slot: Slot) -> io::Result<Bytes> {
        let bytes = fs::read(self.path(slot.file))?;
        if bytes.len() as u64 == slot.len_bytes && crc32(&bytes) == slot.crc {
            Ok(bytes.into())
        } else {
            Err(io::Error::new(io::ErrorKind::InvalidData, "damaged"))
        }
    }

    fn keep(&self, key: PartKey, bytes: &Bytes) {
        self.prepare();
        let slot = Slot {
            file: self.last_file.fetch_add(1, Ordering::Relaxed),
            len_bytes: bytes.len() as u64,
            crc: crc32(bytes),
        };
        if self.store(slot, bytes).is_err() {
            self.stats.read_cache_disk_errors.increment();
            self.delete(slot);
            if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_MAX {
                self.leave_alone();
            }
            return;
        }
        self.failures.store(0, Ordering::Relaxed);
        let mut gone = Vec::new();
        {
            let mut index = self.lock();
            if !self.is_usable() {
                return;
            }
            gone.extend(index.take(&key));
            index.bytes += slot.len_bytes;
            index.slots.put(key, slot);
            while index.bytes > self.capacity_bytes {
                let Some((_, oldest)) = index.slots.pop_lru() else {
                    break;
                };
                index.bytes -= oldest.len_bytes;
                gone.push(oldest);
            }
        }
        self.count();
        gone.into_iter().for_each(|slot| self.delete(slot));
    }

    fn store(&self, slot: Slot, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(slot.file);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, bytes)
    }

    fn delete(&self, slot: Slot) {
        // It may never have come into being.
        fs::remove_file(self.path(slot.file)).ok();
    }
}
