//! The S3 operations over the objects.
//!
//! Owns S3's answers: conditions, ranges, listings, error codes. Does not own
//! signatures and XML (`s3s` does), checksums (`checksums`), nor atomicity (`objects` does), nor faults.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use http::{Extensions, HeaderMap, StatusCode};
use http_body_util::BodyExt;
use s3s::dto::{self, ETag, ETagCondition, StreamingBlob};
use s3s::{
    Body, S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, TrailingHeaders, s3_error,
};

use crate::checksums::Claims;
use crate::objects::{Condition, Object, Objects, Position, Refused};

/// Most keys in one page and in one DeleteObjects.
const MAX_KEYS: i32 = 1000;

/// Put into a request's extensions by a fault: conditions are read but not obeyed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IgnoreConditions;

/// On a request: the range that it asks for is not looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IgnoreRange;

/// See the module.
#[derive(Debug)]
pub(crate) struct Operations {
    pub objects: Objects,
}

impl From<Refused> for S3Error {
    fn from(refused: Refused) -> Self {
        let code = match refused {
            Refused::NoBucket => S3ErrorCode::NoSuchBucket,
            Refused::NoKey => S3ErrorCode::NoSuchKey,
            Refused::Condition => S3ErrorCode::PreconditionFailed,
            Refused::NotEmpty => S3ErrorCode::BucketNotEmpty,
        };
        Self::with_message(code, "refused by the test server")
    }
}

fn matches(if_match: Option<&ETagCondition>) -> Condition {
    match if_match {
        None => Condition::Always,
        Some(ETagCondition::Any) => Condition::Exists,
        Some(ETagCondition::ETag(etag)) => Condition::Matches(etag.value().to_owned()),
    }
}

fn write_condition(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
    extensions: &Extensions,
) -> S3Result<Condition> {
    let condition = match if_none_match {
        None => matches(if_match),
        Some(ETagCondition::Any) if if_match.is_none() => Condition::Absent,
        Some(_) => {
            return Err(s3_error!(
                NotImplemented,
                "If-None-Match takes only * here, and no If-Match beside it"
            ));
        }
    };
    Ok(if extensions.get::<IgnoreConditions>().is_some() {
        Condition::Always
    } else {
        condition
    })
}

/// The checks of GET and HEAD.
fn check_read(
    object: &Object,
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> S3Result<()> {
    if let Some(ETagCondition::ETag(wanted)) = if_match
        && wanted.value() != object.etag
    {
        return Err(s3_error!(PreconditionFailed));
    }
    let same = match if_none_match {
        None => false,
        Some(ETagCondition::Any) => true,
        Some(ETagCondition::ETag(known)) => known.value() == object.etag,
    };
    if same {
        let mut error = S3Error::new(S3ErrorCode::NotModified);
        error.set_status_code(StatusCode::NOT_MODIFIED);
        return Err(error);
    }
    Ok(())
}

async fn collect(body: Option<StreamingBlob>, length: Option<i64>) -> S3Result<Bytes> {
    let Some(body) = body else {
        return Ok(Bytes::new());
    };
    let mut body = Body::from(body);
    let mut bytes =
        BytesMut::with_capacity(length.and_then(|n| usize::try_from(n).ok()).unwrap_or(0));
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| S3Error::with_source(S3ErrorCode::IncompleteBody, error))?;
        if let Some(data) = frame.data_ref() {
            bytes.extend_from_slice(data);
        }
    }
    Ok(bytes.freeze())
}

fn trailer(trailer: Option<&TrailingHeaders>) -> HeaderMap {
    trailer.and_then(TrailingHeaders::take).unwrap_or_default()
}

fn metadata(object: &Object) -> Option<dto::Metadata> {
    (!object.metadata.is_empty()).then(|| object.metadata.clone().into_iter().collect())
}

fn checksum(object: &Object, mode: Option<&dto::ChecksumMode>, whole: bool) -> Option<String> {
    let wanted = mode.is_some_and(|mode| mode.as_str().eq_ignore_ascii_case("ENABLED"));
    if wanted && whole {
        object.checksum_crc32.clone()
    } else {
        None
    }
}

