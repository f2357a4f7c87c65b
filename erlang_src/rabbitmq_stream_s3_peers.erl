-module(rabbitmq_stream_s3_peers).
-moduledoc """
Every message that one node of the cluster sends to another: who sends it, and what it looks like.

All are casts to a registered process, and all may be lost: a node that is not connected, has a full
line or does not run the plugin hears nothing, and learns the same by its own rounds. No sender waits.
Nodes of two versions of the plugin exchange them during an upgrade, so a shape only changes together
with its tag; a receiver drops what it does not know.

Owns the shapes, and the sending. Does not own what a receiver does with a message.

| to                          | message                                                  | when |
| --------------------------- | -------------------------------------------------------- | ---- |
| `..._manifest_replica`      | `{manifest_edit, StreamId, From, To, Epoch, Edit, Node}` | the writer has persisted, and the edit is small |
| `..._manifest_replica`      | `{pointer_moved, StreamId, Pointer, Epoch, Node}`        | the writer has persisted, or was asked |
| `..._manifest_replica`      | `{pointer_taken_back, StreamId, Revision, Node}`         | the writer's log has lost its end |
| `..._manifest_replica`      | `{pointer_wanted, StreamId, Node}`                       | a replica asks the writer |
| `..._lister`                | `{delete_stream, StreamId}`                              | the stream's record is gone |
| `..._membership_reconciliation` | `{trigger, Reason}`                                  | a policy has changed |
""".

-export([announce/4, ask_writer/1, received/1]).
-export([delete_stream/1, trigger_membership/2]).

-export_type([received/0]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().
-type pointer() :: rabbitmq_stream_s3:pointer().
-type edit() :: rabbitmq_stream_s3_nif:edit_from().
-type received() ::
    {manifest_edit, stream_id(), From :: pointer(), To :: pointer(), osiris:epoch(), binary()}
    | {pointer_moved, stream_id(), pointer(), osiris:epoch()}
    | {pointer_taken_back, stream_id(), Revision :: pos_integer()}
    | {pointer_wanted, stream_id(), node()}.


-doc "The writer of a stream here tells the nodes of its replicas what it has persisted.".
-spec announce([node()], stream_id(), rabbitmq_stream_s3:range(), edit()) -> ok.
announce(Nodes, StreamId, Range, Edit) ->
    %% The edit first: a node that could apply it has no need of the pointer.
    case edit(StreamId, Range, Edit) of
        none -> ok;
        Change ->
            Count = send(rabbitmq_stream_s3_manifest_replica, Nodes, Change),
            rabbitmq_stream_s3_counters:add(manifest_edits_sent, Count)
    end,
    case announcement(StreamId, Range) of
        none ->
            ok;
        Message ->
            _ = send(rabbitmq_stream_s3_manifest_replica, Nodes, Message),
            ok
    end.

-doc "Asks for an announcement, whichever node the writer is on.".
-spec ask_writer(stream_id()) -> ok.
ask_writer(StreamId) ->
    _ = send(rabbitmq_stream_s3_manifest_replica, nodes(), {pointer_wanted, StreamId, node()}),
    ok.

-doc "What another node has sent to the process that knows the manifests; `unknown` is not for it.".
-spec received(term()) -> received() | unknown.
received({manifest_edit, StreamId, From, To, WriterEpoch, Edit, _WriterNode}) ->
    {manifest_edit, StreamId, From, To, WriterEpoch, Edit};
received({pointer_moved, StreamId, Pointer, WriterEpoch, _WriterNode}) ->
    {pointer_moved, StreamId, Pointer, WriterEpoch};
received({pointer_taken_back, StreamId, Revision, _WriterNode}) ->
    {pointer_taken_back, StreamId, Revision};
received({pointer_wanted, StreamId, Node}) ->
    {pointer_wanted, StreamId, Node};
received(_Unknown) ->
    unknown.

-doc """
Has the objects of a deleted stream removed: by this node if the plugin runs here, else by the others. Two
nodes at it do no harm.
""".
-spec delete_stream(stream_id()) -> ok.
delete_stream(StreamId) ->
    case whereis(rabbitmq_stream_s3_lister) of
        undefined ->
            _ = send(rabbitmq_stream_s3_lister, nodes(), {delete_stream, StreamId}),
            ok;
        Pid ->
            gen_server:cast(Pid, {delete_stream, StreamId})
    end.

-doc "Has the members of all streams looked over, by this process and its like on all other nodes.".
-spec trigger_membership(pid(), Reason :: term()) -> ok.
trigger_membership(Server, Reason) ->
    _ = send(rabbitmq_stream_s3_membership_reconciliation, nodes(), {trigger, Reason}),
    gen_server:cast(Server, {trigger, Reason}).

edit(StreamId, #{pointer := {_, _, _} = To, epoch := WriterEpoch}, {From, Edit}) ->
    {manifest_edit, StreamId, From, To, WriterEpoch, Edit, node()};
edit(_StreamId, _Range, none) ->
    none.

announcement(StreamId, #{pointer := {_Epoch, _Uid, _Revision} = Pointer, epoch := WriterEpoch}) ->
    {pointer_moved, StreamId, Pointer, WriterEpoch, node()};
announcement(StreamId, #{pointer := none, revision := Revision}) when Revision > 0 ->
    {pointer_taken_back, StreamId, Revision, node()};
announcement(_StreamId, _NothingPersisted) ->
    none.

%% To how many nodes the message is on its way.
send(Process, Nodes, Message) ->
    Sent = [
        erlang:send({Process, Node}, {'$gen_cast', Message}, [nosuspend, noconnect])
     || Node <- lists:delete(node(), Nodes)
    ],
    length([ok || ok <- Sent]).
