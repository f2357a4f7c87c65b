//! What goes over the wire, seen from a raw socket, and what nonsense from the other side becomes.

use std::collections::BTreeMap;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;
use crate::remote_tier::{BodyFrames, BodySource};
use crate::settings::Secret;

struct Request {
    line: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

/// Answers one request with `response` and hands over what was asked.
async fn serve_once(listener: TcpListener, response: Vec<u8>) -> Request {
    let (mut socket, _) = listener.accept().await.expect("a connection");
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        assert!(
            socket.read_buf(&mut bytes).await.expect("a request") > 0,
            "ended inside the head"
        );
    };
    let head = String::from_utf8_lossy(&bytes[..head_end]).into_owned();
    let mut lines = head.split("\r\n");
    let line = lines.next().unwrap_or_default().to_owned();
    let headers: BTreeMap<_, _> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_lowercase(), value.trim().to_owned()))
        .collect();
    let length: usize = headers
        .get("content-length")
        .map_or(0, |length| length.parse().expect("a number"));
    let mut body = bytes.split_off(head_end + 4);
    while body.len() < length {
        assert!(
            socket.read_buf(&mut body).await.expect("a body") > 0,
            "ended inside the body"
        );
    }
    socket.write_all(&response).await.expect("answered");
    socket.shutdown().await.expect("closed");
    Request {
        line,
        headers,
        body,
    }
}

fn config(endpoint: String) -> Config {
    Config {
        bucket: "bucket".to_owned(),
        endpoint: Some(endpoint),
        path_style: true,
        access_key_id: Some("AKTEST".to_owned()),
        secret_access_key: Some(Secret::new("secret")),
        request_timeout_ms: 5_000,
        ..Config::default()
    }
}

async fn tier_and_listener() -> (S3RemoteTier, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    (S3RemoteTier::new(&config(endpoint)), listener)
}

fn response(status: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status}\r\nconnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !headers.iter().any(|(name, _)| *name == "content-length") {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    format!("{text}\r\n{body}").into_bytes()
}

