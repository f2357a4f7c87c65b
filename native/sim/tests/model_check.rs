//! Every order of events, for two writers of one stream: the real machines, one bucket, one metadata store.
//!
//! What is sent may arrive in any order, also after its sender is gone; the second writer (epoch 2) may start at any time after
//! the first. Everything else that happens is bounded, so that it ends: see `Bounds`, and `explorations` for what is explored
//! and how many different states that has. An optimized build (`scripts/sim --model`, a stage of `make test`) explores all of
//! them; one for debugging the first only, which takes as long as all the others.
//!
//! After an exploration its number of states is held against a minimum: bounds that shrink by mistake are noticed.
#![allow(missing_docs, clippy::print_stdout)]
// Kinds of objects that come later do not matter here.
#![allow(unreachable_patterns)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::manifest::{Entry, Group, Kind, Root};
use stateright::{Checker, Model, Property};
use tiering_core::upload::{
    Backoff, CommitOutcome, Effect, Event, Failure, Pointer, PointerRead, RetentionBound,
    RetryPolicy, ScanBatch, ScanEnd, ScannedChunk, Settings, StoredObject, UploadMachine,
    invariants,
};

/// What may happen how often in one exploration.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    /// Chunks in the log, each a fragment.
    fragments: u64,
    /// Fragments of one writer that are on their way at once.
    in_flight: usize,
    /// Fragments to a persist.
    persist_threshold: u32,
    /// Writers that are dropped.
    crashes: u8,
    /// Compare-and-swaps whose outcome is told as unknown after they had their effect.
    losses: u8,
    /// Times that time passes: up to the next deadline of a machine, of an answer or for a retry.
    ticks: u8,
    /// Deletions of the stream, at any time; then the sweeps of what is in the bucket, the second after everybody is gone.
    deletions: u8,
    /// Times that the user bounds the stream to one fragment: what is dropped is deleted, at the right time or too early.
    retentions: u8,
    /// Entries that are moved into a group; 1024: none.
    rebalance_threshold: u32,
}

const NOTHING: Bounds = Bounds {
    fragments: 2,
    in_flight: 2,
    persist_threshold: 1,
    crashes: 0,
    losses: 0,
    ticks: 0,
    deletions: 0,
    retentions: 0,
    rebalance_threshold: 1_024,
};

/// A request under way, or an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Message {
    Ask(Effect),
    Answer(Event),
}

/// One writer; its machine is told apart by what it would do next.
#[derive(Debug, Clone)]
struct Writer {
    machine: Option<UploadMachine>,
    epoch: u64,
    started: bool,
    messages: Vec<Message>,
}

#[derive(Debug, Clone)]
struct State {
    writers: [Writer; 2],
    pointer: Option<Pointer>,
    anchor: bool,
    roots: BTreeMap<(u64, u32), Arc<Root>>,
    fragments: BTreeSet<(u64, u32)>,
    groups: BTreeMap<(u64, u32), Arc<Group>>,
    objects: u32,
    now_ms: u64,
    losses: u8,
    crashes: u8,
    ticks: u8,
    deletions: u8,
    sweeps: u8,
    retentions: u8,
    broken: Option<&'static str>,
    digest: u64,
}

impl State {
    /// Puts what is under way into an order of its own, so that states that differ in nothing else are one, and notes what
    /// the state is told apart by: everything but counters and the chance that spreads retries by a millisecond.
    fn settle(mut self) -> Self {
        for writer in &mut self.writers {
            writer.messages.sort_by_cached_key(digest_of);
        }
        self.digest = 0;
        self.digest = digest_of(&self);
        self
    }
}

/// Hashes what is written into it, but for what no state is told apart by.
#[derive(Default)]
struct Digest {
    hasher: std::hash::DefaultHasher,
    /// Inside of something that is left out: how deep.
    depth: Option<u32>,
}

impl Write for Digest {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if let Some(depth) = &mut self.depth {
            for byte in text.bytes() {
                match byte {
                    b'{' | b'(' => *depth += 1,
                    b'}' | b')' if *depth == 1 => {
                        self.depth = None;
                        break;
                    }
                    b'}' | b')' => *depth -= 1,
                    _ => {}
                }
            }
        } else if matches!(text, "counters" | "chance" | "settings") {
            self.depth = Some(0);
        } else {
            self.hasher.write(text.as_bytes());
        }
        Ok(())
    }
}

