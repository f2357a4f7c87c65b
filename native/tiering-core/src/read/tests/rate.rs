//! How fast one reader becomes over a line like the one to S3, in a time that is computed and not measured.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use log_format::chunk::{ChunkHeader, ChunkType, HEADER_BYTES};
use log_format::manifest::{Entry, Kind, Root};

use crate::read::*;

const BLOCK_BYTES: u64 = 256 << 10;
const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS: u64 = 64;
const FRAGMENTS: u64 = 30;

/// What a connection to the store is like, and how much all of them together can carry.
#[derive(Clone, Copy)]
struct Line {
    first_byte_ms: u64,
    connection_bytes_per_ms: u64,
    line_bytes_per_ms: u64,
}

struct Outcome {
    /// From when half of it was read to the end.
    bytes_per_s: u64,
    /// When so much had been read: an eighth of all.
    eighth_ms: u64,
    deepest: usize,
    most_bytes: u64,
    /// Of the second half.
    most_bytes_late: u64,
    deepest_late: usize,
    requests: u64,
}

/// The bytes of a fragment of equal chunks.
fn bytes_of(first_offset: u64, start: u64, end: u64) -> Bytes {
    let mut bytes = BytesMut::zeroed(usize::try_from(end - start).expect("small"));
    for number in start / CHUNK_BYTES..=(end / CHUNK_BYTES).min(CHUNKS - 1) {
        let at = 8 + number * CHUNK_BYTES;
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp_ms: 0,
            epoch: 1,
            chunk_id: first_offset + number,
            data_crc: 0,
            data_bytes: (CHUNK_BYTES - HEADER_BYTES as u64) as u32,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        for (byte, position) in header.encode().into_iter().zip(at..) {
            if (start..end).contains(&position) {
                bytes[usize::try_from(position - start).expect("small")] = byte;
            }
        }
    }
    bytes.freeze()
}

fn root() -> Root {
    let entry = |number: u64| Entry {
        first_offset: number * CHUNKS,
        first_timestamp_ms: 0,
        last_timestamp_ms: 0,
        kind: Kind::Fragment,
        size_bytes: CHUNKS * CHUNK_BYTES,
        uid: 1,
    };
    Root {
        first_offset: 0,
        next_offset: FRAGMENTS * CHUNKS,
        first_timestamp_ms: 0,
        first_last_timestamp_ms: 0,
        total_size_bytes: u128::from(FRAGMENTS * CHUNKS * CHUNK_BYTES),
        entries: (0..FRAGMENTS).map(entry).collect(),
    }
}

fn read_all(line: Line, consumer_bytes_per_ms: u64) -> Outcome {
    let settings = Settings {
        block_bytes: BLOCK_BYTES,
        verify_crc: false,
        ..Settings::default()
    };
    let root = Arc::new(root());
    let total_bytes = FRAGMENTS * CHUNKS * CHUNK_BYTES;
    let mut reader = ReadMachine::new(0, settings, Start::Offset(0), 7);
    let mut events: BTreeMap<(u64, u64), Event> = BTreeMap::new();
    let (mut now_ms, mut last_event) = (0, 0);
    let (mut read_bytes, mut half_ms) = (0, 0);
    let (mut consumer_free_ms, mut line_free_us) = (0, 0_u64);
    let mut outcome = Outcome {
        bytes_per_s: 0,
        eighth_ms: 0,
        deepest: 0,
        most_bytes: 0,
        most_bytes_late: 0,
        deepest_late: 0,
        requests: 0,
    };
    let mut in_flight = 0;
    loop {
        while let Some(effect) = reader.poll_effect() {
            let mut at = |at_ms: u64, event| {
                last_event += 1;
                events.insert((at_ms, last_event), event);
            };
            match effect {
                Effect::RefreshManifest { id } => {
                    let view = ManifestView::Resolved(Arc::clone(&root));
                    at(now_ms, Event::Manifest { id, view });
                }
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    ..
                } => {
                    outcome.requests += 1;
                    in_flight += 1;
                    let mut from = start;
                    let mut sent_ms = now_ms + line.first_byte_ms;
                    while from < end {
                        let to = end.min((from / BLOCK_BYTES + 1) * BLOCK_BYTES);
                        let part_bytes = to - from;
                        sent_ms += part_bytes / line.connection_bytes_per_ms;
                        line_free_us = line_free_us.max(now_ms * 1000)
                            + part_bytes * 1000 / line.line_bytes_per_ms;
                        let bytes = bytes_of(fragment.first_offset, from, to);
                        let at_ms = sent_ms.max(line_free_us / 1000);
                        at(at_ms, Event::Part { id, bytes });
                        from = to;
                    }
                    let end_ms = sent_ms.max(line_free_us / 1000);
                    let outcome = Ok(Bytes::new());
                    at(end_ms, Event::Fetched { id, outcome });
                }
                Effect::Deliver(chunk) => {
                    let bytes = chunk.bytes.len() as u64;
                    consumer_free_ms = now_ms.max(consumer_free_ms) + bytes / consumer_bytes_per_ms;
                    at(consumer_free_ms, Event::Consumed { chunks: 1, bytes });
                }
                Effect::Finish(finish) => {
                    let next_offset = root.next_offset;
                    assert_eq!(finish, Finish::Local { next_offset });
                    let rest_bytes = total_bytes / 2;
                    outcome.bytes_per_s = rest_bytes * 1000 / (now_ms - half_ms);
                    return outcome;
                }
                other => panic!("{other:?}"),
            }
        }
        outcome.deepest = outcome.deepest.max(in_flight);
        outcome.most_bytes = outcome.most_bytes.max(reader.outstanding_bytes());
        if read_bytes > total_bytes / 2 {
            outcome.most_bytes_late = outcome.most_bytes_late.max(reader.outstanding_bytes());
            outcome.deepest_late = outcome.deepest_late.max(in_flight);
        }
        let ((at_ms, _), event) = events.pop_first().expect("it goes on");
        now_ms = at_ms;
        in_flight -= usize::from(matches!(event, Event::Fetched { .. }));
        if let Event::Consumed { bytes, .. } = event {
            read_bytes += bytes;
            if read_bytes <= total_bytes / 8 {
                outcome.eighth_ms = now_ms;
            }
            if read_bytes <= total_bytes / 2 {
                half_ms = now_ms;
            }
        }
        reader.handle(now_ms, event);
    }
}

