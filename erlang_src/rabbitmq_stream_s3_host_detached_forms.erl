-module(rabbitmq_stream_s3_host_detached_forms).
-moduledoc """
Owns what the wrappers in osiris_log do while the plugin is off, as text of functions that are
added to it. RabbitMQ unloads the plugin's modules when it is disabled, and readers of ours live on
in connections, and writers go on to write snapshots of stored offsets: so this cannot be a module
of the plugin.

Does not own when it is asked (rabbitmq_stream_s3_host_forms), what is kept
(rabbitmq_stream_s3_status_hidden).

A local reader goes on as a stock one. One that needs the remote tier waits: it asks again now and
then, and goes on when the plugin is on again. Positions: rabbitmq_stream_s3_reader.hrl, and the
offset of a remote reader in rabbitmq_stream_s3_reader_remote.
""".

-export([functions/1, kept_key/0]).

-define(KEPT, {osiris_log, rabbitmq_stream_s3_kept}).

-doc "The functions; Iterator are the fields of osiris' record of that name.".
-spec functions([atom()]) -> [string()].
functions(Iterator) ->
    [
        kept(),
        read(),
        wait(),
        local(),
        iterator_next(Iterator),
        next_offset(),
        committed_offset(),
        committed_chunk_id(),
        close()
    ].

-doc """
The persistent term that says below what no stored offset is dropped: `all` (nothing is), or by
stream id `{FirstOffset, FirstTimestamp}`.
""".
-spec kept_key() -> term().
kept_key() ->
    ?KEPT.

kept() ->
    lists:flatten(
        io_lib:format(
            "'$kept'(Which, State, Local) ->"
            "    case persistent_term:get(~p, none) of"
            "        none -> Local;"
            "        all -> min(Local, 0);"
            "        Kept ->"
            "            Name = unicode:characters_to_binary(get_name(State)),"
            "            case Kept of"
            "                #{Name := {Offset, _}} when Which =:= first_offset ->"
            "                    min(Local, Offset);"
            "                #{Name := {_, Timestamp}} -> min(Local, Timestamp);"
            "                _ -> Local"
            "            end"
            "    end.",
            [?KEPT]
        )
    ).

%% A stock reader jumps over what the floor has passed.
read() ->
    "'$detached_read'(Ours, Read) ->"
    "    case '$detached_local'(Ours) of"
    "        {ok, Log} ->"
    "            Next = '$stock_next_offset'(Log),"
    "            case osiris_log_shared:first_chunk_id(element(5, Ours)) =< Next of"
    "                true ->"
    "                    Again = fun(L) ->"
    "                        {rabbitmq_stream_s3_log_reader, setelement(3, Ours, {local, L})}"
    "                    end,"
    "                    case Read(Log) of"
    "                        {ok, After} -> {ok, Again(After)};"
    "                        {ok, Header, Iterator, After} ->"
    "                            {ok, Header, Iterator, Again(After)};"
    "                        {end_of_stream, After} -> {end_of_stream, Again(After)};"
    "                        Other -> Other"
    "                    end;"
    "                false -> '$detached_wait'(Ours)"
    "            end;"
    "        false -> '$detached_wait'(Ours)"
    "    end.".

wait() ->
    "'$detached_wait'(Ours) ->"
    "    _ = is_reference(element(14, Ours)) andalso erlang:cancel_timer(element(14, Ours)),"
    "    Timer = erlang:send_after(1000, self(), element(13, Ours)),"
    "    {end_of_stream, {rabbitmq_stream_s3_log_reader, setelement(14, Ours, Timer)}}.".

local() ->
    "'$detached_local'(Ours) ->"
    "    case element(3, Ours) of"
    "        {local, #osiris_log{} = Log} -> {ok, Log};"
    "        _ -> false"
    "    end.".

%% The rest of a chunk that is in memory, by osiris' own iterator, which has all of its bytes and so
%% no file.
iterator_next(Fields) ->
    Wanted = [next_offset, num_left, data_left, data_cache, next_record_pos],
    Rest =
        case [F || F <- Wanted, not lists:member(F, Fields)] of
            [] ->
                "'$detached_iterator_next'({Data, Position, Offset, Left}) ->"
                "    <<_:Position/binary, Cache/binary>> = iolist_to_binary(Data),"
                "    '$stock_iterator_next'(#iterator{next_offset = Offset, num_left = Left,"
                "                                     data_left = byte_size(Cache),"
                "                                     data_cache = Cache, next_record_pos = 0}).";
            _ ->
                "'$detached_iterator_next'(_) -> error({stream_s3, plugin_is_off})."
        end,
    "'$detached_iterator_next'({_, _, _, 0}) -> end_of_chunk;" ++ Rest.

next_offset() ->
    "'$detached_next_offset'(Ours) ->"
    "    case element(3, Ours) of"
    "        {local, Log} -> '$stock_next_offset'(Log);"
    "        {remote, Remote} -> element(4, Remote);"
    "        Other when is_integer(element(2, Other)) -> element(2, Other);"
    "        _ -> 0"
    "    end.".

committed_offset() ->
    "'$detached_committed_offset'(Ours) ->"
    "    case '$detached_local'(Ours) of"
    "        {ok, Log} -> '$stock_committed_offset'(Log);"
    "        false -> osiris_log_shared:committed_chunk_id(element(5, Ours))"
    "    end.".

committed_chunk_id() ->
    "'$detached_committed_chunk_id'(Ours) ->"
    "    osiris_log_shared:committed_chunk_id(element(5, Ours)).".

close() ->
    "'$detached_close'(Ours) ->"
    "    _ = is_reference(element(14, Ours)) andalso erlang:cancel_timer(element(14, Ours)),"
    "    _ = case '$detached_local'(Ours) of"
    "        {ok, Log} -> '$stock_close'(Log);"
    "        false -> ok"
    "    end,"
    "    _ = (element(8, Ours))(-1),"
    "    case element(7, Ours) of"
    "        undefined -> ok;"
    "        CounterId -> osiris_counters:delete(CounterId)"
    "    end.".
