//! A seeded, deterministic simulator over the real machines of `tiering-core`.
//!
//! Owns a world of streams, nodes, local logs, a bucket and a metadata store with faults ([`world`], [`store`], [`log`]), the
//! interpreters of the machines' effects ([`uploader`], [`consumer`]), a reference that knows what everybody must see, and the
//! checks of the named invariants ([`checks`], and [`promises`] for those that no machine can see alone). Does not own any decision: those are the machines'. No tokio, no clock, no
//! thread inside a run: one seed, one run.

mod checks;
mod clocks;
pub mod coverage;
mod log;
pub mod plan;
pub mod promises;
mod read;
pub mod rng;
pub mod seeds;
pub mod shrink;
mod store;
mod upload;
mod world;

use coverage::Coverage;
use plan::Plan;
use world::World;

/// How a run ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Events.
    pub steps: u64,
    /// Faults made.
    pub faults: u64,
    /// Of everything that happened, in order.
    pub hash: u64,
    /// What happened how often.
    pub coverage: Coverage,
    /// What did not hold, and when.
    pub violation: Option<String>,
    /// The last lines of what happened, if asked for.
    pub trace: Vec<String>,
}

/// Runs a plan to its end or to the first violation. A panic of a machine is a violation, too.
#[must_use]
pub fn run(plan: Plan) -> Outcome {
    let mut world = World::new(plan);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    if let Err(payload) = result {
        let text = payload
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("?");
        world.violation = Some(format!("panic: {text}"));
    }
    Outcome {
        steps: world.steps,
        faults: world.faults(),
        hash: world.hash,
        coverage: world.coverage,
        violation: world.violation,
        trace: world.trace,
    }
}
