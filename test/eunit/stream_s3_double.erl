%% Takes the place of a module in a test: loads one of that name whose functions call those of the same
%% name in another module.
-module(stream_s3_double).

-export([load/3, unload/1]).

%% Functions: [{Name, Arity}], all in the module To.
load(Name, Functions, To) ->
    Lines =
        [io_lib:format("-module(~s).", [Name])] ++
            [io_lib:format("-export([~s/~b]).", [F, A]) || {F, A} <- Functions] ++
            [delegate(F, A, To) || {F, A} <- Functions],
    {ok, Name, Binary} = compile:forms([parse(Line) || Line <- Lines]),
    _ = code:purge(Name),
    {module, Name} = code:load_binary(Name, "double", Binary),
    ok.

%% Twice: another test may have loaded the module itself.
unload(Name) ->
    _ = code:purge(Name),
    true = code:delete(Name),
    _ = code:purge(Name),
    ok.

delegate(Function, Arity, To) ->
    Args = lists:join(",", ["A" ++ integer_to_list(N) || N <- lists:seq(1, Arity)]),
    io_lib:format("~s(~s) -> ~s:~s(~s).", [Function, Args, To, Function, Args]).

parse(Line) ->
    {ok, Tokens, _} = erl_scan:string(lists:flatten(Line)),
    {ok, Form} = erl_parse:parse_form(Tokens),
    Form.
