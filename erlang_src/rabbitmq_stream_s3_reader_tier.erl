-module(rabbitmq_stream_s3_reader_tier).
-moduledoc """
Which tier a reader continues in. Each local read checks the floor before, and again at the chunk that stock
is about to deliver; what the floor has passed is read from the remote tier, from the same place.

Owns the change of tiers in an open reader. Does not own where the next record is (native,
rabbitmq_stream_s3_nif:continue_at/5), opening either tier (rabbitmq_stream_s3_reader_open), waiting
(rabbitmq_stream_s3_reader_wait), whether a gap is certain (rabbitmq_stream_s3_reader_gap), nor delivering a
chunk: both kinds of consumer do that themselves (rabbitmq_stream_s3_log_reader).
""".

-export([read/2]).

-include("rabbitmq_stream_s3_reader.hrl").

%% Changes of tier and reopenings within one read, before the owner gets its turn again.
-define(SWITCHES_MAX, 4).

%% Whether the chunk that stock is about to deliver is the reader's next one.
-type guard() :: fun((osiris:offset()) -> ok | passed).
%% Reads with stock and delivers, or says that the guard has found the reader to be passed. The second
%% argument: stock may be handed back its last iterator.
-type local() :: fun((osiris_log:state(), boolean(), guard()) -> passed | term()).

