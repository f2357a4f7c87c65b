//! What went wrong with a request, in the words of the one who has to decide what to do.
//!
//! Owns: the kinds. Does not own: which answer of a store is of which kind (`tiering-runtime`), nor what a machine does then.

/// What a failed transfer or request means to the machine. Folded once, at the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Worth trying again soon (timeouts, resets, 408, 429, 5xx, SlowDown).
    Transient(String),
    /// Will not go away by itself (403, no such bucket, checksum refused): stalls, is reported, is retried slowly.
    Stalled(String),
    /// The object is there, in an archive class: it cannot be read until somebody restores it. Stalls.
    Archived(String),
    /// The object or segment is not there; of an object that is proven, by the store's own code or by a listing.
    NotFound(String),
    /// The bytes are there as a whole, but are not what they must be.
    Corrupt(String),
}

impl Failure {
    /// Whether it says something of the object itself. Anything else leaves open whether the object is there and well.
    #[must_use]
    pub const fn is_evidence(&self) -> bool {
        match self {
            Self::NotFound(_) | Self::Corrupt(_) => true,
            Self::Transient(_) | Self::Stalled(_) | Self::Archived(_) => false,
        }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Transient(text)
            | Self::Stalled(text)
            | Self::Archived(text)
            | Self::NotFound(text)
            | Self::Corrupt(text) => text,
        }
    }
}
