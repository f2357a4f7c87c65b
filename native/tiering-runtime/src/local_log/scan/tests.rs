//! Scans of logs that were written chunk by chunk.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use log_format::chunk::ChunkType;
use log_format::segment;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::local_log::test_log::{TestChunk, TestLog, Written};

fn scanner(directory: &Path) -> Scanner {
    Scanner::new(
        directory.to_owned(),
        Arc::new(BufferPool::new()),
        Arc::new(Stats::default()),
    )
}

fn log() -> (TempDir, TestLog) {
    let directory = tempfile::tempdir().expect("a directory");
    let log = TestLog::create(directory.path(), 0);
    (directory, log)
}

fn all_from(from_offset: u64, up_to_chunk_id: u64) -> ScanRequest {
    ScanRequest {
        from_offset,
        front_timestamp_ms: None,
        witness: None,
        up_to_chunk_id,
        max_chunks: usize::MAX,
        max_bytes: u64::MAX,
    }
}

fn assert_same(scanned: &[ScannedChunk], written: &[Written]) {
    assert_eq!(scanned.len(), written.len());
    for (scanned, written) in scanned.iter().zip(written) {
        assert_eq!(scanned.header, written.header);
        assert_eq!(
            (scanned.segment_offset, scanned.position),
            (written.segment_offset, written.position)
        );
        let lead_bytes = written.header.lead_bytes();
        assert_eq!(scanned.lead_crc, crc::crc32(&written.bytes[..lead_bytes]));
        let trailer_start = written.bytes.len() - written.header.trailer_bytes as usize;
        assert_eq!(
            scanned.trailer_crc,
            crc::crc32(&written.bytes[trailer_start..])
        );
    }
}

fn chunk() -> impl Strategy<Value = TestChunk> {
    let bytes = |max: usize| proptest::collection::vec(any::<u8>(), 0..max);
    let kind = prop_oneof![8 => Just(ChunkType::User), 1 => Just(ChunkType::TrackingDelta), 1 => Just(ChunkType::TrackingSnapshot)];
    (
        kind,
        1u32..2000,
        prop_oneof![Just(Vec::new()), bytes(255)],
        prop_oneof![bytes(64), bytes(9000)],
        prop_oneof![3 => Just(Vec::new()), 1 => bytes(600)],
    )
        .prop_map(
            |(chunk_type, num_records, filter, data, trailer)| TestChunk {
                chunk_type,
                num_records,
                filter,
                data,
                trailer,
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_scan_sees_every_chunk_once_whatever_the_batches(
        steps in proptest::collection::vec((chunk(), any::<bool>()), 1..60),
        start: prop::sample::Index, max_chunks in 1usize..20, max_bytes in 1u64..40_000, keep_index: bool,
    ) {
        let (directory, mut log) = log();
        for (chunk, roll) in &steps {
            log.append(chunk);
            if *roll {
                log.roll();
            }
        }
        if !keep_index {
            without_indexes(directory.path());
        }
        let start = start.index(log.chunks.len());
        let mut scanner = scanner(directory.path());
        let mut scanned = Vec::new();
        let mut from_offset = log.chunks[start].header.chunk_id;
        loop {
            let request = ScanRequest { from_offset, front_timestamp_ms: None, witness: None, up_to_chunk_id: log.last_chunk_id(), max_chunks, max_bytes };
            let batch = scanner.scan(&request);
            prop_assert!(batch.chunks.len() <= max_chunks);
            if let Some(last) = batch.chunks.last() {
                from_offset = last.header.next_offset().expect("small");
            }
            scanned.extend(batch.chunks);
            match batch.end {
                ScanEnd::More => {}
                ScanEnd::CaughtUp => break,
                other => prop_assert!(false, "{other:?}"),
            }
        }
        assert_same(&scanned, &log.chunks[start..]);
    }
}

#[test]
fn nothing_past_the_committed_chunk_is_seen_and_the_rest_is_seen_later() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    let mut scanner = scanner(directory.path());
    let batch = scanner.scan(&all_from(0, 4));
    assert_same(&batch.chunks, &log.chunks[..5]);
    assert_eq!(batch.end, ScanEnd::CaughtUp);
    log.append_many(5, 5000);
    log.roll();
    log.append_many(5, 10);
    let batch = scanner.scan(&all_from(5, log.last_chunk_id()));
    assert_same(&batch.chunks, &log.chunks[5..]);
    assert_eq!(
        scanner.scan(&all_from(20, 19)),
        ScanBatch {
            chunks: Vec::new(),
            end: ScanEnd::CaughtUp
        }
    );
}

#[test]
fn a_new_scanner_at_the_end_is_caught_up() {
    let (directory, mut log) = log();
    log.append_many(3, 100);
    assert_eq!(
        scanner(directory.path()).scan(&all_from(3, 2)).end,
        ScanEnd::CaughtUp
    );
    log.roll();
    assert_eq!(
        scanner(directory.path()).scan(&all_from(3, 2)).end,
        ScanEnd::CaughtUp
    );
}

#[test]
fn trimmed_segments_are_told_with_the_floor_that_is_there() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    log.roll();
    log.append_many(10, 100);
    log.roll();
    log.append_many(10, 100);
    let mut scanner = scanner(directory.path());
    assert_eq!(
        scanner
            .scan(&ScanRequest {
                max_chunks: 5,
                ..all_from(0, 29)
            })
            .end,
        ScanEnd::More
    );
    log.trim(20);
    // The open file still reads to its end, then the log goes on elsewhere.
    let batch = scanner.scan(&all_from(5, 29));
    assert_same(&batch.chunks, &log.chunks[5..10]);
    assert_eq!(
        batch.end,
        ScanEnd::LocalAhead {
            local_first_offset: 20
        }
    );
    assert_eq!(
        self::scanner(directory.path()).scan(&all_from(3, 29)).end,
        ScanEnd::LocalAhead {
            local_first_offset: 20
        }
    );
}

