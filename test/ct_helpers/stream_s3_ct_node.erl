%% Nodes of a stock broker: started, restarted, killed and asked, by way of scripts/node.
%%
%% Owns what happens to a node from outside of it. Knows nothing of streams and of the plugin
%% (stream_s3_ct_tier). Runs under scripts/ct, which sets the environment.
-module(stream_s3_ct_node).

-export([start/2, start_all/1, restart/1, restart/2, stop/1, kill/1, wipe/1, join/2]).
-export([rpc/4, rpc/5, evaluate/3, pid/1, log/1, warnings/2, errors/1]).
-export([enable/2, disable/2, enabled/1]).
-export([ctl/2, streams/2, plugins/2, tool/3]).

-type t() :: #{name := string(), node := node(), atom() => term()}.
%% plugins: enabled beside RabbitMQ's own that scripts/node enables. env: of scripts/node and of the node.
-type options() :: #{
    conf => [{string(), iodata()}],
    plugins => [string()],
    env => [{string(), string()}]
}.
-export_type([t/0, options/0]).

%% Starts a node and returns once the broker has started.
-spec start(string(), options()) -> t().
start(Name, Options) ->
    Env = maps:get(env, Options, []),
    Plugins =
        case Options of
            #{plugins := [_ | _] = List} -> ["--plugins", lists:flatten(lists:join(",", List))];
            #{} -> []
        end,
    _ = script(["start", Name, "--conf", conf_file(Name, Options)] ++ Plugins, Env),
    handle(Name, Env).

%% Starts several at once. Answers in their order.
-spec start_all([{string(), options()}]) -> [t()].
start_all(Nodes) ->
    Starting = [
        spawn_monitor(fun() -> exit({node, start(Name, Options)}) end)
     || {Name, Options} <- Nodes
    ],
    [started(Pid, Monitor) || {Pid, Monitor} <- Starting].

started(Pid, Monitor) ->
    receive
        {'DOWN', Monitor, process, Pid, {node, Node}} -> Node;
        {'DOWN', Monitor, process, Pid, Reason} -> ct:fail({not_started, Reason})
    end.

