//! Chunks that are ready for the consumer, and the promise to wake it.
//!
//! Owns the hand-over between the task that drives a [`ReadMachine`](super::ReadMachine) and the consumer's calls, so that
//! a consumer never waits while bytes are parsed or checked. Does not own the chunks' making, nor any limit on their number.

use std::collections::VecDeque;

use log_format::chunk::ChunkHeader;

use super::effect::{Chunk, FailureKind, Finish};
use super::parts::Parts;

/// Answer to one read of a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The next chunk.
    Chunk {
        /// Its decoded header.
        header: ChunkHeader,
        /// Where it starts in its fragment object.
        position: u64,
        /// The whole chunk: 48-byte header, filter, data, trailer.
        bytes: Parts,
    },
    /// Nothing to hand over yet. If it is the store that is waited for, one wake-up follows.
    Wait,
    /// The remote tier ends here: go on in the local log.
    Local {
        /// Offset to go on at.
        next_offset: u64,
    },
    /// Final.
    Failed {
        /// Which kind.
        kind: FailureKind,
        /// For people.
        text: String,
    },
}

/// First in, first out; the end of the reader comes after its last chunk.
#[derive(Debug, Default)]
pub struct ReadyQueue {
    chunks: VecDeque<Chunk>,
    finish: Option<Finish>,
    waiting: bool,
    taken_chunks: usize,
    taken_bytes: u64,
}

impl ReadyQueue {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next chunk if its id is at most `max_chunk_id`.
    ///
    /// A chunk that is held back by `max_chunk_id` arms no wake-up: it is the commit offset that the consumer waits for then,
    /// and the log tells it about that.
    pub fn take(&mut self, max_chunk_id: u64) -> ReadOutcome {
        match self.chunks.front() {
            Some(chunk) if chunk.header.chunk_id > max_chunk_id => return ReadOutcome::Wait,
            Some(_) | None => {}
        }
        if let Some(Chunk {
            header,
            position,
            bytes,
        }) = self.chunks.pop_front()
        {
            self.taken_chunks += 1;
            self.taken_bytes += bytes.len() as u64;
            return ReadOutcome::Chunk {
                header,
                position,
                bytes,
            };
        }
        match &self.finish {
            None => {
                self.waiting = true;
                ReadOutcome::Wait
            }
            Some(Finish::Local { next_offset }) => ReadOutcome::Local {
                next_offset: *next_offset,
            },
            Some(Finish::Failed { kind, text }) => ReadOutcome::Failed {
                kind: *kind,
                text: text.clone(),
            },
        }
    }

    /// Adds a chunk. Returns whether the consumer must be woken now.
    ///
    /// After the end it is dropped: a consumer can close while its driver delivers.
    #[must_use]
    pub fn push(&mut self, chunk: Chunk) -> bool {
        if self.finish.is_some() {
            return false;
        }
        self.chunks.push_back(chunk);
        std::mem::take(&mut self.waiting)
    }

    /// Sets the end, which is reported once the chunks are taken. Returns whether the consumer must be woken now.
    #[must_use]
    pub fn finish(&mut self, finish: Finish) -> bool {
        self.finish.get_or_insert(finish);
        std::mem::take(&mut self.waiting)
    }

    /// Chunks and bytes taken since this was last asked: the machine's `Consumed` event.
    pub fn drain_taken(&mut self) -> (usize, u64) {
        (
            std::mem::take(&mut self.taken_chunks),
            std::mem::take(&mut self.taken_bytes),
        )
    }

    /// Chunks taken and not yet reported by [`Self::drain_taken`].
    #[must_use]
    pub const fn taken_chunks(&self) -> usize {
        self.taken_chunks
    }

    /// Whether the consumer got nothing and waits to be woken.
    #[must_use]
    pub const fn is_waited_for(&self) -> bool {
        self.waiting
    }

    /// Bytes taken and not yet reported by [`Self::drain_taken`].
    #[must_use]
    pub const fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Chunks waiting for the consumer.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Empties the queue; the chunks are the caller's to drop, where that may take time.
    #[must_use]
    pub fn take_all(&mut self) -> VecDeque<Chunk> {
        std::mem::take(&mut self.chunks)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use log_format::chunk::ChunkType;

    use super::*;

    fn chunk(chunk_id: u64) -> Chunk {
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp_ms: 0,
            epoch: 1,
            chunk_id,
            data_crc: 0,
            data_bytes: 0,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        Chunk {
            header,
            position: 8,
            bytes: Bytes::copy_from_slice(&header.encode()).into(),
        }
    }

    #[test]
    fn one_wait_is_woken_once() {
        let mut queue = ReadyQueue::new();
        assert!(!queue.push(chunk(0)), "nobody waits yet");
        assert!(matches!(queue.take(u64::MAX), ReadOutcome::Chunk { .. }));
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Wait);
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Wait);
        assert!(queue.push(chunk(1)));
        assert!(!queue.push(chunk(2)));
    }

    #[test]
    fn a_chunk_that_is_not_committed_here_is_held_back_without_a_wake_up() {
        let mut queue = ReadyQueue::new();
        let _ = queue.push(chunk(5));
        assert_eq!(queue.take(4), ReadOutcome::Wait);
        assert!(!queue.push(chunk(6)));
        assert!(matches!(queue.take(5), ReadOutcome::Chunk { header, .. } if header.chunk_id == 5));
    }

    #[test]
    fn the_end_comes_after_the_last_chunk_and_stays() {
        let mut queue = ReadyQueue::new();
        let _ = queue.push(chunk(5));
        assert!(!queue.finish(Finish::Local { next_offset: 6 }));
        assert!(matches!(queue.take(u64::MAX), ReadOutcome::Chunk { .. }));
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Local { next_offset: 6 });
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Local { next_offset: 6 });
    }

    #[test]
    fn what_comes_after_the_end_is_dropped() {
        let mut queue = ReadyQueue::new();
        let _ = queue.finish(Finish::Local { next_offset: 6 });
        assert!(!queue.push(chunk(6)));
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Local { next_offset: 6 });
    }

    #[test]
    fn the_end_wakes_a_waiting_consumer() {
        let mut queue = ReadyQueue::new();
        assert_eq!(queue.take(u64::MAX), ReadOutcome::Wait);
        assert!(queue.finish(Finish::Failed {
            kind: FailureKind::Lost,
            text: String::new()
        }));
    }

    #[test]
    fn what_was_taken_is_reported_once() {
        let mut queue = ReadyQueue::new();
        let _ = queue.push(chunk(0));
        let _ = queue.push(chunk(1));
        let _ = queue.take(0);
        assert_eq!(queue.drain_taken(), (1, 48));
        assert_eq!(queue.drain_taken(), (0, 0));
    }
}
