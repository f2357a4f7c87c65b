-module(rabbitmq_stream_s3_manifest_protection).
-moduledoc """
Which streams are protected while the plugin does not work on this node: those that have a manifest
in the metadata store. What is below their local floor is not nothing, whatever is wrong here.

Owns a table, which an inert node alone has: streams that have a pointer, streams that must be
looked up (a member has started since), and whether the list is complete. What is not known counts
as protected. Asking is one read of the table and never waits; the list is read in this process.
See docs/decisions/0025-protected-without-an-engine.md.
""".

-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, is_protected/1, member_started/1, overview/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-define(TABLE, ?MODULE).
-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).
-define(LOOK_MS, 60_000).
-define(AFTER_FAILURE_MS, 5_000).
%% Members start in bursts.
-define(AFTER_START_MS, 200).

-record(state, {timer :: reference()}).

-spec start_link() -> gen_server:start_ret().
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

-doc """
Whether what the local log does not have must not look like nothing. While the plugin starts, works
or stops: of every stream, because its engine is away for a moment only.
""".
-spec is_protected(rabbitmq_stream_s3:stream_id()) -> boolean().
is_protected(StreamId) ->
    case rabbitmq_stream_s3:mode() of
        %% Without Khepri there are no pointers.
        {inert, khepri_disabled, _} -> false;
        {inert, _, _} -> is_listed(StreamId);
        _ -> true
    end.

-doc """
A log was opened in the calling process. Another node may have written the stream until now, so it
is looked up before it counts as not protected.
""".
-spec member_started(rabbitmq_stream_s3:stream_id()) -> ok.
member_started(StreamId) ->
    try ets:insert_new(?TABLE, {StreamId, {unknown, make_ref()}}) of
        true -> gen_server:cast(?MODULE, member_started);
        false -> ok
    catch
        error:badarg -> ok
    end.

-doc """
How many streams have history in the remote tier, and whether that is all of them; `off` unless the
plugin is inert on this node.
""".
-spec overview() -> {complete | incomplete, non_neg_integer()} | off.
overview() ->
    try
        Listed = ets:select_count(?TABLE, [{{'_', listed}, [], [true]}]),
        case ets:member(?TABLE, complete) of
            true -> {complete, Listed};
            false -> {incomplete, Listed}
        end
    catch
        error:badarg -> off
    end.

-spec init([]) -> {ok, #state{}}.
init([]) ->
    ?TABLE = ets:new(?TABLE, [named_table, public, set, {read_concurrency, true}]),
    {ok, #state{timer = look_after(0)}}.

-spec handle_call(term(), gen_server:from(), #state{}) -> {reply, term(), #state{}}.
handle_call(_Unknown, _From, State) ->
    {reply, {error, unknown_call}, State}.

-spec handle_cast(term(), #state{}) -> {noreply, #state{}}.
handle_cast(member_started, #state{timer = Timer} = State) ->
    case erlang:read_timer(Timer) of
        Left when is_integer(Left), Left > ?AFTER_START_MS ->
            _ = erlang:cancel_timer(Timer),
            {noreply, State#state{timer = look_after(?AFTER_START_MS)}};
        _ ->
            {noreply, State}
    end;
handle_cast(_Unknown, State) ->
    {noreply, State}.

-spec handle_info(term(), #state{}) -> {noreply, #state{}}.
handle_info(look, State) ->
    {noreply, State#state{timer = look_after(look())}};
handle_info(_Unknown, State) ->
    {noreply, State}.

look_after(Ms) ->
    erlang:send_after(Ms, self(), look).

%% Only a quorum knows that a stream has no pointer: this node's copy may be behind. That it has one
%% the copy may say, too.
look() ->
    Asked = ets:select(?TABLE, [{{'_', {unknown, '_'}}, [], ['$_']}]),
    case rabbitmq_stream_s3_db:list_consistent() of
        {ok, Pointers} ->
            Before = ets:select(?TABLE, [{{'$1', listed}, [], ['$1']}]),
            true = insert(Pointers),
            _ = [ets:delete(?TABLE, Id) || Id <- Before, not is_map_key(Id, Pointers)],
            %% Only what was asked for: a member may have started since.
            _ = [ets:delete_object(?TABLE, Row) || Row <- Asked],
            true = ets:insert(?TABLE, {complete, true}),
            true = ets:delete(?TABLE, said),
            ?LOOK_MS;
        {error, Reason} ->
            ok = incomplete(Reason),
            ?AFTER_FAILURE_MS
    end.

incomplete(Reason) ->
    _ =
        case ets:take(?TABLE, said) of
            [{said, Reason}] ->
                ok;
            _ ->
                ?LOG_WARNING(
                    "stream_s3: which streams have history in S3 cannot be read from the metadata "
                    "store (~0p): until it can, streams that are not known count as having some",
                    [Reason],
                    ?DOMAIN
                )
        end,
    true = ets:insert(?TABLE, {said, Reason}),
    case rabbitmq_stream_s3_db:list() of
        {ok, Pointers} ->
            true = insert(Pointers),
            ok;
        {error, _} ->
            ok
    end.

insert(Pointers) ->
    ets:insert(?TABLE, [{StreamId, listed} || StreamId := _ <- Pointers]).

is_listed(StreamId) ->
    try ets:lookup(?TABLE, StreamId) of
        [_] -> true;
        [] -> not ets:member(?TABLE, complete)
    catch
        error:badarg -> true
    end.
