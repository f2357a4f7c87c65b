//! One suite that every remote tier must pass: the one in memory always, an S3 endpoint if the environment names one.
//!
//! `STREAM_S3_TEST_ENDPOINT`, `_BUCKET`, `_KEY` and `_SECRET` choose the endpoint, with `_REGION` (default `us-east-1`) and `_CA` (a
//! PEM file) if need be; the bucket must exist. Everything is written under a prefix of its own and deleted at the end.

#![allow(clippy::expect_used)] // helpers of tests, which lints cannot tell from anything else

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use log_format::crc;
use tiering_runtime::clock::random_u64;
use tiering_runtime::remote_tier::testing::MemoryTier;
use tiering_runtime::remote_tier::{
    BodyFrames, BodySource, KEYS_MAX, Proving, PutBody, PutRequest, RangeSink, RemoteTier,
    S3RemoteTier, StoreError, StoreErrorKind,
};
use tiering_runtime::settings::{Config, Secret};
use tokio::sync::mpsc;

/// A body that is sent in frames of uneven sizes.
struct Streamed(Bytes);

impl BodySource for Streamed {
    fn len_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn open(&self) -> BodyFrames {
        let (sender, receiver) = mpsc::channel(1);
        let mut rest = self.0.clone();
        tokio::spawn(async move {
            let mut size = 1;
            while !rest.is_empty() {
                let frame = rest.split_to(size.min(rest.len()));
                size = (size * 7) % 300_000 + 1;
                if sender.send(Ok(frame)).await.is_err() {
                    return;
                }
            }
        });
        receiver
    }
}

fn pattern(len: usize) -> Bytes {
    (0..len)
        .map(|at| u8::try_from((at * 31 + at / 251) % 256).unwrap_or(0))
        .collect()
}

fn put(key: &str, bytes: &Bytes) -> PutRequest {
    PutRequest {
        key: key.to_owned(),
        body: PutBody::Bytes(bytes.clone()),
        crc32: crc::crc32(bytes),
        metadata: Vec::new(),
    }
}

fn kind<T>(outcome: Result<T, StoreError>) -> Result<T, StoreErrorKind> {
    outcome.map_err(|error| error.kind())
}

async fn conforms(tier: &dyn RemoteTier) {
    let prefix = format!("conformance/{:016x}", random_u64());
    tier.probe().await.expect("usable");
    objects_round_trip(tier, &prefix).await;
    ranges_are_exact(tier, &prefix).await;
    streamed_ranges_are_the_same(tier, &prefix).await;
    what_is_missing_is_not_found(tier, &prefix).await;
    wrong_checksums_are_refused(tier, &prefix).await;
    metadata_round_trips(tier, &prefix).await;
    long_and_similar_keys_work(tier, &prefix).await;
    listings_are_paged_and_deletions_complete(tier, &prefix).await;
    clean_up(tier, &prefix).await;
}

async fn objects_round_trip(tier: &dyn RemoteTier, prefix: &str) {
    // Nothing empty is ever stored, and a whole object is asked for as a range, which an empty one does not have.
    for len in [1, 2, 1000, 1 << 20, (9 << 20) + 7] {
        let bytes = pattern(len);
        let key = format!("{prefix}/memory.{len}");
        tier.put(put(&key, &bytes)).await.expect("stored");
        assert!(
            tier.get(&key, 16 << 20).await.expect("read") == bytes,
            "{len} bytes from memory"
        );

        let key = format!("{prefix}/streamed.{len}");
        let body = PutBody::Source(Arc::new(Streamed(bytes.clone())));
        tier.put(PutRequest {
            body,
            ..put(&key, &bytes)
        })
        .await
        .expect("stored");
        assert!(
            tier.get(&key, 16 << 20).await.expect("read") == bytes,
            "{len} streamed bytes"
        );
        assert_eq!(tier.head(&key).await.expect("there").size_bytes, len as u64);
    }
    // Written again, the newest is read.
    let key = format!("{prefix}/memory.1");
    tier.put(put(&key, &pattern(2000))).await.expect("stored");
    assert_eq!(tier.get(&key, 2000).await.expect("read").len(), 2000);
    assert_eq!(
        kind(tier.get(&key, 1999).await),
        Err(StoreErrorKind::TooLarge)
    );
}

/// Keeps what comes, in the order in which it comes.
#[derive(Default)]
struct Collected(Vec<u8>);

impl RangeSink for Collected {
    fn push(&mut self, bytes: Bytes) {
        self.0.extend_from_slice(&bytes);
    }
}

