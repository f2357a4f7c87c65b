//! Makes the SDK's client from the settings.
//!
//! Owns everything that the SDK could decide for us and must not: retries, checksums, timeouts, trust. Does not own requests.

use std::path::Path;
use std::sync::Arc;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    BehaviorVersion, Builder, Credentials, Region, RequestChecksumCalculation,
    ResponseChecksumValidation, SharedCredentialsProvider, SharedHttpClient,
    StalledStreamProtectionConfig,
};
use aws_smithy_http_client::Builder as HttpBuilder;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::date::{HearDate, StoreTime};
use crate::remote_tier::{StoreError, StoreErrorKind};
use crate::settings::Config;
use crate::timekeeper::Timekeeper;

/// Reads and checks a PEM file. The SDK panics on one that does not parse, so nothing unchecked may reach it.
fn read_authorities(path: &Path) -> Result<Vec<u8>, StoreError> {
    let refuse =
        |text: String| StoreError::new(StoreErrorKind::Tls, format!("{}: {text}", path.display()));
    let pem = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate =
            certificate.map_err(|error| refuse(format!("not a PEM certificate: {error:?}")))?;
        roots
            .add(certificate)
            .map_err(|error| refuse(error.to_string()))?;
    }
    if roots.is_empty() {
        Err(refuse("holds no certificate".to_owned()))
    } else {
        Ok(pem)
    }
}

fn http_client(config: &Config, authorities: Option<Vec<u8>>) -> SharedHttpClient {
    if config
        .endpoint
        .as_deref()
        .is_some_and(|endpoint| endpoint.starts_with("http://"))
    {
        return HttpBuilder::new().build_http();
    }
    let trust_store = match authorities {
        Some(pem) => TrustStore::empty().with_pem_certificate(pem),
        None => TrustStore::default(),
    };
    let builder = HttpBuilder::new().tls_provider(Provider::Rustls(CryptoMode::Ring));
    match TlsContext::builder().with_trust_store(trust_store).build() {
        Ok(context) => builder.tls_context(context).build_https(),
        // Building a context has no way to fail today; without one the system's authorities are trusted, never everybody.
        Err(_) => builder.build_https(),
    }
}

async fn credentials(config: &Config, time: StoreTime) -> Option<SharedCredentialsProvider> {
    if let (Some(key_id), Some(secret)) = (&config.access_key_id, &config.secret_access_key) {
        let token = config
            .session_token
            .as_ref()
            .map(|token| token.expose().to_owned());
        let keys = Credentials::new(key_id, secret.expose(), token, None, "rabbitmq_stream_s3");
        return Some(SharedCredentialsProvider::new(keys));
    }
    // Metadata endpoints of instances and containers are plain http, web identity is https to AWS itself:
    // the system's authorities are right for them, whatever the bucket's endpoint uses.
    let http_client = HttpBuilder::new()
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .build_https();
    let chain = aws_config::defaults(BehaviorVersion::latest())
        .region(Region::new(config.region.clone()))
        .http_client(http_client)
        .time_source(time)
        .load()
        .await;
    chain.credentials_provider()
}

/// A client for these settings.
pub(super) async fn connect(
    config: &Config,
    timekeeper: &Arc<Timekeeper>,
) -> Result<Client, StoreError> {
    let authorities = match config.tls_ca_file.clone() {
        None => None,
        Some(path) => {
            let reading = tokio::task::spawn_blocking(move || read_authorities(&path)).await;
            Some(
                reading
                    .map_err(|error| StoreError::new(StoreErrorKind::Tls, error.to_string()))??,
            )
        }
    };
    // Only connecting is timed by the SDK: its read timeout runs while the body is sent, which is wrong for large objects.
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(config.connect_timeout())
        .build();
    let mut builder = Builder::new()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new(config.region.clone()))
        .force_path_style(config.path_style)
        .http_client(http_client(config, authorities))
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts)
        .interceptor(HearDate(Arc::clone(timekeeper)))
        .time_source(StoreTime(Arc::clone(timekeeper)))
        // That clock is corrected already; to do so twice would be wrong by as much again.
        .disable_clock_skew_correction(true)
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    let time = StoreTime(Arc::clone(timekeeper));
    builder.set_credentials_provider(credentials(config, time).await);
    if let Some(endpoint) = &config.endpoint {
        builder = builder.endpoint_url(endpoint);
    }
    Ok(Client::from_conf(builder.build()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused_not_a_panic() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("ca.pem");
        assert!(read_authorities(&path).is_err(), "missing");
        std::fs::write(&path, "not a certificate").expect("written");
        assert!(read_authorities(&path).is_err(), "empty");
        std::fs::write(
            &path,
            "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n",
        )
        .expect("written");
        assert!(read_authorities(&path).is_err(), "not base64");
        std::fs::write(
            &path,
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        )
        .expect("written");
        assert!(read_authorities(&path).is_err(), "not DER");
    }
}
