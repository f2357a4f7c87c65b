%% Names that more than one module of the shell agrees on. No behaviour.

%% persistent_term key of the native engine handle; absent while the plugin is off.
-define(ENGINE, {rabbitmq_stream_s3, engine}).

%% ETS, rows {StreamId, pending | Range :: map()}: what this node knows of every manifest.
-define(MANIFEST_CACHE, rabbitmq_stream_s3_manifest_cache).

%% ETS, rows {Directory :: binary(), StreamId}: osiris names a log by its directory in
%% osiris_log:evaluate_retention/2. More rows: see rabbitmq_stream_s3_manifest_replica.
-define(DIRS, rabbitmq_stream_s3_dirs).
