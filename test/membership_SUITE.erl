%% Three nodes: streams get the members that they should have and lose those whose nodes are gone, if asked to; and
%% whichever node has the writer uploads.
%%
%% One story: the order of the cases matters. The interval of the reconciler is an hour, so whatever it does here a
%% trigger has made it do.
-module(membership_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    it_is_off_by_default/1,
    an_operator_policy_overrules_the_policy_of_a_user/1,
    a_stream_grows_to_its_target_when_it_is_enabled/1,
    a_new_replica_serves_history_that_it_never_had/1,
    a_new_leader_carries_on_the_upload/1,
    members_agree_on_the_statistics_of_both_tiers/1,
    a_policy_is_a_trigger_and_members_are_added_one_after_the_other/1,
    a_writer_that_comes_is_a_trigger/1,
    a_policy_that_makes_no_sense_is_refused_and_the_one_before_stays/1,
    a_node_that_comes_back_is_a_trigger/1,
    a_minority_changes_nothing/1,
    members_on_a_forgotten_node_are_removed/1,
    nothing_went_wrong_meanwhile/1
]).

-import(stream_s3_ct_node, [rpc/4, log/1]).
-import(stream_s3_ct_client, [with_client/2, subscribe/4]).
-import(stream_s3_ct_records, [fill/3, read/4]).
-import(stream_s3_ct_tier, [
    counter/2, counter/3, flush/3, leader/2, members/2, wait_member/2, wait_members/3
]).
-import(stream_s3_ct_wait, [until/3]).

-define(RECONCILER, rabbitmq_stream_s3_membership_reconciliation).
-define(TARGET, ~"stream-target-group-size").
-define(COUNT, 400).
-define(TIER, [{"fragment_size", "500000"}]).
-define(ENABLED, [
    {"continuous_membership_reconciliation.enabled", "true"},
    {"continuous_membership_reconciliation.auto_remove", "true"},
    {"continuous_membership_reconciliation.trigger_interval", "1s"},
    {"continuous_membership_reconciliation.interval", "1h"}
]).

suite() ->
    [{timetrap, {minutes, 4}}].

