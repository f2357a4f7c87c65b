//! What a request is, read from its head alone.
//!
//! Owns the names that fault rules and the log use. Does not decide anything: `s3s` routes the
//! request by itself, and has the last word on whether it is a good one.

use std::collections::BTreeMap;

use http::Method;
use http::request::Parts;

/// The facts of one request.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub method: Method,
    pub operation: &'static str,
    pub bucket: String,
    /// Key of an object, or the prefix of a listing.
    pub key: String,
    pub range: Option<String>,
    /// Headers that say what was asked for (never the signature).
    pub headers: BTreeMap<String, String>,
}

impl Facts {
    pub(crate) fn of(head: &Parts) -> Self {
        let path = head.uri.path().trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query = Query(head.uri.query().unwrap_or(""));
        let operation = operation(
            &head.method,
            bucket,
            key,
            &query,
            head.headers.contains_key("x-amz-copy-source"),
        );
        let key = if key.is_empty() {
            query.get("prefix").unwrap_or_default()
        } else {
            decode(key)
        };
        let headers = head
            .headers
            .iter()
            .filter(|(name, _)| is_of_interest(name.as_str()))
            .map(|(name, value)| {
                (
                    name.to_string(),
                    String::from_utf8_lossy(value.as_bytes()).into_owned(),
                )
            })
            .collect();
        Self {
            method: head.method.clone(),
            operation,
            bucket: decode(bucket),
            key,
            range: head
                .headers
                .get(http::header::RANGE)
                .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned()),
            headers,
        }
    }
}

fn is_of_interest(name: &str) -> bool {
    let amazon =
        name.starts_with("x-amz-") && name != "x-amz-security-token" && name != "x-amz-date";
    amazon
        || name.starts_with("if-")
        || matches!(
            name,
            "content-type" | "content-length" | "content-md5" | "expect"
        )
}

fn operation(
    method: &Method,
    bucket: &str,
    key: &str,
    query: &Query<'_>,
    copies: bool,
) -> &'static str {
    let object = !key.is_empty();
    match method.as_str() {
        "GET" if bucket.is_empty() => "ListBuckets",
        "GET" if !object && query.has("location") => "GetBucketLocation",
        "GET" if !object && query.has("versioning") => "GetBucketVersioning",
        "GET" if !object && query.get("list-type").as_deref() == Some("2") => "ListObjectsV2",
        "GET" if !object => "ListObjects",
        "GET" => "GetObject",
        "HEAD" if object => "HeadObject",
        "HEAD" => "HeadBucket",
        "PUT" if !object => "CreateBucket",
        "PUT" if query.has("uploadId") => "UploadPart",
        "PUT" if copies => "CopyObject",
        "PUT" => "PutObject",
        "DELETE" if !object => "DeleteBucket",
        "DELETE" if query.has("uploadId") => "AbortMultipartUpload",
        "DELETE" => "DeleteObject",
        "POST" if !object && query.has("delete") => "DeleteObjects",
        "POST" if query.has("uploads") => "CreateMultipartUpload",
        "POST" if query.has("uploadId") => "CompleteMultipartUpload",
        _ => "Unknown",
    }
}

/// A query string, read on demand.
pub(crate) struct Query<'a>(pub &'a str);

impl Query<'_> {
    pub(crate) fn get(&self, name: &str) -> Option<String> {
        self.0.split('&').find_map(|pair| {
            let (found, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(found) == name).then(|| decode(&value.replace('+', "%20")))
        })
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }
}

fn decode(text: &str) -> String {
    String::from_utf8_lossy(&urlencoding::decode_binary(text.as_bytes())).into_owned()
}
