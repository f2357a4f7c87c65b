//! What every phase of the read machine shares: the effects it wants, its memory account, and how it bears faults.

use std::collections::VecDeque;

use super::effect::{CacheUse, Chunk, Effect, FailureKind, Finish, FragmentRef, GroupRef};
use super::pace::Pace;
use super::retry::backoff_ms;
use super::settings::{Counters, Settings};
use crate::chance::Chance;
use crate::failure::Failure;

/// A request that is not a range of chunk bytes. There is at most one at a time.
#[derive(Debug)]
pub(super) struct Lookup {
    pub(super) id: u64,
    pub(super) kind: LookupKind,
    /// Faults so far.
    attempts: u32,
    /// Damaged answers so far.
    damaged: u32,
    state: LookupState,
}

#[derive(Debug)]
enum LookupState {
    InFlight,
    Backoff { until_ms: u64 },
}

/// What is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LookupKind {
    Manifest,
    Group(GroupRef),
    /// The byte range is where the index can be.
    Index {
        fragment: FragmentRef,
        start: u64,
        end_max: u64,
    },
}

/// What is to be done about a damaged answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Damaged {
    /// It will be asked for again.
    Again,
    /// It was asked for again already.
    Twice,
}

/// An object that the manifest names and the store does not have.
#[derive(Debug)]
struct Missing {
    object: (u64, u32),
    attempts: u32,
}

#[derive(Debug)]
pub(super) struct Context {
    pub(super) settings: Settings,
    pub(super) counters: Counters,
    pub(super) chance: Chance,
    effects: VecDeque<Effect>,
    last_id: u64,
    lookup: Option<Lookup>,

    /// Chunks and bytes delivered and not yet consumed.
    pub(super) ready_chunks: usize,
    pub(super) ready_bytes: u64,
    /// Everything was taken back, and the consumer has not asked since.
    pub(super) rests: bool,
    /// How much may be held and on its way: grows while the consumer takes what comes.
    window_bytes: u64,
    consumed_since_growth: u64,
    /// This reader's share of what the node has for all of them.
    share_bytes: u64,
    /// How many requests at once.
    pub(super) pace: Pace,

    /// Since when the consumer has nothing and the store has given nothing.
    progress_ms: u64,
    last_fault: Option<String>,
    /// The last fault was an archived object.
    archived: bool,
    missing: Option<Missing>,
    pub(super) manifest_unknown_since_ms: Option<u64>,
    /// The chunk that was fetched again because its bytes were wrong.
    pub(super) suspect_offset: Option<u64>,
}

impl Context {
    pub(super) fn new(now_ms: u64, settings: Settings, seed: u64) -> Self {
        Self {
            settings,
            counters: Counters::default(),
            chance: Chance::new(seed),
            effects: VecDeque::new(),
            last_id: 0,
            lookup: None,
            ready_chunks: 0,
            ready_bytes: 0,
            rests: false,
            window_bytes: settings.first_request_bytes,
            consumed_since_growth: 0,
            share_bytes: settings.read_ahead_bytes,
            pace: Pace::new(settings.max_depth),
            progress_ms: now_ms,
            last_fault: None,
            archived: false,
            missing: None,
            manifest_unknown_since_ms: None,
            suspect_offset: None,
        }
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push_back(effect);
    }

    pub(super) fn pop_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// An id that no request had before.
    pub(super) fn fresh_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    // Lookups.

    pub(super) const fn has_lookup(&self) -> bool {
        self.lookup.is_some()
    }

    /// Asks now.
    pub(super) fn look_up(&mut self, kind: LookupKind) {
        let id = self.fresh_id();
        self.lookup = Some(Lookup {
            id,
            kind,
            attempts: 0,
            damaged: 0,
            state: LookupState::InFlight,
        });
        self.emit_lookup(id, kind, CacheUse::Allowed);
    }

    /// Asks for the manifest, not before `until_ms`.
    pub(super) fn look_up_manifest_at(&mut self, now_ms: u64, until_ms: u64) {
        if until_ms <= now_ms {
            return self.look_up(LookupKind::Manifest);
        }
        let id = self.fresh_id();
        let state = LookupState::Backoff { until_ms };
        self.lookup = Some(Lookup {
            id,
            kind: LookupKind::Manifest,
            attempts: 0,
            damaged: 0,
            state,
        });
    }

    fn emit_lookup(&mut self, id: u64, kind: LookupKind, cache: CacheUse) {
        self.emit(match kind {
            LookupKind::Manifest => Effect::RefreshManifest { id },
            LookupKind::Group(group) => Effect::GetGroup { id, group, cache },
            LookupKind::Index {
                fragment,
                start,
                end_max,
            } => Effect::GetIndex {
                id,
                fragment,
                start,
                end_max,
                cache,
            },
        });
    }

    /// Whether a lookup waits for this answer.
    pub(super) fn awaits_lookup(&self, id: u64) -> bool {
        (self.lookup.as_ref())
            .is_some_and(|lookup| lookup.id == id && matches!(lookup.state, LookupState::InFlight))
    }

