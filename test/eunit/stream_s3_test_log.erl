%% Real osiris logs in a temporary folder, for tests of what sits on top of them.
-module(stream_s3_test_log).

-export([setup/0, cleanup/1, new/1, new/2, append/2, append/4, append_at/2, commit/1, context/2]).
-export([log/4]).
-export([gap_is_certain/1, gap_is_certain/2]).
-export([dir/1, stream_id/1, floor/1, segments/1, chunks/1, trim/2, delete_files/2, empty_at/2]).
-export([roll/2, unroll/2]).

-compile({no_auto_import, [floor/1]}).

-record(log, {dir, name, shared, log}).

%% Chunks in a segment.
-define(SEGMENT_CHUNKS, 3).

setup() ->
    {ok, _} = application:ensure_all_started(seshat),
    ok = osiris:configure_logger(?MODULE),
    ok = osiris_counters:init(),
    ok = application:set_env(osiris, max_segment_size_chunks, ?SEGMENT_CHUNKS),
    ok = stream_s3_nif_double:load(),
    ok = rabbitmq_stream_s3_manifest_cache:create(),
    {ok, Gaps} = rabbitmq_stream_s3_reader_gap:start_link(),
    true = unlink(Gaps),
    {ok, Lookups} = rabbitmq_stream_s3_reader_lookup:start_link(),
    true = unlink(Lookups),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

cleanup(_) ->
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ok = application:unset_env(osiris, max_segment_size_chunks),
    ok = gen_server:stop(rabbitmq_stream_s3_reader_gap),
    ok = gen_server:stop(rabbitmq_stream_s3_reader_lookup),
    ok = rabbitmq_stream_s3_manifest_cache:delete(),
    stream_s3_nif_double:unload().

