//! How much of a manifest's beginning the user no longer wants.

use log_format::manifest::{Entry, Kind};

/// The user's retention of the stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetentionBound {
    /// Keep at most this many bytes.
    pub max_bytes: Option<u64>,
    /// Drop what is older than this.
    pub max_age_ms: Option<u64>,
}

/// A timestamp that is further ahead than this was given by a clock that was wrong. One that is less is waited for.
const FUTURE_MS: i64 = 15 * 60 * 1_000;

/// How many of `entries`, from the first, the bound lets go: the most that any of its parts does.
///
/// `later` follows them; `total_bytes` is the size of both. Stops at the first group, whose parts are not known here.
/// May be all of them by size. By age the newest fragment stays, as osiris keeps its last segment: if `later` is empty, that is
/// the last of `entries`. Without the wall clock, age says nothing.
///
/// A timestamp from the future says nothing either: such a fragment is as old as the first timestamp after it that can be right.
#[must_use]
pub fn leading_to_drop<'a>(
    entries: &'a [Entry],
    later: impl IntoIterator<Item = &'a Entry>,
    total_bytes: u128,
    bound: RetentionBound,
    wall_now_ms: Option<i64>,
) -> usize {
    let length = entries
        .iter()
        .take_while(|entry| entry.kind == Kind::Fragment)
        .count();
    let (fragments, others) = entries.split_at(length);
    let by_bytes = bound.max_bytes.map_or(0, |max_bytes| {
        let mut left = total_bytes;
        fragments
            .iter()
            .take_while(|entry| {
                let over = left > u128::from(max_bytes);
                left = left.saturating_sub(u128::from(entry.size_bytes));
                over
            })
            .count()
    });
    let by_age = wall_now_ms.map_or(0, |now_ms| {
        too_old(fragments, others.iter().chain(later), bound, now_ms)
    });
    by_bytes.max(by_age)
}

fn too_old<'a>(
    fragments: &[Entry],
    later: impl Iterator<Item = &'a Entry>,
    bound: RetentionBound,
    now_ms: i64,
) -> usize {
    let is_expired = |timestamp_ms| expired(timestamp_ms, bound, Some(now_ms));
    let is_possible = |timestamp_ms: &i64| !is_from_the_future(*timestamp_ms, now_ms);
    // The fragments before this number are too old; those between it and the current one say nothing themselves.
    let mut certain = 0;
    for (number, entry) in fragments.iter().enumerate() {
        let stamps = [
            (entry.first_timestamp_ms, number),
            (entry.last_timestamp_ms, number + 1),
        ];
        for (timestamp_ms, reaches) in stamps {
            if reaches <= certain || !is_possible(&timestamp_ms) {
                continue;
            }
            if !is_expired(timestamp_ms) {
                return certain;
            }
            certain = reaches;
        }
    }
    let mut later = later.peekable();
    if later.peek().is_none() {
        return certain.min(fragments.len().saturating_sub(1));
    }
    if certain < fragments.len() {
        let after = later
            .flat_map(|entry| [entry.first_timestamp_ms, entry.last_timestamp_ms])
            .find(is_possible);
        if after.is_some_and(is_expired) {
            return fragments.len();
        }
    }
    certain
}

