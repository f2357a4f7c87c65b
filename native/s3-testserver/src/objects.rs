//! The objects, in memory behind one lock.
//!
//! Owns atomicity: a condition is checked and its write done under the same lock. Does not own
//! HTTP, checksums or who may do what.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use s3s::crypto::{Checksum as _, Crc64Nvme};

/// One stored object.
#[derive(Debug, Clone)]
pub struct Object {
    /// The bytes.
    pub body: Bytes,
    /// Entity tag without quotes. Depends on the bytes only, as in S3.
    pub etag: String,
    /// User metadata, names without the `x-amz-meta-` prefix.
    pub metadata: BTreeMap<String, String>,
    /// Content type as sent.
    pub content_type: Option<String>,
    /// Base64 of the CRC-32, if the writer sent one (and it was right).
    pub checksum_crc32: Option<String>,
    /// Server-side encryption as asked for. Only remembered and echoed.
    pub encryption: Option<String>,
    /// Key name of that encryption.
    pub encryption_key: Option<String>,
    /// When it was written.
    pub modified: SystemTime,
}

impl Object {
    /// An object with these bytes and nothing else.
    #[must_use]
    pub fn new(body: Bytes) -> Self {
        Self {
            etag: etag(&body),
            body,
            metadata: BTreeMap::new(),
            content_type: None,
            checksum_crc32: None,
            encryption: None,
            encryption_key: None,
            modified: SystemTime::now(),
        }
    }
}

/// An ETag looks like an MD5 sum but is cheaper: tests write gigabytes.
fn etag(body: &[u8]) -> String {
    let mut crc64 = Crc64Nvme::new();
    crc64.update(body);
    let mut text = String::with_capacity(32);
    let length = (body.len() as u64).to_be_bytes();
    let crc32 = crc32fast::hash(body).to_be_bytes();
    for byte in crc64.finalize().iter().chain(&crc32).chain(&length[4..]) {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// What must hold for a write to happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Nothing.
    Always,
    /// The key must not exist (`If-None-Match: *`).
    Absent,
    /// The key must exist (`If-Match: *`).
    Exists,
    /// The key must exist with this ETag (`If-Match`).
    Matches(String),
}

/// Why a request on objects was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There is no such bucket.
    NoBucket,
    /// There is no such key.
    NoKey,
    /// The condition does not hold.
    Condition,
    /// The bucket still has objects.
    NotEmpty,
}

/// One page of a listing.
#[derive(Debug, Default)]
pub struct Page {
    /// Objects in byte order of their keys.
    pub objects: Vec<(String, Object)>,
    /// Common prefixes, if a delimiter was given.
    pub prefixes: Vec<String>,
    /// Where the next page starts, if this is not the last one.
    pub next: Option<Position>,
}

/// A place between keys from which a listing goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Position {
    /// After this key.
    Key(String),
    /// After every key that starts with this.
    Prefix(String),
}

type Keys = BTreeMap<String, Object>;

