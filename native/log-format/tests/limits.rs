//! Every stored record at the ends of its fields: lengths, overflows, and what a group may hold. What a record cannot tell is
//! refused, not cut down silently.
#![allow(clippy::unwrap_used)]

use log_format::chunk::{self, ChunkHeader, ChunkHeaderError, ChunkType};
use log_format::fragment::{self, FragmentIndexRecord, IndexError};
use log_format::index::{self, IndexRecord, IndexRecordError};
use log_format::key::KeySpace;
use log_format::manifest::{
    ENTRY_BYTES, Entry, Group, HEADER_BYTES, Kind, MAX_ENTRY_SIZE_BYTES, MAX_TOTAL_SIZE_BYTES,
    NO_TIMESTAMP, Root, RootError,
};
use proptest::prelude::*;

fn entry(first_offset: u64, kind: Kind, size_bytes: u64) -> Entry {
    Entry {
        first_offset,
        first_timestamp_ms: i64::MIN,
        last_timestamp_ms: i64::MAX,
        kind,
        size_bytes,
        uid: u32::MAX,
    }
}

fn root_of(entries: Vec<Entry>, next_offset: u64, total_size_bytes: u128) -> Root {
    Root {
        first_offset: entries
            .first()
            .map_or(next_offset, |entry| entry.first_offset),
        next_offset,
        first_timestamp_ms: 0,
        first_last_timestamp_ms: 0,
        total_size_bytes,
        entries,
    }
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Group, Kind::KiloGroup, Kind::MegaGroup])
}

fn any_group() -> impl Strategy<Value = Group> {
    let step = (
        1u64..1 << 50,
        0..=MAX_ENTRY_SIZE_BYTES,
        any::<i64>(),
        any::<u32>(),
    );
    (any_kind(), prop::collection::vec(step, 1..20)).prop_map(|(kind, steps)| {
        let below = Kind::from_byte(kind.to_byte() - 1).unwrap();
        let mut entries = Vec::new();
        let mut first_offset = 0;
        for (length, size, timestamp, uid) in steps {
            entries.push(Entry {
                first_offset,
                first_timestamp_ms: timestamp,
                last_timestamp_ms: timestamp,
                kind: below,
                size_bytes: if below == Kind::Fragment { size } else { 0 },
                uid,
            });
            first_offset += length;
        }
        Group {
            kind,
            first_offset: 0,
            first_timestamp_ms: entries[0].first_timestamp_ms,
            entries,
        }
    })
}

#[test]
fn a_chunk_header_at_the_ends_of_its_fields() {
    let header = ChunkHeader {
        chunk_type: ChunkType::TrackingSnapshot,
        num_entries: u16::MAX,
        num_records: u32::MAX,
        timestamp_ms: i64::MIN,
        epoch: u64::MAX,
        chunk_id: u64::MAX - u64::from(u32::MAX),
        data_crc: u32::MAX,
        data_bytes: u32::MAX,
        trailer_bytes: u32::MAX,
        filter_bytes: u8::MAX,
    };
    assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
    assert_eq!(header.next_offset(), Some(u64::MAX));
    let total = 48 + 255 + 2 * u64::from(u32::MAX);
    assert_eq!(header.total_bytes(), total, "does not wrap at 32 bits");
    assert_eq!(
        header.lead_bytes(),
        chunk::HEADER_BYTES + chunk::MAX_FILTER_BYTES
    );
    let past = ChunkHeader {
        chunk_id: header.chunk_id + 1,
        ..header
    };
    assert_eq!(past.next_offset(), None);
    assert_eq!(
        ChunkHeader::decode(&header.encode()[..47]),
        Err(ChunkHeaderError::TooShort)
    );
}

#[test]
fn every_type_of_chunk_has_its_byte_and_no_other_is_known() {
    for byte in 0..=u8::MAX {
        let known = ChunkType::from_byte(byte);
        assert_eq!(known.is_some(), byte < 3);
        assert!(known.is_none_or(|kind| kind.to_byte() == byte));
        let kind = Kind::from_byte(byte);
        assert_eq!(kind.is_some(), byte < 4);
        assert!(kind.is_none_or(|kind| kind.to_byte() == byte));
    }
}

#[test]
fn an_index_record_is_29_bytes_of_a_known_type() {
    let record = IndexRecord {
        chunk_id: u64::MAX,
        timestamp_ms: i64::MIN,
        epoch: u64::MAX,
        position: u32::MAX,
        chunk_type: ChunkType::TrackingDelta,
    };
    let bytes = record.encode();
    assert_eq!(bytes.len(), index::RECORD_BYTES);
    assert_eq!(IndexRecord::decode(&bytes), Ok(record));
    assert_eq!(
        IndexRecord::decode(&bytes[..28]),
        Err(IndexRecordError::TooShort)
    );
    let mut unknown = bytes;
    unknown[28] = 3;
    assert_eq!(
        IndexRecord::decode(&unknown),
        Err(IndexRecordError::ChunkType(3))
    );
}

