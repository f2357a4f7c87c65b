//! Cutting the persisted manifest back to where the local log starts, for a log that lost its end: groups that reach past that
//! place are read and opened.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Root};

use super::{Retry, Work};
use crate::manifest::cut_back::CutBack;
use crate::mutants::mutant;
use crate::replica_reader::{Failure, ReplicaReader};

/// Tries to read a group that is not there, or not what it should be, before what it holds is given up.
const OPENING_TRIES_MAX: u32 = 8;

impl ReplicaReader {
    /// The persisted manifest below this offset; `None` while a group has to be read for that.
    pub(in crate::replica_reader) fn cut_back(&mut self, next_offset: u64) -> Option<Root> {
        if !self.tree.is_idle() {
            return None;
        }
        let persisted = Arc::clone(&self.persisted);
        let (_, mut cut) = self
            .tree
            .cutting
            .take()
            .filter(|(of, cut)| Arc::ptr_eq(of, &persisted) && cut.next_offset() == next_offset)
            .unwrap_or_else(|| {
                let cut = CutBack::new(&persisted, next_offset);
                (Arc::clone(&persisted), cut)
            });
        match cut.step() {
            Ok(root) => Some(root),
            // Its records cannot be had, and what is in front of them does not meet the local log.
            Err(_)
                if self.tree.opening.failures > OPENING_TRIES_MAX
                    || mutant!(GiveUpUnreadableGroup) && self.tree.opening.failures > 0 =>
            {
                Some(Root::empty_at(next_offset))
            }
            Err(entry) => {
                self.tree.cutting = Some((persisted, cut));
                if !self.tree.opening.waits(self.now_ms) {
                    self.tree.opening.at_ms = None;
                    self.read_group(Work::Open { entry }, &entry);
                }
                None
            }
        }
    }

    pub(super) fn opened_for_cut(&mut self, entry: Entry, outcome: Result<Group, Failure>) {
        let Some((_, cut)) = &mut self.tree.cutting else {
            return;
        };
        let outcome = outcome.and_then(|group| {
            let opened = cut.open(&group);
            opened.map_err(|text| Failure::Corrupt(text.to_owned()))
        });
        match outcome {
            Ok(()) => {
                self.tree.opening = Retry::default();
                self.group_problem_is_over();
            }
            Err(failure) => {
                let before = self.tree.opening.failures;
                let text = format!("group at offset {} is not readable", entry.first_offset);
                self.group_failed(|tree| &mut tree.opening, &text, &failure);
                // What may pass is waited for as long as it takes.
                if matches!(failure, Failure::Transient(_) | Failure::Stalled(_)) {
                    self.tree.opening.failures = before.saturating_add(1).min(OPENING_TRIES_MAX);
                }
            }
        }
    }
}
