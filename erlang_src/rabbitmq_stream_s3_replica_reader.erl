-module(rabbitmq_stream_s3_replica_reader).
-moduledoc """
The process beside a local writer that uploads its stream: a shell around the native machine, which
decides everything.

Owns the native stream, the monitor of the writer, the offset listener, and short-lived tasks that
talk to Khepri (monitored, killed with this process; the process itself never blocks on them). Does
not own: what is read, cut, uploaded or deleted; the manifest that consumers are routed by.

No lost wake-ups: a notification makes it look at the writer's atomics and register again one past
what it saw. The writer answers a registration for what is committed already at once, so there is no
gap between looking and registering. Registering is delayed a little, so that a busy stream costs
its writer a few dozen notifications per second, not thousands.

If the engine goes, this process opens its stream with the next one: all of them at once is no
reason for as many crash reports. Anything else that should not happen is one, and the supervisor
starts anew.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-export([start_link/2, serves/1, republish/1]).
-export([update_retention/2, cut/1, status/1, statuses/0, recovery_text/3]).
-export([
    init/1,
    handle_continue/2,
    handle_call/3,
    handle_cast/2,
    handle_info/2,
    terminate/2
]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
%% An event of docs/NIF_PROTOCOL.md.
-type event() :: {atom(), term()} | {atom(), term(), term()} | cut.
-type task() :: pointer | anchor | pointer_committed.

%% Local trimming moves the floor without a notification. Twice as late each time that nothing has
%% happened; while records come it is looked at with them.
-define(LOOK_AGAIN_MIN_MS, 5_000).
-define(LOOK_AGAIN_MAX_MS, 80_000).

-record(state, {
    stream_id :: stream_id(),
    writer :: pid(),
    info :: rabbitmq_stream_s3:member_info(),
    stream :: rabbitmq_stream_s3_nif:upload() | undefined,
    ref :: reference() | undefined,
    sent :: {integer(), integer()} | undefined,
    %% Whether the writer holds a registration of ours that it has not answered.
    listening = false :: boolean(),
    tasks = #{} :: #{reference() => {task(), pid()}},
    unsent = [] :: [event()],
    range :: rabbitmq_stream_s3:range() | undefined,
    %% Who tells other nodes of it.
    announcer :: pid() | undefined,
    problems = #{} :: #{atom() => binary()},
    look_again_ms = ?LOOK_AGAIN_MIN_MS :: pos_integer()
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(LISTEN_PAUSE_MS, 20).
-define(OPEN_RETRY_MS, 1_000).
-define(BUSY_RETRY_MS, 50).
-define(CALL_MS, 5_000).
%% Whatever holds one announcement up: those behind it do not pile up.
-define(ANNOUNCER_WAIT_MS, 5_000).

-spec start_link(pid(), rabbitmq_stream_s3:member_info()) -> gen_server:start_ret().
start_link(Writer, #{stream_id := StreamId} = Info) ->
    Name = {via, rabbitmq_stream_s3_registry, {StreamId, node()}},
    gen_server:start_link(Name, ?MODULE, {Writer, Info}, []).

-doc "The writer that the reader of a stream is for; `undefined` while it is starting.".
-spec serves(stream_id()) -> pid() | undefined.
serves(StreamId) ->
    case rabbitmq_stream_s3_registry:value({StreamId, node()}) of
        {_Stream, _Reference, Writer} -> Writer;
        undefined -> undefined
    end.

-doc "Puts the range into the cache once more, after the cache was lost.".
-spec republish(pid()) -> ok.
republish(Reader) ->
    gen_server:cast(Reader, republish).

-spec update_retention(pid(), [osiris:retention_spec()]) -> ok.
update_retention(Reader, Specs) ->
    gen_server:cast(Reader, {update_retention, Specs}).

-doc "Cuts what is being assembled now, for operators and tests.".
-spec cut(pid()) -> ok | {error, busy | closed | unavailable}.
cut(Reader) ->
    call(Reader, cut).

-spec status(pid()) -> map() | {error, unavailable}.
status(Reader) ->
    call(Reader, status).

%% Ends at any moment, with its writer.
call(Reader, Request) ->
    try
        gen_server:call(Reader, Request, ?CALL_MS)
    catch
        exit:_ -> {error, unavailable}
    end.

-doc "Native status of every stream of this node, without asking their processes.".
-spec statuses() -> [{stream_id(), Queue :: term(), map()}].
statuses() ->
    [
        {StreamId, Reference, Status}
     || {StreamId, _Pid, {Stream, Reference, _Writer}} <- rabbitmq_stream_s3_registry:values(),
        Stream =/= undefined,
        Status <- [rabbitmq_stream_s3_nif:upload_status(Stream)],
        is_map(Status)
    ].

-spec init({pid(), rabbitmq_stream_s3:member_info()}) -> {ok, #state{}, {continue, open}}.
init({Writer, #{stream_id := StreamId} = Info}) ->
    %% terminate/2 must run: it closes the native stream before a next reader opens one.
    process_flag(trap_exit, true),
    _ = monitor(process, Writer),
    ok = rabbitmq_stream_s3_counters:add(readers_started),
    _ = erlang:send_after(?LOOK_AGAIN_MIN_MS, self(), look_again),
    State = #state{stream_id = StreamId, writer = Writer, info = Info},
    ok = publish(State),
    {ok, State, {continue, open}}.

-spec handle_continue(open, #state{}) -> {noreply, #state{}}.
handle_continue(open, State) ->
    {noreply, open(State)}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(cut, _From, #state{stream = undefined} = State) ->
    {reply, {error, closed}, State};
handle_call(cut, _From, #state{stream = Stream} = State) ->
    {reply, rabbitmq_stream_s3_nif:upload_event(Stream, cut), State};
handle_call(status, _From, State) ->
    {reply, describe(State), State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({update_retention, Specs}, #state{info = Info} = State0) ->
    State = State0#state{info = Info#{retention := Specs}},
    {noreply, send({retention, bounds(Specs)}, State)};
%% From rabbitmq_stream_s3_replica_lag: a replica has caught up.
handle_cast(evaluate_retention, #state{info = Info} = State) ->
    ok = evaluate_local_retention(Info),
    {noreply, State};
%% From rabbitmq_stream_s3_manifest_replica: a node with a replica asks what is persisted.
handle_cast({announce_to, _Node}, #state{range = undefined} = State) ->
    {noreply, State};
handle_cast({announce_to, Node}, #state{range = Range, stream_id = StreamId} = State) ->
    ok = rabbitmq_stream_s3_peers:announce([Node], StreamId, Range, none),
    {noreply, State};
handle_cast(republish, #state{range = undefined} = State) ->
    {noreply, State};
handle_cast(republish, #state{range = Range, stream_id = StreamId} = State) ->
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Range),
    {noreply, State};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) ->
    {noreply, #state{}} | {noreply, #state{}, hibernate} | {stop, term(), #state{}}.
handle_info({osiris_offset, _Reference, _Offset}, State) ->
    _ = erlang:send_after(?LISTEN_PAUSE_MS, self(), listen),
    {noreply, State#state{listening = false}};
handle_info(listen, State) ->
    {noreply, listen(look(State))};
handle_info(look_again, #state{sent = Sent, look_again_ms = Before} = State) ->
    Looked = look(State),
    Ms =
        case Looked of
            #state{sent = Sent} -> min(?LOOK_AGAIN_MAX_MS, 2 * Before);
            _SomethingNew -> ?LOOK_AGAIN_MIN_MS
        end,
    _ = erlang:send_after(Ms, self(), look_again),
    %% A thousand idle streams should not each keep what the start of theirs has needed.
    {noreply, Looked#state{look_again_ms = Ms}, hibernate};
handle_info({rabbitmq_stream_s3, Ref, Push}, #state{ref = Ref} = State) ->
    handle_push(Push, State);
handle_info({'DOWN', _Ref, process, Writer, _Reason}, #state{writer = Writer} = State) ->
    %% A new leader elsewhere, a restart or a deletion: none of them is for this process to judge.
    ?LOG_DEBUG("stream_s3: ~ts: the writer is gone", [State#state.stream_id], ?DOMAIN),
    {stop, normal, State};
handle_info({'DOWN', Ref, process, _Pid, Reason}, #state{tasks = Tasks} = State) when
    is_map_key(Ref, Tasks)
->
    {{Task, _}, Rest} = maps:take(Ref, Tasks),
    {noreply, send({Task, task_result(Task, Reason)}, State#state{tasks = Rest})};
handle_info({'DOWN', _Ref, process, {rabbitmq_stream_s3_api_aws, _}, _Reason}, State) ->
    {noreply, open(lost(State))};
handle_info(open, #state{stream = undefined} = State) ->
    {noreply, open(State)};
handle_info(send_unsent, #state{unsent = Unsent} = State) ->
    {noreply, lists:foldl(fun send/2, State#state{unsent = []}, lists:reverse(Unsent))};
handle_info(_Unknown, State) ->
    {noreply, State}.

-spec terminate(term(), #state{}) -> ok.
terminate(_Reason, #state{stream_id = StreamId, stream = Stream} = State) ->
    ok = stop_tasks(State),
    _ = Stream =/= undefined andalso rabbitmq_stream_s3_nif:upload_close(Stream),
    rabbitmq_stream_s3_registry:unregister_name({StreamId, node()}).

open(#state{info = Info0, stream_id = StreamId, writer = Writer} = State0) ->
    Ref = make_ref(),
    %% A restarted reader has been given what was true when the first one started.
    Info =
        case rabbitmq_stream_s3_manifest_replica:retention(StreamId, Writer) of
            {ok, Current} -> Info0#{retention := Current};
            none -> Info0
        end,
    State = State0#state{info = Info},
    case open_native(Ref, State) of
        {ok, Stream} ->
            %% The engine goes with its owner, and this handle with it.
            _ = monitor(process, rabbitmq_stream_s3_api_aws),
            Opened = State#state{stream = Stream, ref = Ref},
            ok = publish(Opened),
            #{retention := Specs} = Info,
            listen(look(send({retention, bounds(Specs)}, Opened)));
        {error, _NoEngineNow} ->
            _ = erlang:send_after(?OPEN_RETRY_MS, self(), open),
            State
    end.

%% The native stream ends with its engine; closing it as well does no harm if this was not the
%% engine's end.
lost(#state{stream = Stream} = State) ->
    ok = stop_tasks(State),
    _ = Stream =/= undefined andalso rabbitmq_stream_s3_nif:upload_close(Stream),
    Lost = State#state{
        stream = undefined,
        ref = undefined,
        sent = undefined,
        tasks = #{},
        unsent = [],
        problems = #{}
    },
    ok = publish(Lost),
    Lost.

stop_tasks(#state{tasks = Tasks}) ->
    lists:foreach(
        fun({Monitor, {_Task, Pid}}) ->
            true = demonitor(Monitor, [flush]),
            true = exit(Pid, kill)
        end,
        maps:to_list(Tasks)
    ).

open_native(Ref, #state{stream_id = StreamId, info = #{dir := Dir, epoch := Epoch} = Info}) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            {VHost, Queue} = queue(Info),
            rabbitmq_stream_s3_nif:upload_open(Engine, self(), Ref, #{
                stream_id => StreamId,
                directory => rabbitmq_stream_s3:utf8(Dir),
                epoch => Epoch,
                queue => Queue,
                vhost => VHost,
                arguments => arguments(Info)
            });
        undefined ->
            {error, closed}
    end.

%% For metrics and the reconciler, which must not wait for this process.
publish(#state{stream_id = StreamId, stream = Stream, info = Info, writer = Writer}) ->
    #{reference := Reference} = Info,
    rabbitmq_stream_s3_registry:set_value({StreamId, node()}, {Stream, Reference, Writer}).

queue(#{reference := #resource{virtual_host = VHost, name = Name}}) -> {VHost, Name};
queue(#{stream_id := StreamId}) -> {<<>>, StreamId}.

arguments(#{reference := #resource{kind = queue} = QName}) ->
    case rabbit_amqqueue:lookup(QName) of
        {ok, Queue} ->
            rabbitmq_stream_s3_host_declare:encode_arguments(amqqueue:get_arguments(Queue));
        {error, not_found} ->
            <<>>
    end;
arguments(_NotOfRabbit) ->
    <<>>.

handle_push(read_pointer, #state{stream_id = StreamId} = State) ->
    {noreply, start_task(pointer, fun() -> read_pointer(StreamId) end, State)};
handle_push(write_anchor, #state{stream_id = StreamId, info = #{reference := QName}} = State) ->
    Task = fun() -> rabbitmq_stream_s3_db:put_anchor(StreamId, QName) end,
    {noreply, start_task(anchor, Task, State)};
handle_push({commit_pointer, Epoch, Uid, Next, Revision}, State) ->
    #state{stream_id = StreamId, info = #{reference := QName}} = State,
    Task = fun() ->
        rabbitmq_stream_s3_db:commit_pointer(StreamId, QName, Epoch, Uid, Next, Revision)
    end,
    {noreply, start_task(pointer_committed, Task, State)};
handle_push({range, Range, Edit}, #state{stream_id = StreamId, info = Info} = State) ->
    %% In this order: the evaluation goes by the row.
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Range),
    ok = evaluate_local_retention(Info),
    Announcer = announce(Range, Edit, State),
    {noreply, State#state{range = Range, announcer = Announcer}};
handle_push({recovery, Kind, From, To}, #state{stream_id = StreamId} = State) ->
    ok = rabbitmq_stream_s3_counters:add(recovery_counter(Kind)),
    ok = rabbitmq_stream_s3_counters:add(lost_records, lost_records(Kind, From, To)),
    ?LOG_WARNING("stream_s3: ~ts: ~ts", [StreamId, recovery_text(Kind, From, To)], ?DOMAIN),
    {noreply, State};
handle_push({abandoned, RootKey, First, Next}, #state{stream_id = StreamId} = State) ->
    ?LOG_ERROR(
        "stream_s3: ~ts: history is given up: part of offsets ~b to ~b is proven to be gone from the"
        " bucket, or damaged there, and the rest cannot be joined to the local log without it. No"
        " object is deleted: ~ts names them, and is shown by stream_s3_status",
        [StreamId, First, Next - 1, RootKey],
        ?DOMAIN
    ),
    {noreply, State};
handle_push({problem, Kind, Text}, #state{stream_id = StreamId, problems = Problems} = State) ->
    ok = rabbitmq_stream_s3_counters:add(stream_problems),
    ?LOG_WARNING("stream_s3: ~ts: ~ts: ~ts", [StreamId, Kind, Text], ?DOMAIN),
    {noreply, State#state{problems = Problems#{Kind => Text}}};
handle_push({recovered, Kind}, #state{stream_id = StreamId, problems = Problems} = State) ->
    ?LOG_INFO("stream_s3: ~ts: problem cleared: ~ts", [StreamId, Kind], ?DOMAIN),
    {noreply, State#state{problems = maps:remove(Kind, Problems)}};
handle_push({stopped, deleted}, #state{stream_id = StreamId} = State) ->
    ?LOG_INFO("stream_s3: ~ts: the queue was deleted, uploads end", [StreamId], ?DOMAIN),
    ok = rabbitmq_stream_s3_manifest_cache:forget(StreamId),
    {stop, normal, State};
handle_push({stopped, conflict_lost}, #state{stream_id = StreamId} = State) ->
    ?LOG_INFO(
        "stream_s3: ~ts: a writer of a higher epoch uploads the stream now; this node stops",
        [StreamId],
        ?DOMAIN
    ),
    {stop, normal, State};
handle_push({stopped, Reason}, State) ->
    {stop, {native_stream_stopped, Reason}, State};
handle_push(Unknown, State) ->
    {stop, {unknown_push, Unknown}, State}.

evaluate_local_retention(#{stream_id := StreamId} = Info) ->
    Member = rabbitmq_stream_s3_manifest_cache:member(StreamId),
    rabbitmq_stream_s3_host_retention:evaluate(Info, Member).

%% What is committed, and where the local log starts, as the writer publishes it.
look(#state{stream = undefined} = State) ->
    State;
look(#state{info = #{shared := Shared}, sent = Sent} = State) ->
    First = osiris_log_shared:first_chunk_id(Shared),
    Committed = osiris_log_shared:committed_chunk_id(Shared),
    case {Committed, First} of
        Sent -> State;
        Seen -> send({committed, Committed, First}, State#state{sent = Seen})
    end.

listen(#state{listening = true} = State) ->
    State;
listen(#state{sent = Sent, writer = Writer} = State) ->
    Committed =
        case Sent of
            undefined -> -1;
            {Seen, _First} -> Seen
        end,
    %% Overrides the formatter of the queue's own listeners, which would wrap the event. Not a
    %% function of ours: the writer calls it, maybe after the plugin has been disabled and its
    %% modules are gone.
    Formatter = {osiris_util, id, []},
    ok = osiris:register_offset_listener(Writer, Committed + 1, Formatter),
    State#state{listening = true}.

-dialyzer({nowarn_function, start_task/3}).
start_task(Task, Fun, #state{tasks = Tasks} = State) ->
    %% The answer travels as the exit reason: one message says done, failed or crashed.
    {Pid, Ref} = spawn_monitor(fun() -> exit({task_result, Fun()}) end),
    State#state{tasks = Tasks#{Ref => {Task, Pid}}}.

%% In a process of its own: the queue's record may have to be asked for. One after the other: an edit
%% that overtakes the one before it is of no use.
announce(Range, Edit, #state{info = #{reference := #resource{kind = queue} = QName}} = State) ->
    #state{stream_id = StreamId, announcer = Before} = State,
    spawn(fun() ->
        Nodes = member_nodes(QName),
        ok = await_end(Before),
        rabbitmq_stream_s3_peers:announce(Nodes, StreamId, Range, Edit)
    end);
announce(_Range, _Edit, _NotOfRabbit) ->
    undefined.

await_end(undefined) ->
    ok;
await_end(Announcer) ->
    Monitor = monitor(process, Announcer),
    receive
        {'DOWN', Monitor, process, Announcer, _Reason} -> ok
    after ?ANNOUNCER_WAIT_MS -> ok
    end.

%% Not known now: the other nodes look themselves.
member_nodes(QName) ->
    try rabbit_amqqueue:lookup(QName) of
        {ok, Queue} -> maps:get(nodes, amqqueue:get_type_state(Queue), []);
        {error, _} -> []
    catch
        _:_ -> []
    end.

read_pointer(StreamId) ->
    rabbitmq_stream_s3_db:get_consistent(StreamId).

task_result(pointer, {task_result, {ok, {Epoch, Uid, Revision}}}) -> {ok, Epoch, Uid, Revision};
task_result(pointer, {task_result, not_found}) -> not_found;
task_result(anchor, {task_result, ok}) -> ok;
task_result(pointer_committed, {task_result, Result}) -> Result;
task_result(_Task, _FailedOrCrashed) -> error.

send(_Event, #state{stream = undefined} = State) ->
    %% Opening sends what there is to know.
    State;
send(Event, #state{stream = Stream, unsent = []} = State) ->
    case rabbitmq_stream_s3_nif:upload_event(Stream, Event) of
        ok -> State;
        {error, busy} -> later(Event, State);
        %% Its last push or the end of its engine is under way and says why.
        {error, closed} -> State
    end;
send(Event, State) ->
    later(Event, State).

later(Event, #state{unsent = []} = State) ->
    _ = erlang:send_after(?BUSY_RETRY_MS, self(), send_unsent),
    State#state{unsent = [Event]};
later(Event, #state{unsent = Unsent} = State) ->
    State#state{unsent = [Event | Unsent]}.

bounds(Specs) ->
    maps:from_list([bound(Spec) || {Kind, _} = Spec <- Specs, Kind =/= 'fun']).

bound({max_bytes, Bytes}) -> {max_bytes, Bytes};
bound({max_age, Ms}) -> {max_age_ms, Ms}.

describe(#state{stream = Stream, info = Info, writer = Writer} = State) ->
    #{epoch := Epoch, dir := Dir, retention := Retention} = Info,
    Native =
        case Stream of
            undefined -> #{};
            _ -> native_status(rabbitmq_stream_s3_nif:upload_status(Stream))
        end,
    Lag = rabbitmq_stream_s3_replica_lag:of_stream(State#state.stream_id),
    Lag#{
        stream_id => State#state.stream_id,
        node => node(),
        writer => Writer,
        epoch => Epoch,
        directory => rabbitmq_stream_s3:utf8(Dir),
        retention => Retention,
        problems => State#state.problems,
        range => State#state.range,
        metadata_store_tasks => maps:size(State#state.tasks),
        native => Native
    }.

native_status(#{} = Status) -> Status;
native_status({error, _}) -> #{}.

recovery_counter(local_log_ahead) -> local_log_ahead_recoveries;
recovery_counter(remote_tier_ahead) -> remote_tier_ahead_recoveries.

%% What was uploaded and is given up is uploaded again; what was not uploaded and is gone is lost.
lost_records(local_log_ahead, From, To) -> max(0, To - From);
lost_records(remote_tier_ahead, _From, _To) -> 0.

-doc false.
-spec recovery_text(local_log_ahead | remote_tier_ahead, osiris:offset(), osiris:offset()) ->
    unicode:chardata().
recovery_text(local_log_ahead, From, To) when From < To ->
    io_lib:format(
        "local_log_ahead: retention dropped offsets ~b to ~b from the local log before they were"
        " uploaded. The remote tier starts anew at ~b and gives up what it has below",
        [From, To - 1, To]
    );
recovery_text(local_log_ahead, _From, To) ->
    io_lib:format("local_log_ahead: the remote tier starts anew at offset ~b", [To]);
recovery_text(remote_tier_ahead, From, To) when To < From ->
    io_lib:format(
        "remote_tier_ahead: the local log, which decides, has lost its end and is not what was"
        " uploaded. What is below offset ~b stays in the remote tier; offsets ~b to ~b of it are"
        " given up, and uploaded again as far as the local log has them",
        [To, To, From - 1]
    );
recovery_text(remote_tier_ahead, _From, To) ->
    io_lib:format(
        "remote_tier_ahead: the local log, which decides, is not what was uploaded. What is below"
        " offset ~b stays in the remote tier; the rest is uploaded again",
        [To]
    ).
