//! Reads on from a place: ranges ahead of the consumer, chunks in order, faults borne.
//!
//! Owns what is asked for next, and how much. Does not own finding a place, nor the memory account (the context does).

use std::collections::VecDeque;

use bytes::Bytes;

use super::assembly::{Assembly, Cut, DATA_START};
use super::context::{Context, Lookup, LookupKind, failed};
use super::cursor::{FragmentCursor, Step};
use super::effect::{CacheUse, Effect, FailureKind, Finish, FragmentRef};
use super::event::Start;
use super::placing::{Placing, check_fragment, damaged, provide_group};
use super::ranges::{Range, RangeQueue, RangeState, block_end, piece_bytes};
use super::{Next, Phase};
use crate::failure::Failure;

/// Chunks in front of the place that was asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Skip {
    pub(super) until: Start,
    /// The place must be a chunk's first offset.
    pub(super) exact: bool,
}

/// Why no more chunks can be cut right now.
#[derive(Debug, PartialEq, Eq)]
enum Idle {
    /// The consumer has enough.
    Full,
    /// Bytes are missing.
    NeedBytes,
    /// The fragment is through and the next one is not known yet.
    FragmentEnd,
    /// The manifest's part of the fragment is through; what follows in the object belongs to nobody.
    Overhang,
}

#[derive(Debug)]
pub(super) struct Streaming {
    cursor: FragmentCursor,
    snapshot_ended: bool,
    /// The fragment being cut, and those behind it that are known. Never empty.
    fragments: VecDeque<FragmentRef>,
    /// Fragments that are cut and whose chunks may not all be consumed: they may have to be fetched again.
    behind: VecDeque<FragmentRef>,
    /// Next byte to ask for: fragment (number in `fragments`) and position in it.
    frontier_index: usize,
    frontier_position: u64,
    assembly: Assembly,
    ranges: RangeQueue,
    /// Lengths of all ranges asked for so far.
    asked_bytes: u64,
    skip: Option<Skip>,
    /// Up to here in the first fragment bytes must come from the store itself: those of the cache were wrong.
    bypass_end: u64,
    /// Where this reading began: what was delivered before it lies in objects that may be others by now.
    entered_at: u64,
    /// An object that is gone. What is in front of it is still served, then the place is searched anew.
    gone: Option<(u64, u32)>,
}

impl Streaming {
    /// From byte `position` of the fragment, where chunk `chunk_id` starts.
    pub(super) fn new(
        context: &Context,
        cursor: FragmentCursor,
        fragment: FragmentRef,
        position: u64,
        chunk_id: u64,
        skip: Option<Skip>,
    ) -> Self {
        Self {
            cursor,
            snapshot_ended: false,
            fragments: VecDeque::from([fragment]),
            behind: VecDeque::new(),
            frontier_index: 0,
            frontier_position: position,
            assembly: Assembly::new(fragment, position, chunk_id, context.settings.verify_crc),
            ranges: RangeQueue::default(),
            asked_bytes: 0,
            skip,
            bypass_end: 0,
            entered_at: chunk_id,
            gone: None,
        }
    }

    /// Bytes held here and on their way.
    pub(super) const fn bytes(&self) -> u64 {
        self.assembly.buffered_bytes() + self.ranges.bytes()
    }

    pub(super) fn owes_store(&self) -> bool {
        self.ranges.owing() > 0
    }

    /// The offset that is to be cut next.
    pub(super) const fn place(&self) -> u64 {
        self.assembly.expected_offset()
    }

    pub(super) fn next_due_ms(&self) -> Option<u64> {
        self.ranges.next_due_ms()
    }

    /// Gives up every request.
    pub(super) fn cancel(&mut self, context: &mut Context) {
        for id in self.ranges.clear() {
            context.emit(Effect::Cancel { id });
        }
    }

    /// Whether a range waits for this answer.
    pub(super) fn awaits(&mut self, id: u64) -> bool {
        self.ranges.in_flight_mut(id).is_some()
    }