/// Whether no clock that is right can have given this timestamp by now.
#[must_use]
pub fn is_from_the_future(timestamp_ms: i64, now_ms: i64) -> bool {
    timestamp_ms > now_ms.saturating_add(FUTURE_MS)
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
        leading_to_drop(&root.entries, [], root.total_size_bytes, bound, now)
    }

    /// Fragments with these first and last timestamps, of which the last `later` only follow.
    fn drop_by_age(stamps: &[(i64, i64)], later: usize, max_age_ms: u64, now: i64) -> usize {
        let mut root = root_of(0, &vec![1; stamps.len()]);
        for (entry, (first, last)) in root.entries.iter_mut().zip(stamps) {
            (entry.first_timestamp_ms, entry.last_timestamp_ms) = (*first, *last);
        }
        let (entries, later) = root.entries.split_at(stamps.len() - later);
        leading_to_drop(
            entries,
            later,
            root.total_size_bytes,
            age(max_age_ms),
            Some(now),
        )
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
        assert_eq!(
            drop_of(&[5, 5, 5], age(0), Some(100)),
            2,
            "the newest stays"
        );
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
        assert_eq!(drop_of(&[5, 5, 5], both, Some(100)), 2);
        assert_eq!(drop_of(&[5, 5, 5], RetentionBound::default(), Some(100)), 0);
    }

    #[test]
    fn a_group_stops_it() {
        let mut root = root_of(0, &[5, 5, 5]);
        root.entries[1].kind = Kind::Group;
        assert_eq!(leading_to_drop(&root.entries, [], 1000, bytes(0), None), 1);
        assert_eq!(
            leading_to_drop(&root.entries, [], 1000, age(0), Some(100)),
            1,
            "what is in the group is newer"
        );
    }

    #[test]
    fn by_age_the_newest_fragment_stays_and_by_size_it_need_not() {
        assert_eq!(drop_of(&[5], age(0), Some(i64::MAX)), 0);
        assert_eq!(drop_of(&[5], bytes(0), None), 1);
        assert_eq!(drop_by_age(&[(0, 1)], 0, 0, 100), 0);
        assert_eq!(drop_by_age(&[(0, 1), (2, 3)], 1, 0, 100), 1);
        assert_eq!(drop_of(&[], age(0), Some(100)), 0);
    }

    const FAR: i64 = 1 << 50;

    #[test]
    fn a_record_from_the_future_does_not_stop_what_is_behind_it() {
        let stamps = [(0, 10), (11, FAR), (20, 30), (31, 40)];
        assert_eq!(drop_by_age(&stamps, 0, 100, 110), 0);
        assert_eq!(drop_by_age(&stamps, 0, 100, 111), 1);
        assert_eq!(
            drop_by_age(&stamps, 0, 100, 120),
            1,
            "as old as what comes next"
        );
        assert_eq!(drop_by_age(&stamps, 0, 100, 121), 2);
        assert_eq!(drop_by_age(&stamps, 0, 100, 131), 3);
        assert_eq!(drop_by_age(&stamps, 0, 100, 999), 3, "the newest stays");
    }

    #[test]
    fn a_run_of_them_is_as_old_as_the_first_timestamp_behind_it() {
        let stamps = [(0, FAR), (FAR, FAR), (FAR, 30), (31, 40), (41, 50)];
        assert_eq!(drop_by_age(&stamps, 0, 100, 130), 0);
        assert_eq!(drop_by_age(&stamps, 0, 100, 131), 3);
        for later in 1..=4 {
            let here = stamps.len() - later;
            assert_eq!(
                drop_by_age(&stamps, later, 100, 131),
                here.min(3),
                "also if that is elsewhere"
            );
        }
        assert_eq!(drop_by_age(&stamps[..2], 0, 100, 9_999), 0, "nothing says");
        assert_eq!(drop_by_age(&stamps[..2], 1, 100, 9_999), 0, "nothing says");
    }

    #[test]
    fn a_timestamp_that_is_a_little_ahead_is_waited_for() {
        let stamps = [(0, 200), (20, 30), (31, 40)];
        assert_eq!(drop_by_age(&stamps, 0, 10, 150), 0);
        assert_eq!(drop_by_age(&stamps, 0, 10, 211), 2);
    }

    proptest! {
        #[test]
        fn never_more_than_needed(sizes in prop::collection::vec(1u64..10, 0..20), max in 0u64..250) {
            let root = root_of(0, &sizes);
            let count = leading_to_drop(&root.entries, [], root.total_size_bytes, bytes(max), None);
            let left = |count: usize| 10 * (sizes.len() - count) as u64;
            prop_assert!(left(count) <= max || count == sizes.len());
            prop_assert!(count == 0 || left(count - 1) > max);
        }

        /// Whatever clocks that are right or ahead have stamped, nothing younger than its bound goes, and the newest stays.
        #[test]
        fn nothing_goes_early(
            pieces in prop::collection::vec((0i64..1_000, prop::option::of(FUTURE_MS + 50_000..1 << 50), prop::option::of(FUTURE_MS + 50_000..1 << 50)), 1..20),
            later in 0usize..20,
            max_age_ms in 0u64..5_000,
            now in 0i64..25_000,
        ) {
            let mut clock = 0;
            let mut truth = Vec::new();
            let mut stamps = Vec::new();
            for (length, first_ahead, last_ahead) in pieces {
                let (first, last) = (clock, clock + length);
                truth.push(last);
                stamps.push((first + first_ahead.unwrap_or(0), last + last_ahead.unwrap_or(0)));
                clock = last;
            }
            let later = later.min(stamps.len() - 1);
            let count = drop_by_age(&stamps, later, max_age_ms, now);
            prop_assert!(count < stamps.len());
            for last in &truth[..count] {
                prop_assert!(last + (max_age_ms as i64) < now);
            }
            // And what goes is not held up: everything goes that is before a timestamp that is right and too old.
            let right = stamps.iter().take(stamps.len() - later).rposition(|(_, last)| last + (max_age_ms as i64) < now);
            let newest = stamps.len() - 1;
            prop_assert!(count >= right.map_or(0, |at| (at + 1).min(newest)));
        }
    }
}
