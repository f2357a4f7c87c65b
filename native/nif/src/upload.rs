//! Calls on a stream: the way in for what the shell tells the upload machine, the way out for what it asks.

use std::path::PathBuf;
use std::sync::Arc;

use rustler::{Encoder, Env, LocalPid, NifResult, Reference, ResourceArc, Term};
use tiering_runtime::engine::Closed;
use tiering_runtime::upload::{EventError, UploadConfig, UploadPush, UploadSink};

use crate::codec::event::EventTerm;
use crate::codec::push::push_term;
use crate::codec::status::status_map;
use crate::codec::{get, string};
use crate::message::Mailbox;
use crate::owner;
use crate::resources::{EngineResource, UploadResource};
use crate::{atoms, errors};

impl UploadSink for Mailbox {
    fn push(&self, push: UploadPush) {
        self.send(|env| push_term(env, &push));
    }
}

pub(crate) fn open<'a>(
    env: Env<'a>,
    engine: ResourceArc<EngineResource>,
    owner: LocalPid,
    reference: Reference<'a>,
    config: Term<'a>,
) -> NifResult<Term<'a>> {
    let config = UploadConfig {
        stream_id: string(get(config, atoms::stream_id())?)?,
        directory: PathBuf::from(string(get(config, atoms::directory())?)?),
        epoch: get(config, atoms::epoch())?.decode()?,
        queue: string(get(config, atoms::queue())?)?,
        vhost: string(get(config, atoms::vhost())?)?,
        arguments: string(get(config, atoms::arguments())?)?,
    };
    let sink = Arc::new(Mailbox::new(owner, *reference));
    let upload = match engine.engine.open_upload(config, sink) {
        Ok(upload) => upload,
        Err(Closed) => return Ok(errors::refused(env, atoms::closed())),
    };
    let handle = ResourceArc::new(UploadResource { upload });
    if !owner::bind(env, &handle, &owner) {
        return Ok(errors::refused(env, atoms::closed()));
    }
    Ok((atoms::ok(), handle).encode(env))
}

pub(crate) fn event(
    env: Env<'_>,
    handle: ResourceArc<UploadResource>,
    event: EventTerm,
) -> NifResult<Term<'_>> {
    Ok(match handle.upload.event(event.0) {
        Ok(()) => atoms::ok().encode(env),
        Err(EventError::Busy) => errors::refused(env, atoms::busy()),
        Err(EventError::Closed) => errors::refused(env, atoms::closed()),
    })
}

pub(crate) fn status(env: Env<'_>, handle: ResourceArc<UploadResource>) -> NifResult<Term<'_>> {
    status_map(env, &handle.upload.status())
}

pub(crate) fn close(env: Env<'_>, handle: ResourceArc<UploadResource>) -> NifResult<Term<'_>> {
    handle.upload.close();
    Ok(atoms::ok().encode(env))
}
