//! Where a reader starts: in the local log or in the remote tier.
//!
//! Owns: the decision, given both ranges. Does not own: whether the remote range is known yet; while it is not, nobody asks
//! here (an unknown answer must not look like a right one).

use log_format::manifest::Root;

use crate::manifest::search;
use crate::mutants::mutant;

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
}

/// Decides. `local_first` is the first local chunk id, `None` if the log is empty; `local_next` the offset after the last
/// committed record. What both tiers have is read locally.
#[must_use]
pub fn route(manifest: &Root, spec: Spec, local_first: Option<u64>, local_next: u64) -> Route {
    match spec {
        Spec::Last => Route::Local(LocalSpec::Last),
        Spec::Next => Route::Local(LocalSpec::Next),
        Spec::First
            if remote_reaches_further_back(manifest, local_first)
                && !mutant!(RouteFirstIsLocal) =>
        {
            Route::Remote {
                start_offset: manifest.first_offset,
            }
        }
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
    if local_first.is_some_and(|local_first| offset >= local_first || mutant!(RouteLocalBelowFloor))
    {
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

    /// Remote [100, 200) in fragments of 10, timestamps as offsets; local [150, 300).
    fn both(spec: Spec) -> Route {
        route(&root_of(100, &[10; 10]), spec, Some(150), 300)
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
        assert_eq!(route(&manifest, Spec::First, Some(100), 120), remote(0));
        assert_eq!(route(&manifest, Spec::First, None, 0), remote(0));
    }

    #[test]
    fn nothing_is_remote() {
        let empty = Root::empty_at(50);
        let local = |spec| route(&empty, spec, Some(60), 90);
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
        let nothing = |spec| route(&empty, spec, None, 0);
        assert_eq!(nothing(Spec::Offset(0)), Route::Local(LocalSpec::First));
        assert_eq!(nothing(Spec::Abs(0)), Route::OutOfRange { range: None });
    }

    #[test]
    fn nothing_is_local() {
        let manifest = root_of(100, &[10; 10]);
        let only_remote = |spec| route(&manifest, spec, None, 0);
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
            route(&manifest, Spec::Offset(120), Some(150), 200),
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
                let got = route(&manifest, spec, local_first, local_next);
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
            let got = match route(&manifest, Spec::Offset(offset), local_first, local_next) {
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
}
