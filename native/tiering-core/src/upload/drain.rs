//! Draining the local log: scans of committed chunk headers go in, fragments come out.

use std::sync::Arc;

use log_format::manifest::{NO_TIMESTAMP, Root};

use super::status::ProblemKind;
use super::{Effect, Phase, Recovery, ScanBatch, ScanEnd, UploadMachine, Witness};
use crate::fragment_assembly::FragmentAssembly;
use crate::manifest::rebalance;
/// A scan that fails this often in a row is a problem; the first time it may be a race with the writer.
const FAILED_SCAN_IS_A_PROBLEM_AFTER: u32 = 2;
/// How often a stream that waits for index room checks for some.
const ROOM_CHECK_MS: u64 = 1_000;

/// The one scan that may be under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scan {
    ticket: u64,
    from_offset: u64,
    up_to_chunk_id: u64,
    deadline_ms: u64,
}

/// Where draining is.
#[derive(Debug, Clone, Default)]
pub(super) struct Drain {
    /// Offset after the last chunk taken over; `None` until it is known where to start.
    pub(super) next_offset: Option<u64>,
    pub(super) assembly: FragmentAssembly,
    scan: Option<Scan>,
    /// When the oldest chunk of the assembly arrived.
    assembly_since_ms: u64,
    retry_at_ms: Option<u64>,
    failures: u32,
    /// Whether the local log has confirmed that it reaches to where we start. Until then one scan is made even if nothing
    /// new is committed: a log that lost its end must be noticed before anything is trimmed or uploaded.
    probed: bool,
    /// Timestamp of the last chunk of the manifest that was found, which ends where we start: the first scan compares it.
    front_timestamp_ms: Option<i64>,
    /// A cut was asked for: everything committed up to this chunk is to be cut.
    cut_up_to_chunk_id: Option<u64>,
}

impl Drain {
    pub(super) fn restart(&mut self, next_offset: Option<u64>) {
        let cut_up_to_chunk_id = self.cut_up_to_chunk_id;
        *self = Self {
            next_offset,
            cut_up_to_chunk_id,
            ..Self::default()
        };
    }

    /// Starts where a manifest that was found ends.
    pub(super) fn start_after(&mut self, manifest: &Root) {
        self.restart(Some(manifest.next_offset));
        self.front_timestamp_ms = manifest
            .entries
            .last()
            .map(|entry| entry.last_timestamp_ms)
            .filter(|timestamp_ms| *timestamp_ms != NO_TIMESTAMP);
    }

    /// What the next scan has to find in front of the place it starts at.
    fn expected_in_front(&self) -> Option<i64> {
        self.front_timestamp_ms.filter(|_| !self.probed)
    }

    /// Offset from which on nothing is in a transfer yet.
    pub(super) fn uncut_from(&self) -> Option<u64> {
        self.assembly.first_offset().or(self.next_offset)
    }

    /// What a scan under way finds is no longer wanted.
    pub(super) fn forget_scan(&mut self) {
        self.scan = None;
    }

    pub(super) fn is_scanning(&self) -> bool {
        self.scan.is_some()
    }
}

impl UploadMachine {
    pub(super) fn on_committed(
        &mut self,
        committed_chunk_id: Option<u64>,
        local_first_chunk_id: Option<u64>,
    ) {
        self.committed_chunk_id = committed_chunk_id;
        self.local_first_chunk_id = local_first_chunk_id;
        self.log_seen = true;
    }

    /// A log that is empty although something is durable was opened without the plugin. The first record would take the place of
    /// one that is durable; as long as there is none, opening the log again is all that is needed.
    pub(super) fn notice_empty_log(&mut self) {
        let empty = self.log_seen && self.local_first_chunk_id.is_none();
        if empty && self.committed_chunk_id.is_none() && !self.persisted.is_empty() {
            let text = format!(
                "the local log was lost and is empty, what is durable ends at offset {}: restart the stream (rabbitmq-streams \
                 restart_stream), and it goes on there",
                self.persisted.next_offset
            );
            self.problems.set(ProblemKind::LostLog, text);
        }
    }

    pub(super) fn on_cut_requested(&mut self) {
        self.drain.cut_up_to_chunk_id = self.committed_chunk_id;
    }

