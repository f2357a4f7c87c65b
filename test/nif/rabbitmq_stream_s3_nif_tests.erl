%% The seam between Erlang and the native core, with the built library: shapes, ownership, messages,
%% no waiting, no leaks.
%%
%% Owns the protocol of docs/NIF_PROTOCOL.md as seen from Erlang. What the core decides is tested in
%% the core. Needs S3_ENDPOINT and its keys in the environment (test/nif/run starts a server); the cases that talk to
%% it are left out without.
-module(rabbitmq_stream_s3_nif_tests).

-include_lib("eunit/include/eunit.hrl").

-define(NIF, rabbitmq_stream_s3_nif).
-define(RECEIVE_MS, 20000).

%% Shapes ------------------------------------------------------------------------------------------

interface_version_test() ->
    ?assertEqual(5, ?NIF:interface_version()).

badarg_test() ->
    {ok, Engine} = open(),
    Ref = make_ref(),
    [?assertError(badarg, apply(?NIF, Function, Arguments))
     || {Function, Arguments} <-
            [{engine_close, [make_ref()]},
             {engine_close, [engine]},
             {engine_stats, [Ref]},
             {engine_request_durations, [Ref]},
             {engine_probe, [Engine, self, Ref]},
             {engine_probe, [Engine, self(), not_a_reference]},
             {engine_set_rate, [Engine, -1, default]},
             {engine_set_rate, [Engine, 0, default]},
             {engine_set_rate, [Engine, unlimited, unlimited]},
             {list_objects, [Engine, self(), Ref, "text", start]},
             {list_objects, [Engine, self(), Ref, <<255>>, start]},
             {delete_objects, [Engine, self(), Ref, lists:duplicate(1001, <<"key">>)]},
             {delete_objects, [Engine, self(), Ref, key]},
             {upload_open, [Engine, self(), Ref, #{}]},
             {upload_open, [Engine, self(), Ref, (stream_config("s"))#{epoch => -1}]},
             {upload_event, [Engine, cut]},
             {manifest_range, [Engine, stream]},
             {manifest_reset, [Engine, stream]},
             {manifest_resolve, [Engine, self(), Ref, <<"s">>, {1, 2}]},
             {manifest_resolve, [Engine, self(), Ref, <<"s">>, {1, 1 bsl 32, 3}]},
             {manifest_resolve, [Engine, self(), Ref, <<"s">>, not_found]},
             {manifest_resolve, [Engine, self, Ref, <<"s">>, empty]},
             {manifest_apply_edit, [Engine, <<"s">>, empty, {1, 2, 3}, <<>>]},
             {manifest_apply_edit, [Engine, <<"s">>, {1, 2, 3}, {1, 1 bsl 32, 4}, <<>>]},
             {manifest_apply_edit, [Engine, <<"s">>, {1, 2, 3}, {1, 2, 4}, edit]},
             {manifest_apply_edit, [Engine, stream, {1, 2, 3}, {1, 2, 4}, <<>>]},
             {route, [Engine, <<"s">>, {offset, -1}, -1, 0]},
             {route, [Engine, <<"s">>, somewhere, -1, 0]},
             {route, [Engine, <<"s">>, first, -2, 0]},
             {reader_open, [Engine, self(), wake, <<"s">>, first]},
             {reader_read, [Engine, 0]},
             {chunk_entries, [data, 0, 0, 1, 1]},
             {chunk_entries, [<<>>, -1, 0, 1, 1]},
             {chunk_entries, [<<1:3>>, 0, 0, 1, 1]}]],
    ok = ?NIF:engine_close(Engine).

bad_events_test() ->
    {ok, Engine} = open(),
    {ok, Stream} = ?NIF:upload_open(Engine, self(), make_ref(), stream_config("events")),
    [?assertError(badarg, ?NIF:upload_event(Stream, Event))
     || Event <-
            [unknown,
             {pointer, {ok, 1, 2}},
             {pointer, found},
             {committed, -2, 0},
             {committed, 0, atom},
             {anchor, maybe_},
             {pointer_committed, ok},
             {retention, []},
             {retention, #{max_bytes => -1}},
             {retention, #{max_age_ms => infinity}}]],
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

%% A wrong configuration is returned, not raised: an exception would carry the secret into a log.
config_errors_keep_secrets_test() ->
    Wrong =
        [config(#{region => 'us-east-1'}),
         config(#{fragment_size_bytes => -1}),
         config(#{endpoint => <<"not a url">>}),
         maps:remove(bucket, config(#{})),
         maps:remove(secret_access_key, config(#{})),
         [{secret_access_key, <<"TheSecret">>}]],
    [begin
         {error, {Kind, Text}} = ?NIF:engine_open(self(), make_ref(), Config),
         ?assert(is_atom(Kind)),
         ?assert(is_binary(Text)),
         ?assertEqual(nomatch, binary:match(Text, <<"TheSecret">>))
     end
     || Config <- Wrong],
    {error, {config, _}} = ?NIF:engine_open(not_a_pid, make_ref(), config(#{})),
    {error, {config, _}} = ?NIF:engine_open(self(), not_a_ref, config(#{})).

%% Entries of a chunk ------------------------------------------------------------------------------

chunk_entries_test() ->
    Big = binary:copy(<<"b">>, 300),
    Data = iolist_to_binary([simple(<<"a">>), batch(7, 3, 999, Big), simple(<<>>), simple(Big)]),
    Size = byte_size(Data),
    All = [{10, <<"a">>}, {11, {batch, 7, 3, 999, Big}}, {18, <<>>}, {19, Big}],
    ?assertEqual({All, Size, 20, 0}, ?NIF:chunk_entries(Data, 0, 10, 4, 100)),
    ?assertEqual({[], 0, 10, 0}, ?NIF:chunk_entries(Data, 0, 10, 0, 100)),
    ?assertEqual({[], 0, 10, 4}, ?NIF:chunk_entries(Data, 0, 10, 4, 0)),
    %% one at a time gives the same
    ?assertEqual(All, one_by_one(Data, 0, 10, 4)),
    %% more entries promised than there are
    ?assertEqual({error, corrupt}, ?NIF:chunk_entries(Data, 0, 10, 5, 100)),
    %% cut off anywhere: never a crash, never a wrong entry
    [?assertEqual({error, corrupt},
                  ?NIF:chunk_entries(binary:part(Data, 0, Length), 0, 10, 4, 100))
     || Length <- lists:seq(0, Size - 1)],
    ?assertEqual({error, corrupt}, ?NIF:chunk_entries(Data, Size + 1, 10, 1, 1)),
    ?assertEqual({error, corrupt}, ?NIF:chunk_entries(Data, 0, 16#ffffffffffffffff, 4, 4)).

%% The data may be in parts, cut anywhere: the same entries, and the same places to go on at.
chunk_entries_of_parts_test() ->
    Big = binary:copy(<<"b">>, 80),
    Data = iolist_to_binary([simple(<<"a">>), batch(7, 3, 999, Big), simple(<<>>), simple(Big)]),
    Size = byte_size(Data),
    Whole = ?NIF:chunk_entries(Data, 0, 10, 4, 100),
    All = element(1, Whole),
    Cut = fun(A, B) ->
        [binary:copy(binary:part(Data, P, L)) || {P, L} <- [{0, A}, {A, B - A}, {B, Size - B}]]
    end,
    lists:foreach(
        fun({A, B}) ->
            Parts = Cut(A, B),
            ?assertEqual(Whole, ?NIF:chunk_entries(Parts, 0, 10, 4, 100)),
            ?assertEqual(All, one_by_one(Parts, 0, 10, 4)),
            ?assertEqual({error, corrupt}, ?NIF:chunk_entries(Parts, 0, 10, 5, 100)),
            %% without its end
            ?assertEqual(
                {error, corrupt}, ?NIF:chunk_entries(lists:droplast(Parts), 0, 10, 4, 100)
            )
        end,
        [{A, B} || A <- lists:seq(0, Size), B <- lists:seq(A, Size), B < Size]
    ),
    %% Only what lies across a cut is copied.
    [{_, First}, {_, {batch, _, _, _, Across}} | _] = All,
    {Entries, _, _, 0} = ?NIF:chunk_entries(Cut(20, 21), 0, 10, 4, 100),
    [{_, First}, {_, {batch, _, _, _, Across}}, _, {_, Last}] = Entries,
    ?assertEqual(Size - 21, binary:referenced_byte_size(Last)),
    ?assertEqual({error, corrupt}, ?NIF:chunk_entries([], 0, 10, 1, 1)),
    ?assertEqual({[], 0, 10, 0}, ?NIF:chunk_entries([], 0, 10, 0, 1)),
    ?assertError(badarg, ?NIF:chunk_entries([data], 0, 10, 1, 1)).

chunk_entries_share_the_data_test() ->
    Data = iolist_to_binary([simple(binary:copy(<<"x">>, 100)) || _ <- lists:seq(1, 100)]),
    {Entries, _, _, 0} = ?NIF:chunk_entries(Data, 0, 0, 100, 100),
    [?assertEqual(byte_size(Data), binary:referenced_byte_size(Entry)) || {_, Entry} <- Entries].

chunk_entries_are_bounded_test() ->
    Count = 5000,
    Data = iolist_to_binary(lists:duplicate(Count, simple(<<"x">>))),
    {Entries, _, _, Left} = ?NIF:chunk_entries(Data, 0, 0, Count, 1 bsl 60),
    ?assert(length(Entries) < Count),
    ?assertEqual(Count, length(Entries) + Left),
    ?assertEqual(Count, length(one_by_one(Data, 0, 0, Count))).

%% Life of the handles -----------------------------------------------------------------------------

engines_leave_no_threads_test_() ->
    {timeout,
     120,
     fun() ->
        eventually(fun() -> engine_threads() =:= 0 end),
        [begin
             {ok, Engine} = open(),
             eventually(fun() -> engine_threads() >= 2 end),
             ok = ?NIF:engine_close(Engine),
             ok = ?NIF:engine_close(Engine)
         end
         || _ <- lists:seq(1, 100)],
        eventually(fun() -> engine_threads() =:= 0 end)
     end}.

%% Publishers come first.
threads_stay_behind_those_of_the_vm_test() ->
    {ok, Engine} = open(),
    eventually(fun() -> engine_threads() >= 2 end),
    [Vm] = lists:usort([Nice || {<<"beam.smp">>, Nice} <- threads()]),
    eventually(fun() ->
        lists:usort([Nice || {<<"stream-s3", _/binary>>, Nice} <- threads()]) =:= [Vm + 7]
    end),
    ok = ?NIF:engine_close(Engine).

dropped_engines_leave_no_threads_test_() ->
    {timeout,
     120,
     fun() ->
        eventually(fun() -> engine_threads() =:= 0 end),
        in_process(fun() -> [{ok, _} = open() || _ <- lists:seq(1, 20)] end),
        erlang:garbage_collect(),
        eventually(fun() -> engine_threads() =:= 0 end)
     end}.

owner_death_closes_everything_test() ->
    {ok, Engine} = open(),
    Self = self(),
    {Pid, Monitor} =
        spawn_monitor(fun() ->
                         {ok, Stream} =
                             ?NIF:upload_open(Engine, self(), make_ref(), stream_config("o")),
                         {ok, Reader} =
                             ?NIF:reader_open(Engine, self(), wake, <<"o">>, {offset, 0}),
                         {ok, Own} = open(),
                         Self ! {handles, Stream, Reader, Own},
                         receive stop -> ok end
                      end),
    receive {handles, Stream, Reader, Own} -> ok end,
    ok = ?NIF:upload_event(Stream, {committed, -1, -1}),
    Pid ! stop,
    receive {'DOWN', Monitor, _, _, _} -> ok end,
    eventually(fun() -> ?NIF:upload_event(Stream, {committed, -1, -1}) =:= {error, closed} end),
    eventually(fun() ->
                  ?NIF:upload_open(Own, self(), make_ref(), stream_config("x")) =:= {error, closed}
               end),
    {error, _, _} = ?NIF:reader_read(Reader, 0),
    ok = ?NIF:engine_close(Engine).

dead_owner_is_refused_test() ->
    Dead = in_process(fun() -> self() end),
    {error, {closed, _}} = ?NIF:engine_open(Dead, make_ref(), config(#{})),
    {ok, Engine} = open(),
    {error, closed} = ?NIF:upload_open(Engine, Dead, make_ref(), stream_config("dead")),
    {error, closed} = ?NIF:reader_open(Engine, Dead, wake, <<"dead">>, {offset, 0}),
    ok = ?NIF:engine_close(Engine).

closed_engine_refuses_test() ->
    {ok, Engine} = open(),
    {ok, Stream} = ?NIF:upload_open(Engine, self(), make_ref(), stream_config("c")),
    ok = ?NIF:engine_close(Engine),
    eventually(fun() -> ?NIF:upload_event(Stream, cut) =:= {error, closed} end),
    Ref = make_ref(),
    {error, closed} = ?NIF:engine_probe(Engine, self(), Ref),
    {error, closed} = ?NIF:list_objects(Engine, self(), Ref, <<"c">>, start),
    {error, closed} = ?NIF:delete_objects(Engine, self(), Ref, []),
    {error, closed} = ?NIF:manifest_resolve(Engine, self(), Ref, <<"c">>, empty),
    {error, closed} = ?NIF:upload_open(Engine, self(), Ref, stream_config("c")),
    {error, closed} = ?NIF:reader_open(Engine, self(), wake, <<"c">>, {offset, 0}),
    ?assert(is_map(?NIF:engine_stats(Engine))),
    %% A sum, and a count for each bucket.
    Durations = ?NIF:engine_request_durations(Engine),
    ?assertEqual([delete, first_byte, get, get_range, head, list, put], lists:sort(maps:keys(Durations))),
    [?assertEqual(13, length(Row)) || Row <- maps:values(Durations)],
    ok = ?NIF:upload_close(Stream).

%% Disabling a plugin deletes its modules, enabling it again loads them: handles of before are refused.
reload_test() ->
    {ok, Old} = open(),
    true = code:soft_purge(?NIF),
    true = code:delete(?NIF),
    {module, ?NIF} = code:ensure_loaded(?NIF),
    ?assertEqual(5, ?NIF:interface_version()),
    ?assertError(badarg, ?NIF:engine_stats(Old)),
    {ok, New} = open(),
    ?assert(is_map(?NIF:engine_stats(New))),
    ok = ?NIF:engine_close(New),
    true = code:soft_purge(?NIF).

%% Manifests ---------------------------------------------------------------------------------------

manifests_test() ->
    {ok, Engine} = open(),
    ?assertEqual(none, ?NIF:manifest_range(Engine, <<"m">>)),
    ?assertEqual({local, first}, ?NIF:route(Engine, <<"m">>, first, {0, 10}, unproven)),
    ?assertEqual(unknown, ?NIF:route(Engine, <<"m">>, first, {5, 10}, unproven)),
    ok = ?NIF:manifest_mark_pending(Engine, <<"m">>),
    ?assertEqual(pending, ?NIF:manifest_range(Engine, <<"m">>)),
    ?assertEqual(unknown, ?NIF:route(Engine, <<"m">>, first, {5, 10}, certain)),
    ?assertEqual(unknown, ?NIF:continue_at(Engine, <<"m">>, 3, 5, unproven)),
    ?assertEqual(local, ?NIF:continue_at(Engine, <<"m">>, 5, 5, unproven)),
    [?assertError(badarg, ?NIF:route(Engine, <<"m">>, first, {5, 10}, Gap)) || Gap <- [true, 0]],
    ok = ?NIF:manifest_forget(Engine, <<"m">>),
    ?assertEqual(none, ?NIF:manifest_range(Engine, <<"m">>)),
    ok = ?NIF:engine_close(Engine).

resolve_elsewhere_written_test() ->
    {ok, Engine} = open(),
    Id = <<"elsewhere">>,
    Resolve = fun(Pointer) ->
                 Ref = make_ref(),
                 ok = ?NIF:manifest_resolve(Engine, self(), Ref, Id, Pointer),
                 push(Ref)
              end,
    ?assertMatch({error, unknown, Text} when is_binary(Text), Resolve(empty)),
    ok = ?NIF:manifest_mark_pending(Engine, Id),
    Empty =
        {resolved,
         #{first_offset => 0,
           next_offset => 0,
           first_timestamp => -1,
           total_size => 0,
           revision => 0,
           epoch => 0,
           fragments => 0,
           pointer => none}},
    ?assertEqual(Empty, Resolve(empty)),
    ?assertEqual(Empty, Resolve(empty)),
    ?assertEqual({ok, 0, 0}, ?NIF:manifest_range(Engine, Id)),
    ok = ?NIF:manifest_reset(Engine, Id),
    ?assertEqual(pending, ?NIF:manifest_range(Engine, Id)),
    %% its writer is here now
    StreamRef = make_ref(),
    {ok, Stream} = ?NIF:upload_open(Engine, self(), StreamRef, stream_config(Id)),
    read_pointer = push(StreamRef),
    ?assertMatch({error, written_here, _}, Resolve({1, 2, 3})),
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

resolved_empty_manifest_test() ->
    {ok, Engine} = open(),
    Ref = make_ref(),
    Id = <<"empty">>,
    ok = ?NIF:manifest_mark_pending(Engine, Id),
    {ok, Stream} = ?NIF:upload_open(Engine, self(), Ref, stream_config(Id)),
    read_pointer = push(Ref),
    ok = ?NIF:upload_event(Stream, {committed, -1, -1}),
    ok = ?NIF:upload_event(Stream, {pointer, not_found}),
    {range, #{first_offset := 0, next_offset := 0, revision := 0}, none} = push(Ref),
    ?assertEqual({ok, 0, 0}, ?NIF:manifest_range(Engine, Id)),
    ?assertEqual({local, first}, ?NIF:route(Engine, Id, first, {0, 10}, unproven)),
    %% Nothing is persisted: whether [0, 5) is gone is for a newer manifest to say.
    ?assertEqual(unproven_gap, ?NIF:route(Engine, Id, first, {5, 10}, unproven)),
    ?assertEqual({local, first}, ?NIF:route(Engine, Id, first, {5, 10}, certain)),
    ?assertEqual(unproven_gap, ?NIF:continue_at(Engine, Id, 3, 5, unproven)),
    ?assertEqual(local, ?NIF:continue_at(Engine, Id, 3, 5, certain)),
    ?assertMatch(#{phase := _, problem := undefined, counters := #{}}, ?NIF:upload_status(Stream)),
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

%% No call waits -----------------------------------------------------------------------------------

events_never_wait_test_() ->
    {timeout,
     60,
     fun() ->
        {ok, Engine} = open(),
        {ok, Stream} = ?NIF:upload_open(Engine, self(), make_ref(), stream_config("fast")),
        Times =
            [time_us(fun() -> ok = ?NIF:upload_event(Stream, {committed, N, 0}) end)
             || N <- lists:seq(1, 10000)],
        report("upload_event {committed,_,_}", Times),
        Cuts =
            [time_us(fun() -> true = lists:member(?NIF:upload_event(Stream, cut), [ok, {error, busy}])
                     end)
             || _ <- lists:seq(1, 10000)],
        report("upload_event cut", Cuts),
        report("stream_status",
               [time_us(fun() -> #{} = ?NIF:upload_status(Stream) end)
                || _ <- lists:seq(1, 1000)]),
        report("engine_stats",
               [time_us(fun() -> #{} = ?NIF:engine_stats(Engine) end)
                || _ <- lists:seq(1, 1000)]),
        report("manifest_range",
               [time_us(fun() -> none = ?NIF:manifest_range(Engine, <<"other">>) end)
                || _ <- lists:seq(1, 10000)]),
        Data = iolist_to_binary(lists:duplicate(1024, simple(binary:copy(<<"x">>, 100)))),
        report("chunk_entries, 1024 entries",
               [time_us(fun() -> {_, _, _, 0} = ?NIF:chunk_entries(Data, 0, 0, 1024, 1024) end)
                || _ <- lists:seq(1, 1000)]),
        Opens =
            [begin
                 {Us, {ok, E}} = timer:tc(fun open/0),
                 CloseUs = time_us(fun() -> ok = ?NIF:engine_close(E) end),
                 {Us, CloseUs}
             end
             || _ <- lists:seq(1, 20)],
        report("engine_open", [Us || {Us, _} <- Opens], 20000),
        report("engine_close", [Us || {_, Us} <- Opens]),
        ok = ?NIF:engine_close(Engine)
     end}.

%% With an S3 server -------------------------------------------------------------------------------

s3_test_() ->
    case os:getenv("S3_ENDPOINT") of
        false ->
            [];
        _ ->
            [{timeout, 60, fun probe/0},
             {timeout, 60, fun probe_failures/0},
             {timeout, 120, fun upload_and_read/0},
             {timeout, 120, fun edits_lead_on_elsewhere/0},
             {timeout, 120, fun read_chunks_do_not_pile_up/0},
             {timeout, 60, fun end_of_the_engine_wakes/0},
             {timeout, 60, fun list_and_delete/0}]
    end.

probe() ->
    {ok, Engine} = open(),
    Ref = make_ref(),
    ok = ?NIF:engine_probe(Engine, self(), Ref),
    ?assertEqual({probe, ok}, push(Ref)),
    ok = ?NIF:engine_close(Engine).

probe_failures() ->
    [begin
         {ok, Engine} = ?NIF:engine_open(self(), make_ref(), config(Change)),
         Ref = make_ref(),
         ok = ?NIF:engine_probe(Engine, self(), Ref),
         ?assertMatch({probe, {error, Kind, <<_/binary>>}}, push(Ref)),
         ok = ?NIF:engine_close(Engine)
     end
     || {Kind, Change} <-
            [{no_such_bucket, #{bucket => <<"nobody-made-this-one">>}},
             {access_denied, #{secret_access_key => <<"wrong">>}},
             {unreachable, #{endpoint => <<"http://127.0.0.1:9">>}}]].

%% A local log of three chunks is uploaded, then read back as the reader of a consumer does it.
upload_and_read() ->
    Chunks =
        [chunk(0, [simple(<<"zero">>), simple(<<"one">>)], <<>>),
         chunk(2, [batch(3, 0, 15, binary:copy(<<"y">>, 200))], <<"filter">>),
         chunk(5, [simple(binary:copy(<<"z">>, 100000))], <<>>)],
    {Engine, Stream, Id, Range} = uploaded(Chunks, 6),
    ?assertMatch(#{first_offset := 0, next_offset := 6, epoch := 1}, Range),
    ?assertEqual({ok, 0, 6}, ?NIF:manifest_range(Engine, Id)),
    ?assertEqual({remote, 0}, ?NIF:route(Engine, Id, first, {5, 6}, unproven)),
    ?assertEqual({remote, 2}, ?NIF:continue_at(Engine, Id, 2, 5, unproven)),
    ?assertEqual({remote, 2}, ?NIF:continue_at(Engine, Id, 2, -1, unproven)),
    %% a node that has a replica finds the same by the pointer
    {ok, Elsewhere} = open(),
    ok = ?NIF:manifest_mark_pending(Elsewhere, Id),
    Resolve = make_ref(),
    {1, Uid, Revision} = maps:get(pointer, Range),
    ok = ?NIF:manifest_resolve(Elsewhere, self(), Resolve, Id, {1, Uid, Revision}),
    ?assertEqual({resolved, Range}, push(Resolve)),
    ?assertEqual({ok, 0, 6}, ?NIF:manifest_range(Elsewhere, Id)),
    ok = ?NIF:manifest_resolve(Elsewhere, self(), Resolve, Id, {1, Uid bxor 1, Revision + 1}),
    ?assertMatch({error, not_found, _}, push(Resolve)),
    ok = ?NIF:engine_close(Elsewhere),
    Wake = {'$gen_cast', {queue_event, <<"name">>, {osiris_offset, make_ref(), 0}}},
    {ok, Reader} = ?NIF:reader_open(Engine, self(), Wake, Id, {offset, 0}),
    Read = read_chunks(Reader, Wake, 5),
    ?assertEqual(Chunks, [iolist_to_binary([maps:get(header_data, H), F, D, T])
                          || {H, F, D, T} <- Read]),
    [{H0, <<>>, D0, <<>>}, {H1, <<"filter">>, _, <<>>}, {H2, <<>>, D2, <<>>}] = Read,
    ?assertMatch(#{chunk_id := 0, epoch := 1, type := 0, num_records := 2, num_entries := 2,
                   data_size := 15, trailer_size := 0, filter_size := 0, timestamp := 1700000000000,
                   header_data := <<5:4, 0:4, _/binary>>},
                 H0),
    ?assertEqual(lists:sort([chunk_id, epoch, type, crc, num_records, num_entries, timestamp,
                             data_size, trailer_size, header_data, filter_size, position,
                             next_position]),
                 lists:sort(maps:keys(H0))),
    ?assertEqual(erlang:crc32(D0), maps:get(crc, H0)),
    ?assertMatch(#{chunk_id := 2, num_records := 3, filter_size := 6}, H1),
    ?assertEqual(maps:get(next_position, H1), maps:get(position, H2)),
    %% the data is fetched memory itself: a copy would be a binary of the VM's own, of that size
    ?assert(binary:referenced_byte_size(D2) < byte_size(D2)),
    {[{0, <<"zero">>}, {1, <<"one">>}], _, 2, 0} = ?NIF:chunk_entries(D0, 0, 0, 2, 10),
    ?assertEqual({local, 6}, read_end(Reader, Wake)),
    ok = ?NIF:reader_close(Reader),
    %% binaries outlive their reader
    erlang:garbage_collect(),
    ?assertEqual(erlang:crc32(D2), maps:get(crc, H2)),
    %% a timestamp finds its place too
    {ok, Reader2} = ?NIF:reader_open(Engine, self(), Wake, Id, {timestamp, 0}),
    [{#{chunk_id := 0}, _, _, _} | _] = read_chunks(Reader2, Wake, 5),
    %% and a limit holds chunks back
    {ok, Reader3} = ?NIF:reader_open(Engine, self(), Wake, Id, {offset, 0}),
    [_, _] = read_chunks(Reader3, Wake, 2),
    ?assertEqual(wait, ?NIF:reader_read(Reader3, 2)),
    ?assertEqual(wait, ?NIF:reader_read(Reader3, -1)),
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

%% What a node with a replica is sent leads it to the next manifest without a request; nothing else does.
edits_lead_on_elsewhere() ->
    Id = unique_id(),
    Dir = scratch(Id),
    Chunk = fun(Offset) -> chunk(Offset, [simple(<<"one">>)], <<>>) end,
    {Engine, Stream, Ref} = begun(Id, Dir, [Chunk(0)]),
    {#{pointer := First}, none} = cut(Stream, Ref, 1),
    {ok, Elsewhere} = open(),
    Apply = fun(From, To, Edit) -> ?NIF:manifest_apply_edit(Elsewhere, Id, From, To, Edit) end,
    ?assertMatch({error, unknown, <<_/binary>>}, Apply(First, {1, 1, 2}, <<>>)),
    ok = ?NIF:manifest_mark_pending(Elsewhere, Id),
    ?assertMatch({error, gap, <<_/binary>>}, Apply(First, {1, 1, 2}, <<>>)),
    Resolve = make_ref(),
    ok = ?NIF:manifest_resolve(Elsewhere, self(), Resolve, Id, First),
    {resolved, _} = push(Resolve),
    #{manifest_syncs := 1, get_requests := 1} = ?NIF:engine_stats(Elsewhere),
    ok = file:write_file(filename:join(Dir, segment_name(0)), Chunk(1), [append]),
    ok = ?NIF:upload_event(Stream, {committed, 1, 0}),
    {#{pointer := Second} = Range, {First, Edit}} = cut(Stream, Ref, 2),
    ok = file:del_dir_r(Dir),
    {1, Uid, Revision} = First,
    ?assertMatch({error, gap, _}, Apply({1, Uid bxor 1, Revision}, Second, Edit)),
    ?assertMatch({error, stale, _}, Apply(First, First, Edit)),
    [?assertMatch({error, corrupt, <<_/binary>>}, Apply(First, Second, Damaged))
     || Damaged <- [<<>>, binary:part(Edit, 0, byte_size(Edit) - 1), <<Edit/binary, 0>>,
                    flipped(Edit, 8), flipped(Edit, byte_size(Edit) - 1)]],
    ?assertEqual({ok, 0, 1}, ?NIF:manifest_range(Elsewhere, Id)),
    ?assertEqual({ok, Range}, Apply(First, Second, Edit)),
    ?assertEqual({ok, 0, 2}, ?NIF:manifest_range(Elsewhere, Id)),
    ?assertMatch({error, stale, _}, Apply(First, Second, Edit)),
    #{manifest_syncs := 1, get_requests := 1} = ?NIF:engine_stats(Elsewhere),
    %% where it is written nobody else publishes
    ?assertMatch({error, written_here, _},
                 ?NIF:manifest_apply_edit(Engine, Id, Second, {1, 1, Revision + 2}, Edit)),
    ok = ?NIF:engine_close(Elsewhere),
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

flipped(Bytes, At) ->
    <<Before:At/binary, Byte, Behind/binary>> = Bytes,
    <<Before/binary, (Byte bxor 1), Behind/binary>>.

%% A consumer that keeps nothing does not make the node keep what it read.
read_chunks_do_not_pile_up() ->
    Size = 1 bsl 20,
    Count = 48,
    Chunks = [chunk(N, [simple(binary:copy(<<N>>, Size))], <<>>) || N <- lists:seq(0, Count - 1)],
    {Engine, Stream, Id, _} = uploaded(Chunks, Count),
    Most =
        in_process(fun() ->
                      {ok, Reader} = ?NIF:reader_open(Engine, self(), wake, Id, {offset, 0}),
                      most_lent(Engine, Reader, Count - 1, 0)
                   end),
    io:format(user, "~n  most chunk bytes held while reading ~b: ~b~n", [Count * Size, Most]),
    ?assert(Most =< 24 * Size),
    ok = ?NIF:upload_close(Stream),
    ok = ?NIF:engine_close(Engine).

most_lent(Engine, Reader, Last, Most0) ->
    #{lent_bytes := Lent} = ?NIF:engine_stats(Engine),
    Most = max(Lent, Most0),
    case ?NIF:reader_read(Reader, Last) of
        {chunk, #{chunk_id := Last}, _, _, _} ->
            Most;
        {chunk, _, _, _, _} ->
            most_lent(Engine, Reader, Last, Most);
        wait ->
            wait_for(wake),
            most_lent(Engine, Reader, Last, Most)
    end.

%% Writes a log of these chunks and has it uploaded.
uploaded(Chunks, NextOffset) ->
    Id = unique_id(),
    Dir = scratch(Id),
    {Engine, Stream, Ref} = begun(Id, Dir, Chunks),
    {Range, _Edit} = cut(Stream, Ref, NextOffset),
    ok = file:del_dir_r(Dir),
    {Engine, Stream, Id, Range}.

begun(Id, Dir, Chunks) ->
    {ok, Engine} = open(#{persist_threshold => 1, persist_interval_ms => 100}),
    ok = file:write_file(filename:join(Dir, segment_name(0)), [<<"OSIL", 1:32>>, Chunks]),
    Ref = make_ref(),
    Config = #{stream_id => Id, directory => unicode:characters_to_binary(Dir), epoch => 1,
               queue => <<"q">>, vhost => <<"/">>, arguments => <<"{}">>},
    {ok, Stream} = ?NIF:upload_open(Engine, self(), Ref, Config),
    <<_:24/binary, LastChunkId:64, _/binary>> = lists:last(Chunks),
    ok = ?NIF:upload_event(Stream, {committed, LastChunkId, 0}),
    read_pointer = push(Ref),
    ok = ?NIF:upload_event(Stream, {pointer, not_found}),
    {Engine, Stream, Ref}.

%% What is too little for a fragment is cut when asked for.
cut(Stream, Ref, NextOffset) ->
    eventually(fun() ->
                  #{log_next_offset := Next} = Status = ?NIF:upload_status(Stream),
                  Next =:= NextOffset andalso maps:get(assembly_next_offset, Status) =:= NextOffset
               end),
    ok = ?NIF:upload_event(Stream, cut),
    serve_until(Stream, Ref, NextOffset).

%% A reader that waits when the engine goes is told, and one that reads on sees the end.
end_of_the_engine_wakes() ->
    {ok, Engine} = open(),
    Id = unique_id(),
    ok = ?NIF:manifest_mark_pending(Engine, Id),
    Wake = {wake, make_ref()},
    {ok, Reader} = ?NIF:reader_open(Engine, self(), Wake, Id, {offset, 0}),
    ?assertEqual(wait, ?NIF:reader_read(Reader, 10)),
    ok = ?NIF:engine_close(Engine),
    wait_for(Wake),
    ?assertMatch({error, unavailable, <<_/binary>>}, ?NIF:reader_read(Reader, 10)).

list_and_delete() ->
    {ok, Engine} = open(),
    Ref = make_ref(),
    ok = ?NIF:list_objects(Engine, self(), Ref, <<"no-such-stream">>, start),
    ?assertEqual({page, [], done}, push(Ref)),
    ok = ?NIF:delete_objects(Engine, self(), Ref, [<<"rabbitmq/stream/none/data/x">>]),
    ?assertMatch({deleted, 1, 0}, push(Ref)),
    ok = ?NIF:engine_close(Engine).

%% Helpers -----------------------------------------------------------------------------------------

open() ->
    open(#{}).

open(Change) ->
    ?NIF:engine_open(self(), make_ref(), config(Change)).

config(Change) ->
    Endpoint = unicode:characters_to_binary(os:getenv("S3_ENDPOINT", "http://127.0.0.1:9")),
    maps:merge(#{bucket => env("S3_BUCKET", "test"),
                 region => <<"us-east-1">>,
                 endpoint => Endpoint,
                 path_style => true,
                 prefix => <<"rabbitmq/stream">>,
                 access_key_id => env("S3_ACCESS_KEY", "AKTEST"),
                 secret_access_key => env("S3_SECRET_KEY", "TheSecret"),
                 session_token => undefined,
                 tls_ca_file => undefined,
                 cluster => <<"nif-tests">>,
                 fragment_size_bytes => 64 bsl 20,
                 fragment_max_age_ms => 0,
                 persist_threshold => 10,
                 persist_interval_ms => 1000,
                 rebalance_threshold => 1024,
                 max_transfer_bytes_per_sec => unlimited,
                 max_transfer_burst_bytes => default,
                 max_concurrent_transfers => 4,
                 max_clock_skew_ms => 300_000,
                 system_time_ms => erlang:system_time(millisecond),
                 request_timeout_ms => 10000,
                 connect_timeout_ms => 1000,
                 transfer_deadline_ms => 60000,
                 worker_threads => 2,
                 worker_niceness => 7,
                 read_request_size_bytes => 4 bsl 20,
                 read_ahead_bytes => 8 bsl 20,
                 read_memory_bytes => 64 bsl 20,
                 read_cache_path => undefined,
                 read_cache_size_bytes => 1 bsl 30,
                 verify_crc_on_read => true},
               Change).

env(Name, Default) ->
    unicode:characters_to_binary(os:getenv(Name, Default)).

stream_config(Id) ->
    #{stream_id => iolist_to_binary(Id),
      directory => <<"/nonexistent/stream">>,
      epoch => 1,
      queue => <<"q">>,
      vhost => <<"/">>,
      arguments => <<"{}">>}.

unique_id() ->
    iolist_to_binary(["__nif_", integer_to_list(erlang:system_time(microsecond))]).

scratch(Id) ->
    Dir = filename:join(["/tmp", "stream-s3-nif-tests", Id]),
    ok = filelib:ensure_path(Dir),
    unicode:characters_to_list(Dir).

segment_name(Offset) ->
    lists:flatten(io_lib:format("~20..0B.segment", [Offset])).

simple(Record) ->
    <<0:1, (byte_size(Record)):31, Record/binary>>.

batch(NumRecords, Compression, UncompressedLen, Records) ->
    <<1:1, Compression:3, 0:4, NumRecords:16, UncompressedLen:32, (byte_size(Records)):32,
      Records/binary>>.

chunk(ChunkId, Entries, Filter) ->
    Data = iolist_to_binary(Entries),
    NumRecords = lists:sum([num_records(Entry) || Entry <- Entries]),
    <<5:4, 0:4, 0:8, (length(Entries)):16, NumRecords:32, 1700000000000:64, 1:64, ChunkId:64,
      (erlang:crc32(Data)):32, (byte_size(Data)):32, 0:32, (byte_size(Filter)):8, 0:24,
      Filter/binary, Data/binary>>.

num_records(<<0:1, _/bitstring>>) ->
    1;
num_records(<<1:1, _:7, NumRecords:16, _/binary>>) ->
    NumRecords.

one_by_one(_Data, _Position, _Offset, 0) ->
    [];
one_by_one(Data, Position, Offset, NumLeft) ->
    {[Entry], Position1, Offset1, NumLeft1} = ?NIF:chunk_entries(Data, Position, Offset, NumLeft, 1),
    [Entry | one_by_one(Data, Position1, Offset1, NumLeft1)].

%% The shell's part of the upload: answers until the persisted range ends at NextOffset.
serve_until(Stream, Ref, NextOffset) ->
    case push(Ref) of
        {range, #{next_offset := NextOffset} = Range, Edit} ->
            {Range, Edit};
        {range, _, _} ->
            serve_until(Stream, Ref, NextOffset);
        read_pointer ->
            ok = ?NIF:upload_event(Stream, {pointer, not_found}),
            serve_until(Stream, Ref, NextOffset);
        write_anchor ->
            ok = ?NIF:upload_event(Stream, {anchor, ok}),
            serve_until(Stream, Ref, NextOffset);
        {commit_pointer, 1, Uid, _Next, Expected} when is_integer(Uid) ->
            ok = ?NIF:upload_event(Stream, {pointer_committed, {ok, Expected + 1}}),
            serve_until(Stream, Ref, NextOffset)
    end.

read_chunks(Reader, Wake, LastChunkId) ->
    case ?NIF:reader_read(Reader, LastChunkId) of
        {chunk, #{chunk_id := LastChunkId} = Header, Filter, Data, Trailer} ->
            [{Header, Filter, Data, Trailer}];
        {chunk, Header, Filter, Data, Trailer} ->
            [{Header, Filter, Data, Trailer} | read_chunks(Reader, Wake, LastChunkId)];
        wait ->
            wait_for(Wake),
            read_chunks(Reader, Wake, LastChunkId)
    end.

read_end(Reader, Wake) ->
    case ?NIF:reader_read(Reader, 1 bsl 60) of
        {chunk, _, _, _, _} ->
            read_end(Reader, Wake);
        wait ->
            wait_for(Wake),
            read_end(Reader, Wake);
        End ->
            End
    end.

wait_for(Wake) ->
    receive
        Wake ->
            ok
    after ?RECEIVE_MS ->
        error({no_wake, process_info(self(), messages)})
    end.

push(Ref) ->
    receive
        {rabbitmq_stream_s3, Ref, Event} ->
            Event
    after ?RECEIVE_MS ->
        error({no_push, process_info(self(), messages)})
    end.

in_process(Fun) ->
    {_, Monitor} = spawn_monitor(fun() -> exit({value, Fun()}) end),
    receive
        {'DOWN', Monitor, _, _, {value, Value}} ->
            Value
    end.

%% Threads of engines, by the name that each gives itself when it starts: also of engines of the tests
%% before that are still ending.
engine_threads() ->
    length([Name || {<<"stream-s3", _/binary>> = Name, _} <- threads()]).

%% {Name, Niceness}, as the system has them: name in brackets, niceness the 17th field behind it.
threads() ->
    {ok, Tasks} = file:list_dir("/proc/self/task"),
    Stats = [file:read_file("/proc/self/task/" ++ Task ++ "/stat") || Task <- Tasks],
    [thread(Stat) || {ok, Stat} <- Stats].

thread(Stat) ->
    [_, Named] = binary:split(Stat, <<"(">>),
    [Name, Rest] = string:split(Named, <<") ">>, trailing),
    {Name, binary_to_integer(lists:nth(17, binary:split(Rest, <<" ">>, [global])))}.

%% Waits for what happens in the background, by trying until it is so.
eventually(Condition) ->
    eventually(Condition, erlang:monotonic_time(millisecond) + ?RECEIVE_MS).

eventually(Condition, Deadline) ->
    case Condition() of
        true ->
            ok;
        false ->
            ?assert(erlang:monotonic_time(millisecond) < Deadline),
            receive after 5 -> eventually(Condition, Deadline) end
    end.

time_us(Fun) ->
    {Us, _} = timer:tc(Fun),
    Us.

report(What, Times) ->
    report(What, Times, 1000).

%% The median is what a call costs; far above it is what the machine's other work costs.
report(What, Times, MaxUs) ->
    Sorted = lists:sort(Times),
    Count = length(Sorted),
    [Median, P99, Worst] = [lists:nth(max(1, ceil(Count * Q)), Sorted) || Q <- [0.5, 0.99, 1.0]],
    io:format(user,
              "~n  ~ts: median ~b us, 99 % ~b us, worst ~b us~n",
              [What, Median, P99, Worst]),
    ?assert(Median < MaxUs).
