%% The plugin opens no port: its metrics are on the pages of rabbitmq_prometheus, whichever of the two came first.
-module(metrics_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    metrics_come_and_go_with_rabbitmq_prometheus/1,
    metrics_come_and_go_with_the_plugin/1,
    an_inert_plugin_says_so_on_the_page/1,
    the_sums_of_the_node_are_those_of_its_streams/1,
    a_stream_is_found_by_its_labels_and_filters_apply/1,
    a_stream_that_does_not_get_through_is_shown_with_its_lag/1
]).

-import(stream_s3_ct_node, [rpc/4, enable/2, disable/2]).
-import(stream_s3_ct_page, [fetch/1, fetch/2, names/1, sum/2, values/2]).
-import(stream_s3_ct_tier, [counter/2, counter/3]).
-import(stream_s3_ct_wait, [until/2]).

-define(PLUGIN, rabbitmq_stream_s3).
-define(PAGES, rabbitmq_prometheus).
-define(ACTIVE, ~"rabbitmq_stream_s3_active").

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        metrics_come_and_go_with_rabbitmq_prometheus,
        metrics_come_and_go_with_the_plugin,
        an_inert_plugin_says_so_on_the_page,
        the_sums_of_the_node_are_those_of_its_streams,
        a_stream_is_found_by_its_labels_and_filters_apply,
        a_stream_that_does_not_get_through_is_shown_with_its_lag
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("metrics-suite"),
    [Node, Inert] = stream_s3_ct_node:start_all([
        stream_s3_ct_tier:node("metrics1", S3, []),
        {"metrics2", #{plugins => ["rabbitmq_stream_s3"]}}
    ]),
    [{s3, S3}, {broker, Node}, {inert, Inert} | Config].

end_per_suite(Config) ->
    [ok = stream_s3_ct_node:wipe(proplists:get_value(Key, Config)) || Key <- [broker, inert]],
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

metrics_come_and_go_with_rabbitmq_prometheus(Config) ->
    Node = broker(Config),
    ok = wait_shown(Node),
    %% Without it, on a node that runs and after a start: no listener, and the plugin works.
    ok = disable(Node, ?PAGES),
    ok = opens_nothing(Node),
    Node = stream_s3_ct_node:restart(Node),
    ok = opens_nothing(Node),
    ok = enable(Node, ?PAGES),
    ok = wait_shown(Node),
    ok = disable(Node, ?PAGES),
    ok = opens_nothing(Node),
    ok = enable(Node, ?PAGES),
    ok = wait_shown(Node),
    %% Both at the start of the node.
    Node = stream_s3_ct_node:restart(Node),
    ok = wait_shown(Node).

metrics_come_and_go_with_the_plugin(Config) ->
    Node = broker(Config),
    ok = disable(Node, ?PLUGIN),
    ?assertEqual([], ours(fetch(Node))),
    %% The pages themselves are there.
    ?assert(lists:member(~"rabbitmq_queues", names(fetch(Node)))),
    ok = enable(Node, ?PLUGIN),
    ok = wait_shown(Node),
    ?assertEqual([], stream_s3_ct_node:errors(Node)).

an_inert_plugin_says_so_on_the_page(Config) ->
    Inert = proplists:get_value(inert, Config),
    ?assertMatch(#{mode := inert, inert_reason := no_bucket}, stream_s3_ct_tier:node_status(Inert)),
    ok = wait_shown(Inert),
    ?assertEqual(0, counter(Inert, ~"active")),
    ?assertEqual(0, counter(Inert, ~"protected_streams")).

the_sums_of_the_node_are_those_of_its_streams(Config) ->
    Node = broker(Config),
    Streams = #{~"sum-1" => 100, ~"sum-2" => 200},
    [ok = durable(Node, Stream, Records) || Stream := Records <- Streams],
    Names = [
        <<"rabbitmq_stream_s3_stream_", Name/binary>>
     || Name <- [
            ~"remote_bytes",
            ~"remote_fragments",
            ~"edits_since_persist",
            ~"unpersisted_bytes"
        ]
    ],
    PerObject = fetch(Node, "/metrics/per-object"),
    Sums = fetch(Node),
    [?assertEqual({Name, sum(PerObject, Name)}, {Name, sum(Sums, Name)}) || Name <- Names],
    [?assertMatch([_], values(Sums, Name)) || Name <- Names],
    ?assert(counter(Node, ~"stream_remote_bytes") > 300_000),
    ?assert(counter(Node, ~"stream_remote_fragments") >= 2),
    ?assertEqual(0, counter(Node, ~"unpersisted_records")),
    ?assertEqual(0, counter(Node, ~"streams_stalled")),
    %% A stream that goes takes its share with it.
    ok = stream_s3_ct_amqp:delete(Node, ~"sum-2"),
    ok = until(
        "the sums follow",
        fun() -> counter(Node, ~"stream_remote_bytes") < 200_000 andalso ok end
    ).

a_stream_is_found_by_its_labels_and_filters_apply(Config) ->
    Node = broker(Config),
    Stream = ~"labelled",
    ok = durable(Node, Stream, 100),
    Labels = ~"vhost=\"/\",queue=\"labelled\"",
    Next = ~"stream_s3_stream_durable_next_offset",
    ?assertMatch(
        #{Labels := Persisted} when Persisted >= 100,
        maps:from_list(values(fetch(Node, "/metrics/per-object"), <<"rabbitmq_", Next/binary>>))
    ),
    %% On the page of sums a stream has no name.
    ?assertEqual([], values(fetch(Node), <<"rabbitmq_", Next/binary>>)),
    Detailed = fun(Query) -> fetch(Node, "/metrics/detailed?" ++ Query) end,
    InDetail = fun(Page) ->
        [L || {L, _} <- values(Page, ~"rabbitmq_detailed_stream_s3_stream_durable_next_offset")]
    end,
    ?assert(lists:member(Labels, InDetail(Detailed("family=stream_s3_metrics")))),
    ?assert(lists:member(Labels, InDetail(Detailed("family=stream_s3_metrics&vhost=/")))),
    ?assertEqual([], InDetail(Detailed("family=stream_s3_metrics&vhost=other"))),
    case has_queue_filter(Node) of
        true ->
            ?assertEqual([Labels], InDetail(Detailed("family=stream_s3_metrics&queue=%5Elab.*d%24"))),
            ?assertEqual([], InDetail(Detailed("family=stream_s3_metrics&queue=%5Elab%24")));
        false ->
            ok
    end,
    ?assertEqual([], InDetail(Detailed("family=queue_coarse_metrics"))).

%% At offset 0, where the first fragment of every stream begins.
a_stream_that_does_not_get_through_is_shown_with_its_lag(Config) ->
    Node = broker(Config),
    S3 = proplists:get_value(s3, Config),
    Denied = #{name => ~"denied", operation => ~"PutObject", status => 403, code => ~"AccessDenied"},
    ok = stream_s3_ct_s3:fault(S3, Denied),
    Stream = ~"denied",
    ok = stream_s3_ct_amqp:declare(Node, Stream),
    ok = stream_s3_ct_amqp:publish(Node, Stream, {0, 100}, 1_000),
    ok = until("it is cut and refused", fun() ->
        _ = rpc(Node, rabbitmq_stream_s3_status, cut, [~"/", Stream]),
        counter(Node, ~"streams_stalled") =:= 1 andalso ok
    end),
    Labels = ~"vhost=\"/\",queue=\"denied\"",
    Of = fun(Name) ->
        values(fetch(Node, "/metrics/per-object"), <<"rabbitmq_stream_s3_stream_", Name/binary>>)
    end,
    ?assertEqual([{Labels, 0}], Of(~"stalled_offset")),
    ?assertMatch([1], [V || {L, V} <- Of(~"stalled"), L =:= Labels]),
    [LagSeconds] = [V || {L, V} <- Of(~"durability_lag_seconds"), L =:= Labels],
    ?assert(LagSeconds > 0),
    ?assert(counter(Node, ~"durability_lag_seconds") >= LagSeconds),
    ?assert(counter(Node, ~"unpersisted_bytes") > 100_000),
    ?assert(
        counter(Node, ~"request_failures_total", ~"reason=\"access_denied\"") > 0
    ),
    {ok, Status} = stream_s3_ct_tier:stream_status(Node, Stream),
    ?assertMatch(#{stalled_offset := 0, problem_kind := transfer}, Status),
    ok = stream_s3_ct_s3:clear_faults(S3),
    ok = stream_s3_ct_tier:flush(Node, Stream, 100),
    ?assertEqual([], Of(~"stalled_offset")),
    ?assertEqual(0, counter(Node, ~"streams_stalled")),
    ?assertEqual(0, counter(Node, ~"unpersisted_bytes")),
    ?assert(counter(Node, ~"durability_lag_seconds") == 0),
    %% What was put took its time.
    Puts = counter(Node, ~"request_duration_seconds_count", ~"operation=\"put\""),
    ?assert(Puts > 0),
    ?assertEqual(
        Puts,
        counter(
            Node, ~"request_duration_seconds_bucket", ~"operation=\"put\",le=\"+Inf\""
        )
    ).

%% Helpers -----------------------------------------------------------------------------------------

%% New in RabbitMQ 4.3.
has_queue_filter(Node) ->
    rpc(Node, rabbit_misc, version_compare, [rpc(Node, rabbit_misc, version, []), "4.3.0", gte]).

broker(Config) ->
    proplists:get_value(broker, Config).

ours(none) -> none;
ours(Page) -> [Name || Name <- names(Page), binary:match(Name, ~"stream_s3") =/= nomatch].

wait_shown(Node) ->
    until("the plugin's metrics are on the page", fun() ->
        case ours(fetch(Node)) of
            none -> false;
            Names -> lists:member(?ACTIVE, Names) andalso ok
        end
    end).

opens_nothing(Node) ->
    ?assertMatch(#{mode := active}, stream_s3_ct_tier:node_status(Node)),
    ?assertEqual(none, fetch(Node)),
    Protocols = [
        element(3, Listener)
     || Listener <- rpc(Node, rabbit_networking, active_listeners, [])
    ],
    ?assertNot(lists:member('http/prometheus', Protocols)),
    Running = [App || {App, _, _} <- rpc(Node, application, which_applications, [])],
    ?assertNot(lists:member(?PAGES, Running)),
    ?assert(lists:member(?PLUGIN, Running)),
    ok.

durable(Node, Stream, Records) ->
    ok = stream_s3_ct_amqp:declare(Node, Stream),
    ok = stream_s3_ct_amqp:publish(Node, Stream, {0, Records}, 1_000),
    stream_s3_ct_tier:flush(Node, Stream, Records).
