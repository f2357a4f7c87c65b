-module(rabbitmq_stream_s3_nif).
-moduledoc """
Stubs of the native core and its loading: nothing else.

Owns the binding of priv/rabbitmq_stream_s3_nif.so to this module. Knows nothing of what the
calls do: docs/NIF_PROTOCOL.md does. Keep it small and stable, native code is replaced with it.
""".

-include_lib("kernel/include/file.hrl").

-export([
    interface_version/0,
    engine_open/3,
    engine_close/1,
    engine_probe/3,
    engine_stats/1,
    engine_request_durations/1,
    engine_set_rate/3,
    list_objects/5,
    delete_objects/4
]).
-export([
    recovery_streams/4,
    recovery_inspect/5,
    recovery_adopt/4
]).
-export([
    upload_open/4,
    upload_event/2,
    upload_status/1,
    upload_close/1
]).
-export([
    manifest_mark_pending/2,
    manifest_reset/2,
    manifest_forget/2,
    manifest_range/2,
    manifest_resolve/5,
    manifest_apply_edit/5,
    route/5,
    continue_at/5
]).
-export([
    reader_open/5,
    reader_read/2,
    reader_close/1,
    chunk_entries/5
]).

-export_type([engine/0, upload/0, reader/0, stream_id/0, push/0, edit_from/0, data/0, found/0]).

-nifs([
    interface_version/0,
    engine_open/3,
    engine_close/1,
    engine_probe/3,
    engine_stats/1,
    engine_request_durations/1,
    engine_set_rate/3,
    list_objects/5,
    delete_objects/4,
    recovery_streams/4,
    recovery_inspect/5,
    recovery_adopt/4,
    upload_open/4,
    upload_event/2,
    upload_status/1,
    upload_close/1,
    manifest_mark_pending/2,
    manifest_reset/2,
    manifest_forget/2,
    manifest_range/2,
    manifest_resolve/5,
    manifest_apply_edit/5,
    route/5,
    continue_at/5,
    reader_open/5,
    reader_read/2,
    reader_close/1,
    chunk_entries/5
]).

-on_load(load/0).

-opaque engine() :: reference().
-opaque upload() :: reference().
-opaque reader() :: reference().
-type stream_id() :: binary().
-type offset() :: non_neg_integer().
-type text() :: binary().
-type found() :: #{
    stream_id := stream_id(),
    vhost := binary() | undefined,
    queue := binary() | undefined,
    arguments := binary() | undefined,
    cluster := binary() | undefined,
    root := {Epoch :: non_neg_integer(), Uid :: non_neg_integer()} | rebuilt,
    modified_ms := integer() | undefined,
    recoveries := non_neg_integer(),
    first_offset := non_neg_integer(),
    next_offset := non_neg_integer(),
    total_size := non_neg_integer(),
    passed_over := [{Key :: binary(), Reason :: text()}],
    lost_up_to := non_neg_integer() | undefined,
    objects := objects() | undefined
}.
-type objects() :: #{
    named := non_neg_integer(),
    affected_count := non_neg_integer(),
    affected := [{Key :: binary(), non_neg_integer(), non_neg_integer(), Reason :: text()}],
    unnamed := non_neg_integer(),
    unnamed_bytes := non_neg_integer()
}.
%% In parts that are one after the other if it was fetched in more than one block.
-type data() :: binary() | [binary()].
-type spec() ::
    first | last | next | {offset, offset()} | {abs, offset()} | {timestamp, integer()}.
-type local_spec() :: first | last | next | {offset, offset()} | {timestamp, integer()}.
-type event() ::
    {pointer, {ok, non_neg_integer(), non_neg_integer(), pos_integer()} | not_found | error}
    | {committed, offset() | -1, offset() | -1}
    | {anchor, ok | error}
    | {pointer_committed, {ok, pos_integer()} | conflict | not_found | error}
    | {retention, #{max_bytes => non_neg_integer(), max_age_ms => non_neg_integer()}}
    | cut.
-type range() ::
    #{
        first_offset := offset(),
        next_offset := offset(),
        first_timestamp := integer(),
        total_size := non_neg_integer(),
        revision := non_neg_integer(),
        epoch := non_neg_integer(),
        fragments := non_neg_integer(),
        pointer := pointer() | none
    }.
-type pointer() ::
    {Epoch :: non_neg_integer(), Uid :: non_neg_integer(), Revision :: pos_integer()}.
