-module(rabbitmq_stream_s3_native_log).
-moduledoc """
Lines of the native side, in the broker's log.

Owns the level that the engine is opened with, and how a line looks. Does not own which lines there
are: the native side decides that, and drops and counts what is too much.
""".

-include_lib("kernel/include/logger.hrl").

-export([configure/1, line/3]).

-define(DOMAIN, [rabbitmq, stream_s3]).

-doc "The engine's configuration with the level of the broker's log at this moment.".
-spec configure(Config :: map()) -> map().
configure(Config) ->
    #{level := Level} = logger:get_primary_config(),
    Config#{log_level => native_level(Level)}.

-doc "Logs one line of the native side.".
-spec line(logger:level(), Message :: binary(), [{Field :: binary(), Value :: binary()}]) -> ok.
line(Level, Message, Fields) ->
    ?LOG(Level, "stream_s3: ~ts~ts", [Message, [[" ", F, "=", V] || {F, V} <- Fields]], #{
        domain => ?DOMAIN
    }).

native_level(none) ->
    off;
native_level(Level) ->
    %% The native side has four levels; each of the broker's takes the next that it includes.
    Names = [error, warning, info, debug],
    Included = [L || L <- Names, logger:compare_levels(L, Level) =/= lt],
    lists:last([off | Included]).
