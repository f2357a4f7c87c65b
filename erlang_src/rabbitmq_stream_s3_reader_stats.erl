-module(rabbitmq_stream_s3_reader_stats).
-moduledoc """
Owns what osiris' own statistics say of a tiered stream. Stock tells where the local log begins;
clients (stream statistics), the number of messages of a queue and `stream_status` take that for
the beginning of the stream, so here it becomes the beginning of both tiers.
Called by wrappers in osiris and osiris_counters, with the answer of stock as the last argument.

Does not own those wrappers (rabbitmq_stream_s3_host_forms), and what osiris itself keeps: the
atomics and counters of a log go on to tell of the local log, which its readers rely on.
""".

%% called by the wrappers
-export([get_stats/2, overview/1, overview/2, counters/3]).
%% called by the shell
-export([wrapped/0]).

%% What osiris itself says of a log without a chunk.
-define(UNKNOWN, -1).

-type values() :: #{atom() => integer()}.

-doc "The functions that ask this module, each under its own name.".
-spec wrapped() -> [{module(), [{atom(), arity()}]}].
wrapped() ->
    [
        {osiris, [{get_stats, 1}]},
        {osiris_counters, [{overview, 0}, {overview, 1}, {counters, 2}]}
    ].

-doc """
As osiris:get_stats/1. While the manifest is not known the first chunk is -1, which clients take for
"there is no first offset" and refuse to use: the floor of the local log would look like the truth.
""".
-spec get_stats(pid(), values()) -> values().
get_stats(Member, #{first_chunk_id := Local} = Stats) when node(Member) =:= node() ->
    #{shared := Shared} = Context = osiris_util:get_reader_context(Member),
    case rabbitmq_stream_s3_reader_open:tiered(Context) of
        {true, StreamId} ->
            case rabbitmq_stream_s3_reader_start:route(StreamId, first, Shared, Local) of
                {remote, First} ->
                    Stats#{first_chunk_id := First};
                unknown ->
                    ok = rabbitmq_stream_s3_manifest_cache:wanted(StreamId),
                    Stats#{first_chunk_id := ?UNKNOWN};
                _ ->
                    Stats
            end;
        false ->
            Stats
    end;
get_stats(_, Stats) ->
    %% The other node has seen to it.
    Stats.

-doc "As osiris_counters:overview/0.".
-spec overview(#{term() => values()}) -> #{term() => values()}.
overview(All) ->
    #{Name => of_both(Name, Values) || Name := Values <- All}.

-doc "As osiris_counters:overview/1.".
-spec overview(term(), values() | undefined) -> values() | undefined.
overview(Name, Values) ->
    of_both(Name, Values).

-doc "As osiris_counters:counters/2.".
-spec counters(term(), [atom()], values() | undefined) -> values() | undefined.
counters(Name, _Fields, Values) ->
    of_both(Name, Values).

%% Those of a member: the counters of its readers begin nowhere.
of_both({Kind, Queue}, #{} = Values) when Kind =:= osiris_writer; Kind =:= osiris_replica ->
    case range(Queue) of
        {ok, #{first_offset := Same, next_offset := Same}} -> Values;
        {ok, #{} = Range} -> #{Key => earlier(Key, Value, Range) || Key := Value <- Values};
        pending -> without_beginning(Values);
        none -> Values
    end;
of_both(_, Values) ->
    Values.

earlier(Key, Value, Range) when Key =:= first_offset; Key =:= first_timestamp ->
    min(Value, maps:get(Key, Range, Value));
earlier(_, Value, _) ->
    Value.

%% What is not known is left out, and RabbitMQ keeps what it knew. A log that begins at 0 has
%% everything, whatever the manifest says.
without_beginning(#{first_offset := First} = Values) when First > 0 ->
    maps:without([first_offset, first_timestamp], Values);
without_beginning(Values) ->
    Values.

range(Queue) ->
    case rabbitmq_stream_s3_manifest_cache:of_queue(Queue) of
        {ok, StreamId} -> rabbitmq_stream_s3_manifest_cache:range(StreamId);
        none -> none
    end.
