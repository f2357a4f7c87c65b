%% When the bucket is asked for again.
-module(rabbitmq_stream_s3_api_aws_tests).

-include_lib("eunit/include/eunit.hrl").

next_probe_test_() ->
    Down = {inaccessible, unreachable, <<"no route">>},
    [
        ?_assertEqual(Expected, rabbitmq_stream_s3_api_aws:next_probe_ms(Interval, Access))
     || {Interval, Access, Expected} <- [
            {300_000, accessible, 300_000},
            {300_000, Down, 5_000},
            {1_000, Down, 1_000},
            {0, accessible, never},
            {0, Down, 5_000},
            {0, unknown, 5_000}
        ]
    ].
