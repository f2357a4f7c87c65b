-module(rabbitmq_stream_s3_metrics).
-moduledoc """
The one table of the plugin's metrics: name, kind, what it says, and where its numbers come from.

Owns names, labels and sentences; docs/METRICS.md is made from it (`scripts/check-metrics --write`).
Owns no number and reads none: rabbitmq_stream_s3_prometheus_collector does, and puts all numbers of
the node into one map by their inner names, which the native library and the counters use.

Rules, which a test checks: a counter ends in `_total`, nothing else does; units are bytes and
seconds; every inner name is used exactly once, or is in `unpublished/0`.
""".

-export([node/0, durations/0, bounds_seconds/0, stream/0, stream_counters/0, unpublished/0]).

-export_type([source/0, row/0]).

%% An inner name; the same in milliseconds; a label and an inner name for each of its values; or
%% samples with labels that the collector makes.
-type source() ::
    atom()
    | {millis, atom()}
    | {Label :: atom(), [{Value :: atom(), Inner :: atom()}]}
    | {samples, atom()}.
-type row() :: {Name :: atom(), counter | gauge, Help :: string(), source()}.

-doc "Of the node, on `/metrics` and `/metrics/per-object`.".
-spec node() -> [row()].
node() ->
    safe() ++ upload() ++ store() ++ reading() ++ metadata() ++ members() ++ inner().

safe() ->
    [
        {active, gauge, "1 if the plugin works on this node, 0 if it is inert", active},
        {info, gauge, "Always 1; versions and state of the plugin on this node", {samples, info}},
        {protected_streams, gauge,
            "Streams with history in S3 that an inert plugin protects here and does not serve",
            protected_streams},
        {bucket_accessible, gauge, "1 if the bucket answered when last asked, 0 if not or never",
            bucket_accessible},
        {bucket_state, gauge, "1 for what the last check of the bucket found", {samples, bucket_state}},
        {bucket_last_success_timestamp_seconds, gauge,
            "When the check of the bucket last succeeded, 0 if never", {millis, bucket_success_ms}},
        {durability_lag_seconds, gauge,
            "Age of the oldest record of all streams written here that is scanned and not durable in S3",
            {millis, durability_lag_ms}},
        {fragment_max_age_seconds, gauge,
            "Age at which a fragment is uploaded whatever its size: the lag that is expected",
            {millis, fragment_max_age_ms}},
        {unpersisted_records, gauge, "Committed records that are not durable in S3 yet",
            streams_unpersisted_records},
        {unpersisted_bytes, gauge, "Bytes that are scanned and not durable in S3 yet",
            unpersisted_bytes},
        {pipeline_bytes, gauge, "Bytes that are scanned and not durable in S3, by where they are",
            {stage, [
                {assembly, streams_assembly_payload_bytes},
                {transfer, streams_transfer_bytes},
                {persist, streams_persist_bytes}
            ]}},
        {streams_index_bytes, gauge,
            "Memory of the indexes of fragments that are made or wait to be uploaded",
            streams_index_bytes},
        {streams_stalled, gauge, "Streams whose oldest fragment keeps failing to upload",
            streams_stalled},
        {stream_problems_total, counter,
            "Total number of problems reported by streams, once per change", stream_problems},
        {recoveries_total, counter, "Total number of times that the two tiers no longer met",
            {kind, [
                {local_log_ahead, local_log_ahead_recoveries},
                {remote_tier_ahead, remote_tier_ahead_recoveries}
            ]}},
        {lost_records_total, counter,
            "Total number of records that retention deleted before they were uploaded", lost_records},
        {integrity_incidents, gauge,
            "Places in streams that cannot be read now: damaged, gone, or in an archive class",
            {kind, [
                {corrupt, places_corrupt}, {lost, places_lost}, {archived, places_archived}
            ]}},
        {clock_skew_seconds, gauge, "Seconds that this node's clock is ahead of the store's",
            {millis, clock_skew_ms}},
        {clock_in_doubt, gauge,
            "1 while the two clocks do not agree, and nothing is deleted because of its age",
            clock_in_doubt},
        {logs_begun_at_durable_end_total, counter,
            "Total number of empty local logs that began at the end of what is durable",
            logs_begun_at_durable_end}
    ].

