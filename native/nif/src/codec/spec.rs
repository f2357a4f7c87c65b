//! Where a reader wants to start, and where it is sent.

use rustler::{Decoder, Encoder, Env, Error, NifResult, Term};
use tiering_core::route::{Continuation, Gap, LocalSpec, Route, Spec};
use tiering_runtime::read::Start;

use crate::atoms;

/// `first | last | next | {offset, N} | {abs, N} | {timestamp, Ms}`.
pub(crate) struct SpecTerm(pub(crate) Spec);

impl<'a> Decoder<'a> for SpecTerm {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        for (atom, spec) in [
            (atoms::first(), Spec::First),
            (atoms::last(), Spec::Last),
            (atoms::next(), Spec::Next),
        ] {
            if atom == term {
                return Ok(Self(spec));
            }
        }
        let (kind, value): (Term<'a>, Term<'a>) = term.decode()?;
        Ok(Self(match kind {
            kind if atoms::offset() == kind => Spec::Offset(value.decode()?),
            kind if atoms::abs() == kind => Spec::Abs(value.decode()?),
            kind if atoms::timestamp() == kind => Spec::Timestamp(value.decode()?),
            _ => return Err(Error::BadArg),
        }))
    }
}

/// `{offset, N} | {timestamp, Ms}`.
pub(crate) struct StartTerm(pub(crate) Start);

impl<'a> Decoder<'a> for StartTerm {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        match SpecTerm::decode(term)?.0 {
            Spec::Offset(offset) => Ok(Self(Start::Offset(offset))),
            Spec::Timestamp(timestamp_ms) => Ok(Self(Start::Timestamp(timestamp_ms))),
            Spec::First | Spec::Last | Spec::Next | Spec::Abs(_) => Err(Error::BadArg),
        }
    }
}

/// `certain | unproven`.
pub(crate) struct GapTerm(pub(crate) Gap);

impl<'a> Decoder<'a> for GapTerm {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        if atoms::certain() == term {
            Ok(Self(Gap::Certain))
        } else if atoms::unproven() == term {
            Ok(Self(Gap::Unproven))
        } else {
            Err(Error::BadArg)
        }
    }
}

/// `local | {remote, Offset} | unknown | unproven_gap`.
pub(crate) fn continuation_term(env: Env<'_>, continuation: Continuation) -> Term<'_> {
    match continuation {
        Continuation::Local => atoms::local().encode(env),
        Continuation::Remote { start_offset } => (atoms::remote(), start_offset).encode(env),
        Continuation::Unknown => atoms::unknown().encode(env),
        Continuation::UnprovenGap => atoms::unproven_gap().encode(env),
    }
}

/// `{local, Spec} | {remote, Offset} | unknown | unproven_gap | {error, {offset_out_of_range, empty | {First, Last}}}`.
pub(crate) fn route_term(env: Env<'_>, route: Route) -> Term<'_> {
    match route {
        Route::Local(spec) => (atoms::local(), local_spec(env, spec)).encode(env),
        Route::Remote { start_offset } => (atoms::remote(), start_offset).encode(env),
        Route::Unknown => atoms::unknown().encode(env),
        Route::UnprovenGap => atoms::unproven_gap().encode(env),
        Route::OutOfRange { range } => {
            let range = match range {
                None => atoms::empty().encode(env),
                Some(first_and_last) => first_and_last.encode(env),
            };
            env.error_tuple((atoms::offset_out_of_range(), range))
        }
    }
}

fn local_spec(env: Env<'_>, spec: LocalSpec) -> Term<'_> {
    match spec {
        LocalSpec::First => atoms::first().encode(env),
        LocalSpec::Last => atoms::last().encode(env),
        LocalSpec::Next => atoms::next().encode(env),
        LocalSpec::Offset(offset) => (atoms::offset(), offset).encode(env),
        LocalSpec::Timestamp(timestamp_ms) => (atoms::timestamp(), timestamp_ms).encode(env),
    }
}
