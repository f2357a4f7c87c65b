//! Drives one stream's upload machine: effects become tasks and pushes, results and answers become events.
//!
//! Owns the stream's tasks and timers; all of them end with the driver. Every task ends in an event, also one that was
//! cancelled or died. An idle stream has no timer, no open request and no buffer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tiering_core::upload::{Activity, Event, Problem, Settings, UploadMachine};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use super::questions::Question;
use super::sums::Share;
use super::work::Workshop;
use super::{Stopped, UploadConfig, UploadEvent, UploadPush, UploadSink, UploadStatus};
use crate::clock::random_u64;
use crate::local_log::Scanner;
use crate::settings::Config;
use crate::shared::Shared;

mod abandoned;
mod deletions;
mod effects;
mod publish;
mod tasks;

use abandoned::RootName;
pub(super) use deletions::Deleted;
use deletions::Deletions;
use tasks::{Done, Task};

/// The shell's own time limit for the metadata store is 30 s; its answer should be the one that counts.
const ANSWER_DEADLINE_MS: u64 = 35_000;

/// Transfers end by a deadline of their own, which starts when they are admitted. The machine's starts before, so it must be
/// long enough for any wait; it only helps against a lost task, and the driver loses none.
const LOST_TRANSFER_FACTOR: u64 = 60;

/// Index bytes of all streams of the node: during an outage of the store, thousands of streams of tiny chunks must not fill the
/// broker's memory. Each stream may hold one batch of a scan beyond it (80 KB).
const INDEX_BYTES_MAX: u64 = if cfg!(test) { 20_000 } else { 128 << 20 };

/// A machine's settings from the engine's.
fn machine_settings(config: &Config) -> Settings {
    Settings {
        fragment_size_bytes: config.fragment_size_bytes,
        fragment_max_age_ms: config.fragment_max_age_ms,
        persist_threshold: config.persist_threshold,
        persist_interval_ms: config.persist_interval_ms,
        rebalance_threshold: config.rebalance_threshold,
        max_in_flight_transfers: config.max_concurrent_transfers.saturating_mul(2).max(2),
        transfer_deadline_ms: config
            .transfer_deadline_ms
            .saturating_mul(LOST_TRANSFER_FACTOR),
        answer_deadline_ms: ANSWER_DEADLINE_MS,
        ..Settings::default()
    }
}

/// The shared atomics as last reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::upload) struct Committed {
    pub(in crate::upload) committed_chunk_id: Option<u64>,
    pub(in crate::upload) local_first_chunk_id: Option<u64>,
}

/// A status that the driver writes and the shell reads.
pub(in crate::upload) type SharedStatus = Arc<Mutex<UploadStatus>>;

