//! Every fault does what its name says, and hits the request it is meant for.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::ChecksumAlgorithm;
use common::{BUCKET, client, code, get, put, start};
use s3_testserver::log::Outcome;
use s3_testserver::{Filter, Rule};

const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn rule_hits_by_operation_key_and_count() {
    let server = start();
    let client = client(&server);
    server.faults().set(vec![Rule {
        name: "second root".to_owned(),
        retry_after_s: Some(1),
        ..Rule::on("PutObject")
            .key("root.")
            .nth(2)
            .times(2)
            .status(503, "SlowDown")
    }]);
    put(&client, "x/root.1", b"1").await.unwrap();
    put(&client, "x/data.1", b"1").await.unwrap();
    assert_eq!(
        put(&client, "x/root.2", b"2").await.unwrap_err(),
        "SlowDown"
    );
    get(&client, "x/root.1").await.unwrap();
    assert_eq!(
        put(&client, "x/root.2", &vec![0; 3_000_000])
            .await
            .unwrap_err(),
        "SlowDown"
    );
    put(&client, "x/root.2", b"2").await.unwrap();

    let status = &server.faults().status()[0];
    assert_eq!((status.matched, status.hits), (4, 2));
    let hit = server.log().entries(&Filter {
        rule: Some("second root".to_owned()),
        ..Filter::default()
    });
    assert_eq!(
        hit.iter().map(|entry| entry.status).collect::<Vec<_>>(),
        [Some(503), Some(503)]
    );
    assert_eq!(hit[1].request_bytes, 3_000_000);
}

#[tokio::test]
async fn rule_may_mean_ranged_reads_only() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"0123456789").await.unwrap();
    server.faults().set(vec![Rule {
        ranged: Some(true),
        ..Rule::on("GetObject").status(500, "InternalError")
    }]);
    get(&client, "k").await.unwrap();
    let ranged = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .range("bytes=0-1")
        .send()
        .await;
    assert_eq!(code(&ranged.unwrap_err()), "InternalError");
}

#[tokio::test]
async fn status_after_effect_leaves_the_object() {
    let server = start();
    let client = client(&server);
    server.faults().set(vec![
        Rule::on("PutObject")
            .status(500, "InternalError")
            .after_effect(),
    ]);
    assert_eq!(put(&client, "k", b"x").await.unwrap_err(), "InternalError");
    assert_eq!(server.objects().get(BUCKET, "k").unwrap().body, "x");
}

#[tokio::test]
async fn delay_comes_before_the_answer() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"x").await.unwrap();
    server.faults().set(vec![Rule {
        delay_ms: 120,
        ..Rule::on("GetObject")
    }]);
    let start = Instant::now();
    get(&client, "k").await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(120));
}