new(Name) ->
    new(Name, #{}).

new(Name0, Config) ->
    Name = Name0 ++ "_" ++ integer_to_list(erlang:unique_integer([positive])),
    Dir = filename:join(["/tmp", "stream_s3_eunit_" ++ os:getpid(), Name]),
    ok = filelib:ensure_path(Dir),
    Shared = osiris_log_shared:new(),
    Log = osiris_log:init(Config#{dir => Dir, name => Name, epoch => 1, shared => Shared}),
    #log{dir = Dir, name = Name, shared = Shared, log = Log}.

%% Count chunks of two records each.
append(Count, Log) ->
    lists:foldl(
        fun(_, #log{log = L} = Acc) ->
            Next = osiris_log:next_offset(L),
            %% Newest first, as the writer collects them.
            Records = [record(Next + 1), record(Next)],
            commit(Acc#log{log = osiris_log:write(Records, L)})
        end,
        Log,
        lists:seq(1, Count)
    ).

append(Entries, Type, Trailer, #log{log = L} = Log) ->
    Now = erlang:system_time(millisecond),
    commit(Log#log{log = osiris_log:write(Entries, Type, Now, Trailer, L)}).

%% Chunks of two records each, of these times.
append_at(Times, Log) ->
    lists:foldl(
        fun(Time, #log{log = L} = Acc) ->
            Next = osiris_log:next_offset(L),
            Records = [record(Next + 1), record(Next)],
            commit(Acc#log{log = osiris_log:write(Records, 0, Time, <<>>, L)})
        end,
        Log,
        Times
    ).

record(Offset) ->
    iolist_to_binary(["record ", integer_to_list(Offset), lists:duplicate(Offset rem 7, $x)]).

commit(#log{log = L} = Log) ->
    {Next, {_, ChunkId, _}} = osiris_log:tail_info(L),
    ok = osiris_log:set_committed_chunk_id(L, ChunkId),
    _ = [
        osiris_log:set_committed_offset(L, Next - 1)
     || erlang:function_exported(osiris_log, set_committed_offset, 2)
    ],
    Log.

context(Options, #log{dir = Dir, name = Name, shared = Shared}) ->
    Self = self(),
    #{
        dir => Dir,
        name => Name,
        shared => Shared,
        reference => reference(Name),
        readers_counter_fun => fun(Inc) -> Self ! {readers, Inc} end,
        counter_spec => {{?MODULE, Name, make_ref()}, []},
        options => maps:merge(#{transport => tcp, chunk_selector => user_data}, Options)
    }.

reference(Name) -> {resource, <<"/">>, queue, list_to_binary(Name)}.

%% Asks as a reader does, and waits until the workers that this has started are done.
gap_is_certain(Log) ->
    gap_is_certain(stream_id(Log), floor(Log)).

gap_is_certain(StreamId, Floor) ->
    case rabbitmq_stream_s3_reader_gap:is_certain(StreamId, Floor) of
        true -> ok;
        false -> proven(StreamId, Floor)
    end.

proven(StreamId, Floor) ->
    Gap = whereis(rabbitmq_stream_s3_reader_gap),
    %% It has handled what was asked before.
    _ = sys:get_state(Gap),
    {monitors, Workers} = process_info(Gap, monitors),
    Monitors = [monitor(process, Pid) || {process, Pid} <- Workers],
    [
        receive
            {'DOWN', Monitor, _, _, _} -> ok
        after 60_000 -> error(worker_does_not_end)
        end
     || Monitor <- Monitors
    ],
    _ = sys:get_state(Gap),
    case rabbitmq_stream_s3_manifest_cache:gap_floor(StreamId) of
        {ok, Floor} -> ok;
        %% There is more in its queue.
        _ when Workers =/= [] -> proven(StreamId, Floor);
        _ -> {error, unavailable}
    end.

%% The logger of osiris.
log(_, _, _, _) -> ok.

dir(#log{dir = Dir}) -> Dir.
stream_id(#log{name = Name}) -> list_to_binary(Name).
floor(#log{shared = Shared}) -> osiris_log_shared:first_chunk_id(Shared).

segments(#log{dir = Dir}) ->
    [
        list_to_integer(filename:basename(F, ".segment"))
     || F <- lists:sort(filelib:wildcard("*.segment", Dir))
    ].

%% What has been uploaded, if everything that is here now has been.
chunks(#log{dir = Dir} = Log) ->
    lists:append([parse(Dir, Offset) || Offset <- segments(Log)]).

parse(Dir, Offset) ->
    File = filename:join(Dir, io_lib:format("~20..0b.segment", [Offset])),
    {ok, <<"OSIL", _:32, Rest/binary>>} = file:read_file(File),
    parse_chunks(Rest).

parse_chunks(<<>>) ->
    [];
parse_chunks(<<HeaderData:48/binary, Rest0/binary>>) ->
    <<5:4, 0:4, Type:8, Entries:16, Records:32, Ts:64/signed, Epoch:64, Id:64, Crc:32, DataSize:32,
        TrailerSize:32, FilterSize:8, _:24>> = HeaderData,
    <<Filter:FilterSize/binary, Data:DataSize/binary, Trailer:TrailerSize/binary, Rest/binary>> =
        Rest0,
    Header = #{
        chunk_id => Id,
        epoch => Epoch,
        type => Type,
        crc => Crc,
        num_records => Records,
        num_entries => Entries,
        timestamp => Ts,
        data_size => DataSize,
        trailer_size => TrailerSize,
        filter_size => FilterSize,
        header_data => HeaderData,
        position => 0,
        next_position => 0
    },
    [{Header, Filter, Data, Trailer} | parse_chunks(Rest)].

%% As the retention of the plugin does it: files first, then the floor.
trim(RemoteNext, #log{shared = Shared} = Log) ->
    Deleted = delete_files(RemoteNext, Log),
    [First | _] = segments(Log),
    ok = osiris_log_shared:set_first_chunk_id(Shared, First),
    Deleted.

%% A replica that begins at Offset, and has nothing yet.
empty_at(Offset, #log{dir = Dir, shared = Shared} = Log) ->
    _ = [ok = file:delete(F) || F <- filelib:wildcard(filename:join(Dir, "*.{segment,index}"))],
    ok = roll(Offset, Log),
    osiris_log_shared:set_first_chunk_id(Shared, -1).

%% A segment without a chunk.
roll(Offset, Log) ->
    ok = file:write_file(file(Offset, "segment", Log), <<"OSIL", 1:32>>),
    file:write_file(file(Offset, "index", Log), <<"OSII", 1:32>>).

%% The log will make it again.
unroll(Offset, Log) ->
    ok = file:delete(file(Offset, "index", Log)),
    file:delete(file(Offset, "segment", Log)).

file(Offset, Extension, #log{dir = Dir}) ->
    filename:join(Dir, io_lib:format("~20..0b.~s", [Offset, Extension])).

delete_files(RemoteNext, #log{dir = Dir}) ->
    rabbitmq_stream_s3_host_retention:trim(Dir, RemoteNext, fun(Segments, _) -> [First || {First, _} <- Segments] end).
