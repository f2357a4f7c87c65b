//! Since when streams have records that are not durable, so that the worst of the node is found without asking each.
//!
//! Owns one time for each stream that has such records. Does not own how a stream finds its own.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Times, and how many streams have each. At most one for each stream of the node.
#[derive(Debug, Default)]
pub struct Pending(Mutex<BTreeMap<i64, usize>>);

impl Pending {
    /// One stream had `before` and has `now`.
    pub fn replace(&self, before: Option<i64>, now: Option<i64>) {
        if before == now {
            return;
        }
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(time) = now {
            *times.entry(time).or_insert(0) += 1;
        }
        if let Some(time) = before
            && let Some(streams) = times.get_mut(&time)
        {
            *streams = streams.saturating_sub(1);
            if *streams == 0 {
                times.remove(&time);
            }
        }
    }

    /// Age of the oldest; 0 if there is none, or if it is from the future.
    #[must_use]
    pub fn lag_ms(&self, now_ms: i64) -> i64 {
        let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        times
            .first_key_value()
            .map_or(0, |(oldest, _)| now_ms.saturating_sub(*oldest).max(0))
    }
}
