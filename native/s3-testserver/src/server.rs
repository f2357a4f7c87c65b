//! Sockets, TLS and the life of the server.
//!
//! Owns the threads, both ports, and whether the S3 port listens at all. Does not look into
//! requests.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

use crate::control::Control;
use crate::faults::Faults;
use crate::io::FlushCounting;
use crate::log::Log;
use crate::objects::Objects;
use crate::s3::Operations;
use crate::service::Service;

/// PEM files that make the S3 port speak TLS.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Certificate chain.
    pub certificate: PathBuf,
    /// Private key.
    pub key: PathBuf,
}

/// How to start a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// S3 port on loopback; 0 picks one.
    pub port: u16,
    /// Control port on loopback; 0 picks one, nothing means that there is none.
    pub control_port: Option<u16>,
    /// The one access key that is let in.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// Buckets that exist from the start.
    pub buckets: Vec<String>,
    /// TLS on the S3 port.
    pub tls: Option<TlsFiles>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            port: 0,
            control_port: None,
            access_key: "AKTEST".to_owned(),
            secret_key: "SKTESTSECRET".to_owned(),
            buckets: vec!["test".to_owned()],
            tls: None,
        }
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port or the runtime is not to be had.
    #[error("cannot start: {0}")]
    Io(#[from] std::io::Error),
    /// A PEM file cannot be read.
    #[error("cannot read PEM: {0}")]
    Pem(#[from] pem::Error),
    /// Certificate and key are no good.
    #[error("cannot use certificate: {0}")]
    Tls(#[from] rustls::Error),
}

/// Whether the S3 port listens: what was asked for, and what is so.
#[derive(Debug, Clone)]
pub(crate) struct Door {
    wanted: Arc<watch::Sender<bool>>,
    open: watch::Receiver<bool>,
}

impl Door {
    /// Opens or shuts the port and waits until that is so. Shutting ends every connection.
    pub(crate) async fn set(&self, open: bool) {
        self.wanted.send_replace(open);
        let mut now = self.open.clone();
        // Never wait for a listener that cannot be bound again: the caller sees it in /health.
        let _ =
            tokio::time::timeout(Duration::from_secs(10), now.wait_for(|now| *now == open)).await;
    }

    pub(crate) fn is_open(&self) -> bool {
        *self.open.borrow()
    }
}

/// A running server on threads of its own (so a test may stop its own clock). Dropping it ends
/// it and every connection.
#[derive(Debug)]
pub struct TestServer {
    runtime: Option<Runtime>,
    address: SocketAddr,
    control_address: Option<SocketAddr>,
    tls: bool,
    objects: Objects,
    faults: Faults,
    log: Log,
    door: Door,
}

impl TestServer {
    /// Starts a server; its ports accept connections when this returns.
    pub fn start(options: Options) -> Result<Self, StartError> {
        let tls = options.tls.as_ref().map(acceptor).transpose()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-testserver")
            .enable_all()
            .build()?;

        let objects = Objects::default();
        for bucket in &options.buckets {
            objects.create_bucket(bucket);
        }
        let (faults, log) = (Faults::default(), Log::default());
        let mut s3 = S3ServiceBuilder::new(Operations {
            objects: objects.clone(),
        });
        s3.set_auth(SimpleAuth::from_single(
            options.access_key,
            options.secret_key,
        ));
        let service = Service {
            s3: s3.build(),
            faults: faults.clone(),
            log: log.clone(),
        };

        let listener = listen(&runtime, options.port)?;
        let address = listener.local_addr()?;
        let (wanted, open) = (watch::Sender::new(true), watch::Sender::new(true));
        let door = Door {
            wanted: Arc::new(wanted),
            open: open.subscribe(),
        };
        let acceptor = Acceptor {
            service,
            tls,
            wanted: door.wanted.subscribe(),
            open,
        };
        let is_tls = acceptor.tls.is_some();
        runtime.spawn(acceptor.run(listener, address));

        let control_address = match options.control_port {
            None => None,
            Some(port) => {
                let listener = listen(&runtime, port)?;
                let address = listener.local_addr()?;
                let control = Control {
                    objects: objects.clone(),
                    faults: faults.clone(),
                    log: log.clone(),
                    door: door.clone(),
                    bucket: options.buckets.first().cloned().unwrap_or_default(),
                };
                runtime.spawn(control.run(listener));
                Some(address)
            }
        };
        Ok(Self {
            runtime: Some(runtime),
            address,
            control_address,
            tls: is_tls,
            objects,
            faults,
            log,
            door,
        })
    }

    /// URL of the S3 port.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!(
            "{}://{}",
            if self.tls { "https" } else { "http" },
            self.address
        )
    }

    /// Address of the S3 port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Address of the control port.
    #[must_use]
    pub fn control_address(&self) -> Option<SocketAddr> {
        self.control_address
    }

    /// The plan of faults.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// The log of requests.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The objects.
    #[must_use]
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Stops listening and ends every connection: clients are refused until [`Self::go_up`].
    pub async fn go_down(&self) {
        self.door.set(false).await;
    }

    /// Listens again, at the same port and with the same objects.
    pub async fn go_up(&self) {
        self.door.set(true).await;
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not waiting: this may be dropped inside another runtime.
            runtime.shutdown_background();
        }
    }
}

/// Binds without waiting, so that a test may start a server from inside its own runtime.
fn listen(runtime: &Runtime, port: u16) -> std::io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    listener.set_nonblocking(true)?;
    let _inside = runtime.enter();
    TcpListener::from_std(listener)
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, StartError> {
    let chain =
        CertificateDer::pem_file_iter(&files.certificate)?.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_file(&files.key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

struct Acceptor {
    service: Service,
    tls: Option<TlsAcceptor>,
    wanted: watch::Receiver<bool>,
    open: watch::Sender<bool>,
}

impl Acceptor {
    async fn run(mut self, listener: TcpListener, address: SocketAddr) {
        let mut listener = Some(listener);
        let mut connections = JoinSet::new();
        loop {
            let wanted = *self.wanted.borrow_and_update();
            if !wanted {
                listener = None;
                // Only when the last one is gone is it true that nobody is served.
                connections.shutdown().await;
            } else if listener.is_none() {
                listener = TcpListener::bind(address).await.ok();
            }
            self.open.send_if_modified(|open| {
                std::mem::replace(open, listener.is_some()) != listener.is_some()
            });
            let Some(open) = &listener else {
                if self.wanted.changed().await.is_err() {
                    return;
                }
                continue;
            };
            tokio::select! {
                accepted = open.accept() => if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(stream, self.tls.clone(), self.service.clone()));
                },
                Some(_) = connections.join_next() => {},
                changed = self.wanted.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, service: Service) {
    let _ = stream.set_nodelay(true);
    match tls {
        None => serve(stream, service).await,
        Some(tls) => {
            if let Ok(stream) = tls.accept(stream).await {
                serve(stream, service).await;
            }
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, service: Service) {
    let stream = FlushCounting::new(stream);
    let flushes = stream.flushes();
    let answer = service_fn(move |request| {
        let (service, flushes) = (service.clone(), flushes.clone());
        async move { service.call(request, flushes).await }
    });
    // An error is the client's leaving or a fault's closing; the log has it.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), answer)
        .await;
}
