%% A client of the stream protocol, on RabbitMQ's own codec: exact places, credit by hand, chunk headers.
%%
%% One process for each connection. Chunks come to the process that opened it as they are delivered, and wait
%% in its mailbox until chunk/2 takes them. Decides nothing: a case says when to give credit.
-module(stream_s3_ct_client).

-behaviour(gen_server).

-export([open/1, close/1, with_client/2]).
-export([create/3, delete/2, publish/3, store_offset/4, stored_offset/3]).
-export([
    subscribe/4, subscribe/5, unsubscribe/2, credit/3, chunk/2, chunk/3, chunks/3, unavailable/1
]).
-export([stats/2, resolve/3, leader_port/2, is_available/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-type client() :: pid().
%% What a subscription delivers: the fields of a chunk's header that tests look at, and its records.
-type chunk() :: #{
    id := osiris:offset(), next := osiris:offset(), timestamp := integer(), data := binary()
}.
-export_type([client/0, chunk/0]).

-define(OK, 1).
-define(PUBLISHER, 0).
-define(CONNECT_MS, 30_000).
-define(CALL_MS, 60_000).
-define(CHUNK_MS, 30_000).

-spec open(stream_s3_ct_node:t()) -> client().
open(#{stream_port := Port}) ->
    {ok, Client} = gen_server:start_link(?MODULE, {self(), Port}, []),
    Plain = <<0, "guest", 0, "guest">>,
    {peer_properties, ?OK, _} = request(
        Client, {peer_properties, #{~"product" => ~"stream_s3_ct"}}
    ),
    {sasl_handshake, ?OK, _} = request(Client, sasl_handshake),
    {sasl_authenticate, ?OK} = request(Client, {sasl_authenticate, ~"PLAIN", Plain}),
    ok = gen_server:call(Client, tune, ?CALL_MS),
    {open, ?OK, _} = request(Client, {open, ~"/"}),
    Client.

%% Closes the socket, as a client that goes does. What was on its way to the caller is dropped.
-spec close(client()) -> ok.
close(Client) ->
    ok = gen_server:stop(Client),
    forget(Client).

%% For as long as the function runs.
-spec with_client(stream_s3_ct_node:t(), fun((client()) -> T)) -> T.
with_client(Node, Fun) ->
    Client = open(Node),
    try
        Fun(Client)
    after
        close(Client)
    end.

%% Args: of the protocol, ~"max-length-bytes" and the like.
-spec create(client(), binary(), #{binary() => binary()}) -> ok.
create(Client, Stream, Args) ->
    {create_stream, ?OK} = request(Client, {create_stream, Stream, Args}),
    ok.

-spec delete(client(), binary()) -> ok.
delete(Client, Stream) ->
    {delete_stream, ?OK} = request(Client, {delete_stream, Stream}),
    ok.

%% Publishes records that end up in one chunk, and returns when they are confirmed.
-spec publish(client(), binary(), [binary()]) -> ok.
publish(Client, Stream, Records) ->
    gen_server:call(Client, {publish, Stream, Records}, ?CALL_MS).

-spec store_offset(client(), binary(), binary(), osiris:offset()) -> ok.
store_offset(Client, Reference, Stream, Offset) ->
    gen_server:cast(Client, {send, {store_offset, Reference, Stream, Offset}}).

-spec stored_offset(client(), binary(), binary()) -> osiris:offset() | none.
stored_offset(Client, Reference, Stream) ->
    case request(Client, {query_offset, Reference, Stream}) of
        {query_offset, ?OK, Offset} -> Offset;
        {query_offset, _NoOffset, _} -> none
    end.

%% With half of the first credit or less left, the server sends nothing until it is given more.
-spec subscribe(client(), binary(), osiris:offset_spec(), non_neg_integer()) -> Id :: 0..255.
subscribe(Client, Stream, Spec, Credit) ->
    {ok, Id} = subscribe(Client, Stream, Spec, Credit, #{}),
    Id.

-spec subscribe(
    client(), binary(), osiris:offset_spec(), non_neg_integer(), #{binary() => binary()}
) ->
    {ok, 0..255} | {error, pos_integer()}.
subscribe(Client, Stream, Spec, Credit, Properties) ->
    Id = erlang:unique_integer([positive]) rem 256,
    case request(Client, {subscribe, Id, Stream, Spec, Credit, Properties}) of
        {subscribe, ?OK} -> {ok, Id};
        {subscribe, Code} -> {error, Code}
    end.

%% Ends a subscription. What it had delivered is dropped.
-spec unsubscribe(client(), 0..255) -> ok.
unsubscribe(Client, Id) ->
    {unsubscribe, ?OK} = request(Client, {unsubscribe, Id}),
    forget(Client, Id).

-spec credit(client(), 0..255, pos_integer()) -> ok.
credit(Client, Id, Count) ->
    gen_server:cast(Client, {send, {credit, Id, Count}}).

%% The next chunk of a subscription, whose checksum is right.
-spec chunk(client(), 0..255) -> chunk().
chunk(Client, Id) ->
    case chunk(Client, Id, ?CHUNK_MS) of
        #{} = Chunk -> Chunk;
        Nothing -> ct:fail("no chunk for subscription ~b: ~p", [Id, Nothing])
    end.

-spec chunk(client(), 0..255, timeout()) -> chunk() | none | closed.
chunk(Client, Id, TimeoutMs) ->
    receive
        {chunk, Client, Id, Chunk} -> parse(Chunk);
        {closed, Client} -> closed
    after TimeoutMs -> none
    end.

%% All chunks up to an offset; each gives back the credit that it took.
-spec chunks(client(), 0..255, osiris:offset()) -> [chunk()].
chunks(Client, Id, Next) ->
    case chunk(Client, Id) of
        #{next := Found} = Chunk when Found >= Next ->
            [Chunk];
        Chunk ->
            ok = credit(Client, Id, 1),
            [Chunk | chunks(Client, Id, Next)]
    end.

%% The streams of which the server has said since that they are not available here any more.
-spec unavailable(client()) -> [binary()].
unavailable(Client) ->
    receive
        {unavailable, Client, Stream} -> [Stream | unavailable(Client)]
    after 0 -> []
    end.

-spec stats(client(), binary()) -> #{binary() => integer()}.
stats(Client, Stream) ->
    {stream_stats, ?OK, Stats} = request(Client, {stream_stats, Stream}),
    #{Name => signed(Value) || Name := Value <- Stats}.

%% The codec takes -1, an offset that there is not, for a number without sign.
signed(Value) ->
    <<Signed:64/signed>> = <<Value:64>>,
    Signed.

%% What a place is resolved to. Not `ok`: the server does not know it now, ask again.
-spec resolve(client(), binary(), osiris:offset_spec()) ->
    {ok, Type :: term(), Value :: term()} | {error, pos_integer()}.
resolve(Client, Stream, Spec) ->
    case request(Client, {resolve_offset_spec, Stream, Spec, #{}}) of
        {resolve_offset_spec, ?OK, Type, Value} -> {ok, Type, Value};
        Refused -> {error, element(2, Refused)}
    end.

%% Whether there is a leader to publish to, and a member here that answers.
-spec is_available(client(), binary()) -> boolean().
is_available(Client, Stream) ->
    leader_port(Client, Stream) =/= none andalso
        element(2, request(Client, {stream_stats, Stream})) =:= ?OK.

%% The stream port of the node that has the writer.
-spec leader_port(client(), binary()) -> inet:port_number() | none.
leader_port(Client, Stream) ->
    case request(Client, {metadata, [Stream]}) of
        {metadata, _, #{Stream := {{_Host, Port}, _Replicas}}} -> Port;
        _ -> none
    end.

request(Client, Body) ->
    gen_server:call(Client, {request, Body}, ?CALL_MS).

forget(Client) ->
    receive
        {chunk, Client, _, _} -> forget(Client);
        {closed, Client} -> forget(Client);
        {unavailable, Client, _} -> forget(Client)
    after 0 -> ok
    end.

forget(Client, Id) ->
    receive
        {chunk, Client, Id, _} -> forget(Client, Id)
    after 0 -> ok
    end.

parse(
    <<5:4, _:4, _Type:8, _Entries:16, Records:32, Timestamp:64/signed, _Epoch:64, Id:64, Crc:32,
        Size:32, _Trailer:32, _:32, Data:Size/binary, _/binary>>
) ->
    Crc =:= erlang:crc32(Data) orelse ct:fail("chunk ~b does not have its checksum", [Id]),
    #{id => Id, next => Id + Records, timestamp => Timestamp, data => Data}.

%% The connection --------------------------------------------------------------------------------------

init({Owner, Port}) ->
    Options = [binary, {active, true}, {nodelay, true}],
    {ok, Socket} = gen_tcp:connect("127.0.0.1", Port, Options, ?CONNECT_MS),
    {ok, #{
        owner => Owner,
        socket => Socket,
        codec => rabbit_stream_core:init(0),
        next => 1,
        asked => #{},
        tune => none,
        %% The caller that waits for a confirm, by the publishing id.
        unconfirmed => #{},
        published => 0,
        publishes_to => none
    }}.

handle_call({request, Body}, From, State) ->
    {noreply, ask(Body, From, State)};
handle_call(tune, _From, #{tune := {FrameMax, _}} = State) ->
    %% No heartbeats: a case that is slow on purpose must not be cut off for it.
    send({response, 0, {tune, FrameMax, 0}}, State),
    {reply, ok, State};
handle_call(tune, From, State) ->
    {noreply, State#{tune := From}};
handle_call({publish, Stream, Records}, From, #{publishes_to := Stream} = State) ->
    #{published := Number, unconfirmed := Unconfirmed} = State,
    Plain = iolist_to_binary([<<0:1, (byte_size(R)):31, R/binary>> || R <- Records]),
    Size = byte_size(Plain),
    %% A sub-batch that is not compressed: its records cannot be put into two chunks.
    Entry = <<Number:64, 1:1, 0:3, 0:4, (length(Records)):16, Size:32, Size:32, Plain/binary>>,
    send({publish, ?PUBLISHER, 1, Entry}, State),
    {noreply, State#{published := Number + 1, unconfirmed := Unconfirmed#{Number => From}}};
handle_call({publish, Stream, _} = Publish, From, #{publishes_to := none} = State) ->
    Declared = ask({declare_publisher, ?PUBLISHER, ~"", Stream}, none, State),
    handle_call(Publish, From, Declared#{publishes_to := Stream});
handle_call({publish, _, _} = Publish, From, State) ->
    handle_call(
        Publish, From, (ask({delete_publisher, ?PUBLISHER}, none, State))#{publishes_to := none}
    ).

handle_cast({send, Command}, State) ->
    send(Command, State),
    {noreply, State}.

handle_info({tcp, _, Data}, #{codec := Codec0} = State) ->
    {Commands, Codec} = rabbit_stream_core:all_commands(
        rabbit_stream_core:incoming_data(Data, Codec0)
    ),
    {noreply, lists:foldl(fun handle/2, State#{codec := Codec}, Commands)};
handle_info({tcp_closed, _}, #{owner := Owner} = State) ->
    Owner ! {closed, self()},
    {noreply, State}.

ask(Body, From, #{next := Next, asked := Asked} = State) ->
    send({request, Next, Body}, State),
    State#{next := Next + 1, asked := Asked#{Next => From}}.

send(Command, #{socket := Socket}) ->
    %% A connection that is closed is reported when its end is seen.
    _ = gen_tcp:send(Socket, rabbit_stream_core:frame(Command)),
    ok.

handle({deliver, Id, Chunk}, #{owner := Owner} = State) ->
    Owner ! {chunk, self(), Id, Chunk},
    State;
handle({publish_confirm, _, Numbers}, State) ->
    lists:foldl(fun confirmed/2, State, Numbers);
handle({metadata_update, Stream, _Code}, #{owner := Owner} = State) ->
    Owner ! {unavailable, self(), Stream},
    State;
handle({tune, FrameMax, Heartbeat}, #{tune := none} = State) ->
    State#{tune := {FrameMax, Heartbeat}};
handle({tune, FrameMax, _}, #{tune := From} = State) ->
    send({response, 0, {tune, FrameMax, 0}}, State),
    gen_server:reply(From, ok),
    State;
handle({response, _NoNumber, Refused}, State) when element(1, Refused) =:= credit ->
    %% The subscription had ended when this credit came to the server, which says so.
    State;
handle({response, Number, Answer}, #{asked := Asked} = State) ->
    case maps:take(Number, Asked) of
        {none, Rest} when element(2, Answer) =:= ?OK ->
            State#{asked := Rest};
        {From, Rest} when From =/= none ->
            gen_server:reply(From, Answer),
            State#{asked := Rest}
    end.

confirmed(Number, #{unconfirmed := Unconfirmed} = State) ->
    {From, Rest} = maps:take(Number, Unconfirmed),
    gen_server:reply(From, ok),
    State#{unconfirmed := Rest}.
