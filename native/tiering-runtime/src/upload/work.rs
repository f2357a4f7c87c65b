//! The work that effects ask for, each as one future that always ends in an answer.
//!
//! Owns keys, bodies, deadlines and the folding of store errors into what they mean to the machine. Does not own tasks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use log_format::crc;
use log_format::manifest::{Group, Kind, Root};
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::upload::{Failure, Pointer, StoredObject};

use super::UploadConfig;
use crate::clock::random_uid;
use crate::local_log::FragmentBody;
use crate::manifests::{RootReadError, fetch_root};
use crate::object_metadata::{self, AboutStream, RootHistory};
use crate::remote_tier::{KEYS_MAX, PutBody, PutRequest, StoreError, StoreErrorKind, failure};
use crate::shared::Shared;

/// Ours have at most 1,024 entries; another program's threshold may be larger.
const GROUP_BYTES_MAX: u64 = 16 << 20;

/// What a piece of work needs.
#[derive(Clone)]
pub(super) struct Workshop {
    pub(super) shared: Arc<Shared>,
    pub(super) stream: Arc<UploadConfig>,
    pub(super) directory: Arc<Path>,
}

impl Workshop {
    /// Sends a fragment once it is admitted; the answer is the random part of its key.
    pub(super) async fn transfer(self, plan: Arc<FragmentPlan>) -> Result<u32, Failure> {
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
        let uid = random_uid();
        let body = FragmentBody::new(
            Arc::clone(&self.directory),
            Arc::clone(&plan),
            Arc::clone(buffers),
        );
        let key = keys.fragment(&self.stream.stream_id, plan.first_offset, uid);
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
                Ok(uid)
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

    /// Stores a root; the answer is the random part of its key.
    pub(super) async fn put_root(
        self,
        root: Arc<Root>,
        history: RootHistory,
    ) -> Result<u32, Failure> {
        let uid = random_uid();
        let about = AboutStream::of_upload(&self.stream, &self.shared.config.cluster);
        let bytes = bytes::Bytes::from(root.encode());
        let request = PutRequest {
            key: (self.shared.keys).root(&self.stream.stream_id, history.epoch, uid),
            crc32: crc::crc32(&bytes),
            body: PutBody::Bytes(bytes),
            metadata: object_metadata::root(&about, root.next_offset, &history),
        };
        match self.shared.tier.put(request).await {
            Ok(()) => {
                self.shared.stats.roots_uploaded.increment();
                Ok(uid)
            }
            Err(error) => {
                self.shared.stats.root_upload_failures.increment();
                Err(failure(&error))
            }
        }
    }

    /// Stores a group; the answer is the random part of its key.
    pub(super) async fn put_group(
        self,
        group: Arc<Group>,
        next_offset: u64,
    ) -> Result<u32, Failure> {
        let uid = random_uid();
        let bytes = bytes::Bytes::from(group.encode());
        let keys = &self.shared.keys;
        let request = PutRequest {
            key: keys.group(&self.stream.stream_id, group.kind, group.first_offset, uid),
            crc32: crc::crc32(&bytes),
            body: PutBody::Bytes(bytes),
            metadata: object_metadata::group(&self.stream, &group, next_offset),
        };
        match self.shared.tier.put(request).await {
            Ok(()) => {
                self.shared.stats.groups_uploaded.increment();
                Ok(uid)
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

    /// Deletes objects that nobody names any more. What cannot be deleted is counted and left to garbage collection.
    pub(super) async fn delete(self, objects: Vec<StoredObject>) {
        let keys: Vec<String> = objects
            .iter()
            .map(|object| match *object {
                StoredObject::Fragment { first_offset, uid } => {
                    self.shared
                        .keys
                        .fragment(&self.stream.stream_id, first_offset, uid)
                }
                StoredObject::Group {
                    kind,
                    first_offset,
                    uid,
                } => self
                    .shared
                    .keys
                    .group(&self.stream.stream_id, kind, first_offset, uid),
                StoredObject::Root { epoch, uid } => {
                    self.shared.keys.root(&self.stream.stream_id, epoch, uid)
                }
            })
            .collect();
        for page in keys.chunks(KEYS_MAX) {
            if self.shared.retrying.delete(page).await.is_err() {
                self.shared
                    .stats
                    .objects_delete_failed
                    .add(page.len() as u64);
            }
        }
    }
}

/// Bytes per millisecond that a line has at least. A transfer that goes on, however slowly, must come to its end: started
/// again it would only fill the line once more. One that stands still is noticed by its silence, long before.
const SLOWEST_BYTES_PER_MS: u64 = 16;

fn transfer_deadline(configured_ms: u64, len_bytes: u64) -> Duration {
    Duration::from_millis(configured_ms.saturating_add(len_bytes / SLOWEST_BYTES_PER_MS))
}