struct Frames(Vec<&'static [u8]>);

impl BodySource for Frames {
    fn len_bytes(&self) -> u64 {
        self.0.iter().map(|frame| frame.len() as u64).sum()
    }

    fn open(&self) -> BodyFrames {
        let (sender, receiver) = mpsc::channel(self.0.len());
        for frame in &self.0 {
            sender
                .try_send(Ok(Bytes::from_static(frame)))
                .expect("room for all");
        }
        receiver
    }
}

fn assert_put_on_the_wire(request: &Request, bytes: &[u8]) {
    assert_eq!(
        request.line.split('?').next(),
        Some("PUT /bucket/a/key"),
        "{}",
        request.line
    );
    let header = |name: &str| request.headers.get(name).map(String::as_str);
    assert_eq!(
        header("content-length"),
        Some(bytes.len().to_string().as_str())
    );
    assert_eq!(header("x-amz-content-sha256"), Some("UNSIGNED-PAYLOAD"));
    let checksum = log_format::crc::to_base64(log_format::crc::crc32(bytes));
    assert_eq!(header("x-amz-checksum-crc32"), Some(checksum.as_str()));
    assert_eq!(header("x-amz-sdk-checksum-algorithm"), Some("CRC32"));
    assert_eq!(header("x-amz-meta-stream"), Some("s1"));
    for absent in [
        "transfer-encoding",
        "content-encoding",
        "x-amz-trailer",
        "expect",
    ] {
        assert_eq!(header(absent), None, "{absent}");
    }
    let signed = header("authorization")
        .and_then(|value| value.split("SignedHeaders=").nth(1))
        .unwrap_or_default();
    for name in [
        "x-amz-checksum-crc32",
        "x-amz-sdk-checksum-algorithm",
        "x-amz-content-sha256",
        "x-amz-meta-stream",
    ] {
        assert!(
            signed.contains(name),
            "{name} is not among the signed headers {signed}"
        );
    }
    assert_eq!(request.body, bytes);
}

async fn put_on_the_wire(body: PutBody, bytes: &[u8]) {
    let (tier, listener) = tier_and_listener().await;
    let server = tokio::spawn(serve_once(
        listener,
        response("200 OK", &[("etag", "\"x\"")], ""),
    ));
    let put = PutRequest {
        key: "a/key".to_owned(),
        body,
        crc32: log_format::crc::crc32(bytes),
        metadata: vec![("stream", "s1".to_owned())],
    };
    assert_eq!(tier.put(put).await, Ok(()));
    assert_put_on_the_wire(&server.await.expect("served"), bytes);
}

#[tokio::test]
async fn a_streamed_put_is_plain_and_checked() {
    let source = Arc::new(Frames(vec![b"hello ", b"wide ", b"world"]));
    put_on_the_wire(PutBody::Source(source), b"hello wide world").await;
}

#[tokio::test]
async fn bug_105_a_root_or_group_is_put_with_its_checksum_as_a_fragment_is() {
    put_on_the_wire(PutBody::Bytes(Bytes::from_static(b"root")), b"root").await;
}

async fn outcome_of<T, F>(response: Vec<u8>, request: F) -> Result<T, StoreErrorKind>
where
    F: AsyncFnOnce(&S3RemoteTier) -> Result<T, StoreError>,
{
    let (tier, listener) = tier_and_listener().await;
    let server = tokio::spawn(serve_once(listener, response));
    let outcome = request(&tier).await.map_err(|error| error.kind());
    server.abort();
    outcome
}

#[tokio::test]
async fn a_lying_length_is_refused_before_it_is_believed() {
    let whole = async |range: &str, length: &str, body: &str| {
        let headers = [("content-range", range), ("content-length", length)];
        let answer = response("206 Partial Content", &headers, body);
        outcome_of(answer, async |tier| tier.get("k", 1 << 20).await).await
    };
    for (range, length, body, outcome) in [
        (
            "bytes 0-4/5",
            "5",
            "hello",
            Ok(Bytes::from_static(b"hello")),
        ),
        (
            "bytes 0-4/*",
            "5",
            "hello",
            Ok(Bytes::from_static(b"hello")),
        ),
        // More than is accepted: the object, or what is announced of it.
        (
            "bytes 0-1048576/1099511627776",
            "1048577",
            "x",
            Err(StoreErrorKind::TooLarge),
        ),
        (
            "bytes 0-1048576/*",
            "1048577",
            "x",
            Err(StoreErrorKind::TooLarge),
        ),
        // It ended early, with an announcement or with one that fits.
        (
            "bytes 0-9/10",
            "10",
            "short",
            Err(StoreErrorKind::Connection),
        ),
        ("bytes 0-4/10", "5", "short", Err(StoreErrorKind::Malformed)),
        ("bytes 0-9/10", "5", "short", Err(StoreErrorKind::Malformed)),
        ("bytes 0-4/10", "0", "", Err(StoreErrorKind::Malformed)),
        // Another part, or no part of anything.
        ("bytes 5-9/10", "5", "hello", Err(StoreErrorKind::Malformed)),
        ("bytes 4-0/5", "5", "hello", Err(StoreErrorKind::Malformed)),
        ("bytes */5", "5", "hello", Err(StoreErrorKind::Malformed)),
        ("5", "5", "hello", Err(StoreErrorKind::Malformed)),
    ] {
        assert_eq!(
            whole(range, length, body).await,
            outcome,
            "{range} {length}"
        );
    }
}

#[tokio::test]
async fn a_page_that_says_fine_is_no_object_and_no_receipt() {
    for body in [
        "<html>Sorry, we are down for maintenance</html>",
        "fine",
        "",
    ] {
        let kind = outcome_of(response("200 OK", &[], body), async |tier| {
            tier.get("k", 1 << 20).await.map(drop)
        });
        assert_eq!(kind.await, Err(StoreErrorKind::Malformed), "{body:?}");
        let kind = outcome_of(response("200 OK", &[], body), async |tier| {
            let bytes = Bytes::from_static(b"bytes");
            let put = PutRequest {
                key: "k".to_owned(),
                crc32: log_format::crc::crc32(&bytes),
                body: PutBody::Bytes(bytes),
                metadata: Vec::new(),
            };
            tier.put(put).await
        });
        assert_eq!(kind.await, Err(StoreErrorKind::Malformed), "{body:?}");
    }
}

#[tokio::test]
async fn a_range_is_the_range_or_an_error() {
    let range = [("content-range", "bytes 3-6/20")];
    let bytes = outcome_of(
        response("206 Partial Content", &range, "3456"),
        async |tier| tier.get_range("k", 3..7).await,
    );
    assert_eq!(bytes.await, Ok(Bytes::from_static(b"3456")));

    let kind = outcome_of(response("200 OK", &[], "0123"), async |tier| {
        tier.get_range("k", 3..7).await
    })
    .await;
    assert_eq!(
        kind,
        Err(StoreErrorKind::Malformed),
        "the range was ignored"
    );

    let kind = outcome_of(
        response("206 Partial Content", &range, "345678"),
        async |tier| tier.get_range("k", 3..7).await,
    );
    assert_eq!(kind.await, Err(StoreErrorKind::Malformed), "too long");

    let kind = outcome_of(Vec::new(), async |tier| tier.get_range("k", 7..7).await).await;
    assert_eq!(kind, Err(StoreErrorKind::InvalidRange));
}

fn error_document(code: &str) -> String {
    format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>")
}

#[tokio::test]
async fn bug_59_what_stores_really_answer_has_a_kind_and_429_and_5xx_are_retried() {
    for (status, body, kind) in [
        (
            "404 Not Found",
            error_document("NoSuchKey"),
            StoreErrorKind::NotFound,
        ),
        (
            "404 Not Found",
            error_document("NoSuchBucket"),
            StoreErrorKind::NoSuchBucket,
        ),
        ("404 Not Found", String::new(), StoreErrorKind::Bare404),
        (
            "404 Not Found",
            "default backend - 404".to_owned(),
            StoreErrorKind::Bare404,
        ),
        (
            "404 Not Found",
            "<html><body>404</body></html>".to_owned(),
            StoreErrorKind::Bare404,
        ),
        (
            "404 Not Found",
            "<?xml version=\"1.0\"?><Error><Code>NoSuchK".to_owned(),
            StoreErrorKind::Bare404,
        ),
        (
            "403 Forbidden",
            error_document("InvalidObjectState"),
            StoreErrorKind::Archived,
        ),
        (
            "413 Payload Too Large",
            "<html>".to_owned(),
            StoreErrorKind::BodyRefused,
        ),
        (
            "416 Range Not Satisfiable",
            String::new(),
            StoreErrorKind::Malformed,
        ),
        (
            "416 Range Not Satisfiable",
            error_document("InvalidRange"),
            StoreErrorKind::InvalidRange,
        ),
        (
            "403 Forbidden",
            error_document("SignatureDoesNotMatch"),
            StoreErrorKind::AccessDenied,
        ),
        (
            "503 Service Unavailable",
            error_document("SlowDown"),
            StoreErrorKind::Throttled,
        ),
        (
            "500 Internal Server Error",
            "no xml".to_owned(),
            StoreErrorKind::Server,
        ),
        (
            "502 Bad Gateway",
            "<html>".to_owned(),
            StoreErrorKind::Server,
        ),
        (
            "400 Bad Request",
            error_document("BadDigest"),
            StoreErrorKind::Checksum,
        ),
        (
            "301 Moved Permanently",
            error_document("PermanentRedirect"),
            StoreErrorKind::WrongRegion,
        ),
        (
            "429 Too Many Requests",
            String::new(),
            StoreErrorKind::Throttled,
        ),
        (
            "501 Not Implemented",
            error_document("NotImplemented"),
            StoreErrorKind::Unexpected(501),
        ),
    ] {
        let outcome = outcome_of(response(status, &[], &body), async |tier| {
            tier.get("k", 1024).await
        })
        .await;
        assert_eq!(outcome, Err(kind), "{status} {body}");
        let passing = ["429", "500", "502", "503"].contains(&&status[..3])
            || matches!(kind, StoreErrorKind::Bare404 | StoreErrorKind::Malformed);
        assert_eq!(kind.is_retryable(), passing, "{status}");
    }
}

#[tokio::test]
async fn bug_106_a_prefix_with_a_space_is_asked_for_as_the_store_reads_it() {
    let listing = "<?xml version=\"1.0\"?><ListBucketResult><IsTruncated>false</IsTruncated>\
                   <Contents><Key>a b/+c</Key><Size>1</Size></Contents></ListBucketResult>";
    let (tier, listener) = tier_and_listener().await;
    let server = tokio::spawn(serve_once(listener, response("200 OK", &[], listing)));
    let page = tier.list("a b/+", None, 10).await.expect("listed");
    let line = server.await.expect("served").line;
    // A plus would be read as itself by some stores, and as a space by others.
    assert!(line.contains("prefix=a%20b%2F%2B"), "{line}");
    assert_eq!(page.objects[0].key, "a b/+c");
}

#[tokio::test]
async fn nonsense_is_an_error_not_a_panic() {
    for body in [
        "",
        "hello",
        "<ListBucketResult>",
        "<html><body>proxy</body></html>",
        "\u{0}\u{1}",
    ] {
        let outcome = outcome_of(response("200 OK", &[], body), async |tier| {
            tier.list("p", None, 10).await
        })
        .await;
        assert!(outcome.is_err(), "{body:?} {outcome:?}");
    }
    let outcome = outcome_of(b"this is not http\r\n\r\n".to_vec(), async |tier| {
        tier.get("k", 10).await
    })
    .await;
    assert!(outcome.is_err(), "{outcome:?}");
    let endless = "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>";
    let outcome = outcome_of(response("200 OK", &[], endless), async |tier| {
        tier.list("p", None, 10).await
    })
    .await;
    assert_eq!(outcome, Err(StoreErrorKind::Malformed));
}

#[tokio::test]
async fn nobody_there_is_a_connection_error() {
    let (tier, listener) = tier_and_listener().await;
    drop(listener);
    let kind = tier.probe().await.map_err(|error| error.kind());
    assert_eq!(kind, Err(StoreErrorKind::Connection));
}

#[tokio::test]
async fn silence_is_a_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let settings = Config {
        request_timeout_ms: 50,
        connect_timeout_ms: 50,
        ..config(endpoint)
    };
    let tier = S3RemoteTier::new(&settings);
    // The listener's backlog takes the connection; nobody ever answers.
    let kind = tier.get("k", 10).await.map_err(|error| error.kind());
    assert_eq!(kind, Err(StoreErrorKind::Timeout));
    drop(listener);
}

