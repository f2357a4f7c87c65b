//! What all streams of the node have together, kept up to date by each of them: who asks for the sums does not ask the streams.

use tiering_core::upload::Status;

use crate::stats::{Stat, Stats};

/// What one stream has put into the sums.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    total_size: u64,
    fragments: u64,
    transfers_in_flight: u64,
    transfers_waiting: u64,
    edits_since_persist: u64,
    assembly_payload_bytes: u64,
    stalled: u64,
    unpersisted_records: u64,
    transfer_bytes: u64,
    persist_bytes: u64,
    index_bytes: u64,
    pending_since_ms: Option<i64>,
}

impl Share {
    fn of(status: &Status) -> Self {
        let unpersisted = status
            .log_next_offset
            .saturating_sub(status.persisted_next_offset);
        Self {
            total_size: u64::try_from(status.manifest_total_size_bytes).unwrap_or(u64::MAX),
            fragments: status.manifest_entries as u64,
            transfers_in_flight: status.transfers_in_flight as u64,
            transfers_waiting: status.transfers_waiting as u64,
            edits_since_persist: u64::from(status.edits_since_persist),
            assembly_payload_bytes: status.assembly_payload_bytes,
            stalled: u64::from(status.stalled_offset.is_some()),
            unpersisted_records: unpersisted,
            transfer_bytes: status.transfer_bytes,
            persist_bytes: status.persist_bytes,
            index_bytes: status.index_bytes as u64,
            pending_since_ms: status.oldest_pending_timestamp_ms,
        }
    }

    /// Puts in what has changed since the last time.
    pub(super) fn update(&mut self, stats: &Stats, status: &Status) {
        self.become_share(stats, Self::of(status));
    }

    /// Index bytes that this stream may hold: what it has put in, and what all streams together leave of `budget_bytes`.
    pub(super) fn index_room_bytes(&self, stats: &Stats, budget_bytes: u64) -> usize {
        let taken_bytes = u64::try_from(stats.streams_index_bytes.get()).unwrap_or(0);
        let left_bytes = budget_bytes.saturating_sub(taken_bytes);
        usize::try_from(left_bytes.saturating_add(self.index_bytes)).unwrap_or(usize::MAX)
    }

    /// Takes all of it out: the stream is closed.
    pub(super) fn withdraw(&mut self, stats: &Stats) {
        self.become_share(stats, Self::default());
    }

    fn become_share(&mut self, stats: &Stats, now: Self) {
        let before = std::mem::replace(self, now);
        if before == now {
            return;
        }
        let rows: [(&Stat, u64, u64); 11] = [
            (
                &stats.streams_manifest_total_size,
                before.total_size,
                now.total_size,
            ),
            (
                &stats.streams_manifest_fragments,
                before.fragments,
                now.fragments,
            ),
            (
                &stats.streams_transfers_in_flight,
                before.transfers_in_flight,
                now.transfers_in_flight,
            ),
            (
                &stats.streams_transfers_waiting,
                before.transfers_waiting,
                now.transfers_waiting,
            ),
            (
                &stats.streams_edits_since_persist,
                before.edits_since_persist,
                now.edits_since_persist,
            ),
            (
                &stats.streams_assembly_payload_bytes,
                before.assembly_payload_bytes,
                now.assembly_payload_bytes,
            ),
            (&stats.streams_stalled, before.stalled, now.stalled),
            (
                &stats.streams_unpersisted_records,
                before.unpersisted_records,
                now.unpersisted_records,
            ),
            (
                &stats.streams_transfer_bytes,
                before.transfer_bytes,
                now.transfer_bytes,
            ),
            (
                &stats.streams_persist_bytes,
                before.persist_bytes,
                now.persist_bytes,
            ),
            (
                &stats.streams_index_bytes,
                before.index_bytes,
                now.index_bytes,
            ),
        ];
        stats
            .pending
            .replace(before.pending_since_ms, now.pending_since_ms);
        for (row, before, now) in rows {
            row.add(now.saturating_sub(before));
            row.subtract(before.saturating_sub(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use tiering_core::upload::{Settings, UploadMachine};

    use super::*;

    #[test]
    fn the_sums_are_those_of_the_streams_and_go_with_them() {
        let stats = Stats::default();
        let mut status = UploadMachine::new(0, Settings::default(), 1, 1).status();
        let (mut one, mut other) = (Share::default(), Share::default());
        status.manifest_total_size_bytes = 100;
        status.log_next_offset = 9;
        status.stalled_offset = Some(0);
        status.oldest_pending_timestamp_ms = Some(1_000);
        status.persist_bytes = 7;
        status.index_bytes = 300;
        one.update(&stats, &status);
        status.manifest_total_size_bytes = 20;
        status.persisted_next_offset = 4;
        status.stalled_offset = None;
        status.oldest_pending_timestamp_ms = Some(5_000);
        other.update(&stats, &status);
        let sums = |stats: &Stats| {
            (
                stats.streams_manifest_total_size.get(),
                stats.streams_unpersisted_records.get(),
                stats.streams_stalled.get(),
            )
        };
        assert_eq!(sums(&stats), (120, 14, 1));
        assert_eq!(stats.streams_persist_bytes.get(), 14);
        // Each may keep what it has, and take what is left.
        assert_eq!(one.index_room_bytes(&stats, 1_000), 700);
        assert_eq!(one.index_room_bytes(&stats, 500), 300);
        assert_eq!(stats.pending.lag_ms(6_000), 5_000);
        // Less than before, and the same once more.
        one.update(&stats, &status);
        one.update(&stats, &status);
        assert_eq!(sums(&stats), (40, 10, 0));
        assert_eq!(stats.pending.lag_ms(6_000), 1_000);
        one.withdraw(&stats);
        other.withdraw(&stats);
        assert_eq!(sums(&stats), (0, 0, 0));
        assert_eq!(stats.pending.lag_ms(6_000), 0);
    }
}
