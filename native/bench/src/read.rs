//! One reader that reads history as fast as it can, beside bare ranged GETs of the same bytes by the same SDK: as many at once
//! as the reader had at most, and as many as anybody could want.

use log_format::key::KeySpace;
use tiering_runtime::log::LogLevel;
use tiering_runtime::read::Start;

use crate::bare::{self, Target};
use crate::endpoint::Seen;
use crate::layout::{self, CHUNKS, DATA_BYTES, DATA_END};
use crate::reading::{Consumer, STREAM, engine_with_log};
use crate::row::{Cost, measure, print, print_paired};

const RUNS: usize = 5;
const PART_BYTES: u64 = 4 << 20;
/// Requests at once of the row that shows what the endpoint and the loopback carry.
const MANY: usize = 32;
const GIB: f64 = (1u64 << 30) as f64;

#[derive(Default)]
struct Rates {
    throughput: Vec<f64>,
    cpu: Vec<f64>,
}

impl Rates {
    fn add(&mut self, bytes: u64, cost: Cost) {
        self.throughput
            .push(bytes as f64 / cost.wall.as_secs_f64() / 1e6);
        self.cpu.push(cost.cpu.as_secs_f64() / (bytes as f64 / GIB));
    }
}

/// Runs all ways in turn.
pub fn run(target: &Target, fragments: u64) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = bare::runtime()?;
    let (mut ours, mut same, mut many) = (Rates::default(), Rates::default(), Rates::default());
    let mut logged = Rates::default();
    let mut at_once = 1;
    for run in 0..=RUNS {
        Seen::reset(&target.endpoint)?;
        let (bytes, cost) = measure(|| read(target, fragments, LogLevel::Off));
        let bytes = bytes?;
        let seen = Seen::at(&target.endpoint)?.get("open_max");
        at_once = at_once.max(usize::try_from(seen)?);
        if bytes != fragments * DATA_BYTES {
            return Err(format!("{bytes} bytes were read").into());
        }
        if run == 0 {
            // Warms up, and tells how many requests at once the bare ones may have.
            continue;
        }
        ours.add(bytes, cost);
        let (bytes, cost) = measure(|| read(target, fragments, LogLevel::Debug));
        logged.add(bytes?, cost);
        for (rates, concurrency) in [(&mut same, at_once), (&mut many, MANY)] {
            let parts = parts(fragments);
            let (got, cost) = measure(|| bare::get(&runtime, target, parts, concurrency));
            rates.add(got?, cost);
        }
    }
    let name = &target.name;
    let bare_many = format!("bare ranged GETs, {MANY} at once, {name}");
    print(&bare_many, "MB/s", &many.throughput, None);
    let bare_same = format!("bare ranged GETs, {at_once} at once as the reader, {name}");
    print(&bare_same, "MB/s", &same.throughput, None);
    let against = format!("{at_once} bare ranged GETs at once");
    let row = format!("one reader, {name}");
    print_paired(&row, "MB/s", &ours.throughput, &against, &same.throughput);
    let row = format!("one reader, {name}, of what {MANY} carry");
    let against = format!("{MANY} bare ranged GETs at once");
    print_paired(&row, "MB/s", &ours.throughput, &against, &many.throughput);
    let against = format!("{at_once} bare ranged GETs at once");
    let row = format!("one reader, {name}, CPU");
    print_paired(&row, "s/GiB", &ours.cpu, &against, &same.cpu);
    let row = format!("one reader, {name}, log at debug, CPU");
    print_paired(&row, "s/GiB", &logged.cpu, "log off", &ours.cpu);
    Ok(())
}

fn read(target: &Target, fragments: u64, log_level: LogLevel) -> Result<u64, String> {
    let engine = engine_with_log(target, layout::root(fragments), log_level)
        .map_err(|error| error.to_string())?;
    Consumer::attach(&engine, Start::Offset(0))?.drain(0)
}

fn parts(fragments: u64) -> Vec<bare::Part> {
    let keys = KeySpace::new("rabbitmq/stream");
    let all = (0..fragments).flat_map(|number| {
        let key = keys.fragment(STREAM, number * CHUNKS, 1);
        bare::parts(&key, DATA_END - DATA_BYTES, DATA_END, PART_BYTES)
    });
    all.collect()
}