    /// The lookup that waits for this answer.
    pub(super) fn take_lookup(&mut self, id: u64) -> Option<Lookup> {
        self.lookup
            .take_if(|lookup| lookup.id == id && matches!(lookup.state, LookupState::InFlight))
    }

    /// Gives up the lookup, if there is one.
    pub(super) fn cancel_lookup(&mut self) {
        if let Some(lookup) = self.lookup.take()
            && matches!(lookup.state, LookupState::InFlight)
            && lookup.kind != LookupKind::Manifest
        {
            self.emit(Effect::Cancel { id: lookup.id });
        }
    }

    /// Asks again later for an object that could not be had.
    pub(super) fn postpone_object(
        &mut self,
        now_ms: u64,
        lookup: Lookup,
        failure: &Failure,
        offset: u64,
    ) {
        self.note_fault(failure, offset);
        self.postpone_lookup(now_ms, lookup, failure.text().to_owned());
    }

    /// Asks again later.
    pub(super) fn postpone_lookup(&mut self, now_ms: u64, mut lookup: Lookup, fault: String) {
        self.last_fault = Some(fault);
        lookup.attempts += 1;
        let until_ms = now_ms.saturating_add(backoff_ms(
            &mut self.chance,
            &self.settings,
            lookup.attempts,
        ));
        lookup.state = LookupState::Backoff { until_ms };
        self.lookup = Some(lookup);
    }

    /// A damaged answer is asked for again once: the store, or the way from it, may have spoilt it.
    pub(super) fn damaged_lookup(
        &mut self,
        now_ms: u64,
        mut lookup: Lookup,
        fault: String,
    ) -> Damaged {
        lookup.damaged += 1;
        if lookup.damaged > 1 {
            return Damaged::Twice;
        }
        self.postpone_lookup(now_ms, lookup, fault);
        Damaged::Again
    }

    pub(super) fn retry_due_lookup(&mut self, now_ms: u64) {
        let id = self.last_id + 1;
        let Some(lookup) = &mut self.lookup else {
            return;
        };
        if !matches!(lookup.state, LookupState::Backoff { until_ms } if until_ms <= now_ms) {
            return;
        }
        self.last_id = id;
        lookup.id = id;
        lookup.state = LookupState::InFlight;
        let kind = lookup.kind;
        let cache = match lookup.damaged {
            0 => CacheUse::Allowed,
            _ => CacheUse::Bypassed,
        };
        if kind != LookupKind::Manifest {
            self.counters.range_retries += 1;
        }
        self.emit_lookup(id, kind, cache);
    }

    pub(super) fn lookup_due_ms(&self) -> Option<u64> {
        match self.lookup.as_ref()?.state {
            LookupState::Backoff { until_ms } => Some(until_ms),
            LookupState::InFlight => None,
        }
    }

    /// Whether a lookup waits for the store (the manifest is on this node, and has a deadline of its own).
    /// Whether the driver was asked what this node knows, which it answers by itself.
    pub(super) fn awaits_manifest(&self) -> bool {
        self.lookup.as_ref().is_some_and(|lookup| {
            lookup.kind == LookupKind::Manifest && matches!(lookup.state, LookupState::InFlight)
        })
    }

    pub(super) fn lookup_owes_store(&self) -> bool {
        self.lookup
            .as_ref()
            .is_some_and(|lookup| lookup.kind != LookupKind::Manifest)
    }

    // Faults.

    /// The store gave something.
    pub(super) fn progress(&mut self, now_ms: u64) {
        self.progress_ms = now_ms;
        self.last_fault = None;
        self.archived = false;
    }

    /// What was wanted is at this offset or behind it.
    fn note_fault(&mut self, failure: &Failure, offset: u64) {
        self.archived = matches!(failure, Failure::Archived(_));
        if self.archived {
            self.emit(Effect::Alarm {
                kind: FailureKind::Archived,
                offset,
            });
        }
    }

    /// How long to wait after this fault.
    pub(super) fn fault(
        &mut self,
        now_ms: u64,
        attempt: u32,
        failure: &Failure,
        offset: u64,
    ) -> u64 {
        self.last_fault = Some(failure.text().to_owned());
        self.note_fault(failure, offset);
        self.counters.range_retries += 1;
        self.pace.fault();
        now_ms.saturating_add(backoff_ms(&mut self.chance, &self.settings, attempt))
    }

    /// When a consumer that is waiting for the store has waited long enough; `None` if it has chunks to take.
    pub(super) fn stall_deadline_ms(&self) -> Option<u64> {
        (self.ready_chunks == 0).then(|| {
            self.progress_ms
                .saturating_add(self.settings.stall_deadline_ms)
        })
    }

