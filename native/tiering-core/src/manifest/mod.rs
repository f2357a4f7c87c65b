//! What is done to a manifest: growing, shrinking, searching, and what must hold of it.
//!
//! Owns: the one way in which a [`Root`](log_format::manifest::Root) changes. Does not own: when, and where it is stored.

pub mod cut_back;
pub mod edit;
pub mod follow;
pub mod invariants;
mod lineage;
mod pointer;
pub mod rebalance;
pub mod retention;
pub mod search;
pub mod trim;

pub use lineage::Lineage;
pub use pointer::Pointer;
pub use retention::RetentionBound;
