-module(rabbitmq_stream_s3_recovery_plan).
-moduledoc """
What a recovery would do with each stream that the bucket has.

Owns the judgement, from what was found and from what this cluster has. Pure: asks nobody.
""".

-export([judge/3, selected/2]).

-export_type([found/0, selection/0, existing/0, verdict/0, judged/0]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type found() :: rabbitmq_stream_s3_nif:found().
-type selection() :: #{
    vhost => binary(), queue => binary(), stream_id => binary(), as => binary()
}.
-type existing() :: #{rabbit_amqqueue:name() => {stream, stream_id(), started | not_started} | other}.
-type verdict() ::
    recoverable
    | interrupted
    | in_use
    | name_taken
    | deleted
    | older_history
    | unnamed
    | empty.
-type judged() :: #{
    verdict := verdict(), found := found(), name => rabbit_amqqueue:name(), text := binary()
}.

-doc "Whether a stream is asked for, as far as its id says.".
-spec selected(stream_id(), selection()) -> boolean().
selected(StreamId, #{stream_id := Wanted}) -> StreamId =:= Wanted;
selected(_StreamId, _Selection) -> true.

-doc """
A verdict for each that is asked for; streams whose id is in `InUse` belong to a queue of this cluster,
whatever its name, and those in `Deleted` did so until it was deleted.
""".
-spec judge(
    [found()], selection(), {existing(), InUse :: [stream_id()], Deleted :: [stream_id()]}
) -> [judged()].
judge(Found, Selection, {Existing, InUse, Deleted}) ->
    Named = [{name(F, Selection), F} || F <- Found, wanted(F, Selection)],
    Newest = lists:foldl(fun newest/2, #{}, Named),
    Gone = maps:from_keys(Deleted, []),
    [verdict(Name, F, Newest, {Existing, InUse, Gone}) || {Name, F} <- Named].

wanted(#{vhost := VHost}, #{vhost := Wanted}) when VHost =/= Wanted, VHost =/= undefined -> false;
wanted(#{queue := Queue}, #{queue := Wanted}) when Queue =/= Wanted -> false;
wanted(_Found, _Selection) -> true.

name(#{vhost := VHost0, queue := Queue0}, Selection) ->
    VHost = maps:get(vhost, Selection, VHost0),
    case maps:get(as, Selection, Queue0) of
        Queue when is_binary(Queue), is_binary(VHost) -> rabbit_misc:r(VHost, queue, Queue);
        _ -> unnamed
    end.

%% A queue that was deleted and declared again has two histories, until the first has been swept.
newest({unnamed, _}, Newest) ->
    Newest;
newest({Name, #{stream_id := Id} = Found}, Newest) ->
    case Newest of
        #{Name := {_, Key}} ->
            case key(Found) > Key of
                true -> Newest#{Name := {Id, key(Found)}};
                false -> Newest
            end;
        _ ->
            Newest#{Name => {Id, key(Found)}}
    end.

key(#{modified_ms := undefined, stream_id := Id}) -> {0, Id};
key(#{modified_ms := Ms, stream_id := Id}) -> {Ms, Id}.

verdict(_Name, #{stream_id := Id} = Found, _, {_, _, Gone}) when is_map_key(Id, Gone) ->
    judged(
        deleted,
        Found,
        <<"this cluster has deleted it: what is left of it is being removed">>
    );
verdict(unnamed, Found, _, _) ->
    judged(
        unnamed,
        Found,
        <<"its objects do not say of which queue it is: choose it with --stream-id, and name it with --as">>
    );
verdict(Name, #{stream_id := Id} = Found, Newest, {Existing, InUse, _Gone}) ->
    Judged =
        case maps:get(Name, Existing, none) of
            {stream, Id, not_started} ->
                judged(interrupted, Found, <<"a recovery has begun and did not end: run it again">>);
            {stream, Id, started} ->
                judged(in_use, Found, <<"this cluster has it">>);
            Other ->
                #{Name := {NewestId, _}} = Newest,
                not_here(Found, Other, Id =:= NewestId, lists:member(Id, InUse))
        end,
    Judged#{name => Name}.

not_here(Found, _Other, _IsNewest, true) ->
    judged(in_use, Found, <<"this cluster has it, under another name">>);
not_here(Found, Other, _IsNewest, false) when Other =/= none ->
    judged(
        name_taken,
        Found,
        <<"this cluster has another queue of this name: delete it, or choose another with --as">>
    );
not_here(Found, none, false, false) ->
    judged(
        older_history,
        Found,
        <<"the bucket has a newer history of a queue of this name: choose this one with --stream-id">>
    );
not_here(Found, none, true, false) ->
    recoverable(Found).

recoverable(#{first_offset := Same, next_offset := Same} = Found) ->
    judged(empty, Found, <<"it has no record">>);
recoverable(Found) ->
    judged(recoverable, Found, warning(Found)).

warning(#{root := rebuilt}) ->
    <<"no manifest can be read: one is made from the fragments">>;
warning(#{passed_over := [_ | _], lost_up_to := Lost, next_offset := Next}) when is_integer(Lost) ->
    text("the newest manifest is damaged: offsets ~b to ~b are lost", [Next, Lost - 1]);
warning(#{objects := #{affected_count := Count, affected := [{_, First, Last, _} | _]}}) when
    Count > 0
->
    text("~b objects are missing or damaged, the first has offsets ~b to ~b", [Count, First, Last - 1]);
warning(#{arguments := undefined}) ->
    <<"its arguments are not known: it gets none, and so no retention of its own">>;
warning(_Found) ->
    <<>>.

judged(Verdict, Found, Text) ->
    #{verdict => Verdict, found => Found, text => Text}.

text(Format, Args) ->
    rabbitmq_stream_s3:utf8(io_lib:format(Format, Args)).
