//! One engine: the runtime, the store, the governor and the registry of manifests, for as long as somebody holds it.
//!
//! Owns the life of all native work of a node. Does not own what the work is: streams and readers bring that.
//! There are no statics: closing the engine, or dropping its last handle, ends its threads and everything on them.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use log_format::key::KeySpace;
use thiserror::Error;
use tiering_core::upload::Pointer;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::buffer_pool::BufferPool;
use crate::clock::Clock;
use crate::durations::Snapshot;
use crate::governor::Governor;
use crate::log::{Log, LogSink};
use crate::manifests::{self, ManifestRange, Manifests, ResolveError};
use crate::object_metadata::AboutStream;
use crate::priority::behind;
use crate::read::{self, Alarms, ReaderHandle, Start, Wake};
use crate::read_cache::{self, ReadCache};
use crate::read_memory::ReadMemory;
use crate::recovery;
use crate::remote_tier::{
    CONTROL_REQUESTS_MAX, DeleteOutcome, Instrumented, KEYS_MAX, Limited, ListPage, Proving,
    RemoteTier, Retrying, RetryingPolicy, S3RemoteTier, StoreError,
};
use crate::settings::{Config, ConfigError};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::timekeeper::{Timekeeper, system_ms};
use crate::upload::{self, UploadConfig, UploadHandle, UploadSink};

/// Each running transfer may hold a thread that reads its segment files; so many more are there for scans and name look-ups.
/// What the cache's disk may hold comes on top of both.
const SCAN_THREADS_MAX: usize = 32;

/// Why an engine could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OpenError {
    /// A setting cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The operating system refused threads or files.
    #[error("{0}")]
    Runtime(String),
}

/// The engine was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the engine is closed")]
pub struct Closed;

struct Inner {
    shared: Arc<Shared>,
    runtime: Mutex<Option<Runtime>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn close(&self) {
        let runtime = self
            .runtime
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(runtime) = runtime {
            // Waits for nothing: workers drop their tasks by themselves, a thread in a system call ends after it.
            runtime.shutdown_background();
        }
    }
}

/// A cheap handle of one engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

impl Engine {
    /// Starts the runtime. Makes no request and reads no file: whether the store can be reached is what [`Self::probe`] tells.
    ///
    /// # Errors
    /// If a setting cannot be used or threads cannot be started.
    pub fn open(config: Config) -> Result<Self, OpenError> {
        let (clock, stats) = (Clock::start(), Arc::new(Stats::default()));
        let timekeeper = Arc::new(Timekeeper::new(&config, clock, Arc::clone(&stats)));
        let tier = S3RemoteTier::with_timekeeper(&config, Arc::clone(&timekeeper));
        Self::open_at(config, Arc::new(tier), clock, timekeeper, stats)
    }

    /// The same over another store. It has no clock: nothing expires by age unless `max_clock_skew_ms` is 0.
    ///
    /// # Errors
    /// If a setting cannot be used or threads cannot be started.
    pub fn open_with(config: Config, tier: Arc<dyn RemoteTier>) -> Result<Self, OpenError> {
        let (clock, stats) = (Clock::start(), Arc::new(Stats::default()));
        let timekeeper = Arc::new(Timekeeper::new(&config, clock, Arc::clone(&stats)));
        Self::open_at(config, tier, clock, timekeeper, stats)
    }

