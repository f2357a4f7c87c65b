#!/usr/bin/env escript
%% Which module of the plugin calls which, by xref, on the floors of docs/ARCHITECTURE.md.
%% Usage: module-calls.escript check|draw EBIN
%%   check: prints each call to a higher floor, each circle of modules and each module without a floor;
%%          exits 1 if there is one.
%%   draw:  prints docs/CALLS.md.
-mode(compile).

-define(PREFIX, "rabbitmq_stream_s3").

%% From the top. A name ends with _ if it is the prefix of a floor's modules; a full name wins.
floors() ->
    [
        {"application", ["app", "sup", "status", "status_", "prometheus", "prometheus_", "command_"]},
        {"processes", [
            "hooks", "reconciler", "replica_reader", "replica_reader_sup", "stream_sup", "replica_lag",
            "manifest_replica", "membership_reconciliation", "lister", "reaper", "governor", "api_aws",
            "recovery", "recovery_job", "recovery_queue", "recovery_native",
            "deleted_streams"
        ]},
        {"reading", ["log_reader", "reader_"]},
        {"manifests", ["manifest_", "membership", "membership_policy", "recovery_plan"]},
        {"host", ["host_", "db", "db_"]},
        {"ground", [
            "", "nif", "native_log", "config", "settings", "counters", "metrics", "registry", "peers"
        ]}
    ].

main(["check", Ebin]) ->
    Calls = calls(Ebin),
    Modules = modules(Ebin),
    Faults =
        [io_lib:format("~s is on no floor", [short(M)]) || M <- Modules, floor_of(M) =:= none] ++
            [
                io_lib:format("~s (~s) calls up to ~s (~s): ~s", [
                    short(From), name(floor_of(From)), short(To), name(floor_of(To)), functions(Fs)
                ])
             || {From, To, Fs} <- Calls, is_up(From, To)
            ] ++
            [
                io_lib:format("circle: ~s", [lists:join(" -> ", [short(M) || M <- Circle])])
             || Circle <- circles(Modules, Calls)
            ],
    [io:format("layers: ~ts~n", [Fault]) || Fault <- Faults],
    halt(
        case Faults of
            [] -> 0;
            _ -> 1
        end
    );
main(["draw", Ebin]) ->
    draw(modules(Ebin), calls(Ebin)),
    halt(0);
main(_) ->
    io:format(standard_error, "usage: module-calls.escript check|draw EBIN~n", []),
    halt(2).

modules(Ebin) ->
    lists:sort([
        list_to_atom(filename:basename(File, ".beam"))
     || File <- filelib:wildcard(filename:join(Ebin, "*.beam"))
    ]).

%% [{From, To, [Function/Arity]}] between modules of the plugin.
calls(Ebin) ->
    {ok, _} = xref:start(s),
    ok = xref:set_default(s, [{warnings, false}, {verbose, false}]),
    {ok, _} = xref:add_directory(s, Ebin),
    {ok, Found} = xref:q(s, "XC"),
    Modules = modules(Ebin),
    Pairs = [
        {{From, To}, {F, A}}
     || {{From, _, _}, {To, F, A}} <- Found, From =/= To, lists:member(To, Modules)
    ],
    Grouped = maps:groups_from_list(fun({K, _}) -> K end, fun({_, V}) -> V end, Pairs),
    lists:sort([{From, To, lists:usort(Fs)} || {From, To} := Fs <- Grouped]).

short(Module) ->
    case atom_to_list(Module) of
        ?PREFIX -> ?PREFIX;
        ?PREFIX ++ "_" ++ Rest -> Rest;
        "Elixir." ++ _ = Name -> "command_" ++ lists:last(string:split(Name, ".", all));
        Name -> Name
    end.

%% 0 is the top.
floor_of(Module) ->
    Name =
        case short(Module) of
            ?PREFIX -> "";
            Other -> Other
        end,
    Levels = lists:enumerate(0, [Names || {_, Names} <- floors()]),
    Full = [Level || {Level, Names} <- Levels, lists:member(Name, Names)],
    ByPrefix = [
        Level
     || {Level, Names} <- Levels, P <- Names, lists:suffix("_", P), lists:prefix(P, Name)
    ],
    case Full ++ ByPrefix of
        [Level | _] -> Level;
        [] -> none
    end.

name(none) -> "no floor";
name(Level) -> element(1, lists:nth(Level + 1, floors())).

is_up(From, To) ->
    case {floor_of(From), floor_of(To)} of
        {A, B} when is_integer(A), is_integer(B) -> B < A;
        _ -> false
    end.

functions(Fs) ->
    lists:join(", ", [io_lib:format("~s/~b", [F, A]) || {F, A} <- Fs]).

circles(Modules, Calls) ->
    Graph = digraph:new(),
    [digraph:add_vertex(Graph, M) || M <- Modules],
    [digraph:add_edge(Graph, From, To) || {From, To, _} <- Calls],
    [Component || Component <- digraph_utils:strong_components(Graph), length(Component) > 1].

draw(Modules, Calls) ->
    io:put_chars([
        "# Calls between the Erlang modules\n\n",
        "Drawn by `scripts/check-layers draw` from xref's call graph; `make test` fails if it is out of date.\n",
        "Each floor calls itself and the floors below it, never one above, and no circle of modules calls itself.\n",
        "[ARCHITECTURE](ARCHITECTURE.md) says what each floor owns. Messages between processes are not calls.\n\n"
    ]),
    Levels = lists:enumerate(0, floors()),
    Counts = maps:groups_from_list(
        fun({From, To, _}) -> {floor_of(From), floor_of(To)} end, Calls
    ),
    io:put_chars("```mermaid\nflowchart TB\n"),
    [
        io:format("  f~b[\"~s<br/>~b modules\"]~n", [
            Level, Name, length([M || M <- Modules, floor_of(M) =:= Level])
        ])
     || {Level, {Name, _}} <- Levels
    ],
    [
        io:format("  f~b -->|~b| f~b~n", [From, length(Of), To])
     || {{From, To}, Of} <- lists:sort(maps:to_list(Counts)), From =/= To
    ],
    io:put_chars("```\n"),
    [floor_section(Level, Name, Modules, Calls) || {Level, {Name, _}} <- Levels].

floor_section(Level, Name, Modules, Calls) ->
    io:format("~n## ~s~n~n| module | calls |~n| --- | --- |~n", [Name]),
    [
        io:format("| `~s` | ~s |~n", [short(M), lists:join(", ", callees(M, Level, Calls))])
     || M <- Modules, floor_of(M) =:= Level
    ].

%% Those of the same floor in italics.
callees(Module, Level, Calls) ->
    [
        case floor_of(To) of
            Level -> ["*", short(To), "*"];
            _ -> short(To)
        end
     || {From, To, _} <- Calls, From =:= Module
    ].