#[tokio::test]
async fn rate_slows_both_directions() {
    let server = start();
    let client = client(&server);
    server.faults().set(vec![Rule {
        rate_bytes_per_s: Some(500_000),
        ..Rule::on_all()
    }]);
    let start = Instant::now();
    put(&client, "k", &vec![1; 100_000]).await.unwrap();
    // 0.2 s, less the pause after the last piece.
    assert!(
        start.elapsed() >= Duration::from_millis(170),
        "{:?}",
        start.elapsed()
    );
    let start = Instant::now();
    assert_eq!(get(&client, "k").await.unwrap().len(), 100_000);
    assert!(
        start.elapsed() >= Duration::from_millis(170),
        "{:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn cut_delivers_exactly_so_many_bytes() {
    let server = start();
    let client = client(&server);
    let body: Vec<u8> = (0..2_000_000u32).map(|n| (n / 7) as u8).collect();
    put(&client, "k", &body).await.unwrap();
    for cut in [0, 1, 1000, 1_500_000] {
        server.faults().set(vec![Rule {
            cut_after_bytes: Some(cut),
            ..Rule::on("GetObject")
        }]);
        let mut stream = client
            .get_object()
            .bucket(BUCKET)
            .key("k")
            .send()
            .await
            .unwrap()
            .body;
        let mut received = Vec::new();
        let ended = loop {
            match stream.next().await {
                Some(Ok(bytes)) => received.extend_from_slice(&bytes),
                other => break other,
            }
        };
        assert!(
            ended.is_some_and(|end| end.is_err()),
            "cut at {cut} looked like the end"
        );
        assert_eq!(received.len() as u64, cut);
        assert_eq!(received, body[..received.len()]);
        let entry = server
            .log()
            .entries(&Filter::on("GetObject"))
            .pop()
            .unwrap();
        assert_eq!((entry.response_bytes, entry.outcome), (cut, Outcome::Cut));
    }
    server.faults().clear();
    assert_eq!(get(&client, "k").await.unwrap(), body);
}

#[tokio::test]
async fn cut_request_leaves_nothing() {
    let server = start();
    let client = client(&server);
    server.faults().set(vec![Rule {
        cut_request_after_bytes: Some(70_000),
        ..Rule::on("PutObject")
    }]);
    assert_eq!(
        put(&client, "k", &vec![1; 1_000_000]).await.unwrap_err(),
        "lost"
    );
    assert!(server.objects().get(BUCKET, "k").is_none());
    let entry = server
        .log()
        .entries(&Filter::on("PutObject"))
        .pop()
        .unwrap();
    assert_eq!((entry.request_bytes, entry.outcome), (70_000, Outcome::Cut));
}

#[tokio::test]
async fn corrupt_changes_one_byte_of_the_answer() {
    let server = start();
    let client = client(&server);
    let body = vec![5; 400_000];
    put(&client, "k", &body).await.unwrap();
    server.faults().set(vec![Rule {
        corrupt_at: Some(300_001),
        ..Rule::on("GetObject")
    }]);
    let mut expected = body.clone();
    expected[300_001] = !5;
    assert!(get(&client, "k").await.unwrap() == expected);
    assert_eq!(server.objects().get(BUCKET, "k").unwrap().body, body);
}

#[tokio::test]
async fn corrupt_request_is_caught_by_its_checksum() {
    let server = start();
    let client = client(&server);
    let upload = || {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .checksum_algorithm(ChecksumAlgorithm::Crc32)
            .checksum_crc32("NhCmhg==")
            .body(ByteStream::from_static(b"hello"))
            .customize()
            .disable_payload_signing()
            .send()
    };
    server.faults().set(vec![Rule {
        corrupt_request_at: Some(2),
        ..Rule::on("PutObject").times(1)
    }]);
    assert_eq!(code(&upload().await.unwrap_err()), "BadDigest");
    assert!(server.objects().get(BUCKET, "k").is_none());
    upload().await.unwrap();
}

#[tokio::test]
async fn dropped_connection_has_no_effect_and_a_lost_answer_has() {
    let server = start();
    let client = client(&server);
    server.faults().set(vec![
        Rule {
            drop_connection: true,
            ..Rule::on("PutObject").key("dropped")
        },
        Rule {
            lose_answer: true,
            ..Rule::on("PutObject").key("lost")
        },
        Rule {
            lose_answer: true,
            ..Rule::on("DeleteObject")
        },
    ]);
    assert_eq!(put(&client, "dropped", b"x").await.unwrap_err(), "lost");
    assert_eq!(put(&client, "lost", b"x").await.unwrap_err(), "lost");
    assert_eq!(server.objects().keys(BUCKET, ""), ["lost"]);
    let delete = client
        .delete_object()
        .bucket(BUCKET)
        .key("lost")
        .send()
        .await;
    assert_eq!(code(&delete.unwrap_err()), "lost");
    assert!(server.objects().keys(BUCKET, "").is_empty());
}

#[tokio::test]
async fn ignored_conditions_overwrite() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"1").await.unwrap();
    server.faults().set(vec![Rule {
        ignore_conditions: true,
        ..Rule::on("PutObject").times(1)
    }]);
    let create = || {
        client
            .put_object()
            .bucket(BUCKET)
            .key("k")
            .if_none_match("*")
            .body(ByteStream::from_static(b"2"))
            .send()
    };
    create().await.unwrap();
    assert_eq!(server.objects().get(BUCKET, "k").unwrap().body, "2");
    assert_eq!(code(&create().await.unwrap_err()), "PreconditionFailed");
}

#[tokio::test]
async fn an_ignored_range_brings_the_whole_object() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"0123456789").await.unwrap();
    server.faults().set(vec![Rule {
        ignore_range: true,
        ..Rule::on("GetObject").times(1)
    }]);
    let part = || {
        client
            .get_object()
            .bucket(BUCKET)
            .key("k")
            .range("bytes=2-3")
            .send()
    };
    let whole = part().await.unwrap();
    assert_eq!(whole.content_range(), None);
    assert_eq!(whole.body.collect().await.unwrap().to_vec(), b"0123456789");
    let asked = part().await.unwrap();
    assert_eq!(asked.content_range(), Some("bytes 2-3/10"));
    assert_eq!(asked.body.collect().await.unwrap().to_vec(), b"23");
}

