-module(rabbitmq_stream_s3_reader_start).
-moduledoc """
Owns where a consumer starts, in osiris' words: asks the native route/5, and says `unknown` while
the answer would depend on a manifest that this node does not know yet, or that may be too old to
say that there is a gap between the tiers.

Does not own the decision itself (native), opening a reader and waiting until the place is known
(rabbitmq_stream_s3_reader_open, rabbitmq_stream_s3_reader_tier).
""".

-export([route/4, supported/1, pinned/2, provisional/2]).
-export([behind_a_local_chunk/2, stock/1, start/2, deadline/0, committed_offset/1]).


-type start() :: rabbitmq_stream_s3_reader_remote:start().
-type route() ::
    {local, term()} | {remote, osiris:offset()} | unknown | {error, {offset_out_of_range, term()}}.
-export_type([route/0]).

-define(RESOLVE_TIMEOUT_MS, 5000).
-define(OFFSET_MAX, 16#ffffffffffffffff).
-define(TIMESTAMP_MAX, 16#7fffffffffffffff).

-doc """
Where to start: First is the first local chunk id, -1 if the log is empty. Never waits. `unknown`
while this node has no engine, does not know the manifest, or has not verified that a gap below First
is real (rabbitmq_stream_s3_reader_gap), unless the local log has the answer whatever the manifest says. An
unknown place never looks like a known one.
""".
-spec route(binary(), osiris:offset_spec(), atomics:atomics_ref(), osiris:offset() | -1) -> route().
route(StreamId, Spec, Shared, First) ->
    Local = {First, local_next(Shared)},
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} -> route(Engine, StreamId, native_spec(Spec), Shared, Local, unproven);
        undefined -> without_engine(native_spec(Spec), Local)
    end.

route(Engine, StreamId, Spec, Shared, {First, _} = Local, Gap) ->
    case rabbitmq_stream_s3_nif:route(Engine, StreamId, Spec, Local, Gap) of
        unproven_gap ->
            case rabbitmq_stream_s3_reader_gap:is_certain(StreamId, First) of
                true -> route(Engine, StreamId, Spec, Shared, Local, certain);
                false -> unknown
            end;
        unknown ->
            ok = mark_member(Engine, StreamId, Shared),
            unknown;
        Route ->
            Route
    end.

%% As tiering_core::route without a manifest. There may be no native library to ask: that is one of the
%% reasons for which a node has no engine.
without_engine(last, _) -> {local, last};
without_engine(next, _) -> {local, next};
without_engine({offset, N}, {First, _}) when First >= 0, N >= First -> {local, {offset, N}};
without_engine({abs, N}, {First, Next}) when First >= 0, N >= First, N < Next -> {local, {offset, N}};
without_engine(first, {0, _}) -> {local, first};
without_engine({timestamp, _} = Spec, {0, _}) -> {local, Spec};
without_engine(_, _) -> unknown.

-doc "Whether a spec is one that osiris knows. Stock answers for any other.".
-spec supported(term()) -> boolean().
supported(Spec) when Spec =:= first; Spec =:= last; Spec =:= next; is_integer(Spec) -> true;
supported({abs, N}) -> is_integer(N) andalso N >= 0;
supported({timestamp, T}) -> is_integer(T);
supported(_) -> false.

-doc """
The spec of a reader that cannot be placed now. `next` keeps meaning the end of the log as it is at
this moment: what is published while the reader waits is for it.
""".
-spec pinned(osiris:offset_spec(), atomics:atomics_ref()) -> osiris:offset_spec().
pinned(next, Shared) ->
    case knows_committed_offset() of
        true -> osiris_log_shared:committed_offset(Shared) + 1;
        false -> next
    end;
pinned(Spec, _) ->
    Spec.

-doc """
The offset at which a reader stands whose place has yet to be found: not behind that place, nor beyond
the end of the log, where its owner would listen for records that do not come.
""".
-spec provisional(osiris:offset_spec(), atomics:atomics_ref()) -> osiris:offset().
provisional({abs, Offset}, Shared) ->
    provisional(Offset, Shared);
provisional(Offset, Shared) when is_integer(Offset) ->
    max(0, min(Offset, committed_offset(Shared) + 1));
provisional(_, _) ->
    0.

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
    case rabbitmq_stream_s3_host_retention:oldest(Dir) of
        {ok, Oldest} -> Oldest < ChunkId;
        none -> false
    end.

%% Clients may ask for any integer. An offset below the log means its beginning, as in stock, and what
%% is beyond the 64 bits of an offset or a time is beyond every record.
native_spec(Offset) when is_integer(Offset) -> {offset, max(0, min(Offset, ?OFFSET_MAX))};
native_spec({abs, Offset}) -> {abs, min(Offset, ?OFFSET_MAX)};
native_spec({timestamp, T}) -> {timestamp, max(-?TIMESTAMP_MAX, min(T, ?TIMESTAMP_MAX))};
native_spec(Spec) -> Spec.

-doc "The local part of a route for a stock reader.".
-spec stock(term()) -> osiris:offset_spec().
stock({offset, Offset}) -> Offset;
stock(Spec) -> Spec.

-doc "The remote part of a route for a native reader: the route is provisional for a timestamp.".
-spec start(osiris:offset_spec(), osiris:offset()) -> start().
start({timestamp, _} = Spec, _) -> native_spec(Spec);
start(_, Offset) -> {offset, Offset}.

-doc "Until when a stream that this node has forgotten may still come back.".
-spec deadline() -> integer().
deadline() ->
    Timeout = application:get_env(rabbitmq_stream_s3, read_resolve_timeout_ms, ?RESOLVE_TIMEOUT_MS),
    erlang:monotonic_time(millisecond) + Timeout.

%% A member that nobody has announced yet: to this engine nothing is known of its stream.
mark_member(Engine, StreamId, Shared) ->
    case rabbitmq_stream_s3_nif:manifest_range(Engine, StreamId) of
        none ->
            case rabbitmq_stream_s3_host_osiris:has_member(Shared) of
                true -> rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId);
                false -> ok
            end;
        _ ->
            ok
    end.
