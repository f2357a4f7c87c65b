%% What the Common Test suites stand on: nodes, a scripted S3 server, records, waiting.
%%
%% Owns starting and ending things outside of this virtual machine (scripts/node, the S3 test server).
%% Knows nothing of what the plugin does inside. Runs under scripts/ct, which sets the environment.
-module(stream_s3_ct_helpers).

-include_lib("amqp_client/include/amqp_client.hrl").

%% Nodes.
-export([start_node/2, restart_node/1, stop_node/1, kill_node/1, wipe_node/1]).
-export([join/2, rpc/4, rpc/5, eval/2, ctl/2, streams/2, plugins/2, log/1, errors/1]).
%% The S3 server.
-export([start_s3/1, stop_s3/1, s3_conf/2, s3/3, s3/4, objects/1]).
%% Streams.
-export([declare/2, declare/3, delete/2, publish/4, consume/4, payload/2, segments/2]).
%% Waiting.
-export([wait_until/2, wait_until/3]).

-type node_handle() :: #{name := string(), node := node(), atom() => term()}.
-type s3_handle() :: #{endpoint := binary(), control := binary(), pid := pid(), atom() => term()}.

-export_type([node_handle/0, s3_handle/0]).

%% Nodes -------------------------------------------------------------------------------------------

%% Starts a node and returns once the broker is up. Opts: conf => iodata | [{Key, Value}], plugins => [string()],
%% index => integer(), env => [{string(), string()}].
-spec start_node(string(), map()) -> node_handle().
start_node(Name, Opts) ->
    Env = maps:get(env, Opts, []),
    Conf = filename:join(os:getenv("STREAM_S3_RUN"), Name ++ ".conf"),
    ok = file:write_file(Conf, conf_text(maps:get(conf, Opts, []))),
    Index =
        case Opts of
            #{index := I} -> ["--index", integer_to_list(I)];
            #{} -> []
        end,
    Plugins =
        case Opts of
            #{plugins := [_ | _] = List} -> ["--plugins", lists:join(",", List)];
            #{} -> []
        end,
    node_script(["start", Name, "--conf", Conf] ++ Index ++ [lists:flatten(P) || P <- Plugins], Env),
    handle(Name, Env).

