//! What a root names, through all groups, against what a listing has.
//!
//! Owns the walk over the tree and the comparison. Reads groups and lists; reads no fragment.

use std::collections::HashMap;

use log_format::fragment::{HEADER_BYTES, INDEX_RECORD_BYTES};
use log_format::key::Object;
use log_format::manifest::{Entry, Group, Kind, Root};

use crate::manifests::GROUP_BYTES_MAX;
use crate::remote_tier::{KEYS_MAX, StoreError, StoreErrorKind};
use crate::shared::Shared;

/// So many are named; the others are counted.
const AFFECTED_MAX: usize = 100;

/// What is named against what is there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Objects {
    /// How many objects the root names, groups included.
    pub named: u64,
    /// How many of them are not there, too short, or groups that cannot be read.
    pub affected_count: u64,
    /// The first of them.
    pub affected: Vec<Affected>,
    /// Objects of the stream that this root does not name, older roots included.
    pub unnamed: u64,
    /// Their bytes.
    pub unnamed_bytes: u64,
}

/// An object without which offsets cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Affected {
    /// Its key.
    pub key: String,
    /// First offset that it has.
    pub first_offset: u64,
    /// Offset after its last one.
    pub next_offset: u64,
    /// What is wrong.
    pub reason: String,
}

impl Objects {
    fn add(&mut self, affected: Affected) {
        self.affected_count += 1;
        if self.affected.len() < AFFECTED_MAX {
            self.affected.push(affected);
        }
    }
}

/// An object that a root names.
struct Named {
    next_offset: u64,
    least_bytes: u64,
    is_listed: bool,
}

/// What one key says.
type Name = (u8, u64, u32);

/// Compares.
pub(super) async fn compare(
    shared: &Shared,
    stream_id: &str,
    root: &Root,
) -> Result<Objects, StoreError> {
    let mut objects = Objects::default();
    let mut named = walk(shared, stream_id, root, &mut objects).await?;
    objects.named = named.len() as u64;
    let prefix = shared.keys.stream_prefix(stream_id);
    let mut token = None::<String>;
    loop {
        let page = shared
            .retrying
            .list(&prefix, token.as_deref(), KEYS_MAX)
            .await?;
        for object in page.objects {
            let name = shared.keys.parse(&object.key).map(|key| name(key.object));
            match name.and_then(|name| named.get_mut(&name)) {
                Some(named) => {
                    named.is_listed = true;
                    if object.size_bytes < named.least_bytes {
                        let (_, first_offset, _) = name.unwrap_or_default();
                        objects.add(Affected {
                            key: object.key,
                            first_offset,
                            next_offset: named.next_offset,
                            reason: format!(
                                "it has {} bytes and should have at least {}",
                                object.size_bytes, named.least_bytes
                            ),
                        });
                    }
                }
                None => {
                    objects.unnamed += 1;
                    objects.unnamed_bytes = objects.unnamed_bytes.saturating_add(object.size_bytes);
                }
            }
        }
        token = page.next_token;
        if token.is_none() {
            break;
        }
    }
    let mut missing: Vec<_> = named.iter().filter(|(_, named)| !named.is_listed).collect();
    missing.sort_unstable_by_key(|(name, _)| **name);
    for ((kind, first_offset, uid), named) in missing {
        let kind = Kind::from_byte(*kind).unwrap_or(Kind::Fragment);
        objects.add(Affected {
            key: shared.keys.group(stream_id, kind, *first_offset, *uid),
            first_offset: *first_offset,
            next_offset: named.next_offset,
            reason: "it is not there".to_owned(),
        });
    }
    Ok(objects)
}

/// All objects below the root. A group that cannot be read is affected, with all that it may have.
async fn walk(
    shared: &Shared,
    stream_id: &str,
    root: &Root,
    objects: &mut Objects,
) -> Result<HashMap<Name, Named>, StoreError> {
    let mut named = HashMap::new();
    let mut to_read: Vec<(Entry, u64)> = with_ends(&root.entries, root.next_offset);
    while let Some((entry, next_offset)) = to_read.pop() {
        // A group keeps what retention has dropped from its beginning.
        if next_offset <= root.first_offset {
            continue;
        }
        let least_bytes = match entry.kind {
            // A fragment has at least one chunk.
            Kind::Fragment => {
                ((HEADER_BYTES + INDEX_RECORD_BYTES) as u64).saturating_add(entry.size_bytes)
            }
            Kind::Group | Kind::KiloGroup | Kind::MegaGroup => 1,
        };
        let name = (entry.kind.to_byte(), entry.first_offset, entry.uid);
        named.insert(
            name,
            Named {
                next_offset,
                least_bytes,
                is_listed: false,
            },
        );
        if entry.kind == Kind::Fragment {
            continue;
        }
        let (kind, first_offset, uid) = (entry.kind, entry.first_offset, entry.uid);
        let key = shared.keys.group(stream_id, kind, first_offset, uid);
        let reason = match shared.retrying.get(&key, GROUP_BYTES_MAX).await {
            Ok(bytes) => match Group::decode(kind, &bytes) {
                Ok(group) => {
                    to_read.extend(with_ends(&group.entries, next_offset));
                    continue;
                }
                Err(error) => error.to_string(),
            },
            // The listing says that.
            Err(error) if error.kind() == StoreErrorKind::NotFound => continue,
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => error.to_string(),
        };
        objects.add(Affected {
            key,
            first_offset,
            next_offset,
            reason,
        });
    }
    Ok(named)
}

/// Each entry with the offset after its last record: where the next begins.
fn with_ends(entries: &[Entry], next_offset: u64) -> Vec<(Entry, u64)> {
    let begins = entries.iter().skip(1).map(|entry| entry.first_offset);
    let ends = begins.chain([next_offset]);
    entries.iter().copied().zip(ends).collect()
}

fn name(object: Object) -> Name {
    match object {
        Object::Fragment { first_offset, uid } => (Kind::Fragment.to_byte(), first_offset, uid),
        Object::Group {
            kind,
            first_offset,
            uid,
        } => (kind.to_byte(), first_offset, uid),
        // No entry names a root.
        Object::Root { epoch, uid } => (u8::MAX, epoch, uid),
    }
}
