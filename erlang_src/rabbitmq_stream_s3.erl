-module(rabbitmq_stream_s3).
-moduledoc """
What all modules of the plugin share: types, the node-wide engine handle, and whether the plugin
works on this node.

Owns two persistent terms and no process. Knows nothing about streams.
""".

-export([
    engine/0,
    engine_or_undefined/0,
    set_engine/1,
    erase_engine/0,
    with_engine/1,
    mode/0,
    set_mode/1,
    erase_mode/0,
    stream_id/1,
    utf8/1
]).

-export_type([
    stream_id/0,
    role/0,
    member_info/0,
    range/0,
    pointer/0,
    mode/0,
    engine/0
]).

-doc "The name that osiris gave the stream: unique per incarnation, safe in object keys.".
-type stream_id() :: binary().

-type role() :: writer | acceptor.

-doc """
What the shell knows of a local member of a stream; made by the hooks, or by the reconciler for one
that was there before.
""".
-type member_info() :: #{
    stream_id := stream_id(),
    name := osiris:name(),
    dir := file:filename_all(),
    shared := atomics:atomics_ref(),
    counter := counters:counters_ref(),
    reference := term(),
    epoch := osiris:epoch(),
    retention := [osiris:retention_spec()],
    leader_pid => pid()
}.

-doc "What is durable of a stream: `[first_offset, next_offset)`, as pushed by the native stream.".
-type range() :: #{
    first_offset := non_neg_integer(),
    next_offset := non_neg_integer(),
    first_timestamp := integer(),
    total_size := non_neg_integer(),
    revision := non_neg_integer(),
    epoch := non_neg_integer(),
    fragments := non_neg_integer(),
    %% Where the root is; `none` while no pointer names one.
    pointer := pointer() | none
}.

-type pointer() ::
    {Epoch :: non_neg_integer(), Uid :: non_neg_integer(), Revision :: non_neg_integer()}.

-doc "`inert`: runs but touches nothing; the text says why, for log and status command.".
-type mode() :: active | {inert, Kind :: atom(), Text :: binary()} | stopped.

-type engine() :: rabbitmq_stream_s3_nif:engine().

-define(ENGINE, {?MODULE, engine}).
-define(MODE, {?MODULE, mode}).

-spec engine() -> {ok, engine()} | undefined.
engine() ->
    case persistent_term:get(?ENGINE, undefined) of
        undefined -> undefined;
        Engine -> {ok, Engine}
    end.

-doc "As engine/0, in the shape that the routes of the native library take.".
-spec engine_or_undefined() -> engine() | undefined.
engine_or_undefined() ->
    persistent_term:get(?ENGINE, undefined).

-spec set_engine(engine()) -> ok.
set_engine(Engine) ->
    persistent_term:put(?ENGINE, Engine).

-spec erase_engine() -> ok.
erase_engine() ->
    _ = persistent_term:erase(?ENGINE),
    ok.

-doc "Calls the function with the engine, if there is one.".
-spec with_engine(fun((engine()) -> term())) -> ok.
with_engine(Fun) ->
    case engine() of
        {ok, Engine} ->
            _ = Fun(Engine),
            ok;
        undefined ->
            ok
    end.

-spec mode() -> mode().
mode() ->
    persistent_term:get(?MODE, stopped).

-spec set_mode(active | {inert, atom(), binary()}) -> ok.
set_mode(Mode) ->
    persistent_term:put(?MODE, Mode).

-spec erase_mode() -> ok.
erase_mode() ->
    _ = persistent_term:erase(?MODE),
    ok.

-doc "The name under which native code and bucket know an osiris log.".
-spec stream_id(osiris:name()) -> stream_id().
stream_id(Name) when is_binary(Name) -> Name;
stream_id(Name) when is_list(Name) -> unicode:characters_to_binary(Name).

-doc "A file name or any text as a UTF-8 binary, which is all that the native side takes.".
-spec utf8(unicode:chardata() | atom()) -> binary().
utf8(Text) when is_atom(Text) ->
    atom_to_binary(Text);
utf8(Text) when is_binary(Text) ->
    Text;
utf8(Text) ->
    case unicode:characters_to_binary(Text) of
        Binary when is_binary(Binary) -> Binary;
        _Invalid -> iolist_to_binary(io_lib:format("~0p", [Text]))
    end.
