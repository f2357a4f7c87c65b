//! What must hold between the parts, where no single machine can see it: one predicate per named invariant, computed from what
//! the nodes, the bucket and the metadata store have. The world asserts them at every step that could break them.

use log_format::manifest::Root;
use tiering_core::manifest::invariants;

/// Replica prefix: what a node believes is a manifest that was persisted before, or now: older perhaps, never different. Neither
/// of its ends is past what is persisted, and what both name at one offset is one object, or a group made of it.
#[must_use]
pub fn replica_prefix(known: &Root, persisted: &Root) -> bool {
    invariants::prefix_monotonicity(known, persisted) && invariants::immutability(known, persisted)
}

/// Anchor ordering: nothing is in the bucket under a stream that has no anchor, unless it is deleted and waits for its sweep.
#[must_use]
pub const fn anchor_ordering(objects: usize, anchor: bool, deleted: bool) -> bool {
    objects == 0 || anchor || deleted
}

/// Anchor removal: an anchor that was there goes with its stream, and in no other way.
#[must_use]
pub const fn anchor_removal(was_there: bool, anchor: bool, deleted: bool) -> bool {
    !was_there || anchor || deleted
}

/// Retention by age: what goes was written longer ago than its bound, by a clock that says no more than `latest_ms`.
#[must_use]
pub const fn old_enough(written_ms: i64, latest_ms: i64, max_age_ms: u64) -> bool {
    latest_ms.saturating_sub(written_ms) > max_age_ms.cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use log_format::manifest::{Entry, Kind};

    fn root(offsets: &[u64], next_offset: u64) -> Root {
        let entries = offsets.iter().map(|offset| Entry {
            first_offset: *offset,
            first_timestamp_ms: 1,
            last_timestamp_ms: 1,
            kind: Kind::Fragment,
            size_bytes: 1,
            uid: *offset as u32,
        });
        Root {
            first_offset: offsets.first().copied().unwrap_or(next_offset),
            next_offset,
            entries: entries.collect(),
            ..Root::empty_at(0)
        }
    }

    #[test]
    fn a_replica_that_believes_something_else_is_noticed() {
        let persisted = root(&[10, 20, 30], 40);
        assert!(replica_prefix(&persisted, &persisted));
        assert!(replica_prefix(&root(&[0, 10, 20], 30), &persisted));
        assert!(
            !replica_prefix(&root(&[10, 20, 30], 41), &persisted),
            "newer"
        );
        assert!(!replica_prefix(&root(&[20, 30], 40), &persisted), "less");
        let mut other = root(&[10, 20], 30);
        other.entries[1].uid = 7;
        assert!(!replica_prefix(&other, &persisted), "another object");
    }

    #[test]
    fn what_goes_too_early_is_noticed() {
        assert!(!old_enough(1_000, 1_500, 500) && old_enough(1_000, 1_501, 500));
    }

    #[test]
    fn an_anchor_that_is_missing_is_noticed() {
        assert!(!anchor_ordering(1, false, false));
        assert!(anchor_ordering(0, false, false) && anchor_ordering(1, false, true));
        assert!(!anchor_removal(true, false, false));
        assert!(anchor_removal(true, false, true) && anchor_removal(false, false, false));
    }
}
