//! The test server answers as S3 does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::path::Path;

use aws_sdk_s3::config::{Config, RequestChecksumCalculation};
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumMode, Delete, ObjectIdentifier};
use common::{BUCKET, client, client_of, code, get, put, start};
use s3_testserver::{Options, Rule, TestServer, TlsFiles};

#[tokio::test]
async fn object_comes_back_whole_and_in_ranges() {
    let server = start();
    let client = client(&server);
    let body: Vec<u8> = (0..100_000u32).map(|n| n as u8).collect();
    put(&client, "a/b c+d%", &body).await.unwrap();
    assert_eq!(get(&client, "a/b c+d%").await.unwrap(), body);

    let range = |text: &'static str| {
        client
            .get_object()
            .bucket(BUCKET)
            .key("a/b c+d%")
            .range(text)
            .send()
    };
    let inner = range("bytes=10-19").await.unwrap();
    assert_eq!(inner.content_range(), Some("bytes 10-19/100000"));
    assert_eq!(inner.body.collect().await.unwrap().to_vec(), body[10..20]);
    assert_eq!(
        range("bytes=-5")
            .await
            .unwrap()
            .body
            .collect()
            .await
            .unwrap()
            .to_vec(),
        body[99_995..]
    );
    assert_eq!(
        range("bytes=99990-200000")
            .await
            .unwrap()
            .body
            .collect()
            .await
            .unwrap()
            .to_vec(),
        body[99_990..]
    );
    assert_eq!(
        code(&range("bytes=100000-").await.unwrap_err()),
        "InvalidRange"
    );

    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("a/b c+d%")
        .send()
        .await
        .unwrap();
    assert_eq!(head.content_length(), Some(100_000));
    assert_eq!(get(&client, "missing").await.unwrap_err(), "NoSuchKey");
}

#[tokio::test]
async fn conditions_on_writes_hold() {
    let server = start();
    let client = client(&server);
    let create = |body: &'static [u8]| {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .if_none_match("*")
            .body(ByteStream::from_static(body))
            .send()
    };
    let first = create(b"1").await.unwrap();
    assert_eq!(code(&create(b"2").await.unwrap_err()), "PreconditionFailed");
    assert_eq!(get(&client, "k").await.unwrap(), b"1");

    let etag = first.e_tag().unwrap().to_owned();
    let swap = |key: &'static str, etag: String, body: &'static [u8]| {
        client
            .put_object()
            .bucket(BUCKET)
            .key(key)
            .if_match(etag)
            .body(ByteStream::from_static(body))
            .send()
    };
    swap("k", etag.clone(), b"2").await.unwrap();
    assert_eq!(
        code(&swap("k", etag.clone(), b"3").await.unwrap_err()),
        "PreconditionFailed"
    );
    assert_eq!(
        code(&swap("missing", etag.clone(), b"3").await.unwrap_err()),
        "NoSuchKey"
    );
    assert_eq!(get(&client, "k").await.unwrap(), b"2");

    let stale = client
        .delete_object()
        .bucket(BUCKET)
        .key("k")
        .if_match(etag)
        .send()
        .await;
    assert_eq!(code(&stale.unwrap_err()), "PreconditionFailed");
    client
        .delete_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .unwrap();
    client
        .delete_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .unwrap();
    assert_eq!(get(&client, "k").await.unwrap_err(), "NoSuchKey");
}

