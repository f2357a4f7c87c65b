//! What the machine tells about itself: status, counters, and the problem that an operator should look at.

use std::collections::BTreeMap;

use log_format::manifest::{Entry, NO_TIMESTAMP};

use super::{Anchor, Effect, Phase, Problem, UploadMachine};

/// What the machine is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Finding out what is persisted.
    Resolving,
    /// Holding the first fragment until the anchor is durable.
    Anchoring,
    /// Uploading, or waiting for something to upload.
    Draining,
    /// Finished.
    Stopped,
}

/// A look at one machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// What it is at.
    pub activity: Activity,
    /// Offset after the last committed record, as far as known: exact once everything committed is scanned, before that the
    /// offset after the first record of the last committed chunk.
    pub log_next_offset: u64,
    /// First offset of the manifest, persisted or not.
    pub manifest_first_offset: u64,
    /// Next offset of the manifest, persisted or not.
    pub manifest_next_offset: u64,
    /// Chunk bytes in the manifest.
    pub manifest_total_size_bytes: u128,
    /// Entries of the manifest.
    pub manifest_entries: usize,
    /// Whether a group is on its way to the bucket.
    pub rebalance_in_flight: bool,
    /// Next offset of the persisted manifest: what is durable.
    pub persisted_next_offset: u64,
    /// Revision of the persisted manifest, 0 if there is none.
    pub revision: u64,
    /// Transfers that were sent out and not answered yet.
    pub transfers_in_flight: usize,
    /// Transfers held for the anchor, waiting for their retry, or done but not in their turn.
    pub transfers_waiting: usize,
    /// Edits that no persist has started on.
    pub edits_since_persist: u32,
    /// Whether a persist is under way.
    pub persist_in_flight: bool,
    /// First offset of the fragment in the making.
    pub assembly_first_offset: Option<u64>,
    /// Next offset of the fragment in the making.
    pub assembly_next_offset: Option<u64>,
    /// Its data bytes.
    pub assembly_payload_bytes: u64,
    /// Its chunks.
    pub assembly_chunks: u32,
    /// Memory of the indexes of what is scanned and not in the manifest.
    pub index_bytes: usize,
    /// First offset of the first fragment that does not get through.
    pub stalled_offset: Option<u64>,
    /// Timestamp of the oldest chunk that is scanned and not durable, by the clock of the node that wrote it.
    pub oldest_pending_timestamp_ms: Option<i64>,
    /// Chunk bytes of fragments that are cut and not in the manifest yet.
    pub transfer_bytes: u64,
    /// Chunk bytes of fragments that the manifest has and the persisted one does not.
    pub persist_bytes: u64,
    /// What keeps the stream from being tiered.
    pub problem: Option<Problem>,
}

/// What has happened since the machine was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Fragments that reached the bucket.
    pub transfers_completed: u64,
    /// Transfers sent again, for whatever reason.
    pub transfer_retries: u64,
    /// Of these, the ones for a reason that does not pass by itself.
    pub stalled_retries: u64,
    /// Object bytes of the completed transfers.
    pub bytes_transferred: u64,
    /// Manifests persisted.
    pub persists_completed: u64,
    /// Tries to persist that failed or whose outcome was unknown.
    pub persists_failed: u64,
    /// Persists that another writer was ahead of.
    pub persist_conflicts: u64,
    /// Times that local retention was ahead of the upload.
    pub local_log_ahead_recoveries: u64,
    /// Times that the local log had lost what was uploaded.
    pub remote_tier_ahead_recoveries: u64,
    /// Fragments handed over for deletion.
    pub fragments_deleted: u64,
    /// Chunk headers taken over from the local log.
    pub chunks_scanned: u64,
    /// Tries to find out what is persisted that failed.
    pub resolution_failures: u64,
    /// Roots written to the bucket, committed or not.
    pub roots_created: u64,
    /// Fragments cut because of their age.
    pub age_cuts: u64,
    /// Fragments cut early, because the indexes of all streams took the memory that they may.
    pub room_cuts: u64,
    /// Anchors made durable.
    pub anchors_written: u64,
    /// Results of transfers that had one already.
    pub duplicates_ignored: u64,
    /// Groups of fragments written to the bucket.
    pub groups_created: u64,
    /// Groups of groups written to the bucket.
    pub kilo_groups_created: u64,
    /// Groups of kilo-groups written to the bucket.
    pub mega_groups_created: u64,
    /// Groups of any height handed over for deletion.
    pub groups_deleted: u64,
    /// Tries to write or read a group that failed.
    pub group_failures: u64,
    /// Times that history was given up because part of it was proven to be unreadable.
    pub histories_abandoned: u64,
}

