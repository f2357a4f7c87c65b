//! Fragments come out as the object that would be written, down to its checksum.

use super::*;
use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::fragment::decode_index;
use proptest::prelude::*;

/// A chunk with real bytes, and what the scan says of it.
fn chunk(id: u64, records: u32, parts: [&[u8]; 3], place: (u64, u64)) -> (Vec<u8>, ScannedChunk) {
    let [filter, data, trailer] = parts;
    let header = ChunkHeader {
        chunk_type: ChunkType::User,
        num_entries: 1,
        num_records: records,
        timestamp_ms: 1000 + id as i64,
        epoch: 1,
        chunk_id: id,
        data_crc: crc::crc32(data),
        data_bytes: data.len() as u32,
        trailer_bytes: trailer.len() as u32,
        filter_bytes: filter.len() as u8,
    };
    let lead = [&header.encode()[..], filter].concat();
    let scanned = ScannedChunk {
        header,
        segment_offset: place.0,
        position: place.1,
        lead_crc: crc::crc32(&lead),
        trailer_crc: crc::crc32(trailer),
    };
    ([&lead[..], data, trailer].concat(), scanned)
}

fn header_only(id: u64, records: u32, data_bytes: u32, position: u64) -> ScannedChunk {
    let (_, mut scanned) = chunk(id, records, [b"", b"", b""], (0, position));
    scanned.header.data_bytes = data_bytes;
    scanned
}

#[test]
fn spans_merge_within_a_segment_and_start_anew_in_the_next() {
    let mut assembly = FragmentAssembly::new();
    assembly.add(&header_only(0, 1, 10, 8)).unwrap();
    assembly.add(&header_only(1, 1, 10, 66)).unwrap();
    let (_, next) = chunk(2, 5, [b"f", b"d", b"t"], (2, 8));
    assembly.add(&next).unwrap();
    assert_eq!(assembly.next_offset(), Some(7));
    let plan = assembly.cut().unwrap();
    assert_eq!(
        plan.spans,
        vec![
            Span {
                segment_offset: 0,
                start: 8,
                end: 124
            },
            Span {
                segment_offset: 2,
                start: 8,
                end: 59
            }
        ]
    );
    assert_eq!(
        (plan.first_offset, plan.next_offset, plan.chunk_count),
        (0, 7, 3)
    );
    assert_eq!(
        (plan.first_timestamp_ms, plan.last_timestamp_ms),
        (1000, 1002)
    );
    assert_eq!((plan.size_bytes, plan.payload_bytes), (167, 21));
    assert_eq!(plan.object_bytes(), 8 + 167 + 60);
    assert!(assembly.is_empty() && assembly.cut().is_none());
}

#[test]
fn a_hole_is_refused_and_nothing_changes() {
    let mut assembly = FragmentAssembly::new();
    assembly.add(&header_only(5, 2, 1, 8)).unwrap();
    let before = assembly.clone().cut();
    let error = AddError::NotContiguous {
        expected: 7,
        found: 8,
    };
    assert_eq!(assembly.add(&header_only(8, 1, 1, 60)), Err(error));
    assert_eq!(assembly.cut(), before);
}

#[test]
fn damaged_headers_are_refused() {
    let mut assembly = FragmentAssembly::new();
    assert_eq!(
        assembly.add(&header_only(5, 0, 1, 8)),
        Err(AddError::Impossible(5))
    );
    let overflow = header_only(u64::MAX, 1, 1, 8);
    assert_eq!(assembly.add(&overflow), Err(AddError::Impossible(u64::MAX)));
    assert_eq!(
        assembly.add(&header_only(5, 1, 1, u64::MAX)),
        Err(AddError::Impossible(5))
    );
    assert!(assembly.is_empty());
}

#[test]
fn positions_stay_within_32_bits() {
    let mut assembly = FragmentAssembly::new();
    let big = u32::MAX - 200;
    assembly.add(&header_only(0, 1, big, 8)).unwrap();
    assert!(assembly.fits(&header_only(1, 1, 100, 0)));
    let too_much = header_only(1, 1, 105, 8 + 48 + u64::from(big));
    assert!(!assembly.fits(&too_much));
    assert_eq!(assembly.add(&too_much), Err(AddError::Full(1)));
}

fn parts() -> impl Strategy<Value = (u32, Vec<u8>, Vec<u8>, Vec<u8>, bool)> {
    let bytes = |n| prop::collection::vec(any::<u8>(), 0..n);
    (1u32..100, bytes(40), bytes(300), bytes(20), any::<bool>())
}

proptest! {
    #[test]
    fn the_plan_is_the_object(start in 0u64..1_000_000, chunks in prop::collection::vec(parts(), 1..30)) {
        let (mut id, mut segment, mut bytes) = (start, start, Vec::new());
        let mut position = 8;
        let (mut assembly, mut positions) = (FragmentAssembly::new(), Vec::new());
        for (records, filter, data, trailer, roll) in &chunks {
            if *roll {
                (segment, position) = (id, 8);
            }
            let (raw, scanned) = chunk(id, *records, [filter, data, trailer], (segment, position));
            prop_assert!(assembly.add(&scanned).is_ok());
            positions.push(bytes.len() as u32);
            position += raw.len() as u64;
            id += u64::from(*records);
            bytes.extend(raw);
        }
        let plan = assembly.cut().unwrap();
        prop_assert_eq!(plan.chunks_crc, crc::crc32(&bytes));
        prop_assert_eq!(plan.size_bytes, bytes.len() as u64);
        prop_assert_eq!(plan.spans.iter().map(|span| span.end - span.start).sum::<u64>(), plan.size_bytes);
        let object = [&HEADER[..], &bytes, &plan.index].concat();
        prop_assert_eq!(plan.object_bytes(), object.len() as u64);
        prop_assert_eq!(plan.object_crc(), crc::crc32(&object));
        let index = decode_index(&plan.index).unwrap();
        prop_assert_eq!(index.records.iter().map(|record| record.position).collect::<Vec<_>>(), positions);
        prop_assert_eq!(plan.next_offset, id);
    }
}
