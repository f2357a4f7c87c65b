%% A round, with members that answer nobody and a manifest replica that tells the test what it is
%% told. The supervisor of members and the tables of osiris are stand-ins.
-module(rabbitmq_stream_s3_reconciler_tests).

-include_lib("eunit/include/eunit.hrl").

-export([init/1, start_member/0]).
%% Stands in for the supervisor of readers.
-export([start_reader/2]).
%% Stand in for RabbitMQ's records of queues.
-export([lookup/1, update_stream_conf/2]).

-include_lib("rabbit_common/include/rabbit.hrl").

-define(CACHE, osiris_reader_context_cache).

-behaviour(supervisor).

%% As a member of osiris, and like one that hangs.
start_member() ->
    {ok,
        spawn_link(fun() ->
            receive
                stop -> ok
            end
        end)}.

init([]) ->
    Member = #{
        id => member,
        start => {?MODULE, start_member, []},
        restart => temporary,
        modules => [osiris_replica]
    },
    {ok, {#{}, [Member]}}.

-define(RECONCILER, rabbitmq_stream_s3_reconciler).
-define(REPLICA, rabbitmq_stream_s3_manifest_replica).
-define(REGISTRY, rabbitmq_stream_s3_registry).

round_test_() ->
    {foreach, fun start/0, fun stop/1, [
        fun({Replica, Member}) -> {timeout, 60, {Name, fun() -> Test(Replica, Member) end}} end
     || {Name, Test} <- [
            {"a member that hangs is found", fun hangs/2},
            {"what cannot be asked now does not end the process", fun survives/2},
            {"membership is looked at when a writer has come, and not in each round",
                fun looks_once/2},
            {"a retention that is not known yet is asked for again", fun unknown_retention/2}
        ]
    ]}.

start() ->
    {ok, _} = application:ensure_all_started(seshat),
    ok = osiris_counters:init(),
    ok = application:set_env(rabbitmq_stream_s3, bucket, "b"),
    ok = application:set_env(rabbitmq_stream_s3, region, "r"),
    {ok, _} = rabbitmq_stream_s3_config:load(),
    ok = rabbitmq_stream_s3:set_mode(active),
    {ok, Sup} = supervisor:start_link({local, osiris_server_sup}, ?MODULE, []),
    true = unlink(Sup),
    [{member, Member, _, _}] = supervisor:which_children(Sup),
    {ok, Replica} = ?REPLICA:start_link(),
    true = unlink(Replica),
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    ?REGISTRY = ets:new(?REGISTRY, [named_table, public]),
    ?CACHE = ets:new(?CACHE, [named_table, public]),
    {Replica, Member}.

stop({Replica, _Member}) ->
    lists:foreach(fun end_of/1, [
        Pid
     || Pid <- [whereis(?RECONCILER), whereis(osiris_server_sup), whereis(?REPLICA), Replica],
        is_pid(Pid)
    ]),
    [true = ets:delete(Table) || Table <- [?CACHE, ?REGISTRY, ?MODULE]],
    ok = rabbitmq_stream_s3:erase_mode(),
    ok = rabbitmq_stream_s3_config:erase(),
    ok = application:unset_env(rabbitmq_stream_s3, bucket),
    ok = application:unset_env(rabbitmq_stream_s3, region).

start_reconciler() ->
    {ok, Reconciler} = ?RECONCILER:start_link(),
    true = unlink(Reconciler),
    Reconciler.

has_log(Member, Reference) ->
    _ = osiris_counters:new({osiris_replica, Reference}, [{offset, 1, counter, ""}]),
    true = ets:insert(?CACHE, {Member, "/some/where", "name", shared, Reference, fun(_) -> ok end}).

hangs(Replica, Member) ->
    true = has_log(Member, a_queue),
    1 = erlang:trace(Replica, true, ['receive']),
    Reconciler = start_reconciler(),
    ok = registered(Replica, Member),
    ?assertMatch(
        {ok, #{<<"name">> := {acceptor, Member, #{dir := "/some/where"}}}}, ?REPLICA:members()
    ),
    %% Another round keeps what is known, and asks nobody either.
    ok = ?RECONCILER:reconcile(),
    ?assertEqual({error, unknown_call}, gen_server:call(Reconciler, are_you_there)).

registered(Replica, Member) ->
    receive
        {trace, Replica, 'receive', {'$gen_cast', {register_member, acceptor, Member, _}}} -> ok
    after 30_000 -> error(not_found)
    end.

survives(Replica, _Member) ->
    Reconciler = start_reconciler(),
    ok = end_of(Replica),
    ?assertEqual({error, unavailable}, ?REPLICA:members()),
    ok = ?RECONCILER:reconcile(),
    ?assertEqual({error, unknown_call}, gen_server:call(Reconciler, are_you_there, 30_000)),
    ?assertEqual(Reconciler, whereis(?RECONCILER)).

looks_once(_Replica, Member) ->
    ok = stream_s3_double:load(rabbitmq_stream_s3_replica_reader_sup, [{start_reader, 2}], ?MODULE),
    true = ets:insert(?MODULE, {readers, 0}),
    true = register(rabbitmq_stream_s3_membership_reconciliation, self()),
    Reconciler = start_reconciler(),
    Info = #{
        stream_id => <<"name">>, name => "name", dir => "/some/where", reference => a_queue,
        shared => shared, counter => counter, epoch => 1, retention => []
    },
    Attach = {attach, writer, Member, Info},
    ok = gen_server:cast(Reconciler, Attach),
    receive
        {'$gen_cast', {trigger, {writer, <<"name">>}}} -> ok
    after 30_000 -> error(no_trigger)
    end,
    %% As each round does.
    ok = gen_server:cast(Reconciler, Attach),
    ok = gen_server:cast(Reconciler, Attach),
    ?assertEqual({error, unknown_call}, gen_server:call(Reconciler, are_you_there)),
    receive
        {'$gen_cast', {trigger, _}} -> error(no_writer_has_come)
    after 0 -> ok
    end,
    ?assertEqual(1, ets:lookup_element(?MODULE, readers, 2)),
    true = unregister(rabbitmq_stream_s3_membership_reconciliation),
    ok = stream_s3_double:unload(rabbitmq_stream_s3_replica_reader_sup).

start_reader(Writer, #{stream_id := StreamId}) ->
    _ = ets:update_counter(?MODULE, readers, 1),
    Value = {undefined, a_queue, Writer},
    true = ets:insert(?REGISTRY, {{StreamId, node()}, Writer, Value}),
    ok.

%% The node's records of queues are still being read: the first look-up finds none.
unknown_retention(Replica, Member) ->
    QName = #resource{virtual_host = <<"/">>, kind = queue, name = <<"name">>},
    ok = stream_s3_double:load(rabbit_amqqueue, [{lookup, 1}], ?MODULE),
    ok = stream_s3_double:load(rabbit_stream_queue, [{update_stream_conf, 2}], ?MODULE),
    true = ets:insert(?MODULE, {lookups, 0}),
    true = has_log(Member, QName),
    1 = erlang:trace(Replica, true, ['receive']),
    _ = start_reconciler(),
    ok = registered(Replica, Member),
    {ok, #{<<"name">> := {acceptor, Member, Info}}} = ?REPLICA:members(),
    ?assertMatch(#{retention := [{max_bytes, 7}]}, Info),
    ?assertEqual(2, ets:lookup_element(?MODULE, lookups, 2)),
    ok = stream_s3_double:unload(rabbit_amqqueue),
    ok = stream_s3_double:unload(rabbit_stream_queue).

lookup(_QName) ->
    case ets:update_counter(?MODULE, lookups, 1) of
        1 -> {error, not_found};
        _ -> {ok, a_queue}
    end.

update_stream_conf(a_queue, Conf) ->
    Conf#{retention => [{max_bytes, 7}]}.

end_of(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end.
