//! Clocks that are wrong: a node's system clock that steps forth and back, a node that starts with a wrong one, a store with
//! another time, and records that were stamped by a clock that was ahead.
//!
//! The world's own time is the true one.

use tiering_core::trusted_time::{Doubt, TrustedTime};
use tiering_core::upload::Event as MachineEvent;

use crate::plan::Trouble;
use crate::world::{Event, WALL_MS, World};

/// Clocks that differ by less agree: so far the store's may be wrong without anybody's noticing.
const MAX_SKEW_MS: u64 = 300_000;
const DAY_MS: u64 = 24 * 3_600 * 1_000;

/// The clocks of one node.
#[derive(Debug)]
pub struct NodeClock {
    trusted: TrustedTime,
    /// How far the system's clock is ahead of the true time.
    ahead_ms: i64,
}

impl NodeClock {
    /// One that is right.
    #[must_use]
    pub fn right(now_ms: u64) -> Self {
        Self {
            trusted: TrustedTime::new(now_ms, WALL_MS + now_ms as i64, MAX_SKEW_MS),
            ahead_ms: 0,
        }
    }
}

impl World {
    /// The true time.
    #[must_use]
    pub const fn true_ms(&self) -> i64 {
        WALL_MS + self.now_ms as i64
    }

    /// The latest that a clock of a node may say, if it follows wrong ones all the time: by a hundredth.
    #[must_use]
    pub const fn latest_ms(&self) -> i64 {
        self.true_ms() + self.now_ms as i64 / 100 + 1
    }

    /// What time it is on a node.
    pub fn node_time(&mut self, node: usize) -> Result<i64, Doubt> {
        let (now_ms, true_ms) = (self.now_ms, self.true_ms());
        let Some(clock) = self.clocks.get_mut(node) else {
            return Ok(true_ms);
        };
        clock.trusted.system_says(now_ms, true_ms + clock.ahead_ms);
        let time = clock.trusted.now(now_ms);
        if time.is_err_and(|doubt| doubt.skew_ms.is_some()) {
            self.coverage.hit("clocks in doubt");
        }
        time
    }

    /// An answer of the store reaches a node, and says what time it is to a second.
    pub fn hear_store_time(&mut self, node: usize, event: &MachineEvent) {
        let answered = matches!(
            event,
            MachineEvent::RootRead { .. }
                | MachineEvent::TransferDone { .. }
                | MachineEvent::RootPut { .. }
                | MachineEvent::GroupPut { .. }
                | MachineEvent::GroupRead { .. }
        );
        if !answered || self.store_down_until_ms > self.now_ms {
            return;
        }
        let (now_ms, store_ms) = (self.now_ms, self.true_ms() + self.store_ahead_ms);
        if let Some(clock) = self.clocks.get_mut(node) {
            clock.trusted.store_says(now_ms, store_ms / 1_000 * 1_000);
        }
    }

    /// A clock is set to something else, for a while.
    pub fn step_clock(&mut self) {
        let (node, kind) = (self.rng.below(self.knobs.nodes), self.rng.below(4));
        let far_ms = self.rng.range(3_600_000, 60 * DAY_MS) as i64;
        let near_ms = self.rng.range(0, MAX_SKEW_MS / 2) as i64;
        let back = self.rng.chance(3_000);
        let until_ms = self.rng.range(100, 3_000);
        let step_ms = if back { -far_ms } else { far_ms };
        let (now_ms, true_ms) = (self.now_ms, self.true_ms());
        if self.store_ahead_ms != 0 {
            return;
        }
        let Some(clock) = self.clocks.get_mut(node).filter(|it| it.ahead_ms == 0) else {
            return;
        };
        let name = match kind {
            0 => {
                clock.ahead_ms = step_ms;
                "clock stepped"
            }
            // The store runs on the same machine. A node whose own clock is wrong already has nothing left that is right, and
            // stock would delete by that clock, too.
            1 if clock.trusted.node_ms(now_ms).abs_diff(true_ms) < MAX_SKEW_MS => {
                clock.ahead_ms = step_ms;
                self.store_ahead_ms = step_ms;
                "clock stepped, the store's too"
            }
            1 | 2 => {
                clock.ahead_ms = step_ms;
                clock.trusted = TrustedTime::new(now_ms, true_ms + step_ms, MAX_SKEW_MS);
                "node started with a wrong clock"
            }
            _ => {
                self.store_ahead_ms = if back { near_ms } else { step_ms };
                "store with a wrong clock"
            }
        };
        self.coverage.hit(name);
        self.note(|| format!("node {node}: {name}, by {step_ms} ms"));
        self.at(until_ms, Event::ClockBack(node));
    }

    /// It is right again.
    pub fn clock_back(&mut self, node: usize) {
        self.store_ahead_ms = 0;
        if let Some(clock) = self.clocks.get_mut(node) {
            clock.ahead_ms = 0;
        }
    }

    /// The timestamp of what is published now.
    pub fn stamp_ms(&mut self) -> i64 {
        let ahead_ms = self.rng.range(DAY_MS, 60 * DAY_MS) as i64;
        if self.fault(Trouble::FutureStamp) {
            self.coverage.hit("record from the future");
            return self.true_ms() + ahead_ms;
        }
        self.true_ms()
    }

    /// Whether timestamps of this run are in order, so that there is one right answer to a consumer that starts by time.
    #[must_use]
    pub fn stamps_are_in_order(&self) -> bool {
        let rate = self.knobs.rates.get(Trouble::FutureStamp as usize);
        !self.plan.allows(Trouble::FutureStamp) || rate == Some(&0)
    }
}
