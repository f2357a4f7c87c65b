//! Where a reader starts, and where it continues: in the local log or in the remote tier.
//!
//! Owns: the decision, given what this node knows of both tiers. An unknown answer is an answer of its own here; it never looks
//! like a right one. Does not own: how a manifest becomes known, and how a gap between the tiers is proven.

use log_format::manifest::Root;

use crate::manifest::search;
/// What this node knows of a stream's manifest.
#[derive(Debug, Clone, Copy)]
pub enum Manifest<'a> {
    /// This one. A newer one may exist: it begins no earlier, and may reach further.
    Known(&'a Root),
    /// Nothing yet, or there is no engine.
    Unknown,
}

/// The local log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalLog {
    /// Id of its first chunk, `None` if it is empty.
    pub first: Option<u64>,
    /// Offset after its last committed record.
    pub next: u64,
}

/// Whether the records between the end of the known manifest and the first local record are in neither tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// A quorum's pointer has shown it.
    Certain,
    /// The known manifest may be an old one.
    Unproven,
}

/// Where a consumer asks to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spec {
    /// At the oldest record of both tiers.
    First,
    /// At the last chunk.
    Last,
    /// At the next record to be written.
    Next,
    /// At this offset, or the nearest one that there is.
    Offset(u64),
    /// At this offset, or not at all.
    Abs(u64),
    /// At the first chunk written at or after this time.
    Timestamp(i64),
}

/// Where to start in the local log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalSpec {
    /// At its first record.
    First,
    /// At its last chunk.
    Last,
    /// At its end.
    Next,
    /// At this offset.
    Offset(u64),
    /// At this time.
    Timestamp(i64),
}

/// The decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// Start in the local log.
    Local(LocalSpec),
    /// Start in the remote tier.
    Remote {
        /// At this offset; for a timestamp only the first offset of the fragment or group that has it.
        start_offset: u64,
    },
    /// An absolute offset that is in no tier.
    OutOfRange {
        /// First and last offset of both tiers, `None` if both are empty.
        range: Option<(u64, u64)>,
    },
    /// The answer depends on a manifest that is not known.
    Unknown,
    /// A newer manifest could lead elsewhere. Prove the gap, then ask again.
    UnprovenGap,
}

/// Where a reader continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continuation {
    /// In the local log: it has the offset, or it begins with the next record that there is.
    Local,
    /// In the remote tier.
    Remote {
        /// At this offset, the first at or after the reader's that the remote tier has.
        start_offset: u64,
    },
    /// The answer depends on a manifest that is not known.
    Unknown,
    /// A newer manifest could have the offset. Prove the gap, then ask again.
    UnprovenGap,
}

/// Decides where a reader starts. What both tiers have is read locally.
#[must_use]
pub fn route(manifest: Manifest<'_>, spec: Spec, local: LocalLog, gap: Gap) -> Route {
    let Manifest::Known(manifest) = manifest else {
        return without_manifest(spec, local);
    };
    let route = by_manifest(manifest, spec, local);
    let is_remote = matches!(route, Route::Remote { .. });
    if is_remote || gap == Gap::Certain || !newer_could_differ(manifest, spec, local.first) {
        route
    } else {
        Route::UnprovenGap
    }
}

/// Decides where a reader continues whose next offset is `next`. `local_first` is the id of the first chunk that the local log can
/// give, `None` if it cannot give any.
#[must_use]
pub fn continue_at(
    manifest: Manifest<'_>,
    next: u64,
    local_first: Option<u64>,
    gap: Gap,
) -> Continuation {
    if local_first.is_some_and(|first| first <= next) {
        return Continuation::Local;
    }
    let Manifest::Known(manifest) = manifest else {
        return Continuation::Unknown;
    };
    let start_offset = manifest.first_offset.max(next);
    let remote_has_it = start_offset < manifest.next_offset;
    match local_first {
        Some(first) if remote_has_it && start_offset < first => {
            Continuation::Remote { start_offset }
        }
        // No manifest begins before an older one: what is before the local log is in none of them.
        Some(first) if manifest.first_offset >= first || gap == Gap::Certain => Continuation::Local,
        Some(_) => Continuation::UnprovenGap,
        None if remote_has_it && start_offset == next => Continuation::Remote { start_offset },
        None => Continuation::Unknown,
    }
}

