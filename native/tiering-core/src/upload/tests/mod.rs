//! Every interleaving that has gone wrong somewhere, as a sequence of calls. `bug_N` is row N of the field's bug list.

mod drain;
mod model;
mod persist;
mod recovery;
mod regressions;
mod resolve;
mod retention;
mod transfers;
mod tree;

use super::*;
use crate::fragment_assembly::FragmentPlan;
use crate::manifest::edit::tests::root_of;
use log_format::chunk::{ChunkHeader, ChunkType};

const EPOCH: u64 = 5;
/// Records per chunk of the test log; chunk ids are its multiples.
const RECORDS: u64 = 10;
const DATA_BYTES: u32 = 100;
const CHUNK_BYTES: u64 = 148;

/// Two chunks, twenty records, per fragment; two edits per persist.
fn settings() -> Settings {
    Settings {
        fragment_size_bytes: 200,
        fragment_max_chunks: 100,
        fragment_max_age_ms: 0,
        persist_threshold: 2,
        persist_interval_ms: 2_000,
        rebalance_threshold: 1_024,
        max_in_flight_transfers: 4,
        max_waiting_index_bytes: 1 << 20,
        transfer_deadline_ms: 180_000,
        answer_deadline_ms: 60_000,
        scan_max_chunks: 100,
        retry: RetryPolicy::default(),
        proof: Proof::default(),
    }
}

fn pointer(epoch: u64, uid: u32, revision: u64) -> Pointer {
    Pointer {
        epoch,
        uid,
        revision,
    }
}

fn chunk(id: u64) -> ScannedChunk {
    let header = ChunkHeader {
        chunk_type: ChunkType::User,
        num_entries: 1,
        num_records: RECORDS as u32,
        timestamp_ms: id as i64,
        epoch: EPOCH,
        chunk_id: id,
        data_crc: 0,
        data_bytes: DATA_BYTES,
        trailer_bytes: 0,
        filter_bytes: 0,
    };
    let position = 8 + id / RECORDS * CHUNK_BYTES;
    ScannedChunk {
        header,
        segment_offset: 0,
        position,
        lead_crc: 0,
        trailer_crc: 0,
    }
}

/// A driver with no tasks: effects wait here until the test answers them.
struct Rig {
    machine: UploadMachine,
    now: u64,
    effects: Vec<Effect>,
    /// The last manifest that was published, and whether local retention may trim by it.
    last_published: Option<(Arc<Root>, u64, bool)>,
}

impl Rig {
    fn with(settings: Settings) -> Self {
        let mut rig = Self {
            machine: UploadMachine::new(0, settings, EPOCH, 1),
            now: 0,
            effects: Vec::new(),
            last_published: None,
        };
        rig.collect();
        rig
    }

    /// A stream that never persisted anything, whose log starts at `local_first`; not yet told what is committed.
    fn fresh_with(settings: Settings) -> Self {
        let mut rig = Self::with(settings);
        rig.answer_pointer(PointerRead::NotFound);
        let effect = rig.next();
        assert_eq!(
            effect,
            Effect::Publish {
                root: Arc::new(Root::empty_at(0)),
                revision: 0,
                confirmed: true,
                pointer: None,
            }
        );
        rig
    }

    fn fresh() -> Self {
        Self::fresh_with(settings())
    }

    /// A stream with this root at revision 7.
    fn resumed_with(settings: Settings, root: &Root) -> Self {
        let mut rig = Self::with(settings);
        rig.answer_pointer(PointerRead::Found(pointer(EPOCH, 70, 7)));
        rig.answer_root(Ok(root.clone()));
        let effect = rig.next();
        assert_eq!(
            effect,
            Effect::Publish {
                root: Arc::new(root.clone()),
                revision: 7,
                confirmed: false,
                pointer: Some(pointer(EPOCH, 70, 7))
            }
        );
        rig
    }

    /// The same, and the local log has been seen to go on where the root ends.
    fn confirmed_with(settings: Settings, root: &Root) -> Self {
        let mut rig = Self::resumed_with(settings, root);
        rig.machine.unconfirmed = false;
        rig
    }

    fn confirmed(root: &Root) -> Self {
        Self::confirmed_with(settings(), root)
    }

    fn resumed(root: &Root) -> Self {
        Self::resumed_with(settings(), root)
    }

