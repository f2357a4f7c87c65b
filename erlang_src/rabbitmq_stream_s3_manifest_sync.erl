-module(rabbitmq_stream_s3_manifest_sync).
-moduledoc """
How the manifests of streams that are written on other nodes come to this one. Usually by edits: one that
continues what is known here is applied natively. Otherwise by a *sync*: the pointer is read, and the root
that it names is fetched and published natively. Then the row is put and local retention runs, in this
order: what is trimmed must be findable by then. Row and retention wait until the writer has announced that
very manifest; after a start, and in each look, it is asked to.

Events in, actions out: no process, no clock, no message. rabbitmq_stream_s3_manifest_replica performs the
actions, in their order, and brings the answers back with the key that it was given.

Owns which work is under way: at most ?WORK_MAX pieces, one for each stream. Does not own what comes next for
one stream (rabbitmq_stream_s3_manifest_context).
""".

-export([
    new/0,
    add/3,
    update/3,
    remove/2,
    announced/4,
    edited/6,
    edit_applied/4,
    taken_back/3,
    published/3,
    wanted/2,
    look/1,
    looked/2,
    engine_opened/1,
    answered/3,
    waited/3
]).

-export_type([t/0, action/0, key/0, answer/0]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type info() :: rabbitmq_stream_s3:member_info().
-type pointer() :: rabbitmq_stream_s3:pointer().

-doc "Names one piece of work; an answer to one that is not under way is dropped.".
-type key() :: pos_integer().

-type action() ::
    %% Put the row.
    {put, stream_id(), rabbitmq_stream_s3:range()}
    %% The manifest is not known any more, whatever it was.
    | {reset, stream_id()}
    %% Have local retention evaluated.
    | {evaluate, info()}
    | {ask_writer, stream_id()}
    %% Answer with edit_applied/4, before anything else.
    | {apply_edit, stream_id(), From :: pointer(), To :: pointer(), Edit :: binary()}
    %% Answer with answered/3.
    | {read_pointer, key(), stream_id()}
    | {fetch, key(), stream_id(), empty | pointer()}
    %% Nobody waits for these answers any more.
    | {drop, [key()]}
    %% Answer with looked/2: which of these the node's copy of the pointers has news of.
    | {look, #{stream_id() => Revision :: integer()}}
    %% Answer with waited/3.
    | {wait, DelayMs :: pos_integer(), stream_id(), reference()}
    | {count, atom()}
    | {log, debug | info | warning, io:format(), [term()]}.

-type answer() ::
    {pointer, {ok, pointer()} | not_found | error}
    | {resolved, rabbitmq_stream_s3:range()}
    | {error, Kind :: atom(), Text :: binary()}
    %% It could not be begun.
    | {refused, Kind :: atom()}
    %% Nobody will answer any more.
    | lost.

-record(stream, {
    %% A new one for each member: an answer for the one before it is not for this one.
    id :: reference(),
    info :: info(),
    context = rabbitmq_stream_s3_manifest_context:new() ::
        rabbitmq_stream_s3_manifest_context:t(),
    %% What is published, until the row says the same.
    range :: rabbitmq_stream_s3:range() | undefined,
    %% Whether a damaged edit has been reported, and none has been applied since.
    damage_reported = false :: boolean()
}).
-record(sync, {
    streams = #{} :: #{stream_id() => #stream{}},
    %% Streams that may have something to do.
    ready = queue:new() :: queue:queue(stream_id()),
    %% Those of them that consumers wait for.
    wanted = #{} :: #{stream_id() => []},
    work = #{} :: #{key() => stream_id()},
    next_key = 1 :: key(),
    is_looking = false :: boolean(),
    %% In reverse order; empty between two events.
    actions = [] :: [action()]
}).

-opaque t() :: #sync{}.

-define(WORK_MAX, 32).
%% As many failures in a row are everyday: a root has been replaced meanwhile, a writer has just moved.
-define(FAILURES_REPORTED, 3).

-spec new() -> t().
new() ->
    #sync{}.

-doc "A replica of which nothing is known.".
-spec add(stream_id(), info(), t()) -> {[action()], t()}.
add(StreamId, Info, T0) ->
    #sync{streams = Streams} = T = act({ask_writer, StreamId}, stop_work(StreamId, T0)),
    Stream = #stream{id = make_ref(), info = Info},
    run(ready(StreamId, T#sync{streams = Streams#{StreamId => Stream}})).

-spec update(stream_id(), info(), t()) -> {[action()], t()}.
update(StreamId, Info, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := Stream} ->
            done(T#sync{streams = Streams#{StreamId := Stream#stream{info = Info}}});
        _ ->
            done(T)
    end.

-spec remove(stream_id(), t()) -> {[action()], t()}.
remove(StreamId, #sync{streams = Streams} = T) ->
    run(stop_work(StreamId, T#sync{streams = maps:remove(StreamId, Streams)})).

-doc "The writer of this epoch says that this is the pointer now.".
-spec announced(stream_id(), pointer(), osiris:epoch(), t()) -> {[action()], t()}.
announced(StreamId, Pointer, WriterEpoch, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{info = #{epoch := Epoch}}} when WriterEpoch >= Epoch ->
            News = fun(C) -> rabbitmq_stream_s3_manifest_context:announced(Pointer, C) end,
            run(confirm(StreamId, news(StreamId, News, T)));
        _ ->
            %% Or a writer of before: this member's log may not be its any more.
            done(T)
    end.

-doc """
The writer of this epoch sends the edit from one pointer to another. If it does not continue what is known
here nothing changes: the announcement behind it leads to a fetch.
""".
-spec edited(stream_id(), pointer(), pointer(), osiris:epoch(), binary(), t()) ->
    {[action()], t()}.
edited(StreamId, From, To, WriterEpoch, Edit, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{info = #{epoch := Epoch}, context = Context}} when
            WriterEpoch >= Epoch
        ->
            case rabbitmq_stream_s3_manifest_context:follows(From, To, Context) of
                true -> done(act({apply_edit, StreamId, From, To, Edit}, T));
                false -> done(act({count, manifest_edits_unfitting}, T))
            end;
        _ ->
            done(T)
    end.

-doc "What came of applying an edit.".
-spec edit_applied(
    stream_id(), To :: pointer(), {ok, rabbitmq_stream_s3:range()} | {error, atom(), binary()}, t()
) -> {[action()], t()}.
edit_applied(StreamId, To, Result, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context, damage_reported = Reported} = Stream} = Streams,
    case Result of
        {ok, Range} ->
            Followed = rabbitmq_stream_s3_manifest_context:followed(To, Context),
            Applied = Stream#stream{context = Followed, range = Range, damage_reported = false},
            run(confirm(StreamId, set(StreamId, Applied, act({count, manifest_edits_applied}, T))));
        {error, corrupt, Text} ->
            Counted = act({count, manifest_edits_corrupt}, T),
            Logged = report_damage(Reported, StreamId, Text, Counted),
            run(set(StreamId, Stream#stream{damage_reported = true}, Logged));
        {error, _NotKnownNatively, _Text} ->
            run(act({count, manifest_edits_unfitting}, T))
    end.

-doc "The writer withdraws the manifest of this revision.".
-spec taken_back(stream_id(), pos_integer(), t()) -> {[action()], t()}.
taken_back(StreamId, Revision, T0) ->
    News = fun(C) -> rabbitmq_stream_s3_manifest_context:taken_back(Revision, C) end,
    case news(StreamId, News, T0) of
        T0 ->
            done(T0);
        T ->
            #sync{streams = #{StreamId := Stream} = Streams} = T,
            Withdrawn = T#sync{streams = Streams#{StreamId := Stream#stream{range = undefined}}},
            run(act({reset, StreamId}, Withdrawn))
    end.

-doc "Another process has had the engine publish the manifest that this pointer names.".
-spec published(stream_id(), pointer(), t()) -> {ok | taken_back, [action()], t()}.
published(StreamId, Pointer, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{context = Context}} ->
            case rabbitmq_stream_s3_manifest_context:is_taken_back(Pointer, Context) of
                true ->
                    reply(taken_back, done(act({reset, StreamId}, T)));
                false ->
                    News = fun(C) -> rabbitmq_stream_s3_manifest_context:seen(Pointer, C) end,
                    reply(ok, run(news(StreamId, News, T)))
            end;
        _ ->
            reply(ok, done(T))
    end.

-doc "A consumer waits for the manifest of this stream.".
-spec wanted(stream_id(), t()) -> {[action()], t()}.
wanted(StreamId, #sync{streams = Streams, wanted = Wanted} = T) when
    is_map_key(StreamId, Streams)
->
    run(T#sync{wanted = Wanted#{StreamId => []}});
wanted(_StreamId, T) ->
    done(T).

-doc "Compares what is known of every stream with this node's copy of the pointers.".
-spec look(t()) -> {[action()], t()}.
look(#sync{streams = Streams} = T0) ->
    T = lists:foldl(
        fun(StreamId, T1) -> act({ask_writer, StreamId}, T1) end,
        T0,
        [
            Id
         || Id := #stream{context = C} <- Streams,
            not rabbitmq_stream_s3_manifest_context:confirmed(C)
        ]
    ),
    case T of
        #sync{is_looking = true} ->
            run(T);
        _ ->
            Known = #{
                Id => rabbitmq_stream_s3_manifest_context:revision(C)
             || Id := #stream{context = C} <- Streams
            },
            run(act({look, Known}, T#sync{is_looking = true}))
    end.

-doc "What the copy has news of; nothing if looking failed.".
-spec looked([{stream_id(), pointer() | none}], t()) -> {[action()], t()}.
looked(Seen, T) ->
    run(lists:foldl(fun seen/2, T#sync{is_looking = false}, Seen)).

-doc "A new engine knows no manifest.".
-spec engine_opened(t()) -> {[action()], t()}.
engine_opened(#sync{streams = Streams} = T) ->
    run(
        lists:foldl(
            fun(StreamId, T1) -> start_over(StreamId, act({ask_writer, StreamId}, T1)) end,
            T,
            maps:keys(Streams)
        )
    ).

-doc "The answer to a piece of work.".
-spec answered(key(), answer(), t()) -> {[action()], t()}.
answered(Key, Answer, #sync{work = Work} = T) ->
    case maps:take(Key, Work) of
        {StreamId, Rest} -> run(answer(StreamId, Answer, T#sync{work = Rest}));
        error -> done(T)
    end.

-doc "The pause of this member is over.".
-spec waited(stream_id(), reference(), t()) -> {[action()], t()}.
waited(StreamId, Id, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{id = Id}} ->
            run(news(StreamId, fun rabbitmq_stream_s3_manifest_context:waited/1, T));
        _ ->
            done(T)
    end.

%% Answers -----------------------------------------------------------------------------------------

answer(StreamId, {pointer, Read}, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context0} = Stream} = Streams,
    case rabbitmq_stream_s3_manifest_context:pointer_read(Read, Context0) of
        {fetch, What, Context} -> fetch(StreamId, What, Stream#stream{context = Context}, T);
        Other -> pause(StreamId, Other, Stream, T)
    end;
answer(StreamId, {resolved, Range}, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context0} = Stream} = Streams,
    case rabbitmq_stream_s3_manifest_context:fetched(Context0) of
        {ok, Context} ->
            Fetched = Stream#stream{context = Context, range = Range},
            confirm(StreamId, set(StreamId, Fetched, report_known(StreamId, Context0, T)));
        {taken_back, Context} ->
            set(StreamId, Stream#stream{context = Context}, act({reset, StreamId}, T))
    end;
answer(StreamId, {error, Kind, Text}, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context} = Stream} = Streams,
    Reported = report_problem(StreamId, Kind, Text, Context, T),
    pause(StreamId, rabbitmq_stream_s3_manifest_context:failed(Kind, Context), Stream, Reported);
answer(StreamId, {refused, Kind}, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context} = Stream} = Streams,
    pause(StreamId, rabbitmq_stream_s3_manifest_context:failed(Kind, Context), Stream, T);
answer(StreamId, lost, T) ->
    start_over(StreamId, T).

confirm(StreamId, #sync{streams = Streams} = T) ->
    #{StreamId := #stream{context = Context, range = Range, info = Info} = Stream} = Streams,
    case Range =/= undefined andalso rabbitmq_stream_s3_manifest_context:confirmed(Context) of
        true ->
            Put = act({put, StreamId, Range}, T),
            Known = Streams#{StreamId := Stream#stream{range = undefined}},
            act({evaluate, Info}, Put#sync{streams = Known});
        false ->
            T
    end.

seen({StreamId, Pointer}, T0) ->
    News = fun(C) -> rabbitmq_stream_s3_manifest_context:seen(Pointer, C) end,
    case news(StreamId, News, T0) of
        T0 -> T0;
        T -> act({count, pointer_moves_missed}, T)
    end.

%% Work --------------------------------------------------------------------------------------------

run(#sync{work = Work} = T) when map_size(Work) >= ?WORK_MAX ->
    done(T);
run(#sync{wanted = Wanted} = T) when map_size(Wanted) > 0 ->
    {StreamId, [], _} = maps:next(maps:iterator(Wanted)),
    run(begin_next(StreamId, T#sync{wanted = maps:remove(StreamId, Wanted)}));
run(#sync{ready = Ready0} = T) ->
    case queue:out(Ready0) of
        {empty, _} -> done(T);
        {{value, StreamId}, Ready} -> run(begin_next(StreamId, T#sync{ready = Ready}))
    end.

begin_next(StreamId, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{context = Context0} = Stream} ->
            case rabbitmq_stream_s3_manifest_context:next(Context0) of
                {read, Context} -> read(StreamId, Stream#stream{context = Context}, T);
                {fetch, What, Context} -> fetch(StreamId, What, Stream#stream{context = Context}, T);
                none -> T
            end;
        _ ->
            T
    end.

read(StreamId, Stream, T) ->
    {Key, Working} = work(StreamId, Stream, T),
    act({read_pointer, Key, StreamId}, Working).

fetch(StreamId, What, Stream, T) ->
    {Key, Working} = work(StreamId, Stream, T),
    act({fetch, Key, StreamId, What}, Working).

work(StreamId, Stream, #sync{streams = Streams, work = Work, next_key = Key} = T) ->
    {Key, T#sync{
        streams = Streams#{StreamId := Stream},
        work = Work#{Key => StreamId},
        next_key = Key + 1
    }}.

%% It may end by itself; nobody listens.
stop_work(StreamId, #sync{work = Work} = T) ->
    case [Key || Key := Of <- Work, Of =:= StreamId] of
        [] -> T;
        Keys -> act({drop, Keys}, T#sync{work = maps:without(Keys, Work)})
    end.

%% The row stays: what is durable is so without an engine.
start_over(StreamId, T) ->
    EngineLost = fun rabbitmq_stream_s3_manifest_context:engine_lost/1,
    news(StreamId, EngineLost, stop_work(StreamId, T)).

pause(StreamId, {wait, DelayMs, Context}, #stream{id = Id} = Stream, T) ->
    set(StreamId, Stream#stream{context = Context}, act({wait, DelayMs, StreamId, Id}, T));
pause(StreamId, {idle, Context}, Stream, T) ->
    set(StreamId, Stream#stream{context = Context}, T).

news(StreamId, Fun, #sync{streams = Streams} = T) ->
    case Streams of
        #{StreamId := #stream{context = Context} = Stream} ->
            case Fun(Context) of
                false -> T;
                Changed -> set(StreamId, Stream#stream{context = Changed}, T)
            end;
        _ ->
            T
    end.

set(StreamId, Stream, #sync{streams = Streams} = T) ->
    ready(StreamId, T#sync{streams = Streams#{StreamId := Stream}}).

ready(StreamId, #sync{ready = Ready} = T) ->
    T#sync{ready = queue:in(StreamId, Ready)}.

%% Reports -----------------------------------------------------------------------------------------

%% One line for what lasts, and one when it has ended.
report_problem(StreamId, Kind, Text, Context, T) ->
    case rabbitmq_stream_s3_manifest_context:failures(Context) of
        ?FAILURES_REPORTED ->
            log(
                warning,
                "stream_s3: ~ts: this node cannot get the newest manifest (~ts): ~ts. Consumers here see the"
                " remote tier as it was before, and local segments stay. The node tries again by itself",
                [StreamId, Kind, Text],
                T
            );
        _ ->
            log(debug, "stream_s3: ~ts: ~ts: ~ts", [StreamId, Kind, Text], T)
    end.

report_known(StreamId, Context, T) ->
    case rabbitmq_stream_s3_manifest_context:failures(Context) > ?FAILURES_REPORTED of
        true -> log(info, "stream_s3: ~ts: this node has the newest manifest again", [StreamId], T);
        false -> T
    end.

%% Once, until one is applied again: whatever damages each edit would report it with each persist.
report_damage(true, _StreamId, _Text, T) ->
    T;
report_damage(false, StreamId, Text, T) ->
    log(
        warning,
        "stream_s3: ~ts: the writer's node sent a damaged change of the manifest (~ts). It is not applied;"
        " this node fetches the whole manifest instead",
        [StreamId, Text],
        T
    ).

log(Level, Format, Args, T) ->
    act({log, Level, Format, Args}, T).

act(Action, #sync{actions = Actions} = T) ->
    T#sync{actions = [Action | Actions]}.

done(#sync{actions = Actions} = T) ->
    {lists:reverse(Actions), T#sync{actions = []}}.

reply(Reply, {Actions, T}) ->
    {Reply, Actions, T}.
