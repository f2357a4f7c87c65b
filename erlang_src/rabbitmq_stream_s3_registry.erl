-module(rabbitmq_stream_s3_registry).
-moduledoc """
Names of the replica readers of this node: `{StreamId, Node} -> pid`, for `{via, ?MODULE, Name}`.

Owns nothing: the table belongs to the supervisor, so that a crash of one worker does not lose the
names. While the table is gone (plugin disabled), every look-up says `undefined`; asking is never an
error. Beside each name a reader may leave a value, its native handle, so that metrics need no call
to the reader.
""".

-export([
    create_table/0,
    register_name/2,
    unregister_name/1,
    whereis_name/1,
    send/2,
    whereis/2,
    set_value/2,
    value/1,
    values/0
]).

-export_type([name/0]).

-type name() :: {rabbitmq_stream_s3:stream_id(), node()}.

-spec create_table() -> ok.
create_table() ->
    ?MODULE = ets:new(?MODULE, [named_table, public, set, {read_concurrency, true}]),
    ok.

-spec register_name(name(), pid()) -> yes | no.
register_name(Name, Pid) ->
    case whereis_name(Name) of
        Pid ->
            yes;
        undefined ->
            %% Replaces what a killed reader has left behind.
            try ets:insert(?MODULE, {Name, Pid, undefined}) of
                true -> yes
            catch
                error:badarg -> no
            end;
        _Other ->
            no
    end.

-spec unregister_name(name()) -> ok.
unregister_name(Name) ->
    try ets:delete(?MODULE, Name) of
        true -> ok
    catch
        error:badarg -> ok
    end.

-spec whereis_name(name()) -> pid() | undefined.
whereis_name(Name) ->
    try ets:lookup(?MODULE, Name) of
        [{Name, Pid, _Value}] ->
            case is_process_alive(Pid) of
                true -> Pid;
                false -> undefined
            end;
        [] ->
            undefined
    catch
        error:badarg -> undefined
    end.

-spec send(name(), term()) -> pid().
send(Name, Message) ->
    case whereis_name(Name) of
        undefined ->
            exit({badarg, {Name, Message}});
        Pid ->
            Pid ! Message,
            Pid
    end.

-doc "The reader of a stream on any node; a node that does not answer has none.".
-spec whereis(rabbitmq_stream_s3:stream_id(), node()) -> pid() | undefined.
whereis(StreamId, Node) when Node =:= node() ->
    whereis_name({StreamId, Node});
whereis(StreamId, Node) ->
    try
        erpc:call(Node, ?MODULE, whereis_name, [{StreamId, Node}], 5000)
    catch
        _:_ -> undefined
    end.

-spec set_value(name(), term()) -> ok.
set_value(Name, Value) ->
    try ets:update_element(?MODULE, Name, {3, Value}) of
        _ -> ok
    catch
        error:badarg -> ok
    end.

-spec value(name()) -> term() | undefined.
value(Name) ->
    try
        ets:lookup_element(?MODULE, Name, 3, undefined)
    catch
        error:badarg -> undefined
    end.

-spec values() -> [{rabbitmq_stream_s3:stream_id(), pid(), term()}].
values() ->
    try
        [{StreamId, Pid, Value} || {{StreamId, _Node}, Pid, Value} <- ets:tab2list(?MODULE)]
    catch
        error:badarg -> []
    end.
