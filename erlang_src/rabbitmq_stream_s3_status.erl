-module(rabbitmq_stream_s3_status).
-moduledoc """
What the status command shows, gathered on the node that is asked.

Owns which facts are shown and that no secret is among them. Holds nothing and changes nothing.
""".

-export([node_status/0, stream_status/2, cut/2, read_alarm/0, advice/1, hidden/0, with_lag/1]).

-define(REMOTE_TIMEOUT_MS, 10_000).

-spec node_status() -> #{atom() => term()}.
node_status() ->
    {Mode, Reason, Text} =
        case rabbitmq_stream_s3:mode() of
            {inert, Kind, Why} -> {inert, Kind, Why};
            Other -> {Other, none, <<>>}
        end,
    #{mode := Hooks, attached := Attached} = rabbitmq_stream_s3_host_osiris:status(),
    Settings = rabbitmq_stream_s3_config:public(),
    Access = rabbitmq_stream_s3_api_aws:bucket_status(),
    {Protected, IsComplete} =
        case {Attached, rabbitmq_stream_s3_manifest_protection:overview()} of
            {true, {Completeness, Streams}} -> {Streams, Completeness =:= complete};
            _ -> {0, true}
        end,
    #{
        node => node(),
        plugin_version => version(),
        mode => Mode,
        inert_reason => Reason,
        inert_text => Text,
        inert_meaning => meaning(Mode, Attached, Protected, IsComplete),
        inert_advice => advice(Reason),
        protected_streams => Protected,
        osiris_hooks => Hooks,
        osiris_attached => Attached,
        osiris_version => version(osiris),
        bucket => maps:get(bucket, Settings, undefined),
        region => maps:get(region, Settings, undefined),
        endpoint => maps:get(endpoint, Settings, undefined),
        prefix => maps:get(prefix, Settings, undefined),
        bucket_accessible => accessible(Access),
        bucket_reason => access_kind(Access),
        bucket_text => access_text(Access),
        read_alarm => read_alarm(),
        streams => length(rabbitmq_stream_s3_registry:values()),
        replica_lag => rabbitmq_stream_s3_replica_lag:overview(),
        native => rabbitmq_stream_s3_api_aws:stats(),
        shell => rabbitmq_stream_s3_counters:overview()
    }.

%% What is wrong with this node's plugin means that for consumers.
meaning(inert, true, 0, true) ->
    <<"no stream has history in S3: streams are as without the plugin">>;
meaning(inert, true, Streams, IsComplete) ->
    text(
        "~ts~b streams have history in S3 and are protected: consumers wait for what the local log "
        "does not have, stored offsets are kept, nothing is uploaded or trimmed; consumers of what "
        "is local, and publishers, notice nothing",
        [
            case IsComplete of
                true -> "";
                false -> "at least "
            end,
            Streams
        ]
    );
meaning(inert, false, _, _) ->
    <<"streams are as without the plugin: consumers see what is left of the local log">>;
meaning(_, _, _, _) ->
    <<>>.

-doc "What to do about what makes the plugin inert.".
-spec advice(atom()) -> binary().
advice(none) ->
    <<>>;
advice(no_bucket) ->
    <<"Set stream_s3.bucket and restart the node, or disable the plugin">>;
advice(invalid_configuration) ->
    <<"Correct the setting and restart the node">>;
advice(khepri_disabled) ->
    <<"Enable the feature flag khepri_db, then disable and enable the plugin">>;
advice(Kind) when Kind =:= native_library; Kind =:= native_version ->
    <<"Install the archive of the plugin that is for this machine and this version">>;
advice(restart_needed) ->
    <<"Restart the node">>;
advice(start_failed) ->
    <<"Correct what the text names, then disable and enable the plugin">>;
advice(_Osiris) ->
    <<"Keep this version of RabbitMQ or go back to the one before, and report both versions. ",
        "rabbitmq-streams stream_s3_check_host says it of a version before it is installed">>.

