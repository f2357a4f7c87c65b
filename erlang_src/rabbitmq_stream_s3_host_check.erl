-module(rabbitmq_stream_s3_host_check).
-moduledoc """
Whether the plugin could be added to an osiris that does not run: before RabbitMQ is upgraded to it.
Reads its files and changes nothing. The same checks as `rabbitmq_stream_s3_host_osiris:attach/0`, of what
is in files and not of what is loaded. Needs no node: it runs in the command line tool, too.

Owns where an osiris may be found; the shape that it must have is rabbitmq_stream_s3_host_forms'.
""".

-export([check/1]).

-export_type([beams/0]).

-type beams() :: #{module() => binary()}.
-type found() :: #{path := binary(), version := binary(), how := native | instrumented}.

%% Below a folder: of osiris itself, of plugins, of a server, of an unpacked package.
-define(PLACES, [
    "osiris_log.beam",
    "ebin/osiris_log.beam",
    "osiris-*/ebin/osiris_log.beam",
    "osiris-*.ez",
    "plugins/osiris-*/ebin/osiris_log.beam",
    "plugins/osiris-*.ez",
    "*/plugins/osiris-*/ebin/osiris_log.beam",
    "*/plugins/osiris-*.ez",
    "usr/lib/rabbitmq/lib/*/plugins/osiris-*/ebin/osiris_log.beam",
    "usr/lib/rabbitmq/lib/*/plugins/osiris-*.ez"
]).

-doc """
Path is an `osiris_log.beam`, an `osiris-*.ez`, or a folder: of osiris, of RabbitMQ's plugins, of its
installation, of its unpacked package. The text of an error is a sentence for a person.
""".
-spec check(file:name_all()) -> {ok, found()} | {error, atom(), binary()}.
check(Path) ->
    maybe
        {ok, File} ?= find(unicode:characters_to_list(Path)),
        {ok, Beams, Version} ?= read(File),
        {ok, How} ?= examined(Beams),
        {ok, #{path => text("~ts", [File]), version => Version, how => How}}
    else
        {error, {Kind, Text}} -> {error, Kind, text("~ts", [Text])}
    end.

find(Path) ->
    case filelib:is_dir(Path) of
        true ->
            case lists:append([filelib:wildcard(filename:join(Path, P)) || P <- ?PLACES]) of
                [File] ->
                    {ok, File};
                [] ->
                    {error, {osiris_missing, ["no osiris below ", Path]}};
                Several ->
                    {error, {several, ["name one of ", lists:join(", ", Several)]}}
            end;
        false ->
            case filelib:is_regular(Path) of
                true -> {ok, Path};
                false -> {error, {osiris_missing, [Path, " does not exist"]}}
            end
    end.

read(File) ->
    case filename:extension(File) of
        ".ez" -> archive(File);
        ".beam" -> folder(filename:dirname(File), filename:basename(File));
        _ -> {error, {osiris_missing, [File, " is neither a beam file nor an .ez archive"]}}
    end.

archive(File) ->
    case zip:unzip(File, [memory]) of
        {ok, Entries} -> beams(File, [{filename:basename(Name), Bytes} || {Name, Bytes} <- Entries]);
        {error, Reason} -> {error, {osiris_missing, [File, io_lib:format(": ~0p", [Reason])]}}
    end.

folder(Dir, "osiris_log.beam") ->
    Names = filelib:wildcard("*.{beam,app}", Dir),
    Read = [{Name, file:read_file(filename:join(Dir, Name))} || Name <- Names],
    beams(Dir, [{Name, Bytes} || {Name, {ok, Bytes}} <- Read]);
folder(Dir, Name) ->
    {error, {osiris_missing, [filename:join(Dir, Name), " is not osiris_log.beam"]}}.

beams(Where, Files) ->
    Beams = #{
        list_to_atom(filename:rootname(Name)) => Bytes
     || {"osiris" ++ _ = Name, Bytes} <- Files, filename:extension(Name) =:= ".beam"
    },
    case Beams of
        #{osiris_log := _} -> {ok, Beams, version(Files)};
        #{} -> {error, {osiris_missing, ["no osiris_log.beam in ", Where]}}
    end.

version(Files) ->
    maybe
        {_, Bytes} ?= lists:keyfind("osiris.app", 1, Files),
        {ok, Tokens, _} ?= erl_scan:string(unicode:characters_to_list(Bytes)),
        {ok, {application, osiris, Keys}} ?= erl_parse:parse_term(Tokens),
        text("~ts", [proplists:get_value(vsn, Keys, "unknown")])
    else
        _ -> <<"unknown">>
    end.

examined(#{osiris_log_hooks := _, osiris_log_reader := _} = Beams) ->
    Wanted = [{B, callbacks(maps:get(B, Beams))} || B <- [osiris_log_hooks, osiris_log_reader]],
    case [B || {B, []} <- Wanted] of
        [] ->
            case rabbitmq_stream_s3_host_osiris:missing_callbacks(Wanted) of
                [] -> neighbours(native, Beams);
                Missing -> shape(io_lib:format("osiris wants unknown callbacks: ~0p", [Missing]))
            end;
        Unreadable ->
            shape(io_lib:format("the callbacks of ~0p cannot be read", [Unreadable]))
    end;
examined(#{osiris_log := Binary} = Beams) ->
    maybe
        {ok, Forms} ?= abstract_code(Binary),
        {ok, _} ?= rabbitmq_stream_s3_host_osiris:instrumented(Forms),
        neighbours(instrumented, Beams)
    end.

abstract_code(Binary) ->
    case beam_lib:chunks(Binary, [abstract_code]) of
        {ok, {osiris_log, [{abstract_code, {raw_abstract_v1, Forms}}]}} ->
            {ok, Forms};
        {ok, {osiris_log, _}} ->
            {error, {debug_info_unreadable, "osiris_log.beam has no debug info"}};
        {ok, {Other, _}} ->
            {error, {unknown_shape, io_lib:format("it is the module ~s", [Other])}};
        {error, beam_lib, Reason} ->
            {error, {debug_info_unreadable, io_lib:format("osiris_log.beam: ~0tp", [Reason])}}
    end.

neighbours(How, Beams) ->
    Missing = [
        MFA
     || {M, F, A} = MFA <- rabbitmq_stream_s3_host_osiris:called(),
        not lists:member({F, A}, exports(maps:get(M, Beams, none)))
    ],
    case Missing of
        [] -> {ok, How};
        _ -> shape(io_lib:format("osiris lacks ~0p", [Missing]))
    end.

exports(none) ->
    [];
exports(Binary) ->
    case beam_lib:chunks(Binary, [exports]) of
        {ok, {_, [{exports, Exports}]}} -> Exports;
        {error, beam_lib, _} -> []
    end.

callbacks(Binary) ->
    case beam_lib:chunks(Binary, [abstract_code]) of
        {ok, {_, [{abstract_code, {raw_abstract_v1, Forms}}]}} ->
            [Callback || {attribute, _, callback, {Callback, _}} <- Forms];
        _ ->
            []
    end.

shape(Text) ->
    {error, {unknown_shape, Text}}.

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
