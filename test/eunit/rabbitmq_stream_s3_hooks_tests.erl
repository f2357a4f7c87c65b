-module(rabbitmq_stream_s3_hooks_tests).
-include_lib("eunit/include/eunit.hrl").

-define(LOG, stream_s3_test_log).
-define(HOOKS, rabbitmq_stream_s3_hooks).

hooks_test_() ->
    [{atom_to_list(name(T)), ?_test(run(T))} || T <- [
        fun a_new_writer_is_announced/0,
        fun an_acceptor_is_announced/0,
        fun a_missing_shell_does_not_fail_the_log/0,
        fun a_change_of_retention_is_announced/0,
        fun retention_trims_what_is_durable/0,
        fun retention_waits_for_a_pending_manifest/0,
        fun retention_of_an_unknown_folder_is_stock/0,
        fun an_evaluation_is_in_the_name_of_the_member/0,
        fun an_evaluation_moves_the_floor/0,
        fun tracking_looks_at_both_tiers/0,
        fun an_inert_node_keeps_what_it_protects/0
    ]].

name(Test) ->
    {name, Name} = erlang:fun_info(Test, name),
    Name.

%% In one process, because the process of a test stands in for the reconciler.
run(Test) ->
    true = setup(),
    try
        Test()
    after
        cleanup(ok)
    end.

setup() ->
    ok = ?LOG:setup(),
    true = register(rabbitmq_stream_s3_reconciler, self()).

cleanup(_) ->
    _ = whereis(rabbitmq_stream_s3_reconciler) =/= undefined andalso
        unregister(rabbitmq_stream_s3_reconciler),
    flush(),
    ?LOG:cleanup(ok).

flush() ->
    _ = announced() =:= none orelse flush().

announced() ->
    receive
        {'$gen_cast', Cast} -> Cast
    after 0 -> none
    end.

a_new_writer_is_announced() ->
    Log = ?LOG:new("writer", #{retention => [{'fun', x}, {max_bytes, 7}], reference => a_queue}),
    StreamId = ?LOG:stream_id(Log),
    Dir = ?LOG:dir(Log),
    {attach, writer, Pid, Info} = announced(),
    ?assertEqual(self(), Pid),
    ?assertMatch(
        #{
            stream_id := StreamId,
            dir := Dir,
            epoch := 1,
            reference := a_queue,
            retention := [{max_bytes, 7}]
        },
        Info
    ),
    #{shared := Shared, counter := Counter} = Info,
    _ = ?LOG:append(1, Log),
    ?assertEqual(0, osiris_log_shared:committed_chunk_id(Shared)),
    ?assertEqual(1, counters:get(Counter, 1)),
    ?assertEqual([{StreamId, pending}], rabbitmq_stream_s3_manifest_cache:ranges()),
    ?assertEqual({ok, StreamId}, rabbitmq_stream_s3_manifest_cache:dir(Dir)),
    ?assertEqual({ok, self()}, rabbitmq_stream_s3_manifest_cache:member(StreamId)),
    ?assertEqual(pending, rabbitmq_stream_s3_nif:manifest_range(double, StreamId)).

