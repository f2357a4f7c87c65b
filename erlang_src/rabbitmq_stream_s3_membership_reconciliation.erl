-module(rabbitmq_stream_s3_membership_reconciliation).
-moduledoc """
Gives streams the members that they should have, and takes those away whose nodes have left the
cluster; off unless `stream_s3.membership_reconciliation.enabled` is set. Each node does so for the
streams that are written on it, with what stock RabbitMQ has for it: `add_replica`, `delete_replica`.

Owns when it is looked: in intervals, and a little after something that may have changed the answer
(a node, a policy, or a writer that has come to this node: who had it before may have been about to). Does not own what is done: rabbitmq_stream_s3_membership decides. A round runs
in a task, because cluster and coordinator may take their time; one at a time.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-export([start_link/0, trigger/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-record(state, {
    timer :: reference() | undefined,
    task :: reference() | undefined,
    %% Something has happened during the round.
    again = false :: boolean(),
    %% What the last round waited for: said once.
    waiting = [] :: [rabbitmq_stream_s3_membership:why()]
}).

-define(STREAMS, rabbit_stream_queue).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
%% Each change restarts a stream: not all streams of a node at once.
-define(CHANGES_PER_ROUND_MAX, 16).
%% Everything in it has a time limit; all together should not be without one.
-define(ROUND_MAX_MS, 600_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "Something has happened that may ask for another member here. Not enabled: nothing comes of it.".
-spec trigger(term()) -> ok.
trigger(Reason) ->
    gen_server:cast(?MODULE, {trigger, Reason}).

-spec init([]) -> {ok, #state{}} | ignore.
init([]) ->
    case rabbitmq_stream_s3_config:get(membership_enabled) of
        true ->
            ok = net_kernel:monitor_nodes(true),
            ok = rabbitmq_stream_s3_membership_policy:listen(self()),
            %% Not at once: the node may just be starting, and its streams with it.
            {ok, schedule(membership_trigger_interval_ms, #state{})};
        false ->
            ignore
    end.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({trigger, Reason}, State) ->
    {noreply, soon(Reason, State)};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(look, State) ->
    {noreply, start_round(State#state{timer = undefined})};
handle_info({overdue, Task, Pid}, #state{task = Task} = State) ->
    true = exit(Pid, kill),
    {noreply, State};
handle_info({nodeup, Node}, State) ->
    {noreply, soon({nodeup, Node}, State)};
handle_info({nodedown, Node}, State) ->
    {noreply, soon({nodedown, Node}, State)};
handle_info({'DOWN', Task, process, _Pid, Reason}, #state{task = Task, again = Again} = State0) ->
    {Changed, Waiting} =
        case Reason of
            {round, Result} ->
                Result;
            Crashed ->
                ?LOG_WARNING("stream_s3: membership: the round failed: ~0p", [Crashed], ?DOMAIN),
                {1, []}
        end,
    ok = log_waiting(Waiting -- State0#state.waiting),
    State = State0#state{task = undefined, again = false, waiting = Waiting},
    case Changed > 0 orelse Again orelse Waiting =/= [] of
        true -> {noreply, schedule(membership_trigger_interval_ms, State)};
        false -> {noreply, schedule(membership_interval_ms, State)}
    end;
handle_info(_Unknown, State) ->
    {noreply, State}.

%% Later events do not put it off: something that keeps happening must not keep it from being done.
soon(Reason, #state{task = undefined} = State) ->
    ?LOG_DEBUG("stream_s3: membership: a round starts soon: ~0p", [Reason], ?DOMAIN),
    schedule(membership_trigger_interval_ms, State);
soon(_Reason, State) ->
    State#state{again = true}.

schedule(Setting, #state{timer = Timer} = State) ->
    Ms = rabbitmq_stream_s3_config:get(Setting),
    case Timer =/= undefined andalso erlang:read_timer(Timer) of
        Left when is_integer(Left), Left =< Ms ->
            State;
        _ ->
            _ = Timer =/= undefined andalso erlang:cancel_timer(Timer),
            State#state{timer = erlang:send_after(Ms, self(), look)}
    end.

%% The result travels as the exit reason: one message says done or crashed.
-dialyzer({nowarn_function, start_round/1}).
start_round(#state{task = undefined} = State) ->
    {Pid, Task} = spawn_monitor(fun() -> exit({round, round()}) end),
    _ = erlang:send_after(?ROUND_MAX_MS, self(), {overdue, Task, Pid}),
    State#state{task = Task};
start_round(State) ->
    State#state{again = true}.

%% The round --------------------------------------------------------------------------------------

round() ->
    ok = rabbitmq_stream_s3_counters:add(membership_rounds),
    Streams = rabbit_amqqueue:list_local_stream_queues(),
    Cluster = cluster(),
    lists:foldl(
        fun(Queue, {Changes, Waiting}) ->
            case Changes < ?CHANGES_PER_ROUND_MAX andalso step(Cluster, Queue) of
                false -> {Changes, Waiting};
                none -> {Changes, Waiting};
                {wait, Why} -> {Changes, lists:usort([Why | Waiting])};
                changed -> {Changes + 1, Waiting}
            end
        end,
        {0, []},
        [Queue || Queue <- Streams, is_written_here(Queue)]
    ).

%% The queue's record follows its writer with some delay. Too many are asked for rather than one too
%% few: the coordinator has the last word.
is_written_here(Queue) ->
    #{name := StreamId} = amqqueue:get_type_state(Queue),
    Name = {rabbitmq_stream_s3:stream_id(StreamId), node()},
    rabbitmq_stream_s3_registry:whereis_name(Name) =/= undefined orelse
        case amqqueue:get_pid(Queue) of
            Pid when is_pid(Pid) -> node(Pid) =:= node();
            _ -> false
        end.

cluster() ->
    Members =
        case rabbit_nodes:list_consistent_members() of
            %% A node that is alone is its own member; none at all is no answer.
            [] -> unknown;
            Nodes -> Nodes
        end,
    Running = rabbit_nodes:list_running(),
    #{
        self => node(),
        members => Members,
        running => Running,
        connected => nodes(connected),
        drained => [Node || Node <- Running, rabbit_maintenance:is_being_drained_local_read(Node)],
        load => load(),
        auto_remove => rabbitmq_stream_s3_config:get(membership_auto_remove)
    }.

load() ->
    lists:foldl(
        fun(Node, Load) -> maps:update_with(Node, fun(Count) -> Count + 1 end, 1, Load) end,
        #{},
        lists:append([recorded(Queue) || Queue <- rabbit_amqqueue:list_by_type(?STREAMS)])
    ).

step(Cluster, Queue) ->
    Stream = #{recorded => recorded(Queue), coordinated => unknown, target => target(Queue)},
    case rabbitmq_stream_s3_membership:worth_asking(Cluster, Stream) of
        true ->
            Asked = Stream#{coordinated => coordinated(Queue)},
            act(rabbitmq_stream_s3_membership:decide(Cluster, Asked), Queue, Asked);
        false ->
            none
    end.

recorded(Queue) ->
    maps:get(nodes, amqqueue:get_type_state(Queue), []).

coordinated(Queue) ->
    #{name := StreamId} = amqqueue:get_type_state(Queue),
    try rabbit_stream_coordinator:members(StreamId) of
        {ok, Members} -> Members;
        {error, _} -> unknown
    catch
        _:_ -> unknown
    end.

target(Queue) ->
    max(
        rabbitmq_stream_s3_config:get(membership_target_group_size),
        rabbitmq_stream_s3_membership_policy:target_size(Queue)
    ).

act({add, Node}, Queue, #{recorded := Recorded, target := Target}) ->
    #resource{virtual_host = VHost, name = Name} = QName = amqqueue:get_name(Queue),
    Outcome = attempt(fun() -> rabbit_stream_queue:add_replica(VHost, Name, Node) end),
    Text = io_lib:format("a replica on ~ts is added to ~b, the target is ~b", [
        Node, length(Recorded), Target
    ]),
    done(Outcome, membership_replicas_added, QName, Text);
act({remove, Node}, Queue, _Stream) ->
    #resource{virtual_host = VHost, name = Name} = QName = amqqueue:get_name(Queue),
    Outcome = attempt(fun() -> rabbit_stream_queue:delete_replica(VHost, Name, Node) end),
    Text = io_lib:format("the replica on ~ts is removed, which has left the cluster", [Node]),
    done(Outcome, membership_replicas_removed, QName, Text);
act(Other, _Queue, _Stream) ->
    Other.

%% RabbitMQ crashes its caller when the coordinator does not answer.
attempt(Change) ->
    try
        Change()
    catch
        Class:Reason -> {error, {Class, Reason}}
    end.

done(ok, Counter, QName, Text) ->
    ok = rabbitmq_stream_s3_counters:add(Counter),
    ?LOG_INFO("stream_s3: membership: ~ts: ~ts", [rabbit_misc:rs(QName), Text], ?DOMAIN),
    changed;
done(Refused, _Counter, QName, Text) ->
    ok = rabbitmq_stream_s3_counters:add(membership_changes_refused),
    Args = [rabbit_misc:rs(QName), Text, Refused],
    ?LOG_INFO("stream_s3: membership: ~ts: ~ts: refused: ~0p", Args, ?DOMAIN),
    changed.

log_waiting([]) ->
    ok;
log_waiting(Waiting) ->
    ?LOG_INFO("stream_s3: membership: streams wait for a change: ~0p", [Waiting], ?DOMAIN).
