#!/usr/bin/env escript
%%! -smp enable
%% The steps of an upload done in Erlang, for scripts/bench: segment files are drained header by header
%% as osiris_log does it, their bytes read with file:pread, summed with erlang:crc32 and sent with the gun
%% of the host. Nothing is signed, and no checksum of a piece is kept: a real plugin would do that on top.
%% Usage: upload-in-erlang.escript FOLDER HOST PORT [AUTHORITY.pem]
%% Prints microseconds: wall, then CPU of the whole machine.
-mode(compile).

-define(FRAGMENT_BYTES, (64 bsl 20)).
-define(PIECE_BYTES, (1 bsl 20)).
-define(WORKERS, 4).
-define(HEADER_BYTES, 48).

main([Folder, Host, Port]) ->
    upload(Folder, Host, list_to_integer(Port), #{transport => tcp});
main([Folder, Host, Port, Authority]) ->
    Tls = [{verify, verify_peer}, {cacertfile, Authority}],
    upload(Folder, Host, list_to_integer(Port), #{transport => tls, tls_opts => Tls}).

upload(Folder, Host, Port, Options) ->
    {ok, _} = application:ensure_all_started(gun),
    {ok, _} = application:ensure_all_started(ssl),
    Segments = lists:sort(filelib:wildcard(filename:join(Folder, "*.segment"))),
    {Cpu0, _} = statistics(runtime),
    Wall0 = erlang:monotonic_time(microsecond),
    Fragments = lists:append([fragments(Segment) || Segment <- Segments]),
    Queue = spawn_link(fun() -> queue(lists:enumerate(Fragments)) end),
    Workers = [
        spawn_monitor(fun() -> worker(Queue, Host, Port, Options) end)
     || _ <- lists:seq(1, ?WORKERS)
    ],
    _ = [
        receive
            {'DOWN', Monitor, process, _, normal} -> ok;
            {'DOWN', Monitor, process, _, Reason} -> error(Reason)
        end
     || {_, Monitor} <- Workers
    ],
    Wall = erlang:monotonic_time(microsecond) - Wall0,
    {Cpu1, _} = statistics(runtime),
    io:format("~b ~b~n", [Wall, (Cpu1 - Cpu0) * 1000]).

%% File, position and length of each fragment of a segment: whole chunks.
fragments(Segment) ->
    {ok, File} = file:open(Segment, [read, raw, binary]),
    Found = drain(File, 8, 8, []),
    ok = file:close(File),
    [{Segment, From, Length} || {From, Length} <- lists:reverse(Found)].

drain(File, From, Position, Found) when Position - From >= ?FRAGMENT_BYTES ->
    drain(File, Position, Position, [{From, Position - From} | Found]);
drain(File, From, Position, Found) ->
    case file:pread(File, Position, ?HEADER_BYTES) of
        {ok,
            <<5:4, 0:4, _Type:8, _Entries:16, _Records:32, _Time:64, _Epoch:64, _Id:64, _Crc:32,
                Data:32, Trailer:32, Filter:8, _:24>>} ->
            drain(File, From, Position + ?HEADER_BYTES + Filter + Data + Trailer, Found);
        eof when Position > From ->
            [{From, Position - From} | Found];
        eof ->
            Found
    end.

queue([]) ->
    receive
        {next, Pid} ->
            Pid ! none,
            queue([])
    end;
queue([Next | Rest]) ->
    receive
        {next, Pid} ->
            Pid ! Next,
            queue(Rest)
    end.

worker(Queue, Host, Port, Options) ->
    {ok, Connection} = gun:open(Host, Port, Options#{protocols => [http]}),
    {ok, http} = gun:await_up(Connection),
    work(Queue, Connection),
    gun:close(Connection).

work(Queue, Connection) ->
    Queue ! {next, self()},
    receive
        none ->
            ok;
        {Number, {Segment, From, Length}} ->
            {ok, File} = file:open(Segment, [read, raw, binary]),
            {Pieces, Crc} = read(File, From, Length, 0, []),
            ok = file:close(File),
            put_object(Connection, Number, Pieces, Crc, Length),
            work(Queue, Connection)
    end.

read(_, _, 0, Crc, Pieces) ->
    {lists:reverse(Pieces), Crc};
read(File, Position, Left, Crc, Pieces) ->
    Size = min(Left, ?PIECE_BYTES),
    {ok, Piece} = file:pread(File, Position, Size),
    read(File, Position + Size, Left - Size, erlang:crc32(Crc, Piece), [Piece | Pieces]).

put_object(Connection, Number, Pieces, Crc, Length) ->
    Path = io_lib:format("/bench/erlang/~b", [Number]),
    Headers = #{
        <<"content-length">> => integer_to_binary(Length),
        <<"x-amz-checksum-crc32">> => base64:encode(<<Crc:32>>)
    },
    Stream = gun:put(Connection, Path, Headers),
    send(Connection, Stream, Pieces),
    {response, fin, 200, _} = gun:await(Connection, Stream, 60_000).

send(Connection, Stream, [Piece]) ->
    gun:data(Connection, Stream, fin, Piece);
send(Connection, Stream, [Piece | Pieces]) ->
    ok = gun:data(Connection, Stream, nofin, Piece),
    send(Connection, Stream, Pieces).
