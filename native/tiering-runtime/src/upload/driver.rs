//! Drives one stream's upload machine: effects become tasks and pushes, results and answers become events.
//!
//! Owns the stream's tasks and timers; all of them end with the driver. Every task ends in an event, also one that was
//! cancelled or died. An idle stream has no timer, no open request and no buffer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tiering_core::upload::{
    Activity, Effect, Event, Failure, Pointer, Problem, ScanBatch, ScanEnd, Settings, StopReason,
    UploadMachine,
};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use super::handle::{Committed, SharedStatus};
use super::questions::Question;
use super::sums::Share;
use super::work::Workshop;
use super::{
    EditFrom, Range, Stopped, UploadConfig, UploadEvent, UploadPush, UploadSink, UploadStatus,
};
use crate::clock::random_u64;
use crate::engine::Shared;
use crate::local_log::{ScanRequest, Scanner};
use crate::manifests::ResolvedManifest;
use crate::settings::Config;

mod abandoned;

use abandoned::RootName;

/// The shell's own time limit for the metadata store is 30 s; its answer should be the one that counts.
const ANSWER_DEADLINE_MS: u64 = 35_000;

/// Transfers end by a deadline of their own, which starts when they are admitted. The machine's starts before, so it must be
/// long enough for any wait; it only helps against a lost task, and the driver loses none.
const LOST_TRANSFER_FACTOR: u64 = 60;

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

/// What a task does, to answer for it if it cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Scan { generation: u64 },
    GetRoot { generation: u64 },
    Transfer { generation: u64, transfer: u64 },
    PutRoot { generation: u64 },
    PutGroup { generation: u64 },
    GetGroup { generation: u64 },
    Delete,
}

impl Task {
    /// The answer of a task that did not give one.
    fn lost(self, text: &str) -> Option<Event> {
        let failure = Failure::Transient(text.to_owned());
        Some(match self {
            Self::Scan { generation } => {
                let end = ScanEnd::Failed {
                    reason: text.to_owned(),
                };
                Event::Scanned {
                    generation,
                    batch: ScanBatch {
                        chunks: Vec::new(),
                        end,
                    },
                }
            }
            Self::GetRoot { generation } => Event::RootRead {
                generation,
                outcome: Err(failure),
            },
            Self::Transfer {
                generation,
                transfer,
            } => Event::TransferDone {
                generation,
                transfer,
                outcome: Err(failure),
            },
            Self::PutRoot { generation } => Event::RootPut {
                generation,
                outcome: Err(failure),
            },
            Self::PutGroup { generation } => Event::GroupPut {
                generation,
                outcome: Err(failure),
            },
            Self::GetGroup { generation } => Event::GroupRead {
                generation,
                outcome: Err(failure),
            },
            Self::Delete => return None,
        })
    }
}

