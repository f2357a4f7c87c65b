//! Messages to Erlang processes: `{rabbitmq_stream_s3, Ref, Event}`, or a wake term exactly as given.
//!
//! Owns the copies of the caller's terms and the environments that messages are built in. The VM refuses such messages from
//! its own scheduler threads, so everything here is called from runtime threads; what happens within a call and has
//! something to tell leaves it to a task. Nothing here panics: a sender may be unwinding already.

use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

use rustler::env::{OwnedEnv, SavedTerm};
use rustler::thread::is_scheduler_thread;
use rustler::{Encoder, Env, LocalPid, Term};

use crate::{atoms, errors};

thread_local! {
    /// One environment for each sending thread: making a new one costs as much as the message.
    static MESSAGE: Cell<Option<OwnedEnv>> = const { Cell::new(None) };
}

/// A process to tell things, with the term of its own that the messages carry.
pub(crate) struct Mailbox {
    pid: LocalPid,
    // Only senders to this mailbox lock it, for the time of a small copy.
    kept: Mutex<Kept>,
}

struct Kept {
    env: OwnedEnv,
    term: SavedTerm,
}

impl Mailbox {
    /// Copies `term` (a reference, or a wake message).
    pub(crate) fn new(pid: LocalPid, term: Term<'_>) -> Self {
        let env = OwnedEnv::new();
        let term = env.save(term);
        Self {
            pid,
            kept: Mutex::new(Kept { env, term }),
        }
    }

    /// Whose it is.
    pub(crate) const fn pid(&self) -> LocalPid {
        self.pid
    }

    /// Sends `{rabbitmq_stream_s3, Term, Event}`. A process that is gone gets nothing: its handles are closed anyway.
    pub(crate) fn send(&self, event: impl for<'a> FnOnce(Env<'a>) -> Term<'a>) {
        if is_scheduler_thread() {
            errors::count_bug();
            return;
        }
        // Taken while in use: one that sends while a panic unwinds through another's message makes its own.
        let mut message = MESSAGE
            .try_with(Cell::take)
            .ok()
            .flatten()
            .unwrap_or_default();
        let _ = message.send_and_clear(&self.pid, |env| {
            let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            let reference = kept.env.run(|owned| kept.term.load(owned).in_env(env));
            drop(kept);
            (atoms::rabbitmq_stream_s3(), reference, event(env)).encode(env)
        });
        let _ = MESSAGE.try_with(|kept| kept.set(Some(message)));
    }

    /// Sends the term as it is; can be done any number of times.
    ///
    /// Does nothing on a scheduler thread: that is a reader that ends before its consumer has had a first answer,
    /// which will tell it.
    pub(crate) fn send_as_is(&self) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.env.run(|env| {
            // Without a message environment the VM copies the term, so ours stays.
            let _ = env.send(&self.pid, kept.term.load(env));
        });
    }
}
