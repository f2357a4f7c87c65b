//! The way into the library: its entry point, loading, and the one door that every call passes.
//!
//! Owns the table's C side and the panic guard. Does not know what any call does.
//!
//! Why not rustler's own `init!` and `nif`: they refuse a code upgrade, and so the second
//! `rabbitmq-plugins enable` in the life of a node (disabling leaves the module's old code behind);
//! and a panic must become a returned error here, not a raised one.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use rustler::codegen_runtime::{ErlNifEntry, ErlNifEnv, ErlNifFunc, ErlNifTerm};
use rustler::{Env, Error, NifResult, Term};

use crate::{errors, resources};

/// The entry as the VM wants it: immutable after it was made.
struct Entry(ErlNifEntry);

// SAFETY: the pointers in it are to static strings and to a leaked, never changed table.
unsafe impl Sync for Entry {}
// SAFETY: as above.
unsafe impl Send for Entry {}

static ENTRY: OnceLock<Entry> = OnceLock::new();

/// What `load_nif` looks up and calls first.
#[unsafe(no_mangle)]
extern "C" fn nif_init() -> *const ErlNifEntry {
    // SAFETY: fills rustler's table of VM functions; called by the VM's loader, under its lock.
    unsafe { rustler::codegen_runtime::internal_write_symbols() };
    let entry = ENTRY.get_or_init(|| {
        let table: &'static [ErlNifFunc] = Box::leak(crate::table());
        let mut entry = ErlNifEntry::new(c"rabbitmq_stream_s3_nif", table, load);
        entry.upgrade = Some(upgrade);
        Entry(entry)
    });
    &entry.0
}

unsafe extern "C" fn load(
    env: *mut ErlNifEnv,
    _private: *mut *mut c_void,
    _info: ErlNifTerm,
) -> c_int {
    // SAFETY: `env` is the VM's and valid for this call.
    unsafe { start(env) }
}

unsafe extern "C" fn upgrade(
    env: *mut ErlNifEnv,
    _private: *mut *mut c_void,
    _old_private: *mut *mut c_void,
    _info: ErlNifTerm,
) -> c_int {
    // SAFETY: `env` is the VM's and valid for this call.
    unsafe { start(env) }
}

/// Registers the resource types; 0 = loaded.
///
/// # Safety
/// `env` must be the environment of a load or upgrade call.
unsafe fn start(env: *mut ErlNifEnv) -> c_int {
    let lifetime = ();
    // SAFETY: promised by the caller; `lifetime` is this call's own.
    let env = unsafe { Env::new_init_env(&lifetime, env) };
    match catch_unwind(AssertUnwindSafe(|| resources::register(env))) {
        Ok(true) => 0,
        _ => 1,
    }
}

/// Runs the body of one call: wrong arguments raise `badarg`, a panic is counted and returned as
/// `{error, {bug, Text}}`.
///
/// # Safety
/// Only for the functions of the table: the pointers must be those of a NIF call.
pub(crate) unsafe fn call(
    env: *mut ErlNifEnv,
    argc: c_int,
    argv: *const ErlNifTerm,
    body: for<'a> fn(Env<'a>, &mut Arguments<'a>) -> NifResult<Term<'a>>,
) -> ErlNifTerm {
    let lifetime = ();
    // SAFETY: the VM's pointer, valid for this call; `lifetime` is this call's own.
    let env = unsafe { Env::new(&lifetime, env) };
    let terms = match usize::try_from(argc) {
        // SAFETY: the VM passes `argc` terms at `argv`, which live as long as this call.
        Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(argv, count) },
        _ => &[],
    };
    let mut arguments = Arguments { env, terms };
    match catch_unwind(AssertUnwindSafe(|| body(env, &mut arguments))) {
        Ok(Ok(term)) => term.as_c_arg(),
        // SAFETY: the environment of this call; the exception is what we return.
        Ok(Err(_)) => unsafe { rustler::sys::enif_make_badarg(env.as_c_arg()) },
        Err(panic) => errors::bug(env, &*panic).as_c_arg(),
    }
}

/// The arguments of a call, taken one after the other.
pub(crate) struct Arguments<'a> {
    env: Env<'a>,
    terms: &'a [ErlNifTerm],
}

impl<'a> Arguments<'a> {
    /// Decodes the next one.
    pub(crate) fn next<T: rustler::Decoder<'a>>(&mut self) -> NifResult<T> {
        let (first, rest) = self.terms.split_first().ok_or(Error::BadArg)?;
        self.terms = rest;
        // SAFETY: the term is an argument of the call whose environment this is.
        unsafe { Term::new(self.env, *first) }.decode()
    }
}

/// Makes the table: for every call its Erlang name, its arguments, and the function that runs it.
macro_rules! nif_table {
    ($( $body:path as $name:ident ( $( $argument:ident : $type:ty ),* $(,)? ) ; )*) => {
        /// Every call of the library, as `docs/NIF_PROTOCOL.md` specifies them.
        fn table() -> Box<[rustler::codegen_runtime::ErlNifFunc]> {
            Box::new([$({
                fn decoded<'a>(
                    env: rustler::Env<'a>,
                    _arguments: &mut $crate::entry::Arguments<'a>,
                ) -> rustler::NifResult<rustler::Term<'a>> {
                    $( let $argument: $type = _arguments.next()?; )*
                    $body(env, $( $argument ),*)
                }
                #[allow(unsafe_code)]
                unsafe extern "C" fn raw(
                    env: *mut rustler::codegen_runtime::ErlNifEnv,
                    argc: std::ffi::c_int,
                    argv: *const rustler::codegen_runtime::ErlNifTerm,
                ) -> rustler::codegen_runtime::ErlNifTerm {
                    // SAFETY: called by the VM as a NIF, with this call's own pointers.
                    unsafe { $crate::entry::call(env, argc, argv, decoded) }
                }
                rustler::codegen_runtime::ErlNifFunc {
                    name: concat!(stringify!($name), "\0").as_ptr().cast(),
                    arity: 0 $( + { let _ = stringify!($argument); 1 } )*,
                    function: raw,
                    flags: 0,
                }
            }),*])
        }
    };
}
pub(crate) use nif_table;
