//! Edits: the one way in which a manifest changes. An edit takes `length` entries at `position` out, puts `entries` in their
//! place, and says what becomes of the range and of the total.
//!
//! Growing at the end, replacing a run by the group that holds it, and shrinking at the beginning are the only edits there are;
//! each is linear in what it touches, not in the manifest.

use log_format::manifest::{
    Entry, Group, Kind, MAX_ENTRY_SIZE_BYTES, MAX_TOTAL_SIZE_BYTES, NO_TIMESTAMP, Root,
};

use crate::fragment_assembly::FragmentPlan;
/// Why an edit is refused; the manifest is as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The fragment does not start where the manifest ends: applying it would make a hole.
    #[error("fragment at {found} does not continue the manifest at {expected}")]
    NotContiguous {
        /// The manifest's next offset.
        expected: u64,
        /// The fragment's first offset.
        found: u64,
    },
    /// The fragment has no records, or a size that an entry cannot tell.
    #[error("fragment at {0} has an impossible range or size")]
    Impossible(u64),
    /// More entries than there are, or a group among them, whose size nobody knows here.
    #[error("the leading {0} entries cannot be dropped")]
    NotDroppable(usize),
    /// The run that a group was made of is not there.
    #[error("the manifest has no run at entry {0} that the group could replace")]
    NotReplaceable(usize),
    /// The manifest would not be well-formed after it.
    #[error("an edit at entry {0} would break the manifest")]
    Malformed(usize),
}

/// Where a manifest begins: its oldest fragment that is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beginning {
    /// Its first offset.
    pub first_offset: u64,
    /// Timestamp of its first chunk.
    pub first_timestamp_ms: i64,
    /// Timestamp of its last chunk; [`NO_TIMESTAMP`] if that is inside a group and not known.
    pub first_last_timestamp_ms: i64,
}

impl Beginning {
    /// Where this one begins.
    #[must_use]
    pub fn of(root: &Root) -> Self {
        Self {
            first_offset: root.first_offset,
            first_timestamp_ms: root.first_timestamp_ms,
            first_last_timestamp_ms: root.first_last_timestamp_ms,
        }
    }

    /// At this fragment.
    #[must_use]
    pub fn at(fragment: &Entry) -> Self {
        Self {
            first_offset: fragment.first_offset,
            first_timestamp_ms: fragment.first_timestamp_ms,
            first_last_timestamp_ms: match fragment.kind {
                Kind::Fragment => fragment.last_timestamp_ms,
                Kind::Group | Kind::KiloGroup | Kind::MegaGroup => NO_TIMESTAMP,
            },
        }
    }

    /// Of an empty manifest.
    #[must_use]
    pub fn nothing_at(offset: u64) -> Self {
        Self {
            first_offset: offset,
            first_timestamp_ms: NO_TIMESTAMP,
            first_last_timestamp_ms: NO_TIMESTAMP,
        }
    }
}

/// One change of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// Number of the first entry that is taken out.
    pub position: usize,
    /// How many are taken out.
    pub length: usize,
    /// What comes in their place.
    pub entries: Vec<Entry>,
    /// Where the manifest begins afterwards.
    pub beginning: Beginning,
    /// Where it ends afterwards.
    pub next_offset: u64,
    /// The sizes of all its fragments afterwards.
    pub total_size_bytes: u128,
}

/// Applies an edit and gives back what it took out.
pub fn apply(root: &mut Root, edit: Edit) -> Result<Vec<Entry>, EditError> {
    if !fits(root, &edit) {
        return Err(EditError::Malformed(edit.position));
    }
    root.first_offset = edit.beginning.first_offset;
    root.first_timestamp_ms = edit.beginning.first_timestamp_ms;
    root.first_last_timestamp_ms = edit.beginning.first_last_timestamp_ms;
    root.next_offset = edit.next_offset;
    root.total_size_bytes = edit.total_size_bytes;
    let range = edit.position..edit.position + edit.length;
    Ok(root.entries.splice(range, edit.entries).collect())
}

