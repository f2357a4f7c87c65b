//! Calls on the engine: its life, requests on behalf of the operator, and this node's manifests.
//!
//! Owns nothing but the translation; answers that take time come as messages from runtime threads.

use std::sync::Arc;

use rustler::{
    Atom, Binary, Encoder, Env, Error, LocalPid, NifResult, Reference, ResourceArc, Term,
};
use tiering_core::route::{self, LocalLog, Manifest};
use tiering_runtime::engine::{Closed, Engine};
use tiering_runtime::manifests::{ManifestState, ResolvedManifest};

use crate::codec::config::{burst, config, rate};
use crate::codec::event::{PointerOrEmpty, PointerTerm};
use crate::codec::push::range_map;
use crate::codec::spec::{GapTerm, SpecTerm, continuation_term, route_term};
use crate::codec::{OffsetOrNone, counters, string, text};
use crate::message::Mailbox;
use crate::owner;
use crate::resources::{self, EngineResource};
use crate::{atoms, errors, memory};

/// Most keys in one `delete_objects`.
const DELETE_KEYS_MAX: usize = tiering_runtime::remote_tier::KEYS_MAX;

/// Never raises: the exception would carry the configuration, and its secrets, along.
pub(crate) fn open<'a>(
    env: Env<'a>,
    owner: Term<'a>,
    reference: Term<'a>,
    map: Term<'a>,
) -> NifResult<Term<'a>> {
    let refused = |kind: Atom, reason: &str| Ok(errors::refused(env, (kind, text(env, reason))));
    let Ok(owner) = owner.decode::<LocalPid>() else {
        return refused(atoms::config(), "the owner is not a local process");
    };
    if reference.decode::<Reference<'a>>().is_err() {
        return refused(atoms::config(), "the reference is none");
    }
    let config = match config(map) {
        Ok(config) => config,
        Err(error) => return refused(atoms::config(), &error.to_string()),
    };
    let engine = match Engine::open(config) {
        Ok(engine) => engine,
        Err(error) => return refused(errors::open(&error), &error.to_string()),
    };
    let mailbox = Arc::new(Mailbox::new(owner, reference));
    let lines = Arc::clone(&mailbox);
    let handle = ResourceArc::new(EngineResource {
        engine,
        owner: mailbox,
    });
    if !owner::bind(env, &handle, &owner) {
        return refused(atoms::closed(), "the owner is dead");
    }
    // Refused only by an engine that is closed already.
    let _ = handle.engine.forward_log(lines);
    Ok((atoms::ok(), handle).encode(env))
}

pub(crate) fn close(env: Env<'_>, handle: ResourceArc<EngineResource>) -> NifResult<Term<'_>> {
    handle.engine.close();
    Ok(atoms::ok().encode(env))
}

pub(crate) fn probe<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
) -> NifResult<Term<'a>> {
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle.engine.probe(move |outcome| {
        mailbox.send(|env| match &outcome {
            Ok(()) => (atoms::probe(), atoms::ok()).encode(env),
            Err(error) => {
                let reason = (
                    atoms::error(),
                    errors::probe(error.kind()),
                    text(env, error.text()),
                );
                (atoms::probe(), reason).encode(env)
            }
        });
    });
    Ok(accepted(env, asked))
}

pub(crate) fn stats(env: Env<'_>, handle: ResourceArc<EngineResource>) -> NifResult<Term<'_>> {
    let own = [
        (
            "native_panics",
            i64::try_from(errors::panics()).unwrap_or(i64::MAX),
        ),
        ("lent_chunks", resources::lent_chunks()),
        ("lent_bytes", resources::lent_bytes()),
        ("native_memory_bytes", memory::in_use_bytes()),
    ];
    counters(env, handle.engine.stats().into_iter().chain(own))
}

/// `#{Operation => [SumMicros, Count ...]}`, a count for each bucket.
pub(crate) fn request_durations(
    env: Env<'_>,
    handle: ResourceArc<EngineResource>,
) -> NifResult<Term<'_>> {
    let rows = handle.engine.request_durations().into_iter();
    counters(
        env,
        rows.map(|(name, counts)| {
            let mut row = vec![counts.sum_micros];
            row.extend(counts.buckets);
            (name, row)
        }),
    )
}

pub(crate) fn set_rate<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    bytes_per_second: Term<'a>,
    burst_bytes: Term<'a>,
) -> NifResult<Term<'a>> {
    handle
        .engine
        .set_rate(rate(bytes_per_second)?, burst(burst_bytes)?);
    Ok(atoms::ok().encode(env))
}

