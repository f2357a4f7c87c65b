//! Round trips, refusals, and bytes of a known root.

use super::*;
use proptest::prelude::*;

fn fragment(first_offset: u64, size_bytes: u64) -> Entry {
    Entry {
        first_offset,
        first_timestamp_ms: 1,
        last_timestamp_ms: 2,
        kind: Kind::Fragment,
        size_bytes,
        uid: 0xdead_beef,
    }
}

fn flat(entries: Vec<Entry>, next_offset: u64) -> Root {
    Root {
        first_offset: entries[0].first_offset,
        next_offset,
        first_timestamp_ms: 1,
        first_last_timestamp_ms: 2,
        total_size_bytes: entries
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum(),
        entries,
    }
}

fn any_root() -> impl Strategy<Value = Root> {
    let step = (
        1u64..1 << 40,
        0..=MAX_ENTRY_SIZE_BYTES,
        any::<i64>(),
        any::<i64>(),
        any::<u32>(),
    );
    (any::<u32>(), prop::collection::vec(step, 0..20)).prop_map(|(start, steps)| {
        let (mut next, mut root) = (u64::from(start), Root::empty_at(u64::from(start)));
        for (length, size_bytes, first_timestamp_ms, last_timestamp_ms, uid) in steps {
            root.entries.push(Entry {
                first_offset: next,
                first_timestamp_ms,
                last_timestamp_ms,
                kind: Kind::Fragment,
                size_bytes,
                uid,
            });
            root.total_size_bytes += u128::from(size_bytes);
            next += length;
        }
        root.next_offset = next;
        root
    })
}

#[test]
fn bytes_of_a_known_root() {
    let root = Root {
        total_size_bytes: (1 << 69) + 0x01_0203_0405,
        ..flat(vec![fragment(7, 0x01_0203_0405)], 9)
    };
    let bytes = root.encode();
    assert_eq!(&bytes[..16], b"OSIR\0\0\0\x01\0\0\0\0\0\0\0\x07");
    assert_eq!(&bytes[16..24], &9u64.to_be_bytes());
    assert_eq!(
        &bytes[24..40],
        &[1i64.to_be_bytes(), 2i64.to_be_bytes()].concat()
    );
    assert_eq!(&bytes[40..49], &[0x20, 0, 0, 0, 1, 2, 3, 4, 5]);
    assert_eq!(&bytes[49..57], &7u64.to_be_bytes());
    assert_eq!(&bytes[73..], &[0, 1, 2, 3, 4, 5, 0xde, 0xad, 0xbe, 0xef]);
    assert_eq!(bytes.len(), HEADER_BYTES + ENTRY_BYTES);
    // The total was only chosen to fill the field: a flat root must add up.
    assert_eq!(Root::decode(&bytes), Err(RootError::Sizes));
}

#[test]
fn the_empty_root_has_the_sentinels() {
    let bytes = Root::empty_at(0).encode();
    assert_eq!(bytes.len(), HEADER_BYTES);
    assert_eq!(&bytes[24..40], &[0xff; 16]);
    assert_eq!(Root::decode(&bytes), Ok(Root::empty_at(0)));
}

#[test]
fn refuses_what_it_does_not_know() {
    let good = flat(vec![fragment(7, 5)], 9).encode();
    let mut version = good.clone();
    version[7] = 2;
    assert_eq!(Root::decode(&version), Err(RootError::Version(2)));
    let mut padding = good.clone();
    padding[40] = 0x40;
    assert_eq!(Root::decode(&padding), Err(RootError::TotalSize));
    let mut kind = good.clone();
    kind[73] = 4;
    assert_eq!(
        Root::decode(&kind),
        Err(RootError::Kind { entry: 0, kind: 4 })
    );
    assert_eq!(Root::decode(&good[..82]), Err(RootError::PartialEntry(33)));
    assert_eq!(Root::decode(&good[..48]), Err(RootError::TooShort));
    assert_eq!(Root::decode(b""), Err(RootError::TooShort));
    assert_eq!(Root::decode(b"OSIG"), Err(RootError::Magic));
}

