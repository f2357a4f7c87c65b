//! The native library of rabbitmq_stream_s3, as the Erlang VM sees it: decode, enqueue, return.
//!
//! Owns the table of calls. Does not own any logic: that is `tiering-runtime`'s and below.
//! `docs/NIF_PROTOCOL.md` is the contract with `rabbitmq_stream_s3_nif`.

mod atoms;
mod chunk_entries;
mod codec;
mod engine;
mod entry;
mod errors;
mod log;
mod memory;
mod message;
mod owner;
mod read;
mod recovery;
mod resources;
mod upload;

use rustler::{Binary, Encoder, Env, LocalPid, NifResult, Reference, ResourceArc, Term};

use crate::codec::OffsetOrNone;
use crate::codec::event::{EventTerm, PointerOrEmpty, PointerTerm};
use crate::codec::spec::{GapTerm, SpecTerm, StartTerm};
use crate::resources::{EngineResource, ReaderResource, UploadResource};

/// Version of the contract; the plugin refuses to start on another.
const INTERFACE_VERSION: u32 = 5;

fn interface_version(env: Env<'_>) -> NifResult<Term<'_>> {
    Ok(INTERFACE_VERSION.encode(env))
}

type EngineArc = ResourceArc<EngineResource>;
type ReaderArc = ResourceArc<ReaderResource>;
type UploadArc = ResourceArc<UploadResource>;

entry::nif_table! {
    interface_version as interface_version();

    engine::open as engine_open(owner: Term<'a>, reference: Term<'a>, config: Term<'a>);
    engine::close as engine_close(engine: EngineArc);
    engine::probe as engine_probe(engine: EngineArc, pid: LocalPid, reference: Reference<'a>);
    engine::stats as engine_stats(engine: EngineArc);
    engine::request_durations as engine_request_durations(engine: EngineArc);
    engine::set_rate as engine_set_rate(engine: EngineArc, rate: Term<'a>, burst: Term<'a>);
    engine::list_objects as list_objects(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, stream_id: Term<'a>, token: Term<'a>);
    engine::delete_objects as delete_objects(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, keys: Term<'a>);

    recovery::streams as recovery_streams(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, token: Term<'a>);
    recovery::inspect as recovery_inspect(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, stream_id: Term<'a>, depth: Term<'a>);
    recovery::adopt as recovery_adopt(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, about: Term<'a>);

    upload::open as upload_open(engine: EngineArc, owner: LocalPid, reference: Reference<'a>, config: Term<'a>);
    upload::event as upload_event(upload: UploadArc, event: EventTerm);
    upload::status as upload_status(upload: UploadArc);
    upload::close as upload_close(upload: UploadArc);

    engine::mark_pending as manifest_mark_pending(engine: EngineArc, stream_id: Term<'a>);
    engine::reset as manifest_reset(engine: EngineArc, stream_id: Term<'a>);
    engine::forget as manifest_forget(engine: EngineArc, stream_id: Term<'a>);
    engine::range as manifest_range(engine: EngineArc, stream_id: Term<'a>);
    engine::resolve as manifest_resolve(
        engine: EngineArc, pid: LocalPid, reference: Reference<'a>, stream_id: Term<'a>, pointer: PointerOrEmpty);
    engine::apply_edit as manifest_apply_edit(
        engine: EngineArc, stream_id: Term<'a>, from: PointerTerm, to: PointerTerm, edit: Binary<'a>);
    engine::route as route(
        engine: EngineArc, stream_id: Term<'a>, spec: SpecTerm, local: (OffsetOrNone, u64), gap: GapTerm);
    engine::continue_at as continue_at(
        engine: EngineArc, stream_id: Term<'a>, next_offset: u64, local_first: OffsetOrNone, gap: GapTerm);

    read::open as reader_open(
        engine: EngineArc, owner: LocalPid, wake: Term<'a>, stream_id: Term<'a>, start: StartTerm);
    read::read as reader_read(reader: ReaderArc, max_chunk_id: OffsetOrNone);
    read::close as reader_close(reader: ReaderArc);
    chunk_entries::chunk_entries as chunk_entries(
        data: Term<'a>, position: usize, offset: u64, num_left: u64, max: usize);
}
