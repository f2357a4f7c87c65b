//! The ranges that were asked for, in stream order: reassembly and repetition in one queue.
//!
//! Owns which range is on its way, waits to be asked for again, or has come before its turn. Does not own when a new one may start.

use std::collections::VecDeque;

use bytes::Bytes;

use super::effect::FragmentRef;
use crate::mutants::mutant;

/// Where one range is.
#[derive(Debug)]
pub(super) enum RangeState {
    /// Asked for.
    InFlight,
    /// To be asked for again, not before this.
    Backoff { until_ms: u64 },
    /// Here, waiting for those in front of it.
    Complete(Bytes),
}

/// One range of one fragment.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) id: u64,
    pub(super) fragment: FragmentRef,
    pub(super) start: u64,
    pub(super) end: u64,
    /// Faults so far.
    pub(super) attempts: u32,
    /// Answers so far that the store itself called damaged.
    pub(super) damaged: u32,
    pub(super) state: RangeState,
}

impl Range {
    pub(super) const fn len_bytes(&self) -> u64 {
        self.end - self.start
    }
}

/// Ranges in stream order, without gaps between them.
#[derive(Debug, Default)]
pub(super) struct RangeQueue {
    ranges: VecDeque<Range>,
    /// Lengths of all ranges, whatever their state.
    bytes: u64,
}

impl RangeQueue {
    /// Bytes asked for or held here.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ranges that are not here yet.
    pub(super) fn owing(&self) -> usize {
        self.ranges
            .iter()
            .filter(|range| !matches!(range.state, RangeState::Complete(_)))
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

    /// The answer of a range; may be shorter than asked, then the rest becomes a range of its own behind it.
    pub(super) fn complete(&mut self, id: u64, bytes: Bytes, rest_id: u64, rest_until_ms: u64) {
        let Some(index) = self.ranges.iter().position(|range| range.id == id) else {
            return;
        };
        let Some(range) = self.ranges.get_mut(index) else {
            return;
        };
        debug_assert!(bytes.len() as u64 <= range.len_bytes());
        let end = range.end;
        range.end = range.start + bytes.len() as u64;
        range.state = RangeState::Complete(bytes);
        if range.end < end && !mutant!(ReaderDropsShortRest) {
            let rest = Range {
                id: rest_id,
                fragment: range.fragment,
                start: range.end,
                end,
                attempts: range.attempts + 1,
                damaged: range.damaged,
                state: RangeState::Backoff {
                    until_ms: rest_until_ms,
                },
            };
            self.ranges.insert(index + 1, rest);
        }
    }

    /// The first range's bytes, if they are here.
    pub(super) fn pop_complete(&mut self) -> Option<Bytes> {
        if !matches!(
            self.ranges.front(),
            Some(Range {
                state: RangeState::Complete(_),
                ..
            })
        ) {
            return None;
        }
        let range = self.ranges.pop_front()?;
        self.bytes -= range.len_bytes();
        match range.state {
            RangeState::Complete(bytes) => Some(bytes),
            RangeState::InFlight | RangeState::Backoff { .. } => None,
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
        if mutant!(ReaderForgetsRetry) {
            return None;
        }
        self.ranges
            .iter()
            .filter_map(|range| match range.state {
                RangeState::Backoff { until_ms } => Some(until_ms),
                RangeState::InFlight | RangeState::Complete(_) => None,
            })
            .min()
    }

    /// Drops the range `id` and everything behind it. Returns the ids of those that were still asked for.
    pub(super) fn cut_from(&mut self, id: u64) -> Vec<u64> {
        let index = self
            .ranges
            .iter()
            .position(|range| range.id == id)
            .unwrap_or(self.ranges.len());
        let dropped = self.ranges.split_off(index);
        self.bytes -= dropped.iter().map(Range::len_bytes).sum::<u64>();
        in_flight_ids(&dropped)
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
