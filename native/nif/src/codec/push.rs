//! Pushes up to the owner of a stream.

use rustler::{Atom, Encoder, Env, Term};
use tiering_core::upload::{Pointer, Recovery};
use tiering_runtime::manifests::{EditFrom, ManifestRange};
use tiering_runtime::upload::{Stopped, UploadPush};

use super::{binary, map, text};
use crate::atoms;

/// The event part of the message.
pub(crate) fn push_term<'a>(env: Env<'a>, push: &UploadPush) -> Term<'a> {
    match push {
        UploadPush::ReadPointer => atoms::read_pointer().encode(env),
        UploadPush::WriteAnchor => atoms::write_anchor().encode(env),
        UploadPush::CommitPointer {
            epoch,
            uid,
            next_offset,
            expected_revision,
        } => (
            atoms::commit_pointer(),
            *epoch,
            *uid,
            *next_offset,
            *expected_revision,
        )
            .encode(env),
        UploadPush::Range(range, edit) => {
            let edit = match edit {
                Some(EditFrom { pointer, bytes }) => {
                    (pointer_term(env, *pointer), binary(env, bytes)).encode(env)
                }
                None => atoms::none().encode(env),
            };
            (atoms::range(), range_map(env, range), edit).encode(env)
        }
        UploadPush::Recovery {
            kind,
            from_offset,
            to_offset,
        } => {
            let kind = match kind {
                Recovery::LocalLogAhead => atoms::local_log_ahead(),
                Recovery::RemoteTierAhead => atoms::remote_tier_ahead(),
            };
            (atoms::recovery(), kind, *from_offset, *to_offset).encode(env)
        }
        UploadPush::Abandoned {
            root_key,
            first_offset,
            next_offset,
        } => {
            let key = text(env, root_key);
            (atoms::abandoned(), key, *first_offset, *next_offset).encode(env)
        }
        UploadPush::Problem { kind, text: reason } => {
            (atoms::problem(), name(env, kind), text(env, reason)).encode(env)
        }
        UploadPush::Recovered { kind } => (atoms::recovered(), name(env, kind)).encode(env),
        UploadPush::Stopped(reason) => {
            let reason = match reason {
                Stopped::Deleted => atoms::deleted(),
                Stopped::ConflictLost => atoms::conflict_lost(),
                Stopped::Bug => atoms::bug(),
            };
            (atoms::stopped(), reason).encode(env)
        }
    }
}

/// An atom of a name that is fixed in the code.
fn name<'a>(env: Env<'a>, name: &'static str) -> Term<'a> {
    Atom::from_str(env, name)
        .unwrap_or_else(|_| atoms::undefined())
        .encode(env)
}

fn pointer_term(env: Env<'_>, pointer: Pointer) -> Term<'_> {
    let Pointer {
        epoch,
        uid,
        revision,
    } = pointer;
    (epoch, uid, revision).encode(env)
}

/// A persisted manifest in short.
pub(crate) fn range_map<'a>(env: Env<'a>, range: &ManifestRange) -> Term<'a> {
    let pointer = match range.pointer {
        Some(pointer) => pointer_term(env, pointer),
        None => atoms::none().encode(env),
    };
    let pairs = [
        (atoms::first_offset(), range.first_offset.encode(env)),
        (atoms::next_offset(), range.next_offset.encode(env)),
        (
            atoms::first_timestamp(),
            range.first_timestamp_ms.encode(env),
        ),
        (atoms::total_size(), range.total_size_bytes.encode(env)),
        (atoms::revision(), range.revision.encode(env)),
        (atoms::epoch(), range.epoch.encode(env)),
        (atoms::fragments(), range.fragments.encode(env)),
        (atoms::pointer(), pointer),
    ];
    // Fails for duplicate keys only.
    map(env, &pairs).unwrap_or_else(|_| Term::map_new(env))
}
