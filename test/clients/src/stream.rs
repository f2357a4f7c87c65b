//! The stream protocol, with `rabbitmq-stream-client`.

use futures_util::StreamExt;
use rabbitmq_stream_client::types::OffsetSpecification;
use rabbitmq_stream_client::{Environment, TlsConfiguration};

use crate::{Outcome, Records};

/// Reads up to the end of the job.
pub async fn consume(records: &mut Records) -> Outcome<()> {
    let mut builder = Environment::builder()
        .host("127.0.0.1")
        .port(records.job.port);
    if let Some(authority) = &records.job.authority {
        let tls = TlsConfiguration::builder()
            .enable(true)
            .add_root_certificates(authority.clone())
            .build()?;
        builder = builder.tls(tls);
    }
    let environment = builder.build().await?;
    let from = match records.job.from {
        None => OffsetSpecification::First,
        Some(offset) => OffsetSpecification::Offset(offset),
    };
    let mut consumer = environment
        .consumer()
        .offset(from)
        .build(&records.job.stream)
        .await?;
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        let body = delivery.message().data().ok_or("a record without a body")?;
        if records.add(delivery.offset(), body)? {
            break;
        }
    }
    consumer.handle().close().await?;
    Ok(())
}