#[tokio::test]
async fn hanging_request_goes_on_when_released() {
    let server = start();
    let client = client(&server);
    server
        .faults()
        .set(vec![Rule::on("PutObject").hang("gate")]);
    let hanging = tokio::spawn({
        let client = client.clone();
        async move { put(&client, "k", b"x").await }
    });
    let at_gate = Filter {
        hanging: Some("gate".to_owned()),
        ..Filter::default()
    };
    assert!(server.log().wait(&at_gate, 1, LONG).await);
    assert!(server.objects().get(BUCKET, "k").is_none());
    server.faults().release("gate");
    hanging.await.unwrap().unwrap();
    // Open for who comes later, until the rule is set again.
    put(&client, "k2", b"x").await.unwrap();
    server
        .faults()
        .set(vec![Rule::on("PutObject").hang("gate").after_effect()]);
    let hanging = tokio::spawn({
        let client = client.clone();
        async move { put(&client, "k3", b"x").await }
    });
    assert!(server.log().wait(&at_gate, 1, LONG).await);
    assert!(server.objects().get(BUCKET, "k3").is_some());
    server.faults().clear();
    hanging.await.unwrap().unwrap();
}

#[tokio::test]
async fn client_that_leaves_ends_a_hanging_request() {
    let server = start();
    let client = client(&server);
    server
        .faults()
        .set(vec![Rule::on("PutObject").hang("gate")]);
    let hanging = tokio::spawn(async move { put(&client, "k", b"x").await });
    let at_gate = Filter {
        hanging: Some("gate".to_owned()),
        ..Filter::default()
    };
    assert!(server.log().wait(&at_gate, 1, LONG).await);
    hanging.abort();
    assert!(
        server
            .log()
            .wait(
                &Filter {
                    done: Some(true),
                    ..Filter::on("PutObject")
                },
                1,
                LONG
            )
            .await
    );
    assert_eq!(
        server.log().entries(&Filter::on("PutObject"))[0].outcome,
        Outcome::Cut
    );
    server.faults().release("gate");
    assert!(server.objects().get(BUCKET, "k").is_none());
}

#[tokio::test]
async fn server_that_is_down_refuses_and_comes_back() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"x").await.unwrap();
    server.go_down().await;
    assert_eq!(get(&client, "k").await.unwrap_err(), "lost");
    assert!(
        tokio::net::TcpStream::connect(server.address())
            .await
            .is_err()
    );
    server.go_up().await;
    assert_eq!(get(&client, "k").await.unwrap(), b"x");
}

#[tokio::test]
async fn log_tells_what_was_asked() {
    let server = start();
    let client = client(&server);
    put(&client, "k", b"0123456789").await.unwrap();
    let read = client
        .get_object()
        .bucket(BUCKET)
        .key("k")
        .range("bytes=2-4")
        .send()
        .await
        .unwrap();
    read.body.collect().await.unwrap();
    client
        .list_objects_v2()
        .bucket(BUCKET)
        .prefix("p/")
        .send()
        .await
        .unwrap();
    client
        .head_object()
        .bucket(BUCKET)
        .key("k")
        .send()
        .await
        .unwrap();
    assert!(
        server
            .log()
            .wait(
                &Filter {
                    done: Some(true),
                    ..Filter::default()
                },
                4,
                LONG
            )
            .await
    );

    let entries = server.log().entries(&Filter::default());
    let operations: Vec<_> = entries.iter().map(|entry| entry.operation).collect();
    assert_eq!(
        operations,
        ["PutObject", "GetObject", "ListObjectsV2", "HeadObject"]
    );
    assert!(
        entries
            .iter()
            .all(|entry| entry.outcome == Outcome::Answered && entry.bucket == BUCKET)
    );
    assert_eq!(
        (entries[0].request_bytes, entries[0].status),
        (10, Some(200))
    );
    assert_eq!(
        (entries[1].range.as_deref(), entries[1].response_bytes),
        (Some("bytes=2-4"), 3)
    );
    assert_eq!(
        (entries[1].status, entries[2].key.as_str()),
        (Some(206), "p/")
    );
    assert!(
        entries
            .iter()
            .all(|entry| !entry.headers.contains_key("authorization"))
    );
    server.log().clear();
    assert!(server.log().entries(&Filter::default()).is_empty());
}

#[tokio::test]
async fn a_page_is_answered_in_the_place_of_the_store() {
    let server = start();
    let client = client(&server);
    put(&client, "x/data.1", b"1").await.unwrap();
    for page in ["default backend - 404", "<html>404</html>", ""] {
        let rule = Rule::on("GetObject").times(1).page(404, page);
        server.faults().set(vec![rule]);
        let error = client
            .get_object()
            .bucket(BUCKET)
            .key("x/data.1")
            .send()
            .await
            .unwrap_err();
        let raw = error.raw_response().unwrap();
        assert_eq!(raw.status().as_u16(), 404);
        assert_eq!(raw.body().bytes(), Some(page.as_bytes()));
        assert_ne!(code(&error), "NoSuchKey");
        get(&client, "x/data.1").await.unwrap();
    }
}