#[tokio::test]
async fn plain_http_where_tls_is_spoken_is_a_tls_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("https://{}", listener.local_addr().expect("an address"));
    let tier = S3RemoteTier::new(&config(endpoint));
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("a connection");
        let mut hello = [0; 16];
        socket.read_exact(&mut hello).await.expect("a client hello");
        socket
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .await
            .expect("answered");
    });
    let outcome = tier.get("k", 10).await;
    assert_eq!(
        outcome.as_ref().map_err(StoreError::kind),
        Err(StoreErrorKind::Tls),
        "{outcome:?}"
    );
    server.abort();
}

#[tokio::test]
async fn a_source_that_breaks_off_says_why() {
    struct Broken;
    impl BodySource for Broken {
        fn len_bytes(&self) -> u64 {
            1 << 20
        }

        fn open(&self) -> BodyFrames {
            let (sender, receiver) = mpsc::channel(2);
            sender
                .try_send(Ok(Bytes::from_static(b"some")))
                .expect("room");
            sender
                .try_send(Err(StoreError::new(StoreErrorKind::LocalRead, "gone")))
                .expect("room");
            receiver
        }
    }
    let (tier, listener) = tier_and_listener().await;
    let accepting = tokio::spawn(async move { listener.accept().await });
    let put = PutRequest {
        key: "k".to_owned(),
        body: PutBody::Source(Arc::new(Broken)),
        crc32: 0,
        metadata: Vec::new(),
    };
    let outcome = tier.put(put).await;
    assert_eq!(
        outcome,
        Err(StoreError::new(StoreErrorKind::LocalRead, "gone"))
    );
    drop(accepting);
}

