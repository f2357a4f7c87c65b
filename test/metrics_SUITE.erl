%% The plugin opens no port: its metrics are on the pages of rabbitmq_prometheus, whichever of the two came first.
-module(metrics_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    metrics_come_and_go_with_rabbitmq_prometheus/1,
    metrics_come_and_go_with_the_plugin/1,
    an_inert_plugin_says_so_on_the_page/1,
    the_sums_of_the_node_are_those_of_its_streams/1,
    a_stream_is_found_by_its_labels_and_filters_apply/1
]).

-import(stream_s3_ct_node, [rpc/4, enable/2, disable/2]).
-import(stream_s3_ct_page, [fetch/1, fetch/2, names/1, sum/2, values/2]).
-import(stream_s3_ct_tier, [counter/2]).
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
        a_stream_is_found_by_its_labels_and_filters_apply
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
            ~"manifest_total_size",
            ~"manifest_fragments",
            ~"edits_since_persist",
            ~"assembly_payload_bytes"
        ]
    ],
    PerObject = fetch(Node, "/metrics/per-object"),
    Sums = fetch(Node),
    [?assertEqual({Name, sum(PerObject, Name)}, {Name, sum(Sums, Name)}) || Name <- Names],
    [?assertMatch([_], values(Sums, Name)) || Name <- Names],
    ?assert(counter(Node, ~"stream_manifest_total_size") > 300_000),
    ?assert(counter(Node, ~"stream_manifest_fragments") >= 2),
    ?assertEqual(0, counter(Node, ~"unpersisted_records")),
    ?assertEqual(0, counter(Node, ~"streams_stalled")),
    %% A stream that goes takes its share with it.
    ok = stream_s3_ct_amqp:delete(Node, ~"sum-2"),
    ok = until(
        "the sums follow",
        fun() -> counter(Node, ~"stream_manifest_total_size") < 200_000 andalso ok end
    ).

a_stream_is_found_by_its_labels_and_filters_apply(Config) ->
    Node = broker(Config),
    Stream = ~"labelled",
    ok = durable(Node, Stream, 100),
    Labels = ~"vhost=\"/\",queue=\"labelled\"",
    Next = ~"stream_s3_stream_persisted_next_offset",
    ?assertMatch(
        #{Labels := Persisted} when Persisted >= 100,
        maps:from_list(values(fetch(Node, "/metrics/per-object"), <<"rabbitmq_", Next/binary>>))
    ),
    %% On the page of sums a stream has no name.
    ?assertEqual([], values(fetch(Node), <<"rabbitmq_", Next/binary>>)),
    Detailed = fun(Query) -> fetch(Node, "/metrics/detailed?" ++ Query) end,
    InDetail = fun(Page) ->
        [L || {L, _} <- values(Page, ~"rabbitmq_detailed_stream_s3_stream_persisted_next_offset")]
    end,
    ?assert(lists:member(Labels, InDetail(Detailed("family=stream_s3_metrics")))),
    ?assert(lists:member(Labels, InDetail(Detailed("family=stream_s3_metrics&vhost=/")))),
    ?assertEqual([], InDetail(Detailed("family=stream_s3_metrics&vhost=other"))),
    ?assertEqual([], InDetail(Detailed("family=queue_coarse_metrics"))).

%% Helpers -----------------------------------------------------------------------------------------

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
