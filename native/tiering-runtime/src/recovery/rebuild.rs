//! A manifest made from the fragments, for a stream of which no root can be read.
//!
//! Each fragment says where it begins and ends (key and metadata), and its last index record says when it ends. A manifest has no
//! holes, so what is found is the run of fragments that ends last; the ones before a hole are not in it, and stay in the bucket.

use std::collections::BTreeMap;
use std::ops::Range;

use log_format::fragment::{FragmentIndexRecord, HEADER_BYTES, INDEX_RECORD_BYTES};
use log_format::key::Object;
use log_format::manifest::{Entry, Kind, Root};

use super::{Found, RecoveryError, Usable};
use crate::object_metadata::{AboutStream, RootHistory};
use crate::remote_tier::{KEYS_MAX, StoreError};
use crate::shared::Shared;

/// A root has 34 bytes for each; a stream of more needs its groups.
const FRAGMENTS_MAX: usize = 1_000_000;

impl Usable {
    pub(super) fn passing_over(mut self, passed_over: Vec<(String, String)>) -> Self {
        self.passed_over = passed_over;
        self
    }
}

/// The manifest, or why there is none.
pub(super) async fn from_fragments(
    shared: &Shared,
    stream_id: &str,
) -> Result<Rebuilt, RecoveryError> {
    let mut fragments = Vec::new();
    let mut about = None;
    for (first_offset, uid) in listed(shared, stream_id).await? {
        let (fragment, metadata) = describe(shared, stream_id, first_offset, uid).await?;
        if let Some(fragment) = fragment {
            fragments.push(fragment);
            about = Some(AboutStream::of(stream_id, &metadata));
        }
    }
    let Some(about) = about else {
        let text = "there is no manifest that can be read, and no fragment to make one from";
        return Err(RecoveryError::Nothing(text.to_owned()));
    };
    let run = last_run(fragments);
    Ok(Rebuilt {
        root: root(&run),
        about,
    })
}

/// What came out.
pub(super) struct Rebuilt {
    pub(super) root: Root,
    about: AboutStream,
}

impl Rebuilt {
    pub(super) fn found(self, passed_over: Vec<(String, String)>) -> Found {
        Usable::from(self).passing_over(passed_over).found()
    }
}

impl From<Rebuilt> for Usable {
    fn from(rebuilt: Rebuilt) -> Self {
        Self {
            about: rebuilt.about,
            history: RootHistory::default(),
            name: None,
            modified_ms: None,
            root: rebuilt.root,
            passed_over: Vec::new(),
            lost_up_to: None,
        }
    }
}

/// A fragment as it describes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fragment {
    entry: Entry,
    next_offset: u64,
    epoch: u64,
}

async fn listed(shared: &Shared, stream_id: &str) -> Result<Vec<(u64, u32)>, RecoveryError> {
    let prefix = format!("{}data/", shared.keys.stream_prefix(stream_id));
    let (mut fragments, mut token) = (Vec::new(), None::<String>);
    loop {
        let page = shared
            .retrying
            .list(&prefix, token.as_deref(), KEYS_MAX)
            .await?;
        for object in page.objects {
            let parsed = shared.keys.parse(&object.key).map(|parsed| parsed.object);
            if let Some(Object::Fragment { first_offset, uid }) = parsed {
                fragments.push((first_offset, uid));
            }
        }
        if fragments.len() > FRAGMENTS_MAX {
            return Err(RecoveryError::Nothing(format!(
                "there is no manifest that can be read, and more than {FRAGMENTS_MAX} fragments"
            )));
        }
        token = page.next_token;
        if token.is_none() {
            return Ok(fragments);
        }
    }
}

/// `None`: the object does not say what is needed.
async fn describe(
    shared: &Shared,
    stream_id: &str,
    first_offset: u64,
    uid: u32,
) -> Result<(Option<Fragment>, BTreeMap<String, String>), StoreError> {
    let key = shared.keys.fragment(stream_id, first_offset, uid);
    let head = shared.retrying.head(&key).await?;
    let number = |name| -> Option<u64> { head.metadata.get(name)?.parse().ok() };
    let (Some(next_offset), Some(epoch), Some(size_bytes), Some(chunks)) = (
        number("next-offset"),
        number("epoch"),
        number("data-size"),
        number("chunks"),
    ) else {
        return Ok((None, head.metadata));
    };
    let places = index_ends(head.size_bytes, size_bytes, chunks);
    let Some((first, last)) = places.filter(|_| next_offset > first_offset) else {
        return Ok((None, head.metadata));
    };
    let first = FragmentIndexRecord::decode(&shared.retrying.get_range(&key, first).await?);
    let last = FragmentIndexRecord::decode(&shared.retrying.get_range(&key, last).await?);
    let (Some(first), Some(last)) = (first, last) else {
        return Ok((None, head.metadata));
    };
    let (first_timestamp_ms, last_timestamp_ms) = (first.timestamp_ms, last.timestamp_ms);
    let fragment = Fragment {
        entry: Entry {
            first_offset,
            first_timestamp_ms,
            last_timestamp_ms,
            kind: Kind::Fragment,
            size_bytes,
            uid,
        },
        next_offset,
        epoch,
    };
    Ok((Some(fragment), head.metadata))
}

