//! The handle of a stream: what the shell holds and calls.
//!
//! Owns the way in (a bounded queue, and the newest committed state beside it) and the end of the stream: dropping the handle
//! cancels everything. No call waits.

use std::sync::{Arc, PoisonError};

use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tracing::Instrument;

use super::driver::{Committed, Driver, SharedStatus};
use super::{UploadConfig, UploadEvent, UploadSink, UploadStatus};
use crate::shared::Shared;

/// Events that may wait for the driver, the coalesced committed state not counted.
const QUEUE_EVENTS_MAX: usize = 1024;

/// Why an event was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EventError {
    /// The queue is full; try later.
    #[error("the queue is full")]
    Busy,
    /// The stream has stopped or was closed.
    #[error("the stream is closed")]
    Closed,
}

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

/// Starts tiering a stream. Its manifest is pending from now on, unless it is known already.
pub(crate) fn open(
    runtime: &Handle,
    shared: &Arc<Shared>,
    config: UploadConfig,
    sink: Arc<dyn UploadSink>,
) -> UploadHandle {
    shared.manifests.mark_pending(&config.stream_id);
    let (events, event_queue) = mpsc::channel(QUEUE_EVENTS_MAX);
    let (committed, committed_changes) = watch::channel(Committed::default());
    let (stream, epoch) = (config.stream_id.clone(), config.epoch);
    let span = shared
        .log
        .within(|| tracing::info_span!("upload", %stream, epoch));
    let (driver, status) = Driver::new(Arc::clone(shared), config, sink);
    let task = runtime
        .spawn(
            Box::new(driver)
                .run(event_queue, committed_changes)
                .instrument(span),
        )
        .abort_handle();
    UploadHandle {
        events,
        committed,
        status,
        task,
    }
}
