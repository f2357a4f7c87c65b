//! Finds the chunk to begin at: manifest, groups, fragment, index.
//!
//! Owns the search, also the one that a running reader makes when its snapshot ended or named what is gone.
//! Does not own reading from the place on.

use std::sync::Arc;

use bytes::Bytes;
use log_format::chunk::HEADER_BYTES;
use log_format::fragment::{self, INDEX_RECORD_BYTES};
use log_format::manifest::{Group, Root};

use super::assembly::DATA_START;
use super::context::{Context, Damaged, Lookup, LookupKind, failed};
use super::cursor::{FragmentCursor, Step};
use super::effect::{FailureKind, Finish, FragmentRef, GroupRef};
use super::event::{ManifestView, Start};
use super::streaming::{Skip, Streaming};
use super::{Next, Phase};
use crate::failure::Failure;

/// Longest index that is read: beyond it the search ends at the last record read, and the rest is skipped chunk by chunk.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// What is searched for, and how far the search is.
#[derive(Debug)]
pub(super) struct Placing {
    target: Start,
    /// The target is the boundary after a chunk that was delivered: nothing else will do.
    exact: bool,
    /// What an earlier search had found and not come to yet, in front of which nothing is to be delivered.
    skip: Option<Skip>,
    cursor: Option<FragmentCursor>,
    manifest_next_offset: u64,
    /// First offset of the object that was looked at last.
    looked_at: u64,
}

impl Placing {
    pub(super) const fn new(target: Start) -> Self {
        Self {
            target,
            exact: false,
            skip: None,
            cursor: None,
            manifest_next_offset: 0,
            looked_at: 0,
        }
    }

    /// Goes on after a chunk that was delivered.
    pub(super) fn resume(expected_offset: u64) -> Self {
        Self {
            exact: true,
            ..Self::new(Start::Offset(expected_offset))
        }
    }

    /// Goes on with a search that had not come to its place: a time is looked for from here on, as it may not be met again in
    /// front of it.
    pub(super) fn resume_skipping(expected_offset: u64, skip: Skip) -> Self {
        match skip.until {
            Start::Offset(_) => Self {
                exact: skip.exact,
                ..Self::new(skip.until)
            },
            Start::Timestamp(_) => Self {
                skip: Some(skip),
                ..Self::new(Start::Offset(expected_offset))
            },
        }
    }

    /// The offset that is to be delivered next, as far as it is known.
    pub(super) fn place(&self) -> u64 {
        match self.target {
            Start::Offset(offset) => offset,
            Start::Timestamp(_) => self.looked_at,
        }
    }

    /// Whether the manifest that it searches is known.
    pub(super) const fn has_manifest(&self) -> bool {
        self.cursor.is_some()
    }

    pub(super) fn advance(&mut self, context: &mut Context) -> Next {
        if context.has_lookup() {
            return Next::Stay;
        }
        let Some(mut cursor) = self.cursor.take() else {
            context.look_up(LookupKind::Manifest);
            return Next::Stay;
        };
        match cursor.step() {
            Step::NeedGroup(group) => {
                self.cursor = Some(cursor);
                context.look_up(LookupKind::Group(group));
                Next::Stay
            }
            Step::End => match self.target {
                Start::Timestamp(_) => Next::Finish(Finish::Local {
                    next_offset: self.manifest_next_offset,
                }),
                Start::Offset(offset) => corrupt(format!(
                    "no fragment holds offset {offset} of the manifest's range"
                )),
            },
            Step::Fragment(fragment) => self.enter_fragment(context, cursor, fragment),
        }
    }

