//! The ranges that were asked for, in stream order: reassembly and repetition in one queue.
//!
//! Owns which range is on its way, waits to be asked for again, or has come before its turn, and how much of each is here:
//! what has come stays, and only what is missing is asked for again. Owns where a new one ends, not when it may start.

use std::collections::VecDeque;

use bytes::Bytes;

use super::effect::{CacheUse, FragmentRef};
use super::settings::Settings;
/// Where one range is.
#[derive(Debug)]
pub(super) enum RangeState {
    /// Asked for.
    InFlight,
    /// To be asked for again, not before this.
    Backoff { until_ms: u64 },
    /// All of it is here, waiting for those in front of it.
    Complete,
}

/// One range of one fragment.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) id: u64,
    pub(super) fragment: FragmentRef,
    /// Where what was not handed on yet starts.
    start: u64,
    end: u64,
    /// What has come of it, in order from `start` on.
    parts: VecDeque<Bytes>,
    parts_bytes: u64,
    /// Whether it must come from the store itself, because what came from the cache was wrong.
    pub(super) cache: CacheUse,
    /// Faults since bytes came last.
    pub(super) attempts: u32,
    /// Answers so far that the store itself called damaged.
    pub(super) damaged: u32,
    pub(super) state: RangeState,
}

impl Range {
    /// A range that was just asked for.
    pub(super) const fn new(
        id: u64,
        fragment: FragmentRef,
        start: u64,
        end: u64,
        cache: CacheUse,
    ) -> Self {
        Self {
            id,
            fragment,
            start,
            end,
            parts: VecDeque::new(),
            parts_bytes: 0,
            cache,
            attempts: 0,
            damaged: 0,
            state: RangeState::InFlight,
        }
    }

    /// First byte that is not here: the one to go on at.
    pub(super) const fn missing_from(&self) -> u64 {
        self.start + self.parts_bytes
    }

    /// After its last byte.
    pub(super) const fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that are not here.
    pub(super) const fn missing_bytes(&self) -> u64 {
        self.end - self.missing_from()
    }