#[tokio::test]
async fn checksum_is_verified_and_remembered() {
    let server = start();
    let client = client(&server);
    let put = |key: &'static str, sum: &'static str| {
        client
            .put_object()
            .bucket(BUCKET)
            .key(key)
            .checksum_algorithm(ChecksumAlgorithm::Crc32)
            .checksum_crc32(sum)
            .body(ByteStream::from_static(b"hello"))
            .send()
    };
    assert_eq!(
        code(&put("bad", "AAAAAA==").await.unwrap_err()),
        "BadDigest"
    );
    assert!(server.objects().get(BUCKET, "bad").is_none());

    // CRC-32 of "hello" is 0x3610a686.
    put("good", "NhCmhg==").await.unwrap();
    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("good")
        .checksum_mode(ChecksumMode::Enabled)
        .send()
        .await
        .unwrap();
    assert_eq!(head.checksum_crc32(), Some("NhCmhg=="));

    // Computed by the client while it sends a file: a signed trailer.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/certificate.pem");
    let trailer = client
        .put_object()
        .bucket(BUCKET)
        .key("trailer")
        .body(ByteStream::from_path(&file).await.unwrap())
        .customize()
        .config_override(
            Config::builder()
                .request_checksum_calculation(RequestChecksumCalculation::WhenSupported),
        )
        .send()
        .await;
    trailer.unwrap();
    let stored = server.objects().get(BUCKET, "trailer").unwrap();
    assert!(stored.checksum_crc32.is_some());
    assert_eq!(stored.body, std::fs::read(&file).unwrap());

    let md5 = |body: &'static [u8]| {
        let put = client
            .put_object()
            .bucket(BUCKET)
            .key("md5")
            .content_md5("XUFAKrxLKna5cZ2REBfFkg==");
        put.body(ByteStream::from_static(body)).send()
    };
    md5(b"hello").await.unwrap();
    assert_eq!(code(&md5(b"hullo").await.unwrap_err()), "BadDigest");
}

#[tokio::test]
async fn metadata_and_type_come_back() {
    let server = start();
    let client = client(&server);
    let put = client
        .put_object()
        .bucket(BUCKET)
        .key("m")
        .metadata("stream", "s1")
        .metadata("first-offset", "7");
    put.content_type("application/x-chunk")
        .body(ByteStream::from_static(b"x"))
        .send()
        .await
        .unwrap();
    let head = client
        .head_object()
        .bucket(BUCKET)
        .key("m")
        .send()
        .await
        .unwrap();
    assert_eq!(head.content_type(), Some("application/x-chunk"));
    let metadata = head.metadata().unwrap();
    assert_eq!(
        (
            metadata["stream"].as_str(),
            metadata["first-offset"].as_str()
        ),
        ("s1", "7")
    );
}

#[tokio::test]
async fn listing_is_in_byte_order_and_in_pages() {
    let server = start();
    let client = client(&server);
    let mut keys = vec![
        "p/a".to_owned(),
        "p/a-b".to_owned(),
        "p/a/b".to_owned(),
        "p/a/c".to_owned(),
        "q".to_owned(),
    ];
    keys.extend((0..1500).map(|n| format!("n/{n:05}")));
    for key in &keys {
        server
            .objects()
            .put_raw(BUCKET, key, bytes::Bytes::from_static(b"x"));
    }
    keys.sort();

    let mut found = Vec::new();
    let mut token = None;
    loop {
        let page = client
            .list_objects_v2()
            .bucket(BUCKET)
            .set_continuation_token(token)
            .send()
            .await
            .unwrap();
        assert!(page.contents().len() <= 1000);
        found.extend(
            page.contents()
                .iter()
                .filter_map(|object| object.key().map(str::to_owned)),
        );
        token = page.next_continuation_token().map(str::to_owned);
        if token.is_none() {
            break;
        }
    }
    assert_eq!(found, keys);

    let list = |after: Option<&str>, max: i32, token: Option<String>| {
        client
            .list_objects_v2()
            .bucket(BUCKET)
            .prefix("p/")
            .delimiter("/")
            .set_start_after(after.map(str::to_owned))
            .max_keys(max)
            .set_continuation_token(token)
            .send()
    };
    let page = list(None, 1000, None).await.unwrap();
    assert_eq!(
        page.contents()
            .iter()
            .filter_map(|o| o.key())
            .collect::<Vec<_>>(),
        ["p/a", "p/a-b"]
    );
    assert_eq!(
        page.common_prefixes()
            .iter()
            .filter_map(|p| p.prefix())
            .collect::<Vec<_>>(),
        ["p/a/"]
    );
    let page = list(Some("p/a"), 2, None).await.unwrap();
    assert_eq!(
        (
            page.contents().len(),
            page.common_prefixes().len(),
            page.is_truncated()
        ),
        (1, 1, Some(false))
    );
    let page = list(None, 2, None).await.unwrap();
    let rest = list(None, 2, page.next_continuation_token().map(str::to_owned))
        .await
        .unwrap();
    assert_eq!(
        (rest.contents().len(), rest.common_prefixes().len()),
        (0, 1)
    );
}

