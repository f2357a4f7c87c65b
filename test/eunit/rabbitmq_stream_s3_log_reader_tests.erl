%% What readers deliver, and what they say when they cannot.
-module(rabbitmq_stream_s3_log_reader_tests).
-include_lib("eunit/include/eunit.hrl").

-export([log/2]).
-import(stream_s3_test_reader, [
    open/3, open/4, under_test/2, next/1, all/1, take/2, ids/1, close/1, tier/1, stock/4,
    uploaded/2, range/2, woken/0, not_woken/0, until_chunk/1, asks/1, asked_as_its_owner_does/1,
    readers/0, with_quiet_log/1, cached/1
]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(TAG, rabbitmq_stream_s3_log_reader).

log_reader_test_() ->
    {setup, fun ?READER:setup/0, fun ?READER:cleanup/1, [
        ?READER:both([
            fun local_reads_are_as_stock/1,
            fun remote_reads_are_as_local/1,
            fun waits_without_blocking_when_bytes_are_late/1,
            fun skips_many_chunks_in_turns/1,
            fun filters_remote_chunks/1,
            fun reports_remote_errors/1,
            fun outlives_a_store_that_is_unavailable/1,
            fun waits_while_the_plugin_is_off/1,
            fun says_each_outage_once/1
        ]),
        ?READER:named([
            fun a_connection_is_told_once_that_its_reader_has_failed/0,
            fun counts_once/0,
            fun outlives_the_code_of_the_plugin/0,
            fun iterates_many_and_batched_entries/0,
            fun sends_trailers_as_stock/0
        ])
    ]}.

local_reads_are_as_stock(How) ->
    Log = ?LOG:append(9, ?LOG:new("local")),
    uploaded(0, Log),
    Expected = stock(How, first, #{}, Log),
    {Chunks, Reader} = all(open(How, first, Log)),
    ?assertEqual([0, 2, 4, 6, 8, 10, 12, 14, 16], ids(Chunks)),
    ?assertEqual(Expected, Chunks),
    ?assertEqual(local, tier(Reader)),
    close(Reader).

remote_reads_are_as_local(How) ->
    Log = ?LOG:append(9, ?LOG:new("remote")),
    Expected = stock(How, first, #{}, Log),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Reader0 = open(How, first, Log),
    ?assertEqual(remote, tier(Reader0)),
    ?assertEqual(0, osiris_log:next_offset(element(3, Reader0))),
    {Chunks, Reader} = all(Reader0),
    ?assertEqual(Expected, Chunks),
    ?assertEqual(18, osiris_log:next_offset(element(3, Reader))),
    ?assertEqual(16, osiris_log:committed_chunk_id(element(3, Reader))),
    close(Reader),
    ?assertEqual(0, ?NIF:opened()).

waits_without_blocking_when_bytes_are_late(How) ->
    Log = ?LOG:append(9, ?LOG:new("late")),
    Expected = stock(How, first, #{}, Log),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    {First, Reader1} = take(2, open(How, first, Log)),
    ?NIF:stall(2),
    {end_of_stream, Reader2} = next(Reader1),
    {end_of_stream, Reader3} = next(Reader2),
    ?assertEqual(4, osiris_log:next_offset(element(3, Reader3))),
    ?assert(not_woken()),
    1 = ?NIF:wake(),
    ?assert(woken()),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader4).

skips_many_chunks_in_turns(How) ->
    Log0 = ?LOG:append([{<<"a">>, <<"first">>}], 0, <<>>, ?LOG:new("many")),
    Log1 = lists:foldl(
        fun(_, L) -> ?LOG:append([{<<"b">>, <<"other">>}], 0, <<>>, L) end,
        Log0,
        lists:seq(1, 150)
    ),
    Log = ?LOG:append([{<<"a">>, <<"last">>}], 0, <<>>, Log1),
    uploaded(152, Log),
    _ = ?LOG:trim(152, Log),
    {[{0, _}], Reader1} = take(1, open(How, first, #{filter_spec => #{filters => [<<"a">>]}}, Log)),
    Reader2 = asked_as_its_owner_does(Reader1),
    Skipped = osiris_log:next_offset(element(3, Reader2)),
    ?assertEqual(Skipped, 1 + 64 * asks(How)),
    %% One turn, also if the end was reported twice.
    ?assert(woken()),
    ?assert(not_woken()),
    {{151, _}, Reader3} = until_chunk(Reader2),
    close(Reader3).

filters_remote_chunks(How) ->
    %% A larger filter than the matcher expects at first.
    Log0 = ?LOG:new("filter", #{filter_size => 64}),
    Log = lists:foldl(
        fun(V, L) -> ?LOG:append([{V, <<"data ", V/binary>>}], 0, <<>>, L) end,
        Log0,
        [<<"a">>, <<"b">>, <<>>, <<"a">>, <<"c">>, <<"b">>, <<"c">>]
    ),
    uploaded(7, Log),
    Check = fun(Spec) ->
        Options = #{filter_spec => Spec},
        Expected = stock(How, first, Options, Log),
        Deleted = ids(Expected),
        {Deleted, Expected, Options}
    end,
    Cases = [
        Check(#{filters => [<<"a">>]}),
        Check(#{filters => [<<"b">>, <<"c">>]}),
        Check(#{filters => [<<"a">>], match_unfiltered => true}),
        Check(#{filters => [<<"z">>]})
    ],
    _ = ?LOG:trim(7, Log),
    [
        begin
            {Chunks, Reader} = all(open(How, first, Options, Log)),
            ?assertEqual(Ids, ids(Chunks)),
            ?assertEqual(Expected, Chunks),
            close(Reader)
        end
     || {Ids, Expected, Options} <- Cases
    ].

reports_remote_errors(How) ->
    Log = ?LOG:append(9, ?LOG:new("error")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    {_, Reader} = take(1, open(How, first, Log)),
    range({error, corrupt, <<"chunk 2">>}, Log),
    with_quiet_log(fun() ->
        {end_of_stream, Ended} = next(Reader),
        ?assertEqual({ended, 2}, {tier(Ended), osiris_log:next_offset(element(3, Ended))}),
        %% Its native reader is closed, and it is not tried again.
        ?assertEqual(0, ?NIF:opened()),
        range({0, 18}, Log),
        {end_of_stream, Same} = next(Ended),
        ?assertEqual(ended, tier(Same)),
        close(Same)
    end).

outlives_a_store_that_is_unavailable(How) ->
    Log = ?LOG:append(9, ?LOG:new("unavailable")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    {_, Reader} = take(1, open(How, first, Log)),
    range({error, unavailable, <<"no answer for 60 s">>}, Log),
    Waiting = with_quiet_log(fun() ->
        {end_of_stream, Next} = next(Reader),
        Next
    end),
    range({0, 18}, Log),
    {Rest, Last} = all(Waiting),
    ?assertEqual([2, 4, 6, 8, 10, 12, 14, 16], ids(Rest)),
    close(Last).

waits_while_the_plugin_is_off(How) ->
    Log = ?LOG:append(12, ?LOG:new("off")),
    Expected = stock(How, first, #{}, Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:trim(20, Log),
    Engine = persistent_term:get({rabbitmq_stream_s3, engine}),
    persistent_term:erase({rabbitmq_stream_s3, engine}),
    {[], Reader2} = with_quiet_log(fun() -> all(Reader1) end),
    persistent_term:put({rabbitmq_stream_s3, engine}, Engine),
    {Second, Reader3} = take(2, Reader2),
    ?assertEqual(remote, tier(Reader3)),
    %% Off and on again: the handles of before are of no use.
    ?NIF:restart(),
    persistent_term:erase({rabbitmq_stream_s3, engine}),
    {[], Reader4} = with_quiet_log(fun() -> all(Reader3) end),
    ?NIF:restart(),
    {Rest, Reader5} = all(Reader4),
    ?assertEqual(Expected, First ++ Second ++ Rest),
    close(Reader5),
    _ = not_woken(),
    ok.

says_each_outage_once(How) ->
    Log = ?LOG:append(9, ?LOG:new("outages")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Off = fun(Reader0) ->
        ?NIF:restart(),
        persistent_term:erase({rabbitmq_stream_s3, engine}),
        {end_of_stream, Reader1} = next(Reader0),
        {end_of_stream, Reader2} = next(Reader1),
        ?NIF:restart(),
        Reader2
    end,
    {_, Reader} = take(1, open(How, first, Log)),
    ok = logger:set_handler_config(default, level, none),
    ok = logger:add_handler(?MODULE, ?MODULE, #{config => #{pid => self()}}),
    try
        Once = Off(Reader),
        %% That there is no engine to open another handle with.
        ?assertEqual(1, said()),
        {_, GoesOn} = take(1, Once),
        Twice = Off(GoesOn),
        %% That there is no engine to open another handle with.
        ?assertEqual(1, said()),
        close(Twice)
    after
        ok = logger:remove_handler(?MODULE),
        ok = logger:set_handler_config(default, level, all)
    end,
    _ = not_woken(),
    ok.

%% As a handler of the logger.
log(#{level := error}, #{config := #{pid := Pid}}) -> Pid ! said;
log(_, _) -> ok.

said() ->
    receive
        said -> 1 + said()
    after 0 -> 0
    end.

a_connection_is_told_once_that_its_reader_has_failed() ->
    Log = ?LOG:append(9, ?LOG:new("told")),
    ok = cached(Log),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    {_, Reader} = take(1, open(send_file, first, Log)),
    range({error, corrupt, <<"chunk 2">>}, Log),
    Monitors = #{make_ref() => {self(), ?LOG:stream_id(Log)}},
    Told = fun() ->
        receive
            %% It has asked for our state.
            {system, {Pid, _} = From, get_state} ->
                gen:reply(From, {ok, {open, {data, {connection, #{}, Monitors}}}}),
                Monitor = monitor(process, Pid),
                receive
                    {'DOWN', Monitor, process, Pid, _} -> ok
                end,
                receive
                    {'DOWN', _, process, _, {stream_s3, corrupt}} = Down -> Down
                after 0 -> nothing
                end
        after 1000 -> not_asked
        end
    end,
    with_quiet_log(fun() ->
        {end_of_stream, Ended} = next(Reader),
        [Monitor] = maps:keys(Monitors),
        ?assertEqual({'DOWN', Monitor, process, self(), {stream_s3, corrupt}}, Told()),
        {end_of_stream, Same} = next(Ended),
        receive
            {system, _, _} -> error(asked_again)
        after 100 -> ok
        end,
        close(Same)
    end),
    true = ets:delete(osiris_reader_context_cache, self()).

counts_once() ->
    _ = readers(),
    Log = ?LOG:append(12, ?LOG:new("counted")),
    Context = #{counter_spec := {Id, _}} = ?LOG:context(#{}, Log),
    uploaded(20, Log),
    1 = ?LOG:trim(6, Log),
    {ok, State} = osiris_log:init_offset_reader(first, Context),
    {_, Reader} = all(under_test(chunk_iterator, State)),
    ?assertEqual(local, tier(Reader)),
    ?assertMatch(#{chunks := 12, offset := 24}, osiris_counters:overview(Id)),
    ?assertEqual([1], readers()),
    close(Reader),
    ?assertEqual([-1], readers()),
    ?assertEqual(undefined, osiris_counters:overview(Id)).

%% RabbitMQ unloads the modules of a disabled plugin. A process that holds a fun of them would be
%% killed when they are loaded again.
outlives_the_code_of_the_plugin() ->
    Log = ?LOG:append(12, ?LOG:new("unloaded")),
    Expected = stock(chunk_iterator, first, #{}, Log),
    uploaded(20, Log),
    1 = ?LOG:trim(6, Log),
    {First, Remote} = take(2, open(chunk_iterator, first, Log)),
    {Second, Local} = take(2, open(chunk_iterator, 6, Log)),
    Modules = [
        ?TAG,
        rabbitmq_stream_s3_reader_open,
        rabbitmq_stream_s3_reader_wait,
        rabbitmq_stream_s3_reader_tier,
        rabbitmq_stream_s3_reader_remote,
        rabbitmq_stream_s3_hooks
    ],
    [
        begin
            true = code:soft_purge(M),
            true = code:delete(M),
            ?assertNot(erlang:check_process_code(self(), M)),
            true = code:soft_purge(M),
            {module, M} = code:load_file(M)
        end
     || M <- Modules
    ],
    {Rest, Reader1} = all(Remote),
    ?assertEqual(Expected, First ++ Rest),
    {Rest2, Reader2} = all(Local),
    ?assertEqual(lists:nthtail(5, Expected), Rest2),
    ?assertEqual([6, 8], ids(Second)),
    close(Reader1),
    close(Reader2).

iterates_many_and_batched_entries() ->
    Log0 = ?LOG:new("entries"),
    Many = [integer_to_binary(N) || N <- lists:seq(1, 200)],
    Log = ?LOG:append([{batch, 3, 1, 30, <<"packed">>} | Many], 0, <<>>, ?LOG:append(3, Log0)),
    Expected = stock(chunk_iterator, first, #{}, Log),
    uploaded(209, Log),
    1 = ?LOG:trim(209, Log),
    range({0, 209}, Log),
    {Chunks, Reader} = all(open(chunk_iterator, first, Log)),
    ?assertEqual(Expected, Chunks),
    {6, Entries} = lists:last(Chunks),
    ?assertEqual({206, {batch, 3, 1, 30, <<"packed">>}}, lists:last(Entries)),
    close(Reader).

sends_trailers_as_stock() ->
    Log0 = ?LOG:append([<<"record">>], 0, <<"trailer">>, ?LOG:new("trailers")),
    Log1 = ?LOG:append([<<"tracking">>], 1, <<>>, Log0),
    Log2 = ?LOG:append([<<"record">>], 0, <<"trailer">>, Log1),
    Log = ?LOG:append([<<"snapshot">>], 2, <<>>, Log2),
    Selectors = [all, user_data],
    Expected = [stock(send_file, first, #{chunk_selector => S}, Log) || S <- Selectors],
    uploaded(4, Log),
    1 = ?LOG:trim(4, Log),
    Read = fun(Selector) ->
        {Chunks, Reader} = all(open(send_file, first, #{chunk_selector => Selector}, Log)),
        close(Reader),
        Chunks
    end,
    ?assertEqual([[0, 1, 2, 3], [0, 2]], [ids(C) || C <- Expected]),
    ?assertEqual(Expected, [Read(S) || S <- Selectors]).
