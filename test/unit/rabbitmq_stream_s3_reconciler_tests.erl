%% A round, with members that answer nobody and a manifest replica that tells the test what it is
%% told. The supervisor of members and the tables of osiris are stand-ins.
-module(rabbitmq_stream_s3_reconciler_tests).

-include_lib("eunit/include/eunit.hrl").

-export([init/1, start_member/0]).

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

a_member_that_hangs_is_found_test_() ->
    {timeout, 60, fun() ->
        {ok, _} = application:ensure_all_started(seshat),
        ok = osiris_counters:init(),
        ok = application:set_env(rabbitmq_stream_s3, bucket, "b"),
        ok = application:set_env(rabbitmq_stream_s3, region, "r"),
        {ok, _} = rabbitmq_stream_s3_config:load(),
        ok = rabbitmq_stream_s3:set_mode(active),
        {ok, Sup} = supervisor:start_link({local, osiris_server_sup}, ?MODULE, []),
        [{member, Member, _, _}] = supervisor:which_children(Sup),
        {ok, Replica} = rabbitmq_stream_s3_manifest_replica:start_link(),
        Reference = a_queue,
        _ = osiris_counters:new({osiris_replica, Reference}, [{offset, 1, counter, ""}]),
        ?CACHE = ets:new(?CACHE, [named_table, public]),
        Row = {Member, "/some/where", "name", shared, Reference, fun(_) -> ok end},
        true = ets:insert(?CACHE, Row),
        1 = erlang:trace(Replica, true, ['receive']),
        {ok, Reconciler} = rabbitmq_stream_s3_reconciler:start_link(),
        receive
            {trace, Replica, 'receive', {'$gen_cast', {register_member, acceptor, Member, _}}} -> ok
        after 30_000 -> error(not_found)
        end,
        ?assertMatch(
            #{<<"name">> := {acceptor, Member, #{dir := "/some/where"}}},
            rabbitmq_stream_s3_manifest_replica:members()
        ),
        %% Another round keeps what is known, and asks nobody either.
        ok = rabbitmq_stream_s3_reconciler:reconcile(),
        ?assertEqual({error, unknown_call}, gen_server:call(Reconciler, are_you_there)),
        true = ets:delete(?CACHE),
        lists:foreach(fun end_of/1, [Reconciler, Sup, Replica]),
        ok = rabbitmq_stream_s3:erase_mode(),
        ok = rabbitmq_stream_s3_config:erase(),
        ok = application:unset_env(rabbitmq_stream_s3, bucket),
        ok = application:unset_env(rabbitmq_stream_s3, region)
    end}.

end_of(Pid) ->
    true = unlink(Pid),
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end.
