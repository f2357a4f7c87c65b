//! The work that effects ask for, each as one future that always ends in an answer.
//!
//! Owns keys, bodies, deadlines and the folding of store errors into what they mean to the machine. Does not own tasks.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use log_format::crc;
use log_format::manifest::{Group, Kind, Root};
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::upload::{Failure, Pointer, StoredObject};

use super::UploadConfig;
use super::driver::Deleted;
use super::series::{Attempt, Identity, Place, Series};
use crate::clock::random_uid;
use crate::local_log::FragmentBody;
use crate::manifests::{GROUP_BYTES_MAX, RootReadError, fetch_root};
use crate::object_metadata::{self, AboutStream, RootHistory};
use crate::remote_tier::{PutBody, PutRequest, StoreError, StoreErrorKind, failure};
use crate::shared::Shared;

/// What a piece of work needs.
#[derive(Clone)]
pub(super) struct Workshop {
    pub(super) shared: Arc<Shared>,
    pub(super) series: Arc<Series>,
    pub(super) stream: Arc<UploadConfig>,
    pub(super) directory: Arc<Path>,
}

/// An object that was stored.
pub(super) struct Stored {
    /// The random part of its key.
    pub(super) uid: u32,
    /// What earlier attempts may have left.
    pub(super) superseded: Vec<StoredObject>,
}

impl Workshop {
    fn attempt(&self, place: Place, crc32: u32, len_bytes: u64) -> Attempt {
        let identity = Identity {
            place,
            crc32,
            len_bytes,
        };
        self.series.attempt(identity, random_uid())
    }

    /// Sends a fragment once it is admitted.
    pub(super) async fn transfer(self, plan: Arc<FragmentPlan>) -> Result<Stored, Failure> {
        let Shared {
            governor,
            stats,
            keys,
            tier,
            config,
            buffers,
            ..
        } = &*self.shared;
        let len_bytes = plan.object_bytes();
        let _permit = governor.admit(len_bytes).await;
        let attempt = self.attempt(
            Place::Fragment(plan.first_offset),
            plan.object_crc(),
            len_bytes,
        );
        let body = FragmentBody::new(
            Arc::clone(&self.directory),
            Arc::clone(&plan),
            Arc::clone(buffers),
        );
        let key = keys.fragment(&self.stream.stream_id, plan.first_offset, attempt.uid());
        let request = PutRequest {
            key: key.clone(),
            body: PutBody::Source(Arc::new(body)),
            crc32: plan.object_crc(),
            metadata: object_metadata::fragment(&self.stream, &config.cluster, &plan),
        };
        let deadline = transfer_deadline(config.transfer_deadline_ms, len_bytes);
        let outcome = tokio::time::timeout(deadline, tier.put(request))
            .await
            .unwrap_or_else(|_| {
                let text = format!("the transfer took longer than {} ms", deadline.as_millis());
                Err(StoreError::new(StoreErrorKind::Timeout, text))
            });
        match outcome {
            Ok(()) => {
                stats.fragments_uploaded.increment();
                stats.fragment_bytes_uploaded.add(len_bytes);
                let index_start = log_format::fragment::HEADER_BYTES as u64 + plan.size_bytes;
                (self.shared.read_cache).remember_index(&key, index_start, &plan.index);
                Ok(Stored::by(attempt))
            }
            Err(error) => {
                stats.fragment_upload_failures.increment();
                Err(failure(&error))
            }
        }
    }

    /// Reads the root that the pointer names, and what it says of the roots before it.
    pub(super) async fn get_root(self, pointer: Pointer) -> Result<(Root, RootHistory), Failure> {
        let Shared { tier, keys, .. } = &*self.shared;
        fetch_root(tier, keys, &self.stream.stream_id, pointer)
            .await
            .map(|(root, metadata)| (root, RootHistory::of(&metadata)))
            .map_err(|error| match error {
                RootReadError::Store(error) => failure(&error),
                RootReadError::Corrupt(text) => Failure::Corrupt(text),
            })
    }

