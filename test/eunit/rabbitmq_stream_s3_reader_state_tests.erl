%% Readers that another version of the plugin has left in a connection; and what becomes of readers
%% while there is no plugin.
-module(rabbitmq_stream_s3_reader_state_tests).
-include_lib("eunit/include/eunit.hrl").

-import(stream_s3_test_reader, [open/3, all/1, take/2, ids/1, close/1, tier/1, stock/4, uploaded/2]).

-define(READER, stream_s3_test_reader).
-define(LOG, stream_s3_test_log).
-define(TAG, rabbitmq_stream_s3_log_reader).
%% Of the record reader, down to `timer`; those of a time without versions had 17 fields.
-define(KEPT_FIELDS, 14).
-define(UNVERSIONED_SIZE, 17).

reader_state_test_() ->
    {setup, fun ?READER:setup/0, fun ?READER:cleanup/1, [
        ?READER:both([
            fun a_local_reader_without_a_version_goes_on/1,
            fun a_remote_reader_without_a_version_goes_on/1,
            fun a_reader_of_a_later_version_goes_on/1,
            fun a_remote_reader_of_another_shape_goes_on/1,
            fun one_that_is_not_understood_is_refused/1,
            fun a_local_reader_is_stock_while_the_plugin_is_off/1,
            fun a_remote_reader_waits_while_the_plugin_is_off/1,
            fun nobody_jumps_while_the_plugin_is_off/1
        ]),
        ?READER:named([
            fun the_rest_of_a_remote_chunk_needs_no_plugin/0,
            fun a_reader_can_be_asked_and_closed_while_the_plugin_is_off/0
        ])
    ]}.

a_local_reader_without_a_version_goes_on(How) ->
    Log = ?LOG:append(9, ?LOG:new("old_local")),
    goes_on(How, Log, fun unversioned/1, local).

