//! What must hold, checked where it could break: the named invariants against the reference.

pub mod tree;

use std::sync::Arc;

use log_format::fragment;
use log_format::manifest::{Kind, Root};
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::manifest::invariants as manifest;
use tiering_core::upload::{self, Activity, Effect, Pointer, Recovery, StoredObject, invariants};

use crate::coverage::Coverage;
use crate::promises;
use crate::store::{Known, Stored};
use crate::world::World;
use tree::Flat;

impl World {
    /// Every predicate of the core, after every event.
    pub fn check_machine(&mut self, uploader: usize) {
        let Some(machine) = self
            .uploaders
            .get(uploader)
            .and_then(|it| it.machine.as_ref())
        else {
            return;
        };
        let violated = invariants::violated(machine);
        if !violated.is_empty() {
            self.violated(|| format!("{}: uploader {uploader}", violated.join(", ")));
        }
    }

    /// Every promise of the core about what it asks for.
    pub fn check_effect(&mut self, uploader: usize, effect: &Effect) {
        let Some(machine) = self
            .uploaders
            .get(uploader)
            .and_then(|it| it.machine.as_ref())
        else {
            return;
        };
        let broken = upload::promises::broken_by(machine, effect);
        if !broken.is_empty() {
            self.violated(|| format!("{}: an effect of uploader {uploader}", broken.join(", ")));
        }
    }

    /// What holds between the parts, after every step.
    pub fn check_promises(&mut self) {
        let mut broken = None;
        for (number, state) in self.streams.iter_mut().enumerate() {
            let (anchor, deleted) = (state.metadata.anchor, state.metadata.deleted);
            let had_anchor = std::mem::replace(&mut state.had_anchor, anchor);
            if !promises::anchor_removal(had_anchor, anchor, deleted) {
                broken = Some(("anchor removal", number));
            }
            if !promises::anchor_ordering(self.bucket.count(number), anchor, deleted) {
                broken = Some(("anchor ordering", number));
            }
            // Computed again for a node when what it knows or what is persisted has changed.
            let revision = state.metadata.pointer.map_or(0, |pointer| pointer.revision);
            let known = state.known.iter().zip(&mut state.compared).enumerate();
            for (node, (known, compared)) in known {
                let Some(known) = known else { continue };
                if std::mem::replace(compared, (known.version, revision))
                    == (known.version, revision)
                    || deleted
                {
                    continue;
                }
                let of_the_past = state.lost.iter().any(|(revision, next)| {
                    known.version.0 <= *revision && known.root.next_offset > *next
                });
                if let Some(current) = &state.current
                    && !of_the_past
                    && !promises::replica_prefix(&known.root, current)
                {
                    broken = Some(("replica prefix", node));
                }
            }
        }
        if let Some((name, number)) = broken {
            self.violated(|| format!("{name}: number {number}"));
        }
    }

    /// Anchor ordering: no fragment is sent before the anchor is durable.
    pub fn check_anchor(&mut self, uploader: usize) {
        let Some(state) = self
            .uploaders
            .get(uploader)
            .and_then(|it| self.streams.get(it.stream))
        else {
            return;
        };
        if !state.metadata.anchor && !state.metadata.deleted {
            self.violated(|| {
                format!("anchor ordering: uploader {uploader} sends a fragment without an anchor")
            });
        }
    }