/// The driver; see the module's page.
pub(super) struct Driver {
    machine: UploadMachine,
    workshop: Workshop,
    sink: Arc<dyn UploadSink>,
    status: SharedStatus,
    share: Share,
    /// Away while a scan runs.
    scanner: Option<Scanner>,
    tasks: JoinSet<Done>,
    running: HashMap<Id, (Task, AbortHandle)>,
    pointer: Question,
    anchor: Question,
    commit: Question,
    deletions: Deletions,
    machine_problem: Option<Problem>,
    reported_problem: Option<&'static str>,
    /// How often the stream was recovered from the bucket, as its root says.
    recoveries: u64,
    /// The root that names history which was given up, and its key.
    abandoned: Option<(RootName, Arc<str>)>,
    stopped: bool,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        stream: UploadConfig,
        sink: Arc<dyn UploadSink>,
    ) -> (Self, SharedStatus) {
        let settings = machine_settings(&shared.config);
        let machine =
            UploadMachine::new(shared.clock.now_ms(), settings, stream.epoch, random_u64());
        let status = UploadStatus {
            machine: machine.status(),
            counters: machine.counters(),
            deletions_waiting: 0,
            abandoned_root: None,
        };
        let status = Arc::new(Mutex::new(status));
        shared.stats.streams_open.increment();
        shared.manifests.take(&stream.stream_id);
        let driver = Self {
            machine,
            workshop: Workshop {
                shared,
                series: Arc::default(),
                directory: Arc::from(stream.directory.as_path()),
                stream: Arc::new(stream),
            },
            sink,
            status: Arc::clone(&status),
            share: Share::default(),
            scanner: None,
            tasks: JoinSet::new(),
            running: HashMap::new(),
            pointer: Question::default(),
            anchor: Question::default(),
            commit: Question::default(),
            deletions: Deletions::default(),
            machine_problem: None,
            reported_problem: None,
            recoveries: 0,
            abandoned: None,
            stopped: false,
        };
        (driver, status)
    }

    fn now_ms(&self) -> u64 {
        self.workshop.shared.clock.now_ms()
    }

    /// Runs until the machine stops or the handle is dropped. Boxed, because a future keeps what it is given twice: as the
    /// argument, and as what it works on.
    pub(super) async fn run(
        mut self: Box<Self>,
        mut events: mpsc::Receiver<UploadEvent>,
        mut committed: watch::Receiver<Committed>,
    ) {
        self.run_effects();
        while !self.stopped {
            let clock = self.workshop.shared.clock;
            let deadline = self.poll_timeout().map(|at_ms| clock.instant_at(at_ms));
            let event = tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.shell_event(event),
                    None => return,
                },
                changed = committed.changed() => match changed {
                    Ok(()) => {
                        let Committed { committed_chunk_id, local_first_chunk_id } = *committed.borrow_and_update();
                        Some(Event::Committed { committed_chunk_id, local_first_chunk_id })
                    }
                    Err(_) => return,
                },
                Some(ended) = self.tasks.join_next_with_id(), if !self.tasks.is_empty() => self.task_ended(ended),
                () = sleep_until(deadline), if deadline.is_some() => Some(self.time_passed()),
            };
            if let Some(event) = event {
                let time = self.workshop.shared.timekeeper.now();
                self.machine.set_time(self.now_ms(), time);
                let stats = &self.workshop.shared.stats;
                let room_bytes = self.share.index_room_bytes(stats, INDEX_BYTES_MAX);
                self.machine.set_index_room(room_bytes);
                self.machine.handle(self.now_ms(), event);
                self.run_effects();
            }
        }
    }

    fn poll_timeout(&self) -> Option<u64> {
        let questions = [&self.pointer, &self.anchor, &self.commit]
            .into_iter()
            .filter_map(Question::poll_timeout);
        questions
            .chain(self.machine.poll_timeout())
            .chain(self.deletions.poll_timeout())
            .min()
    }

    fn time_passed(&mut self) -> Event {
        let now_ms = self.now_ms();
        for question in [&mut self.pointer, &mut self.anchor, &mut self.commit] {
            if let Some(push) = question.release(now_ms) {
                self.sink.push(push);
            }
        }
        self.delete_next();
        Event::Tick
    }

    fn shell_event(&mut self, event: UploadEvent) -> Option<Event> {
        Some(match event {
            UploadEvent::Pointer(outcome) => Event::PointerRead {
                generation: self.answered(|driver| &mut driver.pointer)?,
                outcome,
            },
            UploadEvent::Anchor { ok } => Event::AnchorWritten {
                generation: self.answered(|driver| &mut driver.anchor)?,
                ok,
            },
            UploadEvent::PointerCommitted(outcome) => Event::PointerCommitted {
                generation: self.answered(|driver| &mut driver.commit)?,
                outcome,
            },
            UploadEvent::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            } => Event::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            },
            UploadEvent::Retention(bound) => Event::RetentionChanged(bound),
            UploadEvent::Cut => Event::CutRequested,
        })
    }

    fn answered(&mut self, question: fn(&mut Self) -> &mut Question) -> Option<u64> {
        let now_ms = self.now_ms();
        let (generation, push) = question(self).answered(now_ms);
        if let Some(push) = push {
            self.sink.push(push);
        }
        generation
    }

    fn task_ended(&mut self, ended: Result<(Id, Done), JoinError>) -> Option<Event> {
        let id = match &ended {
            Ok((id, _)) => *id,
            Err(error) => error.id(),
        };
        let task = self.running.remove(&id).map(|(task, _)| task);
        match ended {
            Ok((_, Done::Event(event))) => Some(event),
            Ok((_, Done::RootRead(event, history))) => {
                // What comes too late says what was known before.
                if self.machine.status().activity == Activity::Resolving {
                    self.recoveries = history.recoveries;
                    self.abandoned = (history.abandoned).map(|name| (name, self.key_of(name)));
                }
                Some(event)
            }
            Ok((_, Done::Scanned(scanner, event))) => {
                self.scanner = Some(scanner);
                Some(event)
            }
            Ok((_, Done::Stored(event, superseded))) => {
                self.delete(superseded);
                Some(event)
            }
            Ok((_, Done::Deleted(deleted))) => {
                self.deletion_ended(deleted);
                // The status says it.
                Some(Event::Tick)
            }
            Err(error) => {
                if error.is_panic() {
                    self.workshop.shared.stats.tasks_lost.increment();
                    tracing::error!(
                        "a task of the native side died, which is a bug: its work is tried again"
                    );
                }
                let text = if error.is_panic() {
                    "the task died"
                } else {
                    "the task was cancelled"
                };
                if task == Some(Task::Delete) {
                    self.deletion_lost(text);
                }
                task?.lost(text)
            }
        }
    }

    fn run_effects(&mut self) {
        // The status first: who acts on a push may look at it.
        let mut machine = self.machine.status();
        machine.problem = machine.problem.or_else(|| self.deletions.problem());
        let mut counters = self.machine.counters();
        self.deletions.count(&mut counters);
        self.deletions.show(&self.workshop.shared.stats);
        let status = UploadStatus {
            machine,
            counters,
            deletions_waiting: self.deletions.waiting(),
            abandoned_root: self.abandoned.as_ref().map(|(_, key)| Arc::clone(key)),
        };
        self.share
            .update(&self.workshop.shared.stats, &status.machine);
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
        while let Some(effect) = self.machine.poll_effect() {
            self.run_effect(effect);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let Shared {
            stats, manifests, ..
        } = &*self.workshop.shared;
        stats.streams_open.subtract(1);
        self.share.withdraw(stats);
        self.deletions.withdraw(stats);
        manifests.give_back(&self.workshop.stream.stream_id);
        if std::thread::panicking() {
            self.sink.push(UploadPush::Stopped(Stopped::Bug));
        }
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    if let Some(deadline) = deadline {
        tokio::time::sleep_until(deadline).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node has thousands of streams, most of them idle: what each holds while nothing happens.
    #[test]
    fn what_an_idle_stream_holds_is_small() {
        fn size_of_answer<Run, Future>(_: Run) -> usize
        where
            Run: FnOnce(
                Box<Driver>,
                mpsc::Receiver<UploadEvent>,
                watch::Receiver<Committed>,
            ) -> Future,
        {
            size_of::<Future>()
        }
        assert!(size_of_answer(Driver::run) <= 1_024);
        assert!(size_of::<Driver>() <= 3_072);
        assert!(size_of::<UploadEvent>() <= 64, "a queue has 32 at least");
    }
}
