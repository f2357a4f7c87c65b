-module(rabbitmq_stream_s3_prometheus_collector).
-moduledoc """
Metrics `rabbitmq_stream_s3_*` for the registries that rabbitmq_prometheus serves, where it runs
(rabbitmq_stream_s3_prometheus sees to that):

    /metrics             counters and gauges of the node, sums over its streams
    /metrics/per-object  the same, and every stream with labels vhost and queue
    /metrics/detailed    streams only, with ?family=stream_s3_metrics, honouring its filters

Owns names and labels, no number. Node-wide counters are counted natively per node, so they stay
monotonic when a stream goes; sums over streams are kept natively, so `/metrics` costs the same for any
number of streams. Nothing here asks a process, so a scrape cannot hang on one.
""".

-behaviour(prometheus_collector).

-include_lib("rabbit_common/include/rabbit.hrl").

-export([register/0, deregister/0]).
-export([collect_mf/2, deregister_cleanup/1]).
-export([native_gauges/0]).

-define(REGISTRIES, [default, 'per-object', detailed]).
-define(PREFIX, "rabbitmq_stream_s3_").

%% {Key in stream_status, kind, key of its sum in the native statistics, help}
-define(STREAM_METRICS, [
    {log_next_offset, gauge, none, "Offset after the last committed record of the local log"},
    {manifest_first_offset, gauge, none, "First offset in the remote tier"},
    {manifest_next_offset, gauge, none, "Offset after the last uploaded record, persisted or not"},
    {persisted_next_offset, gauge, none, "Offset below which the stream is durable remotely"},
    {manifest_total_size, gauge, streams_manifest_total_size, "Bytes in the remote tier"},
    {manifest_fragments, gauge, streams_manifest_fragments, "Fragments in the remote tier"},
    {transfers_in_flight, gauge, streams_transfers_in_flight, "Fragments being uploaded"},
    {transfers_waiting, gauge, streams_transfers_waiting,
        "Fragments cut and waiting to be uploaded"},
    {edits_since_persist, gauge, streams_edits_since_persist,
        "Uploaded fragments that no persisted manifest names yet"},
    {assembly_payload_bytes, gauge, streams_assembly_payload_bytes,
        "Bytes in the fragment that is being assembled"},
    {stalled_offset, gauge, none, "Offset of the fragment whose upload keeps failing, 0 if none"}
]).

-spec register() -> ok.
register() ->
    lists:foreach(
        fun(Registry) -> prometheus_registry:register_collector(Registry, ?MODULE) end,
        ?REGISTRIES
    ).

-spec deregister() -> ok.
deregister() ->
    lists:foreach(
        fun(Registry) -> prometheus_registry:deregister_collector(Registry, ?MODULE) end,
        ?REGISTRIES
    ).

-spec deregister_cleanup(prometheus_registry:registry()) -> ok.
deregister_cleanup(_Registry) ->
    ok.

-spec collect_mf(prometheus_registry:registry(), prometheus_collector:collect_mf_callback()) -> ok.
collect_mf(detailed, Callback) ->
    case wants(get(prometheus_mf_filter)) of
        true ->
            Streams = [S || S <- streams(), passes(S)],
            each_stream("rabbitmq_detailed_stream_s3_", Streams, Callback);
        false ->
            ok
    end;
collect_mf('per-object', Callback) ->
    node_metrics(Callback),
    each_stream(?PREFIX, streams(), Callback);
collect_mf(_Default, Callback) ->
    node_metrics(Callback),
    case application:get_env(rabbitmq_prometheus, return_per_object_metrics, false) of
        true -> each_stream(?PREFIX, streams(), Callback);
        false -> all_streams(Callback)
    end.

node_metrics(Callback) ->
    Mode =
        case rabbitmq_stream_s3:mode() of
            active -> 1;
            _ -> 0
        end,
    ok = emit(Callback, ?PREFIX, active, gauge, "1 if the plugin works on this node", [{[], Mode}]),
    Protected =
        case rabbitmq_stream_s3_manifest_protection:overview() of
            {_, Streams} -> Streams;
            off -> 0
        end,
    ProtectedHelp = "Streams with history in S3 that the plugin protects here and does not serve",
    ok = emit(Callback, ?PREFIX, protected_streams, gauge, ProtectedHelp, [{[], Protected}]),
    Access =
        case rabbitmq_stream_s3_api_aws:bucket_status() of
            {inaccessible, _, _} -> 0;
            _UnknownOrAccessible -> 1
        end,
    AccessHelp = "0 if the bucket was not accessible when last asked",
    ok = emit(Callback, ?PREFIX, bucket_accessible, gauge, AccessHelp, [{[], Access}]),
    Pending = rabbitmq_stream_s3_manifest_cache:pending(),
    PendingHelp = "Streams with a member here whose manifest is not known, or not confirmed",
    ok = emit(Callback, ?PREFIX, manifests_pending, gauge, PendingHelp, [{[], Pending}]),
    Alarm =
        case rabbitmq_stream_s3_status:read_alarm() of
            none -> 0;
            _Incident -> 1
        end,
    AlarmHelp = "1 while there is remote data that is lost, damaged or archived and readers want",
    ok = emit(Callback, ?PREFIX, read_alarm, gauge, AlarmHelp, [{[], Alarm}]),
    Counted = rabbitmq_stream_s3_counters:overview(),
    lists:foreach(
        fun({Name, _Index, Kind, Help}) ->
            emit(Callback, ?PREFIX, Name, Kind, Help, [{[], maps:get(Name, Counted, 0)}])
        end,
        rabbitmq_stream_s3_counters:fields()
    ),
    #{local_segments_deleted := Trimmed} = rabbitmq_stream_s3_host_retention:stats(),
    TrimHelp = "Local segments deleted because they are durable remotely",
    ok = emit(Callback, ?PREFIX, local_segments_deleted, counter, TrimHelp, [{[], Trimmed}]),
    Lag = rabbitmq_stream_s3_replica_lag:overview(),
    lists:foreach(
        fun({Name, Help}) ->
            emit(Callback, ?PREFIX, Name, gauge, Help, [{[], maps:get(Name, Lag)}])
        end,
        [
            {replica_lag_streams, "Streams with local segments that stay for a replica that lags"},
            {replica_lag_segments, "Local segments that stay for replicas that lag"},
            {replica_lag_bytes, "Bytes of local segments that stay for replicas that lag"}
        ]
    ),
    maps:foreach(
        fun(Name, Value) ->
            emit(Callback, ?PREFIX, Name, kind(Name), help(Name), [{[], Value}])
        end,
        maps:without(sums(), rabbitmq_stream_s3_api_aws:stats())
    ).

