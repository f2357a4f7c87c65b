-module(rabbitmq_stream_s3_membership).
-moduledoc """
Which member a stream should get or lose next, as quorum queues decide it for theirs. Pure: what is
known of cluster and stream comes in, one step at most comes out, and not knowing is an answer.

Does not own: how it is found out and done (rabbitmq_stream_s3_membership_reconciliation).
""".

-export([worth_asking/2, decide/2]).

-export_type([cluster/0, stream/0, decision/0, why/0]).

-type cluster() :: #{
    self := node(),
    %% On the word of a majority of the metadata store; `unknown` without one.
    members := [node()] | unknown,
    %% Where RabbitMQ runs, of the members.
    running := [node()],
    %% That there is a connection to, members or not.
    connected := [node()],
    %% In maintenance: they shall not get anything.
    drained := [node()],
    %% How many members of streams each node has.
    load := #{node() => non_neg_integer()},
    auto_remove := boolean()
}.

-type stream() :: #{
    %% Of the queue's record.
    recorded := [node()],
    %% Of the coordinator: what it has started, or is starting (`undefined`).
    coordinated := #{node() => {pid() | undefined, writer | replica}} | unknown,
    target := non_neg_integer()
}.

-type why() ::
    no_majority
    | coordinator_unknown
    | change_under_way
    | member_down
    | node_down
    | still_connected.

-type decision() :: none | {wait, why()} | {add, node()} | {remove, node()}.

-doc """
Whether anything could be to do for a stream with these members. Cheaper than asking the coordinator
about it, and in the steady state of every stream the end of the matter.
""".
-spec worth_asking(cluster(), stream()) -> boolean().
worth_asking(#{members := unknown}, _Stream) ->
    true;
worth_asking(Cluster, #{recorded := Recorded, target := Target}) ->
    #{members := Members, running := Running, auto_remove := AutoRemove} = Cluster,
    %% A node that is down may leave the cluster next, and no event tells of that.
    (AutoRemove andalso Recorded -- Running =/= []) orelse
        (length(Recorded) < Target andalso Members -- Recorded =/= []).

-doc """
The next step. `wait`: something is to be done, or may be, and it is not known that it may be done
now. Every step restarts the stream, so there is one at a time, and none that leaves it with fewer
copies than it knows to be alive.
""".
-spec decide(cluster(), stream()) -> decision().
decide(#{members := unknown}, _Stream) ->
    {wait, no_majority};
decide(_Cluster, #{coordinated := unknown}) ->
    {wait, coordinator_unknown};
decide(#{self := Self} = Cluster, #{coordinated := Coordinated} = Stream) ->
    case is_majority(Cluster) of
        false ->
            {wait, no_majority};
        true ->
            case {Coordinated, settled(Cluster, Stream)} of
                %% The node of the writer decides, and nobody else.
                {#{Self := {Pid, writer}}, ok} when is_pid(Pid) ->
                    decide_settled(Cluster, Stream);
                {#{Self := {Pid, writer}}, Why} when is_pid(Pid) ->
                    {wait, Why};
                _Another ->
                    none
            end
    end.

decide_settled(#{self := Self, drained := Drained} = Cluster, Stream) ->
    case {lists:member(Self, Drained), dangling(Cluster, Stream), Cluster} of
        %% Its streams are about to be another node's.
        {true, _, _} -> none;
        {false, [], _} -> maybe_add(Cluster, Stream);
        {false, Dangling, #{auto_remove := true}} -> maybe_remove(Dangling, Cluster);
        %% Who is gone counts when the stream starts again: another member could be one too many.
        {false, _Stays, #{auto_remove := false}} -> none
    end.

%% A node that is connected and no member may be joining right now.
maybe_remove(Dangling, #{connected := Connected}) ->
    case Dangling -- Connected of
        [] -> {wait, still_connected};
        Gone -> {remove, lists:min(Gone)}
    end.

maybe_add(Cluster, #{recorded := Recorded, target := Target}) ->
    #{members := Members, running := Running, drained := Drained, load := Load} = Cluster,
    Others = Members -- Recorded,
    Candidates = [Node || Node <- Others, lists:member(Node, Running)] -- Drained,
    Size = length(Recorded),
    %% An even number of members survives no more failures than one less: from an odd number the
    %% step is taken only if the next can follow.
    Pays = Size rem 2 =:= 0 orelse length(Candidates) > 1,
    if
        Size >= Target ->
            none;
        Candidates =/= [], Pays ->
            {_, Node} = lists:min([{maps:get(N, Load, 0), N} || N <- Candidates]),
            {add, Node};
        true ->
            case Others -- Running of
                [] -> none;
                _MayComeBack -> {wait, node_down}
            end
    end.

%% Members on nodes that are no longer in the cluster.
dangling(#{members := Members}, #{recorded := Recorded}) ->
    Recorded -- Members.

is_majority(#{self := Self, members := Members, running := Running}) ->
    Up = [Node || Node <- Members, lists:member(Node, Running)],
    lists:member(Self, Up) andalso 2 * length(Up) > length(Members).

%% Record and coordinator say the same, and every member that the cluster has is alive. Who is being
%% added, deleted or elected is found by this. What the coordinator has on nodes that are gone does
%% not count: it cannot delete it there.
settled(#{members := Members, running := Running}, Stream) ->
    #{recorded := Recorded, coordinated := Coordinated} = Stream,
    Here = lists:sort([Node || Node <- Recorded, lists:member(Node, Members)]),
    There = lists:sort([Node || Node <- maps:keys(Coordinated), lists:member(Node, Members)]),
    Alive = [Node || Node := {Pid, _Role} <- Coordinated, is_pid(Pid)],
    case {Here =:= There, Here -- Running, Here -- Alive} of
        {false, _, _} -> change_under_way;
        {true, [_ | _], _} -> member_down;
        {true, [], [_ | _]} -> change_under_way;
        {true, [], []} -> ok
    end.