%% Stops it in order and starts it again on the same data.
-spec restart(t()) -> t().
restart(Node) ->
    restart(Node, #{}).

%% With another configuration, if the options have one.
-spec restart(t(), options()) -> t().
restart(#{name := Name, env := Env}, Options) ->
    Conf =
        case Options of
            #{conf := _} -> ["--conf", conf_file(Name, Options)];
            #{} -> []
        end,
    _ = script(["restart", Name | Conf], Env),
    handle(Name, Env).

-spec stop(t()) -> ok.
stop(#{name := Name, env := Env}) ->
    _ = script(["stop", Name], Env),
    ok.

-spec kill(t()) -> ok.
kill(#{name := Name, env := Env}) ->
    _ = script(["kill", Name], Env),
    ok.

%% Kills a node and removes its data. Its log stays in the run folder, to look into a failure.
-spec wipe(t()) -> ok.
wipe(#{name := Name, env := Env, log := Log}) ->
    {ok, _} = file:copy(Log, filename:join(os:getenv("STREAM_S3_RUN"), Name ++ ".log")),
    _ = script(["wipe", Name], Env),
    ok.

%% Makes the first node a member of the second one's cluster.
-spec join(t(), t()) -> ok.
join(#{name := Name, env := Env}, #{name := Seed}) ->
    _ = script(["join", Name, Seed], Env),
    ok.

-spec rpc(t(), module(), atom(), [term()]) -> term().
rpc(Node, Module, Function, Args) ->
    rpc(Node, Module, Function, Args, 30_000).

-spec rpc(t(), module(), atom(), [term()], timeout()) -> term().
rpc(#{node := Node}, Module, Function, Args, TimeoutMs) ->
    erpc:call(Node, Module, Function, Args, TimeoutMs).

%% Evaluates Erlang text in one process of the node. What it logs is in the node's log, and not on this virtual machine.
-spec evaluate(t(), string(), #{atom() => term()}) -> term().
evaluate(Node, Text, Bindings) ->
    {ok, Tokens, _} = erl_scan:string("group_leader(whereis(user), self()), " ++ Text ++ "."),
    {ok, Expressions} = erl_parse:parse_exprs(Tokens),
    {value, Value, _} = rpc(Node, erl_eval, exprs, [Expressions, Bindings], 60_000),
    Value.

%% The process of the operating system: the same as long as the node has not been restarted.
-spec pid(t()) -> string().
pid(Node) ->
    rpc(Node, os, getpid, []).

-spec log(t()) -> binary().
log(#{log := Path}) ->
    {ok, Text} = file:read_file(Path),
    Text.

%% Warnings and errors of the plugin that have all of these words.
-spec warnings(t(), [binary()]) -> [binary()].
warnings(Node, Words) ->
    Has = fun(Line, Word) -> binary:match(Line, Word) =/= nomatch end,
    [
        Line
     || Line <- binary:split(log(Node), ~"\n", [global]),
        Has(Line, ~"stream_s3:"),
        Has(Line, ~"[warning]") orelse Has(Line, ~"[error]"),
        lists:all(fun(Word) -> Has(Line, Word) end, Words)
    ].

%% Lines of the log that report errors and crashes.
-spec errors(t()) -> [string()].
errors(#{name := Name, env := Env}) ->
    string:lexemes(script(["log", Name, "--errors"], Env), "\n").

%% What rabbitmq-plugins does to a node that runs, without the seconds that the tool itself takes to start.
-spec enable(t(), atom()) -> ok.
enable(Node, Plugin) ->
    change_plugins(Node, enabled(Node) ++ [Plugin]).

-spec disable(t(), atom()) -> ok.
disable(Node, Plugin) ->
    change_plugins(Node, lists:delete(Plugin, enabled(Node))).

-spec enabled(t()) -> [atom()].
enabled(#{plugins_file := File}) ->
    {ok, [Plugins]} = file:consult(File),
    Plugins.

change_plugins(#{plugins_file := File} = Node, Plugins) ->
    ok = file:write_file(File, io_lib:format("~p.~n", [Plugins])),
    {ok, _Started, _Stopped} = evaluate(Node, "rabbit_plugins:ensure(File)", #{'File' => File}),
    ok.

%% RabbitMQ's command line tools. They must succeed, and what they print is the answer.
-spec ctl(t(), [string()]) -> string().
ctl(#{name := Name, env := Env}, Args) ->
    script(["ctl", Name | Args], Env).

-spec streams(t(), [string()]) -> string().
streams(#{name := Name, env := Env}, Args) ->
    script(["streams", Name | Args], Env).

-spec plugins(t(), [string()]) -> string().
plugins(#{name := Name, env := Env}, Args) ->
    script(["plugins", Name | Args], Env).

%% One of them that may fail: its exit status and all that it prints.
-spec tool(t(), ctl | streams | plugins, [string()]) -> {non_neg_integer(), string()}.
tool(#{name := Name, env := Env}, Tool, Args) ->
    run([atom_to_list(Tool), Name | Args], Env).

handle(Name, Env) ->
    Lines = string:lexemes(script(["status", Name], Env), "\n"),
    Status = maps:from_list([list_to_tuple(string:split(Line, "=")) || Line <- Lines]),
    Ports = #{
        Key => list_to_integer(maps:get(atom_to_list(Key), Status))
     || Key <- [amqp_port, stream_port, prometheus_port, management_port]
    },
    Ports#{
        name => Name,
        env => Env,
        node => list_to_atom(maps:get("node", Status)),
        data_dir => maps:get("data_dir", Status),
        plugins_file => filename:join(maps:get("dir", Status), "enabled_plugins"),
        log => maps:get("log", Status)
    }.

conf_file(Name, Options) ->
    Conf = filename:join(os:getenv("STREAM_S3_RUN"), Name ++ ".conf"),
    Lines = [
        io_lib:format("~ts = ~ts~n", [Key, Value])
     || {Key, Value} <- maps:get(conf, Options, [])
    ],
    ok = file:write_file(Conf, Lines),
    Conf.

script(Args, Env) ->
    case run(Args, Env) of
        {0, Output} ->
            Output;
        {Status, Output} ->
            %% All of it once, where the log is; the reason is repeated for every case that is skipped for it.
            ct:pal("node ~ts: exit ~b~n~ts", [lists:join(" ", Args), Status, Output]),
            ct:fail("node ~ts: exit ~b", [lists:join(" ", Args), Status])
    end.

run(Args, Env) ->
    Port = open_port(
        {spawn_executable, filename:join([os:getenv("STREAM_S3_TOP"), "scripts", "node"])},
        [
            {args, ["--dir", os:getenv("STREAM_S3_RUN") | Args]},
            {env, Env},
            exit_status,
            use_stdio,
            stderr_to_stdout,
            hide,
            binary
        ]
    ),
    collect(Port, []).

collect(Port, Output) ->
    receive
        {Port, {data, Data}} -> collect(Port, [Output, Data]);
        {Port, {exit_status, Status}} ->
            {Status, unicode:characters_to_list(iolist_to_binary(Output))}
    end.
