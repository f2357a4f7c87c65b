//! The bucket and the metadata store, as strongly consistent as the real ones; faults are made by who asks.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use log_format::manifest::{Group, Root};
use tiering_core::upload::{CommitOutcome, Pointer, PointerRead, StoredObject};

/// One object of the bucket.
#[derive(Debug, Clone)]
pub struct Stored {
    /// Its bytes.
    pub bytes: Bytes,
    /// Offset after its last record; 0 for a root or group.
    pub next_offset: u64,
    /// Length of its chunks; 0 for a root or group.
    pub data_bytes: u64,
    /// Timeline of the log that it was compared with.
    pub timeline: u64,
}

impl Stored {
    /// A root or a group.
    #[must_use]
    pub fn of_manifest(bytes: Vec<u8>) -> Self {
        Self {
            bytes: Bytes::from(bytes),
            next_offset: 0,
            data_bytes: 0,
            timeline: 0,
        }
    }
}

/// The bucket: objects by stream and key.
#[derive(Debug, Default)]
pub struct Bucket {
    objects: BTreeMap<(usize, StoredObject), Stored>,
    /// The groups among them, decoded once: the checks look into them all the time.
    groups: BTreeMap<(usize, StoredObject), Arc<Group>>,
    /// How many objects each stream has.
    counts: BTreeMap<usize, usize>,
}

impl Bucket {
    /// Writes; false if the key has other bytes already.
    #[must_use]
    pub fn put(&mut self, stream: usize, object: StoredObject, stored: Stored) -> bool {
        if let StoredObject::Group { kind, .. } = object
            && let Ok(group) = Group::decode(kind, &stored.bytes)
        {
            self.groups.insert((stream, object), Arc::new(group));
        }
        match self.objects.insert((stream, object), stored.clone()) {
            Some(old) => old.bytes == stored.bytes,
            None => {
                *self.counts.entry(stream).or_default() += 1;
                true
            }
        }
    }

    /// Reads.
    #[must_use]
    pub fn get(&self, stream: usize, object: StoredObject) -> Option<&Stored> {
        self.objects.get(&(stream, object))
    }

    /// Deletes; whether it was there.
    pub fn delete(&mut self, stream: usize, object: StoredObject) -> bool {
        self.groups.remove(&(stream, object));
        let was_there = self.objects.remove(&(stream, object)).is_some();
        if let Some(count) = self.counts.get_mut(&stream) {
            *count -= usize::from(was_there);
        }
        was_there
    }

    /// A group that is there and is well-formed.
    #[must_use]
    pub fn group(&self, stream: usize, object: StoredObject) -> Option<Arc<Group>> {
        self.groups.get(&(stream, object)).map(Arc::clone)
    }

    /// How many objects a stream has.
    #[must_use]
    pub fn count(&self, stream: usize) -> usize {
        self.counts.get(&stream).copied().unwrap_or(0)
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
    /// The pointer that names it; `None` while none does.
    pub pointer: Option<Pointer>,
}
