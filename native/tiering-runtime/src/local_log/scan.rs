//! The header scan: what committed chunks there are from a given offset on.
//!
//! Owns speed (few, large reads where chunks are small; headers only where they are large) and the checks that every chunk is
//! where the one before it ends. Does not own what is done with the chunks.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use log_format::chunk::{ChunkHeader, HEADER_BYTES, MAX_FILTER_BYTES};
use log_format::crc;
use tiering_core::upload::{ScanBatch, ScanEnd, ScannedChunk, Witness};

use super::locate::{Cursor, Opened, open_at};
use super::read_at_most;
use crate::buffer_pool::{BufferPool, PooledBuffer};
use crate::stats::Stats;

/// Above this mean size of chunks only their headers are read: copying the data would cost more than a system call each.
const SMALL_CHUNK_BYTES: u64 = 4096;

/// What to scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRequest {
    /// Id of the first chunk wanted.
    pub from_offset: u64,
    /// Timestamp that the chunk in front of it must have, if there is one; `None`: not looked at.
    pub front_timestamp_ms: Option<i64>,
    /// A chunk that the remote tier has: looked for only where the log does not meet it.
    pub witness: Option<Witness>,
    /// Highest committed chunk id; nothing above it is looked at.
    pub up_to_chunk_id: u64,
    /// At most this many chunks.
    pub max_chunks: usize,
    /// Stop after this many chunk bytes.
    pub max_bytes: u64,
}

/// Scans one stream's log; goes on where the last batch ended, with the file still open.
#[derive(Debug)]
pub struct Scanner {
    directory: PathBuf,
    pool: Arc<BufferPool>,
    stats: Arc<Stats>,
    cursor: Option<Cursor>,
    mean_chunk_bytes: u64,
}

impl Scanner {
    /// A scanner of the log in this directory; opens nothing yet.
    #[must_use]
    pub fn new(directory: PathBuf, pool: Arc<BufferPool>, stats: Arc<Stats>) -> Self {
        Self {
            directory,
            pool,
            stats,
            cursor: None,
            mean_chunk_bytes: 0,
        }
    }

    /// The next batch. Blocks on files, so it belongs on a thread that may block.
    pub fn scan(&mut self, request: &ScanRequest) -> ScanBatch {
        self.stats.scans.increment();
        let mut chunks = Vec::new();
        let mut window = Window {
            buffer: self.pool.take(),
            start: 0,
            filled: 0,
            read_bytes: 0,
        };
        let end = self.scan_into(request, &mut window, &mut chunks);
        self.stats.chunks_scanned.add(chunks.len() as u64);
        self.stats.scan_read_bytes.add(window.read_bytes);
        // Whatever went wrong, the next scan starts from the file names again.
        ScanBatch {
            chunks,
            end: end.unwrap_or_else(|reason| ScanEnd::Failed { reason }),
        }
    }

    fn scan_into(
        &mut self,
        request: &ScanRequest,
        window: &mut Window,
        chunks: &mut Vec<ScannedChunk>,
    ) -> Result<ScanEnd, String> {
        let mut cursor = match self.cursor.take() {
            Some(cursor)
                if cursor.next_offset == request.from_offset
                    && request.front_timestamp_ms.is_none() =>
            {
                cursor
            }
            _ => {
                let ScanRequest {
                    from_offset,
                    front_timestamp_ms,
                    witness,
                    ..
                } = *request;
                match open_at(&self.directory, from_offset, front_timestamp_ms, witness)? {
                    Opened::At(cursor) => cursor,
                    Opened::End(end) => return Ok(end),
                }
            }
        };
        let mut bytes = 0u64;
        let mut looked_again = false;
        loop {
            if cursor.next_offset > request.up_to_chunk_id {
                self.cursor = Some(cursor);
                return Ok(ScanEnd::CaughtUp);
            }
            if chunks.len() >= request.max_chunks || bytes >= request.max_bytes {
                self.cursor = Some(cursor);
                return Ok(ScanEnd::More);
            }
            if cursor.is_at_end()? {
                let next_offset = cursor.next_offset;
                let rolled = (next_offset != cursor.segment_offset)
                    .then(|| Cursor::open(&self.directory, next_offset))
                    .transpose()?
                    .flatten();
                cursor = match rolled {
                    Some(next) => next,
                    None if looked_again => {
                        return Err(cursor
                            .explain(&format!("committed chunk {next_offset} is not in the log")));
                    }
                    // The file may be one that retention has removed since.
                    None => match open_at(&self.directory, next_offset, None, None)? {
                        Opened::At(cursor) => {
                            looked_again = true;
                            cursor
                        }
                        Opened::End(end) => return Ok(end),
                    },
                };
                window.clear();
                continue;
            }
            let chunk = self.read_chunk(&mut cursor, window)?;
            bytes = bytes.saturating_add(chunk.header.total_bytes());
            chunks.push(chunk);
            looked_again = false;
        }
    }