-spec restart_node(node_handle()) -> node_handle().
restart_node(#{name := Name, env := Env}) ->
    node_script(["restart", Name], Env),
    handle(Name, Env).

-spec stop_node(node_handle()) -> ok.
stop_node(#{name := Name, env := Env}) ->
    _ = node_script(["stop", Name], Env),
    ok.

-spec kill_node(node_handle()) -> ok.
kill_node(#{name := Name, env := Env}) ->
    _ = node_script(["kill", Name], Env),
    ok.

%% Kills a node and removes its data.
-spec wipe_node(node_handle()) -> ok.
wipe_node(#{name := Name, env := Env}) ->
    _ = node_script(["wipe", Name], Env),
    ok.

%% Makes the first node a member of the second one's cluster.
-spec join(node_handle(), node_handle()) -> ok.
join(#{name := Name, env := Env}, #{name := Seed}) ->
    _ = node_script(["join", Name, Seed], Env),
    ok.

handle(Name, Env) ->
    Lines = string:lexemes(node_script(["status", Name], Env), "\n"),
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
        log => maps:get("log", Status)
    }.

conf_text([{_, _} | _] = Pairs) ->
    [io_lib:format("~ts = ~ts~n", [Key, Value]) || {Key, Value} <- Pairs];
conf_text(Text) ->
    Text.

-spec rpc(node_handle(), module(), atom(), [term()]) -> term().
rpc(Node, Module, Function, Args) ->
    rpc(Node, Module, Function, Args, 30_000).

-spec rpc(node_handle(), module(), atom(), [term()], timeout()) -> term().
rpc(#{node := Node}, Module, Function, Args, TimeoutMs) ->
    erpc:call(Node, Module, Function, Args, TimeoutMs).

%% Evaluates an expression on a node: for what is no single call.
-spec eval(node_handle(), string()) -> term().
eval(Node, Text) ->
    {ok, Tokens, _} = erl_scan:string(Text ++ "."),
    {ok, Exprs} = erl_parse:parse_exprs(Tokens),
    {value, Value, _} = rpc(Node, erl_eval, exprs, [Exprs, []]),
    Value.

-spec ctl(node_handle(), [string()]) -> string().
ctl(#{name := Name, env := Env}, Args) ->
    node_script(["ctl", Name | Args], Env).

-spec streams(node_handle(), [string()]) -> string().
streams(#{name := Name, env := Env}, Args) ->
    node_script(["streams", Name | Args], Env).

-spec plugins(node_handle(), [string()]) -> string().
plugins(#{name := Name, env := Env}, Args) ->
    node_script(["plugins", Name | Args], Env).

-spec log(node_handle()) -> binary().
log(#{log := Path}) ->
    {ok, Text} = file:read_file(Path),
    Text.

%% Lines of the log that report errors and crashes.
-spec errors(node_handle()) -> [string()].
errors(#{name := Name, env := Env}) ->
    string:lexemes(node_script(["log", Name, "--errors"], Env), "\n").

node_script(Args, Env) ->
    Script = filename:join([os:getenv("STREAM_S3_TOP"), "scripts", "node"]),
    {Status, Output} = run(Script, ["--dir", os:getenv("STREAM_S3_RUN") | Args], Env),
    case Status of
        0 -> Output;
        _ ->
            %% All of it once, where the log is; the reason is repeated for every case that is skipped for it.
            ct:pal("node ~ts: exit ~b~n~ts", [lists:join(" ", Args), Status, Output]),
            ct:fail("node ~ts: exit ~b", [lists:join(" ", Args), Status])
    end.

run(Program, Args, Env) ->
    Port = open_port(
        {spawn_executable, Program},
        [{args, Args}, {env, Env}, exit_status, use_stdio, stderr_to_stdout, hide, binary]
    ),
    collect(Port, []).

collect(Port, Output) ->
    receive
        {Port, {data, Data}} -> collect(Port, [Output, Data]);
        {Port, {exit_status, Status}} -> {Status, unicode:characters_to_list(iolist_to_binary(Output))}
    end.

%% The S3 server -----------------------------------------------------------------------------------

%% Starts the scripted S3 server with one bucket. It lives until stop_s3/1 or the end of this virtual machine.
-spec start_s3(string()) -> s3_handle().
start_s3(Bucket) ->
    {ok, _} = application:ensure_all_started(inets),
    Self = self(),
    Ref = make_ref(),
    Pid = spawn(fun() -> hold_s3(Self, Ref, Bucket) end),
    receive
        {Ref, Ready} -> Ready#{pid => Pid, bucket => list_to_binary(Bucket)}
    after 30_000 ->
        ct:fail(s3_server_did_not_start)
    end.

hold_s3(Parent, Ref, Bucket) ->
    Port = open_port(
        {spawn_executable, os:getenv("STREAM_S3_SERVER")},
        [{args, ["--until-eof", "--bucket", Bucket]}, {line, 65536}, use_stdio, exit_status, hide, binary]
    ),
    receive
        {Port, {data, {eol, Line}}} ->
            Ready = json:decode(Line),
            Parent !
                {Ref, #{
                    endpoint => maps:get(~"endpoint", Ready),
                    control => maps:get(~"control", Ready),
                    access_key => maps:get(~"access_key", Ready),
                    secret_key => maps:get(~"secret_key", Ready),
                    region => maps:get(~"region", Ready)
                }}
    end,
    receive
        {stop, From} ->
            %% Closing its standard input ends it.
            port_close(Port),
            From ! {stopped, self()}
    end.

-spec stop_s3(s3_handle()) -> ok.
stop_s3(#{pid := Pid}) ->
    Monitor = monitor(process, Pid),
    Pid ! {stop, self()},
    receive
        {stopped, Pid} -> ok;
        {'DOWN', Monitor, process, Pid, _} -> ok
    end.

%% Lines of rabbitmq.conf that point the plugin at the server.
-spec s3_conf(s3_handle(), [{string(), iodata()}]) -> [{string(), iodata()}].
s3_conf(S3, More) ->
    [
        {"stream_s3.bucket", maps:get(bucket, S3)},
        {"stream_s3.region", maps:get(region, S3)},
        {"stream_s3.endpoint", maps:get(endpoint, S3)},
        {"stream_s3.path_style", "true"},
        {"stream_s3.access_key_id", maps:get(access_key, S3)},
        {"stream_s3.secret_access_key", maps:get(secret_key, S3)}
        | [{"stream_s3." ++ Key, Value} || {Key, Value} <- More]
    ].

-spec s3(s3_handle(), atom(), string()) -> term().
s3(S3, Method, Path) ->
    s3(S3, Method, Path, none).

%% One request to the control port (native/s3-testserver/src/control.rs), its JSON answer decoded.
-spec s3(s3_handle(), get | put | post | delete, string(), none | term()) -> term().
s3(#{control := Control}, Method, Path, Body) ->
    Url = binary_to_list(Control) ++ Path,
    Request =
        case Body of
            none when Method =:= get; Method =:= delete -> {Url, []};
            none -> {Url, [], "application/json", <<>>};
            _ -> {Url, [], "application/json", iolist_to_binary(json:encode(Body))}
        end,
    {ok, {{_, 200, _}, _, Answer}} =
        httpc:request(Method, Request, [{timeout, 60_000}], [{body_format, binary}]),
    json:decode(Answer).

%% Keys of all objects.
-spec objects(s3_handle()) -> [binary()].
objects(S3) ->
    lists:sort([maps:get(~"key", Object) || Object <- s3(S3, get, "/objects")]).

%% Streams -----------------------------------------------------------------------------------------

-spec declare(node_handle(), binary()) -> ok.
declare(Node, Stream) ->
    declare(Node, Stream, []).

-spec declare(node_handle(), binary(), [{binary(), atom(), term()}]) -> ok.
declare(Node, Stream, Args) ->
    with_channel(Node, fun(Channel) ->
        #'queue.declare_ok'{} = amqp_channel:call(Channel, #'queue.declare'{
            queue = Stream, durable = true, arguments = [{~"x-queue-type", longstr, ~"stream"} | Args]
        }),
        ok
    end).

-spec delete(node_handle(), binary()) -> ok.
delete(Node, Stream) ->
    with_channel(Node, fun(Channel) ->
        #'queue.delete_ok'{} = amqp_channel:call(Channel, #'queue.delete'{queue = Stream}),
        ok
    end).

%% Publishes records First..First+Count-1 of Size bytes, confirmed.
-spec publish(node_handle(), binary(), {non_neg_integer(), pos_integer()}, pos_integer()) -> ok.
publish(Node, Stream, {First, Count}, Size) ->
    with_channel(Node, fun(Channel) ->
        #'confirm.select_ok'{} = amqp_channel:call(Channel, #'confirm.select'{}),
        Publish = #'basic.publish'{routing_key = Stream},
        Send = fun(Sequence) ->
            ok = amqp_channel:cast(Channel, Publish, #amqp_msg{payload = payload(Sequence, Size)}),
            %% Bounds what is in flight.
            (Sequence rem 1000 =/= 999) orelse amqp_channel:wait_for_confirms_or_die(Channel, 60)
        end,
        lists:foreach(Send, lists:seq(First, First + Count - 1)),
        true = amqp_channel:wait_for_confirms_or_die(Channel, 60),
        ok
    end).

%% Consumes from the start and checks every byte of records First..First+Count-1: in order, each once. Offsets grow but
%% may jump: osiris keeps chunks of its own in the stream for AMQP publishers, and they are delivered to nobody.
-spec consume(node_handle(), binary(), {non_neg_integer(), pos_integer()}, pos_integer()) -> ok.
consume(Node, Stream, {First, Count}, Size) ->
    with_channel(Node, fun(Channel) ->
        #'basic.qos_ok'{} = amqp_channel:call(Channel, #'basic.qos'{prefetch_count = 200}),
        #'basic.consume_ok'{} = amqp_channel:subscribe(
            Channel,
            #'basic.consume'{queue = Stream, arguments = [{~"x-stream-offset", longstr, ~"first"}]},
            self()
        ),
        receive_records(Channel, First, First + Count, -1, Size)
    end).

receive_records(_Channel, Next, Next, _Last, _Size) ->
    ok;
receive_records(Channel, Sequence, Next, Last, Size) ->
    receive
        {#'basic.deliver'{delivery_tag = Tag}, #amqp_msg{payload = Payload, props = Props}} ->
            #'P_basic'{headers = Headers} = Props,
            {_, _, Offset} = lists:keyfind(~"x-stream-offset", 1, Headers),
            Offset > Last orelse ct:fail("offset ~b after ~b", [Offset, Last]),
            Payload =:= payload(Sequence, Size) orelse
                ct:fail("record ~b at offset ~b: ~p", [Sequence, Offset, binary:part(Payload, 0, 16)]),
            ok = amqp_channel:cast(Channel, #'basic.ack'{delivery_tag = Tag}),
            receive_records(Channel, Sequence + 1, Next, Offset, Size)
    after 30_000 ->
        ct:fail("record ~b of ~b did not come", [Sequence, Next])
    end.

with_channel(#{amqp_port := Port}, Fun) ->
    {ok, _} = application:ensure_all_started(amqp_client),
    {ok, Connection} = amqp_connection:start(#amqp_params_network{port = Port}),
    try
        {ok, Channel} = amqp_connection:open_channel(Connection),
        Fun(Channel)
    after
        catch_exit(fun() -> amqp_connection:close(Connection) end)
    end.

%% A connection that the test has killed is closed already.
catch_exit(Fun) ->
    try
        Fun()
    catch
        exit:_ -> ok
    end.

%% What record Sequence holds: its number, then bytes that follow from it.
-spec payload(non_neg_integer(), pos_integer()) -> binary().
payload(Sequence, Size) when Size >= 16 ->
    Seed = crypto:hash(sha256, <<Sequence:64>>),
    Copies = binary:copy(Seed, (Size - 16) div 32 + 1),
    <<Size:64, Sequence:64, (binary:part(Copies, 0, Size - 16))/binary>>.

%% First offsets of the local segments of a stream, in order.
-spec segments(node_handle(), binary()) -> [non_neg_integer()].
segments(#{data_dir := Dir}, Stream) ->
    Pattern = filename:join([Dir, "stream", "__" ++ binary_to_list(Stream) ++ "_*", "*.segment"]),
    lists:sort([list_to_integer(filename:basename(File, ".segment")) || File <- filelib:wildcard(Pattern)]).

%% Waiting -----------------------------------------------------------------------------------------

-spec wait_until(string(), fun(() -> boolean())) -> ok.
wait_until(What, Condition) ->
    wait_until(What, Condition, 30_000).

%% Polls a condition until it holds; fails with What when time is up. Not an event, because what is
%% waited for is of another operating system process, most of it of stock code: nobody would send one.
-spec wait_until(string(), fun(() -> boolean()), timeout()) -> ok.
wait_until(What, Condition, TimeoutMs) ->
    wait_for(What, Condition, erlang:monotonic_time(millisecond) + TimeoutMs).

wait_for(What, Condition, Deadline) ->
    case Condition() of
        true ->
            ok;
        false ->
            erlang:monotonic_time(millisecond) < Deadline orelse ct:fail("not in time: ~ts", [What]),
            timer:sleep(50),
            wait_for(What, Condition, Deadline)
    end.