async fn streamed_ranges_are_the_same(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(3 << 20);
    let key = format!("{prefix}/streamed-ranges");
    tier.put(put(&key, &bytes)).await.expect("stored");
    for range in [0..1, 5..3 << 20, (2 << 20) + 1..9 << 20] {
        let mut streamed = Collected::default();
        (tier.stream_range(&key, range.clone(), &mut streamed))
            .await
            .expect("read");
        assert!(streamed.0 == tier.get_range(&key, range).await.expect("read"));
    }
    let mut streamed = Collected::default();
    let outside = tier.stream_range(&key, 4 << 20..5 << 20, &mut streamed);
    assert_eq!(kind(outside.await), Err(StoreErrorKind::InvalidRange));
    let missing = format!("{prefix}/nothing");
    let nothing = tier.stream_range(&missing, 0..5, &mut streamed);
    assert_eq!(kind(nothing.await), Err(StoreErrorKind::NotFound));
    assert!(streamed.0.is_empty());
}

async fn ranges_are_exact(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(100_000);
    let key = format!("{prefix}/ranges");
    tier.put(put(&key, &bytes)).await.expect("stored");
    for range in [0..1, 0..100_000, 5..6, 99_999..100_000, 4096..65_536] {
        let expected = bytes.slice(range.start as usize..range.end as usize);
        assert!(
            tier.get_range(&key, range.clone()).await.expect("read") == expected,
            "{range:?}"
        );
    }
    let past_the_end = tier.get_range(&key, 99_000..200_000).await.expect("read");
    assert!(past_the_end == bytes.slice(99_000..), "shorter at the end");
    assert_eq!(
        kind(tier.get_range(&key, 100_000..100_001).await),
        Err(StoreErrorKind::InvalidRange)
    );
    assert_eq!(
        kind(tier.get_range(&key, 7..7).await),
        Err(StoreErrorKind::InvalidRange)
    );
}

async fn what_is_missing_is_not_found(tier: &dyn RemoteTier, prefix: &str) {
    let key = format!("{prefix}/missing");
    assert_eq!(
        kind(tier.get(&key, 100).await),
        Err(StoreErrorKind::NotFound)
    );
    assert_eq!(
        kind(tier.get_range(&key, 0..10).await),
        Err(StoreErrorKind::NotFound)
    );
    assert_eq!(kind(tier.head(&key).await), Err(StoreErrorKind::NotFound));
    let outcome = tier.delete(&[key]).await.expect("deleted");
    assert_eq!((outcome.deleted, outcome.failed), (1, Vec::new()));
}

async fn wrong_checksums_are_refused(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(300_000);
    for (name, body) in [
        ("memory", PutBody::Bytes(bytes.clone())),
        (
            "streamed",
            PutBody::Source(Arc::new(Streamed(bytes.clone()))),
        ),
    ] {
        let key = format!("{prefix}/wrong.{name}");
        let request = PutRequest {
            body,
            crc32: crc::crc32(&bytes) ^ 1,
            ..put(&key, &bytes)
        };
        assert_eq!(
            kind(tier.put(request).await),
            Err(StoreErrorKind::Checksum),
            "{name}"
        );
        assert_eq!(
            kind(tier.head(&key).await),
            Err(StoreErrorKind::NotFound),
            "{name} left an object behind"
        );
    }
}

async fn metadata_round_trips(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(10);
    let key = format!("{prefix}/metadata");
    let metadata = vec![
        ("first-offset", "0".to_owned()),
        ("queue", "a%20b%C3%A4/".to_owned()),
        ("epoch", "7".to_owned()),
    ];
    tier.put(PutRequest {
        metadata: metadata.clone(),
        ..put(&key, &bytes)
    })
    .await
    .expect("stored");
    let expected: BTreeMap<_, _> = metadata
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    assert_eq!(tier.head(&key).await.expect("there").metadata, expected);
}

async fn long_and_similar_keys_work(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(10);
    let segment = "s".repeat(255);
    let long = format!("{prefix}/{segment}/{segment}/{}", "k".repeat(200));
    let keys = [
        format!("{prefix}/keys/a"),
        format!("{prefix}/keys/a/b"),
        format!("{prefix}/keys/a-b=c"),
        long,
    ];
    for key in &keys {
        tier.put(put(key, &bytes)).await.expect("stored");
        assert_eq!(tier.get(key, 10).await.expect("read"), bytes, "{key}");
    }
    let page = tier
        .list(&format!("{prefix}/keys/"), None, KEYS_MAX)
        .await
        .expect("listed");
    let listed: Vec<_> = page
        .objects
        .iter()
        .map(|object| object.key.as_str())
        .collect();
    let sorted = [keys[0].as_str(), keys[2].as_str(), keys[1].as_str()];
    assert_eq!(listed, sorted, "in byte order");
}

async fn list_all(tier: &dyn RemoteTier, prefix: &str, max_keys: usize) -> Vec<String> {
    let mut keys = Vec::new();
    let mut token: Option<String> = None;
    loop {
        let page = tier
            .list(prefix, token.as_deref(), max_keys)
            .await
            .expect("listed");
        assert!(page.objects.len() <= max_keys);
        keys.extend(page.objects.into_iter().map(|object| object.key));
        token = page.next_token;
        if token.is_none() {
            return keys;
        }
    }
}