    fn open_at(
        config: Config,
        tier: Arc<dyn RemoteTier>,
        clock: Clock,
        timekeeper: Arc<Timekeeper>,
        stats: Arc<Stats>,
    ) -> Result<Self, OpenError> {
        config.validate()?;
        let log = Arc::new(Log::new(config.log_level, Arc::clone(&stats)));
        let (go_behind, lines) = (behind(config.worker_niceness), Arc::clone(&log));
        let runtime = Builder::new_multi_thread()
            .worker_threads(config.worker_threads)
            .thread_name("stream-s3")
            .on_thread_start(move || {
                go_behind();
                lines.enter_thread();
            })
            .on_thread_stop(Log::leave_thread)
            .max_blocking_threads(
                config.max_concurrent_transfers + SCAN_THREADS_MAX + read_cache::DISK_THREADS_MAX,
            )
            .enable_all()
            .build()
            .map_err(|error| OpenError::Runtime(error.to_string()))?;
        let counted = Arc::new(Instrumented::new(tier, Arc::clone(&stats)));
        let limited = Limited::new(counted, CONTROL_REQUESTS_MAX, Arc::clone(&stats));
        let tier: Arc<dyn RemoteTier> = Arc::new(Proving::new(Arc::new(limited)));
        let retrying = Retrying::new(
            Arc::clone(&tier),
            RetryingPolicy::default(),
            Arc::clone(&stats),
        );
        let governor = Governor::new(config.max_concurrent_transfers, clock, Arc::clone(&stats));
        governor.set_rate(
            config.max_transfer_bytes_per_sec,
            config.max_transfer_burst_bytes,
        );
        let read_memory = ReadMemory::new(
            read_cache::budget_bytes(config.read_memory_bytes),
            clock,
            Arc::clone(&stats),
        );
        let read_cache = ReadCache::new(
            Arc::clone(&tier),
            read_memory.clone(),
            (config.read_cache_path.as_deref()).map(|path| (path, config.read_cache_size_bytes)),
            Arc::clone(&stats),
        );
        let shared = Shared {
            keys: KeySpace::new(&config.prefix),
            read_memory,
            read_cache,
            alarms: Alarms::new(Arc::clone(&stats)),
            config: Arc::new(config),
            clock,
            timekeeper,
            tier,
            retrying: Arc::new(retrying),
            governor,
            manifests: Arc::new(Manifests::new()),
            buffers: Arc::new(BufferPool::new()),
            stats,
            log,
        };
        let Config { bucket, prefix, .. } = &*shared.config;
        shared
            .log
            .within(|| tracing::info!(%bucket, %prefix, "the engine is open"));
        Ok(Self {
            inner: Arc::new(Inner {
                shared: Arc::new(shared),
                runtime: Mutex::new(Some(runtime)),
            }),
        })
    }

    /// Cancels all work and stops the runtime in the background. The second time it does nothing.
    pub fn close(&self) {
        self.inner.close();
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// The runtime to start tasks on, as long as there is one.
    pub(crate) fn runtime(&self) -> Result<Handle, Closed> {
        let runtime = self
            .inner
            .runtime
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        runtime
            .as_ref()
            .map(|runtime| runtime.handle().clone())
            .ok_or(Closed)
    }

    /// Every node-wide counter and gauge.
    #[must_use]
    pub fn stats(&self) -> Vec<(&'static str, i64)> {
        let shared = self.shared();
        shared.alarms.settle(&shared.manifests);
        let mut rows = shared.stats.snapshot();
        let lag_ms = shared.stats.pending.lag_ms(system_ms());
        rows.push(("durability_lag_ms", lag_ms));
        rows
    }

    /// How long requests to the store took, by operation.
    #[must_use]
    pub fn request_durations(&self) -> Vec<(&'static str, Snapshot)> {
        self.shared().stats.request_durations.snapshot()
    }

    /// This node's manifests.
    #[must_use]
    pub fn manifests(&self) -> &Arc<Manifests> {
        &self.shared().manifests
    }

    /// Changes the rate of all transfers together (`None` = unlimited) and its burst (`None` = the default).
    pub fn set_rate(&self, bytes_per_second: Option<u64>, burst_bytes: Option<u64>) {
        self.shared()
            .governor
            .set_rate(bytes_per_second, burst_bytes);
    }

    /// Hands what is logged to the sink from now on, and what waits. Only the first sink counts.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the sink.
    pub fn forward_log(&self, sink: Arc<dyn LogSink>) -> Result<(), Closed> {
        let runtime = self.runtime()?;
        if let Some(forwarding) = self.shared().log.forward(sink) {
            runtime.spawn(forwarding);
        }
        Ok(())
    }

    /// Calls back with whether bucket, credentials and region are usable.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn probe<F>(&self, callback: F) -> Result<(), Closed>
    where
        F: FnOnce(Result<(), StoreError>) + Send + 'static,
    {
        let tier = Arc::clone(&self.shared().tier);
        self.runtime()?
            .spawn(async move { callback(tier.probe().await) });
        Ok(())
    }

    /// Calls back with one page of a stream's objects.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn list_objects<F>(
        &self,
        stream_id: &str,
        token: Option<String>,
        callback: F,
    ) -> Result<(), Closed>
    where
        F: FnOnce(Result<ListPage, StoreError>) + Send + 'static,
    {
        let prefix = self.shared().keys.stream_prefix(stream_id);
        let tier = Arc::clone(&self.shared().retrying);
        self.runtime()?
            .spawn(async move { callback(tier.list(&prefix, token.as_deref(), KEYS_MAX).await) });
        Ok(())
    }

