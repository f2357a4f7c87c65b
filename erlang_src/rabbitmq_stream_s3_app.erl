-module(rabbitmq_stream_s3_app).
-moduledoc """
Start and stop of the plugin.

An error from here would stop the broker: RabbitMQ aborts its boot when a plugin's application does
not start. So it always starts; what stands in the way makes it *inert*: nothing is uploaded,
trimmed or read from S3, and streams that have history there are protected (the hooks are attached,
if this osiris can be hooked at all). One line in the log, and the reason in the status command and
in a metric. S3 being down is not in the way. See docs/decisions/0004-inert-instead-of-refusing.md.
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
-define(INTERFACE_VERSION, 5).
%% What prep_stop/1 has seen, for detach/0, if that follows: persistent, because the process ends.
-define(SEEN, {?MODULE, seen}).

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
    %% The hooks go in detach/0; until then, what would need the engine is unavailable. Tables that
    %% say what that hides go before.
    Seen = {rabbitmq_stream_s3_status_hidden:streams(), rabbitmq_stream_s3_status_hidden:kept()},
    ok = persistent_term:put(?SEEN, Seen),
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = rabbitmq_stream_s3_prometheus:stop(),
    State.

-doc """
RabbitMQ calls this before the application starts. Until that has an engine, a consumer whose place
may be in the remote tier waits, and is not given what is left of the local log instead: whatever is
wrong with the plugin, which `start/2` finds out and says.
""".
-spec attach_early() -> ok.
attach_early() ->
    try
        maybe
            %% Not that it is inert already: a running node may start the application first.
            stopped ?= rabbitmq_stream_s3:mode(),
            ok ?= metadata_store(),
            ok ?= rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped())
        else
            _SaidLater -> ok
        end
    catch
        Class:Reason ->
            ?LOG_WARNING(
                "stream_s3: the hooks could not be attached before the first log was opened: ~0p. They"
                " are attached when the plugin starts",
                [{Class, Reason}],
                ?DOMAIN
            )
    end.

-doc """
RabbitMQ calls this when the plugin is disabled: it has stopped, and its modules are unloaded next.
Not when the node stops. Not done in `prep_stop/1`: until OTP 28 the application controller waits for
the stop and would wait for ever for itself.
""".
-spec detach() -> ok.
detach() ->
    {Hidden, Kept} =
        case persistent_term:get(?SEEN, none) of
            {_, _} = Seen -> Seen;
            %% It has ended by itself.
            none -> {[], rabbitmq_stream_s3_status_hidden:kept()}
        end,
    _ = persistent_term:erase(?SEEN),
    ok = rabbitmq_stream_s3_host_osiris:detach(Kept),
    case rabbitmq_stream_s3_status_hidden:text(Hidden) of
        none ->
            ok;
        Text ->
            ?LOG_WARNING(
                "stream_s3: disabled on this node, until it is enabled again ~ts. Consumers that are "
                "there now wait. Stored offsets below the local log are kept while this node runs",
                [Text],
                ?DOMAIN
            )
    end.

-spec stop(term()) -> ok.
stop(_State) ->
    ok = rabbitmq_stream_s3:erase_engine(),
    ok = rabbitmq_stream_s3:erase_mode(),
    ok = rabbitmq_stream_s3_config:erase(),
    ok = rabbitmq_stream_s3_counters:delete().

%% What can be known before anything is started.
prepare() ->
    Result =
        maybe
            ok ?= configuration(),
            ok ?= metadata_store(),
            ok ?= native_library()
        end,
    ok = rabbitmq_stream_s3_config:hide_secrets(),
    Result.

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
    {ok, Sup} = rabbitmq_stream_s3_sup:start_link(inert),
    ok = become_inert(Kind, Text, protect()),
    {ok, Sup}.

%% Whether streams that have history in S3 are protected now.
protect() ->
    case metadata_store() of
        ok ->
            case rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()) of
                ok ->
                    ok;
                {error, {_, Text}} ->
                    case rabbitmq_stream_s3_host_osiris:status() of
                        #{attached := true} -> ok;
                        #{} -> {error, Text}
                    end
            end;
        {inert, _, _} ->
            %% There is no pointer, and what was attached early is in nobody's way.
            ok = rabbitmq_stream_s3_host_osiris:detach()
    end.

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
        ok ?= rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()),
        ok = rabbitmq_stream_s3:set_mode(active),
        ok = rabbitmq_stream_s3_reconciler:reconcile(),
        #{mode := Mode} = rabbitmq_stream_s3_host_osiris:status(),
        ?LOG_INFO(
            "stream_s3: active, bucket ~ts, hooks of osiris: ~ts",
            [rabbitmq_stream_s3_config:get(bucket), Mode],
            ?DOMAIN
        )
    else
        {error, {Kind, Text}} ->
            ok = rabbitmq_stream_s3_sup:become_inert(),
            become_inert(Kind, Text, protect())
    end.

become_inert(Kind, Text, Protection) ->
    ok = rabbitmq_stream_s3:set_mode({inert, Kind, Text}),
    ?LOG_WARNING(
        "stream_s3: inert, nothing is uploaded to S3 or read from it: ~ts (~ts). ~ts. ~ts",
        [Text, Kind, meaning(Protection), rabbitmq_stream_s3_status:advice(Kind)],
        ?DOMAIN
    ).

meaning(ok) ->
    "Streams that have history in S3 are protected: consumers wait for what the local log does not "
    "have, stored offsets are kept";
meaning({error, Text}) ->
    [
        "Streams that have history in S3 are not protected, since osiris cannot be hooked (",
        Text,
        "): consumers are given what is left of the local log"
    ].

start_error({shutdown, {failed_to_start_child, _, {engine_open_failed, Kind, Text}}}) ->
    text("the native engine cannot be opened (~ts): ~ts", [Kind, Text]);
start_error(Reason) ->
    text("~0p", [Reason]).

text(Format, Args) ->
    rabbitmq_stream_s3:utf8(io_lib:format(Format, Args)).
