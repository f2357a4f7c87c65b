-module(rabbitmq_stream_s3_gap).
-moduledoc """
Which gaps between the tiers are certain. The local log begins at a floor, the manifest that this
node knows ends below it: either nobody has what lies between, or the node's manifest is old and the
user's own retention has trimmed the log past its end. A reader goes on at the floor only in the
first case. It is told apart here, on the word of a quorum: the pointer is read, and this node's
manifest is made at least as new as what it names.

Owns a table of rows {StreamId, Floor}: below this floor, what this node's manifest does not have is
gone. That holds for this floor only, and it holds for as long as it is the floor: what is below was
gone from this node's log before the pointer was read (whoever asks has seen the floor), and the
pointer did not cover it. The rows are a cache, which may be emptied at any time.

The same question is asked for readers whose object is gone (rabbitmq_stream_s3_lost): whether this
node's manifest is as new as the pointer was at some time or later. Rows {{current, StreamId}, Since}
say of when the last such pointer is.

Owns the workers that find it out: one for each stream, ?WORKERS_MAX at once. Does not own what is
known of manifests (the engine, rabbitmq_stream_s3_manifest_replica), nor what a reader does
(rabbitmq_stream_s3_tiers, rabbitmq_stream_s3_offset_spec). See docs/decisions/0015.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, is_certain/2, is_current/2, await/3, forget/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

%% In the queue, in work, or at rest after a failure.
-record(stream, {
    %% What has been asked for since the worker began.
    floor :: undefined | osiris:offset(),
    %% Nobody asks for a floor, but for the manifest of now.
    current = false :: boolean(),
    callers = [] :: [{osiris:offset(), gen_server:from()}]
}).
-record(work, {
    stream_id :: stream_id(),
    floor :: undefined | osiris:offset() | forgotten,
    %% Before the pointer was read.
    since :: integer(),
    callers :: [{osiris:offset(), gen_server:from()}]
}).
-record(state, {
    streams = #{} :: #{stream_id() => #stream{}},
    queue = queue:new() :: queue:queue(stream_id()),
    workers = #{} :: #{reference() => #work{}}
}).

-define(TABLE, ?MODULE).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(WORKERS_MAX, 8).
-define(ROWS_MAX, 10_000).
%% Consumers that wait to attach to one stream.
-define(CALLERS_MAX, 1_000).
%% After a failure: readers ask ten times a second.
-define(REST_MS, 1_000).
%% The native deadline is 30 s.
-define(ANSWER_MS, 40_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Whether what this node's manifest does not have below the floor is gone. Never waits: if that is not
known, it is found out, and `false` for now. Whoever is told `true` looks at the manifest again.
""".
-spec is_certain(stream_id(), osiris:offset()) -> boolean().
is_certain(StreamId, Floor) ->
    case is_known(StreamId, Floor) of
        true ->
            true;
        false ->
            ok = gen_server:cast(?MODULE, {verify, StreamId, Floor}),
            false
    end.

-doc """
Whether this node's manifest is at least as new as what the pointer named at this time (of
erlang:monotonic_time/0), or later. Never waits: if that is not known, it is seen to, and `false` for
now.
""".
-spec is_current(stream_id(), Since :: integer()) -> boolean().
is_current(StreamId, Since) ->
    case is_known_since(StreamId, Since) of
        true ->
            true;
        false ->
            ok = gen_server:cast(?MODULE, {renew, StreamId, Since}),
            false
    end.

-doc "As is_certain/2, for who can wait until then.".
-spec await(stream_id(), osiris:offset(), Deadline :: integer()) -> ok | {error, unavailable}.
await(StreamId, Floor, Deadline) ->
    case is_known(StreamId, Floor) of
        true ->
            ok;
        false ->
            Timeout = max(0, Deadline - erlang:monotonic_time(millisecond)),
            try
                gen_server:call(?MODULE, {await, StreamId, Floor}, Timeout)
            catch
                exit:_ -> {error, unavailable}
            end
    end.

-doc "What was found out of this stream counts no more: its log, or what is known, starts over.".
-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    ok = delete(StreamId),
    gen_server:cast(?MODULE, {forget, StreamId}).

is_known(StreamId, Floor) ->
    try ets:lookup(?TABLE, StreamId) of
        [{StreamId, Floor}] -> true;
        _ -> false
    catch
        error:badarg -> false
    end.

is_known_since(StreamId, Since) ->
    try ets:lookup(?TABLE, {current, StreamId}) of
        [{_, Known}] -> Known >= Since;
        [] -> false
    catch
        error:badarg -> false
    end.

