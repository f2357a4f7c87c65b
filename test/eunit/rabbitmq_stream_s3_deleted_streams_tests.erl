%% Which streams a round hands to the lister of this node.
-module(rabbitmq_stream_s3_deleted_streams_tests).

-include_lib("eunit/include/eunit.hrl").

-export([list/0, put/1, streams/0, gone/1, list_running/0]).

-define(M, rabbitmq_stream_s3_deleted_streams).
-define(DOUBLES, [rabbitmq_stream_s3_db_register, rabbitmq_stream_s3_db, rabbit_nodes]).

deleted_streams_test_() ->
    {foreach, fun start/0, fun stop/1, [
        {"a stream without container and queue is swept", fun gone_is_swept/0},
        {"a stream of an earlier version is registered", fun is_registered/0},
        {"a metadata store that is empty sweeps nothing", fun wiped/0},
        {"without an answer nothing is swept", fun silent/0},
        {"a node without the plugin sweeps nothing, and holds nobody up", fun other_node/0}
    ]}.

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    ok = stream_s3_double:load(rabbitmq_stream_s3_db_register, [{list, 0}, {put, 1}], ?MODULE),
    ok = stream_s3_double:load(rabbitmq_stream_s3_db, [{streams, 0}, {gone, 1}], ?MODULE),
    ok = stream_s3_double:load(rabbit_nodes, [{list_running, 0}], ?MODULE),
    has(running, [node()]),
    ok.

stop(ok) ->
    lists:foreach(fun stream_s3_double:unload/1, ?DOUBLES),
    true = ets:delete(?MODULE).

has(What, Value) -> true = ets:insert(?MODULE, {What, Value}).

value(What, Default) ->
    case ets:lookup(?MODULE, What) of
        [{_, Value}] -> Value;
        [] -> Default
    end.

list() -> value(registered, {ok, []}).
streams() -> {ok, maps:from_keys(value(containers, []), [])}.
gone(StreamIds) -> value(gone, {ok, StreamIds -- value(queues, [])}).
list_running() -> value(running, []).
put(StreamId) -> has({put, StreamId}, true), ok.

look() ->
    %% Each test of a fixture has a process of its own.
    whereis(rabbitmq_stream_s3_lister) =:= self() orelse
        register(rabbitmq_stream_s3_lister, self()),
    ok = ?M:look(),
    reported().

reported() ->
    receive
        {'$gen_cast', {delete_stream, StreamId}} -> [StreamId | reported()]
    after 0 -> []
    end.

gone_is_swept() ->
    has(registered, {ok, [~"deleted", ~"here", ~"without container"]}),
    has(containers, [~"here"]),
    has(queues, [~"without container"]),
    ?assertEqual([~"deleted"], look()),
    %% It is there until it has been swept: a restart loses nothing.
    ?assertEqual([~"deleted"], look()).

is_registered() ->
    has(registered, {ok, [~"here"]}),
    has(containers, [~"here", ~"earlier"]),
    ?assertEqual([], look()),
    ?assertEqual([{{put, ~"earlier"}, true}], ets:match_object(?MODULE, {{put, '_'}, '_'})).

wiped() ->
    ?assertEqual([], look()).

silent() ->
    has(registered, {ok, [~"deleted"]}),
    has(gone, {error, timeout}),
    ?assertEqual([], look()),
    has(registered, {error, timeout}),
    ?assertEqual([], look()).

other_node() ->
    Ids = [integer_to_binary(N) || N <- lists:seq(1, 50)],
    has(registered, {ok, Ids}),
    %% Not reached: it has no share.
    has(running, [node(), 'stopped@localhost']),
    ?assertEqual(lists:sort(Ids), lists:sort(look())),
    true = unregister(rabbitmq_stream_s3_lister),
    ok = ?M:look(),
    ?assertEqual([], reported()).
