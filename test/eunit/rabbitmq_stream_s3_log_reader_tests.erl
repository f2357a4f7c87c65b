-module(rabbitmq_stream_s3_log_reader_tests).
-include_lib("eunit/include/eunit.hrl").

-export([log/2]).

-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(TAG, rabbitmq_stream_s3_log_reader).

log_reader_test_() ->
    {setup, fun setup/0, fun cleanup/1, [
        {atom_to_list(name(T)) ++ " " ++ atom_to_list(How), fun() -> T(How) end}
     || T <- [
            fun local_reads_are_as_stock/1,
            fun remote_reads_are_as_local/1,
            fun goes_from_remote_to_local_to_the_live_end/1,
            fun goes_remote_when_the_floor_has_passed/1,
            fun is_not_taken_in_by_a_trim_between_check_and_read/1,
            fun is_not_taken_in_by_a_trim_before_skipped_chunks/1,
            fun goes_remote_when_the_next_file_is_gone_before_the_floor_moves/1,
            fun follows_stock_over_what_user_retention_dropped/1,
            fun waits_while_it_is_not_known_who_has_it/1,
            fun waits_a_moment_for_a_stream_that_was_forgotten/1,
            fun a_trim_before_skipped_chunks_is_remembered_while_unknown/1,
            fun waits_without_blocking_when_bytes_are_late/1,
            fun stays_remote_when_the_place_to_go_local_was_trimmed/1,
            fun reads_nothing_remotely_that_the_log_had_when_it_looked/1,
            fun looks_again_at_what_was_trimmed_since_it_looked/1,
            fun a_timestamp_leads_to_the_log_that_is_there/1,
            fun jumps_to_the_floor_when_the_remote_tier_begins_above_it/1,
            fun waits_for_a_replica_that_is_behind/1,
            fun skips_many_chunks_in_turns/1,
            fun filters_remote_chunks/1,
            fun reports_remote_errors/1,
            fun outlives_a_store_that_is_unavailable/1,
            fun waits_while_the_plugin_is_off/1,
            fun keeps_its_timestamp_until_the_first_chunk/1,
            fun says_each_outage_once/1,
            fun adopts_readers_that_were_open_before/1
        ],
        How <- [send_file, chunk_iterator]
    ] ++ [
        {atom_to_list(name(T)), T}
     || T <- [
            fun attaches_where_the_offset_is/0,
            fun a_time_that_the_local_log_has_is_read_there/0,
            fun a_time_is_not_taken_from_a_log_that_is_trimmed_meanwhile/0,
            fun a_connection_is_told_once_that_its_reader_has_failed/0,
            fun waits_a_bounded_time_for_the_manifest/0,
            fun needs_no_manifest_for_a_log_that_is_all_here/0,
            fun a_member_that_nobody_has_announced_is_waited_for/0,
            fun no_engine_does_not_mean_not_tiered/0,
            fun resolves_specs/0,
            fun counts_once/0,
            fun outlives_the_code_of_the_plugin/0,
            fun iterates_many_and_batched_entries/0,
            fun sends_trailers_as_stock/0,
            fun a_local_start_that_is_trimmed_meanwhile_starts_remotely/0
        ]
    ]}.

name(Test) ->
    {name, Name} = erlang:fun_info(Test, name),
    Name.

setup() ->
    ok = ?LOG:setup(),
    intercept_floor().

cleanup(_) ->
    code:purge(osiris_log_shared),
    {module, _} = code:load_file(osiris_log_shared),
    ?LOG:cleanup(ok).

%% Lets a test run something right after somebody has looked at the floor of a log.
intercept_floor() ->
    {_, Binary, File} = code:get_object_code(osiris_log_shared),
    {ok, {_, [{abstract_code, {_, Forms}}]}} = beam_lib:chunks(Binary, [abstract_code]),
    Text =
        "first_chunk_id(Ref) -> Floor = '$first_chunk_id'(Ref), case erase(after_floor) of "
        "undefined -> Floor; Fun -> Fun(), Floor end.",
    {ok, Tokens, _} = erl_scan:string(Text),
    {ok, Wrapper} = erl_parse:parse_form(Tokens),
    New = lists:flatmap(
        fun
            ({function, A, first_chunk_id, 1, Cs}) ->
                [{function, A, '$first_chunk_id', 1, Cs}, Wrapper];
            (Form) ->
                [Form]
        end,
        Forms
    ),
    {ok, Module, Code} = compile:forms(New),
    code:purge(Module),
    {module, Module} = code:load_binary(Module, File, Code),
    ok.