    /// The consumer took chunks: each fragment behind has at least one that it has not.
    pub(super) fn consumed(&mut self, context: &Context) {
        let surplus = self.behind.len().saturating_sub(context.ready_chunks);
        self.behind.drain(..surplus);
    }

    /// Drops everything, and goes back to the first chunk that was not consumed: its id and where it starts. Returns false if
    /// that place has to be searched for.
    pub(super) fn taken_back(&mut self, context: &mut Context, first: Option<(u64, u64)>) -> bool {
        self.cancel(context);
        if let Some((chunk_id, position)) = first {
            while self.assembly.first_offset() > chunk_id
                && let Some(fragment) = self.behind.pop_back()
            {
                self.fragments.push_front(fragment);
                self.assembly.go_back(fragment, position, chunk_id);
                self.bypass_end = 0;
            }
            if self.assembly.expected_offset() != chunk_id {
                self.assembly.go_back_to(position, chunk_id);
                self.bypass_end = 0;
            }
            if chunk_id < self.entered_at || self.assembly.first_offset() > chunk_id {
                return false;
            }
        }
        self.assembly.rewind();
        self.behind.clear();
        self.gone = None;
        self.asked_bytes = 0;
        self.frontier_index = 0;
        self.frontier_position = self.assembly.position();
        true
    }

    pub(super) fn advance(&mut self, context: &mut Context, now_ms: u64) -> Next {
        let snapshot_had_ended = self.snapshot_ended;
        let next = self.advance_once(context, now_ms);
        // Only the attempt to ask for more finds the snapshot's end, which may be what everything else was waiting for.
        if matches!(next, Next::Stay) && self.snapshot_ended && !snapshot_had_ended {
            return self.advance_once(context, now_ms);
        }
        next
    }

    fn advance_once(&mut self, context: &mut Context, now_ms: u64) -> Next {
        let idle = match self.cut(context) {
            Ok(idle) => idle,
            Err(finish) => return Next::Finish(finish),
        };
        if idle == Idle::Overhang {
            // Nothing that is still asked for belongs to the manifest's part.
            self.cancel(context);
            return if context.ready_chunks == 0 {
                self.search_anew(context)
            } else {
                Next::Stay
            };
        }
        if idle != Idle::Full && self.ranges.is_empty() {
            if let Some(object) = self.gone {
                return match context.object_missing(now_ms, object) {
                    Ok(until_ms) => {
                        let next = self.search_anew(context);
                        context.look_up_manifest_at(now_ms, until_ms);
                        next
                    }
                    Err(finish) => Next::Finish(finish),
                };
            }
            // Only once the consumer has everything: by then the manifest may go on, and the local log is asked as late as can be.
            if self.snapshot_ended && idle == Idle::FragmentEnd && context.ready_chunks == 0 {
                return self.search_anew(context);
            }
        }
        self.retry_due_ranges(context, now_ms);
        if let Err(finish) = self.issue(context, now_ms) {
            return Next::Finish(finish);
        }
        if self.ranges.owing() == 0 {
            context.pace.idle(now_ms);
        }
        Next::Stay
    }

    /// The place is searched from the root again; a group on the way of the old search belongs to nobody then.
    fn search_anew(&self, context: &mut Context) -> Next {
        context.cancel_lookup();
        let expected_offset = self.assembly.expected_offset();
        Next::Enter(Phase::Placing(Box::new(match self.skip {
            None => Placing::resume(expected_offset),
            Some(skip) => Placing::resume_skipping(expected_offset, skip),
        })))
    }

    // Cutting.

