//! Cutting a manifest back to an offset, because the log has another end than it.
//!
//! Groups that reach past the offset are opened: what they hold takes their place in the root, until only fragments are past it.
//! So the sizes of what goes are known, and no group is left that names more than it is there for. What is read is one path from
//! root to leaf and the groups past the offset: as much as was lost, which is little.

use log_format::manifest::{Entry, Group, Kind, Root};

use super::trim;

/// A manifest that is being cut back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutBack {
    root: Root,
    next_offset: u64,
    /// Chunk bytes of what was taken out.
    dropped_bytes: u128,
}

impl CutBack {
    /// Begins to cut a manifest back to `next_offset`.
    #[must_use]
    pub fn new(root: &Root, next_offset: u64) -> Self {
        Self {
            root: root.clone(),
            next_offset,
            dropped_bytes: 0,
        }
    }

    /// Offset that it is cut back to.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// Goes on as far as is known: the part below the offset, or the group that has to be [opened](Self::open) first. The last
    /// fragment that is left may hold more than that: its object stays as it is.
    pub fn step(&mut self) -> Result<Root, Entry> {
        if self.next_offset <= self.root.first_offset {
            return Ok(Root::empty_at(self.next_offset));
        }
        let mut end_offset = self.root.next_offset;
        while let Some(last) = self.root.entries.last().copied() {
            if end_offset <= self.next_offset {
                break;
            }
            match last.kind {
                Kind::Fragment if last.first_offset < self.next_offset => break,
                Kind::Fragment => {
                    self.dropped_bytes += u128::from(last.size_bytes);
                    self.root.entries.pop();
                    self.root.next_offset = last.first_offset;
                    end_offset = last.first_offset;
                }
                Kind::Group | Kind::KiloGroup | Kind::MegaGroup => return Err(last),
            }
        }
        if self.root.entries.is_empty() {
            return Ok(Root::empty_at(self.next_offset));
        }
        Ok(Root {
            next_offset: self.next_offset.min(end_offset),
            total_size_bytes: self
                .root
                .total_size_bytes
                .saturating_sub(self.dropped_bytes),
            ..self.root.clone()
        })
    }

    /// The group that `step` asked for. An error means that it is another one.
    pub fn open(&mut self, group: &Group) -> Result<(), &'static str> {
        let Some(last) = self.root.entries.last().copied() else {
            return Err("no group was asked for");
        };
        trim::check(&last, group)?;
        // Retention has taken out what ends below the first offset.
        let first_offset = self.root.first_offset;
        let gone = group
            .entries
            .partition_point(|entry| entry.first_offset <= first_offset)
            .saturating_sub(1);
        self.root.entries.pop();
        self.root
            .entries
            .extend(group.entries.iter().skip(gone).copied());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::trim::tests::Forest;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_tree_is_cut_back_as_a_flat_list_is(threshold in 2usize..6, lengths in prop::collection::vec((1u64..4, 0u64..50), 1..120), expired in 0usize..30, at in 0u64..400) {
            let mut forest = Forest::new();
            for (length, size) in lengths {
                forest.append(length, size);
                forest.rebalance(threshold);
            }
            forest.expire(expired);
            let mut cut = CutBack::new(&forest.root, at);
            let mut reads = 0;
            let root = loop {
                match cut.step() {
                    Ok(root) => break root,
                    Err(group) => {
                        reads += 1;
                        cut.open(&forest.group(group.uid)).unwrap();
                    }
                }
            };
            prop_assert_eq!(root.check(), Ok(()));
            let mut expected = forest.leaves();
            expected.retain(|leaf| leaf.first_offset < at && at > forest.root.first_offset);
            let total: u128 = expected.iter().map(|entry| u128::from(entry.size_bytes)).sum();
            prop_assert_eq!(root.total_size_bytes, total, "accounting");
            prop_assert_eq!(root.next_offset, if expected.is_empty() { at } else { at.min(forest.root.next_offset) });
            prop_assert_eq!(forest.leaves_of(&root), expected);
            prop_assert!(at < forest.root.next_offset || reads == 0);
        }
    }

    #[test]
    fn only_the_group_that_was_asked_for_is_opened() {
        let mut forest = Forest::new();
        for _ in 0..4 {
            forest.append(10, 10);
        }
        forest.rebalance(4);
        let mut cut = CutBack::new(&forest.root, 15);
        let entry = cut.step().unwrap_err();
        let group = forest.group(entry.uid);
        let other = Group {
            first_offset: 3,
            ..group.clone()
        };
        assert!(cut.open(&other).is_err());
        assert_eq!(cut.step(), Err(entry));
        cut.open(&group).unwrap();
        let root = cut.step().unwrap();
        assert_eq!(
            (root.next_offset, root.total_size_bytes, root.entries.len()),
            (15, 20, 2)
        );
    }
}