fn digest_of(thing: &impl std::fmt::Debug) -> u64 {
    let mut digest = Digest::default();
    let _ = write!(digest, "{thing:?}");
    digest.hasher.finish()
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Start(usize),
    /// The request reaches who answers it, or the answer the machine.
    Arrive(usize, usize),
    /// The request has its effect, and the answer says that nobody knows.
    Lose(usize, usize),
    Crash(usize),
    /// Time passes up to the machine's next deadline.
    Tick(usize),
    Delete,
    Sweep,
    Retain(usize),
}

/// More time than this means that the bounds are too wide.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(300);

fn settings(bounds: &Bounds) -> Settings {
    let at_once = Backoff {
        base_ms: 1,
        cap_ms: 1,
    };
    Settings {
        fragment_size_bytes: 1,
        fragment_max_chunks: 1,
        fragment_max_age_ms: 0,
        persist_threshold: bounds.persist_threshold,
        persist_interval_ms: 1,
        max_in_flight_transfers: bounds.in_flight,
        rebalance_threshold: bounds.rebalance_threshold,
        transfer_deadline_ms: 1_000,
        answer_deadline_ms: 1_000,
        scan_max_chunks: bounds.fragments as usize,
        retry: RetryPolicy {
            transient: at_once,
            stalled: at_once,
            control: at_once,
            recovery: at_once,
        },
        ..Settings::default()
    }
}

fn chunk(chunk_id: u64) -> ScannedChunk {
    let header = ChunkHeader {
        chunk_type: ChunkType::User,
        num_entries: 1,
        num_records: 1,
        timestamp_ms: 1,
        epoch: 1,
        chunk_id,
        data_crc: 0,
        data_bytes: 1,
        trailer_bytes: 0,
        filter_bytes: 0,
    };
    ScannedChunk {
        header,
        segment_offset: 0,
        position: 8 + chunk_id * 49,
        lead_crc: 0,
        trailer_crc: 0,
    }
}

fn name(number: usize, transfer: u64, tries: u32) -> u32 {
    (number as u32) << 16 | (transfer as u32) << 8 | tries
}

impl State {
    /// A request has its effect. Returns the answer.
    fn serve(&mut self, number: usize, effect: Effect) -> Option<Event> {
        Some(match effect {
            Effect::ReadPointer { generation } => {
                let outcome = self
                    .pointer
                    .map_or(PointerRead::NotFound, PointerRead::Found);
                Event::PointerRead {
                    generation,
                    outcome,
                }
            }
            Effect::GetRoot {
                generation,
                pointer,
            } => {
                let root = self.roots.get(&(pointer.epoch, pointer.uid));
                let outcome = root
                    .map(|root| (**root).clone())
                    .ok_or(Failure::NotFound(String::new()));
                Event::RootRead {
                    generation,
                    outcome,
                }
            }
            Effect::Scan {
                generation,
                from_offset,
                up_to_chunk_id,
                max_chunks,
                ..
            } => {
                let wanted: Vec<u64> = (from_offset..=up_to_chunk_id).collect();
                let taken = wanted.len().min(max_chunks);
                let end = if taken == wanted.len() {
                    ScanEnd::CaughtUp
                } else {
                    ScanEnd::More
                };
                let chunks = wanted[..taken].iter().map(|id| chunk(*id)).collect();
                Event::Scanned {
                    generation,
                    batch: ScanBatch { chunks, end },
                }
            }
            Effect::WriteAnchor { generation } => {
                let ok = self.deletions == 0;
                self.anchor |= ok;
                Event::AnchorWritten { generation, ok }
            }
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => {
                if !self.anchor && self.deletions == 0 {
                    self.broken = Some("anchor ordering");
                }
                // Names that do not depend on the order of things, or nothing would ever be the same again.
                let tries = (0..).find(|tries| {
                    let uid = name(number, transfer, *tries);
                    !self.fragments.contains(&(plan.first_offset, uid))
                });
                let uid = name(number, transfer, tries.unwrap_or(0));
                self.objects += 1;
                self.fragments.insert((plan.first_offset, uid));
                Event::TransferDone {
                    generation,
                    transfer,
                    outcome: Ok(uid),
                }
            }
            Effect::PutRoot {
                generation,
                epoch,
                follows: _,
                root,
            } => {
                let uid = (generation as u32) << 1 | number as u32;
                self.objects += 1;
                self.roots.insert((epoch, uid), root);
                Event::RootPut {
                    generation,
                    outcome: Ok(uid),
                }
            }
            Effect::CommitPointer {
                generation,
                epoch,
                uid,
                expected_revision,
                ..
            } => {
                let outcome = self.compare_and_swap(epoch, uid, expected_revision);
                Event::PointerCommitted {
                    generation,
                    outcome,
                }
            }
            Effect::PutGroup {
                generation, group, ..
            } => {
                let uid = (generation as u32) << 1 | number as u32;
                self.objects += 1;
                self.groups.insert((group.first_offset, uid), group);
                Event::GroupPut {
                    generation,
                    outcome: Ok(uid),
                }
            }
            Effect::GetGroup {
                generation,
                first_offset,
                uid,
                ..
            } => {
                let group = self.groups.get(&(first_offset, uid));
                let outcome = group
                    .map(|group| (**group).clone())
                    .ok_or(Failure::NotFound(String::new()));
                Event::GroupRead {
                    generation,
                    outcome,
                }
            }
            Effect::Delete { objects } => {
                for object in objects {
                    self.delete(object);
                }
                return None;
            }
            _ => return None,
        })
    }

