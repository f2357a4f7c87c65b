%% What is damaged in S3 is never served: the stream that has the damage says so and waits or stops there, nothing is
%% destroyed, and its neighbours notice nothing.
-module(damage_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    a_fragment_without_its_end_is_served_up_to_the_damage/1,
    a_fragment_without_its_index_stays_where_it_is/1,
    flipped_bits_end_the_subscription_and_no_other/1,
    a_damaged_root_is_reported_once_and_its_history_waits/1,
    a_neighbour_of_damaged_roots_reads_and_uploads/1,
    nothing_is_written_or_deleted_because_of_a_damaged_root/1,
    a_root_that_is_whole_again_serves_everything/1
]).

-import(stream_s3_ct_client, [open/1, close/1, subscribe/4, chunk/2, chunk/3, credit/3, stats/2]).
-import(stream_s3_ct_records, [fill/3, read/4]).
-import(stream_s3_ct_s3, [keys/2, get/2, put/3]).
-import(stream_s3_ct_tier, [counter/2, flush/3, tier/3, fragments/3, stream_id/2, stream_status/2]).
-import(stream_s3_ct_wait, [until/2]).

-define(NEIGHBOUR, ~"neighbour").
-define(END, 300).
%% A consumer that must be given nothing is listened to for so long.
-define(SILENCE_MS, 500).

suite() ->
    [{timetrap, {minutes, 3}}].

all() ->
    [
        a_fragment_without_its_end_is_served_up_to_the_damage,
        a_fragment_without_its_index_stays_where_it_is,
        flipped_bits_end_the_subscription_and_no_other,
        a_damaged_root_is_reported_once_and_its_history_waits,
        a_neighbour_of_damaged_roots_reads_and_uploads,
        nothing_is_written_or_deleted_because_of_a_damaged_root,
        a_root_that_is_whole_again_serves_everything
    ].

%% Streams whose root is damaged while the node is down, and how.
roots() ->
    #{
        ~"short" => fun(Root) -> binary:part(Root, 0, 40) end,
        ~"partial-entry" => fun(Root) -> binary:part(Root, 0, byte_size(Root) - 7) end,
        ~"unknown-version" => fun(<<Magic:4/binary, _:32, Rest/binary>>) ->
            <<Magic/binary, 2:32, Rest/binary>>
        end,
        ~"zeros" => fun(Root) -> binary:copy(<<0>>, byte_size(Root)) end,
        ~"range" => fun(<<A:8/binary, First:8/binary, _:8/binary, Rest/binary>>) ->
            <<A/binary, First/binary, First/binary, Rest/binary>>
        end
    }.

init_per_suite(Config) ->
    S3 = stream_s3_ct_s3:start("damage-suite"),
    {Name, Options} = stream_s3_ct_tier:node("damage1", S3, [
        {"fragment_size", "300000"}, {"read.resolve_timeout", "1s"}, {"fragment_max_age", "1h"}
    ]),
    Node = stream_s3_ct_node:start(Name, Options),
    [ok = history(Node, Stream) || Stream <- [?NEIGHBOUR | maps:keys(roots())]],
    [{s3, S3}, {broker, Node} | Config].

end_per_suite(Config) ->
    ok = stream_s3_ct_node:wipe(proplists:get_value(broker, Config)),
    ok = stream_s3_ct_s3:stop(proplists:get_value(s3, Config)).

%% Cases -------------------------------------------------------------------------------------------

a_fragment_without_its_end_is_served_up_to_the_damage(Config) ->
    {Node, S3} = setup(Config),
    Stream = ~"without-data",
    ok = history(Node, Stream),
    {First, Key} = second_fragment(S3, Node, Stream),
    Whole = get(S3, Key),
    ok = put(S3, Key, binary:part(Whole, 0, byte_size(Whole) div 2)),
    {Reached, unavailable} = read_to_the_damage(Node, Stream),
    ?assert(First =< Reached andalso Reached < ?END),
    ?assert(lists:member(Key, keys(S3, [stream_id(Node, Stream)]))).

