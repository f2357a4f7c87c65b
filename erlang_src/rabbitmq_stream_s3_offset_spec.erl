%% Owns: where a consumer starts, in osiris' words: asks the native route/5, waits a bounded time
%% for a manifest that is not known yet, or that may be too old to say that there is a gap between
%% the tiers, and finds the chunk of a place in the remote tier.
%% Does not own: the decision itself (native), opening anything that lasts
%% (rabbitmq_stream_s3_log_reader).
-module(rabbitmq_stream_s3_offset_spec).

-export([route/5, behind_a_local_chunk/2, chunk_id/4, stock/1, start/2, deadline/0]).
-export([committed_offset/1]).
-export([run_aside/1]).

-include("rabbitmq_stream_s3.hrl").

-type start() :: rabbitmq_stream_s3_remote_log:start().

-define(RESOLVE_TIMEOUT_MS, 5000).
-define(ENGINE_POLL_MS, 50).

-doc """
Where to start: First is the first local chunk id, -1 if the log is empty. A manifest that is not
known yet is waited for, so that "unknown" never looks like "not there"; unless the local log has
the answer whatever the manifest says. So is an engine that is not there: it is started, or
restarted. A place that is at First only because the manifest ends below it is given when that is
certain (rabbitmq_stream_s3_gap).
""".
-spec route(
    binary(),
    osiris:offset_spec(),
    atomics:atomics_ref(),
    osiris:offset() | -1,
    Deadline :: integer()
) -> {local, term()} | {remote, osiris:offset()} | {error, term()}.
route(StreamId, Spec, Shared, First, Deadline) ->
    LocalNext = local_next(Shared),
    NativeSpec = native_spec(Spec),
    Engine = persistent_term:get(?ENGINE, undefined),
    case native_route(Engine, StreamId, NativeSpec, First, LocalNext) of
        pending ->
            case local_route(NativeSpec, First, LocalNext) of
                {local, _} = Route ->
                    Route;
                unknown ->
                    case await(Engine, StreamId, Shared, Deadline) of
                        ok ->
                            route(StreamId, Spec, Shared, First, Deadline);
                        {error, _} = Error ->
                            Error
                    end
            end;
        {remote, _} = Route ->
            Route;
        Route ->
            case ends_below(Engine, StreamId, NativeSpec, First) of
                false -> Route;
                true -> after_gap(StreamId, Spec, Shared, First, Deadline)
            end
    end.

%% Whether a manifest that reaches further could lead to another place.
ends_below(Engine, StreamId, Spec, First) ->
    case leads_below(Spec, First) andalso rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
        {ok, _, RemoteNext} -> RemoteNext < First;
        %% Forgotten since; or of no interest.
        _ -> false
    end.

leads_below(last, _) -> false;
leads_below(next, _) -> false;
leads_below({offset, N}, First) -> N < First;
leads_below({abs, N}, First) -> N < First;
leads_below(first, _) -> true;
leads_below({timestamp, _}, _) -> true.

after_gap(StreamId, Spec, Shared, First, Deadline) ->
    case rabbitmq_stream_s3_gap:await(StreamId, First, Deadline) of
        ok ->
            %% The manifest may be another one by now.
            Engine = persistent_term:get(?ENGINE, undefined),
            case native_route(Engine, StreamId, native_spec(Spec), First, local_next(Shared)) of
                pending -> route(StreamId, Spec, Shared, First, Deadline);
                Route -> Route
            end;
        {error, _} = Error ->
            Error
    end.

native_route(undefined, _, _, _, _) ->
    pending;
native_route(Engine, StreamId, Spec, First, LocalNext) ->
    rabbitmq_stream_s3_nif:route(Engine, StreamId, Spec, First, LocalNext).

local_route(last, _, _) -> {local, last};
local_route(next, _, _) -> {local, next};
local_route({offset, N}, First, _) when First >= 0, N >= First -> {local, {offset, N}};
local_route({abs, N}, First, Next) when First >= 0, N >= First, N < Next -> {local, {offset, N}};
local_route(first, 0, _) -> {local, first};
local_route({timestamp, _} = Spec, 0, _) -> {local, Spec};
local_route(_, _, _) -> unknown.

local_next(Shared) ->
    case knows_committed_offset() of
        true -> osiris_log_shared:committed_offset(Shared) + 1;
        %% The end of the last chunk is not known: its largest possible one. An offset that is
        %% beyond the log is then not refused, the reader starts at the end.
        false -> osiris_log_shared:committed_chunk_id(Shared) + 16#ffffffff
    end.

-doc "What osiris_log:committed_offset/1 gives.".
-spec committed_offset(atomics:atomics_ref()) -> integer().
committed_offset(Shared) ->
    case knows_committed_offset() of
        true -> osiris_log_shared:committed_offset(Shared);
        false -> osiris_log_shared:committed_chunk_id(Shared)
    end.

