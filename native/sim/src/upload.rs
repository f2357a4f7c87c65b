//! Interprets the effects of [`UploadMachine`]: every request goes to its store as an event of its own, and so does its answer.
//! Between any two of them the machine may be dropped.

mod driver;
mod news;
mod verdicts;

pub use news::Edit;

use std::sync::Arc;

use bytes::Bytes;
use log_format::fragment;
use log_format::manifest::{Group, Kind, Root};
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::upload::promises::Mark;
use tiering_core::upload::{
    CommitOutcome, Effect, Event as MachineEvent, Failure, Pointer, PointerRead, Recovery,
    RetentionBound, ScanEnd, StopReason, StoredObject, UploadMachine,
};

use crate::log::Seam;
use crate::plan::Trouble;
use crate::store::Stored;
use crate::world::{Event, World};

/// A request on its way to who answers it.
#[derive(Debug)]
pub enum Op {
    /// To the metadata store.
    ReadPointer(u64),
    /// To the bucket.
    GetRoot(u64, Pointer),
    /// To the local log.
    Scan {
        generation: u64,
        from_offset: u64,
        seam: Seam,
        up_to_chunk_id: u64,
        max_chunks: usize,
        max_bytes: u64,
    },
    /// To the metadata store.
    WriteAnchor(u64),
    /// To the bucket, from the local log.
    Transfer(u64, u64, Arc<FragmentPlan>),
    /// To the bucket.
    PutRoot(u64, u64, Arc<Root>),
    /// To the metadata store.
    Commit {
        generation: u64,
        epoch: u64,
        uid: u32,
        expected_revision: u64,
    },
    /// To the bucket.
    PutGroup(u64, Arc<Group>),
    /// To the bucket.
    GetGroup(u64, StoredObject),
    /// To the bucket.
    Delete(Vec<StoredObject>),
}

/// One upload machine, and what the simulator remembers about it.
#[derive(Debug)]
pub struct Uploader {
    /// Its stream.
    pub stream: usize,
    /// Its node.
    pub node: usize,
    /// Its epoch.
    pub epoch: u64,
    /// The machine; `None` once it was dropped.
    pub machine: Option<Box<UploadMachine>>,
    /// Even what was on its way is lost.
    pub severed: bool,
    /// It said that it gave something up, and has not persisted since.
    pub recovered: Option<Recovery>,
    /// Where it was cut back to, if that is all that it gave up.
    pub cut_to: Option<u64>,
    /// It said that it is finished.
    pub stopped: Option<StopReason>,
    /// What it was told of the bound.
    pub bound: RetentionBound,
    /// The metadata store said that there is no pointer.
    pub read_none: bool,
    wake_ms: Option<u64>,
    wakes_in_a_row: u32,
    told_soon: bool,
    cancelled_generation: u64,
    last_transfer_done: u64,
    /// Of the group that it waits for, or waited for last.
    group_ticket: u64,
}

impl World {
    /// The writer of a stream starts its machine.
    pub fn start_uploader(&mut self, stream: usize) {
        let seed = self.rng.next();
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        if state.uploader.is_some() || state.metadata.deleted {
            return;
        }
        let (node, epoch) = (state.writer, state.epoch);
        let mut machine = UploadMachine::new(self.now_ms, self.knobs.upload, epoch, seed);
        let uploader = self.uploaders.len();
        state.uploader = Some(uploader);
        machine.set_time(self.now_ms, self.node_time(node));
        self.uploaders.push(Uploader {
            stream,
            node,
            epoch,
            machine: Some(Box::new(machine)),
            severed: false,
            recovered: None,
            cut_to: None,
            stopped: None,
            bound: RetentionBound::default(),
            read_none: false,
            wake_ms: None,
            wakes_in_a_row: 0,
            told_soon: false,
            cancelled_generation: 0,
            last_transfer_done: 0,
            group_ticket: 0,
        });
        self.note(|| {
            format!("uploader {uploader}: starts for stream {stream} on node {node}, epoch {epoch}")
        });
        self.pump(uploader);
        self.at(1, Event::Tell(uploader));
    }

