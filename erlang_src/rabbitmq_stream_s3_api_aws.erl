-module(rabbitmq_stream_s3_api_aws).
-moduledoc """
Owner of the native engine: runtime, S3 client with its credentials and connections, manifests of
this node.

Opens it, publishes the handle for everybody, asks the bucket now and then whether it is there,
closes it. Never keeps a secret: what it passes to `engine_open` is not in its state, its messages
or its log. If this process dies, the engine closes itself, and the readers of streams open theirs
anew with the next one.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, bucket_status/0, bucket_success_ms/0, stats/0, request_durations/0]).
-export([next_probe_ms/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-export_type([access/0]).

-type access() :: unknown | accessible | {inaccessible, Kind :: atom(), Text :: binary()}.

-record(state, {
    engine :: rabbitmq_stream_s3:engine(),
    engine_ref :: reference(),
    probe_ref :: reference() | undefined
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(FIRST_PROBE_MS, 100).
-define(RETRY_PROBE_MS, 5_000).
-define(PROBE_ANSWER_MS, 60_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "What the last check of the bucket said; from a table, so nobody who asks has to wait.".
-spec bucket_status() -> access().
bucket_status() ->
    published(access, unknown).

-doc "When the check of the bucket last succeeded, by this node's clock; 0 if never.".
-spec bucket_success_ms() -> non_neg_integer().
bucket_success_ms() ->
    published(success_ms, 0).

published(Key, Default) ->
    try
        ets:lookup_element(?MODULE, Key, 2, Default)
    catch
        error:badarg -> Default
    end.

-doc "Every node-wide counter and gauge of the native side; empty without an engine.".
-spec stats() -> #{atom() => integer()}.
stats() ->
    of_engine(fun rabbitmq_stream_s3_nif:engine_stats/1).

-doc "How long requests took, by operation; empty without an engine.".
-spec request_durations() -> #{atom() => [non_neg_integer()]}.
request_durations() ->
    of_engine(fun rabbitmq_stream_s3_nif:engine_request_durations/1).

of_engine(Ask) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            case Ask(Engine) of
                #{} = Answer -> Answer;
                {error, _} -> #{}
            end;
        undefined ->
            #{}
    end.

-spec init([]) -> {ok, #state{}} | {stop, term()}.
init([]) ->
    %% terminate/2 must run, or the broker would keep a handle of an engine that is no more.
    process_flag(trap_exit, true),
    ?MODULE = ets:new(?MODULE, [named_table, protected, {read_concurrency, true}]),
    Ref = make_ref(),
    case open(Ref) of
        {ok, Engine} ->
            ok = rabbitmq_stream_s3:set_engine(Engine),
            %% After a crash: the new engine knows of no stream, and unknown must not look like
            %% empty.
            ok = lists:foreach(
                fun(StreamId) -> rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId) end,
                rabbitmq_stream_s3_manifest_cache:streams()
            ),
            ok = rabbitmq_stream_s3_manifest_replica:engine_opened(),
            ok = rabbitmq_stream_s3_governor:engine_opened(),
            _ = schedule_probe(?FIRST_PROBE_MS),
            {ok, #state{engine = Engine, engine_ref = Ref}};
        {error, {Kind, Text}} ->
            {stop, {engine_open_failed, Kind, Text}}
    end.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(probe, #state{engine = Engine} = State) ->
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:engine_probe(Engine, self(), Ref),
    %% Also the deadline of an answer that never comes: a late one has another reference.
    _ = schedule_probe(?PROBE_ANSWER_MS, Ref),
    {noreply, State#state{probe_ref = Ref}};
handle_info({probe_deadline, Ref}, #state{probe_ref = Ref} = State) ->
    _ = schedule_probe(0),
    {noreply, State#state{probe_ref = undefined}};
handle_info({rabbitmq_stream_s3, Ref, {probe, Answer}}, #state{probe_ref = Ref} = State) ->
    ok = rabbitmq_stream_s3_counters:add(bucket_checks),
    ok = note(access(Answer), bucket_status()),
    _ = [publish(success_ms, os:system_time(millisecond)) || Answer =:= ok],
    _ = next_probe(),
    {noreply, State#state{probe_ref = undefined}};
handle_info(
    {rabbitmq_stream_s3, Ref, {log, Level, Message, Fields}}, #state{engine_ref = Ref} = State
) ->
    ok = rabbitmq_stream_s3_native_log:line(Level, Message, Fields),
    {noreply, State};
handle_info({rabbitmq_stream_s3, Ref, {collect, Pid}}, #state{engine_ref = Ref} = State) ->
    %% Memory to read into is short, and a process that rests keeps as garbage what it was handed.
    _ = erlang:garbage_collect(Pid, [{async, Ref}]),
    {noreply, State};
handle_info(_Unknown, State) ->
    {noreply, State}.

-spec terminate(term(), #state{}) -> ok.
terminate(_Reason, #state{engine = Engine}) ->
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = rabbitmq_stream_s3_nif:engine_close(Engine).

%% A badarg would carry its arguments, with the secrets among them, into the crash report.
open(Ref) ->
    try
        Config = rabbitmq_stream_s3_native_log:configure(rabbitmq_stream_s3_config:engine_config()),
        rabbitmq_stream_s3_nif:engine_open(self(), Ref, Config)
    catch
        error:badarg -> {error, {badarg, <<"the native library does not take this configuration">>}}
    end.

access(ok) -> accessible;
access({error, Kind, Text}) -> {inaccessible, Kind, Text}.

%% One line per change: an outage of a day is two lines.
note(Access, Access) ->
    ok;
note(accessible, _Before) ->
    ?LOG_INFO("stream_s3: bucket ~ts is accessible", [bucket()], ?DOMAIN),
    publish(access, accessible);
note({inaccessible, Kind, _} = Access, {inaccessible, Kind, _}) ->
    publish(access, Access);
note({inaccessible, Kind, Text} = Access, _Before) ->
    ?LOG_ERROR(
        "stream_s3: bucket ~ts is not accessible (~ts): ~ts. Streams work from the local disk, uploads"
        " wait; the broker tries the bucket again by itself",
        [bucket(), Kind, Text],
        ?DOMAIN
    ),
    publish(access, Access).

publish(Key, Value) ->
    true = ets:insert(?MODULE, {Key, Value}),
    ok.

next_probe() ->
    Interval = rabbitmq_stream_s3_config:get(bucket_check_interval_ms),
    case next_probe_ms(Interval, bucket_status()) of
        never -> ok;
        AfterMs -> schedule_probe(AfterMs)
    end.

%% "Only at the start" is until it was accessible once: what is inaccessible now would be shown so
%% for ever.
-doc false.
-spec next_probe_ms(non_neg_integer(), access()) -> never | pos_integer().
next_probe_ms(0, accessible) -> never;
next_probe_ms(0, _) -> ?RETRY_PROBE_MS;
next_probe_ms(Interval, accessible) -> Interval;
next_probe_ms(Interval, _) -> min(Interval, ?RETRY_PROBE_MS).

schedule_probe(AfterMs) ->
    erlang:send_after(AfterMs, self(), probe).

schedule_probe(AfterMs, Ref) ->
    erlang:send_after(AfterMs, self(), {probe_deadline, Ref}).

bucket() ->
    rabbitmq_stream_s3_config:get(bucket).
