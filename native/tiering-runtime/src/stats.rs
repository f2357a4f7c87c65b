//! Node-wide counters and gauges of the native side, one row each.
//!
//! Owns the numbers and their names. Does not own their export: the NIF hands over one snapshot, Erlang names and publishes it.

use std::sync::atomic::{AtomicI64, Ordering};

use crate::durations::RequestDurations;
use crate::pending::Pending;
use crate::remote_tier::{StoreError, StoreErrorKind};

/// One counter or gauge.
#[derive(Debug, Default)]
pub struct Stat(AtomicI64);

impl Stat {
    /// Adds.
    pub fn add(&self, amount: u64) {
        self.0
            .fetch_add(i64::try_from(amount).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    /// Adds one.
    pub fn increment(&self) {
        self.add(1);
    }

    /// Takes away (gauges only).
    pub fn subtract(&self, amount: u64) {
        self.0
            .fetch_sub(i64::try_from(amount).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    /// Sets (gauges only).
    pub fn set(&self, value: u64) {
        self.0
            .store(i64::try_from(value).unwrap_or(i64::MAX), Ordering::Relaxed);
    }

    /// Sets what may be negative (gauges only).
    pub fn set_signed(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Reads.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds one now and takes it away when the guard is dropped, however that comes about.
    pub fn hold(&self) -> StatGuard<'_> {
        self.increment();
        StatGuard(self)
    }
}

/// Keeps a gauge up by one.
#[derive(Debug)]
pub struct StatGuard<'a>(&'a Stat);

impl Drop for StatGuard<'_> {
    fn drop(&mut self) {
        self.0.subtract(1);
    }
}

macro_rules! stats {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// Every counter and gauge of one engine.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: Stat,)+
            /// How long requests take.
            pub request_durations: RequestDurations,
            /// Since when the streams have records that are not durable.
            pub pending: Pending,
        }

        impl Stats {
            /// Name and value of every row.
            #[must_use]
            pub fn snapshot(&self) -> Vec<(&'static str, i64)> {
                vec![$((stringify!($name), self.$name.get()),)+]
            }
        }
    };
}

