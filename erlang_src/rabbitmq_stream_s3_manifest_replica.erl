-module(rabbitmq_stream_s3_manifest_replica).
-moduledoc """
What this node knows about the remote tier of the streams that have a member here.

Owns two tables and the monitors of local members:

    rabbitmq_stream_s3_manifest_cache  {StreamId, pending | Range}, for local retention
    rabbitmq_stream_s3_dirs            {Directory, StreamId}: whose folder is it, for the same;
                                       {{member, StreamId}, Pid}: who opened it last;
                                       {{queue, Reference}, StreamId}: what counters call it

The manifests that consumers are routed by live in the engine; each change here is made there too. A
writer's range is put here by its replica reader. Writers of rows call from their own process (the
hook runs inside osiris and must not wait for ours).

Streams that are written on another node: after every persist the writer's replica reader sends an
edit, and tells the pointer that it leads to; when asked, the pointer alone. Where the edit does not
lead there the pointer is resolved (rabbitmq_stream_s3_manifest_resolver, which runs in this process).
A message may be lost, and a node without the plugin never sends one: the reconciler's round
compares with the metadata store.
""".

-behaviour(gen_server).

-include("rabbitmq_stream_s3.hrl").

-export([
    start_link/0,
    range/1,
    put/2,
    mark_pending/1,
    mark_members/0,
    reset/1,
    forget/1,
    streams/0,
    pending/0,
    register_dir/2,
    dir/1,
    stream_of/1,
    member_started/3,
    register_member/3,
    update_retention/3,
    retention/2,
    members/0,
    announce/4,
    ask_writer/1,
    published/2,
    wanted/1,
    look/0,
    engine_opened/0
]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

-record(member, {
    pid :: pid(),
    monitor :: reference(),
    role :: rabbitmq_stream_s3:role(),
    info :: rabbitmq_stream_s3:member_info()
}).
-define(RESOLVER, rabbitmq_stream_s3_manifest_resolver).
%% Who is kept waiting longer than that does without the answer.
-define(CALL_MS, 5_000).

-record(state, {
    members = #{} :: #{stream_id() => #member{}},
    %% Whose monitor it is: a node may end with all of its members at once.
    monitors = #{} :: #{reference() => stream_id()},
    %% Acceptors only; a writer's manifest is its reader's.
    resolver = ?RESOLVER:new() :: ?RESOLVER:t()
}).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "`none`: no member of the stream is known here (or the plugin is off).".
-spec range(stream_id()) -> {ok, rabbitmq_stream_s3:range()} | pending | none.
range(StreamId) ->
    case lookup(?MANIFEST_CACHE, StreamId) of
        {ok, pending} -> pending;
        {ok, Range} -> {ok, Range};
        none -> none
    end.

-doc "A range that has been persisted: from here on local retention counts on it.".
-spec put(stream_id(), rabbitmq_stream_s3:range()) -> ok.
put(StreamId, Range) ->
    insert(?MANIFEST_CACHE, StreamId, Range).

-doc "Before a consumer can attach: the unknown must not look like nothing. Keeps a known range.".
-spec mark_pending(stream_id()) -> ok.
mark_pending(StreamId) ->
    try ets:insert_new(?MANIFEST_CACHE, {StreamId, pending}) of
        _ -> ok
    catch
        error:badarg -> ok
    end,
    with_engine(fun(Engine) -> rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId) end).

-doc "As mark_pending/1, for every member whose log is open now; the reconciler comes later.".
-spec mark_members() -> ok.
mark_members() ->
    lists:foreach(
        fun({_Pid, Directory, Name, _Shared, _Reference}) ->
            StreamId = rabbitmq_stream_s3_hooks:stream_id(Name),
            ok = register_dir(Directory, StreamId),
            ok = mark_pending(StreamId)
        end,
        rabbitmq_stream_s3_osiris:members()
    ).

-doc "Pending, whatever was known.".
-spec reset(stream_id()) -> ok.
reset(StreamId) ->
    ok = rabbitmq_stream_s3_gap:forget(StreamId),
    ok = insert(?MANIFEST_CACHE, StreamId, pending),
    with_engine(fun(Engine) -> rabbitmq_stream_s3_nif:manifest_reset(Engine, StreamId) end).