upload() ->
    [
        {streams_uploading, gauge, "Streams that are written and uploaded here", streams_open},
        {transfers_in_flight, gauge, "Fragments that are being uploaded", transfers_in_flight},
        {transfers_pending, gauge, "Fragments that wait for their turn to be uploaded",
            transfers_pending},
        {transfers_oversized_total, counter,
            "Total number of fragments larger than the burst of the rate limit", transfers_oversized},
        {fragments_uploaded_total, counter, "Total number of fragments stored", fragments_uploaded},
        {fragments_uploaded_bytes_total, counter, "Total number of bytes of fragments stored",
            fragment_bytes_uploaded},
        {fragment_upload_failures_total, counter, "Total number of fragment uploads that failed",
            fragment_upload_failures},
        {manifest_objects_uploaded_total, counter, "Total number of objects of manifests stored",
            {kind, [{root, roots_uploaded}, {group, groups_uploaded}]}},
        {manifest_object_upload_failures_total, counter,
            "Total number of objects of manifests that could not be stored",
            {kind, [{root, root_upload_failures}, {group, group_upload_failures}]}},
        {log_scans_total, counter, "Total number of scans of local segments", scans},
        {log_scan_chunks_total, counter, "Total number of chunk headers that scans saw",
            chunks_scanned},
        {log_scan_read_bytes_total, counter, "Total number of bytes of local files that scans read",
            scan_read_bytes},
        {replica_reader_starts_total, counter, "Total number of times that an upload started",
            readers_started},
        {local_segments_deleted_total, counter,
            "Total number of local segments deleted because they are durable in S3",
            local_segments_deleted}
    ].

store() ->
    [
        {requests_total, counter, "Total number of requests sent to the store, each attempt",
            {operation, [
                {get, get_requests},
                {get_range, get_range_requests},
                {head, head_requests},
                {put, put_requests},
                {delete, delete_requests},
                {list, list_requests}
            ]}},
        {request_failures_total, counter, "Total number of requests that failed, by why",
            {reason, [
                {not_found, request_errors_not_found},
                {bare_404, request_errors_bare_404},
                {archived, request_errors_archived},
                {precondition, request_errors_precondition},
                {access_denied, request_errors_access_denied},
                {no_such_bucket, request_errors_no_such_bucket},
                {wrong_region, request_errors_wrong_region},
                {checksum, request_errors_checksum},
                {throttled, request_errors_throttled},
                {server, request_errors_server},
                {timeout, request_errors_timeout},
                {connection, request_errors_connection},
                {tls, request_errors_tls},
                {malformed, request_errors_malformed},
                {other, request_errors_other}
            ]}},
        {request_retries_total, counter, "Total number of requests made again", request_retries},
        {requests_in_flight, gauge, "Requests that are being answered", requests_in_flight},
        {control_requests_waiting, gauge,
            "Requests for roots, groups, lists and deletions that wait for their turn",
            control_requests_waiting},
        {received_bytes_total, counter, "Total number of bytes of objects received", received_bytes},
        {sent_bytes_total, counter, "Total number of bytes of objects sent", sent_bytes},
        {objects_deleted_total, counter, "Total number of objects deleted", objects_deleted},
        {deletions_waiting, gauge,
            "Objects of streams written here that nothing names and that are not deleted yet",
            deletions_waiting},
        {object_delete_failures_total, counter,
            "Total number of objects that a deletion could not delete", objects_delete_failed},
        {bucket_checks_total, counter, "Total number of answers to the check of the bucket",
            bucket_checks},
        {stream_deletions_seen_total, counter,
            "Total number of deletions of streams that the metadata store reported",
            stored_procedure_calls},
        {deletions_called_off_total, counter,
            "Total number of streams reported as deleted that the metadata store still has",
            deletions_called_off},
        {streams_deleted_total, counter,
            "Total number of deleted streams whose objects have been removed", streams_deleted},
        {deleted_stream_objects_total, counter,
            "Total number of objects of deleted streams removed", deleted_stream_objects},
        {deleted_stream_object_failures_total, counter,
            "Total number of objects of deleted streams that could not be removed",
            deleted_stream_objects_failed}
    ].

