//! Remote retention: the user's bound, applied to what is persisted. What it drops is an edit like any other, and is deleted
//! only after the persist that no longer names it. Fragments of the root are dropped here; a group is the tree's.

use log_format::manifest::{Kind, NO_TIMESTAMP};

use super::status::ProblemKind;
use super::{Phase, RetentionBound, UploadMachine};
use crate::manifest::{edit, retention};
use crate::trusted_time::Doubt;

/// What keeps a fragment that is old enough ends without an event: clocks that do not agree, a timestamp from the future.
const LOOK_AGAIN_MS: u64 = 60_000;

impl UploadMachine {
    pub(super) fn on_retention_changed(&mut self, bound: RetentionBound) {
        self.bound = bound;
    }

    /// How many leading entries are persisted: the ones that may be dropped.
    fn durable_entries(&self) -> usize {
        // After a recovery nothing in memory is persisted yet, whatever the offsets say.
        // Nor is anything dropped from a manifest that the local log has not been seen to continue.
        if self.diverged || self.unconfirmed || !matches!(self.phase, Phase::Running) {
            return 0;
        }
        let next_offset = self.persisted.next_offset;
        self.manifest
            .entries
            .partition_point(|entry| entry.first_offset < next_offset)
    }

    pub(super) fn retain(&mut self) {
        if !self.tree.is_idle() {
            return;
        }
        let (durable, later) = self.manifest.entries.split_at(self.durable_entries());
        let count = retention::leading_to_drop(
            durable,
            later,
            self.manifest.total_size_bytes,
            self.bound,
            self.wall_now_ms(),
        );
        if count == 0 {
            return;
        }
        if let Ok(dropped) = edit::drop_leading(&mut self.manifest, count) {
            let objects = super::objects(&dropped, self.manifest.first_offset);
            self.garbage.extend(objects);
            self.note_edit();
        }
    }

    /// When the oldest fragment gets too old, on our clock.
    pub(super) fn retention_deadline_ms(&self) -> Option<u64> {
        if self.durable_entries() == 0 || self.only_the_newest_is_left() {
            return None;
        }
        // Whatever is in the way looks again when it ends.
        let waits = match self.manifest.entries.first()?.kind {
            Kind::Fragment => !self.tree.is_idle(),
            Kind::Group | Kind::KiloGroup | Kind::MegaGroup => {
                !self.mutator_is_idle()
                    || self.descent_waits()
                    || self.garbage_is_full()
                    || self.manifest.first_offset >= self.persisted.next_offset
            }
        };
        let oldest_ms = self.manifest.first_last_timestamp_ms;
        if waits || oldest_ms == NO_TIMESTAMP {
            return None;
        }
        let expiry_ms = retention::expiry_ms(oldest_ms, self.bound)?;
        let left_ms = match (self.wall_now_ms(), self.doubt()) {
            (Some(wall_ms), _) if retention::is_from_the_future(oldest_ms, wall_ms) => 0,
            (Some(wall_ms), _) => expiry_ms.saturating_sub(wall_ms),
            (None, Some(_)) => 0,
            (None, None) => return None,
        };
        // What is old enough and could go has gone.
        let left_ms = u64::try_from(left_ms).ok().filter(|left_ms| *left_ms > 0);
        Some(self.now_ms.saturating_add(left_ms.unwrap_or(LOOK_AGAIN_MS)))
    }

    /// Age takes nothing from such a manifest, and a stream that rests has no timer.
    fn only_the_newest_is_left(&self) -> bool {
        matches!(self.manifest.entries.as_slice(), [only] if only.kind == Kind::Fragment)
    }

    /// What time it is, as last given and moved on by our own clock.
    pub(super) fn wall_now_ms(&self) -> Option<i64> {
        let (at_ms, time) = self.time?;
        let since_ms = i64::try_from(self.now_ms.saturating_sub(at_ms)).unwrap_or(i64::MAX);
        Some(time.ok()?.saturating_add(since_ms))
    }

    fn doubt(&self) -> Option<Doubt> {
        self.time.and_then(|(_, time)| time.err())
    }

    /// Clocks that do not agree are a problem once something waits for them: what is too old by the node's own.
    pub(super) fn note_doubt(&mut self) {
        let waiting = self.doubt().filter(|doubt| {
            self.durable_entries() > 0
                && !self.only_the_newest_is_left()
                && self.manifest.first_last_timestamp_ms != NO_TIMESTAMP
                && retention::expired(
                    self.manifest.first_last_timestamp_ms,
                    self.bound,
                    Some(doubt.node_ms),
                )
        });
        match waiting {
            Some(doubt) => self.problems.set(
                ProblemKind::Clock,
                format!("{doubt}: nothing is deleted because of its age until they agree"),
            ),
            None => self.problems.clear(ProblemKind::Clock),
        }
    }
}