all_streams(Callback) ->
    Stats = rabbitmq_stream_s3_api_aws:stats(),
    lists:foreach(
        fun({Key, Kind, Sum, Help}) ->
            Value = maps:get(Sum, Stats, 0),
            emit(Callback, ?PREFIX ++ "stream_", Key, Kind, Help, [{[], Value}])
        end,
        [Metric || {_, _, Sum, _} = Metric <- ?STREAM_METRICS, Sum =/= none]
    ),
    Help = "Streams whose oldest fragment keeps failing to upload",
    Stalled = maps:get(streams_stalled, Stats, 0),
    emit(Callback, ?PREFIX, streams_stalled, gauge, Help, [{[], Stalled}]),
    Unpersisted = maps:get(streams_unpersisted_records, Stats, 0),
    Text = "Committed records that are not durable in the remote tier yet",
    emit(Callback, ?PREFIX, unpersisted_records, gauge, Text, [{[], Unpersisted}]).

%% Of the native statistics, what is shown under the names of streams' metrics.
sums() ->
    [streams_stalled, streams_unpersisted_records] ++
        [Sum || {_, _, Sum, _} <- ?STREAM_METRICS, Sum =/= none].

each_stream(_Prefix, [], _Callback) ->
    ok;
each_stream(Prefix, Streams, Callback) ->
    lists:foreach(
        fun({Key, Kind, _SumKey, Help}) ->
            Values = [{Labels, maps:get(Key, Status, 0)} || {Labels, Status} <- Streams],
            emit(Callback, Prefix ++ "stream_", Key, Kind, Help, Values)
        end,
        ?STREAM_METRICS
    ),
    [{_, First} | _] = Counted = [
        {Labels, maps:get(counters, Status, #{})}
     || {Labels, Status} <- Streams
    ],
    lists:foreach(
        fun(Name) ->
            Values = [{Labels, maps:get(Name, Counters, 0)} || {Labels, Counters} <- Counted],
            emit(Callback, Prefix ++ "stream_", Name, kind(Name), help(Name), Values)
        end,
        maps:keys(First)
    ).

streams() ->
    [
        {labels(StreamId, Reference), Status}
     || {StreamId, Reference, Status} <- rabbitmq_stream_s3_replica_reader:statuses()
    ].

labels(_StreamId, #resource{virtual_host = VHost, name = Queue}) ->
    [{vhost, VHost}, {queue, Queue}];
labels(StreamId, _NotOfRabbit) ->
    [{vhost, <<>>}, {queue, StreamId}].

%% The filters of rabbitmq_prometheus are in the dictionary of the process that serves the request.
wants(undefined) -> false;
wants(Families) -> lists:member(stream_s3_metrics, Families).

passes({Labels, _Status}) ->
    case get(prometheus_vhost_filter) of
        undefined -> true;
        VHosts -> lists:member(proplists:get_value(vhost, Labels), VHosts)
    end.

%% The native side gives numbers by name; these go up and down, all others only up.
kind(Name) ->
    case lists:member(Name, native_gauges()) of
        true -> gauge;
        false -> counter
    end.

-doc false.
-spec native_gauges() -> [atom()].
native_gauges() ->
    [
        places_corrupt,
        places_lost,
        places_archived,
        requests_in_flight,
        clock_skew_ms,
        clock_in_doubt,
        control_requests_waiting,
        deletions_waiting,
        transfers_in_flight,
        transfers_pending,
        streams_open,
        streams_manifest_total_size,
        streams_manifest_fragments,
        streams_transfers_in_flight,
        streams_transfers_waiting,
        streams_edits_since_persist,
        streams_assembly_payload_bytes,
        streams_stalled,
        streams_unpersisted_records,
        remote_readers,
        read_cache_bytes,
        read_cache_disk_bytes,
        read_cache_disk_unusable,
        read_memory_used_bytes,
        read_memory_reserved_bytes,
        readers_waiting_for_memory,
        lent_chunks,
        lent_bytes,
        native_memory_bytes
    ].

help(Name) ->
    string:replace(atom_to_list(Name), "_", " ", all).

emit(Callback, Prefix, Name, Kind, Help, Values) ->
    FullName = iolist_to_binary([Prefix, atom_to_binary(Name)]),
    _ = Callback(
        prometheus_model_helpers:create_mf(FullName, iolist_to_binary(Help), Kind, Values)
    ),
    ok.
