%% The hooks on a stock osiris: what is added to the code that runs, who calls it, and what is left when the plugin
%% goes.
-module(hooks_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    without_the_plugin_nothing_is_instrumented/1,
    enabling_instruments_the_code_that_runs_and_not_the_files/1,
    writers_readers_and_retention_call_the_hooks/1,
    nothing_is_left_after_disable/1,
    streams_are_stock_after_disable/1,
    enabled_again_the_code_is_not_added_twice/1,
    nothing_went_wrong_meanwhile/1
]).

-import(stream_s3_ct_node, [rpc/4]).
-import(stream_s3_ct_client, [subscribe/4]).
-import(stream_s3_ct_records, [fill/3, read/4]).
-import(stream_s3_ct_tier, [counter/2, tier/3, floor/2]).

-define(PLUGIN, rabbitmq_stream_s3).
-define(STREAM, ~"hooked").
%% Modules of the host that get wrappers.
-define(INSTRUMENTED, [osiris_log, osiris, osiris_counters, rabbit_stream_queue]).

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        without_the_plugin_nothing_is_instrumented,
        enabling_instruments_the_code_that_runs_and_not_the_files,
        writers_readers_and_retention_call_the_hooks,
        nothing_is_left_after_disable,
        streams_are_stock_after_disable,
        enabled_again_the_code_is_not_added_twice,
        nothing_went_wrong_meanwhile
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("hooks-suite"),
    {Name, Options} = stream_s3_ct_tier:node("hooks1", S3, [{"fragment_size", "500000"}]),
    %% The plugin is installed and configured, and not enabled.
    Node = stream_s3_ct_node:start(Name, maps:remove(plugins, Options)),
    [{s3, S3}, {broker, Node} | Config].

end_per_suite(Config) ->
    ok = stream_s3_ct_node:wipe(broker(Config)),
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

without_the_plugin_nothing_is_instrumented(Config) ->
    Node = broker(Config),
    ?assertNot(lists:member(?PLUGIN, stream_s3_ct_node:enabled(Node))),
    ?assertEqual([], instrumented(Node)),
    ?assertEqual([undefined, undefined], hooks(Node)),
    Stream = ~"stock",
    ok = stream_s3_ct_amqp:declare(Node, Stream),
    ok = stream_s3_ct_amqp:publish(Node, Stream, {0, 300}, 1_000),
    ok = stream_s3_ct_amqp:consume(Node, Stream, {0, 300}, 1_000),
    ok = stream_s3_ct_amqp:delete(Node, Stream).

enabling_instruments_the_code_that_runs_and_not_the_files(Config) ->
    Node = broker(Config),
    ok = stream_s3_ct_node:enable(Node, ?PLUGIN),
    ?assertEqual(?INSTRUMENTED, instrumented(Node)),
    ?assertEqual([rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader], hooks(Node)),
    ?assertMatch(
        #{mode := active, osiris_hooks := instrumented, osiris_attached := true},
        stream_s3_ct_tier:node_status(Node)
    ),
    %% Each hooked function keeps its body beside the wrapper.
    Functions = rpc(Node, osiris_log, module_info, [functions]),
    [
        ?assertMatch([_ | _], [Arity || {Name, Arity} <- Functions, Name =:= Stock])
     || Stock <- [
            '$stock_init',
            '$stock_init_offset_reader',
            '$stock_send_file',
            '$stock_evaluate_retention'
        ]
    ],
    [?assertNotEqual(on_disk(Node, Module), loaded(Node, Module)) || Module <- ?INSTRUMENTED],
    [
        ?assertNot(proplists:is_defined(?PLUGIN, attributes_on_disk(Node, Module)))
     || Module <- ?INSTRUMENTED
    ].

writers_readers_and_retention_call_the_hooks(Config) ->
    Node = broker(Config),
    Client = stream_s3_ct_client:open(Node),
    ok = stream_s3_ct_client:create(
        Client, ?STREAM, #{~"stream-max-segment-size-bytes" => ~"1000000"}
    ),
    %% The writer's hook has found the stream: else nothing would be uploaded. Retention's has trimmed its segments.
    ok = fill(Client, ?STREAM, {0, 400}),
    Floor = tier(Node, ?STREAM, 400),
    ?assert(Floor > 100),
    %% The reader's: what is in no local segment is delivered.
    ok = read(Client, subscribe(Client, ?STREAM, first, 10), 0, 400),
    ?assert(counter(Node, ~"chunks_delivered_total") >= Floor div 10),
    stream_s3_ct_client:close(Client).

