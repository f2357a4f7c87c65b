%% The scripted S3 server (native/s3-testserver): its life, its faults, its log, its objects.
-module(stream_s3_ct_s3).

-export([start/1, stop/1, conf/2]).
-export([fault/2, clear_faults/1, requests/2, wait_requests/3]).
-export([objects/1, keys/2, get/2, put/3]).

-type t() :: #{endpoint := binary(), control := binary(), pid := pid(), atom() => term()}.
-export_type([t/0]).

%% Starts the server with one bucket. It lives until stop/1 or the end of this virtual machine.
-spec start(string()) -> t().
start(Bucket) ->
    {ok, _} = application:ensure_all_started(inets),
    Self = self(),
    Ref = make_ref(),
    Pid = spawn(fun() -> hold(Self, Ref, Bucket) end),
    receive
        {Ref, Ready} -> Ready#{pid => Pid, bucket => list_to_binary(Bucket)}
    after 30_000 ->
        ct:fail(s3_server_did_not_start)
    end.

-spec stop(t()) -> ok.
stop(#{pid := Pid}) ->
    Monitor = monitor(process, Pid),
    Pid ! {stop, self()},
    receive
        {stopped, Pid} -> ok;
        {'DOWN', Monitor, process, Pid, _} -> ok
    end.

%% Lines of rabbitmq.conf that point the plugin at the server. `Settings` are of the plugin and win.
-spec conf(t(), [{string(), iodata()}]) -> [{string(), iodata()}].
conf(S3, Settings) ->
    Server = [
        {"bucket", maps:get(bucket, S3)},
        {"region", maps:get(region, S3)},
        {"endpoint", maps:get(endpoint, S3)},
        {"path_style", "true"},
        {"access_key_id", maps:get(access_key, S3)},
        {"secret_access_key", maps:get(secret_key, S3)}
    ],
    Kept = [Line || {Key, _} = Line <- Server, not lists:keymember(Key, 1, Settings)],
    [{"stream_s3." ++ Key, Value} || {Key, Value} <- Kept ++ Settings].

%% Adds a rule, with the fields of native/s3-testserver's Rule.
-spec fault(t(), #{atom() => term()}) -> ok.
fault(S3, Rule) ->
    _ = control(S3, post, "/faults", Rule),
    ok.

%% Removes all rules. Requests that hang continue.
-spec clear_faults(t()) -> ok.
clear_faults(S3) ->
    _ = control(S3, delete, "/faults", none),
    ok.

%% Requests so far that match: operation, key (a part of it), rule, status, after ...
-spec requests(t(), [{string(), string()}]) -> [map()].
requests(S3, Filter) ->
    control(S3, get, "/log?" ++ uri_string:compose_query(Filter), none).

%% Waits in the server until at least so many requests match.
-spec wait_requests(t(), pos_integer(), [{string(), string()}]) -> [map()].
wait_requests(S3, Count, Filter) ->
    requests(S3, [{"min", integer_to_list(Count)}, {"timeout_ms", "30000"} | Filter]).

%% key, size, metadata and so on of each object.
-spec objects(t()) -> [map()].
objects(S3) ->
    lists:sort(control(S3, get, "/objects", none)).

%% Keys that hold all of these parts.
-spec keys(t(), [binary()]) -> [binary()].
keys(S3, Parts) ->
    Holds = fun(Key) -> lists:all(fun(Part) -> binary:match(Key, Part) =/= nomatch end, Parts) end,
    lists:sort([Key || #{~"key" := Key} <- objects(S3), Holds(Key)]).

%% The bytes of an object.
-spec get(t(), binary()) -> binary().
get(S3, Key) ->
    http(S3, get, object_path(Key), none).

%% Replaces the bytes of an object and keeps its ETag, checksum and metadata: bit rot.
-spec put(t(), binary(), binary()) -> ok.
put(S3, Key, Bytes) ->
    _ = http(S3, put, object_path(Key), {"application/octet-stream", Bytes}),
    ok.

object_path(Key) ->
    "/object?" ++ uri_string:compose_query([{"key", binary_to_list(Key)}]).

control(S3, Method, Path, none) ->
    json:decode(http(S3, Method, Path, none));
control(S3, Method, Path, Body) ->
    json:decode(http(S3, Method, Path, {"application/json", iolist_to_binary(json:encode(Body))})).

http(#{control := Control}, Method, Path, Body) ->
    Url = binary_to_list(Control) ++ Path,
    Request =
        case Body of
            none -> {Url, []};
            {Type, Bytes} -> {Url, [], Type, Bytes}
        end,
    {ok, {{_, 200, _}, _, Answer}} =
        httpc:request(Method, Request, [{timeout, 60_000}], [{body_format, binary}]),
    Answer.

hold(Parent, Ref, Bucket) ->
    Port = open_port(
        {spawn_executable, os:getenv("STREAM_S3_SERVER")},
        [
            {args, ["--until-eof", "--bucket", Bucket]},
            {line, 65536},
            use_stdio,
            exit_status,
            hide,
            binary
        ]
    ),
    receive
        {Port, {data, {eol, Line}}} ->
            Keys = [endpoint, control, access_key, secret_key, region],
            Ready = json:decode(Line),
            Parent ! {Ref, #{Key => maps:get(atom_to_binary(Key), Ready) || Key <- Keys}}
    end,
    receive
        {stop, From} ->
            %% The end of its standard input ends it.
            port_close(Port),
            From ! {stopped, self()}
    end.
