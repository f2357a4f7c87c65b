//! What happens to the upload machine: every input it can get, as a closed set.
//!
//! The driver in `tiering-runtime` makes these from task results, timers and shell calls.

use log_format::chunk::ChunkHeader;
use log_format::manifest::{Group, Root};

use crate::failure::Failure;
use crate::fragment_assembly::ScannedChunk;
use crate::manifest::{Pointer, RetentionBound};

/// A chunk that the remote tier has, by which a log that lost its end is told from one that was lost and began anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// Its id.
    pub chunk_id: u64,
    /// Its timestamp.
    pub timestamp_ms: i64,
    /// Epoch of the writer that persisted last: no chunk of the remote tier is of a later one.
    pub epoch: u64,
}

impl Witness {
    /// Whether a local log that begins with this chunk, at or below the witness, was once the log of what the remote tier has.
    /// What the log of the witness had in front of it was there before it; a log that began anew was not.
    #[must_use]
    pub fn is_related_to(&self, first: &ChunkHeader) -> bool {
        if first.chunk_id == self.chunk_id {
            return first.timestamp_ms == self.timestamp_ms;
        }
        first.epoch <= self.epoch && first.timestamp_ms <= self.timestamp_ms
    }
}

/// Why a scan ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanEnd {
    /// Every committed chunk was read.
    CaughtUp,
    /// The batch limit was reached; there may be more.
    More,
    /// The first local chunk is past the offset asked for: retention was faster than the upload.
    LocalAhead {
        /// First offset that the local log still has.
        local_first_offset: u64,
    },
    /// The local log ends below the offset asked for: the remote tier has a timeline that the local log lost.
    RemoteAhead {
        /// First offset that the local log has.
        local_first_offset: u64,
        /// Offset after the last local record.
        local_next_offset: u64,
    },
    /// The local log reaches the offset asked for, but not by the chunks that the remote tier has: one of its chunks lies across
    /// the offset, or the one in front of it is another. It lost its end and has grown past the place since.
    Diverged {
        /// First offset that the local log has.
        local_first_offset: u64,
    },
    /// As `RemoteAhead` or `Diverged`, and the local log begins at or below the [`Witness`], but with a chunk that is younger than
    /// what the remote tier has: the two were never one.
    Unrelated {
        /// First offset that the local log has.
        local_first_offset: u64,
    },
    /// There is no local log (yet).
    Empty,
    /// The file cannot be read or does not parse; retried, never skipped.
    Failed {
        /// For the log and the status.
        reason: String,
    },
}

/// Result of one [`Effect::Scan`](super::Effect::Scan).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScanBatch {
    /// The chunks, contiguous from the offset asked for.
    pub chunks: Vec<ScannedChunk>,
    /// Why there are no more of them.
    pub end: ScanEnd,
}

/// Answer to a compare-and-swap of the pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommitOutcome {
    /// Committed; the pointer now has this revision.
    Committed {
        /// New version of the pointer.
        revision: u64,
    },
    /// Another writer, or another epoch, was first.
    Conflict,
    /// The stream's node in the metadata store is gone.
    NotFound,
    /// The outcome is unknown (timeout, no quorum).
    Unknown,
}

/// Answer to reading the pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PointerRead {
    /// There is one.
    Found(Pointer),
    /// The stream has never persisted anything.
    NotFound,
    /// The metadata store could not answer.
    Unavailable,
}

/// Everything that can happen to one [`UploadMachine`](super::UploadMachine).
///
/// An answer repeats the `generation` of its effect, which no other effect has; only transfers share one between recoveries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answer to `ReadPointer`.
    PointerRead {
        /// Generation of the effect.
        generation: u64,
        /// The answer.
        outcome: PointerRead,
    },
    /// Answer to `GetRoot`.
    RootRead {
        /// Generation of the effect.
        generation: u64,
        /// The root, decoded and checked, or why not.
        outcome: Result<Root, Failure>,
    },
    /// The shared atomics moved (or the shell looked at them).
    Committed {
        /// Highest committed chunk id, `None` if there is none.
        committed_chunk_id: Option<u64>,
        /// First local chunk id, `None` if the log is empty.
        local_first_chunk_id: Option<u64>,
    },
    /// Answer to `Scan`.
    Scanned {
        /// Generation of the effect.
        generation: u64,
        /// What was found.
        batch: ScanBatch,
    },
    /// Answer to `WriteAnchor`.
    AnchorWritten {
        /// Generation of the effect.
        generation: u64,
        /// Whether the anchor is durable.
        ok: bool,
    },
    /// Answer to `Transfer`.
    TransferDone {
        /// Generation of the effect.
        generation: u64,
        /// Which fragment.
        transfer: u64,
        /// Random part of the object's key, or why not.
        outcome: Result<u32, Failure>,
    },
    /// Answer to `PutRoot`.
    RootPut {
        /// Generation of the effect.
        generation: u64,
        /// Random part of the root's key, or why not.
        outcome: Result<u32, Failure>,
    },
    /// Answer to `CommitPointer`.
    PointerCommitted {
        /// Generation of the effect.
        generation: u64,
        /// The answer.
        outcome: CommitOutcome,
    },
    /// Answer to `PutGroup`.
    GroupPut {
        /// Generation of the effect.
        generation: u64,
        /// Random part of the group's key, or why not.
        outcome: Result<u32, Failure>,
    },
    /// Answer to `GetGroup`.
    GroupRead {
        /// Generation of the effect.
        generation: u64,
        /// The group, decoded and checked, or why not.
        outcome: Result<Group, Failure>,
    },
    /// The user's retention changed (or is first known).
    RetentionChanged(RetentionBound),
    /// Cut what is assembled now.
    CutRequested,
    /// Time may have reached `poll_timeout()`.
    Tick,
}
