%% The table of metrics, compared with what is counted and with how metrics are named.
-module(rabbitmq_stream_s3_metrics_tests).

-include_lib("eunit/include/eunit.hrl").

-define(METRICS, rabbitmq_stream_s3_metrics).
-define(COLLECTOR, rabbitmq_stream_s3_prometheus_collector).

every_number_is_published_once_test() ->
    Native = native(),
    ?assert(length(Native) > 80),
    Shell = [Name || {Name, _, _, _} <- rabbitmq_stream_s3_counters:fields()],
    Used = lists:append([inner(Row) || {_, _, _, Row} <- ?METRICS:node()]),
    ?assertEqual([], (Native ++ Shell) -- (Used ++ ?METRICS:unpublished())),
    ?assertEqual([], Used -- lists:usort(Used)).

gauges_and_counters_are_what_the_native_side_says_test() ->
    {ok, Source} = file:read_file(source("native/tiering-runtime/src/stats.rs")),
    {match, Marked} = re:run(
        Source, "\\(gauge\\)\\.\\s+([a-z_]+),", [global, {capture, all_but_first, list}]
    ),
    Gauges = [list_to_atom(Name) || [Name] <- Marked],
    Native = native(),
    [
        ?assertEqual({Inner, Kind =:= gauge}, {Inner, lists:member(Inner, Gauges)})
     || {_, Kind, _, Row} <- ?METRICS:node(), Inner <- inner(Row), lists:member(Inner, Native)
    ].

names_say_kind_and_unit_test() ->
    Node = [{Name, Kind, Help} || {Name, Kind, Help, _} <- ?METRICS:node()],
    Streams = [{Name, gauge, Help} || {Name, Help, _, _} <- ?METRICS:stream()],
    Counters = [{Name, counter, Help} || {Name, Help, _} <- ?METRICS:stream_counters()],
    Durations = [{Name, histogram, Help} || {Name, Help, _} <- ?METRICS:durations()],
    All = Node ++ Streams ++ Counters ++ Durations,
    Names = [atom_to_list(Name) || {Name, _, _} <- All],
    ?assertEqual([], Names -- lists:usort(Names)),
    [
        begin
            Text = atom_to_list(Name),
            ?assertEqual({Name, Kind =:= counter}, {Name, lists:suffix("_total", Text)}),
            ?assertEqual(
                {Name, Kind =:= counter}, {Name, lists:prefix("Total number of ", Help)}
            ),
            ?assertEqual({Name, nomatch}, {Name, re:run(Text, "_(ms|millis|kb|mb|micros)(_|$)")}),
            ?assertNotEqual({Name, $.}, {Name, lists:last(Help)})
        end
     || {Name, Kind, Help} <- All
    ].

buckets_are_those_of_the_native_side_test() ->
    {ok, Source} = file:read_file(source("native/tiering-runtime/src/durations.rs")),
    {match, [Text]} = re:run(
        Source, "BOUNDS_MS: \\[u64; \\d+\\] = \\[([^\\]]*)\\]", [{capture, all_but_first, list}]
    ),
    Millis = [
        list_to_integer([C || C <- Bound, C >= $0, C =< $9])
     || Bound <- string:split(Text, ",", all), string:trim(Bound) =/= ""
    ],
    ?assertEqual(Millis, [round(Bound * 1000) || Bound <- ?METRICS:bounds_seconds()]).

filters_of_the_request_test() ->
    Labels = [{vhost, ~"/"}, {queue, ~"orders-1"}],
    {ok, Pattern} = re:compile("^orders"),
    {ok, Other} = re:compile("^payments"),
    Passes = fun(VHosts, Queues) ->
        _ = put(prometheus_vhost_filter, VHosts),
        _ = put(prometheus_queue_filter, Queues),
        Result = ?COLLECTOR:passes(Labels),
        _ = erase(prometheus_vhost_filter),
        _ = erase(prometheus_queue_filter),
        Result
    end,
    ?assert(Passes(undefined, undefined)),
    ?assert(Passes([~"/"], Pattern)),
    ?assertNot(Passes([~"other"], Pattern)),
    ?assertNot(Passes([~"/"], Other)).

a_status_with_nothing_pending_has_no_lag_test() ->
    Idle = #{oldest_pending_timestamp => undefined, transfer_bytes => 0, persist_bytes => 0},
    ?assertMatch(#{durability_lag_ms := 0, unpersisted_bytes := 0}, rabbitmq_stream_s3_status:with_lag(Idle)),
    Old = os:system_time(millisecond) - 5_000,
    Behind = Idle#{oldest_pending_timestamp => Old, transfer_bytes => 3, assembly_payload_bytes => 4},
    #{durability_lag_ms := LagMs, unpersisted_bytes := 7} = rabbitmq_stream_s3_status:with_lag(Behind),
    ?assert(LagMs >= 5_000 andalso LagMs < 60_000).

%% The rows of the native statistics.
native() ->
    {ok, Source} = file:read_file(source("native/tiering-runtime/src/stats.rs")),
    {match, Rows} = re:run(
        Source, "\\n    ([a-z_0-9]+),", [global, {capture, all_but_first, list}]
    ),
    [list_to_atom(Name) || [Name] <- Rows].

inner({millis, Inner}) -> [Inner];
inner({samples, Inner}) -> [Inner];
inner({_Label, Rows}) -> [Inner || {_Value, Inner} <- Rows];
inner(Inner) -> [Inner].

%% Beside the sources of the module, wherever the tests run.
source(Path) ->
    Module = proplists:get_value(source, ?METRICS:module_info(compile)),
    filename:join(filename:dirname(filename:dirname(Module)), Path).
