-module(rabbitmq_stream_s3_counters).
-moduledoc """
What the shell itself counts on this node, one row a counter. Everything about uploads, reads and S3
is counted in native code and comes with `engine_stats`.

Counting never fails: before `init/0` and after `delete/0` it does nothing.
""".

-export([init/0, delete/0, add/1, add/2, overview/0, fields/0]).

-define(TERM, {?MODULE, node}).

-define(FIELDS, [
    {pointer_reads, 1, counter, "Reads of a stream's manifest pointer in the metadata store"},
    {pointer_writes, 2, counter, "Attempts to move a stream's manifest pointer"},
    {pointer_writes_ok, 3, counter, "Manifest pointers moved"},
    {pointer_writes_conflict, 4, counter, "Pointer moves refused because another writer was first"},
    {pointer_writes_not_found, 5, counter, "Pointer moves refused because the queue was gone"},
    {pointer_writes_error, 6, counter, "Pointer moves that failed or timed out"},
    {stored_procedure_calls, 7, counter, "Stream deletions reported by the metadata store"},
    {streams_deleted, 8, counter, "Deleted streams whose objects have been removed"},
    {deleted_stream_objects, 9, counter, "Objects of deleted streams removed"},
    {deleted_stream_objects_failed, 10, counter,
        "Objects of deleted streams that could not be removed"},
    {local_log_ahead_recoveries, 11, counter,
        "Uploads resumed behind a gap because local data went before it was uploaded"},
    {remote_tier_ahead_recoveries, 12, counter,
        "Uploads restarted because the remote tier was of another timeline"},
    {readers_started, 13, counter, "Replica readers started"},
    {stream_problems, 14, counter, "Problems reported by streams, once per change"},
    {bucket_checks, 15, counter, "Answers to the periodic check of the bucket"},
    {pointer_moves_received, 16, counter, "Persisted manifests that writers on other nodes told of"},
    {pointer_moves_missed, 17, counter, "Persisted manifests found by looking, not told"},
    {membership_rounds, 18, counter, "Rounds of membership reconciliation"},
    {membership_replicas_added, 19, counter, "Replicas of streams added by it"},
    {membership_replicas_removed, 20, counter, "Replicas on nodes that are gone removed by it"},
    {membership_changes_refused, 21, counter, "Changes of members that RabbitMQ refused for now"},
    {manifest_edits_sent, 22, counter, "Edits of manifests sent to nodes with a replica"},
    {manifest_edits_applied, 23, counter, "Edits of manifests that led to the next one here"},
    {manifest_edits_unfitting, 24, counter,
        "Edits that did not follow what was known here: the manifest is fetched"},
    {manifest_edits_corrupt, 25, counter,
        "Edits refused for what was in them: the manifest is fetched"},
    {drains_deferred, 26, counter,
        "Drains of AMQP 1.0 receivers that waited for records from the remote tier"},
    {drains_given_up, 27, counter,
        "AMQP 1.0 receivers detached because the remote tier did not answer their drain in time"},
    {logs_begun_at_durable_end, 28, counter,
        "Empty local logs of writers that began at the end of what is durable"},
    {metadata_reads_queued, 29, counter,
        "Questions to a quorum of the metadata store that waited for their turn"},
    {deletions_called_off, 30, counter,
        "Streams reported as deleted that a quorum of the metadata store still has"},
    {replica_lag_given_up, 31, counter,
        "Local segments trimmed although a connected replica had not copied them"},
    {lost_records, 32, counter, "Records that retention deleted before they were uploaded"},
    {manifest_proofs_failed, 33, counter,
        "Attempts to determine which manifest is current that failed, while a consumer waited"}
]).

-type name() :: atom().

-spec init() -> ok.
init() ->
    _ = seshat:new_group(rabbitmq_stream_s3),
    Counters = seshat:new(rabbitmq_stream_s3, node, ?FIELDS),
    persistent_term:put(?TERM, Counters).

-spec delete() -> ok.
delete() ->
    _ = persistent_term:erase(?TERM),
    seshat:delete_group(rabbitmq_stream_s3).

-spec add(name()) -> ok.
add(Name) ->
    add(Name, 1).

-spec add(name(), non_neg_integer()) -> ok.
add(Name, Amount) ->
    case persistent_term:get(?TERM, undefined) of
        undefined ->
            ok;
        Counters ->
            {Name, Index, _Type, _Help} = lists:keyfind(Name, 1, ?FIELDS),
            counters:add(Counters, Index, Amount)
    end.

-spec overview() -> #{name() => integer()}.
overview() ->
    case persistent_term:get(?TERM, undefined) of
        undefined -> #{};
        Counters -> #{Name => counters:get(Counters, Index) || {Name, Index, _, _} <- ?FIELDS}
    end.

-spec fields() -> [{name(), pos_integer(), counter | gauge, string()}].
fields() ->
    ?FIELDS.
