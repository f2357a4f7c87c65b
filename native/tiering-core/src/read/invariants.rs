//! What must hold of a read machine after every event and after its effects were taken, one predicate per named invariant.

use super::{Phase, ReadMachine};

/// Names of the invariants that do not hold now; empty in a right program.
#[must_use]
pub fn violated(reader: &ReadMachine) -> Vec<&'static str> {
    type Check = (&'static str, fn(&ReadMachine) -> bool);
    let checks: [Check; 3] = [
        ("liveness", liveness),
        ("bounded_memory", bounded_memory),
        ("own_lookups", own_lookups),
    ];
    checks
        .iter()
        .filter(|(_, holds)| !holds(reader))
        .map(|(name, _)| *name)
        .collect()
}

/// Liveness: a reader that has not ended has chunks for its consumer, or rests until its consumer asks, or waits for the manifest
/// (which the node itself gives), or has a time at which it goes on by itself.
#[must_use]
pub fn liveness(reader: &ReadMachine) -> bool {
    let context = &reader.context;
    reader.is_finished()
        || context.ready_chunks > 0
        || context.rests
        || context.awaits_manifest()
        || reader.poll_timeout().is_some()
}

/// A reader whose consumer rests holds nothing, so that ten thousand of them cost next to nothing.
#[must_use]
pub fn bounded_memory(reader: &ReadMachine) -> bool {
    !reader.context.rests || reader.outstanding_bytes() == 0
}

/// A search that starts over waits for the manifest and for nothing that an earlier one has asked for.
#[must_use]
pub fn own_lookups(reader: &ReadMachine) -> bool {
    match &reader.phase {
        Phase::Placing(placing) => placing.has_manifest() || !reader.context.lookup_owes_store(),
        Phase::Streaming(_) | Phase::Finished => true,
    }
}