reading() ->
    [
        {remote_readers, gauge, "Readers of the remote tier that are at work", remote_readers},
        {remote_reader_failures_total, counter, "Total number of readers that ended with a failure",
            readers_failed},
        {remote_reader_bad_places_total, counter,
            "Total number of times that a reader came to a place that cannot be read",
            {kind, [{corrupt, readers_corrupt}, {lost, readers_lost}]}},
        {chunks_delivered_total, counter, "Total number of chunks given to consumers",
            {tier, [{remote, chunks_served_remote}]}},
        {reader_tier_switches_total, counter, "Total number of readers that continued in another tier",
            {to, [{local, to_local_transitions}]}},
        {reader_repositions_total, counter,
            "Total number of jumps of readers over offsets that retention removed under them",
            reader_repositions},
        {read_ranges_total, counter, "Total number of ranges of fragments that readers asked for",
            read_ranges},
        {read_range_retries_total, counter, "Total number of requests of readers made again",
            range_retries},
        {read_bytes_total, counter, "Total number of bytes that came back for ranges", read_bytes},
        {read_fetched_bytes_total, counter,
            "Total number of bytes that readers' requests brought from the store",
            read_fetched_bytes},
        {read_delivered_bytes_total, counter, "Total number of bytes of chunks given to consumers",
            read_delivered_bytes},
        {read_cache_requests_total, counter,
            "Total number of blocks that readers wanted, by where they were",
            {result, [
                {memory, read_cache_hits},
                {disk, read_cache_disk_hits},
                {miss, read_cache_misses},
                {joined, read_cache_joins}
            ]}},
        {read_index_requests_total, counter,
            "Total number of fragment indexes and groups that readers wanted",
            {result, [{hit, read_lookup_hits}, {miss, read_lookup_misses}]}},
        {read_cache_bytes, gauge, "Bytes kept in memory for readers", read_cache_bytes},
        {read_cache_disk_bytes, gauge, "Bytes kept on disk for readers", read_cache_disk_bytes},
        {read_cache_disk_limit_bytes, gauge, "The most that is kept on disk, 0 without such a cache",
            read_cache_disk_limit_bytes},
        {read_cache_disk_skipped_total, counter,
            "Total number of blocks not written to disk because it is too slow",
            read_cache_disk_skipped},
        {read_cache_disk_errors_total, counter,
            "Total number of files of blocks that could not be written, or had changed",
            read_cache_disk_errors},
        {read_cache_disk_unusable, gauge, "1 if the disk of the cache does not work and is left alone",
            read_cache_disk_unusable},
        {read_memory_used_bytes, gauge, "Bytes of the memory for reading that are in use",
            read_memory_used_bytes},
        {read_memory_reserved_bytes, gauge,
            "Bytes that readers hold or have on their way for consumers", read_memory_reserved_bytes},
        {read_memory_limit_bytes, gauge, "The most memory that reading may use",
            read_memory_limit_bytes},
        {readers_waiting_for_memory, gauge, "Requests of readers that wait for memory",
            readers_waiting_for_memory},
        {readers_taken_back_total, counter,
            "Total number of times that a resting reader gave back what it had read ahead",
            readers_taken_back},
        {read_refetches_total, counter,
            "Total number of places whose bytes were wrong and were asked for again",
            read_refetches_past_cache},
        {chunk_crc_mismatches_total, counter,
            "Total number of chunks from the store that did not match their checksum",
            chunk_crc_mismatches},
        {fragment_indexes_unusable_total, counter,
            "Total number of fragment indexes that could not be used", fragment_indexes_unusable},
        {drains_deferred_total, counter,
            "Total number of drains of AMQP 1.0 receivers that waited for the store",
            drains_deferred},
        {drains_given_up_total, counter,
            "Total number of AMQP 1.0 receivers detached because the store did not answer in time",
            drains_given_up}
    ].