    fn enter_fragment(
        &mut self,
        context: &mut Context,
        cursor: FragmentCursor,
        fragment: FragmentRef,
    ) -> Next {
        if let Err(text) = check_fragment(&fragment) {
            return corrupt(text);
        }
        let starts_there = match self.target {
            Start::Offset(offset)
                if (fragment.first_offset..fragment.next_offset).contains(&offset) =>
            {
                offset == fragment.first_offset
            }
            Start::Offset(offset) => {
                return corrupt(format!(
                    "fragment {} does not hold {offset}",
                    fragment.first_offset
                ));
            }
            Start::Timestamp(timestamp_ms) => timestamp_ms <= fragment.first_timestamp_ms,
        };
        if starts_there {
            let streaming = Streaming::new(
                context,
                cursor,
                fragment,
                DATA_START,
                fragment.first_offset,
                self.skip,
            );
            return Next::Enter(Phase::Streaming(Box::new(streaming)));
        }
        let start = DATA_START.saturating_add(fragment.data_bytes);
        let max_chunks = (fragment.next_offset - fragment.first_offset)
            .min(fragment.data_bytes / HEADER_BYTES as u64);
        let max_bytes = max_chunks
            .saturating_mul(INDEX_RECORD_BYTES as u64)
            .min(MAX_INDEX_BYTES);
        self.cursor = Some(cursor);
        context.look_up(LookupKind::Index {
            fragment,
            start,
            end_max: start.saturating_add(max_bytes),
        });
        Next::Stay
    }

    pub(super) fn manifest(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        view: ManifestView,
    ) -> Next {
        let root = match view {
            ManifestView::Resolved(root) => root,
            ManifestView::Unknown => {
                let since_ms = *context.manifest_unknown_since_ms.get_or_insert(now_ms);
                if now_ms.saturating_sub(since_ms) >= context.settings.manifest_deadline_ms {
                    return Next::Finish(failed(
                        FailureKind::Unavailable,
                        "the manifest of the stream is not known on this node",
                    ));
                }
                context.postpone_lookup(now_ms, lookup, "the manifest is not known".to_owned());
                return Next::Stay;
            }
        };
        context.manifest_unknown_since_ms = None;
        self.manifest_next_offset = root.next_offset;
        if let Some(finish) = self.fit_target(context, &root) {
            return Next::Finish(finish);
        }
        self.cursor = Some(FragmentCursor::new(root, self.target));
        Next::Stay
    }

    /// Moves the target into the manifest's range, or says that the local log is the place.
    fn fit_target(&mut self, context: &mut Context, root: &Arc<Root>) -> Option<Finish> {
        let next_offset = match self.target {
            Start::Offset(offset) => offset,
            Start::Timestamp(_) if root.is_empty() => root.next_offset,
            Start::Timestamp(_) => return None,
        };
        if root.is_empty() || next_offset >= root.next_offset {
            return Some(Finish::Local { next_offset });
        }
        if next_offset < root.first_offset {
            if self.exact {
                context.counters.repositions += 1;
            }
            self.target = Start::Offset(root.first_offset);
        }
        None
    }

    pub(super) fn fetched(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        outcome: Result<Bytes, Failure>,
    ) -> Next {
        let object = match lookup.kind {
            LookupKind::Manifest => return Next::Stay,
            LookupKind::Group(group) => (group.first_offset, group.uid),
            LookupKind::Index { fragment, .. } => (fragment.first_offset, fragment.uid),
        };
        self.looked_at = object.0;
        match outcome {
            Ok(bytes) => {
                context.progress(now_ms);
                match lookup.kind {
                    LookupKind::Manifest => Next::Stay,
                    LookupKind::Group(group) => self.group(context, now_ms, lookup, group, &bytes),
                    LookupKind::Index { fragment, .. } => {
                        self.index(context, now_ms, lookup, fragment, &bytes)
                    }
                }
            }
            Err(Failure::NotFound(_)) => {
                // Another look at the manifest, from the root: it names something else by now, or the object is lost.
                self.cursor = None;
                match context.object_missing(now_ms, object) {
                    Ok(until_ms) => {
                        context.look_up_manifest_at(now_ms, until_ms);
                        Next::Stay
                    }
                    Err(finish) => Next::Finish(finish),
                }
            }
            Err(Failure::Corrupt(text)) => match lookup.kind {
                LookupKind::Index { fragment, .. } => {
                    self.unusable_index(context, now_ms, lookup, fragment, text)
                }
                _ => damaged(context, now_ms, lookup, text),
            },
            Err(failure @ (Failure::Transient(_) | Failure::Stalled(_) | Failure::Archived(_))) => {
                context.postpone_object(now_ms, lookup, &failure, self.place());
                Next::Stay
            }
        }
    }

    fn group(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        group: GroupRef,
        bytes: &[u8],
    ) -> Next {
        context.object_found((group.first_offset, group.uid));
        match self
            .cursor
            .as_mut()
            .map(|cursor| provide_group(cursor, group, bytes))
        {
            Some(Ok(())) => Next::Stay,
            Some(Err(text)) => damaged(context, now_ms, lookup, text),
            None => Next::Finish(failed(
                FailureKind::Bug,
                "a group came and nothing waited for it",
            )),
        }
    }