/// Handle to all objects; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    buckets: Arc<Mutex<BTreeMap<String, Keys>>>,
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Keys>> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of all buckets.
    #[must_use]
    pub fn buckets(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Makes a bucket; false if it was there.
    pub fn create_bucket(&self, bucket: &str) -> bool {
        let mut buckets = self.lock();
        if buckets.contains_key(bucket) {
            return false;
        }
        buckets.insert(bucket.to_owned(), Keys::new());
        true
    }

    /// Removes an empty bucket.
    pub fn delete_bucket(&self, bucket: &str) -> Result<(), Refused> {
        let mut buckets = self.lock();
        match buckets.get(bucket) {
            None => Err(Refused::NoBucket),
            Some(keys) if !keys.is_empty() => Err(Refused::NotEmpty),
            Some(_) => {
                buckets.remove(bucket);
                Ok(())
            }
        }
    }

    /// Writes an object if the condition holds.
    pub fn put_if(
        &self,
        bucket: &str,
        key: &str,
        object: Object,
        condition: &Condition,
    ) -> Result<(), Refused> {
        let mut buckets = self.lock();
        let keys = buckets.get_mut(bucket).ok_or(Refused::NoBucket)?;
        match (condition, keys.get(key)) {
            (Condition::Always, _) | (Condition::Absent, None) | (Condition::Exists, Some(_)) => {}
            (Condition::Matches(wanted), Some(found)) if *wanted == found.etag => {}
            (Condition::Exists | Condition::Matches(_), None) => return Err(Refused::NoKey),
            _ => return Err(Refused::Condition),
        }
        keys.insert(key.to_owned(), object);
        Ok(())
    }

    /// Removes an object if the condition holds. A missing key is a success, as in S3.
    pub fn delete_if(&self, bucket: &str, key: &str, condition: &Condition) -> Result<(), Refused> {
        let mut buckets = self.lock();
        let keys = buckets.get_mut(bucket).ok_or(Refused::NoBucket)?;
        match (condition, keys.get(key)) {
            (Condition::Matches(wanted), Some(found)) if *wanted != found.etag => {
                Err(Refused::Condition)
            }
            _ => {
                keys.remove(key);
                Ok(())
            }
        }
    }

    /// Reads an object.
    pub fn read(&self, bucket: &str, key: &str) -> Result<Object, Refused> {
        let buckets = self.lock();
        let keys = buckets.get(bucket).ok_or(Refused::NoBucket)?;
        keys.get(key).cloned().ok_or(Refused::NoKey)
    }

    /// One page of at most `limit` keys and common prefixes.
    pub fn list(
        &self,
        bucket: &str,
        prefix: &str,
        delimiter: Option<&str>,
        after: Option<&Position>,
        limit: usize,
    ) -> Result<Page, Refused> {
        let buckets = self.lock();
        let keys = buckets.get(bucket).ok_or(Refused::NoBucket)?;
        let mut page = Page::default();
        let from = match after {
            Some(Position::Key(key)) if key.as_str() >= prefix => Bound::Excluded(key.clone()),
            Some(Position::Prefix(done)) if done.as_str() >= prefix => {
                Bound::Included(done.clone())
            }
            _ => Bound::Included(prefix.to_owned()),
        };
        let mut skip = match after {
            Some(Position::Prefix(done)) => Some(done.clone()),
            _ => None,
        };
        let mut last = None;
        for (key, object) in keys.range((from, Bound::Unbounded)) {
            if !key.starts_with(prefix) {
                break;
            }
            if skip
                .as_ref()
                .is_some_and(|done| key.starts_with(done.as_str()))
            {
                continue;
            }
            if page.objects.len() + page.prefixes.len() >= limit {
                page.next = last;
                return Ok(page);
            }
            let tail = key.get(prefix.len()..).unwrap_or_default();
            let common = delimiter
                .and_then(|delimiter| {
                    tail.find(delimiter)
                        .map(|at| prefix.len() + at + delimiter.len())
                })
                .and_then(|end| key.get(..end));
            match common {
                Some(common) => {
                    page.prefixes.push(common.to_owned());
                    skip = Some(common.to_owned());
                    last = Some(Position::Prefix(common.to_owned()));
                }
                None => {
                    page.objects.push((key.clone(), object.clone()));
                    last = Some(Position::Key(key.clone()));
                }
            }
        }
        Ok(page)
    }

    // ---- for tests ----

    /// The object, if there is one.
    #[must_use]
    pub fn get(&self, bucket: &str, key: &str) -> Option<Object> {
        self.read(bucket, key).ok()
    }

    /// Keys that start with `prefix`, in byte order.
    #[must_use]
    pub fn keys(&self, bucket: &str, prefix: &str) -> Vec<String> {
        let buckets = self.lock();
        buckets
            .get(bucket)
            .map(|keys| {
                keys.keys()
                    .filter(|key| key.starts_with(prefix))
                    .cloned()
                    .collect()
            })
            .unwrap_or_default()
    }

    /// Sets the bytes of an object without any check. An object that was there keeps its ETag,
    /// checksum and metadata, so this is bit rot. Makes the bucket if need be.
    pub fn put_raw(&self, bucket: &str, key: &str, body: Bytes) {
        let mut buckets = self.lock();
        let keys = buckets.entry(bucket.to_owned()).or_default();
        match keys.get_mut(key) {
            Some(object) => object.body = body,
            None => {
                keys.insert(key.to_owned(), Object::new(body));
            }
        }
    }

    /// Removes an object behind everybody's back; true if it was there.
    pub fn remove(&self, bucket: &str, key: &str) -> bool {
        self.lock()
            .get_mut(bucket)
            .is_some_and(|keys| keys.remove(key).is_some())
    }

    /// Removes every object whose key starts with `prefix`; answers how many.
    pub fn remove_prefix(&self, bucket: &str, prefix: &str) -> usize {
        let mut buckets = self.lock();
        let Some(keys) = buckets.get_mut(bucket) else {
            return 0;
        };
        let before = keys.len();
        keys.retain(|key, _| !key.starts_with(prefix));
        before - keys.len()
    }
}