    /// The fragments that a root names; `None` if something is not there.
    fn leaves(&self, root: &Root) -> Option<Vec<Entry>> {
        let mut leaves = Vec::new();
        for entry in &root.entries {
            let key = (entry.first_offset, entry.uid);
            match entry.kind {
                Kind::Fragment => {
                    self.fragments.get(&key)?;
                    leaves.push(*entry);
                }
                Kind::Group => {
                    let group = self.groups.get(&key)?;
                    // What has expired inside an immutable group is gone.
                    let left = group
                        .entries
                        .iter()
                        .filter(|entry| entry.first_offset >= root.first_offset);
                    for entry in left {
                        self.fragments.get(&(entry.first_offset, entry.uid))?;
                        leaves.push(*entry);
                    }
                }
                // There are not as many fragments.
                Kind::KiloGroup | Kind::MegaGroup => return None,
            }
        }
        Some(leaves)
    }

    fn current(&self) -> Option<&Arc<Root>> {
        let pointer = self.pointer?;
        self.roots.get(&(pointer.epoch, pointer.uid))
    }

    fn compare_and_swap(&mut self, epoch: u64, uid: u32, expected_revision: u64) -> CommitOutcome {
        if self.deletions > 0 {
            return CommitOutcome::NotFound;
        }
        let before = self.pointer;
        match before {
            Some(pointer) if (pointer.epoch, pointer.uid) == (epoch, uid) => {
                return CommitOutcome::Committed {
                    revision: pointer.revision,
                };
            }
            Some(pointer) if pointer.revision != expected_revision || pointer.epoch > epoch => {
                return CommitOutcome::Conflict;
            }
            None if expected_revision > 0 => return CommitOutcome::NotFound,
            Some(_) | None => {}
        }
        let old = self.current().cloned();
        let revision = expected_revision + 1;
        self.pointer = Some(Pointer {
            epoch,
            uid,
            revision,
        });
        let root = self.current().cloned();
        match root.map(|root| (self.leaves(&root), root)) {
            None => self.broken = Some("durability: no root"),
            Some((None, _)) => self.broken = Some("durability"),
            Some((Some(leaves), root)) => self.check_commit(before, epoch, old, &root, &leaves),
        }
        CommitOutcome::Committed { revision }
    }

    fn check_commit(
        &mut self,
        before: Option<Pointer>,
        epoch: u64,
        old: Option<Arc<Root>>,
        root: &Root,
        leaves: &[Entry],
    ) {
        if before.is_some_and(|before| before.epoch > epoch) {
            self.broken = Some("epoch monotonicity");
        }
        if let Some(old) = old {
            let old_leaves = self.leaves(&old).unwrap_or_default();
            let kept = old_leaves
                .iter()
                .filter(|entry| entry.first_offset >= root.first_offset);
            if root.first_offset < old.first_offset
                || root.next_offset < old.next_offset
                || kept.zip(leaves).any(|(old, new)| old != new)
            {
                self.broken = Some("prefix monotonicity");
            }
            if root.first_offset > old.first_offset && self.retentions == 0 {
                self.broken = Some("retention");
            }
        }
        let offsets = leaves.iter().map(|entry| entry.first_offset);
        if offsets.ne(root.first_offset..root.next_offset) {
            self.broken = Some("contiguous advance");
        }
        let total: u128 = leaves
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum();
        if total != root.total_size_bytes {
            self.broken = Some("accounting");
        }
    }

