//! The machine against a small model of its world: a log, a bucket and a metadata store, with answers that come in any order,
//! late, twice or never, and writers that are replaced while their last requests are still under way.
//!
//! Checked at every step: the machine's invariants; that whatever the pointer names is in the bucket, without a hole; that
//! nothing is published that is not persisted. Checked at the end: that a world that stays quiet becomes durable.

use std::collections::{BTreeMap, BTreeSet};

use log_format::manifest::{Entry, Group};
use proptest::prelude::*;

use super::*;
use crate::manifest::rebalance;

#[derive(Debug, Clone)]
enum Step {
    Append(u64),
    Trim(u64),
    /// Answers one of the waiting effects: which, and how well it goes.
    Answer(prop::sample::Index, u8),
    Lose(prop::sample::Index),
    Wait,
    Cut,
    Retain(Option<u64>),
    /// Another writer of the same epoch (a machine that was thought dead) moves the pointer.
    Intrude,
    Restart,
    /// The log loses this many chunks at its end, and the writer restarts.
    LoseEnd(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1u64..6).prop_map(Step::Append),
        1 => (0u64..400).prop_map(Step::Trim),
        30 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(which, luck)| Step::Answer(which, luck)),
        2 => any::<prop::sample::Index>().prop_map(Step::Lose),
        8 => Just(Step::Wait),
        1 => Just(Step::Cut),
        2 => prop::option::of(0u64..6_000).prop_map(Step::Retain),
        1 => Just(Step::Intrude),
        1 => Just(Step::Restart),
        1 => (1u64..12).prop_map(Step::LoseEnd),
    ];
    prop::collection::vec(step, 1..300)
}

/// A fragment in the bucket.
struct Stored {
    next_offset: u64,
    /// Its chunks' ids and timestamps.
    chunks: Vec<(u64, i64)>,
}

struct World {
    settings: Settings,
    rig: Rig,
    epoch: u64,
    log: std::ops::Range<u64>,
    /// Where the log goes on after it lost its end, and how many times it had by then: chunks from there on are other ones.
    timelines: Vec<(u64, u64)>,
    losses: u64,
    next_uid: u32,
    /// Fragments in the bucket: first offset and uid, and what they hold.
    fragments: BTreeMap<(u64, u32), Stored>,
    roots: BTreeMap<(u64, u32), Root>,
    groups: BTreeMap<(Kind, u64, u32), Group>,
    pointer: Option<Pointer>,
    /// Every pointer there has been.
    history: BTreeMap<u64, Root>,
    waiting: Vec<Effect>,
    /// Of machines that are gone: may still happen, but nobody hears of it.
    zombies: Vec<Effect>,
}

impl World {
    fn new(rebalance_threshold: u32) -> Self {
        let settings = Settings {
            rebalance_threshold,
            ..settings()
        };
        Self {
            settings,
            rig: Rig::with(settings),
            epoch: EPOCH,
            log: 0..0,
            timelines: Vec::new(),
            losses: 0,
            next_uid: 1,
            fragments: BTreeMap::new(),
            roots: BTreeMap::new(),
            groups: BTreeMap::new(),
            pointer: None,
            history: BTreeMap::new(),
            waiting: Vec::new(),
            zombies: Vec::new(),
        }
    }

    /// A chunk of the log; the same id in another timeline is another chunk.
    fn chunk(&self, id: u64) -> ScannedChunk {
        let timeline = self.timelines.iter().rfind(|(from, _)| *from <= id);
        let mut chunk = chunk(id);
        chunk.header.timestamp_ms += timeline.map_or(0, |(_, number)| *number as i64 * 1_000_000);
        chunk
    }

    fn lose_end(&mut self, chunks: u64) {
        let shortest = self.log.end.min(self.log.start + RECORDS);
        let end = self.log.end.saturating_sub(chunks * RECORDS);
        self.log.end = end.max(shortest);
        self.losses += 1;
        self.timelines.retain(|(from, _)| *from < self.log.end);
        self.timelines.push((self.log.end, self.losses));
    }

    /// Local authority: what local retention may trim by, and what readers are given of what the local log has, is what the
    /// local log has.
    fn check_timeline(&self, root: &Root) {
        let mut leaves = Vec::new();
        self.leaves(
            &root.entries,
            root.next_offset,
            root.first_offset,
            &mut leaves,
        );
        for (number, leaf) in leaves.iter().enumerate() {
            let next = leaves.get(number + 1);
            let end = next.map_or(root.next_offset, |next| next.first_offset);
            let stored = &self.fragments[&(leaf.first_offset, leaf.uid)];
            for (id, timestamp_ms) in &stored.chunks {
                let both = self.log.contains(id) && *id < end;
                assert!(
                    !both || self.chunk(*id).header.timestamp_ms == *timestamp_ms,
                    "chunk {id} is of a timeline that is no more"
                );
            }
        }
    }

