//! Folds what the SDK reports into [`StoreError`].
//!
//! Owns the order of evidence: our own body error, TLS, the service's error code, the HTTP status. Does not own the kinds.

use std::error::Error;

use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use crate::remote_tier::{StoreError, StoreErrorKind};

/// Longest text taken from a service's answer.
const TEXT_BYTES_MAX: usize = 512;

/// Folds a failed SDK call.
pub(super) fn sdk_error<E>(error: &SdkError<E, HttpResponse>) -> StoreError
where
    E: ProvideErrorMetadata + Error + 'static,
{
    match error {
        SdkError::ConstructionFailure(_) => chain_error(error, StoreErrorKind::Unexpected(0)),
        SdkError::TimeoutError(_) => StoreError::new(StoreErrorKind::Timeout, chain_text(error)),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => {
            StoreError::new(StoreErrorKind::Timeout, chain_text(error))
        }
        SdkError::DispatchFailure(failure) if failure.is_user() => {
            chain_error(error, StoreErrorKind::Unexpected(0))
        }
        SdkError::DispatchFailure(_) => chain_error(error, StoreErrorKind::Connection),
        SdkError::ResponseError(response) => {
            // The status came, the body is nonsense or broke off. An error status is still worth more than the nonsense.
            let status = response.raw().status().as_u16();
            let kind = match StoreErrorKind::from_status(status) {
                StoreErrorKind::Unexpected(200..=299) => StoreErrorKind::Malformed,
                kind => kind,
            };
            chain_error(error, kind)
        }
        SdkError::ServiceError(service) => {
            let status = service.raw().status().as_u16();
            answer(status, service.err().code(), service.err().message())
        }
        _ => chain_error(error, StoreErrorKind::Unexpected(0)),
    }
}

/// Folds a body that broke off while it was read.
pub(super) fn body_error(error: &(dyn Error + 'static)) -> StoreError {
    chain_error(error, StoreErrorKind::Connection)
}

fn answer(status: u16, code: Option<&str>, message: Option<&str>) -> StoreError {
    let kind =
        code.and_then(StoreErrorKind::from_code).unwrap_or_else(
            || match StoreErrorKind::from_status(status) {
                // An error document in an answer that says "fine" (or something that is not S3 at all).
                StoreErrorKind::Unexpected(200..=299) => StoreErrorKind::Malformed,
                kind => kind,
            },
        );
    let mut text = format!("{status} {}", code.unwrap_or("without a code"));
    if let Some(message) = message.filter(|message| !message.is_empty()) {
        text.push_str(": ");
        text.push_str(message);
    }
    StoreError::new(kind, shorten(text))
}

/// Our own error if one is in the chain, TLS if that is, and `otherwise` if neither.
fn chain_error(error: &(dyn Error + 'static), otherwise: StoreErrorKind) -> StoreError {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(own) = error.downcast_ref::<StoreError>() {
            return own.clone();
        }
        if error.is::<rustls::Error>() {
            return StoreError::new(StoreErrorKind::Tls, shorten(error.to_string()));
        }
        // An I/O error's source() is that of the error inside it, which would be skipped.
        next = match error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref)
        {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    let text = chain_text(error);
    // The SDK has no kind for "no credentials found" or "they could not be loaded"; its text is stable enough to say so.
    let kind = if text.contains("credentials") {
        StoreErrorKind::AccessDenied
    } else {
        otherwise
    };
    StoreError::new(kind, text)
}

fn chain_text(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        let part = error.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        next = error.source();
    }
    shorten(text)
}

fn shorten(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX)
            .rev()
            .find(|&end| text.is_char_boundary(end))
            .unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_wins_over_the_status() {
        assert_eq!(
            answer(404, Some("NoSuchBucket"), None).kind(),
            StoreErrorKind::NoSuchBucket
        );
        assert_eq!(
            answer(503, Some("SlowDown"), Some("x")).kind(),
            StoreErrorKind::Throttled
        );
        assert_eq!(
            answer(400, Some("BadDigest"), None).kind(),
            StoreErrorKind::Checksum
        );
        assert_eq!(
            answer(403, Some("Whatever"), None).kind(),
            StoreErrorKind::AccessDenied
        );
        assert_eq!(answer(200, None, None).kind(), StoreErrorKind::Malformed);
        // The SDK makes the code of a HEAD's 404 up: a HEAD has no body that could hold one.
        for code in [None, Some("NotFound"), Some("Whatever")] {
            assert_eq!(answer(404, code, None).kind(), StoreErrorKind::Bare404);
        }
        assert_eq!(
            answer(403, Some("InvalidObjectState"), None).kind(),
            StoreErrorKind::Archived
        );
        assert_eq!(answer(413, None, None).kind(), StoreErrorKind::BodyRefused);
        assert_eq!(answer(416, None, None).kind(), StoreErrorKind::Malformed);
        assert_eq!(
            answer(416, Some("InvalidRange"), None).kind(),
            StoreErrorKind::InvalidRange
        );
        assert_eq!(
            answer(501, Some("NotImplemented"), None).kind(),
            StoreErrorKind::Unexpected(501)
        );
    }

    #[test]
    fn long_answers_are_cut_at_a_character() {
        let text = answer(500, Some("InternalError"), Some(&"ä".repeat(2000)))
            .text()
            .to_owned();
        assert!(text.len() < TEXT_BYTES_MAX + 8);
    }
}
