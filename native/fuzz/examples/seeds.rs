//! Writes the hand-made part of the corpus: one right input per shape, and the ones at the edges. Inputs that `make fuzz`
//! found are added beside them under their own names.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::crc::{crc32, to_base64};
use log_format::fragment::{self, FragmentIndexRecord};
use log_format::index::IndexRecord;
use log_format::key::{KeySpace, Object};
use log_format::manifest::{Entry, Group, Kind, Root};
use log_format::segment;
use tiering_core::manifest::follow;

fn save(target: &str, name: &str, bytes: impl AsRef<[u8]>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(target);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
}

fn header(chunk_id: u64, num_records: u32, data: &[u8]) -> ChunkHeader {
    ChunkHeader {
        chunk_type: ChunkType::User,
        num_entries: 1,
        num_records,
        timestamp_ms: chunk_id as i64,
        epoch: 1,
        chunk_id,
        data_crc: crc32(data),
        data_bytes: data.len() as u32,
        trailer_bytes: 0,
        filter_bytes: 0,
    }
}

fn simple(record: &[u8]) -> Vec<u8> {
    [&(record.len() as u32).to_be_bytes(), record].concat()
}

fn batch(first: u8, num_records: u16, length: u32, records: &[u8]) -> Vec<u8> {
    let (count, length) = (num_records.to_be_bytes(), length.to_be_bytes());
    [&[first], &count[..], &9u32.to_be_bytes(), &length, records].concat()
}

fn entry(first_offset: u64, kind: Kind, size_bytes: u64, uid: u32) -> Entry {
    Entry {
        first_offset,
        first_timestamp_ms: first_offset as i64,
        last_timestamp_ms: first_offset as i64 + 1,
        kind,
        size_bytes,
        uid,
    }
}

fn chunks() {
    let whole = ChunkHeader {
        filter_bytes: 255,
        trailer_bytes: 7,
        ..header(1000, 10, b"data")
    };
    save("chunk_header", "whole", whole.encode());
    let overflow = ChunkHeader {
        chunk_id: u64::MAX,
        data_bytes: u32::MAX,
        trailer_bytes: u32::MAX,
        num_records: u32::MAX,
        ..whole
    };
    save("chunk_header", "overflow", overflow.encode());
    save("chunk_header", "truncated", &whole.encode()[..47]);

    let at = |offset: u64, data: &[u8]| [&offset.to_be_bytes(), data].concat();
    let mixed = [simple(b"one"), batch(0x90, 3, 4, b"gzip"), simple(b"")].concat();
    save("chunk_entries", "mixed", at(7, &mixed));
    save("chunk_entries", "truncated", at(7, &mixed[..12]));
    save("chunk_entries", "offset_overflow", at(u64::MAX, &mixed));
    save(
        "chunk_entries",
        "length_overflow",
        at(0, &batch(0xf0, 65535, u32::MAX, b"x")),
    );
    save("chunk_entries", "long", at(0, &[0x7f, 0xff, 0xff, 0xff, 0]));

    let record = IndexRecord {
        chunk_id: 5,
        timestamp_ms: -1,
        epoch: u64::MAX,
        position: u32::MAX,
        chunk_type: ChunkType::TrackingSnapshot,
    };
    save("index_record", "whole", record.encode());
    save("index_record", "truncated", &record.encode()[..28]);
    save("index_record", "unknown_type", [0xff; 29]);
}

fn names() {
    save("segment_name", "whole", segment::file_name(42));
    save("segment_name", "largest", segment::file_name(u64::MAX));
    save(
        "segment_name",
        "overflow",
        "18446744073709551616.segment", // 2^64
    );
    save("segment_name", "sign", "+0000000000000000042.segment");
    let keys = KeySpace::default();
    let uid = 0xdead_beef;
    let first_offset = u64::MAX;
    for (name, object) in [
        ("fragment", Object::Fragment { first_offset, uid }),
        (
            "group",
            Object::Group {
                kind: Kind::MegaGroup,
                first_offset,
                uid,
            },
        ),
        (
            "root",
            Object::Root {
                epoch: u64::MAX,
                uid,
            },
        ),
    ] {
        save("key", name, keys.object("__s_1", object));
    }
    save(
        "key",
        "epoch_overflow",
        "rabbitmq/stream/s/metadata/root.18446744073709551616.00000000.manifest",
    );
    save("key", "no_stream", "rabbitmq/stream//data/x");
    save("checksum_text", "whole", to_base64(crc32(b"123456789")));
    save("checksum_text", "loose_bits", "y/Q5Jh==");
}

fn fragments() {
    save("fragment_header", "whole", fragment::HEADER);
    save("fragment_header", "version", b"OSIF\0\0\0\x02");
    save("fragment_header", "truncated", b"OSIF\0\0\0");
    let record = |offset, timestamp_ms, position| {
        FragmentIndexRecord {
            offset,
            timestamp_ms,
            position,
        }
        .encode()
    };
    let three = [record(1, 10, 0), record(5, 10, 60), record(9, 9, 200)].concat();
    save("fragment_index", "whole", &three);
    save("fragment_index", "trailing", &three[..55]);
    save("fragment_index", "truncated", &three[..19]);
    let ends = [
        record(0, i64::MIN, 0),
        record(u64::MAX, i64::MAX, u32::MAX),
        record(u64::MAX, 0, u32::MAX),
    ]
    .concat();
    save("fragment_index", "ends", &ends[..40]);
    save("fragment_index", "out_of_order", ends);
}

