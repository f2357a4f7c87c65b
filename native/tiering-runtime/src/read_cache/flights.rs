//! Requests on their way, so that a part of an object is asked for once however many wait for it.
//!
//! Owns who waits for what, and the tasks. A task lives as long as anybody waits for one of its parts: the one who started it
//! may go, and those who came later get their bytes all the same; when the last one goes the request is given up. An error is
//! told to all who wait, and to nobody who comes later.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use tiering_core::read::CacheUse;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::Instrument;

use super::store::Held;
use super::{Inner, Part, PartKey};
use crate::remote_tier::{StoreError, StoreErrorKind};

/// How often those who wait are told that a flight is alive.
const BEAT: Duration = Duration::from_secs(10);

/// How far a flight is.
#[derive(Debug, Default)]
pub(super) struct Life {
    /// It has waited for memory and for its turn, and is with the store.
    departed: AtomicBool,
    /// Bytes that came.
    moved_bytes: AtomicU64,
}

impl Life {
    pub(super) fn departs(&self) {
        self.departed.store(true, Ordering::Relaxed);
    }

    pub(super) fn moves(&self, bytes: u64) {
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }
}

type Landed = Option<Result<Bytes, StoreError>>;

/// A task; given up when the last one who waits for a part of it is gone.
#[derive(Debug, Default)]
struct Flight {
    /// Not there until it has departed.
    task: OnceLock<AbortHandle>,
    life: Arc<Life>,
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

/// The right to one part.
#[derive(Debug)]
pub(super) struct Seat {
    landed: watch::Receiver<Landed>,
    flight: Arc<Flight>,
}

impl Seat {
    /// The part, when it is here. While it is not, `alive` is called now and then as long as the store is not to blame.
    pub(super) async fn landed(mut self, alive: &(dyn Fn() + Sync)) -> Result<Bytes, StoreError> {
        let life = Arc::clone(&self.flight.life);
        loop {
            let before_bytes = life.moved_bytes();
            tokio::select! {
                biased;
                landed = self.landed.wait_for(Option::is_some) => {
                    return match landed {
                        Ok(landed) => landed.clone().unwrap_or_else(|| Err(lost())),
                        Err(_) => Err(lost()),
                    };
                }
                () = tokio::time::sleep(BEAT) => {
                    let departed = life.departed.load(Ordering::Relaxed);
                    if !departed || life.moved_bytes() > before_bytes {
                        alive();
                    }
                }
            }
        }
    }
}

/// What is told when a task ended without a word.
pub(super) fn lost() -> StoreError {
    StoreError::new(StoreErrorKind::Connection, "the request's task died")
}

#[derive(Debug)]
struct Pending {
    flight: Weak<Flight>,
    flight_id: u64,
    landed: watch::Receiver<Landed>,
}

/// Every part that is on its way.
#[derive(Debug, Default)]
pub(super) struct Flights {
    pending: HashMap<PartKey, Pending>,
    last_id: u64,
}

impl Flights {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Waits along, if the part is on its way.
    pub(super) fn join(&self, key: &PartKey) -> Option<Seat> {
        let pending = self.pending.get(key)?;
        // A flight that nobody waits for is being given up: too late to join.
        let flight = pending.flight.upgrade()?;
        Some(Seat {
            landed: pending.landed.clone(),
            flight,
        })
    }

    /// Books seats for these parts, which one task will bring in this order. From now on others can join; the task itself is
    /// started by [`Booking::depart`], without the lock.
    pub(super) fn book(
        &mut self,
        inner: &Arc<Inner>,
        keys: &[PartKey],
        cache_use: CacheUse,
    ) -> (Vec<Seat>, Booking) {
        self.last_id += 1;
        let flight_id = self.last_id;
        let flight = Arc::new(Flight::default());
        let mut parts = VecDeque::with_capacity(keys.len());
        let mut seats = Vec::with_capacity(keys.len());
        for key in keys {
            let (sender, landed) = watch::channel(None);
            parts.push_back((key.clone(), sender));
            self.pending.insert(
                key.clone(),
                Pending {
                    flight: Arc::downgrade(&flight),
                    flight_id,
                    landed: landed.clone(),
                },
            );
            seats.push(Seat {
                landed,
                flight: Arc::clone(&flight),
            });
        }
        let landing = Landing {
            inner: Arc::clone(inner),
            life: Arc::clone(&flight.life),
            flight_id,
            cache_use,
            parts,
        };
        (seats, Booking { landing, flight })
    }

    fn remove(&mut self, key: &PartKey, flight_id: u64) {
        // Another one may have taken its place: after it was given up, or past the cache.
        if self
            .pending
            .get(key)
            .is_some_and(|pending| pending.flight_id == flight_id)
        {
            self.pending.remove(key);
        }
    }
}

/// A flight that has seats and no task yet.
///
/// Starting a task can end it at once: a runtime that is being closed drops the future where it is spawned, and with it the
/// [`Landing`], which takes the lock. So nobody departs, and no landing is dropped, while the lock is held.
pub(super) struct Booking {
    landing: Landing,
    flight: Arc<Flight>,
}

impl Booking {
    /// Starts the task. Must not be called with the lock held.
    pub(super) fn depart<F>(self, work: impl FnOnce(Landing) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Self { landing, flight } = self;
        let task = tokio::spawn(work(landing).in_current_span()).abort_handle();
        // Set once, here. If those who waited are gone by now, the flight ends with this function, and its task with it.
        let _ = flight.task.set(task);
    }
}

/// Where a task puts what it brings. Whatever is not there when it ends is lost, and said so.
pub(super) struct Landing {
    inner: Arc<Inner>,
    life: Arc<Life>,
    flight_id: u64,
    cache_use: CacheUse,
    parts: VecDeque<(PartKey, watch::Sender<Landed>)>,
}

impl Landing {
    /// How far it is.
    pub(super) const fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Whether what it brings is kept.
    pub(super) const fn keeps(&self) -> bool {
        matches!(self.cache_use, CacheUse::Allowed)
    }

    /// Parts that are still owed.
    pub(super) fn owed(&self) -> usize {
        self.parts.len()
    }

    /// The next part is here. It is kept before anybody is told, and is on its way until it is kept.
    pub(super) fn land(&mut self, part: Arc<Held>) {
        let Some((key, sender)) = self.parts.pop_front() else {
            return;
        };
        let bytes = part.bytes();
        let pushed_out = {
            let mut state = self.inner.lock();
            state.flights.remove(&key, self.flight_id);
            let pushed_out = match (self.cache_use, key.part) {
                (CacheUse::Bypassed, _) => vec![part],
                (CacheUse::Allowed, Part::Block(_)) => state.blocks.put(key, part),
                (CacheUse::Allowed, Part::Index(_) | Part::Whole) => state.lookups.put(key, part),
            };
            self.inner.count_cached(&state);
            pushed_out
        };
        sender.send_replace(Some(Ok(bytes)));
        drop(pushed_out);
    }

    /// The parts that are owed do not come.
    pub(super) fn fail(&mut self, error: &StoreError) {
        while let Some((key, sender)) = self.parts.pop_front() {
            self.inner.lock().flights.remove(&key, self.flight_id);
            sender.send_replace(Some(Err(error.clone())));
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.parts.is_empty() {
            return;
        }
        if std::thread::panicking() {
            self.inner.stats.tasks_lost.increment();
        }
        let mut state = self.inner.lock();
        for (key, _) in &self.parts {
            state.flights.remove(key, self.flight_id);
        }
    }
}
