//! Drives one read machine: effects become requests, answers become events.
//!
//! Owns the reader's tasks, timers and share of the memory; all of them end with the driver. Every request ends in an event,
//! also one whose task died. An idle reader has no timer and no open request.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tiering_core::read::{
    CacheUse, Counters, Effect, Event, FailureKind, Finish, FragmentRef, GroupRef, ManifestView,
    ReadMachine, Settings, Start,
};
use tiering_core::upload::Failure;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tracing::Instrument;

use super::outlet::{Outlet, closed};
use crate::clock::random_u64;
use crate::manifests::ManifestState;
use crate::read_cache::BLOCK_BYTES;
use crate::read_memory::{Lender, ReadMemory, Registration};
use crate::remote_tier::{StoreError, failure};
use crate::settings::Config;
use crate::shared::Shared;

/// How long a look-up of a manifest that is not known waits for it to become known. The machine counts the attempts.
const MANIFEST_WAIT: Duration = Duration::from_secs(1);

/// The first request of a reader: two blocks, so that one that begins at the end of a block has at least a whole one.
const FIRST_REQUEST_BYTES: u64 = 2 * BLOCK_BYTES;

/// Of the node's memory one request may have this part, and one reader this part for what it fetches ahead.
const REQUEST_SHARE: u64 = 8;
const READER_SHARE: u64 = 2;

/// A machine's settings from the engine's.
fn machine_settings(config: &Config, memory: &ReadMemory) -> Settings {
    // A single reader must not be promised more than all of them may have.
    let share = |part: u64| (memory.capacity_bytes() / part).max(BLOCK_BYTES);
    Settings {
        read_request_bytes: config.read_request_size_bytes.min(share(REQUEST_SHARE)),
        read_ahead_bytes: config.read_ahead_bytes.min(share(READER_SHARE)),
        first_request_bytes: FIRST_REQUEST_BYTES,
        block_bytes: BLOCK_BYTES,
        verify_crc: config.verify_crc_on_read,
        ..Settings::default()
    }
}

