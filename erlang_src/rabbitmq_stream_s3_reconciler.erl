-module(rabbitmq_stream_s3_reconciler).
-moduledoc """
Attaches the local members of streams: those that a hook announces, those that were there when the
plugin started, and, every minute, those whose reader has parked or was lost. The same round has the
manifests of replicas compared with the metadata store.

In the same rounds, in a task of their own because the metadata store may take its time: registers
the trigger that reports deleted streams, until that has worked, and looks for those that were deleted
without a report (rabbitmq_stream_s3_deleted_streams). A trigger is lost with its node, and not
every Khepri can have one.

Owns which writer's reader is waited for before the next one may start. Started last, so that what it
starts finds its dependencies. In the steady state a round does nothing but look. No member is asked
anything, since one that hangs would be waited for; what a round needs of the metadata store is read in
its task.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-export([start_link/0, reconcile/0]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2]).

-define(CHILDREN_MS, 5_000).
%% Members of which something was not known yet, as their retention.
-define(FIND_AGAIN_MIN_MS, 1_000).
-define(FIND_AGAIN_MAX_MS, 60_000).

-record(state, {
    %% Monitor of a reader that must end first => the writer that comes after it.
    waiting = #{} :: #{reference() => {pid(), rabbitmq_stream_s3:member_info()}},
    task :: reference() | undefined,
    %% Reads the retention of members that no hook has told of.
    finding :: reference() | undefined,
    %% When it looks for those again of which too little was known; doubles.
    find_again :: reference() | undefined,
    find_again_ms = ?FIND_AGAIN_MIN_MS :: pos_integer(),
    trigger = unknown :: unknown | ok | unsupported | {error, term()}
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "A round now, when the hooks have just been attached.".
-spec reconcile() -> ok.
reconcile() ->
    gen_server:cast(?MODULE, reconcile).

-spec init([]) -> {ok, #state{}, {continue, discover}}.
init([]) ->
    {ok, #state{}, {continue, discover}}.

-spec handle_continue(discover, #state{}) -> {noreply, #state{}}.
handle_continue(discover, State) ->
    _ = schedule(),
    {noreply, look_for_deleted(look_at_all(State))}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({attach, Role, Pid, Info}, State) ->
    {noreply, attach(Role, Pid, Info, State)};
handle_cast({update_retention, StreamId, Pid, Specs}, #state{waiting = Waiting0} = State) ->
    ok = rabbitmq_stream_s3_manifest_replica:update_retention(StreamId, Pid, Specs),
    case rabbitmq_stream_s3_registry:whereis_name({StreamId, node()}) of
        undefined -> ok;
        Reader -> rabbitmq_stream_s3_replica_reader:update_retention(Reader, Specs)
    end,
    Waiting = maps:map(
        fun
            (_, {Writer, Info}) when Writer =:= Pid -> {Writer, Info#{retention := Specs}};
            (_, Other) -> Other
        end,
        Waiting0
    ),
    {noreply, State#state{waiting = Waiting}};
handle_cast(reconcile, State) ->
    {noreply, look_for_deleted(look_at_all(State))};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(tick, State) ->
    _ = schedule(),
    {noreply, look_for_deleted(look_at_all(State))};
handle_info(find_again, State) ->
    {noreply, look_at_all(State#state{find_again = undefined})};
handle_info({'DOWN', Task, process, _Pid, Reason}, #state{task = Task, trigger = Before} = State) ->
    case Reason of
        {looked, Trigger} ->
            ok = log_trigger(Trigger, Before),
            {noreply, State#state{task = undefined, trigger = Trigger}};
        _Crashed ->
            {noreply, State#state{task = undefined}}
    end;
handle_info({'DOWN', Finding, process, _Pid, Reason}, #state{finding = Finding} = State0) ->
    {Found, State} =
        case Reason of
            {found, Infos, NotNow} -> {Infos, find_again(NotNow, State0)};
            _Crashed -> {[], State0}
        end,
    %% Meanwhile a hook may have told. If that is not known now, the next round finds them again.
    case rabbitmq_stream_s3_manifest_replica:members() of
        {ok, Known} ->
            Members = [
                {Role, Pid, told(Role, Pid, Info, Known)}
             || {Role, Pid, Info} <- Found,
                %% One that has ended meanwhile must not take the place of the next.
                is_process_alive(Pid)
            ],
            {noreply, attach_all(Members, State#state{finding = undefined})};
        {error, unavailable} ->
            {noreply, State#state{finding = undefined}}
    end;
handle_info({'DOWN', Monitor, process, _Reader, _Reason}, #state{waiting = Waiting} = State) ->
    case maps:take(Monitor, Waiting) of
        {{Writer, Info}, Rest} ->
            {noreply, attach(writer, Writer, Info, State#state{waiting = Rest})};
        error ->
            {noreply, State}
    end;
handle_info(_Unknown, State) ->
    {noreply, State}.

schedule() ->
    Interval = rabbitmq_stream_s3_config:get(reconciliation_interval_ms),
    erlang:send_after(Interval, self(), tick).

look_at_all(State) ->
    case rabbitmq_stream_s3:mode() of
        active ->
            ok = rabbitmq_stream_s3_manifest_replica:look(),
            case rabbitmq_stream_s3_manifest_replica:members() of
                {ok, Known} -> look_at_members(Known, State);
                %% It starts anew and asks for a round itself, or has its hands full.
                {error, unavailable} -> State
            end;
        _NotYet ->
            State
    end.

look_at_members(Known, State) ->
    {Told, New} = lists:partition(fun({_, _, Info}) -> is_map(Info) end, [
        {Role, Pid, told(Role, Pid, Row, Known)}
     || {Role, Pid, Row} <- local_members()
    ]),
    find(New, attach_all(Told, State)).

-dialyzer({nowarn_function, look_for_deleted/1}).
look_for_deleted(#state{task = undefined, trigger = Trigger0} = State) ->
    {_Pid, Task} = spawn_monitor(fun() ->
        Trigger =
            case Trigger0 of
                ok -> ok;
                _ -> rabbitmq_stream_s3_db:register_trigger()
            end,
        ok = rabbitmq_stream_s3_deleted_streams:look(),
        exit({looked, Trigger})
    end),
    State#state{task = Task};
look_for_deleted(StillLooking) ->
    StillLooking.

log_trigger(Trigger, Trigger) ->
    ok;
log_trigger(ok, _Before) ->
    ok;
log_trigger(unsupported, _Before) ->
    ?LOG_INFO(
        "stream_s3: this version of the metadata store has no safe triggers; deleted streams are found"
        " in each round instead",
        [],
        ?DOMAIN
    );
log_trigger({error, Reason}, _Before) ->
    ?LOG_WARNING(
        "stream_s3: the trigger for deleted streams cannot be registered yet: ~0p",
        [Reason],
        ?DOMAIN
    ).

%% Roles are known by the supervisor, logs by the table that osiris keeps for readers. A member that
%% is in one of them only is just starting or ending.
local_members() ->
    Rows = #{element(1, Row) => Row || Row <- rabbitmq_stream_s3_host_osiris:members()},
    try
        [
            {role(Module), Pid, Row}
         || {_Id, Pid, _Type, [Module]} <- children(),
            Module =:= osiris_writer orelse Module =:= osiris_replica,
            #{Pid := Row} <- [Rows]
        ]
    catch
        exit:_ -> []
    end.

%% As supervisor:which_children/1, which waits for ever: a member that opens a long log holds it up.
children() ->
    gen_server:call(osiris_server_sup, which_children, ?CHILDREN_MS).

role(osiris_writer) -> writer;
role(osiris_replica) -> acceptor.

%% What a hook has told, or a change of policy, is better than what can be found.
told(Role, Pid, Found, Known) ->
    StreamId =
        case Found of
            #{stream_id := Id} -> Id;
            {_Pid, _Dir, Name, _Shared, _Reference} -> rabbitmq_stream_s3:stream_id(Name)
        end,
    case Known of
        #{StreamId := {Role, Pid, Info}} -> Info;
        _ -> Found
    end.

attach_all(Members, State) ->
    lists:foldl(fun({Role, Pid, Info}, Acc) -> attach(Role, Pid, Info, Acc) end, State, Members).

-dialyzer({nowarn_function, find/2}).
find([_ | _] = New, #state{finding = undefined} = State) ->
    {_Pid, Finding} = spawn_monitor(fun() ->
        Infos = [
            {Role, Pid, Info}
         || {Role, Pid, Row} <- New, {ok, Info} <- [found(Role, Row)]
        ],
        exit({found, Infos, length(New) - length(Infos)})
    end),
    State#state{finding = Finding};
find(_NoneOrStillFinding, State) ->
    State.

find_again(0, State) ->
    State#state{find_again_ms = ?FIND_AGAIN_MIN_MS};
find_again(_NotNow, #state{find_again = undefined, find_again_ms = Ms} = State) ->
    State#state{
        find_again = erlang:send_after(Ms, self(), find_again),
        find_again_ms = min(?FIND_AGAIN_MAX_MS, 2 * Ms)
    };
find_again(_NotNow, State) ->
    State.

found(Role, {Pid, Dir, Name, Shared, Reference}) ->
    Module =
        case Role of
            writer -> osiris_writer;
            acceptor -> osiris_replica
        end,
    try {osiris_counters:fetch({Module, Reference}), user_retention(Reference)} of
        {Counter, {ok, Retention}} when Counter =/= undefined ->
            {ok, #{
                stream_id => rabbitmq_stream_s3:stream_id(Name),
                name => Name,
                dir => Dir,
                shared => Shared,
                counter => Counter,
                reference => Reference,
                epoch => epoch(Role, {Module, Reference}),
                retention => Retention
            }};
        _NotKnownNow ->
            not_now
    catch
        Class:Reason ->
            ?LOG_DEBUG(
                "stream_s3: a member does not answer, the next round tries again: ~0p",
                [{Role, Pid, Class, Reason}],
                ?DOMAIN
            ),
            not_now
    end.

%% A member that runs has its epoch in its counters; only a writer's matters.
epoch(writer, Id) ->
    #{epoch := Epoch} = osiris_counters:overview(Id),
    true = Epoch > 0,
    Epoch;
epoch(acceptor, _Id) ->
    0.

%% A queue that is not found has a member all the same: this node's records of queues are still being
%% read. Its retention is unknown, which is not none, and the member is found again later.
user_retention(#resource{kind = queue} = QName) ->
    case rabbit_amqqueue:lookup(QName) of
        {ok, Queue} ->
            #{retention := Retention} = rabbit_stream_queue:update_stream_conf(Queue, #{}),
            {ok, Retention};
        {error, not_found} ->
            unknown
    end;
user_retention(_NotOfRabbit) ->
    {ok, []}.

attach(writer, Writer, #{stream_id := StreamId, dir := Dir} = Info, State) ->
    ok = rabbitmq_stream_s3_manifest_cache:set_dir(Dir, StreamId),
    ok = rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId),
    ok = rabbitmq_stream_s3_manifest_replica:register_member(writer, Writer, Info),
    case is_process_alive(Writer) of
        true -> start_reader(Writer, Info, State);
        false -> State
    end;
attach(acceptor, Replica, #{stream_id := StreamId, dir := Dir} = Info, State) ->
    ok = rabbitmq_stream_s3_manifest_cache:set_dir(Dir, StreamId),
    ok = rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId),
    ok = rabbitmq_stream_s3_manifest_replica:register_member(acceptor, Replica, Info),
    State.

start_reader(Writer, #{stream_id := StreamId} = Info, State) ->
    case rabbitmq_stream_s3_registry:whereis_name({StreamId, node()}) of
        undefined ->
            case rabbitmq_stream_s3_replica_reader_sup:start_reader(Writer, Info) of
                ok ->
                    %% Only now: the writer of every round would be no news.
                    ok = rabbitmq_stream_s3_membership_reconciliation:trigger({writer, StreamId}),
                    State;
                {error, Reason} ->
                    ?LOG_WARNING(
                        "stream_s3: ~ts: the upload could not be started, the next round tries again: ~0p",
                        [StreamId, Reason],
                        ?DOMAIN
                    ),
                    State
            end;
        Reader ->
            wait_for(Reader, Writer, Info, State)
    end.

%% The reader of a writer that has just died may not have noticed yet.
wait_for(Reader, Writer, #{stream_id := StreamId} = Info, #state{waiting = Waiting} = State) ->
    IsWaiting = lists:keymember(Writer, 1, maps:values(Waiting)),
    case rabbitmq_stream_s3_replica_reader:serves(StreamId) of
        Writer ->
            case rabbitmq_stream_s3_manifest_cache:range(StreamId) of
                {ok, _} -> ok;
                _Lost -> rabbitmq_stream_s3_replica_reader:republish(Reader)
            end,
            State;
        _Previous when IsWaiting ->
            State;
        _Previous ->
            Monitor = monitor(process, Reader),
            State#state{waiting = Waiting#{Monitor => {Writer, Info}}}
    end.
