//! What Erlang holds of us: the resource types, their registration, and what their end means.
//!
//! Each handle closes when it is closed, when its owner dies, and when it is garbage collected; closing never waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use bytes::Bytes;
use rustler::codegen_runtime::ResourceRegistration;
use rustler::{Env, LocalPid, Monitor, Resource};
use tiering_runtime::engine::Engine;
use tiering_runtime::read::ReaderHandle;
use tiering_runtime::upload::UploadHandle;

use crate::message::Mailbox;
use crate::owner::Owned;

/// The native side of a node.
pub(crate) struct EngineResource {
    pub(crate) engine: Engine,
    /// Its owner.
    pub(crate) owner: Arc<Mailbox>,
}

impl Owned for EngineResource {
    fn close(&self) {
        self.engine.close();
    }
}

/// The upload machine of one local writer.
pub(crate) struct UploadResource {
    pub(crate) upload: UploadHandle,
}

impl Owned for UploadResource {
    fn close(&self) {
        self.upload.close();
    }
}

/// The remote reads of one consumer.
pub(crate) struct ReaderResource {
    pub(crate) reader: ReaderHandle,
}

impl Owned for ReaderResource {
    fn close(&self) {
        self.reader.close();
    }
}

/// A handle with an owner: `down` and the end of the last term close it.
macro_rules! owned_resource {
    ($type:ty) => {
        impl Resource for $type {
            const IMPLEMENTS_DOWN: bool = true;

            fn down<'a>(&'a self, _env: Env<'a>, _pid: LocalPid, _monitor: Monitor) {
                self.close();
            }
        }

        impl Drop for $type {
            fn drop(&mut self) {
                self.close();
            }
        }
    };
}

owned_resource!(EngineResource);
owned_resource!(UploadResource);
owned_resource!(ReaderResource);

static LENT_CHUNKS: AtomicI64 = AtomicI64::new(0);
static LENT_BYTES: AtomicI64 = AtomicI64::new(0);

/// Chunks that Erlang holds binaries of (and the garbage that is not collected yet).
pub(crate) fn lent_chunks() -> i64 {
    LENT_CHUNKS.load(Ordering::Relaxed)
}

/// Their bytes.
pub(crate) fn lent_bytes() -> i64 {
    LENT_BYTES.load(Ordering::Relaxed)
}

/// The bytes of one chunk while any binary made of them lives.
pub(crate) struct ChunkResource {
    slices: Vec<Bytes>,
    bytes: i64,
}

impl ChunkResource {
    /// What binaries are made of, and the length of the whole chunk.
    pub(crate) fn new(slices: Vec<Bytes>, bytes: usize) -> Self {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        LENT_CHUNKS.fetch_add(1, Ordering::Relaxed);
        LENT_BYTES.fetch_add(bytes, Ordering::Relaxed);
        Self { slices, bytes }
    }

    /// One of the slices.
    pub(crate) fn slice(&self, index: usize) -> &[u8] {
        self.slices
            .get(index)
            .map(|slice| &slice[..])
            .unwrap_or_default()
    }
}

impl Resource for ChunkResource {}

impl Drop for ChunkResource {
    fn drop(&mut self) {
        LENT_CHUNKS.fetch_sub(1, Ordering::Relaxed);
        LENT_BYTES.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// How often this copy of the library tried to register its types in this VM.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Names that a load tries. Another version of the plugin lies at another path: it is another copy
/// of the library, counts from 0 again, and finds the names that earlier copies took in this VM.
const GENERATIONS_MAX: u32 = 4_096;

/// Registers the resource types. A later load (plugin disabled and enabled again, code upgrade)
/// takes new type names: handles of an earlier load are then refused with `badarg`, and are freed
/// by their own types.
pub(crate) fn register(env: Env<'_>) -> bool {
    (0..GENERATIONS_MAX).any(|_| {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        register_as(env, generation)
    })
}

fn register_as(env: Env<'_>, generation: u32) -> bool {
    let name = |kind: &str| -> &'static str {
        // A few bytes for each load of the module.
        Box::leak(format!("{kind}.{generation}").into_boxed_str())
    };
    let registrations = [
        ResourceRegistration::new::<EngineResource>().with_name(name("engine")),
        ResourceRegistration::new::<UploadResource>().with_name(name("upload")),
        ResourceRegistration::new::<ReaderResource>().with_name(name("reader")),
        ResourceRegistration::new::<ChunkResource>().with_name(name("chunk")),
    ];
    registrations
        .iter()
        .all(|registration| registration.register(env).is_ok())
}
