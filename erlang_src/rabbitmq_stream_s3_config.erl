-module(rabbitmq_stream_s3_config).
-moduledoc """
Application environment to one checked map, once per start of the plugin.

Owns the list of settings, their defaults and their checks. The checked map is kept without any
secret; secrets are read by `engine_config/0` for the one call that opens the engine, and what stays
in the environment is obfuscated, so that `rabbitmqctl environment` and a crash dump's environment
table do not show them.
""".

-include_lib("kernel/include/logger.hrl").

-export([load/0, check/1, get/1, public/0, engine_config/0, hide_secrets/0, erase/0, defaults/0]).

-define(TERM, {?MODULE, checked}).
-define(SECRETS, [secret_access_key, session_token]).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
%% A key is at most 1024 bytes in S3, and a stream id alone can be 540.
-define(PREFIX_BYTES_MAX, 700).
-define(KIB, 1024).
-define(MIB, (1024 * 1024)).
%% Memory of all consumers that read from the remote tier: 1/10 of the node's limit, within these bounds.
-define(READ_MEMORY_SHARE, 10).
-define(READ_MEMORY_MIN, (64 * ?MIB)).
-define(READ_MEMORY_MAX, (4_096 * ?MIB)).
-define(READ_MEMORY_UNKNOWN, (256 * ?MIB)).

-type settings() :: #{atom() => term()}.

-doc "Checks the environment and keeps the result for `get/1`.".
-spec load() -> {ok, settings()} | {error, not_configured | {invalid, binary()}}.
load() ->
    case check(application:get_all_env(rabbitmq_stream_s3)) of
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

-spec defaults() -> settings().
defaults() ->
    #{Key => Default || {Key, Default, _Check} <- table()}.

-doc "Pure: the given environment, completed and checked, without its secrets.".
-spec check([{atom(), term()}]) -> {ok, settings()} | {error, not_configured | {invalid, binary()}}.
check(Env0) ->
    Table = table(),
    Known = [Key || {Key, _, _} <- Table] ++ ?SECRETS,
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
check_all([{Key, Default, Check} | Table], Env, Settings) ->
    Value = proplists:get_value(Key, Env, Default),
    case Check(Value) of
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
    #{region := Region} = Settings = persistent_term:get(?TERM),
    #{
        bucket => maps:get(bucket, Settings),
        %% Stores that are not AWS sign for any region, but for some.
        region =>
            case Region of
                undefined -> <<"us-east-1">>;
                _ -> Region
            end,
        endpoint => maps:get(endpoint, Settings),
        path_style => maps:get(path_style, Settings),
        prefix => maps:get(prefix, Settings),
        access_key_id => maps:get(access_key_id, Settings),
        secret_access_key => secret(secret_access_key),
        session_token => secret(session_token),
        tls_ca_file => maps:get(tls_ca_file, Settings),
        tls_verify => maps:get(tls_verify, Settings),
        cluster => rabbitmq_stream_s3:utf8(rabbit_nodes:cluster_name()),
        fragment_size_bytes => maps:get(fragment_size, Settings),
        fragment_max_age_ms => maps:get(fragment_max_age_ms, Settings),
        persist_threshold => maps:get(persist_threshold, Settings),
        persist_interval_ms => maps:get(persist_interval_ms, Settings),
        rebalance_threshold => maps:get(rebalance_threshold, Settings),
        max_transfer_bytes_per_sec => maps:get(max_transfer_bytes_per_sec, Settings),
        max_transfer_burst_bytes => maps:get(max_transfer_burst_bytes, Settings),
        max_concurrent_transfers => maps:get(max_concurrent_transfers, Settings),
        max_clock_skew_ms => maps:get(max_clock_skew_ms, Settings),
        %% Chunks are stamped by this clock, and not by the system's, which may have jumped.
        system_time_ms => erlang:system_time(millisecond),
        request_timeout_ms => maps:get(request_timeout_ms, Settings),
        connect_timeout_ms => maps:get(connect_timeout_ms, Settings),
        transfer_deadline_ms => maps:get(transfer_deadline_ms, Settings),
        worker_threads => maps:get(worker_threads, Settings),
        worker_niceness => maps:get(worker_niceness, Settings),
        read_request_size_bytes => maps:get(read_request_size, Settings),
        read_ahead_bytes => maps:get(read_ahead, Settings),
        read_memory_bytes => maps:get(read_memory, Settings),
        read_cache_path => node_folder(maps:get(read_cache_path, Settings)),
        read_cache_size_bytes => maps:get(read_cache_size, Settings),
        verify_crc_on_read => maps:get(verify_crc_on_read, Settings)
    }.

