//! First of all: the same seed twice is the same run.

use sim::plan::Plan;
use sim::run;

#[test]
fn the_same_seed_twice_gives_the_same_trace() {
    for seed in 1..12 {
        let plan = Plan {
            trace: true,
            ..Plan::new(seed, 3_000)
        };
        let (one, other) = (run(plan), run(plan));
        assert_eq!(one.hash, other.hash, "seed {seed}");
        assert_eq!(one.trace, other.trace, "seed {seed}");
        assert_eq!(one.steps, other.steps, "seed {seed}");
    }
}

#[test]
fn another_seed_is_another_run() {
    assert_ne!(run(Plan::new(1, 1_000)).hash, run(Plan::new(2, 1_000)).hash);
}

#[test]
fn keeping_a_trace_changes_nothing() {
    let plan = Plan::new(5, 2_000);
    assert_eq!(
        run(plan).hash,
        run(Plan {
            trace: true,
            ..plan
        })
        .hash
    );
}
