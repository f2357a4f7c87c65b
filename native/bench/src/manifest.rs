//! What a manifest costs as it grows: built, persisted, searched and expired by the machines themselves, over a bucket in memory.
//! Times are of our code alone, encoding and decoding included: the requests are counted and not waited for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tiering_core::read::Start;
use tiering_core::upload::{Event, RetentionBound};

use crate::row::print;
use crate::world::World;

const SIZES: [u64; 3] = [1_000, 100_000, 1_000_000];
/// Records in a fragment.
const RECORDS: u64 = 10;
/// Bytes of a fragment, which is one chunk.
const DATA_BYTES: u64 = 64 << 20;
const SAMPLES: u64 = 101;

type Failed = Box<dyn std::error::Error>;

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Every measurement at every size; each row is compared with the smallest size.
pub fn run() -> Result<(), Failed> {
    let mut rows: Vec<(&str, &str, Vec<Vec<f64>>)> = Vec::new();
    let mut add = |name: &'static str, unit: &'static str, runs: Vec<f64>| match rows
        .iter_mut()
        .find(|row| row.0 == name)
    {
        Some(row) => row.2.push(runs),
        None => rows.push((name, unit, vec![runs])),
    };
    for size in SIZES {
        let mut world = World::new(RECORDS, DATA_BYTES, 1);
        let began = Instant::now();
        while world.wanted < size {
            world.append(1_000.min(size - world.wanted));
        }
        world.settle();
        let built = micros(began.elapsed()) / size as f64;
        let root = Arc::clone(&world.persisted);
        if root.next_offset != size * RECORDS {
            return Err(format!("{} fragments became {}", size, root.next_offset / RECORDS).into());
        }
        add("build", "us/fragment", vec![built]);
        add("root", "bytes", vec![root.encode().len() as f64]);
        let depth = root.entries.iter().map(|entry| entry.kind.to_byte()).max();
        add(
            "depth",
            "levels of groups",
            vec![f64::from(depth.unwrap_or(0))],
        );
        for (gets, time, by_offset) in [
            (
                "attach at an offset: GETs",
                "attach at an offset: our time",
                true,
            ),
            (
                "attach at a timestamp: GETs",
                "attach at a timestamp: our time",
                false,
            ),
        ] {
            let (mut requests, mut times) = (Vec::new(), Vec::new());
            for sample in 0..SAMPLES {
                // Spread, and never a fragment's first record, which would spare the index.
                let offset = sample.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (size - 1) * RECORDS + 5;
                let timestamp_ms = i64::try_from(offset)?;
                let (count, elapsed) = world.attach(match by_offset {
                    true => Start::Offset(offset),
                    false => Start::Timestamp(timestamp_ms),
                })?;
                requests.push(count as f64);
                times.push(micros(elapsed));
            }
            add(gets, "GETs", requests);
            add(time, "us", times);
        }
        let (mut times, mut sent) = (Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let (before, began) = (world.put_bytes, Instant::now());
            world.append(1);
            world.settle();
            times.push(micros(began.elapsed()));
            sent.push((world.put_bytes - before) as f64);
        }
        add("append and persist: our time", "us", times);
        add("append and persist: sent", "bytes", sent);
        let (mut times, mut sent, mut gets) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..SAMPLES {
            let oldest = world.persisted.first_offset;
            let (before, gets_before, began) = (world.put_bytes, world.group_gets, Instant::now());
            let total_bytes = u64::try_from(world.persisted.total_size_bytes)?;
            world.handle(Event::RetentionChanged(RetentionBound {
                max_bytes: Some(total_bytes - 1),
                max_age_ms: None,
            }));
            world.run();
            world.settle();
            times.push(micros(began.elapsed()));
            sent.push((world.put_bytes - before) as f64);
            gets.push((world.group_gets - gets_before) as f64);
            if world.persisted.first_offset != oldest + RECORDS {
                return Err("not exactly one fragment was dropped".into());
            }
        }
        add("drop the oldest and persist: our time", "us", times);
        add("drop the oldest and persist: sent", "bytes", sent);
        add("drop the oldest and persist: GETs", "GETs", gets);
    }
    for (name, unit, by_size) in rows {
        let mut first = None;
        for (size, runs) in SIZES.iter().zip(&by_size) {
            let value = crate::row::median(runs);
            let base = *first.get_or_insert(value);
            let against = (*size != SIZES[0] && base > 0.0).then_some(("a thousand", base));
            print(&format!("manifest of {size}: {name}"), unit, runs, against);
        }
    }
    Ok(())
}