    fn uid(&mut self) -> u32 {
        self.next_uid += 1;
        self.next_uid
    }

    fn send(&mut self, event: Event) {
        self.rig.send(event);
        self.collect();
    }

    /// Effects without an answer happen at once, the others wait for theirs.
    fn collect(&mut self) {
        for effect in std::mem::take(&mut self.rig.effects) {
            match effect {
                Effect::Publish {
                    root,
                    revision,
                    confirmed,
                    ..
                } => {
                    self.published(&root, revision);
                    if confirmed {
                        self.check_timeline(&root);
                    }
                }
                Effect::Delete { objects } => self.delete(&objects),
                Effect::CancelTransfers { generation } => {
                    let ours = |effect: &Effect| matches!(effect, Effect::Transfer { generation: of, .. } if *of <= generation);
                    let (cancelled, waiting) = std::mem::take(&mut self.waiting)
                        .into_iter()
                        .partition(ours);
                    self.waiting = waiting;
                    self.zombies.extend::<Vec<_>>(cancelled);
                }
                Effect::Stop { reason } => panic!("nobody deposed or deleted anything: {reason:?}"),
                Effect::Abandoned { .. } => panic!("nothing is ever lost"),
                Effect::Recovered { .. } | Effect::Problem { .. } => {}
                asked => self.waiting.push(asked),
            }
        }
        self.check_bucket();
    }

    fn published(&self, root: &Root, revision: u64) {
        match self.history.get(&revision) {
            // What is left after a log lost its end is published before it is persisted.
            Some(persisted) if self.rig.machine.diverged => {
                assert!(root.next_offset <= persisted.next_offset || root.is_empty());
            }
            Some(persisted) => assert_eq!(root, persisted, "published what is not persisted"),
            None => assert!(revision == 0 && root.is_empty()),
        }
    }

    fn delete(&mut self, objects: &[StoredObject]) {
        for object in objects {
            match *object {
                StoredObject::Fragment { first_offset, uid } => {
                    self.fragments.remove(&(first_offset, uid));
                }
                StoredObject::Root { epoch, uid } => {
                    self.roots.remove(&(epoch, uid));
                }
                StoredObject::Group {
                    kind,
                    first_offset,
                    uid,
                } => {
                    self.groups.remove(&(kind, first_offset, uid));
                }
            }
        }
    }

    /// Durability and coverage: what the pointer names is there, all of it, without a hole.
    fn check_bucket(&self) {
        let Some(pointer) = self.pointer else { return };
        let root = self
            .roots
            .get(&(pointer.epoch, pointer.uid))
            .expect("the live root is in the bucket");
        let mut leaves = Vec::new();
        self.leaves(
            &root.entries,
            root.next_offset,
            root.first_offset,
            &mut leaves,
        );
        let mut at = root.first_offset;
        let mut total_bytes = 0;
        for (number, entry) in leaves.iter().enumerate() {
            assert_eq!(entry.first_offset, at, "a hole in the persisted manifest");
            total_bytes += u128::from(entry.size_bytes);
            let end = self
                .fragments
                .get(&(entry.first_offset, entry.uid))
                .expect("a named fragment is in the bucket")
                .next_offset;
            let next = leaves.get(number + 1);
            // The fragment at which a log that lost its end goes on holds more than it is named for.
            at = end.min(next.map_or(root.next_offset, |next| next.first_offset));
        }
        assert_eq!(at, root.next_offset);
        assert_eq!(total_bytes, root.total_size_bytes, "accounting drifted");
        let beginning = leaves.first().map(|first| {
            (
                first.first_offset,
                first.first_timestamp_ms,
                first.last_timestamp_ms,
            )
        });
        let told = (
            root.first_offset,
            root.first_timestamp_ms,
            root.first_last_timestamp_ms,
        );
        assert_eq!(beginning.unwrap_or((root.next_offset, -1, -1)), told);
    }

