//! Every order of events, for two writers of one stream: the real machines, one bucket, one metadata store.
//!
//! Bounds, so that it ends within seconds: two writers (epochs 1 and 2, the second may start at any time after the first), a
//! log of two fragments, at most one crash (of either, at any time), at most one compare-and-swap whose outcome is told as
//! unknown after it had its effect. No time passes: deadlines and back-offs are left to the simulator. What is sent may arrive
//! in any order, also after its sender is gone. (With a third fragment, or one deadline, it takes more than a minute.)
#![allow(missing_docs, clippy::print_stdout)]
// Kinds of objects that come later do not matter here.
#![allow(unreachable_patterns)]

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::manifest::Root;
use stateright::{Checker, Model, Property};
use tiering_core::replica_reader::{
    Backoff, CommitOutcome, Effect, Event, Failure, Pointer, PointerRead, ReplicaReader,
    RetryPolicy, ScanBatch, ScanEnd, ScannedChunk, Settings, StoredObject, invariants,
};

/// Chunks in the log, each a fragment.
const FRAGMENTS: u64 = 2;
/// Answers that may be lost.
const LOSSES: u8 = 1;

/// A request under way, or an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Message {
    Ask(Effect),
    Answer(Event),
}

/// One writer; its machine is told apart by what it would do next.
#[derive(Debug, Clone)]
struct Writer {
    machine: Option<ReplicaReader>,
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
    objects: u32,
    now_ms: u64,
    losses: u8,
    crashes: u8,
    broken: Option<&'static str>,
    digest: u64,
}

impl State {
    /// Puts what is under way into an order of its own, so that states that differ in nothing else are one, and notes what
    /// the state is told apart by: everything but counters and the chance that spreads retries by a millisecond.
    fn settle(mut self) -> Self {
        for writer in &mut self.writers {
            writer
                .messages
                .sort_by_cached_key(|message| format!("{message:?}"));
        }
        self.digest = 0;
        let mut text = format!("{self:?}");
        for noise in ["counters: Counters {", "chance: Chance("] {
            while let Some(start) = text.find(noise) {
                let end = text[start..]
                    .find(['}', ')'])
                    .map_or(text.len(), |end| start + end);
                text.replace_range(start..end, "");
            }
        }
        let mut hasher = std::hash::DefaultHasher::new();
        text.hash(&mut hasher);
        self.digest = hasher.finish();
        self
    }
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
}

/// More time than this means that the bounds are too wide.
const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(300);

struct TwoWriters;

