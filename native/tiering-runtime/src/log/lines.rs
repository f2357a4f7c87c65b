//! The subscriber: an event and the spans around it become one line.
//!
//! Owns which events count and how long a line may be. Does not own the queue's reader.

use std::fmt::{self, Write};
use std::sync::Arc;

use tokio::sync::mpsc::Sender;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::{LogLevel, LogLine};
use crate::stats::Stats;

/// Our own events only.
const TARGET: &str = env!("CARGO_CRATE_NAME");

/// The longest value of a field or message.
const VALUE_BYTES_MAX: usize = 1_024;

pub(super) struct Lines {
    level: LevelFilter,
    waiting: Sender<LogLine>,
    stats: Arc<Stats>,
}

impl Lines {
    pub(super) const fn new(
        level: LevelFilter,
        waiting: Sender<LogLine>,
        stats: Arc<Stats>,
    ) -> Self {
        Self {
            level,
            waiting,
            stats,
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        *metadata.level() <= self.level && is_ours(metadata.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut own = Fields::default();
        event.record(&mut own);
        let mut fields = Vec::new();
        for span in context
            .event_scope(event)
            .into_iter()
            .flat_map(|scope| scope.from_root())
        {
            if let Some(Fields { named, .. }) = span.extensions().get() {
                fields.extend(named.iter().cloned());
            }
        }
        fields.append(&mut own.named);
        let line = LogLine {
            level: level(*event.metadata().level()),
            message: own.message,
            fields,
        };
        if self.waiting.try_send(line).is_err() {
            self.stats.log_lines_dropped.increment();
        }
    }
}

fn is_ours(target: &str) -> bool {
    target
        .strip_prefix(TARGET)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

fn level(level: Level) -> LogLevel {
    match level {
        Level::ERROR => LogLevel::Error,
        Level::WARN => LogLevel::Warn,
        Level::INFO => LogLevel::Info,
        _ => LogLevel::Debug,
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    named: Vec<(&'static str, String)>,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = Short(String::new());
        // It stops where the text is long enough.
        let _ = write!(text, "{value:?}");
        match field.name() {
            "message" => self.message = text.0,
            name => self.named.push((name, text.0)),
        }
    }
}

/// Text up to [`VALUE_BYTES_MAX`].
struct Short(String);

impl Write for Short {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = VALUE_BYTES_MAX.saturating_sub(self.0.len());
        let end = text.floor_char_boundary(room);
        self.0.push_str(text.get(..end).unwrap_or_default());
        if end < text.len() {
            Err(fmt::Error)
        } else {
            Ok(())
        }
    }
}
