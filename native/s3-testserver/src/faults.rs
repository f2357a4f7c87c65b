//! The plan of faults.
//!
//! Owns which request a rule hits and the barriers that hold requests back. Does not carry a
//! fault out: that is `service` (before and after the operation) and `body` (in the bytes).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::facts::Facts;

/// One rule: which requests (all the given parts must agree), which of those, and what happens.
///
/// Actions combine. Order: `hang`, `delay_ms`, then `drop_connection` or `status`, then the
/// operation itself (with `ignore_conditions`, `ignore_range` and the request body's faults), then
/// `lose_answer`, then the response body's faults. With `after_effect` the first group comes after the operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// Shown in the log; `rule-<position>` if empty.
    pub name: String,

    /// HTTP method.
    pub method: Option<String>,
    /// S3 operation, as `PutObject`.
    pub operation: Option<String>,
    /// Part of the key (of the prefix, for a listing).
    pub key: Option<String>,
    /// Whether the request has a `Range`.
    pub ranged: Option<bool>,
    /// First match that is hit, counted from 1; 0 means 1.
    pub nth: u64,
    /// How many matches from there are hit; nothing means all.
    pub count: Option<u64>,

    /// Waits at the barrier of this name until it is released.
    pub hang: Option<String>,
    /// Waits this long.
    pub delay_ms: u64,
    /// Closes the connection without an answer.
    pub drop_connection: bool,
    /// Answers with this status and an S3 error.
    pub status: Option<u16>,
    /// Code of that error.
    pub code: Option<String>,
    /// This text instead of that error, as somebody before the store would answer: HTML, or nothing.
    pub page: Option<String>,
    /// `Retry-After` of that error.
    pub retry_after_s: Option<u64>,
    /// The above happens after the operation took effect, not instead of it.
    pub after_effect: bool,

    /// The server's clock is so far ahead, in `Date` and for the time of signatures; behind if negative.
    pub clock_ahead_ms: Option<i64>,
    /// Refuses requests that were signed more than 15 minutes from the server's time, as S3 does.
    pub check_time: bool,

    /// The operation takes effect and its conditions are not looked at.
    pub ignore_conditions: bool,
    /// A GET is answered with the whole object and status 200, as a store without ranges would.
    pub ignore_range: bool,
    /// The operation takes effect, then the connection is closed without an answer.
    pub lose_answer: bool,

    /// Body bytes a second, in both directions.
    pub rate_bytes_per_s: Option<u64>,
    /// Closes the connection after this many bytes of the response body.
    pub cut_after_bytes: Option<u64>,
    /// Inverts the byte at this position of the response body.
    pub corrupt_at: Option<u64>,
    /// Closes the connection after this many bytes of the request body; no effect.
    pub cut_request_after_bytes: Option<u64>,
    /// Inverts the byte at this position of the request body.
    pub corrupt_request_at: Option<u64>,
}

impl Rule {
    /// A rule for this operation.
    #[must_use]
    pub fn on(operation: &str) -> Self {
        Self {
            operation: Some(operation.to_owned()),
            ..Self::default()
        }
    }

    /// A rule for every request.
    #[must_use]
    pub fn on_all() -> Self {
        Self::default()
    }

    /// Only keys that contain `part`.
    #[must_use]
    pub fn key(self, part: &str) -> Self {
        Self {
            key: Some(part.to_owned()),
            ..self
        }
    }

    /// From the `nth` match on, counted from 1.
    #[must_use]
    pub fn nth(self, nth: u64) -> Self {
        Self { nth, ..self }
    }

    /// At most `count` times.
    #[must_use]
    pub fn times(self, count: u64) -> Self {
        Self {
            count: Some(count),
            ..self
        }
    }

    /// Answers with an error.
    #[must_use]
    pub fn status(self, status: u16, code: &str) -> Self {
        Self {
            status: Some(status),
            code: Some(code.to_owned()),
            ..self
        }
    }

    /// Answers in the store's place: nothing that S3 would say.
    #[must_use]
    pub fn page(self, status: u16, page: &str) -> Self {
        Self {
            status: Some(status),
            page: Some(page.to_owned()),
            ..self
        }
    }

