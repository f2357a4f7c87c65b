//! Readers over a store in memory whose answers can be held back.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::engine::Engine;
use crate::manifests::ResolvedManifest;
use crate::remote_tier::gate::Gate;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::remote_tier::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutRequest, RemoteTier,
    StoreErrorKind, StoreFuture,
};
use crate::settings::Config;
use bytes::Bytes;
use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::crc::crc32;
use log_format::fragment::{FragmentIndexRecord, HEADER};
use log_format::key::KeySpace;
use log_format::manifest::{Entry, Kind, Root};

mod ending;
mod faults;
mod handover;
mod memory;
mod rate;
mod world;

const SOON: Duration = Duration::from_secs(30);
const STREAM: &str = "__s_1";
