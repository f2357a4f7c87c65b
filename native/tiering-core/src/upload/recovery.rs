//! Recoveries that give something up, because the local log and the manifest no longer meet.
//!
//! Local log ahead: the user's retention trimmed what was not uploaded yet. The user's bound wins; the gap is accepted. The old
//! manifest stays published, and readable, until the first fragment after the gap is persisted.
//!
//! Remote tier ahead: the local log lost its end, and the remote tier has records of a timeline that is no more. The local log
//! is the authority for what it has. What lies below its first offset is common to both timelines and stays; the manifest is cut
//! back to that offset, published at once, and persisted without waiting for a fragment. Objects that it no longer names are
//! left in the bucket: they may hold the only copy of records that were acknowledged, and say themselves what they are.
//!
//! A group that has to be read for that, and cannot be, is waited for. Only what is proven to be lost is given up, and the root
//! that named it stays: see [`Effect::Abandoned`] and docs/decisions/0019.

use std::sync::Arc;

use log_format::manifest::Root;

use super::tree::Left;
use super::{Effect, Pointer, Recovery, StoredObject, UploadMachine};

/// A recovery that waits: for a persist that is under way, or because the last one was not long ago.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reset {
    kind: Recovery,
    floor: u64,
    not_before_ms: u64,
}

/// How close together recoveries are.
#[derive(Debug, Clone, Default)]
pub(super) struct Streak {
    length: u32,
    last_ms: Option<u64>,
}

impl UploadMachine {
    pub(super) fn request_reset(&mut self, kind: Recovery, floor: u64) {
        let untouched = self.pointer.is_none()
            && self.manifest.is_empty()
            && self.transfers.is_empty()
            && self.drain.assembly.is_empty();
        if untouched {
            // Nothing has been promised or even read yet: start where the local log starts.
            self.manifest = Root::empty_at(floor);
            return self.drain.restart(Some(floor));
        }
        if self.reset.is_some() {
            return;
        }
        let backoff = self.settings.retry.recovery;
        let quiet_ms = backoff.cap_ms.saturating_mul(2);
        if self
            .streak
            .last_ms
            .is_none_or(|last| self.now_ms.saturating_sub(last) > quiet_ms)
        {
            self.streak.length = 0;
        }
        let delay_ms = match self.streak.length.checked_sub(1) {
            None => 0,
            Some(doublings) => self.chance.jitter(backoff.delay_ms(doublings)),
        };
        self.drain.forget_scan();
        self.reset = Some(Reset {
            kind,
            floor,
            not_before_ms: self.now_ms.saturating_add(delay_ms),
        });
    }

    /// The wait of a recovery; what it waits for besides has its own deadlines.
    pub(super) fn reset_deadline_ms(&self) -> Option<u64> {
        self.reset
            .filter(|reset| match reset.kind {
                Recovery::LocalLogAhead => self.persist.is_idle(),
                Recovery::RemoteTierAhead => self.mutator_is_idle() && !self.opening_waits(),
            })
            .map(|reset| reset.not_before_ms)
    }

    pub(super) fn maybe_reset(&mut self) {
        let now_ms = self.now_ms;
        // While it waited, an earlier try of the transfer that was thought to be lost may have been answered after all.
        let is_needed = |reset: &Reset| match reset.kind {
            Recovery::LocalLogAhead => self.is_trimmed_by(reset.floor),
            Recovery::RemoteTierAhead => true,
        };
        self.reset = self.reset.filter(is_needed);
        if !self.persist.is_idle() {
            return;
        }
        let Some(reset) = self.reset.filter(|reset| reset.not_before_ms <= now_ms) else {
            return;
        };
        // The floor may have moved on while we waited.
        let floor = match (reset.kind, self.local_first_chunk_id) {
            (Recovery::LocalLogAhead, Some(floor)) => floor.max(reset.floor),
            (Recovery::RemoteTierAhead, Some(floor)) => floor,
            (Recovery::LocalLogAhead | Recovery::RemoteTierAhead, None) => reset.floor,
        };
        let left = match reset.kind {
            Recovery::LocalLogAhead => Some(Left::Cut(Root::empty_at(floor))),
            Recovery::RemoteTierAhead => self.cut_back(floor),
        };
        let kept = match left {
            Some(Left::Cut(root)) => root,
            Some(Left::Abandoned(root)) => {
                self.abandon_history(floor);
                root
            }
            None => return,
        };
        self.reset = None;
        let from_offset = self.manifest.next_offset;
        self.abandon_transfers();
        self.abandon_persist();
        match reset.kind {
            Recovery::LocalLogAhead => {
                let discarded: Vec<(StoredObject, u64)> = super::fragments(&self.persisted)
                    .chain(super::fragments(&self.manifest))
                    .chain(self.tree.fresh_objects())
                    .collect();
                self.garbage.extend(discarded);
                if !self.diverged {
                    // What its groups hold is read and deleted piece by piece, once the new manifest is persisted.
                    let persisted = Arc::clone(&self.persisted);
                    self.condemn(&persisted.entries);
                }
            }
            // What an earlier recovery has condemned may be named by what is kept.
            Recovery::RemoteTierAhead => self.pardon(),
        }
        self.abandon_tree();
        self.manifest = kept;
        // What retention had dropped in memory only may be back.
        self.garbage
            .retain(|object, end_offset| !super::may_name(&self.manifest, object, *end_offset));
        self.adopted_entries = self.manifest.entries.len();
        self.diverged = true;
        // Where the manifest ends now. If the local log has moved on past that meanwhile, the next scan says so.
        let to_offset = self.manifest.next_offset;
        self.drain.restart(Some(to_offset));
        self.streak.length = self.streak.length.saturating_add(1);
        self.streak.last_ms = Some(now_ms);
        self.effects.push_back(Effect::Recovered {
            kind: reset.kind,
            from_offset,
            to_offset,
        });
        match reset.kind {
            Recovery::LocalLogAhead => {
                self.counters.local_log_ahead_recoveries += 1;
                self.persist.next_edit_at_once = true;
            }
            Recovery::RemoteTierAhead => {
                self.counters.remote_tier_ahead_recoveries += 1;
                let root = Arc::new(self.manifest.clone());
                self.unconfirmed = false;
                self.effects.push_back(Effect::Publish {
                    root,
                    revision: self.revision(),
                    // It ends where the local log starts: there is nothing to trim by it.
                    confirmed: true,
                    pointer: None,
                });
                self.persist.at_once = self.revision() > 0;
            }
        }
    }

    /// What the persisted manifest has below the offset is given up. Its root stays, and everything that it may name.
    fn abandon_history(&mut self, next_offset: u64) {
        let Some(Pointer { epoch, uid, .. }) = self.pointer else {
            return;
        };
        self.counters.histories_abandoned += 1;
        let root = StoredObject::Root { epoch, uid };
        self.abandoned = Some(root);
        let persisted = Arc::clone(&self.persisted);
        self.garbage
            .retain(|object, end_offset| !super::may_name(&persisted, object, *end_offset));
        self.effects.push_back(Effect::Abandoned {
            root,
            first_offset: persisted.first_offset,
            next_offset: next_offset.min(persisted.next_offset),
        });
    }
}
