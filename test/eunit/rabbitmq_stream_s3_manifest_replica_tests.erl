%% Members of streams on this node: a native side, a metadata store and a local retention that tell
%% the test what they are asked, and answer when it says so.
-module(rabbitmq_stream_s3_manifest_replica_tests).

-include_lib("eunit/include/eunit.hrl").

-export([manifest_mark_pending/2, manifest_reset/2, manifest_forget/2, manifest_resolve/5]).
-export([manifest_apply_edit/5]).
%% A handler of the logger.
-export([log/2]).
-export([get_consistent/1, list/0, evaluate/2]).

-define(REPLICA, rabbitmq_stream_s3_manifest_replica).
-define(CACHE, rabbitmq_stream_s3_manifest_cache).
-define(ID, <<"stream">>).

replica_test_() ->
    {foreach, fun start/0, fun stop/1,
        patient([
            {"a new acceptor: pointer, manifest, row, retention", fun registers/0},
            {"what is open when the plugin comes is pending at once", fun marks_members/0},
            {"nothing is trimmed by what the writer has not told", fun unconfirmed/0},
            {"what it has told counts for that very manifest", fun confirmed_is_exact/0},
            {"nothing persisted is known as empty", fun empty/0},
            {"an unknown pointer stays pending and is asked for again", fun store_down/0},
            {"what is not newer is no news", fun stale/0},
            {"one fetch at a time, the newest wins", fun coalesces/0},
            {"a failed fetch reads the pointer again", fun failed/0},
            {"a root that is gone: the pointer is read at once, and then in peace", fun gone/0},
            {"a damaged manifest is its own stream's trouble", fun poisoned/0},
            {"news ends the pause after a failure", fun news_in_pause/0},
            {"an edit that follows is applied: row, retention, no fetch", fun edit_follows/0},
            {"an edit that does not follow asks for a sync, and the next one follows", fun edit_gap/0},
            {"an edit from another epoch asks for a sync", fun edit_of_another_epoch/0},
            {"an edit of a writer that is over is not believed", fun edit_of_an_old_writer/0},
            {"an edit during a sync changes nothing", fun edit_during_sync/0},
            {"a damaged edit asks for a sync, is told once, and hurts no other stream",
                fun edit_damaged/0},
            {"what the native side does not know asks for a sync", fun edit_not_known_natively/0},
            {"an edit of another shape asks for a sync", fun edit_of_another_shape/0},
            {"an edit from what is taken back changes nothing", fun edit_taken_back/0},
            {"edits of no member here, and without an engine, change nothing", fun edit_nowhere/0},
            {"a missed message is caught by the look", fun look/0},
            {"what is taken back is not believed", fun taken_back/0},
            {"a look believes it again, the second time", fun taken_back_for_good/0},
            {"what another has published is resolved here", fun published/0},
            {"what another has published is not believed if it is taken back",
                fun published_taken_back/0},
            {"with its member all of it goes", fun down/0},
            {"the row of a member that has come already stays", fun down_late/0},
            {"what the next writer has made known outlives the one before", fun down_late_writer/0},
            {"a member that becomes the writer resolves nothing here", fun becomes_writer/0},
            {"a writer that becomes a replica knows nothing", fun becomes_acceptor/0},
            {"a new engine has it resolved again, the row stays", fun engine_opened/0},
            {"only so many at a time", fun bounded/0},
            {"a changed retention counts in the next evaluation", fun retention/0},
            {"announcing needs nobody to listen", fun announces/0},
            {"the end of many members costs each as much as the end of one", fun many_end/0}
        ])}.

%% A machine that builds something else at the same time is not a failure.
patient(Tests) ->
    [{timeout, 60, Test} || Test <- Tests].

-define(DOUBLES, [
    {rabbitmq_stream_s3_nif, [
        {manifest_mark_pending, 2},
        {manifest_reset, 2},
        {manifest_forget, 2},
        {manifest_resolve, 5},
        {manifest_apply_edit, 5}
    ]},
    {rabbitmq_stream_s3_db, [{get_consistent, 1}, {list, 0}]},
    {rabbitmq_stream_s3_host_retention, [{evaluate, 2}]}
]).