    /// What reaches the bucket is the log, byte for byte, and the index says where its chunks are.
    pub fn check_fragment(&mut self, stream: usize, plan: &FragmentPlan, stored: &Stored) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        let (from, to) = (
            state.log.holding(plan.first_offset),
            state.log.holding(plan.next_offset),
        );
        let data = stored
            .bytes
            .get(fragment::HEADER_BYTES..fragment::HEADER_BYTES + plan.size_bytes as usize);
        let index = stored
            .bytes
            .get(fragment::HEADER_BYTES + plan.size_bytes as usize..)
            .unwrap_or_default();
        let exact = state.log.id(from) == plan.first_offset && state.log.id(to) == plan.next_offset;
        let records = fragment::decode_index(index)
            .map(|index| index.records)
            .unwrap_or_default();
        let indexed = records.len() == to - from
            && records.iter().zip(from..to).all(|(record, index)| {
                state.log.chunk(index).is_some_and(|chunk| {
                    record.offset == chunk.header.chunk_id
                        && record.timestamp_ms == chunk.header.timestamp_ms
                        && record.position as usize == chunk.start - state.log.start(from)
                })
            });
        if !exact || data != Some(state.log.bytes(from, to)) || !indexed {
            self.violated(|| {
                format!(
                    "durability: the fragment at {} is not what the log says",
                    plan.first_offset
                )
            });
        }
    }

    /// The pointer has moved. Everything that a commit promises.
    pub fn check_commit(&mut self, uploader: usize, before: Option<Pointer>) {
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        let (stream, recovered, cut_to) = (it.stream, it.recovered.take(), it.cut_to.take());
        let latest_ms = self.latest_ms();
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        let Some(pointer) = state.metadata.pointer else {
            return;
        };
        let object = StoredObject::Root {
            epoch: pointer.epoch,
            uid: pointer.uid,
        };
        let decoded = self
            .bucket
            .get(stream, object)
            .map(|stored| Root::decode(&stored.bytes));
        let Some(Ok(root)) = decoded else {
            return self.violated(|| format!("durability: the pointer of stream {stream} names {object:?}, which is not there"));
        };
        let flat = match Flat::of(&self.bucket, stream, &root) {
            Ok(flat) => flat,
            Err(text) => {
                return self.violated(|| {
                    format!("durability: {text}: commit of uploader {uploader}, {pointer:?}")
                });
            }
        };
        hit_heights(&mut self.coverage, &root);
        let old = state
            .flat
            .take()
            .unwrap_or_else(|| Flat::empty_at(root.first_offset))
            .root;
        let (root, root_as_stored) = (&flat.root, root);
        let fresh = before.is_none();
        let mut wrong = Vec::new();
        if before.is_some_and(|before| {
            before.epoch > pointer.epoch || before.revision >= pointer.revision
        }) {
            wrong.push("epoch monotonicity");
        }
        if !state.metadata.anchor {
            wrong.push("anchor ordering");
        }
        let stored = &root_as_stored;
        if !(manifest::ordering(stored)
            && manifest::coverage(stored)
            && manifest::accounting(stored))
        {
            wrong.push("manifest");
        }
        match recovered {
            None if fresh => {}
            None => {
                let kept = manifest::prefix_monotonicity(&old, root)
                    && manifest::contiguous_advance(&old, root);
                if !kept || !manifest::immutability(&old, root) {
                    wrong.push("contiguous advance");
                }
            }
            Some(Recovery::LocalLogAhead) => {
                if !root.is_empty() && root.first_offset < old.next_offset {
                    wrong.push("reset safety");
                }
            }
            // Of what lies below the place that it was cut back to, everything is kept.
            Some(Recovery::RemoteTierAhead) => {
                let to = cut_to.unwrap_or(0);
                if stored_groups(stored) && to < old.next_offset {
                    self.coverage.hit("cut back with groups");
                }
                let kept = old.entries.partition_point(|entry| entry.first_offset < to);
                if old.entries.get(..kept) != root.entries.get(..kept) {
                    wrong.push("reset safety");
                }
            }
        }
        if recovered.is_none() && root.first_offset > old.first_offset && !fresh {
            self.coverage.hit("retention dropped");
            if root.is_empty() {
                self.coverage.hit("retention emptied the manifest");
            }
            // The last fragment that went had to go by a bound that there has been.
            let last = old
                .entries
                .iter()
                .rfind(|entry| entry.first_offset < root.first_offset);
            let justified = last.is_some_and(|last| {
                let over = state.strictest.max_bytes.is_some_and(|max| {
                    root.total_size_bytes + u128::from(last.size_bytes) > u128::from(max)
                });
                // The true time, unless that went with a timeline that is no more.
                let known = |(_, next): &(u64, u64)| root.first_offset <= *next;
                let written = state.log.holding(root.first_offset).checked_sub(1);
                let written = written
                    .and_then(|at| state.log.chunk(at))
                    .filter(|_| state.lost.iter().all(known));
                let by_age = state.strictest.max_age_ms.is_some_and(|max_age_ms| {
                    !root.is_empty()
                        && written.is_none_or(|chunk| {
                            promises::old_enough(chunk.written_ms, latest_ms, max_age_ms)
                        })
                });
                if by_age {
                    self.coverage.hit("age took what was old enough");
                }
                over || by_age
            });
            if !justified {
                wrong.push("retention");
            }
        }
        for (number, entry) in root.entries.iter().enumerate() {
            let end = root
                .entries
                .get(number + 1)
                .map_or(root.next_offset, |next| next.first_offset);
            let object = StoredObject::Fragment {
                first_offset: entry.first_offset,
                uid: entry.uid,
            };
            let log = &state.log;
            let there = entry.kind == Kind::Fragment
                && self.bucket.get(stream, object).is_some_and(|stored| {
                    // A manifest that was cut back may end inside its last object.
                    let cut = stored.next_offset > end && !state.lost.is_empty();
                    let same_timeline = stored.timeline == log.timeline || {
                        let expected = log.bytes(log.holding(entry.first_offset), log.holding(end));
                        let data = stored
                            .bytes
                            .get(fragment::HEADER_BYTES..fragment::HEADER_BYTES + expected.len());
                        data == Some(expected)
                    };
                    // Until a lost end is noticed, the manifest is of the old timeline.
                    let unnoticed =
                        state.lost.iter().any(|(_, next)| end > *next) && old.next_offset >= end;
                    (stored.next_offset == end || cut)
                        && stored.data_bytes == entry.size_bytes
                        && (same_timeline || unnoticed)
                });
            if !there {
                wrong.push("durability");
                break;
            }
        }
        // Whoever has not noticed yet that the log lost its end has persisted it once more (groups were made).
        if let (None, Some(before)) = (recovered, before) {
            for (revision, next) in &mut state.lost {
                if before.revision <= *revision && old.next_offset > *next {
                    *revision = pointer.revision;
                }
            }
        }
        state.floor = state
            .floor
            .max(root.first_offset.min(state.log.next_offset()));
        let root = Arc::new(root_as_stored);
        state.history.insert(pointer.revision, Arc::clone(&root));
        state.current = Some(root);
        state.flat = Some(flat);
        state.replaced = before;
        if !wrong.is_empty() {
            self.violated(|| {
                format!(
                    "{}: commit of uploader {uploader}, {pointer:?}",
                    wrong.join(", ")
                )
            });
        }
    }

    /// Only what is persisted is published (or nothing at all, after the log lost its end).
    pub fn check_publish(&mut self, uploader: usize, known: &Known) {
        let Some(it) = self.uploaders.get(uploader) else {
            return;
        };
        let Some(state) = self.streams.get(it.stream) else {
            return;
        };
        if state.metadata.deleted {
            return;
        }
        let reset = it.recovered == Some(Recovery::RemoteTierAhead)
            && known.root.next_offset <= state.log.next_offset();
        let right = match known.version.0 {
            0 => known.root.is_empty() && it.read_none,
            revision => state.history.get(&revision) == Some(&known.root),
        };
        if !right && !reset {
            self.violated(|| {
                format!("durability: uploader {uploader} publishes what is not persisted")
            });
        }
    }

    /// Local authority: a manifest that the local log has been seen to continue holds what was acknowledged and not lost, byte
    /// for byte. Local retention trims by it, and what is written after a loss is served from it.
    pub fn check_timeline(&mut self, stream: usize, root: &Root) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        // What is not there is checked elsewhere.
        let Ok(flat) = Flat::of(&self.bucket, stream, root) else {
            return;
        };
        let (log, entries) = (&state.log, &flat.root.entries);
        for (number, entry) in entries.iter().enumerate() {
            let next = entries.get(number + 1);
            let end = next.map_or(root.next_offset, |next| next.first_offset);
            let object = StoredObject::of(entry);
            let Some(stored) = self.bucket.get(stream, object) else {
                continue;
            };
            if stored.timeline == log.timeline {
                continue;
            }
            let expected = log.bytes(log.holding(entry.first_offset), log.holding(end));
            let data = stored
                .bytes
                .get(fragment::HEADER_BYTES..fragment::HEADER_BYTES + expected.len());
            if data != Some(expected) || end > log.next_offset() {
                let first_offset = entry.first_offset;
                self.violated(|| {
                    format!("local authority: the fragment at {first_offset} is of a timeline that is no more")
                });
                return;
            }
        }
    }

    /// Local authority: what leaves the local log because it is durable is durable.
    pub fn check_trim(&mut self, stream: usize, node: usize) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        let floor = state
            .disks
            .get(node)
            .map_or(0, |disk| state.log.id(disk.first()));
        let durable = state.current.as_ref().map_or(0, |root| root.next_offset);
        if floor > durable && floor > state.floor {
            self.violated(|| {
                format!("local authority: node {node} trims to {floor}, durable is {durable}")
            });
        }
    }

    /// Deletion set: nothing that the persisted manifest names is deleted, nor the root before it.
    pub fn check_delete(&mut self, stream: usize, object: StoredObject) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        let named = match object {
            StoredObject::Root { epoch, uid } => [state.metadata.pointer, state.replaced]
                .iter()
                .flatten()
                .any(|pointer| pointer.epoch == epoch && pointer.uid == uid),
            StoredObject::Group { .. } | StoredObject::Fragment { .. } => {
                state.flat.as_ref().is_some_and(|flat| flat.names(&object))
            }
        };
        if named {
            self.violated(|| {
                format!("deletion set: {object:?} of stream {stream} is deleted and still named")
            });
        }
    }

    /// The quiet end: all is durable, all is read, nobody waits.
    pub fn check_end(&mut self, out_of_time: bool) {
        for stream in 0..self.streams.len() {
            let Some(state) = self.streams.get(stream) else {
                continue;
            };
            if state.metadata.deleted {
                let left = self.bucket.list(stream).len();
                if left > 0 {
                    self.violated(|| {
                        format!(
                            "anchor removal: {left} objects of the deleted stream {stream} are left"
                        )
                    });
                }
                continue;
            }
            let durable = state.current.as_ref().map_or(0, |root| root.next_offset);
            if !state.log.is_empty() && durable != state.log.next_offset() {
                let next = state.log.next_offset();
                let status = self.machine_of(stream);
                self.violated(|| {
                    format!(
                        "liveness: stream {stream} is durable up to {durable} of {next}; {status}"
                    )
                });
                continue;
            }
            if let (Some(max_bytes), Some(root)) = (state.bound.max_bytes, &state.current) {
                let total = root.total_size_bytes;
                self.coverage.hit("bound kept to the end");
                if total > u128::from(max_bytes) {
                    let status = self.machine_of(stream);
                    self.violated(|| {
                        format!("retention: stream {stream} keeps {total} bytes, not {max_bytes}; {status}")
                    });
                    continue;
                }
            }
            let machine = state
                .uploader
                .and_then(|uploader| self.uploaders.get(uploader))
                .and_then(|it| it.machine.as_ref());
            let idle = machine.is_some_and(|machine| {
                let status = machine.status();
                machine.poll_timeout().is_none()
                    && matches!(status.activity, Activity::Draining)
                    && status.transfers_in_flight + status.transfers_waiting == 0
                    && !status.persist_in_flight
                    && status.edits_since_persist == 0
                    && status.problem.is_none()
            });
            if !idle {
                let status = self.machine_of(stream);
                self.violated(|| {
                    format!("liveness: stream {stream} does not come to rest; {status}")
                });
            }
        }
        for consumer in 0..self.consumers.len() {
            self.check_consumer_end(consumer);
        }
        if out_of_time {
            self.violated(|| "liveness: the world does not come to rest".to_owned());
        }
    }

    fn machine_of(&self, stream: usize) -> String {
        let machine = self
            .streams
            .get(stream)
            .and_then(|state| self.uploaders.get(state.uploader?)?.machine.as_ref());
        match machine {
            Some(machine) => format!(
                "timeout {:?}, {:?}",
                machine.poll_timeout(),
                machine.status()
            ),
            None => "no machine".to_owned(),
        }
    }
}

fn stored_groups(root: &Root) -> bool {
    root.entries
        .iter()
        .any(|entry| entry.kind != Kind::Fragment)
}

/// Which heights a root has, and whether its beginning is inside a group.
fn hit_heights(coverage: &mut Coverage, root: &Root) {
    for (kind, name) in [
        (Kind::Group, "root with a group"),
        (Kind::KiloGroup, "root with a kilo-group"),
        (Kind::MegaGroup, "root with a mega-group"),
    ] {
        if root.entries.iter().any(|entry| entry.kind == kind) {
            coverage.hit(name);
        }
    }
    if root
        .entries
        .first()
        .is_some_and(|first| first.first_offset < root.first_offset)
    {
        coverage.hit("retention inside a group");
    }
}