/// The driver; see the module's page.
pub(super) struct Driver {
    machine: ReadMachine,
    shared: Arc<Shared>,
    stream_id: Arc<str>,
    outlet: Arc<Outlet>,
    tasks: JoinSet<Event>,
    /// Id of the request by task, to answer for a task that died.
    requests: HashMap<Id, u64>,
    aborts: HashMap<u64, AbortHandle>,
    /// Which one, to the node's memory.
    reader: u64,
    registration: Option<Registration>,
    /// Parts of answers, from the tasks. Bounded by what the machine has asked for.
    parts: mpsc::UnboundedReceiver<Event>,
    parts_sender: mpsc::UnboundedSender<Event>,
    /// This reader's fair share of the node's memory, as the machine knows it.
    fair_bytes: u64,
    counted: Counters,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        stream_id: &str,
        start: Start,
        outlet: Arc<Outlet>,
    ) -> Self {
        let settings = machine_settings(&shared.config, &shared.read_memory);
        let machine = ReadMachine::new(shared.clock.now_ms(), settings, start, random_u64());
        shared.stats.remote_readers.increment();
        let (parts_sender, parts) = mpsc::unbounded_channel();
        Self {
            machine,
            stream_id: Arc::from(stream_id),
            outlet,
            tasks: JoinSet::new(),
            requests: HashMap::new(),
            aborts: HashMap::new(),
            reader: shared.read_memory.next_reader(),
            registration: None,
            parts,
            parts_sender,
            fair_bytes: settings.read_ahead_bytes,
            counted: Counters::default(),
            shared,
        }
    }

    /// Runs until the machine ends or the handle is dropped.
    pub(super) async fn run(mut self) {
        let lender: Arc<dyn Lender> = Arc::clone(&self.outlet) as _;
        self.registration = Some(self.shared.read_memory.register(self.reader, lender));
        self.run_effects();
        while !self.machine.is_finished() {
            let event = self.next_event().await;
            // What came of an answer before its end, in the order in which it came.
            self.pass_parts_on();
            if let Some(event) = event {
                self.handle(event);
            }
            self.tell_share();
            self.run_effects();
        }
    }

    fn handle(&mut self, event: Event) {
        self.machine.handle(self.shared.clock.now_ms(), event);
    }

    fn pass_parts_on(&mut self) {
        while let Ok(part) = self.parts.try_recv() {
            self.handle(part);
        }
    }

    /// Others came or went.
    fn tell_share(&mut self) {
        let bytes = self.shared.read_memory.fair_bytes();
        if bytes != self.fair_bytes {
            self.fair_bytes = bytes;
            self.handle(Event::Share { bytes });
        }
    }

    async fn next_event(&mut self) -> Option<Event> {
        let deadline = self
            .machine
            .poll_timeout()
            .map(|at_ms| self.shared.clock.instant_at(at_ms));
        tokio::select! {
            Some(done) = self.tasks.join_next_with_id() => self.task_ended(done),
            Some(part) = self.parts.recv() => {
                self.handle(part);
                self.pass_parts_on();
                None
            }
            () = self.outlet.taken.notified() => {
                self.consumer_did_something();
                None
            }
            () = sleep_until(deadline) => Some(Event::Tick),
        }
    }

    /// It took chunks, or asks again; or others need the memory of what it did not take.
    fn consumer_did_something(&mut self) {
        let given_back = self.outlet.give_back();
        let (chunks, bytes) = self.outlet.lock().drain_taken();
        if chunks > 0 {
            self.handle(Event::Consumed { chunks, bytes });
        }
        if let Some((chunks, wanted)) = given_back {
            // What came and was not looked at yet is not wanted either.
            self.pass_parts_on();
            if self.machine.is_finished() {
                // They come before its end, and the consumer may have asked in between.
                let mut queue = self.outlet.lock();
                let wake = (chunks.into_iter()).fold(false, |wake, chunk| queue.push(chunk) | wake);
                drop(queue);
                if wake {
                    self.outlet.wake();
                }
                return;
            }
            let first = (chunks.front()).map(|chunk| (chunk.header.chunk_id, chunk.position));
            self.handle(Event::TakenBack { first, wanted });
        }
        if self.outlet.asks_again() {
            self.handle(Event::Wanted);
        }
    }

    fn task_ended(&mut self, done: Result<(Id, Event), JoinError>) -> Option<Event> {
        let task = match &done {
            Ok((task, _)) => *task,
            Err(error) => error.id(),
        };
        let id = self.requests.remove(&task)?;
        self.aborts.remove(&id);
        match done {
            Ok((_, event)) => Some(event),
            Err(error) if error.is_cancelled() => None,
            Err(_) => {
                self.shared.stats.tasks_lost.increment();
                tracing::error!(
                    "a task of the native side died, which is a bug: its work is tried again"
                );
                Some(Event::Fetched {
                    id,
                    outcome: Err(Failure::Transient("the request's task died".to_owned())),
                })
            }
        }
    }

    /// Carries out what the machine wants, until it wants no more.
    fn run_effects(&mut self) {
        let mut wake = false;
        while let Some(effect) = self.machine.poll_effect() {
            match effect {
                Effect::RefreshManifest { id } => self.refresh_manifest(id),
                Effect::GetGroup { id, group, cache } => self.get_group(id, group, cache),
                Effect::GetIndex {
                    id,
                    fragment,
                    start,
                    end_max,
                    cache,
                } => self.get_index(id, fragment, start..end_max, cache),
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    cache,
                } => self.get_range(id, fragment, start..end, cache),
                Effect::Cancel { id } => {
                    if let Some(abort) = self.aborts.remove(&id) {
                        self.requests.remove(&abort.id());
                        abort.abort();
                    }
                }
                Effect::Alarm { kind, offset } => {
                    tracing::debug!(offset, ?kind, "this offset cannot be read");
                    self.shared.alarms.raise(&self.stream_id, offset, kind);
                }
                Effect::Deliver(chunk) => {
                    let stats = &self.shared.stats;
                    let header = &chunk.header;
                    let end = header.next_offset().unwrap_or(u64::MAX);
                    self.shared
                        .alarms
                        .passed(&self.stream_id, header.chunk_id..end);
                    stats.read_delivered_bytes.add(chunk.bytes.len() as u64);
                    wake |= self.outlet.lock().push(chunk);
                }
                Effect::Finish(finish) => {
                    match &finish {
                        Finish::Local { .. } => self.shared.stats.to_local_transitions.increment(),
                        Finish::Failed { kind, text } => {
                            tracing::info!(?kind, text, "a reader has ended with a failure");
                            self.shared.stats.readers_failed.increment();
                        }
                    }
                    wake |= self.outlet.lock().finish(finish);
                }
            }
        }
        self.count();
        self.holds(self.machine.outstanding_bytes());
        if wake {
            self.outlet.wake();
        }
    }

    fn holds(&self, bytes: u64) {
        let gauge = &self.shared.stats.read_memory_reserved_bytes;
        gauge.add(bytes);
        gauge.subtract(self.outlet.holds(bytes));
    }

    fn refresh_manifest(&mut self, id: u64) {
        let resolved = move |manifest: Option<_>| {
            let view = manifest.map_or(ManifestView::Unknown, ManifestView::Resolved);
            Event::Manifest { id, view }
        };
        match self.shared.manifests.get(&self.stream_id) {
            Some(ManifestState::Resolved(manifest)) => {
                self.machine
                    .handle(self.shared.clock.now_ms(), resolved(Some(manifest.root)));
            }
            None => self
                .machine
                .handle(self.shared.clock.now_ms(), resolved(None)),
            Some(ManifestState::Pending) => {
                let (manifests, stream_id) = (
                    Arc::clone(&self.shared.manifests),
                    Arc::clone(&self.stream_id),
                );
                self.spawn(id, async move {
                    let wait =
                        tokio::time::timeout(MANIFEST_WAIT, manifests.wait_resolved(&stream_id));
                    resolved(wait.await.ok().flatten().map(|manifest| manifest.root))
                });
            }
        }
    }

    fn get_group(&mut self, id: u64, group: GroupRef, cache_use: CacheUse) {
        let keys = &self.shared.keys;
        let key = keys.group(&self.stream_id, group.kind, group.first_offset, group.uid);
        let (cache, key) = (self.shared.read_cache.clone(), Arc::from(key));
        let (reader, alive) = (self.reader, self.alive(id));
        self.spawn(id, async move {
            fetched(id, cache.group(reader, &key, cache_use, &alive).await)
        });
    }

    fn get_index(
        &mut self,
        id: u64,
        fragment: FragmentRef,
        range: std::ops::Range<u64>,
        cache_use: CacheUse,
    ) {
        let (cache, key) = (self.shared.read_cache.clone(), self.key_of(&fragment));
        let (reader, alive) = (self.reader, self.alive(id));
        self.spawn(id, async move {
            fetched(
                id,
                cache.index(reader, &key, range, cache_use, &alive).await,
            )
        });
    }

    fn get_range(
        &mut self,
        id: u64,
        fragment: FragmentRef,
        range: std::ops::Range<u64>,
        cache_use: CacheUse,
    ) {
        let (cache, key) = (self.shared.read_cache.clone(), self.key_of(&fragment));
        let parts = self.parts_sender.clone();
        let (reader, alive) = (self.reader, self.alive(id));
        self.spawn(id, async move {
            let mut read = cache.range(reader, &key, range, cache_use);
            loop {
                match read.next(&alive).await {
                    // The driver is there as long as its tasks are.
                    Some(Ok(bytes)) => drop(parts.send(Event::Part { id, bytes })),
                    Some(Err(error)) => return fetched(id, Err(error)),
                    None => return fetched(id, Ok(Bytes::new())),
                }
            }
        });
    }

    /// What a request says while it waits for us, or for a slow line.
    fn alive(&self, id: u64) -> impl Fn() + Send + Sync + 'static {
        let parts = self.parts_sender.clone();
        move || drop(parts.send(Event::Alive { id }))
    }

    fn key_of(&self, fragment: &FragmentRef) -> Arc<str> {
        let keys = &self.shared.keys;
        let key = keys.fragment(&self.stream_id, fragment.first_offset, fragment.uid);
        Arc::from(key)
    }

    fn spawn(&mut self, id: u64, request: impl Future<Output = Event> + Send + 'static) {
        let abort = self.tasks.spawn(request.in_current_span());
        self.requests.insert(abort.id(), id);
        self.aborts.insert(id, abort);
    }

    fn count(&mut self) {
        let counters = self.machine.counters();
        let new = counters.since(&self.counted);
        self.counted = counters;
        let stats = &self.shared.stats;
        stats.read_ranges.add(new.read_ranges);
        stats.read_bytes.add(new.read_bytes);
        stats.chunks_served_remote.add(new.chunks_served);
        stats.chunk_crc_mismatches.add(new.chunk_crc_mismatches);
        stats
            .read_refetches_past_cache
            .add(new.refetches_past_cache);
        stats.readers_corrupt.add(new.corrupt_ends);
        stats.readers_lost.add(new.lost_ends);
        stats.range_retries.add(new.range_retries);
        stats.reader_repositions.add(new.repositions);
        stats.fragment_indexes_unusable.add(new.indexes_unusable);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.stats.remote_readers.subtract(1);
        self.holds(0);
        // A consumer must not wait for a driver that is gone; one that closed by itself does not wait.
        let finish = if std::thread::panicking() {
            Finish::Failed {
                kind: FailureKind::Bug,
                text: "the reader's task died".to_owned(),
            }
        } else {
            closed()
        };
        let wake = self.outlet.lock().finish(finish);
        if wake {
            self.outlet.wake();
        }
    }
}

/// The answer of a request, and what its failure means to the machine.
fn fetched(id: u64, outcome: Result<Bytes, StoreError>) -> Event {
    Event::Fetched {
        id,
        outcome: outcome.map_err(|error| failure(&error)),
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
