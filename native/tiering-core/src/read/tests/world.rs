//! A bucket in memory and a driver that answers when the test says so.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType, HEADER_BYTES};
use log_format::crc::crc32;
use log_format::fragment::{FragmentIndexRecord, HEADER};
use log_format::manifest::{Entry, Group, Kind, Root};

use crate::failure::Failure;
use crate::read::*;

/// Number of records and length of the data of one chunk.
pub type ChunkSpec = (u32, usize);

#[derive(Debug, Clone)]
pub struct Written {
    pub header: ChunkHeader,
    pub bytes: Bytes,
}

/// Objects by first offset and uid, and the manifest that names them.
#[derive(Debug, Clone)]
pub struct World {
    pub objects: BTreeMap<(u64, u32), Bytes>,
    pub chunks: Vec<Written>,
    pub root: Option<Arc<Root>>,
}

impl World {
    /// One fragment per inner list; chunk `n` has timestamp `10 * n`.
    pub fn new(first_offset: u64, layout: &[Vec<ChunkSpec>]) -> Self {
        let mut world = Self {
            objects: BTreeMap::new(),
            chunks: Vec::new(),
            root: None,
        };
        let mut next_offset = first_offset;
        let mut entries = Vec::new();
        for (number, specs) in layout.iter().enumerate() {
            let uid = u32::try_from(number).expect("small") + 1;
            entries.push(world.add_fragment(&mut next_offset, uid, specs));
        }
        world.root = Some(Arc::new(root_of(first_offset, next_offset, entries)));
        world
    }

    pub fn add_fragment(&mut self, next_offset: &mut u64, uid: u32, specs: &[ChunkSpec]) -> Entry {
        let first_offset = *next_offset;
        let (mut object, mut index) = (HEADER.to_vec(), Vec::new());
        let timestamp_of = |number: usize| 10 * i64::try_from(number).expect("small");
        let first_timestamp_ms = timestamp_of(self.chunks.len());
        for (num_records, data_bytes) in specs {
            let number = self.chunks.len();
            let data: Vec<u8> = (0..*data_bytes)
                .map(|byte| (byte * 7 + number) as u8)
                .collect();
            let filter = vec![0xf1; number % 3];
            let trailer = vec![0x77; number % 2];
            let header = ChunkHeader {
                chunk_type: if number % 5 == 4 {
                    ChunkType::TrackingDelta
                } else {
                    ChunkType::User
                },
                num_entries: 1,
                num_records: *num_records,
                timestamp_ms: timestamp_of(number),
                epoch: 3,
                chunk_id: *next_offset,
                data_crc: crc32(&data),
                data_bytes: u32::try_from(data.len()).expect("small"),
                trailer_bytes: u32::try_from(trailer.len()).expect("small"),
                filter_bytes: u8::try_from(filter.len()).expect("small"),
            };
            let bytes = [&header.encode()[..], &filter, &data, &trailer].concat();
            let position = u32::try_from(object.len() - HEADER.len()).expect("small");
            index.extend(
                FragmentIndexRecord {
                    offset: *next_offset,
                    timestamp_ms: header.timestamp_ms,
                    position,
                }
                .encode(),
            );
            object.extend(&bytes);
            *next_offset += u64::from(*num_records);
            self.chunks.push(Written {
                header,
                bytes: Bytes::from(bytes),
            });
        }
        let size_bytes = (object.len() - HEADER.len()) as u64;
        object.extend(index);
        self.objects
            .insert((first_offset, uid), Bytes::from(object));
        Entry {
            first_offset,
            first_timestamp_ms,
            last_timestamp_ms: timestamp_of(self.chunks.len() - 1),
            kind: Kind::Fragment,
            size_bytes,
            uid,
        }
    }

    pub fn root(&self) -> &Root {
        self.root.as_ref().expect("resolved")
    }

