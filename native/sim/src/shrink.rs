//! Makes a failing plan small: fewer kinds of trouble, fewer faults, fewer steps, as long as it fails.

use crate::plan::{Plan, TROUBLES};
use crate::run;

/// The smallest failing plan that was found.
#[must_use]
pub fn shrink(plan: Plan) -> Plan {
    // The same promise must be broken; which one is in front of the first colon.
    let kind = |plan: Plan| {
        run(plan)
            .violation
            .map(|text| text.split(':').next().unwrap_or_default().to_owned())
    };
    let wanted = kind(plan);
    let fails = |plan: Plan| kind(plan) == wanted;
    let mut best = plan;
    // What happened after the violation does not matter.
    best.steps = best.steps.min(run(best).steps + 1);
    loop {
        let before = best;
        for trouble in TROUBLES {
            let without = best.leave_out(trouble);
            if best.allows(trouble) && fails(without) {
                best = without;
            }
        }
        let faults = run(best).faults;
        best.max_faults = best.max_faults.min(faults);
        best = halve(best, best.max_faults, &fails, |plan, max_faults| Plan {
            max_faults,
            ..plan
        });
        best = halve(best, best.steps, &fails, |plan, steps| Plan {
            steps,
            ..plan
        });
        if best == before {
            return best;
        }
    }
}

/// The smallest number that fails, looked for from above by bisection (failing is not monotonous: good enough).
fn halve(
    plan: Plan,
    from: u64,
    fails: &impl Fn(Plan) -> bool,
    with: impl Fn(Plan, u64) -> Plan,
) -> Plan {
    let (mut low, mut high) = (0, from);
    let mut best = plan;
    while low < high {
        let middle = low + (high - low) / 2;
        let smaller = with(plan, middle);
        if fails(smaller) {
            best = smaller;
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    best
}
