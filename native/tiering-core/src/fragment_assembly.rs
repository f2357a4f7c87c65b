//! From committed chunks to fragments: adds up what the header scan saw until somebody cuts.
//!
//! Owns: the arithmetic of one fragment in the making (range, sizes, spans, index, checksum). Does not own: when to cut, and
//! the bytes themselves, which are read only when the fragment is sent.
//!
//! The checksum of the whole object is known before any of it is read: it follows from the CRCs in the chunk headers. A bit
//! that flips between the publisher's node and the bucket therefore makes the store refuse the upload.

use log_format::chunk::ChunkHeader;
use log_format::chunk::HEADER_BYTES as CHUNK_HEADER_BYTES;
use log_format::crc;
use log_format::fragment::{FragmentIndexRecord, HEADER, HEADER_BYTES, MAX_SIZE_BYTES};

/// One committed chunk as the header scan saw it, in log order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScannedChunk {
    /// Decoded 48-byte header.
    pub header: ChunkHeader,
    /// First offset (name) of the segment file that holds the chunk.
    pub segment_offset: u64,
    /// Byte position of the chunk's header in that file.
    pub position: u64,
    /// CRC-32 of header bytes and filter bytes (what the header's own CRC leaves out, in front).
    pub lead_crc: u32,
    /// CRC-32 of the trailer bytes (0 if there is no trailer).
    pub trailer_crc: u32,
}

/// A byte range of one segment file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First offset (name) of the segment file.
    pub segment_offset: u64,
    /// Position of the first byte.
    pub start: u64,
    /// Position after the last byte.
    pub end: u64,
}

/// A fragment that has been cut: everything needed to send it, except its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FragmentPlan {
    /// Id of its first chunk.
    pub first_offset: u64,
    /// Offset after its last record.
    pub next_offset: u64,
    /// Timestamp of its first chunk.
    pub first_timestamp_ms: i64,
    /// Timestamp of its last chunk.
    pub last_timestamp_ms: i64,
    /// Chunk bytes: headers, filters, data and trailers.
    pub size_bytes: u64,
    /// Data bytes alone; what the size target counts.
    pub payload_bytes: u64,
    /// How many chunks.
    pub chunk_count: u32,
    /// Where the chunk bytes are, in order.
    pub spans: Vec<Span>,
    /// The encoded index: one 20-byte record per chunk.
    pub index: Vec<u8>,
    /// CRC-32 of all chunk bytes.
    pub chunks_crc: u32,
}

impl FragmentPlan {
    /// Length of the object: header, chunks, index.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        HEADER_BYTES as u64 + self.size_bytes + self.index.len() as u64
    }

    /// CRC-32 of the whole object.
    #[must_use]
    pub fn object_crc(&self) -> u32 {
        let lead = crc::combine(crc::crc32(&HEADER), self.chunks_crc, self.size_bytes);
        crc::combine(lead, crc::crc32(&self.index), self.index.len() as u64)
    }
}

/// Why a chunk cannot be added. The chunk is not skipped: whoever scanned must look again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// It does not start where the last one ended.
    #[error("chunk {found} follows where chunk {expected} should")]
    NotContiguous {
        /// Offset after the last chunk.
        expected: u64,
        /// Id of the chunk.
        found: u64,
    },
    /// It has no records, or its end does not fit 64 bits: a damaged header.
    #[error("chunk {0} has an impossible number of records or an impossible place")]
    Impossible(u64),
    /// The fragment is full: cut before adding it.
    #[error("chunk {0} does not fit the fragment")]
    Full(u64),
}

/// The fragment in the making.
#[derive(Debug, Clone, Default)]
pub struct FragmentAssembly {
    plan: Option<FragmentPlan>,
}