    /// Replaces the first `count` entries of the root by a group of them.
    pub fn rebalance(&mut self, kind: Kind, count: usize) {
        let mut root = self.root().clone();
        let entries: Vec<Entry> = root.entries.drain(..count).collect();
        let uid = 0x6000_0000 + u32::from(kind.to_byte());
        let entry = Entry {
            kind,
            size_bytes: 0,
            uid,
            last_timestamp_ms: entries.last().expect("some").last_timestamp_ms,
            ..entries[0]
        };
        let group = Group {
            kind,
            first_offset: entry.first_offset,
            first_timestamp_ms: entry.first_timestamp_ms,
            entries,
        };
        self.objects
            .insert((entry.first_offset, uid), Bytes::from(group.encode()));
        root.entries.insert(0, entry);
        root.check().expect("well-formed");
        self.root = Some(Arc::new(root));
    }

    /// Retention: removes the first `count` fragments of a flat manifest and their objects.
    pub fn expire(&mut self, count: usize) {
        let mut root = self.root().clone();
        for entry in root.entries.drain(..count) {
            self.objects.remove(&(entry.first_offset, entry.uid));
        }
        let first_offset = root
            .entries
            .first()
            .map_or(root.next_offset, |entry| entry.first_offset);
        self.root = Some(Arc::new(root_of(
            first_offset,
            root.next_offset,
            root.entries,
        )));
    }

    /// The upload goes on.
    /// Cuts the manifest back to this offset, in the middle of a fragment whose object stays as it is.
    pub fn cut_back(&mut self, next_offset: u64) {
        let mut root = self.root().clone();
        root.entries
            .retain(|entry| entry.first_offset < next_offset);
        root.next_offset = next_offset;
        self.root = Some(Arc::new(root));
    }

    pub fn append(&mut self, specs: &[ChunkSpec]) {
        let root = self.root().clone();
        let (mut entries, mut next_offset) = (root.entries, root.next_offset);
        let uid = 0x1000 + u32::try_from(entries.len()).expect("small");
        entries.push(self.add_fragment(&mut next_offset, uid, specs));
        self.root = Some(Arc::new(root_of(root.first_offset, next_offset, entries)));
    }

    /// Whether this byte of a fragment is covered by a chunk's CRC.
    pub fn is_data(&self, first_offset: u64, position: u64) -> bool {
        let mut start = 8;
        for chunk in self
            .chunks
            .iter()
            .filter(|chunk| chunk.header.chunk_id >= first_offset)
        {
            let end = start + chunk.header.total_bytes();
            if position < end {
                let data_start = start + chunk.header.lead_bytes() as u64;
                return (data_start..data_start + u64::from(chunk.header.data_bytes))
                    .contains(&position);
            }
            start = end;
        }
        false
    }

    /// What a reader that begins at `offset` must deliver.
    pub fn chunks_from(&self, offset: u64) -> Vec<Bytes> {
        self.chunks
            .iter()
            .filter(|chunk| chunk.header.next_offset().is_some_and(|next| next > offset))
            .map(|chunk| chunk.bytes.clone())
            .collect()
    }
}

fn root_of(first_offset: u64, next_offset: u64, entries: Vec<Entry>) -> Root {
    let root = Root {
        first_offset,
        next_offset,
        first_timestamp_ms: entries.first().map_or(-1, |entry| entry.first_timestamp_ms),
        first_last_timestamp_ms: entries.first().map_or(-1, |entry| entry.last_timestamp_ms),
        total_size_bytes: entries
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum(),
        entries,
    };
    root.check().expect("well-formed");
    root
}

/// A request that the machine made and nobody answered yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub id: u64,
    pub object: (u64, u32),
    pub start: u64,
    pub end: u64,
    pub what: What,
    /// When it was asked for.
    pub asked_ms: u64,
}

/// How long the store takes for a range, however many there are at once.
const RANGE_MS: u64 = 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Manifest,
    Group,
    Index,
    Range,
}

/// Reader, queue, clock, and what the machine asked for.
pub struct Run {
    pub world: World,
    pub reader: ReadMachine,
    pub queue: ReadyQueue,
    pub now_ms: u64,
    pub requests: Vec<Request>,
    /// Every request so far, but for look-ups of the manifest.
    pub asked: Vec<Request>,
    /// Everything was taken back and the consumer has not asked since.
    pub rests: bool,
    pub delivered: VecDeque<Bytes>,
    pub finish: Option<Finish>,
    /// What somebody should look at.
    pub alarms: Vec<(FailureKind, u64)>,
    pub max_outstanding: u64,
    /// Ranges that were asked of the store itself.
    pub past_cache: usize,
}

