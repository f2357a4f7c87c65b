//! What the upload machine wants done, as a closed set. Effects are idempotent: running one twice costs, but never harms.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Kind, Root};

use super::event::Witness;
use crate::fragment_assembly::FragmentPlan;
use crate::manifest::Pointer;

/// Work for the driver. Every effect that has an answer carries the `generation` that its answer must repeat. It is a number of
/// its own for every effect, so that a late answer is never taken for another's; only transfers share one between recoveries
/// (they have their reference), because the first answer counts whichever of their tries it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask the shell for the pointer.
    ReadPointer {
        /// Repeated by the answer.
        generation: u64,
    },
    /// GET and decode the root that the pointer names.
    GetRoot {
        /// Repeated by the answer.
        generation: u64,
        /// Which root.
        pointer: Pointer,
    },
    /// Read chunk headers from `from_offset` up to and including chunk `up_to_chunk_id`.
    ///
    /// The first scan after resolving may ask from above `up_to_chunk_id`: then only the place is looked at. A log that ends
    /// exactly there has caught up; one that ends below it is [`ScanEnd::RemoteAhead`](super::ScanEnd::RemoteAhead), and
    /// that must be told by the end of the log itself, committed or not. It also compares what is in front of the place
    /// (`front_timestamp_ms`).
    Scan {
        /// Repeated by the answer.
        generation: u64,
        /// Chunk id of the first chunk wanted.
        from_offset: u64,
        /// Timestamp of the chunk that the remote tier has in front of `from_offset`. If the local log has a chunk in front of it,
        /// and it has another timestamp, the answer is [`ScanEnd::Diverged`](super::ScanEnd::Diverged). `None`: not compared.
        front_timestamp_ms: Option<i64>,
        /// A chunk of the remote tier, by which a local log that does not meet it is seen to be
        /// [`ScanEnd::Unrelated`](super::ScanEnd::Unrelated).
        witness: Option<Witness>,
        /// Highest committed chunk id.
        up_to_chunk_id: u64,
        /// At most this many chunks.
        max_chunks: usize,
        /// Stop after this many chunk bytes.
        max_bytes: u64,
    },
    /// Ask the shell to make the anchor durable.
    WriteAnchor {
        /// Repeated by the answer.
        generation: u64,
    },
    /// PUT one fragment (through the governor), under a random key.
    Transfer {
        /// Repeated by the answer.
        generation: u64,
        /// Reference of the fragment; the same when it is tried again.
        transfer: u64,
        /// What to send.
        plan: Arc<FragmentPlan>,
    },
    /// Give up transfers of this and earlier generations: their results are no longer wanted.
    CancelTransfers {
        /// Highest generation to cancel.
        generation: u64,
    },
    /// PUT a root, under a random key.
    PutRoot {
        /// Repeated by the answer.
        generation: u64,
        /// Epoch for the key.
        epoch: u64,
        /// Revision of the pointer that it follows; 0 = none.
        follows: u64,
        /// What to write.
        root: Arc<Root>,
    },
    /// PUT a group, under a random key.
    PutGroup {
        /// Repeated by the answer.
        generation: u64,
        /// Offset after the last record in it.
        next_offset: u64,
        /// What to write.
        group: Arc<Group>,
    },
    /// GET and decode a group.
    GetGroup {
        /// Repeated by the answer.
        generation: u64,
        /// Its height.
        kind: Kind,
        /// Its first offset.
        first_offset: u64,
        /// Random part of its key.
        uid: u32,
    },
    /// Ask the shell for the compare-and-swap of the pointer.
    CommitPointer {
        /// Repeated by the answer.
        generation: u64,
        /// Epoch of the new pointer.
        epoch: u64,
        /// Random part of the new root's key.
        uid: u32,
        /// Offset after the last record that the root covers: kept with the pointer, for a log that is lost.
        next_offset: u64,
        /// Revision that must still be there; 0 = no pointer yet.
        expected_revision: u64,
    },
    /// The manifest in `root` is persisted: readers may use it.
    ///
    /// One exception: after [`Recovery::RemoteTierAhead`] what is left of the manifest is published under the revision that it
    /// is about to replace, because readers and local retention must forget the rest at once.
    Publish {
        /// The persisted manifest.
        root: Arc<Root>,
        /// Its revision (0 = never persisted, empty).
        revision: u64,
        /// Whether the local log has shown that it goes on where the manifest ends. Only then may local retention trim below
        /// the next offset: a log that lost its end has nothing but what it has.
        confirmed: bool,
        /// The pointer that names it; `None` while none does (never persisted, or the exception).
        pointer: Option<Pointer>,
    },
    /// Delete objects that no persisted manifest names any more (keys relative to the stream).
    Delete {
        /// What to delete.
        objects: Vec<StoredObject>,
    },
    /// Tell the operator about a recovery that gave something up.
    Recovered {
        /// Which kind.
        kind: Recovery,
        /// Manifest's next offset before.
        from_offset: u64,
        /// Offset at which uploading goes on.
        to_offset: u64,
    },
    /// History was given up: part of it is proven to be unreadable. The root that names it stays in the bucket, with all that it
    /// names.
    Abandoned {
        /// The root.
        root: StoredObject,
        /// First offset of what was given up.
        first_offset: u64,
        /// Offset after its last record.
        next_offset: u64,
    },
    /// A problem began, changed (said once per change), or ended (`None`).
    Problem {
        /// Kind and text.
        problem: Option<Problem>,
    },
    /// The machine is finished; nothing more comes.
    Stop {
        /// Why.
        reason: StopReason,
    },
}

/// An object of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoredObject {
    /// A fragment.
    Fragment {
        /// Its first offset.
        first_offset: u64,
        /// Random part of its key.
        uid: u32,
    },
    /// A group of any height.
    Group {
        /// Its height; never [`Kind::Fragment`].
        kind: Kind,
        /// Its first offset.
        first_offset: u64,
        /// Random part of its key.
        uid: u32,
    },
    /// A manifest root.
    Root {
        /// Epoch in its key.
        epoch: u64,
        /// Random part of its key.
        uid: u32,
    },
}

impl StoredObject {
    /// What an entry names.
    #[must_use]
    pub fn of(entry: &Entry) -> Self {
        let Entry {
            first_offset, uid, ..
        } = *entry;
        match entry.kind {
            Kind::Fragment => Self::Fragment { first_offset, uid },
            kind @ (Kind::Group | Kind::KiloGroup | Kind::MegaGroup) => Self::Group {
                kind,
                first_offset,
                uid,
            },
        }
    }
}

/// Recoveries that an operator must hear of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// Local retention removed what was not uploaded yet.
    LocalLogAhead,
    /// The remote tier has a timeline that the local log does not.
    RemoteTierAhead,
}

/// What keeps the stream from being tiered right now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Stable name, of the machine: `manifest`, `scan`, `transfer`, `persist`, `group`, `anchor`, `metadata`, `lost_log`. The driver adds `delete`.
    pub kind: &'static str,
    /// For people.
    pub text: String,
}

/// Why a machine stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The stream was deleted.
    Deleted,
    /// A writer with a higher epoch owns the manifest.
    Deposed,
}