    fn cut(&mut self, context: &mut Context) -> Result<Idle, Finish> {
        loop {
            if context.ready_chunks >= context.settings.max_ready_chunks {
                return Ok(Idle::Full);
            }
            match self.assembly.cut() {
                Cut::Chunk(chunk) => {
                    let bytes = chunk.bytes.len() as u64;
                    match self.skips(
                        chunk.header.chunk_id,
                        chunk.header.next_offset(),
                        chunk.header.timestamp_ms,
                    )? {
                        true => context.grow_window(bytes),
                        false => context.deliver(chunk),
                    }
                }
                Cut::NeedBytes => match self.ranges.pop_part() {
                    Some(part) => self.assembly.push(part),
                    None => return Ok(Idle::NeedBytes),
                },
                Cut::FragmentEnd => {
                    let Some(next) = self.fragments.get(1).copied() else {
                        return Ok(Idle::FragmentEnd);
                    };
                    self.behind.extend(self.fragments.pop_front());
                    self.consumed(context);
                    self.bypass_end = 0;
                    if self.frontier_index == 0 {
                        self.frontier_position = DATA_START;
                    }
                    self.frontier_index = self.frontier_index.saturating_sub(1);
                    self.assembly.enter(next);
                }
                Cut::Overhang => return Ok(Idle::Overhang),
                Cut::CrcMismatch(text) => {
                    context.counters.chunk_crc_mismatches += 1;
                    self.fetch_again(context, text)?;
                }
                Cut::Corrupt(text) => self.fetch_again(context, text)?,
            }
        }
    }

    /// Whether the chunk is in front of the place that was asked for.
    fn skips(
        &mut self,
        chunk_id: u64,
        next_offset: Option<u64>,
        timestamp_ms: i64,
    ) -> Result<bool, Finish> {
        let Some(Skip { until, exact }) = self.skip else {
            return Ok(false);
        };
        let in_front = match until {
            Start::Offset(offset) => next_offset.is_some_and(|next| next <= offset),
            Start::Timestamp(target_ms) => timestamp_ms < target_ms,
        };
        if in_front {
            return Ok(true);
        }
        match until {
            Start::Offset(offset) if exact && chunk_id != offset => Err(failed(
                FailureKind::Corrupt,
                format!("offset {offset} ended a chunk before and is inside chunk {chunk_id} now"),
            )),
            Start::Offset(_) | Start::Timestamp(_) => {
                self.skip = None;
                Ok(false)
            }
        }
    }

    /// Wrong bytes are fetched again once, from the chunk on, and the chunk itself past the cache: it is not known whether the
    /// store, the way from it or this node has spoilt them.
    fn fetch_again(&mut self, context: &mut Context, text: String) -> Result<(), Finish> {
        let offset = self.assembly.expected_offset();
        if context.suspect_offset.replace(offset) == Some(offset) {
            return Err(failed(FailureKind::Corrupt, text));
        }
        context.counters.range_retries += 1;
        context.counters.refetches_past_cache += 1;
        self.cancel(context);
        let chunk_bytes = self.assembly.next_chunk_bytes().unwrap_or(0);
        self.bypass_end = (self.assembly.position())
            .saturating_add(chunk_bytes.max(context.settings.first_request_bytes));
        self.assembly.rewind();
        self.frontier_index = 0;
        self.frontier_position = self.assembly.position();
        Ok(())
    }

    // Asking.