%% osiris 1.8 does not; its committed_offset/1 gives the chunk id.
knows_committed_offset() ->
    erlang:function_exported(osiris_log_shared, committed_offset, 1).

-doc """
Whether the place that stock has found for a time is the nearest one of both tiers: it is if the log
has an older chunk than that, which stock has found to be before the time. The first chunk of the
log may have others of its time, or later than it, before it. Looked at after stock has searched,
because segments only go from the front.
""".
-spec behind_a_local_chunk(osiris:offset(), file:filename_all()) -> boolean().
behind_a_local_chunk(ChunkId, Dir) ->
    case rabbitmq_stream_s3_local_retention:oldest(Dir) of
        {ok, Oldest} -> Oldest < ChunkId;
        none -> false
    end.

native_spec(Offset) when is_integer(Offset) -> {offset, Offset};
native_spec(Spec) -> Spec.

-doc "The local part of a route for a stock reader.".
-spec stock(term()) -> osiris:offset_spec().
stock({offset, Offset}) -> Offset;
stock(Spec) -> Spec.

-doc "The remote part of a route for a native reader: the route is provisional for a timestamp.".
-spec start(osiris:offset_spec(), osiris:offset()) -> start().
start({timestamp, _} = Spec, _) -> Spec;
start(_, Offset) -> {offset, Offset}.

-doc "When to stop waiting for something that starts now.".
-spec deadline() -> integer().
deadline() ->
    Timeout = application:get_env(rabbitmq_stream_s3, read_resolve_timeout_ms, ?RESOLVE_TIMEOUT_MS),
    erlang:monotonic_time(millisecond) + Timeout.

await(undefined, _, _, Deadline) ->
    case erlang:monotonic_time(millisecond) < Deadline of
        true -> timer:sleep(?ENGINE_POLL_MS);
        false -> {error, unavailable}
    end;
await(Engine, StreamId, Shared, Deadline) ->
    ok = mark_member(Engine, StreamId, Shared),
    await_manifest(Engine, StreamId, Deadline).

%% A member that nobody has announced yet: to this engine nothing is known of its stream.
mark_member(Engine, StreamId, Shared) ->
    case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
        none ->
            case rabbitmq_stream_s3_osiris:has_member(Shared) of
                true -> rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId);
                false -> ok
            end;
        _ ->
            ok
    end.

await_manifest(Engine, StreamId, Deadline) ->
    aside(Deadline, fun() ->
        Ref = make_ref(),
        case rabbitmq_stream_s3_nif:manifest_await(Engine, self(), Ref, StreamId) of
            ok ->
                receive
                    {rabbitmq_stream_s3, Ref, resolved} -> still_there(Engine, StreamId)
                end;
            {error, _} ->
                {error, unavailable}
        end
    end).

%% Forgotten is no answer: its member is being replaced, or there is nothing to wait for.
still_there(Engine, StreamId) ->
    case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
        none -> {error, unavailable};
        _ -> ok
    end.

-doc "The id of the chunk at a place in the remote tier.".
-spec chunk_id(
    binary(),
    start(),
    CommittedChunkId :: osiris:offset(),
    Deadline :: integer()
) -> {ok, osiris:offset()} | {error, term()}.
chunk_id(StreamId, Start, Committed, Deadline) ->
    aside(Deadline, fun() ->
        case persistent_term:get(?ENGINE, undefined) of
            undefined ->
                {error, unavailable};
            Engine ->
                case rabbitmq_stream_s3_nif:reader_open(Engine, self(), wake, StreamId, Start) of
                    {ok, Handle} -> first_chunk(Handle, Committed);
                    {error, closed} -> {error, unavailable};
                    {error, _} = Error -> Error
                end
        end
    end).

first_chunk(Handle, Committed) ->
    case rabbitmq_stream_s3_nif:reader_read(Handle, Committed) of
        {chunk, #{chunk_id := ChunkId}, _, _, _} ->
            {ok, ChunkId};
        wait ->
            receive
                wake -> first_chunk(Handle, Committed)
            end;
        {local, Next} ->
            {ok, Next};
        {error, Kind, _} ->
            {error, {stream_s3, Kind}};
        {error, _} = Error ->
            Error
    end.

%% Runs a wait for native messages in a process of its own: a message that comes after the
%% deadline must not end up in the mailbox of a connection.
aside(Deadline, Fun) ->
    {Pid, Monitor} = spawn_monitor(?MODULE, run_aside, [Fun]),
    receive
        {'DOWN', Monitor, process, Pid, {aside, Result}} -> Result;
        {'DOWN', Monitor, process, Pid, _} -> {error, unavailable}
    after max(0, Deadline - erlang:monotonic_time(millisecond)) ->
        exit(Pid, kill),
        true = erlang:demonitor(Monitor, [flush]),
        {error, unavailable}
    end.

-doc false.
-spec run_aside(fun(() -> term())) -> no_return().
run_aside(Fun) ->
    exit({aside, Fun()}).
