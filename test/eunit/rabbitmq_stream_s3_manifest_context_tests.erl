%% When an edit leads on from what one replica knows: on the pure context, without anything around it.
-module(rabbitmq_stream_s3_manifest_context_tests).

-include_lib("eunit/include/eunit.hrl").

-define(C, rabbitmq_stream_s3_manifest_context).
-define(FROM, {1, 7, 5}).
-define(TO, {1, 8, 6}).

%% The manifest of a pointer is known, its writer has told of it, nothing is under way.
known(Pointer) ->
    {read, Reading} = ?C:next(?C:new()),
    {fetch, Pointer, Fetching} = ?C:pointer_read({ok, Pointer}, Reading),
    {ok, Known} = ?C:fetched(?C:announced(Pointer, Fetching)),
    none = ?C:next(Known),
    Known.

an_edit_counts_as_its_announcement_test() ->
    Known = known(?FROM),
    ?assert(?C:follows(?FROM, ?TO, Known)),
    Followed = ?C:followed(?TO, Known),
    ?assertEqual({6, true, 0}, {
        ?C:revision(Followed), ?C:confirmed(Followed), ?C:failures(Followed)
    }),
    %% The announcement behind it is no news, and there is nothing to do.
    ?assertEqual(false, ?C:announced(?TO, Followed)),
    ?assertEqual(none, ?C:next(Followed)),
    %% The same as by a fetch.
    {fetch, ?TO, Fetching} = ?C:next(?C:announced(?TO, Known)),
    ?assertEqual({ok, Followed}, ?C:fetched(Fetching)),
    %% And on from there.
    ?assert(?C:follows(?TO, {2, 9, 7}, Followed)).

%% Nobody has told of what is known: the edit's end is what its writer tells of.
an_edit_confirms_test() ->
    {read, Reading} = ?C:next(?C:new()),
    {fetch, ?FROM, Fetching} = ?C:pointer_read({ok, ?FROM}, Reading),
    {ok, Known} = ?C:fetched(Fetching),
    ?assertNot(?C:confirmed(Known)),
    ?assert(?C:follows(?FROM, ?TO, Known)),
    ?assert(?C:confirmed(?C:followed(?TO, Known))).

a_gap_asks_for_a_sync_test() ->
    Known = known(?FROM),
    %% Later, earlier, another key, another epoch under the same revision.
    Others = [?TO, {1, 6, 4}, {1, 8, 5}, {0, 7, 5}, {2, 7, 5}],
    [?assertNot(?C:follows(From, {2, 9, 7}, Known)) || From <- Others],
    ?assertMatch({fetch, {2, 9, 7}, _}, ?C:next(?C:announced({2, 9, 7}, Known))).

nothing_older_is_followed_test() ->
    Known = known(?FROM),
    [?assertNot(?C:follows(?FROM, To, Known)) || To <- [?FROM, {1, 8, 5}, {2, 8, 4}]].

what_is_under_way_or_wanted_comes_first_test() ->
    New = ?C:new(),
    ?assertNot(?C:follows(?FROM, ?TO, New)),
    {read, Reading} = ?C:next(New),
    ?assertNot(?C:follows(?FROM, ?TO, Reading)),
    {fetch, ?FROM, Fetching} = ?C:pointer_read({ok, ?FROM}, Reading),
    ?assertNot(?C:follows(?FROM, ?TO, Fetching)),
    Wanting = ?C:announced({1, 9, 7}, known(?FROM)),
    ?assertNot(?C:follows(?FROM, ?TO, Wanting)),
    {fetch, {1, 9, 7}, FetchingNewer} = ?C:next(Wanting),
    ?assertNot(?C:follows(?FROM, ?TO, FetchingNewer)),
    {wait, _, Waiting} = ?C:failed(corrupt, FetchingNewer),
    ?assertNot(?C:follows(?FROM, ?TO, Waiting)),
    ?assertNot(?C:follows(?FROM, ?TO, ?C:engine_lost(known(?FROM)))).

an_empty_manifest_has_no_pointer_to_start_from_test() ->
    {read, Reading} = ?C:next(?C:new()),
    {fetch, empty, Fetching} = ?C:pointer_read(not_found, Reading),
    {ok, Empty} = ?C:fetched(Fetching),
    ?assertNot(?C:follows(?FROM, ?TO, Empty)),
    ?assertNot(?C:follows({0, 0, 0}, ?TO, Empty)).

what_is_taken_back_is_not_followed_test() ->
    TakenBack = ?C:taken_back(5, known(?FROM)),
    ?assertNot(?C:follows(?FROM, ?TO, TakenBack)),
    %% The persist that replaces it is fetched, and edits lead on from there.
    {fetch, ?TO, Fetching} = ?C:next(?C:announced(?TO, TakenBack)),
    {ok, Known} = ?C:fetched(Fetching),
    ?assertNot(?C:follows(?FROM, {1, 9, 7}, Known)),
    ?assert(?C:follows(?TO, {1, 9, 7}, Known)).