/// What the local log answers, whatever the manifest says.
fn without_manifest(spec: Spec, local: LocalLog) -> Route {
    let reaches = |offset| local.first.is_some_and(|first| offset >= first);
    let is_whole = local.first == Some(0);
    match spec {
        Spec::Last => Route::Local(LocalSpec::Last),
        Spec::Next => Route::Local(LocalSpec::Next),
        Spec::Offset(offset) if reaches(offset) => Route::Local(LocalSpec::Offset(offset)),
        Spec::Abs(offset) if reaches(offset) && offset < local.next => {
            Route::Local(LocalSpec::Offset(offset))
        }
        Spec::First if is_whole => Route::Local(LocalSpec::First),
        Spec::Timestamp(timestamp_ms) if is_whole => {
            Route::Local(LocalSpec::Timestamp(timestamp_ms))
        }
        Spec::First | Spec::Offset(_) | Spec::Abs(_) | Spec::Timestamp(_) => Route::Unknown,
    }
}

/// Whether a manifest that reaches further than this one could lead to another place.
fn newer_could_differ(manifest: &Root, spec: Spec, local_first: Option<u64>) -> bool {
    local_first.is_some_and(|first| {
        let leads_below = match spec {
            Spec::Last | Spec::Next => false,
            Spec::Offset(offset) | Spec::Abs(offset) => offset < first,
            Spec::First | Spec::Timestamp(_) => true,
        };
        leads_below && manifest.next_offset < first
    })
}

fn by_manifest(manifest: &Root, spec: Spec, local: LocalLog) -> Route {
    let LocalLog {
        first: local_first,
        next: local_next,
    } = local;
    match spec {
        Spec::Last => Route::Local(LocalSpec::Last),
        Spec::Next => Route::Local(LocalSpec::Next),
        Spec::First if remote_reaches_further_back(manifest, local_first) => Route::Remote {
            start_offset: manifest.first_offset,
        },
        Spec::First => Route::Local(LocalSpec::First),
        Spec::Offset(offset) => by_offset(manifest, offset, local_first),
        Spec::Abs(offset) => {
            let range = both_tiers(manifest, local_first, local_next);
            match range {
                Some((first, last)) if (first..=last).contains(&offset) => {
                    by_offset(manifest, offset, local_first)
                }
                Some(_) | None => Route::OutOfRange { range },
            }
        }
        Spec::Timestamp(timestamp_ms) => by_timestamp(manifest, timestamp_ms, local_first),
    }
}

fn remote_reaches_further_back(manifest: &Root, local_first: Option<u64>) -> bool {
    !manifest.is_empty()
        && local_first.is_none_or(|local_first| manifest.first_offset < local_first)
}

fn by_offset(manifest: &Root, offset: u64, local_first: Option<u64>) -> Route {
    if local_first.is_some_and(|local_first| offset >= local_first) {
        return Route::Local(LocalSpec::Offset(offset));
    }
    if !remote_reaches_further_back(manifest, local_first) || offset >= manifest.next_offset {
        // Between the tiers, or with nothing in either: the oldest local record. Not the end, even of an empty log: it is
        // looked up later, and what has been written by then would be passed over.
        return Route::Local(LocalSpec::First);
    }
    Route::Remote {
        start_offset: offset.max(manifest.first_offset),
    }
}

fn by_timestamp(manifest: &Root, timestamp_ms: i64, local_first: Option<u64>) -> Route {
    let local = Route::Local(LocalSpec::Timestamp(timestamp_ms));
    if !remote_reaches_further_back(manifest, local_first) {
        return local;
    }
    match search::by_timestamp(manifest, timestamp_ms) {
        Some(found) => {
            let start_offset = found.entry.first_offset.max(manifest.first_offset);
            // The whole entry is local, too: the local log finds the chunk without a request.
            if local_first.is_some_and(|local_first| start_offset >= local_first) {
                local
            } else {
                Route::Remote { start_offset }
            }
        }
        None => local,
    }
}

