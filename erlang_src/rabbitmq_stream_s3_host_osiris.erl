-module(rabbitmq_stream_s3_host_osiris).
-moduledoc """
Owns the way into osiris. Attaches the plugin's hooks to the osiris of the running node and
detaches them. Uses osiris' own hooks where they exist; otherwise adds them to the loaded
osiris_log from its abstract code, at most once in the life of a node; and likewise the answers to
osiris' statistics.

Does not own what the wrappers look like (rabbitmq_stream_s3_host_forms), what they call
(rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader).
""".

-export([attach/1, detach/0, detach/1, status/0]).
-export([members/0, has_member/1, member/1]).
-export([instrumented/1, called/0, missing_callbacks/1]).

-include_lib("kernel/include/logger.hrl").

-type reason() ::
    osiris_missing
    | debug_info_unreadable
    | changed_on_disk
    | restart_needed
    | unknown_shape
    | compile_failed
    | load_failed.

-type member() ::
    {pid(), file:filename_all(), osiris:name(), atomics:atomics_ref(), Reference :: term()}.

%% How long detach/1 waits for processes that are inside the plugin's modules.
-define(LEAVE_MS, 5_000).
-define(LEAVE_POLL_MS, 10).

-type kept() ::
    none
    | all
    | #{rabbitmq_stream_s3:stream_id() => {osiris:offset(), osiris:timestamp()}}.
%% Functions whose answers rabbitmq_stream_s3_reader_stats completes.
-type statistics() :: [{module(), [{atom(), arity()}]}].
-export_type([kept/0, statistics/0]).

-doc """
Attaches the hooks. Idempotent. On an error the running osiris is as it was, and the text says
what was found. `restart_needed` alone may leave hooks attached: those of another version of the
plugin, if they call nothing that is not here. They are good enough to protect (see status/0).
""".
-spec attach(statistics()) -> ok | {error, {reason(), binary()}}.
attach(Statistics) ->
    %% Two callers must not both load.
    global:trans({?MODULE, self()}, fun() -> attach_locked(Statistics) end, [node()]).

-doc "Unsets the hooks. The added code stays and then behaves as stock; open readers stay ours.".
-spec detach() -> ok.
detach() ->
    detach(none).

-doc """
As detach/0, before the plugin's modules go: until the hooks are attached again no snapshot drops a
stored offset that is kept, and nobody is inside the modules when this returns.
""".
-spec detach(kept()) -> ok.
detach(Kept) ->
    ok = keep(Kept),
    ok = application:unset_env(osiris, log_hooks),
    ok = application:unset_env(osiris, log_reader),
    wait_until_left().

-doc "How this node is hooked, for the status command.".
-spec status() -> #{mode := native | instrumented | untouched, attached := boolean()}.
status() ->
    Mode =
        case {native(), installed_version(osiris_log)} of
            {true, _} -> native;
            {false, none} -> untouched;
            {false, _} -> instrumented
        end,
    Attached = application:get_env(osiris, log_reader) =:= {ok, rabbitmq_stream_s3_log_reader},
    #{mode => Mode, attached => Attached}.

-doc "Members whose log is open on this node, from the table that osiris keeps for readers.".
-spec members() -> [member()].
members() ->
    try
        [
            {Pid, Dir, Name, Shared, Reference}
         || {Pid, Dir, Name, Shared, Reference, _ReadersCounterFun} <-
                ets:tab2list(osiris_reader_context_cache)
        ]
    catch
        %% Osiris is not there, or does it in another way.
        error:badarg -> []
    end.

-doc "Whether the log that is shared by these atomics belongs to one of them.".
-spec has_member(atomics:atomics_ref()) -> boolean().
has_member(Shared) ->
    member(Shared) =/= none.

-doc "The member whose log is shared by these atomics.".
-spec member(atomics:atomics_ref()) -> {ok, pid()} | none.
member(Shared) ->
    try ets:match(osiris_reader_context_cache, {'$1', '_', '_', Shared, '_', '_'}) of
        [[Pid] | _] -> {ok, Pid};
        [] -> none
    catch
        error:badarg -> none
    end.

attach_locked(Statistics) ->
    %% Wrappers call these by name; a node in interactive mode may not have them loaded yet.
    Entries = [
        rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader, rabbitmq_stream_s3_reader_drain
    ],
    _ = [code:ensure_loaded(Entry) || Entry <- Entries],
    ok = rabbitmq_stream_s3_host_retention:init(),
    maybe
        {module, _} ?= code:ensure_loaded(osiris_log),
        ok ?= neighbours(),
        ok ?= install(native(), installed_version(osiris_log)),
        ok = install_statistics(Statistics),
        ok = install_drain(),
        hook()
    else
        {error, {restart_needed, [Installed], Text}} ->
            ok =
                case calls_are_here(Installed) of
                    true -> hook();
                    false -> detach()
                end,
            {error, {restart_needed, unicode:characters_to_binary(Text)}};
        {error, {Reason, Text}} when is_atom(Reason) ->
            {error, {Reason, unicode:characters_to_binary(Text)}};
        {error, What} ->
            {error, {osiris_missing, format("osiris_log cannot be loaded: ~p", [What])}}
    end.

