//! How many requests at once: searched for by the rate that is measured, not assumed.
//!
//! Owns the number. Does not own the requests, nor how much may be read ahead.
//!
//! A reader starts with one request, so that reading one record costs one. It goes on in *rounds*: as many ranges as there may
//! be at once have come, and enough time has passed for a rate to mean something. While the consumer has to wait, each round
//! doubles the number as long as that brings an eighth more; the first doubling that does not is taken back, and tried again
//! after a while, because the store or the line may have become better. Where doubling brings nearly twice as much, two
//! doublings are made at once: far from the end of the line each round is a round trip lost. A consumer that is slower than
//! what comes needs less.
//!
//! What this is for: one connection to S3 gives perhaps 40 MB/s after a first byte that takes 100 ms, so a range of 4 MiB takes
//! 0.1 s + 4.2 MB / 40 MB/s = 0.2 s and brings 20 MB/s. 500 MB/s need 25 of them: 105 MB on their way (rate times delay). The
//! defaults (32 requests, 128 MiB) leave room for what waits for its turn.

/// Shorter rounds measure the clock.
const ROUND_MS_MIN: u64 = 10;

/// Rounds before another doubling is tried.
const ROUNDS_SETTLED: u32 = 16;

/// Rounds in which the consumer always had something, after which less is asked for at once.
const ROUNDS_SATED: u32 = 4;

#[derive(Debug, Clone, Copy)]
enum Search {
    /// There were fewer before, which brought so much.
    Grown {
        before_depth: usize,
        before_bytes_per_s: u64,
    },
    /// For so many more rounds the number stays.
    Settled { rounds: u32 },
}

#[derive(Debug)]
struct Round {
    /// Moved on by the time in which nothing was asked for.
    began_ms: u64,
    idle_since_ms: Option<u64>,
    bytes: u64,
    ranges: usize,
    /// The consumer had to wait.
    hungry: bool,
}

/// The number of requests at once, and what it is derived from.
#[derive(Debug)]
pub(super) struct Pace {
    depth: usize,
    max_depth: usize,
    round: Option<Round>,
    search: Search,
    sated_rounds: u32,
}

impl Pace {
    pub(super) const fn new(max_depth: usize) -> Self {
        Self {
            depth: 1,
            max_depth,
            round: None,
            search: Search::Settled { rounds: 0 },
            sated_rounds: 0,
        }
    }

    /// Most requests at once now.
    pub(super) const fn depth(&self) -> usize {
        self.depth
    }

    /// A range is asked for.
    pub(super) fn asked(&mut self, now_ms: u64) {
        let round = self.round.get_or_insert(Round {
            began_ms: now_ms,
            idle_since_ms: None,
            bytes: 0,
            ranges: 0,
            hungry: false,
        });
        if let Some(since_ms) = round.idle_since_ms.take() {
            round.began_ms += now_ms.saturating_sub(since_ms);
        }
    }

    /// Nothing is asked for now.
    pub(super) fn idle(&mut self, now_ms: u64) {
        if let Some(round) = &mut self.round {
            round.idle_since_ms.get_or_insert(now_ms);
        }
    }

    /// The consumer has nothing.
    pub(super) fn hungry(&mut self) {
        if let Some(round) = &mut self.round {
            round.hungry = true;
        }
    }

    /// Bytes came.
    pub(super) fn arrived(&mut self, now_ms: u64, bytes: u64, range_is_complete: bool) {
        let depth = self.depth;
        let Some(round) = &mut self.round else {
            return;
        };
        round.bytes = round.bytes.saturating_add(bytes);
        round.ranges += usize::from(range_is_complete);
        let elapsed_ms = now_ms.saturating_sub(round.began_ms);
        if round.ranges < depth || elapsed_ms < ROUND_MS_MIN {
            return;
        }
        let bytes_per_s = round.bytes.saturating_mul(1000) / elapsed_ms;
        let hungry = round.hungry;
        self.round = None;
        self.asked(now_ms);
        if hungry {
            self.sated_rounds = 0;
            self.judge(bytes_per_s);
        } else {
            self.sated();
        }
    }

    /// A store in trouble is asked less at once.
    pub(super) fn fault(&mut self) {
        self.depth = (self.depth / 2).max(1);
        self.search = Search::Settled {
            rounds: ROUNDS_SATED,
        };
        self.round = None;
    }

