-module(rabbitmq_stream_s3_stream_sup).
-moduledoc """
Supervises the one replica reader of a stream, with a restart budget of its own: a stream that
cannot be helped parks alone. When the reader ends normally (its writer is gone), this supervisor
ends too.
""".

-behaviour(supervisor).

-export([start_link/2, init/1]).

-spec start_link(pid(), rabbitmq_stream_s3:member_info()) -> supervisor:startlink_ret().
start_link(Writer, Info) ->
    supervisor:start_link(?MODULE, {Writer, Info}).

-spec init({pid(), rabbitmq_stream_s3:member_info()}) ->
    {ok, {supervisor:sup_flags(), [supervisor:child_spec()]}}.
init({Writer, Info}) ->
    Flags = #{
        strategy => one_for_one,
        intensity => 3,
        period => 10,
        auto_shutdown => any_significant
    },
    Child = #{
        id => rabbitmq_stream_s3_replica_reader,
        start => {rabbitmq_stream_s3_replica_reader, start_link, [Writer, Info]},
        restart => transient,
        significant => true,
        shutdown => 5000
    },
    {ok, {Flags, [Child]}}.
