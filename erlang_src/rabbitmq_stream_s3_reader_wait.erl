-module(rabbitmq_stream_s3_reader_wait).
-moduledoc """
Owns how a reader waits, how it ends, and what the log says of what went wrong: each thing once,
until a chunk comes.

Does not own what is waited for (rabbitmq_stream_s3_reader_tier), how a consumer learns that its
subscription has ended (rabbitmq_stream_s3_reader_subscription).
""".

-export([soon/1, retry_later/1, unplaced/2, doubtful/2, plugin_is_off/1]).
-export([failed/3, say_once/3, served/1, next/1]).
-export([close_tier/1]).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3_reader.hrl").

%% Nothing to do but try again: soon when chunks were skipped; when another must move, at first after
%% RETRY_MS, then less and less often.
-define(MORE_MS, 5).
-define(RETRY_MS, 100).
-define(RETRY_MAX_MS, 1000).
-define(RETRY_DOUBLINGS, 4).
-define(OFF_MS, 1000).
%% In case an owner that usually asks twice does not.
-define(UNASKED_MS, 5000).
%% Files that change under a reader settle within moments. What lasts longer belongs into the log.
-define(RETRIES_BEFORE_SAID, 8).

-doc "Only the owner's turn is over.".
-spec soon(#reader{}) -> {end_of_stream, #reader{}}.
soon(Reader) ->
    try_again(?MORE_MS, Reader).

-doc "Another must move first.".
-spec retry_later(#reader{}) -> {end_of_stream, #reader{}}.
retry_later(#reader{retries = Retries} = Reader) ->
    Delay = min(?RETRY_MAX_MS, ?RETRY_MS bsl min(Retries, ?RETRY_DOUBLINGS)),
    %% Readers that began to wait together do not all try at one moment.
    Spread = erlang:phash2({self(), Retries}, Delay div 4),
    try_again(Delay - Spread, Reader#reader{retries = Retries + 1}).

-doc "The place of the reader is not known yet, or cannot be opened now.".
-spec unplaced(manifest | {local | remote, term()}, #reader{}) -> {end_of_stream, #reader{}}.
unplaced(Why, #reader{stream_id = StreamId, retries = Retries, tier = {unknown, Spec}} = Reader) ->
    %% At retries 0, 1, 3, 7, ...: a stream that has just come to this node may not have been there
    %% to be asked for.
    _ =
        (Retries band (Retries + 1)) =:= 0 andalso
            rabbitmq_stream_s3_manifest_cache:wanted(StreamId),
    ok =
        case Why of
            {Tier, Reason} when Retries >= ?RETRIES_BEFORE_SAID ->
                Text = io_lib:format(
                    "waits to attach at ~0p: the ~s tier cannot be opened now (~0p)", [
                        Spec, Tier, Reason
                    ]
                ),
                say_once({unplaced, Tier}, Text, Reader);
            _ ->
                ok
        end,
    retry_later(Reader).

-doc """
An object is gone by a manifest that may be an old one: whether the current manifest names it is being found
out.
""".
-spec doubtful(iodata(), #reader{}) -> {end_of_stream, #reader{}}.
doubtful(Text, #reader{retries = ?RETRIES_BEFORE_SAID, stream_id = StreamId} = Reader) ->
    ?LOG_WARNING(
        "stream_s3: ~ts: a consumer waits at offset ~b. Its object is gone (~ts), and this node does not know"
        " yet whether the current manifest still names it",
        [StreamId, next(Reader), Text]
    ),
    retry_later(Reader);
doubtful(_Text, Reader) ->
    retry_later(Reader).

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

-doc """
The reader cannot continue, for good. It holds nothing any more; whoever reads ends the subscription.
""".
-spec failed(Kind, iodata(), #reader{}) -> {refused, Kind, #reader{}} when Kind :: atom().
failed(Kind, Text, Reader) ->
    ok = say_once(Kind, Text, Reader),
    ok = close_tier(Reader),
    {refused, Kind, Reader#reader{tier = {ended, next(Reader)}}}.

-doc "Releases what the tier of a reader holds.".
-spec close_tier(#reader{}) -> ok.
close_tier(#reader{tier = {local, Log}}) -> osiris_log:close(Log);
close_tier(#reader{tier = {remote, Remote}}) -> rabbitmq_stream_s3_reader_remote:close(Remote);
close_tier(_) -> ok.

-doc "A chunk was read: a problem that comes back is reported again.".
-spec served(#reader{}) -> ok.
served(#reader{counter_id = CounterId}) ->
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
            ?LOG_ERROR("stream_s3: ~ts: a consumer cannot continue at offset ~b: ~0p: ~ts", [
                StreamId, next(Reader), Kind, Text
            ])
    end.

-doc "The offset that comes next.".
-spec next(#reader{}) -> osiris:offset().
next(#reader{tier = {unknown, Spec}, shared = Shared}) ->
    rabbitmq_stream_s3_reader_start:provisional(Spec, Shared);
next(#reader{tier = {ended, Next}}) -> Next;
next(#reader{tier = {local, Log}}) -> osiris_log:next_offset(Log);
next(#reader{tier = {remote, Remote}}) -> rabbitmq_stream_s3_reader_remote:next_offset(Remote).
