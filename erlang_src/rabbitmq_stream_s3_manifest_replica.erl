-module(rabbitmq_stream_s3_manifest_replica).
-moduledoc """
The process that keeps this node's knowledge of manifests true: it watches the local members of streams,
and brings the manifests of those that are written on other nodes here.

Owns the monitors of local members, and performs the actions of rabbitmq_stream_s3_manifest_sync: rows,
retention, tasks that read the metadata store, fetches by the native side, pauses. Does not own what comes
next (rabbitmq_stream_s3_manifest_sync), what is known (rabbitmq_stream_s3_manifest_cache, whose tables it
creates), what nodes tell each other (rabbitmq_stream_s3_peers), nor the manifests of streams that this
node writes (rabbitmq_stream_s3_replica_reader).

A message between nodes may be lost, and a node without the plugin never sends one: the reconciler's round
compares with the metadata store (look/0).
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([
    start_link/0,
    mark_members/0,
    member_started/3,
    register_member/3,
    update_retention/3,
    retention/2,
    members/0,
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
-record(state, {
    members = #{} :: #{stream_id() => #member{}},
    %% Whose monitor it is: a node may end with all of its members at once.
    monitors = #{} :: #{reference() => stream_id()},
    %% Of replicas only.
    sync = rabbitmq_stream_s3_manifest_sync:new() :: rabbitmq_stream_s3_manifest_sync:t(),
    %% The monitor of a task, or the reference of a native answer.
    work = #{} :: #{reference() => {rabbitmq_stream_s3_manifest_sync:key(), SinceMs :: integer()}},
    look :: reference() | undefined
}).

%% Who is kept waiting longer than that does without the answer.
-define(CALL_MS, 5_000).
%% The native deadline is 30 s, the metadata store's as well. A task of the native side that died
%% answers nobody.
-define(WORK_LOST_MS, 120_000).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Marks the manifest of every member whose log is open now as pending; the reconciler comes later.
""".
-spec mark_members() -> ok.
mark_members() ->
    lists:foreach(
        fun({_Pid, Directory, Name, _Shared, _Reference}) ->
            StreamId = rabbitmq_stream_s3:stream_id(Name),
            ok = rabbitmq_stream_s3_manifest_cache:set_dir(Directory, StreamId),
            ok = rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId)
        end,
        rabbitmq_stream_s3_host_osiris:members()
    ).

-doc """
The calling process opens the log of a member. A replica's manifest is not believed any more: its log may
begin above it by now.
""".
-spec member_started(rabbitmq_stream_s3:role(), file:name_all(), stream_id()) -> ok.
member_started(Role, Directory, StreamId) ->
    ok = rabbitmq_stream_s3_manifest_cache:set_dir(Directory, StreamId),
    ok = rabbitmq_stream_s3_manifest_cache:set_member(StreamId, self()),
    case Role of
        writer -> rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId);
        acceptor -> rabbitmq_stream_s3_manifest_cache:reset(StreamId)
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

-doc "Compares what is known of every replica with this node's copy of the pointers.".
-spec look() -> ok.
look() ->
    gen_server:cast(?MODULE, look).

-doc "A new engine knows no manifest.".
-spec engine_opened() -> ok.
engine_opened() ->
    gen_server:cast(?MODULE, engine_opened).

%% The server --------------------------------------------------------------------------------------