    fn index(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        fragment: FragmentRef,
        bytes: &[u8],
    ) -> Next {
        match search_index(&fragment, bytes, self.target) {
            Ok((offset, position)) => self.stream_from(context, fragment, position, offset),
            Err(text) => self.unusable_index(context, now_ms, lookup, fragment, text),
        }
    }

    /// Asked for again once; then the fragment is read from its start, which costs more and is as right.
    fn unusable_index(
        &mut self,
        context: &mut Context,
        now_ms: u64,
        lookup: Lookup,
        fragment: FragmentRef,
        text: String,
    ) -> Next {
        match context.damaged_lookup(now_ms, lookup, text) {
            Damaged::Again => Next::Stay,
            Damaged::Twice => {
                context.counters.indexes_unusable += 1;
                self.stream_from(context, fragment, DATA_START, fragment.first_offset)
            }
        }
    }

    fn stream_from(
        &mut self,
        context: &mut Context,
        fragment: FragmentRef,
        position: u64,
        offset: u64,
    ) -> Next {
        let Some(cursor) = self.cursor.take() else {
            return Next::Finish(failed(
                FailureKind::Bug,
                "an index came and nothing waited for it",
            ));
        };
        let skip = self.skip.unwrap_or(Skip {
            until: self.target,
            exact: self.exact,
        });
        Next::Enter(Phase::Streaming(Box::new(Streaming::new(
            context,
            cursor,
            fragment,
            position,
            offset,
            Some(skip),
        ))))
    }
}

/// Whether the manifest can be right about this fragment.
pub(super) fn check_fragment(fragment: &FragmentRef) -> Result<(), String> {
    if fragment.next_offset <= fragment.first_offset || fragment.data_bytes < HEADER_BYTES as u64 {
        return Err(format!(
            "the manifest gives fragment {} the end {} and {} bytes",
            fragment.first_offset, fragment.next_offset, fragment.data_bytes
        ));
    }
    Ok(())
}

pub(super) fn provide_group(
    cursor: &mut FragmentCursor,
    group: GroupRef,
    bytes: &[u8],
) -> Result<(), String> {
    let decoded = Group::decode(group.kind, bytes)
        .map_err(|error| format!("group {}: {error}", group.first_offset))?;
    cursor
        .provide(decoded)
        .map_err(|text| format!("group {}: {text}", group.first_offset))
}

pub(super) fn damaged(context: &mut Context, now_ms: u64, lookup: Lookup, text: String) -> Next {
    match context.damaged_lookup(now_ms, lookup, text.clone()) {
        Damaged::Again => Next::Stay,
        Damaged::Twice => corrupt(text),
    }
}

fn corrupt(text: String) -> Next {
    Next::Finish(failed(FailureKind::Corrupt, text))
}

/// Chunk id and position in the object of the chunk to begin at.
fn search_index(fragment: &FragmentRef, bytes: &[u8], target: Start) -> Result<(u64, u64), String> {
    let wrong = |text: &str| format!("index of fragment {}: {text}", fragment.first_offset);
    let index = fragment::decode_index(bytes).map_err(|error| wrong(&error.to_string()))?;
    let (Some(first), Some(last)) = (index.records.first(), index.records.last()) else {
        return Err(wrong("empty"));
    };
    if first.offset != fragment.first_offset || first.position != 0 {
        return Err(wrong("does not start with the fragment"));
    }
    if last.offset >= fragment.next_offset
        || u64::from(last.position) + HEADER_BYTES as u64 > fragment.data_bytes
    {
        return Err(wrong("reaches past the fragment"));
    }
    let found = match target {
        Start::Offset(offset) => fragment::search_by_offset(&index.records, offset),
        // Clocks step back: if no chunk is new enough after all, the last one leads to the next fragment.
        Start::Timestamp(timestamp_ms) => {
            fragment::search_by_timestamp(&index.records, timestamp_ms)
                .or(Some(index.records.len() - 1))
        }
    };
    let record = found
        .and_then(|number| index.records.get(number))
        .unwrap_or(first);
    Ok((record.offset, DATA_START + u64::from(record.position)))
}
