//! What the read machine wants done, as a closed set, and what it hands over.

use log_format::chunk::ChunkHeader;
use log_format::manifest::Kind;

use super::parts::Parts;

/// One fragment of the manifest snapshot that the machine reads from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentRef {
    /// Offset of its first record; part of its key.
    pub first_offset: u64,
    /// Offset after its last record.
    pub next_offset: u64,
    /// Timestamp of its first chunk.
    pub first_timestamp_ms: i64,
    /// Length of its chunk bytes, which start at byte 8 of the object.
    pub data_bytes: u64,
    /// Random part of its key.
    pub uid: u32,
}

/// One group of the manifest snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRef {
    /// Its height; never `Kind::Fragment`.
    pub kind: Kind,
    /// Offset of its first record; part of its key.
    pub first_offset: u64,
    /// Random part of its key.
    pub uid: u32,
}

/// A whole chunk, byte for byte as the writer wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Its decoded header.
    pub header: ChunkHeader,
    /// Where it starts in its fragment object.
    pub position: u64,
    /// Header, filter, data, trailer.
    pub bytes: Parts,
}

/// Why a reader gave up; final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// What the store returned is not what the manifest and the chunk headers say, also when asked again.
    Corrupt,
    /// The manifest names an object that the store does not have.
    Lost,
    /// The store, or knowledge of the manifest, did not come back in time.
    Unavailable,
    /// The object is in an archive class, and nobody has restored it in time.
    Archived,
    /// A mistake of ours.
    Bug,
}

impl FailureKind {
    /// Stable name for the shell and the logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Corrupt => "corrupt",
            Self::Lost => "lost",
            Self::Unavailable => "unavailable",
            Self::Archived => "archived",
            Self::Bug => "bug",
        }
    }
}

/// How a reader ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The manifest ends here: go on in the local log.
    Local {
        /// Offset to go on at.
        next_offset: u64,
    },
    /// It could not go on.
    Failed {
        /// Which kind.
        kind: FailureKind,
        /// For people.
        text: String,
    },
}

/// Whether a cache may answer a request, and keep what the store answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheUse {
    /// The usual case.
    Allowed,
    /// What came before was damaged or wrong: the answer must come from the store itself, and is not kept.
    Bypassed,
}

/// Work for the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Look up what this node knows of the manifest.
    RefreshManifest {
        /// Repeated by the answer.
        id: u64,
    },
    /// GET a whole group.
    GetGroup {
        /// Repeated by the answer.
        id: u64,
        /// Which.
        group: GroupRef,
        /// Whether a cache may answer.
        cache: CacheUse,
    },
    /// GET the bytes `start..end_max` of a fragment: its index. The object ends at `end_max` or before it.
    GetIndex {
        /// Repeated by the answer.
        id: u64,
        /// Which.
        fragment: FragmentRef,
        /// Where the index starts.
        start: u64,
        /// The index cannot reach past this.
        end_max: u64,
        /// Whether a cache may answer.
        cache: CacheUse,
    },
    /// GET the bytes `start..end` of a fragment. May be answered in parts.
    GetRange {
        /// Repeated by the answer.
        id: u64,
        /// Which.
        fragment: FragmentRef,
        /// First byte.
        start: u64,
        /// After the last byte.
        end: u64,
        /// Whether a cache may answer.
        cache: CacheUse,
    },
    /// The answer to this request is not wanted any more.
    Cancel {
        /// Id of the request.
        id: u64,
    },
    /// Put this chunk into the [`ReadyQueue`](super::ReadyQueue).
    Deliver(Chunk),
    /// Somebody should look: a place that cannot be read, for a reason that does not pass by itself. Said again as long as it
    /// lasts. It is over when a reader comes past the place, or the place is no longer in the manifest.
    Alarm {
        /// [`FailureKind::Corrupt`], [`FailureKind::Lost`] or [`FailureKind::Archived`].
        kind: FailureKind,
        /// The offset that cannot be read.
        offset: u64,
    },
    /// Nothing comes after this; what is still running is the driver's to drop.
    Finish(Finish),
}
