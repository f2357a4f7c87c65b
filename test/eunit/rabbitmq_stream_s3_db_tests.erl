%% The metadata store with a real Khepri: what a pointer may become, and what goes with the queue.
-module(rabbitmq_stream_s3_db_tests).

-include_lib("eunit/include/eunit.hrl").
-include_lib("khepri/include/khepri.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-define(STORE, rabbitmq_metadata).
-define(DB, rabbitmq_stream_s3_db).

db_test_() ->
    {setup, fun start/0, fun stop/1,
        patient([
            {"nothing is known of a new stream", fun unknown/0},
            {"nothing is written for a queue that is not there", fun no_queue/0},
            {"a pointer is created once", fun created_once/0},
            {"a pointer moves from the revision that the writer knows", fun moves/0},
            {"a lower epoch is fenced", fun fenced/0},
            {"an answer that was lost can be asked for again", fun repeated/0},
            {"the end of what is durable is kept with the pointer", fun durable_end/0},
            {"a pointer of an earlier version goes on", fun earlier_version/0},
            {"the anchor says that there may be objects", fun anchor/0},
            {"all pointers are listed", fun listed/0},
            {"with the queue everything goes, and the lister is told", fun deleted/0},
            {"a deleted stream is not resurrected", fun not_resurrected/0},
            {"another incarnation of the name does not take what is of the one before",
                fun another_incarnation/0},
            {"gone is what has neither container nor queue", fun gone/0}
        ])}.

%% A machine that builds something else at the same time is not a failure.
patient(Tests) ->
    [{timeout, 60, Test} || Test <- Tests].

start() ->
    Dir = filename:join(
        filename:basedir(user_cache, "rabbitmq_stream_s3_tests"),
        integer_to_list(erlang:unique_integer([positive])) ++ os:getpid()
    ),
    {ok, _} = application:ensure_all_started(khepri),
    {ok, ?STORE} = khepri:start(Dir, ?STORE),
    Expected =
        case application:get_key(khepri, vsn) of
            {ok, "0.16" ++ _} -> unsupported;
            _ -> ok
        end,
    ok = register_trigger(Expected),
    Dir.

%% A new store agrees on its version a moment after it has started.
register_trigger(Expected) ->
    case ?DB:register_trigger() of
        Expected ->
            ok;
        unsupported ->
            receive
            after 20 -> register_trigger(Expected)
            end
    end.

stop(Dir) ->
    ok = khepri:stop(?STORE),
    _ = application:stop(khepri),
    _ = application:stop(ra),
    ok = file:del_dir_r(Dir).

queue(Name) ->
    queue(Name, binary_to_list(Name)).

%% The queue's record as RabbitMQ has it, of the incarnation with this stream id.
queue(Name, StreamId) ->
    QName = #resource{virtual_host = <<"/">>, kind = queue, name = Name},
    Record = amqqueue:set_type_state(
        amqqueue:new(QName, none, true, false, none, [], <<"/">>, #{}, rabbit_stream_queue),
        #{name => StreamId, nodes => [node()], epoch => 1}
    ),
    ok = khepri:put(?STORE, rabbit_db_queue:khepri_queue_path(<<"/">>, Name), Record),
    QName.

anchored(StreamId) ->
    khepri:exists(?STORE, [rabbitmq, rabbitmq_stream_s3, StreamId, anchor]).

delete_queue(#resource{virtual_host = VHost, name = Name}) ->
    ok = khepri:delete(?STORE, rabbit_db_queue:khepri_queue_path(VHost, Name)).

unknown() ->
    ?assertEqual(not_found, ?DB:get(<<"unknown">>)),
    ?assertEqual(not_found, ?DB:get_consistent(<<"unknown">>)),
    ?assertEqual(false, anchored(<<"unknown">>)).

no_queue() ->
    QName = #resource{virtual_host = <<"/">>, kind = queue, name = <<"no">>},
    ?assertEqual(not_found, ?DB:commit_pointer(<<"no">>, QName, 1, 7, 40, 0)),
    ?assertEqual({error, not_found}, ?DB:put_anchor(<<"no">>, QName)),
    ?assertNot(khepri:exists(?STORE, [rabbitmq, rabbitmq_stream_s3, <<"no">>])).

created_once() ->
    QName = queue(<<"once">>),
    ?assertEqual({ok, 1}, ?DB:commit_pointer(<<"once">>, QName, 3, 7, 40, 0)),
    ?assertEqual({ok, {3, 7, 1}}, ?DB:get_consistent(<<"once">>)),
    ?assertEqual(conflict, ?DB:commit_pointer(<<"once">>, QName, 3, 8, 40, 0)),
    ?assertEqual({ok, {3, 7, 1}}, ?DB:get(<<"once">>)).

moves() ->
    QName = queue(<<"moves">>),
    {ok, 1} = ?DB:commit_pointer(<<"moves">>, QName, 1, 7, 40, 0),
    ?assertEqual({ok, 2}, ?DB:commit_pointer(<<"moves">>, QName, 1, 8, 40, 1)),
    ?assertEqual(conflict, ?DB:commit_pointer(<<"moves">>, QName, 1, 9, 40, 1)),
    ?assertEqual({ok, 3}, ?DB:commit_pointer(<<"moves">>, QName, 2, 9, 40, 2)),
    ?assertEqual({ok, {2, 9, 3}}, ?DB:get_consistent(<<"moves">>)).

fenced() ->
    QName = queue(<<"fenced">>),
    {ok, 1} = ?DB:commit_pointer(<<"fenced">>, QName, 5, 7, 40, 0),
    ?assertEqual(conflict, ?DB:commit_pointer(<<"fenced">>, QName, 4, 8, 40, 1)),
    ?assertEqual({ok, {5, 7, 1}}, ?DB:get_consistent(<<"fenced">>)).

repeated() ->
    QName = queue(<<"repeated">>),
    {ok, 1} = ?DB:commit_pointer(<<"repeated">>, QName, 1, 7, 40, 0),
    ?assertEqual({ok, 1}, ?DB:commit_pointer(<<"repeated">>, QName, 1, 7, 40, 0)),
    {ok, 2} = ?DB:commit_pointer(<<"repeated">>, QName, 1, 8, 40, 1),
    ?assertEqual({ok, 2}, ?DB:commit_pointer(<<"repeated">>, QName, 1, 8, 40, 1)).

durable_end() ->
    QName = queue(<<"end">>),
    ?assertEqual(not_found, ?DB:durable_end(<<"end">>, 5_000)),
    {ok, 1} = ?DB:commit_pointer(<<"end">>, QName, 1, 7, 40, 0),
    ?assertEqual({ok, {1, 7, 1}, 40}, ?DB:durable_end(<<"end">>, 5_000)),
    {ok, 2} = ?DB:commit_pointer(<<"end">>, QName, 1, 8, 55, 1),
    ?assertEqual({ok, {1, 8, 2}, 55}, ?DB:durable_end(<<"end">>, 5_000)).

earlier_version() ->
    QName = queue(<<"earlier">>),
    {ok, 1} = ?DB:commit_pointer(<<"earlier">>, QName, 5, 7, 40, 0),
    ok = khepri:put(?STORE, [rabbitmq, rabbitmq_stream_s3, <<"earlier">>, manifest], {8, 5}),
    ?assertEqual({ok, {5, 8, 2}, unknown}, ?DB:durable_end(<<"earlier">>, 5_000)),
    ?assertEqual({ok, {5, 8, 2}}, ?DB:get_consistent(<<"earlier">>)),
    {ok, All} = ?DB:list(),
    ?assertMatch(#{<<"earlier">> := {5, 8, 2}}, All),
    ?assertEqual(conflict, ?DB:commit_pointer(<<"earlier">>, QName, 4, 9, 60, 2)),
    ?assertEqual({ok, 3}, ?DB:commit_pointer(<<"earlier">>, QName, 6, 9, 60, 2)),
    ?assertEqual({ok, {6, 9, 3}, 60}, ?DB:durable_end(<<"earlier">>, 5_000)).

anchor() ->
    QName = queue(<<"anchor">>),
    ?assertEqual(ok, ?DB:put_anchor(<<"anchor">>, QName)),
    ?assertEqual(ok, ?DB:put_anchor(<<"anchor">>, QName)),
    ?assertEqual(true, anchored(<<"anchor">>)),
    {ok, Registered} = rabbitmq_stream_s3_db_register:list(),
    ?assertEqual([<<"anchor">>], [Id || Id <- Registered, Id =:= <<"anchor">>]),
    %% It is not a pointer.
    ?assertEqual(not_found, ?DB:get_consistent(<<"anchor">>)).

listed() ->
    QName = queue(<<"listed">>),
    {ok, 1} = ?DB:commit_pointer(<<"listed">>, QName, 1, 7, 40, 0),
    {ok, All} = ?DB:list(),
    ?assertMatch(#{<<"listed">> := {1, 7, 1}}, All),
    {ok, Streams} = ?DB:streams(),
    ?assert(is_map_key(<<"listed">>, Streams)),
    ?assert(is_map_key(<<"anchor">>, Streams)),
    ?assertNot(is_map_key(<<"anchor">>, All)).

deleted() ->
    QName = queue(<<"deleted">>),
    ok = ?DB:put_anchor(<<"deleted">>, QName),
    {ok, 1} = ?DB:commit_pointer(<<"deleted">>, QName, 1, 7, 40, 0),
    true = register(rabbitmq_stream_s3_lister, self()),
    ok = delete_queue(QName),
    case ?DB:register_trigger() of
        ok ->
            receive
                {'$gen_cast', {delete_stream, Deleted}} -> ?assertEqual(<<"deleted">>, Deleted)
            after 10_000 -> error(not_told)
            end;
        unsupported ->
            ok
    end,
    true = unregister(rabbitmq_stream_s3_lister),
    ?assertEqual(not_found, ?DB:get_consistent(<<"deleted">>)),
    ?assertEqual(false, anchored(<<"deleted">>)),
    %% Until its objects are removed.
    {ok, Registered} = rabbitmq_stream_s3_db_register:list(),
    ?assert(lists:member(<<"deleted">>, Registered)),
    ?assertEqual({ok, [<<"deleted">>]}, ?DB:gone([<<"deleted">>])),
    ok = rabbitmq_stream_s3_db_register:remove(<<"deleted">>),
    {ok, Left} = rabbitmq_stream_s3_db_register:list(),
    ?assertNot(lists:member(<<"deleted">>, Left)).

not_resurrected() ->
    QName = queue(<<"gone">>),
    {ok, 1} = ?DB:commit_pointer(<<"gone">>, QName, 1, 7, 40, 0),
    ok = delete_queue(QName),
    ?assertEqual(not_found, ?DB:commit_pointer(<<"gone">>, QName, 1, 8, 40, 1)),
    ?assertEqual(not_found, ?DB:commit_pointer(<<"gone">>, QName, 1, 8, 40, 0)),
    ?assertEqual({error, not_found}, ?DB:put_anchor(<<"gone">>, QName)),
    ?assertNot(khepri:exists(?STORE, [rabbitmq, rabbitmq_stream_s3, <<"gone">>])).

%% Deleted and declared again under the same name, while the old writer's calls are on their way.
another_incarnation() ->
    QName = queue(<<"again">>, "again_1"),
    ok = delete_queue(QName),
    QName = queue(<<"again">>, "again_2"),
    ?assertEqual({error, not_found}, ?DB:put_anchor(<<"again_1">>, QName)),
    ?assertEqual(not_found, ?DB:commit_pointer(<<"again_1">>, QName, 1, 7, 40, 0)),
    ?assertEqual(not_found, ?DB:commit_pointer(<<"again_1">>, QName, 1, 7, 40, 3)),
    ?assertNot(khepri:exists(?STORE, [rabbitmq, rabbitmq_stream_s3, <<"again_1">>])),
    %% The new one is served beside it.
    ?assertEqual(ok, ?DB:put_anchor(<<"again_2">>, QName)),
    ?assertEqual({ok, 1}, ?DB:commit_pointer(<<"again_2">>, QName, 1, 7, 40, 0)).

gone() ->
    Here = queue(<<"here">>),
    ok = ?DB:put_anchor(<<"here">>, Here),
    %% Its container has gone, as after a record was deleted and written again.
    _ = queue(<<"only a queue">>, "only_a_queue"),
    _ = queue(<<"binary">>, <<"binary_1">>),
    Ids = [<<"here">>, <<"only_a_queue">>, <<"binary_1">>, <<"nowhere">>],
    ?assertEqual({ok, [<<"nowhere">>]}, ?DB:gone(Ids)),
    ?assertEqual({ok, []}, ?DB:gone([<<"here">>])),
    ?assertEqual({ok, [<<"nowhere">>]}, ?DB:gone([<<"nowhere">>])).
