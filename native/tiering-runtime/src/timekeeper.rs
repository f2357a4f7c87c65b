//! The clocks of a node: who is asked, and who is informed.
//!
//! Owns the reading of the system's clock; nobody else does that. Does not own what is to be believed ([`TrustedTime`]), nor the
//! answers of the store, which say the time along with everything else ([`crate::remote_tier`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tiering_core::trusted_time::{Doubt, TrustedTime};

use crate::clock::Clock;
use crate::settings::Config;
use crate::stats::Stats;

/// Reads a clock, in milliseconds since the epoch.
type ReadClock = Box<dyn Fn() -> i64 + Send + Sync>;

/// One for an engine. See the module's page.
pub struct Timekeeper {
    clock: Clock,
    /// Not if its answers may be wrong about the time: then neither age nor signatures go by them.
    asks_the_store: bool,
    system: ReadClock,
    time: Mutex<TrustedTime>,
    stats: Arc<Stats>,
}

impl Timekeeper {
    /// Starts at what the host believes, or without that at what the system's clock says.
    #[must_use]
    pub fn new(config: &Config, clock: Clock, stats: Arc<Stats>) -> Self {
        Self::with_system(config, clock, stats, Box::new(system_ms))
    }

    /// The same with another clock in place of the system's.
    #[must_use]
    pub fn with_system(
        config: &Config,
        clock: Clock,
        stats: Arc<Stats>,
        system: ReadClock,
    ) -> Self {
        let host_ms = config.system_time_ms.unwrap_or_else(&system);
        let time = TrustedTime::new(clock.now_ms(), host_ms, config.max_clock_skew_ms);
        Self {
            clock,
            asks_the_store: config.max_clock_skew_ms > 0,
            system,
            time: Mutex::new(time),
            stats,
        }
    }

    /// What time it is for decisions that cannot be taken back.
    ///
    /// # Errors
    /// If the clocks do not agree.
    pub fn now(&self) -> Result<i64, Doubt> {
        let now_ms = self.clock.now_ms();
        let mut time = self.lock();
        time.system_says(now_ms, (self.system)());
        self.report(&time, now_ms)
    }

    /// An answer of the store has just come and says that it is this late.
    pub fn store_says(&self, store_ms: i64) {
        if !self.asks_the_store {
            return;
        }
        let now_ms = self.clock.now_ms();
        let mut time = self.lock();
        time.system_says(now_ms, (self.system)());
        time.store_says(now_ms, store_ms);
        // Who waits for it asks by himself.
        let _known = self.report(&time, now_ms);
    }

    /// What time it is for the store, which judges signatures and credentials: by its own clock, once that was heard.
    #[must_use]
    pub fn for_the_store(&self) -> SystemTime {
        let now_ms = self.clock.now_ms();
        let ms = self
            .lock()
            .store_ms(now_ms)
            .unwrap_or_else(|| (self.system)());
        let since_epoch = Duration::from_millis(u64::try_from(ms).unwrap_or(0));
        SystemTime::UNIX_EPOCH
            .checked_add(since_epoch)
            .unwrap_or(SystemTime::UNIX_EPOCH)
    }

    fn report(&self, time: &TrustedTime, now_ms: u64) -> Result<i64, Doubt> {
        let now = time.now(now_ms);
        self.stats
            .clock_skew_ms
            .set_signed(time.skew_ms(now_ms).unwrap_or(0));
        self.stats.clock_in_doubt.set(u64::from(now.is_err()));
        now
    }

    fn lock(&self) -> MutexGuard<'_, TrustedTime> {
        self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Timekeeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timekeeper").finish_non_exhaustive()
    }
}

/// 0 for a clock that is before the epoch.
pub(crate) fn system_ms() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_millis()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    const HOST_MS: i64 = 1_800_000_000_000;
    const DAY_MS: i64 = 24 * 3_600 * 1_000;

    #[tokio::test(start_paused = true)]
    async fn the_gauges_say_how_far_the_clocks_are_apart_and_whether_that_matters() {
        let stats = Arc::new(Stats::default());
        let system = Arc::new(AtomicI64::new(HOST_MS));
        let read = Arc::clone(&system);
        let config = Config::default();
        let read_clock = Box::new(move || read.load(Ordering::SeqCst));
        let keeper =
            Timekeeper::with_system(&config, Clock::start(), Arc::clone(&stats), read_clock);
        let gauges = || (stats.clock_skew_ms.get(), stats.clock_in_doubt.get());
        assert!(keeper.now().is_err_and(|doubt| doubt.skew_ms.is_none()));
        assert_eq!(gauges(), (0, 1));
        keeper.store_says(HOST_MS - 500);
        assert_eq!(gauges(), (500, 0));
        assert_eq!(keeper.now(), Ok(HOST_MS - 500));
        system.store(HOST_MS + 30 * DAY_MS, Ordering::SeqCst);
        assert_eq!(
            keeper.now(),
            Ok(HOST_MS - 500),
            "a step is of no consequence"
        );
        let store_ms = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).ok();
        assert_eq!(
            store_ms(keeper.for_the_store()),
            Some(Duration::from_millis((HOST_MS - 500) as u64)),
            "nor for signatures"
        );
        keeper.store_says(HOST_MS - DAY_MS);
        assert_eq!(gauges(), (DAY_MS, 1));
        keeper.store_says(HOST_MS);
        assert_eq!(gauges(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_host_s_time_counts_and_not_the_system_s_of_that_moment() {
        let config = Config {
            system_time_ms: Some(HOST_MS),
            max_clock_skew_ms: 0,
            ..Config::default()
        };
        let system = Box::new(|| HOST_MS + 10 * DAY_MS);
        let keeper = Timekeeper::with_system(&config, Clock::start(), Arc::default(), system);
        assert_eq!(keeper.now(), Ok(HOST_MS));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(keeper.now(), Ok(HOST_MS + 1_010));
        keeper.store_says(HOST_MS - 100 * DAY_MS);
        assert_eq!(keeper.now(), Ok(HOST_MS + 1_010), "nor the store's");
        let signed_ms = keeper
            .for_the_store()
            .duration_since(SystemTime::UNIX_EPOCH);
        let signed_ms = signed_ms.map(|since| since.as_millis());
        assert_eq!(signed_ms.ok(), Some((HOST_MS + 10 * DAY_MS) as u128));
    }
}
