//! Consumers: they attach by a spec, are routed as the broker routes them, read through the real [`ReadMachine`], move
//! between the tiers, and compare everything with the reference.

mod gap;
mod reader;

use std::sync::Arc;

use bytes::Bytes;
use log_format::chunk::HEADER_BYTES;
use log_format::fragment;
use tiering_core::read::{
    Effect, Event as ReaderEvent, FailureKind, FragmentRef, GroupRef, ManifestView, ReadMachine,
    ReadOutcome, ReadyQueue, Start, invariants,
};
use tiering_core::route::{LocalSpec, Route, Spec};
use tiering_core::upload::{Failure, StoredObject};

use crate::log::Log;
use crate::plan::Trouble;
use crate::upload::shorten;
use crate::world::{Event, Stream, WALL_MS, World};

/// A request of a reader.
#[derive(Debug)]
pub(crate) enum ReaderOp {
    /// The node's manifest.
    Refresh(u64),
    /// A whole group.
    GetGroup(u64, GroupRef),
    /// Bytes of a fragment; `whole`: fewer are as good (an index).
    Get {
        id: u64,
        fragment: FragmentRef,
        start: u64,
        end: u64,
        index: bool,
    },
}

/// Something for a reader.
#[derive(Debug)]
pub enum ReaderNews {
    /// An answer.
    Event(ReaderEvent),
    /// Time.
    Wake(u64),
}

#[derive(Debug)]
struct Remote {
    machine: Box<ReadMachine>,
    queue: ReadyQueue,
    /// First offset that the local log had when this reader was made. What is below is of no timeline but its own.
    limit: u64,
    wake_ms: Option<u64>,
    wakes_in_a_row: u32,
    /// Requests without an answer, and when the last answer came.
    in_flight: usize,
    answered_ms: u64,
    finished_ms: u64,
    /// Longest time for which nothing was asked although the consumer has nothing.
    idle_ms: u64,
    crc_seen: u64,
}

#[derive(Debug)]
enum Mode {
    Attach(Spec),
    Local(usize),
    Remote(Remote),
}

/// Where the first chunk has to be.
#[derive(Debug, Clone, Copy)]
struct Begin {
    /// The chunk that holds this offset, or a later one if there is a reason.
    offset: u64,
    /// Not older than this, if it comes from the remote tier.
    timestamp_ms: Option<i64>,
}

/// One consumer.
#[derive(Debug)]
pub struct Consumer {
    stream: usize,
    node: usize,
    mode: Mode,
    reader: u64,
    begin: Option<Begin>,
    expected: Option<u64>,
    /// Bytes were corrupted on their way to it.
    corrupted: bool,
}

impl Consumer {
    fn attach(&mut self, spec: Spec) {
        self.mode = Mode::Attach(spec);
        self.reader += 1;
        self.corrupted = false;
    }

    fn begin_ms(&self) -> Option<i64> {
        self.begin.and_then(|begin| begin.timestamp_ms)
    }

    /// Attaches where it is. Whether that was known.
    fn attach_again(&mut self) -> bool {
        let spec = match (self.expected, self.begin_ms(), self.begin) {
            (Some(expected), _, _) => Spec::Offset(expected),
            (None, Some(timestamp_ms), _) => Spec::Timestamp(timestamp_ms),
            (None, None, Some(begin)) => Spec::Offset(begin.offset),
            (None, None, None) => return false,
        };
        self.attach(spec);
        true
    }
}

impl World {
    /// A consumer that attaches for the first time.
    pub fn create_consumer(&mut self) {
        let consumer = self.consumers.len();
        self.consumers.push(Consumer {
            stream: 0,
            node: 0,
            mode: Mode::Attach(Spec::First),
            reader: 0,
            begin: None,
            expected: None,
            corrupted: false,
        });
        self.new_subscription(consumer);
        let delay_ms = self.rng.range(1, 300);
        self.at(delay_ms, Event::Poll(consumer));
    }

    fn new_subscription(&mut self, consumer: usize) {
        let live: Vec<usize> = (0..self.streams.len())
            .filter(|stream| {
                self.streams
                    .get(*stream)
                    .is_some_and(|state| !state.metadata.deleted)
            })
            .collect();
        let stream = live
            .get(self.rng.below(live.len().max(1)))
            .copied()
            .unwrap_or(0);
        let node = self.rng.below(self.knobs.nodes);
        let next = self
            .streams
            .get(stream)
            .map_or(0, |state| state.log.next_offset());
        let ago_ms = self.rng.range(0, self.now_ms + 50);
        let offset = self.rng.range(0, next + 5);
        let spec = match self.rng.below(9) {
            0 | 1 => Spec::First,
            2 => Spec::Last,
            3 => Spec::Next,
            4 | 5 => Spec::Offset(offset),
            6 => Spec::Abs(offset),
            _ if !self.stamps_are_in_order() => Spec::First,
            _ => Spec::Timestamp(WALL_MS + self.now_ms as i64 + 20 - ago_ms as i64),
        };
        if let Some(it) = self.consumers.get_mut(consumer) {
            (it.stream, it.node, it.begin, it.expected) = (stream, node, None, None);
            it.attach(spec);
        }
    }

