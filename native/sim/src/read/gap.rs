//! Whether what lies between the known end of the remote tier and the floor of a local log is in neither tier, as the shell finds
//! it out (`rabbitmq_stream_s3_reader_gap`): on the word of a quorum, for one floor. Until then a reader waits.

use std::sync::Arc;

use tiering_core::route::Spec;

use crate::store::Known;
use crate::world::{Event, World};

impl World {
    /// If not, the node learns what the pointer names, if it can be asked and fetched.
    pub(super) fn gap_is_certain(&mut self, stream: usize, node: usize, spec: Spec) -> bool {
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
        let above_it = match spec {
            Spec::Last | Spec::Next => true,
            Spec::Offset(offset) | Spec::Abs(offset) => offset >= floor,
            Spec::First | Spec::Timestamp(_) => false,
        };
        if above_it
            || known.root.next_offset >= floor
            || *certain == Some(floor)
            || self.plan.believe_gaps
        {
            return true;
        }
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
