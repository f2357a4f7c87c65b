//! What the tests share: a server, a plain S3 client, error codes.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Config, Region, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::Builder as HttpBuilder;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use s3_testserver::{Options, TestServer};

pub const BUCKET: &str = "test";

pub fn start() -> TestServer {
    TestServer::start(Options::default()).unwrap()
}

pub fn client(server: &TestServer) -> Client {
    client_of(&server.endpoint(), "AKTEST", "SKTESTSECRET", None)
}

/// A client that tries once and adds nothing of its own.
pub fn client_of(
    endpoint: &str,
    access_key: &str,
    secret_key: &str,
    authority: Option<Vec<u8>>,
) -> Client {
    let trust = authority.map_or_else(TrustStore::default, |pem| {
        TrustStore::empty().with_pem_certificate(pem)
    });
    let http = HttpBuilder::new()
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .tls_context(
            TlsContext::builder()
                .with_trust_store(trust)
                .build()
                .unwrap(),
        )
        .build_https();
    let config = Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .region(Region::from_static("us-east-1"))
        .endpoint_url(endpoint)
        .force_path_style(true)
        .credentials_provider(Credentials::new(access_key, secret_key, None, None, "test"))
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
        .http_client(http)
        .build();
    Client::from_conf(config)
}

pub async fn put(client: &Client, key: &str, body: &[u8]) -> Result<(), String> {
    client
        .put_object()
        .bucket(BUCKET)
        .key(key)
        .body(ByteStream::from(body.to_vec()))
        .send()
        .await
        .map(|_| ())
        .map_err(|error| code(&error))
}

pub async fn get(client: &Client, key: &str) -> Result<Vec<u8>, String> {
    let output = client
        .get_object()
        .bucket(BUCKET)
        .key(key)
        .send()
        .await
        .map_err(|error| code(&error))?;
    output
        .body
        .collect()
        .await
        .map(|body| body.to_vec())
        .map_err(|_| "cut".to_owned())
}

/// The S3 error code, `lost` if there was no answer, or the bare status.
pub fn code<E: ProvideErrorMetadata>(error: &SdkError<E>) -> String {
    match error {
        SdkError::ServiceError(inner) => match inner.err().code() {
            Some(code) => code.to_owned(),
            None => inner.raw().status().as_u16().to_string(),
        },
        SdkError::ResponseError(inner) => inner.raw().status().as_u16().to_string(),
        _ => "lost".to_owned(),
    }
}
