//! Between the driver and its consumer: the queue of chunks, and what each side wants of the other.
//!
//! Owns who is woken, and when memory is given back. Does not own the reader's life. No call waits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tiering_core::read::{Chunk, FailureKind, Finish, ReadOutcome, ReadyQueue};
use tiering_core::read_budget::ConsumerState;
use tokio::sync::Notify;

use crate::clock::Clock;
use crate::read_memory::Lender;

/// Taken bytes and chunks that are worth telling the driver about before the queue is empty.
const TAKEN_BYTES_WORTH_TELLING: u64 = 64 << 10;
const TAKEN_CHUNKS_WORTH_TELLING: usize = 128;

/// A consumer that waits.
pub trait Wake: Send + Sync + 'static {
    /// Reading is worth another try. Called from a thread of the runtime, once per wait; must not block or panic.
    /// Only a reader that ends with its engine before it was read may call from elsewhere, and then nobody waits.
    fn wake(&self);

    /// Memory is short: what the consumer was handed and has no use for any more is worth letting go of now. Called from a thread
    /// of the runtime, now and then while memory is short; must not block or panic.
    fn call_in(&self) {}
}

/// Where the driver puts chunks and the consumer takes them.
pub(super) struct Outlet {
    queue: Mutex<ReadyQueue>,
    /// The consumer took something, asks again after everything was taken back, or has to give back.
    pub(super) taken: Notify,
    clock: Clock,
    wake: Arc<dyn Wake>,
    /// When the consumer last took something or was woken.
    quiet_since_ms: AtomicU64,
    /// It got nothing and waits to be woken.
    waits: AtomicBool,
    /// Nothing is fetched until it asks.
    rests: AtomicBool,
    /// Bytes that could be taken back, as the driver knows it.
    held_bytes: AtomicU64,
    gives_back: AtomicBool,
    /// It was handed something since it was last called in.
    was_handed: AtomicBool,
}

impl Outlet {
    pub(super) fn new(clock: Clock, wake: Arc<dyn Wake>) -> Self {
        Self {
            queue: Mutex::default(),
            taken: Notify::new(),
            clock,
            wake,
            quiet_since_ms: AtomicU64::new(clock.now_ms()),
            waits: AtomicBool::new(false),
            rests: AtomicBool::new(false),
            held_bytes: AtomicU64::new(0),
            gives_back: AtomicBool::new(false),
            was_handed: AtomicBool::new(false),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ReadyQueue> {
        // Nothing panics while the lock is held, so a poisoned queue is still a whole one.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take(&self, max_chunk_id: u64) -> ReadOutcome {
        let (outcome, tell) = {
            let mut queue = self.lock();
            let outcome = queue.take(max_chunk_id);
            let (chunks, bytes) = (queue.taken_chunks(), queue.taken_bytes());
            let waits = queue.is_waited_for();
            self.waits.store(waits, Ordering::Relaxed);
            let tell = bytes >= TAKEN_BYTES_WORTH_TELLING
                || chunks >= TAKEN_CHUNKS_WORTH_TELLING
                || chunks > 0 && queue.is_empty()
                || waits && self.rests.load(Ordering::Relaxed);
            (outcome, tell)
        };
        if matches!(outcome, ReadOutcome::Chunk { .. }) {
            self.was_handed.store(true, Ordering::Relaxed);
            (self.quiet_since_ms).store(self.clock.now_ms(), Ordering::Relaxed);
        }
        if tell {
            self.taken.notify_one();
        }
        outcome
    }

    /// Wakes the consumer.
    pub(super) fn wake(&self) {
        (self.quiet_since_ms).store(self.clock.now_ms(), Ordering::Relaxed);
        self.waits.store(false, Ordering::Relaxed);
        self.wake.wake();
    }

    pub(super) fn holds(&self, bytes: u64) -> u64 {
        self.held_bytes.swap(bytes, Ordering::Relaxed)
    }

    /// Whether the consumer asks for the first time since everything was taken back.
    pub(super) fn asks_again(&self) -> bool {
        self.rests.load(Ordering::Relaxed)
            && self.lock().is_waited_for()
            && self.rests.swap(false, Ordering::Relaxed)
    }

    /// If the memory is wanted back: what the consumer has not taken, and whether it waits.
    pub(super) fn give_back(&self) -> Option<(VecDeque<Chunk>, bool)> {
        if !self.gives_back.swap(false, Ordering::Relaxed) {
            return None;
        }
        let mut queue = self.lock();
        let waits = queue.is_waited_for();
        self.rests.store(!waits, Ordering::Relaxed);
        Some((queue.take_all(), waits))
    }
}

impl Lender for Outlet {
    fn consumer(&self) -> ConsumerState {
        if self.waits.load(Ordering::Relaxed) {
            return ConsumerState::Waits;
        }
        let since_ms = self.quiet_since_ms.load(Ordering::Relaxed);
        ConsumerState::Quiet { since_ms }
    }

    fn held(&self) -> (u64, bool) {
        let held_bytes = self.held_bytes.load(Ordering::Relaxed);
        (held_bytes, self.gives_back.load(Ordering::Relaxed))
    }

    fn take_back(&self) {
        self.gives_back.store(true, Ordering::Relaxed);
        self.taken.notify_one();
    }

    fn call_in(&self) {
        if self.was_handed.swap(false, Ordering::Relaxed) {
            self.wake.call_in();
        }
    }
}

/// How a reader ends that was closed.
pub(super) fn closed() -> Finish {
    Finish::Failed {
        kind: FailureKind::Unavailable,
        text: "the reader is closed".to_owned(),
    }
}
