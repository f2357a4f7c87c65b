//! What time it is, as the store's answers say; and signatures and credentials that are of that time.
//!
//! Owns the reading of the header `Date`. Does not own what follows from it.

use std::sync::Arc;
use std::time::SystemTime;

use aws_sdk_s3::config::Intercept;
use aws_smithy_async::time::TimeSource;
use aws_smithy_runtime_api::box_error::BoxError;
use aws_smithy_runtime_api::client::interceptors::context::BeforeDeserializationInterceptorContextRef;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::DateTime;
use aws_smithy_types::config_bag::ConfigBag;
use aws_smithy_types::date_time::Format;

use crate::timekeeper::Timekeeper;

/// Hears the time in every answer, whatever else it says.
#[derive(Debug)]
pub(super) struct HearDate(pub(super) Arc<Timekeeper>);

impl Intercept for HearDate {
    fn name(&self) -> &'static str {
        "HearDate"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _bag: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let headers = context.response().headers();
        // An answer with an age is out of somebody's cache, and its date with it.
        if headers.get("age").is_none()
            && let Some(store_ms) = headers.get("date").and_then(milliseconds)
        {
            self.0.store_says(store_ms);
        }
        Ok(())
    }
}

fn milliseconds(date: &str) -> Option<i64> {
    let date = DateTime::from_str(date, Format::HttpDate).ok()?;
    date.to_millis().ok().filter(|ms| *ms > 0)
}

/// The clock that the SDK signs by, and renews credentials by.
#[derive(Debug, Clone)]
pub(super) struct StoreTime(pub(super) Arc<Timekeeper>);

impl TimeSource for StoreTime {
    fn now(&self) -> SystemTime {
        self.0.for_the_store()
    }
}

#[cfg(test)]
mod tests;