    fn delete(&mut self, object: StoredObject) {
        let named = match (object, self.current()) {
            (_, None) => false,
            (StoredObject::Root { epoch, uid }, Some(_)) => self
                .pointer
                .is_some_and(|pointer| (pointer.epoch, pointer.uid) == (epoch, uid)),
            (
                StoredObject::Group {
                    first_offset, uid, ..
                },
                Some(root),
            ) => root
                .entries
                .iter()
                .any(|entry| (entry.first_offset, entry.uid) == (first_offset, uid)),
            (StoredObject::Fragment { first_offset, uid }, Some(root)) => {
                self.leaves(root).is_some_and(|leaves| {
                    leaves
                        .iter()
                        .any(|entry| (entry.first_offset, entry.uid) == (first_offset, uid))
                })
            }
        };
        if named {
            self.broken = Some("deletion set");
        }
        match object {
            StoredObject::Fragment { first_offset, uid } => {
                self.fragments.remove(&(first_offset, uid));
            }
            StoredObject::Group {
                first_offset, uid, ..
            } => {
                self.groups.remove(&(first_offset, uid));
            }
            StoredObject::Root { epoch, uid } => {
                self.roots.remove(&(epoch, uid));
            }
        }
    }

    /// What one sweep of a deleted stream does not find.
    fn landed_after_sweep(&self) -> bool {
        self.sweeps == 1 && !self.fragments.is_empty()
    }

    /// Nobody is left who could write anything.
    fn silent(&self) -> bool {
        self.writers
            .iter()
            .all(|writer| writer.machine.is_none() && writer.messages.is_empty() && writer.started)
    }

    /// Takes what a machine asks for. What nobody answers is looked at here and gone.
    fn pump(&mut self, number: usize) {
        let mut published = Vec::new();
        let writer = &mut self.writers[number];
        let Some(machine) = &mut writer.machine else {
            return;
        };
        while let Some(effect) = machine.poll_effect() {
            match effect {
                Effect::Publish { root, revision, .. } => published.push((root, revision)),
                Effect::CancelTransfers { .. }
                | Effect::Problem { .. }
                | Effect::Abandoned { .. }
                | Effect::Recovered { .. } => {}
                Effect::Stop { .. } => {
                    writer.machine = None;
                    break;
                }
                other => writer.messages.push(Message::Ask(other)),
            }
        }
        if writer
            .machine
            .as_ref()
            .is_some_and(|machine| !invariants::violated(machine).is_empty())
        {
            self.broken = Some("a predicate of the core");
        }
        if self.deletions > 0 {
            return;
        }
        for (root, revision) in published {
            let persisted = self.pointer.map_or(0, |pointer| pointer.revision);
            let newest = self
                .pointer
                .and_then(|pointer| self.roots.get(&(pointer.epoch, pointer.uid)));
            if revision > persisted
                || revision == persisted && revision > 0 && newest != Some(&root)
            {
                self.broken = Some("publish before commit");
            }
        }
    }

    fn send(&mut self, number: usize, event: Event) {
        let now_ms = self.now_ms;
        if let Some(machine) = &mut self.writers[number].machine {
            machine.handle(now_ms, event);
        }
        self.pump(number);
    }
}

