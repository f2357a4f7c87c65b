//! Lines of a whole engine, as its sink gets them.

use std::sync::mpsc::{self, Receiver, Sender};

use super::*;
use crate::engine::Engine;
use crate::read::Start;
use crate::remote_tier::StoreErrorKind;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};
use crate::settings::{Config, Secret};

const SOON: Duration = Duration::from_secs(30);
const KEY_ID: &str = "KEYIDOFTHETEST";
const SECRET: &str = "the-secret-of-the-test";
const TOKEN: &str = "the-token-of-the-test";

struct Channel(Mutex<Sender<LogLine>>);

impl LogSink for Channel {
    fn line(&self, line: &LogLine) {
        // The test may have ended.
        self.0.lock().expect("whole").send(line.clone()).ok();
    }
}

fn forward(engine: &Engine) -> Receiver<LogLine> {
    let (sender, lines) = mpsc::channel();
    let sink = Arc::new(Channel(Mutex::new(sender)));
    engine.forward_log(sink).expect("open");
    lines
}

fn config(log_level: LogLevel) -> Config {
    Config {
        bucket: "bucket".to_owned(),
        access_key_id: Some(KEY_ID.to_owned()),
        secret_access_key: Some(Secret::new(SECRET)),
        session_token: Some(Secret::new(TOKEN)),
        log_level,
        ..Config::default()
    }
}

fn failing(log_level: LogLevel) -> Engine {
    let faulty = Arc::new(Faulty::new(Arc::new(MemoryTier::new())));
    faulty.inject(Fault::fail(Operation::List, StoreErrorKind::AccessDenied).times(1));
    Engine::open_with(config(log_level), faulty).expect("opened")
}

fn list(engine: &Engine) {
    let (sender, answer) = mpsc::channel();
    let asked = engine.list_objects("s1", None, move |page| {
        sender.send(page.is_ok()).expect("received");
    });
    asked.expect("open");
    assert_eq!(answer.recv_timeout(SOON), Ok(false));
}

#[test]
fn a_failed_request_is_a_line_with_its_verb_its_key_and_its_attempt() {
    let engine = failing(LogLevel::Debug);
    let lines = forward(&engine);
    list(&engine);
    let opened = lines.recv_timeout(SOON).expect("a line");
    assert_eq!(opened.level, LogLevel::Info);
    let failed = loop {
        let line = lines.recv_timeout(SOON).expect("a line");
        if line.message.starts_with("a request to the store failed") {
            break line;
        }
    };
    let field = |name| {
        let field = failed.fields.iter().find(|(field, _)| *field == name);
        field.map(|(_, value)| value.as_str())
    };
    assert_eq!(field("verb"), Some("LIST"));
    assert_eq!(field("key"), Some("rabbitmq/stream/s1/"));
    assert_eq!(field("attempt"), Some("1"));
    assert_eq!(field("kind"), Some("access_denied"));
}

#[test]
fn what_the_level_does_not_ask_for_is_no_line() {
    let engine = failing(LogLevel::Warn);
    let lines = forward(&engine);
    list(&engine);
    engine.close();
    // The sink goes with the runtime.
    assert_eq!(
        lines.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
}

#[test]
fn lines_that_nobody_takes_are_dropped_and_counted() {
    let stats = Arc::new(Stats::default());
    let log = Log::new(LogLevel::Info, Arc::clone(&stats));
    log.within(|| {
        for number in 0..LINES_WAITING_MAX + 3 {
            tracing::info!(number, "one of many");
        }
    });
    assert_eq!(stats.log_lines_dropped.get(), 3);
}

#[test]
fn events_of_other_crates_and_long_values_do_not_pass_as_they_are() {
    let log = Log::new(LogLevel::Debug, Arc::new(Stats::default()));
    log.within(|| {
        tracing::info!(target: "aws_smithy_runtime", "authorization: {SECRET}");
        tracing::info!(target: "tiering_runtime_of_another", "x");
        tracing::info!(text = %"ä".repeat(5_000), "long");
    });
    let mut waiting = log
        .waiting
        .lock()
        .expect("whole")
        .take()
        .expect("not taken");
    let line = waiting.try_recv().expect("a line");
    assert_eq!(line.message, "long");
    assert_eq!(line.fields[0].1.len(), 1_024);
    assert!(waiting.try_recv().is_err());
}

/// The real client, at debug, with credentials: signed requests to a port that answers nothing.
#[test]
fn no_line_holds_a_secret_or_a_header() {
    // Closed before the request, so that a connection is refused at once.
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound").port()
    };
    let engine = Engine::open(Config {
        endpoint: Some(format!("http://127.0.0.1:{port}")),
        path_style: true,
        ..config(LogLevel::Debug)
    })
    .expect("opened");
    let lines = forward(&engine);
    let (sender, answer) = mpsc::channel();
    let asked = engine.probe(move |outcome| sender.send(outcome.is_ok()).expect("received"));
    asked.expect("open");
    assert_eq!(answer.recv_timeout(SOON), Ok(false));
    engine.manifests().mark_pending("s1");
    drop(
        engine
            .open_reader("s1", Start::Offset(0), Arc::new(Nobody))
            .expect("open"),
    );
    let mut text = String::new();
    while !text.contains("a request to the store failed") {
        let line = lines.recv_timeout(SOON).expect("a line");
        text.push_str(&format!("{line:?}\n"));
    }
    engine.close();
    text.extend(lines.iter().map(|line| format!("{line:?}\n")));
    for secret in [KEY_ID, SECRET, TOKEN] {
        assert!(!text.contains(secret), "{text}");
    }
    let lower = text.to_lowercase();
    for word in ["authorization", "x-amz-", "signature", "credential"] {
        assert!(!lower.contains(word), "{word}: {text}");
    }
}

struct Nobody;

impl crate::read::Wake for Nobody {
    fn wake(&self) {}
}
