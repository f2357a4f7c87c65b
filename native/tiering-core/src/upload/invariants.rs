//! What must hold of the machine after every event, one predicate per named invariant. Tests and the simulator assert them.

use super::{Anchor, Phase, UploadMachine};
use crate::manifest::{invariants as manifest, rebalance};
use log_format::manifest::Entry;

/// Names of the invariants that do not hold now; empty in a right program. Linear in the manifest: not for production.
#[must_use]
pub fn violated(machine: &UploadMachine) -> Vec<&'static str> {
    type Check = (&'static str, fn(&UploadMachine) -> bool);
    let checks: [Check; 14] = [
        ("accounting", accounting),
        ("ordering", ordering),
        ("coverage", coverage),
        ("immutability", immutability),
        ("durability", durability),
        ("single_mutator", single_mutator),
        ("one_at_a_time", one_at_a_time),
        ("bounded_root", bounded_root),
        ("epoch_monotonicity", epoch_monotonicity),
        ("contiguous_advance", contiguous_advance),
        ("anchor_ordering", anchor_ordering),
        ("bounded_queue", bounded_queue),
        ("local_authority", local_authority),
        ("liveness", liveness),
    ];
    checks
        .iter()
        .filter(|(_, holds)| !holds(machine))
        .map(|(name, _)| *name)
        .collect()
}

/// Accounting: totals are the sums of their parts.
#[must_use]
pub fn accounting(machine: &UploadMachine) -> bool {
    manifest::accounting(&machine.manifest) && manifest::accounting(&machine.persisted)
}

/// Ordering: entries ascend.
#[must_use]
pub fn ordering(machine: &UploadMachine) -> bool {
    manifest::ordering(&machine.manifest) && manifest::ordering(&machine.persisted)
}

/// Coverage: no manifest says a range that it has no objects for.
#[must_use]
pub fn coverage(machine: &UploadMachine) -> bool {
    manifest::coverage(&machine.manifest) && manifest::coverage(&machine.persisted)
}

/// Immutability: what is persisted is the same object in memory, unless memory replaces it.
#[must_use]
pub fn immutability(machine: &UploadMachine) -> bool {
    machine.diverged || manifest::immutability(&machine.persisted, &machine.manifest)
}

/// Durability: what is persisted is never ahead of what is applied, unless memory replaces it.
#[must_use]
pub fn durability(machine: &UploadMachine) -> bool {
    machine.diverged || machine.persisted.next_offset <= machine.manifest.next_offset
}

/// Single mutator: memory, with the groups that are not persisted yet taken apart again, is the persisted manifest without some
/// of its beginning and with something at its end, unless memory replaces it. Two rewriters at once could not keep that.
#[must_use]
pub fn single_mutator(machine: &UploadMachine) -> bool {
    let mut memory = Vec::new();
    take_apart(machine, &machine.manifest.entries, &mut memory);
    let persisted = &machine.persisted.entries;
    let kept = memory.partition_point(|entry| entry.first_offset < machine.persisted.next_offset);
    machine.diverged
        || memory
            .get(..kept)
            .is_some_and(|kept| persisted.ends_with(kept))
}

fn take_apart(machine: &UploadMachine, entries: &[Entry], apart: &mut Vec<Entry>) {
    for entry in entries {
        match machine
            .tree
            .fresh()
            .iter()
            .find(|fresh| fresh.entry == *entry)
        {
            Some(fresh) => take_apart(machine, &fresh.group.entries, apart),
            None => apart.push(*entry),
        }
    }
}

/// One at a time: nobody persists while somebody rebalances or reads groups for retention, and the other way round.
#[must_use]
pub fn one_at_a_time(machine: &UploadMachine) -> bool {
    machine.persist.is_idle() || machine.tree.is_idle()
}

/// Bounded root: it never passes 64 KiB, unless it was found longer or has nothing but mega-groups to give up.
#[must_use]
pub fn bounded_root(machine: &UploadMachine) -> bool {
    let entries = &machine.manifest.entries;
    entries.len() <= rebalance::MAX_ROOT_ENTRIES.max(machine.adopted_entries)
        || rebalance::next_run(entries, machine.rebalance_threshold()).is_none()
}

/// Epoch monotonicity: a machine never goes on from what a writer of a higher epoch persisted.
#[must_use]
pub fn epoch_monotonicity(machine: &UploadMachine) -> bool {
    machine
        .pointer
        .is_none_or(|pointer| pointer.epoch <= machine.epoch)
}

/// Contiguous advance: manifest, transfers, the fragment in the making and the scan follow each other without a hole.
#[must_use]
pub fn contiguous_advance(machine: &UploadMachine) -> bool {
    let Some(drained) = machine.drain.next_offset else {
        return machine.transfers.is_empty() && machine.drain.assembly.is_empty();
    };
    let mut at = machine.manifest.next_offset;
    for (plan, _) in machine.transfers.plans() {
        if plan.first_offset != at {
            return false;
        }
        at = plan.next_offset;
    }
    let assembly = &machine.drain.assembly;
    assembly.first_offset().is_none_or(|first| first == at)
        && assembly.next_offset().unwrap_or(at) == drained
}

/// Anchor ordering: no object before the anchor is durable.
#[must_use]
pub fn anchor_ordering(machine: &UploadMachine) -> bool {
    machine.anchor == Anchor::Done
        || machine.manifest.is_empty()
            && machine.pointer.is_none()
            && machine.transfers.plans().all(|(_, held)| held)
}

/// No more transfers than allowed; one cut that was asked for, or one at four gibibytes, may come on top.
#[must_use]
pub fn bounded_queue(machine: &UploadMachine) -> bool {
    let index_bytes: usize = (machine.transfers.plans())
        .map(|(plan, _)| plan.index.len())
        .sum();
    machine.transfers.index_bytes() == index_bytes
        && machine.transfers.len() <= machine.settings.max_in_flight_transfers + 1
}

/// Local authority: nothing is scanned while local log and manifest do not meet.
#[must_use]
pub fn local_authority(machine: &UploadMachine) -> bool {
    machine.reset.is_none() || !machine.drain.is_scanning()
}

/// Liveness: whatever is not finished has an answer or a time to wait for.
#[must_use]
pub fn liveness(machine: &UploadMachine) -> bool {
    let unfinished = !matches!(machine.phase, Phase::Running)
        || !machine.transfers.is_empty()
        || machine.persist.edits > 0
        || !machine.persist.is_idle()
        || machine.tree.has_work()
        || machine.reset.is_some()
        || machine.drain.is_scanning();
    matches!(machine.phase, Phase::Stopped) || !unfinished || machine.poll_timeout().is_some()
}
