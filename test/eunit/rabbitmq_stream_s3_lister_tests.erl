%% Deletion of streams against a native side that is a table of objects. The pace between listing
%% and deleting is what is tested; the pause before the second sweep is not waited for.
-module(rabbitmq_stream_s3_lister_tests).

-include_lib("eunit/include/eunit.hrl").

-export([list_objects/5, delete_objects/4]).
%% The metadata store: what `kept` rows name is not gone, and a row `silent` answers nothing, once.
-export([gone/1]).
%% The register of streams that may have objects, by rows `registered`.
-export([remove/1]).

-define(LISTER, rabbitmq_stream_s3_lister).
-define(REAPER, rabbitmq_stream_s3_reaper).

lister_test_() ->
    {foreach, fun start/0, fun stop/1, patient([
        {"all pages of a stream go, and nothing else", fun all_pages/0},
        {"the next page is asked for when the last has been deleted", fun paced/0},
        {"a stream that is told twice is swept once", fun once/0},
        {"a failed deletion is reported and tried again", fun failing/0},
        {"bug 25: what lands after the sweep goes with the second one", fun late_object/0},
        {"what a quorum still has is not deleted, and what is gone beside it is", fun kept/0},
        {"without an answer nothing is deleted until there is one", fun silent/0},
        {"what is back before the second sweep is left alone", fun back/0},
        {"a stream is never given up", fun never_given_up/0},
        {"objects of a deleted stream stay for the grace period", fun grace/0}
    ])}.

%% A machine that builds something else at the same time is not a failure.
patient(Tests) ->
    [{timeout, 60, Test} || Test <- Tests].

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public, ordered_set]),
    load_double(),
    ok = configure(0),
    ok = rabbitmq_stream_s3:set_engine(double),
    {ok, Reaper} = ?REAPER:start_link(),
    {ok, Lister} = ?LISTER:start_link(),
    true = ets:insert(?MODULE, {test, self()}),
    [Reaper, Lister].

stop(Pids) ->
    [ok = gen_server:stop(Pid) || Pid <- Pids],
    ok = rabbitmq_stream_s3:erase_engine(),
    _ = persistent_term:erase({rabbitmq_stream_s3_config, checked}),
    Doubles = [rabbitmq_stream_s3_nif, rabbitmq_stream_s3_db, rabbitmq_stream_s3_db_register],
    lists:foreach(fun stream_s3_double:unload/1, Doubles),
    true = ets:delete(?MODULE).

configure(DeleteGraceMs) ->
    persistent_term:put(
        {rabbitmq_stream_s3_config, checked}, #{delete_grace_ms => DeleteGraceMs}
    ).

%% Functions of other modules, delegated to here: {object, Key} rows, pages of two.
load_double() ->
    ok = stream_s3_double:load(
        rabbitmq_stream_s3_nif, [{list_objects, 5}, {delete_objects, 4}], ?MODULE
    ),
    ok = stream_s3_double:load(rabbitmq_stream_s3_db, [{gone, 1}], ?MODULE),
    ok = stream_s3_double:load(rabbitmq_stream_s3_db_register, [{remove, 1}], ?MODULE).

remove(StreamId) ->
    tell({removed, StreamId}).

gone(StreamIds) ->
    case ets:take(?MODULE, silent) of
        [_] -> {error, timeout};
        [] -> {ok, [Id || Id <- StreamIds, not ets:member(?MODULE, {kept, Id})]}
    end.

%% The pause before the store is asked is not waited for.
delete_stream(StreamId) ->
    ok = rabbitmq_stream_s3_peers:delete_stream(StreamId),
    ?LISTER ! ask,
    ok.

list_objects(double, Pid, Ref, StreamId, Token) ->
    tell({list, StreamId, Token}),
    All = [Key || [Key] <- ets:match(?MODULE, {{object, StreamId, '$1'}, '_'})],
    After = [Key || Key <- All, Token =:= start orelse Key > Token],
    Page = lists:sublist(After, 2),
    Next =
        case length(After) > 2 of
            true -> lists:last(Page);
            false -> done
        end,
    Pid ! {rabbitmq_stream_s3, Ref, {page, Page, Next}},
    ok.

