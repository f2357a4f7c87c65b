//! The local tier as files: scanning headers of committed chunks, and reading chunk bytes into fragments.
//!
//! Owns reading of osiris' segment and index files. Does not own what is committed (the shell says), nor writing or deleting
//! (osiris does, at any time). Files are never mapped into memory: osiris truncates them on recovery.

mod body;
mod locate;
mod scan;

pub use body::FragmentBody;
pub use scan::{ScanRequest, Scanner};

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Fills `buffer` from `position`, less only where the file ends.
fn read_at_most(file: &File, buffer: &mut [u8], position: u64) -> io::Result<usize> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, position + filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
pub(crate) mod test_log;
