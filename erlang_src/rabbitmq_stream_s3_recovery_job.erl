-module(rabbitmq_stream_s3_recovery_job).
-moduledoc """
Brings streams back from the bucket alone: lists what the bucket has, says what a recovery would do, and
does it.

Owns the order of the steps and how many are done at once. Does not own what is found (native), the
judgement (rabbitmq_stream_s3_recovery_plan), nor how a queue is declared
(rabbitmq_stream_s3_host_declare). Deletes nothing, and can be run again after any interruption.
""".

-include_lib("rabbit_common/include/rabbit.hrl").

-export([work/3]).

-export_type([kind/0, step/0, report/0]).

-type kind() :: list | plan | run.
-type step() :: listing | inspecting | recovering.
-type report() :: fun(
    (#{step => step(), done => non_neg_integer(), total => non_neg_integer()}) -> ok
).

%% Requests to S3 for so many streams at once, and so many streams that are declared at once.
-define(INSPECTIONS_MAX, 16).
-define(DECLARATIONS_MAX, 4).
%% More streams than a cluster can have.
-define(STREAMS_MAX, 1_000_000).

-doc """
The results, one map for each stream that is asked for: what was found, with `verdict`, `text`, and the
queue's name if it has one. The error is a text for the operator.
""".
-spec work(kind(), rabbitmq_stream_s3_recovery_plan:selection(), report()) ->
    {ok, [map()]} | {error, binary()}.
work(Kind, Selection, Report) ->
    maybe
        {ok, Engine} ?= engine(),
        {ok, All} ?= stream_ids(Engine, start, {0, []}),
        Ids = [Id || Id <- All, rabbitmq_stream_s3_recovery_plan:selected(Id, Selection)],
        ok = Report(#{step => inspecting, total => length(Ids)}),
        {Found, Failed} = inspect(Ids, Engine, depth(Kind), Report),
        InUse = in_use(),
        {ok, Deleted} ?= deleted(InUse),
        Cluster = {existing(Found, Selection), InUse, Deleted},
        Judged = rabbitmq_stream_s3_recovery_plan:judge(Found, Selection, Cluster),
        {ok, recover(Kind, Judged, Engine, Report) ++ Failed}
    end.

engine() ->
    case rabbitmq_stream_s3:engine() of
        {ok, Engine} -> {ok, Engine};
        undefined -> {error, <<"the plugin has no connection to S3 on this node">>}
    end.

depth(plan) -> objects;
depth(_) -> root.

stream_ids(_Engine, _Token, {Count, _Pages}) when Count > ?STREAMS_MAX ->
    {error, <<"the prefix has too many folders: is it that of a cluster?">>};
stream_ids(Engine, Token, {Count, Pages}) ->
    case rabbitmq_stream_s3_recovery_native:streams(Engine, Token) of
        {page, Page, done} -> {ok, lists:append(lists:reverse(Pages, [Page]))};
        {page, Page, Next} -> stream_ids(Engine, Next, {Count + length(Page), [Page | Pages]});
        {error, Text} -> {error, Text}
    end.

%% What could be said of each stream, and those of which nothing could.
inspect(Ids, Engine, Depth, Report) ->
    Inspected = in_parallel(
        fun(Id) ->
            case rabbitmq_stream_s3_recovery_native:inspect(Engine, Id, Depth) of
                {found, Found} -> {ok, Found};
                {error, Text} -> {error, #{stream_id => Id, verdict => unknown, text => Text}}
            end
        end,
        Ids,
        ?INSPECTIONS_MAX,
        Report
    ),
    {[Found || {ok, Found} <- Inspected], [Failed || {error, Failed} <- Inspected]}.

%% What this cluster has under the names of what was found.
existing(Found, Selection) ->
    Names = lists:usort([
        rabbit_misc:r(maps:get(vhost, Selection, VHost), queue, maps:get(as, Selection, Queue))
     || #{vhost := VHost, queue := Queue} <- Found, is_binary(VHost), is_binary(Queue)
    ]),
    maps:from_list([
        {Name, existing(Queue)}
     || Name <- Names, {ok, Queue} <- [rabbit_amqqueue:lookup(Name)]
    ]).

existing(Queue) ->
    case amqqueue:get_type(Queue) of
        rabbit_stream_queue ->
            #{name := Name} = amqqueue:get_type_state(Queue),
            Started =
                case rabbit_stream_coordinator:members(unicode:characters_to_list(Name)) of
                    {error, not_found} -> not_started;
                    _ -> started
                end,
            {stream, rabbitmq_stream_s3:stream_id(Name), Started};
        _ ->
            other
    end.

in_use() ->
    [
        rabbitmq_stream_s3:stream_id(Name)
     || Queue <- rabbit_amqqueue:list_by_type(rabbit_stream_queue),
        #{name := Name} <- [amqqueue:get_type_state(Queue)]
    ].

%% What this cluster had: their objects are being removed, or will be after their grace period.
deleted(InUse) ->
    case rabbitmq_stream_s3_db_register:list() of
        {ok, Registered} -> {ok, Registered -- InUse};
        {error, _} -> {error, <<"the metadata store does not say which streams were deleted">>}
    end.

recover(run, Judged, Engine, Report) ->
    Total = length([J || #{verdict := V} = J <- Judged, is_to_recover(V)]),
    ok = Report(#{step => recovering, done => 0, total => Total}),
    {ToDo, Others} = lists:partition(fun(#{verdict := V}) -> is_to_recover(V) end, Judged),
    Recovered = in_parallel(
        fun(#{found := Found, name := QName} = J) ->
            maps:merge(result(J), rabbitmq_stream_s3_recovery_queue:recover(QName, Found, Engine))
        end,
        ToDo,
        ?DECLARATIONS_MAX,
        Report
    ),
    Recovered ++ [result(J) || J <- Others];
recover(_ListOrPlan, Judged, _Engine, _Report) ->
    [result(J) || J <- Judged].

is_to_recover(Verdict) -> lists:member(Verdict, [recoverable, empty, interrupted]).

-spec result(rabbitmq_stream_s3_recovery_plan:judged()) -> map().
result(#{verdict := Verdict, text := Text, found := Found} = Judged) ->
    Name =
        case Judged of
            #{name := #resource{virtual_host = VHost, name = Queue}} ->
                #{vhost => VHost, queue => Queue};
            _ ->
                #{}
        end,
    maps:merge(Found, Name#{verdict => Verdict, text => Text}).

%% As lists:map/2, by so many processes at once. They are linked: what one of them ends with ends all, and
%% they end with the job.
in_parallel(Fun, List, Max, Report) ->
    in_parallel(Fun, lists:enumerate(List), Max, Report, 0, []).

in_parallel(_Fun, [], _Max, _Report, 0, Done) ->
    [Result || {_Number, Result} <- lists:sort(Done)];
in_parallel(Fun, [{Number, Item} | Rest], Max, Report, Running, Done) when Running < Max ->
    Job = self(),
    _ = spawn_link(fun() -> Job ! {?MODULE, Number, Fun(Item)} end),
    in_parallel(Fun, Rest, Max, Report, Running + 1, Done);
in_parallel(Fun, Rest, Max, Report, Running, Done) ->
    receive
        {?MODULE, Number, Result} ->
            ok = Report(#{done => length(Done) + 1}),
            in_parallel(Fun, Rest, Max, Report, Running - 1, [{Number, Result} | Done])
    end.
