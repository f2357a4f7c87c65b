-module(rabbitmq_stream_s3_reaper).
-moduledoc """
Deletes objects by key, in batches of at most 1000, one batch at a time.

Owns the queue of keys and the batch in flight. Objects that retention or a persist has superseded
are deleted by the native stream itself; here come those of deleted streams. Failures are counted,
not retried: whoever lists the prefix next finds what is left.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, delete/1, delete_request/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type keys() :: [binary()].
-type result() :: {ok, Deleted :: non_neg_integer(), Failed :: non_neg_integer()}.

-export_type([result/0]).

-record(job, {
    from :: gen_server:from() | none,
    keys :: keys(),
    deleted = 0 :: non_neg_integer(),
    failed = 0 :: non_neg_integer()
}).
-record(state, {
    queue = queue:new() :: queue:queue(#job{}),
    job = none :: #job{} | none,
    ref :: reference() | undefined,
    batch = 0 :: non_neg_integer()
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(BATCH_KEYS_MAX, 1000).
-define(BATCH_TIMEOUT_MS, 60_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "Deletes at some time.".
-spec delete(keys()) -> ok.
delete(Keys) ->
    gen_server:cast(?MODULE, {delete, Keys}).

-doc "Answers `t:result/0` when all keys have been tried: listing must not outrun deleting.".
-spec delete_request(keys()) -> gen_server:request_id().
delete_request(Keys) ->
    gen_server:send_request(?MODULE, {delete, Keys}).

-spec init([]) -> {ok, #state{}}.
init([]) ->
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) ->
    {noreply, #state{}} | {reply, term(), #state{}}.
handle_call({delete, Keys}, From, State) ->
    {noreply, enqueue(#job{from = From, keys = Keys}, State)};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({delete, Keys}, State) ->
    {noreply, enqueue(#job{from = none, keys = Keys}, State)};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({rabbitmq_stream_s3, Ref, {deleted, Deleted, Failed}}, #state{ref = Ref} = State) ->
    {noreply, batch_done(Deleted, Failed, State)};
handle_info({rabbitmq_stream_s3, Ref, {error, Kind, Text}}, #state{ref = Ref} = State) ->
    #state{batch = Batch} = State,
    ?LOG_WARNING("stream_s3: cannot delete ~b objects (~ts): ~ts", [Batch, Kind, Text], ?DOMAIN),
    {noreply, batch_done(0, Batch, State)};
handle_info({batch_timeout, Ref}, #state{ref = Ref, batch = Batch} = State) ->
    ?LOG_WARNING("stream_s3: no answer to the deletion of ~b objects", [Batch], ?DOMAIN),
    {noreply, batch_done(0, Batch, State)};
handle_info(_LateOrUnknown, State) ->
    {noreply, State}.

enqueue(Job, #state{queue = Queue} = State) ->
    next(State#state{queue = queue:in(Job, Queue)}).

next(#state{job = none, queue = Queue0} = State) ->
    case queue:out(Queue0) of
        {{value, Job}, Queue} -> next_batch(State#state{job = Job, queue = Queue});
        {empty, _} -> State
    end;
next(State) ->
    State.

next_batch(#state{job = #job{keys = []} = Job} = State) ->
    #job{deleted = Deleted, failed = Failed, from = From} = Job,
    ok = rabbitmq_stream_s3_counters:add(deleted_stream_objects, Deleted),
    ok = rabbitmq_stream_s3_counters:add(deleted_stream_objects_failed, Failed),
    _ = From =/= none andalso gen_server:reply(From, {ok, Deleted, Failed}),
    next(State#state{job = none});
next_batch(#state{job = #job{keys = Keys} = Job} = State0) ->
    {Batch, Rest} = lists:split(min(length(Keys), ?BATCH_KEYS_MAX), Keys),
    Ref = make_ref(),
    State = State0#state{job = Job#job{keys = Rest}, ref = Ref, batch = length(Batch)},
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            _ = erlang:send_after(?BATCH_TIMEOUT_MS, self(), {batch_timeout, Ref}),
            case rabbitmq_stream_s3_nif:delete_objects(Engine, self(), Ref, Batch) of
                ok -> State;
                {error, _BusyOrClosed} -> batch_done(0, length(Batch), State)
            end;
        undefined ->
            batch_done(0, length(Batch), State)
    end.

batch_done(Deleted, Failed, #state{job = #job{deleted = D, failed = F} = Job} = State) ->
    next_batch(State#state{
        job = Job#job{deleted = D + Deleted, failed = F + Failed}, ref = undefined, batch = 0
    }).
