//! The status of one stream as a map.

use rustler::{Atom, Encoder, Env, NifResult, Term};
use tiering_core::upload::{Activity, Problem};
use tiering_runtime::upload::UploadStatus;

use super::{counters, map, text};
use crate::atoms;

/// `upload_status/1`.
pub(crate) fn status_map<'a>(env: Env<'a>, status: &UploadStatus) -> NifResult<Term<'a>> {
    let machine = &status.machine;
    let phase = match machine.activity {
        Activity::Resolving => atoms::resolving(),
        Activity::Anchoring => atoms::anchoring(),
        Activity::Draining => atoms::draining(),
        Activity::Stopped => atoms::stopped(),
    };
    let problem = match &machine.problem {
        None => atoms::undefined().encode(env),
        Some(Problem { kind, text: reason }) => {
            (Atom::from_str(env, kind)?, text(env, reason)).encode(env)
        }
    };
    let abandoned_root = match &status.abandoned_root {
        None => atoms::none().encode(env),
        Some(key) => text(env, key).encode(env),
    };
    let pairs = [
        (atoms::phase(), phase.encode(env)),
        (
            atoms::log_next_offset(),
            machine.log_next_offset.encode(env),
        ),
        (
            atoms::manifest_first_offset(),
            machine.manifest_first_offset.encode(env),
        ),
        (
            atoms::manifest_next_offset(),
            machine.manifest_next_offset.encode(env),
        ),
        (
            atoms::manifest_total_size(),
            machine.manifest_total_size_bytes.encode(env),
        ),
        (
            atoms::manifest_fragments(),
            machine.manifest_entries.encode(env),
        ),
        (
            atoms::rebalance_in_flight(),
            machine.rebalance_in_flight.encode(env),
        ),
        (
            atoms::persisted_next_offset(),
            machine.persisted_next_offset.encode(env),
        ),
        (atoms::revision(), machine.revision.encode(env)),
        (
            atoms::transfers_in_flight(),
            machine.transfers_in_flight.encode(env),
        ),
        (
            atoms::transfers_waiting(),
            machine.transfers_waiting.encode(env),
        ),
        (
            atoms::edits_since_persist(),
            machine.edits_since_persist.encode(env),
        ),
        (
            atoms::persist_in_flight(),
            machine.persist_in_flight.encode(env),
        ),
        (
            atoms::assembly_first_offset(),
            machine.assembly_first_offset.unwrap_or(0).encode(env),
        ),
        (
            atoms::assembly_next_offset(),
            machine.assembly_next_offset.unwrap_or(0).encode(env),
        ),
        (
            atoms::assembly_payload_bytes(),
            machine.assembly_payload_bytes.encode(env),
        ),
        (
            atoms::assembly_chunks(),
            machine.assembly_chunks.encode(env),
        ),
        (
            atoms::stalled_offset(),
            or_undefined(env, machine.stalled_offset),
        ),
        (
            atoms::oldest_pending_timestamp(),
            or_undefined(env, machine.oldest_pending_timestamp_ms),
        ),
        (atoms::transfer_bytes(), machine.transfer_bytes.encode(env)),
        (atoms::persist_bytes(), machine.persist_bytes.encode(env)),
        (atoms::problem(), problem),
        (
            atoms::deletions_waiting(),
            status.deletions_waiting.encode(env),
        ),
        (atoms::abandoned_root(), abandoned_root),
        (atoms::counters(), counters(env, status.counters.named())?),
    ];
    map(env, &pairs)
}

fn or_undefined<V: Encoder>(env: Env<'_>, value: Option<V>) -> Term<'_> {
    value.map_or_else(|| atoms::undefined().encode(env), |value| value.encode(env))
}