    /// Waits for [`Faults::release`].
    #[must_use]
    pub fn hang(self, barrier: &str) -> Self {
        Self {
            hang: Some(barrier.to_owned()),
            ..self
        }
    }

    /// Error, delay, hang or drop come after the effect.
    #[must_use]
    pub fn after_effect(self) -> Self {
        Self {
            after_effect: true,
            ..self
        }
    }

    fn matches(&self, facts: &Facts) -> bool {
        self.method
            .as_deref()
            .is_none_or(|method| method.eq_ignore_ascii_case(facts.method.as_str()))
            && self
                .operation
                .as_deref()
                .is_none_or(|operation| operation == facts.operation)
            && self
                .key
                .as_deref()
                .is_none_or(|part| facts.key.contains(part))
            && self
                .ranged
                .is_none_or(|ranged| ranged == facts.range.is_some())
    }
}

/// A rule and what it did so far.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// The rule.
    #[serde(flatten)]
    pub rule: Rule,
    /// Requests that matched.
    pub matched: u64,
    /// Requests it was applied to.
    pub hits: u64,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Status>,
    /// True once released. A request waits for its barrier to turn true or to be replaced.
    barriers: HashMap<String, watch::Sender<bool>>,
}

impl State {
    fn barrier(&mut self, name: &str) -> &watch::Sender<bool> {
        self.barriers
            .entry(name.to_owned())
            .or_insert_with(|| watch::Sender::new(false))
    }

    fn add(&mut self, mut rule: Rule) {
        if rule.name.is_empty() {
            rule.name = format!("rule-{}", self.rules.len());
        }
        if let Some(name) = &rule.hang {
            // A barrier of a new rule is closed, whatever was released before; who waits at the
            // old one goes on.
            self.barriers.remove(name);
        }
        self.rules.push(Status {
            rule,
            matched: 0,
            hits: 0,
        });
    }
}

/// Handle to the plan; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    state: Arc<Mutex<State>>,
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces every rule; counting starts again.
    pub fn set(&self, rules: Vec<Rule>) {
        let mut state = self.lock();
        state.rules.clear();
        for rule in rules {
            state.add(rule);
        }
    }

    /// Adds a rule behind the others.
    pub fn add(&self, rule: Rule) {
        self.lock().add(rule);
    }

    /// Removes every rule and releases whoever hangs.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.rules.clear();
        state.barriers.clear();
    }

    /// The rules and their counts.
    #[must_use]
    pub fn status(&self) -> Vec<Status> {
        self.lock().rules.clone()
    }

    /// Opens a barrier for who waits there and who comes later, until a rule that names it is
    /// set or added again.
    pub fn release(&self, barrier: &str) {
        self.lock().barrier(barrier).send_replace(true);
    }

    /// The rule for this request: the first that matches and is due. All that match count it.
    pub(crate) fn hit(&self, facts: &Facts) -> Option<Hit> {
        let mut state = self.lock();
        let mut hit = None;
        for status in &mut state.rules {
            if !status.rule.matches(facts) {
                continue;
            }
            status.matched += 1;
            let first = status.rule.nth.max(1);
            let due = status.matched >= first
                && status
                    .rule
                    .count
                    .is_none_or(|count| status.matched - first < count);
            if due && hit.is_none() {
                status.hits += 1;
                hit = Some(status.rule.clone());
            }
        }
        let rule = hit?;
        // Taken here and not where the request stops: what is released from now on counts.
        let barrier = rule
            .hang
            .as_ref()
            .map(|name| Barrier(state.barrier(name).subscribe()));
        Some(Hit { rule, barrier })
    }
}

/// A rule that hit a request.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    pub rule: Rule,
    pub barrier: Option<Barrier>,
}

/// A request's place at a barrier.
#[derive(Debug)]
pub(crate) struct Barrier(watch::Receiver<bool>);

impl Barrier {
    pub(crate) async fn wait(&mut self) {
        // An error means that the barrier is gone: also a release.
        let _ = self.0.wait_for(|open| *open).await;
    }
}