    /// The fragments of a tree that are not below its floor.
    fn leaves(&self, entries: &[Entry], end_offset: u64, floor: u64, leaves: &mut Vec<Entry>) {
        for (number, entry) in entries.iter().enumerate() {
            let next = entries.get(number + 1);
            let end_offset = next.map_or(end_offset, |next| next.first_offset);
            if end_offset <= floor {
                continue;
            }
            if entry.kind == Kind::Fragment {
                leaves.push(*entry);
                continue;
            }
            let group = self
                .groups
                .get(&(entry.kind, entry.first_offset, entry.uid))
                .expect("a named group is in the bucket");
            self.leaves(&group.entries, end_offset, floor, leaves);
        }
    }

    fn compare_and_swap(&mut self, epoch: u64, uid: u32, expected: u64) -> CommitOutcome {
        let current = self.pointer.map_or(0, |pointer| pointer.revision);
        if current != expected || self.pointer.is_some_and(|pointer| pointer.epoch > epoch) {
            return CommitOutcome::Conflict;
        }
        let revision = expected + 1;
        self.pointer = Some(Pointer {
            epoch,
            uid,
            revision,
        });
        self.history
            .insert(revision, self.roots[&(epoch, uid)].clone());
        CommitOutcome::Committed { revision }
    }