    /// The stream is gone or is another one: consumers of it attach to something else.
    pub fn reset_consumers(&mut self, stream: usize) {
        self.reset_consumers_of(stream, None);
    }

    /// The same for one node.
    pub fn reset_consumers_of(&mut self, stream: usize, node: Option<usize>) {
        for consumer in 0..self.consumers.len() {
            let hit = self
                .consumers
                .get(consumer)
                .is_some_and(|it| it.stream == stream && node.is_none_or(|node| it.node == node));
            if hit {
                self.new_subscription(consumer);
            }
        }
    }

    /// The consumer looks for more.
    pub fn poll(&mut self, consumer: usize) {
        let pause_ms = self.rng.range(1, 40);
        let credit = self.rng.range(1, 12);
        if !self.quiet && self.rng.chance(60) {
            self.new_subscription(consumer);
        }
        if self.quiet && self.consumer_is_through(consumer) {
            return;
        }
        self.at(pause_ms, Event::Poll(consumer));
        for _ in 0..credit {
            if self.violation.is_some() || !self.read_one(consumer) {
                break;
            }
        }
        self.reader_consumed(consumer);
    }

    /// Whether it got a chunk or moved on.
    fn read_one(&mut self, consumer: usize) -> bool {
        let Some(it) = self.consumers.get_mut(consumer) else {
            return false;
        };
        let Some(state) = self.streams.get(it.stream) else {
            return false;
        };
        let Some(disk) = state.disks.get(it.node) else {
            return false;
        };
        match &mut it.mode {
            Mode::Attach(spec) => {
                let spec = *spec;
                self.attach(consumer, spec)
            }
            Mode::Local(index) if *index < disk.first() => {
                // Its segment is gone.
                let offset = it.expected.unwrap_or_else(|| state.log.id(*index));
                it.attach(Spec::Offset(offset));
                true
            }
            Mode::Local(index) if *index < disk.end => {
                let (at, bytes) = (
                    *index,
                    Bytes::copy_from_slice(state.log.bytes(*index, *index + 1)),
                );
                *index += 1;
                let id = state.log.id(at);
                self.coverage.hit("reader local chunk");
                self.delivered(consumer, id, &bytes, false);
                true
            }
            Mode::Local(_) => false,
            Mode::Remote(remote) => {
                if disk.is_empty() {
                    // A replica that has nothing yet: nothing is committed there.
                    return false;
                }
                let committed = state.log.id(disk.end - 1);
                let limit = remote.limit;
                if it.expected.is_some_and(|expected| expected >= limit) {
                    self.coverage.hit("reader at its limit");
                    return it.attach_again();
                }
                match remote.queue.take(committed) {
                    ReadOutcome::Chunk { header, .. } if header.chunk_id >= limit => {
                        self.coverage.hit("reader at its limit");
                        let first_offset = disk.first_offset(&state.log);
                        if let (None, Some(timestamp_ms)) = (it.expected, it.begin_ms())
                            && first_offset.is_some_and(|first| first <= header.chunk_id)
                        {
                            // Nothing older is new enough, so the local log has it.
                            let at = state.log.at_time(timestamp_ms);
                            it.mode = Mode::Local(at.clamp(disk.first(), disk.end));
                            return true;
                        }
                        it.attach_again()
                    }
                    ReadOutcome::Chunk { header, bytes, .. } => {
                        self.coverage.hit("reader delivered");
                        self.delivered(consumer, header.chunk_id, &bytes.to_bytes(), true);
                        true
                    }
                    ReadOutcome::Wait => false,
                    ReadOutcome::Local { next_offset } => {
                        self.coverage.hit("reader to local");
                        it.attach(Spec::Offset(it.expected.unwrap_or(next_offset)));
                        self.note(|| {
                            format!(
                                "consumer {consumer}: goes on in the local log at {next_offset}"
                            )
                        });
                        true
                    }
                    ReadOutcome::Failed { kind, text } => {
                        self.reader_failed(consumer, kind, &text);
                        false
                    }
                }
            }
        }
    }

