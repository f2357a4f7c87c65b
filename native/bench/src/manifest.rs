//! What a manifest costs as it grows: built, persisted, searched and expired by the machines themselves, over a bucket in memory.
//! Times are of our code alone, encoding and decoding included: the requests are counted and not waited for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::fragment::FragmentIndexRecord;
use log_format::manifest::{Group, Kind, Root};
use tiering_core::remote_reader::{self, ManifestView, RemoteReader, Start};
use tiering_core::replica_reader::{
    CommitOutcome, Effect, Event, PointerRead, ReplicaReader, RetentionBound, ScanBatch, ScanEnd,
    ScannedChunk, Settings, StoredObject,
};

use crate::row::print;

const SIZES: [u64; 3] = [1_000, 100_000, 1_000_000];
/// Records in a fragment.
const RECORDS: u64 = 10;
/// Data of a fragment, which is one chunk.
const DATA_BYTES: u32 = 64 << 20;
const SAMPLES: u64 = 101;

type Failed = Box<dyn std::error::Error>;

/// A machine, and the world that answers it.
struct World {
    machine: ReplicaReader,
    now_ms: u64,
    groups: BTreeMap<(Kind, u64, u32), Bytes>,
    persisted: Arc<Root>,
    revision: u64,
    last_uid: u32,
    wanted: u64,
    put_bytes: u64,
    group_gets: u64,
}

impl World {
    fn new() -> Self {
        let settings = Settings {
            fragment_size_bytes: 1,
            ..Settings::default()
        };
        let mut world = Self {
            machine: ReplicaReader::new(0, settings, 1, 1),
            now_ms: 0,
            groups: BTreeMap::new(),
            persisted: Arc::new(Root::empty_at(0)),
            revision: 0,
            last_uid: 0,
            wanted: 0,
            put_bytes: 0,
            group_gets: 0,
        };
        world.run();
        world
    }

    fn handle(&mut self, event: Event) {
        self.machine.handle(self.now_ms, event);
    }

    /// Runs effects until there are none.
    fn run(&mut self) {
        while let Some(effect) = self.machine.poll_effect() {
            if let Some(event) = self.perform(effect) {
                self.handle(event);
            }
        }
    }

    fn uid(&mut self) -> u32 {
        self.last_uid += 1;
        self.last_uid
    }

    fn perform(&mut self, effect: Effect) -> Option<Event> {
        Some(match effect {
            Effect::ReadPointer { generation } => Event::PointerRead {
                generation,
                outcome: PointerRead::NotFound,
            },
            Effect::WriteAnchor { generation } => Event::AnchorWritten {
                generation,
                ok: true,
            },
            Effect::Scan {
                generation,
                from_offset,
                up_to_chunk_id,
                max_chunks,
                max_bytes,
            } => Event::Scanned {
                generation,
                batch: scan(from_offset, up_to_chunk_id, max_chunks, max_bytes),
            },
            Effect::Transfer {
                generation,
                transfer,
                ..
            } => Event::TransferDone {
                generation,
                transfer,
                outcome: Ok(self.uid()),
            },
            Effect::PutGroup {
                generation, group, ..
            } => {
                let uid = self.uid();
                let bytes = group.encode();
                self.put_bytes += bytes.len() as u64;
                self.groups
                    .insert((group.kind, group.first_offset, uid), Bytes::from(bytes));
                Event::GroupPut {
                    generation,
                    outcome: Ok(uid),
                }
            }
            Effect::GetGroup {
                generation,
                kind,
                first_offset,
                uid,
            } => {
                self.group_gets += 1;
                let bytes = self.groups.get(&(kind, first_offset, uid))?;
                Event::GroupRead {
                    generation,
                    outcome: Ok(Group::decode(kind, bytes).ok()?),
                }
            }
            Effect::PutRoot {
                generation, root, ..
            } => {
                self.put_bytes += root.encode().len() as u64;
                Event::RootPut {
                    generation,
                    outcome: Ok(self.uid()),
                }
            }
            Effect::CommitPointer { generation, .. } => {
                self.revision += 1;
                Event::PointerCommitted {
                    generation,
                    outcome: CommitOutcome::Committed {
                        revision: self.revision,
                    },
                }
            }
            Effect::Publish { root, .. } => {
                self.persisted = root;
                return None;
            }
            Effect::Delete { objects } => {
                for object in objects {
                    if let StoredObject::Group {
                        kind,
                        first_offset,
                        uid,
                    } = object
                    {
                        self.groups.remove(&(kind, first_offset, uid));
                    }
                }
                return None;
            }
            _ => return None,
        })
    }

