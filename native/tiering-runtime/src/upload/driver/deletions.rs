//! Deletions of a stream that is open: one batch at a time, tried again until the store has done it.
//!
//! Owns what waits and when it is tried. Asks the machine before each try whether something names the object by now. What waits
//! when the stream is closed stays in the bucket: a recovery's plan counts it. Does not own what is garbage (the machine does).

use std::sync::Arc;

use tiering_core::upload::{Counters, Problem, StoredObject};

use super::Driver;
use super::tasks::{Done, Task};
use crate::remote_tier::KEYS_MAX;
use crate::stats::Stats;

/// Objects of one stream that wait for their deletion; what is more is counted as failed, and stays in the bucket.
const WAITING_MAX: usize = 100_000;
const PAUSE_MIN_MS: u64 = if cfg!(test) { 10 } else { 1_000 };
/// A permission that is missing is given by a person.
const PAUSE_MAX_MS: u64 = 300_000;
/// Failures in a row from which on an operator should look.
const FAILURES_OF_A_PROBLEM: u32 = 3;
const PROBLEM: &str = "delete";

/// What is to be deleted, and what came of it.
#[derive(Debug, Default)]
pub(super) struct Deletions {
    waiting: Vec<StoredObject>,
    /// Being tried now.
    tried: Vec<StoredObject>,
    /// Not before this time.
    due_ms: Option<u64>,
    failures: u32,
    reason: Option<Arc<str>>,
    fragments_deleted: u64,
    groups_deleted: u64,
    /// What the node's gauge has of this stream.
    shown: usize,
}

/// How a batch ended.
pub(in crate::upload) struct Deleted {
    /// What is still there.
    pub(in crate::upload) left: Vec<StoredObject>,
    /// Why, in the store's words.
    pub(in crate::upload) reason: Option<String>,
}

impl Deletions {
    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() + self.tried.len()
    }

    /// When to try again.
    pub(super) const fn poll_timeout(&self) -> Option<u64> {
        self.due_ms
    }

    /// What an operator should know.
    pub(super) fn problem(&self) -> Option<Problem> {
        let reason = self.reason.as_ref()?;
        (self.failures >= FAILURES_OF_A_PROBLEM).then(|| Problem {
            kind: PROBLEM,
            text: format!(
                "{} objects that nothing names any more cannot be deleted: {reason}",
                self.waiting()
            ),
        })
    }

    /// Counts what is gone, and not what should go.
    pub(super) fn count(&self, counters: &mut Counters) {
        counters.fragments_deleted = self.fragments_deleted;
        counters.groups_deleted = self.groups_deleted;
    }

    /// Brings the node's gauge up to date.
    pub(super) fn show(&mut self, stats: &Stats) {
        self.show_as(stats, self.waiting());
    }

    /// Takes this stream out of the node's gauge.
    pub(super) fn withdraw(&mut self, stats: &Stats) {
        self.show_as(stats, 0);
    }

    fn show_as(&mut self, stats: &Stats, now: usize) {
        let before = std::mem::replace(&mut self.shown, now);
        (stats.deletions_waiting).add(now.saturating_sub(before) as u64);
        (stats.deletions_waiting).subtract(before.saturating_sub(now) as u64);
    }

    /// What failed is gone, or named again.
    fn nothing_waits(&mut self) {
        self.failures = 0;
        self.reason = None;
        self.due_ms = None;
    }

    fn ended(&mut self, now_ms: u64, Deleted { left, reason }: Deleted) {
        for object in self.tried.drain(..) {
            if !left.contains(&object) {
                match object {
                    StoredObject::Fragment { .. } => self.fragments_deleted += 1,
                    StoredObject::Group { .. } => self.groups_deleted += 1,
                    StoredObject::Root { .. } => {}
                }
            }
        }
        if left.is_empty() {
            if self.failures > 0 {
                tracing::info!("objects of the stream can be deleted again");
            }
            self.nothing_waits();
            return;
        }
        let reason = reason.unwrap_or_else(|| "the store did not say why".to_owned());
        if self.failures == 0 {
            tracing::warn!(
                objects = left.len(),
                reason,
                "objects of the stream could not be deleted; they are tried again"
            );
        }
        // Those that came meanwhile are tried first: what fails may be one key.
        let behind = std::mem::replace(&mut self.waiting, left);
        self.waiting.splice(..0, behind);
        let pause_ms = PAUSE_MIN_MS.saturating_mul(1 << self.failures.min(16));
        self.failures = self.failures.saturating_add(1);
        self.due_ms = Some(now_ms.saturating_add(pause_ms.min(PAUSE_MAX_MS)));
        self.reason = Some(Arc::from(reason));
    }
}

