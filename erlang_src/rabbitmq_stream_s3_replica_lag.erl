-module(rabbitmq_stream_s3_replica_lag).
-moduledoc """
Local segments of writers here that are durable in S3 and not copied yet by a replica that is
connected. Tiering must not trim them: a replica whose next segment is gone jumps, crashes, and throws
its log away (docs/decisions/0022).

Owns which segments are kept for that, how long and how many bytes: both bounded, for one segment by
`stream_s3.replica_lag.max_age`, for the node by `stream_s3.replica_lag.max_bytes`; 0 keeps none. Does
not own what is durable, nor the user's retention, which trims as it always has.

Where replicas are is in the counters that osiris has for each of its replica readers. They are found
by one look through the counters of the node, at most one a second while nothing can be trimmed.

The table has {{readers, StreamId}, [{Host, Port, Counter}]}, {looked, AtMs} and {{kept, StreamId},
#kept{}}. Decisions are made in the process that evaluates retention; this server only asks for another
evaluation when a replica has come along, and says what lasts.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, trimmable/3, overview/0, of_stream/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).
-export([decide/3]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type segment() :: {First :: osiris:offset(), End :: osiris:offset()}.
-type reader() :: {Host :: term(), Port :: term(), counters:counters_ref()}.

-record(kept, {
    %% In order; since when it could have been trimmed, and its bytes.
    segments :: [{osiris:offset(), End :: osiris:offset(), SinceMs :: integer(), Bytes :: integer()}],
    bytes :: non_neg_integer(),
    is_said = false :: boolean()
}).

-define(TABLE, ?MODULE).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(LOOK_MS, 1_000).
-define(TICK_MS, 5_000).
%% A replica that is behind for as long is worth a line.
-define(SAID_AFTER_MS, 30_000).
%% osiris_log: what a reader has read, as the offset after it; one less than where it starts until then.
-define(C_OFFSET, 1).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Of the leading segments that tiering could trim, in order, those that it may trim now: also a beginning
of them. `Size` gives the bytes of a segment.
""".
-spec trimmable(stream_id(), [segment()], fun((osiris:offset()) -> non_neg_integer())) ->
    [osiris:offset()].
trimmable(_StreamId, [], _Size) ->
    [];
trimmable(StreamId, Segments, Size) ->
    case limits() of
        {MaxBytes, MaxAge} ->
            try
                trimmable(StreamId, Segments, Size, MaxBytes, MaxAge)
            catch
                %% The table is gone: this server starts anew, and asks again.
                error:badarg -> []
            end;
        off ->
            [First || {First, _End} <- Segments]
    end.

