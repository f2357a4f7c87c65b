//! The remote tier on any S3-compatible store, through `aws-sdk-s3`.
//!
//! Owns requests on the wire: streamed PUTs with a known length, an unsigned payload and a checksum that the store verifies;
//! bounded GETs; answers that are nonsense become errors. Does not own retries or counting (the wrappers do).

mod body;
mod client;
mod date;
mod fold;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use bytes::{Bytes, BytesMut};
use tokio::sync::OnceCell;

use self::body::{FramedBody, Progress};
use super::{
    DeleteOutcome, Described, FolderPage, KEYS_MAX, ListPage, ListedObject, ObjectMeta, PutBody,
    PutRequest, RangeSink, RemoteTier, StoreError, StoreErrorKind, StoreFuture,
};
use crate::clock::Clock;
use crate::settings::Config;
use crate::timekeeper::Timekeeper;

/// One bucket of an S3-compatible store.
pub struct S3RemoteTier {
    config: Config,
    timekeeper: Arc<Timekeeper>,
    // Made at the first request: finding authorities and credentials reads files, which opening an engine must not wait for.
    client: OnceCell<Client>,
}

impl S3RemoteTier {
    /// A store for these settings. Makes no request and reads no file.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let timekeeper = Timekeeper::new(config, Clock::start(), Arc::default());
        Self::with_timekeeper(config, Arc::new(timekeeper))
    }

    /// The same; what time it is, as its answers say, is passed on.
    #[must_use]
    pub fn with_timekeeper(config: &Config, timekeeper: Arc<Timekeeper>) -> Self {
        Self {
            config: config.clone(),
            timekeeper,
            client: OnceCell::new(),
        }
    }

    async fn client(&self) -> Result<&Client, StoreError> {
        self.client
            .get_or_try_init(|| client::connect(&self.config, &self.timekeeper))
            .await
    }

    fn silence_limit(&self) -> Duration {
        // The SDK times the connecting by itself; the silence limit must not cut that short.
        self.config
            .request_timeout()
            .max(self.config.connect_timeout())
    }

    async fn put_object(
        &self,
        request: PutRequest,
        progress: Arc<Progress>,
    ) -> Result<(), StoreError> {
        let PutRequest {
            key,
            body,
            crc32,
            metadata,
        } = request;
        let len_bytes = body.len_bytes();
        let content_length = i64::try_from(len_bytes).map_err(|_| {
            StoreError::new(StoreErrorKind::TooLarge, "longer than any object can be")
        })?;
        let body = match body {
            PutBody::Bytes(bytes) => SdkBody::from(bytes),
            PutBody::Source(source) => {
                SdkBody::from_body_1_x(FramedBody::new(source.open(), len_bytes, progress))
            }
        };
        let mut put = self
            .client()
            .await?
            .put_object()
            .bucket(&self.config.bucket)
            .key(key)
            .content_length(content_length)
            .body(ByteStream::new(body));
        for (name, value) in metadata {
            put = put.metadata(name, value);
        }
        let checksum = log_format::crc::to_base64(crc32);
        put.customize()
            .disable_payload_signing()
            // The SDK would hash the bytes itself, over plain http even sign them. We know the sum from the chunk headers.
            // The second header is what makes Ceph verify the first.
            .mutate_request(move |request| {
                let headers = request.headers_mut();
                headers.insert("x-amz-checksum-crc32", checksum.clone());
                headers.insert("x-amz-sdk-checksum-algorithm", "CRC32");
            })
            .send()
            .await
            .map_err(|error| fold::sdk_error(&error))
            .and_then(|answer| match answer.e_tag() {
                Some(_) => Ok(()),
                // A "fine" of somebody before the store: nothing says that the object is there.
                None => Err(malformed("the answer to a PUT names no ETag")),
            })
    }

    /// A whole object is asked for as a range: only then the answer has to say what part of how much it is, and a page of
    /// somebody before the store, or half an object with a length that fits, is seen to be none.
    async fn get_object(
        &self,
        key: &str,
        max_bytes: u64,
        progress: &Progress,
    ) -> Result<Described, StoreError> {
        let answer = self
            .open_object_range(key, 0..max_bytes.saturating_add(1), progress)
            .await?;
        if answer.total.unwrap_or(answer.length) > max_bytes {
            let text = format!("more than the {max_bytes} bytes that are accepted");
            return Err(StoreError::new(StoreErrorKind::TooLarge, text));
        }
        Ok(Described {
            bytes: collect(answer.body, answer.length, progress).await?,
            metadata: answer.metadata,
        })
    }

    async fn get_object_range(
        &self,
        key: &str,
        range: Range<u64>,
        progress: &Progress,
    ) -> Result<Bytes, StoreError> {
        let answer = self.open_object_range(key, range, progress).await?;
        collect(answer.body, answer.length, progress).await
    }

    /// An answer that has been seen to be the range that was asked for.
    async fn open_object_range(
        &self,
        key: &str,
        range: Range<u64>,
        progress: &Progress,
    ) -> Result<RangeAnswer, StoreError> {
        let Some(last) = range.end.checked_sub(1).filter(|last| *last >= range.start) else {
            return Err(StoreError::new(
                StoreErrorKind::InvalidRange,
                format!("{range:?} is empty"),
            ));
        };
        let answer = self
            .client()
            .await?
            .get_object()
            .bucket(&self.config.bucket)
            .key(key)
            .range(format!("bytes={}-{last}", range.start))
            .send()
            .await
            .map_err(|error| fold::sdk_error(&error))?;
        progress.touch();
        // A store that ignores the range would answer with the whole object, and its first bytes would look like ours.
        let part = answer
            .content_range()
            .and_then(ContentRange::parse)
            .filter(|part| part.first == range.start)
            .ok_or_else(|| malformed("the answer is not the range asked for"))?;
        let length = announced_length(answer.content_length())?;
        if length > range.end - range.start {
            return Err(malformed("the answer is longer than the range asked for"));
        }
        if part.last.checked_sub(part.first) != length.checked_sub(1) {
            return Err(malformed("the answer's length is not that of its range"));
        }
        let ends_early = part.last < last;
        if ends_early && part.total.is_some_and(|total| total != part.last + 1) {
            return Err(malformed("the answer is shorter than the range asked for"));
        }
        Ok(RangeAnswer {
            metadata: user_metadata(answer.metadata()),
            body: answer.body,
            length,
            total: part.total,
        })
    }

    async fn stream_object_range(
        &self,
        key: &str,
        range: Range<u64>,
        sink: &mut dyn RangeSink,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let answer = self.open_object_range(key, range, progress).await?;
        let (mut body, mut missing) = (answer.body, answer.length);
        while let Some(frame) = body.next().await {
            let frame = frame.map_err(|error| fold::body_error(&error))?;
            progress.touch();
            missing = missing
                .checked_sub(frame.len() as u64)
                .ok_or_else(longer_than_announced)?;
            sink.push(frame);
        }
        match missing {
            0 => Ok(()),
            _ => Err(ended_early()),
        }
    }

    async fn head_object(&self, key: &str) -> Result<ObjectMeta, StoreError> {
        let answer = self
            .client()
            .await?
            .head_object()
            .bucket(&self.config.bucket)
            .key(key)
            .send()
            .await
            .map_err(|error| fold::sdk_error(&error))?;
        Ok(ObjectMeta {
            size_bytes: announced_length(answer.content_length())?,
            metadata: user_metadata(answer.metadata()),
        })
    }

    async fn list_objects(
        &self,
        prefix: &str,
        delimiter: Option<&str>,
        token: Option<&str>,
        max_keys: usize,
    ) -> Result<(ListPage, Vec<String>), StoreError> {
        let answer = self
            .client()
            .await?
            .list_objects_v2()
            .bucket(&self.config.bucket)
            .prefix(prefix)
            .set_delimiter(delimiter.map(str::to_owned))
            .set_continuation_token(token.map(str::to_owned))
            .max_keys(i32::try_from(max_keys.clamp(1, KEYS_MAX)).unwrap_or(1))
            .send()
            .await
            .map_err(|error| fold::sdk_error(&error))?;
        let next_token = match (answer.is_truncated(), answer.next_continuation_token()) {
            (Some(true), Some(token)) => Some(token.to_owned()),
            (Some(false), _) => None,
            // A listing that broke off parses as an empty one, and an empty one must never be believed by mistake.
            (Some(true), None) | (None, _) => {
                let text = "a listing does not say whether or where it goes on";
                return Err(malformed(text));
            }
        };
        let folders = answer.common_prefixes.unwrap_or_default().into_iter();
        let folders = folders.map(|folder| {
            let nameless = || malformed("a listing has a folder without a name");
            folder.prefix.ok_or_else(nameless)
        });
        let folders = folders.collect::<Result<_, _>>()?;
        let objects = answer.contents.unwrap_or_default().into_iter();
        let objects = objects.map(|object| {
            let size_bytes = object
                .size
                .and_then(|size| u64::try_from(size).ok())
                .unwrap_or(0);
            // Leaving it out would say that it is not there.
            let key = object
                .key
                .ok_or_else(|| malformed("a listing has an object without a key"));
            let modified_ms = object.last_modified.and_then(|time| time.to_millis().ok());
            key.map(|key| ListedObject {
                key,
                size_bytes,
                modified_ms,
            })
        });
        let page = ListPage {
            objects: objects.collect::<Result<_, _>>()?,
            next_token,
        };
        Ok((page, folders))
    }

    async fn delete_objects(&self, keys: &[String]) -> Result<DeleteOutcome, StoreError> {
        if keys.is_empty() {
            return Ok(DeleteOutcome {
                deleted: 0,
                failed: Vec::new(),
            });
        }
        if keys.len() > KEYS_MAX {
            let text = format!("{} keys, at most {KEYS_MAX} are possible", keys.len());
            return Err(StoreError::new(StoreErrorKind::TooLarge, text));
        }
        let build = |error: aws_sdk_s3::error::BuildError| {
            StoreError::new(StoreErrorKind::Unexpected(0), error.to_string())
        };
        let identifiers: Result<Vec<_>, _> = keys
            .iter()
            .map(|key| ObjectIdentifier::builder().key(key).build())
            .collect();
        let delete = Delete::builder()
            .set_objects(Some(identifiers.map_err(build)?))
            .quiet(true)
            .build()
            .map_err(build)?;
        let answer = self
            .client()
            .await?
            .delete_objects()
            .bucket(&self.config.bucket)
            .delete(delete)
            .send()
            .await
            .map_err(|error| fold::sdk_error(&error))?;
        let failed: Vec<_> = answer
            .errors
            .unwrap_or_default()
            .into_iter()
            .filter(|error| error.code() != Some("NoSuchKey"))
            .map(|error| {
                let reason = error.code().unwrap_or("without a code").to_owned();
                (error.key.unwrap_or_default(), reason)
            })
            .collect();
        Ok(DeleteOutcome {
            deleted: keys.len().saturating_sub(failed.len()),
            failed,
        })
    }
}

