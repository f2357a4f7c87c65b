//! Terms <-> Rust types, one module per shape of the protocol. Past here there are only Rust types.
//!
//! A term of the wrong shape is `badarg`; nothing here decides anything.

pub(crate) mod config;
pub(crate) mod event;
pub(crate) mod header;
pub(crate) mod push;
pub(crate) mod spec;
pub(crate) mod status;

use rustler::{Atom, Binary, Decoder, Encoder, Env, Error, NewBinary, NifResult, Term};

use crate::atoms;

/// A UTF-8 binary.
pub(crate) fn text<'a>(env: Env<'a>, text: &str) -> Term<'a> {
    binary(env, text.as_bytes())
}

/// A binary.
pub(crate) fn binary<'a>(env: Env<'a>, bytes: &[u8]) -> Term<'a> {
    NewBinary::from_slice(env, bytes).into()
}

/// A non-negative integer or -1 for "none".
pub(crate) struct OffsetOrNone(pub(crate) Option<u64>);

impl<'a> Decoder<'a> for OffsetOrNone {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        match term.decode::<u64>() {
            Ok(offset) => Ok(Self(Some(offset))),
            Err(_) if term.decode::<i64>()? == -1 => Ok(Self(None)),
            Err(_) => Err(Error::BadArg),
        }
    }
}

/// A string that must be a UTF-8 binary.
pub(crate) fn string(term: Term<'_>) -> NifResult<String> {
    let binary: Binary<'_> = term.decode()?;
    std::str::from_utf8(binary.as_slice())
        .map(str::to_owned)
        .map_err(|_| Error::BadArg)
}

/// `undefined` or a value.
pub(crate) fn optional<'a, T>(
    term: Term<'a>,
    decode: impl FnOnce(Term<'a>) -> NifResult<T>,
) -> NifResult<Option<T>> {
    if atoms::undefined() == term {
        Ok(None)
    } else {
        decode(term).map(Some)
    }
}

/// The value of a key that must be there.
pub(crate) fn get<'a>(map: Term<'a>, key: Atom) -> NifResult<Term<'a>> {
    map.map_get(key)
}

/// The value of a key that may be absent.
pub(crate) fn find<'a>(map: Term<'a>, key: Atom) -> Option<Term<'a>> {
    map.map_get(key).ok()
}

/// A map of the given pairs.
pub(crate) fn map<'a>(env: Env<'a>, pairs: &[(Atom, Term<'a>)]) -> NifResult<Term<'a>> {
    let keys: Vec<Term<'a>> = pairs.iter().map(|(key, _)| key.to_term(env)).collect();
    let values: Vec<Term<'a>> = pairs.iter().map(|(_, value)| *value).collect();
    Term::map_from_term_arrays(env, &keys, &values)
}

/// A map from atoms (made of fixed names, never of input) to integers.
pub(crate) fn counters<'a, V: Encoder>(
    env: Env<'a>,
    rows: impl IntoIterator<Item = (&'static str, V)>,
) -> NifResult<Term<'a>> {
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for (name, value) in rows {
        keys.push(Atom::from_str(env, name)?.to_term(env));
        values.push(value.encode(env));
    }
    Term::map_from_term_arrays(env, &keys, &values)
}