async fn listings_are_paged_and_deletions_complete(tier: &dyn RemoteTier, prefix: &str) {
    let bytes = pattern(3);
    let keys: Vec<String> = (0..KEYS_MAX + 5)
        .map(|number| format!("{prefix}/many/{number:020}.fragment"))
        .collect();
    for batch in keys.chunks(16) {
        let puts: Vec<_> = batch.iter().map(|key| tier.put(put(key, &bytes))).collect();
        for put in puts {
            put.await.expect("stored");
        }
    }
    let many = format!("{prefix}/many/");
    assert_eq!(list_all(tier, &many, 7 * 51).await, keys);
    assert_eq!(list_all(tier, &many, KEYS_MAX).await, keys);
    assert_eq!(
        list_all(tier, &format!("{prefix}/none/"), KEYS_MAX).await,
        Vec::<String>::new()
    );
    assert_eq!(
        kind(tier.delete(&keys).await),
        Err(StoreErrorKind::TooLarge),
        "more than a thousand"
    );
    let (thousand, rest) = keys.split_at(KEYS_MAX);
    let outcome = tier.delete(thousand).await.expect("deleted");
    assert_eq!((outcome.deleted, outcome.failed), (KEYS_MAX, Vec::new()));
    assert_eq!(list_all(tier, &many, KEYS_MAX).await, rest);
    let again = tier
        .delete(&keys[..10])
        .await
        .expect("deleted twice is deleted");
    assert_eq!((again.deleted, again.failed), (10, Vec::new()));
    let nothing = tier.delete(&[]).await.expect("nothing to do");
    assert_eq!(nothing.deleted, 0);
}

async fn clean_up(tier: &dyn RemoteTier, prefix: &str) {
    let keys = list_all(tier, prefix, KEYS_MAX).await;
    for page in keys.chunks(KEYS_MAX) {
        tier.delete(page).await.expect("deleted");
    }
    assert_eq!(list_all(tier, prefix, KEYS_MAX).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_tier_in_memory_conforms() {
    conforms(&MemoryTier::new()).await;
}

fn config() -> Option<Config> {
    let var = |name: &str| env::var(format!("STREAM_S3_TEST_{name}")).ok();
    Some(Config {
        endpoint: Some(var("ENDPOINT")?),
        bucket: var("BUCKET").unwrap_or_else(|| "streams".to_owned()),
        region: var("REGION").unwrap_or_else(|| "us-east-1".to_owned()),
        access_key_id: var("KEY"),
        secret_access_key: var("SECRET").map(Secret::new),
        tls_ca_file: var("CA").map(PathBuf::from),
        path_style: true,
        prefix: "conformance".to_owned(),
        ..Config::default()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_endpoint_conforms() {
    let Some(config) = config() else {
        eprintln!("STREAM_S3_TEST_ENDPOINT is not set: only the tier in memory was tested");
        return;
    };
    // As the engine uses it: the answer to a HEAD has no code, so a listing says whether the object is gone.
    conforms(&Proving::new(Arc::new(S3RemoteTier::new(&config)))).await;

    let forged = Config {
        secret_access_key: Some(Secret::new("not the secret")),
        ..config.clone()
    };
    let forged = S3RemoteTier::new(&forged);
    assert_eq!(
        kind(forged.probe().await),
        Err(StoreErrorKind::AccessDenied)
    );
    assert_eq!(
        kind(forged.put(put("conformance/forged", &pattern(1))).await),
        Err(StoreErrorKind::AccessDenied)
    );
    assert_eq!(
        kind(forged.get("conformance/forged", 1).await),
        Err(StoreErrorKind::AccessDenied)
    );
    // Refused while most of it is still to be sent. Some servers answer and then cut the connection, which can swallow the answer.
    let large = pattern(48 << 20);
    let body = PutBody::Source(Arc::new(Streamed(large.clone())));
    let outcome = kind(
        forged
            .put(PutRequest {
                body,
                ..put("conformance/forged", &large)
            })
            .await,
    );
    assert!(
        matches!(
            outcome,
            Err(StoreErrorKind::AccessDenied | StoreErrorKind::Connection)
        ),
        "{outcome:?}"
    );

    let elsewhere = Config {
        bucket: "no-such-bucket-0b1c2d".to_owned(),
        ..config
    };
    let elsewhere = S3RemoteTier::new(&elsewhere);
    assert_eq!(
        kind(elsewhere.probe().await),
        Err(StoreErrorKind::NoSuchBucket)
    );
    assert_eq!(
        kind(elsewhere.put(put("conformance/x", &pattern(1))).await),
        Err(StoreErrorKind::NoSuchBucket)
    );
}