impl FragmentAssembly {
    /// Nothing assembled yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is no chunk in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.plan.is_none()
    }

    /// Id of its first chunk.
    #[must_use]
    pub fn first_offset(&self) -> Option<u64> {
        self.plan.as_ref().map(|plan| plan.first_offset)
    }

    /// Timestamp of its first chunk.
    #[must_use]
    pub fn first_timestamp_ms(&self) -> Option<i64> {
        self.plan.as_ref().map(|plan| plan.first_timestamp_ms)
    }

    /// Offset after its last chunk.
    #[must_use]
    pub fn next_offset(&self) -> Option<u64> {
        self.plan.as_ref().map(|plan| plan.next_offset)
    }

    /// Data bytes so far.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.plan.as_ref().map_or(0, |plan| plan.payload_bytes)
    }

    /// Chunk bytes so far.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.plan.as_ref().map_or(0, |plan| plan.size_bytes)
    }

    /// Chunks so far.
    #[must_use]
    pub fn chunk_count(&self) -> u32 {
        self.plan.as_ref().map_or(0, |plan| plan.chunk_count)
    }

    /// Bytes of the index so far, which is kept in memory.
    #[must_use]
    pub fn index_bytes(&self) -> usize {
        self.plan.as_ref().map_or(0, |plan| plan.index.len())
    }

    /// Whether the chunk's place can be told in the 32 bits of an index record. An empty fragment takes any chunk.
    #[must_use]
    pub fn fits(&self, chunk: &ScannedChunk) -> bool {
        match &self.plan {
            None => true,
            Some(plan) => {
                plan.size_bytes.saturating_add(chunk.header.total_bytes()) <= MAX_SIZE_BYTES
                    && plan.chunk_count < u32::MAX
            }
        }
    }

    /// Adds the next chunk of the log.
    pub fn add(&mut self, chunk: &ScannedChunk) -> Result<(), AddError> {
        let header = &chunk.header;
        let impossible = AddError::Impossible(header.chunk_id);
        let next_offset = header.next_offset().ok_or(impossible)?;
        let bytes = header.total_bytes();
        let end = chunk.position.checked_add(bytes).ok_or(impossible)?;
        if next_offset == header.chunk_id {
            return Err(impossible);
        }
        if !self.fits(chunk) {
            return Err(AddError::Full(header.chunk_id));
        }
        let plan = match &mut self.plan {
            Some(plan) if plan.next_offset != header.chunk_id => {
                let (expected, found) = (plan.next_offset, header.chunk_id);
                return Err(AddError::NotContiguous { expected, found });
            }
            Some(plan) => plan,
            None => self.plan.insert(FragmentPlan {
                first_offset: header.chunk_id,
                next_offset: header.chunk_id,
                first_timestamp_ms: header.timestamp_ms,
                last_timestamp_ms: header.timestamp_ms,
                size_bytes: 0,
                payload_bytes: 0,
                chunk_count: 0,
                spans: Vec::new(),
                index: Vec::new(),
                chunks_crc: 0,
            }),
        };
        let record = FragmentIndexRecord {
            offset: header.chunk_id,
            timestamp_ms: header.timestamp_ms,
            // `fits` has just seen that it does; the first chunk is at 0.
            position: u32::try_from(plan.size_bytes).map_err(|_| impossible)?,
        };
        plan.index.extend_from_slice(&record.encode());
        match plan.spans.last_mut() {
            Some(span)
                if span.segment_offset == chunk.segment_offset && span.end == chunk.position =>
            {
                span.end = end;
            }
            _ => plan.spans.push(Span {
                segment_offset: chunk.segment_offset,
                start: chunk.position,
                end,
            }),
        }
        plan.chunks_crc = append_crc(plan.chunks_crc, chunk);
        plan.next_offset = next_offset;
        plan.last_timestamp_ms = header.timestamp_ms;
        plan.size_bytes += bytes;
        plan.payload_bytes += u64::from(header.data_bytes);
        plan.chunk_count += 1;
        Ok(())
    }

    /// Cuts: gives the fragment away and starts over. `None` if there is no chunk in it.
    pub fn cut(&mut self) -> Option<FragmentPlan> {
        self.plan.take()
    }
}

/// CRC-32 of what `crc` covers, followed by the chunk.
fn append_crc(crc: u32, chunk: &ScannedChunk) -> u32 {
    let header = &chunk.header;
    let lead_bytes = CHUNK_HEADER_BYTES as u64 + u64::from(header.filter_bytes);
    let crc = crc::combine(crc, chunk.lead_crc, lead_bytes);
    let crc = crc::combine(crc, header.data_crc, u64::from(header.data_bytes));
    match header.trailer_bytes {
        0 => crc,
        bytes => crc::combine(crc, chunk.trailer_crc, u64::from(bytes)),
    }
}

#[cfg(test)]
mod tests;
