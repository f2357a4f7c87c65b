-module(rabbitmq_stream_s3_governor).
-moduledoc """
Owner of this node's transfer rate. The token bucket itself is native; this process only says how
fast it fills, when the plugin starts, when an operator changes it, and again whenever the engine is
opened anew.
""".

-behaviour(gen_server).

-export([start_link/0, set_rate/2, rate/0, engine_opened/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type rate() :: unlimited | pos_integer().
-type burst() :: default | pos_integer().

-record(state, {rate :: rate(), burst :: burst()}).

-define(CALL_MS, 5_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "Changes the rate until the plugin is restarted; the configuration is not touched.".
-spec set_rate(rate(), burst()) -> ok | {error, unavailable}.
set_rate(Rate, Burst) ->
    call({set_rate, Rate, Burst}).

-spec rate() -> {rate(), burst()} | {error, unavailable}.
rate() ->
    call(rate).

call(Request) ->
    try
        gen_server:call(?MODULE, Request, ?CALL_MS)
    catch
        exit:_ -> {error, unavailable}
    end.

-spec engine_opened() -> ok.
engine_opened() ->
    gen_server:cast(?MODULE, engine_opened).

-spec init([]) -> {ok, #state{}}.
init([]) ->
    State = #state{
        rate = rabbitmq_stream_s3_config:get(max_transfer_bytes_per_sec),
        burst = rabbitmq_stream_s3_config:get(max_transfer_burst_bytes)
    },
    ok = apply_rate(State),
    {ok, State}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call({set_rate, Rate, Burst}, _From, State0) ->
    State = State0#state{rate = Rate, burst = Burst},
    {reply, apply_rate(State), State};
handle_call(rate, _From, #state{rate = Rate, burst = Burst} = State) ->
    {reply, {Rate, Burst}, State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast(engine_opened, State) ->
    ok = apply_rate(State),
    {noreply, State};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(_Unknown, State) ->
    {noreply, State}.

apply_rate(#state{rate = Rate, burst = Burst}) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} -> rabbitmq_stream_s3_nif:engine_set_rate(Engine, Rate, Burst);
        undefined -> ok
    end.
