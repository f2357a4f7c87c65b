//! `bench`: benchmarks of the native parts, each beside what it is compared with, in one run on one machine.
//!
//! Owns the corpus, the null endpoint and the rows. Does not own any production code.
#![allow(clippy::print_stdout)]

mod corpus;
mod manifest;
mod row;
mod scan;
mod sink;
mod upload;

use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "usage: bench header-scan --dir DIR
       bench upload --dir DIR --endpoint URL --bucket NAME [--key K --secret S] [--against TEXT]
       bench manifest           (1,000, 100,000 and 1,000,000 fragments)
       bench sink               (a null endpoint; prints its port)
Prints one JSON line per row.";

fn option(words: &[String], name: &str) -> Option<String> {
    words
        .iter()
        .position(|word| word == name)
        .and_then(|at| words.get(at + 1))
        .cloned()
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let directory = option(&words, "--dir").map(PathBuf::from);
    let outcome = match (words.first().map(String::as_str), directory) {
        (Some("header-scan"), Some(directory)) => scan::run(&directory),
        (Some("upload"), Some(directory)) => upload::run(
            &directory,
            upload::Target {
                endpoint: option(&words, "--endpoint").unwrap_or_default(),
                bucket: option(&words, "--bucket").unwrap_or_else(|| "bench".to_owned()),
                access_key: option(&words, "--key").unwrap_or_else(|| "key".to_owned()),
                secret_key: option(&words, "--secret").unwrap_or_else(|| "secret".to_owned()),
                name: option(&words, "--against").unwrap_or_else(|| "endpoint".to_owned()),
            },
        ),
        (Some("manifest"), _) => manifest::run(),
        (Some("sink"), _) => sink::run(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}
