//! Buffers of one size, used again: a fresh one costs more in page faults than the reading that fills it.
//!
//! Owns how many idle buffers are kept. Does not own what is in them, and does not limit how many are in use
//! (the governor limits transfers, the runtime limits scans).

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Size of every buffer: large enough that system calls do not count, small enough to stay in a core's cache.
pub const BUFFER_BYTES: usize = 256 * 1024;

/// Idle buffers that a pool keeps unless it is told otherwise (4 MiB).
const IDLE_BUFFERS_MAX: usize = 16;

/// A pool.
#[derive(Debug)]
pub struct BufferPool {
    idle: Mutex<Vec<Box<[u8]>>>,
    idle_max: usize,
}

impl Default for BufferPool {
    fn default() -> Self {
        Self::keeping(IDLE_BUFFERS_MAX)
    }
}

impl BufferPool {
    /// An empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty pool that keeps at most so many idle buffers.
    #[must_use]
    pub const fn keeping(idle_max: usize) -> Self {
        Self {
            idle: Mutex::new(Vec::new()),
            idle_max,
        }
    }

    /// A buffer with undefined (but initialised) content.
    #[must_use]
    pub fn take(self: &Arc<Self>) -> PooledBuffer {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let bytes = idle.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice());
        PooledBuffer {
            bytes,
            pool: Arc::clone(self),
        }
    }

    fn give_back(&self, bytes: Box<[u8]>) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.idle_max {
            idle.push(bytes);
        }
    }
}

/// A buffer that goes back to its pool when it is dropped.
#[derive(Debug)]
pub struct PooledBuffer {
    bytes: Box<[u8]>,
    pool: Arc<BufferPool>,
}

impl PooledBuffer {
    /// The first `len` bytes for others to keep; the buffer goes back when the last of them lets go.
    #[must_use]
    pub fn freeze(self, len: usize) -> Bytes {
        let len = len.min(self.bytes.len());
        Bytes::from_owner(Frozen { buffer: self, len })
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}

struct Frozen {
    buffer: PooledBuffer,
    len: usize,
}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_the_last_slice_is_gone() {
        let pool = Arc::new(BufferPool::new());
        let mut buffer = pool.take();
        buffer[..5].copy_from_slice(b"hello");
        let address = buffer.as_ptr();
        let bytes = buffer.freeze(5);
        let slice = bytes.slice(1..3);
        assert_eq!(bytes, "hello");
        drop(bytes);
        assert_ne!(pool.take().as_ptr(), address);
        assert_eq!(slice, "el");
        drop(slice);
        assert_eq!(pool.take().as_ptr(), address);
    }

    #[test]
    fn no_more_than_so_many_are_kept() {
        let pool = Arc::new(BufferPool::keeping(1));
        let (one, other) = (pool.take(), pool.take());
        drop((one, other));
        assert_eq!(pool.idle.lock().expect("no panic").len(), 1);
    }
}
