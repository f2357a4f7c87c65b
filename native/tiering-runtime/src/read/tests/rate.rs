//! Rates over a store that is far away.

use super::world::*;
use super::*;

/// A store over a long line.
struct Far(Arc<dyn RemoteTier>);

impl RemoteTier for Far {
    fn get_range<'a>(&'a self, key: &'a str, range: Range<u64>) -> StoreFuture<'a, Bytes> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(100)).await;
            self.0.get_range(key, range).await
        })
    }

    fn put(&self, request: PutRequest) -> StoreFuture<'_, ()> {
        self.0.put(request)
    }

    fn get<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Bytes> {
        self.0.get(key, max_bytes)
    }

    fn get_described<'a>(&'a self, key: &'a str, max_bytes: u64) -> StoreFuture<'a, Described> {
        self.0.get_described(key, max_bytes)
    }

    fn head<'a>(&'a self, key: &'a str) -> StoreFuture<'a, ObjectMeta> {
        self.0.head(key)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        max_keys: usize,
    ) -> StoreFuture<'a, ListPage> {
        self.0.list(prefix, token, max_keys)
    }

    fn list_folders<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> StoreFuture<'a, FolderPage> {
        self.0.list_folders(prefix, token)
    }

    fn delete<'a>(&'a self, keys: &'a [String]) -> StoreFuture<'a, DeleteOutcome> {
        self.0.delete(keys)
    }

    fn probe(&self) -> StoreFuture<'_, ()> {
        self.0.probe()
    }
}

struct Woken(tokio::sync::Notify);

impl Wake for Woken {
    fn wake(&self) {
        self.0.notify_one();
    }
}

/// Reads from `start` to the end; returns the time that it took, in virtual milliseconds.
async fn read_over_a_long_line(pause: bool) -> u128 {
    let world = World::of_chunks(64 << 10, 600, true, |config| {
        config.read_memory_bytes = 8 << 20;
        config.read_ahead_bytes = 8 << 20;
        config.read_request_size_bytes = 1 << 20;
    });
    let config = Config {
        bucket: "bucket".to_owned(),
        read_memory_bytes: 8 << 20,
        read_ahead_bytes: 8 << 20,
        read_request_size_bytes: 1 << 20,
        ..Config::default()
    };
    let far = Arc::new(Far(Arc::clone(&world.memory) as Arc<_>));
    let engine = Engine::open_with(config, far).expect("opened");
    let root = Arc::new(world.root.clone());
    let (revision, epoch, pointer) = (1, 1, None);
    let manifest = ResolvedManifest {
        root,
        revision,
        epoch,
        pointer,
    };
    engine.manifests().publish(STREAM, manifest);
    // On this runtime, whose time is virtual.
    let open = |start: u64| {
        let woken = Arc::new(Woken(tokio::sync::Notify::new()));
        let wake = Arc::clone(&woken) as Arc<dyn Wake>;
        let shared = Arc::clone(engine.shared());
        let outlet = Arc::new(outlet::Outlet::new(shared.clock, wake));
        let driver = driver::Driver::new(shared, STREAM, Start::Offset(start), Arc::clone(&outlet));
        tokio::spawn(driver.run());
        (outlet, woken)
    };
    let read = async |(outlet, woken): &(Arc<outlet::Outlet>, Arc<Woken>), until: usize| {
        let mut chunks = 0;
        while chunks < until {
            match outlet.take(u64::MAX) {
                ReadOutcome::Chunk { .. } => chunks += 1,
                ReadOutcome::Wait => woken.0.notified().await,
                _ => break,
            }
        }
        chunks
    };
    let held = |engine: &Engine| engine.shared().stats.read_memory_reserved_bytes.get();
    // Each may have half of it ahead.
    let paused: Vec<_> = [0, 150].into_iter().filter(|_| pause).map(open).collect();
    for first in &paused {
        assert_eq!(read(first, 80).await, 80);
    }
    if pause {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let held = held(&engine);
        assert!(held > 6 << 20, "those that are paused hold {held}");
    }
    let second = open(301);
    let began = tokio::time::Instant::now();
    assert_eq!(read(&second, usize::MAX).await, 299);
    let took = began.elapsed().as_millis();
    // They go on where they were.
    for (first, left) in paused.iter().zip([520, 370]) {
        assert_eq!(read(first, usize::MAX).await, left);
    }
    took
}

#[tokio::test(start_paused = true)]
async fn paused_readers_that_hold_all_cost_another_less_than_half_of_its_rate() {
    let alone_ms = read_over_a_long_line(false).await;
    let beside_ms = read_over_a_long_line(true).await;
    assert!(alone_ms > 500, "{alone_ms} ms");
    assert!(
        beside_ms <= 2 * alone_ms,
        "{beside_ms} instead of {alone_ms} ms"
    );
}
