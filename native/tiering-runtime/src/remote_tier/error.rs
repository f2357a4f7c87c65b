//! What can go wrong at the remote tier, folded once.
//!
//! Owns the kinds and whether trying again is worth it. Does not own retry timing (the machines and the retrying wrapper do),
//! nor what a failure means to a machine (its driver folds it).

use std::fmt;

use thiserror::Error;

/// The kinds of failure that callers tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreErrorKind {
    /// The object is not there: the store said so by its code, or a listing of that very key agrees.
    NotFound,
    /// A 404 without the code of a store. Anybody between us and the store may have said it; it proves nothing.
    Bare404,
    /// The object is in an archive class: it is there, and cannot be read before somebody restores it.
    Archived,
    /// A condition of the request did not hold (409, 412).
    Precondition,
    /// The credentials are missing, wrong, or may not do this.
    AccessDenied,
    /// The bucket does not exist.
    NoSuchBucket,
    /// The bucket lives in another region, or the signature names the wrong one.
    WrongRegion,
    /// The store refused the bytes because they do not match the checksum sent along.
    Checksum,
    /// The range asked for lies outside the object.
    InvalidRange,
    /// The object is larger than the caller allows.
    TooLarge,
    /// The store, or somebody before it, does not take a body of this size (413).
    BodyRefused,
    /// The store asks to slow down (429, 503 SlowDown).
    Throttled,
    /// The store failed (5xx).
    Server,
    /// No answer in time.
    Timeout,
    /// The connection could not be made or broke.
    Connection,
    /// The TLS handshake failed: certificate, name or protocol.
    Tls,
    /// The answer is not what the protocol says.
    Malformed,
    /// The local bytes of a PUT could not be read.
    LocalRead,
    /// The local file with the bytes of a PUT is gone.
    LocalGone,
    /// The local bytes of a PUT are not what they must be.
    LocalCorrupt,
    /// The request could not be made, or was refused for a reason that has no kind of its own; the HTTP status, 0 if there was none.
    Unexpected(u16),
}

impl StoreErrorKind {
    /// Stable name for status, logs and counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Bare404 => "bare_404",
            Self::Archived => "archived",
            Self::Precondition => "precondition",
            Self::AccessDenied => "access_denied",
            Self::NoSuchBucket => "no_such_bucket",
            Self::WrongRegion => "wrong_region",
            Self::Checksum => "checksum",
            Self::InvalidRange => "invalid_range",
            Self::TooLarge => "too_large",
            Self::BodyRefused => "body_refused",
            Self::Throttled => "throttled",
            Self::Server => "server",
            Self::Timeout => "timeout",
            Self::Connection => "connection",
            Self::Tls => "tls",
            Self::Malformed => "malformed",
            Self::LocalRead => "local_read",
            Self::LocalGone => "local_gone",
            Self::LocalCorrupt => "local_corrupt",
            Self::Unexpected(_) => "unexpected",
        }
    }

    /// Whether the same request may well succeed soon.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        match self {
            Self::Throttled | Self::Server | Self::Timeout | Self::Connection => true,
            // Whoever said it was not the store.
            Self::Bare404 | Self::Malformed => true,
            // 501 is "never implemented", not "failed this time"; it arrives here and not as Server.
            Self::Unexpected(status) => status == 408,
            Self::NotFound
            | Self::Archived
            | Self::Precondition
            | Self::AccessDenied
            | Self::NoSuchBucket
            | Self::WrongRegion
            | Self::Checksum
            | Self::InvalidRange
            | Self::TooLarge
            | Self::BodyRefused
            | Self::Tls
            | Self::LocalRead
            | Self::LocalGone
            | Self::LocalCorrupt => false,
        }
    }

    /// The kind that a bare HTTP status stands for, when the body said nothing better. A status alone is no proof of anything
    /// about an object: that takes a code.
    #[must_use]
    pub const fn from_status(status: u16) -> Self {
        match status {
            301 | 307 => Self::WrongRegion,
            401 | 403 => Self::AccessDenied,
            404 => Self::Bare404,
            408 => Self::Timeout,
            409 | 412 => Self::Precondition,
            413 => Self::BodyRefused,
            416 => Self::Malformed,
            429 => Self::Throttled,
            501 => Self::Unexpected(501),
            500..=599 => Self::Server,
            other => Self::Unexpected(other),
        }
    }

    /// The kind that an S3 error code stands for, if it is one that callers tell apart.
    #[must_use]
    pub fn from_code(code: &str) -> Option<Self> {
        Some(match code {
            "NoSuchKey" => Self::NotFound,
            "NoSuchBucket" => Self::NoSuchBucket,
            "InvalidObjectState" => Self::Archived,
            "EntityTooLarge" => Self::BodyRefused,
            "AccessDenied"
            | "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "ExpiredToken"
            | "InvalidToken"
            | "RequestTimeTooSkewed"
            | "AllAccessDisabled"
            | "AccountProblem" => Self::AccessDenied,
            "PermanentRedirect"
            | "TemporaryRedirect"
            | "AuthorizationHeaderMalformed"
            | "IllegalLocationConstraintException" => Self::WrongRegion,
            "BadDigest"
            | "InvalidDigest"
            | "XAmzContentSHA256Mismatch"
            | "XAmzContentChecksumMismatch" => Self::Checksum,
            "InvalidRange" => Self::InvalidRange,
            "PreconditionFailed" | "ConditionalRequestConflict" | "OperationAborted" => {
                Self::Precondition
            }
            "SlowDown" | "Throttling" | "ThrottlingException" | "RequestLimitExceeded" => {
                Self::Throttled
            }
            "InternalError" | "ServiceUnavailable" => Self::Server,
            "RequestTimeout" => Self::Timeout,
            _ => return None,
        })
    }
}

impl fmt::Display for StoreErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unexpected(status) if *status != 0 => write!(f, "unexpected ({status})"),
            kind => f.write_str(kind.name()),
        }
    }
}

/// One failed request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind}: {text}")]
pub struct StoreError {
    kind: StoreErrorKind,
    text: String,
}

impl StoreError {
    /// A failure of this kind; `text` is for people and must not hold secrets.
    pub fn new(kind: StoreErrorKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// Which kind.
    #[must_use]
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the same request may well succeed soon.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        self.kind.is_retryable()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retryable_is_a_property_of_the_error() {
        for status in [404, 408, 416, 429, 500, 502, 503, 504, 507] {
            assert!(
                StoreErrorKind::from_status(status).is_retryable(),
                "{status}"
            );
        }
        for status in [301, 400, 403, 409, 411, 412, 413, 501] {
            assert!(
                !StoreErrorKind::from_status(status).is_retryable(),
                "{status}"
            );
        }
        assert!(StoreErrorKind::from_code("SlowDown").is_some_and(StoreErrorKind::is_retryable));
        assert!(StoreErrorKind::from_code("SomethingNew").is_none());
    }
}
