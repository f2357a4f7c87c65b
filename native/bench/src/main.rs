//! `bench`: benchmarks of the native parts, each beside what it is compared with, in one run on one machine.
//!
//! Owns the corpus, the null endpoint, the rows, and a fast client for the rows of whole brokers. Does not own any production code.
#![allow(clippy::print_stdout)]

mod attach;
mod bare;
mod client;
mod corpus;
mod endpoint;
mod idle;
mod layout;
mod manifest;
mod objects;
mod other;
mod protocol;
mod read;
mod reading;
mod row;
mod scan;
mod share;
mod upload;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

const USAGE: &str = "usage: bench header-scan --dir DIR
       bench upload --dir DIR TARGET [--data-bytes N] [--also NAME=COMMAND]...
       bench manifest           (1,000, 100,000 and 1,000,000 fragments)
       bench read TARGET [--fragments N]
       bench share TARGET [--fragments N]
       bench attach TARGET [--samples N]
       bench idle --dir DIR TARGET
       bench endpoint [--delay-ms N] [--rate BYTES_PER_SECOND] [--tls-cert FILE --tls-key FILE]   (prints its port)
       bench publish --port P --stream NAME --records N --record-bytes N [--batch N] [--window N] [--rate N]
       bench consume --port P --stream NAME --until OFFSET [--from OFFSET] [--credit N]
       bench get TARGET [--at-once N] [--part-bytes N]     (stdin: lines of KEY FIRST END)
TARGET = --endpoint URL [--bucket NAME] [--key K --secret S] [--authorities PEM] [--against NAME]
Rows are printed as one JSON line each.";

type Failed = Box<dyn std::error::Error>;

struct Options(Vec<String>);

impl Options {
    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let pairs = self.0.windows(2);
        pairs.filter_map(move |pair| {
            (pair.first()? == name)
                .then(|| pair.last())
                .flatten()
                .map(String::as_str)
        })
    }

    fn text(&self, name: &str) -> Result<String, Failed> {
        let found = self.all(name).next().map(str::to_owned);
        found.ok_or_else(|| format!("{name} is missing").into())
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> Result<T, Failed> {
        match self.all(name).next() {
            None => Ok(default),
            Some(text) => text
                .parse()
                .map_err(|_| format!("{name} is not a number").into()),
        }
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.all(name).next().map(PathBuf::from)
    }

    fn target(&self) -> Result<bare::Target, Failed> {
        let or = |name, default: &str| self.text(name).unwrap_or_else(|_| default.to_owned());
        Ok(bare::Target {
            endpoint: self.text("--endpoint")?,
            bucket: or("--bucket", "bench"),
            access_key: or("--key", "key"),
            secret_key: or("--secret", "secret"),
            authorities: self.path("--authorities"),
            name: or("--against", "endpoint"),
        })
    }

    fn behaviour(&self) -> Result<endpoint::Behaviour, Failed> {
        let rate = self.number("--rate", 0)?;
        Ok(endpoint::Behaviour {
            delay: Duration::from_millis(self.number("--delay-ms", 0)?),
            rate: (rate > 0).then_some(rate),
            tls: self.path("--tls-cert").zip(self.path("--tls-key")),
        })
    }
}

fn run(command: &str, options: &Options) -> Result<(), Failed> {
    let directory = || options.text("--dir").map(PathBuf::from);
    match command {
        "header-scan" => scan::run(&directory()?),
        "upload" => {
            let others: Option<Vec<_>> = options.all("--also").map(other::Other::parse).collect();
            let others = others.ok_or("--also takes NAME=COMMAND")?;
            let data_bytes = options.number("--data-bytes", 131_000)?;
            upload::run(&directory()?, &options.target()?, &others, data_bytes)
        }
        "manifest" => manifest::run(),
        "read" => read::run(&options.target()?, options.number("--fragments", 16)?),
        "share" => share::run(&options.target()?, options.number("--fragments", 2)?),
        "attach" => attach::run(&options.target()?, options.number("--samples", 100)?),
        "idle" => idle::run(&directory()?, &options.target()?),
        "endpoint" => endpoint::run(options.behaviour()?),
        "publish" => client::publish(&client::Publish {
            port: options.number("--port", 0)?,
            stream: options.text("--stream")?,
            records: options.number("--records", 0)?,
            record_bytes: options.number("--record-bytes", 1_000)?,
            batch: options.number("--batch", 100)?,
            window: options.number("--window", 10_000)?,
            rate: options.number("--rate", 0)?,
        }),
        "consume" => client::consume(&client::Consume {
            port: options.number("--port", 0)?,
            stream: options.text("--stream")?,
            from: options.number("--from", 0)?,
            until: options.number("--until", 0)?,
            credit: options.number("--credit", 10)?,
        }),
        "get" => objects::run(
            &options.target()?,
            options.number("--at-once", 8)?,
            options.number("--part-bytes", 4 << 20)?,
        ),
        _ => Err(USAGE.into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let command = words.first().cloned().unwrap_or_default();
    match run(&command, &Options(words)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}