nothing_is_left_after_disable(Config) ->
    Node = broker(Config),
    ?assertMatch([_ | _], named_processes(Node)),
    ?assertMatch([_ | _], tables(Node)),
    ok = stream_s3_ct_node:disable(Node, ?PLUGIN),
    ?assertEqual([undefined, undefined], hooks(Node)),
    ?assertEqual([], named_processes(Node)),
    ?assertEqual([], tables(Node)),
    ?assertEqual([], loaded_modules(Node)),
    ?assertEqual([], processes_inside(Node)),
    Running = [App || {App, _, _} <- rpc(Node, application, which_applications, [])],
    ?assertNot(lists:member(?PLUGIN, Running)),
    ?assertEqual([], [H || H <- rpc(Node, gen_event, which_handlers, [rabbit_event]), is_ours(H)]),
    Validators = rpc(Node, rabbit_registry, lookup_all, [policy_validator]),
    ?assertEqual([], [Module || {_, Module} <- Validators, is_ours(Module)]),
    ?assertEqual([], [C || C <- rpc(Node, prometheus_registry, collectors, [default]), is_ours(C)]).

streams_are_stock_after_disable(Config) ->
    Node = broker(Config),
    Client = stream_s3_ct_client:open(Node),
    Floor = floor(Node, ?STREAM),
    First = subscribe(Client, ?STREAM, first, 1),
    ?assertMatch(#{id := Floor}, stream_s3_ct_client:chunk(Client, First)),
    ok = fill(Client, ?STREAM, {400, 200}),
    ok = read(Client, subscribe(Client, ?STREAM, Floor, 10), Floor, 600),
    ?assertMatch(#{~"first_chunk_id" := Floor}, stream_s3_ct_client:stats(Client, ?STREAM)),
    %% Nothing trims any more.
    ?assertEqual(Floor, floor(Node, ?STREAM)),
    stream_s3_ct_client:close(Client).

enabled_again_the_code_is_not_added_twice(Config) ->
    Node = broker(Config),
    Before = [loaded(Node, Module) || Module <- ?INSTRUMENTED],
    ok = stream_s3_ct_node:enable(Node, ?PLUGIN),
    ?assertEqual(Before, [loaded(Node, Module) || Module <- ?INSTRUMENTED]),
    ?assertEqual([rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader], hooks(Node)),
    ?assert(tier(Node, ?STREAM, 600) > 400),
    Client = stream_s3_ct_client:open(Node),
    ok = read(Client, subscribe(Client, ?STREAM, first, 10), 0, 600),
    stream_s3_ct_client:close(Client).

nothing_went_wrong_meanwhile(Config) ->
    ?assertEqual([], stream_s3_ct_node:errors(broker(Config))).

%% Helpers -----------------------------------------------------------------------------------------

broker(Config) ->
    proplists:get_value(broker, Config).

%% The hooks that osiris is configured to call.
hooks(Node) ->
    [
        case rpc(Node, application, get_env, [osiris, Key]) of
            {ok, Module} -> Module;
            undefined -> undefined
        end
     || Key <- [log_hooks, log_reader]
    ].

%% Modules of the host whose code in memory carries our mark.
instrumented(Node) ->
    [
        Module
     || Module <- ?INSTRUMENTED,
        proplists:is_defined(?PLUGIN, rpc(Node, Module, module_info, [attributes]))
    ].

loaded(Node, Module) ->
    rpc(Node, Module, module_info, [md5]).

on_disk(Node, Module) ->
    {Module, Binary, _} = rpc(Node, code, get_object_code, [Module]),
    {ok, {Module, Md5}} = beam_lib:md5(Binary),
    Md5.

attributes_on_disk(Node, Module) ->
    {Module, Binary, _} = rpc(Node, code, get_object_code, [Module]),
    {ok, {Module, [{attributes, Attributes}]}} = beam_lib:chunks(Binary, [attributes]),
    Attributes.

named_processes(Node) ->
    [Name || Name <- rpc(Node, erlang, registered, []), is_ours(Name)].

tables(Node) ->
    [Table || Table <- rpc(Node, ets, all, []), is_ours(Table)].

loaded_modules(Node) ->
    [Module || {Module, _} <- rpc(Node, code, all_loaded, []), is_ours(Module)].

processes_inside(Node) ->
    Calls = [
        rpc(Node, erlang, process_info, [Pid, [initial_call, current_function]])
     || Pid <- rpc(Node, erlang, processes, [])
    ],
    [
        Call
     || [{_, {Initial, _, _}}, {_, {Current, _, _}}] = Call <- Calls,
        is_ours(Initial) orelse is_ours(Current)
    ].

is_ours({Module, _}) -> is_ours(Module);
is_ours(Name) when is_atom(Name) ->
    string:prefix(atom_to_list(Name), "rabbitmq_stream_s3") =/= nomatch;
is_ours(_) -> false.
