//! What a read machine is configured with, and what it counts.

/// Limits of one reader. All of them are upper bounds that the machine asserts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Longest range asked for in one request; with blocks the last one of a fragment may be a quarter longer.
    pub read_request_bytes: u64,
    /// Most bytes held and on their way, unless a single chunk needs more.
    pub read_ahead_bytes: u64,
    /// Length of the first request, and of what a reader fetches ahead at least.
    pub first_request_bytes: u64,
    /// Ranges end where a multiple of this is in the object, so that those of different readers coincide; 1 = anywhere.
    pub block_bytes: u64,
    /// Most requests at once; how many there are is searched for by the rate that they bring.
    pub max_depth: usize,
    /// Most chunks cut and not yet consumed: bounds what tiny chunks cost beside their bytes.
    pub max_ready_chunks: usize,
    /// Whether the CRC of each chunk's data is checked.
    pub verify_crc: bool,
    /// First wait after a fault; doubles with each further one.
    pub backoff_min_ms: u64,
    /// Longest wait after a fault.
    pub backoff_max_ms: u64,
    /// A consumer that waits this long without any progress of the store gets `unavailable`.
    pub stall_deadline_ms: u64,
    /// How long to wait for a manifest that is not known.
    pub manifest_deadline_ms: u64,
    /// How often an object that the manifest names may be missing before it counts as lost.
    pub max_missing_attempts: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            read_request_bytes: 4 << 20,
            read_ahead_bytes: 128 << 20,
            first_request_bytes: 512 << 10,
            block_bytes: 1,
            max_depth: 32,
            max_ready_chunks: 512,
            verify_crc: true,
            backoff_min_ms: 100,
            backoff_max_ms: 5_000,
            stall_deadline_ms: 60_000,
            manifest_deadline_ms: 30_000,
            max_missing_attempts: 10,
        }
    }
}

impl Settings {
    /// The same settings with every combination that could not make progress put right.
    #[must_use]
    pub fn sanitized(mut self) -> Self {
        // A request must at least be able to carry a chunk header.
        self.read_request_bytes = self.read_request_bytes.clamp(64, 1 << 30);
        self.first_request_bytes = self.first_request_bytes.clamp(64, self.read_request_bytes);
        self.read_ahead_bytes = self
            .read_ahead_bytes
            .clamp(self.first_request_bytes, 1 << 40);
        self.block_bytes = self.block_bytes.clamp(1, self.first_request_bytes);
        self.max_depth = self.max_depth.clamp(1, 64);
        self.max_ready_chunks = self.max_ready_chunks.clamp(1, 1 << 20);
        self.backoff_min_ms = self.backoff_min_ms.max(1);
        self.backoff_max_ms = self.backoff_max_ms.max(self.backoff_min_ms);
        self
    }
}

/// What one machine has done so far; only grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Range requests made.
    pub read_ranges: u64,
    /// Bytes that came back for them.
    pub read_bytes: u64,
    /// Chunks handed over.
    pub chunks_served: u64,
    /// Chunks whose data did not match their CRC.
    pub chunk_crc_mismatches: u64,
    /// Places whose bytes were wrong, also those of a chunk's header, and were asked for again past the cache.
    pub refetches_past_cache: u64,
    /// Readers that ended because the bytes stayed wrong; at most one each.
    pub corrupt_ends: u64,
    /// Readers that ended because the store does not have what the manifest names; at most one each.
    pub lost_ends: u64,
    /// Requests made again, for whatever reason.
    pub range_retries: u64,
    /// Jumps over offsets that retention removed under the reader.
    pub repositions: u64,
    /// Fragment indexes that could not be used; the fragment was then read from its start.
    pub indexes_unusable: u64,
}

impl Counters {
    /// What was counted since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            read_ranges: self.read_ranges.saturating_sub(earlier.read_ranges),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            chunks_served: self.chunks_served.saturating_sub(earlier.chunks_served),
            chunk_crc_mismatches: self
                .chunk_crc_mismatches
                .saturating_sub(earlier.chunk_crc_mismatches),
            refetches_past_cache: self
                .refetches_past_cache
                .saturating_sub(earlier.refetches_past_cache),
            corrupt_ends: self.corrupt_ends.saturating_sub(earlier.corrupt_ends),
            lost_ends: self.lost_ends.saturating_sub(earlier.lost_ends),
            range_retries: self.range_retries.saturating_sub(earlier.range_retries),
            repositions: self.repositions.saturating_sub(earlier.repositions),
            indexes_unusable: self
                .indexes_unusable
                .saturating_sub(earlier.indexes_unusable),
        }
    }
}
