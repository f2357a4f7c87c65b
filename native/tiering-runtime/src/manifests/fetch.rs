//! Reading a stored root: fetch, decode, check.
//!
//! Owns how large a root may be and what counts as one. Does not own retries, nor what a failure means.

use std::collections::BTreeMap;
use std::sync::Arc;

use log_format::key::KeySpace;
use log_format::manifest::{Root, RootError};
use thiserror::Error;
use tiering_core::upload::Pointer;

use crate::remote_tier::{Described, RemoteTier, StoreError};

/// A root holds 34 bytes per entry and is rebalanced long before this; a larger one is not a root.
const ROOT_BYTES_MAX: u64 = 64 << 20;

/// Why there is no root.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum RootReadError {
    /// It could not be fetched.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What was fetched is no root; the text names the key.
    #[error("{0}")]
    Corrupt(String),
}

/// Reads the root that the pointer names, with what the object says about itself.
pub(crate) async fn fetch_root(
    tier: &Arc<dyn RemoteTier>,
    keys: &KeySpace,
    stream_id: &str,
    pointer: Pointer,
) -> Result<(Root, BTreeMap<String, String>), RootReadError> {
    let key = keys.root(stream_id, pointer.epoch, pointer.uid);
    let Described { bytes, metadata } = tier.get_described(&key, ROOT_BYTES_MAX).await?;
    let corrupt = |error: RootError| RootReadError::Corrupt(format!("{key}: {error}"));
    let root = Root::decode(&bytes).map_err(corrupt)?;
    root.check().map_err(corrupt)?;
    Ok((root, metadata))
}