impl Model for Bounds {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let writer = |epoch| Writer {
            machine: None,
            epoch,
            started: false,
            messages: Vec::new(),
        };
        vec![
            State {
                writers: [writer(1), writer(2)],
                pointer: None,
                anchor: false,
                roots: BTreeMap::new(),
                fragments: BTreeSet::new(),
                groups: BTreeMap::new(),
                objects: 0,
                now_ms: 0,
                losses: 0,
                crashes: 0,
                ticks: 0,
                deletions: 0,
                sweeps: 0,
                retentions: 0,
                broken: None,
                digest: 0,
            }
            .settle(),
        ]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.deletions < self.deletions && state.writers[0].started {
            actions.push(Action::Delete);
        }
        // One at once, and one when everybody is gone: what lands in between goes with that.
        if state.deletions > 0 && (state.sweeps == 0 || state.sweeps == 1 && state.silent()) {
            actions.push(Action::Sweep);
        }
        for (number, writer) in state.writers.iter().enumerate() {
            // The second writer is elected after the first.
            if !writer.started && (number == 0 || state.writers[0].started) {
                actions.push(Action::Start(number));
            }
            for (place, message) in writer.messages.iter().enumerate() {
                actions.push(Action::Arrive(number, place));
                if state.losses < self.losses
                    && matches!(message, Message::Ask(Effect::CommitPointer { .. }))
                {
                    actions.push(Action::Lose(number, place));
                }
            }
            let Some(machine) = &writer.machine else {
                continue;
            };
            // Whoever is told of the deletion may be dropped whenever that comes through.
            if state.crashes < self.crashes || state.deletions > 0 {
                actions.push(Action::Crash(number));
            }
            if state.ticks < self.ticks && machine.poll_timeout().is_some() {
                actions.push(Action::Tick(number));
            }
            if state.retentions < self.retentions {
                actions.push(Action::Retain(number));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Start(number) => {
                let epoch = state.writers[number].epoch;
                state.writers[number].started = true;
                state.writers[number].machine =
                    Some(UploadMachine::new(state.now_ms, settings(self), epoch, 1));
                let committed = Event::Committed {
                    committed_chunk_id: Some(self.fragments - 1),
                    local_first_chunk_id: Some(0),
                };
                state.send(number, committed);
            }
            Action::Arrive(number, place) => match state.writers[number].messages.remove(place) {
                Message::Ask(effect) => {
                    if let Some(answer) = state.serve(number, effect)
                        && state.writers[number].machine.is_some()
                    {
                        // Answers of one kind of request reach the machine in any order.
                        state.writers[number].messages.push(Message::Answer(answer));
                    }
                }
                Message::Answer(event) => state.send(number, event),
            },
            Action::Lose(number, place) => {
                state.losses += 1;
                if let Message::Ask(effect) = state.writers[number].messages.remove(place)
                    && let Some(Event::PointerCommitted { generation, .. }) =
                        state.serve(number, effect)
                    && state.writers[number].machine.is_some()
                {
                    let outcome = CommitOutcome::Unknown;
                    let unknown = Event::PointerCommitted {
                        generation,
                        outcome,
                    };
                    state.writers[number]
                        .messages
                        .push(Message::Answer(unknown));
                }
            }
            Action::Tick(number) => {
                state.ticks += 1;
                let due_ms = last.writers[number]
                    .machine
                    .as_ref()
                    .and_then(UploadMachine::poll_timeout);
                state.now_ms = state.now_ms.max(due_ms.unwrap_or(0));
                state.send(number, Event::Tick);
            }
            Action::Delete => {
                state.deletions += 1;
                (state.pointer, state.anchor) = (None, false);
            }
            Action::Sweep => {
                state.sweeps += 1;
                state.roots.clear();
                state.fragments.clear();
                state.groups.clear();
            }
            Action::Retain(number) => {
                state.retentions += 1;
                let bound = RetentionBound {
                    max_bytes: Some(ONE_FRAGMENT_BYTES),
                    max_age_ms: None,
                };
                state.send(number, Event::RetentionChanged(bound));
            }
            Action::Crash(number) => {
                state.crashes += 1;
                state.writers[number].machine = None;
                // Only what changes something may still arrive.
                state.writers[number].messages.retain(|message| {
                    use Effect::{CommitPointer, Delete, PutGroup, PutRoot, Transfer, WriteAnchor};
                    let Message::Ask(effect) = message else {
                        return false;
                    };
                    matches!(
                        effect,
                        WriteAnchor { .. }
                            | Transfer { .. }
                            | PutGroup { .. }
                            | PutRoot { .. }
                            | CommitPointer { .. }
                            | Delete { .. }
                    )
                });
            }
        }
        Some(state.settle())
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("nothing is broken", |_, state: &State| {
                state.broken.is_none()
            }),
            Property::always("a deleted stream stays deleted", |_, state: &State| {
                state.deletions == 0 || state.pointer.is_none() && !state.anchor
            }),
            Property::sometimes(
                "the second writer makes everything durable",
                |bounds: &Self, state: &State| {
                    state.pointer.is_some_and(|pointer| pointer.epoch == 2)
                        && state
                            .current()
                            .is_some_and(|root| root.next_offset == bounds.fragments)
                },
            ),
            Property::sometimes(
                "the second writer goes on from what the first made durable",
                |bounds: &Self, state: &State| {
                    state.pointer.is_some_and(|pointer| {
                        pointer.epoch == 2 && pointer.revision >= bounds.fragments.min(2)
                    })
                },
            ),
            Property::sometimes("what may happen happens", |bounds: &Self, state: &State| {
                let grouped = state
                    .current()
                    .is_some_and(|root| root.entries.iter().any(|entry| entry.kind == Kind::Group));
                let dropped = state.current().is_some_and(|root| root.first_offset > 0);
                let needed = [
                    (bounds.rebalance_threshold < 1_024, grouped),
                    (bounds.retentions > 0, dropped),
                    (bounds.crashes > 0, state.crashes > 0),
                    (bounds.losses > 0, state.losses > 0),
                    (bounds.ticks > 0, state.ticks > 0),
                    (bounds.deletions > 0, state.landed_after_sweep()),
                ];
                needed.iter().all(|(wanted, seen)| !wanted || *seen)
            }),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        // Roots that lost a race are the only thing that could go on for ever.
        state.objects <= 4 * self.fragments as u32
    }
}