stats! {
    /// GETs of whole objects sent (each attempt counts, here and below).
    get_requests,
    /// Ranged GETs sent.
    get_range_requests,
    /// HEADs sent.
    head_requests,
    /// PUTs sent.
    put_requests,
    /// DeleteObjects sent.
    delete_requests,
    /// LISTs sent.
    list_requests,
    /// Requests that are being answered (gauge).
    requests_in_flight,
    /// Requests for roots, groups, lists and deletions that wait for their turn (gauge).
    control_requests_waiting,
    /// Object bytes received.
    received_bytes,
    /// Object bytes of PUTs that succeeded.
    sent_bytes,
    /// Objects deleted.
    objects_deleted,
    /// Objects of open streams that wait for their deletion (gauge).
    deletions_waiting,
    /// Objects that a DeleteObjects could not delete.
    objects_delete_failed,
    /// Requests tried again by the retrying wrapper.
    request_retries,
    /// Requests that failed, of any kind; the rows below say which.
    request_errors,
    /// The object is not there.
    request_errors_not_found,
    /// 404s without the code of a store: nobody's word that an object is gone.
    request_errors_bare_404,
    /// Objects that an archive class keeps from being read.
    request_errors_archived,
    /// A condition did not hold.
    request_errors_precondition,
    /// Refused credentials or rights (403).
    request_errors_access_denied,
    /// The bucket is not there.
    request_errors_no_such_bucket,
    /// Wrong region.
    request_errors_wrong_region,
    /// The store refused the bytes because of their checksum.
    request_errors_checksum,
    /// The store asked to slow down (429, 503 SlowDown).
    request_errors_throttled,
    /// The store failed (5xx).
    request_errors_server,
    /// No answer in time.
    request_errors_timeout,
    /// The connection could not be made or broke.
    request_errors_connection,
    /// TLS handshakes that failed.
    request_errors_tls,
    /// Answers that are not what the protocol says.
    request_errors_malformed,
    /// Anything else.
    request_errors_other,

    /// Milliseconds that this node's clock is ahead of the store's, 0 until an answer has said the time (gauge).
    clock_skew_ms,
    /// 1 while the two do not agree, and nothing is deleted because of its age (gauge).
    clock_in_doubt,

    /// Fragment transfers that were admitted and are running (gauge).
    transfers_in_flight,
    /// Fragment transfers that wait for admission (gauge).
    transfers_pending,
    /// Fragment transfers that were larger than the rate limit's burst and were admitted on credit.
    transfers_oversized,
    /// Fragments stored.
    fragments_uploaded,
    /// Bytes of fragments stored.
    fragment_bytes_uploaded,
    /// Fragment transfers that failed.
    fragment_upload_failures,
    /// Manifest roots stored.
    roots_uploaded,
    /// Manifest roots that could not be stored.
    root_upload_failures,
    /// Groups of manifest entries stored, of any height.
    groups_uploaded,
    /// Groups that could not be stored.
    group_upload_failures,
    /// Upload tasks that died without an answer (a bug; the upload is tried again).
    tasks_lost,
    /// Lines of the native log that were dropped because too many waited.
    log_lines_dropped,

    /// Manifests of streams written elsewhere that were resolved by their pointer and published here.
    manifests_resolved,
    /// Fetches of a root of a stream that is written elsewhere: no edit led to it.
    manifest_syncs,
    /// Manifests that were fetched or asked for too late: a newer one was known.
    manifests_stale,
    /// Fetches of a manifest that ended without one.
    manifest_resolve_failures,

    /// Header scans of local segments.
    scans,
    /// Chunk headers that scans saw.
    chunks_scanned,
    /// Bytes of local files that scans read.
    scan_read_bytes,

    /// Streams that are being tiered (gauge).
    streams_open,
    /// Bytes in the remote tier, of all of these streams together, as all that follow (gauge).
    streams_manifest_total_size,
    /// Entries of their manifests (gauge).
    streams_manifest_fragments,
    /// Transfers that were sent out and not answered yet (gauge).
    streams_transfers_in_flight,
    /// Transfers that wait for whatever it is (gauge).
    streams_transfers_waiting,
    /// Edits that no persist has started on (gauge).
    streams_edits_since_persist,
    /// Bytes of fragments in the making (gauge).
    streams_assembly_payload_bytes,
    /// Streams whose oldest fragment does not get through (gauge).
    streams_stalled,
    /// Memory of the indexes of fragments that are made or wait to be sent, of all streams (gauge).
    streams_index_bytes,
    /// Committed records that are not durable yet (gauge).
    streams_unpersisted_records,
    /// Chunk bytes of fragments that are cut and not stored yet (gauge).
    streams_transfer_bytes,
    /// Chunk bytes of stored fragments that no persisted manifest has yet (gauge).
    streams_persist_bytes,

    /// Readers of the remote tier that are at work (gauge).
    remote_readers,
    /// Ranges of fragments asked for by readers.
    read_ranges,
    /// Bytes that came back for them.
    read_bytes,
    /// Bytes of fragments, indexes and groups that readers' requests brought from the store.
    read_fetched_bytes,
    /// Bytes of chunks handed to consumers' queues. Beside `read_fetched_bytes` it says what sharing saves.
    read_delivered_bytes,
    /// Blocks of fragments that were in memory when a reader wanted them.
    read_cache_hits,
    /// Blocks that were read from this node's disk.
    read_cache_disk_hits,
    /// Blocks that had to be asked for.
    read_cache_misses,
    /// Blocks, indexes and groups that were on their way for somebody else already.
    read_cache_joins,
    /// Fragment indexes and groups that were in memory when a reader wanted them.
    read_lookup_hits,
    /// Fragment indexes and groups that had to be asked for.
    read_lookup_misses,
    /// Bytes of blocks, indexes and groups kept in memory (gauge).
    read_cache_bytes,
    /// Bytes of blocks kept on disk (gauge).
    read_cache_disk_bytes,
    /// Blocks that were not written to disk because it could not keep up.
    read_cache_disk_skipped,
    /// Files of blocks that could not be written, or were not what had been written.
    read_cache_disk_errors,
    /// The disk of blocks does not answer or cannot be written, and is left alone until the engine is opened again: 0 or 1 (gauge).
    read_cache_disk_unusable,
    /// Bytes of the node's read memory that are in use: on their way, held by readers, handed to the host and not let go of, or
    /// kept by the cache until somebody needs them (gauge).
    read_memory_used_bytes,
    /// Bytes that readers hold or have on their way for consumers that have not taken them (gauge).
    read_memory_reserved_bytes,
    /// Requests of readers that wait for memory (gauge).
    readers_waiting_for_memory,
    /// Times that a reader had to give back what its consumer had not taken, because others needed the memory.
    readers_taken_back,
    /// Places whose bytes were wrong and were asked for again past the cache.
    read_refetches_past_cache,
    /// Readers that ended because bytes stayed wrong when they were asked for again. An incident.
    readers_corrupt,
    /// Readers that ended because the store does not have what the manifest that they knew names.
    readers_lost,
    /// Places in streams that cannot be read because their bytes are damaged (gauge).
    places_corrupt,
    /// Places in streams that cannot be read because their object is gone (gauge).
    places_lost,
    /// Places in streams that cannot be read because their object is archived (gauge).
    places_archived,
    /// Chunks read from the remote tier and handed to a consumer's queue.
    chunks_served_remote,
    /// Chunks from the remote tier whose data did not match their CRC (each is fetched again once).
    chunk_crc_mismatches,
    /// Requests of readers made again.
    range_retries,
    /// Jumps of readers over offsets that retention removed under them.
    reader_repositions,
    /// Fragment indexes that could not be used (the fragment was then read from its start).
    fragment_indexes_unusable,
    /// Readers that ended with a failure.
    readers_failed,
    /// Readers that reached the end of the manifest and went on in the local log.
    to_local_transitions,
}