pub(crate) fn list_objects<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    stream_id: Term<'a>,
    token: Term<'a>,
) -> NifResult<Term<'a>> {
    let stream_id = string(stream_id)?;
    let token = if atoms::start() == token {
        None
    } else {
        Some(string(token)?)
    };
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle
        .engine
        .list_objects(&stream_id, token, move |outcome| {
            mailbox.send(|env| match &outcome {
                Ok(page) => {
                    let keys: Vec<Term<'_>> = page
                        .objects
                        .iter()
                        .map(|object| text(env, &object.key))
                        .collect();
                    let next = match &page.next_token {
                        Some(token) => text(env, token),
                        None => atoms::done().encode(env),
                    };
                    (atoms::page(), keys, next).encode(env)
                }
                Err(error) => errors::store(env, error),
            });
        });
    Ok(accepted(env, asked))
}

pub(crate) fn delete_objects<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    keys: Term<'a>,
) -> NifResult<Term<'a>> {
    if keys.list_length()? > DELETE_KEYS_MAX {
        return Err(Error::BadArg);
    }
    let keys = keys
        .into_list_iterator()?
        .map(string)
        .collect::<NifResult<Vec<String>>>()?;
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle.engine.delete_objects(keys, move |outcome| {
        mailbox.send(|env| match &outcome {
            Ok(outcome) => (atoms::deleted(), outcome.deleted, outcome.failed.len()).encode(env),
            Err(error) => errors::store(env, error),
        });
    });
    Ok(accepted(env, asked))
}

pub(crate) fn mark_pending<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
) -> NifResult<Term<'a>> {
    handle.engine.manifests().mark_pending(&string(stream_id)?);
    Ok(atoms::ok().encode(env))
}

pub(crate) fn reset<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
) -> NifResult<Term<'a>> {
    handle.engine.manifests().reset(&string(stream_id)?);
    Ok(atoms::ok().encode(env))
}

pub(crate) fn forget<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
) -> NifResult<Term<'a>> {
    handle.engine.manifests().forget(&string(stream_id)?);
    Ok(atoms::ok().encode(env))
}

pub(crate) fn range<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
) -> NifResult<Term<'a>> {
    Ok(match handle.engine.manifests().get(&string(stream_id)?) {
        None => atoms::none().encode(env),
        Some(ManifestState::Pending) => atoms::pending().encode(env),
        Some(ManifestState::Resolved(manifest)) => (
            atoms::ok(),
            manifest.root.first_offset,
            manifest.root.next_offset,
        )
            .encode(env),
    })
}

pub(crate) fn resolve<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    stream_id: Term<'a>,
    pointer: PointerOrEmpty,
) -> NifResult<Term<'a>> {
    let stream_id = string(stream_id)?;
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle
        .engine
        .resolve_manifest(&stream_id, pointer.0, move |outcome| {
            mailbox.send(|env| match &outcome {
                Ok(range) => (atoms::resolved(), range_map(env, range)).encode(env),
                Err(error) => errors::resolve(env, error),
            });
        });
    Ok(accepted(env, asked))
}

/// No dirty scheduler: what is changed is bounded (`follow::ROOT_ENTRIES_MAX`), and no lock is held meanwhile.
pub(crate) fn apply_edit<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
    from: PointerTerm,
    to: PointerTerm,
    bytes: Binary<'a>,
) -> NifResult<Term<'a>> {
    let applied = handle
        .engine
        .apply_edit(&string(stream_id)?, from.0, to.0, bytes.as_slice());
    Ok(match &applied {
        Ok(range) => (atoms::ok(), range_map(env, range)).encode(env),
        Err(error) => errors::resolve(env, error),
    })
}

pub(crate) fn route<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
    spec: SpecTerm,
    local: (OffsetOrNone, u64),
    gap: GapTerm,
) -> NifResult<Term<'a>> {
    let manifest = handle.engine.manifests().resolved(&string(stream_id)?);
    let (OffsetOrNone(first), next) = local;
    let route = route::route(
        remote(manifest.as_ref()),
        spec.0,
        LocalLog { first, next },
        gap.0,
    );
    Ok(route_term(env, route))
}

pub(crate) fn continue_at<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    stream_id: Term<'a>,
    next_offset: u64,
    local_first: OffsetOrNone,
    gap: GapTerm,
) -> NifResult<Term<'a>> {
    let manifest = handle.engine.manifests().resolved(&string(stream_id)?);
    let found = route::continue_at(remote(manifest.as_ref()), next_offset, local_first.0, gap.0);
    Ok(continuation_term(env, found))
}

fn remote(manifest: Option<&ResolvedManifest>) -> Manifest<'_> {
    manifest.map_or(Manifest::Unknown, |manifest| {
        Manifest::Known(&manifest.root)
    })
}

fn accepted<'a>(env: Env<'a>, asked: Result<(), Closed>) -> Term<'a> {
    match asked {
        Ok(()) => atoms::ok().encode(env),
        Err(Closed) => errors::refused(env, atoms::closed()),
    }
}
