//! A store with a clock, and a node with another one.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::super::S3RemoteTier;
use super::*;
use crate::clock::Clock;
use crate::remote_tier::{PutBody, PutRequest, RemoteTier, StoreErrorKind};
use crate::settings::{Config, Secret};
use crate::stats::Stats;

const DAY_MS: i64 = 24 * 3_600 * 1_000;
const MINUTE_MS: i64 = 60_000;

#[test]
fn a_date_is_read_or_there_is_none() {
    let date = "Tue, 15 Nov 1994 08:12:31 GMT";
    assert_eq!(milliseconds(date), Some(784_887_151_000));
    for nonsense in [
        "",
        "yesterday",
        "Tue, 99 Nov 1994 08:12:31 GMT",
        "Thu, 01 Jan 1970 00:00:00 GMT",
    ] {
        assert_eq!(milliseconds(nonsense), None, "{nonsense}");
    }
}

fn real_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as i64)
}

fn http_date(ms: i64) -> String {
    let date = DateTime::from_millis(ms).fmt(Format::HttpDate);
    date.expect("a date")
}

/// A node whose system's clock is `ahead_ms` ahead of the real time.
struct Node {
    ahead_ms: Arc<AtomicI64>,
    tier: S3RemoteTier,
    timekeeper: Arc<Timekeeper>,
    stats: Arc<Stats>,
    listener: TcpListener,
}

async fn node(ahead_ms: i64) -> Node {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let config = Config {
        bucket: "bucket".to_owned(),
        endpoint: Some(format!(
            "http://{}",
            listener.local_addr().expect("an address")
        )),
        path_style: true,
        access_key_id: Some("AKTEST".to_owned()),
        secret_access_key: Some(Secret::new("secret")),
        request_timeout_ms: 5_000,
        ..Config::default()
    };
    let stats = Arc::new(Stats::default());
    let ahead_ms = Arc::new(AtomicI64::new(ahead_ms));
    let read = Arc::clone(&ahead_ms);
    let system = Box::new(move || real_ms() + read.load(Ordering::SeqCst));
    let timekeeper = Timekeeper::with_system(&config, Clock::start(), Arc::clone(&stats), system);
    let timekeeper = Arc::new(timekeeper);
    let tier = S3RemoteTier::with_timekeeper(&config, Arc::clone(&timekeeper));
    Node {
        ahead_ms,
        tier,
        timekeeper,
        stats,
        listener,
    }
}

/// Takes one request without a body to speak of, and answers by what its head says.
async fn serve(listener: &TcpListener, answer: impl FnOnce(&str) -> String) -> String {
    let (mut socket, _) = listener.accept().await.expect("a connection");
    let mut bytes = Vec::new();
    while !bytes.windows(4).any(|window| window == b"\r\n\r\n") {
        let count = socket.read_buf(&mut bytes).await.expect("a request");
        assert!(count > 0, "ended inside the head");
    }
    let head = String::from_utf8_lossy(&bytes).into_owned();
    socket
        .write_all(answer(&head).as_bytes())
        .await
        .expect("answered");
    socket.shutdown().await.expect("closed");
    // Until the other side closes too: an unread body would reset the connection under the answer.
    while socket
        .read_buf(&mut bytes)
        .await
        .is_ok_and(|count| count > 0)
    {}
    head
}

fn answer(status: &str, headers: &[(&str, String)], body: &str) -> String {
    let headers: String = headers
        .iter()
        .map(|(name, value)| format!("{name}: {value}\r\n"))
        .collect();
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    )
}

fn error_document(code: &str) -> String {
    format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>")
}

/// How far the node then believes to be ahead of the store.
async fn heard(status: &str, headers: &[(&str, String)], body: &str, put: bool) -> i64 {
    let node = node(0).await;
    let response = answer(status, headers, body);
    let request = async {
        if put {
            let put = PutRequest {
                key: "k".to_owned(),
                body: PutBody::Bytes(Bytes::from_static(b"root")),
                crc32: log_format::crc::crc32(b"root"),
                metadata: Vec::new(),
            };
            drop(node.tier.put(put).await);
        } else {
            drop(node.tier.get("k", 1 << 20).await);
        }
    };
    let serving = serve(&node.listener, |_| response);
    tokio::join!(request, serving);
    node.stats.clock_skew_ms.get()
}

