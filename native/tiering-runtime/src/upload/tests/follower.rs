//! A node with a replica: it hears of each persist, and fetches a root only if no edit leads to it.

use super::world::{SOON, STREAM};
use super::*;
use crate::engine::Engine;
use crate::remote_tier::testing::MemoryTier;
use crate::settings::Config;

pub(super) struct Follower {
    engine: Engine,
    /// Manifests that came as edits.
    pub(super) edits: usize,
    /// Manifests that had to be fetched.
    pub(super) syncs: usize,
}

impl Follower {
    pub(super) fn new(memory: &Arc<MemoryTier>) -> Self {
        let config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        let engine = Engine::open_with(config, Arc::clone(memory) as Arc<_>).expect("opened");
        engine.manifests().mark_pending(STREAM);
        Self {
            engine,
            edits: 0,
            syncs: 0,
        }
    }

    /// What the shell of a replica's node does.
    pub(super) fn hear(&mut self, range: &ManifestRange, edit: Option<&EditFrom>) {
        let Some(pointer) = range.pointer else {
            return self.engine.manifests().reset(STREAM);
        };
        let known = self.engine.manifests().resolved(STREAM);
        if known.and_then(|known| known.pointer) == Some(pointer) {
            return;
        }
        let applied = edit.map(|edit| {
            self.engine
                .apply_edit(STREAM, edit.pointer, pointer, &edit.bytes)
        });
        let heard = match applied {
            Some(Ok(heard)) => {
                self.edits += 1;
                heard
            }
            None | Some(Err(_)) => {
                self.syncs += 1;
                let (sender, answer) = mpsc::channel();
                self.engine
                    .resolve_manifest(STREAM, Some(pointer), move |outcome| {
                        sender.send(outcome).expect("received");
                    })
                    .expect("open");
                answer
                    .recv_timeout(SOON)
                    .expect("an answer")
                    .expect("resolved")
            }
        };
        let told = ManifestRange {
            epoch: pointer.epoch,
            ..*range
        };
        assert_eq!(heard, told, "as the writer says");
    }

    /// The bytes of the root that it believes.
    pub(super) fn root(&self) -> Vec<u8> {
        let known = self.engine.manifests().resolved(STREAM);
        known.expect("known").root.encode()
    }
}
