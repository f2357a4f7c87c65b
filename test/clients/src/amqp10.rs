//! AMQP 1.0, with `fe2o3-amqp`.

use std::sync::Arc;

use fe2o3_amqp::connection::ConnectionHandle;
use fe2o3_amqp::link::receiver::CreditMode;
use fe2o3_amqp::types::messaging::annotations::OwnedKey;
use fe2o3_amqp::types::messaging::{Body, Data, Source};
use fe2o3_amqp::types::primitives::{Symbol, Value};
use fe2o3_amqp::{Connection, Receiver, Session};
use serde_amqp::described::Described;
use serde_amqp::descriptor::Descriptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, pem::PemObject};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::{Outcome, Records};

const OFFSET: &str = "x-stream-offset";
const OFFSET_SPEC: &str = "rabbitmq:stream-offset-spec";
const CREDIT: u32 = 200;

/// Reads up to the end of the job.
pub async fn consume(records: &mut Records) -> Outcome<()> {
    let mut connection = connect(records).await?;
    let mut session = Session::begin(&mut connection).await?;
    let from = match records.job.from {
        None => Value::String("first".into()),
        Some(offset) => Value::Ulong(offset),
    };
    let wanted = Described {
        descriptor: Descriptor::Name(Symbol::from(OFFSET_SPEC)),
        value: from,
    };
    let source = Source::builder()
        .address(format!("/queues/{}", records.job.stream))
        .add_to_filter(Symbol::from(OFFSET_SPEC), wanted)
        .build();
    let mut receiver = Receiver::builder()
        .name("foreign")
        .source(source)
        .credit_mode(CreditMode::Auto(CREDIT))
        .attach(&mut session)
        .await?;
    loop {
        let delivery = receiver.recv::<Body<Value>>().await?;
        receiver.accept(&delivery).await?;
        let annotations = delivery.message().message_annotations.as_ref();
        let found = annotations.and_then(|all| all.0.iter().find(|(key, _)| is_offset(key)));
        let Some((_, Value::Long(offset))) = found else {
            return Err(format!("a record without an offset: {annotations:?}").into());
        };
        let Body::Data(parts) = delivery.body() else {
            return Err("a record whose body is not data".into());
        };
        let body: Vec<u8> = parts
            .iter()
            .flat_map(|Data(part)| part.iter().copied())
            .collect();
        if records.add(u64::try_from(*offset)?, &body)? {
            break;
        }
    }
    receiver.close().await?;
    session.end().await?;
    connection.close().await?;
    Ok(())
}

fn is_offset(key: &OwnedKey) -> bool {
    matches!(key, OwnedKey::Symbol(symbol) if symbol.as_str() == OFFSET)
}

async fn connect(records: &Records) -> Outcome<ConnectionHandle<()>> {
    let port = records.job.port;
    let builder = Connection::builder().container_id("foreign");
    Ok(match &records.job.authority {
        None => {
            let url = format!("amqp://guest:guest@127.0.0.1:{port}");
            builder.open(url.as_str()).await?
        }
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in CertificateDer::pem_file_iter(path)? {
                roots.add(certificate?)?;
            }
            let config = ClientConfig::builder()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let url = format!("amqps://guest:guest@127.0.0.1:{port}");
            // TLS from the first byte, as RabbitMQ has it, and not asked for in AMQP's own words.
            let builder = builder
                .alt_tls_establishment(true)
                .rustls_connector(tokio_rustls::TlsConnector::from(Arc::new(config)));
            builder.open(url.as_str()).await?
        }
    })
}