-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    ok = rabbitmq_stream_s3_gap:forget(StreamId),
    ok = delete(?MANIFEST_CACHE, StreamId),
    with_engine(fun(Engine) -> rabbitmq_stream_s3_nif:manifest_forget(Engine, StreamId) end).

-spec streams() -> [stream_id()].
streams() ->
    try
        ets:select(?MANIFEST_CACHE, [{{'$1', '_'}, [], ['$1']}])
    catch
        error:badarg -> []
    end.

-doc "How many streams have a member here but no manifest that is known.".
-spec pending() -> non_neg_integer().
pending() ->
    try
        ets:select_count(?MANIFEST_CACHE, [{{'_', pending}, [], [true]}])
    catch
        error:badarg -> 0
    end.

-spec register_dir(file:name_all(), stream_id()) -> ok.
register_dir(Directory, StreamId) ->
    insert(?DIRS, rabbitmq_stream_s3:utf8(Directory), StreamId).

-spec dir(file:name_all()) -> {ok, stream_id()} | none.
dir(Directory) ->
    lookup(?DIRS, rabbitmq_stream_s3:utf8(Directory)).

-doc "The stream that osiris' counters know by this reference, if it has a member here.".
-spec stream_of(term()) -> {ok, stream_id()} | none.
stream_of(Reference) ->
    lookup(?DIRS, {queue, Reference}).

-doc """
The calling process opens the log of a member. What was known of an acceptor's manifest is not
believed any more: its log may begin above it by now.
""".
-spec member_started(rabbitmq_stream_s3:role(), file:name_all(), stream_id()) -> ok.
member_started(Role, Directory, StreamId) ->
    ok = register_dir(Directory, StreamId),
    ok = insert(?DIRS, {member, StreamId}, self()),
    case Role of
        writer -> mark_pending(StreamId);
        acceptor -> reset(StreamId)
    end.

-doc "Remembers a local member until it ends, and then forgets its stream here.".
-spec register_member(rabbitmq_stream_s3:role(), pid(), rabbitmq_stream_s3:member_info()) -> ok.
register_member(Role, Pid, Info) ->
    gen_server:cast(?MODULE, {register_member, Role, Pid, Info}).

-doc "The user's retention of a local member has changed.".
-spec update_retention(stream_id(), pid(), [osiris:retention_spec()]) -> ok.
update_retention(StreamId, Pid, Specs) ->
    gen_server:cast(?MODULE, {update_retention, StreamId, Pid, Specs}).

-doc "The user's retention of a local member as it is now; `none` if that cannot be said.".
-spec retention(stream_id(), pid()) -> {ok, [osiris:retention_spec()]} | none.
retention(StreamId, Pid) ->
    try
        gen_server:call(?MODULE, {retention, StreamId, Pid}, ?CALL_MS)
    catch
        exit:_ -> none
    end.