start() ->
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    [stream_s3_double:load(Module, Functions, ?MODULE) || {Module, Functions} <- ?DOUBLES],
    ok = rabbitmq_stream_s3:set_engine(double),
    {ok, Pid} = ?REPLICA:start_link(),
    true = unlink(Pid),
    Pid.

stop(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end,
    ok = rabbitmq_stream_s3:erase_engine(),
    [stream_s3_double:unload(Module) || {Module, _} <- ?DOUBLES],
    true = ets:delete(?MODULE).

%% The doubles -------------------------------------------------------------------------------------

manifest_mark_pending(double, _StreamId) -> ok.

manifest_reset(double, StreamId) -> tell({reset, StreamId}).

manifest_forget(double, StreamId) -> tell({forgotten, StreamId}).

manifest_resolve(double, Pid, Ref, StreamId, What) ->
    tell({resolve, {Pid, Ref}, StreamId, What}).

manifest_apply_edit(double, StreamId, From, To, Edit) ->
    ok = tell({edit, StreamId, From, To}),
    case Edit of
        <<"good">> -> {ok, range(To)};
        <<"damaged">> -> {error, corrupt, <<"not what is persisted">>};
        <<"gap">> -> {error, gap, <<"something else is known">>};
        _ -> error(badarg)
    end.

log(#{level := warning, msg := {Format, _Arguments}}, #{config := Test}) ->
    Test ! {warned, Format};
log(_Event, _Config) ->
    ok.

get_consistent(StreamId) ->
    tell({read, StreamId}),
    [{pointer, Answer}] = ets:lookup(?MODULE, pointer),
    Answer.

list() ->
    [{list, Answer}] = ets:lookup(?MODULE, list),
    tell(looked),
    {ok, Answer}.

evaluate(#{stream_id := StreamId, retention := Retention}, _Member) ->
    tell({evaluated, ?CACHE:range(StreamId), Retention}).

tell(What) ->
    [{test, Pid}] = ets:lookup(?MODULE, test),
    Pid ! What,
    ok.

%% What a test does --------------------------------------------------------------------------------

store(Pointer) ->
    true = ets:insert(?MODULE, [{test, self()}, {pointer, Pointer}]).

member(Role) -> member(Role, ?ID).

member(Role, StreamId) ->
    Pid = spawn(fun() ->
        receive
            stop -> ok
        end
    end),
    ok = ?REPLICA:register_member(Role, Pid, info(StreamId)),
    Pid.

marks_members() ->
    Cache = osiris_reader_context_cache,
    Cache = ets:new(Cache, [named_table, public]),
    true = ets:insert(Cache, {self(), "/some/where", "name", shared, reference, fun(_) -> ok end}),
    ok = ?REPLICA:mark_members(),
    true = ets:delete(Cache),
    ?assertEqual(pending, ?CACHE:range(<<"name">>)),
    ?assertEqual({ok, <<"name">>}, ?CACHE:dir("/some/where")).

info(StreamId) ->
    #{
        stream_id => StreamId,
        name => StreamId,
        dir => <<"/nowhere/", StreamId/binary>>,
        epoch => 1,
        retention => [{max_bytes, 1}]
    }.

range({Epoch, _Uid, Revision} = Pointer) ->
    #{
        first_offset => 0,
        next_offset => 10 * Revision,
        first_timestamp => 1,
        total_size => 9,
        revision => Revision,
        epoch => Epoch,
        fragments => 1,
        pointer => Pointer
    }.

moved({Epoch, _Uid, _Revision} = Pointer) -> moved(Pointer, Epoch).

moved(Pointer, WriterEpoch) ->
    gen_server:cast(?REPLICA, {pointer_moved, ?ID, Pointer, WriterEpoch, 'writer@elsewhere'}).

asked() ->
    receive
        {resolve, From, ?ID, What} -> {From, What}
    after 10_000 -> error(not_asked)
    end.

answer({Pid, Ref}, Answer) ->
    Pid ! {rabbitmq_stream_s3, Ref, Answer}.

%% The writer says the same; that is no news.
answer(Pointer) ->
    {From, Pointer} = asked(),
    moved(Pointer),
    answer(From, {resolved, range(Pointer)}),
    Range = range(Pointer),
    receive
        {evaluated, {ok, Range}, _} -> ok
    after 10_000 -> error(not_evaluated)
    end.

wait(Message) ->
    receive
        Message -> ok
    after 10_000 -> error({not_told, Message})
    end.

%% Everything that was sent before has been handled.
settle() ->
    _ = ?REPLICA:members(),
    ok.

nothing_asked() ->
    settle(),
    receive
        {resolve, _, _, What} -> error({asked, What})
    after 0 -> ok
    end.

%% A replica whose manifest is known.
known(Pointer) ->
    store({ok, Pointer}),
    Pid = member(acceptor),
    ok = answer(Pointer),
    wait({read, ?ID}),
    wait({reset, ?ID}),
    Pid.

%% Tests -------------------------------------------------------------------------------------------

registers() ->
    store({ok, {1, 7, 5}}),
    _ = member(acceptor),
    {From, {1, 7, 5}} = asked(),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    ?assertEqual(1, ?CACHE:pending()),
    ?assertEqual({ok, ?ID}, ?CACHE:dir(<<"/nowhere/stream">>)),
    moved({1, 7, 5}),
    answer(From, {resolved, range({1, 7, 5})}),
    Range = range({1, 7, 5}),
    wait({evaluated, {ok, Range}, [{max_bytes, 1}]}),
    ?assertEqual(0, ?CACHE:pending()),
    nothing_asked().

%% The writer has not seen yet that its log goes on where the manifest ends.
unconfirmed() ->
    store({ok, {1, 7, 5}}),
    _ = member(acceptor),
    {From, {1, 7, 5}} = asked(),
    answer(From, {resolved, range({1, 7, 5})}),
    %% Of a log that this member's may not be any more.
    moved({1, 7, 5}, 0),
    nothing_asked(),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    moved({1, 7, 5}),
    Range = range({1, 7, 5}),
    wait({evaluated, {ok, Range}, [{max_bytes, 1}]}),
    nothing_asked().

%% A newer one that is confirmed says nothing about this one.
confirmed_is_exact() ->
    store({ok, {1, 7, 5}}),
    _ = member(acceptor),
    {From, {1, 7, 5}} = asked(),
    moved({1, 8, 6}),
    answer(From, {resolved, range({1, 7, 5})}),
    {Next, {1, 8, 6}} = asked(),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    answer(Next, {resolved, range({1, 8, 6})}),
    Range = range({1, 8, 6}),
    wait({evaluated, {ok, Range}, [{max_bytes, 1}]}).

empty() ->
    store(not_found),
    _ = member(acceptor),
    {From, empty} = asked(),
    Range = (range({0, 0, 0}))#{pointer := none},
    answer(From, {resolved, Range}),
    wait({evaluated, {ok, Range}, [{max_bytes, 1}]}),
    moved({1, 3, 1}),
    answer({1, 3, 1}).

store_down() ->
    store({error, timeout}),
    _ = member(acceptor),
    wait({read, ?ID}),
    wait({read, ?ID}),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    store({ok, {1, 7, 5}}),
    answer({1, 7, 5}).

stale() ->
    _ = known({2, 7, 5}),
    moved({1, 6, 4}),
    moved({2, 7, 5}),
    nothing_asked(),
    moved({2, 8, 6}),
    answer({2, 8, 6}).

coalesces() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    moved({1, 9, 7}),
    moved({1, 11, 9}),
    moved({1, 10, 8}),
    nothing_asked(),
    answer(From, {resolved, range({1, 8, 6})}),
    answer({1, 11, 9}),
    nothing_asked().

failed() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    store({ok, {1, 9, 7}}),
    answer(From, {error, not_found, <<"404">>}),
    wait({read, ?ID}),
    answer({1, 9, 7}).

gone() ->
    C = rabbitmq_stream_s3_manifest_context,
    {read, Reading} = C:next(C:new()),
    {fetch, {1, 7, 5}, Fetching} = C:pointer_read({ok, {1, 7, 5}}, Reading),
    {idle, Gone} = C:failed(not_found, Fetching),
    {read, ReadingAgain} = C:next(Gone),
    {fetch, {1, 8, 6}, FetchingAgain} = C:pointer_read({ok, {1, 8, 6}}, ReadingAgain),
    {wait, Ms, Waiting} = C:failed(not_found, FetchingAgain),
    ?assert(Ms >= 500),
    none = C:next(Waiting),
    {read, Last} = C:next(C:waited(Waiting)),
    {fetch, {1, 8, 6}, FetchingLast} = C:pointer_read({ok, {1, 8, 6}}, Last),
    {ok, Known} = C:fetched(FetchingLast),
    ?assertEqual({6, 0}, {C:revision(Known), C:failures(Known)}),
    %% What has been announced meanwhile needs no reading.
    {fetch, {1, 9, 7}, FetchingNews} = C:next(C:announced({1, 9, 7}, Known)),
    {idle, GoneToo} = C:failed(not_found, C:announced({1, 10, 8}, FetchingNews)),
    {fetch, {1, 10, 8}, _} = C:next(GoneToo).

poisoned() ->
    _ = known({1, 7, 5}),
    Other = <<"other">>,
    _ = member(acceptor, Other),
    Bad = receive
        {resolve, First, Other, {1, 7, 5}} -> First
    after 10_000 -> error(not_asked)
    end,
    answer(Bad, {error, corrupt, <<"not a root">>}),
    moved({1, 8, 6}),
    answer({1, 8, 6}),
    ?assertEqual({ok, range({1, 8, 6})}, ?CACHE:range(?ID)),
    ?assertEqual(pending, ?CACHE:range(Other)),
    %% It is asked for again, for ever.
    receive
        {resolve, Second, Other, {1, 7, 5}} ->
            Pointer = {1, 7, 5},
            gen_server:cast(?REPLICA, {pointer_moved, Other, Pointer, 1, 'writer@elsewhere'}),
            answer(Second, {resolved, range(Pointer)}),
            Range = range(Pointer),
            wait({evaluated, {ok, Range}, [{max_bytes, 1}]})
    after 10_000 -> error(not_asked_again)
    end.

news_in_pause() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    answer(From, {error, access_denied, <<"403">>}),
    moved({1, 9, 7}),
    answer({1, 9, 7}).

edit(From, To, Edit) -> edit(?ID, From, To, 1, Edit).

%% And what follows it.
edit(StreamId, From, To, WriterEpoch, Edit) ->
    Writer = 'writer@elsewhere',
    gen_server:cast(?REPLICA, {manifest_edit, StreamId, From, To, WriterEpoch, Edit, Writer}),
    gen_server:cast(?REPLICA, {pointer_moved, StreamId, To, WriterEpoch, Writer}).

applied(From, To) ->
    wait({edit, ?ID, From, To}),
    Range = range(To),
    wait({evaluated, {ok, Range}, [{max_bytes, 1}]}),
    nothing_asked(),
    ?assertEqual({ok, Range}, ?CACHE:range(?ID)).

%% The announcement has led to a fetch.
synced(To) ->
    ok = answer(To),
    not_tried().

not_tried() ->
    receive
        {edit, _, _, _} = Tried -> error(Tried)
    after 0 -> ok
    end.

edit_follows() ->
    _ = known({1, 7, 5}),
    edit({1, 7, 5}, {1, 8, 6}, <<"good">>),
    applied({1, 7, 5}, {1, 8, 6}),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    applied({1, 8, 6}, {1, 9, 7}),
    %% The next writer's, too.
    edit(?ID, {1, 9, 7}, {2, 3, 8}, 2, <<"good">>),
    applied({1, 9, 7}, {2, 3, 8}),
    %% One that comes twice or late.
    edit({1, 9, 7}, {2, 3, 8}, <<"good">>),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    nothing_asked(),
    not_tried().

edit_gap() ->
    _ = known({1, 7, 5}),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    synced({1, 9, 7}),
    edit({1, 9, 7}, {1, 10, 8}, <<"good">>),
    applied({1, 9, 7}, {1, 10, 8}).

edit_of_another_epoch() ->
    _ = known({1, 7, 5}),
    edit(?ID, {2, 7, 5}, {2, 8, 6}, 2, <<"good">>),
    synced({2, 8, 6}),
    edit(?ID, {2, 8, 6}, {2, 9, 7}, 2, <<"good">>),
    applied({2, 8, 6}, {2, 9, 7}).

edit_of_an_old_writer() ->
    _ = known({1, 7, 5}),
    edit(?ID, {1, 7, 5}, {1, 8, 6}, 0, <<"good">>),
    nothing_asked(),
    not_tried(),
    ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)).

