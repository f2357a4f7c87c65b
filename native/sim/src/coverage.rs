//! What happened how often, by name: a run that never saw an effect or a fault has proved nothing about it.

use std::collections::BTreeMap;

/// Counts by name.
#[derive(Debug, Clone, Default)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// One more of it.
    pub fn hit(&mut self, name: &'static str) {
        *self.0.entry(name).or_default() += 1;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            *self.0.entry(name).or_default() += count;
        }
    }

    /// How often.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// All counts, in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(name, count)| (*name, *count))
    }

    /// What should have happened and did not.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        let absent = |name: &&&str| self.count(name) == 0;
        EXPECTED.iter().filter(absent).copied().collect()
    }
}

/// What every run of many seeds has to see.
pub const EXPECTED: &[&str] = &[
    "effect ReadPointer",
    "effect GetRoot",
    "effect Scan",
    "effect WriteAnchor",
    "effect Transfer",
    "effect CancelTransfers",
    "effect PutRoot",
    "effect CommitPointer",
    "effect Publish",
    "effect PutGroup",
    "effect PutGroup (kilo)",
    "effect PutGroup (mega)",
    "effect GetGroup",
    "effect Delete",
    "effect Problem",
    "recovered LocalLogAhead",
    "recovered RemoteTierAhead",
    "stop Deposed",
    "stop Deleted",
    "pointer found",
    "pointer not found",
    "pointer unavailable",
    "root read",
    "root missing",
    "root corrupt",
    "scan caught up",
    "scan more",
    "scan local ahead",
    "scan remote ahead",
    "scan diverged",
    "scan empty",
    "scan failed",
    "anchor written",
    "anchor refused",
    "transfer done",
    "transfer out of order",
    "transfer answered twice",
    "transfer segment trimmed",
    "transfer abandoned answered",
    "group put",
    "group put failed",
    "group read",
    "group missing",
    "group corrupt",
    "group read failed",
    "group answered late or twice",
    "groups deleted",
    "root with a group",
    "root with a kilo-group",
    "root with a mega-group",
    "retention inside a group",
    "cut back with groups",
    "bound kept to the end",
    "commit done",
    "commit conflict",
    "commit not found",
    "commit unknown",
    "commit repeated",
    "commit of a dead writer",
    "retention dropped",
    "retention emptied the manifest",
    "objects deleted",
    "local trim by the remote tier",
    "local trim by the user",
    "local trim made a gap",
    "leader change",
    "zombie",
    "crash",
    "crash with effect",
    "crash without effect",
    "data loss",
    "disks lost",
    "stream deleted",
    "object after deletion",
    "sweep",
    "bound changed",
    "cut requested",
    "fault lost before",
    "fault lost after",
    "fault transient",
    "fault stalled",
    "fault slow",
    "fault corrupt",
    "fault short",
    "fault partial delete",
    "fault scan",
    "fault news lost",
    "fault duplicate",
    "fault edit lost",
    "fault edit doubled",
    "fault edit damaged",
    "edit applied",
    "edit gap",
    "edit stale",
    "edit refused",
    "outage store",
    "outage denied",
    "outage impostor",
    "fault impostor",
    "outage metadata",
    "clock stepped",
    "clock stepped, the store's too",
    "node started with a wrong clock",
    "store with a wrong clock",
    "clocks in doubt",
    "record from the future",
    "age took what was old enough",
    "attach first",
    "attach last",
    "attach next",
    "attach offset",
    "attach abs",
    "attach abs out of range",
    "attach timestamp",
    "route local",
    "route remote",
    "reader GetGroup",
    "reader group corrupt",
    "reader group gone",
    "reader taken back",
    "reader Part",
    "reader range broken off",
    "reader GetIndex",
    "reader GetRange",
    "reader RefreshManifest",
    "reader Cancel",
    "reader delivered",
    "reader local chunk",
    "reader to local",
    "reader at its limit",
    "reader to remote",
    "reader jumped",
    "reader crc mismatch",
    "reader object gone",
    "reader manifest unknown",
    "reader gap in doubt",
    "reader gap certain",
    "reader unavailable",
];