delete_objects(double, Pid, Ref, Keys) ->
    tell({delete, Keys}),
    case ets:take(?MODULE, failing) of
        [_] ->
            Pid ! {rabbitmq_stream_s3, Ref, {error, unavailable, <<"down">>}};
        [] ->
            [true = ets:match_delete(?MODULE, {{object, '_', Key}, '_'}) || Key <- Keys],
            Pid ! {rabbitmq_stream_s3, Ref, {deleted, length(Keys), 0}}
    end,
    ok.

tell(What) ->
    [{test, Pid}] = ets:lookup(?MODULE, test),
    Pid ! What.

put_objects(StreamId, Count) ->
    Keys = [<<StreamId/binary, $/, ($a + N)>> || N <- lists:seq(0, Count - 1)],
    true = ets:insert(?MODULE, [{{object, StreamId, Key}, x} || Key <- Keys]),
    %% The test process changes with each test of a fixture.
    true = ets:insert(?MODULE, {test, self()}),
    Keys.

next() ->
    receive
        Message -> Message
    after 5_000 -> timeout
    end.

objects(StreamId) ->
    length(ets:match(?MODULE, {{object, StreamId, '$1'}, '_'})).

all_pages() ->
    _ = put_objects(<<"s1">>, 5),
    _ = put_objects(<<"s2">>, 3),
    ok = delete_stream(<<"s1">>),
    [_ = next() || _ <- lists:seq(1, 6)],
    ?assertEqual([<<"s1">>], ?LISTER:pending()),
    ?assertEqual(0, objects(<<"s1">>)),
    ?assertEqual(3, objects(<<"s2">>)).

paced() ->
    [A, B, C] = put_objects(<<"s">>, 3),
    ok = delete_stream(<<"s">>),
    ?assertEqual({list, <<"s">>, start}, next()),
    ?assertEqual({delete, [A, B]}, next()),
    ?assertEqual({list, <<"s">>, B}, next()),
    ?assertEqual({delete, [C]}, next()).

once() ->
    _ = put_objects(<<"s">>, 1),
    ok = delete_stream(<<"s">>),
    ok = delete_stream(<<"s">>),
    ?assertMatch({list, _, _}, next()),
    ?assertMatch({delete, _}, next()),
    ?assertEqual([<<"s">>], ?LISTER:pending()),
    receive
        More -> error({unexpected, More})
    after 0 -> ok
    end.

failing() ->
    [A] = put_objects(<<"s">>, 1),
    true = ets:insert(?MODULE, {failing, once}),
    ok = delete_stream(<<"s">>),
    ?assertMatch({list, _, start}, next()),
    ?assertEqual({delete, [A]}, next()),
    %% After the pause:
    ?assertMatch({list, _, start}, next()),
    ?assertEqual({delete, [A]}, next()),
    ?assertEqual([<<"s">>], ?LISTER:pending()),
    ?assertEqual(0, objects(<<"s">>)).

%% The pause before the second sweep is not waited for: its timer is caught, and its message sent at once.
late_object() ->
    [A] = put_objects(<<"s">>, 1),
    Lister = whereis(?LISTER),
    1 = erlang:trace(Lister, true, [call]),
    _ = erlang:trace_pattern({erlang, send_after, 3}, true, []),
    ok = delete_stream(<<"s">>),
    Again = second_sweep(Lister),
    ?assertEqual(0, objects(<<"s">>)),
    %% An upload that was under way when the queue was deleted.
    [A] = put_objects(<<"s">>, 1),
    Lister ! Again,
    Lister ! ask,
    %% It has found something, so it is not the last one.
    Last = second_sweep(Lister),
    ?assertEqual(0, objects(<<"s">>)),
    ?assertEqual([<<"s">>], ?LISTER:pending()),
    Lister ! Last,
    Lister ! ask,
    ok = is_gone(<<"s">>, 5_000),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    ok = removed(<<"s">>).

removed(StreamId) ->
    receive
        {removed, StreamId} -> ok
    after 5_000 -> error(still_registered)
    end.

%% No number of failures makes it forget a stream.
never_given_up() ->
    [_] = put_objects(<<"s">>, 1),
    Lister = whereis(?LISTER),
    1 = erlang:trace(Lister, true, [call]),
    _ = erlang:trace_pattern({erlang, send_after, 3}, true, []),
    true = ets:insert(?MODULE, {failing, once}),
    ok = delete_stream(<<"s">>),
    Pauses = [
        begin
            true = ets:insert(?MODULE, {failing, once}),
            {Ms, Again} = tried_again(Lister),
            Lister ! Again,
            Lister ! ask,
            Ms
        end
     || _ <- lists:seq(1, 30)
    ],
    ?assertEqual([1_000, 2_000, 4_000], lists:sublist(Pauses, 3)),
    ?assertEqual(300_000, lists:last(Pauses)),
    true = ets:delete(?MODULE, failing),
    {_, Again} = tried_again(Lister),
    Lister ! Again,
    Lister ! ask,
    _ = second_sweep(Lister),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    ?assertEqual(0, objects(<<"s">>)).

