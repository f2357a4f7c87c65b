//! One measured row: the median of several runs, with spread, and the ratio to what it is compared with.

use std::time::{Duration, Instant};

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

/// Prints a row. `runs` are the values of each run; `base` is the median that it is compared with.
pub fn print(name: &str, unit: &str, runs: &[f64], against: Option<(&str, f64)>) {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let value = median(runs);
    let (min, max) = (
        sorted.first().copied().unwrap_or(0.0),
        sorted.last().copied().unwrap_or(0.0),
    );
    let compared = against.map_or_else(
        || "\"against\":null,\"ratio\":null".to_owned(),
        |(what, base)| format!("\"against\":\"{what}\",\"ratio\":{:.3}", value / base),
    );
    println!(
        "{{\"row\":\"{name}\",\"value\":{value:.3},\"unit\":\"{unit}\",{compared},\"runs\":{},\"min\":{min:.3},\"max\":{max:.3}}}",
        runs.len()
    );
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

/// Clock ticks of `/proc/self/stat` are hundredths of a second on every Linux that matters here.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the command's name, which is in parentheses: utime and stime are fields 14 and 15.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    let ticks = |at: usize| {
        fields
            .get(at)
            .and_then(|text| text.parse::<u64>().ok())
            .unwrap_or(0)
    };
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}
