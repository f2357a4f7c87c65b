%% A local log that is empty although the remote tier has the stream: where it begins.
-module(rabbitmq_stream_s3_lost_log_tests).
-include_lib("eunit/include/eunit.hrl").

-define(DOUBLE, stream_s3_nif_double).
-define(END, rabbitmq_stream_s3_manifest_end).

lost_log_test_() ->
    {foreach, fun setup/0, fun cleanup/1, [
        {"a log without files begins at the durable end", fun no_files/0},
        {"a log with an empty segment begins at the durable end", fun empty_segment/0},
        {"records go on behind it and are read", fun goes_on/0},
        {"a replica follows from there, and its floor is what it has", fun followed/0},
        {"a log with a chunk is left alone", fun not_empty/0},
        {"a stream that has persisted nothing begins at 0", fun nothing_durable/0},
        {"the first writer of a stream asks nobody", fun first_writer/0},
        {"the first writer of a recovered stream begins at the durable end", fun recovered/0},
        {"the log of a replica is not begun", fun acceptor/0},
        {timeout, 30, {"a writer that cannot know ends", fun unknown/0}},
        {"a detached plugin is stock", fun detached/0},
        {"an earlier pointer needs the root", fun earlier_pointer/0},
        {"what does not answer is waited for within the limit", fun limit/0}
    ]}.

setup() ->
    ok = stream_s3_test_log:setup(),
    ok.

cleanup(_) ->
    stream_s3_test_log:cleanup(ok).

config(Epoch) ->
    Name = "lost_" ++ integer_to_list(erlang:unique_integer([positive])),
    Dir = filename:join(["/tmp", "stream_s3_eunit_" ++ os:getpid(), Name]),
    ok = filelib:ensure_path(Dir),
    #{dir => Dir, name => Name, epoch => Epoch, shared => osiris_log_shared:new()}.

