//! The bucket and the metadata store, as strongly consistent as the real ones; faults are made by who asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use log_format::manifest::Root;
use tiering_core::replica_reader::{CommitOutcome, Pointer, PointerRead, StoredObject};

/// One object of the bucket.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its bytes.
    pub bytes: Bytes,
    /// Offset after its last record; 0 for a root.
    pub next_offset: u64,
    /// Length of its chunks; 0 for a root.
    pub data_bytes: u64,
    /// Timeline of the log that it was compared with.
    pub timeline: u64,
}

/// The bucket: objects by stream and key.
#[derive(Debug, Default)]
pub struct Bucket {
    objects: BTreeMap<(usize, StoredObject), Stored>,
}

impl Bucket {
    /// Writes; false if the key has other bytes already.
    #[must_use]
    pub fn put(&mut self, stream: usize, object: StoredObject, stored: Stored) -> bool {
        match self.objects.insert((stream, object), stored.clone()) {
            Some(old) => old.bytes == stored.bytes,
            None => true,
        }
    }

    /// Reads.
    #[must_use]
    pub fn get(&self, stream: usize, object: StoredObject) -> Option<&Stored> {
        self.objects.get(&(stream, object))
    }

    /// Deletes; whether it was there.
    pub fn delete(&mut self, stream: usize, object: StoredObject) -> bool {
        self.objects.remove(&(stream, object)).is_some()
    }

    /// All keys of a stream.
    #[must_use]
    pub fn list(&self, stream: usize) -> Vec<StoredObject> {
        self.objects
            .keys()
            .filter(|(of, _)| *of == stream)
            .map(|(_, object)| *object)
            .collect()
    }
}

/// What the metadata store keeps of one stream.
#[derive(Debug, Default)]
pub struct Metadata {
    /// The queue is gone, and everything below it.
    pub deleted: bool,
    /// The mark that there may be objects.
    pub anchor: bool,
    /// The pointer.
    pub pointer: Option<Pointer>,
}

impl Metadata {
    /// A consistent read.
    #[must_use]
    pub fn read(&self) -> PointerRead {
        match self.pointer {
            Some(pointer) => PointerRead::Found(pointer),
            None => PointerRead::NotFound,
        }
    }

    /// Writes the anchor, unless the stream is gone.
    pub fn write_anchor(&mut self) -> bool {
        self.anchor |= !self.deleted;
        !self.deleted
    }

    /// The compare-and-swap: the revision must be the expected one, and no writer of a higher epoch may own the pointer.
    /// Whoever asks again after a lost answer finds its own pointer in place.
    pub fn commit(&mut self, epoch: u64, uid: u32, expected_revision: u64) -> CommitOutcome {
        if self.deleted {
            return CommitOutcome::NotFound;
        }
        match self.pointer {
            Some(pointer) if pointer.epoch == epoch && pointer.uid == uid => {
                CommitOutcome::Committed {
                    revision: pointer.revision,
                }
            }
            None if expected_revision > 0 => CommitOutcome::NotFound,
            Some(pointer) if pointer.revision != expected_revision || pointer.epoch > epoch => {
                CommitOutcome::Conflict
            }
            Some(_) | None => {
                let revision = expected_revision + 1;
                self.pointer = Some(Pointer {
                    epoch,
                    uid,
                    revision,
                });
                CommitOutcome::Committed { revision }
            }
        }
    }

    /// The queue is deleted: the container goes, and the rest with it.
    pub fn delete(&mut self) {
        *self = Self {
            deleted: true,
            ..Self::default()
        };
    }
}

/// What a node knows of the persisted manifest.
#[derive(Debug, Clone)]
pub struct Known {
    /// The manifest.
    pub root: Arc<Root>,
    /// The local log has shown that it goes on where this ends: local retention may go by it.
    pub confirmed: bool,
    /// Its revision, and the number of its publishing.
    pub version: (u64, u64),
}
