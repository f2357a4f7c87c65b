//! Bare ranged GETs of objects that exist: how fast the same SDK gets what a broker reads. Prints one line of JSON.

use std::io::BufRead;

use serde_json::json;

use crate::bare::{self, Part, Target};
use crate::row::measure;

/// Gets every object that a line `KEY FIRST-BYTE END-BYTE` of the standard input names.
pub fn run(
    target: &Target,
    concurrency: usize,
    part_bytes: u64,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut parts: Vec<Part> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split_whitespace();
        let (Some(key), Some(start), Some(end)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        parts.extend(bare::parts(key, start.parse()?, end.parse()?, part_bytes));
    }
    let runtime = bare::runtime()?;
    let (bytes, cost) = measure(|| bare::get(&runtime, target, parts, concurrency));
    let printed = json!({
        "bytes": bytes?,
        "wall_s": cost.wall.as_secs_f64(),
        "cpu_s": cost.cpu.as_secs_f64(),
    });
    println!("{printed}");
    Ok(())
}
