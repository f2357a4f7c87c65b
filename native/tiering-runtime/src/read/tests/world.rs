//! The engine and the readers that the tests work with.

use super::*;

pub(super) struct WakeUps(pub(super) Mutex<Sender<()>>);

impl Wake for WakeUps {
    fn wake(&self) {
        // The test may be over.
        self.0.lock().expect("whole").send(()).ok();
    }
}

/// An engine over a stream of two fragments of chunks of about 1 kB.
pub(super) struct World {
    pub(super) engine: Engine,
    pub(super) memory: Arc<MemoryTier>,
    pub(super) faults: Arc<Faulty>,
    pub(super) gate: Arc<Gate>,
    pub(super) root: Root,
    pub(super) chunks: Vec<Bytes>,
}

pub(super) struct Reader {
    pub(super) handle: ReaderHandle,
    pub(super) wake_ups: Receiver<()>,
    pub(super) waits: usize,
    pub(super) wakes: usize,
    pub(super) read: Vec<Bytes>,
}

impl World {
    pub(super) fn new(num_chunks: u64, open: bool, change: impl FnOnce(&mut Config)) -> Self {
        Self::of_chunks(1000, num_chunks, open, change)
    }

    pub(super) fn of_chunks(
        chunk_bytes: u64,
        num_chunks: u64,
        open: bool,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let memory = Arc::new(MemoryTier::new());
        let (mut chunks, mut entries) = (Vec::new(), Vec::new());
        let half = num_chunks / 2;
        for (range, uid) in [(0..half, 1), (half..num_chunks, 2)] {
            entries.push(store_fragment(
                &memory,
                range,
                uid,
                chunk_bytes,
                &mut chunks,
            ));
        }
        let root = Root {
            first_offset: 0,
            next_offset: num_chunks,
            first_timestamp_ms: 0,
            first_last_timestamp_ms: entries[0].last_timestamp_ms,
            total_size_bytes: entries
                .iter()
                .map(|entry| u128::from(entry.size_bytes))
                .sum(),
            entries,
        };
        let faults = Arc::new(Faulty::new(Arc::clone(&memory) as Arc<_>));
        let gate = Gate::new(Arc::clone(&faults) as Arc<_>, open);
        let mut config = Config {
            bucket: "bucket".to_owned(),
            ..Config::default()
        };
        change(&mut config);
        let engine = Engine::open_with(config, Arc::clone(&gate) as Arc<_>).expect("opened");
        Self {
            engine,
            memory,
            faults,
            gate,
            root,
            chunks,
        }
    }

    pub(super) fn publish(&self) {
        let root = Arc::new(self.root.clone());
        self.engine.manifests().publish(
            STREAM,
            ResolvedManifest {
                root,
                revision: 1,
                epoch: 1,
                pointer: None,
            },
        );
    }

    pub(super) fn reader(&self, start: Start) -> Reader {
        let (sender, wake_ups) = mpsc::channel();
        let handle = self
            .engine
            .open_reader(STREAM, start, Arc::new(WakeUps(Mutex::new(sender))))
            .expect("open");
        Reader {
            handle,
            wake_ups,
            waits: 0,
            wakes: 0,
            read: Vec::new(),
        }
    }

    pub(super) fn stat(&self, name: &str) -> i64 {
        let rows = self.engine.stats();
        rows.iter()
            .find(|(row, _)| *row == name)
            .unwrap_or_else(|| panic!("no row {name}"))
            .1
    }
}

impl Reader {
    /// Takes what is there.
    pub(super) fn take(&mut self) -> ReadOutcome {
        loop {
            match self.handle.read(u64::MAX) {
                // A copy: what is kept of a chunk keeps the memory that it lies in.
                ReadOutcome::Chunk { bytes, .. } => {
                    (self.read).push(Bytes::copy_from_slice(&bytes.to_bytes()));
                }
                outcome => {
                    self.waits += usize::from(outcome == ReadOutcome::Wait);
                    return outcome;
                }
            }
        }
    }

    pub(super) fn await_wake(&mut self) {
        self.wake_ups.recv_timeout(SOON).expect("woken");
        self.wakes += 1;
    }

    pub(super) fn run_to_the_end(&mut self) -> ReadOutcome {
        loop {
            match self.take() {
                ReadOutcome::Wait => self.await_wake(),
                outcome => return outcome,
            }
        }
    }
}

pub(super) fn store_fragment(
    memory: &MemoryTier,
    offsets: Range<u64>,
    uid: u32,
    chunk_bytes: u64,
    chunks: &mut Vec<Bytes>,
) -> Entry {
    let (mut object, mut index) = (HEADER.to_vec(), Vec::new());
    for offset in offsets.clone() {
        let data: Vec<u8> = (0..chunk_bytes + offset % 7)
            .map(|byte| (byte * 31 + offset) as u8)
            .collect();
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp_ms: offset as i64,
            epoch: 1,
            chunk_id: offset,
            data_crc: crc32(&data),
            data_bytes: data.len() as u32,
            trailer_bytes: 0,
            filter_bytes: 0,
        };
        let position = (object.len() - HEADER.len()) as u32;
        index.extend(
            FragmentIndexRecord {
                offset,
                timestamp_ms: offset as i64,
                position,
            }
            .encode(),
        );
        let chunk = [&header.encode()[..], &data].concat();
        object.extend(&chunk);
        chunks.push(chunk.into());
    }
    let size_bytes = (object.len() - HEADER.len()) as u64;
    object.extend(index);
    memory.insert(&fragment_key(offsets.start, uid), object);
    Entry {
        first_offset: offsets.start,
        first_timestamp_ms: offsets.start as i64,
        last_timestamp_ms: offsets.end as i64 - 1,
        kind: Kind::Fragment,
        size_bytes,
        uid,
    }
}

pub(super) fn fragment_key(first_offset: u64, uid: u32) -> String {
    KeySpace::new("rabbitmq/stream").fragment(STREAM, first_offset, uid)
}

pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + SOON;
    while !holds() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}