    /// Deletes at most [`KEYS_MAX`] objects and calls back with what became of them.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn delete_objects<F>(&self, keys: Vec<String>, callback: F) -> Result<(), Closed>
    where
        F: FnOnce(Result<DeleteOutcome, StoreError>) + Send + 'static,
    {
        let tier = Arc::clone(&self.shared().retrying);
        self.runtime()?
            .spawn(async move { callback(tier.delete(&keys).await) });
        Ok(())
    }

    /// Calls back with one page of the ids of all streams that have objects.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn recovery_streams<F>(&self, token: Option<String>, callback: F) -> Result<(), Closed>
    where
        F: FnOnce(Result<(Vec<String>, Option<String>), StoreError>) + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        self.runtime()?
            .spawn(async move { callback(recovery::streams(&shared, token.as_deref()).await) });
        Ok(())
    }

    /// Calls back with what the bucket has of one stream.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn recovery_inspect<F>(
        &self,
        stream_id: String,
        depth: recovery::Depth,
        callback: F,
    ) -> Result<(), Closed>
    where
        F: FnOnce(Result<recovery::Found, recovery::RecoveryError>) + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        self.runtime()?
            .spawn(async move { callback(recovery::inspect(&shared, &stream_id, depth).await) });
        Ok(())
    }

    /// Writes the root that a recovered stream begins with, and calls back with its name.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn recovery_adopt<F>(&self, about: AboutStream, callback: F) -> Result<(), Closed>
    where
        F: FnOnce(Result<recovery::Adopted, recovery::RecoveryError>) + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        self.runtime()?
            .spawn(async move { callback(recovery::adopt(&shared, &about).await) });
        Ok(())
    }

    /// Starts tiering a stream. Its manifest is pending from now on, unless it is known already.
    ///
    /// # Errors
    /// If the engine is closed.
    pub fn open_upload(
        &self,
        config: UploadConfig,
        sink: Arc<dyn UploadSink>,
    ) -> Result<UploadHandle, Closed> {
        Ok(upload::open(&self.runtime()?, self.shared(), config, sink))
    }

    /// Starts to read a stream's remote tier. The place is found in the background.
    ///
    /// # Errors
    /// If the engine is closed.
    pub fn open_reader(
        &self,
        stream_id: &str,
        start: Start,
        wake: Arc<dyn Wake>,
    ) -> Result<ReaderHandle, Closed> {
        Ok(read::open(
            self.runtime()?,
            self.shared(),
            stream_id,
            start,
            wake,
        ))
    }

    /// Makes the manifest that the pointer names (`None` = nothing was ever persisted) this node's, and calls back from a
    /// thread of the runtime. Failures that pass are tried again until a deadline; the first of another kind is the answer.
    ///
    /// # Errors
    /// If the engine is closed; one that is closed later drops the callback.
    pub fn resolve_manifest<F>(
        &self,
        stream_id: &str,
        pointer: Option<Pointer>,
        callback: F,
    ) -> Result<(), Closed>
    where
        F: FnOnce(Result<ManifestRange, ResolveError>) + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        let stream_id = stream_id.to_owned();
        self.runtime()?.spawn(async move {
            callback(manifests::resolve(&shared, &stream_id, pointer).await);
        });
        Ok(())
    }

    /// Publishes the manifest that an edit leads to, if the one that it was made from is what is known here. Makes no request.
    ///
    /// # Errors
    /// If it must not be used here; nothing has changed then.
    pub fn apply_edit(
        &self,
        stream_id: &str,
        from: Pointer,
        to: Pointer,
        bytes: &[u8],
    ) -> Result<ManifestRange, ResolveError> {
        manifests::apply(self.manifests(), stream_id, from, to, bytes)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("bucket", &self.shared().config.bucket)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
