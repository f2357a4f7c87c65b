//! The handle of a reader: what a consumer holds and calls.
//!
//! Owns the end of the reader: dropping the handle cancels everything. Does not own the queue (`outlet`). No call waits.

use std::fmt;
use std::sync::Arc;

use tiering_core::read::{ReadOutcome, Start};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tracing::Instrument;

use super::driver::Driver;
use super::outlet::{Outlet, Wake, closed};
use crate::shared::Shared;

/// Starts to read a stream's remote tier. The place is found in the background.
pub(crate) fn open(
    runtime: Handle,
    shared: &Arc<Shared>,
    stream_id: &str,
    start: Start,
    wake: Arc<dyn Wake>,
) -> ReaderHandle {
    let outlet = Arc::new(Outlet::new(shared.clock, wake));
    let driver = Driver::new(Arc::clone(shared), stream_id, start, Arc::clone(&outlet));
    let span = shared
        .log
        .within(|| tracing::info_span!("read", stream = %stream_id));
    let task = runtime.spawn(driver.run().instrument(span)).abort_handle();
    ReaderHandle {
        outlet,
        task,
        runtime,
    }
}

/// A reader, until this is dropped.
pub struct ReaderHandle {
    outlet: Arc<Outlet>,
    task: AbortHandle,
    runtime: Handle,
}

impl ReaderHandle {
    /// Takes the next chunk whose id is at most `max_chunk_id`. Never waits.
    ///
    /// After [`ReadOutcome::Wait`] the consumer is woken once, when there is more; not if it is `max_chunk_id` that holds the
    /// next chunk back. `Local` and `Failed` are final.
    #[must_use]
    pub fn read(&self, max_chunk_id: u64) -> ReadOutcome {
        self.outlet.take(max_chunk_id)
    }

    /// Cancels everything and frees what was fetched; also done when the handle is dropped.
    pub fn close(&self) {
        let chunks = {
            let mut queue = self.outlet.lock();
            // Nobody is woken, neither here nor by the driver's end: it is the consumer who closed.
            let _ = queue.finish(closed());
            queue.take_all()
        };
        self.task.abort();
        if !chunks.is_empty() {
            // Giving megabytes back to the system takes longer than a call may.
            self.runtime.spawn(async move { drop(chunks) });
        }
    }
}

impl Drop for ReaderHandle {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for ReaderHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReaderHandle")
            .field("ready_chunks", &self.outlet.lock().len())
            .finish_non_exhaustive()
    }
}
