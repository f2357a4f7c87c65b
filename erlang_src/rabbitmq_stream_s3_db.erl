-module(rabbitmq_stream_s3_db).
-moduledoc """
What the plugin keeps in Khepri, and nothing else does:

    [rabbitmq, rabbitmq_stream_s3, StreamId]  the stream id; goes when the queue goes (keep_while)
    ... manifest    {Uid, Epoch, Next}: the pointer to the root, and the offset after the last one
                    that the root covers; its revision is the payload version. A pointer of an
                    earlier version of the plugin has no Next
    ... anchor      the stream id: "there may be objects"

Owns paths, conditions and the folding of Khepri's errors; no process, no cache, no retry (callers
are tasks that may be killed). Both shapes of Khepri's answers are understood: the node's properties
(0.16) and a map of them by path (0.17 on).

The payload version alone would not be safe against a deleted and recreated queue; it is, because a
stream id is unique per incarnation. keep_while knows names only: that the queue of this name is this
very stream is checked in the transaction that makes the container, and nothing else makes one. Each
write carries its own keep_while: it fails if the queue is gone.

What asks a quorum waits for its turn (rabbitmq_stream_s3_db_quorum).
""".

-include_lib("khepri/include/khepri.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-export([
    is_available/0,
    get/1,
    get_consistent/1,
    durable_end/2,
    gone/1,
    put_anchor/2,
    commit_pointer/6,
    list/0,
    list_consistent/0,
    streams/0,
    register_trigger/0,
    handle_queue_deletion/1
]).

-export_type([pointer/0, reason/0]).

-type uid() :: non_neg_integer().
-type epoch() :: non_neg_integer().
-type revision() :: non_neg_integer().
-type pointer() :: {epoch(), uid(), revision()}.
-type reason() :: timeout | unavailable | not_found | unexpected.

-define(ROOT, [rabbitmq, rabbitmq_stream_s3]).
-define(PROCEDURE, [
    rabbitmq, stored_procedures, ?MODULE, rabbitmq_stream_s3_db_sq_deletion
]).
%% Of the Raft machine, so of all members: what comes with 0.18.
-define(TRIGGER_MACHINE_VERSION, 3).
-define(READ_TIMEOUT_MS, 5000).
-define(CONSISTENT_READ_TIMEOUT_MS, 30000).
-define(WRITE_TIMEOUT_MS, 30000).

-doc "False on a 4.0 or 4.1 whose metadata is still in Mnesia.".
-spec is_available() -> boolean().
is_available() ->
    _ = code:ensure_loaded(rabbit_khepri),
    case erlang:function_exported(rabbit_khepri, is_enabled, 0) of
        true -> rabbit_khepri:is_enabled();
        %% A release that no longer asks has nothing but Khepri.
        false -> true
    end.

