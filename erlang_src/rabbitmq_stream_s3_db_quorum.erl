-module(rabbitmq_stream_s3_db_quorum).
-moduledoc """
Turns at asking the metadata store for what only a quorum can say: at most ?AT_ONCE of this node at
once, the others wait in the order in which they came. When a node starts, or a leader fails, each of
its streams asks within the same second; Khepri's leader has queues to declare meanwhile.

Owns the turns and who waits for one; does not ask anything itself. Who is asked for by `run/1` runs
in the caller, which loses its turn when it ends. Nobody waits longer for a turn than a question may
take: then it is as if the store had not answered, and the caller asks again when it thinks fit.
""".

-behaviour(gen_server).

-export([start_link/0, run/1, overview/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-record(state, {
    %% Monitors of those whose turn it is.
    running = #{} :: #{reference() => []},
    %% Of those that wait, and when they have waited too long.
    queue = queue:new() :: queue:queue(reference()),
    waiting = #{} :: #{reference() => {gen_server:from(), Timer :: reference()}}
}).

-define(AT_ONCE, 32).
-define(WAIT_MS, 30_000).
-define(CALL_MS, 5_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "What the function gives, when it is its turn. Blocks: for tasks, not for servers.".
-spec run(fun(() -> Result)) -> Result | {error, timeout}.
run(Ask) ->
    case turn() of
        {ok, Turn} ->
            try
                Ask()
            after
                gen_server:cast(?MODULE, {done, Turn})
            end;
        not_running ->
            Ask();
        timeout ->
            {error, timeout}
    end.

-doc "How many have their turn, and how many wait.".
-spec overview() -> #{running := non_neg_integer(), waiting := non_neg_integer()}.
overview() ->
    try
        gen_server:call(?MODULE, overview, ?CALL_MS)
    catch
        exit:_ -> #{running => 0, waiting => 0}
    end.

%% The server ends the wait itself: an answer that comes late would be a turn that nobody has.
turn() ->
    try
        gen_server:call(?MODULE, turn, infinity)
    catch
        exit:{noproc, _} -> not_running;
        exit:_ -> timeout
    end.

-spec init([]) -> {ok, #state{}}.
init([]) ->
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) ->
    {reply, term(), #state{}} | {noreply, #state{}}.
handle_call(turn, {Caller, _Tag} = From, #state{running = Running} = State) ->
    Monitor = monitor(process, Caller),
    case map_size(Running) < ?AT_ONCE of
        true ->
            {reply, {ok, Monitor}, State#state{running = Running#{Monitor => []}}};
        false ->
            ok = rabbitmq_stream_s3_counters:add(metadata_reads_queued),
            Timer = erlang:send_after(?WAIT_MS, self(), {waited, Monitor}),
            #state{queue = Queue, waiting = Waiting} = State,
            {noreply, State#state{
                queue = queue:in(Monitor, Queue), waiting = Waiting#{Monitor => {From, Timer}}
            }}
    end;
handle_call(overview, _From, #state{running = Running, waiting = Waiting} = State) ->
    {reply, #{running => map_size(Running), waiting => map_size(Waiting)}, State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({done, Monitor}, State) ->
    true = demonitor(Monitor, [flush]),
    {noreply, ended(Monitor, State)};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Monitor, process, _Caller, _Reason}, State) ->
    {noreply, ended(Monitor, State)};
handle_info({waited, Monitor}, #state{waiting = Waiting} = State) ->
    case maps:take(Monitor, Waiting) of
        {{From, _Timer}, Rest} ->
            true = demonitor(Monitor, [flush]),
            ok = gen_server:reply(From, timeout),
            {noreply, State#state{waiting = Rest}};
        error ->
            {noreply, State}
    end;
handle_info(_Unknown, State) ->
    {noreply, State}.

ended(Monitor, #state{running = Running, waiting = Waiting} = State) ->
    case Waiting of
        #{Monitor := {_From, Timer}} ->
            _ = erlang:cancel_timer(Timer),
            State#state{waiting = maps:remove(Monitor, Waiting)};
        _ ->
            next(State#state{running = maps:remove(Monitor, Running)})
    end.

%% Those who have waited too long, or have ended, are still in the queue.
next(#state{running = Running, queue = Queue0, waiting = Waiting} = State) when
    map_size(Running) < ?AT_ONCE
->
    case queue:out(Queue0) of
        {empty, _} ->
            State;
        {{value, Monitor}, Queue} ->
            case maps:take(Monitor, Waiting) of
                {{From, Timer}, Rest} ->
                    _ = erlang:cancel_timer(Timer),
                    ok = gen_server:reply(From, {ok, Monitor}),
                    next(State#state{
                        running = Running#{Monitor => []}, queue = Queue, waiting = Rest
                    });
                error ->
                    next(State#state{queue = Queue})
            end
    end;
next(State) ->
    State.
