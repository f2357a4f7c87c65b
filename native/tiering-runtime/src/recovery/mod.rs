//! Bringing streams back from the bucket alone: what it has of each, and the root that a recovered stream begins with.
//!
//! Owns the search for the newest usable root, the comparison of what it names with what is there, and the new root. Does not own
//! the metadata store, nor which streams are recovered (the shell does). Deletes and changes nothing; only [`adopt`] writes, and
//! what it writes is one new object.

use std::collections::BTreeMap;
use std::sync::Arc;

use log_format::key::Object;
use log_format::manifest::Root;
use thiserror::Error;
use tiering_core::upload::Pointer;

use crate::manifests::{RootReadError, fetch_root};
use crate::object_metadata::{AboutStream, RootHistory, RootName};
use crate::remote_tier::{FolderPage, KEYS_MAX, StoreError, StoreErrorKind};
use crate::shared::Shared;

mod adopt;
mod objects;
mod rebuild;
#[cfg(test)]
mod tests;

pub use adopt::Adopted;
pub(crate) use adopt::adopt;
pub use objects::{Affected, Objects};

/// A stream has two or three roots, and one more for each writer that ended at a bad moment. Only so many, the last that were
/// stored, are read.
const ROOTS_MAX: usize = 64;
/// More keys than this of one stream's roots are not listed.
const ROOT_KEYS_MAX: usize = 100_000;

/// What a bucket has of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What its root says about it.
    pub about: AboutStream,
    /// The root that a recovery would use; `None`: the manifest is made from the fragments.
    pub root: Option<RootName>,
    /// When that root was stored, by the store's clock.
    pub modified_ms: Option<i64>,
    /// How often it was recovered before.
    pub recoveries: u64,
    /// First offset that can be read.
    pub first_offset: u64,
    /// Offset after the last one.
    pub next_offset: u64,
    /// Chunk bytes of all fragments.
    pub total_size_bytes: u128,
    /// Newer roots that cannot be used, newest first: key and reason.
    pub passed_over: Vec<(String, String)>,
    /// Offset after the last record that a newer, unusable root says to have, if that is more.
    pub lost_up_to: Option<u64>,
    /// What is named against what is there, if that was asked for.
    pub objects: Option<Objects>,
}

/// How much is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// The root.
    Root,
    /// Every object that it names, by a listing: is it there, and long enough?
    Objects,
}

/// Why nothing can be said about a stream.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecoveryError {
    /// The store did not answer, or refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is nothing to bring back; the text says why.
    #[error("{0}")]
    Nothing(String),
}

impl RecoveryError {
    /// Stable name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Store(error) => error.kind().name(),
            Self::Nothing(_) => "nothing",
        }
    }
}

/// One page of the ids of all streams that have objects.
pub(crate) async fn streams(
    shared: &Shared,
    token: Option<&str>,
) -> Result<(Vec<String>, Option<String>), StoreError> {
    let prefix = shared.keys.prefix();
    let FolderPage {
        folders,
        next_token,
    } = shared.retrying.list_folders(prefix, token).await?;
    let ids = folders.iter().filter_map(|folder| {
        let id = folder.strip_prefix(prefix)?.strip_suffix('/')?;
        (!id.is_empty()).then(|| id.to_owned())
    });
    Ok((ids.collect(), next_token))
}

/// What the bucket has of one stream.
pub(crate) async fn inspect(
    shared: &Shared,
    stream_id: &str,
    depth: Depth,
) -> Result<Found, RecoveryError> {
    let mut found = match newest(shared, stream_id).await? {
        Newest::Root(usable) => usable.found(),
        Newest::None(passed_over) => rebuild::from_fragments(shared, stream_id)
            .await?
            .found(passed_over),
    };
    if depth == Depth::Objects {
        let root = read_again(shared, stream_id, &found).await?;
        found.objects = Some(objects::compare(shared, stream_id, &root).await?);
    }
    Ok(found)
}

/// A root that can be used.
pub(super) struct Usable {
    about: AboutStream,
    history: RootHistory,
    name: Option<RootName>,
    modified_ms: Option<i64>,
    root: Root,
    passed_over: Vec<(String, String)>,
    lost_up_to: Option<u64>,
}

impl Usable {
    fn found(self) -> Found {
        Found {
            about: self.about,
            root: self.name,
            modified_ms: self.modified_ms,
            recoveries: self.history.recoveries,
            first_offset: self.root.first_offset,
            next_offset: self.root.next_offset,
            total_size_bytes: self.root.total_size_bytes,
            lost_up_to: self.lost_up_to.filter(|lost| *lost > self.root.next_offset),
            passed_over: self.passed_over,
            objects: None,
        }
    }
}

