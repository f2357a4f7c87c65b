//! Edits of manifests: made where a stream is written, applied where it has a replica.
//!
//! Owns how an edit gets into and out of this node's manifests. Does not own what an edit is, nor what is checked
//! ([`tiering_core::manifest::follow`]); nor how it travels, and when a manifest is fetched instead: the shell does.

use std::sync::Arc;

use tiering_core::manifest::follow::{self, Refused as EditRefused};
use tiering_core::upload::Pointer;

use super::{ManifestRange, Manifests, Offered, ResolveError, ResolvedManifest, Unusable};

/// What leads to a persisted manifest, for nodes that know the one it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EditFrom {
    /// The pointer of that one.
    pub pointer: Pointer,
    /// The encoded edit.
    pub bytes: Vec<u8>,
}

impl EditFrom {
    /// What leads from one persisted manifest to a later one; `None` if that is better fetched, or one of them is not persisted.
    pub(crate) fn between(before: &ResolvedManifest, after: &ResolvedManifest) -> Option<Self> {
        let (from, to) = (before.pointer?, after.pointer?);
        if (from.epoch, from.revision) >= (to.epoch, to.revision) {
            return None;
        }
        let bytes = follow::between(&before.root, &after.root)?;
        Some(Self {
            pointer: from,
            bytes,
        })
    }
}

/// Publishes the manifest that an edit leads to, if the one that it was made from is what is known here. Needs no request,
/// and takes what one pass over the root takes: the lock is held for comparing and publishing only.
///
/// # Errors
/// If it must not be used here; nothing has changed then.
pub(crate) fn apply(
    manifests: &Manifests,
    stream_id: &str,
    from: Pointer,
    to: Pointer,
    bytes: &[u8],
) -> Result<ManifestRange, ResolveError> {
    if manifests.would_take(stream_id, to.epoch, to.revision)? == Offered::Known {
        return Err(Unusable::Stale.into());
    }
    let known = manifests.resolved(stream_id);
    let known = known
        .as_ref()
        .and_then(|known| Some((known.pointer?, &*known.root)));
    let root = follow::follow(known, from, to, bytes).map_err(|error| match error {
        EditRefused::Stale => Unusable::Stale.into(),
        EditRefused::Gap => Unusable::Gap.into(),
        EditRefused::Record(_) | EditRefused::Misfit | EditRefused::Checksum => {
            ResolveError::Corrupt(error.to_string())
        }
    })?;
    let range = ManifestRange::of(&root, to.revision, to.epoch, Some(to));
    let manifest = ResolvedManifest {
        root: Arc::new(root),
        revision: to.revision,
        epoch: to.epoch,
        pointer: Some(to),
    };
    manifests.replace(stream_id, from, manifest)?;
    Ok(range)
}

#[cfg(test)]
mod tests {
    use log_format::manifest::{Entry, Kind, Root};

    use super::*;
    use crate::engine::Engine;
    use crate::remote_tier::testing::MemoryTier;
    use crate::settings::Config;

    const STREAM: &str = "__s_1";

    const fn pointer(epoch: u64, revision: u64) -> Pointer {
        Pointer {
            epoch,
            uid: 7,
            revision,
        }
    }

    /// Fragments of ten records each.
    fn root(fragments: u64) -> Root {
        let entries = (0..fragments).map(|number| Entry {
            first_offset: 10 * number,
            first_timestamp_ms: 1,
            last_timestamp_ms: 2,
            kind: Kind::Fragment,
            size_bytes: 100,
            uid: 9,
        });
        Root {
            first_offset: 0,
            next_offset: 10 * fragments,
            first_timestamp_ms: 1,
            first_last_timestamp_ms: 2,
            total_size_bytes: 100 * u128::from(fragments),
            entries: entries.collect(),
        }
    }

    fn manifest(pointer: Pointer, fragments: u64) -> ResolvedManifest {
        ResolvedManifest {
            root: Arc::new(root(fragments)),
            revision: pointer.revision,
            epoch: pointer.epoch,
            pointer: Some(pointer),
        }
    }

    /// An engine whose store has nothing: whatever is known came in an edit.
    fn engine() -> Engine {
        let config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        Engine::open_with(config, Arc::new(MemoryTier::new())).expect("opened")
    }

