//! A wrapper that counts requests, bytes and failures, and gives each request its span.
//!
//! Sits right above the store, so that each attempt counts. Does not change any request or answer.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio::time::Instant;
use tracing::{Instrument, Span, debug_span};

use super::{
    DeleteOutcome, Described, FolderPage, ListPage, ObjectMeta, PutRequest, RangeSink, RemoteTier,
    StoreError, StoreFuture,
};
use crate::durations::Durations;
use crate::stats::{Stat, Stats};

/// Counts what passes through.
pub struct Instrumented {
    inner: Arc<dyn RemoteTier>,
    stats: Arc<Stats>,
}

impl Instrumented {
    /// Wraps a store.
    pub fn new(inner: Arc<dyn RemoteTier>, stats: Arc<Stats>) -> Self {
        Self { inner, stats }
    }

    fn count<'a, T: Send + 'a>(
        &'a self,
        (requests, durations): (&'a Stat, &'a Durations),
        span: Span,
        request: StoreFuture<'a, T>,
        on_success: impl FnOnce(&Stats, &T) + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let counted = async move {
            requests.increment();
            let _in_flight = self.stats.requests_in_flight.hold();
            let sent = Instant::now();
            let outcome: Result<T, StoreError> = request.await;
            durations.observe(sent.elapsed());
            match &outcome {
                Ok(answer) => on_success(&self.stats, answer),
                Err(error) => {
                    self.stats.count_error(error);
                    let (kind, text) = (error.kind().name(), error.text());
                    tracing::debug!(kind, text, "a request to the store failed");
                }
            }
            outcome
        };
        Box::pin(counted.instrument(span))
    }
}

/// Counts bytes as they come, also those of an answer that breaks off.
struct Counting<'a> {
    sink: &'a mut dyn RangeSink,
    stats: &'a Stats,
    /// Until the first byte.
    sent: Option<Instant>,
}

impl RangeSink for Counting<'_> {
    fn push(&mut self, bytes: Bytes) {
        if let Some(sent) = self.sent.take() {
            let durations = &self.stats.request_durations;
            durations.first_byte.observe(sent.elapsed());
        }
        self.stats.received_bytes.add(bytes.len() as u64);
        self.sink.push(bytes);
    }
}

impl RemoteTier for Instrumented {
    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        let len_bytes = request.body.len_bytes();
        let span = debug_span!("request", verb = "PUT", key = %request.key, len_bytes);
        self.count(
            (&self.stats.put_requests, &self.stats.request_durations.put),
            span,
            self.inner.put(request),
            move |stats, ()| {
                stats.sent_bytes.add(len_bytes);
            },
        )
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.count(
            (&self.stats.get_requests, &self.stats.request_durations.get),
            debug_span!("request", verb = "GET", key = %key),
            self.inner.get(key, max_bytes),
            |stats, bytes| {
                stats.received_bytes.add(bytes.len() as u64);
            },
        )
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.count(
            (&self.stats.get_requests, &self.stats.request_durations.get),
            debug_span!("request", verb = "GET", key = %key),
            self.inner.get_described(key, max_bytes),
            |stats, answer| {
                stats.received_bytes.add(answer.bytes.len() as u64);
            },
        )
    }

    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        self.count(
            (
                &self.stats.get_range_requests,
                &self.stats.request_durations.get_range,
            ),
            debug_span!("request", verb = "GET", key = %key, from = range.start, to = range.end),
            self.inner.get_range(key, range),
            |stats, bytes| {
                stats.received_bytes.add(bytes.len() as u64);
            },
        )
    }

    fn stream_range<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        sink: &'a mut dyn RangeSink,
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let mut counting = Counting {
                sink,
                stats: &self.stats,
                sent: Some(Instant::now()),
            };
            let span = debug_span!("request", verb = "GET", key = %key, from = range.start, to = range.end);
            let request = self.inner.stream_range(key, range, &mut counting);
            let counts = (
                &self.stats.get_range_requests,
                &self.stats.request_durations.get_range,
            );
            self.count(counts, span, request, |_, ()| ()).await
        })
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.count(
            (
                &self.stats.head_requests,
                &self.stats.request_durations.head,
            ),
            debug_span!("request", verb = "HEAD", key = %key),
            self.inner.head(key),
            |_, _| (),
        )
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.count(
            (
                &self.stats.list_requests,
                &self.stats.request_durations.list,
            ),
            debug_span!("request", verb = "LIST", key = %prefix),
            self.inner.list(prefix, token, max_keys),
            |_, _| (),
        )
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.count(
            (
                &self.stats.list_requests,
                &self.stats.request_durations.list,
            ),
            debug_span!("request", verb = "LIST", key = %prefix),
            self.inner.list_folders(prefix, token),
            |_, _| (),
        )
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.count(
            (
                &self.stats.delete_requests,
                &self.stats.request_durations.delete,
            ),
            debug_span!("request", verb = "DELETE", keys = keys.len()),
            self.inner.delete(keys),
            |stats, outcome| {
                stats.objects_deleted.add(outcome.deleted as u64);
                stats.objects_delete_failed.add(outcome.failed.len() as u64);
            },
        )
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.count(
            (
                &self.stats.list_requests,
                &self.stats.request_durations.list,
            ),
            debug_span!("request", verb = "LIST"),
            self.inner.probe(),
            |_, ()| (),
        )
    }
}