#[tokio::test]
async fn batch_delete_takes_a_thousand() {
    let server = start();
    let client = client(&server);
    for n in 0..1001 {
        server
            .objects()
            .put_raw(BUCKET, &format!("d/{n}"), bytes::Bytes::from_static(b"x"));
    }
    let delete = |count: usize| {
        let objects = (0..count).map(|n| {
            ObjectIdentifier::builder()
                .key(format!("d/{n}"))
                .build()
                .unwrap()
        });
        let delete = Delete::builder()
            .set_objects(Some(objects.collect()))
            .build()
            .unwrap();
        client.delete_objects().bucket(BUCKET).delete(delete).send()
    };
    assert_eq!(code(&delete(1001).await.unwrap_err()), "MalformedXML");
    assert_eq!(delete(1000).await.unwrap().deleted().len(), 1000);
    assert_eq!(server.objects().keys(BUCKET, ""), ["d/1000"]);
}

#[tokio::test]
async fn keys_may_have_1024_bytes() {
    let server = start();
    let client = client(&server);
    let key = "k".repeat(1024);
    put(&client, &key, b"x").await.unwrap();
    assert_eq!(get(&client, &key).await.unwrap(), b"x");
    assert_eq!(
        put(&client, &(key + "k"), b"x").await.unwrap_err(),
        "KeyTooLongError"
    );
}

#[tokio::test]
async fn only_the_right_key_gets_in() {
    let server = start();
    let wrong = client_of(&server.endpoint(), "AKTEST", "other", None);
    assert_eq!(
        put(&wrong, "k", b"x").await.unwrap_err(),
        "SignatureDoesNotMatch"
    );
    let unknown = client_of(&server.endpoint(), "AKOTHER", "SKTESTSECRET", None);
    assert!(put(&unknown, "k", b"x").await.is_err());
    assert!(server.objects().keys(BUCKET, "").is_empty());
}

#[tokio::test]
async fn buckets_come_and_go() {
    let server = start();
    let client = client(&server);
    assert_eq!(
        code(
            &client
                .head_bucket()
                .bucket("other")
                .send()
                .await
                .unwrap_err()
        ),
        "NotFound"
    );
    client.create_bucket().bucket("other").send().await.unwrap();
    client.head_bucket().bucket("other").send().await.unwrap();
    assert_eq!(
        code(
            &client
                .create_bucket()
                .bucket("other")
                .send()
                .await
                .unwrap_err()
        ),
        "BucketAlreadyOwnedByYou"
    );
    client.delete_bucket().bucket("other").send().await.unwrap();
    let put = client
        .put_object()
        .bucket("other")
        .key("k")
        .body(ByteStream::from_static(b"x"))
        .send()
        .await;
    assert_eq!(code(&put.unwrap_err()), "NoSuchBucket");
}

#[tokio::test]
async fn tls_port_speaks_tls() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let tls = Some(TlsFiles {
        certificate: data.join("certificate.pem"),
        key: data.join("key.pem"),
    });
    let server = TestServer::start(Options {
        tls,
        ..Options::default()
    })
    .unwrap();
    let authority = std::fs::read(data.join("certificate.pem")).unwrap();
    let client = client_of(
        &server.endpoint(),
        "AKTEST",
        "SKTESTSECRET",
        Some(authority),
    );
    let body = vec![7; 300_000];
    put(&client, "k", &body).await.unwrap();
    assert_eq!(get(&client, "k").await.unwrap(), body);
    let stranger = client_of(&server.endpoint(), "AKTEST", "SKTESTSECRET", None);
    assert_eq!(get(&stranger, "k").await.unwrap_err(), "lost");
}

#[tokio::test]
async fn a_clock_that_is_set_shows_in_every_answer_and_judges_signatures() {
    let server = start();
    let client = client(&server);
    server.faults().add(Rule {
        clock_ahead_ms: Some(20 * 60_000),
        check_time: true,
        ..Rule::on_all()
    });
    let refused = put(&client, "a", b"1").await;
    assert_eq!(refused, Err("RequestTimeTooSkewed".to_owned()));
    assert!(
        server.objects().get(BUCKET, "a").is_none(),
        "without effect"
    );
    server.faults().set(vec![Rule {
        check_time: true,
        ..Rule::on_all()
    }]);
    // Now it has heard the first answer's time, and the server's is the real one again: one more answer says so.
    let refused = put(&client, "a", b"1").await;
    assert_eq!(refused, Err("RequestTimeTooSkewed".to_owned()));
    put(&client, "a", b"1").await.unwrap();
}
