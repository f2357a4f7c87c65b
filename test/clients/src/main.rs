//! Reads a stream with a client library of other people and writes what came to standard output, for a test to check:
//! for each record its offset (u64), its length (u32), both big-endian, and its bytes.
//!
//! Usage: `foreign-clients stream|amqp091|amqp10 PORT STREAM first|OFFSET UNTIL [CA.pem]`. Ends when the record at `UNTIL - 1`
//! is in. With a certificate authority it talks TLS.

mod amqp091;
mod amqp10;
mod stream;

use std::io::{BufWriter, Stdout, Write, stdout};

use tokio_rustls::rustls::crypto::ring;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What to read, and where.
struct Job {
    port: u16,
    stream: String,
    /// From this offset; from the beginning if there is none.
    from: Option<u64>,
    until: u64,
    /// Path of the certificate authority: TLS.
    authority: Option<String>,
}

/// Where the records go.
struct Records {
    out: BufWriter<Stdout>,
    job: Job,
}

impl Records {
    /// Writes one record; says whether it was the last one.
    fn add(&mut self, offset: u64, body: &[u8]) -> Outcome<bool> {
        if self.job.from.unwrap_or(0) <= offset && offset < self.job.until {
            self.out.write_all(&offset.to_be_bytes())?;
            self.out
                .write_all(&u32::try_from(body.len())?.to_be_bytes())?;
            self.out.write_all(body)?;
        }
        Ok(offset + 1 >= self.job.until)
    }
}

fn arguments() -> Option<(String, Job)> {
    let mut given = std::env::args().skip(1);
    let protocol = given.next()?;
    let job = Job {
        port: given.next()?.parse().ok()?,
        stream: given.next()?,
        from: match given.next()?.as_str() {
            "first" => None,
            offset => Some(offset.parse().ok()?),
        },
        until: given.next()?.parse().ok()?,
        authority: given.next(),
    };
    Some((protocol, job))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let (protocol, job) = arguments()
        .ok_or("usage: foreign-clients PROTOCOL PORT STREAM first|OFFSET UNTIL [CA.pem]")?;
    // Several of the libraries are there, each with a favourite of its own; one has to be chosen.
    if ring::default_provider().install_default().is_err() {
        return Err("TLS was set up before".into());
    }
    let mut records = Records {
        out: BufWriter::new(stdout()),
        job,
    };
    match protocol.as_str() {
        "stream" => stream::consume(&mut records).await?,
        "amqp091" => amqp091::consume(&mut records).await?,
        "amqp10" => amqp10::consume(&mut records).await?,
        other => return Err(format!("unknown protocol {other}").into()),
    }
    records.out.flush()?;
    Ok(())
}
