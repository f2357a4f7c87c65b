//! The server's clock, which a rule may set.
//!
//! Owns the forms that time has in a request and in an answer. Does not own which rule applies.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue};
use s3s::dto::{Timestamp, TimestampFormat};

/// As S3 has it.
const MOST_SKEW_MS: u64 = 15 * 60 * 1_000;

/// The real time, in milliseconds since the epoch.
pub(crate) fn real_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(0))
}

/// A time as the header `Date` has it; nothing for one that it cannot have.
pub(crate) fn http_date(ms: i64) -> Option<HeaderValue> {
    let since = Duration::from_millis(u64::try_from(ms).ok()?);
    let mut text = Vec::new();
    Timestamp::from(SystemTime::UNIX_EPOCH.checked_add(since)?)
        .format(TimestampFormat::HttpDate, &mut text)
        .ok()?;
    HeaderValue::from_bytes(&text).ok()
}

/// Whether a request says that it was signed too long before or after this time; one that does not say is not judged.
pub(crate) fn is_too_far(headers: &HeaderMap, now_ms: i64) -> bool {
    let signed = headers
        .get("x-amz-date")
        .and_then(|date| signed_ms(date.to_str().ok()?));
    signed.is_some_and(|signed_ms| signed_ms.abs_diff(now_ms) > MOST_SKEW_MS)
}

/// `20261201T001712Z`.
fn signed_ms(date: &str) -> Option<i64> {
    let part = |from, to| date.get(from..to);
    let date = format!(
        "{}-{}-{}T{}:{}:{}Z",
        part(0, 4)?,
        part(4, 6)?,
        part(6, 8)?,
        part(9, 11)?,
        part(11, 13)?,
        part(13, 15)?
    );
    let mut seconds = Vec::new();
    Timestamp::parse(TimestampFormat::DateTime, &date)
        .ok()?
        .format(TimestampFormat::EpochSeconds, &mut seconds)
        .ok()?;
    // Whole seconds, as the form above has no more.
    let seconds = std::str::from_utf8(&seconds).ok()?.split('.').next()?;
    seconds.parse::<i64>().ok()?.checked_mul(1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_the_forms_that_requests_and_answers_have() {
        let date = http_date(784_887_151_000);
        let date = date.as_ref().map(HeaderValue::as_bytes);
        assert_eq!(date, Some(&b"Tue, 15 Nov 1994 08:12:31 GMT"[..]));
        assert_eq!(signed_ms("19941115T081231Z"), Some(784_887_151_000));
        assert_eq!(signed_ms("yesterday"), None);
        let mut headers = HeaderMap::new();
        assert!(!is_too_far(&headers, 0));
        headers.insert("x-amz-date", HeaderValue::from_static("19941115T081231Z"));
        assert!(!is_too_far(&headers, 784_887_151_000 + 900_000));
        assert!(is_too_far(&headers, 784_887_151_000 + 900_001));
        assert!(is_too_far(&headers, 784_887_151_000 - 900_001));
    }
}