-doc "What consumers of this node would not see if the plugin was disabled.".
-spec hidden() -> {ok, [#{atom() => term()}]}.
hidden() ->
    {ok, [
        Hidden#{text => rabbitmq_stream_s3:utf8(rabbitmq_stream_s3_status_hidden:line(Hidden))}
     || Hidden <- rabbitmq_stream_s3_status_hidden:streams()
    ]}.

-spec stream_status(rabbit_types:vhost(), binary()) ->
    {ok, #{atom() => term()}}
    | {error, not_found | not_a_stream | no_reader | unavailable | {inert, binary()}}.
stream_status(VHost, Name) ->
    maybe
        {ok, Reader} ?= reader(VHost, Name),
        #{} = Status0 ?= rabbitmq_stream_s3_replica_reader:status(Reader),
        Access = rpc(node(Reader), rabbitmq_stream_s3_api_aws, bucket_status, []),
        {Native, Status} = maps:take(native, maps:without([writer, range], Status0)),
        {ok,
            maps:merge(with_lag(flat(Native)), Status#{
                stream => Name,
                vhost => VHost,
                bucket_accessible => accessible(Access),
                bucket_reason => access_kind(Access),
                bucket_text => access_text(Access)
            })}
    end.

-doc "A stream's native status with how far it is behind, by this node's clock.".
-spec with_lag(#{atom() => term()}) -> #{atom() => term()}.
with_lag(Status) ->
    Sizes = maps:with([assembly_payload_bytes, transfer_bytes, persist_bytes], Status),
    LagMs =
        case Status of
            #{oldest_pending_timestamp := Ms} when is_integer(Ms) ->
                max(0, os:system_time(millisecond) - Ms);
            _NothingPending ->
                0
        end,
    Status#{unpersisted_bytes => lists:sum(maps:values(Sizes)), durability_lag_ms => LagMs}.

-doc """
Whether there are places in streams that readers could not get past: the store gives back damaged
bytes also when asked again (`corrupt`), does not have what the manifest names (`lost`), or has it in
an archive class (`archived`). Each hides those behind it. It is over when a reader comes past the
place, or the manifest does not have it any more.
""".
-spec read_alarm() -> none | archived | lost | corrupt.
read_alarm() ->
    case rabbitmq_stream_s3_api_aws:stats() of
        #{places_corrupt := Corrupt} when Corrupt > 0 -> corrupt;
        #{places_lost := Lost} when Lost > 0 -> lost;
        #{places_archived := Archived} when Archived > 0 -> archived;
        #{} -> none
    end.

-doc "Cuts what is being assembled now; it is uploaded as a fragment of its own.".
-spec cut(rabbit_types:vhost(), binary()) -> ok | {error, term()}.
cut(VHost, Name) ->
    maybe
        {ok, Reader} ?= reader(VHost, Name),
        rabbitmq_stream_s3_replica_reader:cut(Reader)
    end.

reader(VHost, Name) ->
    QName = rabbit_misc:r(VHost, queue, Name),
    case rabbit_amqqueue:lookup(QName) of
        {ok, Queue} ->
            case amqqueue:get_type(Queue) of
                rabbit_stream_queue -> reader_of(Queue);
                _ -> {error, not_a_stream}
            end;
        {error, not_found} ->
            {error, not_found}
    end.

reader_of(Queue) ->
    #{name := Name} = amqqueue:get_type_state(Queue),
    StreamId = rabbitmq_stream_s3:stream_id(Name),
    %% This node first: then most answers need no other.
    Others = lists:delete(node(), rabbit_nodes:list_running()),
    case first_reader(StreamId, [node() | Others]) of
        Reader when is_pid(Reader) ->
            {ok, Reader};
        undefined ->
            case rabbitmq_stream_s3:mode() of
                {inert, _, Text} -> {error, {inert, Text}};
                _ -> {error, no_reader}
            end
    end.

first_reader(_StreamId, []) ->
    undefined;
first_reader(StreamId, [Node | Nodes]) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId, Node) of
        undefined -> first_reader(StreamId, Nodes);
        Reader -> Reader
    end.

%% The native map has one level of its own (counters) and a tuple that JSON cannot show.
flat(Native) ->
    case maps:take(problem, Native) of
        {{Kind, Text}, Rest} -> Rest#{problem_kind => Kind, problem_text => Text};
        {undefined, Rest} -> Rest#{problem_kind => none, problem_text => <<>>};
        error -> Native
    end.

accessible(accessible) -> yes;
accessible({inaccessible, _, _}) -> no;
accessible(_) -> unknown.

access_kind({inaccessible, Kind, _}) -> Kind;
access_kind(_) -> none.

access_text({inaccessible, _, Text}) -> Text;
access_text(_) -> <<>>.

text(Format, Args) ->
    rabbitmq_stream_s3:utf8(io_lib:format(Format, Args)).

version() ->
    version(rabbitmq_stream_s3).

version(App) ->
    case application:get_key(App, vsn) of
        {ok, Version} -> rabbitmq_stream_s3:utf8(Version);
        undefined -> <<"unknown">>
    end.

rpc(Node, Module, Function, Args) ->
    try
        erpc:call(Node, Module, Function, Args, ?REMOTE_TIMEOUT_MS)
    catch
        _:_ -> unknown
    end.
