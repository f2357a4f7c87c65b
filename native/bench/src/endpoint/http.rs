//! As much of HTTP/1.1 as the SDK needs: request heads, bodies of a known length, answers.

use std::io::{Error, ErrorKind};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

const HEAD_BYTES_MAX: usize = 64 * 1024;
const BUFFER_BYTES: usize = 1 << 20;

/// One request's head.
#[derive(Debug)]
pub struct Head {
    /// In upper case.
    pub method: String,
    /// As sent.
    pub path: String,
    /// What follows the question mark.
    pub query: String,
    /// The range asked for, its end exclusive.
    pub range: Option<std::ops::Range<u64>>,
    expects: bool,
    content_length: usize,
}

/// A connection that is read request by request.
pub struct Connection<S> {
    pub stream: S,
    buffer: Vec<u8>,
    filled: usize,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// A connection that nothing was read from yet.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            buffer: vec![0; BUFFER_BYTES],
            filled: 0,
        }
    }

    /// The next request's head; `None` when the client left.
    pub async fn head(&mut self) -> Result<Option<Head>, Error> {
        let end = loop {
            let seen = self.buffer.get(..self.filled).unwrap_or_default();
            if let Some(at) = seen.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if self.filled >= HEAD_BYTES_MAX {
                return Err(ErrorKind::InvalidData.into());
            }
            let room = self.buffer.get_mut(self.filled..).unwrap_or_default();
            match self.stream.read(room).await? {
                0 => return Ok(None),
                read => self.filled += read,
            }
        };
        let head = parse(&String::from_utf8_lossy(
            self.buffer.get(..end).unwrap_or_default(),
        ));
        self.buffer.copy_within(end..self.filled, 0);
        self.filled -= end;
        Ok(Some(head))
    }

    /// Reads the request's body and, if `keep`, returns it.
    pub async fn body(&mut self, head: &Head, keep: bool) -> Result<Vec<u8>, Error> {
        if head.expects {
            self.stream
                .write_all(b"HTTP/1.1 100 Continue\r\n\r\n")
                .await?;
            self.stream.flush().await?;
        }
        let (mut left, mut kept) = (head.content_length, Vec::new());
        loop {
            let taken = self.filled.min(left);
            if keep {
                kept.extend_from_slice(self.buffer.get(..taken).unwrap_or_default());
            }
            self.buffer.copy_within(taken..self.filled, 0);
            self.filled -= taken;
            left -= taken;
            if left == 0 {
                return Ok(kept);
            }
            match self.stream.read(&mut self.buffer).await? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => self.filled = read,
            }
        }
    }

    /// Answers with a body that is here.
    pub async fn answer(&mut self, status: &str, body: &[u8]) -> Result<(), Error> {
        let head = format!(
            "HTTP/1.1 {status}\r\netag: \"0\"\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.stream
            .write_all(&[head.as_bytes(), body].concat())
            .await?;
        self.stream.flush().await
    }
}

fn parse(text: &str) -> Head {
    let mut lines = text.lines();
    let mut words = lines.next().unwrap_or_default().split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let fields: Vec<(String, &str)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim()))
        .collect();
    let field = |wanted: &str| {
        let found = fields.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| *value)
    };
    let range = field("range").and_then(|value| {
        let (first, last) = value.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
    });
    Head {
        method,
        path,
        query,
        range,
        expects: field("expect").is_some(),
        content_length: field("content-length")
            .and_then(|value| value.parse().ok())
            .unwrap_or(0),
    }
}
