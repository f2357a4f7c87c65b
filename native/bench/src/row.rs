//! One measured row: the median of several runs, with spread, and the ratio to what it is compared with.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

/// What one run used.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Time on the wall.
    pub wall: Duration,
    /// User and system time of this process.
    pub cpu: Duration,
}

/// Runs something and says what it cost.
pub fn measure<T>(work: impl FnOnce() -> T) -> (T, Cost) {
    let (cpu, wall) = (cpu_time(), Instant::now());
    let result = work();
    (
        result,
        Cost {
            wall: wall.elapsed(),
            cpu: cpu_time().saturating_sub(cpu),
        },
    )
}

/// Prints a row. `runs` are the values of each run; `against` is what it is compared with, and that one's value.
pub fn print(name: &str, unit: &str, runs: &[f64], against: Option<(&str, f64)>) {
    let value = median(runs);
    print_with(
        name,
        unit,
        runs,
        against.map(|(what, base)| (what, value / base)),
    );
}

/// Prints a row that was measured in turn with what it is compared with: the ratio is the median of the runs' own.
pub fn print_paired(name: &str, unit: &str, runs: &[f64], against: &str, base_runs: &[f64]) {
    let ratios: Vec<f64> = runs
        .iter()
        .zip(base_runs)
        .map(|(run, base)| run / base)
        .collect();
    print_with(name, unit, runs, Some((against, median(&ratios))));
}

fn print_with(name: &str, unit: &str, runs: &[f64], against: Option<(&str, f64)>) {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let value = median(runs);
    let (min, max) = (
        sorted.first().copied().unwrap_or(0.0),
        sorted.last().copied().unwrap_or(0.0),
    );
    // Compared with nothing, there is no ratio that JSON could carry.
    let against = against.filter(|(_, ratio)| ratio.is_finite());
    let row = Row {
        row: name,
        value: rounded(value),
        unit,
        against: against.map(|(what, _)| what),
        ratio: against.map(|(_, ratio)| rounded(ratio)),
        runs: runs.len(),
        min: rounded(min),
        max: rounded(max),
    };
    println!("{}", json!(row));
}

/// A row as it is printed.
#[derive(Serialize)]
struct Row<'a> {
    row: &'a str,
    value: f64,
    unit: &'a str,
    against: Option<&'a str>,
    ratio: Option<f64>,
    runs: usize,
    min: f64,
    max: f64,
}

/// To the three decimals that a row has.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// The middle one (the lower of two).
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0.0)
}

/// The p-th percentile (nearest rank).
pub fn percentile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(rank).copied().unwrap_or(0.0)
}

/// Most memory that this process had at once since the start or since [`reset_peak_memory`].
pub fn peak_memory_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Counts the peak from now on; where that is not allowed, the peak since the start counts.
pub fn reset_peak_memory() {
    std::fs::write("/proc/self/clear_refs", "5").ok();
}

/// User and system time of children that have ended and were waited for.
pub fn children_cpu_time() -> Duration {
    ticks_at(13) + ticks_at(14)
}

fn cpu_time() -> Duration {
    ticks_at(11) + ticks_at(12)
}

/// Clock ticks of `/proc/self/stat` are hundredths of a second on every Linux that matters here.
fn ticks_at(at: usize) -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the command's name, which is in parentheses: utime and stime are fields 14 and 15, those of
    // children 16 and 17.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks = fields.get(at).and_then(|text| text.parse::<u64>().ok());
    Duration::from_millis(ticks.unwrap_or(0) * 10)
}
