-module(rabbitmq_stream_s3_reader_remote).
-moduledoc """
Owns one consumer's place in the remote tier: which chunks it is given (chunk selector, bloom
filter), its counters, and the iterator over a chunk's entries.

Does not own fetching and parsing (native), sending, and when to change tiers
(rabbitmq_stream_s3_log_reader).
""".

-export([open/4, resumed/4, read/2, next_offset/1, start/1, engine/1, close/1]).
-export([iterator/2, iterator_next/1]).

-record(remote, {
    handle :: rabbitmq_stream_s3_nif:reader() | none,
    engine :: rabbitmq_stream_s3_nif:engine() | none,
    %% At this position for ever: see rabbitmq_stream_s3_host_detached_forms.
    next_offset :: osiris:offset(),
    %% No chunk from here on is handed over.
    limit :: osiris:offset() | infinity,
    %% The first one that would have been: the handle has given it out and must not be read again.
    beyond :: osiris:offset() | undefined,
    %% Until the first chunk: that of a timestamp is not known before, next_offset is a guess.
    start :: start() | undefined,
    chunk_selector :: all | user_data,
    filter :: undefined | osiris_bloom:mstate(),
    counter :: counters:counters_ref()
}).

-opaque t() :: #remote{}.
-type start() :: {offset, osiris:offset()} | {timestamp, integer()}.
-type options() :: #{
    chunk_selector := all | user_data,
    filter := undefined | osiris_bloom:mstate(),
    counter := counters:counters_ref(),
    wake := term(),
    next_offset := osiris:offset(),
    limit := osiris:offset() | infinity
}.
-type iterator() ::
    {rabbitmq_stream_s3_iterator, [term()], {
        rabbitmq_stream_s3_nif:data(), integer(), integer(), integer()
    }}.
-export_type([t/0, start/0, iterator/0]).

%% How many chunks one read may skip before the process that called gets its turn again.
-define(SKIPPED_CHUNKS_MAX, 64).
%% Entries decoded by one native call.
-define(ENTRIES_PER_CALL, 64).
%% Positions of osiris_log:counter_fields/0.
-define(C_OFFSET, 1).
-define(C_CHUNKS, 4).

-doc "Starts reading for the calling process. Finding the place goes on in the background.".
-spec open(rabbitmq_stream_s3_nif:engine(), binary(), start(), options()) ->
    {ok, t()} | {error, term()}.
open(Engine, StreamId, Start, Options) ->
    #{
        wake := Wake,
        next_offset := Next,
        limit := Limit,
        chunk_selector := Selector,
        filter := Filter,
        counter := Counter
    } = Options,
    case rabbitmq_stream_s3_nif:reader_open(Engine, self(), Wake, StreamId, Start) of
        {ok, Handle} ->
            {ok, #remote{
                handle = Handle,
                engine = Engine,
                next_offset = Next,
                limit = Limit,
                start = Start,
                chunk_selector = Selector,
                filter = Filter,
                counter = Counter
            }};
        {error, _} = Error ->
            Error
    end.

-doc """
The same place for a reader of another version of the plugin: without a handle, so that its first
read says that another one is needed.
""".
-spec resumed(term(), all | user_data, undefined | osiris_bloom:mstate(), counters:counters_ref()) ->
    {ok, t()} | error.
resumed(#remote{} = Remote, _, _, _) ->
    {ok, Remote};
resumed(Other, Selector, Filter, Counter) when
    element(1, Other) =:= remote, is_integer(element(4, Other))
->
    Next = element(4, Other),
    {ok, #remote{
        handle = none,
        engine = none,
        next_offset = Next,
        limit = infinity,
        start = {offset, Next},
        chunk_selector = Selector,
        filter = Filter,
        counter = Counter
    }};
resumed(_, _, _, _) ->
    error.

-doc """
The next chunk that the consumer wants, of those that are committed. `wait`: the consumer is woken
when there is more; `uncommitted`: nobody wakes it, call again later; `more`: call again soon; `local`:
the remote tier ends at this offset; `limit`: the next chunk, which begins here, is not below the limit;
an error `restarted`: nothing is wrong but the handle, which another must take the place of.
""".
-spec read(t(), osiris:offset() | -1) ->
    {chunk, map(), rabbitmq_stream_s3_nif:data(), Trailer :: binary(), t()}
    | {wait | uncommitted | more, t()}
    | {local | limit, osiris:offset(), t()}
    | {error, atom(), binary()}.