fn manifests() -> Vec<u8> {
    let root = Root {
        first_offset: 15,
        next_offset: 50,
        first_timestamp_ms: 15,
        first_last_timestamp_ms: -1,
        total_size_bytes: 1 << 69,
        entries: vec![
            entry(10, Kind::Group, 0, 1),
            entry(20, Kind::Fragment, (1 << 40) - 1, u32::MAX),
            entry(40, Kind::Fragment, 7, 2),
        ],
    };
    assert_eq!(root.check(), Ok(()));
    let bytes = root.encode();
    save("root", "whole", &bytes);
    save("root", "empty", Root::empty_at(u64::MAX).encode());
    save("root", "inside_an_entry", &bytes[..bytes.len() - 1]);
    let mut total = bytes.clone();
    total[40] = 0xff;
    save("root", "total_overflow", total);
    let mut version = bytes;
    version[7] = 2;
    save("root", "version", version);

    let group = Group {
        kind: Kind::Group,
        first_offset: 0,
        first_timestamp_ms: 0,
        entries: vec![
            entry(0, Kind::Fragment, 100, 1),
            entry(2, Kind::Fragment, 100, 1),
        ],
    };
    let kilo = Group {
        kind: Kind::KiloGroup,
        entries: vec![entry(0, Kind::Group, 0, 1)],
        ..group.clone()
    };
    save("group", "group", [&[1], &group.encode()[..]].concat());
    save("group", "kilo_group", [&[2], &kilo.encode()[..]].concat());
    save("group", "other_height", [&[3], &kilo.encode()[..]].concat());
    save(
        "group",
        "no_entries",
        [&[1], &group.encode()[..49]].concat(),
    );
    group.encode()
}

/// A fragment of chunks of two records each, and the length of its chunks.
fn fragment(first_offset: u64, count: u64, wrong_crc: bool) -> (Vec<u8>, u16) {
    let (mut chunks, mut index) = (Vec::new(), Vec::new());
    for number in 0..count {
        let data = [simple(b"first"), simple(&[number as u8; 30])].concat();
        let mut header = header(first_offset + 2 * number, 2, &data);
        header.data_crc ^= u32::from(wrong_crc && number == 1);
        index.extend(
            FragmentIndexRecord {
                offset: header.chunk_id,
                timestamp_ms: header.timestamp_ms,
                position: chunks.len() as u32,
            }
            .encode(),
        );
        chunks.extend(header.encode());
        chunks.extend(data);
    }
    let size = chunks.len() as u16;
    ([&fragment::HEADER[..], &chunks, &index].concat(), size)
}

fn remote(group: &[u8]) {
    let input = |flags: u8, start: u8, objects: &[(u8, u16, &[u8])]| {
        let mut bytes = vec![flags | (objects.len() as u8 - 1) << 3, start];
        for (span, size, object) in objects {
            bytes.push(*span - 1);
            bytes.extend(size.to_be_bytes());
            bytes.extend((object.len() as u16).to_be_bytes());
        }
        for (_, _, object) in objects {
            bytes.extend(*object);
        }
        bytes
    };
    let ((a, a_size), (b, b_size)) = (fragment(0, 3, false), fragment(6, 2, false));
    let (wrong, _) = fragment(0, 3, true);
    let two = [(6, a_size, &a[..]), (4, b_size, &b[..])];
    save("read", "two_fragments", input(0, 0, &two));
    save("read", "inside", input(0x20, 100, &two));
    save("read", "timestamp", input(1, 3, &two));
    save("read", "wrong_crc", input(0, 0, &[(6, a_size, &wrong)]));
    save(
        "read",
        "wrong_crc_unchecked",
        input(2, 0, &[(6, a_size, &wrong)]),
    );
    save("read", "truncated", input(0, 0, &[(6, a_size, &a[..70])]));
    save(
        "read",
        "fewer_records_than_said",
        input(0, 0, &[(9, a_size, &a)]),
    );
    save("read", "no_bytes", input(0, 0, &[(1, 0, b"")]));
    let (c, c_size) = fragment(4, 2, false);
    save(
        "read",
        "group",
        input(4, 0, &[(4, 0, group), (4, c_size, &c)]),
    );
}

/// Edits of the root that the target knows: ten fragments of one record and one byte each.
fn edits() {
    let fragment = |offset: u64| Entry {
        first_timestamp_ms: 1,
        last_timestamp_ms: 1,
        ..entry(offset, Kind::Fragment, 1, 1)
    };
    let of = |range: std::ops::Range<u64>| Root {
        first_offset: range.start,
        next_offset: range.end,
        first_timestamp_ms: 1,
        first_last_timestamp_ms: 1,
        total_size_bytes: u128::from(range.end - range.start),
        entries: range.map(fragment).collect(),
    };
    let known = of(0..10);
    let mut grouped = of(0..12);
    grouped.entries.drain(2..6);
    grouped.entries[1].kind = Kind::Group;
    grouped.entries[1].size_bytes = 0;
    assert_eq!(grouped.check(), Ok(()));
    for (name, root) in [
        ("append", of(0..11)),
        ("both_ends", of(3..12)),
        ("group", grouped),
        ("nothing_left", Root::empty_at(10)),
        ("no_change", known.clone()),
    ] {
        save("edit", name, follow::between(&known, &root).unwrap());
    }
    let append = follow::between(&known, &of(0..11)).unwrap();
    save("edit", "truncated", &append[..append.len() - 1]);
    let mut checksum = append;
    checksum[50] ^= 1;
    save("edit", "checksum", checksum);
}

fn main() {
    chunks();
    names();
    fragments();
    let group = manifests();
    edits();
    remote(&group);
}