id(#{name := Name}) -> list_to_binary(Name).

durable(#{} = Config, Next) ->
    ?DOUBLE:durable(id(Config), Next).

files(#{dir := Dir}) ->
    lists:sort([filename:basename(F) || F <- filelib:wildcard(filename:join(Dir, "*"))]).

begun_at_40(#{shared := Shared, epoch := Epoch} = Config, Log) ->
    ?assertEqual(
        ["00000000000000000040.index", "00000000000000000040.segment"], files(Config)
    ),
    ?assertMatch({41, {Epoch, 40, _}}, osiris_log:tail_info(Log)),
    ?assertEqual(40, osiris_log_shared:first_chunk_id(Shared)),
    ?assertEqual(40, osiris_log_shared:last_chunk_id(Shared)),
    ?assertEqual({{40, 40}, [{Epoch, 40}]}, osiris_log:overview(maps:get(dir, Config))),
    %% As if nothing had ever been tracked.
    ?assertEqual(
        #{offsets => #{}, sequences => #{}, timestamps => #{}},
        osiris_tracking:overview(osiris_log:recover_tracking(Log))
    ).

no_files() ->
    Config = config(2),
    ok = durable(Config, 40),
    begun_at_40(Config, osiris_log:init(Config)).

empty_segment() ->
    Config = config(1),
    ok = osiris_log:close(osiris_log:init(Config#{readers_counter_fun => fun(_) -> ok end})),
    ?assertMatch(["00000000000000000000.index" | _], files(Config)),
    ok = durable(Config, 40),
    begun_at_40(Config#{epoch := 2}, osiris_log:init(Config#{epoch := 2})).

goes_on() ->
    #{dir := Dir, name := Name, shared := Shared} = Config = config(2),
    ok = durable(Config, 40),
    Log0 = osiris_log:init(Config),
    Log = osiris_log:write([<<"two">>, <<"one">>], Log0),
    ok = osiris_log:set_committed_chunk_id(Log, 41),
    ?assertEqual(43, osiris_log:next_offset(Log)),
    Context = #{
        dir => Dir,
        name => Name,
        shared => Shared,
        readers_counter_fun => fun(_) -> ok end,
        options => #{},
        rabbitmq_stream_s3 => stock
    },
    {ok, Reader} = osiris_log:init_offset_reader(first, Context),
    {ok, #{chunk_id := 41}, Iterator, _} = osiris_log:chunk_iterator(Reader, 1),
    ?assertMatch({{41, <<"one">>}, _}, osiris_log:iterator_next(Iterator)),
    %% And it is not begun again.
    Reads = ?DOUBLE:quorum_reads(id(Config)),
    Again = osiris_log:init(Config#{epoch := 3, shared := osiris_log_shared:new()}),
    ?assertMatch({43, {2, 41, _}}, osiris_log:tail_info(Again)),
    ?assertEqual(Reads, ?DOUBLE:quorum_reads(id(Config))).

followed() ->
    #{dir := Dir} = Config = config(2),
    ok = durable(Config, 40),
    _ = osiris_log:init(Config),
    #{shared := Shared} = Replica = config(2),
    {Range, Epochs} = osiris_log:overview(Dir),
    Log = osiris_log:init_acceptor(Range, Epochs, Replica),
    %% Stock would say 39.
    ?assertEqual(40, osiris_log_shared:first_chunk_id(Shared)),
    ?assertEqual({40, empty}, osiris_log:tail_info(Log)),
    {ok, <<_:8/binary, Chunk/binary>>} = file:read_file(
        filename:join(Dir, "00000000000000000040.segment")
    ),
    ?assertMatch({41, {2, 40, _}}, osiris_log:tail_info(osiris_log:accept_chunk([Chunk], Log))).

not_empty() ->
    Config = config(1),
    _ = osiris_log:write([<<"a record">>], osiris_log:init(Config)),
    ok = durable(Config, 40),
    Log = osiris_log:init(Config#{epoch := 2, shared := osiris_log_shared:new()}),
    ?assertMatch({1, {1, 0, _}}, osiris_log:tail_info(Log)),
    ?assertEqual(0, ?DOUBLE:quorum_reads(id(Config))).

nothing_durable() ->
    Config = config(2),
    ?assertEqual({0, empty}, osiris_log:tail_info(osiris_log:init(Config))),
    ?assertEqual(1, ?DOUBLE:quorum_reads(id(Config))).

first_writer() ->
    Config = config(1),
    ok = durable(Config, 40),
    ?assertEqual({0, empty}, osiris_log:tail_info(osiris_log:init(Config))),
    ?assertEqual(0, ?DOUBLE:quorum_reads(id(Config))).

%% The epoch is 1 as for any new stream: who declared it said that it has a history.
recovered() ->
    Config = (config(1))#{rabbitmq_stream_s3_recovered => true},
    ok = durable(Config, 40),
    begun_at_40(Config, osiris_log:init(Config)),
    ?assertEqual(1, ?DOUBLE:quorum_reads(id(Config))).

acceptor() ->
    Config = config(2),
    ok = durable(Config, 40),
    ?assertEqual({0, empty}, osiris_log:tail_info(osiris_log:init_acceptor(empty, [], Config))),
    ?assertEqual(0, ?DOUBLE:quorum_reads(id(Config))).

unknown() ->
    Config = config(2),
    ok = durable(Config, 40),
    ok = ?DOUBLE:quorum(down),
    ?assertExit({stream_s3, durable_end_unknown}, osiris_log:init(Config)),
    %% The next one begins where this one could not.
    ok = ?DOUBLE:quorum(up),
    begun_at_40(Config, osiris_log:init(Config)).

detached() ->
    Config = config(2),
    ok = durable(Config, 40),
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    ?assertEqual({0, empty}, osiris_log:tail_info(osiris_log:init(Config))),
    ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped()).

earlier_pointer() ->
    Config = config(2),
    ok = durable(Config, unknown),
    ok = ?DOUBLE:persist(id(Config), {0, 40}, []),
    begun_at_40(Config, osiris_log:init(Config)).

limit() ->
    Config = config(2),
    ok = ?DOUBLE:quorum({hold, self()}),
    ?assertEqual({error, timeout}, ?END:find(id(Config), 50)),
    Asked =
        receive
            {asked, Pid} -> Pid
        end,
    Monitor = monitor(process, Asked),
    receive
        {'DOWN', Monitor, process, Asked, _} -> ok
    end,
    %% Nothing is left for the writer to find in its mailbox.
    ?assertEqual({message_queue_len, 0}, process_info(self(), message_queue_len)).
