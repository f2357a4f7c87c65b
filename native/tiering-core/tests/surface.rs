//! What operators see and configure: names are distinct and stable, every number is under its own name, defaults are the
//! documented ones.

use std::collections::BTreeSet;

use tiering_core::fragment_assembly::FragmentAssembly;
use tiering_core::{read, upload};

#[allow(clippy::needless_update)] // the next counter is noticed below, and not by a test that does not compile
#[test]
fn bug_119_every_counter_of_the_upload_machine_is_told_under_a_name_of_its_own() {
    let counters = upload::Counters {
        transfers_completed: 1,
        transfer_retries: 2,
        stalled_retries: 3,
        bytes_transferred: 4,
        persists_completed: 5,
        persists_failed: 6,
        persist_conflicts: 7,
        local_log_ahead_recoveries: 8,
        remote_tier_ahead_recoveries: 9,
        fragments_deleted: 10,
        chunks_scanned: 11,
        resolution_failures: 12,
        roots_created: 13,
        age_cuts: 14,
        room_cuts: 17,
        anchors_written: 15,
        duplicates_ignored: 16,
        ..Default::default()
    };
    let named = counters.named();
    let text = format!("{counters:?}");
    for (name, value) in named {
        assert!(text.contains(&format!("{name}: {value}")), "{name}");
    }
    let names: BTreeSet<_> = named.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), named.len());
    assert_eq!(
        text.matches(": ").count(),
        named.len(),
        "no counter is left out"
    );
}

#[test]
fn counters_of_the_read_machine_are_told_as_differences() {
    let later = read::Counters {
        read_ranges: 10,
        read_bytes: 20,
        chunks_served: 30,
        chunk_crc_mismatches: 40,
        range_retries: 50,
        repositions: 60,
        indexes_unusable: 70,
        refetches_past_cache: 80,
        corrupt_ends: 90,
        lost_ends: 100,
    };
    let earlier = read::Counters {
        read_ranges: 1,
        read_bytes: 2,
        chunks_served: 3,
        chunk_crc_mismatches: 4,
        range_retries: 5,
        repositions: 6,
        indexes_unusable: 7,
        refetches_past_cache: 8,
        corrupt_ends: 9,
        lost_ends: 10,
    };
    let since = read::Counters {
        read_ranges: 9,
        read_bytes: 18,
        chunks_served: 27,
        chunk_crc_mismatches: 36,
        range_retries: 45,
        repositions: 54,
        indexes_unusable: 63,
        refetches_past_cache: 72,
        corrupt_ends: 81,
        lost_ends: 90,
    };
    assert_eq!(later.since(&earlier), since);
    assert_eq!(
        earlier.since(&later),
        read::Counters::default(),
        "never negative"
    );
}

#[test]
fn every_kind_of_failure_has_a_name() {
    use read::FailureKind::{Archived, Bug, Corrupt, Lost, Unavailable};
    let names = [Corrupt, Lost, Unavailable, Archived, Bug].map(read::FailureKind::name);
    assert_eq!(names, ["corrupt", "lost", "unavailable", "archived", "bug"]);
}

#[test]
fn defaults_are_the_documented_ones() {
    let settings = upload::Settings::default();
    assert_eq!(settings.fragment_size_bytes, 67_108_864);
    assert_eq!(
        (settings.persist_threshold, settings.persist_interval_ms),
        (5, 2_000)
    );
    assert_eq!(
        settings.fragment_max_age_ms, 0,
        "off, unless the shell asks for it"
    );
    // A transfer that is given up is sent again; that must take longer than any that works.
    assert!(settings.transfer_deadline_ms > settings.answer_deadline_ms);
    let settings = read::Settings::default();
    assert!(settings.verify_crc);
    assert_eq!(
        settings,
        settings.sanitized(),
        "the defaults need no putting right"
    );
}

#[test]
fn an_empty_assembly_has_no_size() {
    let assembly = FragmentAssembly::new();
    assert_eq!(
        (
            assembly.size_bytes(),
            assembly.payload_bytes(),
            assembly.chunk_count()
        ),
        (0, 0, 0)
    );
}

#[test]
fn what_a_closed_reader_held_is_given_to_its_driver() {
    let mut queue = read::ReadyQueue::new();
    let header = log_format::chunk::ChunkHeader {
        chunk_type: log_format::chunk::ChunkType::User,
        num_entries: 1,
        num_records: 1,
        timestamp_ms: 0,
        epoch: 1,
        chunk_id: 7,
        data_crc: 0,
        data_bytes: 0,
        trailer_bytes: 0,
        filter_bytes: 0,
    };
    for position in [8, 56, 104] {
        let bytes = bytes::Bytes::copy_from_slice(&header.encode());
        let _ = queue.push(read::Chunk {
            header,
            position,
            bytes: bytes.into(),
        });
    }
    assert_eq!((queue.len(), queue.is_empty()), (3, false));
    assert!(matches!(
        queue.take(7),
        read::ReadOutcome::Chunk { position: 8, .. }
    ));
    assert_eq!(queue.taken_bytes(), 48);
    assert_eq!(queue.drain_taken(), (1, 48));
    assert_eq!(queue.taken_bytes(), 0);
    assert_eq!(queue.take_all().len(), 2);
    assert!(queue.is_empty());
}
