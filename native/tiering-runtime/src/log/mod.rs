//! What the native side reports of its work: `tracing` spans and events of this crate, as lines for the broker's log.
//!
//! Owns the subscriber of one engine, its level, and the bounded queue of lines. Does not own where a line ends: that is a
//! [`LogSink`]. No static is set: each thread of the engine's runtime gets the subscriber when it starts, and it ends with them.
//!
//! Off costs one load of an atomic for each span and event. Events of other crates are never taken: the SDK's show headers.

mod lines;

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::Dispatch;
use tracing::dispatcher::{self, DefaultGuard};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;

use crate::stats::Stats;
use lines::Lines;

/// Lines that may wait for the sink. More are dropped and counted: work never waits for its log.
const LINES_WAITING_MAX: usize = 1_024;

/// The pause after each line, so that an outage with thousands of streams is a hundred lines a second.
const LINE_PAUSE: Duration = Duration::from_millis(10);

/// From which level on events become lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// Nothing is reported.
    #[default]
    Off,
    /// A mistake of ours.
    Error,
    /// Something an operator has to look at.
    Warn,
    /// What happens seldom: an engine opens, a stream stops.
    Info,
    /// Each request, and why it failed.
    Debug,
}

impl LogLevel {
    const fn filter(self) -> LevelFilter {
        match self {
            Self::Off => LevelFilter::OFF,
            Self::Error => LevelFilter::ERROR,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Debug => LevelFilter::DEBUG,
        }
    }
}

/// One event, with the fields of the spans around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Its level, never [`LogLevel::Off`].
    pub level: LogLevel,
    /// What happened.
    pub message: String,
    /// To what: the outermost span's fields first.
    pub fields: Vec<(&'static str, String)>,
}

/// Where lines go. Called from threads of the runtime; must not block.
pub trait LogSink: Send + Sync + 'static {
    /// Passes one line on.
    fn line(&self, line: &LogLine);
}

/// The log of one engine.
#[derive(Debug)]
pub(crate) struct Log {
    dispatch: Option<Dispatch>,
    waiting: Mutex<Option<mpsc::Receiver<LogLine>>>,
}

thread_local! {
    /// For as long as the thread runs.
    static ENTERED: RefCell<Option<DefaultGuard>> = const { RefCell::new(None) };
}

impl Log {
    pub(crate) fn new(level: LogLevel, stats: Arc<Stats>) -> Self {
        if level == LogLevel::Off {
            return Self {
                dispatch: None,
                waiting: Mutex::new(None),
            };
        }
        let (sender, waiting) = mpsc::channel(LINES_WAITING_MAX);
        let lines = Lines::new(level.filter(), sender, stats);
        Self {
            dispatch: Some(Dispatch::new(tracing_subscriber::registry().with(lines))),
            waiting: Mutex::new(Some(waiting)),
        }
    }

    /// What each thread of the runtime does first.
    pub(crate) fn enter_thread(&self) {
        if let Some(dispatch) = &self.dispatch {
            ENTERED.with(|entered| {
                *entered.borrow_mut() = Some(dispatcher::set_default(dispatch));
            });
        }
    }

    /// What each thread of the runtime does last.
    pub(crate) fn leave_thread() {
        let _ = ENTERED.try_with(|entered| entered.borrow_mut().take());
    }

    /// Makes a span or an event on a thread that is not the runtime's.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.dispatch {
            Some(dispatch) => dispatcher::with_default(dispatch, work),
            None => work(),
        }
    }

    /// Hands all lines to the sink, one after the other; the first caller's sink gets them.
    pub(crate) fn forward(
        &self,
        sink: Arc<dyn LogSink>,
    ) -> Option<impl Future<Output = ()> + use<>> {
        let waiting = self
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        waiting.map(|mut waiting| async move {
            while let Some(line) = waiting.recv().await {
                sink.line(&line);
                tokio::time::sleep(LINE_PAUSE).await;
            }
        })
    }
}

#[cfg(test)]
mod tests;
