%% Where readers start, and in which tier.
-module(rabbitmq_stream_s3_reader_open_tests).
-include_lib("eunit/include/eunit.hrl").

-import(stream_s3_test_reader, [
    after_floor/1, open/3, under_test/2, next/1, all/1, take/2, ids/1, close/1, tier/1, stock/4,
    uploaded/2, range/2, readers/0, cached/1
]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).

reader_open_test_() ->
    {setup, fun ?READER:setup/0, fun ?READER:cleanup/1, [
        ?READER:both([
            fun keeps_its_timestamp_until_the_first_chunk/1,
            fun adopts_readers_that_were_open_before/1,
            fun attaching_never_waits_for_the_manifest/1,
            fun waiting_leaves_nothing_behind/1
        ]),
        ?READER:named([
            fun attaches_where_the_offset_is/0,
            fun what_is_written_while_it_attaches_is_not_passed_over/0,
            fun a_replica_that_is_empty_and_begins_later_is_waited_for/0,
            fun a_segment_that_has_no_chunk_yet_is_not_the_end_at_zero/0,
            fun a_time_that_the_local_log_has_is_read_there/0,
            fun a_time_is_not_taken_from_a_log_that_is_trimmed_meanwhile/0,
            fun odd_specs_are_those_of_stock/0,
            fun an_offset_that_turns_out_not_to_exist_ends_its_consumer/0,
            fun a_reader_that_is_opened_again_keeps_looking_for_its_place/0,
            fun needs_no_manifest_for_a_log_that_is_all_here/0,
            fun a_member_that_nobody_has_announced_is_waited_for/0,
            fun no_engine_does_not_mean_not_tiered/0,
            fun resolves_specs/0,
            fun a_place_that_takes_long_is_refused_and_then_known/0,
            fun a_local_start_that_is_trimmed_meanwhile_starts_remotely/0
        ])
    ]}.

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