#[test]
fn a_log_that_ends_below_is_told_with_its_range() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    let end = scanner(directory.path()).scan(&all_from(50, 9)).end;
    assert_eq!(
        end,
        ScanEnd::RemoteAhead {
            local_first_offset: 0,
            local_next_offset: 10
        }
    );
}

#[test]
fn a_log_that_began_anew_is_not_the_one_that_lost_its_end() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    let first = log.chunks[0].header;
    let scan = |from_offset, front_timestamp_ms, chunk_id, timestamp_ms, epoch| {
        let request = ScanRequest {
            front_timestamp_ms,
            witness: Some(Witness {
                chunk_id,
                timestamp_ms,
                epoch,
            }),
            ..all_from(from_offset, 9)
        };
        scanner(directory.path()).scan(&request).end
    };
    let remote_ahead = ScanEnd::RemoteAhead {
        local_first_offset: 0,
        local_next_offset: 10,
    };
    let unrelated = ScanEnd::Unrelated {
        local_first_offset: 0,
    };
    let (time, epoch) = (first.timestamp_ms, first.epoch);
    // The oldest chunk that is durable is the first one here, or is not.
    assert_eq!(scan(50, None, 0, time, epoch), remote_ahead);
    assert_eq!(scan(50, None, 0, time - 1, epoch), unrelated);
    // It is further on, and the log begins before it was written, or after.
    assert_eq!(scan(50, None, 40, time + 9, epoch), remote_ahead);
    assert_eq!(scan(50, None, 40, time - 1, epoch), unrelated);
    assert_eq!(scan(50, None, 40, time + 9, epoch - 1), unrelated);
    // The log has grown past the place.
    let front = Some(log.chunks[4].header.timestamp_ms + 1);
    assert_eq!(scan(5, front, 0, time, epoch), diverged_at(0));
    assert_eq!(scan(5, front, 0, time - 1, epoch), unrelated);
    // It meets the place: nothing is asked.
    assert_eq!(scan(5, None, 0, time - 1, epoch), ScanEnd::CaughtUp);
    // It begins above: what is in front of it was trimmed.
    let higher = tempfile::tempdir().expect("a directory");
    let mut log = TestLog::create(higher.path(), 20);
    log.append_many(10, 100);
    let request = ScanRequest {
        witness: Some(Witness {
            chunk_id: 0,
            timestamp_ms: 0,
            epoch: 0,
        }),
        ..all_from(50, 29)
    };
    assert_eq!(
        scanner(higher.path()).scan(&request).end,
        ScanEnd::RemoteAhead {
            local_first_offset: 20,
            local_next_offset: 30,
        }
    );
    // It begins exactly where what is durable ends, as a log that lost its disk does.
    let from_20 = ScanRequest {
        from_offset: 20,
        front_timestamp_ms: Some(7),
        ..request
    };
    let batch = scanner(higher.path()).scan(&from_20);
    assert_eq!((batch.chunks.len(), batch.end), (10, ScanEnd::CaughtUp));
}

#[test]
fn no_log_yet_is_empty() {
    let directory = tempfile::tempdir().expect("a directory");
    assert_eq!(
        scanner(directory.path()).scan(&all_from(0, 0)).end,
        ScanEnd::Empty
    );
    assert_eq!(
        scanner(&directory.path().join("missing"))
            .scan(&all_from(0, 0))
            .end,
        ScanEnd::Empty
    );
    let _log = TestLog::create(directory.path(), 7);
    assert_eq!(
        scanner(directory.path()).scan(&all_from(9, 8)).end,
        ScanEnd::Empty
    );
    std::fs::write(directory.path().join(segment::file_name(7)), b"")
        .expect("a file without a header yet");
    assert_eq!(
        scanner(directory.path()).scan(&all_from(7, 8)).end,
        ScanEnd::Empty
    );
}

