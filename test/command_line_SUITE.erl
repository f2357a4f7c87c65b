%% The commands of rabbitmq-streams that the plugin adds: what they print as text and as JSON, how they refuse, and that
%% no secret is in it.
-module(command_line_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    the_commands_are_in_the_help/1,
    status_of_the_node/1,
    status_of_an_inert_node_says_why_and_what_to_do/1,
    status_of_a_stream/1,
    status_of_a_stream_in_another_vhost/1,
    a_stream_that_is_not_there_is_refused_by_reason/1,
    wrong_arguments_are_refused_with_the_usage/1,
    the_preview_names_what_disabling_hides/1,
    another_host_is_checked_before_an_upgrade/1,
    the_list_has_all_streams_and_a_verdict/1,
    a_recovery_shows_what_the_bucket_has/1,
    a_recovery_is_refused_on_an_inert_node/1,
    no_secret_is_shown/1
]).

-import(stream_s3_ct_node, [tool/3]).

-define(STREAM, ~"shown").
-define(SECRET, "a-secret-that-is-shown-nowhere").
%% Of sysexits.h, which RabbitMQ's tools use.
-define(USAGE, 64).
-define(DATA, 65).
-define(UNAVAILABLE, 69).

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        the_commands_are_in_the_help,
        status_of_the_node,
        status_of_an_inert_node_says_why_and_what_to_do,
        status_of_a_stream,
        status_of_a_stream_in_another_vhost,
        a_stream_that_is_not_there_is_refused_by_reason,
        wrong_arguments_are_refused_with_the_usage,
        the_preview_names_what_disabling_hides,
        another_host_is_checked_before_an_upgrade,
        the_list_has_all_streams_and_a_verdict,
        a_recovery_shows_what_the_bucket_has,
        a_recovery_is_refused_on_an_inert_node,
        no_secret_is_shown
    ].

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("command-line-suite"),
    [Node, Inert] = stream_s3_ct_node:start_all([
        stream_s3_ct_tier:node("command1", S3, [{"fragment_size", "500000"}]),
        stream_s3_ct_tier:node(
            "command2", S3, [{"fragment_size", "1"}, {"secret_access_key", ?SECRET}]
        )
    ]),
    Client = stream_s3_ct_client:open(Node),
    ok = stream_s3_ct_client:create(
        Client, ?STREAM, #{~"stream-max-segment-size-bytes" => ~"1000000"}
    ),
    ok = stream_s3_ct_records:fill(Client, ?STREAM, {0, 400}),
    ok = stream_s3_ct_client:close(Client),
    Floor = stream_s3_ct_tier:tier(Node, ?STREAM, 400),
    [{s3, S3}, {broker, Node}, {inert, Inert}, {floor, Floor} | Config].

end_per_suite(Config) ->
    [ok = stream_s3_ct_node:wipe(proplists:get_value(Key, Config)) || Key <- [broker, inert]],
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

the_commands_are_in_the_help(Config) ->
    [{0, Help}] = streams(Config, [["help"]]),
    [
        has(Help, Command)
     || Command <- [
            "stream_s3_status",
            "stream_s3_disable_preview",
            "stream_s3_check_host",
            "stream_s3_recover",
            "stream_s3_list"
        ]
    ].

status_of_the_node(Config) ->
    [{0, Text}, {0, Json}] = streams(Config, both(["stream_s3_status"])),
    [
        has(Text, Part)
     || Part <- [
            "Tiered storage on node",
            "State",
            "active",
            "command-line-suite",
            "Hooks in use",
            "Native counters"
        ]
    ],
    ?assertMatch(
        #{
            ~"mode" := ~"active",
            ~"inert_reason" := ~"none",
            ~"osiris_attached" := true,
            ~"bucket" := ~"command-line-suite",
            ~"bucket_accessible" := ~"yes",
            ~"streams" := 1,
            ~"native" := #{}
        },
        decode(Json)
    ).

status_of_an_inert_node_says_why_and_what_to_do(Config) ->
    Inert = proplists:get_value(inert, Config),
    [{0, Text}, {0, Json}] = run(Inert, both(["stream_s3_status"])),
    [
        has(Text, Part)
     || Part <- ["inert", "fragment_size", "Correct the setting and restart the node"]
    ],
    ?assertMatch(
        #{
            ~"mode" := ~"inert",
            ~"inert_reason" := ~"invalid_configuration",
            ~"osiris_attached" := true
        },
        decode(Json)
    ),
    %% A stream of such a node works, and its status is the node's trouble.
    ok = stream_s3_ct_amqp:declare(Inert, ~"local"),
    ok = stream_s3_ct_amqp:publish(Inert, ~"local", {0, 10}, 100),
    ok = stream_s3_ct_amqp:consume(Inert, ~"local", {0, 10}, 100),
    [{?UNAVAILABLE, Refused}] = run(Inert, [["stream_s3_status", "local"]]),
    [has(Refused, Part) || Part <- ["The plugin is inert", "fragment_size"]].

