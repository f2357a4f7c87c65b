//! One stream that is being tiered: its driver task, its handle, and what passes between it and the shell.
//!
//! Owns the interpretation of the upload machine's effects. Does not own decisions (the machine does), nor the shell's side of
//! questions (metadata store, local retention).

mod driver;
mod handle;
mod questions;
mod series;
mod sums;
mod work;

use std::path::PathBuf;

use tiering_core::upload::{
    CommitOutcome, Counters, PointerRead, Recovery, RetentionBound, Status,
};

use crate::manifests::{EditFrom, ManifestRange};

pub(crate) use handle::open;
pub use handle::{EventError, UploadHandle};

/// Which stream, and where its local log is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadConfig {
    /// Id of the stream: unique per incarnation, safe in an object key.
    pub stream_id: String,
    /// Directory of its segment files.
    pub directory: PathBuf,
    /// Epoch of the local writer.
    pub epoch: u64,
    /// Name of the queue, for object metadata only.
    pub queue: String,
    /// Virtual host of the queue, for object metadata only.
    pub vhost: String,
    /// Arguments of the queue as the shell encodes them, for object metadata only.
    pub arguments: String,
}

/// What the shell tells a stream. Answers belong to the question of that kind that was pushed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UploadEvent {
    /// Answer to [`UploadPush::ReadPointer`].
    Pointer(PointerRead),
    /// The shared atomics of the log. Only the newest counts, so this is never refused as busy.
    Committed {
        /// Highest committed chunk id, `None` if there is none.
        committed_chunk_id: Option<u64>,
        /// First local chunk id, `None` if the log is empty.
        local_first_chunk_id: Option<u64>,
    },
    /// Answer to [`UploadPush::WriteAnchor`].
    Anchor {
        /// Whether the anchor is durable.
        ok: bool,
    },
    /// Answer to [`UploadPush::CommitPointer`].
    PointerCommitted(CommitOutcome),
    /// The user's retention.
    Retention(RetentionBound),
    /// Cut what is assembled now.
    Cut,
}

/// What a stream tells the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UploadPush {
    /// Read the pointer, answer with [`UploadEvent::Pointer`].
    ReadPointer,
    /// Make the anchor durable, answer with [`UploadEvent::Anchor`].
    WriteAnchor,
    /// Compare-and-swap the pointer, answer with [`UploadEvent::PointerCommitted`].
    CommitPointer {
        /// Epoch of the new pointer.
        epoch: u64,
        /// Random part of the root's key.
        uid: u32,
        /// Offset after the last record that the root covers.
        next_offset: u64,
        /// Revision that must still be there; 0 = no pointer yet.
        expected_revision: u64,
    },
    /// The persisted manifest is known, or has advanced: then also what leads to it from the one before, if that is little.
    Range(ManifestRange, Option<EditFrom>),
    /// A recovery gave something up.
    Recovery {
        /// Which kind.
        kind: Recovery,
        /// Manifest's next offset before.
        from_offset: u64,
        /// Where uploading goes on.
        to_offset: u64,
    },
    /// History was given up: part of it is proven to be unreadable.
    Abandoned {
        /// Key of the root that names it, and stays.
        root_key: String,
        /// First offset of what was given up.
        first_offset: u64,
        /// Offset after its last record.
        next_offset: u64,
    },
    /// A problem began or changed.
    Problem {
        /// Stable name.
        kind: &'static str,
        /// For people.
        text: String,
    },
    /// The problem of this kind is over.
    Recovered {
        /// Stable name.
        kind: &'static str,
    },
    /// Nothing more comes.
    Stopped(Stopped),
}

/// Why a stream stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The stream was deleted.
    Deleted,
    /// Another writer owns the manifest.
    ConflictLost,
    /// The driver died.
    Bug,
}

/// The machine's status and counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadStatus {
    /// What the machine is at.
    pub machine: Status,
    /// What has happened since it was made.
    pub counters: Counters,
    /// Objects that nothing names any more and that are still there.
    pub deletions_waiting: usize,
    /// Key of a root that names history which was given up.
    pub abandoned_root: Option<std::sync::Arc<str>>,
}

/// Where a stream's pushes go. Called from threads of the runtime, never from within a call of the shell; must not block.
pub trait UploadSink: Send + Sync + 'static {
    /// Passes one push on.
    fn push(&self, push: UploadPush);
}

#[cfg(test)]
mod tests;
