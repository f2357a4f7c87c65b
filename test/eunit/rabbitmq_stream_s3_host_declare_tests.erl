%% The arguments of a queue as they are kept in the bucket.
-module(rabbitmq_stream_s3_host_declare_tests).

-include_lib("eunit/include/eunit.hrl").

-define(DECLARE, rabbitmq_stream_s3_host_declare).

arguments_come_back_with_their_types_test() ->
    Arguments = [
        {~"x-queue-type", longstr, ~"stream"},
        {~"x-max-length-bytes", long, 1_000_000_000},
        {~"x-max-age", longstr, ~"7D"},
        {~"x-stream-filter-size-bytes", signedint, 32},
        {<<"x-grüße"/utf8>>, table, [{~"nested", array, [{bool, true}, {timestamp, 17}]}]}
    ],
    ?assertEqual({ok, Arguments}, ?DECLARE:decode_arguments(?DECLARE:encode_arguments(Arguments))),
    ?assertEqual({ok, []}, ?DECLARE:decode_arguments(?DECLARE:encode_arguments([]))).

text_that_is_none_is_refused_test() ->
    [
        ?assertEqual(error, ?DECLARE:decode_arguments(Text))
     || Text <- [~"not base64!", base64:encode(~"no table"), base64:encode(<<3, $a, $b>>)]
    ].

only_what_was_declared_here_is_recovered_test() ->
    ?assertNot(?DECLARE:is_recovered(#{name => "a", epoch => 1})),
    ?assert(?DECLARE:is_recovered(#{name => "a", epoch => 1, rabbitmq_stream_s3_recovered => true})).
