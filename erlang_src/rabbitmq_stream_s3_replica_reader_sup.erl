-module(rabbitmq_stream_s3_replica_reader_sup).
-moduledoc """
Factory of the per-stream supervisors. They are `temporary`: neither a stream that parks nor one
that leaves costs this supervisor any of its own restart budget.
""".

-behaviour(supervisor).

-export([start_link/0, start_reader/2, init/1]).

-spec start_link() -> supervisor:startlink_ret().
start_link() ->
    supervisor:start_link({local, ?MODULE}, ?MODULE, []).

-doc "Starts the reader of a local writer; `already_started` if the stream has one.".
-spec start_reader(pid(), rabbitmq_stream_s3:member_info()) ->
    ok | {error, already_started | term()}.
start_reader(Writer, Info) ->
    try supervisor:start_child(?MODULE, [Writer, Info]) of
        {ok, _} -> ok;
        {error, Reason} -> {error, reason(Reason)}
    catch
        exit:{Reason, _} -> {error, Reason}
    end.

-spec init([]) -> {ok, {supervisor:sup_flags(), [supervisor:child_spec()]}}.
init([]) ->
    Flags = #{strategy => simple_one_for_one, intensity => 3, period => 5},
    Child = #{
        id => rabbitmq_stream_s3_stream_sup,
        start => {rabbitmq_stream_s3_stream_sup, start_link, []},
        restart => temporary,
        shutdown => infinity,
        type => supervisor
    },
    {ok, {Flags, [Child]}}.

reason({shutdown, {failed_to_start_child, _, {already_started, _}}}) -> already_started;
reason({already_started, _}) -> already_started;
reason(Reason) -> Reason.