    fn append(&mut self, fragments: u64) {
        self.wanted += fragments;
        self.handle(Event::Committed {
            committed_chunk_id: Some((self.wanted - 1) * RECORDS),
            local_first_chunk_id: Some(0),
        });
        self.run();
    }

    /// Lets time pass until everything is persisted.
    fn settle(&mut self) {
        while let Some(at_ms) = self.machine.poll_timeout() {
            self.now_ms = self.now_ms.max(at_ms);
            self.handle(Event::Tick);
            self.run();
        }
    }

    /// Attaches a reader; requests for objects until it knows which bytes to stream, and the time of our code.
    fn attach(&self, start: Start) -> Result<(u64, Duration), Failed> {
        let began = Instant::now();
        let mut reader = RemoteReader::new(0, remote_reader::Settings::default(), start, 1);
        let mut gets = 0;
        while let Some(effect) = reader.poll_effect() {
            let (id, bytes) = match effect {
                remote_reader::Effect::RefreshManifest { id } => {
                    let view = ManifestView::Resolved(Arc::clone(&self.persisted));
                    reader.handle(0, remote_reader::Event::Manifest { id, view });
                    continue;
                }
                remote_reader::Effect::GetGroup { id, group, .. } => {
                    let key = (group.kind, group.first_offset, group.uid);
                    (
                        id,
                        self.groups.get(&key).ok_or("a group is missing")?.clone(),
                    )
                }
                remote_reader::Effect::GetIndex { id, fragment, .. } => {
                    let record = FragmentIndexRecord {
                        offset: fragment.first_offset,
                        timestamp_ms: fragment.first_timestamp_ms,
                        position: 0,
                    };
                    (id, Bytes::copy_from_slice(&record.encode()))
                }
                remote_reader::Effect::GetRange { .. } => return Ok((gets, began.elapsed())),
                _ => continue,
            };
            gets += 1;
            reader.handle(
                0,
                remote_reader::Event::Fetched {
                    id,
                    outcome: Ok(bytes),
                },
            );
        }
        Err("the reader found nothing".into())
    }
}

fn scan(from_offset: u64, up_to_chunk_id: u64, max_chunks: usize, max_bytes: u64) -> ScanBatch {
    let limit = max_chunks.min(usize::try_from(max_bytes).unwrap_or(usize::MAX));
    let mut ids = (from_offset..=up_to_chunk_id).step_by(10);
    let chunks = ids.by_ref().take(limit).map(chunk).collect();
    let end = match ids.next() {
        Some(_) => ScanEnd::More,
        None => ScanEnd::CaughtUp,
    };
    ScanBatch { chunks, end }
}

