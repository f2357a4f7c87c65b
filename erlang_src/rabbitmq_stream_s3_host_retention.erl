-module(rabbitmq_stream_s3_host_retention).
-moduledoc """
Owns which local segments may go because the remote tier has them, and their deletion.

Does not own the user's retention (stock osiris evaluates it), what is durable (the caller
says up to where), the floor that readers see (set from the result of the stock evaluation).
""".

-export([init/0, trim/3, evaluate/2, user_specs/1, oldest/1, stats/0]).
-export([surplus/2]).

-include_lib("kernel/include/logger.hrl").

-define(COUNTERS, {?MODULE, counters}).
-define(LOCAL_SEGMENTS_DELETED, 1).
%% Header and one record of an osiris index file.
-define(NON_EMPTY_INDEX_BYTES, (8 + 29)).

%% A bound that no log reaches.
-define(UNBOUNDED_BYTES, (1 bsl 62)).

-type offset() :: non_neg_integer().
%% Of the durable leading segments, in order, those that may go now: a beginning of them. The second
%% argument gives the bytes of a segment.
-type trimmable() :: fun(
    ([{First :: offset(), End :: offset()}], fun((offset()) -> non_neg_integer())) -> [offset()]
).

-doc "Makes the counters of this node, once.".
-spec init() -> ok.
init() ->
    case persistent_term:get(?COUNTERS, undefined) of
        undefined -> persistent_term:put(?COUNTERS, counters:new(1, [write_concurrency]));
        _ -> ok
    end.

-doc "Counters of this node since the first start of the plugin.".
-spec stats() -> #{local_segments_deleted := non_neg_integer()}.
stats() ->
    case persistent_term:get(?COUNTERS, undefined) of
        undefined -> #{local_segments_deleted => 0};
        Ref -> #{local_segments_deleted => counters:get(Ref, ?LOCAL_SEGMENTS_DELETED)}
    end.

-doc """
Deletes the leading segments of a log directory whose every offset is below RemoteNext, and returns
how many. Never the active segment, never the last segment that holds a chunk, nor what the caller wants
kept.
""".
-spec trim(file:filename_all(), offset(), trimmable()) -> non_neg_integer().
trim(Dir, RemoteNext, Trimmable) ->
    Segments = segments(Dir),
    Durable = with_ends(surplus(Segments, RemoteNext), [Offset || {Offset, _} <- Segments]),
    Size = fun(Offset) -> filelib:file_size(path(Dir, Offset, "segment"), prim_file) end,
    Surplus = Trimmable(Durable, Size),
    ok = lists:foreach(fun(Offset) -> delete(Dir, Offset) end, Surplus),
    case Surplus of
        [] ->
            0;
        _ ->
            Count = length(Surplus),
            ok = count(Count),
            ?LOG_DEBUG("stream_s3: ~b local segments below offset ~b deleted in ~ts", [
                Count, RemoteNext, Dir
            ]),
            Count
    end.

-doc """
Asks osiris to evaluate the retention of a log now. Osiris would do so only when a segment is full
and the user has set a bound; a persist can come much later, and the segments it covers go then.
Osiris keeps one timer for each log, which ends with the process that asked last: so this asks in
the name of the member, as the member itself does.
""".
-spec evaluate(rabbitmq_stream_s3:member_info(), {ok, pid()} | none) -> ok.
evaluate(Info, Member) ->
    #{name := Name, dir := Dir, retention := Retention} = Info,
    #{shared := Shared, counter := Counter} = Info,
    Specs =
        case user_specs(Retention) of
            %% Osiris ignores an empty list, not a bound that nothing reaches.
            [] -> [{max_bytes, ?UNBOUNDED_BYTES}];
            UserSpecs -> UserSpecs
        end,
    %% Added by the instrumentation, so not known to xref.
    Log = osiris_log,
    Evaluated = Log:'$retention_evaluated'(Shared, Counter),
    case Member of
        {ok, Pid} ->
            %% What osiris_retention:eval/4 sends, with another process than this one.
            gen_server:cast(osiris_retention, {eval, Pid, Name, Dir, Specs, Evaluated});
        none ->
            osiris_retention:eval(Name, Dir, Specs, Evaluated)
    end.

-doc "The bounds that the user has set, without the functions that osiris adds.".
-spec user_specs([osiris:retention_spec() | tuple()]) -> [osiris:retention_spec()].
user_specs(Specs) ->
    [Spec || Spec <- Specs, element(1, Spec) =/= 'fun'].

-doc """
Where the local log begins, by the names of its files: unlike the floor that readers share it is never
behind a deletion.
""".
-spec oldest(file:filename_all()) -> {ok, offset()} | none.
oldest(Dir) ->
    case [Offset || {Offset, _} <- index_files(Dir)] of
        [] -> none;
        Offsets -> {ok, lists:min(Offsets)}
    end.

-doc """
First offsets of the segments that may go, of the sorted list of {FirstOffset, HasChunks}. A segment
ends where the next one starts, so it is durable when the next one starts at or below RemoteNext.
The last one with chunks stays: osiris finds its next offset in it.
""".
-spec surplus([{offset(), boolean()}], offset()) -> [offset()].
surplus(Segments, RemoteNext) ->
    case [Offset || {Offset, true} <- Segments] of
        [] ->
            [];
        WithChunks ->
            Last = lists:last(WithChunks),
            leading([Offset || {Offset, _} <- Segments, Offset =< Last], RemoteNext)
    end.

leading([Offset, Next | Rest], RemoteNext) when Next =< RemoteNext ->
    [Offset | leading([Next | Rest], RemoteNext)];
leading(_, _) ->
    [].

%% A segment ends where the next one begins.
with_ends([], _Offsets) -> [];
with_ends([Offset | Rest], [Offset, End | Offsets]) -> [{Offset, End} | with_ends(Rest, [End | Offsets])];
with_ends(Surplus, [_ | Offsets]) -> with_ends(Surplus, Offsets).

segments(Dir) ->
    lists:sort([
        {Offset, filelib:file_size(filename:join(Dir, Name), prim_file) >= ?NON_EMPTY_INDEX_BYTES}
     || {Offset, Name} <- index_files(Dir)
    ]).

index_files(Dir) ->
    case prim_file:list_dir(Dir) of
        {ok, Names} -> lists:append([index_file(unicode:characters_to_list(N)) || N <- Names]);
        {error, _} -> []
    end.

index_file(Name) ->
    case {filename:extension(Name), string:to_integer(filename:rootname(Name))} of
        {".index", {Offset, []}} when is_integer(Offset) -> [{Offset, Name}];
        _ -> []
    end.

%% Index first, as osiris does: a segment without an index is swept when the log is next opened,
%% an index without a segment is not.
delete(Dir, Offset) ->
    lists:foreach(
        fun(Extension) ->
            Path = path(Dir, Offset, Extension),
            case prim_file:delete(Path) of
                ok ->
                    ok;
                {error, enoent} ->
                    ok;
                {error, Reason} ->
                    ?LOG_WARNING("stream_s3: cannot delete ~ts: ~ts", [
                        Path, file:format_error(Reason)
                    ])
            end
        end,
        ["index", "segment"]
    ).

path(Dir, Offset, Extension) ->
    filename:join(Dir, io_lib:format("~20..0b.~s", [Offset, Extension])).

count(Deleted) ->
    case persistent_term:get(?COUNTERS, undefined) of
        undefined -> ok;
        Ref -> counters:add(Ref, ?LOCAL_SEGMENTS_DELETED, Deleted)
    end.
