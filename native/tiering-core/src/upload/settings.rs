//! Knobs of the machine, and how long it waits before it tries again.

/// Settings of one machine. Times are milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Cut when the data of the assembled chunks reaches this.
    pub fragment_size_bytes: u64,
    /// Cut at this many chunks: bounds the index, which is kept in memory until it is sent.
    pub fragment_max_chunks: u32,
    /// Cut when the oldest assembled chunk arrived this long ago, so that a slow stream reaches the bucket, too; 0 = never.
    pub fragment_max_age_ms: u64,
    /// Persist after this many edits.
    pub persist_threshold: u32,
    /// Persist when the oldest edit is this old.
    pub persist_interval_ms: u64,
    /// Entries of one kind in a row that are moved from the root into a group; 2 to 1024.
    pub rebalance_threshold: u32,
    /// Fragments that are cut and not yet in the manifest; scanning waits while there are as many.
    pub max_in_flight_transfers: usize,
    /// Bytes of the indexes of those fragments; scanning waits while they hold as much. Counts for streams of tiny chunks, whose
    /// indexes are a good part of their data: an outage of the store must not fill the broker's memory.
    pub max_waiting_index_bytes: usize,
    /// A transfer (or a request for a root) with no result for this long is sent again.
    pub transfer_deadline_ms: u64,
    /// Any other effect with no answer for this long counts as failed.
    pub answer_deadline_ms: u64,
    /// Chunks per scan.
    pub scan_max_chunks: usize,
    /// Waiting times.
    pub retry: RetryPolicy,
    /// What it takes to give up history that cannot be read.
    pub proof: Proof,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            fragment_size_bytes: 64 << 20,
            fragment_max_chunks: 1 << 17,
            fragment_max_age_ms: 0,
            persist_threshold: 5,
            persist_interval_ms: 2_000,
            rebalance_threshold: 1_024,
            max_in_flight_transfers: 16,
            max_waiting_index_bytes: 4 << 20,
            transfer_deadline_ms: 180_000,
            answer_deadline_ms: 60_000,
            scan_max_chunks: 4_096,
            retry: RetryPolicy::default(),
            proof: Proof::default(),
        }
    }
}

impl Settings {
    /// With every limit raised to where the machine can move at all: a limit of nothing would stall it without a word.
    pub(super) fn usable(self) -> Self {
        let usable = |backoff: Backoff| Backoff {
            base_ms: backoff.base_ms.max(1),
            cap_ms: backoff.cap_ms.max(1),
        };
        Self {
            fragment_size_bytes: self.fragment_size_bytes.max(1),
            fragment_max_chunks: self.fragment_max_chunks.max(1),
            persist_threshold: self.persist_threshold.max(1),
            persist_interval_ms: self.persist_interval_ms.max(1),
            rebalance_threshold: self.rebalance_threshold.clamp(2, 1_024),
            max_in_flight_transfers: self.max_in_flight_transfers.max(1),
            max_waiting_index_bytes: self.max_waiting_index_bytes.max(1),
            transfer_deadline_ms: self.transfer_deadline_ms.max(1),
            answer_deadline_ms: self.answer_deadline_ms.max(1),
            scan_max_chunks: self.scan_max_chunks.max(1),
            retry: RetryPolicy {
                transient: usable(self.retry.transient),
                stalled: usable(self.retry.stalled),
                control: usable(self.retry.control),
                recovery: usable(self.retry.recovery),
            },
            ..self
        }
    }
}

/// How much evidence is proof that an object is lost: so many answers of the store that say so, and none of another kind, over at
/// least so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// Answers in a row.
    pub answers: u32,
    /// Time from the first of them.
    pub over_ms: u64,
}

impl Default for Proof {
    /// A store says wrong things in earnest for a while after a failover to a copy that is behind, and whoever has deleted
    /// something by mistake needs the time to bring it back: an hour. Being patient costs that the stream is not tiered meanwhile,
    /// which is what any outage of the store costs. The number is a guard against a machine that was asleep between two answers:
    /// an hour of retries makes over a hundred.
    fn default() -> Self {
        Self {
            answers: 20,
            over_ms: 60 * 60 * 1_000,
        }
    }
}

/// Exponential waiting times: each starts at its base and doubles up to its cap; half of it is left to chance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Transfers that failed for a passing reason; their first retry is at once.
    pub transient: Backoff,
    /// Transfers that failed for a reason that will stay.
    pub stalled: Backoff,
    /// Resolving, scanning, the anchor, persisting.
    pub control: Backoff,
    /// Between recoveries that give something up.
    pub recovery: Backoff,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            transient: Backoff {
                base_ms: 10,
                cap_ms: 5_000,
            },
            stalled: Backoff {
                base_ms: 1_000,
                cap_ms: 30_000,
            },
            control: Backoff {
                base_ms: 200,
                cap_ms: 30_000,
            },
            recovery: Backoff {
                base_ms: 1_000,
                cap_ms: 60_000,
            },
        }
    }
}

/// One exponential waiting time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// First waiting time.
    pub base_ms: u64,
    /// Longest waiting time.
    pub cap_ms: u64,
}

impl Backoff {
    /// Waiting time after this many doublings.
    #[must_use]
    pub fn delay_ms(&self, doublings: u32) -> u64 {
        self.base_ms
            .saturating_mul(1 << doublings.min(40))
            .min(self.cap_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    #[test]
    fn delays_double_up_to_the_cap() {
        let backoff = Backoff {
            base_ms: 10,
            cap_ms: 5_000,
        };
        let delays: Vec<u64> = (0..11).map(|n| backoff.delay_ms(n)).collect();
        assert_eq!(
            delays,
            [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5000, 5000]
        );
        assert_eq!(backoff.delay_ms(u32::MAX), 5000);
        assert_eq!(
            Backoff {
                base_ms: u64::MAX,
                cap_ms: u64::MAX
            }
            .delay_ms(9),
            u64::MAX
        );
    }

    #[test]
    fn jitter_stays_within_the_upper_half_and_repeats_with_its_seed() {
        let (mut one, mut two) = (Chance::new(7), Chance::new(7));
        for delay in 0..2000 {
            let jittered = one.jitter(delay);
            assert!((delay / 2..=delay).contains(&jittered));
            assert_eq!(jittered, two.jitter(delay));
        }
    }
}
