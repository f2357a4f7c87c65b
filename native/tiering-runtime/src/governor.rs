//! Admission of fragment transfers on this node: how many at once, and how many bytes a second.
//!
//! Owns the order (first come, first served, over all streams) and the gauges. Does not own the transfers: each waits for its
//! permit in its own task, and giving up is dropping the wait or the permit.

use std::sync::{Arc, Mutex, PoisonError};

use tiering_core::token_bucket::TokenBucket;
use tokio::sync::{Mutex as TurnMutex, Notify, OwnedSemaphorePermit, Semaphore};

use crate::clock::Clock;
use crate::stats::{Stat, Stats};

/// The node's governor.
#[derive(Debug)]
pub struct Governor {
    slots: Arc<Semaphore>,
    /// Held by the one who asks the bucket; a fair lock, so the queue behind it is in order.
    turn: TurnMutex<()>,
    bucket: Mutex<Option<Paced>>,
    rate_changed: Notify,
    clock: Clock,
    stats: Arc<Stats>,
}

#[derive(Debug)]
struct Paced {
    bucket: TokenBucket,
    burst_bytes: u64,
}

/// The right to transfer, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    _slot: OwnedSemaphorePermit,
    _in_flight: Gauge,
}

#[derive(Debug)]
struct Gauge {
    stats: Arc<Stats>,
    stat: fn(&Stats) -> &Stat,
}

impl Gauge {
    fn hold(stats: &Arc<Stats>, stat: fn(&Stats) -> &Stat) -> Self {
        stat(stats).increment();
        Self {
            stats: Arc::clone(stats),
            stat,
        }
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        (self.stat)(&self.stats).subtract(1);
    }
}

impl Governor {
    /// A governor for so many transfers at once, without a rate.
    #[must_use]
    pub fn new(max_concurrent: usize, clock: Clock, stats: Arc<Stats>) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(
                max_concurrent.clamp(1, Semaphore::MAX_PERMITS),
            )),
            turn: TurnMutex::new(()),
            bucket: Mutex::new(None),
            rate_changed: Notify::new(),
            clock,
            stats,
        }
    }

    /// Sets the rate (`None` = unlimited) and its burst (`None` = the default for that rate); those who wait ask again.
    pub fn set_rate(&self, bytes_per_second: Option<u64>, burst_bytes: Option<u64>) {
        let now_ms = self.clock.now_ms();
        let mut paced = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        match bytes_per_second {
            None => *paced = None,
            Some(rate) => {
                let burst_bytes = burst_bytes
                    .unwrap_or_else(|| TokenBucket::default_burst(rate))
                    .max(1);
                match paced.as_mut() {
                    Some(paced) => {
                        paced.bucket.set_rate(now_ms, rate, burst_bytes);
                        paced.burst_bytes = burst_bytes;
                    }
                    None => {
                        *paced = Some(Paced {
                            bucket: TokenBucket::new(now_ms, rate, burst_bytes),
                            burst_bytes,
                        })
                    }
                }
            }
        }
        drop(paced);
        self.rate_changed.notify_one();
    }

    /// Waits for the right to transfer so many bytes.
    pub async fn admit(&self, bytes: u64) -> Permit {
        let pending = Gauge::hold(&self.stats, |stats| &stats.transfers_pending);
        let slot = loop {
            match Arc::clone(&self.slots).acquire_owned().await {
                Ok(slot) => break slot,
                // The semaphore is never closed; if it were, nobody may transfer.
                Err(_) => std::future::pending().await,
            }
        };
        {
            let _turn = self.turn.lock().await;
            while let Err(ask_again_at_ms) = self.ask(bytes) {
                tokio::select! {
                    () = tokio::time::sleep_until(self.clock.instant_at(ask_again_at_ms)) => {}
                    () = self.rate_changed.notified() => {}
                }
            }
        }
        drop(pending);
        let in_flight = Gauge::hold(&self.stats, |stats| &stats.transfers_in_flight);
        Permit {
            _slot: slot,
            _in_flight: in_flight,
        }
    }

    fn ask(&self, bytes: u64) -> Result<(), u64> {
        let mut paced = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(paced) = paced.as_mut() else {
            return Ok(());
        };
        paced.bucket.admit(self.clock.now_ms(), bytes)?;
        if bytes > paced.burst_bytes {
            self.stats.transfers_oversized.increment();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::mpsc;

    use super::*;

    fn governor(max_concurrent: usize) -> (Arc<Governor>, Arc<Stats>) {
        let stats = Arc::new(Stats::default());
        (
            Arc::new(Governor::new(
                max_concurrent,
                Clock::start(),
                Arc::clone(&stats),
            )),
            stats,
        )
    }

    #[tokio::test]
    async fn at_most_so_many_at_once_and_dropping_frees() {
        let (governor, stats) = governor(2);
        let first = governor.admit(1).await;
        let _second = governor.admit(1).await;
        let waiting = tokio::spawn({
            let governor = Arc::clone(&governor);
            async move { governor.admit(1).await }
        });
        while stats.transfers_pending.get() == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            (
                stats.transfers_in_flight.get(),
                stats.transfers_pending.get()
            ),
            (2, 1)
        );
        drop(first);
        let third = waiting.await.expect("admitted");
        assert_eq!(
            (
                stats.transfers_in_flight.get(),
                stats.transfers_pending.get()
            ),
            (2, 0)
        );
        drop(third);
        assert_eq!(stats.transfers_in_flight.get(), 1);
    }

    #[tokio::test]
    async fn giving_up_the_wait_leaves_nothing_behind() {
        let (governor, stats) = governor(1);
        let held = governor.admit(1).await;
        let waiting = tokio::spawn({
            let governor = Arc::clone(&governor);
            async move { governor.admit(1).await }
        });
        while stats.transfers_pending.get() == 0 {
            tokio::task::yield_now().await;
        }
        waiting.abort();
        assert!(waiting.await.is_err());
        assert_eq!(stats.transfers_pending.get(), 0);
        drop(held);
        drop(governor.admit(1).await);
        assert_eq!(stats.transfers_in_flight.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_holds_in_order_and_can_be_lifted() {
        let (governor, stats) = governor(100);
        governor.set_rate(Some(1000), Some(1000));
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let start = tokio::time::Instant::now();
        for number in 0..4u64 {
            let (task_governor, sender) = (Arc::clone(&governor), sender.clone());
            tokio::spawn(async move {
                let permit = task_governor.admit(1000).await;
                sender.send((number, start.elapsed())).expect("received");
                drop(permit);
            });
            tokio::task::yield_now().await;
        }
        for number in 0..3u64 {
            let (admitted, after) = receiver.recv().await.expect("admitted");
            assert_eq!((admitted, after.as_secs()), (number, number));
        }
        governor.set_rate(None, None);
        let (admitted, after) = receiver.recv().await.expect("admitted");
        assert_eq!(admitted, 3);
        assert!(after < Duration::from_secs(3));
        assert_eq!(stats.transfers_oversized.get(), 0);
        governor.set_rate(Some(1000), Some(10));
        drop(governor.admit(1000).await);
        assert_eq!(stats.transfers_oversized.get(), 1);
    }
}