-type edit_from() :: {From :: pointer(), Edit :: binary()} | none.
%% Whether what lies between the end of the known manifest and the local log is proven to be in neither.
-type gap() :: certain | unproven.
-type push() ::
    read_pointer
    | write_anchor
    | {commit_pointer, Epoch :: non_neg_integer(), Uid :: non_neg_integer(),
        Next :: non_neg_integer(), ExpectedRevision :: non_neg_integer()}
    | {range, range(), edit_from()}
    | {recovery, local_log_ahead | remote_tier_ahead, offset(), offset()}
    | {abandoned, RootKey :: text(), First :: offset(), Next :: offset()}
    | {problem, atom(), text()}
    | {recovered, atom()}
    | {stopped, deleted | conflict_lost | bug}.
-type entry() ::
    {offset(), binary()}
    | {offset(), {batch, non_neg_integer(), 0..7, non_neg_integer(), binary()}}.
-type bug() :: {error, {bug, text()}}.

-spec load() -> ok | {error, term()}.
load() ->
    Dir =
        case code:priv_dir(rabbitmq_stream_s3) of
            {error, bad_name} ->
                Ebin = filename:dirname(code:which(?MODULE)),
                filename:join(filename:dirname(Ebin), "priv");
            Priv ->
                Priv
        end,
    Path = filename:join(Dir, "rabbitmq_stream_s3_nif"),
    case erlang:load_nif(Path, 0) of
        ok -> leave_to_others(Path ++ ".so");
        {error, _} = Error -> Error
    end.

%% RabbitMQ unpacks an archive over what it has unpacked before. Writing into a file that is mapped
%% takes the code from under the threads that run it, and the node with them. So the path gets a copy,
%% and the mapped file has no name any more by which anybody could reach it.
leave_to_others(File) ->
    case application:get_env(rabbit, plugins_expand_dir) of
        {ok, Unpacked} when is_list(Unpacked) ->
            case lists:prefix(filename:absname(Unpacked), filename:absname(File)) of
                true -> replace_by_copy(File);
                false -> ok
            end;
        _NotInABroker ->
            ok
    end.