    fn edit(from: &ResolvedManifest, to: &ResolvedManifest) -> EditFrom {
        EditFrom::between(from, to).expect("little has changed")
    }

    #[tokio::test]
    async fn an_edit_leads_to_the_next_manifest_without_a_request() {
        let engine = engine();
        let (old, new) = (manifest(pointer(1, 4), 3), manifest(pointer(2, 5), 5));
        engine.manifests().publish(STREAM, old.clone());
        let mut changes = engine.manifests().subscribe(STREAM).expect("known");
        let edit = edit(&old, &new);
        let range = engine
            .apply_edit(STREAM, edit.pointer, pointer(2, 5), &edit.bytes)
            .expect("applied");
        assert_eq!(
            range,
            ManifestRange::of(&root(5), 5, 2, Some(pointer(2, 5)))
        );
        assert_eq!(engine.manifests().resolved(STREAM), Some(new));
        changes.changed().await.expect("who waits is told");
        assert!(engine.stats().contains(&("get_requests", 0)));
        // Once more: it is known.
        let again = engine.apply_edit(STREAM, edit.pointer, pointer(2, 5), &edit.bytes);
        assert_eq!(again, Err(ResolveError::Unusable(Unusable::Stale)));
    }

    #[test]
    fn what_does_not_follow_is_a_gap_and_what_is_damaged_is_corrupt() {
        let engine = engine();
        let (old, new) = (manifest(pointer(1, 4), 3), manifest(pointer(1, 5), 4));
        let edit = edit(&old, &new);
        let name = |from, to, bytes: &[u8]| {
            let refused = engine.apply_edit(STREAM, from, to, bytes);
            refused.map_err(|error| error.name())
        };
        let apply = |bytes: &[u8]| name(pointer(1, 4), pointer(1, 5), bytes);
        assert_eq!(apply(&edit.bytes), Err("unknown"));
        engine.manifests().mark_pending(STREAM);
        assert_eq!(apply(&edit.bytes), Err("gap"));
        engine
            .manifests()
            .publish(STREAM, manifest(pointer(1, 3), 3));
        assert_eq!(apply(&edit.bytes), Err("gap"));
        engine.manifests().publish(STREAM, old.clone());
        assert_eq!(apply(&edit.bytes[1..]), Err("corrupt"));
        assert_eq!(apply(&[]), Err("corrupt"));
        assert_eq!(
            name(pointer(0, 4), pointer(1, 5), &edit.bytes),
            Err("gap"),
            "of another epoch"
        );
        engine.manifests().take(STREAM);
        assert_eq!(apply(&edit.bytes), Err("written_here"));
        engine.manifests().give_back(STREAM);
        assert_eq!(engine.manifests().resolved(STREAM), Some(old));
        assert!(apply(&edit.bytes).is_ok());
    }

    #[test]
    fn a_damaged_edit_of_one_stream_is_nothing_to_another() {
        let engine = engine();
        let (old, new) = (manifest(pointer(1, 4), 3), manifest(pointer(1, 5), 4));
        let edit = edit(&old, &new);
        for stream in [STREAM, "other"] {
            engine.manifests().publish(stream, old.clone());
        }
        let mut damaged = edit.bytes.clone();
        damaged[20] ^= 1;
        let apply =
            |stream, bytes: &[u8]| engine.apply_edit(stream, edit.pointer, pointer(1, 5), bytes);
        assert!(matches!(
            apply(STREAM, &damaged),
            Err(ResolveError::Corrupt(_))
        ));
        assert!(apply("other", &edit.bytes).is_ok());
        assert_eq!(engine.manifests().resolved(STREAM), Some(old));
        assert_eq!(engine.manifests().resolved("other"), Some(new));
    }

    #[test]
    fn only_persisted_manifests_are_told_of() {
        let (old, new) = (manifest(pointer(1, 4), 3), manifest(pointer(1, 5), 4));
        let unnamed = |manifest: &ResolvedManifest| ResolvedManifest {
            pointer: None,
            ..manifest.clone()
        };
        assert_eq!(EditFrom::between(&unnamed(&old), &new), None);
        assert_eq!(EditFrom::between(&old, &unnamed(&new)), None, "taken back");
        assert_eq!(EditFrom::between(&old, &old), None, "no news");
        assert_eq!(EditFrom::between(&new, &old), None);
    }
}
