//! The manifests that readers of this node may use, by stream.
//!
//! Owns the node's copy of each *persisted* manifest and tells waiters when it changes. Does not own what is in a manifest,
//! nor when one counts as persisted: the upload driver publishes, the shell marks and forgets.
//!
//! A stream that was never marked has no entry; callers must treat that as unknown, never as empty.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use log_format::manifest::Root;
use thiserror::Error;
use tiering_core::upload::Pointer;
use tokio::sync::watch;

/// Id of a stream: unique per incarnation, safe in an object key.
pub type StreamId = Arc<str>;

/// A persisted manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedManifest {
    /// The manifest itself.
    pub root: Arc<Root>,
    /// Version of its pointer in the metadata store (0 = never persisted, empty).
    pub revision: u64,
    /// Epoch of the writer that published it.
    pub epoch: u64,
    /// The pointer that names it; `None` while none does (never persisted, or about to be replaced).
    pub pointer: Option<Pointer>,
}

/// What this node knows of a stream's manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestState {
    /// There may be one; it is not known yet. Readers wait or fail closed.
    Pending,
    /// Known.
    Resolved(ResolvedManifest),
}

impl ManifestState {
    /// The manifest, if it is known.
    #[must_use]
    pub const fn resolved(&self) -> Option<&ResolvedManifest> {
        match self {
            Self::Pending => None,
            Self::Resolved(manifest) => Some(manifest),
        }
    }
}

impl ResolvedManifest {
    /// What orders two manifests of a stream. The metadata store lets neither number of a pointer go back.
    const fn order(&self) -> (u64, u64) {
        (self.epoch, self.revision)
    }
}

/// Why a manifest that was fetched, or made by an edit, is not used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unusable {
    /// The stream was forgotten meanwhile, or never marked.
    #[error("the stream has no member here")]
    Unknown,
    /// Its writer is here; nobody else may publish.
    #[error("the stream is written here")]
    WrittenHere,
    /// A newer one is known.
    #[error("a newer manifest is known")]
    Stale,
    /// What is known is not what it was made from.
    #[error("the manifest before it is not known")]
    Gap,
}

/// What became of a manifest that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offered {
    /// It is published.
    Published,
    /// It was there already.
    Known,
}

/// The registry. The lock is held for a look-up or an insertion only.
#[derive(Debug, Default)]
pub struct Manifests {
    streams: Mutex<HashMap<StreamId, watch::Sender<ManifestState>>>,
    /// How many drivers of a stream run here (for a moment two, when a writer is replaced). Locked after `streams`, never before.
    writers: Mutex<HashMap<StreamId, usize>>,
}

impl Manifests {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<StreamId, watch::Sender<ManifestState>>> {
        // Nothing panics while the lock is held, so a poisoned map is still a whole one.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the stream known; does not replace a manifest that is resolved.
    pub fn mark_pending(&self, stream_id: &str) {
        let mut streams = self.lock();
        if !streams.contains_key(stream_id) {
            streams.insert(
                Arc::from(stream_id),
                watch::Sender::new(ManifestState::Pending),
            );
        }
    }

    /// Sets the persisted manifest and wakes those who wait for it or for its growth.
    pub fn publish(&self, stream_id: &str, manifest: ResolvedManifest) {
        let state = ManifestState::Resolved(manifest);
        let mut streams = self.lock();
        match streams.get(stream_id) {
            // send_replace wakes tasks; it runs none of them, so the lock is still held for nanoseconds only.
            Some(sender) => drop(sender.send_replace(state)),
            None => drop(streams.insert(Arc::from(stream_id), watch::Sender::new(state))),
        }
    }

    /// Publishes what was fetched for a stream that is written elsewhere, if it is newer than what is known.
    ///
    /// # Errors
    /// If it must not be used here.
    pub fn offer(&self, stream_id: &str, manifest: ResolvedManifest) -> Result<Offered, Unusable> {
        let streams = self.lock();
        let sender = self.admit(&streams, stream_id, manifest.order())?;
        let Some(sender) = sender else {
            return Ok(Offered::Known);
        };
        drop(sender.send_replace(ManifestState::Resolved(manifest)));
        Ok(Offered::Published)
    }

    /// Publishes what was made from the manifest that `from` names, if that is still the one that is known.
    ///
    /// # Errors
    /// If it must not be used here.
    pub fn replace(
        &self,
        stream_id: &str,
        from: Pointer,
        manifest: ResolvedManifest,
    ) -> Result<(), Unusable> {
        let streams = self.lock();
        let sender = self
            .admit(&streams, stream_id, manifest.order())?
            .ok_or(Unusable::Stale)?;
        let known = sender
            .borrow()
            .resolved()
            .and_then(|manifest| manifest.pointer);
        if known != Some(from) {
            return Err(Unusable::Gap);
        }
        drop(sender.send_replace(ManifestState::Resolved(manifest)));
        Ok(())
    }

