//! What happens to the read machine, as a closed set.

use std::sync::Arc;

use bytes::Bytes;
use log_format::manifest::Root;

use crate::replica_reader::Failure;

/// Where a reader begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the chunk that holds this offset.
    Offset(u64),
    /// At the first chunk that is at least this new (ms since the epoch).
    Timestamp(i64),
}

/// What this node knows of the stream's manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestView {
    /// Nothing yet, or nothing any more: wait (bounded).
    Unknown,
    /// The persisted manifest.
    Resolved(Arc<Root>),
}

/// Everything that can happen to one [`RemoteReader`](super::RemoteReader).
///
/// Answers carry the `id` of the effect they answer; an id that is not waited for any more is ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answer to `RefreshManifest`.
    Manifest {
        /// Id of the effect.
        id: u64,
        /// What is known now.
        view: ManifestView,
    },
    /// The next bytes of the answer to a `GetRange`, which goes on. They stay, whatever becomes of the rest.
    Part {
        /// Id of the effect.
        id: u64,
        /// The bytes that follow those of the parts before.
        bytes: Bytes,
    },
    /// End of the answer to `GetGroup`, `GetIndex` and `GetRange`: the bytes as the store gave them, or why there are none.
    /// Of a `GetRange` those that came before as parts are not repeated, and there may be none left.
    Fetched {
        /// Id of the effect.
        id: u64,
        /// The answer.
        outcome: Result<Bytes, Failure>,
    },
    /// So much may this reader have fetched ahead now: its share of what the node has for all of them.
    Share {
        /// Bytes held and on their way.
        bytes: u64,
    },
    /// Answer to `Reserve`: the memory is this reader's now.
    Granted {
        /// As many as were asked for.
        bytes: u64,
    },
    /// First answer to `Reserve` if there is not enough memory now: it is granted in its turn. Whoever has nothing at all goes on
    /// with what needs no grant. The driver answers a `Reserve` with one or the other, at once.
    Deferred,
    /// The consumer took chunks that were delivered.
    Consumed {
        /// How many.
        chunks: usize,
        /// Their bytes.
        bytes: u64,
    },
    /// Time may have reached `poll_timeout()`.
    Tick,
}
