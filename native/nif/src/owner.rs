//! Every handle has an owner process; its end is the end of the handle.
//!
//! Owns the monitor. Does not own what closing means: each resource says it.

use rustler::{Env, LocalPid, Resource, ResourceArc};

/// A handle that can be closed at any time, more than once, from any thread, without waiting.
pub(crate) trait Owned: Resource {
    /// Cancels the work.
    fn close(&self);
}

/// Ties the handle to its owner. `false`: the owner is dead already, and the handle is closed.
pub(crate) fn bind<T: Owned>(env: Env<'_>, handle: &ResourceArc<T>, owner: &LocalPid) -> bool {
    let alive = env.monitor(handle, owner).is_some();
    if !alive {
        handle.close();
    }
    alive
}