-doc "This node's copy, which may be a little behind.".
-spec get(rabbitmq_stream_s3:stream_id()) -> {ok, pointer()} | not_found | {error, reason()}.
get(StreamId) ->
    read_pointer(StreamId, #{favor => low_latency, timeout => ?READ_TIMEOUT_MS}).

-spec get_consistent(rabbitmq_stream_s3:stream_id()) ->
    {ok, pointer()} | not_found | {error, reason()}.
get_consistent(StreamId) ->
    rabbitmq_stream_s3_db_quorum:run(fun() ->
        read_pointer(StreamId, #{favor => consistency, timeout => ?CONSISTENT_READ_TIMEOUT_MS})
    end).

-doc """
The pointer and the offset after the last durable record, on the word of a quorum; `unknown` if an
earlier version of the plugin has written the pointer.
""".
-spec durable_end(rabbitmq_stream_s3:stream_id(), timeout()) ->
    {ok, pointer(), non_neg_integer() | unknown} | not_found | {error, reason()}.
durable_end(StreamId, Timeout) ->
    case read(StreamId, #{favor => consistency, timeout => Timeout}) of
        {ok, {Uid, Epoch, Next}, Revision} -> {ok, {Epoch, Uid, Revision}, Next};
        {ok, {Uid, Epoch}, Revision} -> {ok, {Epoch, Uid, Revision}, unknown};
        Other -> Other
    end.

%% A pattern is given where amqqueue expects a queue.
-dialyzer({nowarn_function, [gone/1, queues_of/1, stream_id/1]}).
-doc """
Which of these streams have neither a container nor a queue of whatever name, on the word of a quorum.
All queues are looked through: ask for many streams at once.
""".
-spec gone([rabbitmq_stream_s3:stream_id()]) ->
    {ok, [rabbitmq_stream_s3:stream_id()]} | {error, reason()}.
gone(StreamIds) ->
    rabbitmq_stream_s3_db_quorum:run(fun() ->
        maybe
            {ok, Containers} ?= get_many(?ROOT ++ [#if_any{conditions = StreamIds}]),
            {ok, Queues} ?= get_many(queues_of(StreamIds)),
            WithContainer = [Id || [rabbitmq, rabbitmq_stream_s3, Id] := _ <- Containers],
            WithQueue = [stream_id(Queue) || _Path := #{data := Queue} <- Queues],
            {ok, (StreamIds -- WithContainer) -- WithQueue}
        end
    end).

get_many(Pattern) ->
    Options = #{favor => consistency, timeout => ?CONSISTENT_READ_TIMEOUT_MS},
    fold(khepri_adv:get_many(store(), Pattern, Options)).

queues_of(StreamIds) ->
    Names = StreamIds ++ [unicode:characters_to_list(Id) || Id <- StreamIds],
    Condition = #if_data_matches{
        pattern = amqqueue:set_type_state(amqqueue:pattern_match_all(), #{name => '$1'}),
        conditions = [list_to_tuple(['orelse' | [{'=:=', '$1', {const, N}} || N <- Names]])]
    },
    rabbit_db_queue:khepri_queue_path(?KHEPRI_WILDCARD_STAR, Condition).

stream_id(Queue) ->
    #{name := Name} = amqqueue:get_type_state(Queue),
    rabbitmq_stream_s3:stream_id(Name).

-doc """
Makes it durable that there may be objects, in the register too. `not_found`: the queue is gone, or is
another stream by now.
""".
-spec put_anchor(rabbitmq_stream_s3:stream_id(), rabbit_amqqueue:name()) -> ok | {error, reason()}.
put_anchor(StreamId, QName) ->
    rabbitmq_stream_s3_db_quorum:run(fun() ->
        maybe
            ok ?= fold_ok(rabbitmq_stream_s3_db_register:put(StreamId)),
            ok ?= put_container(StreamId, QName),
            {ok, _} ?= fold(put(in_container(StreamId, anchor), StreamId, QName)),
            ok
        end
    end).

-doc """
Moves the pointer from `Expected` (0: there must be none) to `{Uid, Epoch, Next}`, unless a writer of
a higher epoch has moved it. A repeated call, after an answer that was lost, finds its own pointer in
place and succeeds.
""".
-spec commit_pointer(
    rabbitmq_stream_s3:stream_id(),
    rabbit_amqqueue:name(),
    epoch(),
    uid(),
    Next :: non_neg_integer(),
    revision()
) ->
    {ok, revision()} | conflict | not_found | error.
commit_pointer(StreamId, QName, Epoch, Uid, Next, 0) ->
    Commit = fun() ->
        case put_container(StreamId, QName) of
            ok -> move_pointer(StreamId, QName, {Uid, Epoch, Next}, #if_node_exists{exists = false});
            {error, not_found} -> not_found;
            {error, _} -> error
        end
    end,
    case rabbitmq_stream_s3_db_quorum:run(Commit) of
        {error, timeout} -> error;
        Outcome -> Outcome
    end;
commit_pointer(StreamId, QName, Epoch, Uid, Next, Expected) ->
    Condition = #if_all{
        conditions = [
            #if_payload_version{version = Expected},
            #if_any{
                conditions = [
                    #if_data_matches{pattern = Pattern, conditions = [{'=<', '$1', Epoch}]}
                 || Pattern <- [{'_', '$1', '_'}, {'_', '$1'}]
                ]
            }
        ]
    },
    move_pointer(StreamId, QName, {Uid, Epoch, Next}, Condition).

-doc "Pointers of all streams, from this node's copy.".
-spec list() -> {ok, #{rabbitmq_stream_s3:stream_id() => pointer()}} | {error, reason()}.
list() ->
    list(low_latency).

-doc "As list/0, on the word of a quorum.".
-spec list_consistent() ->
    {ok, #{rabbitmq_stream_s3:stream_id() => pointer()}} | {error, reason()}.
list_consistent() ->
    list(consistency).

list(Favor) ->
    Pattern = ?ROOT ++ [?KHEPRI_WILDCARD_STAR, manifest],
    Options = #{favor => Favor, timeout => ?CONSISTENT_READ_TIMEOUT_MS},
    case khepri_adv:get_many(store(), Pattern, Options) of
        {ok, Nodes} ->
            {ok, #{
                StreamId => {element(2, Data), element(1, Data), Revision}
             || [rabbitmq, rabbitmq_stream_s3, StreamId, manifest] :=
                    #{data := Data, payload_version := Revision} <- Nodes,
                is_tuple(Data)
            }};
        Error ->
            fold(Error)
    end.

-doc "All streams that have a container, from this node's copy.".
-spec streams() -> {ok, #{rabbitmq_stream_s3:stream_id() => []}} | {error, reason()}.
streams() ->
    Options = #{favor => low_latency, timeout => ?CONSISTENT_READ_TIMEOUT_MS},
    case khepri_adv:get_many(store(), ?ROOT ++ [?KHEPRI_WILDCARD_STAR], Options) of
        {ok, Nodes} -> {ok, #{Id => [] || [rabbitmq, rabbitmq_stream_s3, Id] := _ <- Nodes}};
        Error -> fold(Error)
    end.

-doc """
Asks Khepri to call `handle_queue_deletion/1` when a stream's container goes. The stored procedure
is a stub that calls this module by name, so that nodes of different versions of the plugin agree.

`unsupported`: a member of the cluster may still run Khepri 0.16. It looks for a deleted node that a
trigger's wildcard matches in the tree that no longer has it, and its state machine crashes: on
every member, and after each restart again.
""".
-spec register_trigger() -> ok | unsupported | {error, term()}.
register_trigger() ->
    %% What all members agree on, not what this node could do.
    case ra_counters:counters({store(), node()}, [effective_machine_version]) of
        #{effective_machine_version := Version} when Version >= ?TRIGGER_MACHINE_VERSION ->
            do_register_trigger();
        #{effective_machine_version := _Older} ->
            unsupported;
        undefined ->
            {error, unavailable}
    end.

do_register_trigger() ->
    Filter = khepri_evf:tree(?ROOT ++ [?KHEPRI_WILDCARD_STAR], #{on_actions => [delete]}),
    Options = #{timeout => ?WRITE_TIMEOUT_MS},
    maybe
        ok ?= khepri:put(store(), ?PROCEDURE, deletion_procedure(?MODULE), Options),
        khepri:register_trigger(store(), rabbitmq_stream_s3_stream_deleted, Filter, ?PROCEDURE, Options)
    end.

-doc "Runs on Khepri's leader; if the plugin's processes are not there, the others are told.".
-spec handle_queue_deletion(map() | tuple()) -> ok.
handle_queue_deletion(Trigger) when is_tuple(Trigger) ->
    %% Later than 0.18 the event is a map in a record.
    Events = [Event || #{path := _} = Event <- tuple_to_list(Trigger)],
    lists:foreach(fun handle_queue_deletion/1, Events);
handle_queue_deletion(#{path := [rabbitmq, rabbitmq_stream_s3, StreamId]}) ->
    ok = rabbitmq_stream_s3_counters:add(stored_procedure_calls),
    rabbitmq_stream_s3_peers:delete_stream(StreamId);
handle_queue_deletion(_Other) ->
    ok.

%% Khepri takes the code of the fun out of the module: a call through a variable is all that it
%% finds to take.
deletion_procedure(Module) ->
    fun(Event) -> Module:handle_queue_deletion(Event) end.

read_pointer(StreamId, Options) ->
    case read(StreamId, Options) of
        {ok, Data, Revision} -> {ok, {element(2, Data), element(1, Data), Revision}};
        Other -> Other
    end.

read(StreamId, Options) ->
    Path = path(StreamId, manifest),
    ok = rabbitmq_stream_s3_counters:add(pointer_reads),
    case fold(khepri_adv:get(store(), Path, Options)) of
        {ok, Answer} ->
            case properties(Path, Answer) of
                #{data := {_Uid, _Epoch} = Data, payload_version := Revision} ->
                    {ok, Data, Revision};
                #{data := {_Uid, _Epoch, _Next} = Data, payload_version := Revision} ->
                    {ok, Data, Revision};
                _ ->
                    {error, unexpected}
            end;
        {error, not_found} ->
            not_found;
        {error, Reason} ->
            {error, Reason}
    end.

move_pointer(StreamId, QName, Data, Condition) ->
    Path = path(StreamId, manifest),
    Conditional = in_container(StreamId, #if_all{conditions = [manifest, Condition]}),
    ok = rabbitmq_stream_s3_counters:add(pointer_writes),
    Outcome =
        case put(Conditional, Data, QName) of
            {ok, Answer} ->
                case properties(Path, Answer) of
                    #{payload_version := Revision} -> {ok, Revision};
                    _ -> error
                end;
            {error, ?khepri_error(mismatching_node, #{node_props := Props})} ->
                case Props of
                    #{data := Data, payload_version := Revision} -> {ok, Revision};
                    _ -> conflict
                end;
            {error, Reason} ->
                case reason(Reason) of
                    not_found -> not_found;
                    _ -> error
                end
        end,
    ok = count(Outcome),
    Outcome.

count({ok, _}) -> rabbitmq_stream_s3_counters:add(pointer_writes_ok);
count(conflict) -> rabbitmq_stream_s3_counters:add(pointer_writes_conflict);
count(not_found) -> rabbitmq_stream_s3_counters:add(pointer_writes_not_found);
count(error) -> rabbitmq_stream_s3_counters:add(pointer_writes_error).

%% A transaction, so that between the look at the queue and the write nobody declares another of its
%% name. Khepri takes the code of the fun and of what it calls.
put_container(StreamId, QName) ->
    QueuePath = queue_path(QName),
    Path = ?ROOT ++ [StreamId],
    KeepWhile = keep_while(QName),
    AsList = unicode:characters_to_list(StreamId),
    Transaction = fun() ->
        case khepri_tx:get(QueuePath) of
            {ok, Queue} ->
                case amqqueue:get_type_state(Queue) of
                    #{name := Name} when Name =:= StreamId; Name =:= AsList ->
                        khepri_tx:put(Path, StreamId, #{keep_while => KeepWhile});
                    _AnotherIncarnation ->
                        another
                end;
            {error, _} = Error ->
                Error
        end
    end,
    Options = #{timeout => ?WRITE_TIMEOUT_MS, reply_from => local},
    case khepri:transaction(store(), Transaction, rw, Options) of
        ok -> ok;
        {ok, ok} -> ok;
        {ok, another} -> {error, not_found};
        {ok, {error, Reason}} -> {error, reason(Reason)};
        {error, Reason} -> {error, reason(Reason)};
        _Other -> {error, unexpected}
    end.

put(Path, Data, QName) ->
    Options = #{
        keep_while => keep_while(QName), timeout => ?WRITE_TIMEOUT_MS, reply_from => local
    },
    khepri_adv:put(store(), Path, Data, Options).

keep_while(QName) ->
    #{queue_path(QName) => #if_node_exists{}}.

queue_path(#resource{virtual_host = VHost, kind = queue, name = Name}) ->
    rabbit_db_queue:khepri_queue_path(VHost, Name).

%% Not a path: the container must be there, or it would be made anew with what is put into it.
in_container(StreamId, Leaf) ->
    ?ROOT ++ [#if_all{conditions = [StreamId, #if_node_exists{exists = true}]}, Leaf].

store() ->
    rabbit_khepri:get_store_id().

path(StreamId, Leaf) ->
    ?ROOT ++ [StreamId, Leaf].

%% Khepri 0.17 and later answer with properties by path, 0.16 with those of the one node.
properties(Path, Answer) ->
    case Answer of
        #{Path := Properties} -> Properties;
        Properties -> Properties
    end.

fold_ok(ok) -> ok;
fold_ok({error, Reason}) -> {error, reason(Reason)}.

fold({ok, Answer}) -> {ok, Answer};
fold({error, Reason}) -> {error, reason(Reason)}.

reason(timeout) -> timeout;
reason({timeout, _}) -> timeout;
reason(noproc) -> unavailable;
reason({no_more_servers_to_try, _}) -> unavailable;
reason(?khepri_error(node_not_found, _)) -> not_found;
reason(?khepri_error(keep_while_conditions_not_met, _)) -> not_found;
reason(_Other) -> unexpected.
