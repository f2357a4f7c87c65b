//! The root that a recovered stream begins with: the same history, under names that a first writer may follow.
//!
//! A stream that is declared again counts its epochs from 1, and a writer stops when the pointer has a later epoch than its own. So the
//! root is written once more, for epoch 0, and says that the stream was recovered one more time.

use bytes::Bytes;
use log_format::crc;

use super::{Newest, RecoveryError, Usable, newest, rebuild};
use crate::clock::random_uid;
use crate::object_metadata::{self, AboutStream, RootHistory};
use crate::remote_tier::{PutBody, PutRequest};
use crate::shared::Shared;

/// Epoch of a root that no writer has written.
const EPOCH: u64 = 0;

/// The root of a recovered stream, for the pointer in the metadata store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// Epoch of the pointer.
    pub epoch: u64,
    /// Random part of the root's key.
    pub uid: u32,
    /// First offset that can be read.
    pub first_offset: u64,
    /// Offset after the last one; new records come after it.
    pub next_offset: u64,
}

/// Writes the root. Done twice it leaves an object that nobody names.
pub(crate) async fn adopt(shared: &Shared, about: &AboutStream) -> Result<Adopted, RecoveryError> {
    let stream_id = &about.stream_id;
    let usable = match newest(shared, stream_id).await? {
        Newest::Root(usable) => *usable,
        Newest::None(_) => rebuild::from_fragments(shared, stream_id).await?.into(),
    };
    let Usable { root, history, .. } = usable;
    let history = RootHistory {
        recoveries: history.recoveries.saturating_add(1),
        epoch: EPOCH,
        follows: 0,
        abandoned: history.abandoned,
    };
    let uid = random_uid();
    let bytes = Bytes::from(root.encode());
    let request = PutRequest {
        key: shared.keys.root(stream_id, EPOCH, uid),
        crc32: crc::crc32(&bytes),
        body: PutBody::Bytes(bytes),
        metadata: object_metadata::root(about, root.next_offset, &history),
    };
    shared.retrying.put(request).await?;
    shared.stats.roots_uploaded.increment();
    Ok(Adopted {
        epoch: EPOCH,
        uid,
        first_offset: root.first_offset,
        next_offset: root.next_offset,
    })
}
