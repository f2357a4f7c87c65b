-module(rabbitmq_stream_s3_prometheus_collector).
-moduledoc """
Metrics `rabbitmq_stream_s3_*` for the registries that rabbitmq_prometheus serves, where it runs
(rabbitmq_stream_s3_prometheus sees to that):

    /metrics             the node, and sums over its streams
    /metrics/per-object  the node, and every stream with labels vhost and queue
    /metrics/detailed    streams only, with ?family=stream_s3_metrics, honouring its filters

Brings numbers and names together. Owns neither: rabbitmq_stream_s3_metrics has the names. Counters of
the node are counted natively per node, so they stay monotonic when a stream goes; sums over streams
are kept natively, so `/metrics` costs the same for any number of streams. Nothing here asks a
process, so a scrape cannot hang on one.
""".

-behaviour(prometheus_collector).

-include_lib("rabbit_common/include/rabbit.hrl").

-export([register/0, deregister/0]).
-export([collect_mf/2, deregister_cleanup/1]).
-export([numbers/0, passes/1]).

-define(REGISTRIES, [default, 'per-object', detailed]).
-define(PREFIX, "rabbitmq_stream_s3_").
-define(DETAILED, "rabbitmq_detailed_stream_s3_").

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
        true -> each_stream(?DETAILED, [S || S <- streams(), passes(element(1, S))], Callback);
        false -> ok
    end;
collect_mf('per-object', Callback) ->
    _ = node_metrics(Callback),
    each_stream(?PREFIX, streams(), Callback);
collect_mf(_Default, Callback) ->
    Numbers = node_metrics(Callback),
    case application:get_env(rabbitmq_prometheus, return_per_object_metrics, false) of
        true -> each_stream(?PREFIX, streams(), Callback);
        false -> all_streams(Numbers, Callback)
    end.

%% The node ----------------------------------------------------------------------------------------

node_metrics(Callback) ->
    Numbers = numbers(),
    lists:foreach(
        fun({Name, Kind, Help, Source}) ->
            emit(Callback, ?PREFIX, Name, Kind, Help, values(Source, Numbers))
        end,
        rabbitmq_stream_s3_metrics:node()
    ),
    Durations = rabbitmq_stream_s3_api_aws:request_durations(),
    lists:foreach(
        fun({Name, Help, Series}) ->
            Values = [
                histogram(Labels, maps:get(Operation, Durations, [0]))
             || {Labels, Operation} <- Series
            ],
            emit(Callback, ?PREFIX, Name, histogram, Help, Values)
        end,
        rabbitmq_stream_s3_metrics:durations()
    ),
    Numbers.

values({millis, Inner}, Numbers) ->
    [{[], maps:get(Inner, Numbers, 0) / 1000}];
values({samples, Inner}, Numbers) ->
    maps:get(Inner, Numbers);
values({Label, Rows}, Numbers) ->
    [{[{Label, Value}], maps:get(Inner, Numbers, 0)} || {Value, Inner} <- Rows];
values(Inner, Numbers) ->
    [{[], maps:get(Inner, Numbers, 0)}].

%% The library wants what is at or below each bound.
histogram(Labels, [SumMicros | Counts]) ->
    Bounds = rabbitmq_stream_s3_metrics:bounds_seconds() ++ [infinity],
    Padded = Counts ++ lists:duplicate(length(Bounds) - length(Counts), 0),
    {Sums, Total} = lists:mapfoldl(fun(Count, Sum) -> {Sum + Count, Sum + Count} end, 0, Padded),
    {Labels, lists:zip(Bounds, Sums), Total, SumMicros / 1_000_000}.

-doc false.
-spec numbers() -> #{atom() => term()}.
numbers() ->
    Native = rabbitmq_stream_s3_api_aws:stats(),
    Shell = rabbitmq_stream_s3_counters:overview(),
    Lag = rabbitmq_stream_s3_replica_lag:overview(),
    Trimmed = rabbitmq_stream_s3_host_retention:stats(),
    lists:foldl(fun maps:merge/2, #{}, [Native, Shell, Lag, Trimmed, limits(), facts(Native)]).

limits() ->
    Settings = rabbitmq_stream_s3_config:public(),
    DiskLimit =
        case Settings of
            #{read_cache_path := Path, read_cache_size := Size} when is_binary(Path) -> Size;
            _NoCacheOnDisk -> 0
        end,
    #{
        read_memory_limit_bytes => maps:get(read_memory, Settings, 0),
        read_cache_disk_limit_bytes => DiskLimit,
        fragment_max_age_ms => maps:get(fragment_max_age_ms, Settings, 0)
    }.

