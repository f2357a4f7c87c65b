-module(rabbitmq_stream_s3_reader_lookup).
-moduledoc """
Which chunk a place is: the answer to the stream protocol's command "resolve offset specification". The
connection that asks serves many subscriptions, so it waits ?PATIENCE_MS at most. What takes longer,
because the chunk has to be looked up in S3, continues in the background; until its answer is there
the command is refused, and a client that asks again is given it. An unknown place is never answered
with another one.

Owns the lookups under way, one for each place and ?LOOKUPS_MAX at once, and their answers, for a while.
Does not own where a place is (rabbitmq_stream_s3_reader_start), nor reading (native).
""".

-behaviour(gen_server).

-include("rabbitmq_stream_s3_reader.hrl").

-export([start_link/0, resolve_offset_spec/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).
-export([look_up/3]).

-type place() ::
    {rabbitmq_stream_s3:stream_id(), rabbitmq_stream_s3_reader_remote:start(), osiris:offset()}.
-type answer() :: {ok, osiris:offset()} | {error, term()}.

-record(lookup, {monitor :: reference(), callers = [] :: [gen_server:from()]}).
-record(state, {
    running = #{} :: #{place() => #lookup{}},
    places = #{} :: #{reference() => place()},
    answers = #{} :: #{place() => answer()}
}).

%% How long a connection waits: no process of a connection is held up for more than 50 ms.
-define(PATIENCE_MS, 40).
%% Files of the local log that change under a lookup settle within moments.
-define(LOCAL_ATTEMPTS, 5).
-define(LOCAL_PAUSE_MS, 5).
-define(LOOKUPS_MAX, 64).
%% Connections that wait for the same place.
-define(CALLERS_MAX, 1_000).
%% A lookup that S3 does not answer ends after this.
-define(LOOKUP_MS, 60_000).
%% A client asks again within seconds.
-define(ANSWER_KEPT_MS, 30_000).
-define(ANSWERS_MAX, 1_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
As osiris_log:resolve_offset_spec/2: the id of the chunk at which a reader with this spec would start.
`unavailable`: that is not known now; ask again.
""".
-spec resolve_offset_spec(osiris:offset_spec(), map()) -> answer().
resolve_offset_spec(Spec, Context) ->
    IsSupported = rabbitmq_stream_s3_reader_start:supported(Spec),
    case IsSupported andalso rabbitmq_stream_s3_reader_open:tiered(Context) of
        false ->
            osiris_log:resolve_offset_spec(Spec, rabbitmq_stream_s3_reader_open:stock(Context));
        {true, StreamId} ->
            #{shared := Shared} = Context,
            First = osiris_log_shared:first_chunk_id(Shared),
            case resolved_locally(Spec, First, Context) of
                {ok, _} = Found -> Found;
                false -> resolve(StreamId, Spec, First, Context)
            end
    end.

%% What the local log has of a time needs no manifest.
resolved_locally({timestamp, _} = Spec, First, #{dir := Dir} = Context) when First > 0 ->
    case local(Spec, Context, 1) of
        {ok, ChunkId} = Found ->
            rabbitmq_stream_s3_reader_start:behind_a_local_chunk(ChunkId, Dir) andalso Found;
        {error, _} -> false
    end;
resolved_locally(_, _, _) ->
    false.

resolve(StreamId, Spec, First, #{shared := Shared} = Context) ->
    case rabbitmq_stream_s3_reader_start:route(StreamId, Spec, Shared, First) of
        {local, LocalSpec} ->
            local(rabbitmq_stream_s3_reader_start:stock(LocalSpec), Context, ?LOCAL_ATTEMPTS);
        {remote, Start} ->
            Committed = osiris_log_shared:committed_chunk_id(Shared),
            remote({StreamId, rabbitmq_stream_s3_reader_start:start(Spec, Start), Start}, Committed);
        unknown ->
            ok = rabbitmq_stream_s3_manifest_cache:wanted(StreamId),
            {error, unavailable};
        {error, _} = Error ->
            Error
    end.

local(Spec, #{shared := Shared} = Context, Left) ->
    Look = fun() -> osiris_log:resolve_offset_spec(Spec, rabbitmq_stream_s3_reader_open:stock(Context)) end,
    Place = fun(ChunkId) -> ChunkId end,
    case rabbitmq_stream_s3_reader_open:settled(Look, Place, fun(_) -> ok end, Shared) of
        {ok, _} = Found ->
            Found;
        {error, _} when Left > 1 ->
            ok = timer:sleep(?LOCAL_PAUSE_MS),
            local(Spec, Context, Left - 1);
        {error, _} ->
            {error, unavailable}
    end.

remote(Place, Committed) ->
    try
        gen_server:call(?MODULE, {chunk_id, Place, Committed}, ?PATIENCE_MS)
    catch
        exit:_TimeoutOrNoProcess -> {error, unavailable}
    end.

%% The server --------------------------------------------------------------------------------------

-spec init([]) -> {ok, #state{}}.
init([]) ->
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) ->
    {reply, term(), #state{}} | {noreply, #state{}}.
handle_call({chunk_id, Place, Committed}, From, State) ->
    #state{answers = Answers, running = Running} = State,
    case {Answers, Running} of
        {#{Place := Answer}, _} ->
            {reply, Answer, State};
        {_, #{Place := #lookup{callers = Callers}}} when length(Callers) >= ?CALLERS_MAX ->
            {reply, {error, unavailable}, State};
        {_, #{Place := #lookup{callers = Callers} = Lookup}} ->
            Joined = Running#{Place := Lookup#lookup{callers = [From | Callers]}},
            {noreply, State#state{running = Joined}};
        {_, _} when map_size(Running) >= ?LOOKUPS_MAX ->
            {reply, {error, unavailable}, State};
        {_, _} ->
            {noreply, start(Place, Committed, From, State)}
    end;
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{places = Places} = State) when
    is_map_key(Monitor, Places)
->
    {noreply, finished(Monitor, Reason, State)};
handle_info({forget, Place}, #state{answers = Answers} = State) ->
    {noreply, State#state{answers = maps:remove(Place, Answers)}};
handle_info(_Unknown, State) ->
    {noreply, State}.

start({StreamId, Start, _} = Place, Committed, From, State) ->
    #state{running = Running, places = Places} = State,
    {Pid, Monitor} = spawn_monitor(?MODULE, look_up, [StreamId, Start, Committed]),
    %% It holds a native reader, which ends with it.
    _ = erlang:send_after(?LOOKUP_MS, Pid, give_up),
    State#state{
        running = Running#{Place => #lookup{monitor = Monitor, callers = [From]}},
        places = Places#{Monitor => Place}
    }.

finished(Monitor, Reason, #state{running = Running, places = Places, answers = Answers} = State) ->
    {Place, OtherPlaces} = maps:take(Monitor, Places),
    {#lookup{callers = Callers}, Others} = maps:take(Place, Running),
    Answer =
        case Reason of
            {answer, Found} -> Found;
            _Crashed -> {error, unavailable}
        end,
    ok = lists:foreach(fun(From) -> gen_server:reply(From, Answer) end, Callers),
    Finished = State#state{running = Others, places = OtherPlaces},
    case Answer of
        {ok, _} when map_size(Answers) < ?ANSWERS_MAX ->
            _ = erlang:send_after(?ANSWER_KEPT_MS, self(), {forget, Place}),
            Finished#state{answers = Answers#{Place => Answer}};
        _ ->
            Finished
    end.

%% The worker --------------------------------------------------------------------------------------

-doc false.
-spec look_up(rabbitmq_stream_s3:stream_id(), rabbitmq_stream_s3_reader_remote:start(), integer()) ->
    no_return().
look_up(StreamId, Start, Committed) ->
    Answer =
        maybe
            {ok, Engine} ?= rabbitmq_stream_s3:engine(),
            {ok, Handle} ?= rabbitmq_stream_s3_nif:reader_open(Engine, self(), wake, StreamId, Start),
            first_chunk(Handle, Committed)
        else
            _ClosedOrBusy -> {error, unavailable}
        end,
    exit({answer, Answer}).

first_chunk(Handle, Committed) ->
    case rabbitmq_stream_s3_nif:reader_read(Handle, Committed) of
        {chunk, #{chunk_id := ChunkId}, _, _, _} ->
            {ok, ChunkId};
        wait ->
            receive
                wake -> first_chunk(Handle, Committed);
                give_up -> {error, unavailable}
            end;
        {local, Next} ->
            {ok, Next};
        {error, unavailable, _} ->
            {error, unavailable};
        {error, Kind, _} ->
            {error, {stream_s3, Kind}};
        {error, _} ->
            {error, unavailable}
    end.
