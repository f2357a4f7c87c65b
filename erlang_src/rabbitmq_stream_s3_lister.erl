-module(rabbitmq_stream_s3_lister).
-moduledoc """
Removes the objects of deleted streams: lists a stream's folder page by page, and asks for the next
page only when the reaper has dealt with the last.

Owns the queue of streams, oldest first, without duplicates. Before a sweep a quorum of the metadata
store is asked, for all that have come meanwhile at once: only what has neither a container nor a
queue there is deleted. What has one is called off, and without an answer nothing happens but asking
again. A stream is swept twice, the second time after a while: an upload that was under way when the
queue was deleted may still land. It is done when a listing from the front has found nothing. A sweep
that fails is tried again with growing pauses, for as long as it takes. The queue is not on disk: what
a restart interrupts is reported again (rabbitmq_stream_s3_deleted_streams).
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, pending/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

-record(job, {
    stream_id :: stream_id(),
    sweep = first :: first | second,
    attempt = 1 :: pos_integer(),
    %% Objects that this sweep has found.
    found = 0 :: non_neg_integer(),
    deleted = 0 :: non_neg_integer(),
    failed = 0 :: non_neg_integer()
}).
-record(state, {
    %% Of which it has not been asked yet whether they are gone, newest first.
    doubtful = [] :: [#job{}],
    %% Asks: about these.
    asked = [] :: [#job{}],
    task :: reference() | undefined,
    is_pausing = false :: boolean(),
    queue = queue:new() :: queue:queue(#job{}),
    known = #{} :: #{stream_id() => true},
    job = none :: #job{} | none,
    list_ref :: reference() | undefined,
    next_page = done :: binary() | done,
    request :: gen_server:request_id() | undefined
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(SECOND_SWEEP_MS, 240_000).
%% From the report to the question: what is deleted and written again is back by then, and streams that
%% are deleted together are asked about together.
-define(LOOK_MS, 1_000).
-define(LOOK_AGAIN_MS, 10_000).
%% Each question looks through all queues.
-define(LOOK_MAX, 100).
-define(LIST_TIMEOUT_MS, 120_000).
-define(RETRY_MIN_MS, 1_000).
-define(RETRY_MAX_MS, 300_000).
-define(DOUBLINGS_MAX, 20).
-define(CALL_MS, 5_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "Streams whose objects are still to be removed.".
-spec pending() -> [stream_id()] | {error, unavailable}.
pending() ->
    try
        gen_server:call(?MODULE, pending, ?CALL_MS)
    catch
        exit:_ -> {error, unavailable}
    end.

-spec init([]) -> {ok, #state{}}.
init([]) ->
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(pending, _From, #state{known = Known} = State) ->
    {reply, maps:keys(Known), State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({delete_stream, StreamId}, #state{known = Known} = State) when
    is_map_key(StreamId, Known)
->
    {noreply, State};
handle_cast({delete_stream, StreamId}, #state{known = Known} = State) ->
    ?LOG_INFO("stream_s3: stream ~ts is reported as deleted", [StreamId], ?DOMAIN),
    Job = #job{stream_id = StreamId},
    {noreply, begin_after_grace(Job, State#state{known = Known#{StreamId => true}})};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({again, Job}, State) ->
    {noreply, doubt(Job, State)};
handle_info(ask, #state{} = State) ->
    {noreply, ask(State#state{is_pausing = false})};
handle_info({'DOWN', Task, process, _Pid, Reason}, #state{task = Task} = State) ->
    {noreply, answered(Reason, State#state{task = undefined})};
handle_info({rabbitmq_stream_s3, Ref, {page, [], Next}}, #state{list_ref = Ref} = State) ->
    {noreply, page_done(State#state{next_page = Next})};
handle_info({rabbitmq_stream_s3, Ref, {page, Keys, Next}}, #state{list_ref = Ref} = State) ->
    Request = rabbitmq_stream_s3_reaper:delete_request(Keys),
    {noreply, found(length(Keys), State#state{next_page = Next, request = Request})};
handle_info({rabbitmq_stream_s3, Ref, {error, Kind, Text}}, #state{list_ref = Ref} = State) ->
    {noreply, failed(Kind, Text, State)};
handle_info({list_timeout, Ref}, #state{list_ref = Ref} = State) ->
    {noreply, failed(timeout, <<"no answer to a listing">>, State)};
handle_info(_LateOrUnknown, #state{request = undefined} = State) ->
    {noreply, State};
handle_info(Message, #state{request = Request, job = Job} = State0) ->
    case gen_server:check_response(Message, Request) of
        {reply, {ok, Deleted, Failed}} ->
            #job{deleted = D, failed = F} = Job,
            State = State0#state{
                request = undefined, job = Job#job{deleted = D + Deleted, failed = F + Failed}
            },
            {noreply, page_done(State)};
        {error, {_Reason, _Reaper}} ->
            {noreply, failed(reaper, <<"the reaper is gone">>, State0#state{request = undefined})};
        no_reply ->
            {noreply, State0}
    end.

%% Only delays: what is asked before a sweep is asked after it.
begin_after_grace(Job, State) ->
    case rabbitmq_stream_s3_config:get(delete_grace_ms) of
        0 ->
            doubt(Job, State);
        GraceMs ->
            _ = erlang:send_after(GraceMs, self(), {again, Job}),
            State
    end.

found(Count, #state{job = #job{found = Found} = Job} = State) ->
    State#state{list_ref = undefined, job = Job#job{found = Found + Count}}.

doubt(Job, #state{doubtful = Doubtful} = State) ->
    ask_after(?LOOK_MS, State#state{doubtful = [Job | Doubtful]}).

ask_after(Ms, #state{is_pausing = false, task = undefined} = State) ->
    _ = erlang:send_after(Ms, self(), ask),
    State#state{is_pausing = true};
ask_after(_Ms, State) ->
    State.

%% The answer travels as the exit reason: one message says done, failed or crashed.
-dialyzer({nowarn_function, ask/1}).
ask(#state{doubtful = [_ | _] = Doubtful, task = undefined} = State) ->
    Oldest = lists:reverse(Doubtful),
    {Asked, Rest} = lists:split(min(length(Oldest), ?LOOK_MAX), Oldest),
    StreamIds = [StreamId || #job{stream_id = StreamId} <- Asked],
    {_Pid, Task} = spawn_monitor(fun() -> exit({gone, rabbitmq_stream_s3_db:gone(StreamIds)}) end),
    State#state{asked = Asked, doubtful = lists:reverse(Rest), task = Task};
ask(State) ->
    State.

answered({gone, {ok, Gone}}, #state{asked = Asked} = State0) ->
    State1 = lists:foldl(
        fun(#job{stream_id = StreamId} = Job, State) ->
            case lists:member(StreamId, Gone) of
                true -> enqueue(Job, State);
                false -> call_off(StreamId, State)
            end
        end,
        State0#state{asked = []},
        Asked
    ),
    case State1 of
        #state{doubtful = []} -> State1;
        _ -> ask_after(?LOOK_MS, State1)
    end;
answered(Unknown, #state{asked = Asked, doubtful = Doubtful} = State) ->
    ?LOG_DEBUG(
        "stream_s3: the metadata store does not say yet whether streams are gone: ~0p",
        [Unknown],
        ?DOMAIN
    ),
    Again = State#state{asked = [], doubtful = Doubtful ++ lists:reverse(Asked)},
    ask_after(?LOOK_AGAIN_MS, Again).

call_off(StreamId, #state{known = Known} = State) ->
    ok = rabbitmq_stream_s3_counters:add(deletions_called_off),
    ?LOG_WARNING(
        "stream_s3: ~ts: was reported as deleted, but the metadata store still has it. Nothing of it"
        " is removed from the bucket",
        [StreamId],
        ?DOMAIN
    ),
    State#state{known = maps:remove(StreamId, Known)}.

enqueue(Job, #state{queue = Queue} = State) ->
    next(State#state{queue = queue:in(Job, Queue)}).

next(#state{job = none, queue = Queue0} = State) ->
    case queue:out(Queue0) of
        {{value, Job}, Queue} -> list(start, State#state{job = Job#job{found = 0}, queue = Queue});
        {empty, _} -> State
    end;
next(State) ->
    State.

list(Token, #state{job = #job{stream_id = StreamId}} = State) ->
    Ref = make_ref(),
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            _ = erlang:send_after(?LIST_TIMEOUT_MS, self(), {list_timeout, Ref}),
            case rabbitmq_stream_s3_nif:list_objects(Engine, self(), Ref, StreamId, Token) of
                ok -> State#state{list_ref = Ref};
                {error, Kind} -> failed(Kind, <<"the engine did not take the request">>, State)
            end;
        undefined ->
            failed(closed, <<"there is no engine">>, State)
    end.

page_done(#state{next_page = done, job = #job{failed = Failed} = Job} = State) when Failed > 0 ->
    failed(partial, <<"some objects could not be deleted">>, State#state{
        job = Job#job{failed = 0}
    });
page_done(#state{next_page = done} = State) ->
    swept(State#state{list_ref = undefined});
page_done(#state{next_page = Token} = State) ->
    list(Token, State#state{list_ref = undefined}).

swept(#state{job = #job{sweep = first} = Job} = State) ->
    _ = erlang:send_after(
        ?SECOND_SWEEP_MS, self(), {again, Job#job{sweep = second, attempt = 1}}
    ),
    next(State#state{job = none});
swept(#state{job = #job{found = Found} = Job} = State) when Found > 0 ->
    _ = erlang:send_after(?LOOK_AGAIN_MS, self(), {again, Job#job{attempt = 1}}),
    next(State#state{job = none});
swept(#state{job = #job{stream_id = StreamId, deleted = Deleted}, known = Known} = State) ->
    ok = rabbitmq_stream_s3_counters:add(streams_deleted),
    %% If this does not come to its end, the stream is swept again, and has nothing.
    _ = spawn(fun() -> rabbitmq_stream_s3_db_register:remove(StreamId) end),
    ?LOG_INFO("stream_s3: removed ~b objects of stream ~ts", [Deleted, StreamId], ?DOMAIN),
    next(State#state{job = none, known = maps:remove(StreamId, Known)}).

failed(Kind, Text, #state{job = #job{attempt = Attempt, stream_id = StreamId} = Job} = State) ->
    Pause = min(?RETRY_MAX_MS, ?RETRY_MIN_MS bsl min(Attempt - 1, ?DOUBLINGS_MAX)),
    ?LOG_WARNING(
        "stream_s3: removing the objects of the deleted stream ~ts failed (~ts: ~ts). They stay in the"
        " bucket until it works; the next try is in ~b ms",
        [StreamId, Kind, Text, Pause],
        ?DOMAIN
    ),
    _ = erlang:send_after(Pause, self(), {again, Job#job{attempt = Attempt + 1}}),
    next(State#state{job = none, list_ref = undefined}).
