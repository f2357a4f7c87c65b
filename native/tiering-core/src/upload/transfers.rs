//! Transfers: cut fragments on their way to the bucket, in cut order. They may arrive in any order; they enter the manifest
//! in cut order. A fragment is never given up, except by a recovery.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::status::ProblemKind;
use super::{Effect, Failure, Recovery, StoredObject, UploadMachine};
use crate::fragment_assembly::FragmentPlan;
use crate::manifest::edit;
/// Passing failures of one fragment that are a problem: about three hundred milliseconds of them.
const TRANSIENT_IS_A_PROBLEM_AFTER: u32 = 6;

/// The anchor: a mark in the metadata store that the stream may have objects, written before the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Anchor {
    /// Nothing is cut yet.
    Unneeded,
    Writing {
        ticket: u64,
        deadline_ms: u64,
    },
    Waiting {
        until_ms: u64,
    },
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Until the anchor is durable.
    Held,
    InFlight,
    /// For its retry.
    Waiting,
    /// In the bucket, not yet in the manifest.
    Done {
        uid: u32,
    },
}

#[derive(Debug, Clone)]
struct Transfer {
    plan: Arc<FragmentPlan>,
    state: State,
    /// Deadline of `InFlight`, time of the retry of `Waiting`.
    at_ms: u64,
    transient_failures: u32,
    stalled_failures: u32,
    /// Its bytes were not found; if the local floor is above it, they never will be.
    lost: bool,
    /// Why it does not get through, once that is worth telling.
    trouble: Option<String>,
}

/// The queue. References are given in order, so a transfer's place follows from its reference.
#[derive(Debug, Clone, Default)]
pub(super) struct Transfers {
    queue: VecDeque<Transfer>,
    next_reference: u64,
    /// Deadlines and retries: time, reference.
    timers: BTreeSet<(u64, u64)>,
    index_bytes: usize,
    in_flight: usize,
    troubled: usize,
    /// Results of transfers of other generations are not ours.
    generation: u64,
}

