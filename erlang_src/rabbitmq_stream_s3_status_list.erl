-module(rabbitmq_stream_s3_status_list).
-moduledoc """
All streams of the cluster with how much of each is durable in S3: which of many is behind, and which is not
uploaded at all.

Owns the rows and their verdicts. Asks each node once, for what it writes; no process of a stream is asked.
Holds nothing.
""".

-include_lib("rabbit_common/include/rabbit.hrl").

-export([streams/0, here/0]).

-export_type([row/0, verdict/0]).

-type verdict() :: ok | problem | not_uploaded.
-type row() :: #{
    stream := binary(),
    vhost := binary(),
    stream_id := binary(),
    verdict := verdict(),
    %% Why it is not `ok`.
    text := binary(),
    node => node(),
    atom() => term()
}.

-define(NODE_MS, 20_000).
-define(SHOWN, [
    epoch,
    phase,
    log_next_offset,
    manifest_first_offset,
    persisted_next_offset,
    manifest_total_size,
    durability_lag_ms,
    unpersisted_bytes,
    deletions_waiting
]).

-doc "A row for each stream of the cluster, in the order of vhosts and names.".
-spec streams() -> {ok, [row()]}.
streams() ->
    Nodes = rabbit_nodes:list_running(),
    Answers = erpc:multicall(Nodes, ?MODULE, here, [], ?NODE_MS),
    Written = maps:from_list([Row || {ok, {ok, Rows}} <- Answers, Row <- Rows]),
    Silent = #{Node => why(Answer) || {Node, Answer} <- lists:zip(Nodes, Answers), not is_answer(Answer)},
    {ok,
        lists:sort([
            row(Queue, Written, Silent)
         || Queue <- rabbit_amqqueue:list_by_type(rabbit_stream_queue)
        ])}.

-doc "What this node uploads: by stream id, with what of the native status is shown.".
-spec here() -> {ok, [{rabbitmq_stream_s3:stream_id(), map()}]} | {error, binary()}.
here() ->
    case rabbitmq_stream_s3:mode() of
        active ->
            {ok, [
                {StreamId, shown(Status)}
             || {StreamId, _Queue, Status} <- rabbitmq_stream_s3_replica_reader:statuses()
            ]};
        {inert, _Kind, Text} ->
            {error, Text};
        _Starting ->
            {error, <<"the plugin is starting or stopping">>}
    end.

shown(Status) ->
    Problem =
        case Status of
            #{problem := {Kind, Text}} -> #{problem_kind => Kind, problem_text => Text};
            _ -> #{problem_kind => none, problem_text => <<>>}
        end,
    maps:merge(
        Problem#{node => node()},
        maps:with(?SHOWN, rabbitmq_stream_s3_status:with_lag(Status))
    ).

row(Queue, Written, Silent) ->
    #resource{virtual_host = VHost, name = Stream} = amqqueue:get_name(Queue),
    #{name := Name} = State = amqqueue:get_type_state(Queue),
    StreamId = rabbitmq_stream_s3:stream_id(Name),
    Row = #{stream => Stream, vhost => VHost, stream_id => StreamId},
    case Written of
        #{StreamId := #{problem_kind := none} = Shown} ->
            maps:merge(Shown, Row#{verdict => ok, text => <<>>});
        #{StreamId := #{problem_text := Text} = Shown} ->
            maps:merge(Shown, Row#{verdict => problem, text => Text});
        _ ->
            Row#{verdict => not_uploaded, text => nobody(leader(Queue, State), Silent)}
    end.

leader(Queue, State) ->
    case amqqueue:get_pid(Queue) of
        Pid when is_pid(Pid) -> node(Pid);
        _ -> maps:get(leader_node, State, undefined)
    end.

nobody(Node, Silent) ->
    case Silent of
        #{Node := Why} ->
            text("its writer's node ~ts does not upload: ~ts", [Node, Why]);
        _ ->
            text("no node uploads it now; its last known writer was on ~ts", [Node])
    end.

is_answer({ok, {ok, _}}) -> true;
is_answer(_) -> false.

why({ok, {error, Text}}) -> Text;
why({error, {exception, undef, _}}) -> <<"it does not have the plugin">>;
why({error, {erpc, Reason}}) -> text("no answer (~0p)", [Reason]);
why({_Class, Reason}) -> text("~0tp", [Reason]).

text(Format, Args) ->
    rabbitmq_stream_s3:utf8(io_lib:format(Format, Args)).