status_of_a_stream(Config) ->
    [{0, Text}, {0, Json}] = streams(Config, both(["stream_s3_status", "shown"])),
    [
        has(Text, Part)
     || Part <- [
            "Tiered storage of stream shown in vhost /",
            "Persisted next offset",
            "Upload pipeline",
            "400"
        ]
    ],
    ?assertMatch(
        #{
            ~"stream" := ?STREAM,
            ~"vhost" := ~"/",
            ~"persisted_next_offset" := 400,
            ~"manifest_first_offset" := 0,
            ~"log_next_offset" := 400,
            ~"stalled_offset" := null,
            ~"unpersisted_bytes" := 0,
            ~"problem_kind" := ~"none",
            ~"counters" := #{}
        },
        decode(Json)
    ).

status_of_a_stream_in_another_vhost(Config) ->
    Node = proplists:get_value(broker, Config),
    Other = ~"other",
    ok = stream_s3_ct_node:rpc(Node, rabbit_vhost, add, [Other, ~"ct"]),
    %% Of the same name, so that only the vhost tells them apart.
    {new, _} = stream_s3_ct_node:rpc(Node, rabbit_amqqueue, declare, [
        stream_s3_ct_node:rpc(Node, rabbit_misc, r, [Other, queue, ?STREAM]),
        true,
        false,
        [{~"x-queue-type", longstr, ~"stream"}],
        none,
        ~"ct"
    ]),
    ok = stream_s3_ct_wait:until("the plugin knows the stream", fun() ->
        {0, Json} = tool(Node, streams, ["stream_s3_status", "--formatter", "json"]),
        maps:get(~"streams", decode(Json)) =:= 2 andalso ok
    end),
    [{0, Json}] = streams(
        Config, [["stream_s3_status", "shown", "--vhost", "other", "--formatter", "json"]]
    ),
    ?assertMatch(
        #{~"vhost" := Other, ~"persisted_next_offset" := 0, ~"log_next_offset" := 0}, decode(Json)
    ),
    ok = stream_s3_ct_node:rpc(Node, rabbit_vhost, delete, [Other, ~"ct"]).

a_stream_that_is_not_there_is_refused_by_reason(Config) ->
    Node = proplists:get_value(broker, Config),
    ok = stream_s3_ct_amqp:declare_classic(Node, ~"classic"),
    Missing = ["stream_s3_status", "missing"],
    Results = streams(Config, [
        Missing,
        Missing ++ ["--formatter", "json"],
        ["stream_s3_status", "shown", "--vhost", "nowhere"],
        ["stream_s3_status", "classic"]
    ]),
    Reasons = [
        "The stream does not exist",
        "The stream does not exist",
        "The stream does not exist",
        "The queue is not a stream"
    ],
    [
        begin
            ?assertMatch({?UNAVAILABLE, _}, Result),
            has(element(2, Result), Reason)
        end
     || {Result, Reason} <- lists:zip(Results, Reasons)
    ].

wrong_arguments_are_refused_with_the_usage(Config) ->
    Results = streams(Config, [
        ["stream_s3_status", "one", "two"],
        ["stream_s3_disable_preview", "one"],
        ["stream_s3_check_host"],
        ["stream_s3_recover"],
        ["stream_s3_list", "one"],
        ["stream_s3_status", "--no-such-option"]
    ]),
    [?assertMatch({?USAGE, _}, Result) || Result <- Results],
    [has(Output, "stream_s3_") || {_, Output} <- Results],
    [{?DATA, What}, {?DATA, As}] = streams(Config, [
        ["stream_s3_recover", "everything"],
        ["stream_s3_recover", "run", "--as", "alone"]
    ]),
    has(What, "one of list, plan, run, status"),
    has(As, "--as needs --queue or --stream-id").