/// Where the first and the last index record are, if the object is as long as its metadata says. That may be anything.
fn index_ends(object_bytes: u64, data_bytes: u64, chunks: u64) -> Option<(Range<u64>, Range<u64>)> {
    let record_bytes = INDEX_RECORD_BYTES as u64;
    let start = (HEADER_BYTES as u64).checked_add(data_bytes)?;
    let end = start.checked_add(chunks.checked_mul(record_bytes)?)?;
    let ends = (
        start..start.checked_add(record_bytes)?,
        end.checked_sub(record_bytes)?..end,
    );
    (chunks > 0 && end == object_bytes).then_some(ends)
}

/// The fragments that follow each other without a hole and end last. Of two that begin at one place, that of the later writer.
fn last_run(mut fragments: Vec<Fragment>) -> Vec<Fragment> {
    fragments.sort_unstable_by_key(|fragment| {
        let Fragment {
            entry,
            next_offset,
            epoch,
        } = fragment;
        (entry.first_offset, *epoch, *next_offset)
    });
    // Backwards: each is taken whose end is where the one after it begins.
    let last = fragments.iter().max_by_key(|fragment| fragment.next_offset);
    let Some(last) = last.copied() else {
        return Vec::new();
    };
    let mut run = vec![last];
    let mut begins = last.entry.first_offset;
    for fragment in fragments.iter().rev() {
        if fragment.next_offset == begins && fragment.entry.first_offset < begins {
            begins = fragment.entry.first_offset;
            run.push(*fragment);
        }
    }
    run.reverse();
    run
}

fn root(run: &[Fragment]) -> Root {
    let first = run.first();
    let entries: Vec<Entry> = run.iter().map(|fragment| fragment.entry).collect();
    Root {
        first_offset: first.map_or(0, |first| first.entry.first_offset),
        next_offset: run.last().map_or(0, |last| last.next_offset),
        first_timestamp_ms: first.map_or(-1, |first| first.entry.first_timestamp_ms),
        first_last_timestamp_ms: first.map_or(-1, |first| first.entry.last_timestamp_ms),
        total_size_bytes: entries
            .iter()
            .map(|entry| u128::from(entry.size_bytes))
            .sum(),
        entries,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(first_offset: u64, next_offset: u64, epoch: u64) -> Fragment {
        Fragment {
            entry: Entry {
                first_offset,
                first_timestamp_ms: first_offset as i64,
                last_timestamp_ms: next_offset as i64,
                kind: Kind::Fragment,
                size_bytes: 10,
                uid: epoch as u32,
            },
            next_offset,
            epoch,
        }
    }

    #[test]
    fn the_run_that_ends_last_is_taken_and_of_two_the_later_writers() {
        let run = last_run(vec![
            fragment(0, 10, 1),
            // A hole.
            fragment(20, 30, 1),
            fragment(30, 40, 1),
            fragment(30, 40, 2),
            fragment(40, 50, 2),
        ]);
        let begins: Vec<_> = run
            .iter()
            .map(|f| (f.entry.first_offset, f.epoch))
            .collect();
        assert_eq!(begins, [(20, 1), (30, 2), (40, 2)]);
        let root = root(&run);
        assert_eq!(root.check(), Ok(()));
        assert_eq!((root.first_offset, root.next_offset), (20, 50));
        assert_eq!(root.total_size_bytes, 30);
    }

    #[test]
    fn metadata_that_does_not_fit_the_object_names_no_place() {
        let start = HEADER_BYTES as u64 + 100;
        assert_eq!(
            index_ends(start + 40, 100, 2),
            Some((start..start + 20, start + 20..start + 40))
        );
        for (object_bytes, data_bytes, chunks) in [
            (start, 100, 0),
            (start + 40, 100, 3),
            (start + 40, u64::MAX, 2),
            (start + 40, 100, u64::MAX / 20 + 3),
            (u64::MAX, u64::MAX - 8, 1),
        ] {
            assert_eq!(index_ends(object_bytes, data_bytes, chunks), None);
        }
    }

    #[test]
    fn nothing_makes_an_empty_manifest() {
        assert_eq!(root(&last_run(Vec::new())), Root::empty_at(0));
    }
}
