//! Bytes to types and back, one module per stored record.
//!
//! Owns: the layouts of osiris' segment, index and chunk header; of fragments, manifest roots and groups; the scheme of
//! object keys; CRC-32 arithmetic. Does not own: any decision, any input or output. Every multi-byte integer is big-endian.
//!
//! Nothing here panics on any input: bytes from a disk or a bucket are hostile until decoded.

pub mod chunk;
pub mod crc;
pub mod fragment;
pub mod index;
pub mod key;
pub mod manifest;
pub mod segment;

mod bytes;
