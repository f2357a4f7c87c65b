//! The reference: what was acknowledged, byte for byte, and which part of it each node still has on its disk.

use std::collections::VecDeque;

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::crc::crc32;
use log_format::segment;
use tiering_core::upload::{ScanBatch, ScanEnd, ScannedChunk, Witness};

use crate::rng::Rng;

/// One acknowledged chunk.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// Its header.
    pub header: ChunkHeader,
    /// Where its bytes start in the log's.
    pub start: usize,
    /// CRC-32 of header and filter.
    pub lead_crc: u32,
    /// CRC-32 of the trailer.
    pub trailer_crc: u32,
    /// When it was written, whatever its timestamp says.
    pub written_ms: i64,
}

/// All that was ever acknowledged (and not lost by all nodes at once).
#[derive(Debug, Default)]
pub struct Log {
    bytes: Vec<u8>,
    chunks: Vec<Chunk>,
    /// How often the log lost its end: bytes of another timeline are not compared with this one's.
    pub timeline: u64,
}

impl Log {
    /// Chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Whether nothing was ever acknowledged.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Offset after the last record.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.id(self.len())
    }

    /// A chunk.
    #[must_use]
    pub fn chunk(&self, index: usize) -> Option<&Chunk> {
        self.chunks.get(index)
    }

    /// Id of the chunk, or of the one that is to come.
    #[must_use]
    pub fn id(&self, index: usize) -> u64 {
        match (self.chunks.get(index), self.chunks.last()) {
            (Some(chunk), _) => chunk.header.chunk_id,
            (None, Some(last)) => last.header.chunk_id + u64::from(last.header.num_records),
            (None, None) => 0,
        }
    }

    /// Number of the chunk that holds the offset; past the end, of the one to come.
    #[must_use]
    pub fn holding(&self, offset: u64) -> usize {
        if offset >= self.next_offset() {
            return self.len();
        }
        self.chunks
            .partition_point(|chunk| chunk.header.chunk_id <= offset)
            .saturating_sub(1)
    }

    /// First chunk at least as new.
    #[must_use]
    pub fn at_time(&self, timestamp_ms: i64) -> usize {
        self.chunks
            .partition_point(|chunk| chunk.header.timestamp_ms < timestamp_ms)
    }

    /// Where the chunk's bytes start; past the end, where they will.
    #[must_use]
    pub fn start(&self, index: usize) -> usize {
        self.chunks
            .get(index)
            .map_or(self.bytes.len(), |chunk| chunk.start)
    }

    /// Bytes of the chunks from one to before another.
    #[must_use]
    pub fn bytes(&self, from: usize, to: usize) -> &[u8] {
        self.bytes
            .get(self.start(from)..self.start(to))
            .unwrap_or_default()
    }

    /// A new chunk at the end.
    pub fn append(&mut self, rng: &mut Rng, epoch: u64, timestamp_ms: i64, written_ms: i64) {
        let word = rng.next();
        let data_bytes = rng.range(4, if word.is_multiple_of(16) { 700 } else { 90 });
        let filter_bytes = if word & 64 == 0 {
            (word >> 8) as u8 % 17
        } else {
            0
        };
        let trailer_bytes = if word & 128 == 0 {
            (word >> 16) as u32 % 40
        } else {
            0
        };
        let mut fill = |length: usize| {
            let mut bytes = Vec::with_capacity(length + 8);
            while bytes.len() < length {
                bytes.extend(rng.next().to_le_bytes());
            }
            bytes.truncate(length);
            bytes
        };
        let (filter, data, trailer) = (
            fill(usize::from(filter_bytes)),
            fill(data_bytes as usize),
            fill(trailer_bytes as usize),
        );
        let num_records = 1 + (word >> 24) as u32 % 6;
        let header = ChunkHeader {
            chunk_type: if word.is_multiple_of(31) {
                ChunkType::TrackingDelta
            } else {
                ChunkType::User
            },
            num_entries: num_records as u16,
            num_records,
            timestamp_ms,
            epoch,
            chunk_id: self.next_offset(),
            data_crc: crc32(&data),
            data_bytes: data_bytes as u32,
            trailer_bytes,
            filter_bytes,
        };
        let start = self.bytes.len();
        self.bytes.extend(header.encode());
        self.bytes.extend(&filter);
        let lead_crc = crc32(self.bytes.get(start..).unwrap_or_default());
        self.bytes.extend(&data);
        self.bytes.extend(&trailer);
        self.chunks.push(Chunk {
            header,
            start,
            lead_crc,
            trailer_crc: crc32(&trailer),
            written_ms,
        });
    }

    /// What an empty log begins with: a chunk of tracking that says nothing.
    pub fn begin(&mut self, epoch: u64, timestamp_ms: i64) {
        let data = [0u8; 4];
        let header = ChunkHeader {
            chunk_type: ChunkType::TrackingSnapshot,
            num_entries: 1,
            num_records: 1,
            timestamp_ms,
            epoch,
            chunk_id: self.next_offset(),
            data_crc: crc32(&data),
            data_bytes: 4,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        let (start, encoded) = (self.bytes.len(), header.encode());
        self.bytes.extend(encoded);
        self.bytes.extend(data);
        self.chunks.push(Chunk {
            header,
            start,
            lead_crc: crc32(&encoded),
            trailer_crc: crc32(&[]),
            written_ms: timestamp_ms,
        });
    }

    /// All nodes lost everything from this chunk on.
    pub fn lose_from(&mut self, index: usize) {
        self.bytes.truncate(self.start(index));
        self.chunks.truncate(index);
        self.timeline += 1;
    }
}

