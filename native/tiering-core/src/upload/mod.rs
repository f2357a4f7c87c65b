//! The upload machine of one stream on its writer's node: every decision between a committed chunk and a durable one.
//!
//! ```text
//! resolve   ReadPointer -> GetRoot                                what is persisted?       [resolve]
//! drain     Committed -> Scan -> chunks -> cut                    local log to fragments   [drain]
//! transfer  (WriteAnchor ->) Transfer -> applied in cut order     fragments to the bucket  [transfers]
//! persist   PutRoot -> CommitPointer -> Publish, Delete           durable                  [persist]
//! rebalance PutGroup                                              the root stays small     [tree]
//! retain    (GetGroup ->)                  the user's bound, on what is persisted           [retain, tree]
//! recover   local and remote no longer meet                                                [recovery]
//! ```
//!
//! Owns: order, limits, retries, deadlines. Does not own: tasks, clocks, chance; they come in as arguments. An event goes in by
//! [`UploadMachine::handle`], work comes out by [`UploadMachine::poll_effect`], and [`UploadMachine::poll_timeout`] says when
//! to look again although nothing happened.
//!
//! After every event all that can go on does go on (`advance`): no path has to remember what another one waits for. Every
//! answer that is waited for has a deadline, so a lost task delays and never blocks.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use log_format::manifest::{Entry, Kind, Root};

use crate::trusted_time::Doubt;

mod deletion;
mod drain;
mod effect;
mod event;
pub mod invariants;
mod persist;
pub mod promises;
mod recovery;
mod resolve;
mod retain;
mod settings;
mod status;
mod transfers;
mod tree;

pub use crate::failure::Failure;
pub use crate::fragment_assembly::ScannedChunk;
pub use crate::manifest::{Pointer, RetentionBound};
pub use effect::{Effect, Problem, Recovery, StopReason, StoredObject};
pub use event::{CommitOutcome, Event, PointerRead, ScanBatch, ScanEnd, Witness};
pub use settings::{Backoff, Proof, RetryPolicy, Settings};
pub use status::{Activity, Counters, Status};

use crate::chance::Chance;
use drain::Drain;
use persist::Persist;
use recovery::{Reset, Streak};
use resolve::Resolve;
use status::Problems;
use transfers::{Anchor, Transfers};
use tree::Tree;

#[derive(Debug, Clone)]
enum Phase {
    Resolving(Resolve),
    Running,
    Stopped,
}

/// The machine. See the module's page.
#[derive(Debug, Clone)]
pub struct UploadMachine {
    settings: Settings,
    epoch: u64,
    now_ms: u64,
    /// What time it is, as it was last given, and our clock then.
    time: Option<(u64, Result<i64, Doubt>)>,
    chance: Chance,
    /// Every effect with an answer has its own number, so that no answer is taken for another's.
    last_ticket: u64,
    effects: VecDeque<Effect>,
    phase: Phase,

    committed_chunk_id: Option<u64>,
    local_first_chunk_id: Option<u64>,
    /// The two are known.
    log_seen: bool,
    bound: RetentionBound,

    /// What is persisted, and where the metadata store says so.
    persisted: Arc<Root>,
    pointer: Option<Pointer>,
    /// What will be persisted next.
    manifest: Root,
    /// `manifest` does not continue `persisted`: it replaces it.
    diverged: bool,
    /// `persisted` is published, and the local log has not shown yet that it goes on where it ends.
    unconfirmed: bool,
    /// In the bucket, and not in `manifest`, each with the offset after its last record. Deleted after the persist that shows
    /// that no manifest names it.
    garbage: BTreeMap<StoredObject, u64>,
    /// Entries of the root that was found: the one reason for which there may be too many.
    adopted_entries: usize,
    /// The root that names history which this machine has given up. Never deleted: it is the way back.
    abandoned: Option<StoredObject>,

    drain: Drain,
    anchor: Anchor,
    anchor_failures: u32,
    transfers: Transfers,
    /// What this stream may hold of the node's index bytes now.
    index_room_bytes: usize,
    persist: Persist,
    tree: Tree,
    reset: Option<Reset>,
    streak: Streak,
    /// Failures of resolving in a row.
    resolve_failures: u32,
    /// Re-resolves since the last persist.
    conflicts: u32,

