//! The upload machine of one stream.

mod effect;
mod event;

pub use effect::{Effect, Problem, Recovery, StopReason, StoredObject};
pub use event::{
    CommitOutcome, Event, Failure, Pointer, PointerRead, RetentionBound, ScanBatch, ScanEnd,
    ScannedChunk,
};
