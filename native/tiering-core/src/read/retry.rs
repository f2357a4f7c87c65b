//! How long to wait after a fault.

use super::settings::Settings;
use crate::chance::Chance;

/// Wait before attempt number `attempt` (1 = first repetition): doubling, capped, and of that a random upper half.
pub(super) fn backoff_ms(chance: &mut Chance, settings: &Settings, attempt: u32) -> u64 {
    let doublings = attempt.saturating_sub(1).min(20);
    let full = settings
        .backoff_min_ms
        .saturating_mul(1 << doublings)
        .min(settings.backoff_max_ms);
    let half = full / 2;
    full - chance.next() % (half + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_the_cap_and_jitters_down_to_half() {
        let settings = Settings::default();
        let mut chance = Chance::new(7);
        for (attempt, full) in [
            (1, 100),
            (2, 200),
            (3, 400),
            (6, 3_200),
            (7, 5_000),
            (u32::MAX, 5_000),
        ] {
            for _ in 0..50 {
                let wait = backoff_ms(&mut chance, &settings, attempt);
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
            let mut chance = Chance::new(seed);
            (1..20)
                .map(|attempt| backoff_ms(&mut chance, &settings, attempt))
                .collect::<Vec<_>>()
        };
        assert_eq!(waits(1), waits(1));
        assert_ne!(waits(1), waits(2));
    }
}