hook() ->
    ok = application:set_env(osiris, log_reader, rabbitmq_stream_s3_log_reader),
    ok = application:set_env(osiris, log_hooks, rabbitmq_stream_s3_hooks),
    keep(none).

keep(none) ->
    _ = persistent_term:erase(rabbitmq_stream_s3_host_detached_forms:kept_key()),
    ok;
keep(Kept) ->
    persistent_term:put(rabbitmq_stream_s3_host_detached_forms:kept_key(), Kept).

calls_are_here(Version) ->
    case
        rabbitmq_stream_s3_host_forms:calls_of(Version, osiris_log:module_info(attributes))
    of
        {ok, Calls} ->
            lists:all(fun({M, F, A}) -> erlang:function_exported(M, F, A) end, Calls);
        unknown ->
            false
    end.

%% RabbitMQ unloads one module after the other: who is between two of them would crash. First those
%% have to come in who have looked before the hooks were unset.
wait_until_left() ->
    Modules =
        case application:get_key(rabbitmq_stream_s3, modules) of
            {ok, All} -> All;
            undefined -> [rabbitmq_stream_s3_hooks, rabbitmq_stream_s3_log_reader]
        end,
    ok = timer:sleep(?LEAVE_POLL_MS),
    Deadline = erlang:monotonic_time(millisecond) + ?LEAVE_MS,
    wait_until_left(lists:delete(self(), processes()), Modules, Deadline).

wait_until_left(Processes, Modules, Deadline) ->
    Inside = [Pid || Pid <- Processes, is_inside(Pid, Modules)],
    case Inside =:= [] orelse erlang:monotonic_time(millisecond) >= Deadline of
        true ->
            ok;
        false ->
            ok = timer:sleep(?LEAVE_POLL_MS),
            wait_until_left(Inside, Modules, Deadline)
    end.

is_inside(Pid, Modules) ->
    case erlang:process_info(Pid, current_stacktrace) of
        {_, Frames} -> lists:any(fun({M, _, _, _}) -> lists:member(M, Modules) end, Frames);
        undefined -> false
    end.

native() ->
    code:which(osiris_log_hooks) =/= non_existing andalso
        code:which(osiris_log_reader) =/= non_existing.

installed_version(Module) ->
    case code:is_loaded(Module) of
        false ->
            none;
        {file, _} ->
            proplists:get_value(rabbitmq_stream_s3, Module:module_info(attributes), none)
    end.

install(true, _) ->
    Wanted = [{B, B:behaviour_info(callbacks)} || B <- [osiris_log_hooks, osiris_log_reader]],
    case missing_callbacks(Wanted) of
        [] -> ok;
        Missing -> {error, {unknown_shape, format("osiris wants unknown callbacks: ~p", [Missing])}}
    end;
install(false, none) ->
    maybe
        {ok, File, Forms} ?= abstract_code(osiris_log),
        {ok, Binary} ?= instrumented(Forms),
        ok ?= load(osiris_log, File, Binary),
        ?LOG_INFO("stream_s3: added hooks to the running osiris_log (~ts)", [File]),
        ok
    end;
install(false, [Installed]) ->
    case rabbitmq_stream_s3_host_forms:version() of
        Installed ->
            ok;
        Wanted ->
            {error,
                {restart_needed, [Installed],
                    format("osiris_log carries hooks of version ~p, this plugin needs ~p", [
                        Installed, Wanted
                    ])}}
    end.

%% Statistics are no part of reading and writing: without them the plugin works, and an osiris of
%% another shape tells of its local log, as stock does.
install_statistics(Statistics) ->
    lists:foreach(
        fun({Module, Functions}) ->
            case {code:ensure_loaded(Module), installed_version(Module)} of
                {{module, _}, none} ->
                    install_statistics(Module, Functions);
                _ ->
                    ok
            end
        end,
        Statistics
    ).

install_statistics(Module, Functions) ->
    Result =
        maybe
            {ok, File, Forms} ?= abstract_code(Module),
            {ok, Wrapped} ?= rabbitmq_stream_s3_host_forms:wrap_answers(rabbitmq_stream_s3, Functions, Forms),
            {ok, Binary} ?= compiled(Module, Wrapped),
            load(Module, File, Binary)
        end,
    case Result of
        ok ->
            ok;
        {error, {_, Text}} ->
            ?LOG_WARNING(
                "stream_s3: the statistics of ~s count the local log only, not the remote tier: ~ts",
                [Module, Text]
            )
    end.