fn assert_failed(end: &ScanEnd, part: &str) {
    assert!(
        matches!(end, ScanEnd::Failed { reason } if reason.contains(part)),
        "{end:?}"
    );
}

#[test]
fn damage_is_told_and_never_skipped() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    let path = directory.path().join(segment::file_name(0));
    let file = OpenOptions::new().write(true).open(&path).expect("opened");

    file.set_len(log.chunks[9].position + 60).expect("cut");
    let batch = scanner(directory.path()).scan(&all_from(0, 9));
    assert_same(&batch.chunks, &log.chunks[..9]);
    assert_failed(&batch.end, "cut off");
    file.set_len(log.chunks[9].position + 20).expect("cut");
    assert_eq!(
        scanner(directory.path()).scan(&all_from(0, 9)).chunks.len(),
        9
    );

    file.write_at(&[0x51], log.chunks[5].position)
        .expect("damaged");
    let batch = scanner(directory.path()).scan(&all_from(0, 8));
    assert_same(&batch.chunks, &log.chunks[..5]);
    assert_failed(&batch.end, "magic 5");

    file.write_at(b"OSIX", 0).expect("damaged");
    assert_failed(
        &scanner(directory.path()).scan(&all_from(0, 8)).end,
        "known version",
    );
}

#[test]
fn committed_but_missing_is_a_failure() {
    let (directory, mut log) = log();
    log.append_many(3, 100);
    let batch = scanner(directory.path()).scan(&all_from(0, 9));
    assert_eq!(batch.chunks.len(), 3);
    assert_failed(&batch.end, "committed chunk 3 is not in the log");
}

#[test]
fn an_offset_inside_a_chunk_is_of_another_log() {
    let (directory, mut log) = log();
    log.append(&TestChunk::user(10, vec![1; 10]));
    assert_eq!(
        scanner(directory.path()).scan(&all_from(4, 0)).end,
        diverged_at(0)
    );
}

fn diverged_at(local_first_offset: u64) -> ScanEnd {
    ScanEnd::Diverged { local_first_offset }
}

fn without_indexes(directory: &Path) {
    for entry in std::fs::read_dir(directory).expect("listed") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|e| e == "index") {
            std::fs::remove_file(path).expect("removed");
        }
    }
}

/// The first scan from the offset after this chunk, which is the last that the remote tier has.
fn first_scan(log: &TestLog, last: &Written) -> ScanEnd {
    let request = ScanRequest {
        front_timestamp_ms: Some(last.header.timestamp_ms),
        witness: None,
        ..all_from(
            last.header.next_offset().expect("small"),
            log.last_chunk_id(),
        )
    };
    scanner(&log.directory).scan(&request).end
}

/// Three segments of ten chunks of one record; the remote tier has what is below the 15th.
fn three_segments() -> (TempDir, TestLog, Written) {
    let (directory, mut log) = log();
    for _ in 0..2 {
        log.append_many(10, 100);
        log.roll();
    }
    log.append_many(10, 100);
    let last = log.chunks[14].clone();
    (directory, log, last)
}

#[test]
fn a_log_that_has_what_the_remote_tier_ends_with_goes_on_there() {
    let (directory, log, last) = three_segments();
    for last in [&last, &log.chunks[0], &log.chunks[9], &log.chunks[29]] {
        assert_eq!(first_scan(&log, last), ScanEnd::CaughtUp);
    }
    without_indexes(directory.path());
    for last in [&last, &log.chunks[0], &log.chunks[9], &log.chunks[29]] {
        assert_eq!(first_scan(&log, last), ScanEnd::CaughtUp);
    }
}

#[test]
fn another_chunk_in_front_of_the_place_is_noticed_with_and_without_an_index() {
    for kept in [0, 5, 12, 14] {
        let (directory, mut log, last) = three_segments();
        log.lose_from(kept, 60_000);
        log.append_many(15 - kept, 100);
        assert_eq!(first_scan(&log, &last), diverged_at(0), "ends there too");
        log.append_many(8, 100);
        assert_eq!(first_scan(&log, &last), diverged_at(0), "grown past it");
        without_indexes(directory.path());
        assert_eq!(first_scan(&log, &last), diverged_at(0));
        // What both have is no reason.
        if let Some(common) = kept.checked_sub(1).and_then(|at| log.chunks.get(at)) {
            assert_eq!(first_scan(&log, common), ScanEnd::CaughtUp);
        }
    }
}

