//! What must hold of manifests, one predicate per named invariant. Tests assert them after every step.

use log_format::manifest::{Kind, Root};

/// Ordering: entries strictly ascend and lie in `[first, next)`; only a leading group may reach below it.
#[must_use]
pub fn ordering(root: &Root) -> bool {
    let ascending = root
        .entries
        .windows(2)
        .all(|pair| pair[0].first_offset < pair[1].first_offset);
    let start = root.entries.first().is_none_or(|first| match first.kind {
        Kind::Fragment => first.first_offset == root.first_offset,
        Kind::Group | Kind::KiloGroup | Kind::MegaGroup => first.first_offset <= root.first_offset,
    });
    let end = root
        .entries
        .last()
        .is_none_or(|last| last.first_offset < root.next_offset);
    ascending && start && end && root.first_offset <= root.next_offset
}

/// Coverage: there are entries exactly if the range is not empty. As an entry ends where the next one starts, there is no hole.
#[must_use]
pub fn coverage(root: &Root) -> bool {
    root.is_empty() == (root.first_offset == root.next_offset)
}

/// Accounting: the total is the sum of the sizes, if every size is in the root.
#[must_use]
pub fn accounting(root: &Root) -> bool {
    let sum: u128 = root
        .entries
        .iter()
        .map(|entry| u128::from(entry.size_bytes))
        .sum();
    let flat = root
        .entries
        .iter()
        .all(|entry| entry.kind == Kind::Fragment);
    if flat {
        sum == root.total_size_bytes
    } else {
        sum <= root.total_size_bytes
    }
}

/// Contiguous advance: what is new starts exactly where the old manifest ended.
#[must_use]
pub fn contiguous_advance(before: &Root, after: &Root) -> bool {
    let appended = after
        .entries
        .iter()
        .find(|entry| entry.first_offset >= before.next_offset);
    match appended {
        Some(entry) => {
            entry.first_offset == before.next_offset && after.next_offset > before.next_offset
        }
        None => after.next_offset == before.next_offset,
    }
}

/// Prefix monotonicity: without a recovery, neither end of the range ever moves back.
#[must_use]
pub fn prefix_monotonicity(before: &Root, after: &Root) -> bool {
    before.first_offset <= after.first_offset && before.next_offset <= after.next_offset
}

/// Immutability: an entry that both name at the same offset is the same object.
#[must_use]
pub fn immutability(before: &Root, after: &Root) -> bool {
    after.entries.iter().all(|entry| {
        match before
            .entries
            .binary_search_by_key(&entry.first_offset, |old| old.first_offset)
        {
            Ok(at) => before
                .entries
                .get(at)
                .is_some_and(|old| old == entry || old.kind < entry.kind),
            Err(_) => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::edit::tests::root_of;

    #[test]
    fn each_predicate_can_fail() {
        let good = root_of(0, &[5, 5, 5]);
        assert!(ordering(&good) && coverage(&good) && accounting(&good));
        assert!(immutability(&good, &good) && contiguous_advance(&good, &good));

        let mut bad = good.clone();
        bad.entries.swap(0, 1);
        assert!(!ordering(&bad));
        let mut bad = good.clone();
        bad.entries.clear();
        assert!(!coverage(&bad));
        let mut bad = good.clone();
        bad.total_size_bytes += 1;
        assert!(!accounting(&bad));
        let mut bad = good.clone();
        bad.entries[1].uid = 99;
        assert!(!immutability(&good, &bad));
        let short = root_of(0, &[5]);
        let mut hole = short.clone();
        hole.entries.push(good.entries[2]);
        hole.next_offset = 15;
        assert!(!contiguous_advance(&short, &hole));
        assert!(contiguous_advance(&short, &good));
        assert!(!prefix_monotonicity(&good, &short));
    }
}