delete(StreamId) ->
    try
        true = ets:delete(?TABLE, {current, StreamId}),
        true = ets:delete(?TABLE, StreamId),
        ok
    catch
        error:badarg -> ok
    end.

%% The server --------------------------------------------------------------------------------------

-spec init([]) -> {ok, #state{}}.
init([]) ->
    ?TABLE = ets:new(?TABLE, [named_table, public, set, {read_concurrency, true}]),
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) ->
    {reply, term(), #state{}} | {noreply, #state{}}.
handle_call({await, StreamId, Floor}, From, State) ->
    Stream = #stream{callers = Callers} = stream(StreamId, State),
    case is_known(StreamId, Floor) of
        true ->
            {reply, ok, State};
        false when length(Callers) >= ?CALLERS_MAX ->
            {reply, {error, unavailable}, State};
        false ->
            Asked = Stream#stream{callers = [{Floor, From} | Callers]},
            {noreply, wanted(StreamId, Asked, State)}
    end;
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({verify, StreamId, Floor}, State) ->
    %% By now it may be known, or somebody is about to tell.
    case is_known(StreamId, Floor) orelse is_asked(StreamId, Floor, State) of
        true ->
            {noreply, State};
        false ->
            Stream = stream(StreamId, State),
            {noreply, wanted(StreamId, Stream#stream{floor = Floor}, State)}
    end;
handle_cast({renew, StreamId, Since}, State) ->
    case is_known_since(StreamId, Since) orelse is_renewed(StreamId, Since, State) of
        true ->
            {noreply, State};
        false ->
            Stream = stream(StreamId, State),
            {noreply, wanted(StreamId, Stream#stream{current = true}, State)}
    end;
handle_cast({forget, StreamId}, #state{workers = Workers} = State) ->
    ok = delete(StreamId),
    Forgotten = maps:map(
        fun
            (_, #work{stream_id = Id} = Work) when Id =:= StreamId -> Work#work{floor = forgotten};
            (_, Work) -> Work
        end,
        Workers
    ),
    {noreply, State#state{workers = Forgotten}};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Ref, process, _Pid, Reason}, #state{workers = Workers} = State) when
    is_map_key(Ref, Workers)
->
    {Work, Rest} = maps:take(Ref, Workers),
    {noreply, run(found_out(Reason, Work, State#state{workers = Rest}))};
handle_info({rested, StreamId}, State) ->
    {noreply, run(again(StreamId, stream(StreamId, State), State))};
handle_info(_Unknown, State) ->
    {noreply, State}.

stream(StreamId, #state{streams = Streams}) ->
    maps:get(StreamId, Streams, #stream{}).

is_asked(StreamId, Floor, #state{workers = Workers}) ->
    lists:any(
        fun(#work{stream_id = Id, floor = Of}) -> Id =:= StreamId andalso Of =:= Floor end,
        maps:values(Workers)
    ).

is_renewed(StreamId, Since, #state{workers = Workers}) ->
    lists:any(
        fun(#work{stream_id = Id, since = Of}) -> Id =:= StreamId andalso Of >= Since end,
        maps:values(Workers)
    ).

wanted(StreamId, Stream, #state{streams = Streams, queue = Queue} = State) ->
    Wanted = State#state{streams = Streams#{StreamId => Stream}},
    case Streams of
        #{StreamId := _} -> Wanted;
        _ -> run(Wanted#state{queue = queue:in(StreamId, Queue)})
    end.

run(#state{workers = Workers} = State) when map_size(Workers) >= ?WORKERS_MAX ->
    State;
run(#state{queue = Queue0} = State) ->
    case queue:out(Queue0) of
        {empty, _} -> State;
        {{value, StreamId}, Queue} -> run(start_worker(StreamId, State#state{queue = Queue}))
    end.

%% The answer travels as the exit reason: one message says done, failed or crashed.
-dialyzer({nowarn_function, start_worker/2}).
start_worker(StreamId, #state{streams = Streams, workers = Workers} = State) ->
    #{StreamId := #stream{floor = Asked, callers = Callers}} = Streams,
    %% Each has been seen by who asks, before the pointer is read. Floors only rise: the highest one
    %% is the one that will be asked for again.
    Floor =
        case [F || {F, _} <- Callers] ++ [Asked || Asked =/= undefined] of
            [] -> undefined;
            Floors -> lists:max(Floors)
        end,
    Work = #work{
        stream_id = StreamId,
        floor = Floor,
        since = erlang:monotonic_time(),
        callers = Callers
    },
    {_Pid, Ref} = spawn_monitor(fun() -> exit({certain, verify(StreamId)}) end),
    State#state{
        streams = Streams#{StreamId := #stream{}},
        workers = Workers#{Ref => Work}
    }.

found_out({certain, true}, #work{floor = undefined} = Work, State) ->
    #work{stream_id = StreamId, since = Since} = Work,
    ok = insert({current, StreamId}, Since),
    again(StreamId, stream(StreamId, State), State);
found_out({certain, true}, #work{floor = Floor} = Work, State) when is_integer(Floor) ->
    #work{stream_id = StreamId, callers = Callers, since = Since} = Work,
    ok = insert({current, StreamId}, Since),
    ok = insert(StreamId, Floor),
    ?LOG_DEBUG(
        "stream_s3: ~ts: what the remote tier does not have below offset ~b is gone",
        [StreamId, Floor],
        ?DOMAIN
    ),
    #stream{floor = Asked, callers = Later} = Stream = stream(StreamId, State),
    {Same, Other} = lists:partition(fun({F, _}) -> F =:= Floor end, Later),
    ok = answer(ok, Callers ++ Same),
    Left = [F || F <- [Asked], F =/= undefined, F =/= Floor],
    again(StreamId, Stream#stream{floor = first(Left), callers = Other}, State);
found_out(_FailedOrForgotten, #work{stream_id = StreamId, callers = Callers}, State) ->
    ok = answer({error, unavailable}, Callers),
    _ = erlang:send_after(?REST_MS, self(), {rested, StreamId}),
    State.

first([First | _]) -> First;
first([]) -> undefined.

again(StreamId, #stream{floor = undefined, current = false, callers = []}, #state{streams = Streams} = State) ->
    State#state{streams = maps:remove(StreamId, Streams)};
again(StreamId, Stream, #state{streams = Streams, queue = Queue} = State) ->
    State#state{
        streams = Streams#{StreamId => Stream},
        queue = queue:in(StreamId, Queue)
    }.

answer(Answer, Callers) ->
    lists:foreach(fun({_Floor, From}) -> gen_server:reply(From, Answer) end, Callers).

insert(Question, Answer) ->
    _ = ets:info(?TABLE, size) >= ?ROWS_MAX andalso ets:delete_all_objects(?TABLE),
    true = ets:insert(?TABLE, {Question, Answer}),
    ok.

%% The worker --------------------------------------------------------------------------------------

%% Whether this node's manifest is now as new as what a quorum knows.
verify(StreamId) ->
    case learn(StreamId) of
        %% Two persists were faster than this node: the pointer has moved.
        replaced -> learn(StreamId) =:= true;
        Answer -> Answer
    end.

learn(StreamId) ->
    case rabbitmq_stream_s3_db:get_consistent(StreamId) of
        {ok, Pointer} ->
            learnt(resolve(StreamId, Pointer), StreamId, Pointer);
        not_found ->
            %% Nothing is persisted, so nothing can be missed; but what is known is empty from here
            %% on, and no longer unknown.
            resolve(StreamId, empty) =/= {error, closed};
        {error, _} ->
            false
    end.

learnt({resolved, _Range}, StreamId, Pointer) ->
    %% Not if its writer has said meanwhile that it must not be believed.
    rabbitmq_stream_s3_manifest_replica:published(StreamId, Pointer) =:= ok;
learnt({error, stale, _}, _, _) ->
    true;
learnt({error, written_here, _}, StreamId, {_Epoch, _Uid, Revision}) ->
    %% Its machine publishes, and it alone.
    case rabbitmq_stream_s3_manifest_replica:range(StreamId) of
        {ok, #{revision := Known}} -> Known >= Revision;
        _ -> false
    end;
learnt({error, not_found, _}, _, _) ->
    replaced;
learnt(_FailedOrUnknown, _, _) ->
    false.

resolve(StreamId, What) ->
    Ref = make_ref(),
    maybe
        {ok, Engine} ?= rabbitmq_stream_s3:engine(),
        ok ?= rabbitmq_stream_s3_nif:manifest_resolve(Engine, self(), Ref, StreamId, What),
        receive
            {rabbitmq_stream_s3, Ref, Answer} -> Answer
        after ?ANSWER_MS -> {error, closed}
        end
    else
        _NoEngine -> {error, closed}
    end.
