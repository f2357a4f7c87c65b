-module(rabbitmq_stream_s3_recovery_native).
-moduledoc """
Asks the native side what a recovery needs of the bucket, and waits for the answer.

Owns the wait and the text of a failure. Does not own what is asked when.
""".

-export([streams/2, inspect/3, adopt/2]).

%% The native side gives requests up long before.
-define(ANSWER_MS, 600_000).

-doc "A page of the ids of the streams that the bucket has, and where the next one begins.".
-spec streams(rabbitmq_stream_s3_nif:engine(), start | binary()) ->
    {page, [rabbitmq_stream_s3:stream_id()], done | binary()} | {error, binary()}.
streams(Engine, Token) ->
    ask(fun(Ref) -> rabbitmq_stream_s3_nif:recovery_streams(Engine, self(), Ref, Token) end).

-doc "What the bucket has of one stream; `objects` also compares what is named with what is there.".
-spec inspect(rabbitmq_stream_s3_nif:engine(), rabbitmq_stream_s3:stream_id(), root | objects) ->
    {found, rabbitmq_stream_s3_nif:found()} | {error, binary()}.
inspect(Engine, StreamId, Depth) ->
    ask(fun(Ref) -> rabbitmq_stream_s3_nif:recovery_inspect(Engine, self(), Ref, StreamId, Depth) end).

-doc "Writes the root that the recovered stream begins with. The only call here that writes.".
-spec adopt(rabbitmq_stream_s3_nif:engine(), #{atom() => binary() | undefined}) ->
    {adopted, Epoch :: non_neg_integer(), Uid :: non_neg_integer(), First :: osiris:offset(),
        Next :: osiris:offset()}
    | {error, binary()}.
adopt(Engine, About) ->
    ask(fun(Ref) -> rabbitmq_stream_s3_nif:recovery_adopt(Engine, self(), Ref, About) end).

ask(Call) ->
    Ref = make_ref(),
    case Call(Ref) of
        ok -> answer(Ref);
        {error, Reason} -> failure(Reason, <<>>)
    end.

answer(Ref) ->
    receive
        {rabbitmq_stream_s3, Ref, {error, Kind, Text}} -> failure(Kind, Text);
        {rabbitmq_stream_s3, Ref, Answer} -> Answer
    after ?ANSWER_MS -> failure(timeout, <<"no answer">>)
    end.

failure(Kind, Text) ->
    {error, rabbitmq_stream_s3:utf8(io_lib:format("~0tp: ~ts", [Kind, Text]))}.