fn both_tiers(manifest: &Root, local_first: Option<u64>, local_next: u64) -> Option<(u64, u64)> {
    let remote = (!manifest.is_empty()).then_some((manifest.first_offset, manifest.next_offset));
    let local = local_first
        .filter(|first| *first < local_next)
        .map(|first| (first, local_next));
    let (first, next) = match (remote, local) {
        (Some(remote), Some(local)) => (remote.0.min(local.0), remote.1.max(local.1)),
        (Some(range), None) | (None, Some(range)) => range,
        (None, None) => return None,
    };
    Some((first, next.saturating_sub(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::edit::tests::root_of;
    use proptest::prelude::*;

    fn remote(start_offset: u64) -> Route {
        Route::Remote { start_offset }
    }

    /// The decision by this manifest, where the gap is certain.
    fn known(manifest: &Root, spec: Spec, first: Option<u64>, next: u64) -> Route {
        route(
            Manifest::Known(manifest),
            spec,
            LocalLog { first, next },
            Gap::Certain,
        )
    }

    /// Remote [100, 200) in fragments of 10, timestamps as offsets; local [150, 300).
    fn both(spec: Spec) -> Route {
        known(&root_of(100, &[10; 10]), spec, Some(150), 300)
    }

    #[test]
    fn both_tiers_overlap() {
        assert_eq!(both(Spec::First), remote(100));
        assert_eq!(both(Spec::Last), Route::Local(LocalSpec::Last));
        assert_eq!(both(Spec::Next), Route::Local(LocalSpec::Next));
        assert_eq!(both(Spec::Offset(0)), remote(100));
        assert_eq!(both(Spec::Offset(149)), remote(149));
        assert_eq!(
            both(Spec::Offset(150)),
            Route::Local(LocalSpec::Offset(150))
        );
        assert_eq!(
            both(Spec::Offset(900)),
            Route::Local(LocalSpec::Offset(900))
        );
        assert_eq!(
            both(Spec::Abs(99)),
            Route::OutOfRange {
                range: Some((100, 299))
            }
        );
        assert_eq!(both(Spec::Abs(100)), remote(100));
        assert_eq!(both(Spec::Abs(299)), Route::Local(LocalSpec::Offset(299)));
        assert_eq!(
            both(Spec::Abs(300)),
            Route::OutOfRange {
                range: Some((100, 299))
            }
        );
        assert_eq!(both(Spec::Timestamp(0)), remote(100));
        assert_eq!(both(Spec::Timestamp(145)), remote(140));
        assert_eq!(
            both(Spec::Timestamp(155)),
            Route::Local(LocalSpec::Timestamp(155))
        );
        assert_eq!(
            both(Spec::Timestamp(200)),
            Route::Local(LocalSpec::Timestamp(200))
        );
    }

    #[test]
    fn bug_87_first_does_not_skip_the_remote_tier_when_the_local_log_is_short_or_empty() {
        let manifest = root_of(0, &[10; 10]);
        assert_eq!(known(&manifest, Spec::First, Some(100), 120), remote(0));
        assert_eq!(known(&manifest, Spec::First, None, 0), remote(0));
    }

    #[test]
    fn nothing_is_remote() {
        let empty = Root::empty_at(50);
        let local = |spec| known(&empty, spec, Some(60), 90);
        assert_eq!(local(Spec::First), Route::Local(LocalSpec::First));
        assert_eq!(local(Spec::Offset(0)), Route::Local(LocalSpec::First));
        assert_eq!(
            local(Spec::Timestamp(0)),
            Route::Local(LocalSpec::Timestamp(0))
        );
        assert_eq!(
            local(Spec::Abs(59)),
            Route::OutOfRange {
                range: Some((60, 89))
            }
        );
        let nothing = |spec| known(&empty, spec, None, 0);
        assert_eq!(nothing(Spec::Offset(0)), Route::Local(LocalSpec::First));
        assert_eq!(nothing(Spec::Abs(0)), Route::OutOfRange { range: None });
    }

    #[test]
    fn nothing_is_local() {
        let manifest = root_of(100, &[10; 10]);
        let only_remote = |spec| known(&manifest, spec, None, 0);
        assert_eq!(only_remote(Spec::Offset(150)), remote(150));
        assert_eq!(
            only_remote(Spec::Offset(200)),
            Route::Local(LocalSpec::First)
        );
        assert_eq!(only_remote(Spec::Abs(199)), remote(199));
        assert_eq!(
            only_remote(Spec::Abs(200)),
            Route::OutOfRange {
                range: Some((100, 199))
            }
        );
    }

    #[test]
    fn between_the_tiers_the_oldest_local_record_comes_next() {
        let manifest = root_of(0, &[10; 10]);
        assert_eq!(
            known(&manifest, Spec::Offset(120), Some(150), 200),
            Route::Local(LocalSpec::First)
        );
    }

    proptest! {
        /// The end is looked up after the decision: who did not ask for it would miss what is written in between.
        #[test]
        fn only_who_asks_for_the_end_is_sent_there(
            start in 0u64..100, lengths in prop::collection::vec(1u64..20, 0..8), local_first: Option<u8>, local_length in 0u64..100, at in 0i64..400
        ) {
            let manifest = root_of(start, &lengths);
            let local_first = local_first.map(u64::from);
            let local_next = local_first.map_or(0, |first| first + local_length);
            for spec in [Spec::First, Spec::Offset(at.unsigned_abs()), Spec::Abs(at.unsigned_abs()), Spec::Timestamp(at)] {
                let got = known(&manifest, spec, local_first, local_next);
                prop_assert!(!matches!(got, Route::Local(LocalSpec::Next | LocalSpec::Last)), "{spec:?}: {got:?}");
            }
        }

        #[test]
        fn a_route_leads_to_the_nearest_record_at_or_after_the_offset(
            start in 0u64..100, lengths in prop::collection::vec(1u64..20, 0..8), local_first: Option<u8>, local_length in 1u64..100, offset in 0u64..400
        ) {
            let manifest = root_of(start, &lengths);
            let local_first = local_first.map(u64::from);
            let local_next = local_first.map_or(0, |first| first + local_length);
            // The local log goes on where uploading has not been yet.
            prop_assume!(local_first.is_none() || local_next >= manifest.next_offset);
            let exists = |at: u64| {
                (manifest.first_offset..manifest.next_offset).contains(&at) || local_first.is_some_and(|first| (first..local_next).contains(&at))
            };
            let nearest = (offset..500).find(|at| exists(*at));
            let got = match known(&manifest, Spec::Offset(offset), local_first, local_next) {
                Route::Remote { start_offset } => {
                    prop_assert!((manifest.first_offset..manifest.next_offset).contains(&start_offset));
                    Some(start_offset)
                }
                Route::Local(LocalSpec::Offset(at)) => (at < local_next).then_some(at),
                Route::Local(LocalSpec::First) => local_first,
                _ => None,
            };
            prop_assert_eq!(got, nearest);
        }
    }

    /// Every record that either tier has, for a manifest [first, next) and a local log [local, ..).
    #[derive(Debug, Clone, Copy)]
    struct Case {
        known: (u64, u64),
        newest: (u64, u64),
        local_first: u64,
    }

    prop_compose! {
        /// The newest manifest begins no earlier than the known one and reaches as far or further.
        fn cases()(first in 0u64..30, length in 0u64..30, dropped in 0u64..40, more in 0u64..40, local_first in 0u64..120) -> Case {
            let known = (first, first + length);
            let next = known.1 + more;
            Case { known, newest: ((first + dropped).min(next), next), local_first }
        }
    }

    fn root(range: (u64, u64)) -> Root {
        if range.0 == range.1 {
            Root::empty_at(range.0)
        } else {
            root_of(range.0, &[range.1 - range.0])
        }
    }

    proptest! {
        /// The one that matters: a reader never passes over a record that the newest manifest has, whatever this node knows.
        #[test]
        fn a_reader_continues_past_no_record_that_any_manifest_has(case in cases(), next in 0u64..120) {
            let Case { known, newest, local_first } = case;
            let root = root(known);
            let got = continue_at(Manifest::Known(&root), next, Some(local_first), Gap::Unproven);
            let newest_has = |at: u64| (newest.0..newest.1).contains(&at);
            match got {
                Continuation::Local => prop_assert!(!(next..local_first).any(newest_has), "{case:?} at {next}"),
                Continuation::Remote { start_offset } => {
                    prop_assert!((known.0..known.1).contains(&start_offset));
                    prop_assert!(!(next..start_offset).any(newest_has), "{case:?} at {next}: {start_offset}");
                }
                Continuation::UnprovenGap => prop_assert!(next < local_first && known.1 <= local_first.max(next)),
                Continuation::Unknown => prop_assert!(false, "the manifest is known"),
            }
        }

        /// By the newest manifest the gap is certain, and the reader continues at once.
        #[test]
        fn a_certain_gap_is_never_waited_for(case in cases(), next in 0u64..120) {
            let root = root(case.newest);
            let got = continue_at(Manifest::Known(&root), next, Some(case.local_first), Gap::Certain);
            prop_assert!(matches!(got, Continuation::Local | Continuation::Remote { .. }), "{got:?}");
        }

        /// What is decided without a manifest, or with an old one, is what the newest one says.
        #[test]
        fn an_old_manifest_or_none_never_leads_elsewhere(case in cases(), length in 0u64..60, at in 0i64..150) {
            let Case { known, newest, local_first } = case;
            let local = LocalLog { first: Some(local_first), next: (local_first + length).max(newest.1) };
            let (old, new) = (root(known), root(newest));
            for spec in [Spec::First, Spec::Last, Spec::Next, Spec::Offset(at.unsigned_abs()), Spec::Abs(at.unsigned_abs())] {
                let right = route(Manifest::Known(&new), spec, local, Gap::Certain);
                for remote in [Manifest::Unknown, Manifest::Known(&old)] {
                    match route(remote, spec, local, Gap::Unproven) {
                        Route::Unknown | Route::UnprovenGap => {}
                        // Retention may have removed it since: reading there finds that out, and starts at what is left.
                        Route::Remote { start_offset } => prop_assert!(start_offset < known.1),
                        // Which range is named may be of before; that the offset is in no tier is not.
                        Route::OutOfRange { .. } => prop_assert!(
                            matches!(right, Route::OutOfRange { .. }),
                            "{spec:?} {case:?}: {right:?}"
                        ),
                        decided @ Route::Local(_) => prop_assert!(right == decided || matches!(right, Route::OutOfRange { .. }), "{spec:?} {case:?}: {decided:?}, {right:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn without_a_manifest_only_what_the_local_log_has_is_decided() {
        let local = LocalLog {
            first: Some(50),
            next: 90,
        };
        let unknown = |spec| route(Manifest::Unknown, spec, local, Gap::Unproven);
        assert_eq!(unknown(Spec::Last), Route::Local(LocalSpec::Last));
        assert_eq!(unknown(Spec::Next), Route::Local(LocalSpec::Next));
        assert_eq!(
            unknown(Spec::Offset(50)),
            Route::Local(LocalSpec::Offset(50))
        );
        assert_eq!(
            unknown(Spec::Offset(95)),
            Route::Local(LocalSpec::Offset(95))
        );
        assert_eq!(unknown(Spec::Abs(89)), Route::Local(LocalSpec::Offset(89)));
        for spec in [
            Spec::First,
            Spec::Offset(49),
            Spec::Abs(49),
            Spec::Abs(90),
            Spec::Timestamp(0),
        ] {
            assert_eq!(unknown(spec), Route::Unknown, "{spec:?}");
        }
        let whole = LocalLog {
            first: Some(0),
            next: 90,
        };
        let route_whole = |spec| route(Manifest::Unknown, spec, whole, Gap::Unproven);
        assert_eq!(route_whole(Spec::First), Route::Local(LocalSpec::First));
        assert_eq!(
            route_whole(Spec::Timestamp(7)),
            Route::Local(LocalSpec::Timestamp(7))
        );
    }

    #[test]
    fn a_gap_is_proven_before_a_reader_passes_over_it() {
        // Remote [100, 200), local from 300 on: a newer manifest may have 200 to 299.
        let manifest = root_of(100, &[10; 10]);
        let local = LocalLog {
            first: Some(300),
            next: 400,
        };
        let ask = |spec, gap| route(Manifest::Known(&manifest), spec, local, gap);
        assert_eq!(ask(Spec::Offset(250), Gap::Unproven), Route::UnprovenGap);
        assert_eq!(
            ask(Spec::Offset(250), Gap::Certain),
            Route::Local(LocalSpec::First)
        );
        assert_eq!(ask(Spec::Offset(150), Gap::Unproven), remote(150));
        assert_eq!(
            ask(Spec::Offset(300), Gap::Unproven),
            Route::Local(LocalSpec::Offset(300))
        );
        assert_eq!(
            ask(Spec::Last, Gap::Unproven),
            Route::Local(LocalSpec::Last)
        );
    }

    #[test]
    fn a_local_log_that_cannot_give_the_offset_leaves_only_a_remote_tier_that_has_exactly_it() {
        let manifest = root_of(100, &[10; 10]);
        let ask = |next| continue_at(Manifest::Known(&manifest), next, None, Gap::Certain);
        assert_eq!(ask(150), Continuation::Remote { start_offset: 150 });
        assert_eq!(ask(99), Continuation::Unknown);
        assert_eq!(ask(200), Continuation::Unknown);
    }
}
