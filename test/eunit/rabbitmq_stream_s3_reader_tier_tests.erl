%% Which tier a reader goes on in.
-module(rabbitmq_stream_s3_reader_tier_tests).
-include_lib("eunit/include/eunit.hrl").

-import(stream_s3_test_reader, [
    after_floor/1, open/3, open/4, next/1, all/1, take/2, ids/1, close/1, tier/1, stock/4,
    uploaded/2, range/2, woken/0, not_woken/0, asked_as_its_owner_does/1, remote_chunks/1
]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).

tiers_test_() ->
    {setup, fun ?READER:setup/0, fun ?READER:cleanup/1, [
        ?READER:both([
            fun goes_from_remote_to_local_to_the_live_end/1,
            fun goes_remote_when_the_floor_has_passed/1,
            fun is_not_taken_in_by_a_trim_between_check_and_read/1,
            fun is_not_taken_in_by_a_trim_before_skipped_chunks/1,
            fun goes_remote_when_the_next_file_is_gone_before_the_floor_moves/1,
            fun follows_stock_over_what_user_retention_dropped/1,
            fun waits_while_it_is_not_known_who_has_it/1,
            fun waits_a_moment_for_a_stream_that_was_forgotten/1,
            fun a_trim_before_skipped_chunks_is_remembered_while_unknown/1,
            fun stays_remote_when_the_place_to_go_local_was_trimmed/1,
            fun reads_nothing_remotely_that_the_log_had_when_it_looked/1,
            fun looks_again_at_what_was_trimmed_since_it_looked/1,
            fun a_timestamp_leads_to_the_log_that_is_there/1,
            fun jumps_to_the_floor_when_the_remote_tier_begins_above_it/1,
            fun waits_for_a_replica_that_is_behind/1
        ])
    ]}.

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
    {[], Waiting1} = all(Reader1),
    ok = ?LOG:gap_is_certain(Log),
    {Chunks, Reader2} = all(Waiting1),
    ?assertEqual([18, 20, 22], ids(Chunks)),
    ?assertEqual(1, ?NIF:quorum_reads(?LOG:stream_id(Log))),
    close(Reader2),
    %% Dropped during the read.
    Log2 = ?LOG:append(12, ?LOG:new("dropped_race")),
    uploaded(2, Log2),
    {_, Reader3} = take(3, open(How, first, Log2)),
    after_floor(fun() -> 3 = ?LOG:trim(24, Log2) end),
    {[], Waiting3} = all(Reader3),
    ok = ?LOG:gap_is_certain(Log2),
    {Chunks2, Reader4} = all(Waiting3),
    ?assertEqual([18, 20, 22], ids(Chunks2)),
    close(Reader4),
    _ = not_woken(),
    ok.

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
    {[], Waiting} = all(Reader5),
    ok = ?LOG:gap_is_certain(Stock),
    {Chunks, Reader6} = all(Waiting),
    ok = application:unset_env(rabbitmq_stream_s3, read_resolve_timeout_ms),
    ?assertEqual([18, 20, 22], ids(Chunks)),
    close(Reader6).

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
