//! Many readers of one range at the same time: what is fetched for what is delivered, how fast all of them are, and the memory.

use std::sync::Barrier;

use tiering_runtime::read::Start;

use crate::bare::Target;
use crate::endpoint::Seen;
use crate::layout::{self, DATA_BYTES};
use crate::reading::{Consumer, engine};
use crate::row::{measure, median, peak_memory_bytes, print, print_paired, reset_peak_memory};

const RUNS: usize = 3;
const READERS: [usize; 3] = [1, 10, 50];

/// Every number of readers in turn.
pub fn run(target: &Target, fragments: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut rows: Vec<[Vec<f64>; 3]> = vec![Default::default(); READERS.len()];
    for _ in 0..RUNS {
        for (readers, row) in READERS.iter().zip(&mut rows) {
            Seen::reset(&target.endpoint)?;
            reset_peak_memory();
            let (delivered, cost) = measure(|| read(target, fragments, *readers));
            let delivered = delivered?;
            if delivered != fragments * DATA_BYTES * *readers as u64 {
                return Err(format!("{delivered} bytes were delivered").into());
            }
            let fetched = Seen::at(&target.endpoint)?.get("get_bytes");
            let [ratio, rate, memory] = row;
            ratio.push(fetched as f64 / delivered as f64);
            rate.push(delivered as f64 / cost.wall.as_secs_f64() / 1e6);
            memory.push(peak_memory_bytes() as f64 / f64::from(1 << 20));
        }
    }
    let rate_of_one = rows.first().map(|row| row[1].clone()).unwrap_or_default();
    for (readers, [ratio, rate, memory]) in READERS.iter().zip(&rows) {
        let name = format!("{readers} reader(s) of one range");
        let fair = 1.0 / *readers as f64;
        print(
            &format!("{name}: GET bytes a delivered byte"),
            "bytes",
            ratio,
            Some(("fetched once", fair)),
        );
        print_paired(
            &format!("{name}: delivered in all"),
            "MB/s",
            rate,
            "one reader",
            &rate_of_one,
        );
        let one = rows.first().map_or(0.0, |row| median(&row[2]));
        print(
            &format!("{name}: peak memory of the process"),
            "MiB",
            memory,
            Some(("one reader", one)),
        );
    }
    Ok(())
}

fn read(target: &Target, fragments: u64, readers: usize) -> Result<u64, String> {
    let engine = engine(target, layout::root(fragments)).map_err(|error| error.to_string())?;
    let start = Barrier::new(readers);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..readers)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    Consumer::attach(&engine, Start::Offset(0))?.drain(0)
                })
            })
            .collect();
        let mut bytes = 0;
        for thread in threads {
            bytes += thread.join().map_err(|_| "a reader's thread died")??;
        }
        Ok(bytes)
    })
}