/// What a task ended with.
enum Done {
    Event(Event),
    RootRead(Event, Option<RootName>),
    Scanned(Scanner, Event),
    Nothing,
}

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
    told_problem: Option<&'static str>,
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
            abandoned_root: None,
        };
        let status = Arc::new(Mutex::new(status));
        shared.stats.streams_open.increment();
        shared.manifests.take(&stream.stream_id);
        let driver = Self {
            machine,
            workshop: Workshop {
                shared,
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
            told_problem: None,
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
                self.machine.handle(self.now_ms(), event);
                self.run_effects();
            }
        }
    }

    fn poll_timeout(&self) -> Option<u64> {
        let questions = [&self.pointer, &self.anchor, &self.commit]
            .into_iter()
            .filter_map(Question::poll_timeout);
        questions.chain(self.machine.poll_timeout()).min()
    }

    fn time_passed(&mut self) -> Event {
        let now_ms = self.now_ms();
        for question in [&mut self.pointer, &mut self.anchor, &mut self.commit] {
            if let Some(push) = question.release(now_ms) {
                self.sink.push(push);
            }
        }
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
            Ok((_, Done::RootRead(event, abandoned))) => {
                // What comes too late says what was known before.
                if self.machine.status().activity == Activity::Resolving {
                    self.abandoned = abandoned.map(|name| (name, self.key_of(name)));
                }
                Some(event)
            }
            Ok((_, Done::Scanned(scanner, event))) => {
                self.scanner = Some(scanner);
                Some(event)
            }
            Ok((_, Done::Nothing)) => None,
            Err(error) => {
                if error.is_panic() {
                    self.workshop.shared.stats.tasks_lost.increment();
                }
                task?.lost(if error.is_panic() {
                    "the task died"
                } else {
                    "the task was cancelled"
                })
            }
        }
    }

    fn run_effects(&mut self) {
        // The status first: who acts on a push may look at it.
        let status = UploadStatus {
            machine: self.machine.status(),
            counters: self.machine.counters(),
            abandoned_root: self.abandoned.as_ref().map(|(_, key)| Arc::clone(key)),
        };
        self.share
            .update(&self.workshop.shared.stats, &status.machine);
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
        while let Some(effect) = self.machine.poll_effect() {
            self.run_effect(effect);
        }
    }

    fn run_effect(&mut self, effect: Effect) {
        match effect {
            Effect::ReadPointer { generation } => {
                self.ask(
                    |driver| &mut driver.pointer,
                    generation,
                    UploadPush::ReadPointer,
                );
            }
            Effect::WriteAnchor { generation } => {
                self.ask(
                    |driver| &mut driver.anchor,
                    generation,
                    UploadPush::WriteAnchor,
                );
            }
            Effect::CommitPointer {
                generation,
                epoch,
                uid,
                next_offset,
                expected_revision,
            } => {
                let push = UploadPush::CommitPointer {
                    epoch,
                    uid,
                    next_offset,
                    expected_revision,
                };
                self.ask(|driver| &mut driver.commit, generation, push);
            }
            Effect::GetRoot {
                generation,
                pointer,
            } => {
                let work = self.workshop.clone().get_root(pointer);
                self.spawn(Task::GetRoot { generation }, async move {
                    let (outcome, abandoned) = match work.await {
                        Ok((root, abandoned)) => (Ok(root), abandoned),
                        Err(failure) => (Err(failure), None),
                    };
                    let event = Event::RootRead {
                        generation,
                        outcome,
                    };
                    Done::RootRead(event, abandoned)
                });
            }
            Effect::PutRoot {
                generation,
                epoch,
                root,
            } => {
                let abandoned = self.abandoned.as_ref().map(|(name, _)| *name);
                let work = self.workshop.clone().put_root(epoch, root, abandoned);
                self.spawn(Task::PutRoot { generation }, async move {
                    Done::Event(Event::RootPut {
                        generation,
                        outcome: work.await,
                    })
                });
            }
            Effect::PutGroup {
                generation,
                next_offset,
                group,
            } => {
                let work = self.workshop.clone().put_group(group, next_offset);
                self.spawn(Task::PutGroup { generation }, async move {
                    Done::Event(Event::GroupPut {
                        generation,
                        outcome: work.await,
                    })
                });
            }
            Effect::GetGroup {
                generation,
                kind,
                first_offset,
                uid,
            } => {
                let work = self.workshop.clone().get_group(kind, first_offset, uid);
                self.spawn(Task::GetGroup { generation }, async move {
                    Done::Event(Event::GroupRead {
                        generation,
                        outcome: work.await,
                    })
                });
            }
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => {
                let task = Task::Transfer {
                    generation,
                    transfer,
                };
                // One that is still under way answers by its own deadline; starting again would only lose its place in line.
                if self.running.values().all(|(running, _)| *running != task) {
                    let work = self.workshop.clone().transfer(plan);
                    self.spawn(task, async move {
                        Done::Event(Event::TransferDone {
                            generation,
                            transfer,
                            outcome: work.await,
                        })
                    });
                }
            }
            Effect::CancelTransfers { generation: up_to } => {
                for (task, abort) in self.running.values() {
                    if matches!(task, Task::Transfer { generation, .. } if *generation <= up_to) {
                        abort.abort();
                    }
                }
            }
            Effect::Scan {
                generation,
                from_offset,
                front_timestamp_ms,
                witness,
                up_to_chunk_id,
                max_chunks,
                max_bytes,
            } => {
                let request = ScanRequest {
                    from_offset,
                    front_timestamp_ms,
                    witness,
                    up_to_chunk_id,
                    max_chunks,
                    max_bytes,
                };
                self.scan(generation, request);
            }
            Effect::Publish {
                root,
                revision,
                confirmed,
                pointer,
            } => self.publish(root, revision, pointer, confirmed),
            Effect::Delete { objects } => {
                let work = self.workshop.clone().delete(objects);
                self.spawn(Task::Delete, async move {
                    work.await;
                    Done::Nothing
                });
            }
            Effect::Recovered {
                kind,
                from_offset,
                to_offset,
            } => {
                self.sink.push(UploadPush::Recovery {
                    kind,
                    from_offset,
                    to_offset,
                });
            }
            Effect::Abandoned {
                root,
                first_offset,
                next_offset,
            } => self.abandoned(root, first_offset, next_offset),
            Effect::Problem { problem } => self.tell_problem(problem),
            Effect::Stop { reason } => {
                self.stopped = true;
                self.sink.push(UploadPush::Stopped(match reason {
                    StopReason::Deleted => Stopped::Deleted,
                    StopReason::Deposed => Stopped::ConflictLost,
                }));
            }
        }
    }

    fn ask(&mut self, question: fn(&mut Self) -> &mut Question, generation: u64, push: UploadPush) {
        let now_ms = self.now_ms();
        if let Some(push) = question(self).ask(now_ms, generation, push) {
            self.sink.push(push);
        }
    }

    fn spawn(&mut self, task: Task, work: impl Future<Output = Done> + Send + 'static) {
        let abort = self.tasks.spawn(work);
        self.running.insert(abort.id(), (task, abort));
    }

    fn scan(&mut self, generation: u64, request: ScanRequest) {
        // Away only if an earlier scan's answer is still awaited although the machine has given it up.
        let mut scanner = self.scanner.take().unwrap_or_else(|| {
            let Shared { buffers, stats, .. } = &*self.workshop.shared;
            Scanner::new(
                self.workshop.stream.directory.clone(),
                Arc::clone(buffers),
                Arc::clone(stats),
            )
        });
        let abort = self.tasks.spawn_blocking(move || {
            let batch = scanner.scan(&request);
            Done::Scanned(scanner, Event::Scanned { generation, batch })
        });
        self.running
            .insert(abort.id(), (Task::Scan { generation }, abort));
    }

    fn publish(
        &mut self,
        root: Arc<log_format::manifest::Root>,
        revision: u64,
        pointer: Option<Pointer>,
        confirmed: bool,
    ) {
        let epoch = self.workshop.stream.epoch;
        let range = Range::of(&root, revision, epoch, pointer);
        let stream_id = &self.workshop.stream.stream_id;
        let manifests = &self.workshop.shared.manifests;
        let manifest = ResolvedManifest {
            root,
            revision,
            epoch,
            pointer,
        };
        let edit = match manifests.resolved(stream_id) {
            Some(before) if confirmed => EditFrom::between(&before, &manifest),
            Some(_) | None => None,
        };
        // Readers first: what local retention trims because of the push must be findable by then.
        manifests.publish(stream_id, manifest);
        // The shell trims the local log by what it is told.
        if confirmed {
            self.sink.push(UploadPush::Range(range, edit));
        }
    }

    fn tell_problem(&mut self, problem: Option<Problem>) {
        let kind = problem.as_ref().map(|problem| problem.kind);
        if let Some(over) = self.told_problem.filter(|told| Some(*told) != kind) {
            self.sink.push(UploadPush::Recovered { kind: over });
        }
        self.told_problem = kind;
        if let Some(Problem { kind, text }) = problem {
            self.sink.push(UploadPush::Problem { kind, text });
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
