-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3ListCommand').
-moduledoc """
`rabbitmq-streams stream_s3_list`: all streams of the cluster, from any node, with a verdict in the first
line.

Owns what the operator types and reads. See StreamS3StatusCommand for how the tool finds commands.
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

-ignore_xref([{'Elixir.RabbitMQ.CLI.DefaultOutput', output, 1}]).

-spec scopes() -> [atom()].
scopes() ->
    [streams].

-spec switches() -> [{atom(), atom()}].
switches() ->
    [{problems, boolean}].

-spec aliases() -> [].
aliases() ->
    [].

-spec description() -> binary().
description() ->
    <<"Lists all streams of the cluster with how much of each is durable in S3">>.

-spec help_section() -> {plugin, atom()}.
help_section() ->
    {plugin, stream_s3}.

-spec usage() -> binary().
usage() ->
    <<"stream_s3_list [--vhost <vhost>] [--problems]">>.

-spec usage_additional() -> [[binary()]].
usage_additional() ->
    [
        [<<"--vhost <vhost>">>, <<"only streams of this virtual host; without it, of all">>],
        [<<"--problems">>, <<"only streams that have a problem or are not uploaded">>]
    ].

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
    <<"Tiered storage of all streams, asked of node ", (atom_to_binary(Node))/binary, " ...">>.

-spec run([binary()], map()) -> {ok, [map()]} | {badrpc, term()}.
run([], #{node := Node, timeout := Timeout} = Options) ->
    case rabbit_misc:rpc_call(Node, rabbitmq_stream_s3_status_list, streams, [], Timeout) of
        {ok, Rows} -> {ok, [Row || Row <- Rows, is_wanted(Row, Options)]};
        {badrpc, _} = Error -> Error
    end.

is_wanted(#{vhost := VHost}, #{vhost := Wanted}) when VHost =/= Wanted -> false;
is_wanted(#{verdict := ok}, #{problems := true}) -> false;
is_wanted(_Row, _Options) -> true.

-spec output(term(), map()) -> term().
output({ok, Rows}, #{formatter := <<"json">>}) ->
    {ok, #{<<"streams">> => Rows}};
output({ok, Rows}, _Options) ->
    {ok, iolist_to_binary(lists:join($\n, [summary(Rows) | [line(Row) || Row <- Rows]]))};
output(Result, _Options) ->
    %% The tool's own module: on the tool's code path, not on the broker's.
    (default_output()):output(Result).

-spec default_output() -> module().
default_output() ->
    'Elixir.RabbitMQ.CLI.DefaultOutput'.

summary(Rows) ->
    Count = fun(Verdict) -> length([Row || #{verdict := V} = Row <- Rows, V =:= Verdict]) end,
    text("~b streams: ~b ok, ~b with a problem, ~b not uploaded", [
        length(Rows), Count(ok), Count(problem), Count(not_uploaded)
    ]).

line(#{stream := Stream, vhost := VHost, verdict := Verdict, text := Text} = Row) ->
    [
        text("~ts in ~ts: ~ts", [Stream, VHost, words(Verdict)]),
        durable(Row),
        [[", ", Text] || Text =/= <<>>]
    ].

words(not_uploaded) -> "not uploaded";
words(Verdict) -> atom_to_list(Verdict).

durable(#{
    node := Node,
    manifest_first_offset := First,
    persisted_next_offset := Next,
    log_next_offset := LogNext,
    durability_lag_ms := LagMs
}) ->
    text(", durable [~b, ~b), ~b records behind, ~b s, node ~ts", [
        First, Next, max(0, LogNext - Next), LagMs div 1000, Node
    ]);
durable(_NotUploaded) ->
    [].

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
