//! A null endpoint: takes every PUT and throws it away, answers ranged GETs from bytes that are made up, as fast as the
//! loopback carries or with a chosen first-byte delay and rate of each connection. What is measured against it is the client.
//!
//! Objects under `/metadata/` are kept. `GET /stats` says what was asked for since `GET /reset`.

mod http;

use std::collections::HashMap;
use std::io::{Error, IoSlice, Read, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

use self::http::{Connection, Head};
use crate::layout::{DATA_END, Layout};

/// Pieces that go out in one call.
const PIECES_AT_ONCE: usize = 64;
/// A rate is kept to within what a timer can tell apart.
const TIMER: Duration = Duration::from_millis(1);

type Failed = Box<dyn std::error::Error>;

/// How an endpoint behaves.
#[derive(Debug, Clone, Default)]
pub struct Behaviour {
    /// Time between a request and the first byte of its answer.
    pub delay: Duration,
    /// Body bytes a second of each connection's answers; nothing means as fast as can be.
    pub rate: Option<u64>,
    /// Certificate and key: then it speaks TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
}

#[derive(Debug, Default)]
struct Counts {
    requests: AtomicU64,
    data_gets: AtomicU64,
    index_gets: AtomicU64,
    metadata_gets: AtomicU64,
    get_bytes: AtomicU64,
    open: AtomicU64,
    open_max: AtomicU64,
}

struct Endpoint {
    behaviour: Behaviour,
    layout: Layout,
    kept: Mutex<HashMap<String, Bytes>>,
    counts: Counts,
}

/// Serves until its standard input ends.
pub fn run(behaviour: Behaviour) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let acceptor = behaviour.tls.as_ref().map(acceptor).transpose()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let mut out = std::io::stdout();
    writeln!(out, "{}", listener.local_addr()?.port())?;
    out.flush()?;
    let endpoint = Arc::new(Endpoint {
        behaviour,
        layout: Layout::new(),
        kept: Mutex::default(),
        counts: Counts::default(),
    });
    runtime.spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                continue;
            };
            stream.set_nodelay(true).ok();
            let (endpoint, acceptor) = (Arc::clone(&endpoint), acceptor.clone());
            tokio::spawn(async move {
                match acceptor {
                    None => endpoint.serve(stream).await,
                    Some(acceptor) => endpoint.serve(acceptor.accept(stream).await?).await,
                }
            });
        }
    });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn acceptor((certificate, key): &(PathBuf, PathBuf)) -> Result<TlsAcceptor, Failed> {
    let chain = CertificateDer::pem_file_iter(certificate)?.collect::<Result<Vec<_>, _>>()?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(key)?)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

impl Endpoint {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> Result<(), Error> {
        let mut connection = Connection::new(stream);
        while let Some(head) = connection.head().await? {
            match head.path.as_str() {
                "/stats" => {
                    connection
                        .answer("200 OK", self.counts.text().as_bytes())
                        .await?
                }
                "/reset" => {
                    self.counts.reset();
                    connection.answer("200 OK", b"").await?;
                }
                _ => {
                    let _open = self.counts.enter();
                    self.one(&mut connection, head).await?;
                }
            }
        }
        Ok(())
    }

