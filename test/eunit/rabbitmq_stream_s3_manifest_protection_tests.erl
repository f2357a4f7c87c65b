%% Which streams are protected while the plugin does not work, with a metadata store that answers,
%% is behind, or does not answer.
-module(rabbitmq_stream_s3_manifest_protection_tests).
-include_lib("eunit/include/eunit.hrl").

-define(PROTECTION, rabbitmq_stream_s3_manifest_protection).
-define(DB, rabbitmq_stream_s3_db).

protection_test_() ->
    {foreach, fun setup/0, fun cleanup/1, [
        fun(_) -> {atom_to_list(name(T)), T} end
     || T <- [
            fun all_streams_are_while_the_plugin_is_not_inert/0,
            fun none_is_without_khepri/0,
            fun those_that_have_a_pointer_are/0,
            fun the_unknown_is/0,
            fun a_copy_alone_says_only_who_is/0,
            fun a_member_that_starts_is_looked_up/0,
            fun a_deleted_stream_is_not_any_more/0
        ]
    ]}.

name(Test) ->
    {name, Name} = erlang:fun_info(Test, name),
    Name.

setup() ->
    ok = rabbitmq_stream_s3:set_mode({inert, no_bucket, <<"why">>}),
    ?MODULE = ets:new(?MODULE, [named_table, public]),
    ok = answers({error, timeout}, {error, unavailable}),
    load(),
    ok = logger:set_primary_config(level, none).

cleanup(_) ->
    ok = logger:set_primary_config(level, notice),
    _ = [gen_server:stop(?PROTECTION) || whereis(?PROTECTION) =/= undefined],
    ok = rabbitmq_stream_s3:erase_mode(),
    true = ets:delete(?MODULE),
    _ = code:purge(?DB),
    _ = code:delete(?DB),
    _ = code:purge(?DB).

%% A metadata store: what a quorum and what this node's copy says.
load() ->
    Text = [
        "-module(rabbitmq_stream_s3_db).",
        "-export([list/0, list_consistent/0]).",
        "list() -> ets:lookup_element(rabbitmq_stream_s3_manifest_protection_tests, copy, 2).",
        "list_consistent() ->"
        "    case ets:take(rabbitmq_stream_s3_manifest_protection_tests, during) of"
        "        [{during, Fun}] -> Fun(); [] -> ok end,"
        "    ets:lookup_element(rabbitmq_stream_s3_manifest_protection_tests, quorum, 2)."
    ],
    Forms = [form(Line) || Line <- Text],
    {ok, ?DB, Binary} = compile:forms(Forms),
    _ = code:purge(?DB),
    {module, ?DB} = code:load_binary(?DB, "double", Binary).

form(Line) ->
    {ok, Tokens, _} = erl_scan:string(lists:flatten(Line)),
    {ok, Form} = erl_parse:parse_form(Tokens),
    Form.

answers(Quorum, Copy) ->
    true = ets:insert(?MODULE, [{quorum, Quorum}, {copy, Copy}]),
    ok.

pointers(Ids) ->
    {ok, #{Id => {1, 2, 3} || Id <- Ids}}.

%% Answers when it has looked.
look() ->
    ?PROTECTION ! look,
    _ = sys:get_state(?PROTECTION),
    ok.

start() ->
    {ok, Pid} = ?PROTECTION:start_link(),
    true = unlink(Pid),
    look().

protected(Ids) ->
    [Id || Id <- Ids, ?PROTECTION:is_protected(Id)].

all_streams_are_while_the_plugin_is_not_inert() ->
    ok = rabbitmq_stream_s3:erase_mode(),
    ?assert(?PROTECTION:is_protected(<<"a">>)),
    ok = rabbitmq_stream_s3:set_mode(active),
    ?assert(?PROTECTION:is_protected(<<"a">>)),
    ?assertEqual(off, ?PROTECTION:overview()).

none_is_without_khepri() ->
    ok = rabbitmq_stream_s3:set_mode({inert, khepri_disabled, <<"why">>}),
    ?assertNot(?PROTECTION:is_protected(<<"a">>)).

those_that_have_a_pointer_are() ->
    ok = answers(pointers([<<"a">>, <<"b">>]), pointers([])),
    ok = start(),
    ?assertEqual([<<"a">>, <<"b">>], protected([<<"a">>, <<"b">>, <<"c">>])),
    ?assertEqual({complete, 2}, ?PROTECTION:overview()).

the_unknown_is() ->
    %% Nobody has looked; nobody is there to look.
    ?assert(?PROTECTION:is_protected(<<"a">>)),
    ok = start(),
    ?assertEqual([<<"a">>], protected([<<"a">>])),
    ?assertEqual({incomplete, 0}, ?PROTECTION:overview()).

a_copy_alone_says_only_who_is() ->
    ok = answers({error, timeout}, pointers([<<"a">>])),
    ok = start(),
    ?assertEqual([<<"a">>, <<"b">>], protected([<<"a">>, <<"b">>])),
    ?assertEqual({incomplete, 1}, ?PROTECTION:overview()),
    ok = answers(pointers([<<"a">>]), pointers([])),
    ok = look(),
    ?assertEqual([<<"a">>], protected([<<"a">>, <<"b">>])),
    %% What was known stays so when the store fails.
    ok = answers({error, timeout}, {error, timeout}),
    ok = look(),
    ?assertEqual([<<"a">>], protected([<<"a">>, <<"b">>])).

a_member_that_starts_is_looked_up() ->
    ok = answers(pointers([]), pointers([])),
    ok = start(),
    ?assertEqual([], protected([<<"a">>, <<"b">>])),
    ok = ?PROTECTION:member_started(<<"a">>),
    ?assertEqual([<<"a">>], protected([<<"a">>, <<"b">>])),
    %% One that starts while the store is read is not answered by it.
    true = ets:insert(?MODULE, {during, fun() -> ok = ?PROTECTION:member_started(<<"b">>) end}),
    ok = look(),
    ?assertEqual([<<"b">>], protected([<<"a">>, <<"b">>])),
    ok = answers(pointers([<<"b">>]), pointers([])),
    ok = look(),
    ?assertEqual([<<"b">>], protected([<<"a">>, <<"b">>])),
    ?assertEqual({complete, 1}, ?PROTECTION:overview()).

a_deleted_stream_is_not_any_more() ->
    ok = answers(pointers([<<"a">>, <<"b">>]), pointers([])),
    ok = start(),
    ok = answers(pointers([<<"b">>]), pointers([])),
    ok = look(),
    ?assertEqual([<<"b">>], protected([<<"a">>, <<"b">>])).
