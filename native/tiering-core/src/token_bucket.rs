//! A byte rate with a burst: admits transfers, or says when to ask again.
//!
//! Owns: the arithmetic. Does not own: the queue in front of it, and the clock.
//!
//! A transfer larger than the burst is admitted on credit once the bucket is full, and leaves a debt that refills repay; a
//! bucket that had to hold all of it would never admit it, and everything behind it would wait for ever.

/// A token bucket; one token is one byte.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    bytes_per_second: u64,
    burst_bytes: u64,
    /// In thousandths of a byte, so that a refill of a millisecond loses nothing; negative while in debt.
    millitokens: i128,
    refilled_at_ms: u64,
}

impl TokenBucket {
    /// A full bucket. A rate or burst of 0 counts as 1: the caller has "unlimited" for no bucket at all.
    #[must_use]
    pub fn new(now_ms: u64, bytes_per_second: u64, burst_bytes: u64) -> Self {
        let burst_bytes = burst_bytes.max(1);
        Self {
            bytes_per_second: bytes_per_second.max(1),
            burst_bytes,
            millitokens: i128::from(burst_bytes) * 1000,
            refilled_at_ms: now_ms,
        }
    }

    /// The burst that goes with a rate, unless configured: a fifth of a second.
    #[must_use]
    pub fn default_burst(bytes_per_second: u64) -> u64 {
        (bytes_per_second / 5).max(1)
    }

    /// Changes rate and burst; what has been saved up stays, up to the new burst, and so does a debt.
    pub fn set_rate(&mut self, now_ms: u64, bytes_per_second: u64, burst_bytes: u64) {
        self.refill(now_ms);
        self.bytes_per_second = bytes_per_second.max(1);
        self.burst_bytes = burst_bytes.max(1);
        self.millitokens = self.millitokens.min(i128::from(self.burst_bytes) * 1000);
    }

    /// Takes the tokens of a transfer, all at once; or says at which time to try again.
    pub fn admit(&mut self, now_ms: u64, bytes: u64) -> Result<(), u64> {
        self.refill(now_ms);
        let needed = i128::from(bytes.min(self.burst_bytes)) * 1000;
        if self.millitokens >= needed {
            self.millitokens -= i128::from(bytes) * 1000;
            return Ok(());
        }
        let rate = i128::from(self.bytes_per_second);
        let wait_ms = (needed - self.millitokens + rate - 1) / rate;
        Err(self
            .refilled_at_ms
            .saturating_add(u64::try_from(wait_ms).unwrap_or(u64::MAX)))
    }

    /// Bytes that could be sent now; negative while in debt.
    #[must_use]
    pub fn available_bytes(&self) -> i64 {
        i64::try_from(self.millitokens.div_euclid(1000)).unwrap_or(i64::MIN)
    }

    fn refill(&mut self, now_ms: u64) {
        let elapsed_ms = now_ms.saturating_sub(self.refilled_at_ms);
        let gained = i128::from(elapsed_ms).saturating_mul(i128::from(self.bytes_per_second));
        let full = i128::from(self.burst_bytes) * 1000;
        self.millitokens = self.millitokens.saturating_add(gained).min(full);
        self.refilled_at_ms = self.refilled_at_ms.max(now_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bug_60_a_transfer_larger_than_the_burst_is_admitted_on_credit() {
        let mut bucket = TokenBucket::new(0, 1000, 200);
        assert_eq!(bucket.admit(0, 1200), Ok(()));
        assert_eq!(bucket.available_bytes(), -1000);
        let retry = bucket.admit(0, 1).unwrap_err();
        assert_eq!(retry, 1001);
        assert_eq!(bucket.admit(retry, 1), Ok(()));
    }

    #[test]
    fn an_idle_bucket_saves_up_one_burst_and_no_more() {
        let mut bucket = TokenBucket::new(0, 1000, 200);
        assert_eq!(bucket.admit(1_000_000, 200), Ok(()));
        assert_eq!(bucket.admit(1_000_000, 100), Err(1_000_100));
        assert_eq!(bucket.admit(1_000_099, 100), Err(1_000_100));
        assert_eq!(bucket.admit(1_000_100, 100), Ok(()));
    }

    #[test]
    fn a_clock_that_steps_back_gives_nothing() {
        let mut bucket = TokenBucket::new(1000, 1000, 10);
        bucket.admit(1000, 10).unwrap();
        assert_eq!(bucket.admit(0, 10), Err(1010));
    }

    #[test]
    fn a_new_rate_keeps_the_debt() {
        let mut bucket = TokenBucket::new(0, 1000, 200);
        bucket.admit(0, 400).unwrap();
        bucket.set_rate(0, 10, 50);
        assert_eq!(bucket.available_bytes(), -200);
        assert_eq!(bucket.admit(0, 50), Err(25_000));
        assert_eq!(TokenBucket::default_burst(0), 1);
    }

    proptest! {
        #[test]
        fn the_rate_is_kept_and_the_retry_time_is_true(
            rate in 1u64..1_000_000, burst in 1u64..1_000_000, sizes in prop::collection::vec(1u64..2_000_000, 1..50)
        ) {
            let (mut now, mut bucket) = (0, TokenBucket::new(0, rate, burst));
            let mut sent_before_last = 0u128;
            for size in &sizes {
                if let Err(retry) = bucket.admit(now, *size) {
                    prop_assert!(retry > now);
                    prop_assert!(bucket.clone().admit(retry - 1, *size).is_err());
                    now = retry;
                    prop_assert_eq!(bucket.admit(now, *size), Ok(()));
                }
                // Everything before this transfer was paid for by the burst and the time that passed.
                let paid = u128::from(burst) + u128::from(now) * u128::from(rate) / 1000;
                prop_assert!(sent_before_last <= paid);
                sent_before_last += u128::from(*size);
            }
        }

        #[test]
        fn extreme_numbers_do_not_panic(now: u64, rate: u64, burst: u64, size: u64, later: u64) {
            let mut bucket = TokenBucket::new(now, rate, burst);
            let _ = bucket.admit(later, size);
            bucket.set_rate(now, size, rate);
            let _ = (bucket.admit(u64::MAX, u64::MAX), bucket.admit(u64::MAX, u64::MAX), bucket.available_bytes());
        }
    }
}
