-module(rabbitmq_stream_s3_manifest_resolver).
-moduledoc """
Brings the manifests of streams that are written on other nodes to this one. Usually by edits: one
that leads on from what is known here is applied natively. Otherwise by a *sync*: reads the pointer,
has the root fetched and published natively. Then puts the row, lets local retention run. In this
order: what is trimmed must be findable by then. Row and retention wait until the writer has told of
that very manifest; after a start, and in each look, it is asked to.

Part of the state of rabbitmq_stream_s3_manifest_replica, in whose process it runs. Owns what is
under way: tasks that talk to the metadata store, and native answers that are awaited; at most
?WORK_MAX of them, one for each stream. What comes next for one stream is decided in
rabbitmq_stream_s3_replica_context.
""".

-include_lib("kernel/include/logger.hrl").

-export([
    new/0,
    add/3,
    update/3,
    remove/2,
    announced/4,
    edited/6,
    taken_back/3,
    published/3,
    wanted/2,
    look/1,
    engine_opened/1,
    handle_info/2
]).

-export_type([t/0]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type info() :: rabbitmq_stream_s3:member_info().

-record(stream, {
    %% A new one for each member: what was asked for the one before it is not for this one.
    id :: reference(),
    info :: info(),
    context = rabbitmq_stream_s3_replica_context:new() :: rabbitmq_stream_s3_replica_context:t(),
    %% What is published, until the row says the same.
    range :: rabbitmq_stream_s3:range() | undefined,
    %% Whether it has been told that an edit was damaged, and none has been applied since.
    damage_told = false :: boolean()
}).
-record(resolver, {
    streams = #{} :: #{stream_id() => #stream{}},
    %% Streams that may have something to do.
    ready = queue:new() :: queue:queue(stream_id()),
    %% Those of them that consumers wait for.
    wanted = #{} :: #{stream_id() => []},
    %% The monitor of a task, or the reference of a native answer.
    work = #{} :: #{reference() => {stream_id(), task | fetch, Since :: integer()}},
    look :: reference() | undefined
}).

-opaque t() :: #resolver{}.

-define(CONTEXT, rabbitmq_stream_s3_replica_context).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(WORK_MAX, 32).
%% As many failures in a row have happened before one is told.
-define(FAILURES_TOLD, 3).
%% The native deadline is 30 s, the metadata store's as well.
-define(WORK_LOST_MS, 120_000).

-spec new() -> t().
new() ->
    #resolver{}.

-doc "An acceptor of which nothing is known.".
-spec add(stream_id(), info(), t()) -> t().
add(StreamId, Info, R0) ->
    #resolver{streams = Streams} = R = stop_work(StreamId, R0),
    Stream = #stream{id = make_ref(), info = Info},
    ok = rabbitmq_stream_s3_manifest_replica:ask_writer(StreamId),
    run(ready(StreamId, R#resolver{streams = Streams#{StreamId => Stream}})).

-spec update(stream_id(), info(), t()) -> t().
update(StreamId, Info, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := Stream} ->
            R#resolver{streams = Streams#{StreamId := Stream#stream{info = Info}}};
        _ ->
            R
    end.

-spec remove(stream_id(), t()) -> t().
remove(StreamId, #resolver{streams = Streams} = R) ->
    run(stop_work(StreamId, R#resolver{streams = maps:remove(StreamId, Streams)})).

-doc "The writer of this epoch says that this is the pointer now.".
-spec announced(stream_id(), ?CONTEXT:pointer(), osiris:epoch(), t()) -> t().
announced(StreamId, Pointer, WriterEpoch, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{info = #{epoch := Epoch}}} when WriterEpoch >= Epoch ->
            News = fun(Context) -> ?CONTEXT:announced(Pointer, Context) end,
            run(confirm(StreamId, news(StreamId, News, R)));
        _ ->
            %% Also what a writer has said whose log this member's may not be any more.
            R
    end.

-doc """
The writer of this epoch sends what leads from one pointer to another. What it does not lead on from
here changes nothing: the announcement behind it does.
""".
-spec edited(stream_id(), ?CONTEXT:pointer(), ?CONTEXT:pointer(), osiris:epoch(), binary(), t()) ->
    t().
edited(StreamId, From, To, WriterEpoch, Edit, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{info = #{epoch := Epoch}} = Stream} when WriterEpoch >= Epoch ->
            case ?CONTEXT:follows(From, To, Stream#stream.context) of
                true ->
                    Applied = apply_edit(StreamId, From, To, Edit),
                    run(applied(StreamId, To, Applied, Stream, R));
                false ->
                    ok = rabbitmq_stream_s3_counters:add(manifest_edits_unfitting),
                    R
            end;
        _ ->
            R
    end.

-doc "The writer says that the manifest of this revision must not be used any more.".
-spec taken_back(stream_id(), pos_integer(), t()) -> t().
taken_back(StreamId, Revision, R0) ->
    case news(StreamId, fun(Context) -> ?CONTEXT:taken_back(Revision, Context) end, R0) of
        R0 ->
            R0;
        R ->
            ok = rabbitmq_stream_s3_manifest_replica:reset(StreamId),
            #resolver{streams = #{StreamId := Stream} = Streams} = R,
            run(R#resolver{streams = Streams#{StreamId := Stream#stream{range = undefined}}})
    end.

-doc "Another has published what this pointer names.".
-spec published(stream_id(), ?CONTEXT:pointer(), t()) -> {ok | taken_back, t()}.
published(StreamId, Pointer, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{context = Context}} ->
            case ?CONTEXT:is_taken_back(Pointer, Context) of
                true ->
                    ok = rabbitmq_stream_s3_manifest_replica:reset(StreamId),
                    {taken_back, R};
                false ->
                    {ok, run(news(StreamId, fun(C) -> ?CONTEXT:seen(Pointer, C) end, R))}
            end;
        _ ->
            {ok, R}
    end.

-doc "A consumer waits for the manifest of this stream.".
-spec wanted(stream_id(), t()) -> t().
wanted(StreamId, #resolver{streams = Streams, wanted = Wanted} = R) when
    is_map_key(StreamId, Streams)
->
    run(R#resolver{wanted = Wanted#{StreamId => []}});
wanted(_StreamId, R) ->
    R.

-doc "Compares what is known of every stream with this node's copy of the pointers.".
-spec look(t()) -> t().
look(#resolver{streams = Streams} = R) ->
    Unconfirmed = [Id || Id := #stream{context = C} <- Streams, not ?CONTEXT:confirmed(C)],
    ok = lists:foreach(fun rabbitmq_stream_s3_manifest_replica:ask_writer/1, Unconfirmed),
    run(start_look(give_up_lost_work(R))).

-doc "A new engine knows no manifest.".
-spec engine_opened(t()) -> t().
engine_opened(#resolver{streams = Streams} = R) ->
    StreamIds = maps:keys(Streams),
    ok = lists:foreach(fun rabbitmq_stream_s3_manifest_replica:ask_writer/1, StreamIds),
    run(lists:foldl(fun start_over/2, R, StreamIds)).

-doc "A message of the process it lives in, if it is one of its own.".
-spec handle_info(term(), t()) -> {ok, t()} | unknown.
handle_info({'DOWN', Look, process, _Pid, Reason}, #resolver{look = Look} = R) ->
    Seen =
        case Reason of
            {seen, Pointers} -> Pointers;
            _Crashed -> []
        end,
    {ok, run(lists:foldl(fun seen/2, R#resolver{look = undefined}, Seen))};
handle_info({'DOWN', Ref, process, _Pid, Reason}, #resolver{work = Work} = R) when
    is_map_key(Ref, Work)
->
    {{StreamId, task, _Since}, Rest} = maps:take(Ref, Work),
    {ok, run(pointer_read(StreamId, Reason, R#resolver{work = Rest}))};
handle_info({rabbitmq_stream_s3, Ref, Answer}, #resolver{work = Work} = R) when
    is_map_key(Ref, Work)
->
    {{StreamId, fetch, _Since}, Rest} = maps:take(Ref, Work),
    {ok, run(fetched(StreamId, Answer, R#resolver{work = Rest}))};
handle_info({waited, StreamId, Id}, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{id = Id}} -> {ok, run(news(StreamId, fun ?CONTEXT:waited/1, R))};
        _ -> {ok, R}
    end;
handle_info(_Other, _R) ->
    unknown.

%% What to do --------------------------------------------------------------------------------------

news(StreamId, Fun, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{context = Context} = Stream} ->
            case Fun(Context) of
                false -> R;
                Changed -> set(StreamId, Stream#stream{context = Changed}, R)
            end;
        _ ->
            R
    end.

set(StreamId, Stream, #resolver{streams = Streams} = R) ->
    ready(StreamId, R#resolver{streams = Streams#{StreamId := Stream}}).

ready(StreamId, #resolver{ready = Ready} = R) ->
    R#resolver{ready = queue:in(StreamId, Ready)}.

run(#resolver{work = Work} = R) when map_size(Work) >= ?WORK_MAX ->
    R;
run(#resolver{wanted = Wanted} = R) when map_size(Wanted) > 0 ->
    {StreamId, [], _} = maps:next(maps:iterator(Wanted)),
    run(begin_next(StreamId, R#resolver{wanted = maps:remove(StreamId, Wanted)}));
run(#resolver{ready = Ready0} = R) ->
    case queue:out(Ready0) of
        {empty, _} -> R;
        {{value, StreamId}, Ready} -> run(begin_next(StreamId, R#resolver{ready = Ready}))
    end.

begin_next(StreamId, #resolver{streams = Streams} = R) ->
    case Streams of
        #{StreamId := #stream{context = Context0} = Stream} ->
            case ?CONTEXT:next(Context0) of
                {read, Context} -> read(StreamId, Stream#stream{context = Context}, R);
                {fetch, What, Context} -> fetch(StreamId, What, Stream, Context, R);
                none -> R
            end;
        _ ->
            R
    end.

%% The answer travels as the exit reason: one message says done, failed or crashed.
-dialyzer({nowarn_function, read/3}).
read(StreamId, Stream, #resolver{streams = Streams} = R) ->
    {_Pid, Ref} = spawn_monitor(fun() ->
        exit({pointer, rabbitmq_stream_s3_db:get_consistent(StreamId)})
    end),
    add_work(Ref, StreamId, task, R#resolver{streams = Streams#{StreamId := Stream}}).

pointer_read(StreamId, Reason, #resolver{streams = Streams} = R) ->
    #{StreamId := #stream{context = Context0} = Stream} = Streams,
    Answer =
        case Reason of
            {pointer, {ok, Pointer}} -> {ok, Pointer};
            {pointer, not_found} -> not_found;
            _FailedOrCrashed -> error
        end,
    case ?CONTEXT:pointer_read(Answer, Context0) of
        {fetch, What, Context} -> fetch(StreamId, What, Stream, Context, R);
        Other -> pause(StreamId, Other, Stream, R)
    end.

fetch(StreamId, What, Stream, Context, #resolver{streams = Streams} = R) ->
    Ref = make_ref(),
    case resolve(Ref, StreamId, What) of
        ok ->
            Fetching = Streams#{StreamId := Stream#stream{context = Context}},
            add_work(Ref, StreamId, fetch, R#resolver{streams = Fetching});
        {error, Kind} ->
            pause(StreamId, ?CONTEXT:failed(Kind, Context), Stream, R)
    end.

resolve(Ref, StreamId, What) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            %% Unless it is known there, nothing is published.
            _ = rabbitmq_stream_s3_nif:manifest_mark_pending(Engine, StreamId),
            case rabbitmq_stream_s3_nif:manifest_resolve(Engine, self(), Ref, StreamId, What) of
                ok -> ok;
                {error, _ClosedOrBug} -> {error, closed}
            end;
        undefined ->
            {error, closed}
    end.

apply_edit(StreamId, From, To, Edit) ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} ->
            %% What another node sends may have any shape.
            try
                rabbitmq_stream_s3_nif:manifest_apply_edit(Engine, StreamId, From, To, Edit)
            catch
                error:badarg -> {error, corrupt, <<"it has not the shape of one">>}
            end;
        undefined ->
            {error, closed, <<"no engine">>}
    end.

applied(StreamId, To, {ok, Range}, #stream{context = Context0} = Stream0, R) ->
    ok = rabbitmq_stream_s3_counters:add(manifest_edits_applied),
    Context = ?CONTEXT:followed(To, Context0),
    Stream = Stream0#stream{context = Context, range = Range, damage_told = false},
    confirm(StreamId, set(StreamId, Stream, R));
applied(StreamId, _To, {error, corrupt, Text}, #stream{damage_told = Told} = Stream, R) ->
    ok = rabbitmq_stream_s3_counters:add(manifest_edits_corrupt),
    ok = log_damage(Told, StreamId, Text),
    set(StreamId, Stream#stream{damage_told = true}, R);
applied(_StreamId, _To, _NotWhatIsKnownThere, _Stream, R) ->
    ok = rabbitmq_stream_s3_counters:add(manifest_edits_unfitting),
    R.

fetched(StreamId, {resolved, Range}, #resolver{streams = Streams} = R) ->
    #{StreamId := #stream{context = Context0} = Stream} = Streams,
    case ?CONTEXT:fetched(Context0) of
        {ok, Context} ->
            ok = log_recovered(StreamId, Context0),
            confirm(StreamId, set(StreamId, Stream#stream{context = Context, range = Range}, R));
        {taken_back, Context} ->
            ok = rabbitmq_stream_s3_manifest_replica:reset(StreamId),
            set(StreamId, Stream#stream{context = Context}, R)
    end;
fetched(StreamId, {error, Kind, Text}, #resolver{streams = Streams} = R) ->
    #{StreamId := #stream{context = Context} = Stream} = Streams,
    ok = log_problem(StreamId, Kind, Text, Context),
    pause(StreamId, ?CONTEXT:failed(Kind, Context), Stream, R).

confirm(StreamId, #resolver{streams = Streams} = R) ->
    #{StreamId := #stream{context = Context, range = Range, info = Info} = Stream} = Streams,
    case Range =/= undefined andalso ?CONTEXT:confirmed(Context) of
        true ->
            ok = rabbitmq_stream_s3_manifest_replica:put(StreamId, Range),
            ok = rabbitmq_stream_s3_hooks:evaluate_local_retention(Info),
            R#resolver{streams = Streams#{StreamId := Stream#stream{range = undefined}}};
        false ->
            R
    end.

pause(StreamId, {wait, DelayMs, Context}, #stream{id = Id} = Stream, R) ->
    _ = erlang:send_after(DelayMs, self(), {waited, StreamId, Id}),
    set(StreamId, Stream#stream{context = Context}, R);
pause(StreamId, {idle, Context}, Stream, R) ->
    set(StreamId, Stream#stream{context = Context}, R).

add_work(Ref, StreamId, Kind, #resolver{work = Work} = R) ->
    Since = erlang:monotonic_time(millisecond),
    R#resolver{work = Work#{Ref => {StreamId, Kind, Since}}}.

%% What is under way may end by itself; nobody listens.
stop_work(StreamId, #resolver{work = Work} = R) ->
    Stopped = [{Ref, Kind} || Ref := {Of, Kind, _Since} <- Work, Of =:= StreamId],
    _ = [demonitor(Ref, [flush]) || {Ref, task} <- Stopped],
    R#resolver{work = maps:without([Ref || {Ref, _} <- Stopped], Work)}.

%% The row stays: what is durable is so without an engine.
start_over(StreamId, R) ->
    news(StreamId, fun ?CONTEXT:engine_lost/1, stop_work(StreamId, R)).

%% A task of the native side that died answers nobody.
give_up_lost_work(#resolver{work = Work} = R) ->
    Before = erlang:monotonic_time(millisecond) - ?WORK_LOST_MS,
    Lost = [StreamId || _ := {StreamId, _Kind, Since} <- Work, Since < Before],
    lists:foldl(fun start_over/2, R, Lost).

%% Looking -----------------------------------------------------------------------------------------

-dialyzer({nowarn_function, start_look/1}).
start_look(#resolver{look = undefined, streams = Streams} = R) ->
    Known = #{Id => ?CONTEXT:revision(Context) || Id := #stream{context = Context} <- Streams},
    {_Pid, Ref} = spawn_monitor(fun() -> exit({seen, newer(Known)}) end),
    R#resolver{look = Ref};
start_look(StillLooking) ->
    StillLooking.

%% Only what is news crosses to the resolver's process.
newer(Known) when map_size(Known) =:= 0 ->
    [];
newer(Known) ->
    {ok, Pointers} = rabbitmq_stream_s3_db:list(),
    [
        {StreamId, maps:get(StreamId, Pointers, none)}
     || StreamId := Revision <- Known,
        case Pointers of
            #{StreamId := {_Epoch, _Uid, Now}} -> Now > Revision;
            _ -> Revision < 0
        end
    ].

seen({StreamId, Pointer}, R0) ->
    case news(StreamId, fun(Context) -> ?CONTEXT:seen(Pointer, Context) end, R0) of
        R0 ->
            R0;
        R ->
            ok = rabbitmq_stream_s3_counters:add(pointer_moves_missed),
            R
    end.

%% One line for what lasts, and one when it is over: that a root has been replaced meanwhile, or
%% that a writer has only just left this node, is everyday.
log_problem(StreamId, Kind, Text, Context) ->
    case ?CONTEXT:failures(Context) of
        ?FAILURES_TOLD ->
            ?LOG_WARNING(
                "stream_s3: ~ts: the newest manifest is not known on this node (~ts): ~ts",
                [StreamId, Kind, Text],
                ?DOMAIN
            );
        _ ->
            ?LOG_DEBUG("stream_s3: ~ts: ~ts: ~ts", [StreamId, Kind, Text], ?DOMAIN)
    end.

%% Once, until one is applied again: whatever damages each of them says so with each persist.
log_damage(true, _StreamId, _Text) ->
    ok;
log_damage(false, StreamId, Text) ->
    ?LOG_WARNING(
        "stream_s3: ~ts: a change of the manifest was not taken, the manifest is fetched: ~ts",
        [StreamId, Text],
        ?DOMAIN
    ).

log_recovered(StreamId, Context) ->
    case ?CONTEXT:failures(Context) > ?FAILURES_TOLD of
        true -> ?LOG_INFO("stream_s3: ~ts: the manifest is known here", [StreamId], ?DOMAIN);
        false -> ok
    end.