-spec init([]) -> {ok, #state{}}.
init([]) ->
    ok = rabbitmq_stream_s3_manifest_cache:create(),
    %% After a crash the tables are empty; at the first start nobody listens yet.
    ok = gen_server:cast(rabbitmq_stream_s3_reconciler, reconcile),
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
handle_call({published, StreamId, Pointer}, _From, #state{sync = Sync0} = State) ->
    {Reply, Actions, Sync} =
        rabbitmq_stream_s3_manifest_sync:published(StreamId, Pointer, Sync0),
    {reply, Reply, run({Actions, Sync}, State)};
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
handle_cast({wanted, StreamId}, #state{sync = Sync} = State) ->
    {noreply, run(rabbitmq_stream_s3_manifest_sync:wanted(StreamId, Sync), State)};
handle_cast(look, State0) ->
    #state{sync = Sync} = State = give_up_lost_work(State0),
    {noreply, run(rabbitmq_stream_s3_manifest_sync:look(Sync), State)};
handle_cast(engine_opened, #state{sync = Sync} = State) ->
    {noreply, run(rabbitmq_stream_s3_manifest_sync:engine_opened(Sync), State)};
handle_cast(Message, State) ->
    {noreply, received(rabbitmq_stream_s3_peers:received(Message), State)}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Monitor, process, Pid, _Reason}, #state{monitors = Monitors} = State) when
    is_map_key(Monitor, Monitors)
->
    {StreamId, Rest} = maps:take(Monitor, Monitors),
    {noreply, drop_member(StreamId, Pid, State#state{monitors = Rest})};
handle_info({'DOWN', Look, process, _Pid, Reason}, #state{look = Look, sync = Sync} = State) ->
    Seen =
        case Reason of
            {seen, Pointers} -> Pointers;
            _Crashed -> []
        end,
    {noreply, run(rabbitmq_stream_s3_manifest_sync:looked(Seen, Sync), State#state{look = undefined})};
handle_info({'DOWN', Task, process, _Pid, Reason}, State) ->
    Answer =
        case Reason of
            {pointer, {ok, Pointer}} -> {ok, Pointer};
            {pointer, not_found} -> not_found;
            _FailedOrCrashed -> error
        end,
    {noreply, answered(Task, {pointer, Answer}, State)};
handle_info({rabbitmq_stream_s3, Reference, Answer}, State) ->
    {noreply, answered(Reference, Answer, State)};
handle_info({waited, StreamId, Id}, #state{sync = Sync} = State) ->
    {noreply, run(rabbitmq_stream_s3_manifest_sync:waited(StreamId, Id, Sync), State)};
handle_info(_Unknown, State) ->
    {noreply, State}.

%% Other nodes -------------------------------------------------------------------------------------

received({manifest_edit, StreamId, From, To, WriterEpoch, Edit}, #state{sync = Sync} = State) ->
    run(rabbitmq_stream_s3_manifest_sync:edited(StreamId, From, To, WriterEpoch, Edit, Sync), State);
received({pointer_moved, StreamId, Pointer, WriterEpoch}, #state{sync = Sync} = State) ->
    ok = rabbitmq_stream_s3_counters:add(pointer_moves_received),
    run(rabbitmq_stream_s3_manifest_sync:announced(StreamId, Pointer, WriterEpoch, Sync), State);
received({pointer_taken_back, StreamId, Revision}, #state{sync = Sync} = State) ->
    run(rabbitmq_stream_s3_manifest_sync:taken_back(StreamId, Revision, Sync), State);
received({pointer_wanted, StreamId, Node}, State) ->
    case rabbitmq_stream_s3_registry:whereis_name({StreamId, node()}) of
        undefined -> ok;
        %% It announces what it has persisted to this node.
        Writer -> gen_server:cast(Writer, {announce_to, Node})
    end,
    State;
received(unknown, State) ->
    State.

%% Actions -----------------------------------------------------------------------------------------

run({Actions, Sync}, State) ->
    lists:foldl(fun run_action/2, State#state{sync = Sync}, Actions).

run_action({put, StreamId, Range}, State) ->
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Range),
    State;
run_action({reset, StreamId}, State) ->
    ok = rabbitmq_stream_s3_manifest_cache:reset(StreamId),
    State;
run_action({evaluate, #{stream_id := StreamId} = Info}, State) ->
    Member = rabbitmq_stream_s3_manifest_cache:member(StreamId),
    ok = rabbitmq_stream_s3_host_retention:evaluate(Info, Member),
    State;
run_action({ask_writer, StreamId}, State) ->
    ok = rabbitmq_stream_s3_peers:ask_writer(StreamId),
    State;
run_action({apply_edit, StreamId, From, To, Edit}, #state{sync = Sync} = State) ->
    Result = apply_edit(StreamId, From, To, Edit),
    run(rabbitmq_stream_s3_manifest_sync:edit_applied(StreamId, To, Result, Sync), State);
run_action({read_pointer, Key, StreamId}, State) ->
    add_work(read_pointer(StreamId), Key, State);
run_action({fetch, Key, StreamId, What}, #state{sync = Sync} = State) ->
    case fetch(StreamId, What) of
        {ok, Reference} -> add_work(Reference, Key, State);
        {error, Kind} -> run(rabbitmq_stream_s3_manifest_sync:answered(Key, {refused, Kind}, Sync), State)
    end;
run_action({drop, Keys}, #state{work = Work} = State) ->
    Dropped = [Reference || Reference := {Key, _Since} <- Work, lists:member(Key, Keys)],
    %% Of a native answer it is no monitor, which does no harm.
    _ = [demonitor(Reference, [flush]) || Reference <- Dropped],
    State#state{work = maps:without(Dropped, Work)};
run_action({look, Known}, State) ->
    State#state{look = start_look(Known)};
run_action({wait, DelayMs, StreamId, Id}, State) ->
    _ = erlang:send_after(DelayMs, self(), {waited, StreamId, Id}),
    State;
run_action({count, Counter}, State) ->
    ok = rabbitmq_stream_s3_counters:add(Counter),
    State;
run_action({log, Level, Format, Args}, State) ->
    ?LOG(Level, Format, Args, ?DOMAIN),
    State.

%% The answer travels as the exit reason: one message says done, failed or crashed.
-dialyzer({nowarn_function, [read_pointer/1, start_look/1]}).
read_pointer(StreamId) ->
    {_Pid, Monitor} = spawn_monitor(fun() ->
        exit({pointer, rabbitmq_stream_s3_db:get_consistent(StreamId)})
    end),
    Monitor.

start_look(Known) ->
    {_Pid, Monitor} = spawn_monitor(fun() -> exit({seen, newer(Known)}) end),
    Monitor.

%% Only what is news crosses to this process.
newer(Known) when map_size(Known) =:= 0 ->
    [];
newer(Known) ->
    {ok, Pointers} = rabbitmq_stream_s3_db:list(),
    [
        {StreamId, maps:get(StreamId, Pointers, none)}
     || StreamId := Revision <- Known,
        case Pointers of
            #{StreamId := {_Epoch, _Uid, Now}} -> Now > Revision;
            _ -> Revision < 0
        end
    ].

fetch(StreamId, What) ->
    Reference = make_ref(),
    maybe
        {ok, Engine} ?= rabbitmq_stream_s3:engine(),
        %% Unless it is known there, nothing is published.
        _ = rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId),
        ok ?= rabbitmq_stream_s3_nif:manifest_resolve(Engine, self(), Reference, StreamId, What),
        {ok, Reference}
    else
        undefined -> {error, closed};
        {error, _ClosedOrBug} -> {error, closed}
    end.

apply_edit(StreamId, From, To, Edit) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            %% What another node sends may have any shape.
            try
                rabbitmq_stream_s3_nif:manifest_apply_edit(Engine, StreamId, From, To, Edit)
            catch
                error:badarg -> {error, corrupt, <<"it has a different shape">>}
            end;
        undefined ->
            {error, closed, <<"no engine">>}
    end.

add_work(Reference, Key, #state{work = Work} = State) ->
    State#state{work = Work#{Reference => {Key, erlang:monotonic_time(millisecond)}}}.

answered(Reference, Answer, #state{work = Work, sync = Sync} = State) ->
    case maps:take(Reference, Work) of
        {{Key, _Since}, Rest} ->
            Answered = rabbitmq_stream_s3_manifest_sync:answered(Key, Answer, Sync),
            run(Answered, State#state{work = Rest});
        error ->
            State
    end.

give_up_lost_work(#state{work = Work} = State) ->
    Before = erlang:monotonic_time(millisecond) - ?WORK_LOST_MS,
    Lost = [Reference || Reference := {_Key, Since} <- Work, Since < Before],
    lists:foldl(fun(Reference, S) -> answered(Reference, lost, S) end, State, Lost).

%% Members -----------------------------------------------------------------------------------------

add_member(Role, Pid, #{stream_id := StreamId} = Info, #state{members = Members} = State) ->
    case Members of
        #{StreamId := #member{pid = Pid, role = Role} = Member} ->
            Updated = State#state{members = Members#{StreamId := Member#member{info = Info}}},
            run(rabbitmq_stream_s3_manifest_sync:update(StreamId, Info, State#state.sync), Updated);
        #{StreamId := #member{monitor = Old}} ->
            true = demonitor(Old, [flush]),
            Monitors = maps:remove(Old, State#state.monitors),
            new_member(Role, Pid, Info, State#state{monitors = Monitors});
        _ ->
            new_member(Role, Pid, Info, State)
    end.

new_member(Role, Pid, Info, #state{members = Members, monitors = Monitors, sync = Sync} = State) ->
    #{stream_id := StreamId, dir := Directory} = Info,
    Monitor = monitor(process, Pid),
    Member = #member{pid = Pid, monitor = Monitor, role = Role, info = Info},
    Added = State#state{
        members = Members#{StreamId => Member}, monitors = Monitors#{Monitor => StreamId}
    },
    %% Again: the end of the member before it may have removed them.
    ok = rabbitmq_stream_s3_manifest_cache:set_dir(Directory, StreamId),
    ok = rabbitmq_stream_s3_manifest_cache:set_member(StreamId, Pid),
    ok = rabbitmq_stream_s3_manifest_cache:set_queue(queue(Info), StreamId),
    case Role of
        writer ->
            ok = rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId),
            run(rabbitmq_stream_s3_manifest_sync:remove(StreamId, Sync), Added);
        acceptor ->
            %% Also the range of a writer that writes no more: nobody updates it.
            ok = rabbitmq_stream_s3_manifest_cache:reset(StreamId),
            run(rabbitmq_stream_s3_manifest_sync:add(StreamId, Info, Sync), Added)
    end.

drop_member(StreamId, Pid, #state{members = Members0, sync = Sync} = State) ->
    {#member{info = Info}, Members} = maps:take(StreamId, Members0),
    ok = rabbitmq_stream_s3_manifest_cache:member_ended(Pid, queue(Info), Info),
    run(
        rabbitmq_stream_s3_manifest_sync:remove(StreamId, Sync), State#state{members = Members}
    ).

queue(Info) ->
    maps:get(reference, Info, undefined).
