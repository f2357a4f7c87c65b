//! Persisting: root into the bucket, then the compare-and-swap of the pointer. Only after that is anything durable: readers
//! see it, local retention may trim below it, and what it no longer names is deleted.

use std::collections::BTreeMap;
use std::sync::Arc;

use log_format::manifest::Root;

use super::status::ProblemKind;
use super::tree::Taken;
use super::{
    CommitOutcome, Effect, Failure, Phase, Pointer, PointerRead, StopReason, StoredObject,
    UploadMachine,
};

/// Failures in a row that are a problem, if each could pass by itself.
const PASSING_IS_A_PROBLEM_AFTER: u32 = 3;

/// A persist under way.
#[derive(Debug, Clone)]
pub(super) struct Work {
    root: Arc<Root>,
    edits: u32,
    oldest_edit_ms: Option<u64>,
    /// Not named by `root`: deleted once it is persisted.
    garbage: BTreeMap<StoredObject, u64>,
    /// Random part of the root's key, once it is in the bucket.
    uid: Option<u32>,
    /// The compare-and-swap may have happened without our knowing.
    uncertain: bool,
}

#[derive(Debug, Clone, Copy)]
enum Step {
    PuttingRoot {
        ticket: u64,
    },
    Committing {
        ticket: u64,
    },
    /// The outcome is unknown: looking at the pointer.
    Verifying {
        ticket: u64,
    },
    WaitingToCommit,
    WaitingToVerify,
}

#[derive(Debug, Clone)]
struct UnderWay {
    work: Work,
    step: Step,
    /// Deadline of the answer, or time of the next try.
    at_ms: u64,
}

/// Edits that wait for a persist, and the one that may be under way.
#[derive(Debug, Clone, Default)]
pub(super) struct Persist {
    under_way: Option<UnderWay>,
    /// Edits since the last snapshot.
    pub(super) edits: u32,
    oldest_edit_ms: Option<u64>,
    /// Persist without waiting for threshold or interval.
    pub(super) at_once: bool,
    /// The next edit is to be persisted at once.
    pub(super) next_edit_at_once: bool,
    /// The root before the persisted one. Kept for one more persist: who has just been told of it may be fetching it.
    pub(super) replaced: Option<StoredObject>,
    retry_at_ms: Option<u64>,
    failures: u32,
}

impl Persist {
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_none()
    }

    /// What is being persisted, and the random part of its key once it has one.
    pub(super) fn pending(&self) -> Option<(&Root, Option<u32>)> {
        let work = &self.under_way.as_ref()?.work;
        Some((&work.root, work.uid))
    }
}

impl UploadMachine {
    pub(super) fn note_edit(&mut self) {
        self.persist.edits = self.persist.edits.saturating_add(1);
        self.persist.oldest_edit_ms.get_or_insert(self.now_ms);
        self.persist.at_once |= std::mem::take(&mut self.persist.next_edit_at_once);
    }

    /// When a persist is due, if anything is to be persisted and nobody is changing the manifest.
    fn persist_at_ms(&self) -> Option<u64> {
        if !self.mutator_is_idle() || !matches!(self.phase, Phase::Running) {
            return None;
        }
        let due = if self.persist.at_once || self.persist.edits >= self.settings.persist_threshold {
            self.now_ms
        } else {
            self.persist
                .oldest_edit_ms?
                .saturating_add(self.settings.persist_interval_ms)
        };
        Some(due.max(self.persist.retry_at_ms.unwrap_or(0)))
    }

    pub(super) fn persist_deadline_ms(&self) -> Option<u64> {
        let under_way = self.persist.under_way.as_ref();
        under_way
            .map(|under_way| under_way.at_ms)
            .or_else(|| self.persist_at_ms())
    }

    pub(super) fn maybe_persist(&mut self) -> Taken {
        if self.persist_at_ms().is_none_or(|at| at > self.now_ms) {
            return Taken::Not;
        }
        let root = Arc::new(self.manifest.clone());
        let garbage = std::mem::take(&mut self.garbage);
        let work = Work {
            root: Arc::clone(&root),
            edits: std::mem::take(&mut self.persist.edits),
            oldest_edit_ms: self.persist.oldest_edit_ms.take(),
            garbage,
            uid: None,
            uncertain: false,
        };
        self.persist.at_once = false;
        self.persist.retry_at_ms = None;
        let ticket = self.ticket();
        let at_ms = self
            .now_ms
            .saturating_add(self.settings.transfer_deadline_ms);
        self.persist.under_way = Some(UnderWay {
            work,
            step: Step::PuttingRoot { ticket },
            at_ms,
        });
        self.effects.push_back(Effect::PutRoot {
            generation: ticket,
            epoch: self.epoch,
            follows: self.revision(),
            root,
        });
        Taken::Waits
    }

