//! The read machine: from a place in the manifest to whole, checked chunks in order.
//!
//! Owns every decision of a remote read: which fragment, which byte ranges and how many at once, when to try again, when to
//! go on in the local log, when to give up. Does not own requests, time, memory, or the consumer's waiting: a driver runs
//! the [`Effect`]s, returns their answers as [`Event`]s, and hands the chunks over through a [`ReadyQueue`].
//!
//! Rules of the drain: after `handle`, take effects until there are none, then ask `poll_timeout` when to come back.
//! After [`Effect::Finish`] nothing more comes.
//!
//! ```text
//!            manifest, groups, index              end of snapshot, object gone
//!  Placing ────────────────────────────▶ Streaming ─────────────────────────▶ Placing
//!     └── past the manifest ──▶ Local         └── faults beyond measure ──▶ Failed
//! ```

mod assembly;
mod context;
mod cursor;
mod effect;
mod event;
pub mod invariants;
mod pace;
mod parts;
mod placing;
mod ranges;
mod ready_queue;
mod retry;
mod settings;
mod streaming;
#[cfg(test)]
mod tests;

pub use effect::{CacheUse, Chunk, Effect, FailureKind, Finish, FragmentRef, GroupRef};
pub use event::{Event, ManifestView, Start};
pub use parts::Parts;
pub use ready_queue::{ReadOutcome, ReadyQueue};
pub use settings::{Counters, Settings};

use context::Context;
use placing::Placing;
use streaming::Streaming;

#[derive(Debug)]
enum Phase {
    Placing(Box<Placing>),
    Streaming(Box<Streaming>),
    Finished,
}

/// What a phase decided.
#[derive(Debug)]
enum Next {
    Stay,
    Enter(Phase),
    Finish(Finish),
}

/// Reads one stream's remote tier for one consumer.
#[derive(Debug)]
pub struct ReadMachine {
    context: Context,
    phase: Phase,
}

impl ReadMachine {
    /// A reader that begins at `start`; `seed` decides its jitter.
    #[must_use]
    pub fn new(now_ms: u64, settings: Settings, start: Start, seed: u64) -> Self {
        let mut reader = Self {
            context: Context::new(now_ms, settings.sanitized(), seed),
            phase: Phase::Placing(Box::new(Placing::new(start))),
        };
        reader.advance(now_ms);
        reader
    }

    /// Something happened.
    pub fn handle(&mut self, now_ms: u64, event: Event) {
        if self.is_finished() {
            return;
        }
        let next = match event {
            Event::Manifest { id, view } => match (self.context.take_lookup(id), &mut self.phase) {
                (Some(lookup), Phase::Placing(placing)) => {
                    placing.manifest(&mut self.context, now_ms, lookup, view)
                }
                _ => Next::Stay,
            },
            Event::Fetched { id, outcome } => match (self.context.take_lookup(id), &mut self.phase)
            {
                (Some(lookup), Phase::Placing(placing)) => {
                    placing.fetched(&mut self.context, now_ms, lookup, outcome)
                }
                (Some(lookup), Phase::Streaming(streaming)) => {
                    streaming.lookup_fetched(&mut self.context, now_ms, lookup, outcome)
                }
                (None, Phase::Streaming(streaming)) => {
                    streaming.range_fetched(&mut self.context, now_ms, id, outcome)
                }
                (None, Phase::Placing(_)) | (_, Phase::Finished) => Next::Stay,
            },
            Event::Part { id, bytes } => match &mut self.phase {
                Phase::Streaming(streaming) => {
                    streaming.part_fetched(&mut self.context, now_ms, id, bytes)
                }
                Phase::Placing(_) | Phase::Finished => Next::Stay,
            },
            Event::Share { bytes } => {
                self.context.share(bytes);
                Next::Stay
            }
            Event::Consumed { chunks, bytes } => {
                self.context.consumed(now_ms, chunks, bytes);
                if let Phase::Streaming(streaming) = &mut self.phase {
                    streaming.consumed(&self.context);
                }
                Next::Stay
            }
            Event::Alive { id } => {
                let is_range = match &mut self.phase {
                    Phase::Streaming(streaming) => streaming.awaits(id),
                    Phase::Placing(_) | Phase::Finished => false,
                };
                if is_range || self.context.awaits_lookup(id) {
                    self.context.alive(now_ms);
                }
                Next::Stay
            }
            Event::TakenBack { first, wanted } => self.taken_back(now_ms, first, wanted),
            Event::Wanted => {
                self.context.wanted(now_ms);
                Next::Stay
            }
            Event::Tick => Next::Stay,
        };
        self.apply(next);
        self.advance(now_ms);
    }