all() ->
    [
        it_is_off_by_default,
        an_operator_policy_overrules_the_policy_of_a_user,
        a_stream_grows_to_its_target_when_it_is_enabled,
        a_new_replica_serves_history_that_it_never_had,
        a_new_leader_carries_on_the_upload,
        members_agree_on_the_statistics_of_both_tiers,
        a_policy_is_a_trigger_and_members_are_added_one_after_the_other,
        a_writer_that_comes_is_a_trigger,
        a_policy_that_makes_no_sense_is_refused_and_the_one_before_stays,
        a_node_that_comes_back_is_a_trigger,
        a_minority_changes_nothing,
        members_on_a_forgotten_node_are_removed,
        nothing_went_wrong_meanwhile
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("membership-suite"),
    Names = ["member1", "member2", "member3"],
    Nodes = stream_s3_ct_node:start_all([stream_s3_ct_tier:node(Name, S3, ?TIER) || Name <- Names]),
    [ok = stream_s3_ct_node:join(Node, hd(Nodes)) || Node <- tl(Nodes)],
    [{s3, S3}, {nodes, Nodes} | Config].

end_per_suite(Config) ->
    [ok = stream_s3_ct_node:wipe(Node) || Node <- cluster(Config)],
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

it_is_off_by_default(Config) ->
    [Node | _] = Nodes = cluster(Config),
    ok = create(Node, ~"grown", 2),
    ok = target(Node, ~"grown", 3),
    [?assertEqual(undefined, rpc(N, erlang, whereis, [?RECONCILER])) || N <- Nodes],
    [?assertEqual(0, counter(N, ~"membership_rounds_total")) || N <- Nodes],
    ?assertEqual(2, map_size(members(Node, ~"grown"))).

an_operator_policy_overrules_the_policy_of_a_user(Config) ->
    [Node | _] = cluster(Config),
    ok = create(Node, ~"ruled", 1),
    ok = target(Node, ~"ruled", 1),
    Set = fun(Size) ->
        Definition = iolist_to_binary(json:encode(#{?TARGET => Size})),
        Args = [~"/", ~"ruled-by", ~"^ruled$", Definition, ~"0", ~"streams", ~"ct"],
        rpc(Node, rabbit_policy, parse_set_op, Args)
    end,
    ?assertMatch({error_string, _}, Set(0)),
    ok = Set(2),
    Target = fun() ->
        {ok, Queue} = rpc(Node, rabbit_amqqueue, lookup, [~"ruled", ~"/"]),
        rpc(Node, rabbitmq_stream_s3_membership_policy, target_size, [Queue])
    end,
    ok = until("both policies apply", fun() -> Target() =:= 2 andalso ok end, 10_000),
    ok = rpc(Node, rabbit_policy, delete_op, [~"/", ~"ruled-by", ~"ct"]),
    ok = until("the user's is left", fun() -> Target() =:= 1 andalso ok end, 10_000),
    ok = stream_s3_ct_amqp:delete(Node, ~"ruled").

a_stream_grows_to_its_target_when_it_is_enabled(Config) ->
    [Node | _] = Nodes = cluster(Config),
    S3 = proplists:get_value(s3, Config),
    [
        N = stream_s3_ct_node:restart(
            N, element(2, stream_s3_ct_tier:node("", S3, ?TIER ++ ?ENABLED))
        )
     || N <- Nodes
    ],
    ok = wait_members(Node, ~"grown", names(Nodes)),
    ?assertEqual(1, counted(Nodes, ~"replicas_added")).

a_new_replica_serves_history_that_it_never_had(Config) ->
    Nodes = cluster(Config),
    ok = flush(leader(Nodes, ~"grown"), ~"grown", ?COUNT),
    [ok = whole(Node, ~"grown", ?COUNT) || Node <- Nodes],
    [?assert(counter(Node, ~"chunks_delivered_total") > 0) || Node <- Nodes].

a_new_leader_carries_on_the_upload(Config) ->
    Nodes = cluster(Config),
    Before = leader(Nodes, ~"grown"),
    After = move_leader(Nodes, ~"grown"),
    ?assertNotEqual(maps:get(node, Before), maps:get(node, After)),
    ok = publish(After, ~"grown", {?COUNT, ?COUNT}),
    ok = flush(After, ~"grown", 2 * ?COUNT),
    Fragments = stream_s3_ct_tier:fragments(proplists:get_value(s3, Config), After, ~"grown"),
    ?assertEqual(Fragments, lists:usort(Fragments)),
    ?assert(lists:last(Fragments) >= ?COUNT),
    [ok = whole(Node, ~"grown", 2 * ?COUNT) || Node <- Nodes].

members_agree_on_the_statistics_of_both_tiers(Config) ->
    Nodes = cluster(Config),
    Stats = [
        with_client(Node, fun(Client) -> stream_s3_ct_client:stats(Client, ~"grown") end)
     || Node <- Nodes
    ],
    ?assertMatch([#{~"first_chunk_id" := 0, ~"committed_chunk_id" := 790}], lists:usort(Stats)).

a_policy_is_a_trigger_and_members_are_added_one_after_the_other(Config) ->
    [Node, Other | _] = Nodes = cluster(Config),
    Before = counted(Nodes, ~"replicas_added"),
    ok = create(Node, ~"later", 1),
    ?assertEqual(1, map_size(members(Node, ~"later"))),
    ok = target(Node, ~"later", 3),
    ok = wait_members(Node, ~"later", names(Nodes)),
    ?assertEqual(Before + 2, counted(Nodes, ~"replicas_added")),
    ok = whole(Other, ~"later", ?COUNT).

%% Nobody else has a reason to look: the node that had the writer never got to it, the others have looked.
a_writer_that_comes_is_a_trigger(Config) ->
    [Node | Others] = Nodes = cluster(Config),
    Before = counted(Others, ~"replicas_added"),
    ok = create(Node, ~"moves", 2),
    ?assertEqual(maps:get(node, Node), maps:get(node, leader(Nodes, ~"moves"))),
    ok = rpc(Node, sys, suspend, [?RECONCILER]),
    Looked = [{N, counter(N, ~"membership_rounds_total")} || N <- Others],
    ok = target(Node, ~"moves", 3),
    [
        ok = until(
            "it has looked",
            fun() -> counter(N, ~"membership_rounds_total") > Rounds andalso ok end,
            60_000
        )
     || {N, Rounds} <- Looked
    ],
    ?assertEqual(2, map_size(members(Node, ~"moves"))),
    _ = move_leader(Nodes, ~"moves"),
    ok = wait_members(Node, ~"moves", names(Nodes)),
    ?assertEqual(Before + 1, counted(Others, ~"replicas_added")),
    ok = rpc(Node, sys, resume, [?RECONCILER]),
    ok = stream_s3_ct_amqp:delete(Node, ~"moves").

a_policy_that_makes_no_sense_is_refused_and_the_one_before_stays(Config) ->
    [Node | _] = cluster(Config),
    [
        begin
            {error_string, Text} = target(Node, ~"grown", Size),
            ?assertMatch({match, _}, re:run(Text, "must be a number from 1 to 255"))
        end
     || Size <- [0, -1, 256, ~"three"]
    ],
    Policy = rpc(Node, rabbit_policy, lookup, [~"/", ~"grown"]),
    ?assertEqual([{?TARGET, 3}], proplists:get_value(definition, Policy)).

a_node_that_comes_back_is_a_trigger(Config) ->
    [Node, Other, Third] = Nodes = cluster(Config),
    Before = counted([Node, Other], ~"replicas_added"),
    ok = stream_s3_ct_node:stop(Third),
    ok = create(Node, ~"waits", 2),
    ok = target(Node, ~"waits", 3),
    Waits = fun(N) -> re:run(log(N), "wait for a change: \\[[^]]*node_down") =/= nomatch end,
    ok = until("it waits", fun() -> lists:any(Waits, [Node, Other]) andalso ok end, 60_000),
    ?assertEqual(2, map_size(members(Node, ~"waits"))),
    {Name, Options} = stream_s3_ct_tier:node(
        "member3", proplists:get_value(s3, Config), ?TIER ++ ?ENABLED
    ),
    Third = stream_s3_ct_node:start(Name, Options),
    ok = wait_members(Node, ~"waits", names(Nodes)),
    ?assertEqual(Before + 1, counted([Node, Other], ~"replicas_added")).

%% Alone, a node cannot know whether the others are gone.
a_minority_changes_nothing(Config) ->
    Nodes = cluster(Config),
    Alone = leader(Nodes, ~"grown"),
    Others = Nodes -- [Alone],
    Changes = fun() ->
        [
            counted([Alone], Name)
         || Name <- [~"replicas_added", ~"replicas_removed", ~"refused"]
        ]
    end,
    Before = Changes(),
    Said = occurrences(Alone, ~"no_majority"),
    [ok = stream_s3_ct_node:kill(Node) || Node <- Others],
    Knows = fun() -> occurrences(Alone, ~"no_majority") > Said andalso ok end,
    ok = until("it has looked, and cannot know", Knows, 90_000),
    ?assertEqual(Before, Changes()),
    S3 = proplists:get_value(s3, Config),
    Started = stream_s3_ct_node:start_all([
        stream_s3_ct_tier:node(Name, S3, ?TIER ++ ?ENABLED)
     || #{name := Name} <- Others
    ]),
    ?assertEqual(Others, Started),
    [ok = wait_members(Alone, Stream, names(Nodes)) || Stream <- [~"grown", ~"later", ~"waits"]].

members_on_a_forgotten_node_are_removed(Config) ->
    [Node, Other, Gone] = cluster(Config),
    Stay = [Node, Other],
    ok = stream_s3_ct_node:stop(Gone),
    %% Only the cluster forgets: the command of the same name removes replicas itself.
    ok = rpc(Node, rabbit_db_cluster, forget_member, [maps:get(node, Gone), false]),
    Ends = [{~"grown", 2 * ?COUNT}, {~"later", ?COUNT}, {~"waits", ?COUNT}],
    [
        begin
            Removed = fun() ->
                not lists:member(maps:get(node, Gone), recorded(Node, Stream)) andalso ok
            end,
            ok = until("the member is removed", Removed, 90_000),
            ok = wait_members(Node, Stream, names(Stay)),
            ok = publish(leader(Stay, Stream), Stream, {End, 100}),
            ok = whole(Other, Stream, End + 100)
        end
     || {Stream, End} <- Ends
    ],
    ?assertEqual(3, counted(Stay, ~"replicas_removed")).

nothing_went_wrong_meanwhile(Config) ->
    [Node, Other | _] = cluster(Config),
    Ours = fun(Line) -> string:find(Line, "stream_s3") =/= nomatch end,
    [?assertEqual(0, counter(N, ~"native_panics_total")) || N <- [Node, Other]],
    [?assertEqual([], lists:filter(Ours, stream_s3_ct_node:errors(N))) || N <- [Node, Other]].

%% Helpers -----------------------------------------------------------------------------------------

cluster(Config) ->
    proplists:get_value(nodes, Config).

names(Nodes) ->
    [Name || #{node := Name} <- Nodes].

create(Node, Stream, Size) ->
    Args = #{
        ~"stream-max-segment-size-bytes" => ~"1000000",
        ~"initial-cluster-size" => integer_to_binary(Size)
    },
    ok = with_client(Node, fun(Client) -> stream_s3_ct_client:create(Client, Stream, Args) end),
    publish(Node, Stream, {0, ?COUNT}).

publish(Node, Stream, Records) ->
    with_client(Node, fun(Client) -> fill(Client, Stream, Records) end).

whole(Node, Stream, End) ->
    ok = wait_member(Node, Stream),
    with_client(
        Node, fun(Client) -> read(Client, subscribe(Client, Stream, first, 10), 0, End) end
    ).

target(Node, Stream, Size) ->
    stream_s3_ct_tier:set_policy(Node, Stream, ?TARGET, Size).

counted(Nodes, Change) ->
    Labels = <<"change=\"", Change/binary, "\"">>,
    lists:sum([counter(Node, ~"membership_changes_total", Labels) || Node <- Nodes]).

occurrences(Node, Text) ->
    length(binary:matches(log(Node), Text)).

%% The members that the queue's record has.
recorded(Node, Stream) ->
    {ok, Queue} = rpc(Node, rabbit_amqqueue, lookup, [Stream, ~"/"]),
    maps:get(nodes, rpc(Node, amqqueue, get_type_state, [Queue])).

%% The coordinator grants a wish only to one of the first members to stop.
move_leader(Nodes, Stream) ->
    #{node := Before} = leader(Nodes, Stream),
    Wish = hd([Member || Member := _ <- members(hd(Nodes), Stream), Member =/= Before]),
    until("another leader", fun() ->
        case leader(Nodes, Stream) of
            #{node := Before} = Node ->
                _ = rpc(Node, rabbit_stream_queue, restart_stream, [
                    ~"/", Stream, #{preferred_leader_node => Wish}
                ]),
                false;
            Node ->
                Node
        end
    end, 90_000).
