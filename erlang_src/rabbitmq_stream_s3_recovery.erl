-module(rabbitmq_stream_s3_recovery).
-moduledoc """
Keeps the job that brings streams back from the bucket: one at a time on a node.

Owns its progress and its results, the last job's too. The job ends with this process, and with the
plugin. Does not own the work (rabbitmq_stream_s3_recovery_job).
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, start/2, status/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-export_type([status/0]).

-type kind() :: rabbitmq_stream_s3_recovery_job:kind().
-type status() :: #{
    state := none | running | done | failed,
    kind => kind(),
    step => listing | inspecting | recovering,
    done => non_neg_integer(),
    total => non_neg_integer(),
    results => [map()],
    text => binary()
}.

-record(state, {
    status = #{state => none} :: status(),
    job :: reference() | undefined
}).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(CALL_MS, 30_000).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Begins a job: `list` reads the newest manifest of each stream, `plan` also compares what it names with what
is there, `run` recovers. `busy`: a job is running.
""".
-spec start(kind(), rabbitmq_stream_s3_recovery_plan:selection()) -> ok | {error, busy | inactive}.
start(Kind, Selection) ->
    call({start, Kind, Selection}).

-doc "The job that is running, or the last one.".
-spec status() -> status() | {error, inactive}.
status() ->
    call(status).

call(Request) ->
    try
        gen_server:call(?MODULE, Request, ?CALL_MS)
    catch
        exit:{noproc, _} -> {error, inactive}
    end.

-spec init([]) -> {ok, #state{}}.
init([]) ->
    %% The job is linked, and its end is a message.
    _ = process_flag(trap_exit, true),
    {ok, #state{}}.

-dialyzer({nowarn_function, handle_call/3}).
-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call({start, Kind, Selection}, _From, #state{job = undefined} = State) ->
    Server = self(),
    Report = fun(Progress) -> gen_server:cast(Server, {progress, Progress}) end,
    Work = fun() ->
        exit({finished, rabbitmq_stream_s3_recovery_job:work(Kind, Selection, Report)})
    end,
    {_Pid, Job} = spawn_opt(Work, [link, monitor]),
    Status = #{state => running, kind => Kind, step => listing, done => 0, total => 0},
    {reply, ok, State#state{job = Job, status = Status}};
handle_call({start, _Kind, _Selection}, _From, State) ->
    {reply, {error, busy}, State};
handle_call(status, _From, #state{status = Status} = State) ->
    {reply, Status, State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({progress, Progress}, #state{status = Status} = State) ->
    {noreply, State#state{status = maps:merge(Status, Progress)}};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Job, process, _Pid, Reason}, #state{job = Job, status = Before} = State) ->
    Status =
        case Reason of
            {finished, {ok, Results}} ->
                Before#{state => done, results => Results};
            {finished, {error, Text}} ->
                Before#{state => failed, text => Text};
            _Crashed ->
                ?LOG_ERROR("stream_s3: a recovery from the bucket ended with ~0p", [Reason], ?DOMAIN),
                Before#{state => failed, text => <<"the job crashed: see the log of the node">>}
        end,
    {noreply, State#state{job = undefined, status = Status}};
handle_info(_Unknown, State) ->
    {noreply, State}.