    /// What [`Self::offer`] would say of a manifest with that epoch and revision, before it is fetched.
    ///
    /// # Errors
    /// If it must not be used here.
    pub fn would_take(
        &self,
        stream_id: &str,
        epoch: u64,
        revision: u64,
    ) -> Result<Offered, Unusable> {
        let streams = self.lock();
        let sender = self.admit(&streams, stream_id, (epoch, revision))?;
        Ok(sender.map_or(Offered::Known, |_| Offered::Published))
    }

    /// Where to put it; `None` if it is there.
    fn admit<'a>(
        &self,
        streams: &'a HashMap<StreamId, watch::Sender<ManifestState>>,
        stream_id: &str,
        order: (u64, u64),
    ) -> Result<Option<&'a watch::Sender<ManifestState>>, Unusable> {
        let sender = streams.get(stream_id).ok_or(Unusable::Unknown)?;
        if self.writers().contains_key(stream_id) {
            return Err(Unusable::WrittenHere);
        }
        let known = sender.borrow().resolved().map(ResolvedManifest::order);
        match known {
            Some(known) if known == order => Ok(None),
            Some(known) if known > order => Err(Unusable::Stale),
            Some(_) | None => Ok(Some(sender)),
        }
    }

    fn writers(&self) -> MutexGuard<'_, HashMap<StreamId, usize>> {
        self.writers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on only the stream's driver publishes.
    pub(crate) fn take(&self, stream_id: &str) {
        *self.writers().entry(Arc::from(stream_id)).or_default() += 1;
    }

    /// A driver has ended.
    pub(crate) fn give_back(&self, stream_id: &str) {
        let mut writers = self.writers();
        if let Some(count) = writers.get_mut(stream_id) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                writers.remove(stream_id);
            }
        }
    }

    /// Makes the stream pending, whatever was known of it: its member here is a new one.
    pub fn reset(&self, stream_id: &str) {
        let mut streams = self.lock();
        match streams.get(stream_id) {
            Some(sender) => drop(sender.send_replace(ManifestState::Pending)),
            None => drop(streams.insert(
                Arc::from(stream_id),
                watch::Sender::new(ManifestState::Pending),
            )),
        }
    }

    /// Drops the stream; those who wait see the end of the change notification.
    pub fn forget(&self, stream_id: &str) {
        let forgotten = self.lock().remove(stream_id);
        drop(forgotten);
    }

    /// What is known; `None` for a stream that was never marked.
    #[must_use]
    pub fn get(&self, stream_id: &str) -> Option<ManifestState> {
        self.lock()
            .get(stream_id)
            .map(|sender| sender.borrow().clone())
    }

    /// The manifest if it is resolved.
    #[must_use]
    pub fn resolved(&self, stream_id: &str) -> Option<ResolvedManifest> {
        match self.get(stream_id) {
            Some(ManifestState::Resolved(manifest)) => Some(manifest),
            Some(ManifestState::Pending) | None => None,
        }
    }

    /// Change notification: the receiver sees every state from now on (only the newest, if it is slow) and an error
    /// from `changed()` once the stream is forgotten. `None` for a stream that was never marked.
    #[must_use]
    pub fn subscribe(&self, stream_id: &str) -> Option<watch::Receiver<ManifestState>> {
        self.lock().get(stream_id).map(watch::Sender::subscribe)
    }

    /// Completes once the stream is not pending: with its manifest, or `None` when it is unknown or was forgotten meanwhile.
    pub async fn wait_resolved(&self, stream_id: &str) -> Option<ResolvedManifest> {
        let mut receiver = self.subscribe(stream_id)?;
        let state = receiver
            .wait_for(|state| state.resolved().is_some())
            .await
            .ok()?;
        state.resolved().cloned()
    }

    /// How many streams are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(next_offset: u64, revision: u64) -> ResolvedManifest {
        ResolvedManifest {
            root: Arc::new(Root::empty_at(next_offset)),
            revision,
            epoch: 1,
            pointer: Some(pointer(1, revision)),
        }
    }

    fn pointer(epoch: u64, revision: u64) -> Pointer {
        Pointer {
            epoch,
            uid: 7,
            revision,
        }
    }

    #[test]
    fn unknown_pending_resolved_are_three_things() {
        let manifests = Manifests::new();
        assert_eq!(manifests.get("s"), None);
        manifests.mark_pending("s");
        assert_eq!(manifests.get("s"), Some(ManifestState::Pending));
        manifests.publish("s", manifest(7, 1));
        manifests.mark_pending("s");
        assert_eq!(manifests.resolved("s"), Some(manifest(7, 1)));
        manifests.forget("s");
        assert_eq!(manifests.get("s"), None);
    }

    #[tokio::test]
    async fn waiters_see_the_resolve_and_the_growth() {
        let manifests = Arc::new(Manifests::new());
        manifests.mark_pending("s");
        let waiter = {
            let manifests = Arc::clone(&manifests);
            tokio::spawn(async move { manifests.wait_resolved("s").await })
        };
        tokio::task::yield_now().await;
        manifests.publish("s", manifest(7, 1));
        assert_eq!(waiter.await.ok().flatten(), Some(manifest(7, 1)));

        let mut growth = manifests.subscribe("s").expect("known");
        manifests.publish("s", manifest(9, 2));
        growth.changed().await.expect("still known");
        assert_eq!(growth.borrow().resolved(), Some(&manifest(9, 2)));
    }

    #[test]
    fn only_a_newer_manifest_of_a_known_stream_written_elsewhere_is_taken() {
        let manifests = Manifests::new();
        assert_eq!(manifests.offer("s", manifest(7, 1)), Err(Unusable::Unknown));
        manifests.mark_pending("s");
        assert_eq!(manifests.offer("s", manifest(7, 3)), Ok(Offered::Published));
        assert_eq!(manifests.offer("s", manifest(7, 3)), Ok(Offered::Known));
        assert_eq!(manifests.offer("s", manifest(5, 2)), Err(Unusable::Stale));
        let later_epoch = ResolvedManifest {
            epoch: 2,
            ..manifest(9, 4)
        };
        assert_eq!(
            manifests.offer("s", later_epoch.clone()),
            Ok(Offered::Published)
        );
        assert_eq!(manifests.offer("s", manifest(8, 5)), Err(Unusable::Stale));
        assert_eq!(manifests.resolved("s"), Some(later_epoch));
        manifests.take("s");
        manifests.take("s");
        manifests.give_back("s");
        let newest = ResolvedManifest {
            epoch: 3,
            ..manifest(10, 6)
        };
        assert_eq!(
            manifests.offer("s", newest.clone()),
            Err(Unusable::WrittenHere)
        );
        manifests.give_back("s");
        assert_eq!(manifests.offer("s", newest), Ok(Offered::Published));
        manifests.reset("s");
        assert_eq!(manifests.get("s"), Some(ManifestState::Pending));
        assert_eq!(
            manifests.offer("s", manifest(1, 1)),
            Ok(Offered::Published),
            "a new member knows nothing"
        );
    }

    #[tokio::test]
    async fn only_what_was_made_from_the_known_manifest_replaces_it() {
        let manifests = Arc::new(Manifests::new());
        let replace =
            |from, revision| manifests.replace("s", pointer(1, from), manifest(9, revision));
        assert_eq!(replace(1, 2), Err(Unusable::Unknown));
        manifests.mark_pending("s");
        assert_eq!(replace(1, 2), Err(Unusable::Gap), "pending");
        assert_eq!(manifests.get("s"), Some(ManifestState::Pending));
        manifests.publish("s", manifest(7, 3));
        let mut changes = manifests.subscribe("s").expect("known");
        assert_eq!(replace(2, 4), Err(Unusable::Gap));
        let other_key = Pointer {
            uid: 8,
            ..pointer(1, 3)
        };
        for from in [other_key, pointer(2, 3)] {
            let replaced = manifests.replace("s", from, manifest(9, 4));
            assert_eq!(replaced, Err(Unusable::Gap));
        }
        assert_eq!(replace(3, 3), Err(Unusable::Stale));
        assert_eq!(replace(3, 2), Err(Unusable::Stale));
        manifests.take("s");
        assert_eq!(replace(3, 4), Err(Unusable::WrittenHere));
        manifests.give_back("s");
        assert!(!changes.has_changed().expect("known"));
        assert_eq!(manifests.resolved("s"), Some(manifest(7, 3)));
        assert_eq!(replace(3, 4), Ok(()));
        changes.changed().await.expect("known");
        assert_eq!(changes.borrow().resolved(), Some(&manifest(9, 4)));
        let unnamed = ResolvedManifest {
            pointer: None,
            ..manifest(9, 5)
        };
        manifests.publish("s", unnamed);
        assert_eq!(replace(5, 6), Err(Unusable::Gap), "taken back");
    }

    #[tokio::test]
    async fn forgetting_ends_the_wait() {
        let manifests = Manifests::new();
        assert_eq!(manifests.wait_resolved("never marked").await, None);
        manifests.mark_pending("s");
        let mut changes = manifests.subscribe("s").expect("known");
        manifests.forget("s");
        assert!(changes.changed().await.is_err());
    }
}
