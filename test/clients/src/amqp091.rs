//! AMQP 0-9-1, with `lapin`.

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::tcp::OwnedTLSConfig;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};

use crate::{Outcome, Records};

const OFFSET: &str = "x-stream-offset";
const PREFETCH: u16 = 200;

/// Reads up to the end of the job.
pub async fn consume(records: &mut Records) -> Outcome<()> {
    let port = records.job.port;
    let (scheme, authority) = match &records.job.authority {
        None => ("amqp", None),
        Some(path) => ("amqps", Some(std::fs::read_to_string(path)?)),
    };
    let tls = OwnedTLSConfig {
        identity: None,
        cert_chain: authority,
    };
    let connection = Connection::connect_with_config(
        &format!("{scheme}://guest:guest@127.0.0.1:{port}/%2f"),
        ConnectionProperties::default(),
        tls,
        lapin::runtime::default_runtime()?,
    )
    .await?;
    let channel = connection.create_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let from = match records.job.from {
        None => AMQPValue::LongString("first".into()),
        Some(offset) => AMQPValue::LongLongInt(i64::try_from(offset)?),
    };
    let mut arguments = FieldTable::default();
    arguments.insert(OFFSET.into(), from);
    let stream = records.job.stream.as_str().into();
    let options = BasicConsumeOptions::default();
    let mut consumer = channel
        .basic_consume(stream, "foreign".into(), options, arguments)
        .await?;
    while let Some(delivery) = consumer.next().await {
        let delivery = delivery?;
        let headers = delivery.properties.headers().as_ref();
        let offset = headers.and_then(|all| all.inner().get(OFFSET));
        let Some(AMQPValue::LongLongInt(offset)) = offset else {
            return Err("a record without an offset".into());
        };
        if records.add(u64::try_from(*offset)?, &delivery.data)? {
            break;
        }
        delivery.ack(BasicAckOptions::default()).await?;
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}
