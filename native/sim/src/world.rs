//! The world: streams, nodes, stores, and one queue of what happens next. Virtual time; one seed, one run.
//!
//! Owns the queue, the workload and the end of a run. Does not own what machines ask for (`uploader`, `consumer`), nor what
//! must hold (`checks`).

mod workload;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use log_format::manifest::Root;
use tiering_core::upload::{self, Pointer, RetentionBound};

use crate::checks::tree::Flat;
use crate::clocks::NodeClock;
use crate::coverage::Coverage;
use crate::log::{Log, NodeLog};
use crate::plan::{Knobs, Plan, Trouble};
use crate::read::{Consumer, ReaderNews, ReaderOp};
use crate::rng::{Rng, mix};
use crate::store::{Bucket, Known, Metadata};
use crate::upload::{Edit, Op, Uploader};

/// Wall clock at virtual time 0.
pub const WALL_MS: i64 = 1_700_000_000_000;
/// Virtual time that the end of a run may take.
const QUIET_MS: u64 = 300_000;
/// Chunks that wait for their upload before the publishers pause.
const MOST_BACKLOG: usize = 300;
/// Fragments of a manifest before the publishers pause.
const MOST_ENTRIES: usize = 100;
/// Lines of a trace that are kept.
const TRACE_LINES: usize = 400;

/// One stream.
#[derive(Debug)]
pub struct Stream {
    /// What was acknowledged.
    pub log: Log,
    /// What each node has of it.
    pub disks: Vec<NodeLog>,
    /// What each node knows of the manifest; `None`: pending.
    pub known: Vec<Option<Known>>,
    /// The floor of each node's log below which the remote tier was seen to have no more than what the node knows.
    pub certain_gap_below: Vec<Option<u64>>,
    /// News of older revisions than this came from before the node started over, and do not reach it.
    pub news_from: Vec<u64>,
    /// Node of the writer.
    pub writer: usize,
    /// Its epoch.
    pub epoch: u64,
    /// Its upload machine, if it has started.
    pub uploader: Option<usize>,
    /// What the metadata store keeps.
    pub metadata: Metadata,
    /// The root that the pointer names.
    pub current: Option<Arc<Root>>,
    /// The same, with its groups taken apart.
    pub flat: Option<Flat>,
    /// The pointer before the last one: a replica that was told of it may be fetching its root.
    pub replaced: Option<Pointer>,
    /// The roots that were ever persisted, by revision.
    pub history: std::collections::BTreeMap<u64, Arc<Root>>,
    /// The user's bound on the remote tier.
    pub bound: RetentionBound,
    /// The strictest bounds that there have been.
    pub strictest: RetentionBound,
    /// Offsets below are gone with a reason: retention, or a recovery.
    pub floor: u64,
    /// Whether it had an anchor at the last step.
    pub had_anchor: bool,
    /// What each node knew when that was last compared with what was persisted then.
    pub compared: Vec<((u64, u64), u64)>,
    /// Ranges that the user's retention removed before they were uploaded, and what followed from it.
    pub gaps: Vec<(u64, u64)>,
    /// Revisions up to the first number that reach past the second are of a timeline that is no more.
    pub lost: Vec<(u64, u64)>,
}

/// What happens.
#[derive(Debug)]
pub enum Event {
    /// The workload goes on.
    Workload,
    /// A request of an upload machine reaches who answers it.
    Apply(usize, Op),
    /// An answer reaches an upload machine.
    Answer(usize, upload::Event),
    /// A timeout of an upload machine.
    Wake(usize, u64),
    /// An upload machine is told what is committed.
    Tell(usize),
    /// A writer starts its upload machine.
    Start(usize),
    /// A machine that was left behind is dropped.
    Drop(usize),
    /// A node hears of a manifest.
    News(usize, usize, Known),
    /// A node hears what leads on from a manifest.
    Edit(usize, usize, Edit),
    /// The objects of a deleted stream are swept.
    Sweep(usize),
    /// A clock that was wrong is right again.
    ClockBack(usize),
    /// A consumer looks for more.
    Poll(usize),
    /// A request of a reader reaches the store.
    ReaderApply(usize, u64, ReaderOp),
    /// Something reaches a reader.
    ReaderNews(usize, u64, ReaderNews),
}

struct Scheduled {
    at_ms: u64,
    number: u64,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ms, self.number).cmp(&(other.at_ms, other.number))
    }
}