    fn issue(&mut self, context: &mut Context, now_ms: u64) -> Result<(), Finish> {
        if self.gone.is_some() || context.rests {
            return Ok(());
        }
        while self.ranges.owing() < context.pace.depth() {
            let floor_bytes = self.floor_bytes(context);
            let target_bytes = context.window_bytes().max(floor_bytes);
            let outstanding_bytes = context.ready_bytes + self.bytes();
            let room_bytes = target_bytes.saturating_sub(outstanding_bytes);
            if room_bytes == 0 {
                return Ok(());
            }
            let Some(fragment) = self.fragments.get(self.frontier_index).copied() else {
                return Err(failed(
                    FailureKind::Bug,
                    "the frontier left the known fragments",
                ));
            };
            let remaining_bytes = (DATA_START.saturating_add(fragment.data_bytes))
                .saturating_sub(self.frontier_position);
            if remaining_bytes == 0 {
                match self.next_fragment(context)? {
                    true => continue,
                    false => return Ok(()),
                }
            }
            let data_end = DATA_START.saturating_add(fragment.data_bytes);
            let piece_bytes = piece_bytes(&context.settings, self.frontier_position, data_end);
            let length = piece_bytes.min(room_bytes);
            let starving = context.ready_chunks == 0 && self.ranges.is_empty();
            // A consumer that has not used up most of what it was given first may want no more: one record costs one request.
            let is_worth_it = match context.window_has_grown() {
                true => length >= piece_bytes.min(target_bytes / 2),
                false => outstanding_bytes <= self.asked_bytes / 4,
            };
            if !starving && !is_worth_it {
                return Ok(());
            }
            self.ask(context, now_ms, fragment, length, piece_bytes);
        }
        Ok(())
    }

    /// What a reader has at least: enough to have the next chunk whole and to see the header after it.
    fn floor_bytes(&self, context: &Context) -> u64 {
        context
            .settings
            .first_request_bytes
            .saturating_add(self.assembly.next_chunk_bytes().unwrap_or(0))
    }

    fn ask(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        fragment: FragmentRef,
        length: u64,
        piece_bytes: u64,
    ) {
        let id = context.fresh_id();
        let start = self.frontier_position;
        let is_suspect = self.frontier_index == 0 && start < self.bypass_end;
        let cache = match is_suspect {
            true => CacheUse::Bypassed,
            false => CacheUse::Allowed,
        };
        let mut end = start + length;
        if is_suspect {
            end = end.min(self.bypass_end);
        } else if length < piece_bytes {
            end = block_end(&context.settings, start, end);
        }
        self.frontier_position = end;
        self.asked_bytes += end - start;
        self.ranges
            .push(Range::new(id, fragment, start, end, cache));
        context.pace.asked(now_ms);
        context.counters.read_ranges += 1;
        context.emit(Effect::GetRange {
            id,
            fragment,
            start,
            end,
            cache,
        });
    }

    /// Moves the frontier to the start of the next fragment; false if that is not known yet.
    fn next_fragment(&mut self, context: &mut Context) -> Result<bool, Finish> {
        if self.frontier_index + 1 < self.fragments.len() {
            self.frontier_index += 1;
            self.frontier_position = DATA_START;
            return Ok(true);
        }
        // Behind a run of tiny fragments there is nothing to gain from knowing many more.
        if self.fragments.len() > context.settings.max_depth {
            return Ok(false);
        }
        match self.cursor.step() {
            Step::Fragment(fragment) => {
                check_fragment(&fragment).map_err(|text| failed(FailureKind::Corrupt, text))?;
                if self
                    .fragments
                    .back()
                    .is_none_or(|last| last.next_offset != fragment.first_offset)
                {
                    return Err(failed(
                        FailureKind::Bug,
                        "the manifest cursor skipped a fragment",
                    ));
                }
                self.fragments.push_back(fragment);
                self.frontier_index = self.fragments.len() - 1;
                self.frontier_position = DATA_START;
                Ok(true)
            }
            Step::NeedGroup(group) => {
                if !context.has_lookup() {
                    context.look_up(LookupKind::Group(group));
                }
                Ok(false)
            }
            Step::End => {
                self.snapshot_ended = true;
                Ok(false)
            }
        }
    }

    fn retry_due_ranges(&mut self, context: &mut Context, now_ms: u64) {
        while let Some(range) = self.ranges.due_mut(now_ms) {
            range.id = context.fresh_id();
            range.state = RangeState::InFlight;
            context.counters.read_ranges += 1;
            context.pace.asked(now_ms);
            context.emit(Effect::GetRange {
                id: range.id,
                fragment: range.fragment,
                start: range.missing_from(),
                end: range.end(),
                cache: range.cache,
            });
        }
    }

