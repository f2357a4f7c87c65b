//! Calls of a recovery from the bucket: what it has, and the root that a recovered stream begins with.

use std::sync::Arc;

use rustler::{Encoder, Env, LocalPid, NifResult, Reference, ResourceArc, Term};
use tiering_runtime::engine::Closed;
use tiering_runtime::object_metadata::AboutStream;
use tiering_runtime::recovery::{Adopted, Affected, Depth, Found, Objects, RecoveryError};

use crate::codec::{get, map, optional, string, text};
use crate::message::Mailbox;
use crate::resources::EngineResource;
use crate::{atoms, errors};

pub(crate) fn streams<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    token: Term<'a>,
) -> NifResult<Term<'a>> {
    let token = if atoms::start() == token {
        None
    } else {
        Some(string(token)?)
    };
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle.engine.recovery_streams(token, move |outcome| {
        mailbox.send(|env| match &outcome {
            Ok((ids, next)) => {
                let ids: Vec<Term<'_>> = ids.iter().map(|id| text(env, id)).collect();
                let next = match next {
                    Some(token) => text(env, token),
                    None => atoms::done().encode(env),
                };
                (atoms::page(), ids, next).encode(env)
            }
            Err(error) => errors::store(env, error),
        });
    });
    Ok(accepted(env, asked))
}

pub(crate) fn inspect<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    stream_id: Term<'a>,
    depth: Term<'a>,
) -> NifResult<Term<'a>> {
    let depth = if atoms::objects() == depth {
        Depth::Objects
    } else if atoms::root() == depth {
        Depth::Root
    } else {
        return Err(rustler::Error::BadArg);
    };
    let mailbox = Mailbox::new(pid, *reference);
    let asked = handle
        .engine
        .recovery_inspect(string(stream_id)?, depth, move |outcome| {
            mailbox.send(|env| match &outcome {
                Ok(found) => answer(env, found_map(env, found)),
                Err(error) => failure(env, error),
            });
        });
    Ok(accepted(env, asked))
}

pub(crate) fn adopt<'a>(
    env: Env<'a>,
    handle: ResourceArc<EngineResource>,
    pid: LocalPid,
    reference: Reference<'a>,
    about: Term<'a>,
) -> NifResult<Term<'a>> {
    let named = |key| optional(get(about, key)?, string);
    let about = AboutStream {
        stream_id: string(get(about, atoms::stream_id())?)?,
        vhost: named(atoms::vhost())?,
        queue: named(atoms::queue())?,
        arguments: named(atoms::arguments())?,
        cluster: named(atoms::cluster())?,
    };
    let mailbox = Arc::new(Mailbox::new(pid, *reference));
    let asked = handle.engine.recovery_adopt(about, move |outcome| {
        mailbox.send(|env| match &outcome {
            Ok(Adopted {
                epoch,
                uid,
                first_offset,
                next_offset,
            }) => (atoms::adopted(), epoch, uid, first_offset, next_offset).encode(env),
            Err(error) => failure(env, error),
        });
    });
    Ok(accepted(env, asked))
}

fn found_map<'a>(env: Env<'a>, found: &Found) -> NifResult<Term<'a>> {
    let Found {
        about,
        root,
        modified_ms,
        recoveries,
        first_offset,
        next_offset,
        total_size_bytes,
        passed_over,
        lost_up_to,
        objects,
    } = found;
    let or_undefined = |value: &Option<String>| match value {
        Some(value) => text(env, value),
        None => atoms::undefined().encode(env),
    };
    let passed_over: Vec<Term<'a>> = passed_over
        .iter()
        .map(|(key, reason)| (text(env, key), text(env, reason)).encode(env))
        .collect();
    let objects = match objects {
        Some(objects) => objects_map(env, objects)?,
        None => atoms::undefined().encode(env),
    };
    map(
        env,
        &[
            (atoms::stream_id(), text(env, &about.stream_id)),
            (atoms::vhost(), or_undefined(&about.vhost)),
            (atoms::queue(), or_undefined(&about.queue)),
            (atoms::arguments(), or_undefined(&about.arguments)),
            (atoms::cluster(), or_undefined(&about.cluster)),
            (
                atoms::root(),
                match root {
                    Some(root) => (root.epoch, root.uid).encode(env),
                    None => atoms::rebuilt().encode(env),
                },
            ),
            (atoms::modified_ms(), number_or_undefined(env, modified_ms)),
            (atoms::recoveries(), recoveries.encode(env)),
            (atoms::first_offset(), first_offset.encode(env)),
            (atoms::next_offset(), next_offset.encode(env)),
            (atoms::total_size(), total_size_bytes.encode(env)),
            (atoms::passed_over(), passed_over.encode(env)),
            (atoms::lost_up_to(), number_or_undefined(env, lost_up_to)),
            (atoms::objects(), objects),
        ],
    )
}

fn objects_map<'a>(env: Env<'a>, objects: &Objects) -> NifResult<Term<'a>> {
    let affected: Vec<Term<'a>> = objects
        .affected
        .iter()
        .map(|affected| {
            let Affected {
                key,
                first_offset,
                next_offset,
                reason,
            } = affected;
            (text(env, key), first_offset, next_offset, text(env, reason)).encode(env)
        })
        .collect();
    map(
        env,
        &[
            (atoms::named(), objects.named.encode(env)),
            (atoms::affected_count(), objects.affected_count.encode(env)),
            (atoms::affected(), affected.encode(env)),
            (atoms::unnamed(), objects.unnamed.encode(env)),
            (atoms::unnamed_bytes(), objects.unnamed_bytes.encode(env)),
        ],
    )
}

fn number_or_undefined<'a, N: Encoder>(env: Env<'a>, number: &Option<N>) -> Term<'a> {
    match number {
        Some(number) => number.encode(env),
        None => atoms::undefined().encode(env),
    }
}

fn answer<'a>(env: Env<'a>, found: NifResult<Term<'a>>) -> Term<'a> {
    match found {
        Ok(found) => (atoms::found(), found).encode(env),
        Err(_) => {
            errors::count_bug();
            (atoms::error(), atoms::bug(), "the answer has no term").encode(env)
        }
    }
}

fn failure<'a>(env: Env<'a>, error: &RecoveryError) -> Term<'a> {
    let kind = rustler::Atom::from_str(env, error.name()).unwrap_or_else(|_| atoms::unexpected());
    (atoms::error(), kind, text(env, &error.to_string())).encode(env)
}

fn accepted<'a>(env: Env<'a>, asked: Result<(), Closed>) -> Term<'a> {
    match asked {
        Ok(()) => atoms::ok().encode(env),
        Err(Closed) => errors::refused(env, atoms::closed()),
    }
}
