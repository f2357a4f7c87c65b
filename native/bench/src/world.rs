//! An upload machine and a bucket in memory: manifests as large as wanted, made by the machine itself.
//!
//! Owns the world that answers the machine. Does not own what is measured in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType, HEADER_BYTES};
use log_format::fragment::FragmentIndexRecord;
use log_format::manifest::{Group, Kind, Root};
use tiering_core::read::{self, ManifestView, ReadMachine, Start};
use tiering_core::upload::{
    CommitOutcome, Effect, Event, PointerRead, ScanBatch, ScanEnd, ScannedChunk, Settings,
    StoredObject, UploadMachine,
};

type Failed = Box<dyn std::error::Error>;

/// A machine, and the world that answers it.
pub struct World {
    machine: UploadMachine,
    records: u64,
    data_bytes: u64,
    chunks: u64,
    now_ms: u64,
    /// The groups that are stored.
    pub groups: BTreeMap<(Kind, u64, u32), Bytes>,
    /// The root that readers know.
    pub persisted: Arc<Root>,
    revision: u64,
    last_uid: u32,
    /// Fragments appended.
    pub wanted: u64,
    /// Bytes of manifests put.
    pub put_bytes: u64,
    /// Groups that the machine read.
    pub group_gets: u64,
}

impl World {
    /// An empty stream whose fragments hold `records` records and `data_bytes` bytes, in `chunks` chunks.
    pub fn new(records: u64, data_bytes: u64, chunks: u64) -> Self {
        let settings = Settings {
            fragment_size_bytes: data_bytes - chunks * HEADER_BYTES as u64,
            ..Settings::default()
        };
        let mut world = Self {
            records,
            data_bytes,
            chunks,
            machine: UploadMachine::new(0, settings, 1, 1),
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

    /// Something happened.
    pub fn handle(&mut self, event: Event) {
        self.machine.handle(self.now_ms, event);
    }

    /// Runs effects until there are none.
    pub fn run(&mut self) {
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
                ..
            } => Event::Scanned {
                generation,
                batch: self.scan(from_offset, up_to_chunk_id, max_chunks, max_bytes),
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

    /// Appends fragments and uploads them.
    pub fn append(&mut self, fragments: u64) {
        self.wanted += fragments;
        self.handle(Event::Committed {
            committed_chunk_id: Some(self.wanted * self.records - self.records / self.chunks),
            local_first_chunk_id: Some(0),
        });
        self.run();
    }

    /// Lets time pass until everything is persisted.
    pub fn settle(&mut self) {
        while let Some(at_ms) = self.machine.poll_timeout() {
            self.now_ms = self.now_ms.max(at_ms);
            self.handle(Event::Tick);
            self.run();
        }
    }

    /// Attaches a reader; requests for objects until it knows which bytes to stream, and the time of our code.
    pub fn attach(&self, start: Start) -> Result<(u64, Duration), Failed> {
        let began = Instant::now();
        let mut reader = ReadMachine::new(0, read::Settings::default(), start, 1);
        let mut gets = 0;
        while let Some(effect) = reader.poll_effect() {
            let (id, bytes) = match effect {
                read::Effect::RefreshManifest { id } => {
                    let view = ManifestView::Resolved(Arc::clone(&self.persisted));
                    reader.handle(0, read::Event::Manifest { id, view });
                    continue;
                }
                read::Effect::GetGroup { id, group, .. } => {
                    let key = (group.kind, group.first_offset, group.uid);
                    (
                        id,
                        self.groups.get(&key).ok_or("a group is missing")?.clone(),
                    )
                }
                read::Effect::GetIndex { id, fragment, .. } => {
                    let record = FragmentIndexRecord {
                        offset: fragment.first_offset,
                        timestamp_ms: fragment.first_timestamp_ms,
                        position: 0,
                    };
                    (id, Bytes::copy_from_slice(&record.encode()))
                }
                read::Effect::GetRange { .. } => return Ok((gets, began.elapsed())),
                _ => continue,
            };
            gets += 1;
            reader.handle(
                0,
                read::Event::Fetched {
                    id,
                    outcome: Ok(bytes),
                },
            );
        }
        Err("the reader found nothing".into())
    }

    fn scan(&self, from_offset: u64, up_to: u64, max_chunks: usize, max_bytes: u64) -> ScanBatch {
        let limit = max_chunks.min(usize::try_from(max_bytes).unwrap_or(usize::MAX));
        let step = usize::try_from(self.records / self.chunks).unwrap_or(usize::MAX);
        let mut ids = (from_offset..=up_to).step_by(step);
        let chunks = ids.by_ref().take(limit).map(|id| self.chunk(id)).collect();
        let end = match ids.next() {
            Some(_) => ScanEnd::More,
            None => ScanEnd::CaughtUp,
        };
        ScanBatch { chunks, end }
    }

    fn chunk(&self, chunk_id: u64) -> ScannedChunk {
        let data_bytes = (self.data_bytes / self.chunks).saturating_sub(HEADER_BYTES as u64);
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records: u32::try_from(self.records / self.chunks).unwrap_or(u32::MAX),
            timestamp_ms: i64::try_from(chunk_id).unwrap_or(i64::MAX),
            epoch: 1,
            chunk_id,
            data_crc: 0,
            data_bytes: u32::try_from(data_bytes).unwrap_or(u32::MAX),
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
}