#[test]
fn well_formedness() {
    let good = flat(vec![fragment(7, 5), fragment(9, 6)], 11);
    assert_eq!(good.check(), Ok(()));
    assert_eq!(
        Root {
            first_offset: 12,
            ..good.clone()
        }
        .check(),
        Err(RootError::Range)
    );
    assert_eq!(
        Root {
            first_offset: 11,
            ..good.clone()
        }
        .check(),
        Err(RootError::Emptiness)
    );
    assert_eq!(
        Root {
            next_offset: 1,
            ..Root::empty_at(0)
        }
        .check(),
        Err(RootError::Emptiness)
    );
    assert_eq!(
        Root {
            total_size_bytes: 1,
            ..Root::empty_at(0)
        }
        .check(),
        Err(RootError::Sizes)
    );
    assert_eq!(
        Root {
            first_offset: 8,
            ..good.clone()
        }
        .check(),
        Err(RootError::Order(0))
    );
    assert_eq!(
        Root {
            next_offset: 9,
            ..good.clone()
        }
        .check(),
        Err(RootError::Order(1))
    );
    assert_eq!(
        Root {
            total_size_bytes: 12,
            ..good.clone()
        }
        .check(),
        Err(RootError::Sizes)
    );
    assert_eq!(
        flat(vec![fragment(7, 5), fragment(7, 6)], 11).check(),
        Err(RootError::Order(1))
    );
    assert_eq!(
        flat(vec![fragment(7, 1 << 40)], 11).check(),
        Err(RootError::EntrySize(0))
    );
}

#[test]
fn a_leading_group_may_be_partly_expired() {
    let group = Entry {
        kind: Kind::Group,
        size_bytes: 0,
        ..fragment(7, 0)
    };
    let root = Root {
        first_offset: 8,
        total_size_bytes: 100,
        ..flat(vec![group, fragment(9, 6)], 11)
    };
    assert_eq!(root.check(), Ok(()));
    assert_eq!(Root::decode(&root.encode()), Ok(root.clone()));
    assert_eq!(
        Root {
            total_size_bytes: 5,
            ..root
        }
        .check(),
        Err(RootError::Sizes)
    );
}

#[test]
fn groups_have_a_height() {
    let group = Group {
        kind: Kind::Group,
        first_offset: 7,
        first_timestamp_ms: 1,
        entries: vec![fragment(7, 5), fragment(9, 6)],
    };
    assert_eq!(&group.encode()[..8], b"OSIG\0\0\0\x01");
    assert_eq!(group.last_timestamp_ms(), 2);
    assert_eq!(
        Group::decode(Kind::Group, &group.encode()),
        Ok(group.clone())
    );
    assert_eq!(
        Group::decode(Kind::KiloGroup, &group.encode()),
        Err(RootError::Magic)
    );
    assert_eq!(
        Group::decode(Kind::Fragment, &group.encode()),
        Err(RootError::Magic)
    );
    let kilo = Group {
        kind: Kind::KiloGroup,
        ..group.clone()
    };
    assert_eq!(
        Group::decode(Kind::KiloGroup, &kilo.encode()),
        Err(RootError::Kind { entry: 0, kind: 0 })
    );
    assert_eq!(
        Group {
            entries: vec![],
            ..group
        }
        .check(),
        Err(RootError::Emptiness)
    );
}

proptest! {
    #[test]
    fn root_round_trip(root in any_root()) {
        prop_assert_eq!(root.check(), Ok(()));
        prop_assert_eq!(Root::decode(&root.encode()), Ok(root));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..4) {
        let _ = Root::decode(&bytes);
        let _ = Group::decode(Kind::from_byte(kind).unwrap(), &bytes);
    }

    #[test]
    fn a_damaged_root_is_refused_or_well_formed(root in any_root(), at: prop::sample::Index, value: u8) {
        let mut bytes = root.encode();
        let at = at.index(bytes.len());
        bytes[at] = value;
        if let Ok(root) = Root::decode(&bytes) {
            prop_assert_eq!(root.check(), Ok(()));
            prop_assert_eq!(root.encode(), bytes);
        }
    }
}
