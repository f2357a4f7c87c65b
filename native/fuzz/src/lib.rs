//! What must hold whatever the bytes are: one function per decoder, which panics if it does not.
//!
//! Owns: the targets that `make fuzz` feeds with mutated bytes and that `tests/replay.rs` feeds with the committed corpus.
//! Does not own: how inputs come about. Nothing in production depends on this crate.

mod records;
mod remote;

/// A decoder and what must hold of it.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name, and folder of its corpus.
    pub name: &'static str,
    /// Panics if these bytes break a promise.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    target("chunk_header", records::chunk_header),
    target("chunk_entries", records::chunk_entries),
    target("index_record", records::index_record),
    target("segment_name", records::segment_name),
    target("fragment_header", records::fragment_header),
    target("fragment_index", records::fragment_index),
    target("root", records::root),
    target("group", records::group),
    target("edit", records::edit),
    target("key", records::key),
    target("checksum_text", records::checksum_text),
    target("read", remote::read),
];

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}
