//! The bytes of a fragment, read from segment files while they are sent.
//!
//! Owns the reading: header, spans, index, in frames of one buffer each. Checks the bytes against the fragment's checksum
//! before the last frame goes out, so that a damaged local file never becomes an object, whatever the store verifies.
//! Does not own the sending.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use log_format::{crc, fragment, segment};
use tiering_core::fragment_assembly::FragmentPlan;
use tokio::sync::mpsc;

use super::read_at_most;
use crate::buffer_pool::{BufferPool, PooledBuffer};
use crate::remote_tier::{BodyFrames, BodySource, StoreError, StoreErrorKind};

/// Frames read ahead of the sending.
const FRAMES_AHEAD: usize = 2;

/// One fragment to send.
#[derive(Debug, Clone)]
pub struct FragmentBody {
    directory: Arc<Path>,
    plan: Arc<FragmentPlan>,
    pool: Arc<BufferPool>,
}

impl FragmentBody {
    /// The fragment of this plan, from the segment files in this directory.
    #[must_use]
    pub fn new(directory: Arc<Path>, plan: Arc<FragmentPlan>, pool: Arc<BufferPool>) -> Self {
        Self {
            directory,
            plan,
            pool,
        }
    }
}

impl BodySource for FragmentBody {
    fn len_bytes(&self) -> u64 {
        self.plan.object_bytes()
    }

    fn open(&self) -> BodyFrames {
        let (sender, receiver) = mpsc::channel(FRAMES_AHEAD);
        let body = self.clone();
        tokio::task::spawn_blocking(move || {
            let mut writer = FrameWriter::new(&body.pool, sender);
            // A receiver that is gone has no use for the reason either.
            if let Err(Stop::Failed(error)) = body.write_to(&mut writer) {
                drop(writer.sender.blocking_send(Err(error)));
            }
        });
        receiver
    }
}

enum Stop {
    Failed(StoreError),
    ReceiverGone,
}

impl FragmentBody {
    fn write_to(&self, writer: &mut FrameWriter<'_>) -> Result<(), Stop> {
        writer.write(&fragment::HEADER)?;
        for span in &self.plan.spans {
            let name = segment::file_name(span.segment_offset);
            let failed = |error: io::Error| {
                let kind = match error.kind() {
                    io::ErrorKind::NotFound => StoreErrorKind::LocalGone,
                    _ => StoreErrorKind::LocalRead,
                };
                Stop::Failed(StoreError::new(kind, format!("{name}: {error}")))
            };
            let file = File::open(self.directory.join(&name)).map_err(failed)?;
            let mut position = span.start;
            while position < span.end {
                let read = writer
                    .fill_from(&file, position, span.end - position)?
                    .map_err(failed)?;
                if read == 0 {
                    return Err(failed(io::ErrorKind::UnexpectedEof.into()));
                }
                position += read as u64;
            }
        }
        writer.write(&self.plan.index)?;
        writer.finish(self.plan.object_crc())
    }
}

/// Collects bytes into frames and sums them up.
struct FrameWriter<'a> {
    pool: &'a Arc<BufferPool>,
    sender: mpsc::Sender<Result<bytes::Bytes, StoreError>>,
    buffer: PooledBuffer,
    filled: usize,
    sum: u32,
}

impl<'a> FrameWriter<'a> {
    fn new(
        pool: &'a Arc<BufferPool>,
        sender: mpsc::Sender<Result<bytes::Bytes, StoreError>>,
    ) -> Self {
        Self {
            pool,
            sender,
            buffer: pool.take(),
            filled: 0,
            sum: 0,
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Stop> {
        while !bytes.is_empty() {
            let room = self.room()?;
            let (now, later) = bytes.split_at(room.len().min(bytes.len()));
            for (to, from) in room.iter_mut().zip(now) {
                *to = *from;
            }
            self.filled += now.len();
            bytes = later;
        }
        Ok(())
    }

    fn fill_from(
        &mut self,
        file: &File,
        position: u64,
        len: u64,
    ) -> Result<io::Result<usize>, Stop> {
        let room = self.room()?;
        let want = usize::try_from(len).unwrap_or(usize::MAX).min(room.len());
        let read = read_at_most(file, room.get_mut(..want).unwrap_or_default(), position);
        self.filled += read.as_ref().map_or(0, |read| *read);
        Ok(read)
    }

    /// The rest of the buffer, of a new one if it is full.
    fn room(&mut self) -> Result<&mut [u8], Stop> {
        if self.filled == self.buffer.len() {
            self.add_up();
            self.send()?;
        }
        Ok(self.buffer.get_mut(self.filled..).unwrap_or_default())
    }

    fn add_up(&mut self) {
        let bytes = self.buffer.get(..self.filled).unwrap_or_default();
        self.sum = crc::combine(self.sum, crc::crc32(bytes), bytes.len() as u64);
    }

    fn send(&mut self) -> Result<(), Stop> {
        let full = std::mem::replace(&mut self.buffer, self.pool.take());
        let frame = full.freeze(std::mem::take(&mut self.filled));
        self.sender
            .blocking_send(Ok(frame))
            .map_err(|_| Stop::ReceiverGone)
    }

    fn finish(&mut self, expected_sum: u32) -> Result<(), Stop> {
        self.add_up();
        if self.sum != expected_sum {
            let text = "the local bytes do not match the checksums in their chunk headers";
            return Err(Stop::Failed(StoreError::new(
                StoreErrorKind::LocalCorrupt,
                text,
            )));
        }
        self.send()
    }
}
