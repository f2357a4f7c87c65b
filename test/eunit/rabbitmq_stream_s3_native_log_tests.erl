%% A line of the native side arrives in the broker's log, and the engine is opened with its level.
-module(rabbitmq_stream_s3_native_log_tests).

-include_lib("eunit/include/eunit.hrl").

-export([log/2]).

-define(LOG, rabbitmq_stream_s3_native_log).

a_line_is_logged_with_its_level_domain_and_fields_test() ->
    #{level := Before} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, info),
    ok = logger:add_handler(?MODULE, ?MODULE, #{config => #{pid => self()}}),
    try
        ok = ?LOG:line(warning, <<"it happened">>, [
            {<<"stream">>, <<"s1">>}, {<<"offset">>, <<"7">>}
        ]),
        receive
            {logged, #{level := Level, msg := {Format, Args}, meta := #{domain := Domain}}} ->
                ?assertEqual(warning, Level),
                ?assertEqual([rabbitmq, stream_s3], Domain),
                ?assertEqual(
                    "stream_s3: it happened stream=s1 offset=7",
                    lists:flatten(io_lib:format(Format, Args))
                )
        after 5000 -> error(not_logged)
        end
    after
        ok = logger:remove_handler(?MODULE),
        ok = logger:set_primary_config(level, Before)
    end.

the_engine_is_opened_with_the_level_of_the_broker_test_() ->
    [
        ?_assertEqual(Native, level(Broker))
     || {Broker, Native} <- [
            {none, off},
            {emergency, off},
            {critical, off},
            {error, error},
            {warning, warning},
            {notice, warning},
            {info, info},
            {debug, debug},
            {all, debug}
        ]
    ].

level(Broker) ->
    #{level := Before} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, Broker),
    try
        #{bucket := <<"b">>, log_level := Level} = ?LOG:configure(#{bucket => <<"b">>}),
        Level
    after
        ok = logger:set_primary_config(level, Before)
    end.

%% The logger's handler.
log(Event, #{config := #{pid := Pid}}) ->
    Pid ! {logged, Event},
    ok.
