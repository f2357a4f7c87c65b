%% What a stream's next member is: by example, and over clusters made by chance from a fixed seed.
-module(rabbitmq_stream_s3_membership_tests).

-include_lib("eunit/include/eunit.hrl").

-define(M, rabbitmq_stream_s3_membership).
-define(ALL, [a, b, c, d, e]).
-define(CASES, 30_000).

cluster() ->
    #{
        self => a,
        members => [a, b, c],
        running => [a, b, c],
        connected => [b, c],
        drained => [],
        load => #{},
        auto_remove => true
    }.

stream(Nodes) -> stream(Nodes, 3).

stream([Writer | Replicas] = Nodes, Target) ->
    Coordinated = #{Node => {self(), replica} || Node <- Replicas},
    #{
        recorded => Nodes,
        coordinated => Coordinated#{Writer => {self(), writer}},
        target => Target
    }.

examples_test_() ->
    Gone = (cluster())#{members := [a, b, d], running := [a, b, d], connected := [b, d]},
    Examples = [
        {"two of three grow", {add, c}, cluster(), stream([a, b])},
        {"three of three stay", none, cluster(), stream([a, b, c])},
        {"no target, no change", none, cluster(), stream([a, b], 0)},
        {"another node's stream", none, cluster(), stream([b, a])},
        {"one grows to three", {add, b}, cluster(), stream([a])},
        {"one does not grow to two for good", none,
            (cluster())#{members := [a, b], running := [a, b]}, stream([a])},
        {"one waits for the third node before it grows", {wait, node_down},
            (cluster())#{running := [a, b]}, stream([a])},
        {"the node with the fewest members", {add, c}, (cluster())#{load := #{b => 3, c => 2}},
            stream([a])},
        {"not a node in maintenance", none, (cluster())#{drained := [c]}, stream([a, b])},
        {"not out of a node in maintenance", none, (cluster())#{drained := [a]}, stream([a, b])},
        {"a member that is down", {wait, member_down}, (cluster())#{running := [a, c]},
            stream([a, b])},
        {"the node that could take it is down", {wait, node_down},
            (cluster())#{running := [a, b]}, stream([a, b])},
        {"a minority", {wait, no_majority}, (cluster())#{running := [a]}, stream([a], 3)},
        {"half is no majority", {wait, no_majority},
            (cluster())#{members := [a, b, c, d], running := [a, b]}, stream([a, b])},
        {"the metadata store has no majority", {wait, no_majority},
            (cluster())#{members := unknown}, stream([a, b])},
        {"the coordinator does not answer", {wait, coordinator_unknown}, cluster(),
            (stream([a, b]))#{coordinated := unknown}},
        {"a node that has gone", {remove, c}, Gone, stream([a, b, c])},
        {"a node that has gone stays unless enabled", none, Gone#{auto_remove := false},
            stream([a, b, c])},
        {"nothing is added beside it then", none, Gone#{auto_remove := false}, stream([a, c], 5)},
        {"one that is connected may be joining", {wait, still_connected}, Gone#{connected := [b, c]},
            stream([a, b, c])},
        {"removed before anything is added", {remove, c}, Gone, stream([a, c])},
        {"what the coordinator still has of it does not count", {add, d}, Gone,
            add(c, {undefined, replica}, stream([a, b]))},
        {"a replica is being added", {wait, change_under_way}, cluster(),
            add(c, {undefined, replica}, stream([a, b]))},
        {"a replica is starting", {wait, change_under_way}, cluster(),
            add(b, {undefined, replica}, stream([a, b]))},
        {"the writer is being elected", none, cluster(), add(a, {undefined, writer}, stream([a, b]))}
    ],
    [
        {Text, ?_assertEqual(Expected, ?M:decide(Cluster, Stream))}
     || {Text, Expected, Cluster, Stream} <- Examples
    ].

add(Node, Member, #{coordinated := Coordinated} = Stream) ->
    Stream#{coordinated := Coordinated#{Node => Member}}.

worth_asking_test_() ->
    Down = (cluster())#{running := [a, b], connected := [b]},
    [
        ?_assertNot(?M:worth_asking(cluster(), stream([a, b, c]))),
        ?_assertNot(?M:worth_asking(cluster(), stream([a, b], 2))),
        ?_assert(?M:worth_asking(cluster(), stream([a, b]))),
        ?_assert(?M:worth_asking((cluster())#{members := unknown}, stream([a, b, c]))),
        %% Its node may leave the cluster any moment.
        ?_assert(?M:worth_asking(Down, stream([a, b, c]))),
        ?_assertEqual({wait, member_down}, ?M:decide(Down, stream([a, b, c]))),
        ?_assertNot(?M:worth_asking(Down#{auto_remove := false}, stream([a, b, c])))
    ].

whatever_is_known_nothing_unsafe_is_decided_test_() ->
    {timeout, 120, fun() ->
        _ = rand:seed(exsss, {1, 2, 3}),
        Seen = lists:foldl(fun(_, Seen) -> check_one(Seen) end, #{}, lists:seq(1, ?CASES)),
        %% All of it has happened.
        [
            ?assert(maps:get(What, Seen, 0) > 20, {What, Seen})
         || What <- [none, wait, add, remove]
        ]
    end}.

check_one(Seen) ->
    Members = some([a | ?ALL]),
    Running = [Node || Node <- Members, chance(85)],
    Cluster = #{
        self => a,
        members =>
            case chance(95) of
                true -> Members;
                false -> unknown
            end,
        running => Running,
        connected => [Node || Node <- ?ALL -- [a], lists:member(Node, Running) orelse chance(5)],
        drained => [Node || Node <- Running, chance(5)],
        load => #{Node => rand:uniform(9) || Node <- ?ALL},
        auto_remove => chance(50)
    },
    Nodes = [a | some(?ALL) -- [a]],
    Stream = #{recorded := Recorded} = blur(stream(Nodes, rand:uniform(6) - 1)),
    Decision = ?M:decide(Cluster, Stream),
    %% The cheap question never hides a step.
    case Decision of
        {Step, _} when Step =:= add; Step =:= remove ->
            ?assert(?M:worth_asking(Cluster, Stream)),
            ?assertEqual(Members, maps:get(members, Cluster)),
            ?assert(2 * length(Running) > length(Members)),
            %% All that the cluster has of the stream is alive, so no copy is lost by a restart.
            #{coordinated := Coordinated} = Stream,
            [
                ?assertMatch(#{Node := {Pid, _}} when is_pid(Pid), Coordinated)
             || Node <- Recorded, lists:member(Node, Members)
            ];
        _ ->
            ok
    end,
    case Decision of
        {add, New} ->
            ?assert(lists:member(New, Running)),
            ?assertNot(lists:member(New, Recorded)),
            ?assert(length(Recorded) < maps:get(target, Stream));
        {remove, Old} ->
            ?assert(maps:get(auto_remove, Cluster)),
            ?assertNot(lists:member(Old, Members)),
            ?assertNot(lists:member(Old, maps:get(connected, Cluster))),
            ?assert(lists:member(Old, Recorded)),
            ?assertNotEqual(a, Old);
        _ ->
            ok
    end,
    Kind =
        case Decision of
            none -> none;
            {What, _} -> What
        end,
    Seen#{Kind => maps:get(Kind, Seen, 0) + 1}.

%% Now and then the coordinator says something else than the record.
blur(#{coordinated := Coordinated} = Stream) ->
    case rand:uniform(12) of
        1 -> Stream#{coordinated := unknown};
        2 -> add(one(?ALL), {undefined, replica}, Stream);
        3 -> Stream#{coordinated := maps:remove(one(?ALL), Coordinated)};
        4 -> add(a, {undefined, replica}, Stream);
        _ -> Stream
    end.

step_by_step_it_ends_at_the_target_test_() ->
    {timeout, 120, fun() ->
        _ = rand:seed(exsss, {4, 5, 6}),
        lists:foreach(fun(_) -> walk() end, lists:seq(1, 2_000))
    end}.

walk() ->
    Members = some([a | ?ALL]),
    Cluster = (cluster())#{members := Members, running := Members, connected := Members -- [a]},
    Target = rand:uniform(6) - 1,
    Start = [a | some(?ALL) -- [a]],
    End = walk(Cluster, Start, Target, 12),
    ?assertEqual([], End -- Members),
    Kept = [Node || Node <- Start, lists:member(Node, Members)],
    ?assertEqual([], Kept -- End),
    %% As many as asked for, or as there are; one less if that makes the number odd.
    Wanted = max(length(Kept), min(Target, length(Members))),
    ?assert(
        length(End) =:= Wanted orelse length(End) =:= Wanted - 1 andalso length(End) rem 2 =:= 1
    ).

walk(Cluster, Nodes, Target, Left) when Left > 0 ->
    Stream = stream(Nodes, Target),
    case ?M:decide(Cluster, Stream) of
        none -> Nodes;
        {add, Node} -> walk(Cluster, Nodes ++ [Node], Target, Left - 1);
        {remove, Node} -> walk(Cluster, lists:delete(Node, Nodes), Target, Left - 1)
    end.

some(Nodes) -> lists:usort([Node || Node <- Nodes, Node =:= a orelse chance(60)]).

one(Nodes) -> lists:nth(rand:uniform(length(Nodes)), Nodes).

chance(Percent) -> rand:uniform(100) =< Percent.

policy_test_() ->
    Validate = fun rabbitmq_stream_s3_membership_policy:validate_policy/1,
    Key = <<"stream-target-group-size">>,
    [?_assertEqual(ok, Validate([{Key, Size}])) || Size <- [1, 3, 255]] ++
        [
            ?_assertMatch({error, _, _}, Validate([{Key, Size}]))
         || Size <- [0, -1, 256, 1.5, <<"3">>, true]
        ].
