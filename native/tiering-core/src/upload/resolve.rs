//! Finding out what is persisted: pointer, then root. An unknown answer is asked for again, never taken for "nothing".

use std::sync::Arc;

use log_format::manifest::Root;

use super::status::ProblemKind;
use super::{
    Anchor, Effect, Failure, Phase, Pointer, PointerRead, StopReason, StoredObject, UploadMachine,
};
/// A root that is missing this often in a row is a problem and not a race with the writer that replaced it.
const MISSING_ROOT_IS_A_PROBLEM_AFTER: u32 = 3;

/// Where resolving is.
#[derive(Debug, Clone)]
pub(super) enum Resolve {
    ReadingPointer {
        ticket: u64,
        deadline_ms: u64,
    },
    ReadingRoot {
        ticket: u64,
        deadline_ms: u64,
        pointer: Pointer,
    },
    Waiting {
        until_ms: u64,
    },
}

impl Resolve {
    pub(super) fn deadline_ms(&self) -> u64 {
        match self {
            Self::ReadingPointer { deadline_ms, .. } | Self::ReadingRoot { deadline_ms, .. } => {
                *deadline_ms
            }
            Self::Waiting { until_ms } => *until_ms,
        }
    }
}

impl UploadMachine {
    pub(super) fn read_pointer(&mut self) {
        let ticket = self.ticket();
        let deadline_ms = self.now_ms.saturating_add(self.settings.answer_deadline_ms);
        self.phase = Phase::Resolving(Resolve::ReadingPointer {
            ticket,
            deadline_ms,
        });
        self.effects
            .push_back(Effect::ReadPointer { generation: ticket });
    }

    /// Forgets what is in memory and starts from what is persisted. What was uploaded and is not in it becomes garbage; it is
    /// deleted only after the next persist, because until then a commit whose outcome is unknown may still name it.
    pub(super) fn resolve_again(&mut self) {
        self.abandon_transfers();
        self.abandon_persist();
        let unpersisted: Vec<(StoredObject, u64)> = self.unpersisted_objects().collect();
        self.garbage.extend(unpersisted);
        self.abandon_tree();
        self.pardon();
        self.manifest = (*self.persisted).clone();
        self.diverged = false;
        self.drain.restart(None);
        self.reset = None;
        self.conflicts = self.conflicts.saturating_add(1);
        if self.conflicts == 1 {
            self.read_pointer();
        } else {
            self.wait_to_resolve(self.conflicts - 2);
        }
    }

    pub(super) fn on_pointer_resolved(&mut self, outcome: PointerRead) {
        match outcome {
            PointerRead::Found(pointer) if pointer.epoch > self.epoch => {
                self.stop(StopReason::Deposed)
            }
            PointerRead::Found(pointer) if pointer.revision < self.revision() => {
                self.resolve_failed(
                    ProblemKind::Metadata,
                    "the metadata store gave an old pointer".to_owned(),
                    true,
                );
            }
            PointerRead::Found(pointer) => {
                self.problems.clear(ProblemKind::Metadata);
                let ticket = self.ticket();
                let deadline_ms = self
                    .now_ms
                    .saturating_add(self.settings.transfer_deadline_ms);
                self.phase = Phase::Resolving(Resolve::ReadingRoot {
                    ticket,
                    deadline_ms,
                    pointer,
                });
                self.effects.push_back(Effect::GetRoot {
                    generation: ticket,
                    pointer,
                });
            }
            // A pointer that has been there goes away only with its stream.
            PointerRead::NotFound if self.revision() > 0 => self.stop(StopReason::Deleted),
            PointerRead::NotFound => self.adopt(Root::empty_at(0), None),
            PointerRead::Unavailable => {
                self.resolve_failed(
                    ProblemKind::Metadata,
                    "the metadata store does not answer".to_owned(),
                    true,
                );
            }
        }
    }