impl Transfers {
    pub(super) fn new(generation: u64) -> Self {
        Self {
            generation,
            ..Self::default()
        }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Memory that the waiting fragments hold. Asked at every event, so it is kept and not added up.
    pub(super) const fn index_bytes(&self) -> usize {
        self.index_bytes
    }

    /// Chunk bytes of all of them.
    pub(super) fn chunk_bytes(&self) -> u64 {
        self.queue
            .iter()
            .map(|transfer| transfer.plan.size_bytes)
            .sum()
    }

    /// Timestamp of the oldest chunk in the queue.
    pub(super) fn first_timestamp_ms(&self) -> Option<i64> {
        self.queue
            .front()
            .map(|transfer| transfer.plan.first_timestamp_ms)
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn stalled_offset(&self) -> Option<u64> {
        self.first_troubled()
            .map(|transfer| transfer.plan.first_offset)
    }

    pub(super) fn deadline_ms(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Plans in cut order, and whether each is held.
    pub(super) fn plans(&self) -> impl Iterator<Item = (&FragmentPlan, bool)> {
        self.queue
            .iter()
            .map(|transfer| (&*transfer.plan, transfer.state == State::Held))
    }

    /// Objects that are in the bucket without being in any manifest.
    pub(super) fn done_objects(&self) -> impl Iterator<Item = (StoredObject, u64)> + '_ {
        self.queue
            .iter()
            .filter_map(|transfer| match transfer.state {
                State::Done { uid } => {
                    let first_offset = transfer.plan.first_offset;
                    let object = StoredObject::Fragment { first_offset, uid };
                    Some((object, transfer.plan.next_offset))
                }
                State::Held | State::InFlight | State::Waiting => None,
            })
    }

    fn first_troubled(&self) -> Option<&Transfer> {
        if self.troubled == 0 {
            return None;
        }
        self.queue
            .iter()
            .find(|transfer| transfer.trouble.is_some())
    }

    fn first_reference(&self) -> u64 {
        self.next_reference - self.queue.len() as u64
    }

    fn get_mut(&mut self, reference: u64) -> Option<&mut Transfer> {
        let place = reference.checked_sub(self.first_reference())?;
        self.queue.get_mut(usize::try_from(place).ok()?)
    }

    /// Moves a transfer to another state, and keeps timers and counts in step.
    fn set(&mut self, reference: u64, state: State, at_ms: u64) {
        let Some(transfer) = self.get_mut(reference) else {
            return;
        };
        let (old_state, old_at_ms) = (transfer.state, transfer.at_ms);
        (transfer.state, transfer.at_ms) = (state, at_ms);
        if matches!(old_state, State::InFlight | State::Waiting) {
            self.timers.remove(&(old_at_ms, reference));
        }
        if matches!(state, State::InFlight | State::Waiting) {
            self.timers.insert((at_ms, reference));
        }
        self.in_flight -= usize::from(old_state == State::InFlight);
        self.in_flight += usize::from(state == State::InFlight);
    }

    fn set_trouble(&mut self, reference: u64, trouble: Option<String>) {
        let Some(transfer) = self.get_mut(reference) else {
            return;
        };
        let (had, has) = (transfer.trouble.is_some(), trouble.is_some());
        transfer.trouble = trouble;
        self.troubled = self.troubled + usize::from(has) - usize::from(had);
    }

    /// The head of the queue, if it is in the bucket.
    fn pop_done(&mut self) -> Option<(Arc<FragmentPlan>, u32)> {
        match self.queue.front()?.state {
            State::Done { uid } => {
                let transfer = self.queue.pop_front()?;
                self.index_bytes = (self.index_bytes).saturating_sub(transfer.plan.index.len());
                Some((transfer.plan, uid))
            }
            State::Held | State::InFlight | State::Waiting => None,
        }
    }
}

impl UploadMachine {
    pub(super) fn enqueue_transfer(&mut self, plan: FragmentPlan) {
        let reference = self.transfers.next_reference;
        self.transfers.next_reference += 1;
        self.transfers.index_bytes = (self.transfers.index_bytes).saturating_add(plan.index.len());
        self.transfers.queue.push_back(Transfer {
            plan: Arc::new(plan),
            state: State::Held,
            at_ms: 0,
            transient_failures: 0,
            stalled_failures: 0,
            lost: false,
            trouble: None,
        });
        if self.anchor == Anchor::Done {
            self.submit(reference);
        }
    }

    /// Sends a fragment out, for the first time or again under the same reference.
    fn submit(&mut self, reference: u64) {
        let deadline_ms = self
            .now_ms
            .saturating_add(self.settings.transfer_deadline_ms);
        self.transfers.set(reference, State::InFlight, deadline_ms);
        let generation = self.transfers.generation;
        if let Some(transfer) = self.transfers.get_mut(reference) {
            let plan = Arc::clone(&transfer.plan);
            self.effects.push_back(Effect::Transfer {
                generation,
                transfer: reference,
                plan,
            });
        }
    }

    pub(super) fn on_transfer_done(
        &mut self,
        generation: u64,
        reference: u64,
        outcome: Result<u32, Failure>,
    ) {
        if generation != self.transfers.generation {
            return;
        }
        let state = self
            .transfers
            .get_mut(reference)
            .map(|transfer| transfer.state);
        match (state, outcome) {
            // Sent again after its deadline, and now answered twice: the first answer counted.
            (None | Some(State::Held | State::Done { .. }), _) | (Some(State::Waiting), Err(_)) => {
                self.counters.duplicates_ignored += 1;
            }
            (Some(State::InFlight | State::Waiting), Ok(uid)) => {
                self.transfer_succeeded(reference, uid)
            }
            (Some(State::InFlight), Err(failure)) => self.transfer_failed(reference, failure),
        }
    }

    fn transfer_succeeded(&mut self, reference: u64, uid: u32) {
        self.transfers.set(reference, State::Done { uid }, 0);
        self.transfers.set_trouble(reference, None);
        self.counters.transfers_completed += 1;
        if let Some(transfer) = self.transfers.get_mut(reference) {
            // An earlier try may have had its bytes in time.
            transfer.lost = false;
            self.counters.bytes_transferred += transfer.plan.object_bytes();
        }
        self.transfer_problem();
    }

    fn transfer_failed(&mut self, reference: u64, failure: Failure) {
        let retry = self.settings.retry;
        let Some(transfer) = self.transfers.get_mut(reference) else {
            return;
        };
        transfer.lost = matches!(failure, Failure::NotFound(_));
        self.counters.transfer_retries += 1;
        let (delay_ms, trouble) = match failure {
            Failure::Transient(text) => {
                transfer.transient_failures = transfer.transient_failures.saturating_add(1);
                let delay_ms = match transfer.transient_failures.checked_sub(2) {
                    None => 0,
                    Some(doublings) => self.chance.jitter(retry.transient.delay_ms(doublings)),
                };
                let report = transfer.transient_failures >= TRANSIENT_IS_A_PROBLEM_AFTER;
                (delay_ms, report.then_some(text))
            }
            Failure::Stalled(text)
            | Failure::Archived(text)
            | Failure::NotFound(text)
            | Failure::Corrupt(text) => {
                self.counters.stalled_retries += 1;
                transfer.stalled_failures = transfer.stalled_failures.saturating_add(1);
                let doublings = transfer.stalled_failures - 1;
                (
                    self.chance.jitter(retry.stalled.delay_ms(doublings)),
                    Some(text),
                )
            }
        };
        if trouble.is_some() {
            self.transfers.set_trouble(reference, trouble);
        }
        self.transfer_problem();
        if delay_ms == 0 {
            self.submit(reference);
        } else {
            self.transfers.set(
                reference,
                State::Waiting,
                self.now_ms.saturating_add(delay_ms),
            );
        }
    }

    fn transfer_problem(&mut self) {
        match self.transfers.first_troubled() {
            Some(Transfer {
                plan,
                trouble: Some(text),
                ..
            }) => {
                let text = format!(
                    "fragment at offset {} does not get through: {text}",
                    plan.first_offset
                );
                self.problems.set(ProblemKind::Transfer, text);
            }
            Some(_) | None => self.problems.clear(ProblemKind::Transfer),
        }
    }

    /// Retries that are due, and transfers whose result was lost on the way.
    pub(super) fn expire_transfers(&mut self) {
        while let Some((at_ms, reference)) = self.transfers.timers.first().copied()
            && at_ms <= self.now_ms
        {
            if let Some(transfer) = self.transfers.get_mut(reference)
                && transfer.state == State::InFlight
            {
                self.counters.transfer_retries += 1;
                self.transfers
                    .set_trouble(reference, Some("no result in time".to_owned()));
                self.transfer_problem();
            }
            self.submit(reference);
        }
    }

    /// Whatever is complete at the head of the queue enters the manifest.
    pub(super) fn apply_completions(&mut self) {
        while let Some((plan, uid)) = self.transfers.pop_done() {
            if let Err(error) = edit::append(&mut self.manifest, &plan, uid) {
                // Cannot happen: scans are checked and the queue is ordered. If it does, what is persisted is still right.
                self.problems.set(ProblemKind::Manifest, error.to_string());
                let first_offset = plan.first_offset;
                self.garbage.insert(
                    StoredObject::Fragment { first_offset, uid },
                    plan.next_offset,
                );
                return self.resolve_again();
            }
            self.note_edit();
        }
    }

    /// Asks for a recovery if what is not uploaded yet is not in the local log any more.
    pub(super) fn notice_trimmed(&mut self) {
        if let Some(floor) = self.local_first_chunk_id
            && self.is_trimmed_by(floor)
        {
            self.request_reset(Recovery::LocalLogAhead, floor);
        }
    }

    /// Whether a local log that starts at `floor` cannot give any more what is not uploaded yet.
    pub(super) fn is_trimmed_by(&self, floor: u64) -> bool {
        // Chunks in the making were read, but only their headers: their bytes are gone, too.
        let uncut_is_gone = self.drain.uncut_from().is_some_and(|from| from < floor);
        let lost = |transfer: &Transfer| transfer.lost && transfer.plan.first_offset < floor;
        uncut_is_gone || self.transfers.troubled > 0 && self.transfers.queue.iter().any(lost)
    }

    /// Drops all transfers, and whatever is assembled is up to the caller.
    pub(super) fn abandon_transfers(&mut self) {
        let done: Vec<(StoredObject, u64)> = self.transfers.done_objects().collect();
        self.garbage.extend(done);
        self.effects.push_back(Effect::CancelTransfers {
            generation: self.transfers.generation,
        });
        // References are never used twice, not even across generations: a result that is late cannot be taken for another.
        self.transfers = Transfers {
            next_reference: self.transfers.next_reference,
            ..Transfers::new(self.ticket())
        };
        self.problems.clear(ProblemKind::Transfer);
    }

    pub(super) fn maybe_write_anchor(&mut self) {
        let due = match self.anchor {
            Anchor::Unneeded => !self.transfers.is_empty(),
            Anchor::Waiting { until_ms } => until_ms <= self.now_ms,
            Anchor::Writing { .. } | Anchor::Done => false,
        };
        if due {
            let ticket = self.ticket();
            let deadline_ms = self.now_ms.saturating_add(self.settings.answer_deadline_ms);
            self.anchor = Anchor::Writing {
                ticket,
                deadline_ms,
            };
            self.effects
                .push_back(Effect::WriteAnchor { generation: ticket });
        }
    }

    pub(super) fn on_anchor_written(&mut self, generation: u64, ok: bool) {
        match self.anchor {
            Anchor::Writing { ticket, .. } if ticket == generation => {}
            Anchor::Unneeded | Anchor::Writing { .. } | Anchor::Waiting { .. } | Anchor::Done => {
                return;
            }
        }
        if !ok {
            return self.anchor_failed("the metadata store did not take the anchor");
        }
        self.anchor = Anchor::Done;
        self.anchor_failures = 0;
        self.counters.anchors_written += 1;
        self.problems.clear(ProblemKind::Anchor);
        for reference in self.transfers.first_reference()..self.transfers.next_reference {
            self.submit(reference);
        }
    }

    pub(super) fn expire_anchor(&mut self) {
        if let Anchor::Writing { deadline_ms, .. } = self.anchor
            && deadline_ms <= self.now_ms
        {
            self.anchor_failed("the metadata store does not answer");
        }
    }

    fn anchor_failed(&mut self, text: &str) {
        self.problems.set(ProblemKind::Anchor, text.to_owned());
        let delay_ms = self
            .chance
            .jitter(self.settings.retry.control.delay_ms(self.anchor_failures));
        self.anchor_failures = self.anchor_failures.saturating_add(1);
        self.anchor = Anchor::Waiting {
            until_ms: self.now_ms.saturating_add(delay_ms),
        };
    }

    pub(super) fn anchor_deadline_ms(&self) -> Option<u64> {
        match self.anchor {
            Anchor::Writing { deadline_ms, .. } => Some(deadline_ms),
            Anchor::Waiting { until_ms } => Some(until_ms),
            Anchor::Unneeded | Anchor::Done => None,
        }
    }
}