facts(Native) ->
    {Mode, Why} =
        case rabbitmq_stream_s3:mode() of
            {inert, Kind, _Text} -> {inert, Kind};
            Other -> {Other, none}
        end,
    Protected =
        case rabbitmq_stream_s3_manifest_protection:overview() of
            {_, Streams} -> Streams;
            off -> 0
        end,
    Access =
        case rabbitmq_stream_s3_api_aws:bucket_status() of
            {inaccessible, _, _} -> inaccessible;
            AccessibleOrUnknown -> AccessibleOrUnknown
        end,
    #{
        active => one_if(Mode =:= active),
        info => [{info(Mode, Why), 1}],
        protected_streams => Protected,
        bucket_accessible => one_if(Access =:= accessible),
        bucket_state => [
            {[{state, State}], one_if(State =:= Access)}
         || State <- [accessible, inaccessible, unknown]
        ],
        bucket_success_ms => rabbitmq_stream_s3_api_aws:bucket_success_ms(),
        manifests_pending => rabbitmq_stream_s3_manifest_cache:pending(),
        unpersisted_bytes => lists:sum([
            maps:get(Stage, Native, 0)
         || Stage <- [
                streams_assembly_payload_bytes, streams_transfer_bytes, streams_persist_bytes
            ]
        ])
    }.

info(Mode, Why) ->
    Settings = rabbitmq_stream_s3_config:public(),
    #{mode := Hooks} = rabbitmq_stream_s3_host_osiris:status(),
    {ok, Version} = application:get_key(rabbitmq_stream_s3, vsn),
    [
        {plugin_version, Version},
        {mode, Mode},
        {inert_reason, Why},
        {osiris_hooks, Hooks},
        {bucket, maps:get(bucket, Settings, <<>>)},
        {region, maps:get(region, Settings, <<>>)}
    ].

one_if(true) -> 1;
one_if(false) -> 0.

%% Streams -----------------------------------------------------------------------------------------

all_streams(Numbers, Callback) ->
    lists:foreach(
        fun({Name, Help, _Inner, Sum}) ->
            emit(Callback, ?PREFIX, Name, gauge, Help, [{[], maps:get(Sum, Numbers, 0)}])
        end,
        [Row || {_, _, _, Sum} = Row <- rabbitmq_stream_s3_metrics:stream(), Sum =/= none]
    ).

each_stream(_Prefix, [], _Callback) ->
    ok;
each_stream(Prefix, Streams, Callback) ->
    lists:foreach(
        fun({Name, Help, Inner, _Sum}) ->
            Values = [
                {Labels, Value}
             || {Labels, #{Inner := Value}} <- Streams,
                is_number(Value)
            ],
            emit(Callback, Prefix, Name, gauge, Help, Values)
        end,
        rabbitmq_stream_s3_metrics:stream()
    ),
    lists:foreach(
        fun({Name, Help, Inner}) ->
            Values = [{Labels, Value} || {Labels, #{counters := #{Inner := Value}}} <- Streams],
            emit(Callback, Prefix, Name, counter, Help, Values)
        end,
        rabbitmq_stream_s3_metrics:stream_counters()
    ).

streams() ->
    [
        {labels(StreamId, Reference), computed(rabbitmq_stream_s3_status:with_lag(Status))}
     || {StreamId, Reference, Status} <- rabbitmq_stream_s3_replica_reader:statuses()
    ].

computed(#{durability_lag_ms := LagMs} = Status) ->
    Status#{
        durability_lag_seconds => LagMs / 1000,
        stalled => one_if(is_integer(maps:get(stalled_offset, Status, undefined)))
    }.

labels(_StreamId, #resource{virtual_host = VHost, name = Queue}) ->
    [{vhost, VHost}, {queue, Queue}];
labels(StreamId, _NotOfRabbit) ->
    [{vhost, <<>>}, {queue, StreamId}].

%% The filters of rabbitmq_prometheus are in the dictionary of the process that serves the request.
wants(undefined) -> false;
wants(Families) -> lists:member(stream_s3_metrics, Families).

-doc false.
-spec passes([{atom(), binary()}]) -> boolean().
passes([{vhost, VHost}, {queue, Queue}]) ->
    is_vhost(VHost, get(prometheus_vhost_filter)) andalso
        is_queue(Queue, get(prometheus_queue_filter)).

is_vhost(_VHost, undefined) -> true;
is_vhost(VHost, VHosts) -> lists:member(VHost, VHosts).

%% A compiled pattern, from RabbitMQ 4.3.0 on.
is_queue(_Queue, undefined) -> true;
is_queue(Queue, Pattern) -> re:run(Queue, Pattern, [{capture, none}]) =:= match.

emit(_Callback, _Prefix, _Name, _Kind, _Help, []) ->
    ok;
emit(Callback, Prefix, Name, Kind, Help, Values) ->
    FullName = iolist_to_binary([Prefix, atom_to_binary(Name)]),
    _ = Callback(
        prometheus_model_helpers:create_mf(FullName, iolist_to_binary(Help), Kind, Values)
    ),
    ok.
