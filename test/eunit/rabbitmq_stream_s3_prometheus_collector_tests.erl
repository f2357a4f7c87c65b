%% Which of the native numbers are gauges, compared with what the native side says about them.
-module(rabbitmq_stream_s3_prometheus_collector_tests).

-include_lib("eunit/include/eunit.hrl").

native_gauges_test() ->
    {ok, Source} = file:read_file(source("native/tiering-runtime/src/stats.rs")),
    {match, Marked} = re:run(
        Source, "\\(gauge\\)\\.\\s+([a-z_]+),", [global, {capture, all_but_first, list}]
    ),
    %% Of the library, not of one engine.
    Library = [lent_chunks, lent_bytes, native_memory_bytes],
    ?assertEqual(
        lists:sort([list_to_atom(Name) || [Name] <- Marked] ++ Library),
        lists:sort(rabbitmq_stream_s3_prometheus_collector:native_gauges())
    ).

%% Beside the sources of the module, wherever the tests run.
source(Path) ->
    Options = rabbitmq_stream_s3_prometheus_collector:module_info(compile),
    Module = proplists:get_value(source, Options),
    filename:join(filename:dirname(filename:dirname(Module)), Path).