    fn read_chunk(
        &mut self,
        cursor: &mut Cursor,
        window: &mut Window,
    ) -> Result<ScannedChunk, String> {
        let ahead = if self.mean_chunk_bytes <= SMALL_CHUNK_BYTES {
            usize::MAX
        } else {
            HEADER_BYTES + MAX_FILTER_BYTES
        };
        let failed =
            |cursor: &Cursor, error: &dyn std::fmt::Display| cursor.explain(&error.to_string());
        let lead = window
            .bytes_at(&cursor.file, cursor.position, HEADER_BYTES, ahead)
            .map_err(|error| failed(cursor, &error))?;
        let header = ChunkHeader::decode(lead).map_err(|error| failed(cursor, &error))?;
        let expected = cursor.next_offset;
        let next_offset = header.next_offset().filter(|next| *next > header.chunk_id);
        let (Some(next_offset), true) = (next_offset, header.chunk_id == expected) else {
            let text = format!(
                "chunk {} of {} records where {expected} should be",
                header.chunk_id, header.num_records
            );
            return Err(cursor.explain(&text));
        };
        let total_bytes = header.total_bytes();
        let end = cursor.position.saturating_add(total_bytes);
        if !cursor.reaches(end)? {
            return Err(cursor.explain(&format!("committed chunk {expected} is cut off")));
        }
        let lead_bytes = header.lead_bytes();
        let lead = window
            .bytes_at(&cursor.file, cursor.position, lead_bytes, ahead)
            .map_err(|error| failed(cursor, &error))?;
        let lead_crc = crc::crc32(lead.get(..lead_bytes).unwrap_or(lead));
        let trailer_start = end - u64::from(header.trailer_bytes);
        let trailer_crc = window
            .crc_of(&cursor.file, trailer_start, u64::from(header.trailer_bytes))
            .map_err(|error| failed(cursor, &error))?;
        let chunk = ScannedChunk {
            header,
            segment_offset: cursor.segment_offset,
            position: cursor.position,
            lead_crc,
            trailer_crc,
        };
        self.mean_chunk_bytes = (self.mean_chunk_bytes * 7 + total_bytes) / 8;
        cursor.position = end;
        cursor.next_offset = next_offset;
        Ok(chunk)
    }
}

/// The part of the file that is in memory.
struct Window {
    buffer: PooledBuffer,
    start: u64,
    filled: usize,
    read_bytes: u64,
}

impl Window {
    fn clear(&mut self) {
        self.filled = 0;
    }

    fn held(&self, position: u64, need: usize) -> Option<&[u8]> {
        let from = usize::try_from(position.checked_sub(self.start)?).ok()?;
        self.buffer
            .get(from..self.filled)
            .filter(|bytes| bytes.len() >= need)
    }

    /// At least `need` bytes from `position` on; reads up to `ahead` of them if they are not here.
    fn bytes_at(
        &mut self,
        file: &File,
        position: u64,
        need: usize,
        ahead: usize,
    ) -> std::io::Result<&[u8]> {
        if self.held(position, need).is_none() {
            let want = need.max(ahead).min(self.buffer.len());
            self.filled = 0;
            let target = self.buffer.get_mut(..want).unwrap_or_default();
            self.filled = read_at_most(file, target, position)?;
            self.start = position;
            self.read_bytes += self.filled as u64;
        }
        self.held(position, need)
            .ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
    }

    /// CRC-32 of `len` bytes from `position` on, however many they are.
    fn crc_of(&mut self, file: &File, mut position: u64, mut len: u64) -> std::io::Result<u32> {
        let mut sum = 0;
        while len > 0 {
            let need = usize::try_from(len)
                .unwrap_or(usize::MAX)
                .min(self.buffer.len());
            let bytes = self.bytes_at(file, position, need, need)?;
            let bytes = bytes.get(..need).unwrap_or(bytes);
            sum = crc::combine(sum, crc::crc32(bytes), bytes.len() as u64);
            position += need as u64;
            len -= need as u64;
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests;
