//! The only home of tokio, of files and of the S3 client: drives the machines of `tiering-core`.
//!
//! Owns: the runtime and its life, requests to the object store, header scans of local segments, admission of transfers,
//! timers, and this node's registry of manifests. Does not own: decisions (they are in `tiering-core`), stored bytes
//! (`log-format`), Erlang terms (`nif`).

pub mod buffer_pool;
pub mod clock;
pub mod durations;
pub mod engine;
pub mod governor;
pub mod local_log;
pub mod log;
pub mod manifests;
pub mod object_metadata;
pub mod pending;
mod priority;
pub mod read;
mod read_cache;
mod read_memory;
pub mod recovery;
pub mod remote_tier;
pub mod settings;
mod shared;
pub mod stats;
pub mod timekeeper;
pub mod upload;
