//! Manifests of streams that are written on another node: fetched by their pointer, published here.
//!
//! Owns the fetch of one root, its deadline and its retries. Does not own which pointer is the right one, nor when to ask again:
//! the shell does, and asks for one at a time per stream.

use std::sync::Arc;
use std::time::Duration;

use log_format::manifest::Root;
use thiserror::Error;
use tiering_core::upload::Pointer;

use super::{ManifestRange, Offered, ResolvedManifest, RootReadError, Unusable, fetch_root};
use crate::remote_tier::{RemoteTier, Retrying, RetryingPolicy, StoreError};
use crate::shared::Shared;

/// After this the shell re-checks the pointer: the root may have been replaced.
const DEADLINE: Duration = Duration::from_secs(30);

/// As often as the deadline allows.
const RETRYING: RetryingPolicy = RetryingPolicy {
    attempts_max: u32::MAX,
    base_delay: Duration::from_millis(100),
    max_delay: Duration::from_secs(5),
};

/// Why a manifest is not known here now.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ResolveError {
    /// The root could not be fetched.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was fetched is no root, or an edit leads to none.
    #[error("{0}")]
    Corrupt(String),
    /// It must not be used here.
    #[error(transparent)]
    Unusable(#[from] Unusable),
    /// The deadline.
    #[error("no manifest within {} s", DEADLINE.as_secs())]
    TimedOut,
}

impl ResolveError {
    /// Stable name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Store(error) => error.kind().name(),
            Self::Corrupt(_) => "corrupt",
            Self::Unusable(Unusable::Unknown) => "unknown",
            Self::Unusable(Unusable::WrittenHere) => "written_here",
            Self::Unusable(Unusable::Stale) => "stale",
            Self::Unusable(Unusable::Gap) => "gap",
            Self::TimedOut => "timeout",
        }
    }
}

/// Makes the manifest that the pointer names (`None` = nothing was ever persisted) this node's. Failures that pass are tried
/// again until a deadline; the first of another kind is the answer.
///
/// # Errors
/// If it is not known here afterwards.
pub(crate) async fn resolve(
    shared: &Shared,
    stream_id: &str,
    pointer: Option<Pointer>,
) -> Result<ManifestRange, ResolveError> {
    let outcome = resolve_uncounted(shared, stream_id, pointer).await;
    let stats = &shared.stats;
    match &outcome {
        Ok(_) => stats.manifests_resolved.increment(),
        Err(ResolveError::Unusable(Unusable::Stale)) => stats.manifests_stale.increment(),
        Err(_) => stats.manifest_resolve_failures.increment(),
    }
    outcome
}

async fn resolve_uncounted(
    shared: &Shared,
    stream_id: &str,
    pointer: Option<Pointer>,
) -> Result<ManifestRange, ResolveError> {
    let (epoch, revision) = pointer.map_or((0, 0), |pointer| (pointer.epoch, pointer.revision));
    let manifests = &shared.manifests;
    // No request for what would not be used.
    let known = manifests.would_take(stream_id, epoch, revision)?;
    if known == Offered::Known
        && let Some(manifest) = manifests.resolved(stream_id)
    {
        return Ok(ManifestRange::of(
            &manifest.root,
            manifest.revision,
            epoch,
            pointer,
        ));
    }
    let root = match pointer {
        Some(pointer) => fetch(shared, stream_id, pointer).await?,
        None => Root::empty_at(0),
    };
    let range = ManifestRange::of(&root, revision, epoch, pointer);
    let manifest = ResolvedManifest {
        root: Arc::new(root),
        revision,
        epoch,
        pointer,
    };
    manifests.offer(stream_id, manifest)?;
    Ok(range)
}

async fn fetch(shared: &Shared, stream_id: &str, pointer: Pointer) -> Result<Root, ResolveError> {
    shared.stats.manifest_syncs.increment();
    let tier: Arc<dyn RemoteTier> = Arc::new(Retrying::new(
        Arc::clone(&shared.tier),
        RETRYING,
        Arc::clone(&shared.stats),
    ));
    let (root, _) = tokio::time::timeout(
        DEADLINE,
        fetch_root(&tier, &shared.keys, stream_id, pointer),
    )
    .await
    .map_err(|_| ResolveError::TimedOut)??;
    Ok(root)
}

impl From<RootReadError> for ResolveError {
    fn from(error: RootReadError) -> Self {
        match error {
            RootReadError::Store(error) => Self::Store(error),
            RootReadError::Corrupt(text) => Self::Corrupt(text),
        }
    }
}

#[cfg(test)]
mod tests;
