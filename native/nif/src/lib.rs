//! The native library of rabbitmq_stream_s3, as the Erlang VM sees it: decode, enqueue, return.
//!
//! Owns the table of calls. Does not own any logic: that is `tiering-runtime`'s and below.
//! `docs/NIF_PROTOCOL.md` is the contract with `rabbitmq_stream_s3_nif`.

mod atoms;
mod chunk_entries;
mod codec;
mod entry;
mod errors;
mod resources;

use rustler::{Binary, Encoder, Env, NifResult, Term};

/// Version of the contract; the plugin refuses to start on another.
const INTERFACE_VERSION: u32 = 1;

fn interface_version(env: Env<'_>) -> NifResult<Term<'_>> {
    Ok(INTERFACE_VERSION.encode(env))
}

entry::nif_table! {
    interface_version as interface_version();
    chunk_entries::chunk_entries as chunk_entries(
        data: Binary<'a>, position: usize, offset: u64, num_left: u64, max: usize);
}
