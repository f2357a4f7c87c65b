//! `sim --seeds N --from S --steps M [--threads T] [--trace]`: runs seeds, prints steps/s and what was covered, and shrinks the
//! first failure. `sim --mutants` (with the feature of that name): the table of deliberate mistakes, each of them found or not.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use sim::coverage::Coverage;
use sim::plan::Plan;
use sim::{Outcome, run, shrink};

/// Lines of a shrunk trace that are printed.
const TRACE_LINES: usize = 80;
#[cfg(feature = "mutants")]
const MUTANT_SEEDS: u64 = 20_000;

struct Arguments {
    seeds: u64,
    from: u64,
    steps: u64,
    threads: u64,
    trace: bool,
    mutants: bool,
}

fn arguments() -> Result<Arguments, String> {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let mut parsed = Arguments {
        seeds: 200,
        from: 1,
        steps: 5_000,
        threads,
        trace: false,
        mutants: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let slot = match word.as_str() {
            "--seeds" => &mut parsed.seeds,
            "--from" => &mut parsed.from,
            "--steps" => &mut parsed.steps,
            "--threads" => &mut parsed.threads,
            "--trace" => {
                parsed.trace = true;
                continue;
            }
            "--mutants" => {
                parsed.mutants = true;
                continue;
            }
            other => return Err(format!("unknown argument {other}")),
        };
        let number = words
            .next()
            .ok_or_else(|| format!("{word} needs a number"))?;
        *slot = number
            .parse()
            .map_err(|_| format!("{word} needs a number"))?;
    }
    Ok(parsed)
}

struct Totals {
    runs: u64,
    steps: u64,
    coverage: Coverage,
    failures: Vec<(Plan, String)>,
}

/// Runs seeds on all threads. Stops early at the first failure if asked to.
fn run_seeds(from: u64, seeds: u64, steps: u64, threads: u64, stop_at_first: bool) -> Totals {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let totals = Mutex::new(Totals {
        runs: 0,
        steps: 0,
        coverage: Coverage::default(),
        failures: Vec::new(),
    });
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

fn print_coverage(coverage: &Coverage) {
    println!("coverage of transitions:");
    for (name, count) in coverage.iter() {
        println!("  {name:<34} {count:>12}");
    }
}

fn print_failure(plan: Plan, violation: &str) {
    println!("seed {} fails: {violation}", plan.seed);
    println!(
        "again: sim --seeds 1 --from {} --steps {}",
        plan.seed, plan.steps
    );
    let small = shrink::shrink(plan);
    let outcome = run(Plan {
        trace: true,
        ..small
    });
    println!(
        "shrunk to {} steps, {} faults (left out: {:#x}): {}",
        outcome.steps,
        outcome.faults,
        small.without,
        outcome.violation.as_deref().unwrap_or("nothing, any more")
    );
    for line in outcome
        .trace
        .iter()
        .skip(outcome.trace.len().saturating_sub(TRACE_LINES))
    {
        println!("  {line}");
    }
}

fn simulate(arguments: &Arguments) -> bool {
    let started = Instant::now();
    let Totals {
        runs,
        steps,
        coverage,
        failures,
    } = run_seeds(
        arguments.from,
        arguments.seeds,
        arguments.steps,
        arguments.threads,
        false,
    );
    let seconds = started.elapsed().as_secs_f64();
    print_coverage(&coverage);
    let missing = if arguments.seeds >= 100 {
        coverage.missing()
    } else {
        Vec::new()
    };
    for name in &missing {
        println!("never happened: {name}");
    }
    if let Some((plan, violation)) = failures.first() {
        for (plan, violation) in failures.iter().take(20) {
            println!("seed {}: {violation}", plan.seed);
        }
        print_failure(*plan, violation);
    }
    println!(
        "{runs} seeds, {steps} steps in {seconds:.1} s, {:.0} steps/s, {} faults and transitions covered",
        steps as f64 / seconds.max(0.001),
        coverage.iter().count()
    );
    let failed = failures.len() as u64 + u64::from(!missing.is_empty());
    println!("{} passed, {failed} failed", runs - failures.len() as u64);
    failed == 0
}

#[cfg(feature = "mutants")]
fn mutants(arguments: &Arguments) -> bool {
    use tiering_core::mutants::{Mutant, activate};
    // A mutant may well trip over an assertion; that is as good as any other way to be noticed.
    std::panic::set_hook(Box::new(|_| {}));
    println!(
        "{:<34} {:<8} {:>6} {:>10}  by",
        "mutant", "killed", "seed", "steps"
    );
    let (mut killed, mut survived) = (0, 0);
    for mutant in Mutant::ALL.iter().copied() {
        activate(Some(mutant));
        let totals = run_seeds(
            arguments.from,
            MUTANT_SEEDS,
            arguments.steps,
            arguments.threads,
            true,
        );
        match totals.failures.first() {
            Some((plan, violation)) => {
                killed += 1;
                let by: String = violation.chars().take(70).collect();
                println!(
                    "{:<34} {:<8} {:>6} {:>10}  {by}",
                    format!("{mutant:?}"),
                    "yes",
                    plan.seed,
                    totals.steps
                );
            }
            None => {
                survived += 1;
                println!(
                    "{:<34} {:<8} {:>6} {:>10}",
                    format!("{mutant:?}"),
                    "NO",
                    "-",
                    totals.steps
                );
            }
        }
    }
    activate(None);
    println!("{killed} passed, {survived} failed");
    survived == 0
}

#[cfg(not(feature = "mutants"))]
fn mutants(_: &Arguments) -> bool {
    println!("built without the feature `mutants`");
    false
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(text) => {
            println!("{text}");
            return ExitCode::FAILURE;
        }
    };
    let well = match (arguments.trace, arguments.mutants) {
        (true, _) => {
            let outcome = run(Plan {
                trace: true,
                ..Plan::new(arguments.from, arguments.steps)
            });
            for line in &outcome.trace {
                println!("{line}");
            }
            println!("{:?}", outcome.violation);
            outcome.violation.is_none()
        }
        (false, true) => mutants(&arguments),
        (false, false) => simulate(&arguments),
    };
    if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
