-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3StatusCommand').
-moduledoc """
`rabbitmq-streams stream_s3_status [<stream>]`: the node, or one stream.

Found by its name and its behaviour in the modules of enabled plugins, and loaded into the command
line tool, where only the libraries of RabbitMQ are: it calls the node and formats the answer.
""".

-behaviour('Elixir.RabbitMQ.CLI.CommandBehaviour').

%% The behaviour's module comes with the tool and not with the broker: compiler and dialyzer do not
%% find it.
-compile(nowarn_behaviours).
-dialyzer(no_undefined_callbacks).

-export([
    scopes/0,
    switches/0,
    aliases/0,
    usage/0,
    usage_additional/0,
    usage_doc_guides/0,
    banner/2,
    validate/2,
    merge_defaults/2,
    run/2,
    output/2,
    description/0,
    help_section/0
]).

-ignore_xref([{'Elixir.RabbitMQ.CLI.DefaultOutput', output, 1}]).

-spec scopes() -> [atom()].
scopes() ->
    [streams].

-spec switches() -> [{atom(), atom()}].
switches() ->
    [].

-spec aliases() -> [].
aliases() ->
    [].

-spec description() -> binary().
description() ->
    <<"Shows the state of tiered storage of this node or of one stream">>.

-spec help_section() -> {plugin, atom()}.
help_section() ->
    {plugin, stream_s3}.

-spec usage() -> binary().
usage() ->
    <<"stream_s3_status [<stream>] [--vhost <vhost>]">>.

-spec usage_additional() -> [[binary()]].
usage_additional() ->
    [
        [<<"<stream>">>, <<"name of a stream; without it, the node is shown">>],
        [<<"--vhost <vhost>">>, <<"virtual host of the stream">>]
    ].

-spec usage_doc_guides() -> [binary()].
usage_doc_guides() ->
    [].

-spec validate([binary()], map()) -> ok | {validation_failure, atom()}.
validate([], _Options) -> ok;
validate([_Stream], _Options) -> ok;
validate(_, _Options) -> {validation_failure, too_many_args}.

