//! The manifests of this node: how each becomes known here, and who may use it.
//!
//! Owns the registry, the fetch of a root by its pointer, and edits. Does not own what is in a manifest (`log_format`,
//! `tiering_core::manifest`), nor when one counts as persisted: the upload driver publishes, the shell marks and forgets.
//!
//! One way in for each case: a writer here publishes; a replica's shell resolves a pointer, or applies an edit to what is known.

mod edits;
mod fetch;
mod range;
mod registry;
mod resolve;

pub use edits::EditFrom;
pub(crate) use edits::apply;
pub(crate) use fetch::{RootReadError, fetch_root};
pub use range::ManifestRange;
pub use registry::{ManifestState, Manifests, Offered, ResolvedManifest, StreamId, Unusable};
pub use resolve::ResolveError;
pub(crate) use resolve::resolve;

/// A group has some thousand entries of 34 bytes, with another program's threshold perhaps more; a larger object is not a group.
pub(crate) const GROUP_BYTES_MAX: u64 = 16 << 20;
