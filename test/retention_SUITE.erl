%% What goes, and when: local segments once they are durable in S3, history in both tiers by the user's policy, and
%% everything when the stream is deleted.
-module(retention_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([
    all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2
]).
-export([
    local_segments_stay_until_they_are_durable/1,
    a_slow_stream_is_durable_by_age/1,
    max_length_bytes_of_a_policy_bounds_both_tiers/1,
    max_age_of_a_policy_bounds_both_tiers/1,
    a_bound_of_the_stream_itself_holds_from_the_start/1,
    a_policy_that_goes_keeps_what_is_there/1,
    a_deleted_stream_leaves_no_object/1,
    the_neighbour_has_kept_everything/1
]).

-import(stream_s3_ct_client, [with_client/2, subscribe/4, chunk/2, stats/2]).
-import(stream_s3_ct_records, [fill/3, read/4]).
-import(stream_s3_ct_tier, [
    flush/3, tier/3, range/2, fragments/3, floor/2, segments/2, set_policy/4
]).
-import(stream_s3_ct_wait, [until/2, until/3]).

-define(NEIGHBOUR, ~"neighbour").

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        local_segments_stay_until_they_are_durable,
        a_slow_stream_is_durable_by_age,
        max_length_bytes_of_a_policy_bounds_both_tiers,
        max_age_of_a_policy_bounds_both_tiers,
        a_bound_of_the_stream_itself_holds_from_the_start,
        a_policy_that_goes_keeps_what_is_there,
        a_deleted_stream_leaves_no_object,
        the_neighbour_has_kept_everything
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("retention-suite"),
    {Name, Options} = stream_s3_ct_tier:node(
        "retention1", S3, [{"fragment_size", "300000"}, {"fragment_max_age", "1s"}]
    ),
    Node = stream_s3_ct_node:start(Name, Options),
    ok = create(Node, ?NEIGHBOUR, #{}),
    ok = publish(Node, ?NEIGHBOUR, {0, 400}),
    _ = tier(Node, ?NEIGHBOUR, 400),
    [{s3, S3}, {broker, Node}, {neighbours, fragments(S3, Node, ?NEIGHBOUR)} | Config].

end_per_suite(Config) ->
    ok = stream_s3_ct_node:wipe(proplists:get_value(broker, Config)),
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    ok = create(proplists:get_value(broker, Config), Stream, #{}),
    [{stream, Stream} | Config].

end_per_testcase(_Case, Config) ->
    stream_s3_ct_s3:clear_faults(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

local_segments_stay_until_they_are_durable(Config) ->
    {Node, S3, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 200}),
    ok = flush(Node, Stream, 200),
    ok = stream_s3_ct_s3:fault(S3, #{
        name => ~"held",
        operation => ~"PutObject",
        key => stream_s3_ct_tier:stream_id(Node, Stream),
        hang => ~"gate"
    }),
    ok = publish(Node, Stream, {200, 400}),
    [_ | _] = stream_s3_ct_s3:wait_requests(S3, 1, [{"hanging", "gate"}]),
    %% Several segments have ended since, and each end looks at what may be trimmed: below 200, nothing else.
    ?assertEqual({0, 200}, range(Node, Stream)),
    [Floor | _] = Segments = segments(Node, Stream),
    ?assert(Floor =< 200),
    ?assert(length([Segment || Segment <- Segments, Segment >= 200]) >= 3),
    ok = stream_s3_ct_s3:clear_faults(S3),
    ?assert(tier(Node, Stream, 600) > 400),
    ok = whole(Node, Stream, 0, 600).

%% No fragment is full, and nobody cuts one.
a_slow_stream_is_durable_by_age(Config) ->
    {Node, _, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 10}),
    ok = stream_s3_ct_tier:wait_persisted(Node, Stream, 10),
    ok = whole(Node, Stream, 0, 10).

max_length_bytes_of_a_policy_bounds_both_tiers(Config) ->
    {Node, S3, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 400}),
    _ = tier(Node, Stream, 400),
    Before = fragments(S3, Node, Stream),
    ok = set_policy(Node, Stream, ~"max-length-bytes", 1_000_000),
    %% As in stock: the bound is applied when the stream continues.
    ok = publish(Node, Stream, {400, 20}),
    ok = flush(Node, Stream, 420),
    First = wait_begins(Node, Stream, 1),
    %% The bound is met to within a fragment.
    ?assert(420 - First =< 150),
    ok = wait_gone(S3, Node, Stream),
    ?assertEqual([], [Fragment || Fragment <- fragments(S3, Node, Stream), Fragment < First]),
    ?assert(lists:any(fun(Fragment) -> Fragment < First end, Before)),
    Begin = begins(Node, Stream),
    ok = whole(Node, Stream, Begin, 420).

max_age_of_a_policy_bounds_both_tiers(Config) ->
    {Node, S3, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 300}),
    _ = tier(Node, Stream, 300),
    ok = set_policy(Node, Stream, ~"max-age", ~"2s"),
    %% The stream continues until the first records are too old.
    End = continue_until(Node, Stream, 300, fun() -> element(1, range(Node, Stream)) >= 300 end),
    %% From here on nothing grows too old any more.
    ok = stream_s3_ct_node:rpc(Node, rabbit_policy, delete, [~"/", Stream, ~"ct"]),
    ok = publish(Node, Stream, {End, 10}),
    ok = flush(Node, Stream, End + 10),
    ok = wait_gone(S3, Node, Stream),
    Begin = begins(Node, Stream),
    ok = whole(Node, Stream, Begin, End + 10).

