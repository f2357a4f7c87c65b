-module(rabbitmq_stream_s3_hooks).
-moduledoc """
Owns what happens inside an osiris process when a log opens, when its retention changes and
when retention is evaluated. Runs in processes that must never wait or fail because of us: every
hook swallows its own errors, says so in the log, and only sends casts.

Does not own the readers of streams (rabbitmq_stream_s3_reconciler starts them), the deletion
of segments (rabbitmq_stream_s3_host_retention).
""".

%% called by the wrappers in osiris_log
-export([empty_log/1, on_init/3, on_update_retention/2, evaluate_retention/2]).
-export([first_offset/2, first_timestamp/2]).

-include_lib("kernel/include/logger.hrl").

-type member() :: writer | acceptor.
-export_type([member/0]).

-doc """
The log of a writer is empty. The offset at which it has to begin: the end of what is durable, or 0 if
nothing is. If that cannot be found out the writer ends, and the coordinator starts the next one:
records at 0 would take the offsets of those that are durable.
""".
-spec empty_log(osiris_log:config()) -> osiris:offset().
empty_log(#{epoch := 1} = Config) ->
    %% The first writer that the stream has ever had, unless it was recovered from the bucket.
    case rabbitmq_stream_s3_host_declare:is_recovered(Config) of
        true -> durable_end(Config);
        false -> 0
    end;
empty_log(Config) ->
    durable_end(Config).

-doc """
A log has been opened in the calling process. The manifest is marked pending here and not by the
process that resolves it, because a consumer can attach as soon as this returns.
""".
-spec on_init(member(), osiris_log:config(), osiris_log:state()) -> ok.
on_init(Type, Config, State) ->
    guarded(on_init, fun() ->
        #{stream_id := StreamId, dir := Dir} = Info = info(Config, State),
        %% Cache row and native registry. A shell that is still starting has no tables yet: its
        %% discovery walks over this member later.
        ok = rabbitmq_stream_s3_manifest_replica:member_started(Type, Dir, StreamId),
        ok = floor_of_empty(Type, State),
        ok = rabbitmq_stream_s3_manifest_protection:member_started(StreamId),
        gen_server:cast(rabbitmq_stream_s3_reconciler, {attach, Type, self(), Info})
    end).

-doc "The user's retention of the stream of the calling process has changed.".
-spec on_update_retention([osiris:retention_spec()], osiris_log:state()) -> ok.
on_update_retention(Specs, State) ->
    guarded(on_update_retention, fun() ->
        StreamId = rabbitmq_stream_s3:stream_id(osiris_log:get_name(State)),
        gen_server:cast(
            rabbitmq_stream_s3_reconciler,
            {update_retention, StreamId, self(), rabbitmq_stream_s3_host_retention:user_specs(Specs)}
        )
    end).

-doc "Before the stock evaluation of the directory of a log: drops what the remote tier holds.".
-spec evaluate_retention(file:filename_all(), [tuple()]) -> ok.
evaluate_retention(Dir, _Specs) ->
    guarded(evaluate_retention, fun() ->
        maybe
            {ok, StreamId} ?= rabbitmq_stream_s3_manifest_cache:dir(Dir),
            {ok, #{next_offset := RemoteNext}} ?= rabbitmq_stream_s3_manifest_cache:range(StreamId),
            rabbitmq_stream_s3_host_retention:trim(Dir, RemoteNext, fun(Segments, Size) ->
                rabbitmq_stream_s3_replica_lag:trimmable(StreamId, Segments, Size)
            end)
        end
    end).

-doc """
The first offset that a tracking snapshot may rely on. Osiris drops stored consumer offsets below
it, so it has to be the first one of both tiers; not known yet means that nothing is dropped.
""".
-spec first_offset(osiris_log:state(), osiris:offset()) -> osiris:offset().
first_offset(State, Local) ->
    first_of_both(State, Local, first_offset).

-doc "As first_offset/2, for stored timestamps.".
-spec first_timestamp(osiris_log:state(), osiris:timestamp()) -> osiris:timestamp().
first_timestamp(State, Local) ->
    first_of_both(State, Local, first_timestamp).

durable_end(#{name := Name} = Config) ->
    StreamId = rabbitmq_stream_s3:stream_id(Name),
    case rabbitmq_stream_s3_manifest_end:find(StreamId) of
        {ok, 0} ->
            0;
        {ok, Offset} ->
            ok = rabbitmq_stream_s3_counters:add(logs_begun_at_durable_end),
            ?LOG_WARNING(
                "stream_s3: ~ts: the local log is empty (~ts), and what is"
                " below offset ~b is durable in S3: the log continues there, and S3 serves what is below."
                " What was not uploaded yet is lost, and so are the stored consumer offsets",
                [StreamId, why_empty(Config), Offset]
            ),
            Offset;
        none ->
            0;
        {error, Reason} ->
            ?LOG_ERROR(
                "stream_s3: ~ts: the local log is empty, and the plugin cannot determine whether S3 has"
                " the stream (~0p). The writer does not start; RabbitMQ tries again. It needs a quorum"
                " of the metadata store. A stream whose last writer ran an earlier version of the plugin"
                " also needs S3",
                [StreamId, Reason]
            ),
            exit({stream_s3, durable_end_unknown})
    end.

why_empty(Config) ->
    case rabbitmq_stream_s3_host_declare:is_recovered(Config) of
        true -> "the stream was recovered from the bucket";
        false -> "a disk was lost or replaced"
    end.

%% Osiris says one less, and does not correct it when the first chunk comes: a reader would take that
%% offset for one that the local log has.
floor_of_empty(acceptor, State) ->
    case osiris_log:tail_info(State) of
        {Next, empty} when Next > 0 ->
            osiris_log_shared:set_first_chunk_id(osiris_log:get_shared(State), Next);
        _ ->
            ok
    end;
floor_of_empty(writer, _) ->
    ok.

info(#{name := Name, dir := Dir, epoch := Epoch} = Config, State) ->
    Info = #{
        stream_id => rabbitmq_stream_s3:stream_id(Name),
        name => Name,
        dir => Dir,
        shared => osiris_log:get_shared(State),
        counter => osiris_log:counters_ref(State),
        reference => maps:get(reference, Config, Name),
        epoch => Epoch,
        retention => rabbitmq_stream_s3_host_retention:user_specs(maps:get(retention, Config, []))
    },
    maps:merge(Info, maps:with([leader_pid], Config)).

first_of_both(State, Local, Key) ->
    StreamId = rabbitmq_stream_s3:stream_id(osiris_log:get_name(State)),
    case rabbitmq_stream_s3_manifest_cache:range(StreamId) of
        {ok, #{first_offset := Same, next_offset := Same}} -> Local;
        {ok, #{Key := Remote}} -> min(Local, Remote);
        pending -> 0;
        %% Nobody has announced it yet, as at the start of the node; or the plugin is inert.
        none ->
            case rabbitmq_stream_s3_manifest_protection:is_protected(StreamId) of
                true -> 0;
                false -> Local
            end
    end.

guarded(Hook, Fun) ->
    try
        _ = Fun(),
        ok
    catch
        Class:Reason:Stack ->
            ?LOG_WARNING("stream_s3: hook ~s failed: ~p", [Hook, {Class, Reason, Stack}]),
            ok
    end.
