-module(rabbitmq_stream_s3_app).
-moduledoc """
Start and stop of the plugin.

An error from here would stop the broker: RabbitMQ aborts its boot when a plugin's application does
not start. So it always starts; what stands in the way makes it *inert*: no process, no hook, one
line in the log, and the reason in the status command and in a metric. S3 being down is not in the
way. See docs/decisions/0004-inert-instead-of-refusing.md.
""".

-behaviour(application).

-include_lib("kernel/include/logger.hrl").

-export([start/2, prep_stop/1, stop/1, attach_early/0, detach/0]).

%% Before any member of a stream opens its log, and so before any listener: those of RabbitMQ itself
%% open before the applications of plugins start.
-rabbit_boot_step(
    {?MODULE, [
        {description, "tiered storage of streams"},
        {mfa, {?MODULE, attach_early, []}},
        {cleanup, {?MODULE, detach, []}},
        {requires, core_initialized},
        {enables, [rabbit_stream_coordinator, recovery]}
    ]}
).

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(INTERFACE_VERSION, 3).

-spec start(application:start_type(), term()) -> {ok, pid()}.
start(_Type, _Args) ->
    ok = rabbitmq_stream_s3_counters:init(),
    {ok, Sup} =
        case prepare() of
            ok -> start_active();
            {inert, Kind, Text} -> start_inert(Kind, Text)
        end,
    ok = rabbitmq_stream_s3_prometheus:start(),
    {ok, Sup}.

-spec prep_stop(State) -> State.
prep_stop(State) ->
    %% The hooks go in detach/0; until then, what would need the engine is unavailable.
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = rabbitmq_stream_s3_prometheus:stop(),
    State.

-doc """
RabbitMQ calls this before the application starts. Until that has an engine, a consumer whose place
may be in the remote tier waits, and is not given what is left of the local log instead. Whatever
stands in the way is said by `start/2`, which meets it again.
""".
-spec attach_early() -> ok.
attach_early() ->
    try
        maybe
            %% Not that it is inert already: a running node may start the application first.
            stopped ?= rabbitmq_stream_s3:mode(),
            %% Leaves the secrets as they are: RabbitMQ may not have decrypted them yet.
            ok ?= look(),
            ok ?= rabbitmq_stream_s3_osiris:attach()
        else
            _SaidLater -> ok
        end
    catch
        Class:Reason ->
            ?LOG_WARNING(
                "stream_s3: hooks are not attached early: ~0p", [{Class, Reason}], ?DOMAIN
            )
    end.

-doc """
RabbitMQ calls this when the plugin has stopped and before its modules are unloaded. Not done in
`prep_stop/1`: until OTP 28 the application controller waits for the stop and would wait for ever
for itself.
""".
-spec detach() -> ok.
detach() ->
    rabbitmq_stream_s3_osiris:detach().

-spec stop(term()) -> ok.
stop(_State) ->
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = rabbitmq_stream_s3:erase_mode(),
    ok = rabbitmq_stream_s3_config:erase(),
    ok = rabbitmq_stream_s3_counters:delete().

%% What can be known before anything is started.
prepare() ->
    Result = look(),
    ok = rabbitmq_stream_s3_config:hide_secrets(),
    Result.

look() ->
    maybe
        ok ?= configuration(),
        ok ?= metadata_store(),
        ok ?= native_library()
    end.

configuration() ->
    case rabbitmq_stream_s3_config:load() of
        {ok, _Settings} -> ok;
        {error, not_configured} -> {inert, no_bucket, <<"stream_s3.bucket is not set">>};
        {error, {invalid, Text}} -> {inert, invalid_configuration, Text}
    end.

metadata_store() ->
    case rabbitmq_stream_s3_db:is_available() of
        true ->
            ok;
        false ->
            {inert, khepri_disabled,
                <<"the feature flag khepri_db is not enabled; enable it and restart the plugin">>}
    end.

native_library() ->
    try rabbitmq_stream_s3_nif:interface_version() of
        ?INTERFACE_VERSION ->
            ok;
        Other ->
            {inert, native_version,
                text("the native library has interface version ~0p, this plugin needs ~b", [
                    Other, ?INTERFACE_VERSION
                ])}
    catch
        _:Reason ->
            {inert, native_library,
                text("the native library cannot be loaded: ~0p", [Reason])}
    end.

start_inert(Kind, Text) ->
    ok = become_inert(Kind, Text),
    rabbitmq_stream_s3_sup:start_link(inert).

start_active() ->
    %% The supervisor of a failed start takes its starter with it, unless that is a process of its
    %% own.
    case start_supervisor() of
        {ok, Sup} ->
            ok = attach(),
            {ok, Sup};
        {error, Reason} ->
            start_inert(start_failed, start_error(Reason))
    end.

start_supervisor() ->
    OldFlag = process_flag(trap_exit, true),
    Result = rabbitmq_stream_s3_sup:start_link(active),
    case Result of
        {error, _} ->
            receive
                {'EXIT', _Sup, _Reason} -> ok
            after 0 -> ok
            end;
        _ ->
            ok
    end,
    true = process_flag(trap_exit, OldFlag),
    Result.

attach() ->
    %% In this order: nobody may find a member's stream unknown when our readers come.
    ok = rabbitmq_stream_s3_manifest_replica:mark_members(),
    maybe
        ok ?= rabbitmq_stream_s3_osiris:attach(),
        ok = rabbitmq_stream_s3:set_mode(active),
        ok = rabbitmq_stream_s3_reconciler:reconcile(),
        #{mode := Mode} = rabbitmq_stream_s3_osiris:status(),
        ?LOG_INFO(
            "stream_s3: active, bucket ~ts, hooks of osiris: ~ts",
            [rabbitmq_stream_s3_config:get(bucket), Mode],
            ?DOMAIN
        )
    else
        {error, {Kind, Text}} ->
            ok = rabbitmq_stream_s3_sup:stop_children(),
            become_inert(Kind, Text)
    end.

become_inert(Kind, Text) ->
    ok = rabbitmq_stream_s3_osiris:detach(),
    ?LOG_WARNING("stream_s3: inert, streams are local only: ~ts (~ts)", [Text, Kind], ?DOMAIN),
    rabbitmq_stream_s3:set_mode({inert, Kind, Text}).

start_error({shutdown, {failed_to_start_child, _, {engine_open_failed, Kind, Text}}}) ->
    text("the native engine cannot be opened (~ts): ~ts", [Kind, Text]);
start_error(Reason) ->
    text("~0p", [Reason]).

text(Format, Args) ->
    rabbitmq_stream_s3:utf8(io_lib:format(Format, Args)).
