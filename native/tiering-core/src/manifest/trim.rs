//! Retention inside groups: how much of a leading group's beginning the user no longer wants.
//!
//! Groups are never rewritten: the root's first offset moves into them, and what lies below it counts as gone. As an entry of a
//! group tells neither size nor count, the group is descended to its oldest fragments, along one path from root to leaf, and
//! along the path after it once the leaf is used up. No look drops more than one leaf holds, and so a look costs the same
//! however long the stream is.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Kind, NO_TIMESTAMP, Root};

use super::edit::{Beginning, Edit};
use super::retention::{RetentionBound, expired, is_from_the_future, leading_to_drop};

/// Groups that a look may need: a path to the oldest fragment and the one after it.
const MAX_CACHED: usize = 6;

/// The groups at the beginning of the manifest, so that they are not fetched again for every look.
#[derive(Debug, Clone, Default)]
pub struct LeadingGroups(Vec<(Entry, Arc<Group>)>);

impl LeadingGroups {
    fn get(&self, entry: &Entry) -> Option<&Arc<Group>> {
        self.0
            .iter()
            .find(|(cached, _)| cached == entry)
            .map(|(_, group)| group)
    }

    /// Keeps what was read, if it is what the entry says.
    pub fn insert(&mut self, entry: Entry, group: Arc<Group>) -> Result<(), &'static str> {
        check(&entry, &group)?;
        self.0.retain(|(cached, _)| *cached != entry);
        if self.0.len() >= MAX_CACHED {
            self.0.remove(0);
        }
        self.0.push((entry, group));
        Ok(())
    }

    /// Forgets a group that is gone.
    pub fn remove(&mut self, entry: &Entry) {
        self.0.retain(|(cached, _)| cached != entry);
    }

    /// How many are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Whether a group that was read is the one that its entry names.
pub fn check(entry: &Entry, group: &Group) -> Result<(), &'static str> {
    if group.check().is_err() {
        return Err("the group is not well-formed");
    }
    if group.kind != entry.kind || group.first_offset != entry.first_offset {
        return Err("the group is another one than its entry says");
    }
    Ok(())
}

/// What one look found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    /// Nothing is to be dropped.
    Keep,
    /// This group has to be read first.
    Need(Entry),
    /// This edit is to be applied; then the entries, each with the offset after its last record, are gone: fragments, and the
    /// groups that are used up by it, of any height.
    Trim(Edit, Vec<(Entry, u64)>),
}

/// A place on the way down: the entries of one level, which of them, and where the last one ends.
struct Level<'a> {
    entries: &'a [Entry],
    index: usize,
    end_offset: u64,
}

impl Level<'_> {
    fn entry(&self) -> Option<&Entry> {
        self.entries.get(self.index)
    }

    fn end_of(&self, index: usize) -> u64 {
        self.entries
            .get(index + 1)
            .map_or(self.end_offset, |next| next.first_offset)
    }
}

