%% What a recovery would do with what the bucket has.
-module(rabbitmq_stream_s3_recovery_plan_tests).

-include_lib("eunit/include/eunit.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-define(PLAN, rabbitmq_stream_s3_recovery_plan).

found(Id) -> found(Id, #{}).

found(Id, More) ->
    maps:merge(
        #{
            stream_id => Id,
            vhost => <<"/">>,
            queue => <<"orders">>,
            arguments => ~"AAAA",
            cluster => undefined,
            root => {3, 17},
            modified_ms => 1_000,
            recoveries => 0,
            first_offset => 0,
            next_offset => 100,
            total_size => 1_000,
            passed_over => [],
            lost_up_to => undefined,
            objects => undefined
        },
        More
    ).

name(Queue) -> rabbit_misc:r(<<"/">>, queue, Queue).

verdicts(Found, Selection, Cluster) ->
    #{Id => V || #{verdict := V, found := #{stream_id := Id}} <- ?PLAN:judge(Found, Selection, Cluster)}.

nothing_here() -> {#{}, [], []}.

not_here_test() ->
    [Judged] = ?PLAN:judge([found(~"a")], #{}, nothing_here()),
    ?assertMatch(#{verdict := recoverable, text := <<>>}, Judged),
    ?assertEqual(name(~"orders"), maps:get(name, Judged)).

the_newest_of_one_name_wins_test() ->
    Both = [
        found(~"old"),
        found(~"new", #{modified_ms => 2_000}),
        found(~"unknown", #{modified_ms => undefined})
    ],
    Wanted = #{~"old" => older_history, ~"new" => recoverable, ~"unknown" => older_history},
    ?assertEqual(Wanted, verdicts(Both, #{}, nothing_here())),
    ?assertEqual(Wanted, verdicts(lists:reverse(Both), #{}, nothing_here())).

what_is_here_is_left_alone_test() ->
    Here = fun(What) -> verdicts([found(~"a")], #{}, {#{name(~"orders") => What}, [], []}) end,
    ?assertEqual(#{~"a" => in_use}, Here({stream, ~"a", started})),
    ?assertEqual(#{~"a" => interrupted}, Here({stream, ~"a", not_started})),
    ?assertEqual(#{~"a" => name_taken}, Here({stream, ~"b", started})),
    ?assertEqual(#{~"a" => name_taken}, Here(other)),
    %% Two queues must never write to one folder, whatever their names.
    ?assertEqual(#{~"a" => in_use}, verdicts([found(~"a")], #{}, {#{}, [~"a"], []})),
    Again = verdicts([found(~"a")], #{stream_id => ~"a", as => ~"copy"}, {#{}, [~"a"], []}),
    ?assertEqual(#{~"a" => in_use}, Again).

%% What is left of it is being removed: also who asks for just this one must not get half of it.
what_this_cluster_has_deleted_does_not_come_back_test() ->
    Deleted = {#{}, [], [~"a"]},
    ?assertEqual(
        #{~"a" => deleted, ~"b" => recoverable},
        verdicts([found(~"a"), found(~"b", #{queue => ~"bills"})], #{}, Deleted)
    ),
    Chosen = #{stream_id => ~"a", as => ~"copy"},
    ?assertEqual(#{~"a" => deleted}, verdicts([found(~"a")], Chosen, Deleted)).

another_name_test() ->
    Selection = #{stream_id => ~"a", as => ~"copy"},
    Taken = {#{name(~"orders") => {stream, ~"b", started}}, [~"b"], []},
    [Judged] = ?PLAN:judge([found(~"a")], Selection, Taken),
    ?assertMatch(#{verdict := recoverable}, Judged),
    ?assertEqual(name(~"copy"), maps:get(name, Judged)).

without_a_name_test() ->
    Unnamed = found(~"a", #{vhost => undefined, queue => undefined}),
    [Judged] = ?PLAN:judge([Unnamed], #{}, nothing_here()),
    ?assertMatch(#{verdict := unnamed}, Judged),
    ?assertNot(is_map_key(name, Judged)),
    Named = #{stream_id => ~"a", vhost => ~"/", as => ~"copy"},
    ?assertEqual(#{~"a" => recoverable}, verdicts([Unnamed], Named, nothing_here())).

selection_test() ->
    Found = [found(~"a"), found(~"b", #{queue => ~"bills"}), found(~"c", #{vhost => ~"other"})],
    ?assertEqual([~"b"], maps:keys(verdicts(Found, #{queue => ~"bills"}, nothing_here()))),
    ?assertEqual([~"c"], maps:keys(verdicts(Found, #{vhost => ~"other"}, nothing_here()))),
    ?assert(?PLAN:selected(~"a", #{})),
    ?assert(?PLAN:selected(~"a", #{stream_id => ~"a"})),
    ?assertNot(?PLAN:selected(~"b", #{stream_id => ~"a"})).

what_is_wrong_is_said_test() ->
    Text = fun(More) ->
        [#{text := Text}] = ?PLAN:judge([found(~"a", More)], #{}, nothing_here()),
        Text
    end,
    ?assertEqual(~"it has no record", Text(#{first_offset => 100})),
    ?assertEqual(
        ~"its arguments are not known: it gets none, and so no retention of its own",
        Text(#{arguments => undefined})
    ),
    ?assertEqual(~"no manifest can be read: one is made from the fragments", Text(#{root => rebuilt})),
    ?assertEqual(
        ~"the newest manifest is damaged: offsets 100 to 149 are lost",
        Text(#{passed_over => [{~"key", ~"why"}], lost_up_to => 150})
    ),
    Objects = #{
        named => 7,
        affected_count => 2,
        affected => [{~"key", 20, 30, ~"missing"}, {~"more", 40, 50, ~"missing"}],
        unnamed => 0,
        unnamed_bytes => 0
    },
    ?assertEqual(
        ~"2 objects are missing or damaged, the first has offsets 20 to 29", Text(#{objects => Objects})
    ).
