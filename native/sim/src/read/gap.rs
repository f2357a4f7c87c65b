//! Whether what lies between the known end of the remote tier and the first chunk of a local log is in neither tier, as the shell
//! proves it (`rabbitmq_stream_s3_reader_gap`): on the word of a quorum, for one first chunk. Until then a reader waits.

use std::sync::Arc;

use tiering_core::route::{Gap, LocalLog, Manifest, Route, Spec, route};

use super::usable;
use crate::store::Known;
use crate::world::{Event, World};

impl World {
    /// `None` while the node does not know enough.
    pub(super) fn where_to_start(
        &mut self,
        stream: usize,
        node: usize,
        spec: Spec,
    ) -> Option<Route> {
        let mut decision = self.route(stream, node, spec)?;
        if decision == Route::UnprovenGap && self.prove_gap(stream, node) {
            decision = self.route(stream, node, spec)?;
        }
        match decision {
            Route::UnprovenGap => None,
            Route::Unknown => {
                self.coverage.hit("reader manifest unknown");
                None
            }
            decided @ (Route::Local(_) | Route::Remote { .. } | Route::OutOfRange { .. }) => {
                Some(decided)
            }
        }
    }

    fn route(&self, stream: usize, node: usize, spec: Spec) -> Option<Route> {
        let state = self.streams.get(stream)?;
        let disk = state.disks.get(node)?;
        let root = usable(state, node);
        let manifest = root.as_deref().map_or(Manifest::Unknown, Manifest::Known);
        let local = LocalLog {
            first: disk.first_offset(&state.log),
            next: state.log.id(disk.end),
        };
        Some(route(manifest, spec, local, self.gap(stream, node)))
    }

    /// What is proven by now.
    fn gap(&self, stream: usize, node: usize) -> Gap {
        let proven = self.streams.get(stream).is_none_or(|state| {
            let floor = state
                .disks
                .get(node)
                .and_then(|disk| disk.first_offset(&state.log));
            let certain = state.certain_gap_below.get(node).copied().flatten();
            floor.is_none() || certain == floor
        });
        if proven || self.plan.believe_gaps {
            Gap::Certain
        } else {
            Gap::Unproven
        }
    }

    /// Asks the metadata store. If it does not prove the gap, the node learns what the pointer names, if that can be fetched.
    fn prove_gap(&mut self, stream: usize, node: usize) -> bool {
        let Some(state) = self.streams.get_mut(stream) else {
            return true;
        };
        let (Some(Some(known)), Some(disk), Some(certain)) = (
            state.known.get(node),
            state.disks.get(node),
            state.certain_gap_below.get_mut(node),
        ) else {
            return true;
        };
        let Some(floor) = disk.first_offset(&state.log) else {
            return true;
        };
        let pointer = state.metadata.pointer;
        let written_here = state
            .uploader
            .and_then(|uploader| self.uploaders.get(uploader))
            .is_some_and(|uploader| uploader.node == node);
        if self.metadata_down_until_ms > self.now_ms {
            self.coverage.hit("reader gap in doubt");
            return false;
        }
        if pointer.is_none_or(|pointer| pointer.revision <= known.version.0) {
            *certain = Some(floor);
            self.coverage.hit("reader gap certain");
            return true;
        }
        self.coverage.hit("reader gap in doubt");
        // What is written here is published by the upload machine alone.
        let newest = state.current.clone().zip(pointer);
        if let (Some((root, pointer)), false) = (newest, written_here)
            && self.store_failure().is_none()
        {
            let known = Known {
                root: Arc::clone(&root),
                confirmed: false,
                // Older than what the writer says of the same revision.
                version: (pointer.revision, 0),
                pointer: Some(pointer),
            };
            let delay_ms = self.latency_ms();
            self.at(delay_ms, Event::News(stream, node, known));
        }
        false
    }
}
