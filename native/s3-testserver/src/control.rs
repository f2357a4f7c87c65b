//! The control port: plain JSON over HTTP on loopback, for tests that are not in Rust.
//!
//! Owns the paths below. Does not own what they steer.
//!
//! | request | does |
//! |---|---|
//! | `GET /health` | `{"ok":true,"listening":bool,"buckets":[..]}` |
//! | `GET /log?method=&operation=&key=&rule=&hanging=&status=&after=&done=` | array of [`crate::Entry`]; all parts optional; `key` is a substring, `after` an id |
//! | same with `&min=N&timeout_ms=T` | waits until N entries match; 408 with what there is after T (5000 by default) |
//! | `DELETE /log` | forgets it |
//! | `GET /faults` | array of rules with `matched` and `hits` |
//! | `PUT /faults` | replaces all rules by the array in the body (fields of [`crate::Rule`]) |
//! | `POST /faults` | adds one rule, or an array of them |
//! | `DELETE /faults` | removes all rules and releases all that hang |
//! | `POST /release/NAME` | opens a barrier, until a rule that names it is set again |
//! | `POST /down`, `POST /up` | stops listening and ends all connections; listens again |
//! | `GET /objects?prefix=&bucket=` | array of `{key, size, etag, metadata, checksum_crc32}` |
//! | `DELETE /objects?prefix=&bucket=` | removes them; `{"removed":N}` |
//! | `GET`, `PUT`, `DELETE /object?key=&bucket=` | the bytes themselves; a PUT over an object keeps its ETag, checksum and metadata: bit rot |
//!
//! `bucket` is the first one of the start options unless given. Errors are `{"error":"text"}`.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::facts::Query;
use crate::faults::{Faults, Rule};
use crate::log::{Filter, Log};
use crate::objects::Objects;
use crate::server::Door;

/// How long a wait on the log takes at most, unless said otherwise.
const DEFAULT_WAIT_MS: u64 = 5000;

#[derive(Debug, Clone)]
pub(crate) struct Control {
    pub objects: Objects,
    pub faults: Faults,
    pub log: Log,
    pub door: Door,
    pub bucket: String,
}

enum Reply {
    Json(StatusCode, Value),
    Bytes(Bytes),
}

impl Reply {
    fn ok(value: Value) -> Self {
        Self::Json(StatusCode::OK, value)
    }

    fn error(status: StatusCode, text: impl std::fmt::Display) -> Self {
        Self::Json(status, json!({"error": text.to_string()}))
    }
}

