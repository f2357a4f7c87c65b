-module(rabbitmq_stream_s3_sup).
-moduledoc """
The plugin's processes, in the order in which they need each other. Inert, it has one: who says which
streams are protected. And rabbitmq_stream_s3_prometheus, which is started aside in both cases.

Owns the registry's table, which must outlive every reader.
""".

-behaviour(supervisor).

-export([start_link/1, become_inert/0, init/1]).

-spec start_link(active | inert) -> supervisor:startlink_ret().
start_link(Mode) ->
    supervisor:start_link({local, ?MODULE}, ?MODULE, Mode).

-doc "Back to inert, newest child first; the broker must not notice.".
-spec become_inert() -> ok.
become_inert() ->
    ok = lists:foreach(
        fun(Id) ->
            _ = supervisor:terminate_child(?MODULE, Id),
            _ = supervisor:delete_child(?MODULE, Id)
        end,
        [
            Id
         || {Id, _Pid, _Type, _Modules} <- supervisor:which_children(?MODULE),
            %% Shows that the plugin is inert.
            Id =/= rabbitmq_stream_s3_prometheus
        ]
    ),
    lists:foreach(
        fun(Child) -> {ok, _} = supervisor:start_child(?MODULE, Child) end, children(inert)
    ).

-spec init(active | inert) -> {ok, {supervisor:sup_flags(), [supervisor:child_spec()]}}.
init(Mode) ->
    ok = rabbitmq_stream_s3_registry:create_table(),
    Flags = #{strategy => one_for_one, intensity => 3, period => 5},
    {ok, {Flags, children(Mode)}}.

children(inert) ->
    [worker(rabbitmq_stream_s3_manifest_protection)];
children(active) ->
    [
        %% The cache comes before the engine: an engine that is opened again marks what the cache
        %% knows.
        worker(rabbitmq_stream_s3_db_quorum),
        worker(rabbitmq_stream_s3_manifest_replica),
        worker(rabbitmq_stream_s3_replica_lag),
        worker(rabbitmq_stream_s3_api_aws),
        worker(rabbitmq_stream_s3_reader_gap),
        worker(rabbitmq_stream_s3_reader_lookup),
        worker(rabbitmq_stream_s3_reaper),
        worker(rabbitmq_stream_s3_lister),
        worker(rabbitmq_stream_s3_governor),
        worker(rabbitmq_stream_s3_recovery),
        #{
            id => rabbitmq_stream_s3_replica_reader_sup,
            start => {rabbitmq_stream_s3_replica_reader_sup, start_link, []},
            shutdown => infinity,
            type => supervisor
        },
        worker(rabbitmq_stream_s3_reconciler),
        %% `ignore` unless it is enabled.
        worker(rabbitmq_stream_s3_membership_reconciliation)
    ].

worker(Module) ->
    #{id => Module, start => {Module, start_link, []}, shutdown => 5000}.
