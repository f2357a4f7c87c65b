%% A reader whose object is gone, or archived. Of twelve chunks of two records the log has the last two,
%% the remote tier the first twenty records.
-module(rabbitmq_stream_s3_reader_lost_tests).
-include_lib("eunit/include/eunit.hrl").

-import(stream_s3_test_reader, [
    open/3, next/1, all/1, take/2, close/1, tier/1, stock/4, uploaded/2, not_woken/0,
    asks/1, asked_as_its_owner_does/1, with_quiet_log/1, remote_chunks/1
]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(REPLICA, rabbitmq_stream_s3_manifest_replica).

lost_test_() ->
    {setup, fun setup/0, fun cleanup/1, [
        %% A question that failed is not asked again at once.
        {timeout, 60, {Name ++ ", " ++ atom_to_list(How), fun() -> T(How) end}}
     || {Name, T} <- tests(), How <- [send_file, chunk_iterator]
    ]}.

tests() ->
    [
        {"what retention dropped by a newer manifest is stepped over", fun dropped/1},
        {"what is dropped remotely and still there locally is read", fun dropped_remotely/1},
        {"a reader whose object is gone waits for a quorum", fun waits/1},
        {"only what the manifest of now names is lost", fun lost/1},
        {"a place that is dropped after a second look is not lost", fun dropped_later/1},
        {"an archived object is waited for", fun archived/1},
        {"a damaged object ends its reader at once", fun corrupt/1}
    ].

setup() ->
    ok = ?READER:setup(),
    %% It creates the tables.
    ok = rabbitmq_stream_s3_manifest_cache:delete(),
    {ok, Pid} = ?REPLICA:start_link(),
    true = unlink(Pid),
    ok.

cleanup(ok) ->
    ok = gen_server:stop(?REPLICA),
    ?READER:cleanup(ok).

log(Name, How) ->
    Log = ?LOG:append(12, ?LOG:new(Name ++ atom_to_list(How))),
    uploaded(20, Log),
    Expected = stock(How, first, #{}, Log),
    3 = ?LOG:trim(20, Log),
    {Log, Expected}.

unreadable(Places, Kind, Log) ->
    ?NIF:unreadable(?LOG:stream_id(Log), Places, Kind).

persisted(Range, Log) ->
    ?NIF:persist(?LOG:stream_id(Log), Range, remote_chunks(Log)).

quorum_reads(Log) ->
    ?NIF:quorum_reads(?LOG:stream_id(Log)).

asked() ->
    receive
        {asked, Worker} -> Worker
    after 5000 -> error(nobody_asks)
    end.

%% As its owner does that is woken again and again; with or without a chunk in the end.
until_answer({How, _, _} = Reader) ->
    until_answer(asks(How), Reader).

until_answer(0, Reader) ->
    receive
        {'$gen_cast', _} -> until_answer(Reader)
    after 10_000 -> error(not_woken)
    end;
until_answer(Left, Reader0) ->
    case next(Reader0) of
        {end_of_stream, Reader} ->
            case tier(Reader) of
                ended -> {ended, Reader};
                _ -> until_answer(Left - 1, Reader)
            end;
        Answer ->
            Answer
    end.

finish(Reader) ->
    ok = close(Reader),
    _ = not_woken(),
    ok.

%%--------------------------------------------------------------------------------------------

dropped(How) ->
    {Log, Expected} = log("lost_dropped_", How),
    {First, Reader1} = take(2, open(How, first, Log)),
    ok = unreadable({4, 6}, lost, Log),
    ok = persisted({6, 20}, Log),
    ok = ?NIF:quorum({hold, self()}),
    Reader2 = asked_as_its_owner_does(Reader1),
    Worker = asked(),
    Reader3 = asked_as_its_owner_does(Reader2),
    ok = ?NIF:quorum(up),
    Worker ! go,
    {Chunk, Reader4} = until_answer(Reader3),
    ?assertEqual(remote, tier(Reader4)),
    {Rest, Reader5} = all(Reader4),
    ?assertEqual(Expected -- [lists:nth(3, Expected)], First ++ [Chunk | Rest]),
    ?assertEqual(1, quorum_reads(Log)),
    finish(Reader5).

%% Remote retention counts fragments and local retention whole segments: the local log may begin before
%% what is left of the manifest, which may be nothing.
dropped_remotely(How) ->
    [
        begin
            {Log, Expected} = log("lost_remotely_", How),
            {First, Reader1} = take(2, open(How, first, Log)),
            ok = unreadable({4, 6}, lost, Log),
            ok = persisted(Left, Log),
            {Chunk, Reader2} = until_answer(Reader1),
            ?assertEqual(local, tier(Reader2)),
            {Rest, Reader3} = all(Reader2),
            %% The local log begins at 18.
            ?assertEqual(lists:nthtail(9, Expected), [Chunk | Rest]),
            ?assertEqual(2, length(First)),
            finish(Reader3)
        end
     || Left <- [{20, 20}, {22, 24}]
    ].

waits(How) ->
    {Log, Expected} = log("lost_waits_", How),
    ok = unreadable({0, 6}, lost, Log),
    ok = persisted({6, 20}, Log),
    ok = ?NIF:quorum(down),
    Reader1 = asked_as_its_owner_does(open(How, first, Log)),
    Reader2 = asked_as_its_owner_does(Reader1),
    _ = sys:get_state(rabbitmq_stream_s3_reader_gap),
    ok = ?NIF:quorum(up),
    {Chunk, Reader3} = until_answer(Reader2),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(lists:nthtail(3, Expected), [Chunk | Rest]),
    ?assert(quorum_reads(Log) >= 2),
    finish(Reader4).

lost(How) ->
    {Log, _} = log("lost_lost_", How),
    {_, Reader1} = take(2, open(How, first, Log)),
    Opens = ?NIF:opens(),
    ok = unreadable({4, 6}, lost, Log),
    Reader = with_quiet_log(fun() ->
        {ended, Ended} = until_answer(Reader1),
        Ended
    end),
    %% By the manifest of now, and that was looked at again before the verdict.
    ?assertEqual(Opens + 1, ?NIF:opens()),
    ?assertEqual(2, quorum_reads(Log)),
    finish(Reader).

dropped_later(How) ->
    {Log, Expected} = log("lost_later_", How),
    ok = unreadable({0, 6}, lost, Log),
    ok = ?NIF:quorum({hold, self()}),
    Reader1 = asked_as_its_owner_does(open(How, first, Log)),
    asked() ! go,
    _ = spawn_link(fun() -> second_question(Log) end),
    {Chunk, Reader2} = until_answer(Reader1),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual(lists:nthtail(3, Expected), [Chunk | Rest]),
    ?assertEqual(2, quorum_reads(Log)),
    finish(Reader3).

%% Asked once more, and by now retention has dropped it.
second_question(Log) ->
    ok = ?NIF:quorum({hold, self()}),
    Worker = asked(),
    ok = persisted({6, 20}, Log),
    ok = ?NIF:quorum(up),
    Worker ! go.

archived(How) ->
    {Log, Expected} = log("archived_", How),
    {First, Reader1} = take(2, open(How, first, Log)),
    ok = unreadable({4, 6}, archived, Log),
    Reader2 = with_quiet_log(fun() ->
        lists:foldl(fun(_, R) -> asked_as_its_owner_does(R) end, Reader1, lists:seq(1, 3))
    end),
    ok = unreadable({4, 6}, none, Log),
    {Chunk, Reader3} = until_answer(Reader2),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(Expected, First ++ [Chunk | Rest]),
    ?assertEqual(0, quorum_reads(Log)),
    finish(Reader4).

corrupt(How) ->
    {Log, _} = log("corrupt_", How),
    {_, Reader1} = take(2, open(How, first, Log)),
    ok = unreadable({4, 6}, corrupt, Log),
    Reader = with_quiet_log(fun() ->
        {end_of_stream, Ended} = next(Reader1),
        Ended
    end),
    ?assertEqual(ended, tier(Reader)),
    ?assertEqual(0, quorum_reads(Log)),
    finish(Reader).
