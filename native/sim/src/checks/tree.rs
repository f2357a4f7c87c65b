//! A manifest with its groups taken apart: what it names, fragment by fragment, as the bucket has it.

use std::collections::BTreeSet;

use log_format::manifest::{Entry, Kind, NO_TIMESTAMP, Root};
use tiering_core::manifest::trim;
use tiering_core::upload::StoredObject;

use crate::store::Bucket;

/// A persisted manifest without its groups.
#[derive(Debug, Clone)]
pub struct Flat {
    /// The same range with every fragment in the root.
    pub root: Root,
    /// The groups that are needed for it.
    pub groups: BTreeSet<StoredObject>,
}

impl Flat {
    /// Of a manifest of nothing.
    #[must_use]
    pub fn empty_at(offset: u64) -> Self {
        Self {
            root: Root::empty_at(offset),
            groups: BTreeSet::new(),
        }
    }

    /// Takes a root apart. An error names what is missing, or what is not what its entry says.
    pub fn of(bucket: &Bucket, stream: usize, root: &Root) -> Result<Self, String> {
        let mut flat = Self {
            root: Root {
                entries: Vec::new(),
                ..root.clone()
            },
            groups: BTreeSet::new(),
        };
        flat.take_apart(bucket, stream, &root.entries, root.next_offset)?;
        if let Some(first) = flat.root.entries.first() {
            let last_ms = first.last_timestamp_ms;
            if root.first_timestamp_ms != first.first_timestamp_ms
                || ![NO_TIMESTAMP, last_ms].contains(&root.first_last_timestamp_ms)
            {
                return Err("the root's timestamps are not its first fragment's".to_owned());
            }
            flat.root.first_last_timestamp_ms = last_ms;
        }
        // Ordering, coverage and accounting to the byte, also inside groups that expired in part.
        flat.root.check().map_err(|error| error.to_string())?;
        Ok(flat)
    }

    /// Whether the manifest needs the object.
    #[must_use]
    pub fn names(&self, object: &StoredObject) -> bool {
        let entries = &self.root.entries;
        match object {
            StoredObject::Fragment { first_offset, .. } => entries
                .binary_search_by_key(first_offset, |entry| entry.first_offset)
                .ok()
                .and_then(|at| entries.get(at))
                .is_some_and(|entry| StoredObject::of(entry) == *object),
            StoredObject::Group { .. } => self.groups.contains(object),
            StoredObject::Root { .. } => false,
        }
    }

    fn take_apart(
        &mut self,
        bucket: &Bucket,
        stream: usize,
        entries: &[Entry],
        end_offset: u64,
    ) -> Result<(), String> {
        for (number, entry) in entries.iter().enumerate() {
            let end_offset = entries
                .get(number + 1)
                .map_or(end_offset, |next| next.first_offset);
            // A group is immutable: it goes on naming what has expired.
            if end_offset <= self.root.first_offset {
                continue;
            }
            if entry.kind == Kind::Fragment {
                self.root.entries.push(*entry);
                continue;
            }
            let object = StoredObject::of(entry);
            let group = bucket
                .group(stream, object)
                .ok_or_else(|| format!("{object:?} is not there"))?;
            trim::check(entry, &group).map_err(|text| format!("{object:?}: {text}"))?;
            if group.last_timestamp_ms() != entry.last_timestamp_ms
                || group.first_timestamp_ms != entry.first_timestamp_ms
                || group
                    .entries
                    .last()
                    .is_some_and(|last| last.first_offset >= end_offset)
            {
                return Err(format!("{object:?} is not what its entry says"));
            }
            self.groups.insert(object);
            self.take_apart(bucket, stream, &group.entries, end_offset)?;
        }
        Ok(())
    }
}
