-module(rabbitmq_stream_s3_reader_lost).
-moduledoc """
What a reader does whose object is gone. The manifest that it reads by may be an old one: retention
drops the oldest fragments, and one lost message leaves a replica with the manifest of before. So the
manifest of this node is made at least as new as what a quorum's pointer names, and the reader goes on
by that one. Only if the manifest of now names the place, and the object is gone by that one, too, the
reader is lost. Until that is known it waits, as in any other trouble.

Holds nothing: how far a reader is, is in its state. Does not own how the manifest becomes newer
(rabbitmq_stream_s3_reader_gap), nor reading (rabbitmq_stream_s3_reader_tier).
""".

-export([next/3]).

-include("rabbitmq_stream_s3_reader.hrl").

-type range() ::
    {ok, osiris:offset(), osiris:offset()} | pending | none | {error, term()}.

-doc """
For a reader at this offset whose handle has just ended because the object is gone; the range is that
of the manifest which is known here now.
""".
-spec next(osiris:offset(), range(), #reader{}) ->
    {wait, #reader{}} | {reopen, osiris:offset(), #reader{}} | lost.
next(_Next, _Range, #reader{lost = undefined} = Reader) ->
    {wait, ask(undefined, Reader)};
next(_Next, _Range, #reader{lost = {reopened, Place}} = Reader) ->
    {wait, ask(Place, Reader)};
next(Next, Range, #reader{lost = {asked, Since, Reopened}, stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3_reader_gap:is_current(StreamId, Since) of
        true -> by_manifest_of_now(Next, Range, Reopened, Reader);
        false -> {wait, Reader}
    end.

ask(Reopened, #reader{stream_id = StreamId} = Reader) ->
    Since = erlang:monotonic_time(),
    _ = rabbitmq_stream_s3_reader_gap:is_current(StreamId, Since),
    Reader#reader{lost = {asked, Since, Reopened}}.

by_manifest_of_now(Next, {ok, First, RemoteNext}, Next, _Reader) when
    First =< Next, Next < RemoteNext
->
    lost;
by_manifest_of_now(Next, {ok, First, _RemoteNext}, _Reopened, Reader) ->
    Place = max(First, Next),
    {reopen, Place, Reader#reader{lost = {reopened, Place}}};
by_manifest_of_now(_Next, _Unknown, _Reopened, Reader) ->
    {wait, Reader}.
