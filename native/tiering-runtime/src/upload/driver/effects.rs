//! Effects become tasks and pushes: the one place where each effect of the upload machine is carried out.

use std::sync::Arc;

use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::upload::{Effect, Event, Failure, Pointer, StopReason};

use tracing::Instrument;

use super::Driver;
use super::tasks::{Done, Task};
use crate::local_log::{ScanRequest, Scanner};
use crate::object_metadata::RootHistory;
use crate::shared::Shared;
use crate::upload::questions::Question;
use crate::upload::work::Stored;
use crate::upload::{Stopped, UploadPush};

impl Driver {
    pub(super) fn run_effect(&mut self, effect: Effect) {
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
            } => self.get_root(generation, pointer),
            Effect::PutRoot {
                generation,
                epoch,
                follows,
                root,
            } => {
                let history = RootHistory {
                    recoveries: self.recoveries,
                    epoch,
                    follows,
                    abandoned: self.abandoned.as_ref().map(|(name, _)| *name),
                };
                let work = self.workshop.clone().put_root(root, history);
                self.put(Task::PutRoot { generation }, work, move |outcome| {
                    Event::RootPut {
                        generation,
                        outcome,
                    }
                });
            }
            Effect::PutGroup {
                generation,
                next_offset,
                group,
            } => {
                let work = self.workshop.clone().put_group(group, next_offset);
                self.put(Task::PutGroup { generation }, work, move |outcome| {
                    Event::GroupPut {
                        generation,
                        outcome,
                    }
                });
            }
            Effect::GetGroup {
                generation,
                kind,
                first_offset,
                uid,
            } => {
                let work = self.workshop.clone().get_group(kind, first_offset, uid);
                self.answer_with(Task::GetGroup { generation }, work, move |outcome| {
                    Event::GroupRead {
                        generation,
                        outcome,
                    }
                });
            }
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => self.transfer(generation, transfer, plan),
            Effect::CancelTransfers { generation } => self.cancel_transfers(generation),
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
            Effect::Delete { objects } => self.delete(objects),
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
            Effect::Problem { problem } => self.report_problem(problem),
            Effect::Stop { reason } => {
                tracing::info!(?reason, "uploads of the stream have stopped");
                self.stopped = true;
                self.sink.push(UploadPush::Stopped(match reason {
                    StopReason::Deleted => Stopped::Deleted,
                    StopReason::Deposed => Stopped::ConflictLost,
                }));
            }
        }
    }

    fn get_root(&mut self, generation: u64, pointer: Pointer) {
        let work = self.workshop.clone().get_root(pointer);
        self.spawn(Task::GetRoot { generation }, async move {
            let (outcome, history) = match work.await {
                Ok((root, history)) => (Ok(root), history),
                Err(failure) => (Err(failure), RootHistory::default()),
            };
            let event = Event::RootRead {
                generation,
                outcome,
            };
            Done::RootRead(event, history)
        });
    }

    fn transfer(&mut self, generation: u64, transfer: u64, plan: Arc<FragmentPlan>) {
        let task = Task::Transfer {
            generation,
            transfer,
        };
        // One that is still under way answers by its own deadline; starting again would only lose its place in line.
        if self.running.values().any(|(running, _)| *running == task) {
            return;
        }
        let work = self.workshop.clone().transfer(plan);
        self.put(task, work, move |outcome| Event::TransferDone {
            generation,
            transfer,
            outcome,
        });
    }

    fn cancel_transfers(&self, up_to: u64) {
        for (task, abort) in self.running.values() {
            if matches!(task, Task::Transfer { generation, .. } if *generation <= up_to) {
                abort.abort();
            }
        }
    }

    /// Runs a PUT; what it ends with becomes one event, and what earlier attempts may have left is deleted.
    fn put(
        &mut self,
        task: Task,
        work: impl Future<Output = Result<Stored, Failure>> + Send + 'static,
        answer: impl FnOnce(Result<u32, Failure>) -> Event + Send + 'static,
    ) {
        self.spawn(task, async move {
            match work.await {
                Ok(Stored { uid, superseded }) => Done::Stored(answer(Ok(uid)), superseded),
                Err(failure) => Done::Event(answer(Err(failure))),
            }
        });
    }

    /// Runs a request to the store; what it ends with becomes one event.
    fn answer_with<T: Send + 'static>(
        &mut self,
        task: Task,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
        answer: impl FnOnce(Result<T, Failure>) -> Event + Send + 'static,
    ) {
        self.spawn(task, async move { Done::Event(answer(work.await)) });
    }

    fn ask(&mut self, question: fn(&mut Self) -> &mut Question, generation: u64, push: UploadPush) {
        let now_ms = self.now_ms();
        if let Some(push) = question(self).ask(now_ms, generation, push) {
            self.sink.push(push);
        }
    }

    pub(super) fn spawn(&mut self, task: Task, work: impl Future<Output = Done> + Send + 'static) {
        let abort = self.tasks.spawn(work.in_current_span());
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
}
