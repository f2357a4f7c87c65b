-module(rabbitmq_stream_s3_reader_gap).
-moduledoc """
Which gaps between the tiers are certain. The local log begins at a floor, the manifest that this
node knows ends below it: either nobody has what lies between, or the node's manifest is old and the
user's own retention has trimmed the log past its end. A reader continues at the floor only in the
first case. This process determines which it is, on the word of a quorum: it reads the pointer, and
makes this node's manifest at least as new as what the pointer names.

A proof holds for one floor, and as long as that is the floor: what is below was gone from this node's
log before the pointer was read (the caller has seen the floor), and the pointer did not cover it.

Readers whose object is gone (rabbitmq_stream_s3_reader_lost) ask the same question: whether this node's
manifest is as new as the pointer was at some time or later.

Owns the workers that make the proofs: one for each stream, ?WORKERS_MAX at once. Does not own the proofs
(rabbitmq_stream_s3_manifest_cache), what is known of manifests (the engine), nor what a reader does
(rabbitmq_stream_s3_reader_tier, rabbitmq_stream_s3_reader_start). See docs/decisions/0015.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, is_certain/2, is_current/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

%% Queued, in work, or resting after a failure. What has been asked for since the worker began:
-record(stream, {
    floor :: undefined | osiris:offset(),
    %% Nobody asks for a floor, but for the manifest of now.
    current = false :: boolean()
}).
-record(work, {
    stream_id :: stream_id(),
    floor :: undefined | osiris:offset() | forgotten,
    %% Before the pointer was read.
    since :: integer()
}).
-record(state, {
    streams = #{} :: #{stream_id() => #stream{}},
    queue = queue:new() :: queue:queue(stream_id()),
    workers = #{} :: #{reference() => #work{}},
    %% In a row, of streams whose last proof failed.
    failures = #{} :: #{stream_id() => pos_integer()}
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(WORKERS_MAX, 8).
%% After a failure: readers ask ten times a second.
-define(REST_MS, 1_000).
%% So many failures in a row belong into the log: readers have waited for some seconds.
-define(FAILURES_SAID, 5).
%% Beyond this the counts start again.
-define(FAILURES_MAX, 10_000).
%% The native deadline is 30 s.
-define(ANSWER_MS, 40_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Whether what this node's manifest does not have below the floor is in neither tier. Never waits: if that
is not known, a proof is begun and the answer is `false` for now. After `true` the caller reads the
manifest again: the proof may have brought a newer one.
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
erlang:monotonic_time/0), or later. Never waits: if that is not known, the manifest is renewed and the
answer is `false` for now.
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

is_known(StreamId, Floor) ->
    rabbitmq_stream_s3_manifest_cache:gap_floor(StreamId) =:= {ok, Floor}.

is_known_since(StreamId, Since) ->
    case rabbitmq_stream_s3_manifest_cache:current_since(StreamId) of
        {ok, Known} -> Known >= Since;
        none -> false
    end.

%% The server --------------------------------------------------------------------------------------

-spec init([]) -> {ok, #state{}}.
init([]) ->
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({verify, StreamId, Floor}, State) ->
    %% By now it may be known, or a worker is about to say it.
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
    %% A worker may have ended, and its proof been put, since the sender dropped the proofs.
    ok = rabbitmq_stream_s3_manifest_cache:disprove(StreamId),
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
    {noreply, run(verified(Reason, Work, State#state{workers = Rest}))};
handle_info({rested, StreamId}, State) ->
    {noreply, run(requeue(StreamId, stream(StreamId, State), State))};
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
    %% The caller has seen the floor before the pointer is read. Floors only rise: the last one asked
    %% for is the one that will be asked for again.
    #{StreamId := #stream{floor = Floor}} = Streams,
    Work = #work{stream_id = StreamId, floor = Floor, since = erlang:monotonic_time()},
    {_Pid, Ref} = spawn_monitor(fun() -> exit({certain, verify(StreamId)}) end),
    State#state{
        streams = Streams#{StreamId := #stream{}},
        workers = Workers#{Ref => Work}
    }.

verified({certain, true}, #work{floor = undefined} = Work, State) ->
    #work{stream_id = StreamId, since = Since} = Work,
    ok = rabbitmq_stream_s3_manifest_cache:set_current_since(StreamId, Since),
    requeue(StreamId, stream(StreamId, State), succeeded(StreamId, State));
verified({certain, true}, #work{floor = Floor} = Work, State0) when is_integer(Floor) ->
    #work{stream_id = StreamId, since = Since} = Work,
    State = succeeded(StreamId, State0),
    ok = rabbitmq_stream_s3_manifest_cache:set_current_since(StreamId, Since),
    ok = rabbitmq_stream_s3_manifest_cache:set_gap_floor(StreamId, Floor),
    ?LOG_DEBUG(
        "stream_s3: ~ts: what the remote tier does not have below offset ~b is gone",
        [StreamId, Floor],
        ?DOMAIN
    ),
    case stream(StreamId, State) of
        #stream{floor = Floor} = Stream ->
            requeue(StreamId, Stream#stream{floor = undefined}, State);
        Stream ->
            requeue(StreamId, Stream, State)
    end;
verified({certain, true}, #work{stream_id = StreamId}, State) ->
    rest(StreamId, State);
verified(Failed, #work{stream_id = StreamId}, State) ->
    ok = rabbitmq_stream_s3_counters:add(manifest_proofs_failed),
    rest(StreamId, failed(StreamId, Failed, State)).

rest(StreamId, State) ->
    _ = erlang:send_after(?REST_MS, self(), {rested, StreamId}),
    State.

failed(StreamId, Failed, #state{failures = Failures} = State) when
    map_size(Failures) < ?FAILURES_MAX
->
    Count = maps:get(StreamId, Failures, 0) + 1,
    _ =
        Count =:= ?FAILURES_SAID andalso
            ?LOG_WARNING(
                "stream_s3: ~ts: consumers of old records wait on this node, because it could not"
                " determine which manifest is current, ~b times in a row: ~0tp. It needs a quorum of"
                " the metadata store and S3, and tries again each second",
                [StreamId, Count, why(Failed)],
                ?DOMAIN
            ),
    State#state{failures = Failures#{StreamId => Count}};
failed(_StreamId, _Failed, State) ->
    State#state{failures = #{}}.

why({certain, Why}) -> Why;
why(Crashed) -> Crashed.

succeeded(StreamId, #state{failures = Failures} = State) ->
    case Failures of
        #{StreamId := Count} when Count >= ?FAILURES_SAID ->
            ?LOG_INFO(
                "stream_s3: ~ts: this node knows again which manifest is current; its consumers"
                " continue",
                [StreamId],
                ?DOMAIN
            );
        _ ->
            ok
    end,
    State#state{failures = maps:remove(StreamId, Failures)}.

%% If somebody has asked meanwhile.
requeue(StreamId, #stream{floor = undefined, current = false}, #state{streams = Streams} = State) ->
    State#state{streams = maps:remove(StreamId, Streams)};
requeue(StreamId, Stream, #state{streams = Streams, queue = Queue} = State) ->
    State#state{
        streams = Streams#{StreamId => Stream},
        queue = queue:in(StreamId, Queue)
    }.

%% The worker --------------------------------------------------------------------------------------

%% `true`: this node's manifest is now as new as what a quorum knows. Else: why that is not known.
verify(StreamId) ->
    case renew(StreamId) of
        %% Two persists were faster than this node: the pointer has moved.
        replaced -> renew(StreamId);
        Answer -> Answer
    end.

renew(StreamId) ->
    case rabbitmq_stream_s3_db:get_consistent(StreamId) of
        {ok, Pointer} ->
            published(resolve(StreamId, Pointer), StreamId, Pointer);
        not_found ->
            %% Nothing is persisted, so nothing can be missed; but what is known is empty from here
            %% on, and no longer unknown.
            resolve(StreamId, empty) =/= {error, closed} orelse closed;
        {error, Reason} ->
            {metadata_store, Reason}
    end.

published({resolved, _Range}, StreamId, Pointer) ->
    %% Not if its writer has said meanwhile that it must not be believed.
    case rabbitmq_stream_s3_manifest_cache:published(StreamId, Pointer) of
        ok -> true;
        NotNow -> NotNow
    end;
published({error, stale, _}, _, _) ->
    true;
published({error, written_here, _}, StreamId, {_Epoch, _Uid, Revision}) ->
    %% Its machine publishes, and it alone.
    case rabbitmq_stream_s3_manifest_cache:range(StreamId) of
        {ok, #{revision := Known}} when Known >= Revision -> true;
        Other -> {written_here, Other}
    end;
published({error, not_found, _}, _, _) ->
    replaced;
published(Failed, _, _) ->
    Failed.

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