    fn collect(&mut self) {
        while let Some(effect) = self.machine.poll_effect() {
            let broken = promises::broken_by(&self.machine, &effect);
            assert_eq!(broken, Vec::<&str>::new(), "{effect:?}");
            if let Effect::Publish {
                root,
                revision,
                confirmed,
                ..
            } = &effect
            {
                let now = (Arc::clone(root), *revision, *confirmed);
                let before = self.last_published.replace(now);
                // The same manifest once more, now that the local log was looked at: of interest to one test only.
                if *confirmed && before == Some((Arc::clone(root), *revision, false)) {
                    continue;
                }
            }
            self.effects.push(effect);
        }
    }

    fn send(&mut self, event: Event) {
        let mark = promises::Mark::of(&self.machine);
        self.machine.handle(self.now, event);
        self.collect();
        assert!(mark.still_holds(&self.machine), "prefix monotonicity");
        self.check();
    }

    fn check(&self) {
        assert_eq!(invariants::violated(&self.machine), Vec::<&str>::new());
        // A deadline that has passed has been acted on: the driver would spin otherwise.
        assert!(self.machine.poll_timeout().is_none_or(|at| at > self.now));
    }

    fn wait(&mut self, ms: u64) {
        self.now += ms;
        self.send(Event::Tick);
    }

    /// To the next deadline.
    fn wait_until_due(&mut self) -> u64 {
        let at = self.machine.poll_timeout().expect("something waits");
        self.now = at;
        self.send(Event::Tick);
        at
    }

    /// The oldest effect that nobody has looked at.
    #[track_caller]
    fn next(&mut self) -> Effect {
        assert!(!self.effects.is_empty(), "no effect");
        self.effects.remove(0)
    }

    #[track_caller]
    fn quiet(&self) {
        assert_eq!(self.effects, vec![]);
    }

    #[track_caller]
    fn answer_pointer(&mut self, outcome: PointerRead) {
        let Effect::ReadPointer { generation } = self.next() else {
            panic!("no pointer asked for")
        };
        self.send(Event::PointerRead {
            generation,
            outcome,
        });
    }

    #[track_caller]
    fn answer_root(&mut self, outcome: Result<Root, Failure>) {
        let Effect::GetRoot { generation, .. } = self.next() else {
            panic!("no root asked for")
        };
        self.send(Event::RootRead {
            generation,
            outcome,
        });
    }

    fn committed(&mut self, chunk_id: u64, local_first: u64) {
        let event = Event::Committed {
            committed_chunk_id: Some(chunk_id),
            local_first_chunk_id: Some(local_first),
        };
        self.send(event);
    }

    #[track_caller]
    fn take_scan(&mut self) -> (u64, u64, u64, usize, u64) {
        match self.next() {
            Effect::Scan {
                generation,
                from_offset,
                up_to_chunk_id,
                max_chunks,
                max_bytes,
                ..
            } => (
                generation,
                from_offset,
                up_to_chunk_id,
                max_chunks,
                max_bytes,
            ),
            other => panic!("no scan but {other:?}"),
        }
    }

    /// What the next scan is to find in front of the place it starts at.
    fn front_timestamp_ms(&self) -> Option<i64> {
        match self.effects.first() {
            Some(Effect::Scan {
                front_timestamp_ms, ..
            }) => *front_timestamp_ms,
            other => panic!("no scan but {other:?}"),
        }
    }

    #[track_caller]
    fn end_scan(&mut self, end: ScanEnd) {
        let (generation, ..) = self.take_scan();
        self.send(Event::Scanned {
            generation,
            batch: ScanBatch {
                chunks: vec![],
                end,
            },
        });
    }

    /// Answers the scan as the log would.
    #[track_caller]
    fn scan(&mut self) {
        let (generation, from, up_to, max_chunks, max_bytes) = self.take_scan();
        let batch = scan_of(from, up_to, max_chunks, max_bytes);
        self.send(Event::Scanned { generation, batch });
    }

    /// Commits up to this chunk, and scans while that is asked for; other effects stay.
    fn drain(&mut self, chunk_id: u64, local_first: u64) {
        self.committed(chunk_id, local_first);
        while let Some(at) = self
            .effects
            .iter()
            .position(|effect| matches!(effect, Effect::Scan { .. }))
        {
            let scan = self.effects.remove(at);
            self.effects.insert(0, scan);
            self.scan();
        }
    }

    #[track_caller]
    fn take_transfer(&mut self) -> (u64, u64, Arc<FragmentPlan>) {
        match self.next() {
            Effect::Transfer {
                generation,
                transfer,
                plan,
            } => (generation, transfer, plan),
            other => panic!("no transfer but {other:?}"),
        }
    }