    /// Goes back to the first chunk that was not consumed. It is fetched again, most likely from the node's own cache.
    fn taken_back(&mut self, now_ms: u64, first: Option<(u64, u64)>, wanted: bool) -> Next {
        self.context.taken_back(now_ms, wanted);
        let first = first.or(self.context.drop_undelivered());
        let must_search = match &mut self.phase {
            Phase::Streaming(streaming) => !streaming.taken_back(&mut self.context, first),
            Phase::Placing(_) => true,
            Phase::Finished => false,
        };
        match first {
            Some((chunk_id, _)) if must_search => {
                self.context.cancel_lookup();
                Next::Enter(Phase::Placing(Box::new(Placing::resume(chunk_id))))
            }
            Some(_) | None => Next::Stay,
        }
    }

    /// What to do next, in order.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.context.pop_effect()
    }

    /// When to send [`Event::Tick`] if nothing else happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        if self.is_finished() {
            return None;
        }
        let ranges_due_ms = match &self.phase {
            Phase::Streaming(streaming) => streaming.next_due_ms(),
            Phase::Placing(_) | Phase::Finished => None,
        };
        [
            self.context.lookup_due_ms(),
            ranges_due_ms,
            self.stall_deadline_ms(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Whether nothing more comes.
    #[must_use]
    pub const fn is_finished(&self) -> bool {
        matches!(self.phase, Phase::Finished)
    }

    /// What it has done so far.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        self.context.counters
    }

    /// Bytes that are held, on their way, or delivered and not consumed.
    #[must_use]
    pub const fn outstanding_bytes(&self) -> u64 {
        let streaming_bytes = match &self.phase {
            Phase::Streaming(streaming) => streaming.bytes(),
            Phase::Placing(_) | Phase::Finished => 0,
        };
        self.context.ready_bytes + streaming_bytes
    }

    fn advance(&mut self, now_ms: u64) {
        self.context.retry_due_lookup(now_ms);
        loop {
            let next = match &mut self.phase {
                Phase::Placing(placing) => placing.advance(&mut self.context),
                Phase::Streaming(streaming) => streaming.advance(&mut self.context, now_ms),
                Phase::Finished => return,
            };
            if !self.apply(next) {
                break;
            }
        }
        if self
            .stall_deadline_ms()
            .is_some_and(|deadline_ms| deadline_ms <= now_ms)
        {
            let finish = self.context.unavailable();
            self.apply(Next::Finish(finish));
        }
    }

    /// Returns whether the phase changed to one that can go on.
    fn apply(&mut self, next: Next) -> bool {
        match next {
            Next::Stay => false,
            Next::Enter(phase) => {
                self.phase = phase;
                true
            }
            Next::Finish(finish) => {
                let place = self.place();
                if let Phase::Streaming(streaming) = &mut self.phase {
                    streaming.cancel(&mut self.context);
                }
                self.context.cancel_lookup();
                if let Finish::Failed { kind, .. } = &finish {
                    let counters = &mut self.context.counters;
                    counters.corrupt_ends += u64::from(*kind == FailureKind::Corrupt);
                    counters.lost_ends += u64::from(*kind == FailureKind::Lost);
                    if matches!(kind, FailureKind::Corrupt | FailureKind::Lost) {
                        self.context.emit(Effect::Alarm {
                            kind: *kind,
                            offset: place,
                        });
                    }
                }
                self.phase = Phase::Finished;
                self.context.emit(Effect::Finish(finish));
                false
            }
        }
    }

    /// The offset that the consumer has not been given yet.
    fn place(&self) -> u64 {
        match &self.phase {
            Phase::Placing(placing) => placing.place(),
            Phase::Streaming(streaming) => streaming.place(),
            Phase::Finished => 0,
        }
    }

    /// The end of patience with the store, while something is asked of it and the consumer has nothing.
    fn stall_deadline_ms(&self) -> Option<u64> {
        let ranges_owe = match &self.phase {
            Phase::Streaming(streaming) => streaming.owes_store(),
            Phase::Placing(_) => false,
            Phase::Finished => return None,
        };
        // Nobody waits for a reader that rests.
        if self.context.rests {
            return None;
        }
        if ranges_owe || self.context.lookup_owes_store() {
            self.context.stall_deadline_ms()
        } else {
            None
        }
    }
}