impl Stats {
    /// Counts a failed request by kind.
    pub fn count_error(&self, error: &StoreError) {
        self.request_errors.increment();
        let row = match error.kind() {
            StoreErrorKind::NotFound => &self.request_errors_not_found,
            StoreErrorKind::Bare404 => &self.request_errors_bare_404,
            StoreErrorKind::Archived => &self.request_errors_archived,
            StoreErrorKind::Precondition => &self.request_errors_precondition,
            StoreErrorKind::AccessDenied => &self.request_errors_access_denied,
            StoreErrorKind::NoSuchBucket => &self.request_errors_no_such_bucket,
            StoreErrorKind::WrongRegion => &self.request_errors_wrong_region,
            StoreErrorKind::Checksum => &self.request_errors_checksum,
            StoreErrorKind::Throttled => &self.request_errors_throttled,
            StoreErrorKind::Server => &self.request_errors_server,
            StoreErrorKind::Timeout => &self.request_errors_timeout,
            StoreErrorKind::Connection => &self.request_errors_connection,
            StoreErrorKind::Tls => &self.request_errors_tls,
            StoreErrorKind::Malformed => &self.request_errors_malformed,
            StoreErrorKind::InvalidRange
            | StoreErrorKind::TooLarge
            | StoreErrorKind::BodyRefused
            | StoreErrorKind::LocalRead
            | StoreErrorKind::LocalGone
            | StoreErrorKind::LocalCorrupt
            | StoreErrorKind::Unexpected(_) => &self.request_errors_other,
        };
        row.increment();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_comes_down_with_its_guard() {
        let stats = Stats::default();
        {
            let _held = stats.transfers_in_flight.hold();
            assert_eq!(stats.transfers_in_flight.get(), 1);
        }
        assert_eq!(stats.transfers_in_flight.get(), 0);
    }

    #[test]
    fn every_error_has_a_row() {
        let stats = Stats::default();
        stats.count_error(&StoreError::new(StoreErrorKind::Unexpected(418), "teapot"));
        stats.count_error(&StoreError::new(StoreErrorKind::AccessDenied, "no"));
        let rows: std::collections::HashMap<_, _> = stats.snapshot().into_iter().collect();
        assert_eq!(rows.get("request_errors"), Some(&2));
        assert_eq!(rows.get("request_errors_other"), Some(&1));
        assert_eq!(rows.get("request_errors_access_denied"), Some(&1));
    }
}
