//! A consumer of the engine's readers: what the shell is in a broker, as a thread that parks.

use std::sync::Arc;
use std::thread::Thread;

use log_format::manifest::Root;
use tiering_runtime::engine::Engine;
use tiering_runtime::log::{LogLevel, LogLine, LogSink};
use tiering_runtime::manifests::ResolvedManifest;
use tiering_runtime::read::{ReadOutcome, ReaderHandle, Start, Wake};
use tiering_runtime::settings::Config;

use crate::bare::Target;

/// Id of the stream that rows read.
pub const STREAM: &str = "__bench_1";

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(&self) {
        self.0.unpark();
    }
}

/// An engine that knows the stream.
pub fn engine(target: &Target, root: Root) -> Result<Engine, Box<dyn std::error::Error>> {
    engine_with_log(target, root, LogLevel::Off)
}

/// The same with a log, whose lines go nowhere.
pub fn engine_with_log(
    target: &Target,
    root: Root,
    log_level: LogLevel,
) -> Result<Engine, Box<dyn std::error::Error>> {
    let config = Config {
        log_level,
        ..target.config()
    };
    let engine = Engine::open(config)?;
    engine.forward_log(Arc::new(Nowhere))?;
    let manifest = ResolvedManifest {
        root: Arc::new(root),
        revision: 1,
        epoch: 1,
        pointer: None,
    };
    engine.manifests().publish(STREAM, manifest);
    Ok(engine)
}

struct Nowhere;

impl LogSink for Nowhere {
    fn line(&self, _: &LogLine) {}
}

/// One consumer; stays on the thread that made it.
pub struct Consumer(ReaderHandle);

impl Consumer {
    /// Attaches.
    pub fn attach(engine: &Engine, start: Start) -> Result<Self, String> {
        let wake = Arc::new(Unpark(std::thread::current()));
        let opened = engine.open_reader(STREAM, start, wake);
        opened.map(Self).map_err(|error| error.to_string())
    }

    /// The next chunk's first offset and length; `None` at the end.
    pub fn next(&self) -> Result<Option<(u64, u64)>, String> {
        loop {
            match self.0.read(u64::MAX) {
                ReadOutcome::Chunk { header, bytes, .. } => {
                    return Ok(Some((header.chunk_id, bytes.len() as u64)));
                }
                ReadOutcome::Wait => std::thread::park(),
                ReadOutcome::Local { .. } => return Ok(None),
                ReadOutcome::Failed { text, .. } => return Err(text),
            }
        }
    }

    /// Bytes up to the end; every chunk must follow the one before.
    pub fn drain(&self, mut expected: u64) -> Result<u64, String> {
        let mut bytes = 0;
        while let Some((chunk_id, length)) = self.next()? {
            if chunk_id != expected {
                return Err(format!("chunk {chunk_id} came instead of {expected}"));
            }
            expected += 1;
            bytes += length;
        }
        Ok(bytes)
    }
}
