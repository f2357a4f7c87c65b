//! The read machine, with arbitrary bytes as what the bucket holds: it ends, and never delivers a chunk that is not one.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use log_format::chunk::ChunkHeader;
use log_format::crc::crc32;
use log_format::manifest::{Entry, Kind, Root};
use tiering_core::read::{
    Chunk, Effect, Event, FailureKind, Finish, ManifestView, ReadMachine, Settings, Start,
};
use tiering_core::upload::Failure;

/// More than a reader with 60 s of patience and waits of at least 50 ms can take; beyond it, it spins.
const MAX_STEPS: usize = 50_000;

const SHAPE_BYTES: usize = 5;

/// A bucket whose objects are slices of the input. The first bytes say how it is laid out:
///
/// ```text
/// 0   1 bit  start by timestamp
///     1 bit  CRCs are not checked
///     1 bit  the leading entry is a group (whose bytes come from the input, too)
///     2 bit  entries, less one
///     3 bit  longest request: 64 << this
/// 1   1   where to start
/// 2   5   per entry: offsets it spans less one u8, size that the manifest says u16, length of its object u16
/// -   -   the objects
/// ```
struct Bucket<'a> {
    objects: Vec<&'a [u8]>,
    root: Root,
    start: Start,
    settings: Settings,
}

impl<'a> Bucket<'a> {
    fn new(bytes: &'a [u8]) -> Option<Self> {
        let (&[flags, start], rest) = bytes.split_first_chunk()?;
        let count = usize::from(flags >> 3 & 3) + 1;
        let (shapes, mut content) = rest.split_at_checked(SHAPE_BYTES * count)?;
        let (mut objects, mut root) = (Vec::new(), Root::empty_at(0));
        for (number, shape) in shapes.chunks_exact(SHAPE_BYTES).enumerate() {
            let &[span, size_high, size_low, length_high, length_low] = shape else {
                return None;
            };
            let length = usize::from(u16::from_be_bytes([length_high, length_low]));
            let (object, after) = content.split_at(length.min(content.len()));
            objects.push(object);
            content = after;
            let leading_group = number == 0 && flags & 4 != 0;
            let size_bytes = match leading_group {
                true => 0,
                false => u64::from(u16::from_be_bytes([size_high, size_low])),
            };
            root.entries.push(Entry {
                first_offset: root.next_offset,
                first_timestamp_ms: root.next_offset as i64,
                last_timestamp_ms: (root.next_offset + u64::from(span)) as i64,
                kind: if leading_group {
                    Kind::Group
                } else {
                    Kind::Fragment
                },
                size_bytes,
                uid: number as u32,
            });
            root.next_offset += u64::from(span) + 1;
            root.total_size_bytes += u128::from(size_bytes);
        }
        root.first_timestamp_ms = 0;
        let request_bytes = 64 << (flags >> 5);
        Some(Self {
            objects,
            start: match flags & 1 {
                0 => Start::Offset(u64::from(start) * root.next_offset / 256),
                _ => Start::Timestamp(i64::from(start)),
            },
            settings: Settings {
                verify_crc: flags & 2 == 0,
                first_request_bytes: 64,
                read_request_bytes: request_bytes,
                read_ahead_bytes: request_bytes * 3,
                ..Settings::default()
            },
            root,
        })
    }

    fn read(&self, uid: u32, start: u64, end: u64) -> Result<Bytes, Failure> {
        let object = self.objects.get(uid as usize);
        let object = object.ok_or_else(|| Failure::NotFound("no such key".to_owned()))?;
        let position = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(object.len());
        let bytes = object
            .get(position(start)..position(end))
            .unwrap_or_default();
        Ok(Bytes::copy_from_slice(bytes))
    }
}

pub(crate) fn read(bytes: &[u8]) {
    let Some(bucket) = Bucket::new(bytes) else {
        return;
    };
    assert_eq!(bucket.root.check(), Ok(()), "a mistake of this target");
    let root = Arc::new(bucket.root.clone());
    let mut reader = ReadMachine::new(0, bucket.settings, bucket.start, 1);
    let (mut now_ms, mut expected) = (0, None);
    let mut answers = VecDeque::new();
    for _ in 0..MAX_STEPS {
        while let Some(effect) = reader.poll_effect() {
            let fetched = |id, outcome| Event::Fetched { id, outcome };
            match effect {
                Effect::RefreshManifest { id } => answers.push_back(Event::Manifest {
                    id,
                    view: ManifestView::Resolved(Arc::clone(&root)),
                }),
                Effect::GetGroup { id, group, .. } => {
                    answers.push_back(fetched(id, bucket.read(group.uid, 0, u64::MAX)));
                }
                Effect::GetIndex {
                    id,
                    fragment,
                    start,
                    end_max,
                    ..
                } => {
                    assert!(start == 8 + fragment.data_bytes && start < end_max);
                    answers.push_back(fetched(id, bucket.read(fragment.uid, start, end_max)));
                }
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    ..
                } => {
                    assert!(start >= 8 && start < end && end <= 8 + fragment.data_bytes);
                    let mut outcome = bucket.read(fragment.uid, start, end);
                    // Every other answer comes in two parts.
                    if let Ok(bytes) = &mut outcome
                        && id % 2 == 0
                    {
                        let bytes = bytes.split_to(bytes.len() / 2);
                        answers.push_back(Event::Part { id, bytes });
                    }
                    answers.push_back(fetched(id, outcome));
                }
                Effect::Cancel { id: cancelled } => answers.retain(
                    |event| !matches!(event, Event::Fetched { id, .. } | Event::Part { id, .. } if *id == cancelled),
                ),
                Effect::Alarm { .. } => {}
                Effect::Deliver(chunk) => {
                    check_chunk(&chunk, bucket.settings.verify_crc, &mut expected);
                    answers.push_back(Event::Consumed {
                        chunks: 1,
                        bytes: chunk.bytes.len() as u64,
                    });
                }
                Effect::Finish(finish) => {
                    assert!(!is_bug(&finish), "{finish:?}");
                    return;
                }
            }
        }
        let event = answers.pop_front().unwrap_or_else(|| {
            let due_ms = reader.poll_timeout();
            assert!(due_ms.is_some(), "the reader waits for nothing: {reader:?}");
            now_ms = now_ms.max(due_ms.unwrap_or(now_ms));
            Event::Tick
        });
        reader.handle(now_ms, event);
    }
    let stuck = true;
    assert!(!stuck, "the reader does not end: {reader:?}");
}

/// Whole, what its header says, and right after the one before.
fn check_chunk(chunk: &Chunk, verified: bool, expected: &mut Option<u64>) {
    let bytes = chunk.bytes.to_bytes();
    assert_eq!(ChunkHeader::decode(&bytes), Ok(chunk.header));
    assert_eq!(bytes.len() as u64, chunk.header.total_bytes());
    assert!(expected.is_none_or(|id| id == chunk.header.chunk_id));
    *expected = chunk.header.next_offset();
    assert!(*expected > Some(chunk.header.chunk_id));
    if verified {
        let start = chunk.header.lead_bytes();
        let data = bytes.get(start..start + chunk.header.data_bytes as usize);
        assert_eq!(data.map(crc32), Some(chunk.header.data_crc));
    }
}

fn is_bug(finish: &Finish) -> bool {
    matches!(
        finish,
        Finish::Failed {
            kind: FailureKind::Bug,
            ..
        }
    )
}
