//! Drives one read machine: effects become requests, answers become events.
//!
//! Owns the reader's tasks, timers and share of the memory; all of them end with the driver. Every request ends in an event,
//! also one whose task died. An idle reader has no timer and no open request.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tiering_core::remote_reader::{
    Counters, Effect, Event, FailureKind, Finish, FragmentRef, GroupRef, ManifestView,
    RemoteReader, Settings, Start,
};
use tiering_core::replica_reader::Failure;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use super::handle::{Outlet, Wake, closed};
use super::memory::Share;
use crate::clock::random_u64;
use crate::engine::Shared;
use crate::manifests::ManifestState;
use crate::remote_tier::{StoreError, StoreErrorKind};
use crate::settings::Config;

/// A group has some thousand entries of 34 bytes; a larger object is not a group.
const GROUP_BYTES_MAX: u64 = 16 << 20;

/// How long a look-up of a manifest that is not known waits for it to become known. The machine counts the attempts.
const MANIFEST_WAIT: Duration = Duration::from_secs(1);

/// A machine's settings from the engine's.
fn machine_settings(config: &Config) -> Settings {
    Settings {
        read_request_bytes: config.read_request_size_bytes,
        // A single reader must not be promised more than all of them may have.
        read_ahead_bytes: config.read_ahead_bytes.min(config.read_memory_bytes),
        verify_crc: config.verify_crc_on_read,
        ..Settings::default()
    }
}

type WaitingGrant = Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>;

/// The driver; see the module's page.
pub(super) struct Driver {
    machine: RemoteReader,
    shared: Arc<Shared>,
    stream_id: Arc<str>,
    outlet: Arc<Outlet>,
    wake: Arc<dyn Wake>,
    tasks: JoinSet<Event>,
    /// Id of the request by task, to answer for a task that died.
    requests: HashMap<Id, u64>,
    aborts: HashMap<u64, AbortHandle>,
    share: Share,
    waiting_grant: Option<(u64, WaitingGrant)>,
    counted: Counters,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        stream_id: &str,
        start: Start,
        outlet: Arc<Outlet>,
        wake: Arc<dyn Wake>,
    ) -> Self {
        let settings = machine_settings(&shared.config);
        let machine = RemoteReader::new(shared.clock.now_ms(), settings, start, random_u64());
        shared.stats.remote_readers.increment();
        Self {
            machine,
            stream_id: Arc::from(stream_id),
            outlet,
            wake,
            tasks: JoinSet::new(),
            requests: HashMap::new(),
            aborts: HashMap::new(),
            share: shared.read_memory.share(),
            waiting_grant: None,
            counted: Counters::default(),
            shared,
        }
    }

    /// Runs until the machine ends or the handle is dropped.
    pub(super) async fn run(mut self) {
        self.run_effects();
        while !self.machine.is_finished() {
            let event = self.next_event().await;
            if let Some(event) = event {
                self.machine.handle(self.shared.clock.now_ms(), event);
                self.run_effects();
            }
        }
    }

    async fn next_event(&mut self) -> Option<Event> {
        let deadline = self
            .machine
            .poll_timeout()
            .map(|at_ms| self.shared.clock.instant_at(at_ms));
        tokio::select! {
            Some(done) = self.tasks.join_next_with_id() => self.task_ended(done),
            () = self.outlet.taken.notified() => {
                let (chunks, bytes) = self.outlet.lock().drain_taken();
                (chunks > 0).then_some(Event::Consumed { chunks, bytes })
            }
            (bytes, permit) = granted(&mut self.waiting_grant) => {
                self.waiting_grant = None;
                self.share.grant(permit?, bytes);
                Some(Event::Granted { bytes })
            }
            () = sleep_until(deadline) => Some(Event::Tick),
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
                Effect::GetGroup { id, group, .. } => self.get_group(id, group),
                Effect::GetIndex {
                    id,
                    fragment,
                    start,
                    end_max: end,
                    ..
                }
                | Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    ..
                } => {
                    self.get_range(id, fragment, start, end);
                }
                Effect::Cancel { id } => {
                    if let Some(abort) = self.aborts.remove(&id) {
                        self.requests.remove(&abort.id());
                        abort.abort();
                    }
                }
                Effect::Reserve { bytes } => self.reserve(bytes),
                Effect::Release { bytes } => self.share.release(bytes),
                Effect::Deliver(chunk) => wake |= self.outlet.lock().push(chunk),
                Effect::Finish(finish) => {
                    match &finish {
                        Finish::Local { .. } => self.shared.stats.to_local_transitions.increment(),
                        Finish::Failed { .. } => self.shared.stats.readers_failed.increment(),
                    }
                    wake |= self.outlet.lock().finish(finish);
                }
            }
        }
        self.count();
        if wake {
            self.wake.wake();
        }
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

    fn get_group(&mut self, id: u64, group: GroupRef) {
        let key =
            self.shared
                .keys
                .group(&self.stream_id, group.kind, group.first_offset, group.uid);
        let tier = Arc::clone(&self.shared.tier);
        self.spawn(id, async move {
            fetched(id, tier.get(&key, GROUP_BYTES_MAX).await)
        });
    }

    fn get_range(&mut self, id: u64, fragment: FragmentRef, start: u64, end: u64) {
        let key = self
            .shared
            .keys
            .fragment(&self.stream_id, fragment.first_offset, fragment.uid);
        let tier = Arc::clone(&self.shared.tier);
        self.spawn(id, async move {
            fetched(id, tier.get_range(&key, start..end).await)
        });
    }

    fn spawn(&mut self, id: u64, request: impl Future<Output = Event> + Send + 'static) {
        let abort = self.tasks.spawn(request);
        self.requests.insert(abort.id(), id);
        self.aborts.insert(id, abort);
    }

    fn reserve(&mut self, bytes: u64) {
        match self.share.try_reserve(bytes) {
            Some(permit) => {
                self.share.grant(permit, bytes);
                self.machine
                    .handle(self.shared.clock.now_ms(), Event::Granted { bytes });
            }
            None => self.waiting_grant = Some((bytes, Box::pin(self.share.reserve(bytes)))),
        }
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
        stats.range_retries.add(new.range_retries);
        stats.reader_repositions.add(new.repositions);
        stats.fragment_indexes_unusable.add(new.indexes_unusable);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.stats.remote_readers.subtract(1);
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
            self.wake.wake();
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

fn failure(error: &StoreError) -> Failure {
    let text = error.to_string();
    match error.kind() {
        kind if kind.is_retryable() => Failure::Transient(text),
        // What stands between us and the store can spoil an answer; that is no proof that the object is spoilt.
        StoreErrorKind::Malformed => Failure::Transient(text),
        StoreErrorKind::NotFound => Failure::NotFound(text),
        // The object is shorter than the manifest says, or larger than it can be.
        StoreErrorKind::InvalidRange | StoreErrorKind::TooLarge | StoreErrorKind::Checksum => {
            Failure::Corrupt(text)
        }
        _ => Failure::Stalled(text),
    }
}

async fn granted(waiting: &mut Option<(u64, WaitingGrant)>) -> (u64, Option<OwnedSemaphorePermit>) {
    match waiting {
        Some((bytes, grant)) => (*bytes, grant.await),
        None => std::future::pending().await,
    }
}

async fn sleep_until(deadline: Option<tokio::time::Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
