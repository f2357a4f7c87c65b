-module(rabbitmq_stream_s3_status_hidden).
-moduledoc """
What consumers of this node do not see any more when the plugin is disabled: for each stream with a
member here, what is only in the remote tier. And which stored offsets are kept meanwhile.

Owns the words for it; reads what others keep, holds nothing.
""".

-include_lib("rabbit_common/include/rabbit.hrl").

-export([streams/0, kept/0, text/1, line/1]).
-export_type([hidden/0]).

-type hidden() :: #{
    stream := binary(),
    vhost := binary(),
    %% First offset of the remote tier, and of the local log; between them nobody sees anything.
    first_offset := osiris:offset() | unknown,
    local_first_offset := osiris:offset(),
    records := non_neg_integer() | unknown
}.

-define(SHOWN, 10).

-doc "The streams that lose sight of something, those that lose most first.".
-spec streams() -> [hidden()].
streams() ->
    Hidden = lists:append([
        hidden(rabbitmq_stream_s3:stream_id(Name), Shared, Reference)
     || {_Pid, _Dir, Name, Shared, Reference} <- rabbitmq_stream_s3_host_osiris:members()
    ]),
    %% `unknown` is larger than any number.
    lists:sort(fun(#{records := A}, #{records := B}) -> A >= B end, Hidden).

-doc """
Below what no stored offset may be dropped while the plugin is off: of all streams that have a
manifest, also of those that get a writer here later.
""".
-spec kept() -> rabbitmq_stream_s3_host_osiris:kept().
kept() ->
    Known = #{
        Id => Firsts
     || {Id, Row} <- rabbitmq_stream_s3_manifest_cache:ranges(), {_, _} = Firsts <- [firsts(Row)]
    },
    case rabbitmq_stream_s3_db:is_available() of
        false ->
            none;
        true ->
            case rabbitmq_stream_s3_db:list() of
                {ok, Pointers} ->
                    maps:merge(#{Id => {0, 0} || Id := _ <- Pointers}, Known);
                {error, _} ->
                    all
            end
    end.

-doc "One sentence for the log; `none` if nothing is hidden.".
-spec text([hidden()]) -> unicode:chardata() | none.
text([]) ->
    none;
text(Hidden) ->
    {Shown, More} = lists:split(min(?SHOWN, length(Hidden)), Hidden),
    Rest =
        case More of
            [] -> "";
            _ -> io_lib:format("; and ~b more streams", [length(More)])
        end,
    [
        io_lib:format("consumers of ~b streams do not see what is only in S3: ", [length(Hidden)]),
        lists:join("; ", [line(H) || H <- Shown]),
        Rest
    ].

-doc "One of them, in words.".
-spec line(hidden()) -> unicode:chardata().
line(#{stream := Stream, vhost := VHost, local_first_offset := Floor} = Hidden) ->
    Range =
        case Hidden of
            #{records := unknown} ->
                io_lib:format("all before offset ~b", [Floor]);
            #{records := Records, first_offset := First} ->
                io_lib:format("~b records, offsets ~b to ~b", [Records, First, First + Records - 1])
        end,
    io_lib:format("~ts in vhost ~ts: ~ts", [Stream, VHost, Range]).

hidden(StreamId, Shared, Reference) ->
    Floor = osiris_log_shared:first_chunk_id(Shared),
    Row =
        case rabbitmq_stream_s3_manifest_cache:range(StreamId) of
            {ok, Range} ->
                Range;
            pending ->
                unknown;
            none ->
                case rabbitmq_stream_s3_manifest_protection:is_protected(StreamId) of
                    true -> unknown;
                    false -> none
                end
        end,
    case Row of
        #{first_offset := First, next_offset := Next} when First < Next, Floor =:= -1 ->
            [row(StreamId, Reference, First, Next, Next - First)];
        #{first_offset := First, next_offset := Next} when First < Next, First < Floor ->
            [row(StreamId, Reference, First, Floor, min(Floor, Next) - First)];
        unknown when Floor > 0 ->
            [row(StreamId, Reference, unknown, Floor, unknown)];
        _ ->
            []
    end.

row(StreamId, Reference, First, Floor, Records) ->
    {VHost, Stream} =
        case Reference of
            #resource{virtual_host = V, name = N} -> {V, N};
            _ -> {<<>>, StreamId}
        end,
    #{
        stream => Stream,
        vhost => VHost,
        first_offset => First,
        local_first_offset => Floor,
        records => Records
    }.

firsts(#{first_offset := Same, next_offset := Same}) -> none;
firsts(#{first_offset := First, first_timestamp := Timestamp}) -> {First, Timestamp};
%% It keeps everything, if it has a pointer at all.
firsts(pending) -> none.