impl Run {
    pub fn new(world: World, settings: Settings, start: Start) -> Self {
        let mut run = Self {
            world,
            reader: ReadMachine::new(0, settings, start, 11),
            queue: ReadyQueue::new(),
            now_ms: 0,
            requests: Vec::new(),
            asked: Vec::new(),
            rests: false,
            delivered: VecDeque::new(),
            finish: None,
            alarms: Vec::new(),
            max_outstanding: 0,
            past_cache: 0,
        };
        run.drain();
        run
    }

    pub fn handle(&mut self, event: Event) {
        self.reader.handle(self.now_ms, event);
        self.drain();
    }

    pub fn drain(&mut self) {
        while let Some(effect) = self.reader.poll_effect() {
            assert!(self.finish.is_none(), "{effect:?} after the end");
            let asked_ms = self.now_ms;
            let request = |id, object, start, end, what| Request {
                asked_ms,
                id,
                object,
                start,
                end,
                what,
            };
            let request = match effect {
                Effect::RefreshManifest { id } => request(id, (0, 0), 0, 0, What::Manifest),
                Effect::GetGroup { id, group, .. } => request(
                    id,
                    (group.first_offset, group.uid),
                    0,
                    u64::MAX,
                    What::Group,
                ),
                Effect::GetIndex {
                    id,
                    fragment,
                    start,
                    end_max,
                    ..
                } => request(
                    id,
                    (fragment.first_offset, fragment.uid),
                    start,
                    end_max,
                    What::Index,
                ),
                Effect::GetRange {
                    id,
                    fragment,
                    start,
                    end,
                    cache,
                } => {
                    self.past_cache += usize::from(cache == CacheUse::Bypassed);
                    assert!(start >= 8 && start < end && end <= 8 + fragment.data_bytes);
                    request(
                        id,
                        (fragment.first_offset, fragment.uid),
                        start,
                        end,
                        What::Range,
                    )
                }
                Effect::Cancel { id } => {
                    let before = self.requests.len();
                    self.requests.retain(|request| request.id != id);
                    assert_eq!(
                        before,
                        self.requests.len() + 1,
                        "what is cancelled was running"
                    );
                    continue;
                }
                Effect::Alarm { kind, offset } => {
                    self.alarms.push((kind, offset));
                    continue;
                }
                Effect::Deliver(chunk) => {
                    assert_eq!(chunk.bytes.len() as u64, chunk.header.total_bytes());
                    let _ = self.queue.push(chunk);
                    continue;
                }
                Effect::Finish(finish) => {
                    let _ = self.queue.finish(finish.clone());
                    self.finish = Some(finish);
                    self.requests.clear();
                    continue;
                }
            };
            if request.what != What::Manifest {
                self.asked.push(request.clone());
            }
            self.requests.push(request);
        }
        assert_eq!(invariants::violated(&self.reader), Vec::<&str>::new());
        self.max_outstanding = self.max_outstanding.max(self.reader.outstanding_bytes());
    }

    /// Others need the memory, as the driver says it.
    pub fn take_back(&mut self, wanted: bool) {
        if self.finish.is_some() {
            return;
        }
        self.report_consumed();
        let chunks = self.queue.take_all();
        let first = chunks
            .front()
            .map(|chunk| (chunk.header.chunk_id, chunk.position));
        self.rests = !wanted;
        self.handle(Event::TakenBack { first, wanted });
    }

    /// What the store would say.
    pub fn truth(&self, request: &Request) -> Result<Bytes, Failure> {
        let Some(object) = self.world.objects.get(&request.object) else {
            return Err(Failure::NotFound("no such key".to_owned()));
        };
        let end = usize::try_from(request.end)
            .unwrap_or(usize::MAX)
            .min(object.len());
        let start = usize::try_from(request.start).expect("small");
        if start >= end {
            return Err(Failure::Transient("range outside".to_owned()));
        }
        Ok(object.slice(start..end))
    }