    pub(super) fn on_scanned(&mut self, generation: u64, batch: ScanBatch) {
        let Some(scan) = self.drain.scan.take_if(|scan| scan.ticket == generation) else {
            return;
        };
        match self.take_chunks(scan, &batch) {
            Ok(true) => {}
            // The rest, and how the scan ended, is looked at again when there is room.
            Ok(false) => return self.seam_found(),
            Err(reason) => return self.scan_failed(reason),
        }
        let next = self.drain.next_offset.unwrap_or(scan.from_offset);
        match batch.end {
            ScanEnd::CaughtUp if next > scan.up_to_chunk_id => self.seam_found(),
            ScanEnd::CaughtUp => self.scan_failed(format!(
                "committed chunk {} is not in the local log",
                scan.up_to_chunk_id
            )),
            ScanEnd::More if next > scan.from_offset => self.seam_found(),
            ScanEnd::More => self.scan_failed("a scan made no progress".to_owned()),
            ScanEnd::LocalAhead { local_first_offset } if local_first_offset > next => {
                self.scan_succeeded();
                self.request_reset(Recovery::LocalLogAhead, local_first_offset);
            }
            ScanEnd::RemoteAhead {
                local_first_offset,
                local_next_offset,
            } if local_next_offset < next => {
                self.remote_tier_ahead(local_first_offset, self.witness().is_some());
            }
            ScanEnd::Diverged { local_first_offset }
                if !self.drain.probed && next == scan.from_offset && local_first_offset <= next =>
            {
                self.remote_tier_ahead(local_first_offset, self.witness().is_some());
            }
            ScanEnd::Unrelated { local_first_offset }
                if !self.drain.probed && next == scan.from_offset && local_first_offset <= next =>
            {
                self.remote_tier_ahead(local_first_offset, false);
            }
            // Once they have met, the local log only grows: this is a file that is not what it should be.
            ScanEnd::Diverged { .. } | ScanEnd::Unrelated { .. } => {
                self.scan_failed(format!("no chunk of the local log starts at offset {next}"));
            }
            ScanEnd::LocalAhead { .. } | ScanEnd::RemoteAhead { .. } => {
                self.scan_failed("a scan contradicts itself".to_owned());
            }
            // The writer may be recovering its log: an empty one is never a reason to give anything up.
            ScanEnd::Empty => self.scan_later(),
            ScanEnd::Failed { reason } => self.scan_failed(reason),
        }
    }

    /// Whether there was room for all of them. Fragments that are cut for their size and others that are cut for their number
    /// of chunks can be more than the scan's limits, each for itself, allow for.
    fn take_chunks(&mut self, scan: Scan, batch: &ScanBatch) -> Result<bool, String> {
        for chunk in &batch.chunks {
            if self.transfers.len() >= self.settings.max_in_flight_transfers {
                return Ok(false);
            }
            let (id, expected) = (
                chunk.header.chunk_id,
                self.drain.next_offset.unwrap_or(scan.from_offset),
            );
            if id != expected {
                return Err(format!("chunk {id} follows where chunk {expected} should"));
            }
            if id > scan.up_to_chunk_id {
                return Err(format!("chunk {id} is not committed"));
            }
            if !self.drain.assembly.fits(chunk) {
                self.cut();
            }
            if self.drain.assembly.is_empty() {
                self.drain.assembly_since_ms = self.now_ms;
            }
            self.drain
                .assembly
                .add(chunk)
                .map_err(|error| error.to_string())?;
            self.drain.next_offset = self.drain.assembly.next_offset();
            self.seam_met();
            self.counters.chunks_scanned += 1;
            let assembly = &self.drain.assembly;
            if assembly.payload_bytes() >= self.settings.fragment_size_bytes
                || assembly.chunk_count() >= self.settings.fragment_max_chunks
            {
                self.cut();
            }
        }
        Ok(true)
    }

