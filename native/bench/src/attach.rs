//! The first record after attaching, in a stream of a million fragments: at the newest one, one day back, anywhere. How long,
//! and how many requests one after the other. The stream has a record a millisecond, so a day is 84,375 fragments.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tiering_runtime::engine::Engine;
use tiering_runtime::read::Start;

use crate::bare::{self, Target};
use crate::endpoint::Seen;
use crate::layout::{CHUNKS, DATA_BYTES};
use crate::reading::{Consumer, STREAM, engine};
use crate::row::{median, percentile, print_paired};
use crate::world::World;

const FRAGMENTS: u64 = 1_000_000;
const APPEND_AT_ONCE: u64 = 1_000;
const RUNS: u64 = 3;
const DAY: u64 = 24 * 3_600 * 1_000;
/// As much as a reader's first request.
const PART_BYTES: u64 = 256 << 10;
const PUTS_AT_ONCE: usize = 8;
const GETS_MAX: f64 = 3.0;
const PATIENCE: Duration = Duration::from_secs(30);

type Failed = Box<dyn std::error::Error>;
type Place = fn(u64, u64) -> Start;

/// Where to attach: `next` is the offset after the last one, `draw` is any number. Never a fragment's first record, which
/// would spare the index.
const PLACES: [(&str, Place); 4] = [
    ("in the newest fragment", |next, draw| {
        Start::Offset(next - 1 - draw % (CHUNKS - 1))
    }),
    ("one day back, offset", |next, draw| {
        Start::Offset(next - DAY + 1 + draw % (CHUNKS - 2))
    }),
    ("one day back, timestamp", |next, draw| {
        let offset = next - DAY + 1 + draw % (CHUNKS / 2);
        Start::Timestamp(i64::try_from(offset).unwrap_or(i64::MAX))
    }),
    ("anywhere, offset", |next, draw| {
        Start::Offset(draw % (next / CHUNKS - 1) * CHUNKS + 1 + draw % (CHUNKS - 2))
    }),
];

/// One place: p50 and p99 of each run, in milliseconds, and GETs one after the other.
#[derive(Default, Clone)]
struct Row {
    p50: Vec<f64>,
    p99: Vec<f64>,
    gets: Vec<f64>,
}

impl Row {
    fn add(&mut self, attached: &[Attached]) {
        let times: Vec<f64> = attached.iter().map(|one| one.ms).collect();
        self.p50.push(percentile(&times, 50));
        self.p99.push(percentile(&times, 99));
        let gets: f64 = attached.iter().map(|one| one.gets).sum();
        self.gets.push(gets / attached.len() as f64);
    }

    fn print(&self, name: &str, one: &Row) {
        let get = "one bare ranged GET";
        print_paired(&format!("{name}: p50"), "ms", &self.p50, get, &one.p50);
        print_paired(&format!("{name}: p99"), "ms", &self.p99, get, &one.p99);
        let at_most = vec![GETS_MAX; self.gets.len()];
        print_paired(
            &format!("{name}: GETs"),
            "GETs",
            &self.gets,
            "at most 3",
            &at_most,
        );
    }
}

/// One consumer's first record.
struct Attached {
    ms: f64,
    gets: f64,
}

/// Runs all places in turn. Each time a new engine, which knows the manifest's root and has one connection; then another
/// consumer at the same place.
pub fn run(target: &Target, samples: u64) -> Result<(), Failed> {
    // Two chunks, of which the second begins in the middle: the manifest knows no timestamp behind that.
    let mut world = World::new(CHUNKS, DATA_BYTES, 2);
    while world.wanted < FRAGMENTS {
        world.append(APPEND_AT_ONCE);
    }
    world.settle();
    store_groups(&world, target)?;
    let next_offset = world.persisted.next_offset;
    let mut cold = vec![Row::default(); PLACES.len()];
    let (mut again, mut one) = (cold.clone(), Row::default());
    for run in 0..RUNS {
        for ((_, place), (cold, again)) in PLACES.iter().zip(cold.iter_mut().zip(&mut again)) {
            let (mut first, mut second) = (Vec::new(), Vec::new());
            for sample in 0..samples {
                let draw = (run * samples + sample + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                let engine = engine(target, world.persisted.as_ref().clone())?;
                connect(&engine)?;
                let start = place(next_offset, draw);
                first.push(attach(&engine, target, start)?);
                second.push(attach(&engine, target, start)?);
            }
            cold.add(&first);
            again.add(&second);
        }
        let times = one_get(target, samples)?;
        one.p50.push(percentile(&times, 50));
        one.p99.push(percentile(&times, 99));
    }
    let name = &target.name;
    for ((place, _), (cold, again)) in PLACES.iter().zip(cold.iter().zip(&again)) {
        cold.print(&format!("first record {place}, {name}"), &one);
        again.print(
            &format!("first record {place}, another consumer, {name}"),
            &one,
        );
        if median(&cold.gets) < 1.0 {
            return Err("a record came without a request".into());
        }
    }
    Ok(())
}

/// Makes the client and a connection, and fetches nothing.
fn connect(engine: &Engine) -> Result<(), Failed> {
    let (sender, probed) = channel();
    engine.probe(move |outcome| {
        sender.send(outcome).ok();
    })?;
    Ok(probed.recv_timeout(PATIENCE)??)
}

fn attach(engine: &Engine, target: &Target, start: Start) -> Result<Attached, Failed> {
    Seen::reset(&target.endpoint)?;
    let began = Instant::now();
    let consumer = Consumer::attach(engine, start)?;
    let (chunk_id, _) = consumer.next()?.ok_or("the reader found nothing")?;
    let elapsed = began.elapsed();
    let wanted = match start {
        Start::Offset(offset) => offset,
        Start::Timestamp(timestamp_ms) => u64::try_from(timestamp_ms)?,
    };
    if chunk_id != wanted {
        return Err(format!("attached at {wanted}, got {chunk_id}").into());
    }
    let seen = Seen::at(&target.endpoint)?;
    // One range holds the record; those that were asked for ahead of it do not count.
    let gets = seen.get("metadata_gets") + seen.get("index_gets") + seen.get("data_gets").min(1);
    Ok(Attached {
        ms: elapsed.as_secs_f64() * 1e3,
        gets: gets as f64,
    })
}

/// Milliseconds of ranged GETs one after the other.
fn one_get(target: &Target, samples: u64) -> Result<Vec<f64>, Failed> {
    let runtime = bare::runtime()?;
    let keys = log_format::key::KeySpace::new("rabbitmq/stream");
    let part = bare::Part {
        key: keys.fragment(STREAM, 0, 1),
        start: 8,
        end: 8 + PART_BYTES,
    };
    Ok(bare::get_each(&runtime, target, part, samples)?)
}

/// Puts the groups of the manifest where readers look for them.
fn store_groups(world: &World, target: &Target) -> Result<(), Failed> {
    let runtime = bare::runtime()?;
    let client = target.client()?;
    let keys = log_format::key::KeySpace::new("rabbitmq/stream");
    let puts = world
        .groups
        .iter()
        .map(|((kind, first_offset, uid), bytes)| {
            let put = client
                .put_object()
                .bucket(&target.bucket)
                .key(keys.group(STREAM, *kind, *first_offset, *uid))
                .body(bytes.clone().into());
            async move {
                put.send()
                    .await
                    .map(drop)
                    .map_err(|error| format!("{error:?}"))
            }
        });
    bare::all(&runtime, puts, PUTS_AT_ONCE)?;
    Ok(())
}