-doc "What is kept on this node for replicas that lag.".
-spec overview() -> #{atom() => non_neg_integer()}.
overview() ->
    Kept = [Kept || {_StreamId, Kept} <- kept()],
    #{
        replica_lag_streams => length(Kept),
        replica_lag_segments => lists:sum([length(Segments) || #kept{segments = Segments} <- Kept]),
        replica_lag_bytes => lists:sum([Bytes || #kept{bytes = Bytes} <- Kept])
    }.

-doc "The same of one stream that is written here, and for which replica.".
-spec of_stream(stream_id()) -> #{atom() => term()}.
of_stream(StreamId) ->
    case kept(StreamId) of
        undefined ->
            #{replica_lag_bytes => 0, replica_lag_segments => 0, replica_lag_of => <<>>};
        #kept{segments = [{First, _, _, _} | _] = Segments, bytes = Bytes} ->
            #{
                replica_lag_bytes => Bytes,
                replica_lag_segments => length(Segments),
                replica_lag_of => rabbitmq_stream_s3:utf8(slowest(StreamId, First))
            }
    end.

trimmable(StreamId, [{First, End} | _] = Segments, Size, MaxBytes, MaxAge) ->
    Now = now_ms(),
    %% To keep all of them, what was found a moment ago is good enough; a reader may have come since.
    case looked_at() > Now - ?LOOK_MS andalso position(StreamId, First) of
        KeepsAll when is_integer(KeepsAll), KeepsAll < End -> true;
        _ -> look(Now)
    end,
    Position = position(StreamId, First),
    Before = kept(StreamId),
    Needed = [
        {Offset, Next, since(Offset, Before, Now), Size(Offset)}
     || {Offset, Next} <- Segments, Position =/= none, Next > Position
    ],
    #{replica_lag_bytes := AllBytes} = overview(),
    Others = AllBytes - bytes(Before),
    {GivenUp, Kept} = decide(Needed, max(0, MaxBytes - Others), Now - MaxAge),
    ok = count_given_up(StreamId, GivenUp, First),
    ok = keep(StreamId, Kept, Before),
    lists:sublist([Offset || {Offset, _Next} <- Segments], length(Segments) - length(Kept)).

-doc false.
-spec decide([Segment], Bytes :: non_neg_integer(), OldestMs :: integer()) ->
    {GivenUp :: [Segment], Kept :: [Segment]}
when
    Segment :: {osiris:offset(), osiris:offset(), SinceMs :: integer(), Bytes :: non_neg_integer()}.
decide(Needed, Budget, OldestMs) ->
    Bytes = lists:sum([B || {_, _, _, B} <- Needed]),
    give_up(Needed, Bytes, Budget, OldestMs, []).

%% The oldest first: a log has no holes.
give_up([{_, _, Since, Size} = Segment | Rest], Bytes, Budget, OldestMs, GivenUp) when
    Bytes > Budget; Since < OldestMs
->
    give_up(Rest, Bytes - Size, Budget, OldestMs, [Segment | GivenUp]);
give_up(Kept, _Bytes, _Budget, _OldestMs, GivenUp) ->
    {lists:reverse(GivenUp), Kept}.

count_given_up(_StreamId, [], _First) ->
    ok;
count_given_up(StreamId, [{Offset, _, _, _} | _] = GivenUp, First) ->
    ok = rabbitmq_stream_s3_counters:add(replica_lag_given_up, length(GivenUp)),
    ?LOG_WARNING(
        "stream_s3: ~ts: ~b local segments from offset ~b on are no longer kept for replica ~ts,"
        " which has not copied them: stream_s3.replica_lag.max_bytes or max_age is reached. The"
        " replica starts over behind them; no record is lost, all of them are in S3",
        [StreamId, length(GivenUp), Offset, slowest(StreamId, First)],
        ?DOMAIN
    ).

keep(_StreamId, [], undefined) ->
    ok;
keep(StreamId, [], #kept{is_said = IsSaid}) ->
    true = ets:delete(?TABLE, {kept, StreamId}),
    _ = IsSaid andalso
        ?LOG_INFO("stream_s3: ~ts: no local segment is kept for a replica", [StreamId], ?DOMAIN),
    ok;
keep(StreamId, Segments, Before) ->
    IsSaid = Before =/= undefined andalso Before#kept.is_said,
    Bytes = lists:sum([B || {_, _, _, B} <- Segments]),
    insert(StreamId, #kept{segments = Segments, bytes = Bytes, is_said = IsSaid}).

insert(StreamId, Kept) ->
    true = ets:insert(?TABLE, {{kept, StreamId}, Kept}),
    ok.

since(Offset, #kept{segments = Segments}, Now) ->
    case lists:keyfind(Offset, 1, Segments) of
        {Offset, _, Since, _} -> Since;
        false -> Now
    end;
since(_Offset, undefined, Now) ->
    Now.

bytes(#kept{bytes = Bytes}) -> Bytes;
bytes(undefined) -> 0.

kept(StreamId) ->
    case lookup({kept, StreamId}) of
        {ok, Kept} -> Kept;
        none -> undefined
    end.

kept() ->
    try
        [{StreamId, Kept} || [StreamId, Kept] <- ets:match(?TABLE, {{kept, '$1'}, '$2'})]
    catch
        error:badarg -> []
    end.

limits() ->
    Settings = rabbitmq_stream_s3_config:public(),
    case Settings of
        #{replica_lag_max_bytes := MaxBytes, replica_lag_max_age_ms := MaxAge} when
            MaxBytes > 0, MaxAge > 0
        ->
            {MaxBytes, MaxAge};
        _ ->
            off
    end.

%% Replicas ----------------------------------------------------------------------------------------

%% What the slowest replica wants next, of those that the local log still has something for.
position(StreamId, First) ->
    case [Position || {Position, _Reader} <- positions(StreamId, First)] of
        [] -> none;
        Positions -> lists:min(Positions)
    end.

slowest(StreamId, First) ->
    case lists:sort([{P, Host, Port} || {P, {Host, Port, _}} <- positions(StreamId, First)]) of
        [{Position, Host, Port} | _] ->
            io_lib:format("~ts:~0p, at offset ~b", [host(Host), Port, Position]);
        [] ->
            ""
    end.

positions(StreamId, First) ->
    Readers =
        case lookup({readers, StreamId}) of
            {ok, Found} -> Found;
            none -> []
        end,
    [
        {max(0, Position), Reader}
     || {_Host, _Port, Counter} = Reader <- Readers,
        Position <- [counters:get(Counter, ?C_OFFSET)],
        %% Below it, the reader has been overtaken already: by the user's retention, or given up.
        Position + 1 >= First
    ].

host(Host) when is_list(Host); is_binary(Host) -> Host;
host(Host) -> io_lib:format("~0p", [Host]).

looked_at() ->
    case lookup(looked) of
        {ok, At} -> At;
        none -> now_ms() - ?LOOK_MS
    end.

look(Now) ->
    Found = readers(),
    true = ets:match_delete(?TABLE, {{readers, '_'}, '_'}),
    true = ets:insert(?TABLE, [{{readers, Id}, Readers} || Id := Readers <- Found]),
    true = ets:insert(?TABLE, {looked, Now}).

-spec readers() -> #{stream_id() => [reader()]}.
readers() ->
    lists:foldl(
        fun({_, Reference, Host, Port} = Id, Found) ->
            case {rabbitmq_stream_s3_manifest_cache:of_queue(Reference), osiris_counters:fetch(Id)} of
                {{ok, StreamId}, Counter} when Counter =/= undefined ->
                    Reader = {Host, Port, Counter},
                    maps:update_with(StreamId, fun(Rs) -> [Reader | Rs] end, [Reader], Found);
                _NotWrittenHereOrGone ->
                    Found
            end
        end,
        #{},
        reader_ids()
    ).

%% The names of counters, wherever this seshat has them in its rows.
reader_ids() ->
    Table = seshat_counters_server:get_table(osiris),
    Id = {element, ets:info(Table, keypos), '$1'},
    IsReader = [
        {is_tuple, Id},
        {'=:=', {size, Id}, 4},
        {'=:=', {element, 1, Id}, osiris_replica_reader}
    ],
    ets:select(Table, [{'$1', IsReader, [Id]}]).

lookup(Key) ->
    try ets:lookup(?TABLE, Key) of
        [{Key, Value}] -> {ok, Value};
        [] -> none
    catch
        error:badarg -> none
    end.

now_ms() ->
    erlang:monotonic_time(millisecond).

%% The server --------------------------------------------------------------------------------------

-spec init([]) -> {ok, []}.
init([]) ->
    ?TABLE = ets:new(?TABLE, [named_table, public, set, {read_concurrency, true}]),
    _ = erlang:send_after(?TICK_MS, self(), tick),
    {ok, []}.

-spec handle_call(term(), gen_server:from(), []) -> {reply, term(), []}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), []) -> {noreply, []}.
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), []) -> {noreply, []}.
handle_info(tick, State) ->
    _ = erlang:send_after(?TICK_MS, self(), tick),
    ok = look_after(kept()),
    {noreply, State};
handle_info(_Unknown, State) ->
    {noreply, State}.

look_after([]) ->
    ok;
look_after(Kept) ->
    Now = now_ms(),
    true = look(Now),
    lists:foreach(fun({StreamId, Of}) -> look_after(StreamId, Of, Now) end, Kept).

look_after(StreamId, #kept{segments = [{First, End, Since, _} | _]} = Kept, Now) ->
    Reader = rabbitmq_stream_s3_registry:whereis_name({StreamId, node()}),
    Position = position(StreamId, First),
    IsOver =
        case {Position, limits()} of
            {none, _} -> true;
            {_, off} -> true;
            {_, {_MaxBytes, MaxAge}} -> Position >= End orelse Since < Now - MaxAge
        end,
    if
        Reader =:= undefined ->
            %% It is not written here any more.
            true = ets:delete(?TABLE, {kept, StreamId});
        IsOver ->
            gen_server:cast(Reader, evaluate_retention);
        true ->
            say(StreamId, Kept, Now)
    end.

say(StreamId, #kept{is_said = false, segments = [{First, _, Since, _} | _]} = Kept, Now) when
    Since < Now - ?SAID_AFTER_MS
->
    ?LOG_WARNING(
        "stream_s3: ~ts: ~b bytes of local segments from offset ~b on are durable in S3 and stay for"
        " replica ~ts, which has not copied them. Look at that node and the network to it;"
        " stream_s3.replica_lag.max_bytes and max_age say how much stays and how long",
        [StreamId, Kept#kept.bytes, First, slowest(StreamId, First)],
        ?DOMAIN
    ),
    %% An evaluation may have changed the row meanwhile; then it is said again.
    case kept(StreamId) of
        Kept -> insert(StreamId, Kept#kept{is_said = true});
        _ -> ok
    end;
say(_StreamId, _Kept, _Now) ->
    ok.