an_acceptor_is_announced() ->
    Log = ?LOG:append(4, ?LOG:new("acceptor")),
    {attach, writer, _, #{name := Name, dir := Dir}} = announced(),
    Config = #{name => Name, dir => Dir, epoch => 2, leader_pid => self()},
    StreamId = list_to_binary(Name),
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, #{first_offset => 0, next_offset => 4}),
    _ = osiris_log:init_acceptor({0, 7}, [{1, 6}], Config),
    %% Its log may begin above what was known.
    ?assertEqual(pending, rabbitmq_stream_s3_manifest_cache:range(StreamId)),
    {attach, acceptor, _, Info} = announced(),
    ?assertMatch(#{epoch := 2, leader_pid := _, shared := _, counter := _}, Info),
    ?assertEqual([0, 6], ?LOG:segments(Log)).

a_missing_shell_does_not_fail_the_log() ->
    true = unregister(rabbitmq_stream_s3_reconciler),
    ok = rabbitmq_stream_s3_manifest_cache:delete(),
    Log = ?LOG:append(4, ?LOG:new("alone")),
    ?assertMatch({{0, 7}, _, 2}, osiris_log:evaluate_retention(?LOG:dir(Log), [])).

a_change_of_retention_is_announced() ->
    Dir = filename:join("/tmp", "stream_s3_eunit_" ++ os:getpid()),
    Config = #{name => "policy", dir => filename:join(Dir, "policy"), epoch => 1},
    ok = filelib:ensure_path(filename:join(Dir, "policy")),
    State = osiris_log:init(Config),
    {attach, writer, _, _} = announced(),
    _ = osiris_log:update_retention([], State),
    ?assertEqual({update_retention, <<"policy">>, self(), []}, announced()).

retention_trims_what_is_durable() ->
    Log = ?LOG:append(9, ?LOG:new("durable")),
    ok = rabbitmq_stream_s3_manifest_cache:put(?LOG:stream_id(Log), #{first_offset => 0, next_offset => 13}),
    ?assertMatch({{12, 17}, _, 1}, osiris_log:evaluate_retention(?LOG:dir(Log), [{'fun', x}])),
    ?assertEqual([12], ?LOG:segments(Log)).

retention_waits_for_a_pending_manifest() ->
    Log = ?LOG:append(9, ?LOG:new("pending")),
    ?assertMatch({{0, 17}, _, 3}, osiris_log:evaluate_retention(?LOG:dir(Log), [{'fun', x}])).

retention_of_an_unknown_folder_is_stock() ->
    Log = ?LOG:append(9, ?LOG:new("unknown")),
    true = ets:delete_all_objects(rabbitmq_stream_s3_manifest_members),
    ?assertMatch(
        {{12, 17}, _, 1}, osiris_log:evaluate_retention(?LOG:dir(Log), [{max_bytes, 1}])
    ).

an_evaluation_moves_the_floor() ->
    {ok, Pid} = osiris_retention:start_link(),
    try
        Log = ?LOG:append(9, ?LOG:new("floor")),
        {attach, writer, _, Info} = announced(),
        ok = rabbitmq_stream_s3_manifest_cache:put(?LOG:stream_id(Log), #{first_offset => 0, next_offset => 12}),
        ?assertEqual(0, ?LOG:floor(Log)),
        ok = rabbitmq_stream_s3_host_retention:evaluate(Info, none),
        %% It handles a batch newest first: the second answer comes after the evaluation.
        [ok, ok] = [gen_batch_server:call(osiris_retention, sync) || _ <- [1, 2]],
        ?assertEqual(12, ?LOG:floor(Log)),
        #{counter := Counter} = Info,
        ?assertEqual([12, 1], [counters:get(Counter, N) || N <- [2, 5]])
    after
        true = unlink(Pid),
        ok = gen_batch_server:stop(Pid)
    end.

an_evaluation_is_in_the_name_of_the_member() ->
    Log = ?LOG:new("timer", #{retention => [{max_age, 1000}]}),
    {attach, writer, Member, Info} = announced(),
    Test = self(),
    Retention = spawn_link(fun() ->
        receive
            Message -> Test ! Message
        end
    end),
    true = register(osiris_retention, Retention),
    Monitor = monitor(process, Retention),
    #{stream_id := StreamId} = Info,
    Opener = rabbitmq_stream_s3_manifest_cache:member(StreamId),
    ?assertEqual({ok, Member}, Opener),
    _ = spawn_link(fun() -> ok = rabbitmq_stream_s3_host_retention:evaluate(Info, Opener) end),
    receive
        {'DOWN', Monitor, process, Retention, _} -> ok
    end,
    Dir = ?LOG:dir(Log),
    ?assertMatch({eval, Member, _, Dir, [{max_age, 1000}], _}, announced()).

%% Osiris forgets stored offsets of consumers below the first offset of the log.
tracking_looks_at_both_tiers() ->
    Dir = filename:join(["/tmp", "stream_s3_eunit_" ++ os:getpid(), "tracking"]),
    ok = filelib:ensure_path(Dir),
    State = osiris_log:init(#{name => <<"tracking">>, dir => Dir, epoch => 1}),
    counters:put(osiris_log:counters_ref(State), 2, 50),
    counters:put(osiris_log:counters_ref(State), 3, 5000),
    Firsts = fun() -> {osiris_log:first_offset(State), osiris_log:first_timestamp(State)} end,
    ?assertEqual({0, 0}, Firsts()),
    Range = #{first_offset => 10, next_offset => 40, first_timestamp => 1000},
    ok = rabbitmq_stream_s3_manifest_cache:put(<<"tracking">>, Range),
    ?assertEqual({10, 1000}, Firsts()),
    ok = rabbitmq_stream_s3_manifest_cache:put(<<"tracking">>, Range#{first_offset := 40}),
    ?assertEqual({50, 5000}, Firsts()),
    %% At the start of a node a log may open before anybody can be told of it.
    ok = rabbitmq_stream_s3_manifest_cache:forget(<<"tracking">>),
    ?assertEqual({0, 0}, Firsts()),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ?assertEqual({50, 5000}, Firsts()).

%% No shell and no engine, and a stream that has a manifest: nothing is forgotten, nothing is trimmed,
%% and stock's own retention goes on. One that has none is stock.
an_inert_node_keeps_what_it_protects() ->
    ok = rabbitmq_stream_s3_manifest_cache:delete(),
    true = unregister(rabbitmq_stream_s3_reconciler),
    _ = persistent_term:erase({rabbitmq_stream_s3, engine}),
    ok = rabbitmq_stream_s3:set_mode({inert, no_bucket, <<"why">>}),
    Table = ets:new(rabbitmq_stream_s3_manifest_protection, [named_table, public]),
    true = ets:insert(Table, {complete, true}),
    Log = ?LOG:append(9, ?LOG:new("inert")),
    [{_, {unknown, _}}] = ets:lookup(Table, ?LOG:stream_id(Log)),
    true = ets:insert(Table, {<<"protected">>, listed}),
    ?assertEqual({0, 0}, firsts(opened("protected"))),
    Plain = opened("plain"),
    ?assertEqual({0, 0}, firsts(Plain)),
    true = ets:delete(Table, <<"plain">>),
    ?assertEqual({50, 5000}, firsts(Plain)),
    ?assertMatch({{0, 17}, _, 3}, osiris_log:evaluate_retention(?LOG:dir(Log), [{'fun', x}])),
    ?assertMatch({{12, 17}, _, 1}, osiris_log:evaluate_retention(?LOG:dir(Log), [{max_bytes, 1}])),
    %% Readers: ours, also where the local log is all that is needed; stock's if it is not protected.
    Readable = ?LOG:append(9, ?LOG:new("inert_readable")),
    Context = ?LOG:context(#{}, Readable),
    true = ets:insert(Table, {?LOG:stream_id(Readable), listed}),
    {ok, Ours} = osiris_log:init_offset_reader(last, Context),
    ?assertEqual(rabbitmq_stream_s3_log_reader, element(1, Ours)),
    ok = osiris_log:close(Ours),
    {ok, Whole} = osiris_log:init_offset_reader(first, Context),
    ?assertEqual({rabbitmq_stream_s3_log_reader, 0}, {element(1, Whole), osiris_log:next_offset(Whole)}),
    ok = osiris_log:close(Whole),
    true = ets:delete(Table, ?LOG:stream_id(Readable)),
    {ok, Stock} = osiris_log:init_offset_reader(first, Context),
    ?assertEqual(osiris_log, element(1, Stock)),
    ok = osiris_log:close(Stock),
    true = ets:delete(Table),
    ok = rabbitmq_stream_s3:erase_mode().

firsts(State) ->
    {osiris_log:first_offset(State), osiris_log:first_timestamp(State)}.

opened(Name) ->
    Dir = filename:join(["/tmp", "stream_s3_eunit_" ++ os:getpid(), Name]),
    ok = filelib:ensure_path(Dir),
    State = osiris_log:init(#{name => Name, dir => Dir, epoch => 1}),
    counters:put(osiris_log:counters_ref(State), 2, 50),
    counters:put(osiris_log:counters_ref(State), 3, 5000),
    State.
