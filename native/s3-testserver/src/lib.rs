//! A small S3 server for tests.
//!
//! Owns: objects in memory behind one lock (so that conditional writes are atomic), the checks a
//! real S3 makes (signature, checksums, conditions, ranges), a plan of faults, and a log of every
//! request. Does not own any promise about speed or durability: it forgets everything when it
//! ends. Never a dependency of code that ships.
//!
//! In a Rust test: [`TestServer::start`], then [`TestServer::faults`], [`TestServer::log`] and
//! [`TestServer::objects`]. From another language: the binary, steered over a second port
//! (see [`control`]).
//!
//! ```no_run
//! use s3_testserver::{Options, Rule, TestServer};
//! # fn main() -> Result<(), s3_testserver::StartError> {
//! let server = TestServer::start(Options::default())?;
//! server.faults().set(vec![Rule::on("PutObject").key("root.").times(2).status(503, "SlowDown")]);
//! println!("{}", server.endpoint());
//! # Ok(())
//! # }
//! ```
//!
//! How a request travels: `server` (sockets, TLS) → `service` (facts, faults, log) → `s3s`
//! (HTTP to typed operations, signatures) → `s3` (the operations) → `objects` (the lock).

pub mod control;
pub mod faults;
pub mod log;
pub mod objects;

mod body;
mod checksums;
mod clock;
mod facts;
mod io;
mod s3;
mod server;
mod service;

pub use faults::{Faults, Rule};
pub use log::{Entry, Filter, Log};
pub use objects::{Object, Objects};
pub use server::{Options, StartError, TestServer, TlsFiles};