-spec merge_defaults([binary()], map()) -> {[binary()], map()}.
merge_defaults(Args, Options) ->
    {Args, maps:merge(#{vhost => <<"/">>}, Options)}.

-spec banner([binary()], map()) -> binary().
banner([], #{node := Node}) ->
    <<"Tiered storage on node ", (atom_to_binary(Node))/binary, " ...">>;
banner([Stream], #{vhost := VHost}) ->
    <<"Tiered storage of stream ", Stream/binary, " in vhost ", VHost/binary, " ...">>.

-spec run([binary()], map()) -> {ok, map()} | {error, term()} | {badrpc, term()}.
run([], #{node := Node, timeout := Timeout}) ->
    case rabbit_misc:rpc_call(Node, rabbitmq_stream_s3_status, node_status, [], Timeout) of
        #{} = Status -> {ok, Status};
        Error -> failure(Error)
    end;
run([Stream], #{node := Node, vhost := VHost, timeout := Timeout}) ->
    Args = [VHost, Stream],
    case rabbit_misc:rpc_call(Node, rabbitmq_stream_s3_status, stream_status, Args, Timeout) of
        {ok, Status} -> {ok, Status};
        Error -> failure(Error)
    end.

failure({error, not_found}) -> {error, <<"The stream does not exist">>};
failure({error, not_a_stream}) -> {error, <<"The queue is not a stream">>};
failure({error, no_reader}) -> {error, <<"No node has a replica reader for the stream now">>};
failure({error, unavailable}) -> {error, <<"The replica reader does not answer now; try again">>};
failure({error, {inert, Text}}) -> {error, <<"The plugin is inert: ", Text/binary>>};
failure({badrpc, _} = Error) -> Error;
failure(Other) -> {error, iolist_to_binary(io_lib:format("~0tp", [Other]))}.

-spec output(term(), map()) -> term().
output({ok, Status}, #{formatter := <<"json">>}) ->
    {ok, json(Status)};
output({ok, #{stream := _} = Status}, _Options) ->
    {ok, sections(stream_sections(), Status)};
output({ok, Status}, _Options) ->
    {ok, sections(node_sections(), Status)};
output(Result, _Options) ->
    %% The tool's own module: on the tool's code path, not on the broker's.
    (default_output()):output(Result).

-spec default_output() -> module().
default_output() ->
    'Elixir.RabbitMQ.CLI.DefaultOutput'.

node_sections() ->
    [
        {<<"Plugin">>, [
            {<<"Version">>, plugin_version},
            {<<"State">>, mode},
            {<<"Why">>, inert_text},
            {<<"What it means">>, inert_meaning},
            {<<"What to do">>, inert_advice},
            {<<"Protected streams">>, protected_streams},
            {<<"Hooks of osiris">>, osiris_hooks},
            {<<"Hooks in use">>, osiris_attached},
            {<<"osiris">>, osiris_version},
            {<<"Streams uploaded from this node">>, streams}
        ]},
        {<<"Remote tier bucket">>, [
            {<<"Bucket">>, bucket},
            {<<"Region">>, region},
            {<<"Endpoint">>, endpoint},
            {<<"Prefix">>, prefix},
            {<<"Accessible">>, bucket_accessible},
            {<<"Reason">>, bucket_reason},
            {<<"Text">>, bucket_text},
            {<<"Data lost, damaged or archived">>, read_alarm}
        ]},
        {<<"Local segments kept for replicas that lag">>, replica_lag},
        {<<"Native counters">>, native},
        {<<"Shell counters">>, shell}
    ].

stream_sections() ->
    [
        {<<"Remote tier bucket">>, [
            {<<"Accessible">>, bucket_accessible},
            {<<"Reason">>, bucket_reason},
            {<<"Text">>, bucket_text}
        ]},
        {<<"Stream">>, [
            {<<"Stream ID">>, stream_id},
            {<<"Node">>, node},
            {<<"Epoch">>, epoch},
            {<<"Phase">>, phase},
            {<<"Log next offset">>, log_next_offset},
            {<<"Local bytes kept for replicas that lag">>, replica_lag_bytes},
            {<<"The slowest of them">>, replica_lag_of},
            {<<"Problem">>, problem_kind},
            {<<"Text">>, problem_text}
        ]},
        {<<"Remote tier">>, [
            {<<"First offset">>, manifest_first_offset},
            {<<"Next offset">>, manifest_next_offset},
            {<<"Persisted next offset">>, persisted_next_offset},
            {<<"Total size">>, manifest_total_size},
            {<<"Fragments">>, manifest_fragments},
            {<<"Revision">>, revision},
            {<<"Objects that wait for their deletion">>, deletions_waiting},
            {<<"Root that names history which was given up">>, abandoned_root}
        ]},
        {<<"Upload pipeline">>, [
            {<<"Transfers in flight">>, transfers_in_flight},
            {<<"Transfers waiting">>, transfers_waiting},
            {<<"Edits since last persist">>, edits_since_persist},
            {<<"Persist in flight">>, persist_in_flight},
            {<<"Rebalance in flight">>, rebalance_in_flight},
            {<<"Metadata store tasks">>, metadata_store_tasks},
            {<<"Oldest record that is not durable (ms since 1970)">>, oldest_pending_timestamp},
            {<<"Its age in ms">>, durability_lag_ms},
            {<<"Bytes that are not durable">>, unpersisted_bytes},
            {<<"Stalled at offset">>, stalled_offset}
        ]},
        {<<"Current fragment">>, [
            {<<"First offset">>, assembly_first_offset},
            {<<"Next offset">>, assembly_next_offset},
            {<<"Payload size">>, assembly_payload_bytes},
            {<<"Chunks">>, assembly_chunks}
        ]},
        {<<"Counters">>, counters}
    ].

sections(Sections, Status) ->
    iolist_to_binary(lists:join($\n, [section(Section, Status) || Section <- Sections])).

section({Title, Rows}, Status) when is_list(Rows) ->
    [Title, $\n, [row(Label, maps:get(Key, Status, undefined)) || {Label, Key} <- Rows]];
section({Title, Key}, Status) ->
    Map = maps:get(Key, Status, #{}),
    [Title, $\n, [row(atom_to_binary(K), V) || {K, V} <- lists:sort(maps:to_list(Map))]].

row(_Label, <<>>) -> [];
row(Label, undefined) -> [<<"  ">>, Label, <<": (not set)\n">>];
row(Label, Value) -> [<<"  ">>, Label, <<": ">>, text(Value), $\n].

text(Value) when is_binary(Value) -> Value;
text(Value) -> io_lib:format("~0tp", [Value]).

%% Terms that JSON has no word for.
json(undefined) -> null;
json(Map) when is_map(Map) -> #{Key => json(Value) || Key := Value <- Map};
json(Pairs) when is_list(Pairs) -> [json(Pair) || Pair <- Pairs];
json({Key, Value}) -> #{iolist_to_binary(io_lib:format("~0tp", [Key])) => json(Value)};
json(Other) -> Other.