    /// Stores a root.
    pub(super) async fn put_root(
        self,
        root: Arc<Root>,
        history: RootHistory,
    ) -> Result<Stored, Failure> {
        let about = AboutStream::of_upload(&self.stream, &self.shared.config.cluster);
        let bytes = bytes::Bytes::from(root.encode());
        let crc32 = crc::crc32(&bytes);
        let attempt = self.attempt(Place::Root(history.epoch), crc32, bytes.len() as u64);
        let request = PutRequest {
            key: (self.shared.keys).root(&self.stream.stream_id, history.epoch, attempt.uid()),
            crc32,
            body: PutBody::Bytes(bytes),
            metadata: object_metadata::root(&about, root.next_offset, &history),
        };
        match self.shared.tier.put(request).await {
            Ok(()) => {
                self.shared.stats.roots_uploaded.increment();
                Ok(Stored::by(attempt))
            }
            Err(error) => {
                self.shared.stats.root_upload_failures.increment();
                Err(failure(&error))
            }
        }
    }

    /// Stores a group.
    pub(super) async fn put_group(
        self,
        group: Arc<Group>,
        next_offset: u64,
    ) -> Result<Stored, Failure> {
        let bytes = bytes::Bytes::from(group.encode());
        let crc32 = crc::crc32(&bytes);
        let place = Place::Group(group.kind, group.first_offset);
        let attempt = self.attempt(place, crc32, bytes.len() as u64);
        let (stream_id, uid) = (&self.stream.stream_id, attempt.uid());
        let request = PutRequest {
            key: (self.shared.keys).group(stream_id, group.kind, group.first_offset, uid),
            crc32,
            body: PutBody::Bytes(bytes),
            metadata: object_metadata::group(&self.stream, &group, next_offset),
        };
        match self.shared.tier.put(request).await {
            Ok(()) => {
                self.shared.stats.groups_uploaded.increment();
                Ok(Stored::by(attempt))
            }
            Err(error) => {
                self.shared.stats.group_upload_failures.increment();
                Err(failure(&error))
            }
        }
    }

    /// Reads a group.
    pub(super) async fn get_group(
        self,
        kind: Kind,
        first_offset: u64,
        uid: u32,
    ) -> Result<Group, Failure> {
        let keys = &self.shared.keys;
        let key = keys.group(&self.stream.stream_id, kind, first_offset, uid);
        let bytes = self
            .shared
            .tier
            .get(&key, GROUP_BYTES_MAX)
            .await
            .map_err(|error| failure(&error))?;
        Group::decode(kind, &bytes).map_err(|error| Failure::Corrupt(format!("{key}: {error}")))
    }

    /// Deletes objects that nobody names any more, at most [`KEYS_MAX`]. The answer says what is still there.
    pub(super) async fn delete(self, objects: Vec<StoredObject>) -> Deleted {
        let by_key: HashMap<String, StoredObject> = objects
            .iter()
            .map(|object| (self.key(*object), *object))
            .collect();
        let keys: Vec<String> = by_key.keys().cloned().collect();
        match self.shared.retrying.delete(&keys).await {
            Ok(outcome) => Deleted {
                reason: outcome
                    .failed
                    .first()
                    .map(|(key, reason)| format!("{key}: {reason}")),
                left: outcome
                    .failed
                    .iter()
                    .filter_map(|(key, _)| by_key.get(key).copied())
                    .collect(),
            },
            Err(error) => {
                (self.shared.stats.objects_delete_failed).add(objects.len() as u64);
                Deleted {
                    left: objects,
                    reason: Some(error.to_string()),
                }
            }
        }
    }

    fn key(&self, object: StoredObject) -> String {
        let (keys, stream_id) = (&self.shared.keys, &self.stream.stream_id);
        match object {
            StoredObject::Fragment { first_offset, uid } => {
                keys.fragment(stream_id, first_offset, uid)
            }
            StoredObject::Group {
                kind,
                first_offset,
                uid,
            } => keys.group(stream_id, kind, first_offset, uid),
            StoredObject::Root { epoch, uid } => keys.root(stream_id, epoch, uid),
        }
    }
}

impl Stored {
    fn by(attempt: Attempt) -> Self {
        Self {
            uid: attempt.uid(),
            superseded: attempt.stored(),
        }
    }
}

/// Bytes per millisecond that a line has at least. A transfer that goes on, however slowly, must come to its end: started
/// again it would only fill the line once more. One that stands still is noticed by its silence, long before.
const SLOWEST_BYTES_PER_MS: u64 = 16;

fn transfer_deadline(configured_ms: u64, len_bytes: u64) -> Duration {
    Duration::from_millis(configured_ms.saturating_add(len_bytes / SLOWEST_BYTES_PER_MS))
}
