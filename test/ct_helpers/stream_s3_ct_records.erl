%% Records whose every byte follows from their number, in chunks that are the same on every node.
%%
%% Over the stream protocol: ten records of 10 kB to a chunk. So record N is at offset N, and a chunk begins at each
%% tenth.
-module(stream_s3_ct_records).

-export([fill/3, read/4, check/1, chunk_of/1, payload/2]).

-import(stream_s3_ct_client, [publish/3, chunk/2, credit/3]).

-define(RECORD_BYTES, 10_000).
-define(CHUNK_RECORDS, 10).

%% Publishes whole chunks of records, each confirmed before the next, and each of a time of its own.
-spec fill(
    stream_s3_ct_client:client(), binary(), {First :: osiris:offset(), Count :: pos_integer()}
) -> ok.
fill(
    Client, Stream, {First, Count}
) when First rem ?CHUNK_RECORDS =:= 0, Count rem ?CHUNK_RECORDS =:= 0 ->
    lists:foreach(
        fun(Id) ->
            Numbers = lists:seq(Id, Id + ?CHUNK_RECORDS - 1),
            ok = publish(Client, Stream, [payload(Number, ?RECORD_BYTES) || Number <- Numbers]),
            ok = next_millisecond(erlang:system_time(millisecond))
        end,
        lists:seq(First, First + Count - 1, ?CHUNK_RECORDS)
    ).

%% Reads a subscription from an offset up to another: every chunk follows the one before, byte for byte.
-spec read(stream_s3_ct_client:client(), 0..255, osiris:offset(), osiris:offset()) -> ok.
read(_Client, _Id, Next, Until) when Next >= Until ->
    ok;
read(Client, Id, Next, Until) ->
    Chunk = #{id := Found, next := Following} = chunk(Client, Id),
    Found =:= Next orelse ct:fail("offset ~b where ~b should be", [Found, Next]),
    ok = check(Chunk),
    ok = credit(Client, Id, 1),
    read(Client, Id, Following, Until).

%% A chunk of fill/3: its records are what was published at their offsets.
-spec check(stream_s3_ct_client:chunk()) -> ok.
check(#{id := Id, next := Next, data := Data}) ->
    Records = records(Data),
    length(Records) =:= Next - Id orelse ct:fail("chunk ~b has ~b records", [Id, length(Records)]),
    lists:foreach(
        fun({Offset, Record}) ->
            Record =:= payload(Offset, ?RECORD_BYTES) orelse ct:fail(
                "the record at offset ~b is another", [Offset]
            )
        end,
        lists:enumerate(Id, Records)
    ).

%% The first offset of the chunk that has an offset.
-spec chunk_of(osiris:offset()) -> osiris:offset().
chunk_of(Offset) ->
    Offset - Offset rem ?CHUNK_RECORDS.

%% What record Number holds: its size and number, then bytes that follow from its number.
-spec payload(non_neg_integer(), pos_integer()) -> binary().
payload(Number, Size) when Size >= 16 ->
    Seed = crypto:hash(sha256, <<Number:64>>),
    Copies = binary:copy(Seed, (Size - 16) div 32 + 1),
    <<Size:64, Number:64, (binary:part(Copies, 0, Size - 16))/binary>>.

next_millisecond(Ms) ->
    case erlang:system_time(millisecond) of
        Ms -> next_millisecond(Ms);
        _ -> ok
    end.

records(<<>>) ->
    [];
records(<<1:1, 0:3, _:4, _Count:16, _:32, Size:32, Batch:Size/binary, Rest/binary>>) ->
    records(Batch) ++ records(Rest);
records(<<0:1, Size:31, Record:Size/binary, Rest/binary>>) ->
    [Record | records(Rest)].