#[tokio::test]
async fn bug_32_a_connection_with_half_a_request_on_it_is_closed_and_never_used_again() {
    /// Some bytes; the test says how it goes on.
    #[derive(Default)]
    struct Half(std::sync::Mutex<Option<mpsc::Sender<Result<Bytes, StoreError>>>>);
    impl BodySource for Half {
        fn len_bytes(&self) -> u64 {
            1 << 20
        }

        fn open(&self) -> BodyFrames {
            let (sender, receiver) = mpsc::channel(2);
            sender
                .try_send(Ok(Bytes::from_static(b"some")))
                .expect("room");
            *self.0.lock().expect("not poisoned") = Some(sender);
            receiver
        }
    }
    let (tier, listener) = tier_and_listener().await;
    let source = Arc::new(Half::default());
    let put = PutRequest {
        key: "k".to_owned(),
        body: PutBody::Source(Arc::clone(&source) as Arc<dyn BodySource>),
        crc32: 0,
        metadata: Vec::new(),
    };
    let serving = tokio::spawn(async move {
        let (mut first, _) = listener.accept().await.expect("a connection");
        let mut half = Vec::new();
        while !half.ends_with(b"some") {
            assert!(first.read_buf(&mut half).await.expect("bytes") > 0);
        }
        let sender = source.0.lock().expect("not poisoned").take();
        let gone = StoreError::new(StoreErrorKind::LocalRead, "gone");
        sender.expect("open").try_send(Err(gone)).expect("room");
        // All that comes until the other side closes it; if it does not, nobody answers the second request.
        while first.read_buf(&mut half).await.is_ok_and(|count| count > 0) {}
        let range = [("content-range", "bytes 0-3/4")];
        let fine = response("206 Partial Content", &range, "fine");
        let second = serve_once(listener, fine).await;
        (half, second)
    });
    let outcome = tier.put(put).await;
    assert_eq!(
        outcome.map_err(|error| error.kind()),
        Err(StoreErrorKind::LocalRead)
    );
    assert_eq!(
        tier.get("k", 1024).await,
        Ok(Bytes::from_static(b"fine")),
        "on a connection of its own"
    );
    let (half, second) = serving.await.expect("served");
    assert!(half.starts_with(b"PUT ") && half.ends_with(b"some"));
    assert!(second.line.starts_with("GET "), "{}", second.line);
}

#[tokio::test]
async fn what_came_of_a_range_before_it_broke_off_is_handed_over() {
    #[derive(Default)]
    struct Collected(Vec<u8>);
    impl RangeSink for Collected {
        fn push(&mut self, bytes: Bytes) {
            self.0.extend_from_slice(&bytes);
        }
    }
    let (tier, listener) = tier_and_listener().await;
    let headers = [
        ("content-range", "bytes 4-13/100"),
        ("content-length", "10"),
    ];
    let served = tokio::spawn(serve_once(
        listener,
        response("206 Partial Content", &headers, "0123456"),
    ));
    let mut collected = Collected::default();
    let outcome = tier.stream_range("a/key", 4..14, &mut collected).await;
    assert!(outcome.is_err_and(|error| error.is_retryable()));
    assert_eq!(collected.0, b"0123456");
    let request = served.await.expect("served");
    assert_eq!(
        request.headers.get("range").map(String::as_str),
        Some("bytes=4-13")
    );
}