    fn transfer_done(&mut self, (generation, transfer): (u64, u64), outcome: Result<u32, Failure>) {
        self.send(Event::TransferDone {
            generation,
            transfer,
            outcome,
        });
    }

    /// The next transfer succeeds.
    #[track_caller]
    fn upload(&mut self, uid: u32) {
        let (generation, transfer, _) = self.take_transfer();
        self.transfer_done((generation, transfer), Ok(uid));
    }

    #[track_caller]
    fn put_root(&mut self, outcome: Result<u32, Failure>) -> Arc<Root> {
        let place = self
            .effects
            .iter()
            .position(|effect| matches!(effect, Effect::PutRoot { .. }));
        let Effect::PutRoot {
            generation,
            epoch: EPOCH,
            follows: _,
            root,
        } = self.effects.remove(place.expect("no root to put"))
        else {
            panic!("a root of another epoch")
        };
        self.send(Event::RootPut {
            generation,
            outcome,
        });
        root
    }

    #[track_caller]
    fn commit(&mut self, expected: (u32, u64), outcome: CommitOutcome) {
        let place = self
            .effects
            .iter()
            .position(|effect| matches!(effect, Effect::CommitPointer { .. }));
        match self.effects.remove(place.expect("no commit")) {
            Effect::CommitPointer {
                generation,
                epoch: EPOCH,
                uid,
                expected_revision,
                ..
            } => {
                assert_eq!((uid, expected_revision), expected);
                self.send(Event::PointerCommitted {
                    generation,
                    outcome,
                });
            }
            other => panic!("no commit but {other:?}"),
        }
    }

    #[track_caller]
    fn published(&mut self) -> (Arc<Root>, u64) {
        match self.next() {
            Effect::Publish {
                root,
                revision,
                pointer,
                ..
            } => {
                assert!(pointer.is_none_or(|pointer| pointer.revision == revision));
                (root, revision)
            }
            other => panic!("nothing published but {other:?}"),
        }
    }

    #[track_caller]
    fn deleted(&mut self) -> Vec<StoredObject> {
        match self.next() {
            Effect::Delete { objects } => objects,
            other => panic!("nothing deleted but {other:?}"),
        }
    }

    #[track_caller]
    fn problem(&mut self) -> Option<&'static str> {
        match self.next() {
            Effect::Problem { problem } => problem.map(|problem| problem.kind),
            other => panic!("no problem but {other:?}"),
        }
    }

    fn cancelled(&mut self) {
        let effect = self.next();
        assert!(
            matches!(effect, Effect::CancelTransfers { .. }),
            "{effect:?}"
        );
    }

    /// A fresh stream whose first two fragments are up and whose anchor is written: a persist is about to start.
    fn with_two_fragments() -> Self {
        let mut rig = Self::fresh();
        rig.drain(30, 0);
        rig.write_anchor();
        rig.upload(1);
        rig.upload(2);
        rig
    }

    /// The same, persisted as revision 1 under uid 100.
    fn persisted() -> Self {
        let mut rig = Self::with_two_fragments();
        rig.put_root(Ok(100));
        rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
        assert_eq!(rig.published().1, 1);
        rig.quiet();
        rig
    }

    #[track_caller]
    fn write_anchor(&mut self) {
        let Effect::WriteAnchor { generation } = self.next() else {
            panic!("no anchor")
        };
        self.send(Event::AnchorWritten {
            generation,
            ok: true,
        });
    }
}

fn scan_of(from: u64, up_to: u64, max_chunks: usize, max_bytes: u64) -> ScanBatch {
    let by_bytes = usize::try_from(max_bytes.div_ceil(CHUNK_BYTES)).unwrap();
    let wanted: Vec<u64> = (from..=up_to).step_by(RECORDS as usize).collect();
    let count = wanted.len().min(max_chunks).min(by_bytes.max(1));
    let end = if count == wanted.len() {
        ScanEnd::CaughtUp
    } else {
        ScanEnd::More
    };
    ScanBatch {
        chunks: wanted[..count].iter().map(|id| chunk(*id)).collect(),
        end,
    }
}

fn transient() -> Failure {
    Failure::Transient("slow down".to_owned())
}

fn forbidden() -> Failure {
    Failure::Stalled("403".to_owned())
}

fn fragment(first_offset: u64, uid: u32) -> StoredObject {
    StoredObject::Fragment { first_offset, uid }
}

fn root_object(uid: u32) -> StoredObject {
    StoredObject::Root { epoch: EPOCH, uid }
}
