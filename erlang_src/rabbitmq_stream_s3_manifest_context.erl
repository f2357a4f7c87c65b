-module(rabbitmq_stream_s3_manifest_context).
-moduledoc """
One replica's way to the newest manifest of its stream: what is known, what leads on from there, what
is asked for, what comes next. Pure; `rabbitmq_stream_s3_manifest_replica` does what `next/1` says and tells what came of it.

Owns: one piece of work at a time, the newest pointer wins, back-off, that a pointer which its
writer has taken back is not believed again, and which manifest is *confirmed*: its writer has told
of it, so it has seen that the log goes on where the manifest ends. By any other a node's readers
may go, as the writer's own do, and its local retention must not. A look (`seen/2`) finds what no
message told.
""".

-export([
    new/0,
    engine_lost/1,
    announced/2,
    follows/3,
    followed/2,
    taken_back/2,
    is_taken_back/2,
    seen/2,
    next/1,
    pointer_read/2,
    fetched/1,
    failed/2,
    waited/1,
    revision/1,
    confirmed/1,
    failures/1
]).

-export_type([t/0, pointer/0]).

-type pointer() :: rabbitmq_stream_s3:pointer().

-record(context, {
    %% What is published on this node.
    resolved = undefined :: undefined | empty | pointer(),
    confirmed = false :: boolean(),
    %% What to do after `work`; a pointer with whether it is confirmed.
    wanted = read :: none | read | {pointer(), boolean()},
    work = idle :: idle | reading | waiting | {fetching, empty | pointer(), boolean()},
    failures = 0 :: non_neg_integer(),
    %% Pointers of lower revisions have been taken back.
    floor = 0 :: non_neg_integer()
}).

-opaque t() :: #context{}.

-define(BASE_DELAY_MS, 1_000).
-define(MAX_DELAY_MS, 30_000).

-doc "Nothing is known: its first step is to read the pointer.".
-spec new() -> t().
new() ->
    #context{}.

