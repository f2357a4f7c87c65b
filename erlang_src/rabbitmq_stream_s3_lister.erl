-module(rabbitmq_stream_s3_lister).
-moduledoc """
Removes the objects of deleted streams: lists a stream's folder page by page, and asks for the next
page only when the reaper has dealt with the last.

Owns the queue of streams, oldest first, without duplicates. A stream is swept twice, the second
time after a while: an upload that was under way when the queue was deleted may still land. A sweep
that fails is tried again with growing pauses; the queue is not on disk, so what a restart
interrupts stays in the bucket, under a prefix without an anchor.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, delete_stream/1, pending/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

-record(job, {
    stream_id :: stream_id(),
    sweep = first :: first | second,
    attempt = 1 :: pos_integer(),
    deleted = 0 :: non_neg_integer(),
    failed = 0 :: non_neg_integer()
}).
-record(state, {
    queue = queue:new() :: queue:queue(#job{}),
    known = #{} :: #{stream_id() => true},
    job = none :: #job{} | none,
    list_ref :: reference() | undefined,
    next_page = done :: binary() | done,
    request :: gen_server:request_id() | undefined
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(SECOND_SWEEP_MS, 240_000).
-define(LIST_TIMEOUT_MS, 120_000).
-define(RETRY_MIN_MS, 1_000).
-define(RETRY_MAX_MS, 300_000).
-define(ATTEMPTS_MAX, 20).
-define(CALL_MS, 5_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "On this node if the plugin runs here, else on the others; two nodes at it do no harm.".
-spec delete_stream(stream_id()) -> ok.
delete_stream(StreamId) ->
    case whereis(?MODULE) of
        undefined ->
            %% Who calls is Khepri's own process: nothing is waited for.
            Message = {'$gen_cast', {delete_stream, StreamId}},
            lists:foreach(
                fun(Node) -> erlang:send({?MODULE, Node}, Message, [nosuspend, noconnect]) end,
                nodes()
            );
        Pid ->
            gen_server:cast(Pid, {delete_stream, StreamId})
    end.

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
    ?LOG_INFO("stream_s3: stream ~ts was deleted, removing its objects", [StreamId], ?DOMAIN),
    Job = #job{stream_id = StreamId},
    {noreply, enqueue(Job, State#state{known = Known#{StreamId => true}})};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({again, Job}, State) ->
    {noreply, enqueue(Job, State)};
handle_info({rabbitmq_stream_s3, Ref, {page, [], Next}}, #state{list_ref = Ref} = State) ->
    {noreply, page_done(State#state{next_page = Next})};
handle_info({rabbitmq_stream_s3, Ref, {page, Keys, Next}}, #state{list_ref = Ref} = State) ->
    Request = rabbitmq_stream_s3_reaper:delete_request(Keys),
    {noreply, State#state{list_ref = undefined, next_page = Next, request = Request}};
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

enqueue(Job, #state{queue = Queue} = State) ->
    next(State#state{queue = queue:in(Job, Queue)}).

next(#state{job = none, queue = Queue0} = State) ->
    case queue:out(Queue0) of
        {{value, Job}, Queue} -> list(start, State#state{job = Job, queue = Queue});
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
swept(#state{job = #job{stream_id = StreamId, deleted = Deleted}, known = Known} = State) ->
    ok = rabbitmq_stream_s3_counters:add(streams_deleted),
    ?LOG_INFO("stream_s3: removed ~b objects of stream ~ts", [Deleted, StreamId], ?DOMAIN),
    next(State#state{job = none, known = maps:remove(StreamId, Known)}).

failed(Kind, Text, #state{job = #job{attempt = Attempt, stream_id = StreamId} = Job} = State0) ->
    State = State0#state{job = none, list_ref = undefined},
    case Attempt < ?ATTEMPTS_MAX of
        true ->
            Pause = min(?RETRY_MAX_MS, ?RETRY_MIN_MS bsl (Attempt - 1)),
            ?LOG_WARNING(
                "stream_s3: removing the objects of stream ~ts failed (~ts: ~ts), again in ~b ms",
                [StreamId, Kind, Text, Pause],
                ?DOMAIN
            ),
            _ = erlang:send_after(Pause, self(), {again, Job#job{attempt = Attempt + 1}}),
            next(State);
        false ->
            ?LOG_ERROR(
                "stream_s3: giving up on stream ~ts (~ts: ~ts); its objects stay in the bucket",
                [StreamId, Kind, Text],
                ?DOMAIN
            ),
            next(State#state{known = maps:remove(StreamId, State#state.known)})
    end.
