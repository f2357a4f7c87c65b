//! The stored records of `log-format`: decoding never panics, and what decodes is what would be written.

use log_format::chunk::{self, ChunkHeader, EntryKind};
use log_format::fragment::{self, FragmentIndexRecord};
use log_format::index::{self, IndexRecord};
use log_format::key::KeySpace;
use log_format::manifest::{ENTRY_BYTES, Entry, Group, Kind, MAX_EDIT_BYTES, Root, RootEdit};
use log_format::{crc, segment};
use tiering_core::manifest::follow;
use tiering_core::upload::Pointer;

pub(crate) fn chunk_header(bytes: &[u8]) {
    let Ok(header) = ChunkHeader::decode(bytes) else {
        return;
    };
    let written = header.encode();
    // The three reserved bytes at the end are not kept.
    assert_eq!(Some(&written[..45]), bytes.get(..45));
    assert_eq!(ChunkHeader::decode(&written), Ok(header));
    assert!(header.total_bytes() >= header.lead_bytes() as u64);
    assert!(header.lead_bytes() <= chunk::HEADER_BYTES + chunk::MAX_FILTER_BYTES);
    assert_eq!(
        header.next_offset().is_none(),
        u128::from(header.chunk_id) + u128::from(header.num_records) > u128::from(u64::MAX)
    );
}

pub(crate) fn chunk_entries(bytes: &[u8]) {
    let (id, data) = bytes.split_at(bytes.len().min(8));
    let mut first = [0; 8];
    first[..id.len()].copy_from_slice(id);
    let chunk_id = u64::from_be_bytes(first);
    let (mut end, mut offset) = (0, chunk_id);
    for (number, entry) in chunk::entries(data, chunk_id).enumerate() {
        let Ok(entry) = entry else {
            return;
        };
        assert_eq!(entry.offset, offset, "entry {number}");
        let (range, records) = match entry.kind {
            EntryKind::Simple(range) => {
                assert_eq!(range.start, end + 4);
                (range, 1)
            }
            EntryKind::Batch {
                num_records,
                compression,
                data,
                ..
            } => {
                assert!(compression < 8);
                assert_eq!(data.start, end + 11);
                (data, u64::from(num_records))
            }
        };
        assert!(data.get(range.clone()).is_some());
        end = range.end;
        offset += records;
    }
    assert_eq!(end, data.len(), "nothing is left out without an error");
}

pub(crate) fn index_record(bytes: &[u8]) {
    if let Ok(record) = IndexRecord::decode(bytes) {
        assert_eq!(Some(&record.encode()[..]), bytes.get(..index::RECORD_BYTES));
    }
}

pub(crate) fn segment_name(bytes: &[u8]) {
    let name = String::from_utf8_lossy(bytes);
    if let Some(offset) = segment::parse_file_name(&name) {
        assert_eq!(segment::file_name(offset), name);
    }
}

pub(crate) fn fragment_header(bytes: &[u8]) {
    assert_eq!(
        fragment::check_header(bytes).is_ok(),
        bytes.starts_with(&fragment::HEADER)
    );
}

pub(crate) fn fragment_index(bytes: &[u8]) {
    let Ok(decoded) = fragment::decode_index(bytes) else {
        return;
    };
    let records = &decoded.records;
    let written: Vec<u8> = records
        .iter()
        .flat_map(FragmentIndexRecord::encode)
        .collect();
    assert_eq!(bytes.len(), written.len() + decoded.trailing_bytes);
    assert!(bytes.starts_with(&written) && decoded.trailing_bytes < fragment::INDEX_RECORD_BYTES);
    assert!(records.is_sorted_by(|a, b| a.offset < b.offset && a.position < b.position));
    for offset in records
        .iter()
        .flat_map(|record| [record.offset, record.offset.wrapping_sub(1)])
    {
        let linear = records.iter().rposition(|record| record.offset <= offset);
        assert_eq!(fragment::search_by_offset(records, offset), linear);
    }
    let ordered = records.is_sorted_by_key(|record| record.timestamp_ms);
    for timestamp_ms in records.iter().map(|record| record.timestamp_ms) {
        let found = fragment::search_by_timestamp(records, timestamp_ms);
        let linear = records
            .iter()
            .position(|record| record.timestamp_ms >= timestamp_ms);
        assert!(!ordered || found == linear);
        assert!(found.is_none_or(|at| at < records.len()));
    }
}