    pub(super) fn unavailable(&self) -> Finish {
        let why = self.last_fault.as_deref().unwrap_or("no answer");
        if self.archived {
            return failed(FailureKind::Archived, why);
        }
        failed(
            FailureKind::Unavailable,
            format!("the remote tier does not answer: {why}"),
        )
    }

    /// The store has no such object although the manifest names it. Returns when to look at the manifest again.
    pub(super) fn object_missing(
        &mut self,
        now_ms: u64,
        object: (u64, u32),
    ) -> Result<u64, Finish> {
        let attempts = match &self.missing {
            Some(missing) if missing.object == object => missing.attempts + 1,
            _ => 1,
        };
        self.missing = Some(Missing { object, attempts });
        if attempts >= self.settings.max_missing_attempts {
            let (first_offset, uid) = object;
            return Err(failed(
                FailureKind::Lost,
                format!(
                    "object {first_offset:020}.{uid:08x} is named by the manifest and not in the bucket"
                ),
            ));
        }
        // The first time it is most likely retention, which the current manifest tells about at once.
        let wait_ms = match attempts {
            1 => 0,
            _ => backoff_ms(&mut self.chance, &self.settings, attempts - 1),
        };
        Ok(now_ms.saturating_add(wait_ms))
    }

    pub(super) fn object_found(&mut self, object: (u64, u32)) {
        self.missing.take_if(|missing| missing.object == object);
    }

    // Memory.

    pub(super) fn deliver(&mut self, chunk: Chunk) {
        self.ready_chunks += 1;
        self.ready_bytes += chunk.bytes.len() as u64;
        self.counters.chunks_served += 1;
        self.emit(Effect::Deliver(chunk));
    }

    /// The consumer took chunks.
    pub(super) fn consumed(&mut self, now_ms: u64, chunks: usize, bytes: u64) {
        debug_assert!(chunks <= self.ready_chunks && bytes <= self.ready_bytes);
        self.ready_chunks = self.ready_chunks.saturating_sub(chunks);
        self.ready_bytes = self.ready_bytes.saturating_sub(bytes);
        if self.ready_chunks == 0 {
            self.progress_ms = now_ms;
            self.pace.hungry();
        }
        self.grow_window(bytes);
    }

    /// Bytes were used up: whoever uses up half of what was fetched ahead gets twice as much, and four times if it has to wait.
    pub(super) fn grow_window(&mut self, bytes: u64) {
        self.consumed_since_growth = self.consumed_since_growth.saturating_add(bytes);
        if self.consumed_since_growth >= self.window_bytes / 2 {
            self.consumed_since_growth = 0;
            let factor = if self.ready_chunks == 0 { 4 } else { 2 };
            self.window_bytes = self.window_bytes.saturating_mul(factor);
        }
        self.window_bytes = self.window_bytes.min(self.window_bytes_max());
    }

    /// Whether the consumer has ever used up what the first request brought.
    pub(super) const fn window_has_grown(&self) -> bool {
        self.window_bytes > self.settings.first_request_bytes
    }

    /// How much may be held and on its way, if there is memory for it.
    pub(super) fn window_bytes(&self) -> u64 {
        self.window_bytes.min(self.window_bytes_max())
    }

    /// As much as the requests at once can bring, and once more of it to take meanwhile.
    fn window_bytes_max(&self) -> u64 {
        (self.settings.read_request_bytes)
            .saturating_mul(2 * self.pace.depth() as u64)
            .min(self.settings.read_ahead_bytes)
            .min(self.share_bytes)
            .max(self.settings.first_request_bytes)
    }

    pub(super) fn share(&mut self, bytes: u64) {
        self.share_bytes = bytes;
    }

    /// Everything was taken back: it begins anew, with as little as at first.
    pub(super) fn taken_back(&mut self, now_ms: u64, wanted: bool) {
        (self.ready_chunks, self.ready_bytes) = (0, 0);
        self.window_bytes = self.settings.first_request_bytes;
        self.consumed_since_growth = 0;
        self.rests = !wanted;
        self.progress_ms = now_ms;
    }

    /// Takes back chunks that the driver has not been given yet; returns id and place of the first.
    pub(super) fn drop_undelivered(&mut self) -> Option<(u64, u64)> {
        let mut first = None;
        self.effects.retain(|effect| {
            if let Effect::Deliver(chunk) = effect {
                first.get_or_insert((chunk.header.chunk_id, chunk.position));
            }
            !matches!(effect, Effect::Deliver(_))
        });
        first
    }

    /// The consumer asks again. It has waited for nothing until now.
    pub(super) const fn wanted(&mut self, now_ms: u64) {
        self.rests = false;
        self.progress_ms = now_ms;
    }

    /// Our own limits are waited for, or a slow line: no fault of the store.
    pub(super) const fn alive(&mut self, now_ms: u64) {
        self.progress_ms = now_ms;
    }
}

pub(super) fn failed(kind: FailureKind, text: impl Into<String>) -> Finish {
    Finish::Failed {
        kind,
        text: text.into(),
    }
}