#[test]
fn a_fragment_index_reaches_to_the_last_position_that_32_bits_tell() {
    let record = |offset, position| FragmentIndexRecord {
        offset,
        timestamp_ms: i64::MAX,
        position,
    };
    let last = record(u64::MAX, u32::MAX);
    assert_eq!(u64::from(last.position), fragment::MAX_SIZE_BYTES);
    let bytes = [record(0, 0).encode(), last.encode()].concat();
    assert_eq!(
        fragment::decode_index(&bytes).map(|index| index.records),
        Ok(vec![record(0, 0), last])
    );
    // A position that went round would come out as one that does not increase.
    let bytes = [last.encode(), record(u64::MAX, 5).encode()].concat();
    assert_eq!(
        fragment::decode_index(&bytes),
        Err(IndexError::OutOfOrder { record: 1 })
    );
    assert_eq!(FragmentIndexRecord::decode(&bytes[..19]), None);
}

#[test]
fn an_entry_tells_sizes_below_a_tebibyte_and_no_others() {
    let largest = root_of(
        vec![entry(0, Kind::Fragment, MAX_ENTRY_SIZE_BYTES)],
        1,
        u128::from(MAX_ENTRY_SIZE_BYTES),
    );
    assert_eq!(Root::decode(&largest.encode()), Ok(largest));
    let over = root_of(vec![entry(0, Kind::Fragment, 1 << 40)], 1, 0);
    assert_eq!(over.check(), Err(RootError::EntrySize(0)));
    // Written all the same, it does not wrap to 0, with which the total would add up.
    assert_eq!(Root::decode(&over.encode()), Err(RootError::Sizes));
}

#[test]
fn a_root_tells_totals_of_70_bits_and_no_others() {
    let entries = vec![entry(0, Kind::Group, 0)];
    let largest = root_of(entries.clone(), 1, MAX_TOTAL_SIZE_BYTES);
    assert_eq!(Root::decode(&largest.encode()), Ok(largest));
    let over = root_of(entries, 1, MAX_TOTAL_SIZE_BYTES + 1);
    assert_eq!(over.check(), Err(RootError::TotalSize));
    assert_eq!(
        Root::decode(&over.encode()).map(|root| root.total_size_bytes),
        Ok(MAX_TOTAL_SIZE_BYTES),
        "cut to the largest, not wrapped to 0"
    );
}

#[test]
fn a_root_at_the_end_of_the_offsets() {
    let root = root_of(vec![entry(u64::MAX - 1, Kind::Fragment, 0)], u64::MAX, 0);
    assert_eq!(Root::decode(&root.encode()), Ok(root.clone()));
    let past = Root {
        next_offset: u64::MAX - 1,
        ..root
    };
    assert_eq!(past.check(), Err(RootError::Emptiness));
    let behind = Root {
        first_offset: u64::MAX,
        ..past
    };
    assert_eq!(behind.check(), Err(RootError::Range));
    let empty = Root::empty_at(u64::MAX);
    assert_eq!(Root::decode(&empty.encode()), Ok(empty.clone()));
    assert!(empty.is_empty());
    let sized = Root {
        total_size_bytes: 1,
        ..empty
    };
    assert_eq!(sized.check(), Err(RootError::Sizes));
}

#[test]
fn a_leading_fragment_is_whole_and_a_leading_group_need_not_be() {
    let mut root = root_of(vec![entry(5, Kind::Fragment, 0)], 10, 0);
    root.first_offset = 6;
    assert_eq!(root.check(), Err(RootError::Order(0)));
    root.entries = vec![entry(5, Kind::Group, 0)];
    assert_eq!(root.check(), Ok(()));
    root.entries = vec![entry(7, Kind::Group, 0)];
    assert_eq!(root.check(), Err(RootError::Order(0)));
}

#[test]
fn a_group_holds_what_is_one_height_below_and_never_nothing() {
    let group = |kind, entries: Vec<Entry>| Group {
        kind,
        first_offset: entries.first().map_or(0, |entry| entry.first_offset),
        first_timestamp_ms: 0,
        entries,
    };
    let empty = group(Kind::Group, vec![]);
    assert_eq!(empty.check(), Err(RootError::Emptiness));
    assert_eq!(
        Group::decode(Kind::Group, &empty.encode()),
        Err(RootError::Emptiness)
    );
    assert_eq!(empty.last_timestamp_ms(), NO_TIMESTAMP);
    for (height, inside) in [(1, 1), (1, 2), (2, 0), (3, 1), (3, 3)] {
        let (kind, inside) = (
            Kind::from_byte(height).unwrap(),
            Kind::from_byte(inside).unwrap(),
        );
        let wrong = group(kind, vec![entry(0, inside, 0)]);
        let error = RootError::Kind {
            entry: 0,
            kind: inside.to_byte(),
        };
        assert_eq!(wrong.check(), Err(error.clone()));
        assert_eq!(Group::decode(kind, &wrong.encode()), Err(error));
    }
    let nested = group(Kind::KiloGroup, vec![entry(0, Kind::Group, 1)]);
    assert_eq!(
        nested.check(),
        Err(RootError::EntrySize(0)),
        "groups have no size"
    );
    let shifted = Group {
        first_offset: 4,
        ..group(Kind::Group, vec![entry(5, Kind::Fragment, 1)])
    };
    assert_eq!(shifted.check(), Err(RootError::Order(0)));
    let twice = group(
        Kind::Group,
        vec![entry(5, Kind::Fragment, 1), entry(5, Kind::Fragment, 1)],
    );
    assert_eq!(twice.check(), Err(RootError::Order(1)));
}

