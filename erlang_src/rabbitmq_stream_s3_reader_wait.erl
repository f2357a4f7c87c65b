%% Owns: how a reader waits, and what it says of what went wrong: each thing once, until a chunk
%% comes.
%% Does not own: what is waited for (rabbitmq_stream_s3_tiers).
-module(rabbitmq_stream_s3_reader_wait).

-export([soon/1, retry_later/1, plugin_is_off/1, failed/3, say_once/3, goes_on/1, next/1]).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3_reader.hrl").

%% Nothing to do but try again: soon when chunks were skipped, less so when another must move.
-define(MORE_MS, 5).
-define(RETRY_MS, 100).
-define(OFF_MS, 1000).
%% In case an owner that usually asks twice does not.
-define(UNASKED_MS, 5000).

-doc "Only the owner's turn is over.".
-spec soon(#reader{}) -> {end_of_stream, #reader{}}.
soon(Reader) ->
    try_again(?MORE_MS, Reader).

-doc "Another must move first.".
-spec retry_later(#reader{}) -> {end_of_stream, #reader{}}.
retry_later(Reader) ->
    try_again(?RETRY_MS, Reader).

-doc "What is asked for is not here and cannot be fetched until the plugin is on again.".
-spec plugin_is_off(#reader{}) -> {end_of_stream, #reader{}}.
plugin_is_off(Reader) ->
    ok = say_once(closed, <<"waits until the plugin is on again">>, Reader),
    try_again(?OFF_MS, Reader).

%% One wake-up for one end of stream that the owner believes. The stream protocol asks twice, and
%% two wake-ups for one would become four, and so on: the first answer only sets one that is late
%% enough for the second to replace it.
try_again(Ms, #reader{timer = Timer, wake = Wake, asks_again = AsksAgain} = Reader) ->
    _ = Timer =:= undefined orelse erlang:cancel_timer(Timer),
    Delay =
        case AsksAgain of
            true -> ?UNASKED_MS;
            false -> Ms
        end,
    {end_of_stream, Reader#reader{timer = erlang:send_after(Delay, self(), Wake)}}.

-doc "The owner is told that its reader cannot go on.".
-spec failed(Kind, iodata(), #reader{}) -> {error, {stream_s3, Kind}}.
failed(Kind, Text, Reader) ->
    ok = say_once(Kind, Text, Reader),
    {error, {stream_s3, Kind}}.

-doc "A chunk: what went wrong is over, and will be said if it goes wrong again.".
-spec goes_on(#reader{}) -> ok.
goes_on(#reader{counter_id = CounterId}) ->
    _ = erase({?MODULE, CounterId}),
    ok.

-doc "The same thing, or the same two, go wrong again on every try.".
-spec say_once(term(), iodata(), #reader{}) -> ok.
say_once(Kind, Text, #reader{stream_id = StreamId, counter_id = CounterId} = Reader) ->
    Said =
        case get({?MODULE, CounterId}) of
            undefined -> [];
            Kinds -> Kinds
        end,
    case lists:member(Kind, Said) of
        true ->
            ok;
        false ->
            _ = put({?MODULE, CounterId}, [Kind | Said]),
            ?LOG_ERROR("stream_s3: ~ts: a consumer cannot go on at offset ~b: ~0p: ~ts", [
                StreamId, next(Reader), Kind, Text
            ])
    end.

-doc "The offset that comes next.".
-spec next(#reader{}) -> osiris:offset().
next(#reader{tier = {local, Log}}) -> osiris_log:next_offset(Log);
next(#reader{tier = {remote, Remote}}) -> rabbitmq_stream_s3_remote_log:next_offset(Remote).