/// What a scan compares the log with, where it does not go on from the scan before.
#[derive(Debug, Clone, Copy)]
pub struct Seam {
    /// Timestamp of the chunk in front of the place.
    pub front_timestamp_ms: Option<i64>,
    /// A chunk of the remote tier.
    pub witness: Option<Witness>,
}

/// The part of a log that is on one node's disk, in segments.
#[derive(Debug, Clone)]
pub struct NodeLog {
    /// Number of the first chunk of each segment.
    segments: VecDeque<usize>,
    /// Chunks before this number are here, unless trimmed.
    pub end: usize,
    /// Length at which a segment is closed.
    segment_bytes: usize,
}

impl NodeLog {
    /// An empty log.
    #[must_use]
    pub fn new(segment_bytes: usize) -> Self {
        Self {
            segments: VecDeque::from([0]),
            end: 0,
            segment_bytes,
        }
    }

    /// Number of the first chunk here.
    #[must_use]
    pub fn first(&self) -> usize {
        self.segments.front().copied().unwrap_or(0)
    }

    /// Whether there is no chunk here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first() >= self.end
    }

    /// First offset here, `None` if there is none.
    #[must_use]
    pub fn first_offset(&self, log: &Log) -> Option<u64> {
        (!self.is_empty()).then(|| log.id(self.first()))
    }

    /// Takes over what others have.
    pub fn replicate(&mut self, log: &Log, up_to: usize) {
        while self.end < up_to.min(log.len()) {
            let active = self.segments.back().copied().unwrap_or(0);
            if log.start(self.end) - log.start(active) >= self.segment_bytes {
                self.segments.push_back(self.end);
            }
            self.end += 1;
        }
    }

    /// Loses what the log lost.
    pub fn lose_from(&mut self, index: usize) {
        self.end = self.end.min(index);
        while self.segments.len() > 1 && self.segments.back().is_some_and(|first| *first > self.end)
        {
            self.segments.pop_back();
        }
        if let Some(first) = self.segments.front_mut() {
            *first = (*first).min(self.end);
        }
    }

    /// The whole disk is lost and the log copied again from where the others start: a new replica.
    pub fn start_over(&mut self, from: usize) {
        self.segments = VecDeque::from([from]);
        self.end = from;
    }

    /// What the remote tier has may go: whole segments below `next_offset`, never the active one. Returns whether any went.
    pub fn trim_durable(&mut self, log: &Log, next_offset: u64) -> bool {
        let before = self.segments.len();
        while let Some(second) = self.segments.get(1)
            && *second < self.end
            && log.id(*second) <= next_offset
        {
            self.segments.pop_front();
        }
        self.segments.len() < before
    }

    /// The user's bound: oldest segments go until the rest fits, never the active one. Returns whether any went.
    pub fn trim_user(
        &mut self,
        log: &Log,
        max_bytes: Option<u64>,
        older_than_ms: Option<i64>,
    ) -> bool {
        let before = self.segments.len();
        while let Some(second) = self.segments.get(1).copied()
            && second < self.end
        {
            let bytes = (log.start(self.end) - log.start(self.first())) as u64;
            let last_ms = log
                .chunk(second - 1)
                .map_or(0, |chunk| chunk.header.timestamp_ms);
            let over = max_bytes.is_some_and(|max| bytes > max)
                || older_than_ms.is_some_and(|cutoff| last_ms < cutoff);
            if !over {
                break;
            }
            self.segments.pop_front();
        }
        self.segments.len() < before
    }

    /// Bytes of a segment file, `None` if it is not there (any more).
    #[must_use]
    pub fn segment_range<'a>(
        &self,
        log: &'a Log,
        segment_offset: u64,
        start: u64,
        end: u64,
    ) -> Option<&'a [u8]> {
        let place = self
            .segments
            .iter()
            .position(|first| log.id(*first) == segment_offset)?;
        let first = *self.segments.get(place)?;
        let past = self.segments.get(place + 1).copied().unwrap_or(self.end);
        let bytes = log.bytes(first, past);
        let at = |position: u64| {
            usize::try_from(position.checked_sub(segment::HEADER_BYTES as u64)?).ok()
        };
        bytes.get(at(start)?..at(end)?)
    }

    /// What the driver's header scan answers.
    #[must_use]
    pub fn scan(
        &self,
        log: &Log,
        from_offset: u64,
        Seam {
            front_timestamp_ms,
            witness,
        }: Seam,
        up_to_chunk_id: u64,
        max_chunks: usize,
        max_bytes: u64,
    ) -> ScanBatch {
        let ended = |end| ScanBatch {
            chunks: Vec::new(),
            end,
        };
        let Some(local_first_offset) = self.first_offset(log) else {
            return ended(ScanEnd::Empty);
        };
        let local_next_offset = log.id(self.end);
        if from_offset < local_first_offset {
            return ended(ScanEnd::LocalAhead { local_first_offset });
        }
        let unrelated = witness
            .filter(|witness| local_first_offset <= witness.chunk_id)
            .zip(log.chunk(self.first()))
            .is_some_and(|(witness, first)| !witness.is_related_to(&first.header));
        if unrelated && from_offset > local_next_offset {
            return ended(ScanEnd::Unrelated { local_first_offset });
        }
        if from_offset > local_next_offset {
            return ended(ScanEnd::RemoteAhead {
                local_first_offset,
                local_next_offset,
            });
        }
        let mut index = if from_offset == local_next_offset {
            self.end
        } else {
            log.holding(from_offset)
        };
        let in_front = index
            .checked_sub(1)
            .filter(|front| *front >= self.first())
            .and_then(|front| log.chunk(front));
        let differs = in_front
            .zip(front_timestamp_ms)
            .is_some_and(|(chunk, expected)| chunk.header.timestamp_ms != expected);
        if log.id(index) != from_offset || differs {
            if unrelated {
                return ended(ScanEnd::Unrelated { local_first_offset });
            }
            return ended(ScanEnd::Diverged { local_first_offset });
        }
        let (mut chunks, mut bytes) = (Vec::new(), 0);
        loop {
            if log.id(index) > up_to_chunk_id
                || index >= self.end && chunks.is_empty() && from_offset > up_to_chunk_id
            {
                return ScanBatch {
                    chunks,
                    end: ScanEnd::CaughtUp,
                };
            }
            if chunks.len() >= max_chunks || bytes >= max_bytes {
                return ScanBatch {
                    chunks,
                    end: ScanEnd::More,
                };
            }
            let Some(chunk) = log.chunk(index).filter(|_| index < self.end) else {
                let reason = "a committed chunk is not in the log".to_owned();
                return ScanBatch {
                    chunks,
                    end: ScanEnd::Failed { reason },
                };
            };
            let place = self
                .segments
                .partition_point(|first| *first <= index)
                .saturating_sub(1);
            let first = self.segments.get(place).copied().unwrap_or(0);
            bytes += chunk.header.total_bytes();
            chunks.push(ScannedChunk {
                header: chunk.header,
                segment_offset: log.id(first),
                position: (segment::HEADER_BYTES + chunk.start - log.start(first)) as u64,
                lead_crc: chunk.lead_crc,
                trailer_crc: chunk.trailer_crc,
            });
            index += 1;
        }
    }
}
