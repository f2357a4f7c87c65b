%% The plugin on a node: its configuration, what is durable, what is left on disk, what it counts.
%%
%% The one helper that knows modules of the plugin. What an operator can see is asked where an operator sees it.
-module(stream_s3_ct_tier).

-export([node/3]).
-export([node_status/1, stream_status/2, stream_id/2, range/2, counter/2, counter/3, set_policy/4]).
-export([flush/3, wait_persisted/3, wait_trimmed/2, tier/3]).
-export([segments/2, floor/2, fragments/3]).
-export([members/2, wait_members/3, leader/2, wait_member/2]).

-import(stream_s3_ct_node, [rpc/4]).
-import(stream_s3_ct_wait, [until/2, until/3]).

-define(PLUGIN, "rabbitmq_stream_s3").
-define(WAIT_MS, 60_000).

%% Name and options of a node with the plugin, for stream_s3_ct_node. Settings are of the plugin.
-spec node(string(), stream_s3_ct_s3:t(), [{string(), iodata()}]) ->
    {string(), stream_s3_ct_node:options()}.
node(Name, S3, Settings) ->
    Quick = [{"persist_interval_ms", "100"} | Settings],
    {Name, #{conf => stream_s3_ct_s3:conf(S3, Quick), plugins => [?PLUGIN]}}.

%% What the status command prints of the node.
-spec node_status(stream_s3_ct_node:t()) -> #{atom() => term()}.
node_status(Node) ->
    rpc(Node, rabbitmq_stream_s3_status, node_status, []).

%% What it prints of a stream.
-spec stream_status(stream_s3_ct_node:t(), binary()) -> {ok, #{atom() => term()}} | {error, term()}.
stream_status(Node, Stream) ->
    rpc(Node, rabbitmq_stream_s3_status, stream_status, [~"/", Stream]).

%% The plugin's name of a stream: its folder on disk, and its part of each key.
-spec stream_id(stream_s3_ct_node:t(), binary()) -> binary().
stream_id(Node, Stream) ->
    iolist_to_binary(maps:get(name, queue_state(Node, Stream))).

%% What the readers of this node count on in S3, or none while that is not known.
-spec range(stream_s3_ct_node:t(), binary()) ->
    {First :: osiris:offset(), Next :: osiris:offset()} | none.
range(Node, Stream) ->
    case rpc(Node, rabbitmq_stream_s3_manifest_cache, range, [stream_id(Node, Stream)]) of
        {ok, #{first_offset := First, next_offset := Next}} -> {First, Next};
        _ -> none
    end.

%% A metric of the node, added up over its labels.
-spec counter(stream_s3_ct_node:t(), binary()) -> number().
counter(Node, Name) ->
    Full = <<?PLUGIN, "_", Name/binary>>,
    stream_s3_ct_page:sum(page_with(Node, Full), Full).

%% The sample of a metric that has these labels, as they are written.
-spec counter(stream_s3_ct_node:t(), binary(), binary()) -> number().
counter(Node, Name, Labels) ->
    Full = <<?PLUGIN, "_", Name/binary>>,
    {Labels, Value} = lists:keyfind(
        Labels, 1, stream_s3_ct_page:values(page_with(Node, Full), Full)
    ),
    Value.

page_with(Node, Full) ->
    until("the plugin's metrics", fun() ->
        Page = stream_s3_ct_page:fetch(Node),
        is_list(Page) andalso stream_s3_ct_page:values(Page, Full) =/= [] andalso Page
    end).

%% A policy of a stream's own, named as the stream.
-spec set_policy(stream_s3_ct_node:t(), binary(), binary(), term()) ->
    ok | {error_string, string()}.
set_policy(Node, Stream, Key, Value) ->
    Definition = iolist_to_binary(json:encode(#{Key => Value})),
    Pattern = <<"^", Stream/binary, "$">>,
    rpc(
        Node, rabbit_policy, parse_set, [~"/", Stream, Pattern, Definition, ~"0", ~"streams", ~"ct"]
    ).

%% Makes everything below an offset durable in S3, without waiting for size or age of a fragment.
-spec flush(stream_s3_ct_node:t(), binary(), osiris:offset()) -> ok.
flush(Node, Stream, Next) ->
    Flushed = fun() ->
        case stream_status(Node, Stream) of
            {ok, #{persisted_next_offset := Persisted}} when Persisted >= Next ->
                ok;
            {ok, _} ->
                _ = rpc(Node, rabbitmq_stream_s3_status, cut, [~"/", Stream]),
                false;
            {error, _NoWriterYet} ->
                false
        end
    end,
    until(
        lists:flatten(io_lib:format("~ts is durable up to ~b", [Stream, Next])), Flushed, ?WAIT_MS
    ).

%% Waits until the readers of this node count on S3 for everything below an offset.
-spec wait_persisted(stream_s3_ct_node:t(), binary(), osiris:offset()) -> ok.
wait_persisted(Node, Stream, Next) ->
    Known = fun() ->
        case range(Node, Stream) of
            {_, Persisted} when Persisted >= Next -> ok;
            _ -> false
        end
    end,
    until(
        lists:flatten(io_lib:format("~ts is known to be durable up to ~b", [Stream, Next])),
        Known,
        ?WAIT_MS
    ).

%% Waits until local segments have gone and answers where the local log begins by then.
-spec wait_trimmed(stream_s3_ct_node:t(), binary()) -> osiris:offset().
wait_trimmed(Node, Stream) ->
    Trimmed = fun() ->
        case segments(Node, Stream) of
            [Floor | Others] when Floor > 0, length(Others) =< 1 -> Floor;
            _ -> false
        end
    end,
    until("local segments are trimmed", Trimmed, ?WAIT_MS).

%% Both: history is in S3 and nowhere else. Answers where the local log begins.
-spec tier(stream_s3_ct_node:t(), binary(), osiris:offset()) -> osiris:offset().
tier(Node, Stream, Next) ->
    ok = flush(Node, Stream, Next),
    ok = wait_persisted(Node, Stream, Next),
    wait_trimmed(Node, Stream).

%% First offsets of the local segments of a stream, in order.
-spec segments(stream_s3_ct_node:t(), binary()) -> [osiris:offset()].
segments(#{data_dir := Dir}, Stream) ->
    Pattern = filename:join([Dir, "stream", "__" ++ binary_to_list(Stream) ++ "_*", "*.segment"]),
    lists:sort(
        [list_to_integer(filename:basename(File, ".segment")) || File <- filelib:wildcard(Pattern)]
    ).

-spec floor(stream_s3_ct_node:t(), binary()) -> osiris:offset().
floor(Node, Stream) ->
    hd(segments(Node, Stream)).

%% First offsets of the fragments in S3, in order. Of a stream that was deleted: by its id.
-spec fragments(stream_s3_ct_s3:t(), stream_s3_ct_node:t(), binary()) -> [osiris:offset()].
fragments(S3, Node, Stream) ->
    Keys = stream_s3_ct_s3:keys(S3, [<<"/", (stream_id(Node, Stream))/binary, "/">>, ~".fragment"]),
    lists:sort([binary_to_integer(hd(binary:split(filename:basename(Key), ~"."))) || Key <- Keys]).

%% The nodes on which a member runs, as the coordinator has it.
-spec members(stream_s3_ct_node:t(), binary()) -> #{node() => writer | replica}.
members(Node, Stream) ->
    Name = maps:get(name, queue_state(Node, Stream)),
    {ok, Members} = rpc(Node, rabbit_stream_coordinator, members, [Name]),
    #{Member => Role || Member := {Pid, Role} <- Members, is_pid(Pid)}.

%% Waits until the stream has members on exactly these nodes.
-spec wait_members(stream_s3_ct_node:t(), binary(), [node()]) -> ok.
wait_members(Node, Stream, Expected) ->
    What = lists:flatten(io_lib:format("~ts has members on ~p", [Stream, Expected])),
    until(
        What,
        fun() ->
            lists:sort(maps:keys(members(Node, Stream))) =:= lists:sort(Expected) andalso ok
        end,
        90_000
    ).

%% Which of the nodes has the writer.
-spec leader([stream_s3_ct_node:t()], binary()) -> stream_s3_ct_node:t().
leader([Any | _] = Nodes, Stream) ->
    until("a leader", fun() ->
        case [Member || Member := writer <- members(Any, Stream)] of
            [Writer] -> hd([Node || #{node := Name} = Node <- Nodes, Name =:= Writer]);
            [] -> false
        end
    end).

%% Waits until clients of the node can use the stream, after a restart. The process of the member is asked
%% for first: stock crashes a connection whose client asks for the statistics of one that has just ended.
-spec wait_member(stream_s3_ct_node:t(), binary()) -> ok.
wait_member(Node, Stream) ->
    until("the member of this node runs", fun() ->
        case rpc(Node, rabbit_stream_manager, lookup_local_member, [~"/", Stream]) of
            {ok, Pid} -> rpc(Node, erlang, is_process_alive, [Pid]) andalso ok;
            {error, _} -> false
        end
    end),
    stream_s3_ct_client:with_client(Node, fun(Client) ->
        until("the stream is available", fun() ->
            stream_s3_ct_client:is_available(Client, Stream) andalso ok
        end)
    end).

queue_state(Node, Stream) ->
    {ok, Queue} = rpc(Node, rabbit_amqqueue, lookup, [Stream, ~"/"]),
    rpc(Node, amqqueue, get_type_state, [Queue]).
