%% A handler of logger that sends what is logged to a test: `{logged, Level, Text}`.
-module(stream_s3_logged).

-export([begin_for/1, stop/0]).
-export([log/2]).

begin_for(Pid) ->
    logger:add_handler(?MODULE, ?MODULE, #{config => #{pid => Pid}}).

stop() ->
    logger:remove_handler(?MODULE).

log(#{level := Level, msg := {Format, Args}}, #{config := #{pid := Pid}}) when is_list(Args) ->
    Pid ! {logged, Level, lists:flatten(io_lib:format(Format, Args))};
log(_Other, _Config) ->
    ok.
