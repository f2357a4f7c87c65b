-module(rabbitmq_stream_s3_manifest_cache).
-moduledoc """
What this node knows of the remote tier of the streams that have a member here, for those that must not
ask a process: hooks inside osiris, readers, statistics.

Owns three tables, which rabbitmq_stream_s3_manifest_replica creates:

    rabbitmq_stream_s3_manifest_cache    {StreamId, pending | Range}
    rabbitmq_stream_s3_manifest_members  {{dir, Directory}, StreamId}: whose folder it is;
                                         {{member, StreamId}, Pid}: who opened it last;
                                         {{queue, Reference}, StreamId}: how osiris' counters name it
    rabbitmq_stream_s3_manifest_proofs   {{gap, StreamId}, Floor}, {{current, StreamId}, Since}: see
                                         rabbitmq_stream_s3_reader_gap

Each change of a manifest is made in the engine as well, which routes consumers. Callers write rows from
their own process. While the tables do not exist nothing is known, and nothing is remembered. Does not
own: who may change a row, and when (rabbitmq_stream_s3_manifest_replica, and for the streams that this
node writes rabbitmq_stream_s3_replica_reader).
""".

-export([create/0, delete/0]).
-export([range/1, ranges/0, pending/0, streams/0]).
-export([put/2, mark_pending/1, reset/1, forget/1]).
-export([set_dir/2, dir/1, set_member/2, member/1, set_queue/2, of_queue/1, member_ended/3]).
-export([gap_floor/1, set_gap_floor/2, current_since/1, set_current_since/2, disprove/1]).
-export([wanted/1, published/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type range() :: rabbitmq_stream_s3:range().

-define(MANIFESTS, ?MODULE).
-define(MEMBERS, rabbitmq_stream_s3_manifest_members).
-define(PROOFS, rabbitmq_stream_s3_manifest_proofs).
-define(TABLES, [?MANIFESTS, ?MEMBERS, ?PROOFS]).
%% The proofs are a cache: beyond this it starts anew.
-define(PROOFS_MAX, 10_000).
%% How long a caller waits for the process that fills the cache.
-define(CALL_MS, 5_000).

-doc "Creates the tables, owned by the calling process.".
-spec create() -> ok.
create() ->
    Options = [named_table, public, set, {read_concurrency, true}],
    lists:foreach(fun(Table) -> Table = ets:new(Table, Options) end, ?TABLES).

-doc "Deletes the tables, where they exist.".
-spec delete() -> ok.
delete() ->
    lists:foreach(
        fun(Table) -> ets:whereis(Table) =/= undefined andalso ets:delete(Table) end, ?TABLES
    ).

%% Manifests ---------------------------------------------------------------------------------------

-doc "`none`: no member of the stream is known here (or the plugin is off).".
-spec range(stream_id()) -> {ok, range()} | pending | none.
range(StreamId) ->
    case lookup(?MANIFESTS, StreamId) of
        {ok, pending} -> pending;
        {ok, Range} -> {ok, Range};
        none -> none
    end.

-doc "All that is known.".
-spec ranges() -> [{stream_id(), range() | pending}].
ranges() ->
    try
        ets:tab2list(?MANIFESTS)
    catch
        error:badarg -> []
    end.

-spec streams() -> [stream_id()].
streams() ->
    try
        ets:select(?MANIFESTS, [{{'$1', '_'}, [], ['$1']}])
    catch
        error:badarg -> []
    end.

-doc "How many streams have a member here but no manifest that is known.".
-spec pending() -> non_neg_integer().
pending() ->
    try
        ets:select_count(?MANIFESTS, [{{'_', pending}, [], [true]}])
    catch
        error:badarg -> 0
    end.

-doc "A range that has been persisted: from here on local retention counts on it.".
-spec put(stream_id(), range()) -> ok.
put(StreamId, Range) ->
    insert(?MANIFESTS, StreamId, Range).

-doc "Before a consumer can attach: the unknown must not look like nothing. Keeps a known range.".
-spec mark_pending(stream_id()) -> ok.
mark_pending(StreamId) ->
    try ets:insert_new(?MANIFESTS, {StreamId, pending}) of
        _ -> ok
    catch
        error:badarg -> ok
    end,
    rabbitmq_stream_s3:with_engine(fun(Engine) ->
        rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId)
    end).

-doc "Pending, whatever was known.".
-spec reset(stream_id()) -> ok.
reset(StreamId) ->
    ok = drop_proofs(StreamId),
    ok = insert(?MANIFESTS, StreamId, pending),
    rabbitmq_stream_s3:with_engine(fun(Engine) ->
        rabbitmq_stream_s3_nif:manifest_reset(Engine, StreamId)
    end).

-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    ok = drop_proofs(StreamId),
    ok = delete(?MANIFESTS, StreamId),
    rabbitmq_stream_s3:with_engine(fun(Engine) ->
        rabbitmq_stream_s3_nif:manifest_forget(Engine, StreamId)
    end).

%% Members -----------------------------------------------------------------------------------------

-doc "Osiris names a log by its directory in osiris_log:evaluate_retention/2.".
-spec set_dir(file:name_all(), stream_id()) -> ok.
set_dir(Directory, StreamId) ->
    insert(?MEMBERS, {dir, rabbitmq_stream_s3:utf8(Directory)}, StreamId).

-spec dir(file:name_all()) -> {ok, stream_id()} | none.
dir(Directory) ->
    lookup(?MEMBERS, {dir, rabbitmq_stream_s3:utf8(Directory)}).

-doc "The process that opened the local log of the stream last.".
-spec set_member(stream_id(), pid()) -> ok.
set_member(StreamId, Pid) ->
    insert(?MEMBERS, {member, StreamId}, Pid).

-spec member(stream_id()) -> {ok, pid()} | none.
member(StreamId) ->
    lookup(?MEMBERS, {member, StreamId}).

-doc "The reference by which osiris' counters know a stream.".
-spec set_queue(Reference :: term(), stream_id()) -> ok.
set_queue(Reference, StreamId) ->
    insert(?MEMBERS, {queue, Reference}, StreamId).

-spec of_queue(Reference :: term()) -> {ok, stream_id()} | none.
of_queue(Reference) ->
    lookup(?MEMBERS, {queue, Reference}).

-doc """
A local member has ended: forgets its stream, unless another member has opened the log by now. What is
there then belongs to that one.
""".
-spec member_ended(pid(), Reference :: term(), rabbitmq_stream_s3:member_info()) -> ok.
member_ended(Pid, Reference, #{stream_id := StreamId, dir := Directory}) ->
    case member(StreamId) of
        {ok, Successor} when Successor =/= Pid ->
            ok;
        _ ->
            ok = forget(StreamId),
            ok = delete(?MEMBERS, {member, StreamId}),
            %% Not that of a stream that has the name of this one by now.
            ok = delete_object(?MEMBERS, {{queue, Reference}, StreamId}),
            delete(?MEMBERS, {dir, rabbitmq_stream_s3:utf8(Directory)})
    end.

%% Proofs ------------------------------------------------------------------------------------------

-doc "Below this floor, what the manifest here does not have is in neither tier.".
-spec gap_floor(stream_id()) -> {ok, osiris:offset()} | none.
gap_floor(StreamId) ->
    lookup(?PROOFS, {gap, StreamId}).

-spec set_gap_floor(stream_id(), osiris:offset()) -> ok.
set_gap_floor(StreamId, Floor) ->
    prove({gap, StreamId}, Floor).

-doc "The manifest here is at least as new as the pointer was at this time (erlang:monotonic_time/0).".
-spec current_since(stream_id()) -> {ok, integer()} | none.
current_since(StreamId) ->
    lookup(?PROOFS, {current, StreamId}).

-spec set_current_since(stream_id(), integer()) -> ok.
set_current_since(StreamId, Since) ->
    prove({current, StreamId}, Since).

prove(Question, Answer) ->
    try
        _ = ets:info(?PROOFS, size) >= ?PROOFS_MAX andalso ets:delete_all_objects(?PROOFS),
        insert(?PROOFS, Question, Answer)
    catch
        error:badarg -> ok
    end.

-doc "Forgets both proofs of a stream.".
-spec disprove(stream_id()) -> ok.
disprove(StreamId) ->
    ok = delete(?PROOFS, {current, StreamId}),
    delete(?PROOFS, {gap, StreamId}).

%% The log of the stream, or what is known of it, starts anew. A proof that is under way must not count
%% afterwards, either: rabbitmq_stream_s3_reader_gap hears of it by a message.
drop_proofs(StreamId) ->
    ok = disprove(StreamId),
    gen_server:cast(rabbitmq_stream_s3_reader_gap, {forget, StreamId}).

%% Requests to the process that fills the cache ----------------------------------------------------

-doc "A consumer waits for the manifest of this stream: it comes before those that nobody waits for.".
-spec wanted(stream_id()) -> ok.
wanted(StreamId) ->
    gen_server:cast(rabbitmq_stream_s3_manifest_replica, {wanted, StreamId}).

-doc """
The caller has had the engine publish the manifest that this pointer names. `taken_back`: the writer has
withdrawn it meanwhile, so the manifest has been reset.
""".
-spec published(stream_id(), rabbitmq_stream_s3:pointer()) ->
    ok | taken_back | {error, unavailable}.
published(StreamId, Pointer) ->
    try
        gen_server:call(rabbitmq_stream_s3_manifest_replica, {published, StreamId, Pointer}, ?CALL_MS)
    catch
        exit:_ -> {error, unavailable}
    end.

%% Rows --------------------------------------------------------------------------------------------

lookup(Table, Key) ->
    try ets:lookup(Table, Key) of
        [{Key, Value}] -> {ok, Value};
        [] -> none
    catch
        error:badarg -> none
    end.

insert(Table, Key, Value) ->
    try ets:insert(Table, {Key, Value}) of
        true -> ok
    catch
        error:badarg -> ok
    end.

delete(Table, Key) ->
    try ets:delete(Table, Key) of
        true -> ok
    catch
        error:badarg -> ok
    end.

delete_object(Table, Row) ->
    try ets:delete_object(Table, Row) of
        true -> ok
    catch
        error:badarg -> ok
    end.