/// A part of an object, with what its answer says of the whole.
struct RangeAnswer {
    body: ByteStream,
    length: u64,
    /// Length of the object, if the answer says it.
    total: Option<u64>,
    metadata: BTreeMap<String, String>,
}

/// `bytes FIRST-LAST/TOTAL`; a total that is not known is a star.
struct ContentRange {
    first: u64,
    last: u64,
    total: Option<u64>,
}

impl ContentRange {
    fn parse(value: &str) -> Option<Self> {
        let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let number = |text: &str| text.trim().parse::<u64>().ok().filter(|n| *n < u64::MAX);
        Some(Self {
            first: number(first)?,
            last: number(last)?,
            total: match total.trim() {
                "*" => None,
                total => Some(number(total)?),
            },
        })
    }
}

fn user_metadata(all: Option<&HashMap<String, String>>) -> BTreeMap<String, String> {
    let all = all.into_iter().flatten();
    all.map(|(name, value)| (name.to_lowercase(), value.clone()))
        .collect()
}

fn malformed(text: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Malformed, text)
}

fn announced_length(content_length: Option<i64>) -> Result<u64, StoreError> {
    content_length
        .and_then(|length| u64::try_from(length).ok())
        .ok_or_else(|| malformed("the answer does not say how long it is"))
}

