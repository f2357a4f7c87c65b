%% Every way to name a place in a stream whose beginning is only in S3: on both sides of every boundary, on the node of
%% the writer and on a replica's.
%%
%% The same records are in a stream of a stock broker, in the same chunks: what that one answers has to come here too.
%% Times of chunks differ between the two: for them the right answer follows from the chunks themselves.
-module(reader_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    there_are_boundaries_of_every_kind/1,
    an_offset_begins_in_the_chunk_that_has_it/1,
    a_time_begins_in_the_first_chunk_that_is_not_older/1,
    first_last_next_and_places_beyond_the_end_are_those_of_stock/1,
    statistics_are_those_of_stock/1,
    the_number_of_messages_is_that_of_both_tiers/1,
    absolute_offsets_are_refused_as_stock_refuses_them/1,
    amqp_begins_at_the_very_record/1,
    a_stream_that_does_not_exist_is_refused_and_others_are_read/1,
    what_comes_next_is_for_consumers_that_wait_at_the_end/1,
    nothing_is_skipped_while_both_tiers_are_trimmed/1,
    nothing_went_wrong_meanwhile/1
]).

-import(stream_s3_ct_node, [rpc/4]).
-import(stream_s3_ct_places, [
    both/1, twin/1, boundaries/2, first_chunk/2, resolve_when_known/2, opened/2
]).
-import(stream_s3_ct_client, [
    open/1, close/1, with_client/2, subscribe/4, unsubscribe/2, chunk/2, stats/2, resolve/3
]).
-import(stream_s3_ct_records, [fill/3, chunk_of/1]).
-import(stream_s3_ct_tier, [counter/2, tier/3, floor/2, range/2]).
-import(stream_s3_ct_wait, [until/2, until/3]).

-define(STREAM, ~"places").
-define(COUNT, 1_000).
%% The protocol's number for a place that is an offset.
-define(OFFSET, 4).

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        there_are_boundaries_of_every_kind,
        an_offset_begins_in_the_chunk_that_has_it,
        a_time_begins_in_the_first_chunk_that_is_not_older,
        first_last_next_and_places_beyond_the_end_are_those_of_stock,
        statistics_are_those_of_stock,
        the_number_of_messages_is_that_of_both_tiers,
        absolute_offsets_are_refused_as_stock_refuses_them,
        amqp_begins_at_the_very_record,
        a_stream_that_does_not_exist_is_refused_and_others_are_read,
        what_comes_next_is_for_consumers_that_wait_at_the_end,
        nothing_is_skipped_while_both_tiers_are_trimmed,
        nothing_went_wrong_meanwhile
    ].

init_per_suite(Config) ->
    stream_s3_ct_places:start(Config).

end_per_suite(Config) ->
    stream_s3_ct_places:stop(Config).

%% Cases -------------------------------------------------------------------------------------------

