//! Remote retention: the user's bound, applied to what is persisted. What it drops is an edit like any other, and is deleted
//! only after the persist that no longer names it.

use log_format::manifest::Kind;

use super::{Phase, ReplicaReader, RetentionBound, StoredObject};
use crate::manifest::{edit, retention};
use crate::mutants::mutant;

impl ReplicaReader {
    pub(super) fn on_retention_changed(&mut self, bound: RetentionBound) {
        self.bound = bound;
    }

    /// How many leading entries are persisted: the ones that may be dropped.
    fn durable_entries(&self) -> usize {
        // After a recovery nothing in memory is persisted yet, whatever the offsets say.
        // Nor is anything dropped from a manifest that the local log has not been seen to continue: to persist that would
        // publish it as confirmed, and local retention would trim by a timeline that may be no more.
        if self.diverged || self.unconfirmed || !matches!(self.phase, Phase::Running) {
            return 0;
        }
        let next_offset = self.persisted.next_offset;
        self.manifest
            .entries
            .partition_point(|entry| entry.first_offset < next_offset)
    }

    pub(super) fn retain(&mut self) {
        let durable = self
            .manifest
            .entries
            .get(..self.durable_entries())
            .unwrap_or_default();
        let total_bytes = self.manifest.total_size_bytes;
        let count =
            retention::leading_to_drop(durable, total_bytes, self.bound, self.wall_now_ms());
        if count == 0 {
            return;
        }
        let count = if mutant!(RetainTooMuch) {
            (count + 1).min(durable.len())
        } else {
            count
        };
        if let Ok(dropped) = edit::drop_leading(&mut self.manifest, count) {
            let objects = dropped.iter().map(|entry| StoredObject::Fragment {
                first_offset: entry.first_offset,
                uid: entry.uid,
            });
            if mutant!(DeleteBeforePersist) {
                self.effects.push_back(super::Effect::Delete {
                    objects: objects.collect(),
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
        // A leading group is not dropped here, so its age is nothing to wake up for.
        let first = self
            .manifest
            .entries
            .first()
            .filter(|first| first.kind == Kind::Fragment)?;
        let expiry_ms = retention::expiry_ms(first, self.bound)?;
        let left_ms = u64::try_from(expiry_ms.saturating_sub(self.wall_now_ms()?)).unwrap_or(0);
        Some(self.now_ms.saturating_add(left_ms))
    }

    /// The wall clock, as last told and moved on by our own.
    fn wall_now_ms(&self) -> Option<i64> {
        let (at_ms, wall_ms) = self.wall?;
        let since_ms = i64::try_from(self.now_ms.saturating_sub(at_ms)).unwrap_or(i64::MAX);
        Some(wall_ms.saturating_add(since_ms))
    }
}
