-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3DisablePreviewCommand').
-moduledoc """
`rabbitmq-streams stream_s3_disable_preview`: which streams lose how much of their history to the
consumers of this node if the plugin is disabled. `rabbitmq-plugins disable` itself has no place
where a plugin could say it.

See StreamS3StatusCommand for how the tool finds commands of plugins.
""".

-behaviour('Elixir.RabbitMQ.CLI.CommandBehaviour').

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
    <<"Shows what consumers of this node would not see if tiered storage was disabled">>.

-spec help_section() -> {plugin, atom()}.
help_section() ->
    {plugin, stream_s3}.

-spec usage() -> binary().
usage() ->
    <<"stream_s3_disable_preview">>.

-spec usage_additional() -> [].
usage_additional() ->
    [].

-spec usage_doc_guides() -> [binary()].
usage_doc_guides() ->
    [].

-spec validate([binary()], map()) -> ok | {validation_failure, atom()}.
validate([], _Options) -> ok;
validate(_, _Options) -> {validation_failure, too_many_args}.

-spec merge_defaults([binary()], map()) -> {[binary()], map()}.
merge_defaults(Args, Options) ->
    {Args, Options}.

-spec banner([binary()], map()) -> binary().
banner([], #{node := Node}) ->
    <<"What is only in S3 of streams on node ", (atom_to_binary(Node))/binary, " ...">>.

-spec run([binary()], map()) -> {ok, [map()]} | {error, term()}.
run([], #{node := Node, timeout := Timeout}) ->
    case rabbit_misc:rpc_call(Node, rabbitmq_stream_s3_status, hidden, [], Timeout) of
        {ok, Hidden} -> {ok, Hidden};
        {badrpc, _} = Error -> {error, Error}
    end.

-spec output(term(), map()) -> term().
output({ok, Hidden}, #{formatter := <<"json">>}) ->
    {ok, #{<<"streams">> => [maps:map(fun json/2, H) || H <- Hidden]}};
output({ok, []}, _Options) ->
    {ok, <<"Nothing: every stream is whole in the local log of this node">>};
output({ok, Hidden}, _Options) ->
    Rows = [[<<"  ">>, Text] || #{text := Text} <- Hidden],
    {ok, iolist_to_binary(lists:join($\n, [heading(length(Hidden)) | Rows]))};
output({error, _} = Error, _Options) ->
    Error.

heading(Streams) ->
    io_lib:format(
        "While disabled, consumers of ~b streams do not see (and find again when it is enabled):",
        [Streams]
    ).

json(_, unknown) -> null;
json(_, Value) -> Value.
