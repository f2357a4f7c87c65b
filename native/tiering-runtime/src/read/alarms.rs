//! Places in streams that cannot be read, for a reason that does not pass by itself: damaged, gone, archived.
//!
//! Owns which there are now. An alarm is raised by the reader that came to the place, and is over when a reader comes past it, or
//! when the stream's manifest of now does not have it any more. Does not own what became of the reader.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tiering_core::read::FailureKind;

use crate::manifests::{ManifestState, Manifests};
use crate::stats::{Stat, Stats};

/// Places that are remembered. More than that say nothing new to who has to look anyway; the oldest are still there.
const PLACES_MAX: usize = 256;

type Places = BTreeMap<(Arc<str>, u64), FailureKind>;

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Alarms {
    places: Mutex<Places>,
    /// How many there are, for those who hand over chunks while there is none.
    count: AtomicUsize,
    stats: Arc<Stats>,
}

impl Alarms {
    pub(crate) fn new(stats: Arc<Stats>) -> Self {
        Self {
            places: Mutex::default(),
            count: AtomicUsize::new(0),
            stats,
        }
    }

    /// This offset of the stream cannot be read.
    pub(crate) fn raise(&self, stream_id: &Arc<str>, offset: u64, kind: FailureKind) {
        let mut places = self.lock();
        let place = (Arc::clone(stream_id), offset);
        if places.len() < PLACES_MAX || places.contains_key(&place) {
            places.insert(place, kind);
            self.count(&places);
        }
    }

    /// These offsets of the stream have been read.
    pub(crate) fn passed(&self, stream_id: &Arc<str>, offsets: std::ops::Range<u64>) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut places = self.lock();
        places.retain(|(stream, offset), _| stream != stream_id || !offsets.contains(offset));
        self.count(&places);
    }

    /// Forgets what is not in the manifests of now.
    pub(crate) fn settle(&self, manifests: &Manifests) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut places = self.lock();
        places.retain(|(stream, offset), _| match manifests.get(stream) {
            Some(ManifestState::Resolved(manifest)) => {
                (manifest.root.first_offset..manifest.root.next_offset).contains(offset)
            }
            Some(ManifestState::Pending) => true,
            None => false,
        });
        self.count(&places);
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, places: &Places) {
        self.count.store(places.len(), Ordering::Relaxed);
        let set = |stat: &Stat, kind: FailureKind| {
            stat.set(places.values().filter(|of| **of == kind).count() as u64);
        };
        set(&self.stats.places_corrupt, FailureKind::Corrupt);
        set(&self.stats.places_lost, FailureKind::Lost);
        set(&self.stats.places_archived, FailureKind::Archived);
    }
}

#[cfg(test)]
mod tests {
    use log_format::manifest::Root;

    use super::*;
    use crate::manifests::ResolvedManifest;

    fn counts(stats: &Stats) -> [i64; 3] {
        [
            stats.places_corrupt.get(),
            stats.places_lost.get(),
            stats.places_archived.get(),
        ]
    }

    #[test]
    fn an_alarm_lasts_until_somebody_comes_past_its_place() {
        let stats = Arc::new(Stats::default());
        let alarms = Alarms::new(Arc::clone(&stats));
        let (one, other): (Arc<str>, Arc<str>) = (Arc::from("one"), Arc::from("other"));
        alarms.raise(&one, 10, FailureKind::Archived);
        alarms.raise(&one, 10, FailureKind::Archived);
        alarms.raise(&one, 50, FailureKind::Lost);
        alarms.raise(&other, 10, FailureKind::Corrupt);
        assert_eq!(counts(&stats), [1, 1, 1]);
        alarms.passed(&one, 0..10);
        alarms.passed(&one, 11..50);
        assert_eq!(counts(&stats), [1, 1, 1]);
        alarms.passed(&one, 5..11);
        assert_eq!(counts(&stats), [1, 1, 0]);
    }

    #[test]
    fn an_alarm_is_over_when_the_manifest_does_not_have_its_place_any_more() {
        let stats = Arc::new(Stats::default());
        let (alarms, manifests) = (Alarms::new(Arc::clone(&stats)), Manifests::new());
        let stream: Arc<str> = Arc::from("one");
        let publish = |first_offset, next_offset, revision| {
            let root = Root {
                first_offset,
                next_offset,
                ..Root::empty_at(first_offset)
            };
            let manifest = ResolvedManifest {
                root: Arc::new(root),
                revision,
                epoch: 1,
                pointer: None,
            };
            manifests.publish("one", manifest);
        };
        manifests.mark_pending("one");
        alarms.raise(&stream, 10, FailureKind::Lost);
        alarms.settle(&manifests);
        assert_eq!(counts(&stats), [0, 1, 0], "not known is not gone");
        publish(0, 20, 1);
        alarms.settle(&manifests);
        assert_eq!(counts(&stats), [0, 1, 0]);
        publish(11, 20, 2);
        alarms.settle(&manifests);
        assert_eq!(counts(&stats), [0, 0, 0]);
    }

    #[test]
    fn there_are_not_more_than_so_many() {
        let stats = Arc::new(Stats::default());
        let alarms = Alarms::new(Arc::clone(&stats));
        let stream: Arc<str> = Arc::from("one");
        for offset in 0..2 * PLACES_MAX as u64 {
            alarms.raise(&stream, offset, FailureKind::Lost);
        }
        assert_eq!(counts(&stats), [0, PLACES_MAX as i64, 0]);
    }
}
