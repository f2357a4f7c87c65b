%% A stream of a thousand records whose beginning is only in S3, on the node of its writer and on a replica's, and the
%% same records in a stream of a stock broker, in the same chunks.
-module(stream_s3_ct_places).

-include_lib("stdlib/include/assert.hrl").

-export([start/1, stop/1, both/1, twin/1, boundaries/2]).
-export([first_chunk/2, resolve_when_known/2, opened/2]).

-import(stream_s3_ct_client, [with_client/2, subscribe/4, unsubscribe/2, chunk/2, resolve/3]).
-import(stream_s3_ct_records, [fill/3]).
-import(stream_s3_ct_tier, [tier/3, floor/2]).
-import(stream_s3_ct_wait, [until/2]).

-type config() :: [{atom(), term()}].
%% A chunk without its bytes: Common Test prints what cases share, and what an assertion compares.
-type summary() :: #{
    id := osiris:offset(), next := osiris:offset(), timestamp := integer(), md5 := binary()
}.

-define(STREAM, ~"places").
-define(COUNT, 1_000).

%% Adds the nodes, the server and all chunks to what the cases of a suite share.
-spec start(config()) -> config().
start(Config) ->
    S3 = stream_s3_ct_s3:start("places"),
    %% Two chunks in a fragment, four of a kind in a group.
    Settings = [{"fragment_size", "200000"}, {"rebalance_threshold", "4"}],
    [One, Two, Twin] = stream_s3_ct_node:start_all(
        [stream_s3_ct_tier:node(Name, S3, Settings) || Name <- ["places1", "places2"]] ++ [
            {"places3", #{}}
        ]
    ),
    ok = stream_s3_ct_node:join(Two, One),
    Args = #{~"stream-max-segment-size-bytes" => ~"1000000"},
    [
        with_client(Node, fun(Client) ->
            ok = stream_s3_ct_client:create(
                Client, ?STREAM, Args#{~"initial-cluster-size" => Members}
            )
        end)
     || {Node, Members} <- [{One, ~"2"}, {Twin, ~"1"}]
    ],
    Writer = stream_s3_ct_tier:leader([One, Two], ?STREAM),
    [Replica] = [One, Two] -- [Writer],
    [
        with_client(Node, fun(Client) -> ok = fill(Client, ?STREAM, {0, ?COUNT}) end)
     || Node <- [Writer, Twin]
    ],
    _ = tier(Writer, ?STREAM, ?COUNT),
    _ = tier(Replica, ?STREAM, ?COUNT),
    Chunks = all_chunks(Writer),
    ?assertEqual([Id || #{id := Id} <- Chunks], [Id || #{id := Id} <- all_chunks(Twin)]),
    Times = [Time || #{timestamp := Time} <- Chunks],
    ?assertEqual(Times, lists:usort(Times)),
    [{s3, S3}, {nodes, [Writer, Replica]}, {twin, Twin}, {chunks, Chunks} | Config].

-spec stop(config()) -> ok.
stop(Config) ->
    [ok = stream_s3_ct_node:wipe(Node) || Node <- [twin(Config) | both(Config)]],
    stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% The node of the writer, and the replica's.
-spec both(config()) -> [stream_s3_ct_node:t()].
both(Config) ->
    proplists:get_value(nodes, Config).

%% The stock broker.
-spec twin(config()) -> stream_s3_ct_node:t().
twin(Config) ->
    proplists:get_value(twin, Config).

%% Where something begins or ends: fragments, groups of all heights, the local log.
-spec boundaries(config(), stream_s3_ct_node:t()) -> [osiris:offset()].
boundaries(Config, Node) ->
    Ends = [
        binary_to_integer(maps:get(End, Metadata))
     || #{~"metadata" := #{~"first-offset" := _} = Metadata} <-
            stream_s3_ct_s3:objects(proplists:get_value(s3, Config)),
        End <- [~"first-offset", ~"next-offset"]
    ],
    lists:usort([0, ?COUNT, floor(Node, ?STREAM) | Ends]).

%% The chunk that a subscription begins with.
-spec first_chunk(stream_s3_ct_client:client(), osiris:offset_spec()) -> summary().
first_chunk(Client, Spec) ->
    Id = subscribe(Client, ?STREAM, Spec, 1),
    Chunk = chunk(Client, Id),
    ok = unsubscribe(Client, Id),
    summary(Chunk).

%% The server may say that it does not know the place now.
-spec resolve_when_known(stream_s3_ct_client:client(), osiris:offset_spec()) ->
    {ok, term(), term()}.
resolve_when_known(Client, Spec) ->
    until("the place is known", fun() ->
        case resolve(Client, ?STREAM, Spec) of
            {ok, _, _} = Resolved -> Resolved;
            {error, _} -> false
        end
    end).

%% Where a reader at an absolute offset begins, which no client of the stream protocol can ask for.
-spec opened(stream_s3_ct_node:t(), osiris:offset()) -> {ok, osiris:offset()} | {error, term()}.
opened(Node, Offset) ->
    Text =
        "[Member] = [Pid ||"
        "  {Pid, _, _, _, {resource, _, queue, S}, _} <- ets:tab2list(osiris_reader_context_cache),"
        "  S =:= Stream],"
        "case osiris:init_reader(Member, {abs, Offset}, {{test, self()}, []}, #{}) of"
        "  {ok, Log} -> Next = osiris_log:next_offset(Log), ok = osiris_log:close(Log), {ok, Next};"
        "  Error -> Error "
        "end",
    stream_s3_ct_node:evaluate(Node, Text, #{'Stream' => ?STREAM, 'Offset' => Offset}).

all_chunks(Node) ->
    with_client(Node, fun(Client) ->
        Id = subscribe(Client, ?STREAM, first, 10),
        [summary(Chunk) || Chunk <- stream_s3_ct_client:chunks(Client, Id, ?COUNT)]
    end).

summary(#{data := Data} = Chunk) ->
    (maps:remove(data, Chunk))#{md5 => erlang:md5(Data)}.
