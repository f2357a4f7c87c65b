-module(rabbitmq_stream_s3_host_retention_tests).
-include_lib("eunit/include/eunit.hrl").

-define(M, rabbitmq_stream_s3_host_retention).

surplus_test_() ->
    All = [{0, true}, {6, true}, {12, true}, {18, true}],
    [
        {"nothing is durable", ?_assertEqual([], ?M:surplus(All, 0))},
        {"a segment that is durable but for its last record stays",
            ?_assertEqual([], ?M:surplus(All, 5))},
        {"a segment goes when the next one starts at the durable end",
            ?_assertEqual([0], ?M:surplus(All, 6))},
        {"a part of the next one changes nothing", ?_assertEqual([0], ?M:surplus(All, 11))},
        {"two segments", ?_assertEqual([0, 6], ?M:surplus(All, 12))},
        {"never the active segment", ?_assertEqual([0, 6, 12], ?M:surplus(All, 1000))},
        {"an empty active segment does not count as one",
            ?_assertEqual([0, 6], ?M:surplus([{0, true}, {6, true}, {12, true}, {18, false}], 18))},
        {"an empty log", ?_assertEqual([], ?M:surplus([{0, false}], 100))},
        {"no log", ?_assertEqual([], ?M:surplus([], 100))}
    ].

trim_test_() ->
    {setup, fun stream_s3_test_log:setup/0, fun stream_s3_test_log:cleanup/1, [
        fun deletes_pairs_and_counts/0,
        fun tolerates_missing_files_and_folders/0
    ]}.

deletes_pairs_and_counts() ->
    Log = stream_s3_test_log:append(9, stream_s3_test_log:new("trim")),
    Dir = stream_s3_test_log:dir(Log),
    #{local_segments_deleted := Before} = ?M:stats(),
    ?assertEqual([0, 6, 12], stream_s3_test_log:segments(Log)),
    ?assertEqual(1, trim(Dir, 11)),
    ?assertEqual(0, trim(Dir, 11)),
    {ok, Files} = file:list_dir(Dir),
    ?assertEqual(
        [
            "00000000000000000006.index",
            "00000000000000000006.segment",
            "00000000000000000012.index",
            "00000000000000000012.segment"
        ],
        lists:sort(Files)
    ),
    ?assertEqual(1, trim(unicode:characters_to_binary(Dir), 1000)),
    ?assertEqual(#{local_segments_deleted => Before + 2}, ?M:stats()).

tolerates_missing_files_and_folders() ->
    Log = stream_s3_test_log:append(9, stream_s3_test_log:new("gone")),
    Dir = stream_s3_test_log:dir(Log),
    ok = file:delete(filename:join(Dir, "00000000000000000000.segment")),
    ?assertEqual(2, trim(Dir, 1000)),
    ?assertEqual([12], stream_s3_test_log:segments(Log)),
    ?assertEqual(0, trim(Dir ++ "_never_there", 1000)).

%% All that is durable may go.
trim(Dir, RemoteNext) ->
    ?M:trim(Dir, RemoteNext, fun(Segments, _Size) -> [First || {First, _End} <- Segments] end).
