//! `mutants [--from S] [--steps M]`: the table of deliberate mistakes, each found by a seed or not. Built only in the copy of the
//! sources that has them (scripts/sim --mutants).
#![allow(clippy::print_stdout, missing_docs)]

use std::process::ExitCode;

use sim::seeds::run_seeds;
use tiering_core::mutants::{ALL, activate};

/// A mistake that this many seeds do not find is not found.
const SEEDS: u64 = 20_000;

fn argument(name: &str, default: u64) -> u64 {
    let words: Vec<String> = std::env::args().collect();
    let place = words.iter().position(|word| word == name);
    place
        .and_then(|at| words.get(at + 1)?.parse().ok())
        .unwrap_or(default)
}

fn main() -> ExitCode {
    // A mistake may well trip over an assertion; that is as good as any other way to be noticed.
    std::panic::set_hook(Box::new(|_| {}));
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let (from, steps) = (argument("--from", 1), argument("--steps", 5_000));
    println!("{:<34} {:<8} {:>6} {:>10}  by", "mutant", "killed", "seed", "steps");
    let (mut killed, mut survived) = (0, 0);
    for mutant in ALL.iter().copied() {
        activate(Some(mutant));
        let totals = run_seeds(from, SEEDS, steps, threads, true);
        let name = format!("{mutant:?}");
        match totals.failures.first() {
            Some((plan, violation)) => {
                killed += 1;
                let by: String = violation.chars().take(70).collect();
                println!("{name:<34} {:<8} {:>6} {:>10}  {by}", "yes", plan.seed, totals.steps);
            }
            None => {
                survived += 1;
                println!("{name:<34} {:<8} {:>6} {:>10}", "NO", "-", totals.steps);
            }
        }
    }
    println!("{killed} passed, {survived} failed");
    ExitCode::from(u8::from(survived > 0))
}
