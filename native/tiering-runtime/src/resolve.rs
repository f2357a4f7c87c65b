//! Manifests of streams that are written on another node: fetched by their pointer, published here.
//!
//! Owns the fetch of one root, its deadline and its retries. Does not own which pointer is the right one, nor when to ask again:
//! the shell does, and asks for one at a time per stream.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use log_format::manifest::Root;
use tiering_core::upload::Pointer;

use crate::engine::{Closed, Engine, Shared};
use crate::manifests::{Offered, Refused, ResolvedManifest};
use crate::remote_tier::{RemoteTier, Retrying, RetryingPolicy, StoreError};
use crate::roots::{self, RootReadError};
use crate::upload::Range;

/// After this the shell looks at the pointer again: the root may have been replaced.
const DEADLINE: Duration = Duration::from_secs(30);

/// As often as the deadline allows.
const RETRYING: RetryingPolicy = RetryingPolicy {
    attempts_max: u32::MAX,
    base_delay: Duration::from_millis(100),
    max_delay: Duration::from_secs(5),
};

/// Why a manifest is not known here now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolveError {
    /// The root could not be fetched.
    Store(StoreError),
    /// What was fetched is no root; or what was told leads to none.
    Corrupt(String),
    /// It must not be used here.
    Refused(Refused),
    /// The deadline.
    TimedOut,
}

impl ResolveError {
    /// Stable name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Store(error) => error.kind().name(),
            Self::Corrupt(_) => "corrupt",
            Self::Refused(Refused::Unknown) => "unknown",
            Self::Refused(Refused::WrittenHere) => "written_here",
            Self::Refused(Refused::Stale) => "stale",
            Self::Refused(Refused::Gap) => "gap",
            Self::TimedOut => "timeout",
        }
    }
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(error) => error.fmt(f),
            Self::Corrupt(text) => f.write_str(text),
            Self::Refused(Refused::Unknown) => f.write_str("the stream has no member here"),
            Self::Refused(Refused::WrittenHere) => f.write_str("the stream is written here"),
            Self::Refused(Refused::Stale) => f.write_str("a newer manifest is known"),
            Self::Refused(Refused::Gap) => f.write_str("the manifest before it is not known"),
            Self::TimedOut => write!(f, "no manifest within {} s", DEADLINE.as_secs()),
        }
    }
}

impl std::error::Error for ResolveError {}

impl Engine {
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
        F: FnOnce(Result<Range, ResolveError>) + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        let stream_id = stream_id.to_owned();
        self.runtime()?.spawn(async move {
            let outcome = resolve(&shared, &stream_id, pointer).await;
            let stats = &shared.stats;
            match &outcome {
                Ok(_) => stats.manifests_resolved.increment(),
                Err(ResolveError::Refused(Refused::Stale)) => stats.manifests_stale.increment(),
                Err(_) => stats.manifest_resolve_failures.increment(),
            }
            callback(outcome);
        });
        Ok(())
    }
}

async fn resolve(
    shared: &Shared,
    stream_id: &str,
    pointer: Option<Pointer>,
) -> Result<Range, ResolveError> {
    let (epoch, revision) = pointer.map_or((0, 0), |pointer| (pointer.epoch, pointer.revision));
    let manifests = &shared.manifests;
    // No request for what would not be used.
    let known = manifests
        .would_take(stream_id, epoch, revision)
        .map_err(ResolveError::Refused)?;
    if known == Offered::Known
        && let Some(manifest) = manifests.resolved(stream_id)
    {
        return Ok(Range::of(&manifest.root, manifest.revision, epoch, pointer));
    }
    let root = match pointer {
        Some(pointer) => fetch(shared, stream_id, pointer).await?,
        None => Root::empty_at(0),
    };
    let range = Range::of(&root, revision, epoch, pointer);
    let manifest = ResolvedManifest {
        root: Arc::new(root),
        revision,
        epoch,
        pointer,
    };
    manifests
        .offer(stream_id, manifest)
        .map_err(ResolveError::Refused)?;
    Ok(range)
}

async fn fetch(shared: &Shared, stream_id: &str, pointer: Pointer) -> Result<Root, ResolveError> {
    shared.stats.manifest_syncs.increment();
    let tier: Arc<dyn RemoteTier> = Arc::new(Retrying::new(
        Arc::clone(&shared.tier),
        RETRYING,
        Arc::clone(&shared.stats),
    ));
    tokio::time::timeout(
        DEADLINE,
        roots::get(&tier, &shared.keys, stream_id, pointer),
    )
    .await
    .map_err(|_| ResolveError::TimedOut)?
    .map(|(root, _)| root)
    .map_err(|error| match error {
        RootReadError::Store(error) => ResolveError::Store(error),
        RootReadError::Corrupt(text) => ResolveError::Corrupt(text),
    })
}

#[cfg(test)]
mod tests;
