%% What lies between the end of the manifest that is known and the floor of the local log: in S3, or
%% gone. Of twelve chunks of two records, in segments of three, the log has the last three.
-module(rabbitmq_stream_s3_reader_gap_tests).
-include_lib("eunit/include/eunit.hrl").

-import(stream_s3_test_reader, [
    open/3, all/1, take/2, ids/1, close/1, tier/1, stock/4, uploaded/2, not_woken/0,
    asked_as_its_owner_does/1
]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(NIF, stream_s3_nif_double).
-define(GAP, rabbitmq_stream_s3_reader_gap).
-define(CACHE, rabbitmq_stream_s3_manifest_cache).
-define(REPLICA, rabbitmq_stream_s3_manifest_replica).

gap_test_() ->
    {setup, fun setup/0, fun cleanup/1, [
        %% A question that failed is not asked again at once.
        {timeout, 60, Test}
     || Test <-
            [
                {Name ++ ", " ++ atom_to_list(How), fun() -> T(How) end}
             || {Name, T} <- of_readers(), How <- [send_file, chunk_iterator]
            ] ++ others()
    ]}.

of_readers() ->
    [
        {"a reader overtaken by the user's retention goes remote", fun overtaken/1},
        {"a reader at the end of an old manifest goes on remotely", fun at_an_old_end/1},
        {"a gap is verified once", fun verified_once/1},
        {"a reader waits for the word of a quorum", fun waits_for_a_quorum/1},
        {"a gap is certain for one floor", fun certain_for_one_floor/1},
        {"no file that goes meanwhile is jumped over", fun files_go_first/1},
        {"where it is written its machine publishes", fun written_here/1}
    ].

others() ->
    [
        {"attaching waits for what the pointer names", fun attaches_remotely/0},
        {"attaching goes on at the floor of a gap", fun attaches_at_the_floor/0},
        {"attaching without a quorum waits", fun attaches_without_a_quorum/0},
        {"no gap, no question", fun no_gap/0},
        {"what is forgotten meanwhile does not count", fun forgotten/0},
        {"only so many are verified at once", fun bounded/0},
        {"a proof that fails again and again is logged once, and so is its end", fun failing_is_logged/0}
    ].

setup() ->
    ok = ?READER:setup(),
    %% It creates the tables.
    ok = ?CACHE:delete(),
    {ok, Pid} = ?REPLICA:start_link(),
    true = unlink(Pid),
    ok.

cleanup(ok) ->
    ok = gen_server:stop(?REPLICA),
    ?READER:cleanup(ok).

%% Known up to Next.
log(Name, Next) ->
    Log = ?LOG:append_at(lists:seq(1000, 1011), ?LOG:new(Name)),
    uploaded(Next, Log),
    Log.

%% The writer has persisted more than is known here, up to 20.
persisted(Log) ->
    ?NIF:persist(?LOG:stream_id(Log), {0, 20}, ?LOG:chunks(Log)).

trimmed_by_user(Log) ->
    Deleted = ?LOG:trim(24, Log),
    18 = ?LOG:floor(Log),
    Deleted.

quorum_reads(Log) ->
    ?NIF:quorum_reads(?LOG:stream_id(Log)).

%% Not only for as long as the answer takes: the answer comes when its owner has believed the end.
waits(Reader0) ->
    ok = ?NIF:quorum({hold, self()}),
    Reader = asked_as_its_owner_does(Reader0),
    Worker = asked(),
    ok = ?NIF:quorum(up),
    Worker ! go,
    Reader.

asked() ->
    receive
        {asked, Worker} -> Worker
    after 5000 -> error(nobody_asks)
    end.

finish(Reader) ->
    ok = close(Reader),
    _ = not_woken(),
    ok.

%%--------------------------------------------------------------------------------------------

overtaken(How) ->
    Log = log("overtaken", 2),
    Expected = stock(How, first, #{}, Log),
    ok = persisted(Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = trimmed_by_user(Log),
    Reader2 = waits(Reader1),
    ?assertEqual(6, osiris_log:next_offset(element(3, Reader2))),
    ok = ?LOG:gap_is_certain(Log),
    {[Chunk], Reader3} = take(1, Reader2),
    ?assertEqual(remote, tier(Reader3)),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual(Expected, First ++ [Chunk | Rest]),
    ?assertEqual(1, quorum_reads(Log)),
    finish(Reader4).

at_an_old_end(How) ->
    Log = log("old_end", 6),
    Expected = stock(How, first, #{}, Log),
    ok = persisted(Log),
    1 = ?LOG:trim(6, Log),
    {First, Reader1} = take(3, open(How, first, Log)),
    ?assertEqual(remote, tier(Reader1)),
    2 = trimmed_by_user(Log),
    Reader2 = waits(Reader1),
    ok = ?LOG:gap_is_certain(Log),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual(Expected, First ++ Rest),
    ?assertEqual(1, quorum_reads(Log)),
    finish(Reader3).

verified_once(How) ->
    Log = log("once", 6),
    1 = ?LOG:trim(6, Log),
    {_, Reader1} = take(3, open(How, first, Log)),
    {_, Other1} = take(3, open(How, first, Log)),
    2 = trimmed_by_user(Log),
    Reader2 = waits(Reader1),
    ok = ?LOG:gap_is_certain(Log),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual([18, 20, 22], ids(Rest)),
    {OtherRest, Other2} = all(Other1),
    ?assertEqual([18, 20, 22], ids(OtherRest)),
    ?assertEqual(1, quorum_reads(Log)),
    finish(Other2),
    finish(Reader3).

waits_for_a_quorum(How) ->
    Log = log("no_quorum", 2),
    {_, Reader1} = take(3, open(How, first, Log)),
    3 = trimmed_by_user(Log),
    ok = ?NIF:quorum(down),
    Reader2 = asked_as_its_owner_does(Reader1),
    ?assertEqual({error, unavailable}, ?LOG:gap_is_certain(Log)),
    Reader3 = asked_as_its_owner_does(Reader2),
    ?assertEqual(6, osiris_log:next_offset(element(3, Reader3))),
    ok = ?NIF:quorum(up),
    ok = certain_in_the_end(Log),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual([18, 20, 22], ids(Rest)),
    finish(Reader4).

%% What was asked before may still be on its way to a refusal.
certain_in_the_end(Log) ->
    case ?LOG:gap_is_certain(Log) of
        ok -> ok;
        {error, unavailable} -> certain_in_the_end(Log)
    end.

certain_for_one_floor(How) ->
    Log = log("moving_floor", 2),
    {_, Reader1} = take(3, open(How, first, Log)),
    2 = ?LOG:trim(12, Log),
    {[], Reader2} = all(Reader1),
    ok = ?LOG:gap_is_certain(Log),
    1 = trimmed_by_user(Log),
    {[], Reader3} = all(Reader2),
    ok = ?LOG:gap_is_certain(Log),
    {Rest, Reader4} = all(Reader3),
    ?assertEqual([18, 20, 22], ids(Rest)),
    ?assertEqual(2, quorum_reads(Log)),
    finish(Reader4).

%% The floor is the certain one, and the files above it are going.
files_go_first(How) ->
    Log = log("going_files", 2),
    Expected = stock(How, 12, #{}, Log),
    {_, Reader1} = take(3, open(How, first, Log)),
    2 = ?LOG:trim(12, Log),
    {[], Reader2} = all(Reader1),
    ok = ?LOG:gap_is_certain(Log),
    ok = persisted(Log),
    1 = ?LOG:delete_files(24, Log),
    12 = ?LOG:floor(Log),
    {[], Reader3} = all(Reader2),
    0 = trimmed_by_user(Log),
    {[], Reader4} = all(Reader3),
    ok = ?LOG:gap_is_certain(Log),
    {Rest, Reader5} = all(Reader4),
    %% What has been persisted since of the remaining log; the rest of the gap is gone.
    ?assertEqual(ids(Expected), ids(Rest)),
    finish(Reader5).

written_here(How) ->
    Log = log("written_here", 2),
    StreamId = ?LOG:stream_id(Log),
    Expected = stock(How, first, #{}, Log),
    Chunks = ?LOG:chunks(Log),
    ok = ?NIF:written_here(StreamId),
    ok = persisted(Log),
    ok = ?CACHE:put(StreamId, #{revision => 1}),
    {First, Reader1} = take(3, open(How, first, Log)),
    3 = trimmed_by_user(Log),
    Reader2 = waits(Reader1),
    ?assertEqual({error, unavailable}, ?LOG:gap_is_certain(Log)),
    ok = ?NIF:put(StreamId, {0, 20}, Chunks),
    ok = ?CACHE:put(StreamId, #{revision => 2}),
    {Rest, Reader3} = all(Reader2),
    ?assertEqual(Expected, First ++ Rest),
    finish(Reader3),
    %% And a gap is one there, too, once the machine has published what the pointer names.
    ok = certain_in_the_end(Log),
    ok = ?NIF:put(StreamId, {0, 2}, Chunks),
    Reader4 = open(How, 4, Log),
    ?assertEqual({local, [18]}, {tier(Reader4), ids(element(1, take(1, Reader4)))}),
    finish(Reader4).

%%--------------------------------------------------------------------------------------------

%% Spec, up to where the manifest is known, first chunk if more is persisted than is known.
below_the_floor() ->
    [
        {first, 0, 0},
        {7, 2, 6},
        {7, 0, 6},
        {{abs, 7}, 2, 6},
        {{timestamp, 1004}, 2, 8}
    ].

attaches_remotely() ->
    [
        begin
            Log = log("attach_old", Known),
            ok = persisted(Log),
            3 = trimmed_by_user(Log),
            Reader0 = open(chunk_iterator, Spec, Log),
            ?assertEqual({Spec, unknown}, {Spec, tier(Reader0)}),
            ok = ?LOG:gap_is_certain(Log),
            {Chunks, Reader} = take(1, Reader0),
            ?assertEqual({Spec, remote, [First]}, {Spec, tier(Reader), ids(Chunks)}),
            ?assertEqual(1, quorum_reads(Log)),
            finish(Reader),
            resolves_to(First, Spec, Log)
        end
     || {Spec, Known, First} <- below_the_floor()
    ].

resolves_to(Offset, Spec, Log) ->
    case erlang:function_exported(osiris_log, resolve_offset_spec, 2) of
        true ->
            ?assertEqual({ok, Offset}, ?READER:resolved(Spec, Log));
        false ->
            ok
    end.

attaches_at_the_floor() ->
    [
        begin
            Log = log("attach_gap", Known),
            3 = trimmed_by_user(Log),
            [
                begin
                    Reader0 = open(chunk_iterator, Spec, Log),
                    ?assertEqual({Spec, Tier}, {Spec, tier(Reader0)}),
                    ok = ?LOG:gap_is_certain(Log),
                    {Chunks, Reader} = take(1, Reader0),
                    ?assertEqual({Spec, local, [18]}, {Spec, tier(Reader), ids(Chunks)}),
                    ?assertEqual(1, quorum_reads(Log)),
                    finish(Reader)
                end
             || Tier <- [unknown, local]
            ],
            resolves_to(18, Spec, Log)
        end
     || {Spec, Known, _} <- below_the_floor()
    ].

attaches_without_a_quorum() ->
    ok = ?NIF:quorum(down),
    [
        begin
            Log = log("attach_no_quorum", Known),
            3 = trimmed_by_user(Log),
            [finish(open(chunk_iterator, Local, Log)) || Local <- [last, next, 18, {abs, 19}]],
            ?assertEqual(0, quorum_reads(Log)),
            Reader = ?READER:waiting(open(chunk_iterator, Spec, Log)),
            ok = ?READER:eventually(fun() -> quorum_reads(Log) > 0 end),
            finish(?READER:waiting(Reader))
        end
     || {Spec, Known, _} <- below_the_floor()
    ],
    ok = ?NIF:quorum(up).

no_gap() ->
    Specs = [first, 7, {abs, 7}, {timestamp, 1004}, {timestamp, 1}, last, next],
    Log = log("no_gap", 0),
    [finish(open(chunk_iterator, Spec, Log)) || Spec <- Specs],
    ?assertEqual(0, quorum_reads(Log)),
    Meets = log("meets", 6),
    1 = ?LOG:trim(6, Meets),
    [finish(open(chunk_iterator, Spec, Meets)) || Spec <- Specs],
    ?assertEqual(0, quorum_reads(Meets)).

%%--------------------------------------------------------------------------------------------

forgotten() ->
    Log = log("forgotten", 2),
    3 = trimmed_by_user(Log),
    StreamId = ?LOG:stream_id(Log),
    ok = ?NIF:quorum({hold, self()}),
    ?assertNot(?GAP:is_certain(StreamId, 18)),
    Worker = asked(),
    ok = rabbitmq_stream_s3_manifest_cache:reset(StreamId),
    Worker ! go,
    ok = ?NIF:quorum(up),
    ok = certain_in_the_end(Log),
    ?assertEqual(2, quorum_reads(Log)),
    ?assert(?GAP:is_certain(StreamId, 18)),
    %% What was certain goes with it, too.
    ok = ?CACHE:forget(StreamId),
    ?assertNot(?GAP:is_certain(StreamId, 18)).

bounded() ->
    ok = ?NIF:quorum({hold, self()}),
    StreamIds = [<<"stream ", (integer_to_binary(N))/binary>> || N <- lists:seq(1, 10)],
    [?assertNot(?GAP:is_certain(StreamId, 5)) || StreamId <- StreamIds],
    Workers = [asked() || _ <- lists:seq(1, 8)],
    %% It has seen all ten requests.
    _ = sys:get_state(?GAP),
    receive
        {asked, _} -> error(too_many)
    after 0 -> ok
    end,
    [Worker ! go || Worker <- Workers],
    [asked() ! go || _ <- lists:seq(9, 10)],
    ok = ?NIF:quorum(up),
    [?assertEqual(ok, ?LOG:gap_is_certain(StreamId, 5)) || StreamId <- StreamIds],
    ?assertEqual([1], lists:usort([?NIF:quorum_reads(StreamId) || StreamId <- StreamIds])).

failing_is_logged() ->
    StreamId = ?LOG:stream_id(log("failing", 2)),
    ok = logger:set_module_level(?GAP, info),
    ok = stream_s3_logged:begin_for(self()),
    ok = ?NIF:quorum(down),
    Since = erlang:monotonic_time(),
    [
        begin
            ?assertNot(?GAP:is_current(StreamId, Since)),
            %% The rest after a failure is not waited for.
            ?GAP ! {rested, StreamId},
            ok = ?READER:eventually(fun() -> failures(StreamId) >= Count end)
        end
     || Count <- lists:seq(1, 7)
    ],
    ok = ?NIF:quorum(up),
    ok = ?READER:eventually(fun() ->
        ?GAP ! {rested, StreamId},
        ?GAP:is_current(StreamId, Since)
    end),
    ok = stream_s3_logged:stop(),
    ok = logger:unset_module_level(?GAP),
    ?assertEqual(0, failures(StreamId)),
    ?assertMatch([{warning, _}, {info, _}], logged(StreamId)).

failures(StreamId) ->
    maps:get(StreamId, element(5, sys:get_state(?GAP)), 0).

logged(StreamId) ->
    receive
        {logged, Level, Text} ->
            case string:find(Text, StreamId) of
                nomatch -> logged(StreamId);
                _ -> [{Level, Text} | logged(StreamId)]
            end
    after 0 -> []
    end.
