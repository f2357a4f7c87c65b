-module(rabbitmq_stream_s3_settings).
-moduledoc """
The table of settings: names, defaults, bounds, and what a value may be.

Owns what each setting may be on its own. The schema of rabbitmq.conf, the engine's own table and
docs/CONFIGURATION.md are compared with it (scripts/check-settings). Does not own where values come from,
nor what must hold between two of them: `rabbitmq_stream_s3_config` does.
""".

-export([table/0, secrets/0, defaults/0, default/1, check/2]).

-export_type([row/0]).

-define(SECRETS, [secret_access_key, session_token]).
%% A key is at most 1024 bytes in S3, and a stream id alone can be 540.
-define(PREFIX_BYTES_MAX, 700).
-define(KIB, 1024).
-define(MIB, (1024 * 1024)).
%% Memory of all consumers that read from the remote tier: 1/10 of the node's limit, within these bounds.
-define(READ_MEMORY_SHARE, 10).
-define(READ_MEMORY_MIN, (64 * ?MIB)).
-define(READ_MEMORY_MAX, (4_096 * ?MIB)).
-define(READ_MEMORY_UNKNOWN, (256 * ?MIB)).

-type bounds() ::
    text
    | optional_text
    | endpoint
    | prefix
    | boolean
    | only_true
    | {within, Min :: integer(), Max :: integer()}
    %% 0 switches it off.
    | {off_or_within, Min :: integer(), Max :: integer()}
    | {atom_or_within, atom(), Min :: integer(), Max :: integer()}.
%% `node`: computed on the node that reads it.
-type default() :: {value, term()} | {node, fun(() -> term())}.
%% Name in the environment, name in the engine's map (`shell`: the engine does not get it).
-type row() :: {Key :: atom(), EngineKey :: atom(), default(), bounds()}.

-doc "Every setting that is not a secret, in the order of docs/CONFIGURATION.md.".
-spec table() -> [row()].
table() ->
    Text = {value, undefined},
    [
        {bucket, bucket, Text, text},
        {region, region, Text, optional_text},
        {endpoint, endpoint, Text, endpoint},
        {path_style, path_style, {value, false}, boolean},
        {prefix, prefix, {value, <<"rabbitmq/stream">>}, prefix},
        {access_key_id, access_key_id, Text, optional_text},
        {tls_ca_file, tls_ca_file, Text, optional_text},
        {tls_verify, shell, {value, true}, only_true},
        {fragment_size, fragment_size_bytes, {value, 64 * ?MIB}, {within, 64 * ?KIB, 1024 * ?MIB}},
        {fragment_max_age_ms, fragment_max_age_ms, {value, 300_000},
            {off_or_within, 1_000, 7 * 24 * 3_600_000}},
        {persist_threshold, persist_threshold, {value, 5}, {within, 1, 10_000}},
        {persist_interval_ms, persist_interval_ms, {value, 2_000}, {within, 10, 3_600_000}},
        {rebalance_threshold, rebalance_threshold, {value, 1_024}, {within, 2, 1_024}},
        {max_transfer_bytes_per_sec, max_transfer_bytes_per_sec, {value, unlimited},
            {atom_or_within, unlimited, 1, 1 bsl 50}},
        {max_transfer_burst_bytes, max_transfer_burst_bytes, {value, default},
            {atom_or_within, default, 1, 1 bsl 50}},
        {max_concurrent_transfers, max_concurrent_transfers, {value, 8}, {within, 1, 1_024}},
        {max_clock_skew_ms, max_clock_skew_ms, {value, 300_000},
            {off_or_within, 10_000, 24 * 3_600_000}},
        {request_timeout_ms, request_timeout_ms, {value, 30_000}, {within, 100, 3_600_000}},
        {connect_timeout_ms, connect_timeout_ms, {value, 5_000}, {within, 100, 600_000}},
        {transfer_deadline_ms, transfer_deadline_ms, {value, 180_000},
            {within, 1_000, 24 * 3_600_000}},
        {worker_threads, worker_threads, {node, fun worker_threads/0}, {within, 1, 64}},
        {worker_niceness, worker_niceness, {value, 10}, {within, 0, 19}},
        {read_request_size, read_request_size_bytes, {value, 4 * ?MIB},
            {within, 64 * ?KIB, 256 * ?MIB}},
        {read_ahead, read_ahead_bytes, {value, 128 * ?MIB}, {within, 64 * ?KIB, 4_096 * ?MIB}},
        {read_memory, read_memory_bytes, {node, fun read_memory/0}, {within, ?MIB, 1 bsl 46}},
        {read_cache_path, read_cache_path, Text, optional_text},
        {read_cache_size, read_cache_size_bytes, {value, 10_240 * ?MIB},
            {within, 64 * ?MIB, 1 bsl 50}},
        {read_resolve_timeout_ms, shell, {value, 5_000}, {within, 0, 600_000}},
        {read_drain_timeout_ms, shell, {value, 60_000}, {within, 100, 3_600_000}},
        {verify_crc_on_read, verify_crc_on_read, {value, true}, boolean},
        {reconciliation_interval_ms, shell, {value, 60_000}, {within, 1_000, 24 * 3_600_000}},
        {delete_grace_ms, shell, {value, 0}, {within, 0, 30 * 24 * 3_600_000}},
        {replica_lag_max_bytes, shell, {value, 8_192 * ?MIB}, {off_or_within, ?MIB, 1 bsl 50}},
        {replica_lag_max_age_ms, shell, {value, 600_000},
            {off_or_within, 1_000, 7 * 24 * 3_600_000}},
        {bucket_check_interval_ms, shell, {value, 300_000}, {off_or_within, 1_000, 24 * 3_600_000}},
        {membership_enabled, shell, {value, false}, boolean},
        {membership_interval_ms, shell, {value, 3_600_000}, {within, 1_000, 7 * 24 * 3_600_000}},
        {membership_trigger_interval_ms, shell, {value, 10_000}, {within, 1_000, 3_600_000}},
        {membership_auto_remove, shell, {value, false}, boolean},
        {membership_target_group_size, shell, {value, 0}, {within, 0, 255}}
    ].

