//! The read memory of a node: the count of what is in use, and the hands of the one rule (`tiering_core::read_budget`).
//!
//! Owns the count, which is of memory and not of intentions: a piece counts from when it was granted until the last one who can
//! see its bytes lets go, be that a reader, the cache, or the host. Owns the waiting. Does not own the choice of who is served
//! and who gives back (the core does), nor what is kept (the cache does).
//!
//! Letting go takes no lock, because it happens on schedulers, too.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use tiering_core::read_budget::{ConsumerState, Holder, ReadBudget, Step, Ticket};
use tokio::sync::{Notify, oneshot};

use crate::clock::Clock;
use crate::stats::Stats;

/// What the cache does for the budget.
pub(crate) trait Evict: Send + Sync {
    /// Gives up so much of what nobody uses, or all there is of it; returns how much that was.
    fn evict(&self, bytes: u64) -> u64;
}

/// What a reader does for the budget. Called on threads of the runtime; must not wait.
pub(crate) trait Lender: Send + Sync {
    /// What its consumer does.
    fn consumer(&self) -> ConsumerState;
    /// Bytes that could be taken back, and whether that has been asked for.
    fn held(&self) -> (u64, bool);
    /// Give back what the consumer has not taken.
    fn take_back(&self);
    /// Remind the host of what it was handed and may have no use for.
    fn call_in(&self);
}

/// The read memory of a node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ReadMemory {
    inner: Arc<Inner>,
}

struct Inner {
    used_bytes: AtomicU64,
    waiting: AtomicUsize,
    /// Readers whose consumers do not rest, as of the last time that memory was short.
    active: AtomicUsize,
    queue: Mutex<Queue>,
    readers: Mutex<HashMap<u64, Arc<dyn Lender>>>,
    last_reader: AtomicU64,
    cache: OnceLock<Weak<dyn Evict>>,
    /// Something was given back while somebody waits.
    changed: Notify,
    capacity_bytes: u64,
    clock: Clock,
    stats: Arc<Stats>,
}

