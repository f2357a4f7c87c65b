//! Many seeds on many threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::coverage::Coverage;
use crate::plan::Plan;
use crate::{Outcome, run};

/// What came of them.
#[derive(Debug, Default)]
pub struct Totals {
    /// Seeds that were run.
    pub runs: u64,
    /// Steps of all of them.
    pub steps: u64,
    /// What happened how often.
    pub coverage: Coverage,
    /// Plans that broke a promise, by seed, and which.
    pub failures: Vec<(Plan, String)>,
}

/// Runs `seeds` seeds from `from`, `steps` steps each, on `threads` threads. Stops early at the first failure if asked to.
#[must_use]
pub fn run_seeds(from: u64, seeds: u64, steps: u64, threads: u64, stop_at_first: bool) -> Totals {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let totals = Mutex::new(Totals::default());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut mine = Coverage::default();
                let (mut runs, mut done) = (0, 0);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= seeds || stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let plan = Plan::new(from + number, steps);
                    let outcome: Outcome = run(plan);
                    runs += 1;
                    done += outcome.steps;
                    mine.add(&outcome.coverage);
                    if let Some(violation) = outcome.violation {
                        if stop_at_first {
                            stop.store(true, Ordering::Relaxed);
                        }
                        if let Ok(mut totals) = totals.lock() {
                            totals.failures.push((plan, violation));
                        }
                    }
                }
                if let Ok(mut totals) = totals.lock() {
                    totals.runs += runs;
                    totals.steps += done;
                    totals.coverage.add(&mine);
                }
            });
        }
    });
    match totals.into_inner() {
        Ok(mut totals) => {
            totals.failures.sort_by_key(|(plan, _)| plan.seed);
            totals
        }
        Err(poisoned) => poisoned.into_inner(),
    }
}
