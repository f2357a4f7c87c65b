-module(rabbitmq_stream_s3_host_declare).
-moduledoc """
Declares a stream that already has a stream id and a history: what rabbit_stream_queue does for a new one,
with the id given, and with a step of the caller's between the queue's record and the first writer.

Owns the steps of stock's declaration, which are the same in RabbitMQ 4.0 to 4.3, and the text of a
queue's arguments in the bucket. Does not own where the history is. Removes nothing, also if it fails: with
the record of a queue its history would go. Done again, it does what is missing.
""".

-include_lib("rabbit_common/include/rabbit.hrl").

-export([declare/1, encode_arguments/1, decode_arguments/1, is_recovered/1]).

-export_type([declaration/0]).

-type declaration() :: #{
    name := rabbit_amqqueue:name(),
    stream_id := rabbitmq_stream_s3:stream_id(),
    arguments := rabbit_framing:amqp_table(),
    user := rabbit_types:username(),
    %% Called when the queue's record is there, and before its first writer.
    between := fun(() -> ok | {error, term()})
}.

%% Comes to the hook of the first writer with the configuration of its log.
-define(RECOVERED, rabbitmq_stream_s3_recovered).

-doc """
`declared`: the stream is there now. `exists`: the queue of this name is another stream, and nothing was
done. Any other error leaves what was done, and can be tried again.
""".
-spec declare(declaration()) -> declared | {error, exists | term()}.
declare(#{name := QName, arguments := Arguments, user := User} = Declaration) ->
    #resource{virtual_host = VHost} = QName,
    Queue = amqqueue:new(
        QName, none, true, false, none, Arguments, VHost, #{user => User}, rabbit_stream_queue
    ),
    Size = initial_cluster_size(Queue),
    {Leader, Followers} = rabbit_queue_location:select_leader_and_followers(Queue, Size),
    Conf = rabbit_stream_queue:update_stream_conf(Queue, #{
        reference => QName,
        name => name(Declaration),
        event_formatter => {rabbit_stream_queue, format_osiris_event, [QName]},
        epoch => 1,
        nodes => [Leader | Followers],
        leader_node => Leader,
        replica_nodes => Followers,
        ?RECOVERED => true
    }),
    case rabbit_amqqueue:internal_declare(amqqueue:set_type_state(Queue, Conf), false) of
        {created, Created} -> begin_stream(Created, Declaration);
        {existing, Existing} -> complete(Existing, Declaration);
        {error, Reason} -> {error, Reason}
    end.

-doc "Whether the log that a writer opens is that of a stream that was declared here.".
-spec is_recovered(osiris_log:config()) -> boolean().
is_recovered(Config) ->
    maps:get(?RECOVERED, Config, false).

-doc "Arguments of a queue as text, with their types.".
-spec encode_arguments(rabbit_framing:amqp_table()) -> binary().
encode_arguments(Arguments) ->
    base64:encode(iolist_to_binary(rabbit_binary_generator:generate_table(Arguments))).

-doc "The way back; `error` for what is not that.".
-spec decode_arguments(binary()) -> {ok, rabbit_framing:amqp_table()} | error.
decode_arguments(Text) ->
    try
        {ok, rabbit_binary_parser:parse_table(base64:decode(Text))}
    catch
        _:_ -> error
    end.

complete(Existing, #{stream_id := StreamId} = Declaration) ->
    case amqqueue:get_type(Existing) =:= rabbit_stream_queue andalso stream_id(Existing) of
        StreamId ->
            #{leader_node := _} = amqqueue:get_type_state(Existing),
            case rabbit_stream_coordinator:members(name(Declaration)) of
                {error, not_found} -> begin_stream(Existing, Declaration);
                {ok, _Members} -> declared
            end;
        _AnotherStream ->
            {error, exists}
    end.

begin_stream(Queue, #{between := Between} = Declaration) ->
    case Between() of
        ok -> start(Queue, Declaration);
        {error, Reason} -> {error, Reason}
    end.

start(Queue, #{name := QName, arguments := Arguments, user := User}) ->
    #{leader_node := Leader} = amqqueue:get_type_state(Queue),
    case rabbit_stream_coordinator:new_stream(Queue, Leader) of
        {ok, {ok, LeaderPid}, _} ->
            _ = rabbit_amqqueue:update(QName, fun(Q) -> amqqueue:set_pid(Q, LeaderPid) end),
            ok = rabbit_event:notify(queue_created, [
                {name, QName},
                {durable, true},
                {auto_delete, false},
                {arguments, Arguments},
                {type, rabbit_stream_queue},
                {user_who_performed_action, User}
            ]),
            declared;
        Other ->
            {error, Other}
    end.

%% As stock: a policy wins over the argument, and without both it is all nodes.
initial_cluster_size(Queue) ->
    Policy = fun(OfPolicy, _OfArgument) -> OfPolicy end,
    case rabbit_queue_type_util:args_policy_lookup(<<"initial-cluster-size">>, Policy, Queue) of
        undefined -> length(rabbit_nodes:list_members());
        Size -> Size
    end.

%% Stock keeps and compares it as a list.
name(#{stream_id := StreamId}) ->
    unicode:characters_to_list(StreamId).

stream_id(Queue) ->
    #{name := Name} = amqqueue:get_type_state(Queue),
    rabbitmq_stream_s3:stream_id(Name).
