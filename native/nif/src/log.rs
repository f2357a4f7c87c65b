//! Lines of the native log, as messages to the engine's owner.

use rustler::{Atom, Encoder, Env, Term};
use tiering_runtime::log::{LogLevel, LogLine, LogSink};

use crate::atoms;
use crate::codec::text;
use crate::message::Mailbox;

impl LogSink for Mailbox {
    fn line(&self, line: &LogLine) {
        self.send(|env| line_term(env, line));
    }
}

/// `{log, Level, Message, [{Field, Value}]}`.
fn line_term<'a>(env: Env<'a>, line: &LogLine) -> Term<'a> {
    let fields: Vec<(Term<'a>, Term<'a>)> = (line.fields.iter())
        .map(|(name, value)| (text(env, name), text(env, value)))
        .collect();
    (
        atoms::log(),
        level(line.level),
        text(env, &line.message),
        fields,
    )
        .encode(env)
}

fn level(level: LogLevel) -> Atom {
    match level {
        LogLevel::Error => atoms::error(),
        LogLevel::Warn => atoms::warning(),
        LogLevel::Info => atoms::info(),
        LogLevel::Debug | LogLevel::Off => atoms::debug(),
    }
}