edit_during_sync() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    %% It could be applied; but an answer is under way that would come behind it.
    edit({1, 7, 5}, {1, 8, 6}, <<"good">>),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    nothing_asked(),
    not_tried(),
    ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)),
    answer(From, {resolved, range({1, 8, 6})}),
    synced({1, 9, 7}).

edit_damaged() ->
    ok = logger:add_handler(?MODULE, ?MODULE, #{config => self()}),
    try
        _ = known({1, 7, 5}),
        Other = <<"other">>,
        _ = member(acceptor, Other),
        receive
            {resolve, First, Other, {1, 7, 5}} -> answer(First, {resolved, range({1, 7, 5})})
        after 10_000 -> error(not_asked)
        end,
        edit({1, 7, 5}, {1, 8, 6}, <<"damaged">>),
        wait({edit, ?ID, {1, 7, 5}, {1, 8, 6}}),
        edit(Other, {1, 7, 5}, {1, 8, 6}, 1, <<"good">>),
        wait({edit, Other, {1, 7, 5}, {1, 8, 6}}),
        {From, {1, 8, 6}} = asked(),
        %% Nothing of it has reached a row.
        ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)),
        ?assertEqual({ok, range({1, 8, 6})}, ?CACHE:range(Other)),
        answer(From, {resolved, range({1, 8, 6})}),
        edit({1, 8, 6}, {1, 9, 7}, <<"damaged">>),
        wait({edit, ?ID, {1, 8, 6}, {1, 9, 7}}),
        synced({1, 9, 7}),
        ?assertEqual(1, warnings()),
        edit({1, 9, 7}, {1, 10, 8}, <<"good">>),
        wait({edit, ?ID, {1, 9, 7}, {1, 10, 8}}),
        edit({1, 10, 8}, {1, 11, 9}, <<"damaged">>),
        wait({edit, ?ID, {1, 10, 8}, {1, 11, 9}}),
        synced({1, 11, 9}),
        ?assertEqual(1, warnings(), "again, as one had been applied")
    after
        ok = logger:remove_handler(?MODULE)
    end.

