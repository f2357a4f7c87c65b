-module(rabbitmq_stream_s3_db_register).
-moduledoc """
Which streams may have objects in the bucket, kept in Khepri for longer than the streams themselves:

    [rabbitmq, rabbitmq_stream_s3_streams, StreamId]  the stream id

Written before a stream's first object, removed after its last. A stream that is here, and has neither a
container nor a queue, was deleted and is still to be swept. A metadata store that was wiped or restored has
no such stream, so nothing is deleted because of it.

Owns these paths and their errors. Does not own who is gone (rabbitmq_stream_s3_db), nor who sweeps
(rabbitmq_stream_s3_deleted_streams).
""".

-include_lib("khepri/include/khepri.hrl").

-export([put/1, list/0, remove/1]).

-define(ROOT, [rabbitmq, rabbitmq_stream_s3_streams]).
-define(TIMEOUT_MS, 30_000).

-doc "Enters a stream; entering it again changes nothing.".
-spec put(rabbitmq_stream_s3:stream_id()) -> ok | {error, term()}.
put(StreamId) ->
    khepri:put(store(), ?ROOT ++ [StreamId], StreamId, #{timeout => ?TIMEOUT_MS}).

-doc "All of them, from this node's copy.".
-spec list() -> {ok, [rabbitmq_stream_s3:stream_id()]} | {error, term()}.
list() ->
    Options = #{favor => low_latency, timeout => ?TIMEOUT_MS},
    case khepri_adv:get_many(store(), ?ROOT ++ [?KHEPRI_WILDCARD_STAR], Options) of
        {ok, Nodes} ->
            {ok, lists:sort([Id || [rabbitmq, rabbitmq_stream_s3_streams, Id] := _ <- Nodes])};
        {error, Reason} ->
            {error, Reason}
    end.

-doc "Removes a stream of which nothing is in the bucket any more.".
-spec remove(rabbitmq_stream_s3:stream_id()) -> ok | {error, term()}.
remove(StreamId) ->
    khepri:delete(store(), ?ROOT ++ [StreamId], #{timeout => ?TIMEOUT_MS}).

store() ->
    rabbit_khepri:get_store_id().
