-module(rabbitmq_stream_s3_manifest_replica).
-moduledoc """
What this node knows about the remote tier of the streams that have a member here.

Owns two tables and the monitors of local members:

    rabbitmq_stream_s3_manifest_cache  {StreamId, pending | Range}, for local retention
    rabbitmq_stream_s3_dirs            {Directory, StreamId}: whose folder is it, for the same

The manifests that consumers are routed by live in the engine; each change here is made there too.
Does not fetch anything: a writer's range is put here by its replica reader. Writers of rows call
from their own process (the hook runs inside osiris and must not wait for ours).
""".

-behaviour(gen_server).

-include("rabbitmq_stream_s3.hrl").

-export([
    start_link/0,
    range/1,
    put/2,
    mark_pending/1,
    forget/1,
    streams/0,
    register_dir/2,
    dir/1,
    register_member/3,
    members/0
]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

-record(member, {
    pid :: pid(),
    monitor :: reference(),
    role :: rabbitmq_stream_s3:role(),
    info :: rabbitmq_stream_s3:member_info()
}).
-record(state, {members = #{} :: #{stream_id() => #member{}}}).


-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc "`none`: no member of the stream is known here (or the plugin is off).".
-spec range(stream_id()) -> {ok, rabbitmq_stream_s3:range()} | pending | none.
range(StreamId) ->
    case lookup(?MANIFEST_CACHE, StreamId) of
        {ok, pending} -> pending;
        {ok, Range} -> {ok, Range};
        none -> none
    end.

-doc "A range that has been persisted: from here on local retention counts on it.".
-spec put(stream_id(), rabbitmq_stream_s3:range()) -> ok.
put(StreamId, Range) ->
    insert(?MANIFEST_CACHE, StreamId, Range).

-doc "Before a consumer can attach: the unknown must not look like nothing. Keeps a known range.".
-spec mark_pending(stream_id()) -> ok.
mark_pending(StreamId) ->
    try ets:insert_new(?MANIFEST_CACHE, {StreamId, pending}) of
        _ -> ok
    catch
        error:badarg -> ok
    end,
    with_engine(fun(Engine) -> rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId) end).

-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    try ets:delete(?MANIFEST_CACHE, StreamId) of
        true -> ok
    catch
        error:badarg -> ok
    end,
    with_engine(fun(Engine) -> rabbitmq_stream_s3_nif:manifest_forget(Engine, StreamId) end).

-spec streams() -> [stream_id()].
streams() ->
    try
        ets:select(?MANIFEST_CACHE, [{{'$1', '_'}, [], ['$1']}])
    catch
        error:badarg -> []
    end.

-spec register_dir(file:name_all(), stream_id()) -> ok.
register_dir(Directory, StreamId) ->
    insert(?DIRS, rabbitmq_stream_s3:utf8(Directory), StreamId).

-spec dir(file:name_all()) -> {ok, stream_id()} | none.
dir(Directory) ->
    lookup(?DIRS, rabbitmq_stream_s3:utf8(Directory)).

-doc "Remembers a local member until it ends, and then forgets its stream here.".
-spec register_member(rabbitmq_stream_s3:role(), pid(), rabbitmq_stream_s3:member_info()) -> ok.
register_member(Role, Pid, Info) ->
    gen_server:cast(?MODULE, {register_member, Role, Pid, Info}).

-spec members() ->
    #{stream_id() => {rabbitmq_stream_s3:role(), pid(), rabbitmq_stream_s3:member_info()}}.
members() ->
    gen_server:call(?MODULE, members).

-spec init([]) -> {ok, #state{}}.
init([]) ->
    Options = [named_table, public, set, {read_concurrency, true}],
    ?MANIFEST_CACHE = ets:new(?MANIFEST_CACHE, Options),
    ?DIRS = ets:new(?DIRS, Options),
    %% After a crash the tables are empty; at the first start nobody listens yet.
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    {ok, #state{}}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(members, _From, #state{members = Members} = State) ->
    Reply = #{Id => {M#member.role, M#member.pid, M#member.info} || Id := M <- Members},
    {reply, Reply, State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast({register_member, Role, Pid, Info}, State) ->
    {noreply, add_member(Role, Pid, Info, State)};
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info({'DOWN', Monitor, process, Pid, _Reason}, #state{members = Members} = State) ->
    case [Id || Id := #member{monitor = M} <- Members, M =:= Monitor] of
        [StreamId] -> {noreply, drop_member(StreamId, Pid, State)};
        [] -> {noreply, State}
    end;
handle_info(_Unknown, State) ->
    {noreply, State}.

add_member(Role, Pid, #{stream_id := StreamId} = Info, #state{members = Members} = State) ->
    case Members of
        #{StreamId := #member{pid = Pid, role = Role} = Member} ->
            State#state{members = Members#{StreamId := Member#member{info = Info}}};
        #{StreamId := #member{monitor = Old, role = OldRole}} ->
            true = demonitor(Old, [flush]),
            %% A member that no longer writes has a range that nobody moves on: it must not be
            %% believed.
            case {OldRole, Role} of
                {writer, acceptor} ->
                    ok = forget(StreamId),
                    ok = mark_pending(StreamId);
                _ ->
                    ok
            end,
            State#state{members = Members#{StreamId := new_member(Role, Pid, Info)}};
        _ ->
            State#state{members = Members#{StreamId => new_member(Role, Pid, Info)}}
    end.

new_member(Role, Pid, Info) ->
    #member{pid = Pid, monitor = monitor(process, Pid), role = Role, info = Info}.

drop_member(StreamId, _Pid, #state{members = Members0} = State) ->
    {#member{info = #{dir := Directory}}, Members} = maps:take(StreamId, Members0),
    ok = forget(StreamId),
    true = ets:delete(?DIRS, rabbitmq_stream_s3:utf8(Directory)),
    State#state{members = Members}.

lookup(Table, Key) ->
    try ets:lookup(Table, Key) of
        [{Key, Value}] -> {ok, Value};
        [] -> none
    catch
        error:badarg -> none
    end.

insert(Table, Key, Value) ->
    try ets:insert(Table, {Key, Value}) of
        true -> ok
    catch
        error:badarg -> ok
    end.

with_engine(Fun) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            _ = Fun(Engine),
            ok;
        undefined ->
            ok
    end.