    pub(super) fn on_root_read(&mut self, generation: u64, outcome: Result<Root, Failure>) {
        let pointer = match &self.phase {
            Phase::Resolving(Resolve::ReadingRoot {
                ticket, pointer, ..
            }) if *ticket == generation => *pointer,
            Phase::Resolving(_) | Phase::Running | Phase::Stopped => return,
        };
        let outcome = outcome.and_then(|root| match root.check() {
            Ok(()) => Ok(root),
            Err(error) => Err(Failure::Corrupt(error.to_string())),
        });
        match outcome {
            Ok(root) => self.adopt(root, Some(pointer)),
            // The pointer may be an old one whose root has been replaced and deleted.
            Err(Failure::NotFound(text)) => {
                let report = self.resolve_failures + 1 >= MISSING_ROOT_IS_A_PROBLEM_AFTER;
                self.resolve_failed(
                    ProblemKind::Manifest,
                    format!("the manifest is missing: {text}"),
                    report,
                );
            }
            Err(Failure::Transient(text)) => {
                self.resolve_failed(ProblemKind::Manifest, text, self.resolve_failures > 0)
            }
            Err(Failure::Stalled(text) | Failure::Archived(text)) => {
                self.resolve_failed(ProblemKind::Manifest, text, true)
            }
            Err(Failure::Corrupt(text)) => {
                self.resolve_failed(
                    ProblemKind::Manifest,
                    format!("the manifest is corrupt: {text}"),
                    true,
                );
            }
        }
    }

    /// No answer came in time.
    pub(super) fn expire_resolve(&mut self) {
        let Phase::Resolving(resolve) = &self.phase else {
            return;
        };
        if resolve.deadline_ms() > self.now_ms {
            return;
        }
        match resolve {
            Resolve::Waiting { .. } => self.read_pointer(),
            Resolve::ReadingPointer { .. } => {
                self.resolve_failed(
                    ProblemKind::Metadata,
                    "the metadata store does not answer".to_owned(),
                    true,
                );
            }
            Resolve::ReadingRoot { .. } => {
                self.resolve_failed(
                    ProblemKind::Manifest,
                    "no answer to the request for the manifest".to_owned(),
                    true,
                );
            }
        }
    }

    fn resolve_failed(&mut self, kind: ProblemKind, text: String, report: bool) {
        self.counters.resolution_failures += 1;
        if report {
            self.problems.set(kind, text);
        }
        let doublings = self.resolve_failures.max(self.conflicts.saturating_sub(1));
        self.resolve_failures = self.resolve_failures.saturating_add(1);
        self.wait_to_resolve(doublings);
    }

    fn wait_to_resolve(&mut self, doublings: u32) {
        let delay_ms = self
            .chance
            .jitter(self.settings.retry.control.delay_ms(doublings));
        self.phase = Phase::Resolving(Resolve::Waiting {
            until_ms: self.now_ms.saturating_add(delay_ms),
        });
    }

    /// What is persisted is known: tell readers, and go on from its end.
    fn adopt(&mut self, root: Root, pointer: Option<Pointer>) {
        self.problems.clear(ProblemKind::Manifest);
        self.problems.clear(ProblemKind::Metadata);
        self.resolve_failures = 0;
        self.pointer = pointer;
        if pointer.is_some() {
            self.anchor = Anchor::Done;
        }
        self.adopted_entries = root.entries.len();
        // What was thought to be garbage may turn out to be named, by a commit whose outcome was unknown or by another writer.
        // What a group of theirs may hold is left to garbage collection.
        self.garbage
            .retain(|object, end_offset| !super::may_name(&root, object, *end_offset));
        self.manifest = root.clone();
        self.persisted = Arc::new(root);
        // A stream that never persisted anything starts at the local floor, once that is known.
        match pointer {
            Some(_) => self.drain.start_after(&self.manifest),
            None => self.drain.restart(None),
        }
        self.phase = Phase::Running;
        // The first scan tells whether the local log goes on where this manifest ends.
        self.unconfirmed = pointer.is_some();
        self.effects.push_back(Effect::Publish {
            root: Arc::clone(&self.persisted),
            revision: self.revision(),
            confirmed: !self.unconfirmed,
            pointer,
        });
    }

    /// Objects of the in-memory manifest that the persisted one does not name.
    pub(super) fn unpersisted_objects(&self) -> impl Iterator<Item = (StoredObject, u64)> + '_ {
        super::fragments(&self.manifest)
            .chain(self.tree.fresh_objects())
            .filter(|(object, end_offset)| !super::may_name(&self.persisted, object, *end_offset))
    }
}