fn settings() -> Settings {
    let at_once = Backoff {
        base_ms: 1,
        cap_ms: 1,
    };
    Settings {
        fragment_size_bytes: 1,
        fragment_max_chunks: 1,
        fragment_max_age_ms: 0,
        persist_threshold: 1,
        persist_interval_ms: 1,
        max_in_flight_transfers: FRAGMENTS as usize,
        transfer_deadline_ms: 1_000,
        answer_deadline_ms: 1_000,
        scan_max_chunks: FRAGMENTS as usize,
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
                self.anchor = true;
                Event::AnchorWritten {
                    generation,
                    ok: true,
                }
            }
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => {
                if !self.anchor {
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
            } => {
                let outcome = self.compare_and_swap(epoch, uid, expected_revision);
                Event::PointerCommitted {
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

    fn compare_and_swap(&mut self, epoch: u64, uid: u32, expected_revision: u64) -> CommitOutcome {
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
        let revision = expected_revision + 1;
        self.pointer = Some(Pointer {
            epoch,
            uid,
            revision,
        });
        let old_root =
            before.and_then(|before| self.roots.get(&(before.epoch, before.uid)).cloned());
        match self.roots.get(&(epoch, uid)).cloned() {
            None => self.broken = Some("durability: no root"),
            Some(root) => {
                if before.is_some_and(|before| before.epoch > epoch) {
                    self.broken = Some("epoch monotonicity");
                }
                let grows = old_root.is_none_or(|old| {
                    root.entries.starts_with(&old.entries) && root.next_offset >= old.next_offset
                });
                if !grows {
                    self.broken = Some("prefix monotonicity");
                }
                if root
                    .entries
                    .iter()
                    .any(|entry| !self.fragments.contains(&(entry.first_offset, entry.uid)))
                {
                    self.broken = Some("durability");
                }
                if root
                    .entries
                    .iter()
                    .map(|entry| entry.first_offset)
                    .ne(0..root.next_offset)
                {
                    self.broken = Some("contiguous advance");
                }
            }
        }
        CommitOutcome::Committed { revision }
    }

    fn delete(&mut self, object: StoredObject) {
        let named = self.pointer.is_some_and(|pointer| match object {
            StoredObject::Root { epoch, uid } => (pointer.epoch, pointer.uid) == (epoch, uid),
            StoredObject::Fragment { first_offset, uid } => self
                .roots
                .get(&(pointer.epoch, pointer.uid))
                .is_some_and(|root| {
                    root.entries
                        .iter()
                        .any(|entry| (entry.first_offset, entry.uid) == (first_offset, uid))
                }),
            _ => false,
        });
        if named {
            self.broken = Some("deletion set");
        }
        match object {
            StoredObject::Fragment { first_offset, uid } => {
                self.fragments.remove(&(first_offset, uid));
            }
            StoredObject::Root { epoch, uid } => {
                self.roots.remove(&(epoch, uid));
            }
            _ => {}
        }
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

impl Model for TwoWriters {
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
                objects: 0,
                now_ms: 0,
                losses: 0,
                crashes: 0,
                broken: None,
                digest: 0,
            }
            .settle(),
        ]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, writer) in state.writers.iter().enumerate() {
            // The second writer is elected after the first.
            if !writer.started && (number == 0 || state.writers[0].started) {
                actions.push(Action::Start(number));
            }
            for (place, message) in writer.messages.iter().enumerate() {
                actions.push(Action::Arrive(number, place));
                if state.losses < LOSSES
                    && matches!(message, Message::Ask(Effect::CommitPointer { .. }))
                {
                    actions.push(Action::Lose(number, place));
                }
            }
            if writer.machine.is_some() && state.crashes == 0 {
                actions.push(Action::Crash(number));
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
                    Some(ReplicaReader::new(state.now_ms, settings(), epoch, 1));
                let committed = Event::Committed {
                    committed_chunk_id: Some(FRAGMENTS - 1),
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
            Action::Crash(number) => {
                state.crashes += 1;
                state.writers[number].machine = None;
                // Only what changes something may still arrive.
                state.writers[number].messages.retain(|message| {
                    use Effect::{CommitPointer, Delete, PutRoot, Transfer, WriteAnchor};
                    let Message::Ask(effect) = message else {
                        return false;
                    };
                    matches!(
                        effect,
                        WriteAnchor { .. }
                            | Transfer { .. }
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
            Property::sometimes(
                "the second writer makes everything durable",
                |_, state: &State| {
                    let root = state
                        .pointer
                        .and_then(|pointer| state.roots.get(&(pointer.epoch, pointer.uid)));
                    state.pointer.is_some_and(|pointer| pointer.epoch == 2)
                        && root.is_some_and(|root| root.next_offset == FRAGMENTS)
                },
            ),
            Property::sometimes(
                "the second writer goes on from what the first made durable",
                |_, state: &State| {
                    state
                        .pointer
                        .is_some_and(|pointer| pointer.epoch == 2 && pointer.revision == FRAGMENTS)
                },
            ),
        ]
    }

    fn within_boundary(&self, state: &State) -> bool {
        // Roots that lost a race are the only thing that could go on for ever.
        state.objects <= 4 * FRAGMENTS as u32
    }
}

#[test]
fn two_writers_in_every_order() {
    let started = std::time::Instant::now();
    let checker = TwoWriters
        .checker()
        .threads(2)
        .timeout(TIMEOUT)
        .spawn_bfs()
        .join();
    println!(
        "{} states, {} of them different, depth {}",
        checker.state_count(),
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
    assert!(
        started.elapsed() < TIMEOUT,
        "the exploration was not finished in time"
    );
}
