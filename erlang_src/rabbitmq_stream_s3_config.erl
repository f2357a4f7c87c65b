-module(rabbitmq_stream_s3_config).
-moduledoc """
Application environment to one checked map, once per start of the plugin.

Owns the checked map and the secrets, and what must hold between settings. Names, defaults and bounds
are in `rabbitmq_stream_s3_settings`. The checked map is kept without any secret; secrets are read by
`engine_config/0` for the one call that opens the engine, and what stays in the environment is
obfuscated, so that `rabbitmqctl environment` and a crash dump's environment table do not show them.
""".

-include_lib("kernel/include/logger.hrl").

-export([load/0, check/1, get/1, public/0, engine_config/0, hide_secrets/0, erase/0]).

-define(APP, rabbitmq_stream_s3).
-define(TERM, {?MODULE, checked}).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-type settings() :: #{atom() => term()}.
-doc "Checks the environment and keeps the result for `get/1`.".
-spec load() -> {ok, settings()} | {error, not_configured | {invalid, binary()}}.
load() ->
    case check(application:get_all_env(?APP)) of
        {ok, Settings} ->
            persistent_term:put(?TERM, Settings),
            {ok, Settings};
        Error ->
            Error
    end.

-spec get(atom()) -> term().
get(Key) ->
    maps:get(Key, persistent_term:get(?TERM)).

-doc "What may be shown: every setting that is not a secret; empty while none are loaded.".
-spec public() -> settings().
public() ->
    persistent_term:get(?TERM, #{}).

-spec erase() -> ok.
erase() ->
    _ = persistent_term:erase(?TERM),
    ok.

-doc "Pure: the given environment, completed and checked, without its secrets.".
-spec check([{atom(), term()}]) -> {ok, settings()} | {error, not_configured | {invalid, binary()}}.
check(Env0) ->
    Table = rabbitmq_stream_s3_settings:table(),
    Known = [Key || {Key, _, _, _} <- Table] ++ rabbitmq_stream_s3_settings:secrets(),
    {Env, Unknown} = lists:partition(fun({Key, _}) -> lists:member(Key, Known) end, Env0),
    ok = warn_unknown([Key || {Key, _} <- Unknown, not lists:member(Key, [included_applications])]),
    case proplists:get_value(bucket, Env) of
        Unset when Unset =:= undefined; Unset =:= ""; Unset =:= <<>> ->
            {error, not_configured};
        _Bucket ->
            check_all(Table, Env, #{})
    end.

check_all([], Env, Settings) ->
    check_together(Env, Settings);
check_all([{Key, _, Default, Bounds} | Table], Env, Settings) ->
    Value = proplists:get_value(Key, Env, rabbitmq_stream_s3_settings:default(Default)),
    case rabbitmq_stream_s3_settings:check(Bounds, Value) of
        {ok, Checked} ->
            check_all(Table, Env, Settings#{Key => Checked});
        {error, Expected} ->
            invalid("~ts is ~0tp, but must be ~ts", [Key, Value, Expected])
    end.

check_together(Env, #{access_key_id := KeyId} = Settings) ->
    HasSecret = proplists:get_value(secret_access_key, Env, undefined) =/= undefined,
    HasToken = proplists:get_value(session_token, Env, undefined) =/= undefined,
    case Settings of
        #{region := undefined, endpoint := undefined} ->
            invalid("neither region nor endpoint is set", []);
        _ when HasSecret, KeyId =:= undefined ->
            invalid("secret_access_key is set, access_key_id is not", []);
        _ when KeyId =/= undefined, not HasSecret ->
            invalid("access_key_id is set, secret_access_key is not", []);
        #{access_key_id := undefined} when HasToken ->
            invalid("session_token is set, access_key_id is not", []);
        #{read_ahead := Ahead, read_memory := Memory} when Ahead > Memory ->
            case proplists:is_defined(read_ahead, Env) of
                true -> invalid("read_ahead (~b) is larger than read_memory (~b)", [Ahead, Memory]);
                false -> {ok, Settings#{read_ahead := Memory}}
            end;
        _ ->
            {ok, Settings}
    end.

-doc "The map of docs/NIF_PROTOCOL.md. Holds the secrets: pass it on, keep it nowhere.".
-spec engine_config() -> map().
engine_config() ->
    Settings = persistent_term:get(?TERM),
    FromTable = #{
        EngineKey => for_engine(Key, maps:get(Key, Settings))
     || {Key, EngineKey, _, _} <- rabbitmq_stream_s3_settings:table(), EngineKey =/= shell
    },
    FromTable#{
        secret_access_key => secret(secret_access_key),
        session_token => secret(session_token),
        cluster => rabbitmq_stream_s3:utf8(rabbit_nodes:cluster_name()),
        %% Chunks are stamped by this clock, and not by the system's, which may have jumped.
        system_time_ms => erlang:system_time(millisecond)
    }.

%% Stores that are not AWS sign for any region, but for some.
for_engine(region, undefined) -> <<"us-east-1">>;
for_engine(read_cache_path, Path) -> node_folder(Path);
for_engine(_, Value) -> Value.

-doc """
Replaces plain secrets in the environment. `{obfuscated, _}`, and not the bare `{encrypted, _}`,
because RabbitMQ decrypts the latter with another key when the plugin is enabled again. Persistent,
or a reload would bring back the plain one.
""".
-spec hide_secrets() -> ok.
hide_secrets() ->
    lists:foreach(fun hide_secret/1, rabbitmq_stream_s3_settings:secrets()).

hide_secret(Key) ->
    case application:get_env(?APP, Key) of
        {ok, Value} when Value =/= undefined, not is_tuple(Value) ->
            case credentials_obfuscation:encrypt(plain(Value)) of
                {encrypted, _} = Hidden ->
                    application:set_env(?APP, Key, {obfuscated, Hidden}, [{persistent, true}]);
                _NotReady ->
                    ok
            end;
        _ ->
            ok
    end.

secret(Key) ->
    case application:get_env(?APP, Key) of
        {ok, {obfuscated, Hidden}} -> credentials_obfuscation:decrypt(Hidden);
        {ok, Value} when Value =/= undefined -> plain(Value);
        _ -> undefined
    end.

%% rabbitmq.conf gives [{password, Secret}], because that is what RabbitMQ's own debug log knows to
%% redact.
plain([{password, Secret}]) -> rabbitmq_stream_s3:utf8(Secret);
plain(Secret) -> rabbitmq_stream_s3:utf8(Secret).

%% The nodes of a machine must not delete each other's files.
node_folder(undefined) -> undefined;
node_folder(Path) -> rabbitmq_stream_s3:utf8(filename:join(Path, atom_to_binary(node()))).

invalid(Format, Args) ->
    {error, {invalid, rabbitmq_stream_s3:utf8(io_lib:format(Format, Args))}}.

warn_unknown([]) ->
    ok;
warn_unknown(Keys) ->
    ?LOG_WARNING("stream_s3: unknown settings are ignored: ~0tp", [Keys], ?DOMAIN).
