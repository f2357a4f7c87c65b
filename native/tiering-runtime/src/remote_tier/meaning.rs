//! What a failed request means to a machine: decided here, once, for uploads and for reads.
//!
//! Gone and corrupt are the two words by which history can be given up or a consumer can be ended, so they take proof: a code of
//! the store, a listing that agrees, bytes that were seen to be whole. Whatever else an answer is, it passes or it stalls, and its
//! text says what it was.

use tiering_core::upload::Failure;

use super::{StoreError, StoreErrorKind};

/// See the module's page.
pub(crate) fn failure(error: &StoreError) -> Failure {
    let text = error.to_string();
    match error.kind() {
        kind if kind.is_retryable() => Failure::Transient(text),
        StoreErrorKind::NotFound | StoreErrorKind::LocalGone => Failure::NotFound(text),
        // The object is shorter than the manifest says, or larger than it can be, in the store's own words.
        StoreErrorKind::InvalidRange | StoreErrorKind::TooLarge | StoreErrorKind::LocalCorrupt => {
            Failure::Corrupt(text)
        }
        StoreErrorKind::Archived => Failure::Archived(text),
        StoreErrorKind::Bare404
        | StoreErrorKind::Malformed
        | StoreErrorKind::Throttled
        | StoreErrorKind::Server
        | StoreErrorKind::Timeout
        | StoreErrorKind::Connection
        | StoreErrorKind::Precondition
        | StoreErrorKind::AccessDenied
        | StoreErrorKind::NoSuchBucket
        | StoreErrorKind::WrongRegion
        | StoreErrorKind::Checksum
        | StoreErrorKind::BodyRefused
        | StoreErrorKind::Tls
        | StoreErrorKind::LocalRead
        | StoreErrorKind::Unexpected(_) => Failure::Stalled(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_and_corrupt_take_proof_and_everything_else_passes_or_stalls() {
        let word = |kind| match failure(&StoreError::new(kind, "x")) {
            Failure::Transient(_) => "transient",
            Failure::Stalled(_) => "stalled",
            Failure::NotFound(_) => "gone",
            Failure::Corrupt(_) => "corrupt",
            Failure::Archived(_) => "archived",
        };
        for (kind, expected) in [
            (StoreErrorKind::NotFound, "gone"),
            (StoreErrorKind::LocalGone, "gone"),
            (StoreErrorKind::InvalidRange, "corrupt"),
            (StoreErrorKind::TooLarge, "corrupt"),
            (StoreErrorKind::LocalCorrupt, "corrupt"),
            (StoreErrorKind::Archived, "archived"),
            (StoreErrorKind::Bare404, "transient"),
            (StoreErrorKind::Malformed, "transient"),
            (StoreErrorKind::Connection, "transient"),
            (StoreErrorKind::BodyRefused, "stalled"),
            (StoreErrorKind::AccessDenied, "stalled"),
            (StoreErrorKind::Checksum, "stalled"),
            (StoreErrorKind::Unexpected(418), "stalled"),
        ] {
            assert_eq!(word(kind), expected, "{kind:?}");
        }
        assert_eq!(
            failure(&StoreError::new(StoreErrorKind::Bare404, "by whom?")),
            Failure::Transient("bare_404: by whom?".to_owned()),
            "the reason is named"
        );
    }
}
