//! News of what is persisted: published where it is written, told to the other nodes. First an edit, then what a fetch would bring;
//! either may be lost, late, or come twice, and an edit may be damaged.

use tiering_core::manifest::follow::{self, Refused};

use super::*;
use crate::store::Known;

/// What leads on from one persisted manifest.
#[derive(Debug, Clone)]
pub struct Edit {
    /// Pointer of the manifest that it was made from.
    from: Pointer,
    /// Pointer of the one that it leads to.
    to: Pointer,
    /// As they travel.
    bytes: Vec<u8>,
    /// Number of the publishing.
    publishing: u64,
}

impl World {
    pub(super) fn publish_manifest(
        &mut self,
        uploader: usize,
        root: Arc<Root>,
        revision: u64,
        confirmed: bool,
        pointer: Option<Pointer>,
    ) {
        self.coverage.hit("effect Publish");
        let Some(it) = self.uploaders.get_mut(uploader) else {
            return;
        };
        let (stream, node) = (it.stream, it.node);
        self.publishings += 1;
        let known = Known {
            root,
            confirmed,
            version: (revision, self.publishings),
            pointer,
        };
        self.check_publish(uploader, &known);
        if confirmed {
            self.check_timeline(stream, &known.root);
        }
        let edit = self.edit_to(stream, node, &known);
        self.hear(stream, node, known.clone());
        for other in (0..self.knobs.nodes).filter(|other| *other != node) {
            let told_ms = match &edit {
                Some(edit) => self.send_edit(stream, other, edit),
                None => 0,
            };
            let delay_ms = told_ms + self.latency_ms();
            if self.fault(Trouble::NewsLost) {
                self.coverage.hit("fault news lost");
                self.at(delay_ms + 700, Event::News(stream, other, known.clone()));
            } else {
                self.at(delay_ms, Event::News(stream, other, known.clone()));
            }
        }
    }

    /// What leads there from what the writer's node has told of before.
    fn edit_to(&self, stream: usize, node: usize, after: &Known) -> Option<Edit> {
        let before = self.streams.get(stream)?.known.get(node)?.as_ref()?;
        let (from, to) = (before.pointer?, after.pointer?);
        if !after.confirmed || from == to {
            return None;
        }
        Some(Edit {
            from,
            to,
            bytes: follow::between(&before.root, &after.root)?,
            publishing: after.version.1,
        })
    }

    /// When it arrives.
    fn send_edit(&mut self, stream: usize, node: usize, edit: &Edit) -> u64 {
        let delay_ms = self.latency_ms();
        if self.fault(Trouble::NewsLost) {
            self.coverage.hit("fault edit lost");
            return delay_ms;
        }
        if self.fault(Trouble::Duplicate) {
            self.coverage.hit("fault edit doubled");
            let again_ms = self.latency_ms();
            self.at(delay_ms + again_ms, Event::Edit(stream, node, edit.clone()));
        }
        let mut edit = edit.clone();
        if self.fault(Trouble::Corrupt) {
            self.coverage.hit("fault edit damaged");
            let at = self.rng.below(edit.bytes.len());
            if self.rng.chance(5_000) {
                edit.bytes.truncate(at);
            } else if let Some(byte) = edit.bytes.get_mut(at) {
                *byte ^= 1 << (at % 8);
            }
        }
        self.at(delay_ms, Event::Edit(stream, node, edit));
        delay_ms
    }

    /// A node takes an edit if it leads on from what it knows: to what was persisted, and to nothing else.
    pub fn hear_edit(&mut self, stream: usize, node: usize, edit: &Edit) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        if state.metadata.deleted {
            return;
        }
        let known = state.known.get(node).and_then(Option::as_ref);
        let known = known.and_then(|known| Some((known.pointer?, &*known.root)));
        let root = match follow::follow(known, edit.from, edit.to, &edit.bytes) {
            Ok(root) => root,
            Err(refused) => {
                return self.coverage.hit(match refused {
                    Refused::Gap => "edit gap",
                    Refused::Stale => "edit stale",
                    Refused::Record(_) | Refused::Misfit | Refused::Checksum => "edit refused",
                });
            }
        };
        let persisted = state.history.get(&edit.to.revision);
        if persisted.is_none_or(|persisted| **persisted != root) {
            return self.violated(|| {
                format!("replica prefix: an edit leads node {node} to what was never persisted")
            });
        }
        self.coverage.hit("edit applied");
        let known = Known {
            root: Arc::new(root),
            confirmed: true,
            version: (edit.to.revision, edit.publishing),
            pointer: Some(edit.to),
        };
        self.hear(stream, node, known);
    }

    /// A node takes over what is persisted, and trims its local log by it.
    pub fn hear(&mut self, stream: usize, node: usize, known: Known) {
        let Some(state) = self.streams.get_mut(stream) else {
            return;
        };
        if state.metadata.deleted
            || state
                .news_from
                .get(node)
                .is_none_or(|from| known.version.0 < *from)
        {
            return;
        }
        let Some(slot) = state.known.get_mut(node) else {
            return;
        };
        if slot
            .as_ref()
            .is_some_and(|old| old.version >= known.version)
        {
            return;
        }
        let (next_offset, confirmed) = (known.root.next_offset, known.confirmed);
        *slot = Some(known);
        let Some(disk) = state.disks.get_mut(node) else {
            return;
        };
        if confirmed && disk.trim_durable(&state.log, next_offset) {
            let floor = state.log.id(disk.first());
            self.coverage.hit("local trim by the remote tier");
            self.note(|| {
                format!(
                    "stream {stream}: node {node} trims to {floor}, as {next_offset} is durable"
                )
            });
            self.check_trim(stream, node);
            if let Some(uploader) = self.streams.get(stream).and_then(|state| state.uploader) {
                self.tell_soon(uploader);
            }
        }
    }

    /// Tells all nodes what the writer's node knows.
    pub fn spread_news(&mut self, stream: usize) {
        let Some(state) = self.streams.get(stream) else {
            return;
        };
        if let Some(Some(known)) = state.known.get(state.writer).cloned() {
            for node in 0..self.knobs.nodes {
                self.at(1, Event::News(stream, node, known.clone()));
            }
        }
    }
}
