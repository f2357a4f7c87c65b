-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3CheckHostCommand').
-moduledoc """
`rabbitmq-streams stream_s3_check_host <path>`: before an upgrade of RabbitMQ, whether the plugin can be
added to the osiris that comes with it. Needs no node. Exit status 0: it can; 69: it cannot, and why.

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
    distribution/1,
    run/2,
    output/2,
    description/0,
    help_section/0
]).

%% EX_UNAVAILABLE of sysexits.h, which the tool uses.
-define(UNAVAILABLE, 69).

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
    <<"Says whether tiered storage of streams works with another RabbitMQ, before an upgrade to it">>.

-spec help_section() -> {plugin, atom()}.
help_section() ->
    {plugin, stream_s3}.

-spec usage() -> binary().
usage() ->
    <<"stream_s3_check_host <path>">>.

-spec usage_additional() -> [[binary()]].
usage_additional() ->
    [
        [
            <<"<path>">>,
            <<"an osiris_log.beam, an osiris-*.ez, or a folder: of osiris, of RabbitMQ's plugins, of an "
                "installation, or of an unpacked package">>
        ]
    ].

-spec usage_doc_guides() -> [binary()].
usage_doc_guides() ->
    [].

-spec validate([binary()], map()) -> ok | {validation_failure, atom()}.
validate([_Path], _Options) -> ok;
validate([], _Options) -> {validation_failure, not_enough_args};
validate(_, _Options) -> {validation_failure, too_many_args}.

-spec merge_defaults([binary()], map()) -> {[binary()], map()}.
merge_defaults(Args, Options) ->
    {Args, Options}.

-spec distribution(map()) -> none.
distribution(_Options) ->
    none.

-spec banner([binary()], map()) -> binary().
banner([Path], _Options) ->
    <<"Checking the osiris in ", Path/binary, " ...">>.

-spec run([binary()], map()) -> {ok, binary()} | {error, 69, binary()}.
run([Path], _Options) ->
    case rabbitmq_stream_s3_host_check:check(Path) of
        {ok, #{path := Found, version := Version, how := How}} ->
            {ok, <<"osiris ", Version/binary, " in ", Found/binary, ": ", (how(How))/binary>>};
        {error, Kind, Text} ->
            {error, ?UNAVAILABLE,
                <<"Tiered storage would be inert with it (", (atom_to_binary(Kind))/binary, "): ",
                    Text/binary>>}
    end.

how(native) -> <<"has the hooks itself, tiered storage works with it">>;
how(instrumented) -> <<"can be hooked, tiered storage works with it">>.

-spec output(term(), map()) -> term().
output({ok, Text}, #{formatter := <<"json">>}) ->
    {ok, #{<<"result">> => <<"ok">>, <<"text">> => Text}};
output(Result, _Options) ->
    Result.