/// Whether a well-formed manifest stays so.
fn fits(root: &Root, edit: &Edit) -> bool {
    let Some(end) = edit.position.checked_add(edit.length) else {
        return false;
    };
    let (Some(before), Some(after)) = (root.entries.get(..edit.position), root.entries.get(end..))
    else {
        return false;
    };
    let neighbours = before
        .last()
        .into_iter()
        .chain(&edit.entries)
        .chain(after.first());
    let mut offsets = neighbours.clone().map(|entry| entry.first_offset);
    let ascending = match offsets.next() {
        Some(first) => offsets
            .try_fold(first, |last, next| (last < next).then_some(next))
            .is_some(),
        None => true,
    };
    let leading = before.first().or(edit.entries.first()).or(after.first());
    let trailing = after.last().or(edit.entries.last()).or(before.last());
    let beginning = edit.beginning.first_offset;
    let range = match (leading, trailing) {
        (Some(leading), Some(trailing)) => {
            let starts = match leading.kind {
                Kind::Fragment => leading.first_offset == beginning,
                Kind::Group | Kind::KiloGroup | Kind::MegaGroup => {
                    leading.first_offset <= beginning
                }
            };
            starts && trailing.first_offset < edit.next_offset && beginning < edit.next_offset
        }
        _ => beginning == edit.next_offset && edit.total_size_bytes == 0,
    };
    let sizes = edit.entries.iter().all(|entry| match entry.kind {
        Kind::Fragment => entry.size_bytes <= MAX_ENTRY_SIZE_BYTES,
        Kind::Group | Kind::KiloGroup | Kind::MegaGroup => entry.size_bytes == 0,
    });
    ascending && range && sizes && edit.total_size_bytes <= MAX_TOTAL_SIZE_BYTES
}

/// Appends a fragment that is in the bucket under `uid`.
///
/// The first fragment of an empty manifest must continue it, too: a fragment that overtook its predecessors would otherwise
/// become the beginning of the stream.
pub fn append(root: &mut Root, plan: &FragmentPlan, uid: u32) -> Result<(), EditError> {
    if plan.first_offset != root.next_offset {
        return Err(EditError::NotContiguous {
            expected: root.next_offset,
            found: plan.first_offset,
        });
    }
    let entry = Entry {
        first_offset: plan.first_offset,
        first_timestamp_ms: plan.first_timestamp_ms,
        last_timestamp_ms: plan.last_timestamp_ms,
        kind: Kind::Fragment,
        size_bytes: plan.size_bytes,
        uid,
    };
    let edit = Edit {
        position: root.entries.len(),
        length: 0,
        entries: vec![entry],
        beginning: if root.is_empty() {
            Beginning::at(&entry)
        } else {
            Beginning::of(root)
        },
        next_offset: plan.next_offset,
        total_size_bytes: root
            .total_size_bytes
            .saturating_add(u128::from(plan.size_bytes)),
    };
    match apply(root, edit) {
        Ok(_) => Ok(()),
        Err(_) => Err(EditError::Impossible(plan.first_offset)),
    }
}

/// Replaces the run of entries at `position` by the group that was made of it and is in the bucket under `uid`.
pub fn replace(
    root: &mut Root,
    position: usize,
    group: &Group,
    uid: u32,
) -> Result<Entry, EditError> {
    let refused = EditError::NotReplaceable(position);
    let length = group.entries.len();
    let run = position
        .checked_add(length)
        .and_then(|end| root.entries.get(position..end));
    if run != Some(&group.entries) || group.check().is_err() {
        return Err(refused);
    }
    let entry = Entry {
        first_offset: group.first_offset,
        first_timestamp_ms: group.first_timestamp_ms,
        last_timestamp_ms: group.last_timestamp_ms(),
        kind: group.kind,
        size_bytes: 0,
        uid,
    };
    let edit = Edit {
        position,
        length,
        entries: vec![entry],
        beginning: Beginning::of(root),
        next_offset: root.next_offset,
        total_size_bytes: root.total_size_bytes,
    };
    apply(root, edit).map(|_| entry).map_err(|_| refused)
}

