-module(rabbitmq_stream_s3_config_tests).

-include_lib("eunit/include/eunit.hrl").

-define(CONFIG, rabbitmq_stream_s3_config).

check(Env) ->
    ?CONFIG:check([{bucket, "b"}, {region, "r"} | Env]).

no_bucket_test_() ->
    [
        ?_assertEqual({error, not_configured}, ?CONFIG:check(Env))
     || Env <- [[], [{bucket, undefined}], [{bucket, ""}], [{region, "r"}]]
    ].

defaults_test() ->
    {ok, Settings} = check([]),
    ?assertMatch(
        #{
            bucket := <<"b">>,
            region := <<"r">>,
            endpoint := undefined,
            prefix := <<"rabbitmq/stream">>,
            fragment_size := 67108864,
            fragment_max_age_ms := 300000,
            max_transfer_bytes_per_sec := unlimited,
            tls_verify := true
        },
        Settings
    ),
    ?assertEqual(maps:keys(rabbitmq_stream_s3_settings:defaults()), maps:keys(Settings)).

no_secret_in_the_checked_map_test() ->
    {ok, Settings} = check([{access_key_id, "id"}, {secret_access_key, "hidden"}]),
    ?assertEqual(nomatch, string:find(io_lib:format("~tp", [Settings]), "hidden")).

endpoint_test_() ->
    [
        ?_assertMatch({ok, #{endpoint := Expected}}, check([{endpoint, Given}]))
     || {Given, Expected} <- [
            {"s3.example.com", <<"https://s3.example.com">>},
            {"http://localhost:9000", <<"http://localhost:9000">>},
            {<<"https://s3.example.com">>, <<"https://s3.example.com">>}
        ]
    ].

prefix_test_() ->
    Good = ["a", "rabbitmq/stream", "a/b/c", "a-b_c.d=e", lists:duplicate(700, $a)],
    TooLong = lists:duplicate(701, $a),
    Bad = ["", "/a", "a/", "a//b", "a/../b", ".", "a\n", "a\nb", "a b", [0], [127], "größe", TooLong],
    [?_assertMatch({ok, _}, check([{prefix, Prefix}])) || Prefix <- Good] ++
        [
            ?_assertMatch({error, {invalid, <<"prefix is ", _/binary>>}}, check([{prefix, P}]))
         || P <- Bad
        ].

invalid_test_() ->
    [
        ?_assertMatch({error, {invalid, _}}, check([Setting]))
     || Setting <- [
            {path_style, yes},
            {fragment_size, 1},
            {fragment_size, "64MB"},
            {fragment_max_age_ms, 10},
            {persist_threshold, 0},
            {rebalance_threshold, 1},
            {rebalance_threshold, 2000},
            {max_transfer_bytes_per_sec, 0},
            {max_transfer_bytes_per_sec, fast},
            {endpoint, "http://"},
            {request_timeout_ms, -1},
            {max_clock_skew_ms, 1},
            {worker_threads, 0},
            {worker_niceness, 20},
            {access_key_id, "alone"},
            {secret_access_key, "alone"},
            {session_token, "alone"},
            {tls_verify, false},
            {bucket_check_interval_ms, 1}
        ]
    ].

off_test_() ->
    [
        ?_assertMatch({ok, _}, check([Setting]))
     || Setting <- [
            {fragment_max_age_ms, 0}, {bucket_check_interval_ms, 0}, {max_clock_skew_ms, 0}
        ]
    ].

region_or_endpoint_test() ->
    ?assertMatch({error, {invalid, _}}, ?CONFIG:check([{bucket, "b"}])),
    Env = [{bucket, "b"}, {endpoint, "http://x:1"}],
    ?assertMatch({ok, #{region := undefined}}, ?CONFIG:check(Env)).

read_ahead_fits_the_memory_test() ->
    ?assertMatch({error, {invalid, _}}, check([{read_ahead, 2_000_000}, {read_memory, 1_048_576}])),
    %% What nobody has set gives way.
    ?assertMatch({ok, #{read_ahead := 1_048_576}}, check([{read_memory, 1_048_576}])).

read_memory_is_a_share_of_the_node_s_test() ->
    %% Without a memory monitor the limit is not known.
    {ok, #{read_memory := Unknown, read_ahead := Ahead}} = check([]),
    ?assertEqual({256 bsl 20, 128 bsl 20}, {Unknown, Ahead}).

read_cache_path_test() ->
    ?assertMatch({ok, #{read_cache_path := undefined}}, check([])),
    ?assertMatch({ok, #{read_cache_path := <<"/var/cache/s3">>}}, check([{read_cache_path, "/var/cache/s3"}])),
    ?assertMatch({error, {invalid, _}}, check([{read_cache_size, 1}])).

an_unknown_setting_is_not_an_error_test() ->
    ?assertMatch({ok, _}, check([{no_such_setting, 1}])).