warnings() ->
    receive
        {warned, _} -> 1 + warnings()
    after 0 -> 0
    end.

edit_not_known_natively() ->
    _ = known({1, 7, 5}),
    edit({1, 7, 5}, {1, 8, 6}, <<"gap">>),
    wait({edit, ?ID, {1, 7, 5}, {1, 8, 6}}),
    synced({1, 8, 6}).

edit_of_another_shape() ->
    _ = known({1, 7, 5}),
    edit({1, 7, 5}, {1, 8, 6}, not_even_a_binary),
    wait({edit, ?ID, {1, 7, 5}, {1, 8, 6}}),
    synced({1, 8, 6}),
    edit(nowhere, somewhere, <<"good">>),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    applied({1, 8, 6}, {1, 9, 7}).

edit_taken_back() ->
    _ = known({1, 7, 5}),
    take_back(5),
    edit({1, 7, 5}, {1, 8, 6}, <<"good">>),
    {From, {1, 8, 6}} = asked(),
    not_tried(),
    answer(From, {resolved, range({1, 8, 6})}),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    applied({1, 8, 6}, {1, 9, 7}).

edit_nowhere() ->
    Pid = known({1, 7, 5}),
    edit(<<"of no member">>, {1, 7, 5}, {1, 8, 6}, 1, <<"good">>),
    ok = rabbitmq_stream_s3:erase_engine(),
    edit({1, 7, 5}, {1, 8, 6}, <<"good">>),
    settle(),
    ok = rabbitmq_stream_s3:set_engine(double),
    Pid ! stop,
    wait({forgotten, ?ID}),
    edit({1, 8, 6}, {1, 9, 7}, <<"good">>),
    nothing_asked(),
    not_tried(),
    ?assertEqual(none, ?CACHE:range(?ID)).

