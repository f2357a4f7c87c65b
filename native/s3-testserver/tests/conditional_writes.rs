//! Exactly one of many racers wins a conditional write.
//!
//! Runs against the test server, or against any S3 named by STREAM_S3_TEST_ENDPOINT, _BUCKET,
//! _KEY and _SECRET: fencing stands on this property of the store.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::env::var;

use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::ByteStream;
use common::{client_of, code};
use s3_testserver::{Options, TestServer};

const RACERS: usize = 16;
const ROUNDS: usize = 10;

struct Store {
    client: Client,
    bucket: String,
    _server: Option<TestServer>,
}

fn store() -> Store {
    match var("STREAM_S3_TEST_ENDPOINT") {
        Ok(endpoint) => {
            let name = |name: &str| var(format!("STREAM_S3_TEST_{name}")).unwrap();
            Store {
                client: client_of(&endpoint, &name("KEY"), &name("SECRET"), None),
                bucket: name("BUCKET"),
                _server: None,
            }
        }
        Err(_) => {
            let server = TestServer::start(Options::default()).unwrap();
            let client = common::client(&server);
            Store {
                client,
                bucket: common::BUCKET.to_owned(),
                _server: Some(server),
            }
        }
    }
}

/// Keys of this run only: the store may keep those of an earlier one.
fn key(name: &str, round: usize) -> String {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    format!(
        "race/{}-{}/{name}-{round}",
        std::process::id(),
        since.as_nanos()
    )
}

/// Races writers with the same condition; answers who won and with which ETag.
async fn race(store: &Store, key: &str, if_match: Option<&str>) -> Vec<(usize, String)> {
    let racers: Vec<_> = (0..RACERS)
        .map(|racer| {
            let put = store.client.put_object().bucket(&store.bucket).key(key);
            let put = match if_match {
                Some(etag) => put.if_match(etag),
                None => put.if_none_match("*"),
            };
            tokio::spawn(put.body(ByteStream::from(body(key, racer))).send())
        })
        .collect();
    let mut winners = Vec::new();
    for (racer, outcome) in racers.into_iter().enumerate() {
        match outcome.await.unwrap() {
            Ok(output) => winners.push((racer, output.e_tag().unwrap().to_owned())),
            Err(error) => {
                let code = code(&error);
                let lost = [
                    "PreconditionFailed",
                    "ConditionalRequestConflict",
                    "ConcurrentModification",
                ];
                assert!(
                    lost.contains(&code.as_str()),
                    "a loser was told {code}: {error:?}"
                );
            }
        }
    }
    winners
}

/// Large enough that uploads overlap, different for everybody.
fn body(key: &str, racer: usize) -> Vec<u8> {
    format!("{key} {racer};").repeat(4000).into_bytes()
}

async fn stored(store: &Store, key: &str) -> Vec<u8> {
    let output = store
        .client
        .get_object()
        .bucket(&store.bucket)
        .key(key)
        .send()
        .await
        .unwrap();
    output.body.collect().await.unwrap().to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_creators_wins() {
    let store = store();
    for round in 0..ROUNDS {
        let key = key("create", round);
        let winners = race(&store, &key, None).await;
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        assert!(
            stored(&store, &key).await == body(&key, winners[0].0),
            "round {round}: not the winner's bytes"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_swappers_wins() {
    let store = store();
    for round in 0..ROUNDS {
        let key = key("swap", round);
        let first = store
            .client
            .put_object()
            .bucket(&store.bucket)
            .key(&key)
            .body(ByteStream::from_static(b"first"));
        let etag = first.send().await.unwrap().e_tag().unwrap().to_owned();
        let winners = race(&store, &key, Some(&etag)).await;
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        assert!(
            stored(&store, &key).await == body(&key, winners[0].0),
            "round {round}: not the winner's bytes"
        );
    }
}
