//! The log of requests.
//!
//! Owns one entry for each request, from its head to the last byte of the answer, and the means
//! to wait for entries without sleeping. Does not own what happens to a request.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::watch;

use crate::facts::Facts;

/// Entries kept; older ones are dropped first.
const MAX_ENTRIES: usize = 200_000;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It has not.
    Open,
    /// The whole answer went out.
    Answered,
    /// The connection ended first: a fault, or the client left.
    Cut,
}

/// One request.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// Counts requests since the start of the server; never reused.
    pub id: u64,
    /// HTTP method.
    pub method: String,
    /// S3 operation, as `PutObject`.
    pub operation: &'static str,
    /// Bucket, or nothing.
    pub bucket: String,
    /// Key, or the prefix of a listing.
    pub key: String,
    /// `Range` header as sent.
    pub range: Option<String>,
    /// `x-amz-*` and conditional headers as sent.
    pub headers: BTreeMap<String, String>,
    /// Status of the answer, once there is one.
    pub status: Option<u16>,
    /// Body bytes read from the client.
    pub request_bytes: u64,
    /// Body bytes handed to the connection.
    pub response_bytes: u64,
    /// Milliseconds since the start of the server.
    pub start_ms: u64,
    /// Same, at the end; nothing while open.
    pub end_ms: Option<u64>,
    /// Name of the fault rule that hit.
    pub rule: Option<String>,
    /// Barrier this request hangs at now.
    pub hanging: Option<String>,
    /// How it ended.
    pub outcome: Outcome,
}

/// Which entries are meant; an empty filter means all.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// HTTP method.
    pub method: Option<String>,
    /// S3 operation.
    pub operation: Option<String>,
    /// Part of the key.
    pub key: Option<String>,
    /// Name of the rule that hit.
    pub rule: Option<String>,
    /// Barrier it hangs at now.
    pub hanging: Option<String>,
    /// Status of the answer.
    pub status: Option<u16>,
    /// Only entries with a larger id.
    pub after: Option<u64>,
    /// Only ended (true) or only open (false) ones.
    pub done: Option<bool>,
}

impl Filter {
    /// Every request of this operation.
    #[must_use]
    pub fn on(operation: &str) -> Self {
        Self {
            operation: Some(operation.to_owned()),
            ..Self::default()
        }
    }

    fn matches(&self, entry: &Entry) -> bool {
        let same = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        same(&self.method, &entry.method)
            && same(&self.operation, entry.operation)
            && self
                .key
                .as_deref()
                .is_none_or(|part| entry.key.contains(part))
            && self
                .rule
                .as_deref()
                .is_none_or(|name| entry.rule.as_deref() == Some(name))
            && self
                .hanging
                .as_deref()
                .is_none_or(|name| entry.hanging.as_deref() == Some(name))
            && self
                .status
                .is_none_or(|status| entry.status == Some(status))
            && self.after.is_none_or(|after| entry.id > after)
            && self
                .done
                .is_none_or(|done| done == (entry.outcome != Outcome::Open))
    }
}

#[derive(Debug, Default)]
struct State {
    entries: VecDeque<Entry>,
    next_id: u64,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: watch::Sender<()>,
    start: Instant,
}

/// Handle to the log; clones share it.
#[derive(Debug, Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

impl Default for Log {
    fn default() -> Self {
        let shared = Shared {
            state: Mutex::new(State::default()),
            changed: watch::Sender::new(()),
            start: Instant::now(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.shared.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Entries that match, in order of arrival.
    #[must_use]
    pub fn entries(&self, filter: &Filter) -> Vec<Entry> {
        self.lock()
            .entries
            .iter()
            .filter(|entry| filter.matches(entry))
            .cloned()
            .collect()
    }

    /// How many entries match.
    #[must_use]
    pub fn count(&self, filter: &Filter) -> usize {
        self.lock()
            .entries
            .iter()
            .filter(|entry| filter.matches(entry))
            .count()
    }

    /// Forgets every entry (open ones too; they are not logged again when they end).
    pub fn clear(&self) {
        self.lock().entries.clear();
        self.shared.changed.send_replace(());
    }

    /// Waits until `count` entries match; false if `limit` passes first.
    pub async fn wait(&self, filter: &Filter, count: usize, limit: Duration) -> bool {
        let mut changed = self.shared.changed.subscribe();
        let reached = async {
            while self.count(filter) < count {
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(limit, reached).await.is_ok()
    }

    pub(crate) fn begin(&self, facts: &Facts, rule: Option<String>) -> Ticket {
        let start_ms = self.now_ms();
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        if state.entries.len() >= MAX_ENTRIES {
            state.entries.pop_front();
        }
        state.entries.push_back(Entry {
            id,
            method: facts.method.to_string(),
            operation: facts.operation,
            bucket: facts.bucket.clone(),
            key: facts.key.clone(),
            range: facts.range.clone(),
            headers: facts.headers.clone(),
            status: None,
            request_bytes: 0,
            response_bytes: 0,
            start_ms,
            end_ms: None,
            rule,
            hanging: None,
            outcome: Outcome::Open,
        });
        drop(state);
        self.shared.changed.send_replace(());
        Ticket {
            log: self.clone(),
            id,
        }
    }
}

/// The right to write one entry. Dropping it ends the entry as cut, unless it was answered.
#[derive(Debug)]
pub(crate) struct Ticket {
    log: Log,
    id: u64,
}

impl Ticket {
    pub(crate) fn update(&self, change: impl FnOnce(&mut Entry)) {
        let mut state = self.log.lock();
        if let Ok(at) = state
            .entries
            .binary_search_by_key(&self.id, |entry| entry.id)
            && let Some(entry) = state.entries.get_mut(at)
        {
            change(entry);
        }
        drop(state);
        self.log.shared.changed.send_replace(());
    }

    pub(crate) fn answered(&self) {
        self.end(Outcome::Answered);
    }

    fn end(&self, outcome: Outcome) {
        let now_ms = self.log.now_ms();
        self.update(|entry| {
            if entry.outcome == Outcome::Open {
                entry.outcome = outcome;
                entry.end_ms = Some(now_ms);
                entry.hanging = None;
            }
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.end(Outcome::Cut);
    }
}