metadata() ->
    [
        {metadata_reads_total, counter, "Total number of reads of pointers to manifests",
            pointer_reads},
        {metadata_reads_queued_total, counter,
            "Total number of questions to a quorum of the metadata store that waited for their turn",
            metadata_reads_queued},
        {metadata_write_attempts_total, counter,
            "Total number of attempts to move a pointer to a manifest", pointer_writes},
        {metadata_writes_total, counter, "Total number of moves of pointers, by their outcome",
            {result, [
                {ok, pointer_writes_ok},
                {conflict, pointer_writes_conflict},
                {not_found, pointer_writes_not_found},
                {error, pointer_writes_error}
            ]}},
        {manifests_pending, gauge,
            "Streams with a member here whose manifest is not known, or not confirmed",
            manifests_pending},
        {manifests_resolved_total, counter,
            "Total number of manifests of streams written elsewhere that were found by their pointer",
            manifests_resolved},
        {manifest_syncs_total, counter,
            "Total number of roots of streams written elsewhere that were fetched", manifest_syncs},
        {manifests_stale_total, counter,
            "Total number of manifests that were fetched when a newer one was known already",
            manifests_stale},
        {manifest_resolve_failures_total, counter,
            "Total number of fetches of a manifest that ended without one",
            manifest_resolve_failures},
        {manifest_proofs_failed_total, counter,
            "Total number of failed attempts to determine, for a consumer, which manifest is current",
            manifest_proofs_failed},
        {manifest_notifications_total, counter,
            "Total number of persists on other nodes, by whether a message announced them",
            {result, [{received, pointer_moves_received}, {missed, pointer_moves_missed}]}},
        {manifest_edits_sent_total, counter,
            "Total number of edits of manifests sent to nodes with a replica", manifest_edits_sent},
        {manifest_edits_received_total, counter,
            "Total number of edits of manifests that came from other nodes, by their outcome",
            {result, [
                {applied, manifest_edits_applied},
                {unfitting, manifest_edits_unfitting},
                {corrupt, manifest_edits_corrupt}
            ]}}
    ].

members() ->
    [
        {membership_rounds_total, counter, "Total number of rounds of membership reconciliation",
            membership_rounds},
        {membership_changes_total, counter, "Total number of changes of members of streams",
            {change, [
                {replicas_added, membership_replicas_added},
                {replicas_removed, membership_replicas_removed},
                {refused, membership_changes_refused}
            ]}},
        {replica_lag_streams, gauge, "Streams with local segments that stay for a replica that lags",
            replica_lag_streams},
        {replica_lag_segments, gauge, "Local segments that stay for replicas that lag",
            replica_lag_segments},
        {replica_lag_bytes, gauge, "Bytes of local segments that stay for replicas that lag",
            replica_lag_bytes},
        {replica_lag_given_up_total, counter,
            "Total number of local segments trimmed although a connected replica had not copied them",
            replica_lag_given_up}
    ].

inner() ->
    [
        {upload_tasks_lost_total, counter,
            "Total number of upload tasks that died without an answer: a bug", tasks_lost},
        {native_panics_total, counter, "Total number of panics of the native library: a bug",
            native_panics},
        {log_lines_dropped_total, counter,
            "Total number of log lines dropped because too many waited", log_lines_dropped},
        {lent_chunks, gauge, "Chunks of native memory that Erlang holds, garbage included",
            lent_chunks},
        {lent_bytes, gauge, "Bytes of these chunks", lent_bytes},
        {native_memory_bytes, gauge, "Memory that the native library has allocated",
            native_memory_bytes}
    ].

-doc "Histograms of the node: name, what it says, and the operation of each series.".
-spec durations() -> [{atom(), string(), [{Labels :: [{atom(), atom()}], atom()}]}].
durations() ->
    [
        {request_duration_seconds, "How long requests to the store took, each attempt", [
            {[{operation, Operation}], Operation}
         || Operation <- [get, get_range, head, put, delete, list]
        ]},
        {request_first_byte_seconds, "How long readers' requests took to their first byte", [
            {[{operation, get_range}], first_byte}
        ]}
    ].

-doc "Upper bounds of the buckets; those of `native/tiering-runtime/src/durations.rs`.".
-spec bounds_seconds() -> [number()].
bounds_seconds() ->
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30].

