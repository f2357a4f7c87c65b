//! Fills a stream of a broker, and empties it, as fast as a client can. Each prints one line of JSON with what it saw.

use std::io::Error;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::protocol::{Connection, DELIVER, PUBLISH, PUBLISH_CONFIRM, number, send};
use crate::row::{measure, percentile};

type Failed = Box<dyn std::error::Error>;

/// What to publish, and where.
#[derive(Debug, Clone)]
pub struct Publish {
    /// Stream protocol port.
    pub port: u16,
    /// Name of the stream.
    pub stream: String,
    /// Records in all.
    pub records: u64,
    /// Bytes of each.
    pub record_bytes: usize,
    /// Records of a frame.
    pub batch: u64,
    /// Most records without a confirmation.
    pub window: u64,
    /// Most records a second; 0: as fast as it can.
    pub rate: u64,
}

/// What to read, and from where.
#[derive(Debug, Clone)]
pub struct Consume {
    /// Stream protocol port.
    pub port: u16,
    /// Name of the stream.
    pub stream: String,
    /// First offset.
    pub from: u64,
    /// Ends with the chunk that holds the offset before this one.
    pub until: u64,
    /// Chunks that the broker may send ahead.
    pub credit: u16,
}

/// Publishes and waits for all confirmations.
pub fn publish(work: &Publish) -> Result<(), Failed> {
    let mut connection = Connection::open(work.port)?;
    connection.declare_publisher(&work.stream)?;
    let mut output = connection.writer()?;
    // One AMQP 1.0 data section.
    let mut message = vec![0x00, 0x53, 0x75, 0xb0];
    message.extend_from_slice(&(work.record_bytes as u32).to_be_bytes());
    message.extend(
        (0..work.record_bytes as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8),
    );
    let confirmed = (Mutex::new(0u64), Condvar::new());
    // When each frame went out.
    let frames = Mutex::new(Vec::<Instant>::new());
    let began = Instant::now();
    let confirm_ms = std::thread::scope(|scope| -> Result<Vec<f64>, Failed> {
        let reader = scope.spawn(|| -> Result<Vec<f64>, Error> {
            let (mut seen, mut confirm_ms) = (0, Vec::new());
            while seen < work.records {
                if connection.receive()? != PUBLISH_CONFIRM {
                    continue;
                }
                let now = Instant::now();
                let body = connection.body();
                let count = u64::from(u32::from_be_bytes(number(body, 1)?));
                let frames = frames.lock().unwrap_or_else(PoisonError::into_inner);
                for id in body.get(5..).unwrap_or_default().chunks_exact(8) {
                    let frame = u64::from_be_bytes(number(id, 0)?) / work.batch;
                    let sent = usize::try_from(frame)
                        .ok()
                        .and_then(|frame| frames.get(frame));
                    confirm_ms.extend(sent.map(|sent| (now - *sent).as_secs_f64() * 1e3));
                }
                drop(frames);
                seen += count;
                *confirmed.0.lock().unwrap_or_else(PoisonError::into_inner) = seen;
                confirmed.1.notify_one();
            }
            Ok(confirm_ms)
        });
        let mut sent = 0;
        while sent < work.records {
            let count = work.batch.min(work.records - sent);
            let mut body = vec![0];
            body.extend_from_slice(&(count as u32).to_be_bytes());
            for number in sent..sent + count {
                body.extend_from_slice(&number.to_be_bytes());
                body.extend_from_slice(&(message.len() as u32).to_be_bytes());
                body.extend_from_slice(&message);
            }
            if work.rate > 0 {
                // From the start, so that a pause is made up for.
                let due = began + Duration::from_secs_f64(sent as f64 / work.rate as f64);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            frames
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(Instant::now());
            send(&mut output, PUBLISH, &body)?;
            sent += count;
            let mut seen = confirmed.0.lock().unwrap_or_else(PoisonError::into_inner);
            while sent - *seen > work.window && !reader.is_finished() {
                let pause = Duration::from_millis(100);
                let waited = confirmed.1.wait_timeout(seen, pause);
                seen = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(reader.join().map_err(|_| "the reading thread died")??)
    })?;
    let wall_s = began.elapsed().as_secs_f64();
    let printed = json!({
        "records": work.records,
        "wall_s": wall_s,
        "p50_ms": percentile(&confirm_ms, 50),
        "p99_ms": percentile(&confirm_ms, 99),
    });
    println!("{printed}");
    Ok(())
}

/// Reads, giving one credit back for each chunk.
pub fn consume(work: &Consume) -> Result<(), Failed> {
    let mut connection = Connection::open(work.port)?;
    let (mut bytes, mut chunks, mut first_s) = (0, 0u64, None);
    let began = Instant::now();
    let (outcome, cost) = measure(|| -> Result<(), Error> {
        connection.subscribe(&work.stream, work.from, work.credit)?;
        loop {
            if connection.receive()? != DELIVER {
                continue;
            }
            // The subscription's id, then the chunk as it is stored.
            let body = connection.body();
            let records = u32::from_be_bytes(number(body, 5)?);
            let chunk_id = u64::from_be_bytes(number(body, 25)?);
            bytes += body.len() as u64 - 1;
            chunks += 1;
            first_s.get_or_insert_with(|| began.elapsed().as_secs_f64());
            if chunk_id + u64::from(records) >= work.until {
                return Ok(());
            }
            connection.credit(1)?;
        }
    });
    outcome?;
    let printed = json!({
        "bytes": bytes,
        "chunks": chunks,
        "wall_s": cost.wall.as_secs_f64(),
        "first_s": first_s.unwrap_or_default(),
        "cpu_s": cost.cpu.as_secs_f64(),
    });
    println!("{printed}");
    Ok(())
}