/// Everything.
pub struct World {
    /// What was asked for.
    pub plan: Plan,
    /// What this seed made of it.
    pub knobs: Knobs,
    /// Virtual time.
    pub now_ms: u64,
    /// Decides the workload and delays.
    pub rng: Rng,
    fault_rng: Rng,
    faults: u64,
    queue: BinaryHeap<Reverse<Scheduled>>,
    scheduled: u64,
    /// Streams, also deleted ones.
    pub streams: Vec<Stream>,
    /// Upload machines, also dropped ones.
    pub uploaders: Vec<Uploader>,
    /// Consumers.
    pub consumers: Vec<Consumer>,
    /// The bucket.
    pub bucket: Bucket,
    /// Until when the store is not there.
    pub store_down_until_ms: u64,
    /// Until when the store refuses.
    pub store_denies_until_ms: u64,
    /// Until when somebody else answers in the store's place.
    pub impostor_until_ms: u64,
    /// Until when the metadata store is not there.
    pub metadata_down_until_ms: u64,
    /// The clocks of the nodes.
    pub clocks: Vec<NodeClock>,
    /// How far the store's clock is ahead of the true time.
    pub store_ahead_ms: i64,
    /// What happened how often.
    pub coverage: Coverage,
    /// The first thing that did not hold.
    pub violation: Option<String>,
    /// Events so far.
    pub steps: u64,
    /// Of everything that happened.
    pub hash: u64,
    /// The last lines of what happened.
    pub trace: Vec<String>,
    /// Faults are over.
    pub quiet: bool,
    /// Publishings so far.
    pub publishings: u64,
}