#[test]
fn what_is_no_group_reads_as_none() {
    let fragment = Group {
        kind: Kind::Fragment,
        first_offset: 0,
        first_timestamp_ms: 0,
        entries: vec![entry(0, Kind::Fragment, 1)],
    };
    for kind in [
        Kind::Fragment,
        Kind::Group,
        Kind::KiloGroup,
        Kind::MegaGroup,
    ] {
        assert_eq!(
            Group::decode(kind, &fragment.encode()),
            Err(RootError::Magic)
        );
    }
    assert_eq!(
        fragment.check(),
        Err(RootError::Kind { entry: 0, kind: 0 }),
        "nothing is below a fragment"
    );
    assert_eq!(Root::decode(&fragment.encode()), Err(RootError::Magic));
}

#[test]
fn a_group_of_kind_fragment_has_the_key_of_a_fragment() {
    let keys = KeySpace::new("p");
    assert_eq!(
        keys.group("s", Kind::Fragment, 1, 2),
        keys.fragment("s", 1, 2)
    );
}

proptest! {
    #[test]
    fn groups_round_trip_and_are_taken_for_no_other_height(group in any_group(), other in any_kind()) {
        let bytes = group.encode();
        prop_assert_eq!(bytes.len(), HEADER_BYTES + ENTRY_BYTES * group.entries.len());
        prop_assert_eq!(Group::decode(group.kind, &bytes), Ok(group.clone()));
        prop_assert_eq!(group.last_timestamp_ms(), group.entries.last().unwrap().last_timestamp_ms);
        if other != group.kind {
            prop_assert_eq!(Group::decode(other, &bytes), Err(RootError::Magic));
        }
        prop_assert_eq!(Root::decode(&bytes), Err(RootError::Magic));
    }

    #[test]
    fn a_group_that_is_cut_off_anywhere_is_refused_or_ends_at_an_entry(group in any_group(), at in any::<prop::sample::Index>()) {
        let bytes = group.encode();
        let cut = at.index(bytes.len());
        match Group::decode(group.kind, &bytes[..cut]) {
            Ok(shorter) => {
                prop_assert!((cut - HEADER_BYTES).is_multiple_of(ENTRY_BYTES));
                prop_assert!(group.entries.starts_with(&shorter.entries));
            }
            Err(_) => prop_assert!(cut <= HEADER_BYTES || !(cut - HEADER_BYTES).is_multiple_of(ENTRY_BYTES)),
        }
    }

    #[test]
    fn arbitrary_bytes_are_a_group_or_an_error(kind in any_kind(), head in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        // With a right magic and version half of the time: otherwise chance would never get past them.
        let magic = match kind { Kind::KiloGroup => b"OSIK", Kind::MegaGroup => b"OSIM", Kind::Group | Kind::Fragment => b"OSIG" };
        let lead = if head { [&magic[..], &[0, 0, 0, 1]].concat() } else { Vec::new() };
        let bytes = [lead, bytes].concat();
        if let Ok(group) = Group::decode(kind, &bytes) {
            prop_assert_eq!(group.check(), Ok(()));
        }
        if let Ok(root) = Root::decode(&bytes) {
            prop_assert_eq!(root.encode(), bytes);
        }
    }

    #[test]
    fn searching_a_fragment_index_agrees_with_looking_at_every_record(
        steps in prop::collection::vec((1u64..9, 0i64..5, 1u32..9), 1..40), offset in 0u64..300, timestamp_ms in -2i64..150,
    ) {
        let (mut records, mut next) = (Vec::new(), (3, 0, 0));
        for (records_in_chunk, ms, bytes) in steps {
            records.push(FragmentIndexRecord { offset: next.0, timestamp_ms: next.1, position: next.2 });
            next = (next.0 + records_in_chunk, next.1 + ms, next.2 + bytes);
        }
        prop_assert_eq!(
            fragment::search_by_offset(&records, offset),
            records.iter().rposition(|record| record.offset <= offset)
        );
        prop_assert_eq!(
            fragment::search_by_timestamp(&records, timestamp_ms),
            records.iter().position(|record| record.timestamp_ms >= timestamp_ms)
        );
    }
}
