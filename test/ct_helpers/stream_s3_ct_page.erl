%% A metrics page of a node, as Prometheus would get it.
-module(stream_s3_ct_page).

-export([fetch/1, fetch/2, names/1, sum/2, values/2]).

-type page() :: [{Name :: binary(), Labels :: binary(), number()}].
-export_type([page/0]).

-spec fetch(stream_s3_ct_node:t()) -> page() | none.
fetch(Node) ->
    fetch(Node, "/metrics").

%% `none` if nobody listens there.
-spec fetch(stream_s3_ct_node:t(), string()) -> page() | none.
fetch(#{prometheus_port := Port}, Path) ->
    {ok, _} = application:ensure_all_started(inets),
    Url = "http://127.0.0.1:" ++ integer_to_list(Port) ++ Path,
    case httpc:request(get, {Url, []}, [{timeout, 30_000}], [{body_format, binary}]) of
        {ok, {{_, 200, _}, _, Text}} -> parse(Text);
        {error, _} -> none
    end.

-spec names(page()) -> [binary()].
names(Page) ->
    lists:usort([Name || {Name, _, _} <- Page]).

%% All samples of that name, added up; it must be on the page.
-spec sum(page(), binary()) -> number().
sum(Page, Name) ->
    lists:sum([Value || {_, Value} <- [_ | _] = values(Page, Name)]).

%% The samples of that name with their labels, as they are written.
-spec values(page(), binary()) -> [{binary(), number()}].
values(Page, Name) ->
    [{Labels, Value} || {N, Labels, Value} <- Page, N =:= Name].

parse(Text) ->
    [
        sample(Line)
     || Line <- binary:split(Text, ~"\n", [global, trim_all]), binary:first(Line) =/= $#
    ].

sample(Line) ->
    {match, [Name, Labels, Value]} =
        re:run(
            Line,
            ~"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\\{(.*)\\})?\\s+(\\S+)",
            [{capture, all_but_first, binary}]
        ),
    {Name, Labels, number(Value)}.

number(~"+Inf") ->
    infinity;
number(~"NaN") ->
    nan;
number(Text) ->
    try
        binary_to_integer(Text)
    catch
        error:badarg -> element(1, string:to_float(binary_to_list(Text)))
    end.
