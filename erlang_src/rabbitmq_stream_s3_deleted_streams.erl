-module(rabbitmq_stream_s3_deleted_streams).
-moduledoc """
Finds streams that were deleted and whose objects are still in the bucket, and hands them to the lister of
this node. Called in each round of the reconciler, in a task.

Owns which node sweeps which stream: the nodes whose plugin is active share them, so that a node that is
stopped, inert or without the plugin holds nobody up. Does not own the sweep (rabbitmq_stream_s3_lister),
which asks a quorum again before it deletes. Keeps nothing: what a restart interrupts is found again.
""".

-include_lib("kernel/include/logger.hrl").

-export([look/0]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(ASK_NODES_MS, 5_000).
%% A quorum is asked about so many at once, and looks through all queues for them.
-define(LOOK_MAX, 100).

-doc "One look; what the metadata store does not answer now is found by the next one.".
-spec look() -> ok.
look() ->
    maybe
        {ok, Registered} ?= rabbitmq_stream_s3_db_register:list(),
        {ok, Containers} ?= rabbitmq_stream_s3_db:streams(),
        Nodes = active_nodes(),
        Mine = fun(StreamId) -> sweeper(StreamId, Nodes) =:= node() end,
        %% An earlier version of the plugin has written these.
        New = [Id || Id <- maps:keys(Containers) -- Registered, Mine(Id)],
        ok = lists:foreach(fun rabbitmq_stream_s3_db_register:put/1, New),
        Without = [Id || Id <- Registered, not is_map_key(Id, Containers), Mine(Id)],
        sweep(lists:sublist(Without, ?LOOK_MAX))
    else
        {error, Reason} ->
            ?LOG_DEBUG(
                "stream_s3: the metadata store does not say now which streams were deleted: ~0p",
                [Reason],
                ?DOMAIN
            )
    end,
    ok.

sweep([]) ->
    ok;
sweep(StreamIds) ->
    case rabbitmq_stream_s3_db:gone(StreamIds) of
        {ok, Gone} -> lists:foreach(fun rabbitmq_stream_s3_peers:delete_stream/1, Gone);
        {error, Reason} -> {error, Reason}
    end.

-spec sweeper(stream_id(), [node()]) -> node() | none.
sweeper(_StreamId, []) -> none;
sweeper(StreamId, Nodes) -> lists:nth(1 + erlang:phash2(StreamId, length(Nodes)), Nodes).

%% The lister runs where the plugin is active, and only there.
active_nodes() ->
    Nodes = lists:sort(rabbit_nodes:list_running()),
    Answers = erpc:multicall(Nodes, erlang, whereis, [rabbitmq_stream_s3_lister], ?ASK_NODES_MS),
    [Node || {Node, {ok, Pid}} <- lists:zip(Nodes, Answers), is_pid(Pid)].