#[test]
fn one_reader_passes_500_mb_a_second_at_100_ms_and_40_mb_a_second_for_a_connection() {
    let outcome = read_all(
        Line {
            first_byte_ms: 100,
            connection_bytes_per_ms: 40_000,
            line_bytes_per_ms: 10_000_000,
        },
        10_000_000,
    );
    assert!(
        outcome.bytes_per_s > 500_000_000,
        "{} bytes/s with {} requests at once",
        outcome.bytes_per_s,
        outcome.deepest
    );
    // 250 MB, the search for the number of requests among them.
    assert!(outcome.eighth_ms < 1_400, "{} ms", outcome.eighth_ms);
    assert!(outcome.most_bytes <= (128 << 20) + 2 * CHUNK_BYTES);
    assert!(
        outcome.requests < FRAGMENTS * CHUNKS * CHUNK_BYTES / (3 << 20),
        "{} requests",
        outcome.requests
    );
}

#[test]
fn a_line_that_a_few_connections_fill_gets_a_few() {
    let outcome = read_all(
        Line {
            first_byte_ms: 10,
            connection_bytes_per_ms: 60_000,
            line_bytes_per_ms: 100_000,
        },
        10_000_000,
    );
    assert!(outcome.bytes_per_s > 85_000_000, "{}", outcome.bytes_per_s);
    // The search may go past it, in front of a line that it does not know; and the end of an answer comes after its last bytes,
    // at which the next one is asked for.
    let (deepest, late) = (outcome.deepest, outcome.deepest_late);
    assert!(
        deepest <= 17 && late <= 9,
        "{deepest}, later {late} requests at once"
    );
}

#[test]
fn a_slow_consumer_gets_what_it_takes_and_holds_little() {
    let outcome = read_all(
        Line {
            first_byte_ms: 20,
            connection_bytes_per_ms: 100_000,
            line_bytes_per_ms: 10_000_000,
        },
        20_000,
    );
    assert!(outcome.bytes_per_s > 19_000_000, "{}", outcome.bytes_per_s);
    let most_bytes = outcome.most_bytes_late;
    assert!(most_bytes <= 32 << 20, "{most_bytes}");
}

#[test]
fn readers_that_began_elsewhere_ask_for_the_same_ranges_soon() {
    let ranges_of = |start: u64| {
        let settings = Settings {
            block_bytes: BLOCK_BYTES,
            verify_crc: false,
            ..Settings::default()
        };
        let root = Arc::new(root());
        let mut reader = ReadMachine::new(0, settings, Start::Offset(start), 7);
        let (mut ranges, mut now_ms) = (Vec::new(), 0);
        while let Some(effect) = reader.poll_effect() {
            now_ms += 20;
            match effect {
                Effect::RefreshManifest { id } => {
                    let view = ManifestView::Resolved(Arc::clone(&root));
                    reader.handle(now_ms, Event::Manifest { id, view });
                }
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    ..
                } => {
                    ranges.push((fragment.first_offset, start, end));
                    let outcome = Ok(bytes_of(fragment.first_offset, start, end));
                    reader.handle(now_ms, Event::Fetched { id, outcome });
                }
                Effect::Deliver(chunk) => {
                    let bytes = chunk.bytes.len() as u64;
                    reader.handle(now_ms, Event::Consumed { chunks: 1, bytes });
                }
                _ => {}
            }
            if ranges.iter().any(|(first, _, _)| *first == 5 * CHUNKS) {
                break;
            }
        }
        ranges.retain(|(first, _, _)| (3 * CHUNKS..5 * CHUNKS).contains(first));
        ranges
    };
    let first = ranges_of(0);
    assert!(first.len() >= 2 * 16 && first.len() <= 2 * 18, "{first:?}");
    assert_eq!(ranges_of(CHUNKS), first);
    assert_eq!(ranges_of(2 * CHUNKS), first);
}