    problems: Problems,
    counters: Counters,
}

impl UploadMachine {
    /// A machine for the writer of `epoch`; its first effect reads the pointer. `seed` is for spreading retries.
    #[must_use]
    pub fn new(now_ms: u64, settings: Settings, epoch: u64, seed: u64) -> Self {
        let mut machine = Self {
            settings: settings.usable(),
            epoch,
            now_ms,
            time: None,
            chance: Chance::new(seed),
            last_ticket: 1,
            effects: VecDeque::new(),
            phase: Phase::Stopped,
            committed_chunk_id: None,
            local_first_chunk_id: None,
            log_seen: false,
            bound: RetentionBound::default(),
            persisted: Arc::new(Root::empty_at(0)),
            pointer: None,
            manifest: Root::empty_at(0),
            diverged: false,
            unconfirmed: false,
            garbage: BTreeMap::new(),
            adopted_entries: 0,
            abandoned: None,
            drain: Drain::default(),
            anchor: Anchor::Unneeded,
            anchor_failures: 0,
            transfers: Transfers::new(1),
            index_room_bytes: usize::MAX,
            persist: Persist::default(),
            tree: Tree::default(),
            reset: None,
            streak: Streak::default(),
            resolve_failures: 0,
            conflicts: 0,
            problems: Problems::default(),
            counters: Counters::default(),
        };
        machine.read_pointer();
        machine
    }

    /// Says what time it is, which retention by age compares the chunks' timestamps with, or why nobody knows
    /// ([`TrustedTime`](crate::trusted_time::TrustedTime)). The machine moves it on by `now_ms`. Nothing is too old while it is in
    /// doubt, nor before it was given.
    pub fn set_time(&mut self, now_ms: u64, time: Result<i64, Doubt>) {
        self.time = Some((now_ms, time));
    }

    /// Says how many index bytes ([`Status::index_bytes`]) the stream may hold: what it has, and what all streams of the node
    /// have left.
    pub const fn set_index_room(&mut self, bytes: usize) {
        self.index_room_bytes = bytes;
    }

    /// Takes in what happened. `now_ms` is a clock that never steps back.
    pub fn handle(&mut self, now_ms: u64, event: Event) {
        if matches!(self.phase, Phase::Stopped) {
            return;
        }
        self.now_ms = self.now_ms.max(now_ms);
        match event {
            Event::PointerRead {
                generation,
                outcome,
            } => self.on_pointer_read(generation, outcome),
            Event::RootRead {
                generation,
                outcome,
            } => self.on_root_read(generation, outcome),
            Event::Committed {
                committed_chunk_id,
                local_first_chunk_id,
            } => {
                self.on_committed(committed_chunk_id, local_first_chunk_id);
            }
            Event::Scanned { generation, batch } => self.on_scanned(generation, batch),
            Event::AnchorWritten { generation, ok } => self.on_anchor_written(generation, ok),
            Event::TransferDone {
                generation,
                transfer,
                outcome,
            } => self.on_transfer_done(generation, transfer, outcome),
            Event::RootPut {
                generation,
                outcome,
            } => self.on_root_put(generation, outcome),
            Event::PointerCommitted {
                generation,
                outcome,
            } => self.on_pointer_committed(generation, outcome),
            Event::GroupPut {
                generation,
                outcome,
            } => self.on_group_put(generation, outcome),
            Event::GroupRead {
                generation,
                outcome,
            } => self.on_group_read(generation, outcome),
            Event::RetentionChanged(bound) => self.on_retention_changed(bound),
            Event::CutRequested => self.on_cut_requested(),
            Event::Tick => {}
        }
        self.expire();
        self.advance();
        self.note_doubt();
        self.tell_problem();
    }