-doc """
Of each stream that is written here: name, what it says, inner name in its status, and inner name of
the sum that `/metrics` has instead, if a sum means something. Labels are `vhost` and `queue`.
""".
-spec stream() -> [{atom(), string(), atom(), Sum :: atom()}].
stream() ->
    [
        {stream_next_offset, "Offset after the last committed record", log_next_offset, none},
        {stream_remote_first_offset, "First offset in S3", manifest_first_offset, none},
        {stream_remote_next_offset, "Offset after the last uploaded record, durable or not",
            manifest_next_offset, none},
        {stream_durable_next_offset, "Offset below which the stream is durable in S3",
            persisted_next_offset, none},
        {stream_remote_bytes, "Bytes in S3", manifest_total_size, streams_manifest_total_size},
        {stream_remote_fragments, "Entries of the manifest's root: fragments, and groups of them",
            manifest_fragments, streams_manifest_fragments},
        {stream_transfers_in_flight, "Fragments that are being uploaded", transfers_in_flight,
            streams_transfers_in_flight},
        {stream_transfers_waiting, "Fragments that are cut and wait", transfers_waiting,
            streams_transfers_waiting},
        {stream_edits_since_persist, "Uploaded fragments that no persisted manifest names yet",
            edits_since_persist, streams_edits_since_persist},
        {stream_unpersisted_bytes, "Bytes that are scanned and not durable in S3",
            unpersisted_bytes, unpersisted_bytes},
        {stream_durability_lag_seconds,
            "Age of the oldest record that is scanned and not durable in S3",
            durability_lag_seconds, none},
        {stream_stalled, "1 if the oldest fragment keeps failing to upload", stalled, none},
        {stream_stalled_offset, "Offset of that fragment; absent if there is none", stalled_offset,
            none}
    ].

-doc "Counters of each stream, by their inner names.".
-spec stream_counters() -> [{atom(), string(), atom()}].
stream_counters() ->
    [
        {stream_transfers_completed_total, "Total number of fragments stored", transfers_completed},
        {stream_transfer_retries_total, "Total number of uploads of fragments made again",
            transfer_retries},
        {stream_stalled_retries_total,
            "Total number of these for a reason that does not pass by itself", stalled_retries},
        {stream_uploaded_bytes_total, "Total number of bytes of fragments stored",
            bytes_transferred},
        {stream_persists_total, "Total number of manifests persisted", persists_completed},
        {stream_persist_failures_total, "Total number of persists that failed", persists_failed},
        {stream_persist_conflicts_total,
            "Total number of persists that another writer was ahead of", persist_conflicts},
        {stream_local_log_ahead_recoveries_total,
            "Total number of times that retention was ahead of the upload",
            local_log_ahead_recoveries},
        {stream_remote_tier_ahead_recoveries_total,
            "Total number of times that the local log had lost what was uploaded",
            remote_tier_ahead_recoveries},
        {stream_fragments_deleted_total, "Total number of fragments given to deletion",
            fragments_deleted},
        {stream_chunks_scanned_total, "Total number of chunk headers taken from the local log",
            chunks_scanned},
        {stream_resolution_failures_total,
            "Total number of tries to determine what is persisted that failed", resolution_failures},
        {stream_roots_created_total, "Total number of roots stored, committed or not",
            roots_created},
        {stream_room_cuts_total,
            "Total number of fragments cut early, because all streams hold as many index bytes as they may",
            room_cuts},
        {stream_age_cuts_total, "Total number of fragments cut because of their age", age_cuts},
        {stream_anchors_written_total, "Total number of anchors made durable", anchors_written},
        {stream_duplicates_ignored_total,
            "Total number of results of uploads that had one already", duplicates_ignored},
        {stream_groups_created_total, "Total number of groups of fragments stored", groups_created},
        {stream_kilo_groups_created_total, "Total number of groups of groups stored",
            kilo_groups_created},
        {stream_mega_groups_created_total, "Total number of groups of kilo-groups stored",
            mega_groups_created},
        {stream_groups_deleted_total, "Total number of groups given to deletion", groups_deleted},
        {stream_group_failures_total,
            "Total number of tries to store or read a group that failed", group_failures},
        {stream_histories_abandoned_total,
            "Total number of times that history was given up because it was proven unreadable",
            histories_abandoned}
    ].

-doc "Inner names that are no metric of their own: sums of others, or under another name above.".
-spec unpublished() -> [atom()].
unpublished() ->
    [request_errors | [Sum || {_, _, _, Sum} <- stream(), Sum =/= none]] -- [unpersisted_bytes].