-doc "Settings whose values are never shown. They have no row: text, no default.".
-spec secrets() -> [atom()].
secrets() -> ?SECRETS.

-doc "The value of each setting that is not set.".
-spec defaults() -> #{atom() => term()}.
defaults() ->
    #{Key => default(Default) || {Key, _, Default, _} <- table()}.

-doc "The value of a setting that is not set.".
-spec default(default()) -> term().
default({value, Value}) -> Value;
default({node, Compute}) -> Compute().

-doc "The value as the plugin uses it, or what it must be, for a person to read.".
-spec check(bounds(), term()) -> {ok, term()} | {error, iodata()}.
check(text, Value) ->
    text(Value);
check(optional_text, Value) ->
    optional_text(Value);
check(endpoint, Value) ->
    endpoint(Value);
check(prefix, Value) ->
    prefix(Value);
check(boolean, Value) ->
    value_if(is_boolean(Value), Value, "true or false", []);
check(only_true, Value) ->
    %% Kept as a setting so that someone who looks for the switch finds the answer.
    Expected = "true: it cannot be switched off, name the store's authority in tls.ca_file",
    value_if(Value =:= true, Value, Expected, []);
check({within, Min, Max}, Value) ->
    value_if(within(Value, Min, Max), Value, "an integer from ~b to ~b", [Min, Max]);
check({off_or_within, Min, Max}, Value) ->
    Fits = Value =:= 0 orelse within(Value, Min, Max),
    value_if(Fits, Value, "0 (off) or an integer from ~b to ~b", [Min, Max]);
check({atom_or_within, Atom, Min, Max}, Value) ->
    Fits = Value =:= Atom orelse within(Value, Min, Max),
    value_if(Fits, Value, "~s or an integer from ~b to ~b", [Atom, Min, Max]).

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

value_if(true, Value, _, _) -> {ok, Value};
value_if(false, _, Expected, Args) -> {error, io_lib:format(Expected, Args)}.

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

within(Value, Min, Max) -> is_integer(Value) andalso Value >= Min andalso Value =< Max.