fn chunk(chunk_id: u64) -> ScannedChunk {
    let header = ChunkHeader {
        chunk_type: ChunkType::User,
        num_entries: 1,
        num_records: 10,
        timestamp_ms: i64::try_from(chunk_id).unwrap_or(i64::MAX),
        epoch: 1,
        chunk_id,
        data_crc: 0,
        data_bytes: DATA_BYTES,
        trailer_bytes: 0,
        filter_bytes: 0,
    };
    // Every chunk in a segment of its own: positions in files are 32 bits wide in a fragment's index.
    ScannedChunk {
        header,
        segment_offset: chunk_id,
        position: 8,
        lead_crc: 0,
        trailer_crc: 0,
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Every measurement at every size; each row is compared with the smallest size.
pub fn run() -> Result<(), Failed> {
    let mut rows: Vec<(&str, &str, Vec<Vec<f64>>)> = Vec::new();
    let mut add = |name: &'static str, unit: &'static str, runs: Vec<f64>| match rows
        .iter_mut()
        .find(|row| row.0 == name)
    {
        Some(row) => row.2.push(runs),
        None => rows.push((name, unit, vec![runs])),
    };
    for size in SIZES {
        let mut world = World::new();
        let began = Instant::now();
        while world.wanted < size {
            world.append(1_000.min(size - world.wanted));
        }
        world.settle();
        let built = micros(began.elapsed()) / size as f64;
        let root = Arc::clone(&world.persisted);
        if root.next_offset != size * RECORDS {
            return Err(format!("{} fragments became {}", size, root.next_offset / RECORDS).into());
        }
        add("build", "us/fragment", vec![built]);
        add("root", "bytes", vec![root.encode().len() as f64]);
        let depth = root.entries.iter().map(|entry| entry.kind.to_byte()).max();
        add(
            "depth",
            "levels of groups",
            vec![f64::from(depth.unwrap_or(0))],
        );
        for (gets, time, by_offset) in [
            (
                "attach at an offset: GETs",
                "attach at an offset: our time",
                true,
            ),
            (
                "attach at a timestamp: GETs",
                "attach at a timestamp: our time",
                false,
            ),
        ] {
            let (mut requests, mut times) = (Vec::new(), Vec::new());
            for sample in 0..SAMPLES {
                // Spread, and never a fragment's first record, which would spare the index.
                let offset = sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (size - 1) * RECORDS + 5;
                let timestamp_ms = i64::try_from(offset)?;
                let (count, elapsed) = world.attach(match by_offset {
                    true => Start::Offset(offset),
                    false => Start::Timestamp(timestamp_ms),
                })?;
                requests.push(count as f64);
                times.push(micros(elapsed));
            }
            add(gets, "GETs", requests);
            add(time, "us", times);
        }
        let (mut times, mut sent) = (Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let (before, began) = (world.put_bytes, Instant::now());
            world.append(1);
            world.settle();
            times.push(micros(began.elapsed()));
            sent.push((world.put_bytes - before) as f64);
        }
        add("append and persist: our time", "us", times);
        add("append and persist: sent", "bytes", sent);
        let (mut times, mut sent, mut gets) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let oldest = world.persisted.first_offset;
            let (before, gets_before, began) = (world.put_bytes, world.group_gets, Instant::now());
            let total_bytes = u64::try_from(world.persisted.total_size_bytes)?;
            world.handle(Event::RetentionChanged(RetentionBound {
                max_bytes: Some(total_bytes - 1),
                max_age_ms: None,
            }));
            world.run();
            world.settle();
            times.push(micros(began.elapsed()));
            sent.push((world.put_bytes - before) as f64);
            gets.push((world.group_gets - gets_before) as f64);
            if world.persisted.first_offset != oldest + RECORDS {
                return Err("not exactly one fragment was dropped".into());
            }
        }
        add("drop the oldest and persist: our time", "us", times);
        add("drop the oldest and persist: sent", "bytes", sent);
        add("drop the oldest and persist: GETs", "GETs", gets);
    }
    for (name, unit, by_size) in rows {
        let mut first = None;
        for (size, runs) in SIZES.iter().zip(&by_size) {
            let value = crate::row::median(runs);
            let base = *first.get_or_insert(value);
            let against = (*size != SIZES[0] && base > 0.0).then_some(("a thousand", base));
            print(&format!("manifest of {size}: {name}"), unit, runs, against);
        }
    }
    Ok(())
}
