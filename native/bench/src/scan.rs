//! How fast chunk headers are scanned, alone and with the assembly of fragments. One thread, files in the page cache;
//! per second of CPU time, which other work on the machine changes less than the clock.

use std::path::Path;
use std::sync::Arc;

use tiering_core::fragment_assembly::FragmentAssembly;
use tiering_core::upload::ScanBatch;
use tiering_runtime::buffer_pool::BufferPool;
use tiering_runtime::local_log::{ScanRequest, Scanner};
use tiering_runtime::stats::Stats;

use crate::corpus::Corpus;
use crate::row::{measure, print};

const RUNS: usize = 5;
/// CPU time comes in hundredths of a second: several passes make a run long enough.
const PASSES: u32 = 4;
const BATCH_CHUNKS: usize = 16_384;

/// Runs both chunk sizes.
pub fn run(directory: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for (name, chunks, data_bytes) in [("1 KiB", 1_000_000, 1_000), ("64 KiB", 30_000, 65_536)] {
        let corpus = Corpus {
            chunks,
            data_bytes,
            segment_bytes: 500_000_000,
        };
        let place = directory.join(format!("scan-{data_bytes}"));
        corpus.write(&place)?;
        let mut alone = Vec::new();
        let mut assembled = Vec::new();
        for _ in 0..RUNS {
            alone.push(rate(&place, corpus, |_| {})?);
            let (mut assembly, mut added) = (FragmentAssembly::new(), 0);
            assembled.push(rate(&place, corpus, |batch| {
                for chunk in &batch.chunks {
                    let full = assembly.payload_bytes() >= 64 << 20 || !assembly.fits(chunk);
                    // Each pass starts over.
                    if full || chunk.header.chunk_id == 0 {
                        drop(assembly.cut());
                    }
                    added += u64::from(assembly.add(chunk).is_ok());
                }
            })?);
            if added != corpus.chunks * u64::from(PASSES) {
                return Err(format!("only {added} chunks were assembled").into());
            }
        }
        let target = (data_bytes < 4096).then_some(("design target 5 M/s", 5.0));
        print(
            &format!("header scan, {name} chunks"),
            "M chunks/s/core",
            &alone,
            target,
        );
        print(
            &format!("header scan and assembly, {name} chunks"),
            "M chunks/s/core",
            &assembled,
            target,
        );
        std::fs::remove_dir_all(&place)?;
    }
    Ok(())
}

fn rate(directory: &Path, corpus: Corpus, mut each: impl FnMut(&ScanBatch)) -> Result<f64, String> {
    let mut scanner = Scanner::new(
        directory.to_path_buf(),
        Arc::new(BufferPool::new()),
        Arc::new(Stats::default()),
    );
    let (seen, cost) = measure(|| {
        let (mut from_offset, mut seen) = (0, 0);
        while seen < corpus.chunks * u64::from(PASSES) {
            from_offset %= corpus.chunks;
            let batch = scanner.scan(&ScanRequest {
                from_offset,
                front_timestamp_ms: None,
                witness: None,
                up_to_chunk_id: corpus.chunks - 1,
                max_chunks: BATCH_CHUNKS,
                max_bytes: 64 << 20,
            });
            if batch.chunks.is_empty() {
                return Err(format!(
                    "the scan stopped at {from_offset}: {:?}",
                    batch.end
                ));
            }
            from_offset += batch.chunks.len() as u64;
            seen += batch.chunks.len() as u64;
            each(&batch);
        }
        Ok(seen)
    });
    Ok(seen? as f64 / cost.cpu.as_secs_f64() / 1e6)
}