adopts_readers_that_were_open_before(How) ->
    Log = ?LOG:append(12, ?LOG:new("adopted")),
    Expected = stock(How, first, #{}, Log),
    #{dir := Dir, name := Name, shared := Shared, reference := Ref} =
        Context = ?LOG:context(#{}, Log),
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    true = ets:insert(Cache, {self(), Dir, Name, Shared, Ref, fun(_) -> ok end}),
    _ = readers(),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    {ok, State} = osiris_log:init_offset_reader(first, Context),
    {First, Reader1} = take(3, under_test(How, State)),
    ?assertEqual(osiris_log, tier(Reader1)),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
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

%% Nothing is there when the route is made, and something is when stock opens the log.
what_is_written_while_it_attaches_is_not_passed_over() ->
    lists:foreach(
        fun(Spec) ->
            Log = ?LOG:new("written_meanwhile"),
            ok = ?NIF:put(?LOG:stream_id(Log), {0, 0}, []),
            ?assertEqual(-1, ?LOG:floor(Log)),
            after_floor(fun() -> ?LOG:append(2, Log) end),
            {Chunks, Reader} = take(2, open(chunk_iterator, Spec, Log)),
            ?assertEqual({Spec, [0, 2]}, {Spec, ids(Chunks)}),
            close(Reader)
        end,
        [first, 0, 1]
    ).

%% Stock has no place for an offset in such a log. Nothing is committed on such a node, so nothing is
%% delivered there.
a_replica_that_is_empty_and_begins_later_is_waited_for() ->
    Log = ?LOG:append(9, ?LOG:new("empty_later")),
    uploaded(18, Log),
    ok = ?LOG:empty_at(18, Log),
    ?assertError(
        {case_clause, {not_found, low}},
        osiris_log:init_offset_reader(17, (?LOG:context(#{}, Log))#{rabbitmq_stream_s3 => stock})
    ),
    lists:foreach(
        fun({Spec, Tier}) ->
            Reader0 = open(chunk_iterator, Spec, Log),
            ?assertEqual({Spec, Tier}, {Spec, tier(Reader0)}),
            {[], Reader} = all(Reader0),
            close(Reader)
        end,
        [{15, remote}, {18, local}, {20, local}]
    ).

%% The log has made its next segment and not written the chunk that is for it: stock finds the end at 0.
a_segment_that_has_no_chunk_yet_is_not_the_end_at_zero() ->
    lists:foreach(
        fun({Spec, At}) ->
            Log = ?LOG:append(9, ?LOG:new("rolling")),
            uploaded(18, Log),
            1 = ?LOG:trim(11, Log),
            ok = ?LOG:roll(18, Log),
            {ok, Stock} = osiris_log:init_offset_reader(
                Spec, (?LOG:context(#{}, Log))#{rabbitmq_stream_s3 => stock}
            ),
            ?assertEqual(0, osiris_log:next_offset(Stock)),
            ok = osiris_log:close(Stock),
            %% Written when stock has looked once: the floor is asked for before, and again after it.
            Self = self(),
            Written = fun() ->
                Self ! written,
                ok = ?LOG:unroll(18, Log),
                ?LOG:append(1, Log)
            end,
            after_floor(fun() -> after_floor(fun() -> after_floor(Written) end) end),
            Reader = open(chunk_iterator, Spec, Log),
            receive
                written -> ok
            after 0 -> error({not_looked_again, Spec})
            end,
            ?assertEqual({local, At}, {tier(Reader), osiris_log:next_offset(element(3, Reader))}),
            close(Reader)
        end,
        [{next, 20}, {18, 18}]
    ).

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
                ?assertEqual({ok, Wanted}, ?READER:resolved({timestamp, T}, Log))
             || erlang:function_exported(osiris_log, resolve_offset_spec, 2)
            ]
        end,
        Around
    ),
    %% What it has, it has whatever the manifest says.
    range(pending, Log),
    close(?READER:waiting(open(chunk_iterator, {timestamp, 1005}, Log))),
    Local = open(chunk_iterator, {timestamp, 1041}, Log),
    ?assertEqual({local, 14}, {tier(Local), osiris_log:next_offset(element(3, Local))}),
    close(Local).

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

%% The place of each spec is found later, without another word from whoever attached.
attaching_never_waits_for_the_manifest(How) ->
    Log = ?LOG:append(9, ?LOG:new("resolve")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    _ = readers(),
    [
        begin
            range(pending, Log),
            Reader0 = ?READER:waiting(open(How, Spec, Log)),
            ?assertEqual({Spec, Provisional}, {Spec, osiris_log:next_offset(element(3, Reader0))}),
            range({0, 18}, Log),
            {[{ChunkId, _}], Reader} = take(1, Reader0),
            ?assertEqual({Spec, First, remote}, {Spec, ChunkId, tier(Reader)}),
            close(Reader),
            ?assertEqual([1, -1], readers())
        end
     || {Spec, Provisional, First} <- [
            {first, 0, 0}, {3, 3, 2}, {-1, 0, 0}, {{abs, 5}, 5, 4}, {{timestamp, 0}, 0, 0}
        ]
    ],
    %% Again and again, each time with a wake-up.
    range(pending, Log),
    close(?READER:waiting(?READER:waiting(open(How, first, Log)))),
    %% What is local needs no manifest.
    close(open(How, last, Log)),
    close(open(How, 13, Log)).

waiting_leaves_nothing_behind(How) ->
    Log = ?LOG:append(9, ?LOG:new("waiting")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    range(pending, Log),
    _ = readers(),
    Context = #{counter_spec := {Id, _}} = ?LOG:context(#{}, Log),
    {ok, State} = osiris_log:init_offset_reader(first, Context),
    Reader = ?READER:asked_as_its_owner_does(under_test(How, State)),
    ?assertMatch(#{}, osiris_counters:overview(Id)),
    close(Reader),
    ?assertEqual(undefined, osiris_counters:overview(Id)),
    ?assertEqual([1, -1], readers()),
    ?assert(?READER:not_woken()).

%% Clients may send any integer; what stock does with each is what counts.
odd_specs_are_those_of_stock() ->
    Log = ?LOG:append(9, ?LOG:new("odd")),
    Specs = [
        -1,
        16#7fffffffffffffff,
        16#ffffffffffffffff,
        {timestamp, 1_700_000_000_000},
        {timestamp, 1_700_000_000_000_000_000_000},
        {timestamp, -1},
        {timestamp, -16#ffffffffffffffffff}
    ],
    Open = fun(Spec) ->
        {ok, State} = osiris_log:init_offset_reader(Spec, ?LOG:context(#{}, Log)),
        Next = osiris_log:next_offset(State),
        ok = osiris_log:close(State),
        Next
    end,
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    Expected = [Open(S) || S <- Specs],
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    uploaded(14, Log),
    ?assertEqual(Expected, [Open(S) || S <- Specs]),
    %% What stock does not know it refuses itself.
    Unknown = fun(Spec) ->
        try
            osiris_log:init_offset_reader(Spec, ?LOG:context(#{}, Log))
        catch
            Class:_ -> Class
        end
    end,
    Odd = [true, 1.5, {abs, -1}, {unknown, 1}],
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    Refused = [Unknown(S) || S <- Odd],
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    ?assertEqual(Refused, [Unknown(S) || S <- Odd]),
    %% Trimmed, an offset below everything is the first of both tiers.
    1 = ?LOG:trim(11, Log),
    ?assertEqual([0, 18], [Open(-1), Open(16#7fffffffffffffff)]).

an_offset_that_turns_out_not_to_exist_ends_its_consumer() ->
    Log = ?LOG:append(9, ?LOG:new("out_of_range")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    %% Known at once: the contract of osiris.
    ?assertMatch(
        {error, {offset_out_of_range, _}},
        osiris_log:init_offset_reader({abs, 99}, ?LOG:context(#{}, Log))
    ),
    range(pending, Log),
    Reader0 = ?READER:waiting(open(chunk_iterator, {abs, 99}, Log)),
    Beside0 = open(chunk_iterator, last, Log),
    range({0, 18}, Log),
    ?READER:with_quiet_log(fun() ->
        {end_of_stream, Reader} = next(Reader0),
        ?assertEqual(ended, tier(Reader)),
        Queue = maps:get(reference, ?LOG:context(#{}, Log)),
        receive
            {'$gen_cast', {queue_event, Queue, Event}} -> ?assertEqual(deleted_replica, Event)
        after 0 -> error(not_ended)
        end,
        %% Other consumers of this queue in this process go with it, as when a replica is deleted.
        {end_of_stream, Beside} = next(Beside0),
        ?assertEqual(ended, tier(Beside)),
        %% Who comes after that is another one.
        {[{16, _}], Later} = take(1, open(chunk_iterator, last, Log)),
        [close(R) || R <- [Reader, Beside, Later]]
    end).

%% RabbitMQ opens AMQP consumers again when the local member changes, at the offset where they stand.
a_reader_that_is_opened_again_keeps_looking_for_its_place() ->
    Log = ?LOG:append_at(lists:seq(1000, 1008), ?LOG:new("reopened")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Context = #{reference := Queue} = ?LOG:context(#{}, Log),
    Again = fun(Next) ->
        Counter = {{rabbit_stream_queue, Queue, self()}, []},
        {ok, State} = osiris_log:init_offset_reader(Next, Context#{counter_spec := Counter}),
        under_test(chunk_iterator, State)
    end,
    [
        begin
            range(Range, Log),
            Reader0 = open(chunk_iterator, {timestamp, 1004}, Log),
            Next = osiris_log:next_offset(element(3, Reader0)),
            close(Reader0),
            Reader1 = Again(Next),
            range({0, 18}, Log),
            {[{8, _}], Reader2} = take(1, Reader1),
            %% Once it has been found, the offset counts.
            Found = osiris_log:next_offset(element(3, Reader2)),
            close(Reader2),
            {[{10, _}], Reader3} = take(1, Again(Found)),
            close(Reader3)
        end
     || Range <- [pending, {0, 18}]
    ],
    %% A consumer of its own that begins at the same offset means that offset.
    range(pending, Log),
    close(open(chunk_iterator, {timestamp, 1004}, Log)),
    range({0, 18}, Log),
    {[{0, _}], Reader} = take(1, open(chunk_iterator, 0, Log)),
    close(Reader).

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
    Reader0 = ?READER:waiting(open(chunk_iterator, first, Log)),
    ?assertEqual(pending, ?NIF:manifest_range(double, StreamId)),
    close(open(chunk_iterator, last, Log)),
    ok = ?NIF:put(StreamId, {0, 18}, Chunks),
    {[{0, _}], Reader} = take(1, Reader0),
    close(Reader),
    true = ets:delete(osiris_reader_context_cache, self()).

no_engine_does_not_mean_not_tiered() ->
    Log = ?LOG:append(9, ?LOG:new("no_engine")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Engine = persistent_term:get({rabbitmq_stream_s3, engine}),
    persistent_term:erase({rabbitmq_stream_s3, engine}),
    Reader0 = ?READER:waiting(open(chunk_iterator, first, Log)),
    [close(open(chunk_iterator, Spec, Log)) || Spec <- [last, next, 13]],
    persistent_term:put({rabbitmq_stream_s3, engine}, Engine),
    {[{0, _}], Reader} = take(1, Reader0),
    close(Reader).

resolves_specs() ->
    case erlang:function_exported(osiris_log, resolve_offset_spec, 2) of
        true ->
            Log = ?LOG:append(9, ?LOG:new("specs")),
            uploaded(14, Log),
            1 = ?LOG:trim(11, Log),
            Resolve = fun(Spec) -> ?READER:resolved(Spec, Log) end,
            ?assertEqual({ok, 0}, Resolve(first)),
            ?assertEqual({ok, 2}, Resolve(3)),
            ?assertEqual({ok, 8}, Resolve(9)),
            ?assertEqual({ok, 16}, Resolve(last)),
            ?assertEqual({ok, 18}, Resolve(next)),
            ?assertEqual({ok, 0}, Resolve(-1)),
            ?assertMatch({error, {offset_out_of_range, _}}, Resolve({abs, 99})),
            ?assertEqual(0, length(ets:match(?NIF, {{waiting, '$1'}, '_', '_'})));
        false ->
            ok
    end.

%% The command answers at once. What S3 says later is the answer to the next one.
a_place_that_takes_long_is_refused_and_then_known() ->
    case erlang:function_exported(osiris_log, resolve_offset_spec, 2) of
        true ->
            Log = ?LOG:append(9, ?LOG:new("lookup")),
            uploaded(18, Log),
            1 = ?LOG:trim(11, Log),
            Resolve = fun(Spec) ->
                osiris_log:resolve_offset_spec(Spec, ?LOG:context(#{}, Log))
            end,
            Opens = ?NIF:opens(),
            ok = ?NIF:stall(1),
            ?assertEqual({error, unavailable}, Resolve(3)),
            ?assertEqual({error, unavailable}, Resolve(3)),
            %% One lookup for both.
            ok = ?READER:eventually(fun() -> ?NIF:wake() =:= 1 end),
            ?assertEqual({ok, 2}, ?READER:resolved(3, Log)),
            ?assertEqual({ok, 2}, Resolve(3)),
            ?assertEqual(Opens + 1, ?NIF:opens()),
            range(pending, Log),
            ?assertEqual({error, unavailable}, Resolve(3)),
            ?assertEqual({ok, 6}, Resolve(6)),
            %% Another place.
            range({4, 18}, Log),
            ?assertEqual({ok, 4}, ?READER:resolved(3, Log));
        false ->
            ok
    end.

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