enum Newest {
    Root(Box<Usable>),
    /// There is none; those that there are, with what is wrong with each.
    None(Vec<(String, String)>),
}

/// The newest root that can be read and is well-formed.
async fn newest(shared: &Shared, stream_id: &str) -> Result<Newest, StoreError> {
    let mut candidates = Vec::new();
    for (name, modified_ms) in listed_roots(shared, stream_id).await? {
        let key = shared.keys.root(stream_id, name.epoch, name.uid);
        match shared.retrying.head(&key).await {
            Ok(head) => {
                let history = RootHistory::of(&head.metadata);
                let lineage = history.lineage(name.epoch, modified_ms);
                candidates.push((lineage, name, modified_ms, head.metadata));
            }
            // Replaced since the listing.
            Err(error) if error.kind() == StoreErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    candidates.sort_by_key(|(lineage, ..)| std::cmp::Reverse(*lineage));
    let (mut passed_over, mut lost_up_to) = (Vec::new(), None);
    for (_, name, modified_ms, metadata) in candidates {
        match read(shared, stream_id, name).await {
            Ok((root, metadata)) => {
                return Ok(Newest::Root(Box::new(Usable {
                    about: AboutStream::of(stream_id, &metadata),
                    history: RootHistory::of(&metadata),
                    name: Some(name),
                    modified_ms,
                    root,
                    passed_over,
                    lost_up_to,
                })));
            }
            Err(ReadError::Unusable(text)) => {
                let end = metadata.get("next-offset").and_then(|end| end.parse().ok());
                lost_up_to = lost_up_to.max(end);
                passed_over.push((shared.keys.root(stream_id, name.epoch, name.uid), text));
            }
            Err(ReadError::Store(error)) => return Err(error),
        }
    }
    Ok(Newest::None(passed_over))
}

enum ReadError {
    Store(StoreError),
    Unusable(String),
}

async fn read(
    shared: &Shared,
    stream_id: &str,
    name: RootName,
) -> Result<(Root, BTreeMap<String, String>), ReadError> {
    let RootName { epoch, uid } = name;
    let pointer = Pointer {
        epoch,
        uid,
        revision: 0,
    };
    let tier = Arc::clone(&shared.retrying);
    match fetch_root(&tier, &shared.keys, stream_id, pointer).await {
        Ok(read) => Ok(read),
        Err(RootReadError::Corrupt(text)) => Err(ReadError::Unusable(text)),
        Err(RootReadError::Store(error)) => match error.kind() {
            // What is wrong with this object is no reason not to look at the one before it.
            StoreErrorKind::NotFound
            | StoreErrorKind::Archived
            | StoreErrorKind::Checksum
            | StoreErrorKind::TooLarge => Err(ReadError::Unusable(error.to_string())),
            _ => Err(ReadError::Store(error)),
        },
    }
}

async fn read_again(
    shared: &Shared,
    stream_id: &str,
    found: &Found,
) -> Result<Root, RecoveryError> {
    match found.root {
        None => Ok(rebuild::from_fragments(shared, stream_id).await?.root),
        Some(name) => match read(shared, stream_id, name).await {
            Ok((root, _)) => Ok(root),
            Err(ReadError::Store(error)) => Err(error.into()),
            Err(ReadError::Unusable(text)) => Err(RecoveryError::Nothing(text)),
        },
    }
}

/// The roots that are listed, at most [`ROOTS_MAX`], the last that were stored.
async fn listed_roots(
    shared: &Shared,
    stream_id: &str,
) -> Result<Vec<(RootName, Option<i64>)>, StoreError> {
    let prefix = format!("{}metadata/root.", shared.keys.stream_prefix(stream_id));
    let (mut roots, mut token) = (Vec::new(), None::<String>);
    loop {
        let page = shared
            .retrying
            .list(&prefix, token.as_deref(), KEYS_MAX)
            .await?;
        for object in page.objects {
            let parsed = shared.keys.parse(&object.key);
            if let Some(Object::Root { epoch, uid }) = parsed.map(|parsed| parsed.object) {
                roots.push((RootName { epoch, uid }, object.modified_ms));
            }
        }
        token = page.next_token;
        if token.is_none() || roots.len() >= ROOT_KEYS_MAX {
            break;
        }
    }
    roots.sort_by_key(|(name, modified_ms)| std::cmp::Reverse((*modified_ms, name.epoch)));
    roots.truncate(ROOTS_MAX);
    Ok(roots)
}
