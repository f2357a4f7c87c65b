%% What the modules of one reader share: rabbitmq_stream_s3_log_reader, ..._reader_open, ..._tiers,
%% ..._reader_wait.

%% A reader lives in a connection, which outlives the plugin's modules: they may be replaced (disable,
%% enable), and wrappers in osiris_log read it while there are none. So the fields down to `timer`, and
%% `version`, keep their positions for ever; the others may change with READER_VERSION and start anew
%% in a reader of another version (rabbitmq_stream_s3_reader_state).
-define(READER_VERSION, 1).

-record(reader, {
    stream_id :: binary(),
    tier ::
        undefined
        %% Its place is not known yet.
        | {unknown, osiris:offset_spec()}
        | {local, osiris_log:state()}
        | {remote, rabbitmq_stream_s3_reader_remote:t()}
        %% It was refused for good at this offset, and its owner has been notified.
        | {ended, osiris:offset()},
    %% What opens a stock reader inside: counts nothing, since this reader does.
    context :: map(),
    shared :: atomics:atomics_ref(),
    counter :: counters:counters_ref(),
    counter_id :: term(),
    count :: fun((integer()) -> term()),
    transport :: tcp | ssl,
    chunk_selector :: all | user_data,
    filter :: undefined | osiris_bloom:mstate(),
    %% The queue, if the context names one.
    reference :: term(),
    %% Makes the owner try again; both kinds of consumer understand it.
    wake :: term(),
    timer :: undefined | reference(),
    %% The owner will ask once more before it believes the end of the stream.
    asks_again = true :: boolean(),
    forgotten_until :: undefined | integer(),
    %% The last stock iterator came from this very stock reader: only then may it be handed back,
    %% because it carries bytes of the file that it was made from.
    chained = false :: boolean(),
    %% Behind the fields of a time when there was none.
    version = ?READER_VERSION :: pos_integer(),
    %% When: of two readers of one process the later one has the greater number.
    opened = erlang:unique_integer([monotonic]) :: integer(),
    %% Tries since the last chunk that had to wait for something else: each waits longer.
    retries = 0 :: non_neg_integer(),
    %% The object at the place is gone (rabbitmq_stream_s3_reader_lost): since when the manifest of now is
    %% asked for, and where it has been read from by a newer one already.
    lost :: undefined
        | {asked, Since :: integer(), undefined | osiris:offset()}
        | {reopened, osiris:offset()}
}).
