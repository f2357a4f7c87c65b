-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3RecoverCommand').
-moduledoc """
`rabbitmq-streams stream_s3_recover list|plan|run|status`: brings streams back from the bucket.

Owns what the operator types and reads. The work is a job on the node (rabbitmq_stream_s3_recovery): it goes
on if this command is ended, and `status` follows it again. Exit status 0: all is as asked; 69: the job
failed, or a stream could not be recovered. See StreamS3StatusCommand for how the tool finds commands.
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

%% EX_UNAVAILABLE of sysexits.h, which the tool uses.
-define(UNAVAILABLE, 69).
-define(CALL_MS, 60_000).
-define(LOOK_AGAIN_MS, 500).

-spec scopes() -> [atom()].
scopes() ->
    [streams].

-spec switches() -> [{atom(), atom()}].
switches() ->
    [{queue, string}, {stream_id, string}, {as, string}].

-spec aliases() -> [].
aliases() ->
    [].

-spec description() -> binary().
description() ->
    <<"Brings streams back that the bucket has and this cluster has not">>.

-spec help_section() -> {plugin, atom()}.
help_section() ->
    {plugin, stream_s3}.

-spec usage() -> binary().
usage() ->
    <<"stream_s3_recover list|plan|run|status [--vhost <vhost>] [--queue <name>] [--stream-id <id>] "
        "[--as <name>]">>.

-spec usage_additional() -> [[binary()]].
usage_additional() ->
    [
        [<<"list">>, <<"shows which streams the bucket has. Reads only">>],
        [<<"plan">>, <<"also checks that every object is there, and says what run would do. Reads only">>],
        [<<"run">>, <<"declares the streams that are not here, with their history. Deletes nothing">>],
        [<<"status">>, <<"follows the job that is running on the node, or shows the last one">>],
        [<<"--vhost <vhost>">>, <<"only of this virtual host; with --stream-id: where it comes back">>],
        [<<"--queue <name>">>, <<"only the stream of this name">>],
        [<<"--stream-id <id>">>, <<"only this stream, also if the bucket has a newer one of its name">>],
        [<<"--as <name>">>, <<"the name that it gets; needs --queue or --stream-id">>]
    ].

-spec usage_doc_guides() -> [binary()].
usage_doc_guides() ->
    [].

-spec validate([binary()], map()) -> ok | {validation_failure, term()}.
validate([], _Options) ->
    {validation_failure, not_enough_args};
validate([_, _ | _], _Options) ->
    {validation_failure, too_many_args};
validate([_Kind], #{as := _} = Options) when
    not is_map_key(queue, Options), not is_map_key(stream_id, Options)
->
    {validation_failure, {bad_argument, <<"--as needs --queue or --stream-id">>}};
validate([Kind], _Options) ->
    case lists:member(Kind, [<<"list">>, <<"plan">>, <<"run">>, <<"status">>]) of
        true -> ok;
        false -> {validation_failure, {bad_argument, <<"one of list, plan, run, status">>}}
    end.

-spec merge_defaults([binary()], map()) -> {[binary()], map()}.
merge_defaults(Args, Options) ->
    {Args, Options}.

-spec banner([binary()], map()) -> binary().
banner([Kind], #{node := Node}) ->
    <<"Recovery from the bucket, ", Kind/binary, ", on node ", (atom_to_binary(Node))/binary, " ...">>.

-spec run([binary()], map()) ->
    {ok, [map()]} | {error, 69, binary()} | {failed, [map()]} | {badrpc, term()}.
run([<<"status">>], #{node := Node} = Options) ->
    follow(Node, undefined, Options);
run([Kind], #{node := Node} = Options) ->
    Selection = maps:with([vhost, queue, stream_id, as], Options),
    case call(Node, start, [kind(Kind), Selection]) of
        ok -> follow(Node, undefined, Options);
        Error -> failure(Error)
    end.

kind(<<"list">>) -> list;
kind(<<"plan">>) -> plan;
kind(<<"run">>) -> run.

follow(Node, Before, Options) ->
    case call(Node, status, []) of
        #{state := running} = Status ->
            Line = progress(Status),
            Line =/= Before andalso tell(Line, Options),
            timer:sleep(?LOOK_AGAIN_MS),
            follow(Node, Line, Options);
        #{state := done, results := Results} ->
            case [R || #{verdict := V} = R <- Results, V =:= failed orelse V =:= unknown] of
                [] -> {ok, Results};
                _ -> {failed, Results}
            end;
        #{state := failed, text := Text} ->
            {error, ?UNAVAILABLE, Text};
        #{state := none} ->
            {ok, []};
        Error ->
            failure(Error)
    end.

call(Node, Function, Args) ->
    rabbit_misc:rpc_call(Node, rabbitmq_stream_s3_recovery, Function, Args, ?CALL_MS).

progress(#{step := Step, done := Done, total := Total}) ->
    io_lib:format("~ts: ~b of ~b~n", [Step, Done, Total]).

%% Not where the answer is read; a script follows the job with `status`.
tell(_Line, #{quiet := true}) -> ok;
tell(_Line, #{formatter := <<"json">>}) -> ok;
tell(Line, _Options) -> io:put_chars(standard_error, Line).

failure({error, busy}) ->
    {error, ?UNAVAILABLE,
        <<"A recovery is running on this node: stream_s3_recover status follows it">>};
failure({error, inactive}) ->
    {error, ?UNAVAILABLE, <<"The plugin is not active on this node: see stream_s3_status">>};
failure({badrpc, _} = Error) ->
    Error;
failure(Other) ->
    {error, ?UNAVAILABLE, text("~0tp", [Other])}.

-spec output(term(), map()) -> term().
output({ok, Results}, Options) ->
    {ok, shown(Results, Options)};
output({failed, Results}, Options) ->
    {error, ?UNAVAILABLE, shown(Results, Options)};
output(Result, _Options) ->
    %% The tool's own module: on the tool's code path, not on the broker's.
    (default_output()):output(Result).

-spec default_output() -> module().
default_output() ->
    'Elixir.RabbitMQ.CLI.DefaultOutput'.

shown(Results, #{formatter := <<"json">>}) ->
    [json(Result) || Result <- Results];
shown(Results, _Options) ->
    iolist_to_binary([summary(Results) | [line(R) || R <- lists:sort(fun by_name/2, Results)]]).

summary(Results) ->
    Counts = maps:groups_from_list(fun(#{verdict := Verdict}) -> Verdict end, Results),
    Parts = [text("~b ~ts", [length(Of), words(V)]) || V := Of <- maps:iterator(Counts, ordered)],
    text("~b streams: ~ts~n", [length(Results), lists:join(", ", Parts)]).

words(in_use) -> "in use";
words(name_taken) -> "name taken";
words(older_history) -> "older history";
words(Verdict) -> atom_to_list(Verdict).

by_name(A, B) -> name(A) =< name(B).

name(#{vhost := VHost, queue := Queue}) when is_binary(VHost), is_binary(Queue) ->
    <<Queue/binary, " in ", VHost/binary>>;
name(#{stream_id := Id}) ->
    Id.

line(#{verdict := Verdict, stream_id := Id, text := Text} = Result) ->
    [
        text("~ts: ~ts", [name(Result), words(Verdict)]),
        case Result of
            #{first_offset := First, next_offset := Next, total_size := Bytes} ->
                text(", offsets [~b, ~b), ~b bytes", [First, Next, Bytes]);
            _ ->
                []
        end,
        [[", ", Text] || Text =/= <<>>],
        text(" (~ts)~n", [Id])
    ].

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).

json(undefined) -> null;
json({Epoch, Uid}) ->
    #{epoch => Epoch, uid => Uid};
json({Key, First, Next, Reason}) ->
    #{key => Key, first_offset => First, next_offset => Next, reason => Reason};
json(Map) when is_map(Map) -> #{Key => json(key(Key, Value)) || Key := Value <- Map};
json(List) when is_list(List) -> [json(Item) || Item <- List];
json(Other) -> Other.

%% The pairs of passed_over are no roots.
key(passed_over, Pairs) -> [#{key => Key, reason => Reason} || {Key, Reason} <- Pairs];
key(_Key, Value) -> Value.
