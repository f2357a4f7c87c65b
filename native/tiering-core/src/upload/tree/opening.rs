//! Cutting the persisted manifest back to where the local log starts, for a log that lost its end: groups that reach past that
//! place are read and opened.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Root};

use super::{Retry, Work};
use crate::manifest::cut_back::CutBack;
use crate::upload::settings::Proof;
use crate::upload::{Failure, UploadMachine};

/// Answers in a row that say of one object that it is gone, or not what it must be, and nothing else in between. How often the
/// object was asked for in vain is counted elsewhere (`Retry`): that is no evidence, however often.
#[derive(Debug, Clone, Default)]
pub(super) struct Evidence {
    of: Option<Entry>,
    answers: u32,
    first_ms: u64,
    last_ms: u64,
}

impl Evidence {
    fn add(&mut self, entry: Entry, now_ms: u64) {
        if self.of != Some(entry) {
            *self = Self {
                of: Some(entry),
                answers: 0,
                first_ms: now_ms,
                last_ms: now_ms,
            };
        }
        self.answers = self.answers.saturating_add(1);
        self.last_ms = now_ms;
    }

    fn is_proof(&self, entry: &Entry, wanted: Proof) -> bool {
        self.of.as_ref() == Some(entry)
            && self.answers >= wanted.answers.max(1)
            && self.last_ms.saturating_sub(self.first_ms) >= wanted.over_ms
    }
}

/// What is left of the persisted manifest.
#[derive(Debug)]
pub(in crate::upload) enum Left {
    /// All of it below the offset.
    Cut(Root),
    /// Nothing: part of it is proven to be unreadable, and what is in front of that does not meet the local log.
    Abandoned(Root),
}

impl UploadMachine {
    /// The persisted manifest below this offset; `None` while a group has to be read for that. Such a group is waited for as
    /// long as it takes, unless it is proven that it will not come.
    pub(in crate::upload) fn cut_back(&mut self, next_offset: u64) -> Option<Left> {
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
            Ok(root) => Some(Left::Cut(root)),
            Err(entry) if (self.tree.evidence).is_proof(&entry, self.settings.proof) => {
                Some(Left::Abandoned(Root::empty_at(next_offset)))
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
                self.tree.evidence = Evidence::default();
                self.group_problem_is_over();
            }
            Err(failure) => {
                if failure.is_evidence() {
                    self.tree.evidence.add(entry, self.now_ms);
                } else {
                    self.tree.evidence = Evidence::default();
                }
                let text = format!("group at offset {} is not readable", entry.first_offset);
                self.group_failed(|tree| &mut tree.opening, &text, &failure);
            }
        }
    }
}
