//! A persisted manifest in short: what the shell keeps of it.

use log_format::manifest::Root;
use tiering_core::upload::Pointer;

/// A persisted manifest in short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ManifestRange {
    /// First offset.
    pub first_offset: u64,
    /// Offset after the last one; equal to the first if it is empty.
    pub next_offset: u64,
    /// Timestamp of the first chunk, -1 if there is none.
    pub first_timestamp_ms: i64,
    /// Chunk bytes.
    pub total_size_bytes: u128,
    /// Revision of its pointer, 0 if it was never persisted.
    pub revision: u64,
    /// Epoch of the writer that published it.
    pub epoch: u64,
    /// Entries of the root.
    pub fragments: u64,
    /// The pointer that names its root; `None` while none does (nothing persisted, or just about to be replaced).
    pub pointer: Option<Pointer>,
}

impl ManifestRange {
    pub(crate) fn of(root: &Root, revision: u64, epoch: u64, pointer: Option<Pointer>) -> Self {
        Self {
            first_offset: root.first_offset,
            next_offset: root.next_offset,
            first_timestamp_ms: root.first_timestamp_ms,
            total_size_bytes: root.total_size_bytes,
            revision,
            epoch,
            fragments: root.entries.len() as u64,
            pointer,
        }
    }
}
