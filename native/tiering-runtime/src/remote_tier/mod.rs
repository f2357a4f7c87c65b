//! The remote tier: one small store trait, its S3 implementation and its one-job wrappers.
//!
//! Owns requests and answers of an object store. Does not own what the objects mean, when to retry an upload,
//! or how many requests run at once.
//!
//! Order of the wrappers, outside first: `retrying` (only for requests that no machine repeats) over `proving` over `instrumented`
//! over `s3`, so that each attempt counts. What a failure means to a machine is said in `meaning`, and nowhere else.

use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;

mod error;
#[cfg(test)]
pub(crate) mod gate;
mod instrumented;
mod limited;
mod meaning;
mod proving;
mod retrying;
mod s3;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use error::{StoreError, StoreErrorKind};
pub use instrumented::Instrumented;
pub use limited::{CONTROL_REQUESTS_MAX, Limited};
pub(crate) use meaning::failure;
pub use proving::Proving;
pub use retrying::{Retrying, RetryingPolicy};
pub use s3::S3RemoteTier;

/// Where the bytes of a range go as they come.
pub trait RangeSink: Send {
    /// The next bytes.
    fn push(&mut self, bytes: Bytes);
}

/// At most this many keys in one `delete` and one `list` page: S3's own limit.
pub const KEYS_MAX: usize = 1000;

/// The answer of a store call, boxed so that the trait is object-safe.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// An object store with one bucket. Keys are full keys, with prefix.
///
/// Dropping a future gives the request up; a PUT that is given up may still have happened.
pub trait RemoteTier: Send + Sync + 'static {
    /// Stores an object; the store checks the bytes against `crc32` before it keeps them.
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()>;

    /// A whole object of at most `max_bytes`; a longer one is `TooLarge` and is not buffered.
    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes>;

    /// The same with the object's user metadata.
    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described>;

    /// The bytes `range.start..range.end` of an object. Shorter only where the object ends; starting past the end is `InvalidRange`.
    /// An empty range is an error of the caller (`InvalidRange`).
    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes>;

    /// The same as [`Self::get_range`], handed over as it comes. What came before a failure is good.
    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            sink.push(self.get_range(key, range).await?);
            Ok(())
        })
    }

    /// Size and metadata of an object.
    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta>;

    /// One page of at most `max_keys` (and at most [`KEYS_MAX`]) keys under `prefix`, in byte order.
    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage>;

    /// One page of the folders directly below `prefix`, which is empty or ends in a slash; in byte order, each with its slash.
    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage>;

    /// Deletes at most [`KEYS_MAX`] objects; one that is not there counts as deleted.
    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome>;

    /// Whether bucket, credentials and region are usable.
    fn probe(&self) -> StoreFuture<'_, ()>;
}

/// One object to store.
#[derive(Debug, Clone)]
pub struct PutRequest {
    /// Full key.
    pub key: String,
    /// The bytes; can be read more than once.
    pub body: PutBody,
    /// CRC-32 (zlib) of all bytes of the body.
    pub crc32: u32,
    /// User metadata, names without the `x-amz-meta-` part; ASCII, under 2 KB in all.
    pub metadata: Vec<(&'static str, String)>,
}

/// Where the bytes of a PUT come from.
#[derive(Clone)]
pub enum PutBody {
    /// From memory.
    Bytes(Bytes),
    /// From a source that is opened once per attempt.
    Source(Arc<dyn BodySource>),
}

impl PutBody {
    /// Length of the whole body.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Source(source) => source.len_bytes(),
        }
    }
}

impl std::fmt::Debug for PutBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PutBody({} bytes)", self.len_bytes())
    }
}

/// Frames of a body in order; ends early only with an error.
pub type BodyFrames = mpsc::Receiver<Result<Bytes, StoreError>>;

/// A body that is produced while it is sent, so that no object is ever in memory as a whole.
pub trait BodySource: Send + Sync + 'static {
    /// Exact length of what `open` yields.
    fn len_bytes(&self) -> u64;

    /// Starts reading from the beginning; called on a tokio runtime. Dropping the receiver ends the reading.
    fn open(&self) -> BodyFrames;
}

/// Answer of `head`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Length of the object.
    pub size_bytes: u64,
    /// User metadata, names in lower case without the `x-amz-meta-` part.
    pub metadata: BTreeMap<String, String>,
}

/// Answer of `get_described`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The whole object.
    pub bytes: Bytes,
    /// User metadata, names in lower case without the `x-amz-meta-` part.
    pub metadata: BTreeMap<String, String>,
}

/// One listed object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedObject {
    /// Full key.
    pub key: String,
    /// Length of the object.
    pub size_bytes: u64,
    /// When it was stored, by the store's clock, in milliseconds since 1970; `None` if the store does not say.
    pub modified_ms: Option<i64>,
}

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListPage {
    /// The objects, in byte order of their keys.
    pub objects: Vec<ListedObject>,
    /// Where the next page starts; `None` on the last one.
    pub next_token: Option<String>,
}

/// One page of folders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FolderPage {
    /// The folders, each with its slash, in byte order.
    pub folders: Vec<String>,
    /// Where the next page starts; `None` on the last one.
    pub next_token: Option<String>,
}

/// Answer of `delete`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeleteOutcome {
    /// How many are gone now.
    pub deleted: usize,
    /// Key and reason of those that are not.
    pub failed: Vec<(String, String)>,
}