-doc """
Replaces plain secrets in the environment. `{obfuscated, _}`, and not the bare `{encrypted, _}`,
because RabbitMQ decrypts the latter with another key when the plugin is enabled again. Persistent,
or a reload would bring back the plain one.
""".
-spec hide_secrets() -> ok.
hide_secrets() ->
    lists:foreach(fun hide_secret/1, ?SECRETS).

hide_secret(Key) ->
    case application:get_env(rabbitmq_stream_s3, Key) of
        {ok, Value} when Value =/= undefined, not is_tuple(Value) ->
            case credentials_obfuscation:encrypt(plain(Value)) of
                {encrypted, _} = Hidden ->
                    application:set_env(rabbitmq_stream_s3, Key, {obfuscated, Hidden}, [{persistent, true}]);
                _NotReady ->
                    ok
            end;
        _ ->
            ok
    end.

secret(Key) ->
    case application:get_env(rabbitmq_stream_s3, Key) of
        {ok, {obfuscated, Hidden}} -> credentials_obfuscation:decrypt(Hidden);
        {ok, Value} when Value =/= undefined -> plain(Value);
        _ -> undefined
    end.

%% rabbitmq.conf gives [{password, Secret}], because that is what RabbitMQ's own debug log knows to
%% redact.
plain([{password, Secret}]) -> rabbitmq_stream_s3:utf8(Secret);
plain(Secret) -> rabbitmq_stream_s3:utf8(Secret).

table() ->
    Burst = default,
    [
        {bucket, undefined, fun text/1},
        {region, undefined, fun optional_text/1},
        {endpoint, undefined, fun endpoint/1},
        {path_style, false, fun boolean/1},
        {prefix, <<"rabbitmq/stream">>, fun prefix/1},
        {access_key_id, undefined, fun optional_text/1},
        {tls_ca_file, undefined, fun optional_text/1},
        {tls_verify, true, fun always/1},
        {fragment_size, 64 * ?MIB, within(64 * ?KIB, 1024 * ?MIB)},
        {fragment_max_age_ms, 300_000, zero_or_within(1_000, 7 * 24 * 3_600_000)},
        {persist_threshold, 5, within(1, 10_000)},
        {persist_interval_ms, 2_000, within(10, 3_600_000)},
        {rebalance_threshold, 1_024, within(2, 1_024)},
        {max_transfer_bytes_per_sec, unlimited, atom_or_within(unlimited, 1, 1 bsl 50)},
        {max_transfer_burst_bytes, Burst, atom_or_within(default, 1, 1 bsl 50)},
        {max_concurrent_transfers, 8, within(1, 1_024)},
        {max_clock_skew_ms, 300_000, zero_or_within(10_000, 24 * 3_600_000)},
        {request_timeout_ms, 30_000, within(100, 3_600_000)},
        {connect_timeout_ms, 5_000, within(100, 600_000)},
        {transfer_deadline_ms, 180_000, within(1_000, 24 * 3_600_000)},
        {worker_threads, worker_threads(), within(1, 64)},
        {worker_niceness, 10, within(0, 19)},
        {read_request_size, 4 * ?MIB, within(64 * ?KIB, 256 * ?MIB)},
        {read_ahead, 128 * ?MIB, within(64 * ?KIB, 4_096 * ?MIB)},
        {read_memory, read_memory(), within(?MIB, 1 bsl 46)},
        {read_cache_path, undefined, fun optional_text/1},
        {read_cache_size, 10_240 * ?MIB, within(64 * ?MIB, 1 bsl 50)},
        {read_resolve_timeout_ms, 5_000, within(0, 600_000)},
        {read_drain_timeout_ms, 60_000, within(100, 3_600_000)},
        {verify_crc_on_read, true, fun boolean/1},
        {reconciliation_interval_ms, 60_000, within(1_000, 24 * 3_600_000)},
        {replica_lag_max_bytes, 8_192 * ?MIB, zero_or_within(?MIB, 1 bsl 50)},
        {replica_lag_max_age_ms, 600_000, zero_or_within(1_000, 7 * 24 * 3_600_000)},
        {bucket_check_interval_ms, 300_000, zero_or_within(1_000, 24 * 3_600_000)},
        {membership_enabled, false, fun boolean/1},
        {membership_interval_ms, 3_600_000, within(1_000, 7 * 24 * 3_600_000)},
        {membership_trigger_interval_ms, 10_000, within(1_000, 3_600_000)},
        {membership_auto_remove, false, fun boolean/1},
        {membership_target_group_size, 0, within(0, 255)}
    ].

