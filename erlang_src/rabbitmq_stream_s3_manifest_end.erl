-module(rabbitmq_stream_s3_manifest_end).
-moduledoc """
Where a stream goes on whose local log is empty: the offset after its last durable record.

The metadata store says it on the word of a quorum; this node's copy may be behind, and a log that
begins below the end is another timeline. Where the pointer was written by an earlier version of the
plugin, which did not keep the offset, the root that it names is fetched.

Owns how long that may take. Called in the process of a writer whose log is being opened, so all of it
happens in a process of its own, and no late answer is left in the writer's mailbox. See
docs/decisions/0021.
""".

-export([find/1, find/2]).

-type stream_id() :: rabbitmq_stream_s3:stream_id().

%% Nobody can publish until then, and a failed writer is followed by the next one.
-define(LIMIT_MS, 5_000).
-define(PAUSE_MS, 100).

-doc "`none`: nothing has ever been persisted.".
-spec find(stream_id()) -> {ok, osiris:offset()} | none | {error, term()}.
find(StreamId) ->
    find(StreamId, ?LIMIT_MS).

-doc "As find/1, for at most this long.".
-spec find(stream_id(), pos_integer()) -> {ok, osiris:offset()} | none | {error, term()}.
-dialyzer({nowarn_function, find/2}).
find(StreamId, LimitMs) ->
    Deadline = erlang:monotonic_time(millisecond) + LimitMs,
    {Pid, Monitor} = spawn_monitor(fun() -> exit({found, look(StreamId, Deadline)}) end),
    receive
        {'DOWN', Monitor, process, Pid, {found, Answer}} -> Answer;
        {'DOWN', Monitor, process, Pid, Reason} -> {error, Reason}
    after LimitMs + ?PAUSE_MS ->
        true = exit(Pid, kill),
        true = demonitor(Monitor, [flush]),
        {error, timeout}
    end.

look(StreamId, Deadline) ->
    case look_once(StreamId, Deadline) of
        {error, _} = Error ->
            case left(Deadline) > ?PAUSE_MS of
                true ->
                    ok = timer:sleep(?PAUSE_MS),
                    look(StreamId, Deadline);
                false ->
                    Error
            end;
        Answer ->
            Answer
    end.

look_once(StreamId, Deadline) ->
    case rabbitmq_stream_s3_db:durable_end(StreamId, left(Deadline)) of
        {ok, Pointer, unknown} -> root_end(StreamId, Pointer, Deadline);
        {ok, _Pointer, Next} -> {ok, Next};
        not_found -> none;
        {error, Reason} -> {error, {metadata_store, Reason}}
    end.

root_end(StreamId, {_Epoch, _Uid, Revision} = Pointer, Deadline) ->
    Ref = make_ref(),
    maybe
        {ok, Engine} ?= rabbitmq_stream_s3:engine(),
        %% The writer's own hook comes later.
        ok = rabbitmq_stream_s3_manifest_cache:mark_pending(StreamId),
        ok ?= rabbitmq_stream_s3_nif:manifest_resolve(Engine, self(), Ref, StreamId, Pointer),
        receive
            {rabbitmq_stream_s3, Ref, {resolved, #{revision := Revision, next_offset := Next}}} ->
                {ok, Next};
            {rabbitmq_stream_s3, Ref, {error, Kind, Text}} ->
                {error, {Kind, Text}};
            {rabbitmq_stream_s3, Ref, _Newer} ->
                {error, moved}
        after left(Deadline) -> {error, no_answer_from_s3}
        end
    else
        undefined -> {error, engine_not_started};
        {error, Reason} -> {error, Reason}
    end.

left(Deadline) ->
    max(1, Deadline - erlang:monotonic_time(millisecond)).