    pub(super) fn on_root_put(&mut self, generation: u64, outcome: Result<u32, Failure>) {
        let awaited = |under_way: &mut UnderWay| matches!(under_way.step, Step::PuttingRoot { ticket } if ticket == generation);
        let Some(UnderWay { mut work, .. }) = self.persist.under_way.take_if(awaited) else {
            return;
        };
        match outcome {
            Ok(uid) => {
                self.counters.roots_created += 1;
                work.uid = Some(uid);
                self.commit(work);
            }
            Err(Failure::Transient(text)) => {
                let report = self.persist.failures + 1 >= PASSING_IS_A_PROBLEM_AFTER;
                self.persist_failed(work, text, report);
            }
            Err(
                Failure::Stalled(text)
                | Failure::Archived(text)
                | Failure::NotFound(text)
                | Failure::Corrupt(text),
            ) => {
                self.persist_failed(work, text, true);
            }
        }
    }

    fn commit(&mut self, work: Work) {
        let Some(uid) = work.uid else {
            return self.persist_failed(work, "a root without a key".to_owned(), true);
        };
        let ticket = self.ticket();
        let next_offset = work.root.next_offset;
        let at_ms = self.now_ms.saturating_add(self.settings.answer_deadline_ms);
        self.persist.under_way = Some(UnderWay {
            work,
            step: Step::Committing { ticket },
            at_ms,
        });
        let (epoch, expected_revision) = (self.epoch, self.revision());
        self.effects.push_back(Effect::CommitPointer {
            generation: ticket,
            epoch,
            uid,
            next_offset,
            expected_revision,
        });
    }

    pub(super) fn on_pointer_committed(&mut self, generation: u64, outcome: CommitOutcome) {
        let awaited = |under_way: &mut UnderWay| matches!(under_way.step, Step::Committing { ticket } if ticket == generation);
        let Some(UnderWay { mut work, .. }) = self.persist.under_way.take_if(awaited) else {
            return;
        };
        match outcome {
            CommitOutcome::Committed { revision } if revision > self.revision() => {
                self.persisted(work, revision)
            }
            // Not an answer to this commit, whatever it answers.
            CommitOutcome::Committed { .. } | CommitOutcome::Unknown => {
                work.uncertain = true;
                self.verify(work);
            }
            // An earlier try of the same commit may have been the one that was first.
            CommitOutcome::Conflict if work.uncertain => self.verify(work),
            CommitOutcome::Conflict => self.conflict(work),
            CommitOutcome::NotFound if self.revision() > 0 => {
                self.keep_for_later(work);
                self.stop(StopReason::Deleted);
            }
            CommitOutcome::NotFound => {
                self.keep_for_later(work);
                self.resolve_again();
            }
        }
    }

    fn conflict(&mut self, work: Work) {
        self.counters.persist_conflicts += 1;
        self.keep_for_later(work);
        self.resolve_again();
    }

    /// Looks at the pointer before anything else is tried: the compare-and-swap may have happened.
    fn verify(&mut self, work: Work) {
        let ticket = self.ticket();
        let at_ms = self.now_ms.saturating_add(self.settings.answer_deadline_ms);
        self.persist.under_way = Some(UnderWay {
            work,
            step: Step::Verifying { ticket },
            at_ms,
        });
        self.effects
            .push_back(Effect::ReadPointer { generation: ticket });
    }

    pub(super) fn on_pointer_verified(&mut self, generation: u64, outcome: PointerRead) {
        let awaited = |under_way: &mut UnderWay| matches!(under_way.step, Step::Verifying { ticket } if ticket == generation);
        let Some(UnderWay { work, .. }) = self.persist.under_way.take_if(awaited) else {
            return;
        };
        match outcome {
            PointerRead::Found(pointer) if pointer.revision > self.revision() => {
                if pointer.epoch == self.epoch && Some(pointer.uid) == work.uid {
                    self.persisted(work, pointer.revision);
                } else {
                    self.conflict(work);
                }
            }
            PointerRead::Found(pointer) if pointer.revision == self.revision() => {
                self.wait(work, Step::WaitingToCommit);
            }
            // Only the compare-and-swap itself knows for sure whether the stream is gone.
            PointerRead::NotFound => self.wait(work, Step::WaitingToCommit),
            PointerRead::Found(_) | PointerRead::Unavailable => {
                self.wait(work, Step::WaitingToVerify)
            }
        }
    }