a_fragment_without_its_index_stays_where_it_is(Config) ->
    {Node, S3} = setup(Config),
    Stream = ~"without-index",
    ok = history(Node, Stream),
    {First, Key} = second_fragment(S3, Node, Stream),
    Whole = get(S3, Key),
    ok = put(S3, Key, binary:part(Whole, 0, byte_size(Whole) - 30)),
    %% What is delivered is right. A consumer from the beginning does not need the index.
    {Reached, _} = read_to_the_damage(Node, Stream),
    ?assert(First =< Reached),
    ?assert(lists:member(Key, keys(S3, [stream_id(Node, Stream)]))).

flipped_bits_end_the_subscription_and_no_other(Config) ->
    {Node, S3} = setup(Config),
    Stream = ~"flipped",
    ok = history(Node, Stream),
    {First, Key} = second_fragment(S3, Node, Stream),
    [_, _, Behind | _] = fragments(S3, Node, Stream),
    Whole = get(S3, Key),
    Middle = byte_size(Whole) div 2,
    <<Before:Middle/binary, Byte, After/binary>> = Whole,
    ok = put(S3, Key, <<Before/binary, (Byte bxor 16#ff), After/binary>>),
    Client = open(Node),
    Beside = subscribe(Client, ?NEIGHBOUR, first, 1),
    ?assertMatch(#{id := 0}, chunk(Client, Beside)),
    {Reached, unavailable} = read_to_the_damage(Node, Stream),
    ?assert(First =< Reached andalso Reached < ?END),
    ?assert(counter(Node, ~"chunk_crc_mismatches_total") > 0),
    %% A subscription of another stream continues, and what is behind the damage can be read.
    ok = credit(Client, Beside, 1),
    ?assertMatch(#{id := 10}, chunk(Client, Beside)),
    ok = read(Client, subscribe(Client, Stream, Behind, 10), Behind, ?END),
    ?assertEqual([], stream_s3_ct_client:unavailable(Client)),
    close(Client).

a_damaged_root_is_reported_once_and_its_history_waits(Config) ->
    {Node, S3} = setup(Config),
    Damages = #{
        {Stream, Id, Key} => Damage
     || Stream := Damage <- roots(),
        Id <- [stream_id(Node, Stream)],
        Key <- keys(S3, [<<Id/binary, "/metadata/root.">>])
    },
    ok = stream_s3_ct_node:stop(Node),
    Whole = #{Key => get(S3, Key) || {_, _, Key} := _ <- Damages},
    [ok = put(S3, Key, Damage(maps:get(Key, Whole))) || {_, _, Key} := Damage <- Damages],
    Objects = [maps:get(~"key", Object) || Object <- stream_s3_ct_s3:objects(S3)],
    [#{~"id" := Last} | _] = lists:reverse(stream_s3_ct_s3:requests(S3, [])),
    Node = restart(Node),
    Client = open(Node),
    [
        begin
            ok = until("the problem is shown", fun() ->
                case stream_status(Node, Stream) of
                    {ok, #{problem_kind := manifest}} -> ok;
                    _ -> false
                end
            end),
            ?assertMatch([_], stream_s3_ct_node:warnings(Node, [Id, ~"manifest"])),
            ?assertMatch(#{~"first_chunk_id" := -1}, stats(Client, Stream)),
            Waits = subscribe(Client, Stream, first, 1),
            ?assertEqual(none, chunk(Client, Waits, ?SILENCE_MS)),
            %% The writer takes records all the while.
            ok = fill(Client, Stream, {?END, 10})
        end
     || {Stream, Id} <- lists:usort([{Stream, Id} || {Stream, Id, _} := _ <- Damages])
    ],
    close(Client),
    {save_config, [{whole, Whole}, {objects, Objects}, {last, Last}]}.

a_neighbour_of_damaged_roots_reads_and_uploads(Config) ->
    {Node, _} = setup(Config),
    Client = open(Node),
    ok = fill(Client, ?NEIGHBOUR, {?END, 100}),
    ok = flush(Node, ?NEIGHBOUR, ?END + 100),
    ok = read(Client, subscribe(Client, ?NEIGHBOUR, first, 10), 0, ?END + 100),
    close(Client),
    saved(Config).

nothing_is_written_or_deleted_because_of_a_damaged_root(Config) ->
    {Node, S3} = setup(Config),
    {save_config, Saved} = saved(Config),
    Ids = [stream_id(Node, Stream) || Stream <- maps:keys(roots())],
    OfThem = fun(Key) -> lists:any(fun(Id) -> binary:match(Key, Id) =/= nomatch end, Ids) end,
    Keys = [maps:get(~"key", Object) || Object <- stream_s3_ct_s3:objects(S3)],
    ?assertEqual(
        lists:filter(OfThem, proplists:get_value(objects, Saved)), lists:filter(OfThem, Keys)
    ),
    After = integer_to_list(proplists:get_value(last, Saved)),
    Changes = [
        Key
     || Operation <- ["PutObject", "DeleteObject"],
        #{~"key" := Key} <-
            stream_s3_ct_s3:requests(S3, [{"operation", Operation}, {"after", After}])
    ],
    ?assertEqual([], lists:filter(OfThem, Changes)),
    {save_config, Saved}.

a_root_that_is_whole_again_serves_everything(Config) ->
    {Node, S3} = setup(Config),
    {save_config, Saved} = saved(Config),
    [ok = put(S3, Key, Bytes) || Key := Bytes <- proplists:get_value(whole, Saved)],
    Client = open(Node),
    [
        begin
            ok = flush(Node, Stream, ?END + 10),
            ok = read(Client, subscribe(Client, Stream, first, 10), 0, ?END + 10)
        end
     || Stream <- maps:keys(roots())
    ],
    close(Client).

%% Helpers -----------------------------------------------------------------------------------------

setup(Config) ->
    {proplists:get_value(broker, Config), proplists:get_value(s3, Config)}.

saved(Config) ->
    {_Case, Saved} = proplists:get_value(saved_config, Config),
    {save_config, Saved}.

%% A stream whose beginning is only in S3.
history(Node, Stream) ->
    Client = open(Node),
    ok = stream_s3_ct_client:create(
        Client, Stream, #{~"stream-max-segment-size-bytes" => ~"1000000"}
    ),
    ok = fill(Client, Stream, {0, ?END}),
    close(Client),
    Floor = tier(Node, Stream, ?END),
    ?assert(Floor >= 100),
    ok.

%% Its data region lies in what is only in S3.
second_fragment(S3, Node, Stream) ->
    [_, First | _] = fragments(S3, Node, Stream),
    Name = iolist_to_binary(io_lib:format("/data/~20..0b.", [First])),
    [Key] = keys(S3, [stream_id(Node, Stream), Name]),
    {First, Key}.

%% Reads from the beginning: how far, and whether the server has said that the stream is not available.
read_to_the_damage(Node, Stream) ->
    Client = open(Node),
    Id = subscribe(Client, Stream, first, 5),
    Result = read_on(Client, Stream, Id, 0),
    %% Credit that comes after the end is refused, and the connection stays.
    ok = credit(Client, Id, 1),
    #{} = stats(Client, ?NEIGHBOUR),
    close(Client),
    Result.

read_on(_Client, _Stream, _Id, ?END) ->
    {?END, whole};
read_on(Client, Stream, Id, Next) ->
    receive
        {unavailable, Client, Stream} -> {read_what_is_here(Client, Id, Next), unavailable}
    after 0 ->
        case chunk(Client, Id, 100) of
            none ->
                read_on(Client, Stream, Id, Next);
            #{id := Next, next := Following} = Chunk ->
                ok = stream_s3_ct_records:check(Chunk),
                ok = credit(Client, Id, 1),
                read_on(Client, Stream, Id, Following)
        end
    end.

read_what_is_here(Client, Id, Next) ->
    case chunk(Client, Id, 0) of
        none ->
            Next;
        #{id := Next, next := Following} = Chunk ->
            ok = stream_s3_ct_records:check(Chunk),
            read_what_is_here(Client, Id, Following)
    end.

%% The node is stopped already, and stops again without having run.
restart(Node) ->
    Again = stream_s3_ct_node:restart(Node),
    [
        ok = stream_s3_ct_tier:wait_member(Again, Stream)
     || Stream <- [?NEIGHBOUR | maps:keys(roots())]
    ],
    Again.
