//! `sim --seeds N --from S --steps M [--threads T] [--trace]`: runs seeds, prints steps/s and what was covered, and shrinks the
//! first failure.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::time::Instant;

use sim::coverage::Coverage;
use sim::plan::Plan;
use sim::seeds::{Totals, run_seeds};
use sim::{run, shrink};

/// Lines of a shrunk trace that are printed.
const TRACE_LINES: usize = 80;

struct Arguments {
    seeds: u64,
    from: u64,
    steps: u64,
    threads: u64,
    trace: bool,
}

fn arguments() -> Result<Arguments, String> {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let mut parsed = Arguments {
        seeds: 200,
        from: 1,
        steps: 5_000,
        threads,
        trace: false,
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

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(text) => {
            println!("{text}");
            return ExitCode::FAILURE;
        }
    };
    let well = match arguments.trace {
        true => {
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
        false => simulate(&arguments),
    };
    if well {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