    // Answers.

    /// Bytes of a range that goes on. They are good also if the rest never comes.
    pub(super) fn part_fetched(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        id: u64,
        bytes: Bytes,
    ) -> Next {
        let Some(range) = self.ranges.in_flight_mut(id) else {
            return Next::Stay;
        };
        if bytes.len() as u64 > range.missing_bytes() {
            let failure = Failure::Transient("more bytes than asked for".to_owned());
            return self.range_failed(context, now_ms, id, failure);
        }
        if bytes.is_empty() {
            return Next::Stay;
        }
        let object = (range.fragment.first_offset, range.fragment.uid);
        let part_bytes = bytes.len() as u64;
        context.progress(now_ms);
        context.object_found(object);
        context.counters.read_bytes += part_bytes;
        if context.ready_chunks == 0 {
            context.pace.hungry();
        }
        let is_complete = self.ranges.arrived(id, bytes);
        context.pace.arrived(now_ms, part_bytes, is_complete);
        Next::Stay
    }

    /// The end of a range's answer.
    pub(super) fn range_fetched(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        id: u64,
        outcome: Result<Bytes, Failure>,
    ) -> Next {
        match outcome {
            Ok(bytes) => {
                let next = self.part_fetched(context, now_ms, id, bytes);
                // Still there: it is not complete.
                if self.ranges.in_flight_mut(id).is_some() {
                    let failure = Failure::Transient("short answer".to_owned());
                    return self.range_failed(context, now_ms, id, failure);
                }
                next
            }
            Err(failure) => self.range_failed(context, now_ms, id, failure),
        }
    }

    fn range_failed(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        id: u64,
        failure: Failure,
    ) -> Next {
        let Some(range) = self.ranges.in_flight_mut(id) else {
            return Next::Stay;
        };
        match failure {
            Failure::NotFound(_) => {
                self.gone = Some((range.fragment.first_offset, range.fragment.uid));
                range.state = RangeState::Backoff { until_ms: u64::MAX };
                for id in self.ranges.cut_from(id) {
                    context.emit(Effect::Cancel { id });
                }
            }
            Failure::Corrupt(text) if range.damaged > 0 => {
                range.state = RangeState::Backoff { until_ms: u64::MAX };
                return Next::Finish(failed(FailureKind::Corrupt, text));
            }
            failure => {
                range.attempts += 1;
                if matches!(failure, Failure::Corrupt(_)) {
                    range.damaged += 1;
                    range.cache = CacheUse::Bypassed;
                }
                let offset = range
                    .fragment
                    .first_offset
                    .max(self.assembly.expected_offset());
                let until_ms = context.fault(now_ms, range.attempts, &failure, offset);
                self.ranges.ended_early(id, until_ms);
            }
        }
        Next::Stay
    }

    /// Answer to a group on the way to further fragments.
    pub(super) fn lookup_fetched(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        outcome: Result<Bytes, Failure>,
    ) -> Next {
        let LookupKind::Group(group) = lookup.kind else {
            return Next::Stay;
        };
        match outcome {
            Ok(bytes) => {
                context.progress(now_ms);
                context.object_found((group.first_offset, group.uid));
                match provide_group(&mut self.cursor, group, &bytes) {
                    Ok(()) => Next::Stay,
                    Err(text) => damaged(context, now_ms, lookup, text),
                }
            }
            Err(Failure::NotFound(_)) => {
                self.gone = Some((group.first_offset, group.uid));
                Next::Stay
            }
            Err(Failure::Corrupt(text)) => damaged(context, now_ms, lookup, text),
            Err(failure @ (Failure::Transient(_) | Failure::Stalled(_) | Failure::Archived(_))) => {
                let offset = group.first_offset.max(self.assembly.expected_offset());
                context.postpone_object(now_ms, lookup, &failure, offset);
                Next::Stay
            }
        }
    }
}