/// Bytes of a fragment: one chunk of a header and one byte.
const ONE_FRAGMENT_BYTES: u64 = 49;

/// What is explored, and the least number of different states that each must have.
fn explorations() -> Vec<(&'static str, Bounds, usize)> {
    vec![
        (
            "crash, unknown outcome",
            Bounds {
                crashes: 1,
                losses: 1,
                ..NOTHING
            },
            14_000,
        ),
        (
            "three fragments at once, crash",
            Bounds {
                fragments: 3,
                in_flight: 3,
                crashes: 1,
                ..NOTHING
            },
            116_000,
        ),
        (
            "four fragments one by one, two to a persist, crash",
            Bounds {
                fragments: 4,
                in_flight: 1,
                persist_threshold: 2,
                crashes: 1,
                ..NOTHING
            },
            24_900,
        ),
        (
            "four fragments two at once, two to a persist",
            Bounds {
                fragments: 4,
                persist_threshold: 2,
                ..NOTHING
            },
            191_000,
        ),
        (
            "two deadlines or retries, crash",
            Bounds {
                fragments: 1,
                ticks: 2,
                crashes: 1,
                ..NOTHING
            },
            88_000,
        ),
        (
            "deletion of the stream, unknown outcome",
            Bounds {
                fragments: 1,
                deletions: 1,
                losses: 1,
                ..NOTHING
            },
            9_600,
        ),
        (
            "retention, crash",
            Bounds {
                retentions: 1,
                crashes: 1,
                ..NOTHING
            },
            22_000,
        ),
        (
            "groups, retention in them, crash",
            Bounds {
                in_flight: 1,
                retentions: 1,
                crashes: 1,
                rebalance_threshold: 2,
                ..NOTHING
            },
            27_000,
        ),
    ]
}

#[test]
fn two_writers_in_every_order() {
    let wanted = std::env::var("MODEL").unwrap_or_default();
    let count = if cfg!(debug_assertions) {
        1
    } else {
        usize::MAX
    };
    for (name, bounds, least) in explorations().into_iter().take(count) {
        if !name.contains(&wanted) {
            continue;
        }
        let started = std::time::Instant::now();
        let checker = bounds
            .checker()
            .threads(2)
            .timeout(TIMEOUT)
            .spawn_bfs()
            .join();
        let different = checker.unique_state_count();
        println!(
            "{name}: {} states, {different} of them different, depth {}, {:.1} s",
            checker.state_count(),
            checker.max_depth(),
            started.elapsed().as_secs_f64()
        );
        checker.assert_properties();
        assert!(
            started.elapsed() < TIMEOUT,
            "{name}: the exploration was not finished in time"
        );
        assert!(
            different >= least,
            "{name}: {different} states, fewer than {least}: what was bounded?"
        );
    }
}