a_bound_of_the_stream_itself_holds_from_the_start(Config) ->
    {Node, S3, _} = setup(Config),
    Stream = ~"bounded",
    ok = create(Node, Stream, #{~"max-length-bytes" => ~"1000000"}),
    ok = publish(Node, Stream, {0, 400}),
    ok = flush(Node, Stream, 400),
    First = wait_begins(Node, Stream, 250),
    ok = wait_gone(S3, Node, Stream),
    ?assert(First =< 390),
    ok = whole(Node, Stream, begins(Node, Stream), 400).

a_policy_that_goes_keeps_what_is_there(Config) ->
    {Node, S3, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 300}),
    _ = tier(Node, Stream, 300),
    ok = set_policy(Node, Stream, ~"max-length-bytes", 1_000_000),
    ok = publish(Node, Stream, {300, 10}),
    ok = flush(Node, Stream, 310),
    First = wait_begins(Node, Stream, 1),
    ok = wait_gone(S3, Node, Stream),
    ok = stream_s3_ct_node:rpc(Node, rabbit_policy, delete, [~"/", Stream, ~"ct"]),
    ok = publish(Node, Stream, {310, 300}),
    _ = tier(Node, Stream, 610),
    ?assertEqual({First, 610}, range(Node, Stream)),
    ?assert(floor(Node, Stream) > First),
    ok = whole(Node, Stream, begins(Node, Stream), 610).

a_deleted_stream_leaves_no_object(Config) ->
    {Node, S3, Stream} = setup(Config),
    ok = publish(Node, Stream, {0, 200}),
    ok = flush(Node, Stream, 200),
    Id = stream_s3_ct_tier:stream_id(Node, Stream),
    ?assertMatch([_ | _], stream_s3_ct_s3:keys(S3, [Id])),
    ok = stream_s3_ct_amqp:delete(Node, Stream),
    ok = until(
        "its objects are gone", fun() -> stream_s3_ct_s3:keys(S3, [Id]) =:= [] andalso ok end
    ).

the_neighbour_has_kept_everything(Config) ->
    {Node, S3, _} = setup(Config),
    ?assertEqual(proplists:get_value(neighbours, Config), fragments(S3, Node, ?NEIGHBOUR)),
    ok = whole(Node, ?NEIGHBOUR, 0, 400),
    ?assertEqual([], stream_s3_ct_node:errors(Node)).

%% Helpers -----------------------------------------------------------------------------------------

setup(Config) ->
    {
        proplists:get_value(broker, Config),
        proplists:get_value(s3, Config),
        proplists:get_value(stream, Config)
    }.

create(Node, Stream, Args) ->
    with_client(Node, fun(Client) ->
        stream_s3_ct_client:create(
            Client, Stream, Args#{~"stream-max-segment-size-bytes" => ~"1000000"}
        )
    end).

publish(Node, Stream, Records) ->
    with_client(Node, fun(Client) -> fill(Client, Stream, Records) end).

%% From there on, everything is as it was published.
whole(Node, Stream, First, End) ->
    with_client(
        Node, fun(Client) -> read(Client, subscribe(Client, Stream, first, 10), First, End) end
    ).

%% Where the stream begins for consumers and in the statistics. The local log may reach further back than what is
%% left in S3: of it whole segments go.
begins(Node, Stream) ->
    First = min(element(1, range(Node, Stream)), floor(Node, Stream)),
    with_client(Node, fun(Client) ->
        ?assertMatch(#{id := First}, chunk(Client, subscribe(Client, Stream, first, 1))),
        ?assertMatch(#{id := First}, chunk(Client, subscribe(Client, Stream, 0, 1))),
        ?assertMatch(#{~"first_chunk_id" := First}, stats(Client, Stream)),
        First
    end).

%% Waits until the stream begins there or later.
wait_begins(Node, Stream, AtLeast) ->
    until("retention takes the beginning", fun() ->
        {First, _} = range(Node, Stream),
        First >= AtLeast andalso First
    end).

%% Waits until no object is left of what the manifest does not name any more.
wait_gone(S3, Node, Stream) ->
    until("objects of expired fragments are deleted", fun() ->
        {First, _} = range(Node, Stream),
        hd(fragments(S3, Node, Stream)) >= First andalso ok
    end).

%% Publishes chunk after chunk until the condition holds. Answers where the stream ends.
continue_until(Node, Stream, Next, Condition) ->
    with_client(Node, fun(Client) ->
        Ends = counters:new(1, []),
        ok = counters:put(Ends, 1, Next),
        Continue = fun() ->
            End = counters:get(Ends, 1),
            ok = fill(Client, Stream, {End, 10}),
            ok = counters:add(Ends, 1, 10),
            Condition() andalso End + 10
        end,
        until("the condition of a stream that continues", Continue, 60_000)
    end).
