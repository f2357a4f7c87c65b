%% Owns: what osiris' own statistics say of a tiered stream. Stock tells where the local log begins;
%% clients (stream statistics), the number of messages of a queue and `stream_status` take that for
%% the beginning of the stream, so here it becomes the beginning of both tiers.
%% Called by wrappers in osiris and osiris_counters, with the answer of stock as the last argument.
%% Does not own: those wrappers (rabbitmq_stream_s3_osiris_forms), and what osiris itself keeps: the
%% atomics and counters of a log go on to tell of the local log, which its readers rely on.
-module(rabbitmq_stream_s3_stats).

%% called by the wrappers
-export([get_stats/2, overview/1, overview/2, counters/3]).
%% called by the shell
-export([wrapped/0]).

-include("rabbitmq_stream_s3.hrl").

-define(SPEC, rabbitmq_stream_s3_offset_spec).

-type values() :: #{atom() => integer()}.

-doc "The functions that ask this module, each under its own name.".
-spec wrapped() -> [{module(), [{atom(), arity()}]}].
wrapped() ->
    [
        {osiris, [{get_stats, 1}]},
        {osiris_counters, [{overview, 0}, {overview, 1}, {counters, 2}]}
    ].

-doc """
As osiris:get_stats/1. A manifest that is not known yet is waited for as long as a consumer would wait
for it, and then the answer is that of the local log: there is no way to refuse one.
""".
-spec get_stats(pid(), values()) -> values().
get_stats(Member, #{first_chunk_id := Local} = Stats) when node(Member) =:= node() ->
    #{name := Name, shared := Shared} = osiris_util:get_reader_context(Member),
    StreamId = rabbitmq_stream_s3_hooks:stream_id(Name),
    maybe
        true ?= rabbitmq_stream_s3_protection:is_protected(StreamId),
        {remote, First} ?= ?SPEC:route(StreamId, first, Shared, Local, ?SPEC:deadline()),
        Stats#{first_chunk_id := First}
    else
        _ -> Stats
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
        none -> Values
    end;
of_both(_, Values) ->
    Values.

earlier(Key, Value, Range) when Key =:= first_offset; Key =:= first_timestamp ->
    min(Value, maps:get(Key, Range, Value));
earlier(_, Value, _) ->
    Value.

range(Queue) ->
    maybe
        [{_, StreamId}] ?= lookup(?DIRS, {queue, Queue}),
        [{_, #{} = Range}] ?= lookup(?MANIFEST_CACHE, StreamId),
        {ok, Range}
    else
        _ -> none
    end.

lookup(Table, Key) ->
    try
        ets:lookup(Table, Key)
    catch
        error:badarg -> []
    end.
