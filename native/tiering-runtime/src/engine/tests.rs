//! The life of an engine, and answers that come from its runtime.

use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::remote_tier::StoreErrorKind;
use crate::remote_tier::testing::{Fault, Faulty, MemoryTier, Operation};

const SOON: Duration = Duration::from_secs(10);

fn config() -> Config {
    Config {
        bucket: "bucket".to_owned(),
        ..Config::default()
    }
}

#[test]
fn answers_come_from_the_runtime_and_are_counted() {
    let tier = Arc::new(MemoryTier::new());
    tier.insert("rabbitmq/stream/s1/data/x", "1");
    tier.insert("rabbitmq/stream/s2/data/x", "1");
    let engine =
        Engine::open_with(config(), Arc::clone(&tier) as Arc<dyn RemoteTier>).expect("opened");
    let (sender, receiver) = mpsc::channel();
    let answer = sender.clone();
    engine
        .probe(move |outcome| answer.send(outcome.is_ok()).expect("received"))
        .expect("open");
    assert_eq!(receiver.recv_timeout(SOON), Ok(true));
    let answer = sender.clone();
    engine
        .list_objects("s1", None, move |page| {
            answer
                .send(page.is_ok_and(|page| page.objects.len() == 1))
                .expect("received")
        })
        .expect("open");
    assert_eq!(receiver.recv_timeout(SOON), Ok(true));
    engine
        .delete_objects(tier.keys(), move |outcome| {
            sender
                .send(outcome.is_ok_and(|o| o.deleted == 2))
                .expect("received")
        })
        .expect("open");
    assert_eq!(receiver.recv_timeout(SOON), Ok(true));
    assert!(engine.stats().contains(&("objects_deleted", 2)));
    assert!(tier.keys().is_empty());
}

#[test]
fn closing_waits_for_nothing_and_refuses_afterwards() {
    let faulty = Arc::new(Faulty::new(Arc::new(MemoryTier::new())));
    faulty.inject(Fault::hang(Operation::Probe));
    let engine = Engine::open_with(config(), faulty).expect("opened");
    let (sender, receiver) = mpsc::channel::<Result<(), StoreError>>();
    engine
        .probe(move |outcome| sender.send(outcome).expect("received"))
        .expect("open");
    engine.close();
    // The callback is dropped with its task.
    assert_eq!(
        receiver.recv_timeout(SOON),
        Err(mpsc::RecvTimeoutError::Disconnected)
    );
    assert_eq!(engine.probe(|_| ()), Err(Closed));
    engine.close();
}

#[test]
fn what_cannot_work_is_not_opened() {
    let refused = Engine::open(Config::default()).map(drop);
    assert!(
        matches!(
            refused,
            Err(OpenError::Config(ConfigError {
                setting: "bucket",
                ..
            }))
        ),
        "{refused:?}"
    );
}

#[test]
fn a_file_of_authorities_that_is_not_there_is_told_by_the_probe() {
    let settings = Config {
        endpoint: Some("https://localhost:1".to_owned()),
        tls_ca_file: Some("/nowhere/ca.pem".into()),
        access_key_id: Some("a".to_owned()),
        secret_access_key: Some(crate::settings::Secret::new("b")),
        ..config()
    };
    let engine = Engine::open(settings).expect("opened");
    let (sender, receiver) = mpsc::channel();
    engine
        .probe(move |outcome| {
            sender
                .send(outcome.map_err(|e| e.kind()))
                .expect("received")
        })
        .expect("open");
    assert_eq!(receiver.recv_timeout(SOON), Ok(Err(StoreErrorKind::Tls)));
}