replace_by_copy(File) ->
    Copy = File ++ ".copy." ++ os:getpid(),
    maybe
        {ok, _Bytes} ?= file:copy(File, Copy),
        {ok, #file_info{mode = Mode}} ?= file:read_file_info(File, [raw]),
        ok ?= file:change_mode(Copy, Mode band 8#7777),
        ok ?= file:rename(Copy, File)
    else
        {error, _CannotBeWritten} ->
            _ = file:delete(Copy),
            ok
    end.

-spec interface_version() -> pos_integer().
interface_version() ->
    erlang:nif_error(not_loaded).

-spec engine_open(pid(), reference(), map()) ->
    {ok, engine()} | {error, {atom(), text()}}.
engine_open(_Owner, _Ref, _Config) ->
    erlang:nif_error(not_loaded).

-spec engine_close(engine()) -> ok | bug().
engine_close(_Engine) ->
    erlang:nif_error(not_loaded).

-spec engine_probe(engine(), pid(), reference()) -> ok | {error, closed} | bug().
engine_probe(_Engine, _Pid, _Ref) ->
    erlang:nif_error(not_loaded).

-spec engine_stats(engine()) -> #{atom() => integer()} | bug().
engine_stats(_Engine) ->
    erlang:nif_error(not_loaded).

-spec engine_request_durations(engine()) -> #{atom() => [non_neg_integer()]} | bug().
engine_request_durations(_Engine) ->
    erlang:nif_error(not_loaded).

-spec engine_set_rate(engine(), unlimited | pos_integer(), default | pos_integer()) ->
    ok | bug().
engine_set_rate(_Engine, _BytesPerSecond, _BurstBytes) ->
    erlang:nif_error(not_loaded).

-spec list_objects(engine(), pid(), reference(), stream_id(), start | binary()) ->
    ok | {error, closed} | bug().
list_objects(_Engine, _Pid, _Ref, _StreamId, _Token) ->
    erlang:nif_error(not_loaded).

-spec delete_objects(engine(), pid(), reference(), [binary()]) ->
    ok | {error, closed} | bug().
delete_objects(_Engine, _Pid, _Ref, _Keys) ->
    erlang:nif_error(not_loaded).

-spec recovery_streams(engine(), pid(), reference(), start | binary()) ->
    ok | {error, closed} | bug().
recovery_streams(_Engine, _Pid, _Ref, _Token) ->
    erlang:nif_error(not_loaded).

-spec recovery_inspect(engine(), pid(), reference(), stream_id(), root | objects) ->
    ok | {error, closed} | bug().
recovery_inspect(_Engine, _Pid, _Ref, _StreamId, _Depth) ->
    erlang:nif_error(not_loaded).

-spec recovery_adopt(engine(), pid(), reference(), #{atom() => binary() | undefined}) ->
    ok | {error, closed} | bug().
recovery_adopt(_Engine, _Pid, _Ref, _About) ->
    erlang:nif_error(not_loaded).

-spec upload_open(engine(), pid(), reference(), map()) ->
    {ok, upload()} | {error, closed} | bug().
upload_open(_Engine, _Owner, _Ref, _Config) ->
    erlang:nif_error(not_loaded).

-spec upload_event(upload(), event()) -> ok | {error, busy | closed} | bug().
upload_event(_Upload, _Event) ->
    erlang:nif_error(not_loaded).

-spec upload_status(upload()) -> map() | bug().
upload_status(_Upload) ->
    erlang:nif_error(not_loaded).

-spec upload_close(upload()) -> ok | bug().
upload_close(_Upload) ->
    erlang:nif_error(not_loaded).

-spec manifest_mark_pending(engine(), stream_id()) -> ok | bug().
manifest_mark_pending(_Engine, _StreamId) ->
    erlang:nif_error(not_loaded).

-spec manifest_reset(engine(), stream_id()) -> ok | bug().
manifest_reset(_Engine, _StreamId) ->
    erlang:nif_error(not_loaded).

-spec manifest_forget(engine(), stream_id()) -> ok | bug().
manifest_forget(_Engine, _StreamId) ->
    erlang:nif_error(not_loaded).

-spec manifest_range(engine(), stream_id()) ->
    {ok, offset(), offset()} | pending | none | bug().
manifest_range(_Engine, _StreamId) ->
    erlang:nif_error(not_loaded).

-spec manifest_resolve(engine(), pid(), reference(), stream_id(), pointer() | empty) ->
    ok | {error, closed} | bug().
manifest_resolve(_Engine, _Pid, _Ref, _StreamId, _Pointer) ->
    erlang:nif_error(not_loaded).

-spec manifest_apply_edit(engine(), stream_id(), pointer(), pointer(), binary()) ->
    {ok, range()} | {error, atom(), text()} | bug().
manifest_apply_edit(_Engine, _StreamId, _From, _To, _Edit) ->
    erlang:nif_error(not_loaded).

-spec route(engine(), stream_id(), spec(), {offset() | -1, offset()}, gap()) ->
    {local, local_spec()}
    | {remote, offset()}
    | unknown
    | unproven_gap
    | {error, {offset_out_of_range, empty | {offset(), offset()}}}
    | bug().
route(_Engine, _StreamId, _Spec, _LocalFirstAndNext, _Gap) ->
    erlang:nif_error(not_loaded).

-spec continue_at(engine(), stream_id(), offset(), offset() | -1, gap()) ->
    local | {remote, offset()} | unknown | unproven_gap | bug().
continue_at(_Engine, _StreamId, _NextOffset, _LocalFirst, _Gap) ->
    erlang:nif_error(not_loaded).

-spec reader_open(engine(), pid(), term(), stream_id(), {offset | timestamp, integer()}) ->
    {ok, reader()} | {error, closed} | bug().
reader_open(_Engine, _Owner, _Wake, _StreamId, _Start) ->
    erlang:nif_error(not_loaded).

-spec reader_read(reader(), offset()) ->
    {chunk, map(), Filter :: binary(), data(), Trailer :: binary()}
    | wait
    | {local, offset()}
    | {error, atom(), text()}
    | bug().
reader_read(_Reader, _MaxChunkId) ->
    erlang:nif_error(not_loaded).

-spec reader_close(reader()) -> ok | bug().
reader_close(_Reader) ->
    erlang:nif_error(not_loaded).

-spec chunk_entries(data(), non_neg_integer(), offset(), non_neg_integer(), pos_integer()) ->
    {[entry()], non_neg_integer(), offset(), non_neg_integer()} | {error, corrupt} | bug().
chunk_entries(_Data, _Position, _Offset, _NumLeft, _Max) ->
    erlang:nif_error(not_loaded).
