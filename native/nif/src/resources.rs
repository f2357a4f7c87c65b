//! What Erlang holds of us: the resource types and their registration.

#![allow(dead_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use rustler::codegen_runtime::ResourceRegistration;
use rustler::{Env, Resource};

/// The bytes of one chunk while any binary made of them lives.
pub(crate) struct ChunkResource(pub(crate) Bytes);

impl Resource for ChunkResource {}

/// How often the library was loaded in this VM.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Registers the resource types. A later load (plugin disabled and enabled again, code upgrade)
/// takes new type names: handles of an earlier load are then refused with `badarg`, and are freed
/// by their own types.
pub(crate) fn register(env: Env<'_>) -> bool {
    let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
    let name = |kind: &str| -> &'static str {
        // A few bytes for each load of the module.
        Box::leak(format!("{kind}.{generation}").into_boxed_str())
    };
    let registrations = [ResourceRegistration::new::<ChunkResource>().with_name(name("chunk"))];
    registrations.iter().all(|registration| registration.register(env).is_ok())
}