look() ->
    _ = known({1, 7, 5}),
    true = ets:insert(?MODULE, {list, #{?ID => {1, 7, 5}}}),
    ok = ?REPLICA:look(),
    wait(looked),
    nothing_asked(),
    true = ets:insert(?MODULE, {list, #{?ID => {1, 9, 8}}}),
    %% The one before may not have ended yet, then this one does nothing.
    look_until_asked().

look_until_asked() ->
    ok = ?REPLICA:look(),
    receive
        {resolve, From, ?ID, {1, 9, 8}} ->
            moved({1, 9, 8}),
            answer(From, {resolved, range({1, 9, 8})}),
            Range = range({1, 9, 8}),
            wait({evaluated, {ok, Range}, [{max_bytes, 1}]})
    after 100 -> look_until_asked()
    end.

take_back(Revision) ->
    gen_server:cast(?REPLICA, {pointer_taken_back, ?ID, Revision, 'writer@elsewhere'}),
    wait({reset, ?ID}),
    ?assertEqual(pending, ?CACHE:range(?ID)).

taken_back() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    take_back(6),
    answer(From, {resolved, range({1, 8, 6})}),
    wait({reset, ?ID}),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    moved({2, 9, 7}),
    answer({2, 9, 7}),
    %% One that comes late.
    gen_server:cast(?REPLICA, {pointer_taken_back, ?ID, 6, 'writer@elsewhere'}),
    settle(),
    ?assertEqual({ok, range({2, 9, 7})}, ?CACHE:range(?ID)).

taken_back_for_good() ->
    _ = known({1, 7, 5}),
    take_back(5),
    true = ets:insert(?MODULE, {list, #{?ID => {1, 7, 5}}}),
    ok = ?REPLICA:look(),
    wait(looked),
    look_until({1, 7, 5}).

published() ->
    _ = known({1, 7, 5}),
    ?assertEqual(ok, ?CACHE:published(?ID, {1, 8, 6})),
    {From, {1, 8, 6}} = asked(),
    answer(From, {resolved, range({1, 8, 6})}),
    %% The row waits for the writer, as ever.
    settle(),
    ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)),
    ?assertEqual(ok, ?CACHE:published(?ID, {1, 8, 6})),
    nothing_asked(),
    ?assertEqual(ok, ?CACHE:published(<<"of no member here">>, {1, 8, 6})).

published_taken_back() ->
    _ = known({1, 7, 5}),
    take_back(5),
    ?assertEqual(taken_back, ?CACHE:published(?ID, {1, 7, 5})),
    wait({reset, ?ID}),
    nothing_asked().

look_until(Pointer) ->
    ok = ?REPLICA:look(),
    receive
        {resolve, From, ?ID, Pointer} -> answer(From, {resolved, range(Pointer)})
    after 100 -> look_until(Pointer)
    end.

down() ->
    Pid = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    Pid ! stop,
    wait({forgotten, ?ID}),
    settle(),
    ?assertEqual(none, ?CACHE:range(?ID)),
    ?assertEqual(none, ?CACHE:dir(<<"/nowhere/stream">>)),
    ?assertEqual({ok, #{}}, ?REPLICA:members()),
    answer(From, {resolved, range({1, 8, 6})}),
    moved({1, 9, 7}),
    nothing_asked(),
    ?assertEqual(none, ?CACHE:range(?ID)).

%% The next member opens its log before the end of the one before it is noticed.
down_late() ->
    Pid = known({1, 7, 5}),
    ok = ?REPLICA:member_started(acceptor, <<"/nowhere/stream">>, ?ID),
    wait({reset, ?ID}),
    Monitor = monitor(process, Pid),
    Pid ! stop,
    wait_down(Monitor),
    settle(),
    ?assertEqual({ok, #{}}, ?REPLICA:members()),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    ?assertEqual({ok, ?ID}, ?CACHE:dir(<<"/nowhere/stream">>)).

wait_down(Monitor) ->
    receive
        {'DOWN', Monitor, _, _, _} -> ok
    end.

becomes_writer() ->
    _ = known({1, 7, 5}),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    _ = member(writer),
    answer(From, {resolved, range({1, 8, 6})}),
    moved({1, 9, 7}),
    nothing_asked(),
    ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)).

down_late_writer() ->
    Dead = member(writer),
    settle(),
    %% In its own process, as the hook does it; its registration comes later.
    ok = ?REPLICA:member_started(writer, <<"/nowhere/stream">>, ?ID),
    Range = range({2, 9, 7}),
    ok = ?CACHE:put(?ID, Range),
    Monitor = monitor(process, Dead),
    Dead ! stop,
    wait_down(Monitor),
    settle(),
    ?assertEqual({ok, Range}, ?CACHE:range(?ID)),
    ?assertEqual({ok, ?ID}, ?CACHE:dir(<<"/nowhere/stream">>)),
    receive
        {forgotten, _} = Forgotten -> error(Forgotten)
    after 0 -> ok
    end.

becomes_acceptor() ->
    store({ok, {2, 8, 6}}),
    _ = member(writer),
    ok = ?CACHE:put(?ID, range({1, 7, 5})),
    _ = member(acceptor),
    wait({reset, ?ID}),
    {From, {2, 8, 6}} = asked(),
    ?assertEqual(pending, ?CACHE:range(?ID)),
    answer(From, {resolved, range({2, 8, 6})}).

engine_opened() ->
    _ = known({1, 7, 5}),
    ok = rabbitmq_stream_s3:erase_engine(),
    moved({1, 8, 6}),
    nothing_asked(),
    store({ok, {1, 8, 6}}),
    ok = rabbitmq_stream_s3:set_engine(double),
    ok = ?REPLICA:engine_opened(),
    {From, {1, 8, 6}} = asked(),
    ?assertEqual({ok, range({1, 7, 5})}, ?CACHE:range(?ID)),
    answer(From, {resolved, range({1, 8, 6})}).

bounded() ->
    store({ok, {1, 7, 5}}),
    Ids = [integer_to_binary(N) || N <- lists:seq(1, 100)],
    _ = [member(acceptor, Id) || Id <- Ids],
    Asked = [
        receive
            {resolve, From, _, _} -> From
        after 10_000 -> error(not_asked)
        end
     || _ <- lists:seq(1, 32)
    ],
    nothing_asked(),
    answer_all(Asked, 100 - 32).

answer_all([], 0) ->
    ok;
answer_all([From | Asked], Left) ->
    answer(From, {resolved, range({1, 7, 5})}),
    case Left of
        0 ->
            answer_all(Asked, 0);
        _ ->
            receive
                {resolve, Next, _, _} -> answer_all(Asked ++ [Next], Left - 1)
            after 10_000 -> error(not_asked)
            end
    end.

retention() ->
    Pid = known({1, 7, 5}),
    ok = ?REPLICA:update_retention(?ID, Pid, [{max_age, 3}]),
    moved({1, 8, 6}),
    {From, {1, 8, 6}} = asked(),
    answer(From, {resolved, range({1, 8, 6})}),
    Range = range({1, 8, 6}),
    wait({evaluated, {ok, Range}, [{max_age, 3}]}).

announces() ->
    store(not_found),
    Nodes = [node(), 'nobody@nowhere'],
    ok = rabbitmq_stream_s3_peers:ask_writer(?ID),
    gen_server:cast(?REPLICA, {pointer_wanted, ?ID, 'nobody@nowhere'}),
    settle(),
    From = {{1, 6, 4}, <<"edit">>},
    ok = rabbitmq_stream_s3_peers:announce(Nodes, ?ID, range({1, 7, 5}), none),
    ok = rabbitmq_stream_s3_peers:announce(Nodes, ?ID, range({1, 7, 5}), From),
    ok = rabbitmq_stream_s3_peers:announce(Nodes, ?ID, (range({1, 7, 5}))#{pointer := none}, none),
    ok = rabbitmq_stream_s3_peers:announce(Nodes, ?ID, (range({0, 0, 0}))#{pointer := none}, none).

many_end() ->
    true = ets:insert(?MODULE, {test, self()}),
    Alone = cost_of_end(10),
    Many = cost_of_end(4_000),
    ?assert(Many < 4 * Alone).

%% Reductions for each member that ends.
cost_of_end(Count) ->
    Pids = [member(writer, integer_to_binary(N)) || N <- lists:seq(1, Count)],
    settle(),
    Before = reductions(),
    Monitors = [monitor(process, Pid) || Pid <- Pids],
    [Pid ! stop || Pid <- Pids],
    [wait_down(Monitor) || Monitor <- Monitors],
    ok = no_members(),
    (reductions() - Before) / Count.

%% The server hears of an end by a signal of its own.
no_members() ->
    case ?REPLICA:members() of
        {ok, Members} when Members =:= #{} -> ok;
        _ -> no_members()
    end.

reductions() ->
    {reductions, Reductions} = process_info(whereis(?REPLICA), reductions),
    Reductions.