    fn attach(&mut self, consumer: usize, spec: Spec) -> bool {
        let Some(it) = self.consumers.get_mut(consumer) else {
            return false;
        };
        let (stream, node) = (it.stream, it.node);
        let Some(decision) = self.where_to_start(stream, node, spec) else {
            return false;
        };
        let Some(it) = self.consumers.get_mut(consumer) else {
            return false;
        };
        let Some(state) = self.streams.get(it.stream) else {
            return false;
        };
        let Some(disk) = state.disks.get(it.node) else {
            return false;
        };
        let local_first = disk.first_offset(&state.log);
        let local_next = state.log.id(disk.end);
        // Without a manifest only the local log can have decided.
        let root = usable(state, it.node)
            .unwrap_or_else(|| Arc::new(log_format::manifest::Root::empty_at(0)));
        let readable_first = match local_first {
            Some(local) if root.is_empty() => local,
            Some(local) => local.min(root.first_offset),
            None if root.is_empty() => local_next,
            None => root.first_offset,
        };
        let local_at = |local: LocalSpec| match local {
            LocalSpec::First => disk.first(),
            LocalSpec::Last => disk.end.max(1) - 1,
            LocalSpec::Next => disk.end,
            LocalSpec::Offset(offset) => state.log.holding(offset).clamp(disk.first(), disk.end),
            LocalSpec::Timestamp(timestamp_ms) => state
                .log
                .at_time(timestamp_ms)
                .clamp(disk.first(), disk.end),
        };
        if it.expected.is_none() {
            let offset = match spec {
                Spec::First => readable_first,
                Spec::Last | Spec::Next => state.log.id(local_at(if spec == Spec::Last {
                    LocalSpec::Last
                } else {
                    LocalSpec::Next
                })),
                Spec::Offset(offset) | Spec::Abs(offset) => offset
                    .max(readable_first)
                    .min(local_next.max(root.next_offset).max(readable_first)),
                Spec::Timestamp(timestamp_ms) => state
                    .log
                    .id(state.log.at_time(timestamp_ms))
                    .max(readable_first),
            };
            let timestamp_ms = match spec {
                Spec::Timestamp(timestamp_ms) => Some(timestamp_ms),
                _ => None,
            };
            // Past the end is at the end, as in the stock log; a replica that lags ends earlier.
            let offset = if matches!(decision, Route::Local(_)) {
                offset.min(local_next)
            } else {
                offset
            };
            it.begin = Some(Begin {
                offset,
                timestamp_ms,
            });
        }
        self.coverage.hit(match spec {
            Spec::First => "attach first",
            Spec::Last => "attach last",
            Spec::Next => "attach next",
            Spec::Offset(_) => "attach offset",
            Spec::Abs(_) => "attach abs",
            Spec::Timestamp(_) => "attach timestamp",
        });
        match decision {
            Route::Unknown | Route::UnprovenGap => false,
            Route::Local(local) => {
                self.coverage.hit("route local");
                it.mode = Mode::Local(local_at(local));
                self.note(|| format!("consumer {consumer}: {spec:?} is local ({local:?})"));
                true
            }
            Route::OutOfRange { .. } => {
                self.coverage.hit("attach abs out of range");
                if let Spec::Abs(offset) = spec
                    && offset >= readable_first
                    && offset < local_next
                {
                    self.violated(|| {
                        format!("tier overlap: offset {offset} is called out of range")
                    });
                }
                self.new_subscription(consumer);
                false
            }
            Route::Remote { start_offset } => {
                self.coverage.hit("route remote");
                if it.expected.is_some() {
                    self.coverage.hit("reader to remote");
                }
                let start = match spec {
                    Spec::Timestamp(timestamp_ms) => Start::Timestamp(timestamp_ms),
                    _ => Start::Offset(start_offset),
                };
                let seed = self.rng.next();
                it.mode = Mode::Remote(Remote {
                    machine: Box::new(ReadMachine::new(self.now_ms, self.knobs.read, start, seed)),
                    queue: ReadyQueue::new(),
                    limit: local_first.unwrap_or(0),
                    wake_ms: None,
                    wakes_in_a_row: 0,
                    in_flight: 0,
                    answered_ms: self.now_ms,
                    finished_ms: 0,
                    idle_ms: 0,
                    crc_seen: 0,
                });
                self.note(|| format!("consumer {consumer}: {spec:?} is remote ({start:?})"));
                self.reader_pump(consumer);
                true
            }
        }
    }

