%% Deletion of streams against a native side that is a table of objects. The pace between listing
%% and deleting is what is tested; the pause before the second sweep is not waited for.
-module(rabbitmq_stream_s3_lister_tests).

-include_lib("eunit/include/eunit.hrl").

-export([list_objects/5, delete_objects/4]).

-define(LISTER, rabbitmq_stream_s3_lister).
-define(REAPER, rabbitmq_stream_s3_reaper).

lister_test_() ->
    {foreach, fun start/0, fun stop/1, patient([
        {"all pages of a stream go, and nothing else", fun all_pages/0},
        {"the next page is asked for when the last has been deleted", fun paced/0},
        {"a stream that is told twice is swept once", fun once/0},
        {"a failed deletion is reported and tried again", fun failing/0},
        {"bug 25: what lands after the sweep goes with the second one", fun late_object/0}
    ])}.

%% A machine that builds something else at the same time is not a failure.
patient(Tests) ->
    [{timeout, 60, Test} || Test <- Tests].

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public, ordered_set]),
    load_double(),
    ok = rabbitmq_stream_s3:set_engine(double),
    {ok, Reaper} = ?REAPER:start_link(),
    {ok, Lister} = ?LISTER:start_link(),
    true = ets:insert(?MODULE, {test, self()}),
    [Reaper, Lister].

stop(Pids) ->
    [ok = gen_server:stop(Pid) || Pid <- Pids],
    ok = rabbitmq_stream_s3:erase_engine(),
    true = code:delete(rabbitmq_stream_s3_nif),
    _ = code:purge(rabbitmq_stream_s3_nif),
    true = ets:delete(?MODULE).

%% The NIF module's two functions, delegated to here: {object, Key} rows, pages of two.
load_double() ->
    Delegate = fun(Name, Arity) ->
        Args = lists:join(",", ["A" ++ integer_to_list(N) || N <- lists:seq(1, Arity)]),
        io_lib:format("~s(~s) -> ~s:~s(~s).", [Name, Args, ?MODULE, Name, Args])
    end,
    Lines = [
        "-module(rabbitmq_stream_s3_nif).",
        "-export([list_objects/5, delete_objects/4]).",
        Delegate(list_objects, 5),
        Delegate(delete_objects, 4)
    ],
    Forms = [
        begin
            {ok, Tokens, _} = erl_scan:string(lists:flatten(Line)),
            {ok, Form} = erl_parse:parse_form(Tokens),
            Form
        end
     || Line <- Lines
    ],
    {ok, Module, Binary} = compile:forms(Forms),
    _ = code:purge(Module),
    {module, Module} = code:load_binary(Module, "double", Binary).

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
    ok = ?LISTER:delete_stream(<<"s1">>),
    [_ = next() || _ <- lists:seq(1, 6)],
    ?assertEqual([<<"s1">>], ?LISTER:pending()),
    ?assertEqual(0, objects(<<"s1">>)),
    ?assertEqual(3, objects(<<"s2">>)).

paced() ->
    [A, B, C] = put_objects(<<"s">>, 3),
    ok = ?LISTER:delete_stream(<<"s">>),
    ?assertEqual({list, <<"s">>, start}, next()),
    ?assertEqual({delete, [A, B]}, next()),
    ?assertEqual({list, <<"s">>, B}, next()),
    ?assertEqual({delete, [C]}, next()).

once() ->
    _ = put_objects(<<"s">>, 1),
    ok = ?LISTER:delete_stream(<<"s">>),
    ok = ?LISTER:delete_stream(<<"s">>),
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
    ok = ?LISTER:delete_stream(<<"s">>),
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
    ok = ?LISTER:delete_stream(<<"s">>),
    Again = second_sweep(Lister),
    ?assertEqual(0, objects(<<"s">>)),
    %% An upload that was under way when the queue was deleted.
    [A] = put_objects(<<"s">>, 1),
    Lister ! Again,
    ok = gone(<<"s">>, 500),
    _ = erlang:trace_pattern({erlang, send_after, 3}, false, []),
    ok.

second_sweep(Lister) ->
    receive
        {trace, Lister, call, {erlang, send_after, [_Ms, Lister, {again, _} = Again]}} -> Again
    after 5_000 -> error(no_second_sweep)
    end.

%% Each call makes the lister take one more message.
gone(_StreamId, 0) ->
    error(left_behind);
gone(StreamId, Left) ->
    case {objects(StreamId), ?LISTER:pending()} of
        {0, []} ->
            ok;
        _ ->
            _ = sys:get_state(?REAPER),
            gone(StreamId, Left - 1)
    end.