impl Counters {
    /// Every counter with its name, in a stable order.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 23] {
        [
            ("transfers_completed", self.transfers_completed),
            ("transfer_retries", self.transfer_retries),
            ("stalled_retries", self.stalled_retries),
            ("bytes_transferred", self.bytes_transferred),
            ("persists_completed", self.persists_completed),
            ("persists_failed", self.persists_failed),
            ("persist_conflicts", self.persist_conflicts),
            (
                "local_log_ahead_recoveries",
                self.local_log_ahead_recoveries,
            ),
            (
                "remote_tier_ahead_recoveries",
                self.remote_tier_ahead_recoveries,
            ),
            ("fragments_deleted", self.fragments_deleted),
            ("chunks_scanned", self.chunks_scanned),
            ("resolution_failures", self.resolution_failures),
            ("roots_created", self.roots_created),
            ("age_cuts", self.age_cuts),
            ("room_cuts", self.room_cuts),
            ("anchors_written", self.anchors_written),
            ("duplicates_ignored", self.duplicates_ignored),
            ("groups_created", self.groups_created),
            ("kilo_groups_created", self.kilo_groups_created),
            ("mega_groups_created", self.mega_groups_created),
            ("groups_deleted", self.groups_deleted),
            ("group_failures", self.group_failures),
            ("histories_abandoned", self.histories_abandoned),
        ]
    }
}

/// Kinds of problems, the one that explains most first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ProblemKind {
    Manifest,
    Metadata,
    Anchor,
    LostLog,
    Scan,
    Transfer,
    Persist,
    Group,
    Clock,
}

impl ProblemKind {
    fn name(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Metadata => "metadata",
            Self::Anchor => "anchor",
            Self::LostLog => "lost_log",
            Self::Scan => "scan",
            Self::Transfer => "transfer",
            Self::Persist => "persist",
            Self::Group => "group",
            Self::Clock => "clock",
        }
    }
}

/// All problems there are. Only the first is told, once for as long as it is of the same kind: the text of each retry may be
/// another one, and the status has the newest.
#[derive(Debug, Clone, Default)]
pub(super) struct Problems {
    present: BTreeMap<ProblemKind, String>,
    told: Option<ProblemKind>,
}

impl Problems {
    pub(super) fn set(&mut self, kind: ProblemKind, text: String) {
        self.present.insert(kind, text);
    }

    pub(super) fn clear(&mut self, kind: ProblemKind) {
        self.present.remove(&kind);
    }

    pub(super) fn current(&self) -> Option<Problem> {
        let (kind, text) = self.present.first_key_value()?;
        Some(Problem {
            kind: kind.name(),
            text: text.clone(),
        })
    }
}

impl UploadMachine {
    /// What the machine is at.
    #[must_use]
    pub fn status(&self) -> Status {
        let in_flight = self.transfers.in_flight();
        let scanned = self.drain.next_offset.unwrap_or(self.manifest.next_offset);
        let (persist_bytes, unpersisted_since) = self.uploaded_and_not_persisted();
        let oldest_pending_timestamp_ms = unpersisted_since
            .or_else(|| self.transfers.first_timestamp_ms())
            .or_else(|| self.drain.assembly.first_timestamp_ms());
        Status {
            activity: match (&self.phase, &self.anchor) {
                (Phase::Resolving(_), _) => Activity::Resolving,
                (Phase::Stopped, _) => Activity::Stopped,
                (Phase::Running, Anchor::Writing { .. } | Anchor::Waiting { .. }) => {
                    Activity::Anchoring
                }
                (Phase::Running, Anchor::Unneeded | Anchor::Done) => Activity::Draining,
            },
            log_next_offset: self
                .committed_chunk_id
                .map_or(scanned, |id| scanned.max(id.saturating_add(1))),
            manifest_first_offset: self.manifest.first_offset,
            manifest_next_offset: self.manifest.next_offset,
            manifest_total_size_bytes: self.manifest.total_size_bytes,
            manifest_entries: self.manifest.entries.len(),
            rebalance_in_flight: self.tree.is_rebalancing(),
            persisted_next_offset: self.persisted.next_offset,
            revision: self.revision(),
            transfers_in_flight: in_flight,
            transfers_waiting: self.transfers.len() - in_flight,
            edits_since_persist: self.persist.edits,
            persist_in_flight: !self.persist.is_idle(),
            assembly_first_offset: self.drain.assembly.first_offset(),
            assembly_next_offset: self.drain.assembly.next_offset(),
            assembly_payload_bytes: self.drain.assembly.payload_bytes(),
            assembly_chunks: self.drain.assembly.chunk_count(),
            index_bytes: self.index_bytes(),
            stalled_offset: self.transfers.stalled_offset(),
            oldest_pending_timestamp_ms,
            transfer_bytes: self.transfers.chunk_bytes(),
            persist_bytes,
            problem: self.problems.current(),
        }
    }

    /// Chunk bytes at the manifest's end that the persisted one does not have, and the timestamp of the first of them.
    fn uploaded_and_not_persisted(&self) -> (u64, Option<i64>) {
        let pending = self
            .manifest
            .entries
            .iter()
            .rev()
            .take_while(|entry| entry.first_offset >= self.persisted.next_offset);
        let sum = |(bytes, _): (u64, Option<i64>), entry: &Entry| {
            (
                bytes.saturating_add(entry.size_bytes),
                Some(entry.first_timestamp_ms).filter(|at| *at != NO_TIMESTAMP),
            )
        };
        pending.fold((0, None), sum)
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Tells the operator if what there is to tell has changed.
    pub(super) fn tell_problem(&mut self) {
        let kind = self.problems.present.keys().next().copied();
        if kind != self.problems.told {
            self.problems.told = kind;
            let problem = self.problems.current();
            self.effects.push_back(Effect::Problem { problem });
        }
    }
}