#[test]
fn a_chunk_across_the_place_is_noticed() {
    let (_directory, mut log, last) = three_segments();
    log.lose_from(12, 60_000);
    log.append(&TestChunk::user(20, vec![7; 100]));
    assert_eq!(first_scan(&log, &last), diverged_at(0));
}

#[test]
fn another_last_chunk_of_the_segment_in_front_of_the_place_is_noticed() {
    for with_index in [true, false] {
        let (directory, mut log, last) = three_segments();
        log.lose_from(12, 60_000);
        log.append_many(3, 100);
        log.roll();
        log.append_many(5, 100);
        if !with_index {
            without_indexes(directory.path());
        }
        assert_eq!(first_scan(&log, &last), diverged_at(0));
    }
}

#[test]
fn what_the_local_log_does_not_have_is_not_compared() {
    let (_directory, mut log, last) = three_segments();
    log.lose_from(12, 60_000);
    log.append_many(3, 100);
    log.roll();
    log.append_many(5, 100);
    log.trim(15);
    assert_eq!(
        first_scan(&log, &last),
        ScanEnd::CaughtUp,
        "it starts there"
    );
}

#[test]
fn a_segment_that_ends_in_front_of_a_hole_is_not_compared() {
    let (directory, log, _) = three_segments();
    let last = log.chunks[9].clone();
    let path = directory.path().join(segment::file_name(0));
    let file = OpenOptions::new().write(true).open(path).expect("opened");
    file.set_len(log.chunks[7].position).expect("cut");
    assert_eq!(first_scan(&log, &last), ScanEnd::CaughtUp);
    // Nor is one that was lengthened by the file system, and not written.
    file.set_len(log.chunks[9].position + 100).expect("filled");
    assert_eq!(first_scan(&log, &last), ScanEnd::CaughtUp);
    without_indexes(directory.path());
    assert_eq!(first_scan(&log, &last), ScanEnd::CaughtUp);
    // Damage in the segment that is to be scanned is told.
    let last = log.chunks[6].clone();
    file.write_at(&[0], log.chunks[5].position)
        .expect("damaged");
    assert_failed(&first_scan(&log, &last), "0x00");
}

#[test]
fn chunks_of_one_millisecond_are_no_reason() {
    let (_directory, mut log) = log();
    for _ in 0..9 {
        // The clock stands still.
        log.later_ms = -i64::try_from(log.next_offset).expect("small");
        log.append_many(1, 100);
    }
    for last in &log.chunks {
        assert_eq!(first_scan(&log, last), ScanEnd::CaughtUp);
    }
}

#[test]
fn the_open_file_of_the_last_scan_does_not_save_the_comparison() {
    let (directory, mut log, last) = three_segments();
    let mut scanner = scanner(directory.path());
    assert_eq!(scanner.scan(&all_from(0, 14)).end, ScanEnd::CaughtUp);
    log.lose_from(12, 60_000);
    log.append_many(5, 100);
    let request = ScanRequest {
        front_timestamp_ms: Some(last.header.timestamp_ms),
        witness: None,
        ..all_from(15, 16)
    };
    assert_eq!(scanner.scan(&request).end, diverged_at(0));
}

#[test]
fn an_index_that_lies_is_not_believed() {
    let (directory, mut log) = log();
    log.append_many(10, 100);
    let path = directory
        .path()
        .join(segment::file_name(0))
        .with_extension("index");
    let file = OpenOptions::new().write(true).open(path).expect("opened");
    file.write_at(&77u32.to_be_bytes(), 8 + 5 * 29 + 24)
        .expect("damaged");
    let batch = scanner(directory.path()).scan(&all_from(5, 9));
    assert_same(&batch.chunks, &log.chunks[5..]);
}

#[test]
fn a_huge_chunk_costs_its_header_only() {
    let (directory, mut log) = log();
    for _ in 0..4 {
        log.append(&TestChunk {
            trailer: vec![9; 700_000],
            ..TestChunk::user(1, vec![3; 3 << 20])
        });
    }
    log.append_many(1, 10);
    let stats = Arc::new(Stats::default());
    let mut scanner = Scanner::new(
        directory.path().to_owned(),
        Arc::new(BufferPool::new()),
        Arc::clone(&stats),
    );
    let batch = scanner.scan(&all_from(0, log.last_chunk_id()));
    assert_same(&batch.chunks, &log.chunks);
    assert!(
        stats.scan_read_bytes.get() < 4 * 700_000 + 600_000,
        "{}",
        stats.scan_read_bytes.get()
    );
}
