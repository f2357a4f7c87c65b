//! Folding: the errors of the layers below become the few words that the shell acts on.
//!
//! Owns the panic counter. Never shows a secret: only kinds and texts made for people pass.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};

use rustler::{Atom, Encoder, Env, Term};
use tiering_runtime::engine::OpenError;
use tiering_runtime::manifests::ResolveError;
use tiering_runtime::remote_tier::{StoreError, StoreErrorKind};

use crate::atoms;
use crate::codec::text;

static PANICS: AtomicU64 = AtomicU64::new(0);

/// How many panics were caught in calls since the library was loaded.
pub(crate) fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Counts a mistake of ours that does no further harm.
pub(crate) fn count_bug() {
    PANICS.fetch_add(1, Ordering::Relaxed);
}

/// `{error, {bug, Text}}`, counted.
pub(crate) fn bug<'a>(env: Env<'a>, panic: &(dyn Any + Send)) -> Term<'a> {
    count_bug();
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

/// Why an engine was not opened.
pub(crate) fn open(error: &OpenError) -> Atom {
    match error {
        OpenError::Config(_) => atoms::config(),
        OpenError::Runtime(_) => atoms::system(),
    }
}

/// What the operator must look at when the probe fails.
pub(crate) fn probe(kind: StoreErrorKind) -> Atom {
    match kind {
        StoreErrorKind::NoSuchBucket => atoms::no_such_bucket(),
        StoreErrorKind::AccessDenied => atoms::access_denied(),
        StoreErrorKind::WrongRegion => atoms::wrong_region(),
        StoreErrorKind::Timeout | StoreErrorKind::Connection => atoms::unreachable(),
        StoreErrorKind::Tls => atoms::tls(),
        _ => atoms::unexpected(),
    }
}

/// `{error, Kind, Text}` of a manifest that is not known.
pub(crate) fn resolve<'a>(env: Env<'a>, error: &ResolveError) -> Term<'a> {
    let kind = Atom::from_str(env, error.name()).unwrap_or_else(|_| atoms::unexpected());
    (atoms::error(), kind, text(env, &error.to_string())).encode(env)
}

/// `{error, Kind, Text}` of a failed request.
pub(crate) fn store<'a>(env: Env<'a>, error: &StoreError) -> Term<'a> {
    let kind = Atom::from_str(env, error.kind().name()).unwrap_or_else(|_| atoms::unexpected());
    (atoms::error(), kind, text(env, error.text())).encode(env)
}