tried_again(Lister) ->
    receive
        {trace, Lister, call, {erlang, send_after, [Ms, Lister, {again, _} = Again]}} -> {Ms, Again}
    after 5_000 -> error(given_up)
    end.

grace() ->
    [_] = put_objects(<<"s">>, 1),
    ok = configure(3_600_000),
    Lister = whereis(?LISTER),
    1 = erlang:trace(Lister, true, [call]),
    _ = erlang:trace_pattern({erlang, send_after, 3}, true, []),
    ok = delete_stream(<<"s">>),
    {3_600_000, Again} = tried_again(Lister),
    ok = configure(0),
    ?assertEqual([<<"s">>], ?LISTER:pending()),
    ?assertEqual(1, objects(<<"s">>)),
    Lister ! Again,
    Lister ! ask,
    _ = second_sweep(Lister),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    ?assertEqual(0, objects(<<"s">>)).

second_sweep(Lister) ->
    receive
        {trace, Lister, call, {erlang, send_after, [_Ms, Lister, {again, _} = Again]}} -> Again
    after 5_000 -> error(no_second_sweep)
    end.

%% Each call makes the lister take one more message.
is_gone(_StreamId, 0) ->
    error(left_behind);
is_gone(StreamId, Left) ->
    case {objects(StreamId), ?LISTER:pending()} of
        {0, []} ->
            ok;
        _ ->
            _ = sys:get_state(?REAPER),
            is_gone(StreamId, Left - 1)
    end.

kept() ->
    [_] = put_objects(<<"kept">>, 1),
    [A] = put_objects(<<"gone">>, 1),
    true = ets:insert(?MODULE, {{kept, <<"kept">>}, x}),
    ok = rabbitmq_stream_s3_peers:delete_stream(<<"kept">>),
    ok = delete_stream(<<"gone">>),
    ?assertEqual({list, <<"gone">>, start}, next()),
    ?assertEqual({delete, [A]}, next()),
    ?assertEqual([<<"gone">>], ?LISTER:pending()),
    ?assertEqual(1, objects(<<"kept">>)),
    %% It may be deleted for good later.
    true = ets:delete(?MODULE, {kept, <<"kept">>}),
    ok = delete_stream(<<"kept">>),
    ?assertEqual({list, <<"kept">>, start}, next()).

silent() ->
    [A] = put_objects(<<"s">>, 1),
    true = ets:insert(?MODULE, {silent, once}),
    Lister = whereis(?LISTER),
    1 = erlang:trace(Lister, true, [call]),
    _ = erlang:trace_pattern({erlang, send_after, 3}, true, []),
    ok = rabbitmq_stream_s3_peers:delete_stream(<<"s">>),
    ok = asks_again(Lister, 1_000),
    Lister ! ask,
    ok = asks_again(Lister, 10_000),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    ?assertEqual(1, objects(<<"s">>)),
    Lister ! ask,
    ?assertEqual({list, <<"s">>, start}, next()),
    ?assertEqual({delete, [A]}, next()).

asks_again(Lister, Ms) ->
    receive
        {trace, Lister, call, {erlang, send_after, [Ms, Lister, ask]}} -> ok
    after 5_000 -> error(does_not_ask_again)
    end.

back() ->
    [A] = put_objects(<<"s">>, 1),
    Lister = whereis(?LISTER),
    1 = erlang:trace(Lister, true, [call]),
    _ = erlang:trace_pattern({erlang, send_after, 3}, true, []),
    ok = delete_stream(<<"s">>),
    Again = second_sweep(Lister),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    [A] = put_objects(<<"s">>, 1),
    true = ets:insert(?MODULE, {{kept, <<"s">>}, x}),
    Lister ! Again,
    Lister ! ask,
    ok = called_off(5_000),
    ?assertEqual(1, objects(<<"s">>)).

called_off(0) ->
    error(not_called_off);
called_off(Left) ->
    case ?LISTER:pending() of
        [] -> ok;
        _ -> called_off(Left - 1)
    end.