%% Nor is this: without it a receiver that drains may be told too early that there is nothing more.
install_drain() ->
    Module = rabbit_stream_queue,
    case {code:ensure_loaded(Module), installed_version(Module)} of
        {{module, _}, none} ->
            Result =
                maybe
                    {ok, File, Forms} ?= abstract_code(Module),
                    {ok, Wrapped} ?= rabbitmq_stream_s3_host_forms:wrap_drain(rabbitmq_stream_s3, Forms),
                    {ok, Binary} ?= compiled(Module, Wrapped),
                    load(Module, File, Binary)
                end,
            case Result of
                ok ->
                    ok;
                {error, {_, Text}} ->
                    ?LOG_WARNING(
                        "stream_s3: a draining AMQP 1.0 receiver may be answered before it has read what is "
                        "in the remote tier: ~ts",
                        [Text]
                    )
            end;
        _ ->
            ok
    end.

-doc false.
-spec missing_callbacks([{module(), [{atom(), arity()}]}]) -> [{module(), {atom(), arity()}}].
missing_callbacks(Wanted) ->
    %% A callback that we do not export would crash a log when it is first called.
    Ours = #{
        osiris_log_hooks => rabbitmq_stream_s3_hooks,
        osiris_log_reader => rabbitmq_stream_s3_log_reader
    },
    [
        {Behaviour, Callback}
     || {Behaviour, Callbacks} <- Wanted,
        Callback <- Callbacks,
        not lists:member(Callback, (maps:get(Behaviour, Ours)):module_info(exports))
    ].

-doc "What log reader and hooks call outside osiris_log.".
-spec called() -> [mfa()].
called() ->
    [
        {osiris_log_shared, first_chunk_id, 1},
        {osiris_log_shared, last_chunk_id, 1},
        {osiris_log_shared, committed_chunk_id, 1},
        {osiris_log_shared, set_first_chunk_id, 2},
        {osiris_counters, delete, 1},
        {osiris_bloom, init_matcher, 1},
        {osiris_bloom, is_match, 2},
        {osiris_retention, eval, 4}
    ].

neighbours() ->
    Calls = called(),
    _ = [code:ensure_loaded(M) || {M, _, _} <- Calls],
    case [MFA || {M, F, A} = MFA <- Calls, not erlang:function_exported(M, F, A)] of
        [] -> ok;
        Missing -> {error, {unknown_shape, format("osiris lacks ~p", [Missing])}}
    end.

abstract_code(Module) ->
    case code:get_object_code(Module) of
        error ->
            {error, {debug_info_unreadable, format("no ~s.beam in the code path", [Module])}};
        {Module, Binary, File} ->
            {ok, {Module, Md5}} = beam_lib:md5(Binary),
            case Module:module_info(md5) of
                Md5 -> abstract_code(Module, File, Binary);
                _ -> {error, {changed_on_disk, [File, format(" is not the ~s that runs", [Module])]}}
            end
    end.

abstract_code(Module, File, Binary) ->
    case beam_lib:chunks(Binary, [abstract_code]) of
        {ok, {Module, [{abstract_code, {raw_abstract_v1, Forms}}]}} -> {ok, File, Forms};
        _ -> {error, {debug_info_unreadable, [File, " has no debug info"]}}
    end.

-doc false.
-spec instrumented(rabbitmq_stream_s3_host_forms:forms()) ->
    {ok, binary()} | {error, {reason(), unicode:chardata()}}.
instrumented(Forms) ->
    case rabbitmq_stream_s3_host_forms:instrument(rabbitmq_stream_s3, Forms) of
        {ok, Hooked} ->
            compiled(osiris_log, Hooked);
        {error, Problems} ->
            {error, {unknown_shape, ["osiris_log: ", lists:join(", ", Problems)]}}
    end.

compiled(Module, Forms) ->
    case compile:forms(Forms, [return_errors]) of
        {ok, Module, Binary} -> {ok, Binary};
        Failed -> {error, {compile_failed, format("~s: ~p", [Module, Failed])}}
    end.

load(Module, File, Binary) ->
    %% Loading turns the stock code into old code and drops what is old now; a process that still
    %% runs older code would be killed, so leave it alone then.
    case erlang:check_old_code(Module) =:= false orelse code:soft_purge(Module) of
        true ->
            case code:load_binary(Module, File, Binary) of
                {module, Module} -> ok;
                {error, What} -> {error, {load_failed, format("~s: ~p", [Module, What])}}
            end;
        false ->
            {error, {restart_needed, format("processes still run an older ~s", [Module])}}
    end.

format(Format, Args) ->
    io_lib:format(Format, Args).