    /// The local log lost its end, and is cut back to; or, if nothing would be left of the manifest and nothing shows that the two
    /// were ever one (`related`), it was lost and has begun anew below what is durable. Then there is no offset at which uploading
    /// could go on, and what is durable is kept.
    fn remote_tier_ahead(&mut self, local_first_offset: u64, related: bool) {
        let durable = &self.persisted;
        if related || durable.is_empty() || local_first_offset > durable.first_offset {
            self.scan_succeeded();
            return self.request_reset(Recovery::RemoteTierAhead, local_first_offset);
        }
        let text = format!(
            "the local log was lost and began anew at offset {local_first_offset}, below offset {} at which what is durable ends: nothing \
             is uploaded, trimmed or given up",
            durable.next_offset
        );
        self.problems.set(ProblemKind::LostLog, text);
        self.scan_later();
    }

    /// The oldest chunk that the remote tier has and whose timestamp the root says: groups may begin below what is durable.
    fn witness(&self) -> Option<Witness> {
        let (durable, epoch) = (&self.persisted, self.pointer?.epoch);
        durable
            .entries
            .iter()
            .find(|entry| {
                entry.first_offset >= durable.first_offset
                    && entry.first_timestamp_ms != NO_TIMESTAMP
            })
            .map(|entry| Witness {
                chunk_id: entry.first_offset,
                timestamp_ms: entry.first_timestamp_ms,
                epoch,
            })
    }

    fn seam_found(&mut self) {
        self.scan_succeeded();
        self.seam_met();
    }

    /// The local log goes on where the manifest ends.
    fn seam_met(&mut self) {
        self.drain.probed = true;
        if std::mem::take(&mut self.unconfirmed) {
            self.effects.push_back(Effect::Publish {
                root: Arc::clone(&self.persisted),
                revision: self.revision(),
                confirmed: true,
                pointer: self.pointer,
            });
        }
    }

    fn scan_succeeded(&mut self) {
        self.drain.failures = 0;
        self.drain.retry_at_ms = None;
        self.drain.probed = true;
        self.problems.clear(ProblemKind::Scan);
        self.problems.clear(ProblemKind::LostLog);
    }

    /// Looked at again later and never skipped: what does not parse today may be half a write, or a disk to be looked after.
    fn scan_failed(&mut self, reason: String) {
        if self.drain.failures + 1 >= FAILED_SCAN_IS_A_PROBLEM_AFTER {
            self.problems.set(ProblemKind::Scan, reason);
        }
        self.scan_later();
    }

    fn scan_later(&mut self) {
        let delay_ms = self.settings.retry.control.delay_ms(self.drain.failures);
        self.drain.failures = self.drain.failures.saturating_add(1);
        self.drain.retry_at_ms = Some(self.now_ms.saturating_add(self.chance.jitter(delay_ms)));
    }

    pub(super) fn expire_scan(&mut self) {
        if self
            .drain
            .scan
            .take_if(|scan| scan.deadline_ms <= self.now_ms)
            .is_some()
        {
            self.scan_failed("the local log does not answer".to_owned());
        }
    }

    /// A stream that never persisted anything starts at the local floor, also if that moves before the first chunk is taken.
    pub(super) fn find_start(&mut self) {
        let untouched = self.pointer.is_none()
            && self.manifest.is_empty()
            && self.transfers.is_empty()
            && self.drain.assembly.is_empty()
            && self.drain.scan.is_none();
        if let (true, Some(floor)) = (untouched, self.local_first_chunk_id)
            && self.drain.next_offset.is_none_or(|next| next < floor)
        {
            self.manifest = Root::empty_at(floor);
            self.drain.next_offset = Some(floor);
        }
    }

    /// From where up to which chunk to scan, if there is something to be found and nothing but time is in the way.
    fn wanted_scan(&self) -> Option<(u64, u64)> {
        let (from_offset, up_to_chunk_id) = (self.drain.next_offset?, self.committed_chunk_id?);
        let in_the_way = !matches!(self.phase, Phase::Running)
            || self.drain.scan.is_some()
            || self.reset.is_some()
            || self.scan_room() == 0
            || self.transfers.index_bytes() >= self.settings.max_waiting_index_bytes
            || self.has_no_index_room();
        let something = up_to_chunk_id >= from_offset || !self.drain.probed;
        (something && !in_the_way).then_some((from_offset, up_to_chunk_id))
    }

    /// Whether this stream must not hold more index bytes, because of all streams of the node. One that holds none always may take
    /// one batch: so each makes progress, however many there are.
    fn has_no_index_room(&self) -> bool {
        let held_bytes = self.index_bytes();
        held_bytes > 0 && held_bytes >= self.index_room_bytes
    }

