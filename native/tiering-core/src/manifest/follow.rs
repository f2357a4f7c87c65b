//! Following a manifest from afar: what leads from one persisted root to the next, and taking it in where the first one is known.
//!
//! Owns which edits are made, and all that is checked before one counts: that it follows what is known, that it fits, and that
//! what comes out is the persisted root, byte for byte. A refused one has changed nothing; the root can still be fetched.

use log_format::crc::crc32;
use log_format::manifest::{Change, Entry, MAX_EDIT_BYTES, Root, RootEdit, RootError};

use super::Pointer;

/// Longest root that edits are made of and applied to, so that either takes well under a millisecond. Ours stay below 2,000
/// entries; what another program has left may be longer, and is fetched.
pub const ROOT_ENTRIES_MAX: usize = 8_192;

/// Why an edit is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// What is known is as new as what it leads to, or newer.
    #[error("the edit leads to nothing newer")]
    Stale,
    /// What is known is not what it was made from.
    #[error("the edit does not follow what is known")]
    Gap,
    /// It cannot be read, or leads to what is no manifest.
    #[error("the edit is damaged: {0}")]
    Record(#[from] RootError),
    /// It takes out entries that are not there.
    #[error("the edit was made for a longer manifest")]
    Misfit,
    /// It does not lead to the persisted root.
    #[error("the edit leads to another manifest than the persisted one")]
    Checksum,
}

/// What leads from one root to the other; `None` if that is better fetched. Linear in the roots.
#[must_use]
pub fn between(from: &Root, to: &Root) -> Option<Vec<u8>> {
    if from.entries.len().max(to.entries.len()) > ROOT_ENTRIES_MAX {
        return None;
    }
    let edit = RootEdit {
        header: Root {
            entries: Vec::new(),
            ..*to
        },
        root_crc: crc32(&to.encode()),
        changes: changes(&from.entries, &to.entries)?,
    };
    (edit.encoded_bytes() <= MAX_EDIT_BYTES).then(|| edit.encode())
}

/// Both lists ascend: what is only in one of them, or another object at the same offset, is a change.
fn changes(from: &[Entry], to: &[Entry]) -> Option<Vec<Change>> {
    let (mut changes, mut position, mut put) = (Vec::new(), 0, 0);
    loop {
        let same = (from.get(position..)?.iter().zip(to.get(put..)?))
            .take_while(|(old, new)| old == new)
            .count();
        (position, put) = (position + same, put + same);
        let (first_out, first_in) = (position, put);
        loop {
            match (from.get(position), to.get(put)) {
                (Some(old), Some(new)) if old == new => break,
                (Some(old), Some(new)) if old.first_offset < new.first_offset => position += 1,
                (Some(_), None) => position += 1,
                (_, Some(_)) => put += 1,
                (None, None) => break,
            }
        }
        if (first_out, first_in) == (position, put) {
            return Some(changes);
        }
        changes.push(Change {
            position: u32::try_from(first_out).ok()?,
            length: u32::try_from(position - first_out).ok()?,
            entries: to.get(first_in..put)?.to_vec(),
        });
    }
}

/// The root that `to` names, if this is the edit that leads there from the one that is known.
pub fn follow(
    known: Option<(Pointer, &Root)>,
    from: Pointer,
    to: Pointer,
    bytes: &[u8],
) -> Result<Root, Refused> {
    let (pointer, root) = known.ok_or(Refused::Gap)?;
    if (to.epoch, to.revision) <= (pointer.epoch, pointer.revision) {
        return Err(Refused::Stale);
    }
    if pointer != from || root.entries.len() > ROOT_ENTRIES_MAX {
        return Err(Refused::Gap);
    }
    let edit = RootEdit::decode(bytes)?;
    let result = Root {
        entries: changed(&root.entries, edit.changes).ok_or(Refused::Misfit)?,
        ..edit.header
    };
    result.check()?;
    if crc32(&result.encode()) != edit.root_crc {
        return Err(Refused::Checksum);
    }
    Ok(result)
}

fn changed(entries: &[Entry], changes: Vec<Change>) -> Option<Vec<Entry>> {
    let (mut result, mut at) = (Vec::with_capacity(entries.len()), 0);
    for change in changes {
        let position = usize::try_from(change.position).ok()?;
        result.extend_from_slice(entries.get(at..position)?);
        result.extend(change.entries);
        at = position.checked_add(usize::try_from(change.length).ok()?)?;
    }
    result.extend_from_slice(entries.get(at..)?);
    Some(result)
}

#[cfg(test)]
mod tests;
