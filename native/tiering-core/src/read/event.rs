//! What happens to the read machine, as a closed set.

use std::sync::Arc;

use bytes::Bytes;
use log_format::manifest::Root;

use crate::failure::Failure;

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

/// Everything that can happen to one [`ReadMachine`](super::ReadMachine).
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
    /// The request waits for something of the node itself (memory, its turn), or its bytes come, however slowly: no fault of the
    /// store.
    Alive {
        /// Id of the effect.
        id: u64,
    },
    /// Others need the memory: what was delivered and not consumed is back, and whatever else is held is to be dropped. What was
    /// consumed before has been reported.
    TakenBack {
        /// Id of the first chunk that was not consumed, and where it starts in its fragment; `None` if all were.
        first: Option<(u64, u64)>,
        /// The consumer waits for a chunk; else nothing is fetched before it does ([`Event::Wanted`]).
        wanted: bool,
    },
    /// The consumer has asked for a chunk after everything was taken back.
    Wanted,
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
