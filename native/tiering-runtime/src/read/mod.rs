//! Remote reads: one driver task per reader.
//!
//! Owns the requests and timers of readers, and the hand-over of chunks to consumers. Does not own any decision about
//! what is read when (`tiering_core::read` does), nor what a consumer is: it is a [`Wake`] here.
//!
//! A consumer's read takes a lock that is held for the time of a queue operation only; bytes are parsed and checked outside it.

mod alarms;
mod driver;
mod handle;
mod outlet;
#[cfg(test)]
mod tests;

pub use handle::ReaderHandle;
pub(crate) use handle::open;
pub use outlet::Wake;
pub use tiering_core::read::{FailureKind, Parts, ReadOutcome, Start};

pub(crate) use alarms::Alarms;