#[tokio::test]
async fn every_answer_says_what_time_it_is() {
    let date = || ("date", http_date(real_ms() - DAY_MS));
    let near = |skew_ms: i64| (skew_ms - DAY_MS).abs() < MINUTE_MS;
    assert!(near(heard("200 OK", &[date()], "fine", false).await));
    assert!(near(heard("200 OK", &[date()], "", true).await));
    let missing = error_document("NoSuchKey");
    assert!(near(
        heard("404 Not Found", &[date()], &missing, false).await
    ));
    assert!(near(
        heard("503 Slow Down", &[date()], "<html>", true).await
    ));
}

#[tokio::test]
async fn an_answer_without_a_date_or_out_of_a_cache_says_nothing() {
    assert_eq!(heard("200 OK", &[], "fine", false).await, 0);
    let nonsense = [("date", "yesterday".to_owned())];
    assert_eq!(heard("200 OK", &nonsense, "fine", false).await, 0);
    let date = ("date", http_date(real_ms() - DAY_MS));
    let cached = [date, ("age", "3600".to_owned())];
    assert_eq!(heard("200 OK", &cached, "fine", false).await, 0);
}

/// When a request says that it was signed.
fn signed_ms(head: &str) -> i64 {
    let date = head
        .lines()
        .find_map(|line| line.strip_prefix("x-amz-date: "))
        .expect("signed");
    let (day, time) = date.trim_end_matches('Z').split_once('T').expect("a time");
    let date = format!(
        "{}-{}-{}T{}:{}:{}Z",
        &day[..4],
        &day[4..6],
        &day[6..],
        &time[..2],
        &time[2..4],
        &time[4..]
    );
    let date = DateTime::from_str(&date, Format::DateTime).expect("a date");
    date.to_millis().expect("in range")
}

/// As S3 does: what was signed more than 15 minutes from now is refused.
fn judge(head: &str) -> String {
    let date = [("date", http_date(real_ms()))];
    let range = ("content-range", "bytes 0-3/4".to_owned());
    if (signed_ms(head) - real_ms()).abs() > 15 * MINUTE_MS {
        answer(
            "403 Forbidden",
            &date,
            &error_document("RequestTimeTooSkewed"),
        )
    } else {
        answer("206 Partial Content", &[date[0].clone(), range], "fine")
    }
}

#[tokio::test]
async fn a_node_whose_clock_is_wrong_signs_by_the_store_s_after_one_answer() {
    for ahead_ms in [20 * MINUTE_MS, -20 * MINUTE_MS, 400 * DAY_MS] {
        let node = node(ahead_ms).await;
        let requests = async {
            let refused = node.tier.get("k", 1 << 20).await;
            assert_eq!(
                refused.map_err(|error| error.kind()),
                Err(StoreErrorKind::AccessDenied)
            );
            let fine = Ok(Bytes::from_static(b"fine"));
            assert_eq!(node.tier.get("k", 1 << 20).await, fine);
            assert_eq!(node.tier.get("k", 1 << 20).await, fine);
        };
        let serving = async {
            for _ in 0..3 {
                serve(&node.listener, judge).await;
            }
        };
        tokio::join!(requests, serving);
        // What is cached of credentials expires by the same clock.
        let for_the_store = node.timekeeper.for_the_store();
        let off = for_the_store
            .duration_since(SystemTime::now() - Duration::from_secs(60))
            .map(|off| off.as_secs());
        assert!(off.is_ok_and(|off| off <= 120), "{for_the_store:?}");
        assert!(
            node.timekeeper.now().is_err(),
            "and nothing is deleted by such a clock"
        );
    }
}

#[tokio::test]
async fn a_step_of_the_system_s_clock_spoils_no_signature() {
    let node = node(0).await;
    let requests = async {
        for step_ms in [0, 30 * DAY_MS, 0, -30 * DAY_MS] {
            node.ahead_ms.store(step_ms, Ordering::SeqCst);
            let answered = node.tier.get("k", 1 << 20).await;
            assert_eq!(answered, Ok(Bytes::from_static(b"fine")), "{step_ms}");
        }
    };
    let serving = async {
        for _ in 0..4 {
            serve(&node.listener, judge).await;
        }
    };
    tokio::join!(requests, serving);
    assert!(node.timekeeper.now().is_ok());
}