a_remote_reader_without_a_version_goes_on(How) ->
    Log = ?LOG:append(9, ?LOG:new("old_remote")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    goes_on(How, Log, fun unversioned/1, remote).

a_reader_of_a_later_version_goes_on(How) ->
    Log = ?LOG:append(9, ?LOG:new("later")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    goes_on(How, Log, fun later/1, remote).

a_remote_reader_of_another_shape_goes_on(How) ->
    Log = ?LOG:append(9, ?LOG:new("other_remote")),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Other = fun(Reader) ->
        {remote, Remote} = element(3, Reader),
        [remote, _Handle, _Engine, Next | _] = tuple_to_list(Remote),
        later(setelement(3, Reader, {remote, {remote, old_handle, old_engine, Next, more, more}}))
    end,
    goes_on(How, Log, Other, remote).

%% All of the stream, once each, although the reader is replaced by one of another version.
goes_on(How, Log, Change, Tier) ->
    Spec = first,
    {First, Reader0} = take(2, open(How, Spec, Log)),
    ?assertEqual(Tier, tier(Reader0)),
    Reader1 = changed(Change, Reader0),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual([0, 2, 4, 6, 8, 10, 12, 14, 16], ids(First ++ Rest)),
    close(Reader2).

one_that_is_not_understood_is_refused(How) ->
    Log = ?LOG:append(3, ?LOG:new("unknown")),
    {_, Reader0} = take(1, open(How, first, Log)),
    Unknown = changed(fun(Reader) -> {newer, [element(12, Reader)], element(12, Reader)} end, Reader0),
    ?READER:with_quiet_log(fun() ->
        %% No chunk, and its owner hears that the subscription ends (of a log without a member only AMQP can).
        {end_of_stream, Same} = ?READER:next(Unknown),
        ?assertEqual(How =:= chunk_iterator, ends()),
        {end_of_stream, _} = ?READER:next(Same),
        ?assertNot(ends())
    end),
    ok = close(Unknown),
    close(Reader0).

ends() ->
    receive
        {'$gen_cast', {queue_event, _, deleted_replica}} -> true
    after 0 -> false
    end.

a_local_reader_is_stock_while_the_plugin_is_off(How) ->
    Log = ?LOG:append(9, ?LOG:new("off_local")),
    Expected = stock(How, first, #{}, Log),
    {First, Reader0} = take(2, open(How, first, Log)),
    {Middle, Reader1} = while_off(fun() -> take(3, Reader0) end),
    ?assertEqual(local, tier(Reader1)),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Middle ++ Rest),
    close(Reader2).

a_remote_reader_waits_while_the_plugin_is_off(How) ->
    Log = ?LOG:append(9, ?LOG:new("off_remote")),
    Expected = stock(How, first, #{}, Log),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    {First, Reader0} = take(2, open(How, first, Log)),
    Reader1 = while_off(fun() ->
        {end_of_stream, R1} = ?READER:next(Reader0),
        %% It asks again by itself.
        ?assertMatch({queue_event, _, {osiris_offset, _, _}}, woken()),
        {end_of_stream, R2} = ?READER:next(R1),
        R2
    end),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader2).

nobody_jumps_while_the_plugin_is_off(How) ->
    Log = ?LOG:append(9, ?LOG:new("off_jump")),
    Expected = stock(How, first, #{}, Log),
    {First, Reader0} = take(2, open(How, first, Log)),
    uploaded(18, Log),
    2 = ?LOG:trim(18, Log),
    Reader1 = while_off(fun() ->
        {end_of_stream, R} = ?READER:next(Reader0),
        R
    end),
    {Rest, Reader2} = all(Reader1),
    ?assertEqual(Expected, First ++ Rest),
    close(Reader2).

the_rest_of_a_remote_chunk_needs_no_plugin() ->
    Entries = [
        <<"one">>,
        <<"two">>,
        {batch, 2, 0, 10, <<3:32, "abc", 3:32, "def">>},
        list_to_binary(lists:duplicate(300, $x)),
        <<>>
    ],
    Log = ?LOG:append(lists:reverse(Entries), 0, <<>>, ?LOG:append(1, ?LOG:new("off_iterator"))),
    [_, {#{num_entries := 5} = Header, _, Data, _}] = ?LOG:chunks(Log),
    Whole = rabbitmq_stream_s3_reader_remote:iterator(Header, split(Data)),
    Expected = entries(Whole),
    ?assertEqual(5, length(Expected)),
    %% From the start, and behind what was decoded already.
    ?assertEqual(Expected, while_off(fun() -> entries(Whole) end)),
    {First, Rest} = osiris_log:iterator_next(Whole),
    ?assertEqual(Expected, [First | while_off(fun() -> entries(Rest) end)]).

split(Data) ->
    <<A:5/binary, B:7/binary, C/binary>> = Data,
    [A, B, C].

entries(Iterator) ->
    case osiris_log:iterator_next(Iterator) of
        end_of_chunk -> [];
        {Entry, Next} -> [Entry | entries(Next)]
    end.

a_reader_can_be_asked_and_closed_while_the_plugin_is_off() ->
    lists:foreach(
        fun(Remote) ->
            Log = ?LOG:append(9, ?LOG:new("off_asked")),
            _ = [{uploaded(18, Log), 2 = ?LOG:trim(18, Log)} || Remote],
            {_, {_, _, State} = Reader} = take(2, open(chunk_iterator, first, Log)),
            _ = ?READER:readers(),
            ?assertEqual({Remote, [4, 16]}, while_off(fun() ->
                {Remote, [osiris_log:next_offset(State), osiris_log:committed_chunk_id(State)]}
            end)),
            CounterId = element(7, element(2, State)),
            ?assertNotEqual(undefined, osiris_counters:overview(CounterId)),
            ok = while_off(fun() -> close(Reader) end),
            ?assertEqual([-1], ?READER:readers()),
            ?assertEqual(undefined, osiris_counters:overview(CounterId))
        end,
        [true, false]
    ).

while_off(Fun) ->
    ok = rabbitmq_stream_s3_host_osiris:detach(),
    try
        Fun()
    after
        ok = rabbitmq_stream_s3_host_osiris:attach(rabbitmq_stream_s3_reader_stats:wrapped())
    end.

woken() ->
    receive
        {'$gen_cast', Event} -> Event
    after 5000 -> nothing
    end.

changed(Change, {How, Sockets, {?TAG, Reader}}) ->
    {How, Sockets, {?TAG, Change(Reader)}}.

%% As it was when readers had no version.
unversioned(Reader) ->
    list_to_tuple(lists:sublist(tuple_to_list(Reader), ?UNVERSIONED_SIZE)).

%% What is not kept is of another meaning.
later(Reader) ->
    Kept = lists:sublist(tuple_to_list(Reader), ?KEPT_FIELDS),
    list_to_tuple(Kept ++ [something, [new], <<"now">>, 4711, more]).
