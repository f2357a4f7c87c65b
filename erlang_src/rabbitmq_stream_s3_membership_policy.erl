-module(rabbitmq_stream_s3_membership_policy).
-moduledoc """
The policy key `stream-target-group-size`: how many members a stream should have. RabbitMQ has
`target-group-size`, and lets no policy that holds it apply to a stream.

Owns the key's check, its reading, and the handler that tells the reconcilers when any policy has
changed: RabbitMQ says so only on the node that was asked to change it. The handler runs in RabbitMQ's event manager and goes with the process that it tells.
""".

-behaviour(rabbit_policy_validator).
-behaviour(rabbit_policy_merge_strategy).
-behaviour(gen_event).

-include_lib("rabbit_common/include/rabbit.hrl").

-export([register/0, unregister/0, validate_policy/1, merge_policy_value/3, target_size/1, listen/1]).
-export([init/1, handle_event/2, handle_call/2, handle_info/2]).

%% Before policies are read back, or set by definitions that are imported at the start.
-rabbit_boot_step(
    {?MODULE, [
        {description, "policies for members of streams"},
        {mfa, {?MODULE, register, []}},
        {cleanup, {?MODULE, unregister, []}},
        {requires, rabbit_registry},
        {enables, recovery}
    ]}
).

-define(KEY, <<"stream-target-group-size">>).
%% No stream profits from more copies than nodes that a cluster has.
-define(SIZE_MAX, 255).

%% Without a way to merge, a key that both policies of a stream have crashes who reads it.
-define(CLASSES, [policy_validator, operator_policy_validator, policy_merge_strategy]).

-spec register() -> ok.
register() ->
    lists:foreach(
        fun(Class) -> ok = rabbit_registry:register(Class, ?KEY, ?MODULE) end, ?CLASSES
    ).

-spec unregister() -> ok.
unregister() ->
    lists:foreach(fun(Class) -> ok = rabbit_registry:unregister(Class, ?KEY) end, ?CLASSES).

-spec validate_policy([{binary(), term()}]) -> ok | {error, string(), [term()]}.
validate_policy([{?KEY, Size}]) when is_integer(Size), Size >= 1, Size =< ?SIZE_MAX ->
    ok;
validate_policy([{?KEY, Other}]) ->
    {error, "~ts must be a number from 1 to ~b, not ~tp", [?KEY, ?SIZE_MAX, Other]};
validate_policy(_Other) ->
    ok.

-doc "An operator policy is there to overrule.".
-spec merge_policy_value(binary(), term(), term()) -> term().
merge_policy_value(?KEY, _OfUser, OfOperator) ->
    OfOperator.

-doc "What the policy of a stream says; 0 if nothing.".
-spec target_size(amqqueue:amqqueue()) -> non_neg_integer().
target_size(Queue) ->
    case rabbit_policy:get(?KEY, Queue) of
        Size when is_integer(Size) -> Size;
        _ -> 0
    end.

-doc "Has a reconciler told, until it ends, that policies have changed.".
-spec listen(pid()) -> ok.
listen(Reconciler) ->
    %% Supervised: when the caller ends, RabbitMQ's event manager drops the handler.
    case gen_event:add_sup_handler(rabbit_event, {?MODULE, Reconciler}, Reconciler) of
        ok -> ok;
        {error, already_present} -> ok
    end.

-spec init(pid()) -> {ok, pid()}.
init(Reconciler) ->
    {ok, Reconciler}.

-spec handle_event(term(), pid()) -> {ok, pid()}.
handle_event(Event, Reconciler) ->
    ok =
        case is_of_policies(Event) of
            {true, Type} ->
                rabbitmq_stream_s3_peers:trigger_membership(Reconciler, Type);
            false ->
                ok
        end,
    {ok, Reconciler}.

-spec handle_call(term(), pid()) -> {ok, ok, pid()}.
handle_call(_Unknown, Reconciler) ->
    {ok, ok, Reconciler}.

-spec handle_info(term(), pid()) -> {ok, pid()}.
handle_info(_Unknown, Reconciler) ->
    {ok, Reconciler}.

is_of_policies(#event{type = Type}) ->
    Types = [policy_set, policy_cleared, operator_policy_set, operator_policy_cleared],
    lists:member(Type, Types) andalso {true, Type};
is_of_policies(_Event) ->
    false.