-doc """
Reads the next chunk from the tier that has it. `chunk`: of the remote tier, the caller delivers it. Other
answers are those of the fun, with the reader for the log; no chunk yet is the end of the stream; `refused`
is final. Never waits.
""".
-spec read(#reader{}, local()) ->
    {chunk, map(), rabbitmq_stream_s3_nif:data(), binary(), #reader{}}
    | {ok, #reader{}}
    | {ok, map(), term(), #reader{}}
    | {end_of_stream, #reader{}}
    | {refused, atom(), #reader{}}
    | {error, term()}.
read(Reader, Local) ->
    read(Reader, Local, ?SWITCHES_MAX).

read(Reader, _, 0) ->
    rabbitmq_stream_s3_reader_wait:retry_later(Reader);
read(#reader{tier = {unknown, Spec}} = Reader, Local, Left) ->
    case rabbitmq_stream_s3_reader_open:place(Spec, Reader) of
        {ok, Placed} ->
            read(Placed#reader{retries = 0}, Local, Left - 1);
        {unknown, Why} ->
            rabbitmq_stream_s3_reader_wait:unplaced(Why, Reader);
        {error, {offset_out_of_range, Range}} ->
            Text = io_lib:format("the stream has no such offset: it has ~0p", [Range]),
            rabbitmq_stream_s3_reader_wait:failed(out_of_range, Text, Reader)
    end;
read(#reader{tier = {ended, _}} = Reader, _, _) ->
    {end_of_stream, Reader};
read(#reader{tier = {local, Log}} = Reader, Local, Left) ->
    Next = osiris_log:next_offset(Log),
    case rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next of
        true -> read_local(Log, Next, Reader, Local, Left);
        false -> below_floor(Next, Reader, Local, Left)
    end;
read(#reader{tier = {remote, Remote0}} = Reader0, Local, Left) ->
    Committed = osiris_log_shared:committed_chunk_id(Reader0#reader.shared),
    case rabbitmq_stream_s3_reader_remote:read(Remote0, Committed) of
        {chunk, Header, Data, Trailer, Remote} ->
            ok = rabbitmq_stream_s3_reader_wait:served(Reader0),
            Reader = Reader0#reader{tier = {remote, Remote}, retries = 0, lost = undefined},
            {chunk, Header, Data, Trailer, Reader};
        {wait, Remote} ->
            {end_of_stream, Reader0#reader{tier = {remote, Remote}}};
        {uncommitted, Remote} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader0#reader{tier = {remote, Remote}});
        {more, Remote} ->
            rabbitmq_stream_s3_reader_wait:soon(Reader0#reader{tier = {remote, Remote}});
        {local, Next, Remote} ->
            become_local(Next, Reader0#reader{tier = {remote, Remote}}, Local, Left);
        {limit, ChunkId, Remote} ->
            at_limit(ChunkId, Reader0#reader{tier = {remote, Remote}}, Local, Left);
        {error, Kind, Text} ->
            remote_failed(Kind, Text, Reader0, Local, Left)
    end.

read_local(Log0, Next, #reader{chained = Chained} = Reader, Local, Left) ->
    Guard = fun(ChunkId) ->
        %% The chunk that is next cannot be a jump. Another one may follow skipped chunks, or be
        %% the first one above a floor that passed us: then the floor is above Next now.
        case
            ChunkId =:= Next orelse rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next
        of
            true -> ok;
            false -> passed
        end
    end,
    case Local(Log0, Chained, Guard) of
        passed ->
            below_floor(Next, Reader, Local, Left);
        {ok, Log} ->
            ok = rabbitmq_stream_s3_reader_wait:served(Reader),
            {ok, Reader#reader{tier = {local, Log}, retries = 0}};
        {ok, Header, Iterator, Log} ->
            ok = rabbitmq_stream_s3_reader_wait:served(Reader),
            {ok, Header, Iterator, Reader#reader{tier = {local, Log}, chained = true, retries = 0}};
        {end_of_stream, Log} ->
            end_of_local(Next, Log, Reader, Local, Left);
        {error, Damage} when is_tuple(Damage) ->
            %% Not of the socket: those are atoms. Stock would keep the subscription and send nothing.
            Text = io_lib:format("the local log cannot be read: ~0p", [Damage]),
            rabbitmq_stream_s3_reader_wait:failed(local_log, Text, Reader);
        {error, _} = Error ->
            Error
    end.

%% Nothing more here: the end of the log, or a segment that has just been deleted, before (the
%% file is not there) or after (stock stepped over it and wanted no chunk up to the end) the floor
%% moved.
end_of_local(Next0, Log, Reader0, Local, Left) ->
    Next = osiris_log:next_offset(Log),
    Reader = Reader0#reader{tier = {local, Log}},
    case {rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next0, readable(Next, Reader)} of
        {false, _} ->
            %% Reader0 keeps the place; its file may be closed, but below the floor only that counts.
            ok = osiris_log:close(Log),
            below_floor(Next0, Reader0, Local, Left);
        {true, false} ->
            {end_of_stream, Reader};
        {true, true} ->
            case remote_has(Next, Reader) of
                true ->
                    become_remote(Next, Reader, Local, Left);
                false ->
                    %% The log has more, which stock does not see yet: its owner listens for what is
                    %% beyond, and would not hear of it.
                    rabbitmq_stream_s3_reader_wait:retry_later(Reader)
            end
    end.

remote_has(Next, #reader{stream_id = StreamId}) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            Answer = rabbitmq_stream_s3_nif:continue_at(Engine, StreamId, Next, -1, unproven),
            Answer =:= {remote, Next};
        undefined ->
            false
    end.

readable(Next, #reader{shared = Shared}) ->
    osiris_log_shared:committed_chunk_id(Shared) >= Next andalso
        osiris_log_shared:last_chunk_id(Shared) >= Next.

%% The local log begins above Next. Trimmed by tiering: the remote tier has it. Trimmed by the
%% user's retention: it is gone from both, and the reader continues at the floor, as in stock.
below_floor(Next, Reader, Local, Left) ->
    Floor = rabbitmq_stream_s3_reader_open:local_first(Reader),
    case continue_at(Next, Floor, Reader) of
        {remote, Start} ->
            become_remote(Start, Reader, Local, Left);
        local ->
            at_floor(Next, Floor, Reader, Local, Left);
        {later, Waiting} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Waiting);
        closed ->
            rabbitmq_stream_s3_reader_wait:plugin_is_off(Reader);
        {error, {bug, Text}} ->
            Why = ["which tier has the next chunk cannot be determined: ", Text],
            rabbitmq_stream_s3_reader_wait:failed(bug, Why, Reader)
    end.

at_floor(Next, Floor, #reader{tier = {local, Log}} = Reader, Local, Left) ->
    case rabbitmq_stream_s3_reader_open:local(Next, Reader) of
        {ok, Reopened} ->
            case osiris_log:next_offset(Reopened) =< Floor of
                true ->
                    ok = osiris_log:close(Log),
                    read(Reader#reader{tier = {local, Reopened}, chained = false}, Local, Left - 1);
                false ->
                    %% The floor has moved, or is about to: nothing is known of what is below.
                    ok = osiris_log:close(Reopened),
                    read(Reader, Local, Left - 1)
            end;
        {error, _Moving} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

become_remote(Next, #reader{tier = {local, Log}} = Reader, Local, Left) ->
    Close = fun() -> osiris_log:close(Log) end,
    reopen_remote({offset, Next}, Next, Close, Reader, Local, Left).

reopen_remote(Start, Next, Close, Reader0, Local, Left) ->
    case rabbitmq_stream_s3_reader_open:remote(Start, Next, Reader0) of
        {ok, Reader} ->
            ok = Close(),
            read(Reader, Local, Left - 1);
        {error, closed} ->
            rabbitmq_stream_s3_reader_wait:plugin_is_off(Reader0);
        {error, {bug, Text}} ->
            Why = ["a remote reader cannot be opened: ", Text],
            rabbitmq_stream_s3_reader_wait:failed(bug, Why, Reader0)
    end.

%% Final for this handle. A store that has not answered for a minute may answer in the next one: the
%% consumer waits, as it would have to wait if it came again. And the handle may have ended only
%% because its engine did, and the plugin has a new one by now.
remote_failed(restarted, _, Reader, Local, Left) ->
    again_remote(Reader, Local, Left);
remote_failed(Kind, Text, Reader, Local, Left) when Kind =:= unavailable; Kind =:= archived ->
    ok = rabbitmq_stream_s3_reader_wait:say_once(Kind, Text, Reader),
    again_remote(Reader, Local, Left);
remote_failed(Kind, Text, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    Engine = rabbitmq_stream_s3:engine_or_undefined(),
    case rabbitmq_stream_s3_reader_remote:engine(Remote) of
        Engine when Kind =:= lost -> lost(Engine, Text, Reader, Local, Left);
        Engine -> rabbitmq_stream_s3_reader_wait:failed(Kind, Text, Reader);
        _OfBefore -> again_remote(Reader, Local, Left)
    end.

lost(Engine, Text, #reader{tier = {remote, Remote}, stream_id = StreamId} = Reader0, Local, Left) ->
    Next = rabbitmq_stream_s3_reader_remote:next_offset(Remote),
    Range = rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId),
    case rabbitmq_stream_s3_reader_lost:next(Next, Range, Reader0) of
        {wait, Reader} -> rabbitmq_stream_s3_reader_wait:doubtful(Text, Reader);
        {reopen, Place, Reader} -> by_current_manifest(Place, Reader, Local, Left);
        lost -> rabbitmq_stream_s3_reader_wait:failed(lost, Text, Reader0)
    end.

%% The current manifest begins at Place, or at the reader's own place. The local log may begin before that:
%% remote retention drops fragments, local retention whole segments. What the local log has is not skipped.
by_current_manifest(Place, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    Next = rabbitmq_stream_s3_reader_remote:next_offset(Remote),
    case rabbitmq_stream_s3_reader_remote:start(Remote) of
        {offset, _} ->
            Floor = rabbitmq_stream_s3_reader_open:local_first(Reader),
            case continue_at(Next, Floor, Reader) of
                local -> become_local(Next, Reader, Local, Left);
                {later, Waiting} -> rabbitmq_stream_s3_reader_wait:retry_later(Waiting);
                _ -> again_remote(Place, Reader, Local, Left)
            end;
        %% It searches the current manifest, and stops at what the local log has.
        {timestamp, _} ->
            again_remote(Reader, Local, Left)
    end.

again_remote(Reader, Local, Left) ->
    again_remote(0, Reader, Local, Left).

%% Not below First.
again_remote(First, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    Close = fun() -> rabbitmq_stream_s3_reader_remote:close(Remote) end,
    Next = max(First, rabbitmq_stream_s3_reader_remote:next_offset(Remote)),
    Start =
        case rabbitmq_stream_s3_reader_remote:start(Remote) of
            {offset, _} -> {offset, Next};
            {timestamp, _} = Time -> Time
        end,
    reopen_remote(Start, Next, Close, Reader, Local, Left).

%% The chunk with this id was in the local log, too, when this reader was opened. If the log had lost
%% its end, the manifest of then may have had another one there. So the local log is asked; what it
%% has trimmed meanwhile is in the manifest of now.
at_limit(ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    First = rabbitmq_stream_s3_reader_open:local_first(Reader),
    Next = rabbitmq_stream_s3_reader_remote:next_offset(Remote),
    case rabbitmq_stream_s3_reader_remote:start(Remote) of
        _ when First < 0 ->
            again_remote(Reader, Local, Left);
        {timestamp, _} = Spec when First =< ChunkId ->
            start_local(Spec, ChunkId, Reader, Local, Left);
        {timestamp, _} ->
            again_remote(Reader, Local, Left);
        {offset, _} ->
            case continue_at(Next, First, Reader) of
                local -> become_local(Next, Reader, Local, Left);
                %% A gap that is not certain yet, above what the remote tier has.
                {later, Waiting} -> rabbitmq_stream_s3_reader_wait:retry_later(Waiting);
                _ -> again_remote(Reader, Local, Left)
            end
    end.

%% Nothing older than the chunk with this id is new enough.
start_local(Spec, ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    LocalSpec = rabbitmq_stream_s3_reader_start:stock(Spec),
    case rabbitmq_stream_s3_reader_open:local(LocalSpec, Reader) of
        {ok, Log} ->
            case rabbitmq_stream_s3_reader_open:oldest_chunk(Reader) =< ChunkId of
                true ->
                    ok = rabbitmq_stream_s3_reader_remote:close(Remote),
                    read(Reader#reader{tier = {local, Log}, chained = false}, Local, Left - 1);
                false ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Left)
            end;
        {error, _} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

%% The remote tier ends at Next. The local reader must begin exactly there.
become_local(Next, #reader{tier = {remote, Remote}} = Reader, Local, Left) ->
    case rabbitmq_stream_s3_reader_open:local(Next, Reader) of
        {ok, Log} ->
            case fits(osiris_log:next_offset(Log), Next, Reader) of
                true ->
                    ok = rabbitmq_stream_s3_reader_remote:close(Remote),
                    read(Reader#reader{tier = {local, Log}, chained = false}, Local, Left - 1);
                again ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Left);
                {later, Waiting} ->
                    ok = osiris_log:close(Log),
                    rabbitmq_stream_s3_reader_wait:retry_later(Waiting)
            end;
        {error, _} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

fits(Landed, Next, Reader) when Landed < Next ->
    %% A replica that is behind.
    {later, Reader};
fits(Landed, Next, Reader) ->
    %% Above Next if the floor is. Tiering moves the manifest before it trims.
    case continue_at(Next, Landed, Reader) of
        local -> true;
        {remote, _} -> again;
        {later, Waiting} -> {later, Waiting};
        _ClosedOrBug -> {later, Reader}
    end.

%% Where the record at Next, or the first one behind it, is to be read, by a local log whose first chunk
%% is First. `closed`: that cannot be said while the plugin is off.
continue_at(Next, First, #reader{stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3:engine_or_undefined() of
        undefined ->
            case rabbitmq_stream_s3_manifest_protection:is_protected(StreamId) of
                true -> closed;
                %% The local log is all that there is, also of a reader from before.
                false -> local
            end;
        Engine ->
            continue_at(Engine, Next, First, unproven, Reader)
    end.

continue_at(Engine, Next, First, Gap, #reader{stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3_nif:continue_at(Engine, StreamId, Next, First, Gap) of
        unproven_gap ->
            proven(Engine, Next, First, Reader);
        unknown when Gap =:= certain ->
            local;
        unknown ->
            case still_unknown(Engine, Reader) of
                {true, Waiting} -> {later, Waiting};
                false -> proven(Engine, Next, First, Reader)
            end;
        Answer ->
            Answer
    end.

%% A proof may have brought a newer manifest.
proven(Engine, Next, First, #reader{stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3_reader_gap:is_certain(StreamId, First) of
        true -> continue_at(Engine, Next, First, certain, Reader);
        false -> {later, Reader}
    end.

%% A stream of which nothing is known any more has a member that is just being replaced, or it was
%% never tiered: the first for a moment, the second for good.
still_unknown(Engine, #reader{stream_id = StreamId, shared = Shared} = Reader) ->
    case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
        none ->
            case {rabbitmq_stream_s3_host_osiris:has_member(Shared), Reader} of
                {true, _} ->
                    {true, Reader};
                {false, #reader{forgotten_until = undefined}} ->
                    Deadline = rabbitmq_stream_s3_reader_start:deadline(),
                    {true, Reader#reader{forgotten_until = Deadline}};
                {false, #reader{forgotten_until = Until}} ->
                    erlang:monotonic_time(millisecond) < Until andalso {true, Reader}
            end;
        _PendingOrJustKnown ->
            {true, Reader}
    end.