fn range(range: Option<dto::Range>, length: u64) -> S3Result<Option<std::ops::Range<u64>>> {
    range
        .map(|range| range.check(length).map_err(S3Error::from))
        .transpose()
}

fn content_range(range: &std::ops::Range<u64>, length: u64) -> String {
    format!(
        "bytes {}-{}/{length}",
        range.start,
        range.end.saturating_sub(1)
    )
}

fn signed(length: u64) -> i64 {
    i64::try_from(length).unwrap_or(i64::MAX)
}

impl Position {
    fn to_token(&self) -> String {
        let (kind, text) = match self {
            Self::Key(text) => ('k', text),
            Self::Prefix(text) => ('p', text),
        };
        text.bytes().fold(String::from(kind), |token, byte| {
            token + &format!("{byte:02x}")
        })
    }

    fn of_token(token: &str) -> Option<Self> {
        let kind = token.get(..1)?;
        let digits = token.get(1..)?;
        let bytes: Option<Vec<u8>> = (0..digits.len())
            .step_by(2)
            .map(|at| {
                digits
                    .get(at..at + 2)
                    .and_then(|pair| u8::from_str_radix(pair, 16).ok())
            })
            .collect();
        let text = String::from_utf8(bytes?).ok()?;
        match kind {
            "k" => Some(Self::Key(text)),
            "p" => Some(Self::Prefix(text)),
            _ => None,
        }
    }
}

#[async_trait::async_trait]
impl S3 for Operations {
    async fn create_bucket(
        &self,
        req: S3Request<dto::CreateBucketInput>,
    ) -> S3Result<S3Response<dto::CreateBucketOutput>> {
        if !self.objects.create_bucket(&req.input.bucket) {
            return Err(s3_error!(BucketAlreadyOwnedByYou));
        }
        let location = Some(format!("/{}", req.input.bucket));
        Ok(S3Response::new(dto::CreateBucketOutput { location }))
    }