pub(crate) fn root(bytes: &[u8]) {
    let Ok(root) = Root::decode(bytes) else {
        return;
    };
    assert_eq!(root.check(), Ok(()));
    assert_eq!(root.encode(), bytes, "a root has one encoding");
    assert_eq!(
        root.is_empty(),
        root.first_offset == root.next_offset,
        "coverage"
    );
    assert!(sizes(&root.entries) <= root.total_size_bytes, "accounting");
    assert!(ascending(&root.entries), "ordering");
}

pub(crate) fn group(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let Some(kind) = Kind::from_byte(kind & 3) else {
        return;
    };
    let Ok(group) = Group::decode(kind, bytes) else {
        return;
    };
    assert_eq!(group.check(), Ok(()));
    assert_eq!(Group::decode(kind, &group.encode()), Ok(group.clone()));
    assert!(ascending(&group.entries), "ordering");
    assert!(kind != Kind::Fragment && group.entries.iter().all(|entry| entry.kind < kind));
    for other in [
        Kind::Fragment,
        Kind::Group,
        Kind::KiloGroup,
        Kind::MegaGroup,
    ] {
        assert!(other == kind || Group::decode(other, bytes).is_err());
    }
}

/// An edit of a root of ten fragments. Whatever it says, what comes out is a root, and the one that it says.
pub(crate) fn edit(bytes: &[u8]) {
    let Ok(edit) = RootEdit::decode(bytes) else {
        return;
    };
    assert_eq!(edit.encode(), bytes, "an edit has one encoding");
    assert_eq!(edit.encoded_bytes(), bytes.len());
    assert!(bytes.len() <= MAX_EDIT_BYTES);
    let changes = &edit.changes;
    assert!(changes.iter().all(|change| ascending(&change.entries)));
    let entries = (0..10).map(|number| Entry {
        first_offset: number,
        first_timestamp_ms: 1,
        last_timestamp_ms: 1,
        kind: Kind::Fragment,
        size_bytes: 1,
        uid: 1,
    });
    let known = Root {
        next_offset: 10,
        total_size_bytes: 10,
        first_timestamp_ms: 1,
        first_last_timestamp_ms: 1,
        entries: entries.collect(),
        ..Root::empty_at(0)
    };
    let [from, to] = [1, 2].map(|revision| Pointer {
        epoch: 1,
        uid: 1,
        revision,
    });
    if let Ok(result) = follow::follow(Some((from, &known)), from, to, bytes) {
        assert_eq!(result.check(), Ok(()));
        assert_eq!(crc::crc32(&result.encode()), edit.root_crc);
        let most = known.entries.len() + bytes.len() / ENTRY_BYTES;
        assert!(result.entries.len() <= most);
        if let Some(bytes) = follow::between(&known, &result) {
            let again = follow::follow(Some((from, &known)), from, to, &bytes);
            assert_eq!(again, Ok(result));
        }
    }
}

pub(crate) fn key(bytes: &[u8]) {
    let key = String::from_utf8_lossy(bytes);
    for space in [KeySpace::default(), KeySpace::new("")] {
        if let Some(parsed) = space.parse(&key) {
            assert_eq!(space.object(&parsed.stream_id, parsed.object), key);
            assert!(key.starts_with(&space.stream_prefix(&parsed.stream_id)));
        }
    }
}

pub(crate) fn checksum_text(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(checksum) = crc::from_base64(&text) {
        assert_eq!(crc::to_base64(checksum), text);
    }
    // The same bytes, cut anywhere, add up.
    let (a, b) = bytes.split_at(bytes.len() / 3);
    let combined = crc::combine(crc::crc32(a), crc::crc32(b), b.len() as u64);
    assert_eq!(combined, crc::crc32(bytes));
}

fn sizes(entries: &[Entry]) -> u128 {
    entries
        .iter()
        .map(|entry| u128::from(entry.size_bytes))
        .sum()
}

fn ascending(entries: &[Entry]) -> bool {
    entries.is_sorted_by(|a, b| a.first_offset < b.first_offset)
}