    /// What an effect does to the world, and the event that tells of it. Luck: 0..32 a failure before it happens, 32..48 it
    /// happens but looks like a failure.
    fn perform(&mut self, effect: &Effect, luck: u8) -> Event {
        let (fails, looks_failed) = (luck < 32, luck < 48);
        let failure = if luck & 1 == 0 {
            transient()
        } else {
            forbidden()
        };
        match effect {
            Effect::ReadPointer { generation } => {
                let outcome = match self.pointer {
                    _ if looks_failed => PointerRead::Unavailable,
                    Some(pointer) => PointerRead::Found(pointer),
                    None => PointerRead::NotFound,
                };
                Event::PointerRead {
                    generation: *generation,
                    outcome,
                }
            }
            Effect::GetRoot {
                generation,
                pointer,
            } => {
                let outcome = match self.roots.get(&(pointer.epoch, pointer.uid)) {
                    _ if looks_failed => Err(failure),
                    Some(root) => Ok(root.clone()),
                    None => Err(Failure::NotFound("gone".to_owned())),
                };
                Event::RootRead {
                    generation: *generation,
                    outcome,
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
                let local_first_offset = self.log.start;
                let in_front = from_offset
                    .checked_sub(RECORDS)
                    .filter(|id| self.log.contains(id));
                let differs = |expected: i64| {
                    in_front.is_some_and(|id| self.chunk(id).header.timestamp_ms != expected)
                };
                let unrelated = witness
                    .filter(|witness| local_first_offset <= witness.chunk_id)
                    .is_some_and(|witness| {
                        !witness.is_related_to(&self.chunk(local_first_offset).header)
                    });
                let ended = |end| {
                    let end = if unrelated {
                        ScanEnd::Unrelated { local_first_offset }
                    } else {
                        end
                    };
                    ScanBatch {
                        chunks: vec![],
                        end,
                    }
                };
                let batch = if looks_failed {
                    ScanBatch {
                        chunks: vec![],
                        end: ScanEnd::Failed {
                            reason: "half a header".to_owned(),
                        },
                    }
                } else if *from_offset < self.log.start {
                    ScanBatch {
                        chunks: vec![],
                        end: ScanEnd::LocalAhead { local_first_offset },
                    }
                } else if *from_offset > self.log.end {
                    ended(ScanEnd::RemoteAhead {
                        local_first_offset,
                        local_next_offset: self.log.end,
                    })
                } else if front_timestamp_ms.is_some_and(differs) {
                    ended(ScanEnd::Diverged { local_first_offset })
                } else {
                    let mut batch = scan_of(*from_offset, *up_to_chunk_id, *max_chunks, *max_bytes);
                    for found in &mut batch.chunks {
                        *found = self.chunk(found.header.chunk_id);
                    }
                    batch
                };
                Event::Scanned {
                    generation: *generation,
                    batch,
                }
            }
            Effect::WriteAnchor { generation } => Event::AnchorWritten {
                generation: *generation,
                ok: !looks_failed,
            },
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => {
                let outcome = if fails {
                    Err(failure)
                } else if plan.first_offset < self.log.start {
                    Err(Failure::NotFound("segment".to_owned()))
                } else {
                    let uid = self.uid();
                    let index = log_format::fragment::decode_index(&plan.index).unwrap();
                    let stored = Stored {
                        next_offset: plan.next_offset,
                        chunks: index
                            .records
                            .iter()
                            .map(|record| (record.offset, record.timestamp_ms))
                            .collect(),
                    };
                    self.fragments.insert((plan.first_offset, uid), stored);
                    if looks_failed { Err(failure) } else { Ok(uid) }
                };
                Event::TransferDone {
                    generation: *generation,
                    transfer: *transfer,
                    outcome,
                }
            }
            Effect::PutRoot {
                generation,
                epoch,
                follows: _,
                root,
            } => {
                let uid = self.uid();
                if !fails {
                    self.roots.insert((*epoch, uid), (**root).clone());
                }
                Event::RootPut {
                    generation: *generation,
                    outcome: if looks_failed { Err(failure) } else { Ok(uid) },
                }
            }
            Effect::PutGroup {
                generation, group, ..
            } => {
                let uid = self.uid();
                if !fails {
                    let key = (group.kind, group.first_offset, uid);
                    self.groups.insert(key, (**group).clone());
                }
                Event::GroupPut {
                    generation: *generation,
                    outcome: if looks_failed { Err(failure) } else { Ok(uid) },
                }
            }
            Effect::GetGroup {
                generation,
                kind,
                first_offset,
                uid,
            } => {
                let outcome = match self.groups.get(&(*kind, *first_offset, *uid)) {
                    _ if looks_failed => Err(failure),
                    Some(group) => Ok(group.clone()),
                    None => Err(Failure::NotFound("gone".to_owned())),
                };
                Event::GroupRead {
                    generation: *generation,
                    outcome,
                }
            }
            Effect::CommitPointer {
                generation,
                epoch,
                uid,
                expected_revision,
                ..
            } => {
                let outcome = if fails {
                    CommitOutcome::Unknown
                } else {
                    let outcome = self.compare_and_swap(*epoch, *uid, *expected_revision);
                    if looks_failed {
                        CommitOutcome::Unknown
                    } else {
                        outcome
                    }
                };
                Event::PointerCommitted {
                    generation: *generation,
                    outcome,
                }
            }
            other => panic!("{other:?} has no answer"),
        }
    }

    fn committed(&mut self) {
        let chunk_ids =
            (self.log.start < self.log.end).then(|| (self.log.end - RECORDS, self.log.start));
        let (committed_chunk_id, local_first_chunk_id) = chunk_ids.unzip();
        self.send(Event::Committed {
            committed_chunk_id,
            local_first_chunk_id,
        });
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Append(chunks) => {
                self.log.end += chunks * RECORDS;
                self.committed();
            }
            Step::Trim(records) => {
                let last = self.log.end.saturating_sub(RECORDS);
                self.log.start = self
                    .log
                    .start
                    .max((self.log.start + records / RECORDS * RECORDS).min(last));
                self.committed();
            }
            Step::Answer(which, luck) => self.answer(which, luck),
            Step::Lose(which) => {
                if !self.waiting.is_empty() {
                    let lost = self.waiting.remove(which.index(self.waiting.len()));
                    self.zombies.push(lost);
                }
            }
            Step::Wait => {
                if self.rig.machine.poll_timeout().is_some() {
                    self.rig.wait_until_due();
                    self.collect();
                }
            }
            Step::Cut => self.send(Event::CutRequested),
            Step::Retain(max_bytes) => {
                self.send(Event::RetentionChanged(RetentionBound {
                    max_bytes,
                    max_age_ms: None,
                }));
            }
            Step::Intrude => self.intrude(),
            Step::Restart => self.restart(),
            Step::LoseEnd(chunks) => {
                self.lose_end(chunks);
                self.restart();
            }
        }
    }

    fn answer(&mut self, which: prop::sample::Index, luck: u8) {
        let all = self.waiting.len() + self.zombies.len();
        if all == 0 {
            return;
        }
        let which = which.index(all);
        if let Some(zombie) = which.checked_sub(self.waiting.len()) {
            // It happens at last; if its machine is still there, it hears of it, and must know what that is worth.
            let effect = self.zombies.remove(zombie);
            let event = self.perform(&effect, luck.max(48));
            if luck & 2 == 0 && self.epoch_of(&effect) == self.epoch {
                self.send(event);
            }
        } else {
            let effect = self.waiting.remove(which);
            let event = self.perform(&effect, luck);
            if luck % 16 == 15 {
                self.zombies.push(effect);
            }
            self.send(event);
        }
        self.check_bucket();
    }

