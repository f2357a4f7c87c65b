//! Remote retention: the user's bound, applied to what is persisted. What it drops is an edit like any other, and is deleted
//! only after the persist that no longer names it. Fragments of the root are dropped here; a group is the tree's.

use log_format::manifest::{Kind, NO_TIMESTAMP};

use super::{Phase, ReplicaReader, RetentionBound};
use crate::manifest::{edit, retention};
use crate::mutants::mutant;

impl ReplicaReader {
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
        let durable = self
            .manifest
            .entries
            .get(..self.durable_entries())
            .unwrap_or_default();
        let total_bytes = self.manifest.total_size_bytes;
        let count =
            retention::leading_to_drop(durable, total_bytes, self.bound, self.wall_now_ms());
        let count = if mutant!(RetainLastEntry) {
            count.min(self.manifest.entries.len().saturating_sub(1))
        } else {
            count
        };
        if count == 0 {
            return;
        }
        let count = if mutant!(RetainTooMuch) {
            (count + 1).min(durable.len())
        } else {
            count
        };
        if let Ok(dropped) = edit::drop_leading(&mut self.manifest, count) {
            let objects = super::objects(&dropped, self.manifest.first_offset);
            if mutant!(DeleteBeforePersist) {
                self.effects.push_back(super::Effect::Delete {
                    objects: objects.map(|(object, _)| object).collect(),
                });
            } else {
                self.garbage.extend(objects);
            }
            self.note_edit();
        }
    }

    /// When the oldest fragment gets too old, on our clock.
    pub(super) fn retention_deadline_ms(&self) -> Option<u64> {
        if self.durable_entries() == 0 {
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
        let left_ms = u64::try_from(expiry_ms.saturating_sub(self.wall_now_ms()?)).unwrap_or(0);
        Some(self.now_ms.saturating_add(left_ms))
    }

    /// The wall clock, as last told and moved on by our own.
    pub(super) fn wall_now_ms(&self) -> Option<i64> {
        let (at_ms, wall_ms) = self.wall?;
        let since_ms = i64::try_from(self.now_ms.saturating_sub(at_ms)).unwrap_or(i64::MAX);
        Some(wall_ms.saturating_add(since_ms))
    }
}
