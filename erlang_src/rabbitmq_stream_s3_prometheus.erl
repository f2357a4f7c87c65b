-module(rabbitmq_stream_s3_prometheus).
-moduledoc """
Keeps the collector of metrics registered wherever the `prometheus` library runs on this node.

Owns when it is registered, not what it collects. The plugin depends neither on that library nor on
rabbitmq_prometheus, which opens a port: an operator enables it, before this plugin or after, and may
disable it again. The library's tables end with its supervisor, so that one is monitored, and looked
for while it is not there.
""".

-behaviour(gen_server).

-export([start/0, stop/0, start_link/0, is_registered/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-record(state, {
    %% Of the library's supervisor, while the collector is registered.
    monitor :: reference() | undefined
}).

-define(LIBRARY, prometheus_sup).
-define(LOOK_MS, 500).
-define(CALL_MS, 5_000).

-doc "Under the plugin's supervisor, also while the plugin is inert.".
-spec start() -> ok.
start() ->
    Child = #{id => ?MODULE, start => {?MODULE, start_link, []}, shutdown => 5_000},
    case supervisor:start_child(rabbitmq_stream_s3_sup, Child) of
        {ok, _Pid} -> ok;
        {error, {already_started, _Pid}} -> ok;
        {error, already_present} -> restart()
    end.

-doc "Deregisters: nothing of the plugin is asked for metrics from here on.".
-spec stop() -> ok.
stop() ->
    try
        _ = supervisor:terminate_child(rabbitmq_stream_s3_sup, ?MODULE),
        _ = supervisor:delete_child(rabbitmq_stream_s3_sup, ?MODULE),
        ok
    catch
        exit:_ -> ok
    end.

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "Whether the library is there and knows the collector; for tests.".
-spec is_registered() -> boolean().
is_registered() ->
    try
        gen_server:call(?MODULE, is_registered, ?CALL_MS)
    catch
        exit:_ -> false
    end.

-spec init([]) -> {ok, #state{}}.
init([]) ->
    %% terminate/2 must run: the library would go on asking a collector that is gone.
    process_flag(trap_exit, true),
    {ok, look(#state{})}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(is_registered, _From, #state{monitor = Monitor} = State) ->
    {reply, Monitor =/= undefined, State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(look, State) ->
    {noreply, look(State)};
handle_info({'DOWN', Monitor, process, _Library, _Reason}, #state{monitor = Monitor} = State) ->
    {noreply, look(State#state{monitor = undefined})};
handle_info(_Unknown, State) ->
    {noreply, State}.

-spec terminate(term(), #state{}) -> ok.
terminate(_Reason, #state{monitor = undefined}) ->
    ok;
terminate(_Reason, _Registered) ->
    guarded(fun rabbitmq_stream_s3_prometheus_collector:deregister/0).

look(#state{monitor = undefined} = State) ->
    case whereis(?LIBRARY) of
        undefined -> again(State);
        Library -> register_collector(Library, State)
    end;
look(State) ->
    State.

%% The library's supervisor has its name before it has its tables.
register_collector(Library, State) ->
    Monitor = monitor(process, Library),
    case guarded(fun rabbitmq_stream_s3_prometheus_collector:register/0) of
        ok ->
            State#state{monitor = Monitor};
        not_now ->
            true = demonitor(Monitor, [flush]),
            again(State)
    end.

again(State) ->
    _ = erlang:send_after(?LOOK_MS, self(), look),
    State.

%% The library may end, and its modules may be unloaded, at any moment.
guarded(Fun) ->
    try
        Fun()
    catch
        _:_ -> not_now
    end.

restart() ->
    _ = supervisor:restart_child(rabbitmq_stream_s3_sup, ?MODULE),
    ok.