/// Looks at the beginning of a manifest that starts with a group. `durable_next_offset` is where the persisted manifest ends:
/// what is not below it stays.
#[must_use]
pub fn look(
    root: &Root,
    groups: &LeadingGroups,
    bound: RetentionBound,
    wall_now_ms: Option<i64>,
    durable_next_offset: u64,
) -> Look {
    if !is_due(root, bound, wall_now_ms) {
        return Look::Keep;
    }
    let mut levels = vec![Level {
        entries: &root.entries,
        index: 0,
        end_offset: root.next_offset,
    }];
    if let Err(need) = descend(&mut levels, groups, root.first_offset) {
        return need;
    }
    let Some(leaf) = levels.pop() else {
        return Look::Keep;
    };
    let durable = leaf
        .entries
        .partition_point(|entry| entry.first_offset < durable_next_offset);
    let candidates = leaf.entries.get(leaf.index..durable).unwrap_or_default();
    let above = levels.iter().rev().flat_map(|level| {
        let after = level.entries.get(level.index + 1..);
        after.unwrap_or_default()
    });
    let later = leaf.entries.get(durable.max(leaf.index)..);
    let later = later.unwrap_or_default().iter().chain(above);
    let count = leading_to_drop(candidates, later, root.total_size_bytes, bound, wall_now_ms);
    let survivor = leaf.entries.get(leaf.index + count);
    if let (0, Some(first)) = (count, survivor) {
        let beginning = Beginning {
            first_offset: root.first_offset,
            ..Beginning::at(first)
        };
        return match beginning == Beginning::of(root) {
            true => Look::Keep,
            false => Look::Trim(unchanged(root, beginning), Vec::new()),
        };
    }
    let mut gone: Vec<(Entry, u64)> = candidates
        .iter()
        .take(count)
        .enumerate()
        .map(|(number, entry)| (*entry, leaf.end_of(leaf.index + number)))
        .collect();
    let dropped_bytes: u128 = gone
        .iter()
        .map(|(entry, _)| u128::from(entry.size_bytes))
        .sum();
    let Some(total_size_bytes) = root.total_size_bytes.checked_sub(dropped_bytes) else {
        return Look::Keep;
    };
    let (length, beginning) = match survivor {
        Some(first) => (0, Some(Beginning::at(first))),
        None => match climb(&mut levels, groups, &mut gone) {
            Ok(climbed) => climbed,
            Err(need) => return need,
        },
    };
    let edit = Edit {
        length,
        beginning: beginning.unwrap_or(Beginning::nothing_at(root.next_offset)),
        total_size_bytes,
        ..unchanged(root, Beginning::of(root))
    };
    Look::Trim(edit, gone)
}

/// Whether a look can find anything: told by the root alone, without reading a group.
fn is_due(root: &Root, bound: RetentionBound, wall_now_ms: Option<i64>) -> bool {
    if root
        .entries
        .first()
        .is_none_or(|first| first.kind == Kind::Fragment)
    {
        return false;
    }
    let too_big = bound
        .max_bytes
        .is_some_and(|max_bytes| root.total_size_bytes > u128::from(max_bytes));
    let unknown = bound.max_age_ms.is_some() && root.first_last_timestamp_ms == NO_TIMESTAMP;
    // What such a fragment's age is, those behind it say.
    let from_the_future = bound.max_age_ms.is_some()
        && wall_now_ms
            .is_some_and(|now_ms| is_from_the_future(root.first_last_timestamp_ms, now_ms));
    too_big
        || unknown
        || from_the_future
        || expired(root.first_last_timestamp_ms, bound, wall_now_ms)
}

/// Down to the fragment that holds the offset.
fn descend<'a>(
    levels: &mut Vec<Level<'a>>,
    groups: &'a LeadingGroups,
    offset: u64,
) -> Result<(), Look> {
    // Every level is one lower, so this ends.
    while let Some(level) = levels.last() {
        let Some(entry) = level.entry().filter(|entry| entry.kind != Kind::Fragment) else {
            break;
        };
        let end_offset = level.end_of(level.index);
        let Some(group) = groups.get(entry) else {
            return Err(Look::Need(*entry));
        };
        let after = group
            .entries
            .partition_point(|entry| entry.first_offset <= offset);
        levels.push(Level {
            entries: &group.entries,
            index: after.saturating_sub(1),
            end_offset,
        });
    }
    Ok(())
}

/// Up from a leaf that is used up, over all groups that are used up with it, and down to the fragment that comes first now.
fn climb<'a>(
    levels: &mut Vec<Level<'a>>,
    groups: &'a LeadingGroups,
    gone: &mut Vec<(Entry, u64)>,
) -> Result<(usize, Option<Beginning>), Look> {
    while let Some(level) = levels.last_mut() {
        if let Some(used_up) = level.entry() {
            gone.push((*used_up, level.end_of(level.index)));
        }
        level.index += 1;
        if level.index < level.entries.len() || levels.len() == 1 {
            break;
        }
        levels.pop();
    }
    let length = levels.first().map_or(0, |root| root.index);
    descend(levels, groups, 0)?;
    let first = levels.last().and_then(Level::entry);
    Ok((length, first.map(Beginning::at)))
}

fn unchanged(root: &Root, beginning: Beginning) -> Edit {
    Edit {
        position: 0,
        length: 0,
        entries: Vec::new(),
        beginning,
        next_offset: root.next_offset,
        total_size_bytes: root.total_size_bytes,
    }
}

#[cfg(test)]
pub(crate) mod tests;
