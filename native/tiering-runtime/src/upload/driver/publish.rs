//! What the driver reports: persisted manifests to readers and the shell, problems to the shell.

use std::sync::Arc;

use log_format::manifest::Root;
use tiering_core::upload::{Pointer, Problem};

use super::Driver;
use crate::manifests::{EditFrom, ManifestRange, ResolvedManifest};
use crate::upload::UploadPush;

impl Driver {
    pub(super) fn publish(
        &mut self,
        root: Arc<Root>,
        revision: u64,
        pointer: Option<Pointer>,
        confirmed: bool,
    ) {
        let epoch = self.workshop.stream.epoch;
        let range = ManifestRange::of(&root, revision, epoch, pointer);
        let stream_id = &self.workshop.stream.stream_id;
        let manifests = &self.workshop.shared.manifests;
        let manifest = ResolvedManifest {
            root,
            revision,
            epoch,
            pointer,
        };
        let edit = match manifests.resolved(stream_id) {
            Some(before) if confirmed => EditFrom::between(&before, &manifest),
            Some(_) | None => None,
        };
        // Readers first: what local retention trims because of the push must be findable by then.
        manifests.publish(stream_id, manifest);
        // The shell trims the local log by this push.
        if confirmed {
            let next_offset = range.next_offset;
            tracing::debug!(revision, next_offset, "a manifest was persisted");
            self.sink.push(UploadPush::Range(range, edit));
        }
    }

    pub(super) fn report_problem(&mut self, problem: Option<Problem>) {
        self.machine_problem = problem;
        self.show_problem();
    }

    /// Tells the shell what is wrong now: what keeps the stream from being uploaded first, then what cannot be deleted.
    pub(super) fn show_problem(&mut self) {
        let problem = (self.machine_problem.clone()).or_else(|| self.deletions.problem());
        let kind = problem.as_ref().map(|problem| problem.kind);
        if kind == self.reported_problem {
            return;
        }
        if let Some(cleared) = self.reported_problem {
            self.sink.push(UploadPush::Recovered { kind: cleared });
        }
        self.reported_problem = kind;
        if let Some(Problem { kind, text }) = problem {
            self.sink.push(UploadPush::Problem { kind, text });
        }
    }
}