    const fn len_bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Ranges in stream order, without gaps between them.
#[derive(Debug, Default)]
pub(super) struct RangeQueue {
    ranges: VecDeque<Range>,
    /// Lengths of all ranges less what was handed on, whatever their state.
    bytes: u64,
}

impl RangeQueue {
    /// Bytes asked for or held here.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ranges that are not here as a whole.
    pub(super) fn owing(&self) -> usize {
        self.ranges
            .iter()
            .filter(|range| !matches!(range.state, RangeState::Complete))
            .count()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn push(&mut self, range: Range) {
        self.bytes += range.len_bytes();
        self.ranges.push_back(range);
    }

    /// The range that waits for this answer.
    pub(super) fn in_flight_mut(&mut self, id: u64) -> Option<&mut Range> {
        self.ranges
            .iter_mut()
            .find(|range| range.id == id && matches!(range.state, RangeState::InFlight))
    }

    /// Bytes of a range that is on its way; no more than are missing. Returns whether it is complete with them.
    pub(super) fn arrived(&mut self, id: u64, bytes: Bytes) -> bool {
        let Some(range) = self.in_flight_mut(id) else {
            return false;
        };
        debug_assert!(bytes.len() as u64 <= range.missing_bytes());
        if !bytes.is_empty() {
            range.attempts = 0;
            range.parts_bytes += bytes.len() as u64;
            range.parts.push_back(bytes);
        }
        if range.missing_bytes() == 0 {
            range.state = RangeState::Complete;
            return true;
        }
        false
    }

    /// The answer ended before the range did: the rest is asked for again.
    pub(super) fn ended_early(&mut self, id: u64, until_ms: u64) {
        let Some(range) = self.in_flight_mut(id) else {
            return;
        };
        range.state = RangeState::Backoff { until_ms };
    }

    /// The bytes that come next, if they are here.
    pub(super) fn pop_part(&mut self) -> Option<Bytes> {
        loop {
            let front = self.ranges.front_mut()?;
            let part = front.parts.pop_front();
            if let Some(part) = &part {
                let part_bytes = part.len() as u64;
                front.start += part_bytes;
                front.parts_bytes -= part_bytes;
                self.bytes -= part_bytes;
            }
            if front.start == front.end && matches!(front.state, RangeState::Complete) {
                self.ranges.pop_front();
            } else if part.is_none() {
                return None;
            }
            if part.is_some() {
                return part;
            }
        }
    }

    /// The first range whose wait is over.
    pub(super) fn due_mut(&mut self, now_ms: u64) -> Option<&mut Range> {
        self.ranges.iter_mut().find(
            |range| matches!(range.state, RangeState::Backoff { until_ms } if until_ms <= now_ms),
        )
    }

    /// When the next wait is over.
    pub(super) fn next_due_ms(&self) -> Option<u64> {
        self.ranges
            .iter()
            .filter_map(|range| match range.state {
                RangeState::Backoff { until_ms } => Some(until_ms),
                RangeState::InFlight | RangeState::Complete => None,
            })
            .min()
    }

    /// Drops what is missing of the range `id`, and everything behind it. Returns the ids of those that were still asked for.
    pub(super) fn cut_from(&mut self, id: u64) -> Vec<u64> {
        let index = self
            .ranges
            .iter()
            .position(|range| range.id == id)
            .unwrap_or(self.ranges.len());
        let mut dropped = self.ranges.split_off(index);
        let in_flight = in_flight_ids(&dropped);
        if let Some(mut range) = dropped.pop_front() {
            let missing_bytes = range.missing_bytes();
            self.bytes -= missing_bytes;
            if range.parts_bytes > 0 {
                range.end -= missing_bytes;
                range.state = RangeState::Complete;
                self.ranges.push_back(range);
            }
        }
        self.bytes -= dropped.iter().map(Range::len_bytes).sum::<u64>();
        in_flight
    }

    /// Drops everything. Returns the ids of those that were still asked for.
    pub(super) fn clear(&mut self) -> Vec<u64> {
        self.bytes = 0;
        in_flight_ids(&std::mem::take(&mut self.ranges))
    }
}

fn in_flight_ids(ranges: &VecDeque<Range>) -> Vec<u64> {
    ranges
        .iter()
        .filter(|range| matches!(range.state, RangeState::InFlight))
        .map(|range| range.id)
        .collect()
}

/// How long a range from `start` is if there is memory for it. Ranges of different readers coincide soon, wherever each began:
/// they end at multiples of the longest request, and the last one of a fragment takes a small rest along.
pub(super) fn piece_bytes(settings: &Settings, start: u64, data_end: u64) -> u64 {
    let request_bytes = settings.read_request_bytes;
    let remaining_bytes = data_end.saturating_sub(start);
    if settings.block_bytes == 1 {
        // Equal pieces instead of full ones and a small rest.
        return remaining_bytes.div_ceil(remaining_bytes.div_ceil(request_bytes).max(1));
    }
    let boundary = (start / request_bytes + 1).saturating_mul(request_bytes);
    if data_end <= boundary.saturating_add(request_bytes / 4) {
        return remaining_bytes;
    }
    let first_bytes = settings.first_request_bytes;
    if boundary - start < first_bytes {
        // Too little to begin with, and the boundary after it is too far.
        let first_end = block_end(settings, start, start + first_bytes);
        return remaining_bytes.min(first_end - start);
    }
    boundary - start
}

/// Where a range that is shorter than it could be ends: at a block.
pub(super) const fn block_end(settings: &Settings, start: u64, end: u64) -> u64 {
    let aligned = end - end % settings.block_bytes;
    // A place inside a block that is nearly through: better a range that ends anywhere than a tiny one.
    if aligned > start { aligned } else { end }
}