impl Driver {
    pub(super) fn delete(&mut self, objects: Vec<StoredObject>) {
        let waiting = &mut self.deletions.waiting;
        let room = WAITING_MAX.saturating_sub(waiting.len());
        let (taken, left) = objects.split_at(room.min(objects.len()));
        waiting.extend(taken);
        if !left.is_empty() {
            (self.workshop.shared.stats.objects_delete_failed).add(left.len() as u64);
        }
        self.delete_next();
    }

    /// Tries the next batch, if none is under way and it is time.
    pub(super) fn delete_next(&mut self) {
        let now_ms = self.now_ms();
        if !self.deletions.tried.is_empty()
            || self.deletions.due_ms.is_some_and(|due_ms| due_ms > now_ms)
        {
            return;
        }
        self.deletions.due_ms = None;
        let machine = &self.machine;
        (self.deletions.waiting).retain(|object| !machine.is_named(object));
        let count = self.deletions.waiting.len().min(KEYS_MAX);
        if count == 0 {
            self.deletions.nothing_waits();
            self.show_problem();
            return;
        }
        let batch: Vec<StoredObject> = self.deletions.waiting.drain(..count).collect();
        self.deletions.tried.clone_from(&batch);
        let work = self.workshop.clone().delete(batch);
        self.spawn(Task::Delete, async move { Done::Deleted(work.await) });
    }

    pub(super) fn deletion_ended(&mut self, deleted: Deleted) {
        self.deletions.ended(self.now_ms(), deleted);
        self.delete_next();
        self.show_problem();
    }

    /// The task died: what it did is not known.
    pub(super) fn deletion_lost(&mut self, text: &str) {
        let left = self.deletions.tried.clone();
        let reason = Some(text.to_owned());
        self.deletion_ended(Deleted { left, reason });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: StoredObject = StoredObject::Fragment {
        first_offset: 7,
        uid: 1,
    };

    /// The pause after a batch that failed.
    fn fail(deletions: &mut Deletions) -> u64 {
        deletions.waiting.clear();
        deletions.tried = vec![OBJECT];
        let left = vec![OBJECT];
        let reason = Some("AccessDenied".to_owned());
        deletions.ended(1_000, Deleted { left, reason });
        deletions.poll_timeout().expect("it is tried again") - 1_000
    }

    #[test]
    fn the_pause_doubles_and_ends_at_five_minutes() {
        let mut deletions = Deletions::default();
        let pauses: Vec<u64> = (0..70).map(|_| fail(&mut deletions)).collect();
        assert_eq!(
            pauses[..3],
            [PAUSE_MIN_MS, 2 * PAUSE_MIN_MS, 4 * PAUSE_MIN_MS]
        );
        assert_eq!(pauses.last(), Some(&PAUSE_MAX_MS));
        assert_eq!((deletions.waiting(), deletions.fragments_deleted), (1, 0));
    }

    #[test]
    fn a_problem_begins_at_the_third_failure_and_ends_when_nothing_waits() {
        let mut deletions = Deletions::default();
        let problems: Vec<bool> = (0..3)
            .map(|_| {
                fail(&mut deletions);
                deletions.problem().is_some()
            })
            .collect();
        assert_eq!(problems, [false, false, true]);
        // What waits is named again, so there is nothing to try.
        deletions.waiting.clear();
        deletions.nothing_waits();
        assert_eq!(
            (deletions.problem(), deletions.poll_timeout()),
            (None, None)
        );
    }
}
