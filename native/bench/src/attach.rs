//! The first record after attaching, in a stream of a million fragments: at the newest one, one day back, anywhere. How long,
//! and how many requests one after the other. The stream has a record a millisecond, so a day is 84,375 fragments.

use std::time::Instant;

use tiering_runtime::engine::Engine;
use tiering_runtime::remote_reader::Start;

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
#[derive(Default)]
struct Row {
    p50: Vec<f64>,
    p99: Vec<f64>,
    gets: Vec<f64>,
}

/// Runs all places in turn.
pub fn run(target: &Target, samples: u64) -> Result<(), Failed> {
    // Two chunks, of which the second begins in the middle: the manifest knows no timestamp behind that.
    let mut world = World::new(CHUNKS, DATA_BYTES, 2);
    while world.wanted < FRAGMENTS {
        world.append(APPEND_AT_ONCE);
    }
    world.settle();
    store_groups(&world, target)?;
    let next_offset = world.persisted.next_offset;
    let mut rows: Vec<Row> = PLACES.iter().map(|_| Row::default()).collect();
    let mut one = Row::default();
    for run in 0..RUNS {
        let engine = engine(target, world.persisted.as_ref().clone())?;
        // The first request makes the client and the connection.
        first_record(&engine, Start::Offset(1))?;
        for ((_, place), row) in PLACES.iter().zip(&mut rows) {
            Seen::reset(&target.endpoint)?;
            let mut times = Vec::new();
            for sample in 0..samples {
                let draw = (run * samples + sample + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                times.push(first_record(&engine, place(next_offset, draw))?);
            }
            let seen = Seen::at(&target.endpoint)?;
            // One range holds the record; others that were asked for ahead do not count.
            let before = seen.get("metadata_gets") + seen.get("index_gets");
            row.gets.push(before as f64 / samples as f64 + 1.0);
            row.p50.push(percentile(&times, 50));
            row.p99.push(percentile(&times, 99));
        }
        let times = one_get(target, samples)?;
        one.p50.push(percentile(&times, 50));
        one.p99.push(percentile(&times, 99));
    }
    let name = &target.name;
    let get = "one bare ranged GET";
    for ((place, _), row) in PLACES.iter().zip(&rows) {
        let row_name = format!("first record {place}, {name}");
        print_paired(&format!("{row_name}: p50"), "ms", &row.p50, get, &one.p50);
        print_paired(&format!("{row_name}: p99"), "ms", &row.p99, get, &one.p99);
        let at_most = vec![3.0; row.gets.len()];
        print_paired(
            &format!("{row_name}: GETs"),
            "GETs",
            &row.gets,
            "at most 3",
            &at_most,
        );
        if median(&row.gets) < 1.0 {
            return Err("a record came without a request".into());
        }
    }
    Ok(())
}

/// Milliseconds until the first record is there.
fn first_record(engine: &Engine, start: Start) -> Result<f64, Failed> {
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
    Ok(elapsed.as_secs_f64() * 1e3)
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