-doc "`unavailable`: this process is restarting, or has too much to do.".
-spec members() ->
    {ok, #{stream_id() => {rabbitmq_stream_s3:role(), pid(), rabbitmq_stream_s3:member_info()}}}
    | {error, unavailable}.
members() ->
    try
        {ok, gen_server:call(?MODULE, members, ?CALL_MS)}
    catch
        exit:_ -> {error, unavailable}
    end.

-doc """
Tells other nodes what the writer here has persisted, and what leads to it from the one before. Waits
for nobody: a node that is not connected or does not run the plugin hears nothing, and finds out by
looking.
""".
-spec announce(
    [node()], stream_id(), rabbitmq_stream_s3:range(), rabbitmq_stream_s3_nif:edit_from()
) -> ok.
announce(Nodes, StreamId, Range, Edit) ->
    %% The edit first: to whom it leads there, the pointer is no news.
    case edit(StreamId, Range, Edit) of
        none -> ok;
        Change -> rabbitmq_stream_s3_counters:add(manifest_edits_sent, tell(Nodes, Change))
    end,
    case announcement(StreamId, Range) of
        none ->
            ok;
        Message ->
            _ = tell(Nodes, Message),
            ok
    end.

-doc "Asks for an announcement, whichever node the writer is on. As lossy as that.".
-spec ask_writer(stream_id()) -> ok.
ask_writer(StreamId) ->
    _ = tell(nodes(), {pointer_wanted, StreamId, node()}),
    ok.

%% How many nodes it is on its way to.
tell(Nodes, Message) ->
    Sent = [
        erlang:send({?MODULE, Node}, {'$gen_cast', Message}, [nosuspend, noconnect])
     || Node <- lists:delete(node(), Nodes)
    ],
    length([ok || ok <- Sent]).

edit(StreamId, #{pointer := {_, _, _} = To, epoch := WriterEpoch}, {From, Edit}) ->
    {manifest_edit, StreamId, From, To, WriterEpoch, Edit, node()};
edit(_StreamId, _Range, none) ->
    none.

announcement(StreamId, #{pointer := {_Epoch, _Uid, _Revision} = Pointer, epoch := WriterEpoch}) ->
    {pointer_moved, StreamId, Pointer, WriterEpoch, node()};
announcement(StreamId, #{pointer := none, revision := Revision}) when Revision > 0 ->
    {pointer_taken_back, StreamId, Revision, node()};
announcement(_StreamId, _NothingPersisted) ->
    none.

-doc """
What this pointer names has been published in the engine by another than the resolver, which finds
it known. `taken_back`: its writer has said that it must not be, and it no longer is.
""".
-spec published(stream_id(), rabbitmq_stream_s3:pointer()) ->
    ok | taken_back | {error, unavailable}.
published(StreamId, Pointer) ->
    try
        gen_server:call(?MODULE, {published, StreamId, Pointer}, ?CALL_MS)
    catch
        exit:_ -> {error, unavailable}
    end.

-doc "A consumer waits for the manifest of this stream: it comes before those that nobody waits for.".
-spec wanted(stream_id()) -> ok.
wanted(StreamId) ->
    gen_server:cast(?MODULE, {wanted, StreamId}).

-doc "Compares what is known of every acceptor with this node's copy of the pointers.".
-spec look() -> ok.
look() ->
    gen_server:cast(?MODULE, look).

-doc "A new engine knows no manifest.".
-spec engine_opened() -> ok.
engine_opened() ->
    gen_server:cast(?MODULE, engine_opened).

-spec init([]) -> {ok, #state{}}.
init([]) ->
    Options = [named_table, public, set, {read_concurrency, true}],
    ?MANIFEST_CACHE = ets:new(?MANIFEST_CACHE, Options),
    ?DIRS = ets:new(?DIRS, Options),
    %% After a crash the tables are empty; at the first start nobody listens yet.
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(members, _From, #state{members = Members} = State) ->
    Reply = #{Id => {M#member.role, M#member.pid, M#member.info} || Id := M <- Members},
    {reply, Reply, State};
handle_call({retention, StreamId, Pid}, _From, #state{members = Members} = State) ->
    Reply =
        case Members of
            #{StreamId := #member{pid = Pid, info = #{retention := Specs}}} -> {ok, Specs};
            _ -> none
        end,
    {reply, Reply, State};
handle_call({published, StreamId, Pointer}, _From, #state{resolver = Resolver} = State) ->
    {Reply, Changed} = ?RESOLVER:published(StreamId, Pointer, Resolver),
    {reply, Reply, State#state{resolver = Changed}};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({register_member, Role, Pid, Info}, State) ->
    {noreply, add_member(Role, Pid, Info, State)};
handle_cast({update_retention, StreamId, Pid, Specs}, #state{members = Members} = State) ->
    case Members of
        #{StreamId := #member{pid = Pid, role = Role, info = Info}} ->
            {noreply, add_member(Role, Pid, Info#{retention := Specs}, State)};
        _ ->
            {noreply, State}
    end;
handle_cast({pointer_moved, StreamId, Pointer, WriterEpoch, _WriterNode}, State) ->
    ok = rabbitmq_stream_s3_counters:add(pointer_moves_received),
    {noreply, resolver(announced, [StreamId, Pointer, WriterEpoch], State)};
handle_cast({manifest_edit, StreamId, From, To, WriterEpoch, Edit, _WriterNode}, State) ->
    {noreply, resolver(edited, [StreamId, From, To, WriterEpoch, Edit], State)};
handle_cast({pointer_wanted, StreamId, Node}, State) ->
    case rabbitmq_stream_s3_registry:whereis_name({StreamId, node()}) of
        undefined -> ok;
        Reader -> rabbitmq_stream_s3_replica_reader:announce_to(Reader, Node)
    end,
    {noreply, State};
handle_cast({pointer_taken_back, StreamId, Revision, _WriterNode}, State) ->
    {noreply, resolver(taken_back, [StreamId, Revision], State)};
handle_cast({wanted, StreamId}, State) ->
    {noreply, resolver(wanted, [StreamId], State)};
handle_cast(look, State) ->
    {noreply, resolver(look, [], State)};
handle_cast(engine_opened, State) ->
    {noreply, resolver(engine_opened, [], State)};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Monitor, process, Pid, _Reason}, #state{monitors = Monitors} = State) when
    is_map_key(Monitor, Monitors)
->
    {StreamId, Rest} = maps:take(Monitor, Monitors),
    {noreply, drop_member(StreamId, Pid, State#state{monitors = Rest})};
handle_info(Message, #state{resolver = Resolver} = State) ->
    case ?RESOLVER:handle_info(Message, Resolver) of
        {ok, Changed} -> {noreply, State#state{resolver = Changed}};
        unknown -> {noreply, State}
    end.

resolver(Function, Arguments, #state{resolver = Resolver} = State) ->
    Changed = apply(?RESOLVER, Function, Arguments ++ [Resolver]),
    State#state{resolver = Changed}.

add_member(Role, Pid, #{stream_id := StreamId} = Info, #state{members = Members} = State) ->
    case Members of
        #{StreamId := #member{pid = Pid, role = Role} = Member} ->
            Updated = State#state{members = Members#{StreamId := Member#member{info = Info}}},
            resolver(update, [StreamId, Info], Updated);
        #{StreamId := #member{monitor = Old}} ->
            true = demonitor(Old, [flush]),
            Monitors = maps:remove(Old, State#state.monitors),
            new_member(Role, Pid, Info, State#state{monitors = Monitors});
        _ ->
            new_member(Role, Pid, Info, State)
    end.

new_member(Role, Pid, Info, #state{members = Members, monitors = Monitors} = State) ->
    #{stream_id := StreamId, dir := Directory} = Info,
    Monitor = monitor(process, Pid),
    Member = #member{pid = Pid, monitor = Monitor, role = Role, info = Info},
    Added = State#state{
        members = Members#{StreamId => Member}, monitors = Monitors#{Monitor => StreamId}
    },
    %% Again: the end of the member before it may have taken them away.
    ok = register_dir(Directory, StreamId),
    ok = insert(?DIRS, {member, StreamId}, Pid),
    ok = insert(?DIRS, {queue, maps:get(reference, Info, undefined)}, StreamId),
    case Role of
        writer ->
            ok = mark_pending(StreamId),
            resolver(remove, [StreamId], Added);
        acceptor ->
            %% Also the range of a writer that writes no more: nobody moves it on.
            ok = reset(StreamId),
            resolver(add, [StreamId, Info], Added)
    end.

drop_member(StreamId, Pid, #state{members = Members0} = State) ->
    {#member{info = #{dir := Directory} = Info}, Members} = maps:take(StreamId, Members0),
    case lookup(?DIRS, {member, StreamId}) of
        {ok, Next} when Next =/= Pid ->
            %% What is there belongs to a member that has opened its log already.
            ok;
        _ ->
            ok = forget(StreamId),
            ok = delete(?DIRS, {member, StreamId}),
            %% Not that of a stream that has the name of this one by now.
            ok = delete_object(?DIRS, {{queue, maps:get(reference, Info, undefined)}, StreamId}),
            ok = delete(?DIRS, rabbitmq_stream_s3:utf8(Directory))
    end,
    resolver(remove, [StreamId], State#state{members = Members}).

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

with_engine(Fun) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            _ = Fun(Engine),
            ok;
        undefined ->
            ok
    end.
