//! Clearing away what the groups of a discarded manifest hold: after the persist that replaces it, one group at a time. What is
//! cut off by a restart, or cannot be read, is left to garbage collection.

use log_format::manifest::{Entry, Group, Kind};

use super::{Retry, Taken, Work};
use crate::manifest::trim;
use crate::upload::{Failure, StoredObject, UploadMachine};

/// Tries to read a group that is to be cleared away; then it is left to garbage collection.
const CLEARING_TRIES_MAX: u32 = 8;

/// A group of a manifest that is no more.
#[derive(Debug, Clone)]
pub(super) struct Condemned {
    pub(super) entry: Entry,
    /// What it holds is on the list, too; it goes when that is gone.
    pub(super) opened: bool,
}

impl UploadMachine {
    pub(super) fn maybe_clear(&mut self) -> Taken {
        let Some(Condemned { entry, opened }) = self.tree.to_clear.last() else {
            self.tree.clearing = Retry::default();
            return Taken::Not;
        };
        if *opened {
            let object = StoredObject::of(entry);
            self.tree.to_clear.pop();
            self.delete(vec![object]);
            return Taken::Done;
        }
        if self.tree.clearing.waits(self.now_ms) {
            return Taken::Not;
        }
        self.tree.clearing.at_ms = None;
        let entry = *entry;
        self.read_group(Work::Clear, &entry)
    }

    /// What a condemned group holds is known. Its own object goes last: whatever is left over is still found by way of it.
    pub(super) fn opened(&mut self, outcome: Result<Group, Failure>) {
        let Some(condemned) = self.tree.to_clear.last_mut() else {
            return;
        };
        let entry = condemned.entry;
        match outcome {
            Ok(group) if trim::check(&entry, &group).is_ok() => {
                self.tree.clearing = Retry::default();
                if entry.kind == Kind::Group {
                    self.tree.to_clear.pop();
                    let mut objects: Vec<_> = group.entries.iter().map(StoredObject::of).collect();
                    objects.push(StoredObject::of(&entry));
                    self.delete(objects);
                } else {
                    condemned.opened = true;
                    let children = group.entries.iter().rev().map(|entry| Condemned {
                        entry: *entry,
                        opened: false,
                    });
                    self.tree.to_clear.extend(children);
                }
            }
            Err(Failure::Transient(_) | Failure::Stalled(_) | Failure::Archived(_))
                if self.tree.clearing.failures < CLEARING_TRIES_MAX =>
            {
                self.counters.group_failures += 1;
                let doublings = self.tree.clearing.failures;
                let delay_ms = self
                    .chance
                    .jitter(self.settings.retry.control.delay_ms(doublings));
                self.tree.clearing.failures += 1;
                self.tree.clearing.at_ms = Some(self.now_ms.saturating_add(delay_ms.max(1)));
            }
            // Gone already, or not to be had: garbage collection finds the rest.
            Ok(_) | Err(_) => {
                self.tree.to_clear.pop();
                self.tree.clearing = Retry::default();
            }
        }
    }

    /// The groups of the manifest are being replaced; they go once that is persisted.
    pub(in crate::upload) fn condemn(&mut self, entries: &[Entry]) {
        let groups = entries.iter().filter(|entry| entry.kind != Kind::Fragment);
        self.tree.condemned.extend(groups);
    }

    /// What was condemned may be named by what is resolved now.
    pub(in crate::upload) fn pardon(&mut self) {
        self.tree.condemned.clear();
    }
}