    async fn one<S>(&self, connection: &mut Connection<S>, head: Head) -> Result<(), Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let is_metadata = head.path.contains("/metadata/");
        let body = connection.body(&head, is_metadata).await?;
        if !self.behaviour.delay.is_zero() {
            sleep(self.behaviour.delay).await;
        }
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        match head.method.as_str() {
            "PUT" if is_metadata => {
                kept().insert(head.path, body.into());
                connection.answer("200 OK", b"").await
            }
            "GET" if head.query.contains("list-type=2") => {
                let page = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
                connection.answer("200 OK", page).await
            }
            "GET" if is_metadata => {
                count(&self.counts.metadata_gets, 1);
                let object = kept().get(&head.path).cloned();
                match object {
                    Some(object) => connection.answer("200 OK", &object).await,
                    None => connection.answer("404 Not Found", b"").await,
                }
            }
            "GET" => match (first_offset(&head.path), head.range) {
                (Some(first_offset), Some(range)) => {
                    self.send(connection, first_offset, range).await
                }
                _ => connection.answer("400 Bad Request", b"").await,
            },
            "HEAD" => connection.answer("404 Not Found", b"").await,
            "POST" => connection.answer("200 OK", b"<DeleteResult/>").await,
            _ => connection.answer("200 OK", b"").await,
        }
    }

    async fn send<S>(
        &self,
        connection: &mut Connection<S>,
        first_offset: u64,
        range: Range<u64>,
    ) -> Result<(), Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let kind = if range.start >= DATA_END {
            &self.counts.index_gets
        } else {
            &self.counts.data_gets
        };
        count(kind, 1);
        let pieces = self.layout.pieces(first_offset, range.clone());
        let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if length == 0 {
            return connection.answer("416 Range Not Satisfiable", b"").await;
        }
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\netag: \"0\"\r\ncontent-length: {length}\r\ncontent-range: bytes {}-{}/*\r\n\r\n",
            range.start,
            range.start + length - 1,
        );
        let stream = &mut connection.stream;
        stream.write_all(head.as_bytes()).await?;
        let started = Instant::now();
        let mut sent = 0;
        let at_once = match self.behaviour.rate {
            Some(_) => 2,
            None => PIECES_AT_ONCE,
        };
        for batch in pieces.chunks(at_once) {
            write_all(stream, batch).await?;
            let bytes = batch.iter().map(|piece| piece.len() as u64).sum();
            sent += bytes;
            count(&self.counts.get_bytes, bytes);
            if let Some(rate) = self.behaviour.rate {
                // Deadlines count from the start of the answer, so that late timers do not add up.
                let due = started + Duration::from_secs_f64(sent as f64 / rate as f64);
                if due > Instant::now() + TIMER {
                    stream.flush().await?;
                    sleep_until(due).await;
                }
            }
        }
        stream.flush().await
    }
}

async fn write_all<S: AsyncWrite + Unpin>(stream: &mut S, pieces: &[Bytes]) -> Result<(), Error> {
    let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
    let mut left = slices.as_mut_slice();
    while !left.is_empty() {
        let written = stream.write_vectored(left).await?;
        if written == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut left, written);
    }
    Ok(())
}

/// The offset in a fragment's key: `.../<20 digits>.<uid>.fragment`.
fn first_offset(path: &str) -> Option<u64> {
    let name = path.rsplit('/').next()?;
    name.strip_suffix(".fragment")?
        .split('.')
        .next()?
        .parse()
        .ok()
}

fn count(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// One request that is being answered.
struct Open<'a>(&'a Counts);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counts {
    fn enter(&self) -> Open<'_> {
        count(&self.requests, 1);
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.open_max.fetch_max(open, Ordering::Relaxed);
        Open(self)
    }

    fn rows(&self) -> [(&'static str, &AtomicU64); 7] {
        [
            ("requests", &self.requests),
            ("data_gets", &self.data_gets),
            ("index_gets", &self.index_gets),
            ("metadata_gets", &self.metadata_gets),
            ("get_bytes", &self.get_bytes),
            ("open", &self.open),
            ("open_max", &self.open_max),
        ]
    }

    fn text(&self) -> String {
        let lines = self
            .rows()
            .map(|(name, value)| format!("{name} {}\n", value.load(Ordering::Relaxed)));
        lines.concat()
    }

    fn reset(&self) {
        for (name, value) in self.rows() {
            if name != "open" {
                value.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// What an endpoint was asked for, as its clients see it.
#[derive(Debug, Clone, Default)]
pub struct Seen(HashMap<String, u64>);

impl Seen {
    /// One number: `requests`, `data_gets`, `index_gets`, `metadata_gets`, `get_bytes`, `open`, `open_max`.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Asks an endpoint.
    pub fn at(url: &str) -> Result<Self, Failed> {
        let lines = fetch(url, "/stats")?;
        let rows = lines.lines().filter_map(|line| line.split_once(' '));
        Ok(Self(
            rows.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
                .collect(),
        ))
    }

    /// Makes an endpoint count from zero.
    pub fn reset(url: &str) -> Result<(), Failed> {
        fetch(url, "/reset").map(drop)
    }
}

fn fetch(url: &str, path: &str) -> Result<String, Failed> {
    let address = url.trim_start_matches("http://");
    let mut stream = std::net::TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n")?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer
        .split_once("\r\n\r\n")
        .ok_or("no answer of the endpoint")?;
    Ok(body.to_owned())
}