-doc "The node's manifests are lost, and what was under way with them.".
-spec engine_lost(t()) -> t().
engine_lost(#context{floor = Floor}) ->
    #context{floor = Floor}.

-doc "The writer says that this is the pointer now. `false`: it is no news.".
-spec announced(pointer(), t()) -> t() | false.
announced(Pointer, #context{work = {fetching, Pointer, false}} = Context) ->
    Context#context{work = {fetching, Pointer, true}};
announced(Pointer, #context{wanted = {Pointer, false}} = Context) ->
    want({Pointer, true}, Context);
announced(Pointer, #context{resolved = Pointer, confirmed = false} = Context) ->
    Context#context{confirmed = true};
announced(Pointer, Context) ->
    case revision_of(Pointer) > newest(Context) of
        true -> want({Pointer, true}, Context#context{floor = 0});
        false -> false
    end.

-doc """
Whether an edit from one pointer to another leads on from what is known, while nothing is under way or
wanted that would lead further. If not, the announcement that comes with it leads to a fetch.
""".
-spec follows(pointer(), pointer(), t()) -> boolean().
follows(From, To, #context{resolved = From, wanted = none, work = idle} = Context) ->
    revision_of(To) > revision_of(From) andalso not is_taken_back(To, Context);
follows(_From, _To, _Context) ->
    false.

-doc "Such an edit has been applied: as if its writer's announcement had been fetched.".
-spec followed(pointer(), t()) -> t().
followed(To, #context{wanted = none, work = idle} = Context) ->
    Context#context{resolved = To, confirmed = true, failures = 0, floor = 0}.

-doc "The writer says that the manifest of this revision is of a timeline that is no more.".
-spec taken_back(pos_integer(), t()) -> t() | false.
taken_back(Revision, Context) ->
    case newest(Context) > Revision of
        true ->
            false;
        false ->
            Context#context{
                resolved = undefined,
                confirmed = false,
                wanted = none,
                floor = Revision + 1
            }
    end.

-doc "Whether the writer has said so of what this pointer names.".
-spec is_taken_back(pointer(), t()) -> boolean().
is_taken_back({_Epoch, _Uid, Revision}, #context{floor = Floor}) ->
    Revision < Floor.

-doc "A look at this node's copy of the pointer. `false`: nothing to do.".
-spec seen(pointer() | none, t()) -> t() | false.
seen(_, #context{work = reading}) ->
    false;
seen(none, #context{resolved = undefined, wanted = none, work = idle} = Context) ->
    Context#context{wanted = read};
seen(none, _) ->
    false;
seen({_, _, Revision}, #context{floor = Floor} = Context) when Revision < Floor ->
    %% Believed in the next look: the writer that took it back may be gone, and its word with it.
    Context#context{floor = 0};
seen(Pointer, Context) ->
    case revision_of(Pointer) > newest(Context) of
        true -> want({Pointer, false}, Context);
        false -> false
    end.

-doc "What to do now, if anything; it counts as begun.".
-spec next(t()) -> {read, t()} | {fetch, pointer(), t()} | none.
next(#context{work = idle, wanted = read} = Context) ->
    {read, Context#context{work = reading, wanted = none}};
next(#context{work = idle, wanted = {Pointer, Confirmed}} = Context) ->
    {fetch, Pointer, Context#context{work = {fetching, Pointer, Confirmed}, wanted = none}};
next(_) ->
    none.

-doc "The answer of the metadata store, on the word of a quorum.".
-spec pointer_read({ok, pointer()} | not_found | error, t()) ->
    {fetch, empty | pointer(), t()} | {wait, pos_integer(), t()} | {idle, t()}.
pointer_read({ok, Pointer}, #context{floor = Floor, wanted = Wanted} = Context) ->
    {Newest, Confirmed} = newer({Pointer, false}, Wanted),
    case {revision_of(Newest), revision(Context)} of
        {Revision, _} when Revision < Floor ->
            wait(Context);
        {Revision, Resolved} when Revision > Resolved ->
            {fetch, Newest, Context#context{work = {fetching, Newest, Confirmed}, wanted = none}};
        _ ->
            {idle, Context#context{work = idle, wanted = none}}
    end;
pointer_read(not_found, #context{resolved = undefined, wanted = none} = Context) ->
    {fetch, empty, Context#context{work = {fetching, empty, true}}};
pointer_read(not_found, Context) ->
    {idle, Context#context{work = idle}};
pointer_read(error, Context) ->
    wait(Context).

-doc "What was fetched is published. `taken_back`: it must not be.".
-spec fetched(t()) -> {ok, t()} | {taken_back, t()}.
fetched(#context{work = {fetching, What, Confirmed}, floor = Floor} = Context) ->
    case revision_of(What) < Floor of
        true ->
            {taken_back, Context#context{work = idle}};
        false ->
            {ok, Context#context{
                work = idle,
                resolved = What,
                confirmed = Confirmed,
                failures = 0
            }}
    end.

-doc """
It is not: the pointer is read again after a pause, unless a newer one has been announced. At once the
first time that the root is gone: then two persists were faster than this node, and the pointer has
moved.
""".
-spec failed(atom(), t()) -> {wait, pos_integer(), t()} | {idle, t()}.
failed(stale, #context{resolved = Resolved} = Context) when Resolved =/= undefined ->
    {idle, Context#context{work = idle}};
failed(not_found, #context{failures = 0} = Context) ->
    {idle, or_read(Context#context{work = idle, failures = 1})};
failed(_Kind, Context) ->
    wait(Context).

-doc "The pause is over.".
-spec waited(t()) -> t().
waited(#context{work = waiting} = Context) ->
    Context#context{work = idle};
waited(Context) ->
    Context.

-doc "Revision of what is published here: -1 if nothing is, 0 if it is empty.".
-spec revision(t()) -> integer().
revision(#context{resolved = undefined}) -> -1;
revision(#context{resolved = Resolved}) -> revision_of(Resolved).

-doc "Whether local retention may go by what is published here.".
-spec confirmed(t()) -> boolean().
confirmed(#context{confirmed = Confirmed}) ->
    Confirmed.

-doc "How often it has failed since it last worked.".
-spec failures(t()) -> non_neg_integer().
failures(#context{failures = Failures}) ->
    Failures.

%% Whatever waits after a failure need not: there is news.
want(Pointer, #context{work = waiting} = Context) ->
    Context#context{wanted = Pointer, work = idle};
want(Pointer, Context) ->
    Context#context{wanted = Pointer}.

or_read(#context{wanted = none} = Context) -> Context#context{wanted = read};
or_read(Context) -> Context.

wait(#context{failures = Failures} = Context) ->
    Full = min(?MAX_DELAY_MS, ?BASE_DELAY_MS bsl min(Failures, 10)),
    %% Half of it is chance: all streams of a node fail at once.
    Delay = Full div 2 + rand:uniform(Full div 2),
    {wait, Delay, (or_read(Context))#context{work = waiting, failures = Failures + 1}}.

newest(#context{wanted = Wanted, work = Work} = Context) ->
    Fetching =
        case Work of
            {fetching, What, _} -> revision_of(What);
            _ -> -1
        end,
    lists:max([revision(Context), Fetching, revision_of(Wanted)]).

newer({Pointer, _} = Found, Wanted) ->
    case revision_of(Wanted) >= revision_of(Pointer) of
        true -> Wanted;
        false -> Found
    end.

revision_of({_Epoch, _Uid, Revision}) -> Revision;
revision_of({Pointer, _Confirmed}) -> revision_of(Pointer);
revision_of(empty) -> 0;
revision_of(_NoneOrRead) -> -1.