    fn epoch_of(&self, effect: &Effect) -> u64 {
        match effect {
            Effect::PutRoot { epoch, .. } | Effect::CommitPointer { epoch, .. } => *epoch,
            // Tickets and references start over in a new machine: its driver is another, too.
            _ if self.epoch == EPOCH => EPOCH,
            _ => 0,
        }
    }

    fn intrude(&mut self) {
        let Some(pointer) = self.pointer else { return };
        if pointer.epoch > self.epoch {
            return;
        }
        let uid = self.uid();
        let root = self.roots[&(pointer.epoch, pointer.uid)].clone();
        self.roots.insert((pointer.epoch, uid), root);
        self.compare_and_swap(pointer.epoch, uid, pointer.revision);
    }

    fn restart(&mut self) {
        self.zombies.append(&mut self.waiting);
        self.epoch += 1;
        let now = self.rig.now;
        self.rig = Rig {
            machine: UploadMachine::new(now, self.settings, self.epoch, 1),
            now,
            effects: vec![],
            last_published: None,
        };
        self.rig.collect();
        self.collect();
        self.committed();
    }

    /// Until nothing is left to do. `false`: the machine waits for a person, because nothing of the local log is of the
    /// manifest's past.
    fn run_until_quiet(&mut self) -> bool {
        for round in 0.. {
            if self.waiting.is_empty()
                && self
                    .rig
                    .machine
                    .problems
                    .current()
                    .is_some_and(|problem| problem.kind == "lost_log")
            {
                self.assert_unrelated();
                return false;
            }
            assert!(
                round < 5_000,
                "does not settle: {:?}",
                self.rig.machine.status()
            );
            if let Some(effect) = (!self.waiting.is_empty()).then(|| self.waiting.remove(0)) {
                let event = self.perform(&effect, 255);
                self.send(event);
                continue;
            }
            let status = self.rig.machine.status();
            if status.assembly_chunks > 0 {
                self.send(Event::CutRequested);
            }
            if self.rig.machine.poll_timeout().is_some() {
                self.rig.wait_until_due();
                self.collect();
            } else if self.waiting.is_empty() {
                break;
            }
        }
        true
    }

    /// Retention may take the last chunk that the log had before it lost its end: what is left is as a log that began again.
    fn assert_unrelated(&self) {
        let root = &self.rig.machine.persisted;
        let mut leaves = Vec::new();
        self.leaves(
            &root.entries,
            root.next_offset,
            root.first_offset,
            &mut leaves,
        );
        for leaf in leaves {
            for (id, timestamp_ms) in &self.fragments[&(leaf.first_offset, leaf.uid)].chunks {
                let both = self.log.contains(id) && *id >= root.first_offset;
                assert!(
                    !both || self.chunk(*id).header.timestamp_ms != *timestamp_ms,
                    "chunk {id} is in both"
                );
            }
        }
    }

    /// Everything works from here on, and nothing new is written: in the end all that is there is durable.
    fn settle(&mut self) {
        self.zombies.clear();
        self.send(Event::RetentionChanged(RetentionBound::default()));
        self.committed();
        if !self.run_until_quiet() {
            return;
        }
        let status = self.rig.machine.status();
        assert_eq!(
            (status.activity, status.problem.clone()),
            (Activity::Draining, None)
        );
        if self.log.start < self.log.end {
            assert_eq!(status.persisted_next_offset, self.log.end, "{status:?}");
            self.check_timeline(&self.rig.machine.persisted);
        }
        let live: BTreeSet<_> = self
            .pointer
            .map(|pointer| (pointer.epoch, pointer.uid))
            .into_iter()
            .collect();
        assert!(
            self.roots
                .keys()
                .copied()
                .collect::<BTreeSet<_>>()
                .is_superset(&live)
        );
        let entries = &self.rig.machine.manifest.entries;
        let threshold = self.rig.machine.rebalance_threshold();
        assert_eq!(rebalance::next_run(entries, threshold), None);
        // Retention can always empty it, group by group.
        self.send(Event::RetentionChanged(RetentionBound {
            max_bytes: Some(0),
            max_age_ms: None,
        }));
        assert!(self.run_until_quiet());
        assert_eq!(self.rig.machine.problems.current(), None);
        assert!(self.rig.machine.persisted.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_whatever_the_order(threshold in prop_oneof![2u32..6, Just(1_024)], steps in steps()) {
        let mut world = World::new(threshold);
        world.collect();
        for step in steps {
            world.step(step);
        }
        world.settle();
    }
}
