//! How long to wait after a fault.

use super::settings::Settings;

/// A small generator (splitmix64), so that a test can replay a reader from its seed.
#[derive(Debug)]
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Wait before attempt number `attempt` (1 = first repetition): doubling, capped, and of that a random upper half.
    pub(super) fn backoff_ms(&mut self, settings: &Settings, attempt: u32) -> u64 {
        let doublings = attempt.saturating_sub(1).min(20);
        let full = settings
            .backoff_min_ms
            .saturating_mul(1 << doublings)
            .min(settings.backoff_max_ms);
        let half = full / 2;
        full - self.next() % (half + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_the_cap_and_jitters_down_to_half() {
        let settings = Settings::default();
        let mut jitter = Jitter::new(7);
        for (attempt, full) in [
            (1, 100),
            (2, 200),
            (3, 400),
            (6, 3_200),
            (7, 5_000),
            (u32::MAX, 5_000),
        ] {
            for _ in 0..50 {
                let wait = jitter.backoff_ms(&settings, attempt);
                assert!(
                    wait >= full / 2 && wait <= full,
                    "attempt {attempt}: {wait}"
                );
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_waits() {
        let settings = Settings::default();
        let waits = |seed| {
            let mut jitter = Jitter::new(seed);
            (1..20)
                .map(|attempt| jitter.backoff_ms(&settings, attempt))
                .collect::<Vec<_>>()
        };
        assert_eq!(waits(1), waits(1));
        assert_ne!(waits(1), waits(2));
    }
}