after_floor(Fun) ->
    undefined = put(after_floor, Fun),
    ok.

%%--------------------------------------------------------------------------------------------
%% A reader under test: {How, Socket pair or previous iterator, Log state}

open(How, Spec, Log) ->
    open(How, Spec, #{}, Log).

open(How, Spec, Options, Log) ->
    {ok, State} = osiris_log:init_offset_reader(Spec, ?LOG:context(Options, Log)),
    under_test(How, State).

under_test(send_file, State) -> {send_file, sockets(), State};
under_test(chunk_iterator, State) -> {chunk_iterator, undefined, State}.

sockets() ->
    {ok, Listen} = gen_tcp:listen(0, [binary, {active, false}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listen),
    {ok, Out} = gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}]),
    {ok, In} = gen_tcp:accept(Listen),
    ok = gen_tcp:close(Listen),
    {Out, In}.

%% One chunk: {{ChunkId, What}, Reader} or {end_of_stream, Reader} or {error, _}.
next({send_file, {Out, In} = Sockets, State0}) ->
    Callback = fun(#{chunk_id := Id, num_entries := _}, Size) ->
        %% osiris 1.8 leaves the sending of the frame's start to the callback.
        case erlang:function_exported(osiris_log, chunk_iterator, 3) of
            true -> <<Id:64, Size:32>>;
            false -> gen_tcp:send(Out, <<Id:64, Size:32>>)
        end
    end,
    case osiris_log:send_file(Out, State0, Callback) of
        {ok, State} ->
            {ok, <<Id:64, Size:32>>} = gen_tcp:recv(In, 12, 1000),
            {ok, Bytes} = gen_tcp:recv(In, Size, 1000),
            {{Id, Bytes}, {send_file, Sockets, State}};
        {end_of_stream, State} ->
            {end_of_stream, {send_file, Sockets, State}};
        {error, _} = Error ->
            Error
    end;
next({chunk_iterator, Previous, State0}) ->
    Result =
        case erlang:function_exported(osiris_log, chunk_iterator, 3) of
            true -> osiris_log:chunk_iterator(State0, 10, Previous);
            false -> osiris_log:chunk_iterator(State0, 10)
        end,
    case Result of
        {ok, #{chunk_id := Id}, Iterator0, State} ->
            {Entries, Iterator} = entries(Iterator0, []),
            {{Id, Entries}, {chunk_iterator, Iterator, State}};
        {end_of_stream, State} ->
            {end_of_stream, {chunk_iterator, Previous, State}};
        {error, _} = Error ->
            Error
    end.

entries(Iterator0, Acc) ->
    case osiris_log:iterator_next(Iterator0) of
        end_of_chunk -> {lists:reverse(Acc), Iterator0};
        {Entry, Iterator} -> entries(Iterator, [Entry | Acc])
    end.

all(Reader) -> all(Reader, []).

all(Reader0, Acc) ->
    case next(Reader0) of
        {end_of_stream, Reader} -> {lists:reverse(Acc), Reader};
        {Chunk, Reader} -> all(Reader, [Chunk | Acc])
    end.

take(0, Reader) ->
    {[], Reader};
take(N, Reader0) ->
    {{_, _} = Chunk, Reader1} = next(Reader0),
    {Chunks, Reader} = take(N - 1, Reader1),
    {[Chunk | Chunks], Reader}.

ids(Chunks) -> [Id || {Id, _} <- Chunks].

close({send_file, {Out, In}, State}) ->
    ok = gen_tcp:close(Out),
    ok = gen_tcp:close(In),
    osiris_log:close(State);
close({chunk_iterator, _, State}) ->
    osiris_log:close(State).

tier({_, _, {?TAG, Reader}}) -> element(1, element(3, Reader));
tier({_, _, State}) -> element(1, State).

%% What stock reads of this log.
stock(How, Spec, Options, Log) ->
    ok = rabbitmq_stream_s3_osiris:detach(),
    Reader0 = open(How, Spec, Options, Log),
    {Chunks, Reader} = all(Reader0),
    ok = close(Reader),
    ok = rabbitmq_stream_s3_osiris:attach(),
    Chunks.

%% Uploaded up to Next, all still local.
uploaded(Next, Log) ->
    ?NIF:put(?LOG:stream_id(Log), {0, Next}, ?LOG:chunks(Log)).

range(Range, Log) ->
    StreamId = ?LOG:stream_id(Log),
    [{_, _, Chunks}] = ets:lookup(?NIF, {stream, StreamId}),
    ?NIF:put(StreamId, Range, Chunks).

woken() ->
    receive
        {'$gen_cast', {queue_event, QName, {osiris_offset, QName, Offset}}} when Offset >= 0 ->
            {resource, _, queue, _} = QName,
            true
    after 1000 -> false
    end.

not_woken() ->
    receive
        {'$gen_cast', _} -> false
    after 0 -> true
    end.

%%--------------------------------------------------------------------------------------------

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

goes_from_remote_to_local_to_the_live_end(How) ->
    Log0 = ?LOG:append(9, ?LOG:new("through")),
    uploaded(14, Log0),
    2 = ?LOG:trim(14, Log0),
    {Chunks, Reader1} = all(open(How, 3, Log0)),
    ?assertEqual([2, 4, 6, 8, 10, 12, 14, 16], ids(Chunks)),
    ?assertEqual(local, tier(Reader1)),
    ?assertEqual(0, ?NIF:opened()),
    Log1 = ?LOG:append(2, Log0),
    {More, Reader2} = all(Reader1),
    ?assertEqual([18, 20], ids(More)),
    ?assertEqual(stock(How, 12, #{}, Log1), lists:nthtail(5, Chunks) ++ More),
    close(Reader2).

goes_remote_when_the_floor_has_passed(How) ->
    Log = ?LOG:append(12, ?LOG:new("passed")),
    Expected = stock(How, first, #{}, Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:trim(20, Log),
    {Second, Reader2} = take(1, Reader1),
    ?assertEqual(remote, tier(Reader2)),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual(local, tier(Reader3)),
    ?assertEqual(Expected, First ++ Second ++ Rest),
    close(Reader3).

%% Fails without the check of the chunk that stock is about to deliver.
is_not_taken_in_by_a_trim_between_check_and_read(How) ->
    Log = ?LOG:append(12, ?LOG:new("race")),
    Expected = stock(How, first, #{}, Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    after_floor(fun() -> 3 = ?LOG:trim(20, Log) end),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(undefined, get(after_floor)),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader2).

filtered(Name) ->
    lists:foldl(
        fun(Value, Log) -> ?LOG:append([{Value, <<"data of ", Value/binary>>}], 0, <<>>, Log) end,
        ?LOG:new(Name),
        [<<"a">>, <<"b">>, <<"b">>, <<"b">>, <<"a">>, <<"b">>, <<"b">>, <<"b">>]
    ).

%% Stock steps over the trimmed segment and then sees nothing that it wants: no chunk to check.
is_not_taken_in_by_a_trim_before_skipped_chunks(How) ->
    Log = filtered("filter_race"),
    Options = #{filter_spec => #{filters => [<<"a">>]}},
    Expected = stock(How, first, Options, Log),
    ?assertEqual([0, 4], ids(Expected)),
    uploaded(8, Log),
    {First, Reader1} = take(1, open(How, first, Options, Log)),
    after_floor(fun() -> 2 = ?LOG:trim(8, Log) end),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    ?assertEqual(8, osiris_log:next_offset(element(3, Reader2))),
    close(Reader2).

a_trim_before_skipped_chunks_is_remembered_while_unknown(How) ->
    Log = filtered("filter_race_pending"),
    Options = #{filter_spec => #{filters => [<<"a">>]}},
    Expected = stock(How, first, Options, Log),
    uploaded(8, Log),
    {First, Reader1} = take(1, open(How, first, Options, Log)),
    after_floor(fun() ->
        2 = ?LOG:trim(8, Log),
        range(pending, Log)
    end),
    {[], Reader2} = all(Reader1),
    {[], Reader3} = all(Reader2),
    range({0, 8}, Log),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader4),
    _ = not_woken(),
    ok.

goes_remote_when_the_next_file_is_gone_before_the_floor_moves(How) ->
    Log = ?LOG:append(12, ?LOG:new("files_first")),
    Expected = stock(How, first, #{}, Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:delete_files(20, Log),
    ?assertEqual(0, ?LOG:floor(Log)),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader2).

follows_stock_over_what_user_retention_dropped(How) ->
    Log = ?LOG:append(12, ?LOG:new("dropped")),
    uploaded(2, Log),
    {_, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:trim(24, Log),
    {Chunks, Reader2} = all(Reader1),
    ?assertEqual([18, 20, 22], ids(Chunks)),
    close(Reader2),
    %% Dropped during the read.
    Log2 = ?LOG:append(12, ?LOG:new("dropped_race")),
    uploaded(2, Log2),
    {_, Reader3} = take(3, open(How, first, Log2)),
    after_floor(fun() -> 3 = ?LOG:trim(24, Log2) end),
    {Chunks2, Reader4} = all(Reader3),
    ?assertEqual([18, 20, 22], ids(Chunks2)),
    close(Reader4).

waits_while_it_is_not_known_who_has_it(How) ->
    Log = ?LOG:append(12, ?LOG:new("unknown")),
    Expected = stock(How, first, #{}, Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:trim(20, Log),
    range(pending, Log),
    Reader3 = asked_as_its_owner_does(Reader1),
    ?assertEqual(6, osiris_log:next_offset(element(3, Reader3))),
    range({0, 20}, Log),
    ?assert(woken()),
    ?assert(not_woken()),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader4).

waits_a_moment_for_a_stream_that_was_forgotten(How) ->
    %% It comes back: its member was replaced.
    Log = ?LOG:append(12, ?LOG:new("forgotten")),
    Expected = stock(How, first, #{}, Log),
    Uploaded = ?LOG:chunks(Log),
    uploaded(20, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = ?LOG:trim(20, Log),
    _ = ?NIF:forget(?LOG:stream_id(Log)),
    Reader2 = asked_as_its_owner_does(Reader1),
    ?NIF:put(?LOG:stream_id(Log), {0, 20}, Uploaded),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader3),
    %% It does not: it was never tiered.
    Stock = ?LOG:append(12, ?LOG:new("never_tiered")),
    uploaded(0, Stock),
    {_, Reader4} = take(3, open(How, first, Stock)),
    3 = ?LOG:trim(24, Stock),
    _ = ?NIF:forget(?LOG:stream_id(Stock)),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 0),
    {end_of_stream, Reader5} = next(Reader4),
    {Chunks, Reader6} = all(Reader5),
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms),
    ?assertEqual([18, 20, 22], ids(Chunks)),
    close(Reader6).

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

%% The remote reader says that the remote tier ends here; by then more has been uploaded and
%% trimmed.
stays_remote_when_the_place_to_go_local_was_trimmed(How) ->
    Log = ?LOG:append(12, ?LOG:new("moved_on")),
    Expected = stock(How, first, #{}, Log),
    uploaded(6, Log),
    1 = ?LOG:trim(6, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    ?assertEqual(remote, tier(Reader1)),
    ?NIF:after_read(fun() ->
        range({0, 20}, Log),
        2 = ?LOG:trim(20, Log)
    end),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader2).

%% The remote tier's part of a log that lost its end, and what the log has now.
lost_end(Name, Kept) ->
    Old = ?LOG:append(10, ?LOG:new(Name ++ "_old")),
    Log = lists:foldl(
        fun(_, Acc) -> ?LOG:append([<<"another record">>, <<"and another">>], 0, <<>>, Acc) end,
        ?LOG:append(Kept, ?LOG:new(Name)),
        lists:seq(1, 12 - Kept)
    ),
    {Common, _} = lists:split(Kept, ?LOG:chunks(Log)),
    ok = ?NIF:put(?LOG:stream_id(Log), {0, 20}, Common ++ lists:nthtail(Kept, ?LOG:chunks(Old))),
    Log.

reads_nothing_remotely_that_the_log_had_when_it_looked(How) ->
    Log = lost_end("lost_end", 5),
    Expected = stock(How, first, #{}, Log),
    1 = ?LOG:trim(6, Log),
    Reader0 = open(How, first, Log),
    ?assertEqual(remote, tier(Reader0)),
    {First, Reader1} = take(3, Reader0),
    ?assertEqual(remote, tier(Reader1)),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    ?assertEqual(0, ?NIF:opened()),
    close(Reader2).

looks_again_at_what_was_trimmed_since_it_looked(How) ->
    Log = lost_end("looks_again", 5),
    Expected = stock(How, first, #{}, Log),
    1 = ?LOG:trim(6, Log),
    {First, Reader1} = take(2, open(How, first, Log)),
    %% The end that was lost has been noticed, and what the log has was uploaded again and trimmed.
    ok = ?NIF:put(?LOG:stream_id(Log), {0, 22}, uploaded_again(Log)),
    Opens = ?NIF:opens(),
    2 = ?LOG:trim(22, Log),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    ?assertEqual(Opens + 1, ?NIF:opens()),
    close(Reader2).

%% Everything that the log has or had, as it has it.
uploaded_again(Log) ->
    Here = ?LOG:chunks(Log),
    [{#{chunk_id := First}, _, _, _} | _] = Here,
    [C || {#{chunk_id := Id}, _, _, _} = C <- remote_chunks(Log), Id < First] ++ Here.

remote_chunks(Log) ->
    [{_, _, Chunks}] = ets:lookup(?NIF, {stream, ?LOG:stream_id(Log)}),
    Chunks.

a_timestamp_leads_to_the_log_that_is_there(How) ->
    Log = lost_end("lost_time", 3),
    Expected = stock(How, 6, #{}, Log),
    Now = erlang:system_time(millisecond),
    Chunks = [
        setelement(1, C, H#{
            timestamp :=
                case Id < 6 of
                    true -> 1000 + Id;
                    %% What is here was written before that.
                    false -> Now - 60_000 + Id
                end
        })
     || {#{chunk_id := Id} = H, _, _, _} = C <- remote_chunks(Log)
    ],
    ok = ?NIF:put(?LOG:stream_id(Log), {0, 20}, Chunks),
    1 = ?LOG:trim(6, Log),
    Reader0 = open(How, {timestamp, Now - 60_000}, Log),
    ?assertEqual(remote, tier(Reader0)),
    {Found, Reader1} = all(Reader0),
    ?assertEqual(Expected, Found),
    close(Reader1).

jumps_to_the_floor_when_the_remote_tier_begins_above_it(How) ->
    Log = ?LOG:append(12, ?LOG:new("begins_above")),
    Expected = stock(How, 12, #{}, Log),
    uploaded(20, Log),
    2 = ?LOG:trim(12, Log),
    {_, Reader1} = take(2, open(How, first, Log)),
    %% The user's retention: the remote tier now begins above the floor.
    Kept = [C || {#{chunk_id := Id}, _, _, _} = C <- remote_chunks(Log), Id >= 14],
    ok = ?NIF:put(?LOG:stream_id(Log), {14, 20}, Kept),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, Rest),
    close(Reader2).

waits_for_a_replica_that_is_behind(How) ->
    Log0 = ?LOG:append(9, ?LOG:new("behind")),
    %% The leader has uploaded more than there is here.
    Ahead = ?LOG:append(12, ?LOG:new("leader")),
    ?NIF:put(?LOG:stream_id(Log0), {0, 20}, ?LOG:chunks(Ahead)),
    2 = ?LOG:trim(18, Log0),
    Reader0 = open(How, first, Log0),
    {Chunks, Reader1} = all(Reader0),
    ?assertEqual([0, 2, 4, 6, 8, 10, 12, 14, 16], ids(Chunks)),
    Log1 = ?LOG:append(3, Log0),
    {More, Reader2} = all(Reader1),
    ?assertEqual([18, 20, 22], ids(More)),
    _ = Log1,
    close(Reader2).

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

until_chunk(Reader0) ->
    case next(Reader0) of
        {end_of_stream, Reader} -> until_chunk(Reader);
        Chunk -> Chunk
    end.

%% The stream protocol asks twice before it believes the end of a stream.
asks(send_file) -> 2;
asks(chunk_iterator) -> 1.

asked_as_its_owner_does({How, _, _} = Reader) ->
    lists:foldl(
        fun(_, R0) ->
            {end_of_stream, R} = next(R0),
            R
        end,
        Reader,
        lists:seq(1, asks(How))
    ).

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
        ?assertEqual({error, {stream_s3, corrupt}}, next(Reader)),
        ?assertEqual({error, {stream_s3, corrupt}}, next(Reader))
    end),
    close(Reader).

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

%% Chunks have times of their own here, and the route gives the start of the fragment, as the native
%% one does.
keeps_its_timestamp_until_the_first_chunk(How) ->
    Log = ?LOG:append(9, ?LOG:new("timestamp")),
    Chunks = [
        setelement(1, C, H#{timestamp := 1000 + Id})
     || {#{chunk_id := Id} = H, _, _, _} = C <- ?LOG:chunks(Log)
    ],
    ok = ?NIF:put(?LOG:stream_id(Log), {0, 18}, Chunks),
    2 = ?LOG:trim(18, Log),
    Reader0 = open(How, {timestamp, 1004}, Log),
    ?NIF:restart(),
    {[{4, _}], Reader1} = take(1, Reader0),
    ?NIF:restart(),
    {[{6, _}], Reader2} = take(1, Reader1),
    close(Reader2).

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
        %% Its handle, and that there is no engine to open another one with.
        ?assertEqual(2, said()),
        {_, GoesOn} = take(1, Once),
        Twice = Off(GoesOn),
        %% Its handle, and that there is no engine to open another one with.
        ?assertEqual(2, said()),
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

adopts_readers_that_were_open_before(How) ->
    Log = ?LOG:append(12, ?LOG:new("adopted")),
    Expected = stock(How, first, #{}, Log),
    #{dir := Dir, name := Name, shared := Shared, reference := Ref} =
        Context = ?LOG:context(#{}, Log),
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    true = ets:insert(Cache, {self(), Dir, Name, Shared, Ref, fun(_) -> ok end}),
    _ = readers(),
    ok = rabbitmq_stream_s3_osiris:detach(),
    {ok, State} = osiris_log:init_offset_reader(first, Context),
    {First, Reader1} = take(3, under_test(How, State)),
    ?assertEqual(osiris_log, tier(Reader1)),
    ok = rabbitmq_stream_s3_osiris:attach(),
    uploaded(20, Log),
    3 = ?LOG:trim(20, Log),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(local, tier(Reader2)),
    ?assertEqual(Expected, First ++ Rest),
    #{counter_spec := {Id, _}} = Context,
    ?assertMatch(#{chunks := 12, offset := 24}, osiris_counters:overview(Id)),
    close(Reader2),
    ?assertEqual(undefined, osiris_counters:overview(Id)),
    ?assertEqual([1, -1], readers()),
    true = ets:delete(Cache).

readers() ->
    receive
        {readers, N} -> [N | readers()]
    after 0 -> []
    end.

with_quiet_log(Fun) ->
    #{level := Level} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, none),
    try
        Fun()
    after
        logger:set_primary_config(level, Level)
    end.

%%--------------------------------------------------------------------------------------------

attaches_where_the_offset_is() ->
    Log = ?LOG:append(9, ?LOG:new("attach")),
    uploaded(14, Log),
    [{#{timestamp := Ts}, _, _, _} | _] = ?LOG:chunks(Log),
    1 = ?LOG:trim(11, Log),
    At = fun(Spec) ->
        case osiris_log:init_offset_reader(Spec, ?LOG:context(#{}, Log)) of
            {ok, State} ->
                {Chunks, Reader} = take(1, under_test(chunk_iterator, State)),
                close(Reader),
                {tier({x, x, State}), hd(ids(Chunks))};
            Error ->
                Error
        end
    end,
    ?assertEqual({remote, 0}, At(first)),
    ?assertEqual({remote, 0}, At(0)),
    ?assertEqual({remote, 2}, At(3)),
    ?assertEqual({remote, 4}, At({abs, 5})),
    ?assertEqual({remote, 0}, At({timestamp, Ts - 1000})),
    ?assertEqual({local, 6}, At(6)),
    ?assertEqual({local, 16}, At({abs, 17})),
    ?assertEqual({local, 16}, At(last)),
    _ = [
        ?assertEqual({error, {offset_out_of_range, {0, 17}}}, At({abs, 18}))
     || erlang:function_exported(osiris_log, set_committed_offset, 2)
    ],
    {ok, Next} = osiris_log:init_offset_reader(next, ?LOG:context(#{}, Log)),
    ?assertEqual({local, 18}, {tier({x, x, Next}), osiris_log:next_offset(Next)}),
    ok = osiris_log:close(Next).

%% Every time around every chunk of both tiers, also several chunks of one time, against the times
%% themselves: the first chunk that is not older, or the end.
a_time_that_the_local_log_has_is_read_there() ->
    %% Also across the floor; not across other ends of segments, where stock takes the later one.
    Times = [1000, 1000, 1010, 1010, 1030, 1030, 1040, 1050, 1050, 1060, 1060],
    Log = ?LOG:append_at(Times, ?LOG:new("times")),
    uploaded(18, Log),
    1 = ?LOG:trim(11, Log),
    Floor = ?LOG:floor(Log),
    ?assertEqual(6, Floor),
    Chunks = lists:zip(Times, lists:seq(0, 20, 2)),
    Expected = fun(T) -> hd([Id || {Time, Id} <- Chunks, Time >= T] ++ [22]) end,
    Around = lists:usort([0] ++ [T + D || T <- Times, D <- [-1, 0, 1]]),
    lists:foreach(
        fun(T) ->
            Reader = open(chunk_iterator, {timestamp, T}, Log),
            At =
                case next(Reader) of
                    {end_of_stream, Last} -> osiris_log:next_offset(element(3, Last));
                    {{Id, _}, _} -> Id
                end,
            Wanted = Expected(T),
            %% The first local chunk may have others of its time before it.
            Tier = lists:nth(1 + length([y || Wanted > Floor]), [remote, local]),
            ?assertEqual({T, Tier, Wanted}, {T, tier(Reader), At}),
            close(Reader),
            _ = [
                ?assertEqual(
                    {ok, Wanted},
                    osiris_log:resolve_offset_spec({timestamp, T}, ?LOG:context(#{}, Log))
                )
             || erlang:function_exported(osiris_log, resolve_offset_spec, 2)
            ]
        end,
        Around
    ),
    %% What it has, it has whatever the manifest says.
    range(pending, Log),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 1),
    Open = fun(T) -> osiris_log:init_offset_reader({timestamp, T}, ?LOG:context(#{}, Log)) end,
    ?assertEqual({error, unavailable}, Open(1005)),
    {ok, Local} = Open(1041),
    ?assertEqual(14, osiris_log:next_offset(Local)),
    ok = osiris_log:close(Local),
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms).

a_time_is_not_taken_from_a_log_that_is_trimmed_meanwhile() ->
    Log = ?LOG:append_at(lists:seq(1000, 1008), ?LOG:new("time_race")),
    uploaded(18, Log),
    1 = ?LOG:trim(11, Log),
    %% Gone when stock looks for the time; the floor has not moved.
    after_floor(fun() -> 1 = ?LOG:delete_files(18, Log) end),
    Reader0 = open(chunk_iterator, {timestamp, 1004}, Log),
    ?assertEqual(remote, tier(Reader0)),
    {[{8, _}], Reader} = take(1, Reader0),
    close(Reader).

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
        ?assertEqual({error, {stream_s3, corrupt}}, next(Reader)),
        [Monitor] = maps:keys(Monitors),
        ?assertEqual({'DOWN', Monitor, process, self(), {stream_s3, corrupt}}, Told()),
        ?assertEqual({error, {stream_s3, corrupt}}, next(Reader)),
        receive
            {system, _, _} -> error(asked_again)
        after 100 -> ok
        end
    end),
    close(Reader),
    true = ets:delete(osiris_reader_context_cache, self()).

waits_a_bounded_time_for_the_manifest() ->
    Log = ?LOG:append(9, ?LOG:new("resolve")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    range(pending, Log),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 1),
    Context = #{counter_spec := {Id, _}} = ?LOG:context(#{}, Log),
    _ = readers(),
    ?assertEqual({error, unavailable}, osiris_log:init_offset_reader(first, Context)),
    ?assertEqual(undefined, osiris_counters:overview(Id)),
    ?assertEqual([], readers()),
    %% What is local needs no manifest.
    close(open(chunk_iterator, last, Log)),
    close(open(chunk_iterator, 13, Log)),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 60_000),
    Self = self(),
    {Pid, Monitor} = spawn_monitor(fun() ->
        {ok, State} = osiris_log:init_offset_reader(first, Context),
        Self ! {first, osiris_log:next_offset(State)},
        osiris_log:close(State)
    end),
    _ = wait_for_waiter(),
    range({0, 18}, Log),
    ?assertEqual(
        0,
        receive
            {first, N} -> N
        after 5000 -> never
        end
    ),
    receive
        {'DOWN', Monitor, process, Pid, normal} -> ok
    end,
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms).

needs_no_manifest_for_a_log_that_is_all_here() ->
    Log = ?LOG:append(3, ?LOG:new("all_here")),
    ?assertEqual(pending, ?NIF:manifest_range(double, ?LOG:stream_id(Log))),
    [
        begin
            Reader = open(chunk_iterator, Spec, Log),
            ?assertEqual({local, Next}, {tier(Reader), osiris_log:next_offset(element(3, Reader))}),
            close(Reader)
        end
     || {Spec, Next} <- [
            {first, 0}, {3, 2}, {{abs, 4}, 4}, {{timestamp, 1}, 0}, {last, 4}, {next, 6}
        ]
    ].

%% At the start of a node: its stream has been trimmed, and nobody knows of it yet.
a_member_that_nobody_has_announced_is_waited_for() ->
    Log = ?LOG:append(9, ?LOG:new("unannounced")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    StreamId = ?LOG:stream_id(Log),
    Chunks = ?NIF:forget(StreamId),
    ok = cached(Log),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 1),
    Open = fun() -> osiris_log:init_offset_reader(first, ?LOG:context(#{}, Log)) end,
    ?assertEqual({error, unavailable}, Open()),
    ?assertEqual(pending, ?NIF:manifest_range(double, StreamId)),
    close(open(chunk_iterator, last, Log)),
    ok = ?NIF:put(StreamId, {0, 18}, Chunks),
    {ok, State} = Open(),
    ?assertEqual(0, osiris_log:next_offset(State)),
    ok = osiris_log:close(State),
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms),
    true = ets:delete(osiris_reader_context_cache, self()).

no_engine_does_not_mean_not_tiered() ->
    Log = ?LOG:append(9, ?LOG:new("no_engine")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Engine = persistent_term:get({rabbitmq_stream_s3, engine}),
    persistent_term:erase({rabbitmq_stream_s3, engine}),
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 1),
    Open = fun() -> osiris_log:init_offset_reader(first, ?LOG:context(#{}, Log)) end,
    ?assertEqual({error, unavailable}, Open()),
    [close(open(chunk_iterator, Spec, Log)) || Spec <- [last, next, 13]],
    ok = application:set_env(rabbitmq_stream_s3, read_resolve_timeout_ms, 60_000),
    Self = self(),
    {_, Monitor} = spawn_monitor(fun() ->
        Self ! opening,
        {ok, State} = Open(),
        0 = osiris_log:next_offset(State),
        ok = osiris_log:close(State)
    end),
    receive
        opening -> ok
    end,
    persistent_term:put({rabbitmq_stream_s3, engine}, Engine),
    receive
        {'DOWN', Monitor, process, _, Reason} -> ?assertEqual(normal, Reason)
    end,
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms).

cached(Log) ->
    #{dir := Dir, name := Name, shared := Shared, reference := Ref} = ?LOG:context(#{}, Log),
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    true = ets:insert(Cache, {self(), Dir, Name, Shared, Ref, fun(_) -> ok end}),
    ok.

wait_for_waiter() ->
    case ets:match(?NIF, {{await, '$1'}, '_', '_'}) of
        [_ | _] = Waiters -> Waiters;
        [] -> erlang:yield() andalso wait_for_waiter()
    end.

resolves_specs() ->
    case erlang:function_exported(osiris_log, resolve_offset_spec, 2) of
        true ->
            Log = ?LOG:append(9, ?LOG:new("specs")),
            uploaded(14, Log),
            1 = ?LOG:trim(11, Log),
            Resolve = fun(Spec) ->
                osiris_log:resolve_offset_spec(Spec, ?LOG:context(#{}, Log))
            end,
            ?assertEqual({ok, 0}, Resolve(first)),
            ?assertEqual({ok, 2}, Resolve(3)),
            ?assertEqual({ok, 8}, Resolve(9)),
            ?assertEqual({ok, 16}, Resolve(last)),
            ?assertEqual({ok, 18}, Resolve(next)),
            ?assertEqual(0, length(ets:match(?NIF, {{waiting, '$1'}, '_', '_'})));
        false ->
            ok
    end.

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
    Modules = [?TAG, rabbitmq_stream_s3_remote_log, rabbitmq_stream_s3_hooks],
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

a_local_start_that_is_trimmed_meanwhile_starts_remotely() ->
    Log = ?LOG:append(9, ?LOG:new("start_race")),
    uploaded(18, Log),
    %% Found local by the route, gone when stock opens it; the floor has not moved.
    after_floor(fun() -> 2 = ?LOG:delete_files(18, Log) end),
    Reader0 = open(chunk_iterator, 3, Log),
    ?assertEqual(remote, tier(Reader0)),
    {Chunks, Reader} = all(Reader0),
    ?assertEqual([2, 4, 6, 8, 10, 12, 14, 16], ids(Chunks)),
    close(Reader).
