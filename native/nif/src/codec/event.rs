//! Events down to a stream: what the shell answers and tells.

use rustler::{Decoder, Error, NifResult, Term};
use tiering_core::upload::{CommitOutcome, Pointer, PointerRead, RetentionBound};
use tiering_runtime::upload::UploadEvent;

use super::{OffsetOrNone, find};
use crate::atoms;

/// One event.
pub(crate) struct EventTerm(pub(crate) UploadEvent);

impl<'a> Decoder<'a> for EventTerm {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        if atoms::cut() == term {
            return Ok(Self(UploadEvent::Cut));
        }
        if let Ok((kind, committed, local_first)) =
            term.decode::<(Term<'a>, OffsetOrNone, OffsetOrNone)>()
        {
            if atoms::committed() != kind {
                return Err(Error::BadArg);
            }
            return Ok(Self(UploadEvent::Committed {
                committed_chunk_id: committed.0,
                local_first_chunk_id: local_first.0,
            }));
        }
        let (kind, value): (Term<'a>, Term<'a>) = term.decode()?;
        let event = if atoms::pointer() == kind {
            UploadEvent::Pointer(pointer_read(value)?)
        } else if atoms::anchor() == kind {
            UploadEvent::Anchor {
                ok: ok_or_error(value)?,
            }
        } else if atoms::pointer_committed() == kind {
            UploadEvent::PointerCommitted(commit_outcome(value)?)
        } else if atoms::retention() == kind {
            UploadEvent::Retention(retention(value)?)
        } else {
            return Err(Error::BadArg);
        };
        Ok(Self(event))
    }
}

/// `{Epoch, Uid, Revision} | empty`.
pub(crate) struct PointerOrEmpty(pub(crate) Option<Pointer>);

impl<'a> Decoder<'a> for PointerOrEmpty {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        if atoms::empty() == term {
            return Ok(Self(None));
        }
        let PointerTerm(pointer) = term.decode()?;
        Ok(Self(Some(pointer)))
    }
}

/// `{Epoch, Uid, Revision}`.
pub(crate) struct PointerTerm(pub(crate) Pointer);

impl<'a> Decoder<'a> for PointerTerm {
    fn decode(term: Term<'a>) -> NifResult<Self> {
        let (epoch, uid, revision): (u64, u32, u64) = term.decode()?;
        Ok(Self(Pointer {
            epoch,
            uid,
            revision,
        }))
    }
}

fn pointer_read(term: Term<'_>) -> NifResult<PointerRead> {
    if atoms::not_found() == term {
        return Ok(PointerRead::NotFound);
    }
    if atoms::error() == term {
        return Ok(PointerRead::Unavailable);
    }
    let (ok, epoch, uid, revision): (Term<'_>, u64, u32, u64) = term.decode()?;
    if atoms::ok() != ok {
        return Err(Error::BadArg);
    }
    Ok(PointerRead::Found(Pointer {
        epoch,
        uid,
        revision,
    }))
}

fn commit_outcome(term: Term<'_>) -> NifResult<CommitOutcome> {
    for (atom, outcome) in [
        (atoms::conflict(), CommitOutcome::Conflict),
        (atoms::not_found(), CommitOutcome::NotFound),
        (atoms::error(), CommitOutcome::Unknown),
    ] {
        if atom == term {
            return Ok(outcome);
        }
    }
    let (ok, revision): (Term<'_>, u64) = term.decode()?;
    if atoms::ok() != ok {
        return Err(Error::BadArg);
    }
    Ok(CommitOutcome::Committed { revision })
}

fn retention(term: Term<'_>) -> NifResult<RetentionBound> {
    if !term.is_map() {
        return Err(Error::BadArg);
    }
    let bound = |key| {
        find(term, key)
            .map(|value| value.decode::<u64>())
            .transpose()
    };
    Ok(RetentionBound {
        max_bytes: bound(atoms::max_bytes())?,
        max_age_ms: bound(atoms::max_age_ms())?,
    })
}

fn ok_or_error(term: Term<'_>) -> NifResult<bool> {
    if atoms::ok() == term {
        Ok(true)
    } else if atoms::error() == term {
        Ok(false)
    } else {
        Err(Error::BadArg)
    }
}
