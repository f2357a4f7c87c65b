%% Waiting for what happens in another process of the operating system.
-module(stream_s3_ct_wait).

-export([until/2, until/3]).

-spec until(string(), fun(() -> T | false)) -> T.
until(What, Condition) ->
    until(What, Condition, 30_000).

%% Polls a condition until it answers something else than false, which is the answer. Fails with What when time is up.
%% Not an event, because most of what is waited for is stock code in another virtual machine: nobody would send one.
-spec until(string(), fun(() -> T | false), timeout()) -> T.
until(What, Condition, TimeoutMs) ->
    until_deadline(What, Condition, erlang:monotonic_time(millisecond) + TimeoutMs).

until_deadline(What, Condition, DeadlineMs) ->
    case Condition() of
        false ->
            erlang:monotonic_time(millisecond) < DeadlineMs orelse ct:fail(
                "not in time: ~ts", [What]
            ),
            timer:sleep(50),
            until_deadline(What, Condition, DeadlineMs);
        Value ->
            Value
    end.