/// Drops the `count` leading entries, which must be fragments, and gives them back. Dropping all leaves an empty manifest
/// that starts and ends at its next offset, so that tiering goes on where it was.
pub fn drop_leading(root: &mut Root, count: usize) -> Result<Vec<Entry>, EditError> {
    let refused = EditError::NotDroppable(count);
    let leading = root.entries.get(..count).ok_or(refused)?;
    if leading.iter().any(|entry| entry.kind != Kind::Fragment) {
        return Err(refused);
    }
    let dropped_bytes: u128 = leading
        .iter()
        .map(|entry| u128::from(entry.size_bytes))
        .sum();
    let edit = Edit {
        position: 0,
        length: count,
        entries: Vec::new(),
        beginning: match root.entries.get(count) {
            Some(first) => Beginning::at(first),
            None => Beginning::nothing_at(root.next_offset),
        },
        next_offset: root.next_offset,
        total_size_bytes: root
            .total_size_bytes
            .checked_sub(dropped_bytes)
            .ok_or(refused)?,
    };
    apply(root, edit).map_err(|_| refused)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::manifest::invariants;
    use proptest::prelude::*;

    /// A plan with nothing to send, for tests of what happens around it.
    pub(crate) fn plan(first_offset: u64, next_offset: u64, size_bytes: u64) -> FragmentPlan {
        FragmentPlan {
            first_offset,
            next_offset,
            first_timestamp_ms: first_offset as i64,
            last_timestamp_ms: next_offset as i64 - 1,
            size_bytes,
            payload_bytes: size_bytes,
            chunk_count: 1,
            spans: Vec::new(),
            index: Vec::new(),
            chunks_crc: 0,
        }
    }

    pub(crate) fn root_of(start: u64, lengths: &[u64]) -> Root {
        let mut root = Root::empty_at(start);
        for (uid, length) in lengths.iter().enumerate() {
            let fragment = plan(root.next_offset, root.next_offset + length, 10);
            append(&mut root, &fragment, uid as u32).unwrap();
        }
        root
    }

    #[test]
    fn bug_2_a_fragment_that_overtook_its_predecessors_is_refused_on_an_empty_manifest_too() {
        let mut root = Root::empty_at(0);
        let error = EditError::NotContiguous {
            expected: 0,
            found: 10,
        };
        assert_eq!(append(&mut root, &plan(10, 20, 5), 1), Err(error));
        assert_eq!(root, Root::empty_at(0));
    }

    #[test]
    fn impossible_fragments_are_refused() {
        let mut root = Root::empty_at(5);
        assert_eq!(
            append(&mut root, &plan(5, 5, 1), 1),
            Err(EditError::Impossible(5))
        );
        assert_eq!(
            append(&mut root, &plan(5, 6, 1 << 40), 1),
            Err(EditError::Impossible(5))
        );
        assert_eq!(root, Root::empty_at(5));
    }

    #[test]
    fn dropping_everything_keeps_the_place() {
        let mut root = root_of(5, &[10, 10]);
        let dropped = drop_leading(&mut root, 2).unwrap();
        assert_eq!(
            dropped
                .iter()
                .map(|entry| entry.first_offset)
                .collect::<Vec<_>>(),
            [5, 15]
        );
        assert_eq!(root, Root::empty_at(25));
        assert_eq!(drop_leading(&mut root, 1), Err(EditError::NotDroppable(1)));
    }

    #[test]
    fn groups_are_not_dropped_here() {
        let mut root = root_of(5, &[10, 10]);
        root.entries[1].kind = Kind::Group;
        let before = root.clone();
        assert_eq!(drop_leading(&mut root, 2), Err(EditError::NotDroppable(2)));
        assert_eq!(root, before);
        drop_leading(&mut root, 1).unwrap();
        assert_eq!(root.first_last_timestamp_ms, NO_TIMESTAMP);
    }

    proptest! {
        #[test]
        fn every_edit_keeps_the_manifest_well_formed(start in 0u64..1000, edits in prop::collection::vec((any::<bool>(), 1u64..50, 0u64..1000), 0..60)) {
            let mut root = Root::empty_at(start);
            for (grow, length, size) in edits {
                let before = root.clone();
                if grow {
                    let fragment = plan(root.next_offset, root.next_offset + length, size);
                    prop_assert!(append(&mut root, &fragment, 0).is_ok());
                    prop_assert!(invariants::contiguous_advance(&before, &root));
                } else {
                    let count = (length as usize).min(root.entries.len());
                    prop_assert_eq!(drop_leading(&mut root, count).unwrap(), &before.entries[..count]);
                }
                prop_assert_eq!(root.check(), Ok(()));
                prop_assert!(invariants::prefix_monotonicity(&before, &root));
                prop_assert!(invariants::accounting(&root) && invariants::ordering(&root));
            }
        }
    }
}