    /// The next thing to do, in order. Call until `None` after every [`UploadMachine::handle`], and once at the start.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// When to send [`Event::Tick`] if nothing else happens before; `None` while only an event can change anything.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        match &self.phase {
            Phase::Stopped => None,
            Phase::Resolving(resolve) => Some(resolve.deadline_ms()),
            Phase::Running => [
                self.drain_deadline_ms(),
                self.anchor_deadline_ms(),
                self.transfers.deadline_ms(),
                self.persist_deadline_ms(),
                self.tree_deadline_ms(),
                self.reset_deadline_ms(),
                self.retention_deadline_ms(),
            ]
            .into_iter()
            .flatten()
            .min(),
        }
    }

    fn on_pointer_read(&mut self, generation: u64, outcome: PointerRead) {
        match &self.phase {
            Phase::Resolving(Resolve::ReadingPointer { ticket, .. }) if *ticket == generation => {
                self.on_pointer_resolved(outcome);
            }
            Phase::Running => self.on_pointer_verified(generation, outcome),
            Phase::Resolving(_) | Phase::Stopped => {}
        }
    }

    /// Deadlines that have passed. After the event, so that an answer on the last moment still counts.
    fn expire(&mut self) {
        match self.phase {
            Phase::Resolving(_) => self.expire_resolve(),
            Phase::Running => {
                self.expire_scan();
                self.expire_anchor();
                self.expire_transfers();
                self.expire_persist();
                self.expire_tree();
            }
            Phase::Stopped => {}
        }
    }

    /// Everything that can go on goes on.
    fn advance(&mut self) {
        let steps = [
            Self::notice_empty_log,
            Self::find_start,
            Self::apply_completions,
            Self::notice_trimmed,
            Self::maybe_reset,
            Self::retain,
            Self::maybe_cut,
            Self::maybe_write_anchor,
            Self::maybe_mutate,
            Self::maybe_scan,
        ];
        for step in steps {
            if matches!(self.phase, Phase::Running) {
                step(self);
            }
        }
    }

    fn ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    fn revision(&self) -> u64 {
        self.pointer.map_or(0, |pointer| pointer.revision)
    }

    fn stop(&mut self, reason: StopReason) {
        self.phase = Phase::Stopped;
        self.effects.push_back(Effect::CancelTransfers {
            generation: self.transfers.generation(),
        });
        self.effects.push_back(Effect::Stop { reason });
    }
}

/// What entries name, as objects, each with the offset after its last record; the last one ends at `end_offset`.
fn objects(entries: &[Entry], end_offset: u64) -> impl Iterator<Item = (StoredObject, u64)> + '_ {
    let ends = entries
        .iter()
        .skip(1)
        .map(|next| next.first_offset)
        .chain([end_offset]);
    entries.iter().map(StoredObject::of).zip(ends)
}

/// The fragments that a root names itself.
fn fragments(root: &Root) -> impl Iterator<Item = (StoredObject, u64)> + '_ {
    objects(&root.entries, root.next_offset)
        .filter(|(object, _)| matches!(object, StoredObject::Fragment { .. }))
}

/// Where the entry before this one ends.
fn end_of(root: &Root, position: usize) -> u64 {
    root.entries
        .get(position)
        .map_or(root.next_offset, |next| next.first_offset)
}

/// Whether a manifest names the object, or may do so: what its groups hold is not looked into. An object whose records all end
/// below the first offset is not needed, whatever an immutable group says.
fn may_name(root: &Root, object: &StoredObject, end_offset: u64) -> bool {
    let (kind, first_offset, uid) = match *object {
        StoredObject::Fragment { first_offset, uid } => (Kind::Fragment, first_offset, uid),
        StoredObject::Group {
            kind,
            first_offset,
            uid,
        } => (kind, first_offset, uid),
        StoredObject::Root { .. } => return false,
    };
    if end_offset <= root.first_offset || first_offset >= root.next_offset {
        return false;
    }
    let after = root
        .entries
        .partition_point(|entry| entry.first_offset <= first_offset);
    let Some(holder) = after.checked_sub(1).and_then(|at| root.entries.get(at)) else {
        return false;
    };
    holder.kind > kind
        || holder.kind == kind && holder.first_offset == first_offset && holder.uid == uid
}

#[cfg(test)]
mod tests;