the_preview_names_what_disabling_hides(Config) ->
    Floor = proplists:get_value(floor, Config),
    [{0, Text}, {0, Json}] = streams(Config, both(["stream_s3_disable_preview"])),
    Line = lists:flatten(
        io_lib:format("shown in vhost /: ~b records, offsets 0 to ~b", [Floor, Floor - 1])
    ),
    has(Text, Line),
    ?assertMatch(
        #{
            ~"streams" := [
                #{~"stream" := ?STREAM, ~"vhost" := ~"/", ~"first_offset" := 0, ~"records" := Floor}
            ]
        },
        decode(Json)
    ),
    %% Nothing is hidden on a node whose streams are whole.
    [{0, Nothing}, {0, Empty}] = run(
        proplists:get_value(inert, Config), both(["stream_s3_disable_preview"])
    ),
    has(Nothing, "every stream is whole in the local log of this node"),
    ?assertEqual(#{~"streams" => []}, decode(Empty)).

another_host_is_checked_before_an_upgrade(Config) ->
    Node = proplists:get_value(broker, Config),
    Here = filename:dirname(stream_s3_ct_node:rpc(Node, code, which, [osiris_log])),
    Damaged = filename:join(proplists:get_value(priv_dir, Config), "damaged"),
    Beam = filename:join([Damaged, "ebin", "osiris_log.beam"]),
    ok = filelib:ensure_dir(Beam),
    ok = file:write_file(Beam, ~"of another kind"),
    Paths = [Here, Damaged, filename:join(Damaged, "nowhere")],
    [Good, Unreadable, Nowhere] = streams(
        Config, [["stream_s3_check_host", Path] || Path <- Paths]
    ),
    ?assertMatch({0, _}, Good),
    has(element(2, Good), "can be hooked, tiered storage works with it"),
    ?assertMatch({?UNAVAILABLE, _}, Unreadable),
    has(element(2, Unreadable), "debug_info_unreadable"),
    ?assertMatch({?UNAVAILABLE, _}, Nowhere).

the_list_has_all_streams_and_a_verdict(Config) ->
    [{0, Text}, {0, Json}, {0, Problems}, {0, Elsewhere}] = streams(Config, [
        ["stream_s3_list"],
        ["stream_s3_list", "--formatter", "json"],
        ["stream_s3_list", "--problems"],
        ["stream_s3_list", "--vhost", "none", "--formatter", "json"]
    ]),
    has(Text, "1 streams: 1 ok, 0 with a problem, 0 not uploaded"),
    has(Text, "shown in /: ok, durable [0, 400), 0 records behind, 0 s, node command1@"),
    ?assertMatch(
        #{
            ~"streams" := [
                #{
                    ~"stream" := ~"shown",
                    ~"vhost" := ~"/",
                    ~"verdict" := ~"ok",
                    ~"persisted_next_offset" := 400,
                    ~"deletions_waiting" := 0
                }
            ]
        },
        decode(Json)
    ),
    has(Problems, "0 streams: 0 ok"),
    ?assertEqual(#{~"streams" => []}, decode(Elsewhere)),
    %% A node that does not upload says why.
    Inert = proplists:get_value(inert, Config),
    ok = stream_s3_ct_amqp:declare(Inert, ~"not-uploaded"),
    [{0, NotUploaded}] = run(Inert, [["stream_s3_list", "--problems"]]),
    has(NotUploaded, "not-uploaded in /: not uploaded, its writer's node command2@"),
    has(NotUploaded, "fragment_size").

a_recovery_shows_what_the_bucket_has(Config) ->
    Command = fun(Words) -> hd(streams(Config, [["stream_s3_recover" | Words]])) end,
    {0, None} = Command(["status"]),
    has(None, "0 streams"),
    {0, Text} = Command(["list", "--queue", ?STREAM]),
    {0, Json} = Command(["list", "--queue", ?STREAM, "--formatter", "json"]),
    {0, Last} = Command(["status"]),
    [has(T, "shown in /: in use, offsets [0, 400)") || T <- [Text, Last]],
    ?assertMatch(
        [#{~"queue" := ~"shown", ~"verdict" := ~"in_use", ~"next_offset" := 400}], decode(Json)
    ).

a_recovery_is_refused_on_an_inert_node(Config) ->
    [{?UNAVAILABLE, Text}] = run(proplists:get_value(inert, Config), [["stream_s3_recover", "run"]]),
    has(Text, "The plugin is not active on this node: see stream_s3_status").

no_secret_is_shown(Config) ->
    #{secret_key := Secret} = proplists:get_value(s3, Config),
    [Node, Inert] = [proplists:get_value(Key, Config) || Key <- [broker, inert]],
    Status = both(["stream_s3_status"]) ++ both(["stream_s3_status", "shown"]),
    Shown = run(Node, Status) ++ run(Inert, both(["stream_s3_status"])) ++
        [tool(N, ctl, ["environment"]) || N <- [Node, Inert]],
    Texts = [stream_s3_ct_node:log(N) || N <- [Node, Inert]] ++ [
        unicode:characters_to_binary(T)
     || {_, T} <- Shown
    ],
    [
        ?assertEqual(nomatch, binary:match(Text, Word))
     || Text <- Texts, Word <- [Secret, list_to_binary(?SECRET)]
    ].

%% Helpers -----------------------------------------------------------------------------------------

%% A command as text and as JSON.
both(Command) ->
    [Command, Command ++ ["--formatter", "json"]].

streams(Config, Commands) ->
    run(proplists:get_value(broker, Config), Commands).

%% Side by side: most of the time of a command is that of the tool's start.
run(Node, Commands) ->
    Running = [
        spawn_monitor(fun() -> exit({done, tool(Node, streams, Command)}) end)
     || Command <- Commands
    ],
    [
        receive
            {'DOWN', Monitor, process, Pid, {done, Result}} -> Result
        end
     || {Pid, Monitor} <- Running
    ].

decode(Json) ->
    json:decode(unicode:characters_to_binary(Json)).

has(Text, Part) ->
    string:find(Text, Part) =/= nomatch orelse ct:fail("~ts~n is not in:~n~ts", [Part, Text]).