read(#remote{beyond = ChunkId} = Remote, _) when ChunkId =/= undefined ->
    {limit, ChunkId, Remote};
read(Remote, CommittedChunkId) when CommittedChunkId < 0 ->
    %% A member that does not know yet what is committed.
    {uncommitted, Remote};
read(Remote, CommittedChunkId) ->
    read(Remote, CommittedChunkId, ?SKIPPED_CHUNKS_MAX).

read(Remote, _, 0) ->
    {more, Remote};
read(#remote{start = undefined, next_offset = Next, limit = Limit} = Remote, _, _) when
    Next >= Limit
->
    {limit, Next, Remote};
read(#remote{handle = Handle, limit = Limit} = Remote0, CommittedChunkId, Left) ->
    case reader_read(Handle, CommittedChunkId) of
        {chunk, #{chunk_id := ChunkId}, _, _, _} when ChunkId >= Limit ->
            {limit, ChunkId, Remote0#remote{beyond = ChunkId}};
        {chunk, Header, ChunkFilter, Data, Trailer} ->
            Remote1 = advance(Header, Remote0),
            case wanted(Header, ChunkFilter, Remote1) of
                {true, Remote} -> {chunk, Header, Data, Trailer, Remote};
                {false, Remote} -> read(Remote, CommittedChunkId, Left - 1)
            end;
        wait ->
            {wait, Remote0};
        {local, Next} ->
            {local, Next, Remote0};
        {error, Kind, Text} ->
            {error, Kind, Text};
        {error, {bug, Text}} ->
            {error, bug, Text}
    end.

reader_read(none, _) ->
    {error, restarted, <<"the plugin was replaced">>};
%% A handle of before the native library was loaded again.
reader_read(Handle, CommittedChunkId) ->
    try
        rabbitmq_stream_s3_nif:reader_read(Handle, CommittedChunkId)
    catch
        error:badarg -> {error, restarted, <<"the plugin was restarted">>}
    end.

%% Counts a chunk once its header has been seen, also when it is skipped, as stock does.
advance(#{chunk_id := ChunkId, num_records := Records}, #remote{counter = Counter} = Remote) ->
    counters:put(Counter, ?C_OFFSET, ChunkId + Records),
    counters:add(Counter, ?C_CHUNKS, 1),
    Remote#remote{next_offset = ChunkId + Records, start = undefined}.

wanted(#{type := Type} = Header, ChunkFilter, #remote{filter = Filter} = Remote) ->
    case osiris_bloom:is_match(ChunkFilter, Filter) of
        {retry_with, NewFilter} ->
            wanted(Header, ChunkFilter, Remote#remote{filter = NewFilter});
        Match ->
            {Match andalso selected(Remote#remote.chunk_selector, Type), Remote}
    end.

selected(all, _) -> true;
selected(user_data, 0) -> true;
selected(user_data, _) -> false.

-doc "Where the next read begins.".
-spec next_offset(t()) -> osiris:offset().
next_offset(#remote{next_offset = Next}) ->
    Next.

-doc "Where another handle has to start to go on.".
-spec start(t()) -> start().
start(#remote{start = undefined, next_offset = Next}) -> {offset, Next};
start(#remote{start = Start}) -> Start.

-doc "The engine that it reads with; another one may have come since.".
-spec engine(t()) -> rabbitmq_stream_s3_nif:engine() | none.
engine(#remote{engine = Engine}) ->
    Engine.

-spec close(t()) -> ok.
close(#remote{handle = none}) ->
    ok;
close(#remote{handle = Handle}) ->
    try rabbitmq_stream_s3_nif:reader_close(Handle) of
        _ -> ok
    catch
        error:badarg -> ok
    end.

-doc "An iterator over the entries of a chunk.".
-spec iterator(map(), rabbitmq_stream_s3_nif:data()) -> iterator().
iterator(#{chunk_id := ChunkId, num_entries := Entries}, Data) ->
    {rabbitmq_stream_s3_iterator, [], {Data, 0, ChunkId, Entries}}.

-spec iterator_next(iterator()) -> end_of_chunk | {{osiris:offset(), osiris:entry()}, iterator()}.
iterator_next({Tag, [Entry | Entries], Rest}) ->
    {Entry, {Tag, Entries, Rest}};
iterator_next({_, [], {_, _, _, 0}}) ->
    end_of_chunk;
iterator_next({Tag, [], {Data, Position, Offset, Left}}) ->
    case
        rabbitmq_stream_s3_nif:chunk_entries(Data, Position, Offset, Left, ?ENTRIES_PER_CALL)
    of
        {[_ | _] = Entries, NextPosition, NextOffset, LeftAfter} ->
            iterator_next({Tag, Entries, {Data, NextPosition, NextOffset, LeftAfter}});
        _ ->
            %% There is no way to report an error here; a consumer must not see a gap.
            error({stream_s3, corrupt})
    end.
