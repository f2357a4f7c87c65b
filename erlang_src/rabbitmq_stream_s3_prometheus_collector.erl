-module(rabbitmq_stream_s3_prometheus_collector).
-moduledoc """
Metrics `rabbitmq_stream_s3_*` for the registries that rabbitmq_prometheus serves:

    /metrics             counters and gauges of the node, sums over its streams
    /metrics/per-object  the same, and every stream with labels vhost and queue
    /metrics/detailed    streams only, with ?family=stream_s3_metrics, honouring its filters

Owns names and labels, no number. Node-wide counters are counted natively per node, so they stay
monotonic when a stream goes. Nothing here asks a process, so a scrape cannot hang on one.
""".

-behaviour(prometheus_collector).

-include_lib("rabbit_common/include/rabbit.hrl").

-export([register/0, deregister/0]).
-export([collect_mf/2, deregister_cleanup/1]).
-export([native_gauges/0]).

-define(REGISTRIES, [default, 'per-object', detailed]).
-define(PREFIX, "rabbitmq_stream_s3_").

%% {Key in stream_status, kind, is a sum over streams of use, help}
-define(STREAM_METRICS, [
    {log_next_offset, gauge, false, "Offset after the last committed record of the local log"},
    {manifest_first_offset, gauge, false, "First offset in the remote tier"},
    {manifest_next_offset, gauge, false, "Offset after the last uploaded record, persisted or not"},
    {persisted_next_offset, gauge, false, "Offset below which the stream is durable remotely"},
    {manifest_total_size, gauge, true, "Bytes in the remote tier"},
    {manifest_fragments, gauge, true, "Fragments in the remote tier"},
    {transfers_in_flight, gauge, true, "Fragments being uploaded"},
    {transfers_waiting, gauge, true, "Fragments cut and waiting to be uploaded"},
    {edits_since_persist, gauge, true, "Uploaded fragments that no persisted manifest names yet"},
    {assembly_payload_bytes, gauge, true, "Bytes in the fragment that is being assembled"},
    {stalled_offset, gauge, false, "Offset of the fragment whose upload keeps failing, 0 if none"}
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
        false -> all_streams(streams(), Callback)
    end.

node_metrics(Callback) ->
    Mode =
        case rabbitmq_stream_s3:mode() of
            active -> 1;
            _ -> 0
        end,
    ok = emit(Callback, ?PREFIX, active, gauge, "1 if the plugin works on this node", [{[], Mode}]),
    Access =
        case rabbitmq_stream_s3_api_aws:bucket_status() of
            {inaccessible, _, _} -> 0;
            _UnknownOrAccessible -> 1
        end,
    AccessHelp = "0 if the bucket was not accessible when last asked",
    ok = emit(Callback, ?PREFIX, bucket_accessible, gauge, AccessHelp, [{[], Access}]),
    Pending = rabbitmq_stream_s3_manifest_replica:pending(),
    PendingHelp = "Streams with a member here whose manifest is not known, or not confirmed",
    ok = emit(Callback, ?PREFIX, manifests_pending, gauge, PendingHelp, [{[], Pending}]),
    Alarm =
        case rabbitmq_stream_s3_status:read_alarm() of
            none -> 0;
            _Incident -> 1
        end,
    AlarmHelp = "1 if a reader has met remote data that is lost or stays damaged, until a restart",
    ok = emit(Callback, ?PREFIX, read_alarm, gauge, AlarmHelp, [{[], Alarm}]),
    Counted = rabbitmq_stream_s3_counters:overview(),
    lists:foreach(
        fun({Name, _Index, Kind, Help}) ->
            emit(Callback, ?PREFIX, Name, Kind, Help, [{[], maps:get(Name, Counted, 0)}])
        end,
        rabbitmq_stream_s3_counters:fields()
    ),
    #{local_segments_deleted := Trimmed} = rabbitmq_stream_s3_local_retention:stats(),
    TrimHelp = "Local segments deleted because they are durable remotely",
    ok = emit(Callback, ?PREFIX, local_segments_deleted, counter, TrimHelp, [{[], Trimmed}]),
    maps:foreach(
        fun(Name, Value) ->
            emit(Callback, ?PREFIX, Name, kind(Name), help(Name), [{[], Value}])
        end,
        rabbitmq_stream_s3_api_aws:stats()
    ).

all_streams(Streams, Callback) ->
    lists:foreach(
        fun({Key, Kind, _Sum, Help}) ->
            Sum = lists:sum([maps:get(Key, Status, 0) || {_Labels, Status} <- Streams]),
            emit(Callback, ?PREFIX ++ "stream_", Key, Kind, Help, [{[], Sum}])
        end,
        [Metric || {_, _, true, _} = Metric <- ?STREAM_METRICS]
    ),
    Stalled = length([stalled || {_, #{stalled_offset := Offset}} <- Streams, Offset > 0]),
    Help = "Streams whose oldest fragment keeps failing to upload",
    emit(Callback, ?PREFIX, streams_stalled, gauge, Help, [{[], Stalled}]),
    Unpersisted = lists:sum([unpersisted(Status) || {_, Status} <- Streams]),
    Text = "Committed records that are not durable in the remote tier yet",
    emit(Callback, ?PREFIX, unpersisted_records, gauge, Text, [{[], Unpersisted}]).

each_stream(_Prefix, [], _Callback) ->
    ok;
each_stream(Prefix, Streams, Callback) ->
    lists:foreach(
        fun({Key, Kind, _Sum, Help}) ->
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

unpersisted(#{log_next_offset := Next, persisted_next_offset := Persisted}) ->
    max(0, Next - Persisted);
unpersisted(_NotYet) ->
    0.

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
        requests_in_flight,
        control_requests_waiting,
        transfers_in_flight,
        transfers_pending,
        streams_open,
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
