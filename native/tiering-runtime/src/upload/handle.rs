//! The handle of a stream: what the shell holds and calls.
//!
//! Owns the way in (a bounded queue, and the newest committed state beside it) and the end of the stream: dropping the handle
//! cancels everything. No call waits.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use super::driver::Driver;
use super::{UploadConfig, UploadEvent, UploadSink, UploadStatus};
use crate::engine::{Closed, Engine};

/// Events that may wait for the driver, the coalesced committed state not counted.
const QUEUE_EVENTS_MAX: usize = 1024;

/// Why an event was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventError {
    /// The queue is full; try later.
    Busy,
    /// The stream has stopped or was closed.
    Closed,
}

impl fmt::Display for EventError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "the queue is full",
            Self::Closed => "the stream is closed",
        })
    }
}

impl std::error::Error for EventError {}

/// The shared atomics as last told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Committed {
    pub(super) committed_chunk_id: Option<u64>,
    pub(super) local_first_chunk_id: Option<u64>,
}

/// A status that the driver writes and the shell reads.
pub(super) type SharedStatus = Arc<Mutex<UploadStatus>>;

/// A stream that is being tiered, until this is dropped.
#[derive(Debug)]
pub struct UploadHandle {
    events: mpsc::Sender<UploadEvent>,
    committed: watch::Sender<Committed>,
    status: SharedStatus,
    task: AbortHandle,
}

impl UploadHandle {
    /// Passes an event on.
    ///
    /// # Errors
    /// If the queue is full (never for the committed state), or the stream is not there any more.
    pub fn event(&self, event: UploadEvent) -> Result<(), EventError> {
        if self.events.is_closed() {
            return Err(EventError::Closed);
        }
        if let UploadEvent::Committed {
            committed_chunk_id,
            local_first_chunk_id,
        } = event
        {
            self.committed.send_replace(Committed {
                committed_chunk_id,
                local_first_chunk_id,
            });
            return Ok(());
        }
        self.events.try_send(event).map_err(|error| match error {
            TrySendError::Full(_) => EventError::Busy,
            TrySendError::Closed(_) => EventError::Closed,
        })
    }

    /// Status and counters as of the last thing that happened.
    #[must_use]
    pub fn status(&self) -> UploadStatus {
        self.status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Cancels everything; nothing more is pushed once what runs at this moment has yielded.
    pub fn close(&self) {
        self.task.abort();
    }
}

impl Drop for UploadHandle {
    fn drop(&mut self) {
        self.close();
    }
}

impl Engine {
    /// Starts tiering a stream. Its manifest is pending from now on, unless it is known already.
    ///
    /// # Errors
    /// If the engine is closed.
    pub fn open_upload(
        &self,
        config: UploadConfig,
        sink: Arc<dyn UploadSink>,
    ) -> Result<UploadHandle, Closed> {
        let runtime = self.runtime()?;
        self.manifests().mark_pending(&config.stream_id);
        let (events, event_queue) = mpsc::channel(QUEUE_EVENTS_MAX);
        let (committed, committed_changes) = watch::channel(Committed::default());
        let (driver, status) = Driver::new(Arc::clone(self.shared()), config, sink);
        let task = runtime
            .spawn(Box::new(driver).run(event_queue, committed_changes))
            .abort_handle();
        Ok(UploadHandle {
            events,
            committed,
            status,
            task,
        })
    }
}
