%% Owns: which tier a reader goes on in. Each local read checks the floor before, and again at the
%% chunk that stock is about to deliver; what the floor has passed is read from the remote tier,
%% from where it was left.
%% Does not own: opening either tier (rabbitmq_stream_s3_reader_open), waiting
%% (rabbitmq_stream_s3_reader_wait), whether a gap is certain (rabbitmq_stream_s3_reader_gap), what a chunk
%% becomes: both kinds of consumer say that themselves (rabbitmq_stream_s3_log_reader).
-module(rabbitmq_stream_s3_reader_tier).

-export([read/3]).

-include("rabbitmq_stream_s3_reader.hrl").

%% Changes of tier and reopenings within one read, before the owner gets its turn again.
-define(SWITCHES_MAX, 4).

%% Reads with stock, unless the guard throws at the id of the chunk that it is about to deliver. The
%% second argument: stock may be handed back its last iterator.
-type local() :: fun((osiris_log:state(), boolean(), fun((osiris:offset()) -> ok)) -> term()).
%% Delivers a chunk of the remote tier.
-type deliver() :: fun((map(), rabbitmq_stream_s3_nif:data(), binary(), #reader{}) -> term()).

-doc """
Reads the next chunk from the tier that has it. The answers are those of the two funs, with the
reader for the log; no chunk yet is the end of the stream; `refused` is final. Never waits.
""".
-spec read(#reader{}, local(), deliver()) -> term().
read(Reader, Local, Deliver) ->
    read(Reader, Local, Deliver, ?SWITCHES_MAX).

read(Reader, _, _, 0) ->
    rabbitmq_stream_s3_reader_wait:retry_later(Reader);
read(#reader{tier = {unknown, Spec}} = Reader, Local, Deliver, Left) ->
    case rabbitmq_stream_s3_reader_open:place(Spec, Reader) of
        {ok, Placed} ->
            read(Placed#reader{retries = 0}, Local, Deliver, Left - 1);
        {unknown, Why} ->
            rabbitmq_stream_s3_reader_wait:unplaced(Why, Reader);
        {error, {offset_out_of_range, Range}} ->
            Text = io_lib:format("the stream has no such offset: it has ~0p", [Range]),
            rabbitmq_stream_s3_reader_wait:failed(out_of_range, Text, Reader)
    end;
read(#reader{tier = {ended, _}} = Reader, _, _, _) ->
    {end_of_stream, Reader};
read(#reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    Next = osiris_log:next_offset(Log),
    case rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next of
        true -> read_local(Log, Next, Reader, Local, Deliver, Left);
        false -> below_floor(Next, Reader, Local, Deliver, Left)
    end;
read(#reader{tier = {remote, Remote0}} = Reader0, Local, Deliver, Left) ->
    Committed = osiris_log_shared:committed_chunk_id(Reader0#reader.shared),
    case rabbitmq_stream_s3_reader_remote:read(Remote0, Committed) of
        {chunk, Header, Data, Trailer, Remote} ->
            ok = rabbitmq_stream_s3_reader_wait:goes_on(Reader0),
            Deliver(Header, Data, Trailer, Reader0#reader{
                tier = {remote, Remote}, retries = 0, lost = undefined
            });
        {wait, Remote} ->
            {end_of_stream, Reader0#reader{tier = {remote, Remote}}};
        {uncommitted, Remote} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader0#reader{tier = {remote, Remote}});
        {more, Remote} ->
            rabbitmq_stream_s3_reader_wait:soon(Reader0#reader{tier = {remote, Remote}});
        {local, Next, Remote} ->
            Reader = Reader0#reader{tier = {remote, Remote}},
            become_local(Next, Reader, Local, Deliver, Left);
        {limit, ChunkId, Remote} ->
            at_limit(ChunkId, Reader0#reader{tier = {remote, Remote}}, Local, Deliver, Left);
        {error, Kind, Text} ->
            remote_failed(Kind, Text, Reader0, Local, Deliver, Left)
    end.

read_local(Log0, Next, #reader{chained = Chained} = Reader, Local, Deliver, Left) ->
    Guard = fun(ChunkId) ->
        %% The chunk that is next cannot be a jump. Another one may follow skipped chunks, or be
        %% the first one above a floor that passed us: then the floor is above Next now.
        case ChunkId =:= Next orelse rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next of
            true -> ok;
            false -> throw(rabbitmq_stream_s3_floor_has_passed)
        end
    end,
    try Local(Log0, Chained, Guard) of
        {ok, Log} ->
            ok = rabbitmq_stream_s3_reader_wait:goes_on(Reader),
            {ok, Reader#reader{tier = {local, Log}, retries = 0}};
        {ok, Header, Iterator, Log} ->
            ok = rabbitmq_stream_s3_reader_wait:goes_on(Reader),
            {ok, Header, Iterator, Reader#reader{tier = {local, Log}, chained = true, retries = 0}};
        {end_of_stream, Log} ->
            end_of_local(Next, Log, Reader, Local, Deliver, Left);
        {error, Damage} when is_tuple(Damage) ->
            %% Not of the socket: those are atoms. Stock would keep the subscription and send nothing.
            Text = io_lib:format("the local log cannot be read: ~0p", [Damage]),
            rabbitmq_stream_s3_reader_wait:failed(local_log, Text, Reader);
        {error, _} = Error ->
            Error
    catch
        throw:rabbitmq_stream_s3_floor_has_passed -> below_floor(Next, Reader, Local, Deliver, Left)
    end.

%% Nothing more here: the end of the log, or a segment that has just been deleted, before (the
%% file is not there) or after (stock stepped over it and wanted no chunk up to the end) the floor
%% moved.
end_of_local(Next0, Log, Reader0, Local, Deliver, Left) ->
    Next = osiris_log:next_offset(Log),
    Reader = Reader0#reader{tier = {local, Log}},
    case {rabbitmq_stream_s3_reader_open:local_first(Reader) =< Next0, readable(Next, Reader)} of
        {false, _} ->
            %% Reader0 keeps the place; its file may be closed, but below the floor only that counts.
            ok = osiris_log:close(Log),
            below_floor(Next0, Reader0, Local, Deliver, Left);
        {true, false} ->
            {end_of_stream, Reader};
        {true, true} ->
            case remote_range(Reader) of
                {ok, First, RemoteNext} when First =< Next, Next < RemoteNext ->
                    become_remote(Next, Reader, Local, Deliver, Left);
                _ ->
                    %% The log has more, which stock does not see yet: its owner listens for what is
                    %% beyond, and would not hear of it.
                    rabbitmq_stream_s3_reader_wait:retry_later(Reader)
            end
    end.

readable(Next, #reader{shared = Shared}) ->
    osiris_log_shared:committed_chunk_id(Shared) >= Next andalso
        osiris_log_shared:last_chunk_id(Shared) >= Next.

%% The local log begins above Next. Trimmed by tiering: the remote tier has it. Trimmed by the
%% user's retention: it is gone from both, and the reader goes on at the floor, as in stock; if that
%% is certain, because the manifest that is known here may be old.
below_floor(Next, Reader, Local, Deliver, Left) ->
    below_floor(Next, rabbitmq_stream_s3_reader_open:local_first(Reader), false, Reader, Local, Deliver, Left).

below_floor(Next, Floor, IsCertain, Reader, Local, Deliver, Left) ->
    case remote_range(Reader) of
        {ok, First, RemoteNext} when First < RemoteNext, Next < RemoteNext, First < Floor ->
            become_remote(max(First, Next), Reader, Local, Deliver, Left);
        {error, closed} ->
            rabbitmq_stream_s3_reader_wait:plugin_is_off(Reader);
        unprotected ->
            at_floor(Next, Floor, Reader, Local, Deliver, Left);
        {error, {bug, Text}} ->
            rabbitmq_stream_s3_reader_wait:failed(bug, ["which tier has the next chunk cannot be determined: ", Text], Reader);
        Range ->
            case gap(Range, Floor, IsCertain, Reader) of
                true ->
                    at_floor(Next, Floor, Reader, Local, Deliver, Left);
                look_again ->
                    below_floor(Next, Floor, true, Reader, Local, Deliver, Left);
                {later, Waiting} ->
                    rabbitmq_stream_s3_reader_wait:retry_later(Waiting)
            end
    end.

%% Whether a reader may go on at the floor, where the remote tier is not known to have what is
%% missing. Only a manifest that was looked at after the gap became certain shows it.
gap({ok, First, _}, Floor, _, _) when First >= Floor ->
    %% No manifest begins further down than an older one.
    true;
gap({ok, _, _}, Floor, IsCertain, Reader) ->
    gap(Floor, IsCertain, Reader);
gap({error, _}, _, _, Reader) ->
    {later, Reader};
gap(Unknown, Floor, IsCertain, Reader) ->
    case still_unknown(Unknown, Reader) of
        {true, Waiting} -> {later, Waiting};
        false -> gap(Floor, IsCertain, Reader)
    end.

gap(_, true, _) ->
    true;
gap(Floor, false, #reader{stream_id = StreamId} = Reader) ->
    case rabbitmq_stream_s3_reader_gap:is_certain(StreamId, Floor) of
        true -> look_again;
        false -> {later, Reader}
    end.

at_floor(Next, Floor, #reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    case rabbitmq_stream_s3_reader_open:local(Next, Reader) of
        {ok, Reopened} ->
            case osiris_log:next_offset(Reopened) =< Floor of
                true ->
                    ok = osiris_log:close(Log),
                    Local1 = Reader#reader{tier = {local, Reopened}, chained = false},
                    read(Local1, Local, Deliver, Left - 1);
                false ->
                    %% The floor has moved, or is about to: of what is below that nothing is known.
                    ok = osiris_log:close(Reopened),
                    read(Reader, Local, Deliver, Left - 1)
            end;
        {error, _Moving} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

%% A stream that nothing is known of any more has a member that is just being replaced, or it was
%% never tiered: the first for a moment, the second for good.
still_unknown(pending, Reader) ->
    {true, Reader};
still_unknown(none, #reader{forgotten_until = undefined} = Reader) ->
    {true, Reader#reader{forgotten_until = rabbitmq_stream_s3_reader_start:deadline()}};
still_unknown(none, #reader{forgotten_until = Until} = Reader) ->
    erlang:monotonic_time(millisecond) < Until andalso {true, Reader}.

become_remote(Next, #reader{tier = {local, Log}} = Reader, Local, Deliver, Left) ->
    Close = fun() -> osiris_log:close(Log) end,
    reopen_remote({offset, Next}, Next, Close, Reader, Local, Deliver, Left).

reopen_remote(Start, Next, Close, Reader0, Local, Deliver, Left) ->
    case rabbitmq_stream_s3_reader_open:remote(Start, Next, Reader0) of
        {ok, Reader} ->
            ok = Close(),
            read(Reader, Local, Deliver, Left - 1);
        {error, closed} ->
            rabbitmq_stream_s3_reader_wait:plugin_is_off(Reader0);
        {error, {bug, Text}} ->
            rabbitmq_stream_s3_reader_wait:failed(bug, ["a remote reader cannot be opened: ", Text], Reader0)
    end.

%% Final for this handle. A store that has not answered for a minute may answer in the next one: the
%% consumer waits, as it would have to wait if it came again. And the handle may have ended only
%% because its engine did, and the plugin has a new one by now.
remote_failed(restarted, _, Reader, Local, Deliver, Left) ->
    again_remote(Reader, Local, Deliver, Left);
remote_failed(Kind, Text, Reader, Local, Deliver, Left) when
    Kind =:= unavailable; Kind =:= archived
->
    ok = rabbitmq_stream_s3_reader_wait:say_once(Kind, Text, Reader),
    again_remote(Reader, Local, Deliver, Left);
remote_failed(Kind, Text, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case persistent_term:get(?ENGINE, undefined) =:= rabbitmq_stream_s3_reader_remote:engine(Remote) of
        true when Kind =:= lost -> lost(Text, Reader, Local, Deliver, Left);
        true -> rabbitmq_stream_s3_reader_wait:failed(Kind, Text, Reader);
        false -> again_remote(Reader, Local, Deliver, Left)
    end.

lost(Text, #reader{tier = {remote, Remote}} = Reader0, Local, Deliver, Left) ->
    Next = rabbitmq_stream_s3_reader_remote:next_offset(Remote),
    case rabbitmq_stream_s3_reader_lost:next(Next, remote_range(Reader0), Reader0) of
        {wait, Reader} -> rabbitmq_stream_s3_reader_wait:retry_later(Reader);
        {reopen, Place, Reader} -> again_remote(Place, Reader, Local, Deliver, Left);
        lost -> rabbitmq_stream_s3_reader_wait:failed(lost, Text, Reader0)
    end.

again_remote(Reader, Local, Deliver, Left) ->
    again_remote(0, Reader, Local, Deliver, Left).

%% Not below First.
again_remote(First, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    Close = fun() -> rabbitmq_stream_s3_reader_remote:close(Remote) end,
    Next = max(First, rabbitmq_stream_s3_reader_remote:next_offset(Remote)),
    Start =
        case rabbitmq_stream_s3_reader_remote:start(Remote) of
            {offset, _} -> {offset, Next};
            {timestamp, _} = Time -> Time
        end,
    reopen_remote(Start, Next, Close, Reader, Local, Deliver, Left).

%% The chunk with this id was in the local log, too, when this reader was opened. If the log had lost
%% its end, the manifest of then may have had another one there. So the local log is asked; what it
%% has trimmed meanwhile is in the manifest of now.
at_limit(ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    First = rabbitmq_stream_s3_reader_open:local_first(Reader),
    Next = rabbitmq_stream_s3_reader_remote:next_offset(Remote),
    case rabbitmq_stream_s3_reader_remote:start(Remote) of
        {timestamp, _} = Spec when First >= 0, First =< ChunkId ->
            start_local(Spec, ChunkId, Reader, Local, Deliver, Left);
        {offset, _} when First >= 0, First =< Next ->
            become_local(Next, Reader, Local, Deliver, Left);
        {offset, _} when First >= 0 ->
            case remote_range(Reader) of
                {ok, RemoteFirst, RemoteNext} when RemoteFirst >= First; RemoteNext =< Next ->
                    become_local(Next, Reader, Local, Deliver, Left);
                _ ->
                    again_remote(Reader, Local, Deliver, Left)
            end;
        _ ->
            again_remote(Reader, Local, Deliver, Left)
    end.

%% Nothing older than the chunk with this id is new enough.
start_local(Spec, ChunkId, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case rabbitmq_stream_s3_reader_open:local(rabbitmq_stream_s3_reader_start:stock(Spec), Reader) of
        {ok, Log} ->
            case rabbitmq_stream_s3_reader_open:oldest_chunk(Reader) =< ChunkId of
                true ->
                    ok = rabbitmq_stream_s3_reader_remote:close(Remote),
                    Opened = Reader#reader{tier = {local, Log}, chained = false},
                    read(Opened, Local, Deliver, Left - 1);
                false ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Deliver, Left)
            end;
        {error, _} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

%% The remote tier ends at Next. The local reader must begin exactly there.
become_local(Next, #reader{tier = {remote, Remote}} = Reader, Local, Deliver, Left) ->
    case rabbitmq_stream_s3_reader_open:local(Next, Reader) of
        {ok, Log} ->
            case fits(osiris_log:next_offset(Log), Next, Reader) of
                true ->
                    ok = rabbitmq_stream_s3_reader_remote:close(Remote),
                    Opened = Reader#reader{tier = {local, Log}, chained = false},
                    read(Opened, Local, Deliver, Left - 1);
                again ->
                    ok = osiris_log:close(Log),
                    again_remote(Reader, Local, Deliver, Left);
                {later, Waiting} ->
                    ok = osiris_log:close(Log),
                    rabbitmq_stream_s3_reader_wait:retry_later(Waiting)
            end;
        {error, _} ->
            rabbitmq_stream_s3_reader_wait:retry_later(Reader)
    end.

fits(Next, Next, _) ->
    true;
fits(Landed, Next, Reader) when Landed < Next ->
    %% A replica that is behind.
    {later, Reader};
fits(Landed, Next, Reader) ->
    fits(Landed, Next, false, Reader).

%% The floor is above Next. Tiering moves the manifest before it trims, so a manifest that still
%% does not reach beyond Next, and is not an old one, means that the user's retention dropped it.
fits(Landed, Next, IsCertain, Reader) ->
    case remote_range(Reader) of
        {ok, First, RemoteNext} when Next < RemoteNext, First < Landed ->
            again;
        unprotected ->
            true;
        Range ->
            case gap(Range, Landed, IsCertain, Reader) of
                look_again -> fits(Landed, Next, true, Reader);
                Answer -> Answer
            end
    end.

remote_range(#reader{stream_id = StreamId, shared = Shared}) ->
    case persistent_term:get(?ENGINE, undefined) of
        undefined ->
            case rabbitmq_stream_s3_manifest_protection:is_protected(StreamId) of
                true -> {error, closed};
                %% The local log is all that there is, also of a reader from before.
                false -> unprotected
            end;
        Engine ->
            case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
                none ->
                    case rabbitmq_stream_s3_host_osiris:has_member(Shared) of
                        true -> pending;
                        false -> none
                    end;
                Known ->
                    Known
            end
    end.