    fn wait(&mut self, work: Work, step: Step) {
        self.counters.persists_failed += 1;
        if self.persist.failures + 1 >= PASSING_IS_A_PROBLEM_AFTER {
            let text = "the metadata store does not take the manifest's pointer";
            self.problems.set(ProblemKind::Metadata, text.to_owned());
        }
        let at_ms = self.back_off();
        self.persist.under_way = Some(UnderWay { work, step, at_ms });
    }

    fn back_off(&mut self) -> u64 {
        let delay_ms = self
            .chance
            .jitter(self.settings.retry.control.delay_ms(self.persist.failures));
        self.persist.failures = self.persist.failures.saturating_add(1);
        self.now_ms.saturating_add(delay_ms)
    }

    /// Nothing was committed: the edits wait for the next persist, which takes a new snapshot.
    fn persist_failed(&mut self, work: Work, text: String, report: bool) {
        self.counters.persists_failed += 1;
        if report {
            self.problems.set(ProblemKind::Persist, text);
        }
        self.keep_for_later(work);
        // A snapshot without edits (a recovery) is due again, too.
        self.persist.at_once = true;
        self.persist.retry_at_ms = Some(self.back_off());
    }

    fn keep_for_later(&mut self, work: Work) {
        self.persist.edits = self.persist.edits.saturating_add(work.edits);
        self.persist.oldest_edit_ms = match (work.oldest_edit_ms, self.persist.oldest_edit_ms) {
            (Some(work), Some(since)) => Some(work.min(since)),
            (one, other) => one.or(other),
        };
        self.garbage.extend(work.garbage);
        if let Some(uid) = work.uid {
            let root = StoredObject::Root {
                epoch: self.epoch,
                uid,
            };
            self.garbage.insert(root, 0);
        }
    }

    /// The manifest is being left behind, and its edits with it.
    pub(super) fn abandon_persist(&mut self) {
        if let Some(UnderWay { work, .. }) = self.persist.under_way.take() {
            self.keep_for_later(work);
        }
        let (failures, replaced) = (self.persist.failures, self.persist.replaced);
        self.persist = Persist {
            failures,
            replaced,
            ..Persist::default()
        };
        self.problems.clear(ProblemKind::Persist);
    }

    /// Durable.
    fn persisted(&mut self, work: Work, revision: u64) {
        let Work {
            root,
            mut garbage,
            uid,
            ..
        } = work;
        let Some(uid) = uid else { return };
        let new = Pointer {
            epoch: self.epoch,
            uid,
            revision,
        };
        let root_of = |pointer: Pointer| StoredObject::Root {
            epoch: pointer.epoch,
            uid: pointer.uid,
        };
        // By chance the same key again: then it is the live root.
        let replaced = self
            .pointer
            .map(root_of)
            .filter(|root| *root != root_of(new))
            // It names what was given up: the way back.
            .filter(|root| Some(*root) != self.abandoned);
        let unread = std::mem::replace(&mut self.persist.replaced, replaced);
        garbage.extend(unread.map(|root| (root, 0)));
        garbage.remove(&root_of(new));
        self.pointer = Some(new);
        self.persisted = root;
        self.diverged = false;
        self.conflicts = 0;
        self.persist.failures = 0;
        self.counters.persists_completed += 1;
        self.problems.clear(ProblemKind::Persist);
        self.problems.clear(ProblemKind::Metadata);
        // Groups are persisted without the local log having been looked at.
        self.effects.push_back(Effect::Publish {
            root: Arc::clone(&self.persisted),
            revision,
            confirmed: !self.unconfirmed,
            pointer: self.pointer,
        });
        // Before the groups of this persist are no longer known as new, and what they hold with them.
        self.delete(garbage.into_keys().collect());
        self.tree_persisted();
    }

    /// Answers that did not come, and waits that are over.
    pub(super) fn expire_persist(&mut self) {
        let now_ms = self.now_ms;
        let Some(UnderWay { mut work, step, .. }) = self
            .persist
            .under_way
            .take_if(|under_way| under_way.at_ms <= now_ms)
        else {
            return;
        };
        match step {
            Step::PuttingRoot { .. } => {
                self.persist_failed(
                    work,
                    "no answer to the upload of the manifest".to_owned(),
                    true,
                );
            }
            Step::Committing { .. } => {
                work.uncertain = true;
                self.verify(work);
            }
            Step::Verifying { .. } => self.wait(work, Step::WaitingToVerify),
            Step::WaitingToCommit => self.commit(work),
            Step::WaitingToVerify => self.verify(work),
        }
    }
}