    pub fn take_request(&mut self, what: What) -> Request {
        let index = self
            .requests
            .iter()
            .position(|request| request.what == what);
        self.requests
            .remove(index.unwrap_or_else(|| panic!("no {what:?} among {:?}", self.requests)))
    }

    pub fn answer(&mut self, request: &Request, outcome: Result<Bytes, Failure>) {
        self.requests.retain(|other| other.id != request.id);
        if request.what == What::Range {
            self.now_ms = self.now_ms.max(request.asked_ms + RANGE_MS);
        }
        self.handle(match request.what {
            What::Manifest => Event::Manifest {
                id: request.id,
                view: self
                    .world
                    .root
                    .clone()
                    .map_or(ManifestView::Unknown, ManifestView::Resolved),
            },
            What::Group | What::Index | What::Range => Event::Fetched {
                id: request.id,
                outcome,
            },
        });
    }

    /// The first `length` bytes of a range come; the answer goes on.
    pub fn answer_in_part(&mut self, request: &Request, length: u64) {
        let bytes = self.truth(request).expect("there");
        let bytes = bytes.slice(..usize::try_from(length).expect("small"));
        for other in &mut self.requests {
            if other.id == request.id {
                other.start += length;
            }
        }
        self.requests
            .retain(|other| other.what != What::Range || other.start < other.end);
        self.handle(Event::Part {
            id: request.id,
            bytes,
        });
    }

    pub fn answer_truly(&mut self, what: What) {
        let request = self.take_request(what);
        let outcome = self.truth(&request);
        self.answer(&request, outcome);
    }

    pub fn fail(&mut self, what: What, failure: Failure) {
        let request = self.take_request(what);
        self.answer(&request, Err(failure));
    }

    /// The consumer takes what there is.
    pub fn consume(&mut self) -> ReadOutcome {
        loop {
            match self.queue.take(u64::MAX) {
                ReadOutcome::Chunk { bytes, .. } => self.delivered.push_back(bytes.to_bytes()),
                outcome => {
                    self.report_consumed();
                    self.ask();
                    return outcome;
                }
            }
        }
    }

    /// The consumer got nothing.
    pub fn ask(&mut self) {
        if std::mem::take(&mut self.rests) && self.finish.is_none() {
            self.handle(Event::Wanted);
        }
    }

    pub fn report_consumed(&mut self) {
        let (chunks, bytes) = self.queue.drain_taken();
        if chunks > 0 && self.finish.is_none() {
            self.handle(Event::Consumed { chunks, bytes });
        }
    }

    /// Jumps to the machine's next deadline.
    pub fn sleep(&mut self) {
        self.now_ms = self
            .now_ms
            .max(self.reader.poll_timeout().expect("a deadline"));
        self.handle(Event::Tick);
    }

    /// Answers truly, consumes everything, sleeps where the machine sleeps, until it ends.
    pub fn run_to_the_end(&mut self) -> ReadOutcome {
        for _ in 0..20_000 {
            match self.consume() {
                ReadOutcome::Wait => {}
                outcome => return outcome,
            }
            if let Some(request) = self.requests.first().cloned() {
                let outcome = self.truth(&request);
                self.answer(&request, outcome);
            } else if self.finish.is_none()
                && self.reader.poll_timeout().is_some()
                && self.queue.is_empty()
            {
                self.sleep();
            }
        }
        panic!("the reader does not end: {:?}", self.reader);
    }

    pub fn delivered(&self) -> Vec<Bytes> {
        self.delivered.iter().cloned().collect()
    }

    pub fn ranges(&self) -> Vec<(u64, u64, u64)> {
        self.asked
            .iter()
            .filter(|request| request.what == What::Range)
            .map(|request| (request.object.0, request.start, request.end))
            .collect()
    }

    pub fn count(&self, what: What) -> usize {
        self.asked
            .iter()
            .filter(|request| request.what == what)
            .count()
    }
}

pub fn small() -> Settings {
    Settings {
        read_request_bytes: 400,
        read_ahead_bytes: 1600,
        first_request_bytes: 150,
        max_depth: 4,
        ..Settings::default()
    }
}

pub fn header_of(bytes: &[u8]) -> ChunkHeader {
    ChunkHeader::decode(&bytes[..HEADER_BYTES]).expect("a header")
}
