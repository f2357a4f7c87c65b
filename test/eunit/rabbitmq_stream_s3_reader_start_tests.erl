%% Where a consumer starts on a node that is inert: there may be no native library that could be asked.
-module(rabbitmq_stream_s3_reader_start_tests).

-include_lib("eunit/include/eunit.hrl").

-define(START, rabbitmq_stream_s3_reader_start).

without_an_engine_the_local_log_alone_is_asked_test() ->
    ok = rabbitmq_stream_s3:erase_engine(),
    Shared = osiris_log_shared:new(),
    %% Records [50, 90).
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 80),
    _ = [
        osiris_log_shared:set_committed_offset(Shared, 89)
     || erlang:function_exported(osiris_log_shared, set_committed_offset, 2)
    ],
    Route = fun(Spec, First) -> ?START:route(<<"stream">>, Spec, Shared, First) end,
    ?assertEqual({local, last}, Route(last, 50)),
    ?assertEqual({local, next}, Route(next, 50)),
    ?assertEqual({local, {offset, 50}}, Route(50, 50)),
    ?assertEqual({local, {offset, 60}}, Route({abs, 60}, 50)),
    %% What is before the local log may be in S3, and is waited for.
    [
        ?assertEqual({Spec, unknown}, {Spec, Route(Spec, 50)})
     || Spec <- [first, 49, {abs, 49}, {timestamp, 1}]
    ],
    ?assertEqual({local, first}, Route(first, 0)),
    ?assertEqual({local, {timestamp, 1}}, Route({timestamp, 1}, 0)).
