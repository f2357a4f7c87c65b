%% A bucket that is not set or cannot be used: streams work locally, the reason is in the log once and in the status, no
%% secret is, and nothing that the endpoint answers is taken for something durable.
-module(bucket_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    streams_work_on_every_node/1,
    without_a_bucket_the_plugin_is_inert/1,
    the_reason_is_in_the_status_and_in_the_metrics/1,
    the_reason_is_in_the_log_once/1,
    a_wrong_secret_is_shown_nowhere/1,
    nothing_is_durable_and_nothing_is_written/1,
    a_bucket_that_can_be_used_again_takes_what_was_held_back/1,
    nothing_went_wrong_meanwhile/1
]).

-import(stream_s3_ct_tier, [counter/2, counter/3, node_status/1, range/2]).
-import(stream_s3_ct_wait, [until/3]).

-define(STREAM, ~"still-works").
-define(SECRET, "wrong-secret-that-must-not-leak").

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        streams_work_on_every_node,
        without_a_bucket_the_plugin_is_inert,
        the_reason_is_in_the_status_and_in_the_metrics,
        the_reason_is_in_the_log_once,
        a_wrong_secret_is_shown_nowhere,
        nothing_is_durable_and_nothing_is_written,
        a_bucket_that_can_be_used_again_takes_what_was_held_back,
        nothing_went_wrong_meanwhile
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("bucket-suite"),
    %% Of its own, because the fault is of every request.
    Elsewhere = stream_s3_ct_s3:start("bucket-suite-elsewhere"),
    ok = stream_s3_ct_s3:fault(
        Elsewhere, #{name => ~"region", status => 301, code => ~"PermanentRedirect"}
    ),
    Node = fun(Name, Server, Settings) ->
        stream_s3_ct_tier:node(
            Name, Server, [{"fragment_size", "100000"}, {"bucket_check_interval", "1s"} | Settings]
        )
    end,
    [Without | Nodes] = stream_s3_ct_node:start_all([
        {"bucket1", #{plugins => ["rabbitmq_stream_s3"]}},
        Node("bucket2", S3, [{"bucket", "no-such-bucket"}]),
        Node("bucket3", S3, [{"secret_access_key", ?SECRET}]),
        Node("bucket4", S3, [{"endpoint", "http://127.0.0.1:1"}]),
        Node("bucket5", Elsewhere, [])
    ]),
    Reasons = [no_such_bucket, access_denied, unreachable, wrong_region],
    [
        {s3, S3},
        {elsewhere, Elsewhere},
        {without, Without},
        {refused, lists:zip(Reasons, Nodes)}
        | Config
    ].

end_per_suite(Config) ->
    [ok = stream_s3_ct_node:wipe(Node) || Node <- all_nodes(Config)],
    [ok = stream_s3_ct_s3:stop(proplists:get_value(Key, Config)) || Key <- [s3, elsewhere]].

%% Cases -------------------------------------------------------------------------------------------

streams_work_on_every_node(Config) ->
    [
        begin
            ok = stream_s3_ct_amqp:declare(Node, ?STREAM),
            ok = stream_s3_ct_amqp:publish(Node, ?STREAM, {0, 300}, 1_000),
            ok = stream_s3_ct_amqp:consume(Node, ?STREAM, {0, 300}, 1_000)
        end
     || Node <- all_nodes(Config)
    ].

without_a_bucket_the_plugin_is_inert(Config) ->
    Node = proplists:get_value(without, Config),
    ?assertMatch(#{mode := inert, inert_reason := no_bucket}, node_status(Node)),
    ?assertMatch([_], stream_s3_ct_node:warnings(Node, [~"stream_s3.bucket"])),
    %% Nobody has asked, so nobody says that it can be used.
    ?assertEqual(0, counter(Node, ~"bucket_accessible")),
    ?assertEqual(1, counter(Node, ~"bucket_state", ~"state=\"unknown\"")).

the_reason_is_in_the_status_and_in_the_metrics(Config) ->
    [
        begin
            ok = until(
                "the reason is known",
                fun() -> maps:get(bucket_reason, node_status(Node)) =:= Reason andalso ok end,
                60_000
            ),
            ?assertMatch(#{mode := active, bucket_accessible := no}, node_status(Node)),
            ?assertEqual(0, counter(Node, ~"bucket_accessible")),
            ?assertEqual(1, counter(Node, ~"bucket_state", ~"state=\"inaccessible\"")),
            ?assert(counter(Node, ~"bucket_last_success_timestamp_seconds") == 0)
        end
     || {Reason, Node} <- proplists:get_value(refused, Config)
    ].

%% However often it has been asked again.
the_reason_is_in_the_log_once(Config) ->
    [
        ?assertMatch(
            [_], stream_s3_ct_node:warnings(Node, [~"not accessible", atom_to_binary(Reason)])
        )
     || {Reason, Node} <- proplists:get_value(refused, Config)
    ].

a_wrong_secret_is_shown_nowhere(Config) ->
    {access_denied, Node} = lists:keyfind(access_denied, 1, proplists:get_value(refused, Config)),
    Shown = [
        stream_s3_ct_node:log(Node),
        stream_s3_ct_node:ctl(Node, ["environment"]),
        stream_s3_ct_node:streams(Node, ["stream_s3_status"])
    ],
    [?assertEqual(nomatch, string:find(Text, ?SECRET)) || Text <- Shown].

nothing_is_durable_and_nothing_is_written(Config) ->
    [
        ?assert(lists:member(range(Node, ?STREAM), [none, {0, 0}]))
     || {_, Node} <- proplists:get_value(refused, Config)
    ],
    [
        ?assertEqual([], stream_s3_ct_s3:objects(proplists:get_value(Key, Config)))
     || Key <- [s3, elsewhere]
    ].

a_bucket_that_can_be_used_again_takes_what_was_held_back(Config) ->
    {wrong_region, Node} = lists:keyfind(wrong_region, 1, proplists:get_value(refused, Config)),
    ok = stream_s3_ct_s3:clear_faults(proplists:get_value(elsewhere, Config)),
    ok = stream_s3_ct_tier:flush(Node, ?STREAM, 300),
    ok = until(
        "the status says so",
        fun() -> maps:get(bucket_accessible, node_status(Node)) =:= yes andalso ok end,
        60_000
    ),
    ?assertEqual(1, counter(Node, ~"bucket_accessible")),
    ?assertEqual(1, counter(Node, ~"bucket_state", ~"state=\"accessible\"")),
    ?assert(counter(Node, ~"bucket_last_success_timestamp_seconds") > 1_700_000_000).

nothing_went_wrong_meanwhile(Config) ->
    [?assertEqual([], crashes(Node)) || Node <- all_nodes(Config)].

%% Helpers -----------------------------------------------------------------------------------------

all_nodes(Config) ->
    [
        proplists:get_value(without, Config)
        | [Node || {_, Node} <- proplists:get_value(refused, Config)]
    ].

%% That the bucket cannot be used is an error, too, and is expected here.
crashes(Node) ->
    [Line || Line <- stream_s3_ct_node:errors(Node), string:find(Line, "stream_s3:") =:= nomatch].