impl Control {
    pub(crate) async fn run(self, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            let control = self.clone();
            let answer = service_fn(move |request| {
                let control = control.clone();
                async move { control.answer(request).await }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
        }
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, http::Error> {
        let (head, body) = request.into_parts();
        let reply = match body.collect().await {
            Ok(body) => {
                let query = Query(head.uri.query().unwrap_or(""));
                self.reply(&head.method, head.uri.path(), &query, body.to_bytes())
                    .await
            }
            Err(error) => Reply::error(StatusCode::BAD_REQUEST, error),
        };
        let (status, kind, bytes) = match reply {
            Reply::Json(status, value) => {
                (status, "application/json", Bytes::from(value.to_string()))
            }
            Reply::Bytes(bytes) => (StatusCode::OK, "application/octet-stream", bytes),
        };
        Response::builder()
            .status(status)
            .header(http::header::CONTENT_TYPE, kind)
            .body(Full::new(bytes))
    }

    async fn reply(&self, method: &Method, path: &str, query: &Query<'_>, body: Bytes) -> Reply {
        let bucket = query.get("bucket").unwrap_or_else(|| self.bucket.clone());
        let prefix = query.get("prefix").unwrap_or_default();
        match (method.as_str(), path) {
            ("GET", "/health") => Reply::ok(
                json!({"ok": true, "listening": self.door.is_open(), "buckets": self.objects.buckets()}),
            ),
            ("GET", "/log") => self.read_log(query).await,
            ("DELETE", "/log") => {
                self.log.clear();
                Reply::ok(json!({}))
            }
            ("GET", "/faults") => Reply::ok(json!(self.faults.status())),
            ("PUT", "/faults") => match rules(&body) {
                Ok(rules) => {
                    self.faults.set(rules);
                    Reply::ok(json!(self.faults.status()))
                }
                Err(error) => Reply::error(StatusCode::BAD_REQUEST, error),
            },
            ("POST", "/faults") => match rules(&body) {
                Ok(rules) => {
                    rules.into_iter().for_each(|rule| self.faults.add(rule));
                    Reply::ok(json!(self.faults.status()))
                }
                Err(error) => Reply::error(StatusCode::BAD_REQUEST, error),
            },
            ("DELETE", "/faults") => {
                self.faults.clear();
                Reply::ok(json!([]))
            }
            ("POST", "/down") => self.set_door(false).await,
            ("POST", "/up") => self.set_door(true).await,
            ("GET", "/objects") => Reply::ok(self.list(&bucket, &prefix)),
            ("DELETE", "/objects") => {
                Reply::ok(json!({"removed": self.objects.remove_prefix(&bucket, &prefix)}))
            }
            (_, "/object") => match query.get("key") {
                Some(key) => self.object(method, &bucket, &key, body),
                None => Reply::error(StatusCode::BAD_REQUEST, "key is missing"),
            },
            ("POST", path) if path.starts_with("/release/") => {
                self.faults.release(path.trim_start_matches("/release/"));
                Reply::ok(json!({}))
            }
            _ => Reply::error(StatusCode::NOT_FOUND, "no such path"),
        }
    }

    async fn set_door(&self, open: bool) -> Reply {
        self.door.set(open).await;
        let listening = self.door.is_open();
        let status = if listening == open {
            StatusCode::OK
        } else {
            StatusCode::INTERNAL_SERVER_ERROR
        };
        Reply::Json(status, json!({"listening": listening}))
    }

    async fn read_log(&self, query: &Query<'_>) -> Reply {
        let number = |name| query.get(name).and_then(|text| text.parse::<u64>().ok());
        let filter = Filter {
            method: query.get("method"),
            operation: query.get("operation"),
            key: query.get("key"),
            rule: query.get("rule"),
            hanging: query.get("hanging"),
            status: query.get("status").and_then(|text| text.parse().ok()),
            after: number("after"),
            done: query.get("done").map(|text| text == "true"),
        };
        let mut status = StatusCode::OK;
        if let Some(min) = number("min") {
            let limit = Duration::from_millis(number("timeout_ms").unwrap_or(DEFAULT_WAIT_MS));
            if !self
                .log
                .wait(&filter, usize::try_from(min).unwrap_or(usize::MAX), limit)
                .await
            {
                status = StatusCode::REQUEST_TIMEOUT;
            }
        }
        Reply::Json(status, json!(self.log.entries(&filter)))
    }

    fn list(&self, bucket: &str, prefix: &str) -> Value {
        let keys = self.objects.keys(bucket, prefix);
        let describe = |key: String| {
            let object = self.objects.get(bucket, &key)?;
            Some(json!({
                "key": key,
                "size": object.body.len(),
                "etag": object.etag,
                "metadata": object.metadata,
                "checksum_crc32": object.checksum_crc32,
            }))
        };
        keys.into_iter().filter_map(describe).collect()
    }

    fn object(&self, method: &Method, bucket: &str, key: &str, body: Bytes) -> Reply {
        let absent = || Reply::error(StatusCode::NOT_FOUND, "no such object");
        match *method {
            Method::GET => self
                .objects
                .get(bucket, key)
                .map_or_else(absent, |object| Reply::Bytes(object.body)),
            Method::PUT => {
                self.objects.put_raw(bucket, key, body);
                Reply::ok(json!({}))
            }
            Method::DELETE if self.objects.remove(bucket, key) => Reply::ok(json!({})),
            Method::DELETE => absent(),
            _ => Reply::error(StatusCode::METHOD_NOT_ALLOWED, "GET, PUT or DELETE"),
        }
    }
}

fn rules(body: &[u8]) -> Result<Vec<Rule>, serde_json::Error> {
    let value: Value = serde_json::from_slice(body)?;
    if value.is_array() {
        serde_json::from_value(value)
    } else {
        serde_json::from_value(value).map(|rule| vec![rule])
    }
}