    /// Exactly once, in order, byte for byte.
    fn delivered(&mut self, consumer: usize, chunk_id: u64, bytes: &Bytes, remote: bool) {
        let Some(it) = self.consumers.get_mut(consumer) else {
            return;
        };
        let Some(state) = self.streams.get(it.stream) else {
            return;
        };
        let index = state.log.holding(chunk_id);
        let next = state.log.id(index + 1);
        let same = state.log.id(index) == chunk_id && state.log.bytes(index, index + 1) == bytes;
        let (expected, begin) = (it.expected.replace(next), it.begin.take());
        if !same {
            return self.violated(|| format!("exactly once: consumer {consumer} got other bytes at {chunk_id} (remote: {remote})"));
        }
        let timestamp_ms = state
            .log
            .chunk(index)
            .map_or(0, |chunk| chunk.header.timestamp_ms);
        let problem = match (expected, begin) {
            (Some(expected), _) if chunk_id < expected => Some("again"),
            (Some(expected), _) if chunk_id > expected => {
                self.coverage.hit("reader jumped");
                (!explained(state, expected, chunk_id)).then_some("a chunk after a gap")
            }
            (None, Some(begin)) if chunk_id > begin.offset => {
                (!explained(state, begin.offset, chunk_id)).then_some("a first chunk too late")
            }
            (
                None,
                Some(Begin {
                    offset,
                    timestamp_ms: None,
                }),
            ) if next <= offset => Some("a first chunk too early"),
            (
                None,
                Some(Begin {
                    timestamp_ms: Some(wanted),
                    ..
                }),
            ) if remote && timestamp_ms < wanted => Some("a first chunk too old"),
            _ => None,
        };
        if let Some(problem) = problem {
            let known = state.known.get(it.node).and_then(Option::as_ref);
            let known = known.map(|known| (known.version, known.root.next_offset));
            let reasons = format!(
                "node {} knows {known:?}, floor {}, gaps {:?}",
                it.node, state.floor, state.gaps
            );
            self.violated(|| {
                format!("exactly once: consumer {consumer} got {problem}: {chunk_id}, expected {expected:?} or {begin:?} (remote: {remote}; {reasons})")
            });
        }
    }

    fn reader_failed(&mut self, consumer: usize, kind: FailureKind, text: &str) {
        let quiet = self.quiet;
        let Some(it) = self.consumers.get_mut(consumer) else {
            return;
        };
        let patience_ms = 2 * self.knobs.read.backoff_max_ms;
        let asked = match &it.mode {
            Mode::Remote(remote) => {
                remote.idle_ms <= patience_ms
                    && (remote.in_flight > 0
                        || remote.finished_ms <= remote.answered_ms + patience_ms)
            }
            Mode::Attach(_) | Mode::Local(_) => true,
        };
        let allowed = match kind {
            // Nothing is archived here.
            FailureKind::Bug | FailureKind::Archived => false,
            FailureKind::Corrupt => it.corrupted,
            // A node that has not heard of the newest manifest yet, or that was cut off from the store.
            FailureKind::Lost => !quiet,
            // Whoever gives up has asked to the end, with the longest wait before the last time.
            FailureKind::Unavailable => asked,
        };
        if kind == FailureKind::Unavailable {
            self.coverage.hit("reader unavailable");
        }
        if !it.attach_again() {
            self.new_subscription(consumer);
        }
        self.note(|| format!("consumer {consumer}: its reader failed: {kind:?} {text}"));
        if !allowed {
            self.violated(|| {
                format!("exactly once: the reader of consumer {consumer} failed: {kind:?} {text}")
            });
        }
    }

    fn consumer_is_through(&self, consumer: usize) -> bool {
        let Some(it) = self.consumers.get(consumer) else {
            return true;
        };
        let Some(state) = self.streams.get(it.stream) else {
            return true;
        };
        match (&it.mode, it.expected, it.begin) {
            (Mode::Local(_), Some(expected), _) => expected == state.log.next_offset(),
            (Mode::Local(index), None, _) => *index >= state.log.len(),
            _ => state.metadata.deleted,
        }
    }

    /// At the end of a run everybody has read to the end, in the local log.
    pub fn check_consumer_end(&mut self, consumer: usize) {
        if !self.consumer_is_through(consumer)
            && let Some(it) = self.consumers.get(consumer)
        {
            let next = self
                .streams
                .get(it.stream)
                .map_or(0, |state| state.log.next_offset());
            let disk = self
                .streams
                .get(it.stream)
                .and_then(|state| state.disks.get(it.node));
            let text = format!("{} of {next}, {}", shorten(it), shorten(&disk));
            self.violated(|| {
                format!("liveness: consumer {consumer} does not get to the end: {text}")
            });
        }
    }
}

/// What a node knows of the manifest. Part of it may be of a timeline that is no more.
fn usable(state: &Stream, node: usize) -> Option<Arc<log_format::manifest::Root>> {
    let known = state.known.get(node)?.as_ref()?;
    Some(Arc::clone(&known.root))
}

/// Whether everything between two offsets is gone with a reason.
fn explained(state: &Stream, from: u64, to: u64) -> bool {
    let mut at = from.max(state.floor.min(to));
    while at < to {
        let reach = state
            .gaps
            .iter()
            .filter(|(start, end)| *start <= at && at < *end)
            .map(|(_, end)| *end)
            .max();
        match reach {
            Some(end) => at = end,
            None => return false,
        }
    }
    true
}
