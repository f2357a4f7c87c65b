//! How much of a manifest's beginning the user no longer wants.

use log_format::manifest::{Entry, Kind};

use crate::replica_reader::RetentionBound;

/// How many of `entries`, from the first, the bound lets go: the most that any of its parts does.
///
/// `total_bytes` is the size of all of them and of what follows. Stops at the first group, whose parts are not known here.
/// May be all of them. Without the wall clock, age says nothing.
#[must_use]
pub fn leading_to_drop(
    entries: &[Entry],
    total_bytes: u128,
    bound: RetentionBound,
    wall_now_ms: Option<i64>,
) -> usize {
    let fragments = || {
        entries
            .iter()
            .take_while(|entry| entry.kind == Kind::Fragment)
    };
    let by_bytes = bound.max_bytes.map_or(0, |max_bytes| {
        let mut left = total_bytes;
        fragments()
            .take_while(|entry| {
                let over = left > u128::from(max_bytes);
                left = left.saturating_sub(u128::from(entry.size_bytes));
                over
            })
            .count()
    });
    let by_age = fragments()
        .take_while(|entry| expired(entry.last_timestamp_ms, bound, wall_now_ms))
        .count();
    by_bytes.max(by_age)
}

/// Wall-clock time from which on a fragment with this last timestamp is too old; `None` if age does not matter.
#[must_use]
pub fn expiry_ms(last_timestamp_ms: i64, bound: RetentionBound) -> Option<i64> {
    let age = i64::try_from(bound.max_age_ms?).unwrap_or(i64::MAX);
    last_timestamp_ms.checked_add(age)?.checked_add(1)
}

/// Whether a fragment with this last timestamp is too old. Without the wall clock, nothing is.
#[must_use]
pub fn expired(last_timestamp_ms: i64, bound: RetentionBound, wall_now_ms: Option<i64>) -> bool {
    wall_now_ms
        .is_some_and(|now| expiry_ms(last_timestamp_ms, bound).is_some_and(|expiry| expiry <= now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::edit::tests::root_of;
    use proptest::prelude::*;

    fn bytes(max_bytes: u64) -> RetentionBound {
        RetentionBound {
            max_bytes: Some(max_bytes),
            max_age_ms: None,
        }
    }

    fn age(max_age_ms: u64) -> RetentionBound {
        RetentionBound {
            max_bytes: None,
            max_age_ms: Some(max_age_ms),
        }
    }

    fn drop_of(lengths: &[u64], bound: RetentionBound, now: Option<i64>) -> usize {
        let root = root_of(0, lengths);
        leading_to_drop(&root.entries, root.total_size_bytes, bound, now)
    }

    #[test]
    fn bytes_drop_the_oldest_until_the_rest_fits() {
        assert_eq!(drop_of(&[5, 5, 5], bytes(30), None), 0);
        assert_eq!(drop_of(&[5, 5, 5], bytes(29), None), 1);
        assert_eq!(drop_of(&[5, 5, 5], bytes(0), None), 3);
    }

    #[test]
    fn age_drops_what_ended_before_the_cutoff() {
        // Last timestamps are 4, 9, 14.
        assert_eq!(drop_of(&[5, 5, 5], age(10), Some(14)), 0);
        assert_eq!(drop_of(&[5, 5, 5], age(10), Some(15)), 1);
        assert_eq!(drop_of(&[5, 5, 5], age(0), Some(100)), 3);
        assert_eq!(drop_of(&[5, 5, 5], age(0), None), 0, "no clock, no age");
        assert_eq!(drop_of(&[5, 5, 5], age(u64::MAX), Some(i64::MAX)), 0);
    }

    #[test]
    fn the_stricter_part_decides() {
        let both = RetentionBound {
            max_bytes: Some(10),
            max_age_ms: Some(10),
        };
        assert_eq!(drop_of(&[5, 5, 5], both, Some(15)), 2);
        assert_eq!(drop_of(&[5, 5, 5], both, Some(100)), 3);
        assert_eq!(drop_of(&[5, 5, 5], RetentionBound::default(), Some(100)), 0);
    }

    #[test]
    fn a_group_stops_it() {
        let mut root = root_of(0, &[5, 5, 5]);
        root.entries[1].kind = Kind::Group;
        assert_eq!(leading_to_drop(&root.entries, 1000, bytes(0), None), 1);
    }

    proptest! {
        #[test]
        fn never_more_than_needed(sizes in prop::collection::vec(1u64..10, 0..20), max in 0u64..250) {
            let root = root_of(0, &sizes);
            let count = leading_to_drop(&root.entries, root.total_size_bytes, bytes(max), None);
            let left = |count: usize| 10 * (sizes.len() - count) as u64;
            prop_assert!(left(count) <= max || count == sizes.len());
            prop_assert!(count == 0 || left(count - 1) > max);
        }
    }
}