impl World {
    /// A world at its beginning.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let mut rng = Rng::new(plan.seed, 1);
        let knobs = Knobs::new(&mut Rng::new(plan.seed, 2));
        let streams = if plan.allows(Trouble::ManyStreams) {
            rng.range(1, 3)
        } else {
            1
        };
        let clocks = (0..knobs.nodes).map(|_| NodeClock::right(1)).collect();
        let mut world = Self {
            plan,
            knobs,
            now_ms: 1,
            rng,
            fault_rng: Rng::new(plan.seed, 3),
            faults: 0,
            queue: BinaryHeap::new(),
            scheduled: 0,
            streams: Vec::new(),
            uploaders: Vec::new(),
            consumers: Vec::new(),
            bucket: Bucket::default(),
            store_down_until_ms: 0,
            store_denies_until_ms: 0,
            impostor_until_ms: 0,
            metadata_down_until_ms: 0,
            clocks,
            store_ahead_ms: 0,
            coverage: Coverage::default(),
            violation: None,
            steps: 0,
            hash: plan.seed,
            trace: Vec::new(),
            quiet: false,
            publishings: 0,
        };
        for _ in 0..streams {
            world.create_stream();
        }
        if plan.allows(Trouble::Consumers) {
            for _ in 0..world.rng.range(1, 4) {
                world.create_consumer();
            }
        }
        world.at(1, Event::Workload);
        world
    }

    /// Runs to the end or to the first violation.
    pub fn run(&mut self) {
        while self.steps < self.plan.steps && self.violation.is_none() && self.step() {}
        if self.violation.is_none() {
            self.end();
        }
    }

    /// Lets something happen after a while.
    pub fn at(&mut self, delay_ms: u64, event: Event) {
        let (at_ms, number) = (self.now_ms + delay_ms, self.scheduled);
        self.scheduled += 1;
        self.queue.push(Reverse(Scheduled {
            at_ms,
            number,
            event,
        }));
    }

    /// A usual delay, now and then a long one.
    pub fn latency_ms(&mut self) -> u64 {
        let most = self.knobs.latency_ms;
        let usual = self.rng.range(0, most);
        if self.fault(Trouble::Slow) {
            self.coverage.hit("fault slow");
            return usual + self.rng.range(100, 2_500);
        }
        usual
    }

    /// Whether this goes wrong now.
    pub fn fault(&mut self, trouble: Trouble) -> bool {
        let rate = self.knobs.rates.get(trouble as usize).copied().unwrap_or(0);
        let chosen = self.fault_rng.chance(rate);
        let happens = chosen
            && !self.quiet
            && self.plan.allows(trouble)
            && self.faults < self.plan.max_faults;
        self.faults += u64::from(happens);
        happens
    }

    /// Faults so far.
    #[must_use]
    pub const fn faults(&self) -> u64 {
        self.faults
    }

    /// Something does not hold.
    pub fn violated(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(text());
        }
    }

    /// Notes a line of the trace.
    pub fn note(&mut self, line: impl FnOnce() -> String) {
        if self.plan.trace {
            if self.trace.len() >= 2 * TRACE_LINES {
                self.trace.drain(..TRACE_LINES);
            }
            self.trace
                .push(format!("{:>7} ms  {}", self.now_ms, line()));
        }
    }

    fn fold(&mut self, tag: u64, a: u64, b: u64) {
        self.hash = mix(self.hash ^ mix(tag ^ a.rotate_left(20) ^ b.rotate_left(40)));
    }

    fn step(&mut self) -> bool {
        let Some(Reverse(Scheduled {
            at_ms,
            number,
            event,
        })) = self.queue.pop()
        else {
            return false;
        };
        self.now_ms = self.now_ms.max(at_ms);
        self.steps += 1;
        self.fold(self.now_ms, number, self.scheduled);
        match event {
            Event::Workload => self.workload(),
            Event::Apply(uploader, op) => self.apply(uploader, op),
            Event::Answer(uploader, event) => self.handle(uploader, event),
            Event::Wake(uploader, at_ms) => self.wake(uploader, at_ms),
            Event::Tell(uploader) => self.tell(uploader),
            Event::Start(stream) => self.start_uploader(stream),
            Event::Drop(uploader) => self.crash(uploader),
            Event::News(stream, node, known) => self.hear(stream, node, known),
            Event::Edit(stream, node, edit) => self.hear_edit(stream, node, &edit),
            Event::Sweep(stream) => self.sweep(stream),
            Event::ClockBack(node) => self.clock_back(node),
            Event::Poll(consumer) => self.poll(consumer),
            Event::ReaderApply(consumer, reader, op) => self.reader_apply(consumer, reader, op),
            Event::ReaderNews(consumer, reader, news) => self.reader_news(consumer, reader, news),
        }
        self.check_promises();
        true
    }

    /// Faults off, nothing new: everything acknowledged becomes durable, everybody reads to the end, and then it is silent.
    fn end(&mut self) {
        self.quiet = true;
        self.note(|| "--- quiet: no faults, nothing new".to_owned());
        self.store_down_until_ms = 0;
        self.store_denies_until_ms = 0;
        self.impostor_until_ms = 0;
        self.metadata_down_until_ms = 0;
        for node in 0..self.clocks.len() {
            self.clock_back(node);
        }
        for uploader in 0..self.uploaders.len() {
            let current = self.uploaders.get(uploader).is_some_and(|it| {
                self.streams.get(it.stream).is_some_and(|stream| {
                    stream.uploader == Some(uploader)
                        && it.epoch == stream.epoch
                        && !stream.metadata.deleted
                })
            });
            if !current {
                self.crash(uploader);
            }
        }
        let until_ms = self.now_ms + QUIET_MS;
        let mut next_look_ms = self.now_ms;
        while self.violation.is_none() {
            if next_look_ms <= self.now_ms && next_look_ms < until_ms {
                next_look_ms = self.now_ms + 500;
                self.calm_down();
            }
            if self.now_ms > until_ms {
                break;
            }
            if !self.step() {
                if self.at_rest() || next_look_ms >= until_ms {
                    break;
                }
                self.now_ms = self.now_ms.max(next_look_ms);
            }
        }
        if self.violation.is_none() {
            self.check_end(self.now_ms > until_ms);
        }
        let states: Vec<u64> = self
            .streams
            .iter()
            .map(|stream| stream.log.next_offset())
            .collect();
        for state in states {
            self.fold(7, state, self.steps);
        }
        let coverage: Vec<(usize, u64)> = self
            .coverage
            .iter()
            .map(|(name, count)| (name.len(), count))
            .collect();
        for (name, count) in coverage {
            self.fold(8, name as u64, count);
        }
    }

    /// What an operator or time would do: start what is not started, look at what is committed, cut what is assembled.
    fn calm_down(&mut self) {
        for stream in 0..self.streams.len() {
            let Some(state) = self.streams.get_mut(stream) else {
                continue;
            };
            if state.metadata.deleted {
                if !self.bucket.list(stream).is_empty() {
                    self.at(1, Event::Sweep(stream));
                }
                continue;
            }
            // A bound by age would never come to rest; one by size must be kept to.
            state.bound.max_age_ms = None;
            for disk in &mut state.disks {
                disk.replicate(&state.log, usize::MAX);
            }
            let durable = state.current.as_ref().map_or(0, |root| root.next_offset);
            match state.uploader {
                Some(uploader) if state.log.is_empty() || durable == state.log.next_offset() => {
                    // Told once more what the bound is, which ends the timers of retention by age.
                    let told = self
                        .uploaders
                        .get(uploader)
                        .is_some_and(|it| it.bound == state.bound);
                    if !told {
                        self.at(1, Event::Tell(uploader));
                    }
                }
                Some(uploader) => {
                    self.at(1, Event::Tell(uploader));
                    self.at(2, Event::Answer(uploader, upload::Event::CutRequested));
                }
                None => self.at(1, Event::Start(stream)),
            }
            self.spread_news(stream);
        }
    }

    /// Whether everything is durable, and what is to be gone is gone.
    fn at_rest(&self) -> bool {
        self.streams.iter().enumerate().all(|(number, state)| {
            let durable = state.current.as_ref().map_or(0, |root| root.next_offset);
            match state.metadata.deleted {
                true => self.bucket.list(number).is_empty(),
                false => state.log.is_empty() || durable == state.log.next_offset(),
            }
        })
    }

    fn create_stream(&mut self) {
        let nodes = self.knobs.nodes;
        let stream = self.streams.len();
        let writer = self.rng.below(nodes);
        self.streams.push(Stream {
            log: Log::default(),
            disks: vec![NodeLog::new(self.knobs.segment_bytes); nodes],
            known: vec![None; nodes],
            certain_gap_below: vec![None; nodes],
            news_from: vec![0; nodes],
            writer,
            epoch: 1,
            uploader: None,
            metadata: Metadata::default(),
            current: None,
            flat: None,
            replaced: None,
            history: std::collections::BTreeMap::new(),
            bound: RetentionBound::default(),
            strictest: RetentionBound::default(),
            floor: 0,
            had_anchor: false,
            compared: vec![Default::default(); nodes],
            gaps: Vec::new(),
            lost: Vec::new(),
        });
        self.at(1, Event::Start(stream));
    }
}