async fn collect(
    mut body: ByteStream,
    announced: u64,
    progress: &Progress,
) -> Result<Bytes, StoreError> {
    // `announced` is at most what the caller allows, so a lying store can make us allocate no more than that.
    let capacity = usize::try_from(announced).map_err(|_| malformed("longer than memory"))?;
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.next().await {
        let frame = frame.map_err(|error| fold::body_error(&error))?;
        progress.touch();
        if bytes.is_empty() {
            bytes.reserve(capacity);
        }
        if bytes.len() + frame.len() > capacity {
            return Err(longer_than_announced());
        }
        bytes.extend_from_slice(&frame);
    }
    if bytes.len() == capacity {
        Ok(bytes.freeze())
    } else {
        Err(ended_early())
    }
}

fn longer_than_announced() -> StoreError {
    malformed("the answer is longer than announced")
}

fn ended_early() -> StoreError {
    StoreError::new(StoreErrorKind::Connection, "the answer ended early")
}

impl RemoteTier for S3RemoteTier {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let progress = Progress::start();
            progress
                .guard(
                    self.silence_limit(),
                    self.put_object(request, Arc::clone(&progress)),
                )
                .await
        })
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        Box::pin(async move { Ok(self.get_described(key, max_bytes).await?.bytes) })
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        Box::pin(async move {
            let progress = Progress::start();
            progress
                .guard(
                    self.silence_limit(),
                    self.get_object(key, max_bytes, &progress),
                )
                .await
        })
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            let progress = Progress::start();
            progress
                .guard(
                    self.silence_limit(),
                    self.get_object_range(key, range, &progress),
                )
                .await
        })
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let progress = Progress::start();
            progress
                .guard(
                    self.silence_limit(),
                    self.stream_object_range(key, range, sink, &progress),
                )
                .await
        })
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move {
            Progress::start()
                .guard(self.silence_limit(), self.head_object(key))
                .await
        })
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        Box::pin(async move {
            Progress::start()
                .guard(
                    self.silence_limit(),
                    self.list_objects(prefix, None, token, max_keys),
                )
                .await
                .map(|(page, _)| page)
        })
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        Box::pin(async move {
            let (page, folders) = Progress::start()
                .guard(
                    self.silence_limit(),
                    self.list_objects(prefix, Some("/"), token, KEYS_MAX),
                )
                .await?;
            Ok(FolderPage {
                folders,
                next_token: page.next_token,
            })
        })
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        Box::pin(async move {
            Progress::start()
                .guard(self.silence_limit(), self.delete_objects(keys))
                .await
        })
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        // A listing names the reason in its body, which HEAD cannot; and without the right to list nothing works anyway.
        Box::pin(async move {
            Progress::start()
                .guard(
                    self.silence_limit(),
                    self.list_objects(&self.config.prefix, None, None, 1),
                )
                .await
                .map(drop)
        })
    }
}

#[cfg(test)]
mod tests;