    async fn delete_bucket(
        &self,
        req: S3Request<dto::DeleteBucketInput>,
    ) -> S3Result<S3Response<dto::DeleteBucketOutput>> {
        self.objects.delete_bucket(&req.input.bucket)?;
        Ok(S3Response::with_status(
            dto::DeleteBucketOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }

    async fn head_bucket(
        &self,
        req: S3Request<dto::HeadBucketInput>,
    ) -> S3Result<S3Response<dto::HeadBucketOutput>> {
        self.objects.list(&req.input.bucket, "", None, None, 0)?;
        Ok(S3Response::new(dto::HeadBucketOutput::default()))
    }

    async fn get_bucket_location(
        &self,
        req: S3Request<dto::GetBucketLocationInput>,
    ) -> S3Result<S3Response<dto::GetBucketLocationOutput>> {
        self.objects.list(&req.input.bucket, "", None, None, 0)?;
        Ok(S3Response::new(dto::GetBucketLocationOutput::default()))
    }

    async fn list_buckets(
        &self,
        _req: S3Request<dto::ListBucketsInput>,
    ) -> S3Result<S3Response<dto::ListBucketsOutput>> {
        let bucket = |name| dto::Bucket {
            name: Some(name),
            ..Default::default()
        };
        let buckets = Some(self.objects.buckets().into_iter().map(bucket).collect());
        Ok(S3Response::new(dto::ListBucketsOutput {
            buckets,
            ..Default::default()
        }))
    }

    async fn put_object(
        &self,
        req: S3Request<dto::PutObjectInput>,
    ) -> S3Result<S3Response<dto::PutObjectOutput>> {
        let mut input = req.input;
        let condition = write_condition(
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
            &req.extensions,
        )?;
        let body = collect(input.body.take(), input.content_length).await?;
        if input
            .content_length
            .is_some_and(|length| length != signed(body.len() as u64))
        {
            return Err(s3_error!(IncompleteBody));
        }
        let mut claims = Claims::of(&input);
        claims.add_trailer(&trailer(req.trailing_headers.as_ref()));
        claims.check(&body)?;

        let mut object = Object::new(body);
        object.metadata = input
            .metadata
            .unwrap_or_default()
            .into_iter()
            .collect::<BTreeMap<_, _>>();
        object.content_type = input.content_type;
        object.checksum_crc32 = claims.crc32;
        object.encryption = input
            .server_side_encryption
            .map(|sse| sse.as_str().to_owned());
        object.encryption_key = input.ssekms_key_id;
        let output = dto::PutObjectOutput {
            e_tag: Some(ETag::Strong(object.etag.clone())),
            checksum_crc32: object.checksum_crc32.clone(),
            server_side_encryption: object
                .encryption
                .clone()
                .map(dto::ServerSideEncryption::from),
            ssekms_key_id: object.encryption_key.clone(),
            ..Default::default()
        };
        self.objects
            .put_if(&input.bucket, &input.key, object, &condition)?;
        Ok(S3Response::new(output))
    }

    async fn get_object(
        &self,
        req: S3Request<dto::GetObjectInput>,
    ) -> S3Result<S3Response<dto::GetObjectOutput>> {
        let input = req.input;
        let object = self.objects.read(&input.bucket, &input.key)?;
        check_read(
            &object,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
        )?;
        let length = object.body.len() as u64;
        let ignored = req.extensions.get::<IgnoreRange>().is_some();
        let part = range(input.range.filter(|_| !ignored), length)?;
        let body = match &part {
            None => object.body.clone(),
            Some(part) => {
                let end = usize::try_from(part.end)
                    .unwrap_or(usize::MAX)
                    .min(object.body.len());
                let start = usize::try_from(part.start).unwrap_or(usize::MAX).min(end);
                object.body.slice(start..end)
            }
        };
        Ok(S3Response::new(dto::GetObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            checksum_crc32: checksum(&object, input.checksum_mode.as_ref(), part.is_none()),
            content_length: Some(signed(body.len() as u64)),
            content_range: part.as_ref().map(|part| content_range(part, length)),
            body: Some(StreamingBlob::from(Body::from(body))),
            content_type: object.content_type.clone(),
            e_tag: Some(ETag::Strong(object.etag.clone())),
            last_modified: Some(object.modified.into()),
            metadata: metadata(&object),
            server_side_encryption: object.encryption.map(dto::ServerSideEncryption::from),
            ssekms_key_id: object.encryption_key,
            ..Default::default()
        }))
    }

    async fn head_object(
        &self,
        req: S3Request<dto::HeadObjectInput>,
    ) -> S3Result<S3Response<dto::HeadObjectOutput>> {
        let input = req.input;
        let object = self.objects.read(&input.bucket, &input.key)?;
        check_read(
            &object,
            input.if_match.as_ref(),
            input.if_none_match.as_ref(),
        )?;
        let length = object.body.len() as u64;
        let part = range(input.range, length)?;
        Ok(S3Response::new(dto::HeadObjectOutput {
            accept_ranges: Some("bytes".to_owned()),
            checksum_crc32: checksum(&object, input.checksum_mode.as_ref(), part.is_none()),
            content_length: Some(signed(
                part.as_ref().map_or(length, |part| part.end - part.start),
            )),
            content_range: part.as_ref().map(|part| content_range(part, length)),
            content_type: object.content_type.clone(),
            e_tag: Some(ETag::Strong(object.etag.clone())),
            last_modified: Some(object.modified.into()),
            metadata: metadata(&object),
            server_side_encryption: object.encryption.map(dto::ServerSideEncryption::from),
            ssekms_key_id: object.encryption_key,
            ..Default::default()
        }))
    }

    async fn delete_object(
        &self,
        req: S3Request<dto::DeleteObjectInput>,
    ) -> S3Result<S3Response<dto::DeleteObjectOutput>> {
        let condition = write_condition(req.input.if_match.as_ref(), None, &req.extensions)?;
        self.objects
            .delete_if(&req.input.bucket, &req.input.key, &condition)?;
        Ok(S3Response::with_status(
            dto::DeleteObjectOutput::default(),
            StatusCode::NO_CONTENT,
        ))
    }

    async fn delete_objects(
        &self,
        req: S3Request<dto::DeleteObjectsInput>,
    ) -> S3Result<S3Response<dto::DeleteObjectsOutput>> {
        let delete = req.input.delete;
        if delete.objects.is_empty() || delete.objects.len() > MAX_KEYS as usize {
            return Err(s3_error!(MalformedXML));
        }
        let mut output = dto::DeleteObjectsOutput::default();
        let mut deleted = Vec::new();
        let mut errors = Vec::new();
        for object in delete.objects {
            let condition = object.e_tag.map_or(Condition::Always, |etag| {
                Condition::Matches(etag.into_value())
            });
            match self
                .objects
                .delete_if(&req.input.bucket, &object.key, &condition)
            {
                Ok(()) => deleted.push(dto::DeletedObject {
                    key: Some(object.key),
                    ..Default::default()
                }),
                Err(Refused::Condition) => errors.push(dto::Error {
                    key: Some(object.key),
                    code: Some("PreconditionFailed".to_owned()),
                    ..Default::default()
                }),
                Err(refused) => return Err(refused.into()),
            }
        }
        if !delete.quiet.unwrap_or(false) {
            output.deleted = Some(deleted);
        }
        output.errors = (!errors.is_empty()).then_some(errors);
        Ok(S3Response::new(output))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<dto::ListObjectsV2Input>,
    ) -> S3Result<S3Response<dto::ListObjectsV2Output>> {
        let input = req.input;
        let limit = input.max_keys.unwrap_or(MAX_KEYS).clamp(0, MAX_KEYS);
        let after = match (&input.continuation_token, &input.start_after) {
            (Some(token), _) => Some(
                Position::of_token(token)
                    .ok_or_else(|| s3_error!(InvalidArgument, "not a token of this server"))?,
            ),
            (None, Some(key)) => Some(Position::Key(key.clone())),
            (None, None) => None,
        };
        let delimiter = input
            .delimiter
            .as_deref()
            .filter(|delimiter| !delimiter.is_empty());
        let page = self.objects.list(
            &input.bucket,
            input.prefix.as_deref().unwrap_or(""),
            delimiter,
            after.as_ref(),
            usize::try_from(limit).unwrap_or(0),
        )?;

        let encode = input
            .encoding_type
            .as_ref()
            .is_some_and(|kind| kind.as_str() == "url");
        let name = |text: &str| {
            if encode {
                urlencoding::encode(text).into_owned()
            } else {
                text.to_owned()
            }
        };
        let contents: Vec<_> = page
            .objects
            .iter()
            .map(|(key, object)| dto::Object {
                key: Some(name(key)),
                size: Some(signed(object.body.len() as u64)),
                e_tag: Some(ETag::Strong(object.etag.clone())),
                last_modified: Some(dto::Timestamp::from(SystemTime::max(
                    object.modified,
                    SystemTime::UNIX_EPOCH,
                ))),
                storage_class: Some(dto::ObjectStorageClass::from_static(
                    dto::ObjectStorageClass::STANDARD,
                )),
                ..Default::default()
            })
            .collect();
        let prefixes: Vec<_> = page
            .prefixes
            .iter()
            .map(|prefix| dto::CommonPrefix {
                prefix: Some(name(prefix)),
            })
            .collect();
        Ok(S3Response::new(dto::ListObjectsV2Output {
            key_count: Some(i32::try_from(contents.len() + prefixes.len()).unwrap_or(i32::MAX)),
            max_keys: Some(limit),
            is_truncated: Some(page.next.is_some()),
            next_continuation_token: page.next.as_ref().map(Position::to_token),
            continuation_token: input.continuation_token,
            contents: Some(contents),
            common_prefixes: Some(prefixes),
            prefix: input.prefix.as_deref().map(name),
            start_after: input.start_after.as_deref().map(name),
            delimiter: input.delimiter,
            encoding_type: input.encoding_type,
            name: Some(input.bucket),
            ..Default::default()
        }))
    }
}
