//! Where the persisted root is.

/// The persisted manifest's place, as the metadata store keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pointer {
    /// Writer epoch that persisted the root.
    pub epoch: u64,
    /// Random part of the root's key.
    pub uid: u32,
    /// Version of the pointer in the metadata store; the next compare-and-swap names it.
    pub revision: u64,
}