    fn judge(&mut self, bytes_per_s: u64) {
        match self.search {
            Search::Grown {
                before_depth,
                before_bytes_per_s,
            } => {
                let growth = (self.depth / before_depth.max(1)).max(2);
                let doublings = u64::from(growth.ilog2());
                let enough = before_bytes_per_s.saturating_add(before_bytes_per_s / 8 * doublings);
                let nearly_all = before_bytes_per_s.saturating_mul(growth as u64) / 8 * 7;
                if bytes_per_s >= enough {
                    self.grow(bytes_per_s, if bytes_per_s >= nearly_all { 4 } else { 2 });
                } else if doublings > 1 {
                    // The first of them may have been worth it.
                    self.depth /= 2;
                } else {
                    self.depth = before_depth;
                    self.settle();
                }
            }
            Search::Settled { rounds: 0 } => self.grow(bytes_per_s, 2),
            Search::Settled { rounds } => self.search = Search::Settled { rounds: rounds - 1 },
        }
    }

    fn grow(&mut self, bytes_per_s: u64, factor: usize) {
        let before_depth = self.depth;
        self.depth = (before_depth * factor).min(self.max_depth);
        if self.depth > before_depth {
            self.search = Search::Grown {
                before_depth,
                before_bytes_per_s: bytes_per_s,
            };
        } else {
            self.settle();
        }
    }

    const fn settle(&mut self) {
        self.search = Search::Settled {
            rounds: ROUNDS_SETTLED,
        };
    }

    fn sated(&mut self) {
        // What was measured against a slow consumer says nothing about the store.
        self.search = Search::Settled { rounds: 0 };
        self.sated_rounds += 1;
        if self.sated_rounds >= ROUNDS_SATED {
            self.sated_rounds = 0;
            self.depth -= self.depth / 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE_BYTES: u64 = 4 << 20;

    /// A store whose ranges take so long, and whose line carries so much.
    fn run(pace: &mut Pace, rounds: usize, range_ms: u64, line_bytes_per_ms: u64, hungry: bool) {
        let mut now_ms = pace.round.as_ref().map_or(0, |round| round.began_ms);
        for _ in 0..rounds {
            let depth = pace.depth();
            pace.asked(now_ms);
            let bytes = depth as u64 * RANGE_BYTES;
            now_ms += range_ms.max(bytes / line_bytes_per_ms);
            if hungry {
                pace.hungry();
            }
            for _ in 0..depth {
                pace.arrived(now_ms, RANGE_BYTES, true);
            }
        }
    }

    #[test]
    fn it_starts_with_one_and_takes_what_the_line_gives() {
        let mut pace = Pace::new(32);
        assert_eq!(pace.depth(), 1);
        // 100 ms to the first byte and 40 MB/s: 205 ms a range; the line itself is no limit.
        let mut depths = Vec::new();
        for _ in 0..3 {
            run(&mut pace, 1, 205, u64::MAX, true);
            depths.push(pace.depth());
        }
        assert_eq!(depths, [2, 8, 32]);
        let bytes_per_s = 32 * RANGE_BYTES * 1000 / 205;
        assert!(bytes_per_s > 500_000_000, "{bytes_per_s}");
    }

    #[test]
    fn a_line_that_is_full_is_not_asked_for_more() {
        let mut pace = Pace::new(32);
        // Two ranges at once fill it: the first doubling brings all that it can, the next two bring nothing.
        let mut depths = Vec::new();
        for _ in 0..4 {
            run(&mut pace, 1, 100, 2 * RANGE_BYTES / 100, true);
            depths.push(pace.depth());
        }
        assert_eq!(depths, [2, 8, 4, 2]);
        run(&mut pace, 8, 100, 2 * RANGE_BYTES / 100, true);
        assert_eq!(pace.depth(), 2);
        // It tries again after a while, and takes it back again.
        let mut deepest = 0;
        for _ in 0..2 * ROUNDS_SETTLED {
            run(&mut pace, 1, 100, 2 * RANGE_BYTES / 100, true);
            deepest = deepest.max(pace.depth());
        }
        assert_eq!(deepest, 4);
        // The line becomes better.
        run(&mut pace, 2 * ROUNDS_SETTLED as usize, 100, u64::MAX, true);
        assert_eq!(pace.depth(), 32);
    }

    #[test]
    fn a_slow_consumer_needs_less() {
        let mut pace = Pace::new(32);
        run(&mut pace, 6, 205, u64::MAX, true);
        run(&mut pace, 100, 205, u64::MAX, false);
        assert!(pace.depth() <= 3, "{}", pace.depth());
        assert!(pace.depth() >= 1);
    }

    #[test]
    fn a_fault_halves_and_never_stops() {
        let mut pace = Pace::new(32);
        run(&mut pace, 6, 205, u64::MAX, true);
        pace.fault();
        assert_eq!(pace.depth(), 16);
        for _ in 0..10 {
            pace.fault();
        }
        assert_eq!(pace.depth(), 1);
    }
}
