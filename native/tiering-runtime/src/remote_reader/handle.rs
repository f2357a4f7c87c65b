//! The handle of a reader: what a consumer holds and calls.
//!
//! Owns the way out (a queue of chunks) and the end of the reader: dropping the handle cancels everything. No call waits.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tiering_core::remote_reader::{FailureKind, Finish, ReadOutcome, ReadyQueue, Start};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::driver::Driver;
use crate::engine::{Closed, Engine};

/// Taken bytes that are worth telling the driver about before the queue is empty.
const TAKEN_BYTES_WORTH_TELLING: u64 = 64 << 10;

/// A consumer that waits.
pub trait Wake: Send + Sync + 'static {
    /// Reading is worth another try. Called from a thread of the runtime, once per wait; must not block or panic.
    /// Only a reader that ends with its engine before it was read may call from elsewhere, and then nobody waits.
    fn wake(&self);
}

/// Where the driver puts chunks and the consumer takes them.
#[derive(Debug, Default)]
pub(super) struct Outlet {
    queue: Mutex<ReadyQueue>,
    /// The consumer took something.
    pub(super) taken: Notify,
}

impl Outlet {
    pub(super) fn lock(&self) -> MutexGuard<'_, ReadyQueue> {
        // Nothing panics while the lock is held, so a poisoned queue is still a whole one.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, max_chunk_id: u64) -> ReadOutcome {
        let (outcome, tell) = {
            let mut queue = self.lock();
            let outcome = queue.take(max_chunk_id);
            let taken_bytes = queue.taken_bytes();
            let tell =
                taken_bytes >= TAKEN_BYTES_WORTH_TELLING || taken_bytes > 0 && queue.is_empty();
            (outcome, tell)
        };
        if tell {
            self.taken.notify_one();
        }
        outcome
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

pub(super) fn closed() -> Finish {
    Finish::Failed {
        kind: FailureKind::Unavailable,
        text: "the reader is closed".to_owned(),
    }
}

impl Engine {
    /// Starts to read a stream's remote tier. Finding the place goes on in the background.
    ///
    /// # Errors
    /// If the engine is closed.
    pub fn open_reader(
        &self,
        stream_id: &str,
        start: Start,
        wake: Arc<dyn Wake>,
    ) -> Result<ReaderHandle, Closed> {
        let runtime = self.runtime()?;
        let outlet = Arc::new(Outlet::default());
        let driver = Driver::new(
            Arc::clone(self.shared()),
            stream_id,
            start,
            Arc::clone(&outlet),
            wake,
        );
        let task = runtime.spawn(driver.run()).abort_handle();
        Ok(ReaderHandle {
            outlet,
            task,
            runtime,
        })
    }
}