struct Queue {
    budget: ReadBudget,
    asks: BTreeMap<Ticket, (u64, oneshot::Sender<Memory>)>,
    has_keeper: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these locks is held, so what is behind it is whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ReadMemory {
    /// A budget of so many bytes.
    pub(crate) fn new(capacity_bytes: u64, clock: Clock, stats: Arc<Stats>) -> Self {
        Self {
            inner: Arc::new(Inner {
                used_bytes: AtomicU64::new(0),
                waiting: AtomicUsize::new(0),
                active: AtomicUsize::new(0),
                queue: Mutex::new(Queue {
                    budget: ReadBudget::new(capacity_bytes),
                    asks: BTreeMap::new(),
                    has_keeper: false,
                }),
                readers: Mutex::default(),
                last_reader: AtomicU64::new(0),
                cache: OnceLock::new(),
                changed: Notify::new(),
                capacity_bytes,
                clock,
                stats,
            }),
        }
    }

    /// Who can give up what nobody uses; the first one stays.
    pub(crate) fn set_cache(&self, cache: Weak<dyn Evict>) {
        let _ = self.inner.cache.set(cache);
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.inner.capacity_bytes
    }

    /// Bytes in use now, by whomever.
    #[cfg(test)]
    pub(crate) fn used_bytes(&self) -> u64 {
        self.inner.used_bytes.load(Ordering::SeqCst)
    }

    /// How far one reader may fetch ahead: as far as it wants while there is enough for all, else its share among those who read.
    pub(crate) fn fair_bytes(&self) -> u64 {
        if self.inner.waiting.load(Ordering::Relaxed) == 0 {
            return self.inner.capacity_bytes;
        }
        self.inner.capacity_bytes / self.inner.active.load(Ordering::Relaxed).max(1) as u64
    }

    /// A number for a reader.
    pub(crate) fn next_reader(&self) -> u64 {
        self.inner.last_reader.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// From now on the reader can be asked to give back, until the answer is dropped.
    pub(crate) fn register(&self, reader: u64, lender: Arc<dyn Lender>) -> Registration {
        lock(&self.inner.readers).insert(reader, lender);
        Registration {
            inner: Arc::clone(&self.inner),
            reader,
        }
    }

    /// Waits for memory, in turn. Must be called on the engine's runtime.
    pub(crate) async fn ask(&self, reader: u64, bytes: u64) -> Memory {
        let (sender, receiver) = oneshot::channel();
        let ticket = {
            let mut queue = lock(&self.inner.queue);
            let ticket = queue.budget.ask(self.inner.clock.now_ms(), reader, bytes);
            queue.asks.insert(ticket, (bytes, sender));
            self.inner.count(&queue);
            ticket
        };
        let _given_up = GivenUp {
            inner: &self.inner,
            ticket,
        };
        self.inner.settle();
        self.keep();
        // The sender goes only with an answer, or with this ask.
        receiver.await.unwrap_or_else(|_| self.take_now(bytes))
    }

    /// Memory that is there and nobody waits for, or none.
    pub(crate) fn try_take(&self, bytes: u64) -> Option<Memory> {
        let inner = &self.inner;
        let missing = || {
            let wanted = (inner.used_bytes.load(Ordering::Relaxed)).saturating_add(bytes);
            wanted.saturating_sub(inner.capacity_bytes)
        };
        if inner.waiting.load(Ordering::Relaxed) > 0 {
            return None;
        }
        if missing() > 0 {
            inner.evict(missing());
        }
        (missing() == 0).then(|| self.take_now(bytes))
    }

    /// Counts what is here already.
    pub(crate) fn take_now(&self, bytes: u64) -> Memory {
        self.inner.take(bytes)
    }

    /// Starts the task that serves those who wait, if there is somebody and it does not run.
    fn keep(&self) {
        let starts = {
            let mut queue = lock(&self.inner.queue);
            let starts = queue.budget.waiting() > 0 && !queue.has_keeper;
            queue.has_keeper |= starts;
            starts
        };
        if starts {
            tokio::spawn(keeper(Arc::clone(&self.inner)));
        }
    }
}

/// Serves the queue until it is empty.
async fn keeper(inner: Arc<Inner>) {
    loop {
        match inner.settle() {
            Some(until_ms) => {
                let until = inner.clock.instant_at(until_ms);
                tokio::select! {
                    () = inner.changed.notified() => {}
                    () = tokio::time::sleep_until(until) => {}
                }
            }
            None => {
                let mut queue = lock(&inner.queue);
                if queue.budget.waiting() == 0 {
                    queue.has_keeper = false;
                    return;
                }
            }
        }
    }
}

impl Inner {
    fn count(&self, queue: &Queue) {
        let waiting = queue.budget.waiting();
        self.waiting.store(waiting, Ordering::SeqCst);
        self.stats.readers_waiting_for_memory.set(waiting as u64);
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Memory {
        self.used_bytes.fetch_add(bytes, Ordering::SeqCst);
        self.stats.read_memory_used_bytes.add(bytes);
        Memory {
            inner: Arc::clone(self),
            bytes,
        }
    }

    fn evict(&self, bytes: u64) -> u64 {
        let cache = self.cache.get().and_then(Weak::upgrade);
        cache.map_or(0, |cache| cache.evict(bytes))
    }

    /// Does what can be done now. Returns when to look again, if somebody waits then.
    fn settle(self: &Arc<Self>) -> Option<u64> {
        let mut evictable = true;
        loop {
            let (step, granted) = {
                let mut queue = lock(&self.queue);
                let used_bytes = self.used_bytes.load(Ordering::SeqCst);
                let now_ms = self.clock.now_ms();
                let step = (queue.budget).step(now_ms, used_bytes, evictable, || self.holders());
                let granted = match &step {
                    Step::Grant(ticket) => queue.asks.remove(ticket),
                    _ => None,
                };
                self.count(&queue);
                // Counted before the next one is looked at.
                (
                    step,
                    granted.map(|(bytes, sender)| (self.take(bytes), sender)),
                )
            };
            match step {
                Step::Idle => return None,
                Step::Grant(_) => {
                    if let Some((memory, sender)) = granted {
                        // Who does not want it any more gives it back by not taking it.
                        drop(sender.send(memory));
                    }
                }
                Step::Evict { bytes } => evictable = self.evict(bytes) > 0,
                Step::TakeBack { readers } => {
                    for lender in self.lenders(&readers) {
                        lender.take_back();
                    }
                    self.stats.readers_taken_back.add(readers.len() as u64);
                }
                Step::CallIn => {
                    let lenders: Vec<_> = lock(&self.readers).values().cloned().collect();
                    lenders.iter().for_each(|lender| lender.call_in());
                }
                Step::Wait { until_ms } => return Some(until_ms),
            }
        }
    }

    fn lenders(&self, readers: &[u64]) -> Vec<Arc<dyn Lender>> {
        let all = lock(&self.readers);
        (readers.iter())
            .filter_map(|reader| all.get(reader).cloned())
            .collect()
    }

    fn holders(&self) -> Vec<Holder> {
        let readers = lock(&self.readers);
        let holders: Vec<Holder> = (readers.iter())
            .map(|(reader, lender)| {
                let (held_bytes, gives_back) = lender.held();
                Holder {
                    reader: *reader,
                    held_bytes,
                    consumer: lender.consumer(),
                    gives_back,
                }
            })
            .collect();
        let now_ms = self.clock.now_ms();
        let active = (holders.iter())
            .filter(|holder| !holder.rests(now_ms))
            .count();
        self.active.store(active, Ordering::Relaxed);
        holders
    }
}

/// An ask that may have to be taken back.
struct GivenUp<'a> {
    inner: &'a Arc<Inner>,
    ticket: Ticket,
}

impl Drop for GivenUp<'_> {
    fn drop(&mut self) {
        let asked = {
            let mut queue = lock(&self.inner.queue);
            queue.budget.cancel(self.ticket);
            self.inner.count(&queue);
            queue.asks.remove(&self.ticket)
        };
        drop(asked);
        // Somebody else is the first now.
        if self.inner.waiting.load(Ordering::SeqCst) > 0 {
            self.inner.changed.notify_one();
        }
    }
}

/// A reader that can be asked to give back.
pub(crate) struct Registration {
    inner: Arc<Inner>,
    reader: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let lender = lock(&self.inner.readers).remove(&self.reader);
        drop(lender);
    }
}

/// Memory that was granted; goes back when it is dropped.
pub(crate) struct Memory {
    inner: Arc<Inner>,
    bytes: u64,
}

impl Memory {
    /// At most so many bytes of it.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            inner: Arc::clone(&self.inner),
            bytes,
        }
    }

    /// All of the other.
    pub(crate) fn join(&mut self, other: &mut Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// More of it, or less.
    pub(crate) fn set(&mut self, bytes: u64) {
        match bytes.checked_sub(self.bytes) {
            Some(more_bytes) => {
                let mut more = self.inner.take(more_bytes);
                self.join(&mut more);
            }
            None => drop(self.split(self.bytes - bytes)),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        self.inner
            .used_bytes
            .fetch_sub(self.bytes, Ordering::SeqCst);
        self.inner.stats.read_memory_used_bytes.subtract(self.bytes);
        if self.inner.waiting.load(Ordering::SeqCst) > 0 {
            self.inner.changed.notify_one();
        }
    }
}