%% Uploads are bound by the network; more threads would only take cores from the broker.
worker_threads() ->
    min(4, max(1, erlang:system_info(schedulers_online) div 2)).

%% A named share of what the node may use before it blocks publishers: vm_memory_high_watermark.
read_memory() ->
    Limit =
        try
            vm_memory_monitor:get_memory_limit()
        catch
            _:_ -> unknown
        end,
    case is_integer(Limit) andalso Limit > 0 of
        true -> max(?READ_MEMORY_MIN, min(?READ_MEMORY_MAX, Limit div ?READ_MEMORY_SHARE));
        false -> ?READ_MEMORY_UNKNOWN
    end.

%% The nodes of a machine must not delete each other's files.
node_folder(undefined) -> undefined;
node_folder(Path) -> rabbitmq_stream_s3:utf8(filename:join(Path, atom_to_binary(node()))).

text(Value) ->
    case optional_text(Value) of
        {ok, undefined} -> {error, "a text"};
        Other -> Other
    end.

optional_text(undefined) ->
    {ok, undefined};
optional_text(Value) when is_binary(Value), Value =/= <<>>; is_list(Value), Value =/= "" ->
    try unicode:characters_to_binary(Value) of
        Text when is_binary(Text) -> {ok, Text};
        _ -> {error, "a text in UTF-8"}
    catch
        error:badarg -> {error, "a text"}
    end;
optional_text(_) ->
    {error, "a text that is not empty"}.

endpoint(Value) ->
    maybe
        {ok, <<_, _/binary>> = Text} ?= optional_text(Value),
        Url =
            case Text of
                <<"http://", _/binary>> -> Text;
                <<"https://", _/binary>> -> Text;
                _ -> <<"https://", Text/binary>>
            end,
        #{host := <<_, _/binary>>} ?= uri_string:parse(Url),
        {ok, Url}
    else
        {ok, undefined} -> {ok, undefined};
        _ -> {error, "a URL such as https://s3.example.com or http://localhost:9000"}
    end.

prefix(Value) ->
    maybe
        {ok, <<_, _/binary>> = Prefix} ?= optional_text(Value),
        true ?= byte_size(Prefix) =< ?PREFIX_BYTES_MAX,
        {match, _} ?= re:run(Prefix, "\\A[-_.=/A-Za-z0-9]+\\z"),
        Parts = binary:split(Prefix, <<"/">>, [global]),
        [] ?= [Part || Part <- Parts, lists:member(Part, [<<>>, <<".">>, <<"..">>])],
        {ok, Prefix}
    else
        _ ->
            {error,
                "1 to 700 letters, digits, '-', '_', '.', '=' and '/', "
                "without a '/' in front, at the end or twice in a row"}
    end.

boolean(Value) when is_boolean(Value) -> {ok, Value};
boolean(_) -> {error, "true or false"}.

%% Kept as a setting so that who looks for the switch finds the answer.
always(true) -> {ok, true};
always(_) -> {error, "true: it cannot be switched off, name the store's authority in tls.ca_file"}.

within(Min, Max) ->
    fun
        (Value) when is_integer(Value), Value >= Min, Value =< Max -> {ok, Value};
        (_) -> {error, io_lib:format("an integer from ~b to ~b", [Min, Max])}
    end.

zero_or_within(Min, Max) ->
    fun
        (0) -> {ok, 0};
        (Value) when is_integer(Value), Value >= Min, Value =< Max -> {ok, Value};
        (_) -> {error, io_lib:format("0 (off) or an integer from ~b to ~b", [Min, Max])}
    end.

atom_or_within(Atom, Min, Max) ->
    fun
        (Value) when Value =:= Atom -> {ok, Atom};
        (Value) when is_integer(Value), Value >= Min, Value =< Max -> {ok, Value};
        (_) -> {error, io_lib:format("~s or an integer from ~b to ~b", [Atom, Min, Max])}
    end.

invalid(Format, Args) ->
    {error, {invalid, rabbitmq_stream_s3:utf8(io_lib:format(Format, Args))}}.

warn_unknown([]) ->
    ok;
warn_unknown(Keys) ->
    ?LOG_WARNING("stream_s3: unknown settings are ignored: ~0tp", [Keys], ?DOMAIN).
