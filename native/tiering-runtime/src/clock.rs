//! The monotonic clock that machines are told the time by, and chance.
//!
//! Owns the translation between tokio's instants and the milliseconds of `tiering-core`.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

/// Milliseconds since the engine was opened.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts at 0 now.
    #[must_use]
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// The time now.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The instant of a time; one that is too far away to be told is a year away.
    #[must_use]
    pub fn instant_at(&self, time_ms: u64) -> Instant {
        const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
        self.start
            .checked_add(Duration::from_millis(time_ms))
            .unwrap_or_else(|| self.start + YEAR)
    }
}

/// 64 random bits: seeds of machines, and names of objects that no other node may choose too.
#[must_use]
pub fn random_u64() -> u64 {
    // The keys of the standard library's hash maps come from the operating system; no generator of our own is needed.
    RandomState::new().build_hasher().finish()
}

/// 32 random bits: the random part of an object's key.
#[must_use]
pub fn random_uid() -> u32 {
    let bits = random_u64();
    (bits ^ (bits >> 32)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn time_and_instants_agree() {
        let clock = Clock::start();
        tokio::time::sleep_until(clock.instant_at(1500)).await;
        assert_eq!(clock.now_ms(), 1500);
        assert!(clock.instant_at(u64::MAX) > Instant::now());
    }

    #[test]
    fn chance_does_not_repeat() {
        let seen: std::collections::HashSet<_> = (0..1000).map(|_| random_u64()).collect();
        assert_eq!(seen.len(), 1000);
    }
}
