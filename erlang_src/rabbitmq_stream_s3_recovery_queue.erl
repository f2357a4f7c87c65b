-module(rabbitmq_stream_s3_recovery_queue).
-moduledoc """
Brings one stream back: its virtual host, its queue with the stream id that it had, and the pointer to the
root that it begins with.

Owns the order of these steps. Each is done once, whatever ended the try before. Does not own whether
it should be done (rabbitmq_stream_s3_recovery_plan).
""".

-include_lib("kernel/include/logger.hrl").
-include_lib("rabbit_common/include/rabbit.hrl").

-export([recover/3]).

-type found() :: rabbitmq_stream_s3_nif:found().
-type engine() :: rabbitmq_stream_s3_nif:engine().

-define(DOMAIN, #{domain => [rabbitmq, stream_s3]}).

-doc "What became of it: `recovered`, or `failed` and why.".
-spec recover(rabbit_amqqueue:name(), found(), engine()) ->
    #{verdict := recovered | failed, text => binary()}.
recover(QName, #{stream_id := Id} = Found, Engine) ->
    case declare(QName, Found, Engine) of
        declared ->
            ?LOG_INFO(
                "stream_s3: ~ts was recovered from the bucket: its offsets [~b, ~b) can be read again, new"
                " records follow them. Stream ~ts",
                [
                    rabbit_misc:rs(QName),
                    maps:get(first_offset, Found),
                    maps:get(next_offset, Found),
                    Id
                ],
                ?DOMAIN
            ),
            #{verdict => recovered};
        {error, Reason} ->
            Text = rabbitmq_stream_s3:utf8(io_lib:format("~0tp", [Reason])),
            ?LOG_ERROR(
                "stream_s3: ~ts could not be recovered from the bucket: ~ts. Nothing was lost, run"
                " stream_s3_recover again",
                [rabbit_misc:rs(QName), Text],
                ?DOMAIN
            ),
            #{verdict => failed, text => Text}
    end.

declare(#resource{virtual_host = VHost} = QName, Found, Engine) ->
    maybe
        {ok, Arguments} ?= arguments(Found),
        ok ?= vhost(VHost),
        rabbitmq_stream_s3_host_declare:declare(#{
            name => QName,
            stream_id => maps:get(stream_id, Found),
            arguments => Arguments,
            user => ?INTERNAL_USER,
            between => fun() -> adopt(QName, Found, Engine) end
        })
    end.

%% Objects of an earlier version do not have them: the queue is a stream, that much is known.
arguments(#{arguments := Text}) when is_binary(Text), Text =/= <<>> ->
    case rabbitmq_stream_s3_host_declare:decode_arguments(Text) of
        {ok, Arguments} -> {ok, Arguments};
        error -> {error, unreadable_arguments}
    end;
arguments(_Found) ->
    {ok, [{<<"x-queue-type">>, longstr, <<"stream">>}]}.

vhost(VHost) ->
    case rabbit_vhost:exists(VHost) of
        true ->
            ok;
        false ->
            case rabbit_vhost:add(VHost, ?INTERNAL_USER) of
                ok -> ok;
                {error, Reason} -> {error, {vhost, Reason}}
            end
    end.

%% The pointer, before the first writer asks for it. One that is there is of an earlier try.
adopt(QName, #{stream_id := Id} = Found, Engine) ->
    case rabbitmq_stream_s3_db:get_consistent(Id) of
        {ok, _Pointer} -> ok;
        not_found -> adopt_new(QName, Id, Found, Engine);
        {error, Reason} -> {error, {metadata_store, Reason}}
    end.

adopt_new(#resource{virtual_host = VHost, name = Queue} = QName, Id, Found, Engine) ->
    About = (maps:with([stream_id, arguments, cluster], Found))#{vhost => VHost, queue => Queue},
    maybe
        {adopted, Epoch, Uid, _First, Next} ?= rabbitmq_stream_s3_recovery_native:adopt(Engine, About),
        ok ?= rabbitmq_stream_s3_db:put_anchor(Id, QName),
        {ok, _} ?= rabbitmq_stream_s3_db:commit_pointer(Id, QName, Epoch, Uid, Next, 0),
        ok
    else
        {error, Reason} -> {error, Reason};
        NotCommitted -> {error, {metadata_store, NotCommitted}}
    end.