    /// The machine is dropped; what it asked for may or may not happen.
    pub fn crash(&mut self, uploader: usize) {
        if let Some(it) = self.uploaders.get_mut(uploader)
            && it.machine.take().is_some()
        {
            let stream = it.stream;
            if let Some(state) = self.streams.get_mut(stream)
                && state.uploader == Some(uploader)
            {
                state.uploader = None;
            }
            self.note(|| format!("uploader {uploader}: dropped"));
        }
    }

    /// Tells the machine soon what is committed; several reasons are told once.
    pub fn tell_soon(&mut self, uploader: usize) {
        let delay_ms = self.rng.range(0, 20);
        if let Some(it) = self.uploaders.get_mut(uploader)
            && !std::mem::replace(&mut it.told_soon, true)
        {
            self.at(delay_ms, Event::Tell(uploader));
        }
    }

    /// Tells the machine what is committed on its node, and the bound.
    pub fn tell(&mut self, uploader: usize) {
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        it.told_soon = false;
        let Some(state) = self.streams.get(it.stream) else {
            return;
        };
        let Some(disk) = state.disks.get(it.node) else {
            return;
        };
        let local_first_chunk_id = disk.first_offset(&state.log);
        let committed_chunk_id = local_first_chunk_id.map(|_| state.log.id(disk.end - 1));
        let bound = state.bound;
        let changed = it.bound != bound;
        it.bound = bound;
        self.handle(
            uploader,
            MachineEvent::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            },
        );
        if changed {
            self.handle(uploader, MachineEvent::RetentionChanged(bound));
        }
    }

    /// A timeout of the machine, unless it has moved since.
    pub fn wake(&mut self, uploader: usize, at_ms: u64) {
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        if it.wake_ms != Some(at_ms) {
            return;
        }
        it.wake_ms = None;
        it.wakes_in_a_row += 1;
        let wakes = it.wakes_in_a_row;
        self.handle(uploader, MachineEvent::Tick);
        if wakes > 2_000 {
            self.violated(|| format!("liveness: uploader {uploader} is woken and never gets on"));
        }
    }

    /// Something happens to the machine.
    pub fn handle(&mut self, uploader: usize, event: MachineEvent) {
        let now_ms = self.now_ms;
        self.hit_event(uploader, &event);
        self.note(|| format!("uploader {uploader}: {}", shorten(&event)));
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        if !matches!(event, MachineEvent::Tick) {
            it.wakes_in_a_row = 0;
        }
        let node = it.node;
        if it.machine.is_none() {
            return;
        }
        self.hear_store_time(node, &event);
        let time = self.node_time(node);
        let Some(machine) = self
            .uploaders
            .get_mut(uploader)
            .and_then(|it| it.machine.as_mut())
        else {
            return;
        };
        let mark = Mark::of(machine);
        machine.set_time(now_ms, time);
        machine.handle(now_ms, event);
        if !mark.still_holds(machine) {
            self.violated(|| format!("prefix monotonicity: uploader {uploader}"));
        }
        self.pump(uploader);
        self.check_machine(uploader);
    }

    fn hit_event(&mut self, uploader: usize, event: &MachineEvent) {
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        if it.machine.is_none() {
            return;
        }
        let name = match event {
            MachineEvent::PointerRead { outcome, .. } => match outcome {
                PointerRead::Found(_) => "pointer found",
                PointerRead::NotFound => "pointer not found",
                PointerRead::Unavailable => "pointer unavailable",
            },
            MachineEvent::RootRead { outcome, .. } => match outcome {
                Ok(_) => "root read",
                Err(Failure::NotFound(_)) => "root missing",
                Err(Failure::Corrupt(_)) => "root corrupt",
                Err(_) => "root failed",
            },
            MachineEvent::GroupPut { generation, .. }
            | MachineEvent::GroupRead { generation, .. }
                if *generation != it.group_ticket =>
            {
                "group answered late or twice"
            }
            MachineEvent::GroupPut { outcome: Ok(_), .. } => "group put",
            MachineEvent::GroupPut { .. } => "group put failed",
            MachineEvent::GroupRead { outcome, .. } => match outcome {
                Ok(_) => "group read",
                Err(Failure::NotFound(_)) => "group missing",
                Err(Failure::Corrupt(_)) => "group corrupt",
                Err(_) => "group read failed",
            },
            MachineEvent::Committed { .. } => "committed",
            MachineEvent::Scanned { batch, .. } => match batch.end {
                ScanEnd::CaughtUp => "scan caught up",
                ScanEnd::More => "scan more",
                ScanEnd::LocalAhead { .. } => "scan local ahead",
                ScanEnd::RemoteAhead { .. } => "scan remote ahead",
                ScanEnd::Diverged { .. } => "scan diverged",
                ScanEnd::Unrelated { .. } => "scan unrelated",
                ScanEnd::Empty => "scan empty",
                ScanEnd::Failed { .. } => "scan failed",
            },
            MachineEvent::AnchorWritten { ok: true, .. } => "anchor written",
            MachineEvent::AnchorWritten { ok: false, .. } => "anchor refused",
            MachineEvent::TransferDone {
                outcome,
                generation,
                transfer,
            } => match outcome {
                Ok(_) if *generation <= it.cancelled_generation => "transfer abandoned answered",
                Ok(_) if *transfer == it.last_transfer_done => "transfer answered twice",
                Ok(_) if *transfer < it.last_transfer_done => "transfer out of order",
                Ok(_) => "transfer done",
                Err(Failure::NotFound(_)) => "transfer segment trimmed",
                Err(_) => "transfer failed",
            },
            MachineEvent::RootPut { outcome: Ok(_), .. } => "root put",
            MachineEvent::RootPut { .. } => "root put failed",
            MachineEvent::PointerCommitted { outcome, .. } => match outcome {
                CommitOutcome::Committed { .. } => "commit done",
                CommitOutcome::Conflict => "commit conflict",
                CommitOutcome::NotFound => "commit not found",
                CommitOutcome::Unknown => "commit unknown",
            },
            MachineEvent::RetentionChanged(_) => "retention changed",
            MachineEvent::CutRequested => "cut",
            MachineEvent::Tick => "tick",
        };
        if let MachineEvent::TransferDone {
            outcome: Ok(_),
            transfer,
            ..
        } = event
        {
            it.last_transfer_done = it.last_transfer_done.max(*transfer);
        }
        self.coverage.hit(name);
    }

    /// Runs what the machine asks for. The place to add an effect.
    fn pump(&mut self, uploader: usize) {
        while let Some(effect) = self
            .uploaders
            .get_mut(uploader)
            .and_then(|it| it.machine.as_mut()?.poll_effect())
        {
            self.note(|| format!("uploader {uploader}: -> {}", shorten(&effect)));
            self.check_effect(uploader, &effect);
            match effect {
                Effect::ReadPointer { generation } => {
                    self.ask(uploader, "effect ReadPointer", Op::ReadPointer(generation))
                }
                Effect::GetRoot {
                    generation,
                    pointer,
                } => {
                    // It starts over from what is persisted: whatever it gave up before was not.
                    if let Some(it) = self.uploaders.get_mut(uploader) {
                        (it.recovered, it.cut_to) = (None, None);
                    }
                    self.ask(uploader, "effect GetRoot", Op::GetRoot(generation, pointer));
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
                    let op = Op::Scan {
                        generation,
                        from_offset,
                        seam: Seam {
                            front_timestamp_ms,
                            witness,
                        },
                        up_to_chunk_id,
                        max_chunks,
                        max_bytes,
                    };
                    self.ask(uploader, "effect Scan", op);
                }
                Effect::WriteAnchor { generation } => {
                    self.ask(uploader, "effect WriteAnchor", Op::WriteAnchor(generation))
                }
                Effect::Transfer {
                    generation,
                    transfer,
                    plan,
                } => {
                    self.check_anchor(uploader);
                    self.ask(
                        uploader,
                        "effect Transfer",
                        Op::Transfer(generation, transfer, plan),
                    );
                }
                Effect::CancelTransfers { generation } => {
                    self.coverage.hit("effect CancelTransfers");
                    if let Some(it) = self.uploaders.get_mut(uploader) {
                        it.cancelled_generation = it.cancelled_generation.max(generation);
                    }
                }
                Effect::PutRoot {
                    generation,
                    epoch,
                    follows: _,
                    root,
                } => {
                    self.ask(
                        uploader,
                        "effect PutRoot",
                        Op::PutRoot(generation, epoch, root),
                    );
                }
                Effect::CommitPointer {
                    generation,
                    epoch,
                    uid,
                    expected_revision,
                    ..
                } => {
                    let op = Op::Commit {
                        generation,
                        epoch,
                        uid,
                        expected_revision,
                    };
                    self.ask(uploader, "effect CommitPointer", op);
                }
                Effect::Publish {
                    root,
                    revision,
                    confirmed,
                    pointer,
                } => self.publish_manifest(uploader, root, revision, confirmed, pointer),
                Effect::PutGroup {
                    generation, group, ..
                } => {
                    self.check_anchor(uploader);
                    self.group_asked(uploader, generation);
                    let name = match group.kind {
                        Kind::MegaGroup => "effect PutGroup (mega)",
                        Kind::KiloGroup => "effect PutGroup (kilo)",
                        Kind::Fragment | Kind::Group => "effect PutGroup",
                    };
                    self.ask(uploader, name, Op::PutGroup(generation, group));
                }
                Effect::GetGroup {
                    generation,
                    kind,
                    first_offset,
                    uid,
                } => {
                    self.group_asked(uploader, generation);
                    let object = StoredObject::Group {
                        kind,
                        first_offset,
                        uid,
                    };
                    self.ask(
                        uploader,
                        "effect GetGroup",
                        Op::GetGroup(generation, object),
                    );
                }
                Effect::Delete { objects } => {
                    self.ask(uploader, "effect Delete", Op::Delete(objects))
                }
                Effect::Recovered {
                    kind,
                    from_offset,
                    to_offset,
                } => self.recovered(uploader, kind, from_offset, to_offset),
                // No object is ever lost here.
                Effect::Abandoned {
                    first_offset,
                    next_offset,
                    ..
                } => self.violated(|| {
                    format!("never given up: [{first_offset}, {next_offset}) was there")
                }),
                Effect::Problem { .. } => self.coverage.hit("effect Problem"),
                Effect::Stop { reason } => self.machine_stopped(uploader, reason),
            }
        }
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        let timeout_ms = it
            .machine
            .as_ref()
            .and_then(|machine| machine.poll_timeout());
        if timeout_ms != it.wake_ms {
            it.wake_ms = timeout_ms;
            if let Some(at_ms) = timeout_ms {
                self.at(
                    at_ms.saturating_sub(self.now_ms),
                    Event::Wake(uploader, at_ms),
                );
            }
        }
    }

    fn group_asked(&mut self, uploader: usize, generation: u64) {
        if let Some(it) = self.uploaders.get_mut(uploader) {
            it.group_ticket = generation;
        }
    }

    fn ask(&mut self, uploader: usize, name: &'static str, op: Op) {
        self.coverage.hit(name);
        let delay_ms = self.latency_ms();
        self.at(delay_ms, Event::Apply(uploader, op));
    }
}

/// One line of something, without its bulk.
pub fn shorten(thing: &impl std::fmt::Debug) -> String {
    let mut text = format!("{thing:?}");
    if text.len() > 300 {
        let end = (0..=300)
            .rev()
            .find(|at| text.is_char_boundary(*at))
            .unwrap_or(0);
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}
