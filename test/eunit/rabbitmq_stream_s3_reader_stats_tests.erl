-module(rabbitmq_stream_s3_reader_stats_tests).
-include_lib("eunit/include/eunit.hrl").

-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(FORMS, rabbitmq_stream_s3_host_forms).
%% As osiris has them.
-define(FIELDS, [
    {Field, N, counter, ""}
 || {N, Field} <- lists:enumerate([offset, first_offset, first_timestamp, chunks, segments])
]).

stats_test_() ->
    {setup, fun setup/0, fun cleanup/1, [
        {"stream statistics begin with the remote tier", fun begins_with_the_remote_tier/0},
        {"the local log begins where it begins", fun the_floor_stays/0},
        {"while the manifest is unknown there is no first chunk", fun unknown/0},
        {"counters of a member begin with the remote tier", fun counters_of_a_member/0},
        {"fields that were asked for begin with the remote tier, too", fun fields_of_a_member/0},
        {"without hooks everything is stock", fun detached/0}
    ]}.

setup() ->
    ok = ?LOG:setup(),
    Cache = osiris_reader_context_cache,
    _ = [ets:new(Cache, [named_table, public]) || ets:whereis(Cache) =:= undefined],
    ok.

cleanup(_) ->
    ?LOG:cleanup(ok).

%% A log of nine chunks, [0, 14) of it uploaded, that begins at 6; the caller is its member.
trimmed(Name) ->
    Log = ?LOG:append(9, ?LOG:new(Name)),
    ok = ?NIF:put(?LOG:stream_id(Log), {0, 14}, ?LOG:chunks(Log)),
    1 = ?LOG:trim(11, Log),
    #{dir := Dir, name := Id, shared := Shared, reference := Ref} = ?LOG:context(#{}, Log),
    Row = {self(), Dir, Id, Shared, Ref, fun erlang:is_integer/1},
    true = ets:insert(osiris_reader_context_cache, Row),
    {Log, Ref}.

begins_with_the_remote_tier() ->
    {_, _} = trimmed("stats"),
    ?assertMatch(
        #{first_chunk_id := 0, committed_chunk_id := 16, last_chunk_id := 16},
        osiris:get_stats(self())
    ),
    {Log, _} = trimmed("stats_expired"),
    ok = ?NIF:put(?LOG:stream_id(Log), {4, 14}, []),
    ?assertMatch(#{first_chunk_id := 4}, osiris:get_stats(self())).

the_floor_stays() ->
    {Log, _} = trimmed("stats_floor"),
    _ = osiris:get_stats(self()),
    ?assertEqual(6, ?LOG:floor(Log)),
    ok = ?NIF:put(?LOG:stream_id(Log), {7, 7}, []),
    ?assertMatch(#{first_chunk_id := 6}, osiris:get_stats(self())).

unknown() ->
    {Log, _} = trimmed("stats_unknown"),
    ok = ?NIF:put(?LOG:stream_id(Log), pending, []),
    ?assertMatch(#{first_chunk_id := -1}, osiris:get_stats(self())),
    ok = ?NIF:put(?LOG:stream_id(Log), {2, 14}, []),
    ?assertMatch(#{first_chunk_id := 2}, osiris:get_stats(self())).

counters_of_a_member() ->
    {Log, Queue} = trimmed("stats_counters"),
    Name = {osiris_writer, Queue},
    Counters = osiris_counters:new(Name, ?FIELDS),
    [counters:put(Counters, N, V) || {N, V} <- [{1, 17}, {2, 6}, {3, 2000}]],
    Reader = {{osiris_reader, Queue}, 1},
    _ = osiris_counters:new(Reader, ?FIELDS),
    Said = fun() -> maps:with([offset, first_offset], osiris_counters:overview(Name)) end,
    ?assertEqual(#{offset => 17, first_offset => 6}, Said()),
    ok = rabbitmq_stream_s3_manifest_cache:set_queue(Queue, ?LOG:stream_id(Log)),
    Know = fun(Range) -> ok = rabbitmq_stream_s3_manifest_cache:put(?LOG:stream_id(Log), Range) end,
    Know(pending),
    %% RabbitMQ keeps what it knew of the number of messages.
    ?assertEqual(#{offset => 17}, Said()),
    counters:put(Counters, 2, 0),
    ?assertEqual(#{offset => 17, first_offset => 0}, Said()),
    counters:put(Counters, 2, 6),
    Know(#{first_offset => 2, next_offset => 14, first_timestamp => 1000}),
    ?assertEqual(#{offset => 17, first_offset => 2}, Said()),
    ?assertMatch(
        #{Name := #{first_offset := 2}, Reader := #{first_offset := 0}}, osiris_counters:overview()
    ),
    ?assertEqual(undefined, osiris_counters:overview({osiris_writer, nobody})),
    Know(#{first_offset => 4, next_offset => 4, first_timestamp => 0}),
    ?assertEqual(#{offset => 17, first_offset => 6}, Said()),
    ?assertEqual(6, counters:get(Counters, 2)),
    [osiris_counters:delete(N) || N <- [Name, Reader]].

%% Not in osiris 1.8.
fields_of_a_member() ->
    Fields = {counters, 2},
    case lists:member(Fields, osiris_counters:module_info(exports)) of
        true ->
            {Log, Queue} = trimmed("stats_fields"),
            Name = {osiris_writer, Queue},
            _ = osiris_counters:new(Name, ?FIELDS),
            counters:put(osiris_counters:fetch(Name), 3, 2000),
            ok = rabbitmq_stream_s3_manifest_cache:set_queue(Queue, ?LOG:stream_id(Log)),
            Range = #{first_offset => 2, next_offset => 14, first_timestamp => 1000},
            ok = rabbitmq_stream_s3_manifest_cache:put(?LOG:stream_id(Log), Range),
            Told = osiris_counters:counters(Name, [first_timestamp, segments]),
            ?assertEqual(#{first_timestamp => 1000, segments => 0}, Told),
            ?assertEqual(undefined, osiris_counters:counters({osiris_writer, nobody}, [offset])),
            osiris_counters:delete(Name);
        false ->
            ok
    end.

detached() ->
    {_, _} = trimmed("stats_detached"),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ?assertMatch(#{first_chunk_id := 6}, osiris:get_stats(self())),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
    ?assertMatch(#{first_chunk_id := 0}, osiris:get_stats(self())).

a_module_of_another_shape_is_left_alone_test() ->
    {osiris_counters, Binary, _} = code:get_object_code(osiris_counters),
    {ok, {_, [{abstract_code, {_, Forms}}]}} = beam_lib:chunks(Binary, [abstract_code]),
    ?assertMatch({ok, _}, ?FORMS:wrap_answers(mark, [{overview, 0}], Forms)),
    {error, {unknown_shape, Text}} = ?FORMS:wrap_answers(mark, [{overview, 7}], Forms),
    ?assertEqual("no exported function overview/7", lists:flatten(Text)).