there_are_boundaries_of_every_kind(Config) ->
    Keys = [Key || #{~"key" := Key} <- stream_s3_ct_s3:objects(proplists:get_value(s3, Config))],
    ?assertEqual(
        [~".fragment", ~".group", ~".kgroup", ~".manifest"], lists:usort(
            [filename:extension(Key) || Key <- Keys]
        )
    ),
    [?assert(length(boundaries(Config, Node)) > 40) || Node <- both(Config)],
    [?assert(floor(Node, ?STREAM) > ?COUNT div 2) || Node <- both(Config)].

an_offset_begins_in_the_chunk_that_has_it(Config) ->
    Chunks = #{Id => Chunk || #{id := Id} = Chunk <- proplists:get_value(chunks, Config)},
    Twin = open(twin(Config)),
    [
        begin
            Client = open(Node),
            Floor = floor(Node, ?STREAM),
            Served = counter(Node, ~"chunks_delivered_total"),
            Edges = inside([Edge + D || Edge <- boundaries(Config, Node), D <- [-1, 0, 1]]),
            Offsets = lists:usort(
                Edges ++ inside([Id + D || Id <- maps:keys(Chunks), D <- [0, 2, 9]])
            ),
            [
                begin
                    #{id := Id, md5 := Md5} = maps:get(chunk_of(Offset), Chunks),
                    ?assertMatch(
                        {Offset, #{id := Id, md5 := Md5}}, {Offset, first_chunk(Client, Offset)}
                    )
                end
             || Offset <- Offsets
            ],
            [
                begin
                    Id = chunk_of(Offset),
                    ?assertEqual(
                        {Offset, {ok, ?OFFSET, Id}}, {Offset, resolve_when_known(Client, Offset)}
                    ),
                    ?assertMatch({Offset, #{id := Id}}, {Offset, first_chunk(Twin, Offset)})
                end
             || Offset <- Edges
            ],
            Remote = length([Offset || Offset <- Offsets, chunk_of(Offset) < Floor]),
            ?assert(Remote > 100),
            ?assert(counter(Node, ~"chunks_delivered_total") >= Served + Remote),
            close(Client)
        end
     || Node <- both(Config)
    ],
    close(Twin).

a_time_begins_in_the_first_chunk_that_is_not_older(Config) ->
    Chunks = proplists:get_value(chunks, Config),
    S3 = proplists:get_value(s3, Config),
    Times = [Time || #{timestamp := Time} <- Chunks],
    Around = lists:usort([0, hd(Times) - 1_000 | [Time + D || Time <- Times, D <- [-1, 0, 1]]]),
    [
        begin
            Client = open(Node),
            Floor = floor(Node, ?STREAM),
            [AtFloor] = [Time || #{id := Id, timestamp := Time} <- Chunks, Id =:= Floor],
            Attach = fun(Asked) ->
                [#{id := Id, timestamp := Time} | _] = [
                    C
                 || #{timestamp := T} = C <- Chunks, T >= Asked
                ],
                Found = first_chunk(Client, {timestamp, Asked}),
                ?assertMatch({Asked, #{id := Id, timestamp := Time}}, {Asked, Found}),
                ?assertEqual(
                    {Asked, {ok, ?OFFSET, Id}},
                    {Asked, resolve_when_known(Client, {timestamp, Asked})}
                )
            end,
            Known = [Time || Time <- Around, Time =< lists:last(Times)],
            %% What is behind an older local chunk is read locally, without a request. A consumer that asks for the very
            %% first local chunk is sent to the remote tier: others of its time may come before it.
            Before = counter(Node, ~"chunks_delivered_total"),
            Requests = length(stream_s3_ct_s3:requests(S3, [{"operation", "GetObject"}])),
            lists:foreach(Attach, [Time || Time <- Known, Time > AtFloor]),
            ?assertEqual(Before, counter(Node, ~"chunks_delivered_total")),
            ?assertEqual(
                Requests, length(stream_s3_ct_s3:requests(S3, [{"operation", "GetObject"}]))
            ),
            lists:foreach(Attach, [Time || Time <- Known, Time =< AtFloor]),
            ?assert(counter(Node, ~"chunks_delivered_total") > Before),
            close(Client)
        end
     || Node <- both(Config)
    ].

first_last_next_and_places_beyond_the_end_are_those_of_stock(Config) ->
    Last = lists:last([Time || #{timestamp := Time} <- proplists:get_value(chunks, Config)]),
    Twin = open(twin(Config)),
    [
        begin
            Client = open(Node),
            [
                begin
                    #{id := Id, md5 := Md5} = first_chunk(Twin, Spec),
                    ?assertMatch({Spec, #{id := Id, md5 := Md5}}, {Spec, first_chunk(Client, Spec)})
                end
             || Spec <- [first, last]
            ],
            [
                ?assertEqual(
                    {Spec, resolve(Twin, ?STREAM, Spec)}, {Spec, resolve_when_known(Client, Spec)}
                )
             || Spec <- [first, last, next, ?COUNT, ?COUNT + 1_000, 1 bsl 62]
            ],
            ?assertEqual({ok, ?OFFSET, ?COUNT}, resolve_when_known(Client, {timestamp, Last + 1})),
            close(Client)
        end
     || Node <- both(Config)
    ],
    close(Twin).

statistics_are_those_of_stock(Config) ->
    Stats = [
        with_client(Node, fun(Client) -> stats(Client, ?STREAM) end)
     || Node <- [twin(Config) | both(Config)]
    ],
    ?assertMatch([#{~"first_chunk_id" := 0, ~"committed_chunk_id" := 990}], lists:usort(Stats)).

the_number_of_messages_is_that_of_both_tiers(Config) ->
    [Writer, Replica] = both(Config),
    Name = rpc(Writer, rabbit_misc, r, [~"/", queue, ?STREAM]),
    FirstOffset = fun(Node, Kind) ->
        maps:get(first_offset, rpc(Node, osiris_counters, overview, [{Kind, Name}]))
    end,
    ?assertEqual(0, FirstOffset(Writer, osiris_writer)),
    ?assertEqual(0, FirstOffset(Replica, osiris_replica)),
    %% RabbitMQ counts every five seconds.
    Messages = fun() ->
        {ok, Queue} = rpc(Writer, rabbit_amqqueue, lookup, [?STREAM, ~"/"]),
        rpc(Writer, rabbit_amqqueue, info, [Queue, [messages]]) =:= [{messages, ?COUNT}] andalso ok
    end,
    ok = until("all messages are counted", Messages).

absolute_offsets_are_refused_as_stock_refuses_them(Config) ->
    Twin = twin(Config),
    [
        begin
            Floor = floor(Node, ?STREAM),
            [
                case opened(Node, Offset) of
                    {ok, Next} when Offset < Floor ->
                        %% A remote reader begins at the offset itself; the chunk that has it is what it reads.
                        ?assertEqual({Offset, Offset}, {Offset, Next}),
                        ?assertEqual(
                            {Offset, {ok, chunk_of(Offset)}}, {Offset, opened(Twin, Offset)}
                        );
                    Answer ->
                        ?assertEqual({Offset, opened(Twin, Offset)}, {Offset, Answer})
                end
             || Offset <- [0, 7, Floor - 1, Floor, ?COUNT - 1, ?COUNT, ?COUNT + 1, 1 bsl 62]
            ],
            ?assertMatch({error, {offset_out_of_range, _}}, opened(Node, ?COUNT))
        end
     || Node <- both(Config)
    ].

%% In a stream of single records: a stock broker leaves those that share an entry out of AMQP.
amqp_begins_at_the_very_record(Config) ->
    Stream = ~"places-amqp",
    Count = 400,
    Size = 10_000,
    Nodes = [Writer | _] = both(Config),
    ok = stream_s3_ct_amqp:declare(Writer, Stream, [
        {~"x-stream-max-segment-size-bytes", long, 1_000_000}, {~"x-initial-cluster-size", long, 2}
    ]),
    %% Each time at least one chunk.
    [
        ok = stream_s3_ct_amqp:publish(Writer, Stream, {First, 50}, Size)
     || First <- lists:seq(0, Count - 1, 50)
    ],
    Offsets = stream_s3_ct_amqp:consume(Writer, Stream, {longstr, ~"first"}, {0, Count}, Size),
    Next = lists:last(Offsets) + 1,
    [
        begin
            Floor = tier(Node, Stream, Next),
            Served = counter(Node, ~"chunks_delivered_total"),
            %% The first local record, and those around it.
            Local = length([Offset || Offset <- Offsets, Offset < Floor]),
            [
                begin
                    Until = min(Number + 50, Count),
                    Records = {Number, Until - Number},
                    Expected = [Offset | _] = lists:sublist(Offsets, Number + 1, Until - Number),
                    Classic = stream_s3_ct_amqp:consume(
                        Node, Stream, {long, Offset}, Records, Size
                    ),
                    ?assertEqual({~"0-9-1", Expected}, {~"0-9-1", Classic}),
                    ?assertEqual(
                        {~"1.0", Expected},
                        {~"1.0", stream_s3_ct_amqp10:consume(Node, Stream, Offset, Records, Size)}
                    )
                end
             || Number <- lists:usort([0, 2, 99, 100, Local - 1, Local, Local + 2, Count - 1]),
                Number < Count
            ],
            ?assert(counter(Node, ~"chunks_delivered_total") > Served)
        end
     || Node <- Nodes
    ],
    ok = stream_s3_ct_amqp:delete(Writer, Stream).

a_stream_that_does_not_exist_is_refused_and_others_are_read(Config) ->
    StreamDoesNotExist = 2,
    [
        begin
            Client = open(Node),
            Open = subscribe(Client, ?STREAM, first, 1),
            ?assertMatch(#{id := 0}, chunk(Client, Open)),
            ?assertEqual(
                {error, StreamDoesNotExist},
                stream_s3_ct_client:subscribe(Client, ~"missing", first, 1, #{})
            ),
            ?assertEqual({error, StreamDoesNotExist}, resolve(Client, ~"missing", first)),
            ok = stream_s3_ct_client:credit(Client, Open, 1),
            ?assertMatch(#{id := 10}, chunk(Client, Open)),
            close(Client)
        end
     || Node <- both(Config)
    ].

what_comes_next_is_for_consumers_that_wait_at_the_end(Config) ->
    [Writer | _] = Nodes = both(Config),
    Specs = [next, ?COUNT, ?COUNT + 1_000, {timestamp, erlang:system_time(millisecond) + 60_000}],
    Waiting = [
        {Client, subscribe(Client, ?STREAM, Spec, 1)}
     || Node <- [twin(Config) | Nodes], Client <- [open(Node)], Spec <- Specs
    ],
    [
        with_client(Node, fun(Client) -> ok = fill(Client, ?STREAM, {?COUNT, 10}) end)
     || Node <- [Writer, twin(Config)]
    ],
    [?assertMatch(#{id := ?COUNT}, chunk(Client, Id)) || {Client, Id} <- Waiting],
    [close(Client) || Client <- lists:usort([Client || {Client, _} <- Waiting])].

%% Consumers come and go at every place while the user's retention takes the beginning and tiering the local log.
%% A consumer may only be moved to where the stream begins by then, and must see all that follows.
nothing_is_skipped_while_both_tiers_are_trimmed(Config) ->
    [Writer, Replica] = Nodes = both(Config),
    ok = stream_s3_ct_tier:set_policy(Writer, ?STREAM, ~"max-length-bytes", 6_000_000),
    {Writing, Monitor} = spawn_monitor(fun() ->
        with_client(Writer, fun(Client) ->
            [
                begin
                    ok = fill(Client, ?STREAM, {First, 100}),
                    ok = stream_s3_ct_tier:flush(Writer, ?STREAM, First + 100)
                end
             || First <- lists:seq(?COUNT + 10, ?COUNT + 810, 100)
            ]
        end)
    end),
    Begin = fun(Node) -> element(1, range(Node, ?STREAM)) end,
    Clients = [{Node, open(Node)} || Node <- Nodes],
    _ = rand:seed(exsss, 11),
    Rounds = attach_while(Writing, Begin, Clients, 0),
    ?assert(Rounds >= 20),
    receive
        {'DOWN', Monitor, process, Writing, Reason} -> ?assertEqual(normal, Reason)
    end,
    ok = until("retention took the beginning", fun() -> Begin(Writer) > 300 andalso ok end, 60_000),
    ok = until("the replica follows", fun() -> Begin(Replica) =:= Begin(Writer) andalso ok end),
    [
        begin
            First = Begin(Node),
            ?assert(First < floor(Node, ?STREAM)),
            ?assertMatch(#{id := First}, first_chunk(Client, first)),
            ?assertMatch(#{id := First}, first_chunk(Client, {timestamp, 0})),
            ?assertMatch(#{~"first_chunk_id" := First}, stats(Client, ?STREAM)),
            close(Client)
        end
     || {Node, Client} <- Clients
    ].

nothing_went_wrong_meanwhile(Config) ->
    [?assertEqual(0, counter(Node, ~"native_panics_total")) || Node <- both(Config)],
    [?assertEqual([], stream_s3_ct_node:errors(Node)) || Node <- both(Config)].

%% Helpers -----------------------------------------------------------------------------------------

inside(Offsets) ->
    [Offset || Offset <- lists:usort(Offsets), Offset >= 0, Offset < ?COUNT].

attach_while(Writing, Begin, Clients, Rounds) ->
    {Node, Client} = lists:nth(rand:uniform(2), Clients),
    {First, Next} = range(Node, ?STREAM),
    Random = First + rand:uniform(Next - First - 20) - 1,
    {Spec, Asked} = lists:nth(
        rand:uniform(4), [{first, First}, {0, First}, {First, First}, {Random, Random}]
    ),
    %% Of four, so that the second chunk needs no more credit (see subscribe/4).
    Id = subscribe(Client, ?STREAM, Spec, 4),
    Chunk = #{id := Found, next := Following} = chunk(Client, Id),

    FollowUp = #{id := Then} = chunk(Client, Id),
    Now = lists:max([Begin(N) || {N, _} <- Clients]),
    Exact = chunk_of(Asked),
    ?assert(Exact =< Found andalso Found =< max(Exact, Now), {Spec, First, Found, Now}),
    ?assert(Following =< Then andalso Then =< max(Following, Now), {Spec, Following, Then, Now}),
    [ok = stream_s3_ct_records:check(C) || C <- [Chunk, FollowUp]],
    ok = unsubscribe(Client, Id),
    case is_process_alive(Writing) of
        true -> attach_while(Writing, Begin, Clients, Rounds + 1);
        false -> Rounds + 1
    end.
