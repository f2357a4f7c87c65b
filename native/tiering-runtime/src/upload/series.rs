//! One random part for each series of attempts to store the same bytes: a PUT that was stored and not answered is the same object
//! when it is sent again.
//!
//! Owns which attempts have not succeeded yet. Forgets them with the stream: what a crash leaves stays in the bucket. Does not
//! own what is deleted (`driver/deletions`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tiering_core::upload::StoredObject;

/// Attempts that are remembered. A stream has a few transfers, one root and one group under way.
const ATTEMPTS_MAX: usize = 64;

/// What is stored, apart from the random part of its key: another series begins when any of it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// Kind and place.
    pub(super) place: Place,
    /// CRC-32 of all bytes.
    pub(super) crc32: u32,
    /// How many there are.
    pub(super) len_bytes: u64,
}

/// Where in the manifest the object is meant to be. A later one for the same place supersedes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A fragment by its first offset.
    Fragment(u64),
    /// A group by its height and first offset.
    Group(log_format::manifest::Kind, u64),
    /// The next root, by the epoch of its key.
    Root(u64),
}

impl Place {
    fn object(self, uid: u32) -> StoredObject {
        match self {
            Self::Fragment(first_offset) => StoredObject::Fragment { first_offset, uid },
            Self::Group(kind, first_offset) => StoredObject::Group {
                kind,
                first_offset,
                uid,
            },
            Self::Root(epoch) => StoredObject::Root { epoch, uid },
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Attempted {
    identity: Identity,
    uid: u32,
    is_running: bool,
}

/// The attempts of one stream.
#[derive(Debug, Default)]
pub(super) struct Series(Mutex<Vec<Attempted>>);

impl Series {
    /// Begins an attempt: with the random part of the one before, if that has ended without success. One that still runs keeps its
    /// own, because both may succeed, and then one of the two is garbage.
    pub(super) fn attempt(self: &Arc<Self>, identity: Identity, drawn: u32) -> Attempt {
        let mut attempts = self.lock();
        let before = attempts
            .iter_mut()
            .find(|attempted| attempted.identity == identity && !attempted.is_running);
        let uid = if let Some(before) = before {
            before.is_running = true;
            before.uid
        } else {
            if attempts.len() >= ATTEMPTS_MAX {
                attempts.remove(0);
            }
            attempts.push(Attempted {
                identity,
                uid: drawn,
                is_running: true,
            });
            drawn
        };
        Attempt {
            series: Arc::clone(self),
            identity,
            uid,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Attempted>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One attempt that runs; dropped, it has ended without success.
#[derive(Debug)]
pub(super) struct Attempt {
    series: Arc<Series>,
    identity: Identity,
    uid: u32,
}

impl Attempt {
    /// The random part of the key.
    pub(super) const fn uid(&self) -> u32 {
        self.uid
    }

    /// It is stored. The answer is what earlier attempts for this place may have left: nobody names it, and it will not be sent
    /// again.
    pub(super) fn stored(self) -> Vec<StoredObject> {
        let mut superseded = Vec::new();
        self.series.lock().retain(|attempted| {
            if attempted.identity == self.identity && attempted.uid == self.uid {
                return false;
            }
            let goes = attempted.identity.place == self.identity.place && !attempted.is_running;
            if goes {
                superseded.push(attempted.identity.place.object(attempted.uid));
            }
            !goes
        });
        superseded
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let mut attempts = self.series.lock();
        for attempted in attempts.iter_mut() {
            if attempted.identity == self.identity && attempted.uid == self.uid {
                attempted.is_running = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn identity(place: Place, crc32: u32) -> Identity {
        Identity {
            place,
            crc32,
            len_bytes: 10,
        }
    }

    #[test]
    fn the_same_bytes_keep_their_uid_until_they_are_stored() {
        let series = Arc::new(Series::default());
        let fragment = identity(Place::Fragment(7), 1);
        drop(series.attempt(fragment, 11));
        assert_eq!(series.attempt(fragment, 12).uid(), 11);
        assert_eq!(series.attempt(fragment, 13).stored(), []);
        let next = series.attempt(fragment, 14);
        assert_eq!(next.uid(), 14, "another series");
    }

    #[test]
    fn two_that_run_at_once_have_keys_of_their_own() {
        let series = Arc::new(Series::default());
        let fragment = identity(Place::Fragment(7), 1);
        let one = series.attempt(fragment, 11);
        let other = series.attempt(fragment, 12);
        assert_eq!((one.uid(), other.uid()), (11, 12));
        // The one that runs is not what the other supersedes: its answer says what it is.
        assert_eq!(other.stored(), []);
        drop(one);
        assert_eq!(series.attempt(fragment, 13).uid(), 11);
    }

    #[test]
    fn what_was_perhaps_stored_for_the_same_place_is_handed_over_once() {
        let series = Arc::new(Series::default());
        drop(series.attempt(identity(Place::Root(3), 1), 11));
        drop(series.attempt(identity(Place::Fragment(7), 1), 12));
        let root = series.attempt(identity(Place::Root(3), 2), 13);
        assert_eq!(root.stored(), [StoredObject::Root { epoch: 3, uid: 11 }]);
        assert_eq!(series.attempt(identity(Place::Root(3), 3), 14).stored(), []);
        assert_eq!(
            series.attempt(identity(Place::Fragment(7), 1), 15).uid(),
            12
        );
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let series = Arc::new(Series::default());
        for offset in 0..=ATTEMPTS_MAX as u64 {
            drop(series.attempt(identity(Place::Fragment(offset), 1), 1));
        }
        assert_eq!(series.lock().len(), ATTEMPTS_MAX);
        assert_eq!(series.attempt(identity(Place::Fragment(1), 1), 2).uid(), 1);
        assert_eq!(series.attempt(identity(Place::Fragment(0), 1), 2).uid(), 2);
    }
}