    /// Index bytes of what is scanned and not in the manifest.
    pub(super) fn index_bytes(&self) -> usize {
        (self.transfers.index_bytes()).saturating_add(self.drain.assembly.index_bytes())
    }

    /// Fragments that may still be cut: as many as transfers are allowed, and as the root can take before it is rebalanced. A
    /// few are left over for cuts that nobody scanned for.
    fn scan_room(&self) -> usize {
        let queued = self.transfers.len();
        let in_root =
            rebalance::room(&self.manifest.entries, self.rebalance_threshold()).saturating_sub(4);
        self.settings
            .max_in_flight_transfers
            .min(in_root)
            .saturating_sub(queued)
    }

    pub(super) fn maybe_scan(&mut self) {
        let Some((from_offset, up_to_chunk_id)) = self.wanted_scan() else {
            return;
        };
        if self.drain.retry_at_ms.is_some_and(|at| at > self.now_ms) {
            return;
        }
        // No more than the transfers that are still allowed can take.
        let room = self.scan_room() as u64;
        let target_bytes = self.settings.fragment_size_bytes;
        let max_bytes = target_bytes
            .saturating_mul(room)
            .saturating_sub(self.drain.assembly.payload_bytes())
            .max(1);
        let max_chunks = u64::from(self.settings.fragment_max_chunks)
            .saturating_mul(room)
            .saturating_sub(u64::from(self.drain.assembly.chunk_count()));
        let max_chunks = usize::try_from(max_chunks)
            .unwrap_or(usize::MAX)
            .clamp(1, self.settings.scan_max_chunks);
        let ticket = self.ticket();
        let deadline_ms = self.now_ms.saturating_add(self.settings.answer_deadline_ms);
        self.drain.scan = Some(Scan {
            ticket,
            from_offset,
            up_to_chunk_id,
            deadline_ms,
        });
        self.drain.retry_at_ms = None;
        self.effects.push_back(Effect::Scan {
            generation: ticket,
            from_offset,
            front_timestamp_ms: self.drain.expected_in_front(),
            witness: self.witness(),
            up_to_chunk_id,
            max_chunks,
            max_bytes,
        });
    }

    pub(super) fn maybe_cut(&mut self) {
        if self.reset.is_some() {
            return;
        }
        if let Some(chunk_id) = self.drain.cut_up_to_chunk_id {
            let drained = self.drain.next_offset.is_some_and(|next| next > chunk_id);
            if drained || self.drain.failures > 0 {
                self.drain.cut_up_to_chunk_id = None;
                self.cut();
            }
        }
        // What is assembled is sent as it is: nothing will be added to it, and others wait for its room.
        if self.has_no_index_room() && !self.drain.assembly.is_empty() {
            self.counters.room_cuts += 1;
            self.cut();
        }
        if self.age_cut_at_ms().is_some_and(|at| at <= self.now_ms) {
            self.counters.age_cuts += 1;
            self.cut();
        }
    }

    /// When the assembly is old enough to be cut; not while there is no place for one more transfer.
    fn age_cut_at_ms(&self) -> Option<u64> {
        let waits = self.settings.fragment_max_age_ms > 0
            && !self.drain.assembly.is_empty()
            && self.reset.is_none()
            && self.transfers.len() < self.settings.max_in_flight_transfers;
        waits.then(|| {
            self.drain
                .assembly_since_ms
                .saturating_add(self.settings.fragment_max_age_ms)
        })
    }

    pub(super) fn drain_deadline_ms(&self) -> Option<u64> {
        let scan = self.drain.scan.map(|scan| scan.deadline_ms);
        let retry = self.wanted_scan().and(self.drain.retry_at_ms);
        // Other streams give room back without a word to this one.
        let room = (self.has_no_index_room()).then(|| self.now_ms.saturating_add(ROOM_CHECK_MS));
        [scan, retry, room, self.age_cut_at_ms()]
            .into_iter()
            .flatten()
            .min()
    }

    fn cut(&mut self) {
        if let Some(plan) = self.drain.assembly.cut() {
            self.enqueue_transfer(plan);
        }
    }
}
