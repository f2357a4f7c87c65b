//! The SDK's client without anything of ours around it: what rows are compared with.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    BehaviorVersion, Builder, Credentials, Region, RequestChecksumCalculation, SharedHttpClient,
};
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use tiering_runtime::settings::{Config, Secret};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

/// Where to.
#[derive(Debug, Clone)]
pub struct Target {
    /// Base address.
    pub endpoint: String,
    /// Bucket; must exist.
    pub bucket: String,
    /// Key id.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// PEM file with the only authority to trust, if the endpoint speaks TLS.
    pub authorities: Option<PathBuf>,
    /// Name for the rows.
    pub name: String,
}

impl Target {
    /// The same place in our own settings.
    pub fn config(&self) -> Config {
        Config {
            bucket: self.bucket.clone(),
            endpoint: Some(self.endpoint.clone()),
            path_style: true,
            access_key_id: Some(self.access_key.clone()),
            secret_access_key: Some(Secret::new(self.secret_key.clone())),
            tls_ca_file: self.authorities.clone(),
            ..Config::default()
        }
    }

    /// A client as its documentation makes one, but for checksums that not every store knows.
    pub fn client(&self) -> Result<Client, String> {
        let credentials = Credentials::new(&self.access_key, &self.secret_key, None, None, "bench");
        let config = Builder::new()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .force_path_style(true)
            .endpoint_url(&self.endpoint)
            .http_client(self.http_client()?)
            .credentials_provider(credentials)
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired);
        Ok(Client::from_conf(config.build()))
    }

    fn http_client(&self) -> Result<SharedHttpClient, String> {
        let builder = aws_smithy_http_client::Builder::new();
        let Some(authorities) = &self.authorities else {
            return Ok(builder.build_http());
        };
        let pem = std::fs::read(authorities).map_err(|error| error.to_string())?;
        let trusted = TrustStore::empty().with_pem_certificate(pem);
        let context = TlsContext::builder().with_trust_store(trusted).build();
        Ok(builder
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .tls_context(context.map_err(|error| error.to_string())?)
            .build_https())
    }
}

/// One part of one object.
#[derive(Debug, Clone)]
pub struct Part {
    /// Its key.
    pub key: String,
    /// First byte.
    pub start: u64,
    /// After the last byte.
    pub end: u64,
}

/// An object in parts of that size.
pub fn parts(
    key: &str,
    start: u64,
    end: u64,
    part_bytes: u64,
) -> impl Iterator<Item = Part> + use<> {
    let key = key.to_owned();
    let starts = (start..end).step_by(usize::try_from(part_bytes).unwrap_or(usize::MAX).max(1));
    starts.map(move |start| Part {
        key: key.clone(),
        start,
        end: end.min(start + part_bytes),
    })
}

/// Gets one part again and again with one client; milliseconds of each, the first not counted.
pub fn get_each(
    runtime: &Runtime,
    target: &Target,
    part: Part,
    samples: u64,
) -> Result<Vec<f64>, String> {
    let client = target.client()?;
    runtime.block_on(async {
        let mut times = Vec::new();
        for _ in 0..=samples {
            let began = Instant::now();
            get_part(&client, &target.bucket, &part).await?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(times.split_off(1))
    })
}

async fn get_part(client: &Client, bucket: &str, part: &Part) -> Result<u64, String> {
    let answer = client
        .get_object()
        .bucket(bucket)
        .key(&part.key)
        .range(format!("bytes={}-{}", part.start, part.end - 1))
        .send()
        .await
        .map_err(|error| format!("{error:?}"))?;
    let (mut body, mut bytes) = (answer.body, 0);
    while let Some(frame) = body.next().await {
        bytes += frame.map_err(|error| error.to_string())?.len() as u64;
    }
    Ok(bytes)
}

/// Gets the parts, `concurrency` at a time, and throws their bytes away; how many there were.
pub fn get(
    runtime: &Runtime,
    target: &Target,
    parts: Vec<Part>,
    concurrency: usize,
) -> Result<u64, String> {
    let client = target.client()?;
    let gets = parts.into_iter().map(|part| {
        let (client, bucket) = (client.clone(), target.bucket.clone());
        async move { get_part(&client, &bucket, &part).await }
    });
    all(runtime, gets, concurrency).map(|bytes| bytes.into_iter().sum())
}

/// Runs them, a few at a time, and gathers what they give.
pub fn all<T, F>(
    runtime: &Runtime,
    work: impl Iterator<Item = F>,
    concurrency: usize,
) -> Result<Vec<T>, String>
where
    T: Send + 'static,
    F: Future<Output = Result<T, String>> + Send + 'static,
{
    runtime.block_on(async {
        let admission = Arc::new(Semaphore::new(concurrency));
        let mut tasks = Vec::new();
        for one in work {
            let admission = Arc::clone(&admission);
            let permit = admission
                .acquire_owned()
                .await
                .map_err(|error| error.to_string())?;
            tasks.push(tokio::spawn(async move {
                let _permit = permit;
                one.await
            }));
        }
        let mut given = Vec::new();
        for task in tasks {
            given.push(task.await.map_err(|error| error.to_string())??);
        }
        Ok(given)
    })
}

/// A runtime with as many threads as the engine's own by default.
pub fn runtime() -> Result<Runtime, std::io::Error> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(Config::default().worker_threads)
        .enable_all()
        .build()
}
