//! `s3-testserver`: the test server as a program.
//!
//! Prints one line of JSON when it is ready, then serves until it is terminated (or until its
//! standard input ends, with `--until-eof`: so that it dies with the test that started it).

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use s3_testserver::{Options, TestServer, TlsFiles};
use serde_json::json;

const USAGE: &str =
    "usage: s3-testserver [--port N] [--control-port N] [--access-key KEY] [--secret-key SECRET]
  [--bucket NAME]... [--tls-cert FILE --tls-key FILE] [--until-eof]
Ports are on loopback; 0 (the default) picks one. Buckets: test, unless named.";

struct Arguments {
    options: Options,
    until_eof: bool,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut options = Options {
        control_port: Some(0),
        ..Options::default()
    };
    let (mut buckets, mut certificate, mut key, mut until_eof) = (Vec::new(), None, None, false);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--port" => options.port = number(&value()?)?,
            "--control-port" => options.control_port = Some(number(&value()?)?),
            "--access-key" => options.access_key = value()?,
            "--secret-key" => options.secret_key = value()?,
            "--bucket" => buckets.push(value()?),
            "--tls-cert" => certificate = Some(PathBuf::from(value()?)),
            "--tls-key" => key = Some(PathBuf::from(value()?)),
            "--until-eof" => until_eof = true,
            _ => return Err(format!("unknown argument {word}")),
        }
    }
    if !buckets.is_empty() {
        options.buckets = buckets;
    }
    options.tls = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(TlsFiles { certificate, key }),
        (None, None) => None,
        _ => return Err("--tls-cert and --tls-key go together".to_owned()),
    };
    Ok(Arguments { options, until_eof })
}

fn number(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| format!("not a port: {text}"))
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(text) => {
            eprintln!("{text}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match serve(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let options = arguments.options;
    let (access_key, secret_key, buckets) = (
        options.access_key.clone(),
        options.secret_key.clone(),
        options.buckets.clone(),
    );
    let server = TestServer::start(options)?;
    let ready = json!({
        "endpoint": server.endpoint(),
        "port": server.address().port(),
        "control": server.control_address().map(|address| format!("http://{address}")),
        "control_port": server.control_address().map(|address| address.port()),
        "access_key": access_key,
        "secret_key": secret_key,
        "region": "us-east-1",
        "buckets": buckets,
        "pid": std::process::id(),
    });
    let mut out = std::io::stdout();
    writeln!(out, "{ready}")?;
    out.flush()?;
    if arguments.until_eof {
        std::io::copy(&mut std::io::stdin().by_ref(), &mut std::io::sink())?;
        return Ok(());
    }
    // A signal ends the process; there is nothing to save.
    loop {
        std::thread::park();
    }
}
