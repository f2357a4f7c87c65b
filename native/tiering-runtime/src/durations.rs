//! How long requests to the store take: one histogram for each operation.
//!
//! Owns bounds and counts. Does not measure: the instrumented store does. Does not publish: the NIF hands over a snapshot.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets in milliseconds; what took longer is in one more bucket.
pub const BOUNDS_MS: [u64; 11] = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000,
];
const BUCKETS: usize = BOUNDS_MS.len() + 1;

/// Counts of one operation.
#[derive(Debug, Default)]
pub struct Durations {
    buckets: [AtomicU64; BUCKETS],
    sum_micros: AtomicU64,
}

/// Counts of one operation at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// How many fell in each bucket alone, the one without a bound last.
    pub buckets: [u64; BUCKETS],
    /// All of them together.
    pub sum_micros: u64,
}

impl Durations {
    /// Counts one.
    pub fn observe(&self, duration: Duration) {
        let millis = duration.as_millis();
        let place = BOUNDS_MS.partition_point(|bound| u128::from(*bound) < millis);
        if let Some(bucket) = self.buckets.get(place) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            buckets: std::array::from_fn(|place| {
                self.buckets
                    .get(place)
                    .map_or(0, |bucket| bucket.load(Ordering::Relaxed))
            }),
            sum_micros: self.sum_micros.load(Ordering::Relaxed),
        }
    }
}

/// Durations of all operations. A request that fails counts as one that succeeds; one that is given up by the caller does not count.
#[derive(Debug, Default)]
pub struct RequestDurations {
    /// GETs of whole objects.
    pub get: Durations,
    /// Ranged GETs, to their last byte.
    pub get_range: Durations,
    /// HEADs.
    pub head: Durations,
    /// PUTs.
    pub put: Durations,
    /// DeleteObjects.
    pub delete: Durations,
    /// LISTs.
    pub list: Durations,
    /// Ranged GETs of readers, to their first byte.
    pub first_byte: Durations,
}

impl RequestDurations {
    /// Name and counts of every operation.
    #[must_use]
    pub fn snapshot(&self) -> Vec<(&'static str, Snapshot)> {
        [
            ("get", &self.get),
            ("get_range", &self.get_range),
            ("head", &self.head),
            ("put", &self.put),
            ("delete", &self.delete),
            ("list", &self.list),
            ("first_byte", &self.first_byte),
        ]
        .map(|(name, durations)| (name, durations.snapshot()))
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_bucket_of_the_first_bound_that_is_not_below_it() {
        let durations = Durations::default();
        for millis in [0, 10, 11, 30_000, 30_001] {
            durations.observe(Duration::from_millis(millis));
        }
        let Snapshot {
            buckets,
            sum_micros,
        } = durations.snapshot();
        assert_eq!(buckets, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(sum_micros, 60_022_000);
    }
}
