//! What the tasks of one engine work with.
//!
//! Owns nothing but the list: each part has a room of its own. The engine makes it, streams and readers hold it.

use std::sync::Arc;

use log_format::key::KeySpace;

use crate::buffer_pool::BufferPool;
use crate::clock::Clock;
use crate::governor::Governor;
use crate::log::Log;
use crate::manifests::Manifests;
use crate::read::Alarms;
use crate::read_cache::ReadCache;
use crate::read_memory::ReadMemory;
use crate::remote_tier::RemoteTier;
use crate::settings::Config;
use crate::stats::Stats;
use crate::timekeeper::Timekeeper;

/// What tasks of an engine work with. Holds no runtime, so a task that holds this keeps no thread alive.
pub(crate) struct Shared {
    pub(crate) config: Arc<Config>,
    pub(crate) clock: Clock,
    pub(crate) timekeeper: Arc<Timekeeper>,
    pub(crate) keys: KeySpace,
    /// Counts each request; retries nothing.
    pub(crate) tier: Arc<dyn RemoteTier>,
    /// The same with retries, for requests that no machine repeats.
    pub(crate) retrying: Arc<dyn RemoteTier>,
    pub(crate) governor: Governor,
    pub(crate) manifests: Arc<Manifests>,
    pub(crate) buffers: Arc<BufferPool>,
    /// The memory of all readers together, and of what they share.
    pub(crate) read_memory: ReadMemory,
    /// What they have fetched, shared.
    pub(crate) read_cache: ReadCache,
    /// Where they cannot continue.
    pub(crate) alarms: Alarms,
    pub(crate) stats: Arc<Stats>,
    pub(crate) log: Arc<Log>,
}
