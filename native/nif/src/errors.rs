//! Folding: the errors of the layers below become the few words that the shell acts on.
//!
//! Owns the panic counter. Never shows a secret: only kinds and texts made for people pass.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};

use rustler::{Encoder, Env, Term};

use crate::atoms;
use crate::codec::text;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// How many panics were caught in calls since the library was loaded.
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// `{error, {bug, Text}}`, counted.
pub(crate) fn bug<'a>(env: Env<'a>, panic: &(dyn Any + Send)) -> Term<'a> {
    PANICS.fetch_add(1, Ordering::Relaxed);
    let message = panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic without a text");
    env.error_tuple((atoms::bug(), text(env, message)))
}

/// `{error, Reason}` with an atom.
pub(crate) fn refused<'a>(env: Env<'a>, reason: impl Encoder) -> Term<'a> {
    env.error_tuple(reason)
}
