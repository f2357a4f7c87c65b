//! What must hold of every single effect and of every step, one predicate per named invariant. [`invariants`](super::invariants)
//! looks at a machine that rests; this looks at what it does. Tests and the simulator assert both.

use log_format::manifest::Entry;

use super::{Anchor, Effect, Phase, StoredObject, UploadMachine};

/// Names of the invariants that this effect breaks, right after the machine gave it out; empty in a right program.
#[must_use]
pub fn broken_by(machine: &UploadMachine, effect: &Effect) -> Vec<&'static str> {
    type Check = (&'static str, fn(&UploadMachine, &Effect) -> bool);
    let checks: [Check; 6] = [
        ("deletion_set", deletion_set),
        ("durability", durability),
        ("epoch_monotonicity", epoch_monotonicity),
        ("anchor_ordering", anchor_ordering),
        ("edit_ordering", edit_ordering),
        ("nothing_after_the_end", nothing_after_the_end),
    ];
    checks
        .iter()
        .filter(|(_, holds)| !holds(machine, effect))
        .map(|(name, _)| *name)
        .collect()
}

/// Deletion set: nothing is deleted that the persisted manifest names, nor the root that the pointer names, nor the one that it
/// named before, nor what the next persist would name.
#[must_use]
pub fn deletion_set(machine: &UploadMachine, effect: &Effect) -> bool {
    let Effect::Delete { objects } = effect else {
        return true;
    };
    let named = |object: &StoredObject| {
        if let StoredObject::Root { epoch, uid } = object {
            return machine
                .pointer
                .is_some_and(|pointer| (pointer.epoch, pointer.uid) == (*epoch, *uid))
                || machine.persist.replaced == Some(*object)
                || machine.abandoned == Some(*object);
        }
        let entries = [&machine.persisted.entries, &machine.manifest.entries];
        entries
            .into_iter()
            .flatten()
            .any(|entry| StoredObject::of(entry) == *object)
    };
    !objects.iter().any(named)
}

/// Durability: what is published is what is persisted, under its revision. The one exception is what a recovery whose persisted
/// timeline is no more leaves of it (reset safety: it says less, never more).
#[must_use]
pub fn durability(machine: &UploadMachine, effect: &Effect) -> bool {
    let Effect::Publish { root, revision, .. } = effect else {
        return true;
    };
    let persisted = *root == machine.persisted;
    // What is left names what the persisted manifest names, or what is in one of its groups.
    let known = |entry: &Entry| {
        let entries = &machine.persisted.entries;
        let after = entries.partition_point(|known| known.first_offset <= entry.first_offset);
        let holder = after.checked_sub(1).and_then(|at| entries.get(at));
        holder.is_some_and(|holder| holder == entry || holder.kind > entry.kind)
    };
    let says_less = root.next_offset <= machine.persisted.next_offset
        && root.first_offset == machine.persisted.first_offset
        && root.entries.iter().all(known);
    let left_over = root.is_empty() || says_less;
    *revision == machine.revision() && (persisted || machine.diverged && left_over)
}

/// Epoch monotonicity: roots and pointers are written under the machine's own epoch, and never over a higher one.
#[must_use]
pub fn epoch_monotonicity(machine: &UploadMachine, effect: &Effect) -> bool {
    match effect {
        Effect::PutRoot { epoch, .. } | Effect::CommitPointer { epoch, .. } => {
            *epoch == machine.epoch
                && machine
                    .pointer
                    .is_none_or(|pointer| pointer.epoch <= *epoch)
        }
        _ => true,
    }
}

/// Anchor ordering: no object is written before the anchor is durable.
#[must_use]
pub fn anchor_ordering(machine: &UploadMachine, effect: &Effect) -> bool {
    match effect {
        Effect::Transfer { .. } | Effect::PutRoot { .. } | Effect::PutGroup { .. } => {
            machine.anchor == Anchor::Done
        }
        _ => true,
    }
}

/// Edit ordering: a compare-and-swap names the revision that it follows, so that no edit can be applied twice or be left out.
#[must_use]
pub fn edit_ordering(machine: &UploadMachine, effect: &Effect) -> bool {
    match effect {
        Effect::CommitPointer {
            expected_revision, ..
        } => *expected_revision == machine.revision(),
        _ => true,
    }
}

/// A machine that has stopped asks for nothing that could bring its stream back.
#[must_use]
pub fn nothing_after_the_end(machine: &UploadMachine, effect: &Effect) -> bool {
    let writes = matches!(
        effect,
        Effect::Transfer { .. }
            | Effect::PutRoot { .. }
            | Effect::PutGroup { .. }
            | Effect::CommitPointer { .. }
            | Effect::WriteAnchor { .. }
    );
    !writes || !matches!(machine.phase, Phase::Stopped)
}

/// What of a machine must not move back; taken before a step, held against the machine after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    persisted: (u64, u64),
    revision: u64,
    diverged: bool,
    resolving: bool,
}

impl Mark {
    /// Of the machine now.
    #[must_use]
    pub fn of(machine: &UploadMachine) -> Self {
        Self {
            persisted: (
                machine.persisted.first_offset,
                machine.persisted.next_offset,
            ),
            revision: machine.revision(),
            diverged: machine.diverged,
            resolving: matches!(machine.phase, Phase::Resolving(_)),
        }
    }

    /// Prefix monotonicity over time: the pointer's revision never goes back; what is persisted neither, but for a recovery:
    /// one of this machine, or one that it finds when it resolves (also its own, whose commit had an unknown outcome).
    #[must_use]
    pub fn still_holds(&self, machine: &UploadMachine) -> bool {
        let now = Self::of(machine);
        let forward = now.persisted.0 >= self.persisted.0 && now.persisted.1 >= self.persisted.1;
        let recovered = self.diverged || now.diverged || self.resolving;
        now.revision >= self.revision && (forward || recovered)
    }
}
