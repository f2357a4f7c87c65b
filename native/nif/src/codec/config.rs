//! The engine's configuration map.
//!
//! A wrong value is an error of its own, never `badarg`: an exception carries the arguments of the call, and with them
//! the secret, into the log.

use std::path::PathBuf;

use rustler::{Decoder, Error, NifResult, Term};
use tiering_runtime::log::LogLevel;
use tiering_runtime::settings::{Config, ConfigError, Secret};

use super::{get, optional, string};
use crate::atoms;

/// Reads a key of the map named like the setting.
macro_rules! setting {
    ($map:expr, $name:ident, $decode:expr) => {
        get($map, atoms::$name())
            .and_then($decode)
            .map_err(|_| ConfigError {
                setting: stringify!($name),
                text: "is missing or has a value of the wrong type".to_owned(),
            })?
    };
}

/// Decodes the map. Whether the values can be used is not checked here.
pub(crate) fn config(map: Term<'_>) -> Result<Config, ConfigError> {
    if !map.is_map() {
        return Err(ConfigError {
            setting: "configuration",
            text: "is not a map".to_owned(),
        });
    }
    Ok(Config {
        bucket: setting!(map, bucket, string),
        region: setting!(map, region, string),
        endpoint: setting!(map, endpoint, |term| optional(term, string)),
        path_style: setting!(map, path_style, boolean),
        prefix: setting!(map, prefix, string),
        access_key_id: setting!(map, access_key_id, |term| optional(term, string)),
        secret_access_key: setting!(map, secret_access_key, |term| optional(term, secret)),
        session_token: setting!(map, session_token, |term| optional(term, secret)),
        tls_ca_file: setting!(map, tls_ca_file, |term| optional(term, path)),
        cluster: setting!(map, cluster, string),
        fragment_size_bytes: setting!(map, fragment_size_bytes, integer),
        fragment_max_age_ms: setting!(map, fragment_max_age_ms, integer),
        persist_threshold: setting!(map, persist_threshold, integer),
        persist_interval_ms: setting!(map, persist_interval_ms, integer),
        rebalance_threshold: setting!(map, rebalance_threshold, integer),
        max_transfer_bytes_per_sec: setting!(map, max_transfer_bytes_per_sec, rate),
        max_transfer_burst_bytes: setting!(map, max_transfer_burst_bytes, burst),
        max_concurrent_transfers: setting!(map, max_concurrent_transfers, integer),
        max_clock_skew_ms: setting!(map, max_clock_skew_ms, integer),
        system_time_ms: setting!(map, system_time_ms, |term| integer(term).map(Some)),
        request_timeout_ms: setting!(map, request_timeout_ms, integer),
        connect_timeout_ms: setting!(map, connect_timeout_ms, integer),
        transfer_deadline_ms: setting!(map, transfer_deadline_ms, integer),
        worker_threads: setting!(map, worker_threads, integer),
        worker_niceness: setting!(map, worker_niceness, integer),
        read_request_size_bytes: setting!(map, read_request_size_bytes, integer),
        read_ahead_bytes: setting!(map, read_ahead_bytes, integer),
        read_memory_bytes: setting!(map, read_memory_bytes, integer),
        read_cache_path: setting!(map, read_cache_path, |term| optional(term, path)),
        read_cache_size_bytes: setting!(map, read_cache_size_bytes, integer),
        verify_crc_on_read: setting!(map, verify_crc_on_read, boolean),
        log_level: get(map, atoms::log_level()).map_or(LogLevel::Off, log_level),
    })
}

fn integer<'a, T: Decoder<'a>>(term: Term<'a>) -> NifResult<T> {
    term.decode()
}

/// A level that is not named means no lines.
fn log_level(term: Term<'_>) -> LogLevel {
    let levels = [
        (atoms::error(), LogLevel::Error),
        (atoms::warning(), LogLevel::Warn),
        (atoms::info(), LogLevel::Info),
        (atoms::debug(), LogLevel::Debug),
    ];
    let level = levels.iter().find(|(name, _)| *name == term);
    level.map_or(LogLevel::Off, |(_, level)| *level)
}

fn boolean(term: Term<'_>) -> NifResult<bool> {
    term.decode()
}

fn path(term: Term<'_>) -> NifResult<PathBuf> {
    string(term).map(PathBuf::from)
}

fn secret(term: Term<'_>) -> NifResult<Secret> {
    string(term).map(Secret::new)
}

/// `unlimited` or a positive rate.
pub(crate) fn rate(term: Term<'_>) -> NifResult<Option<u64>> {
    if atoms::unlimited() == term {
        Ok(None)
    } else {
        positive(term).map(Some)
    }
}

/// `default` or a positive burst.
pub(crate) fn burst(term: Term<'_>) -> NifResult<Option<u64>> {
    if atoms::default() == term {
        Ok(None)
    } else {
        positive(term).map(Some)
    }
}

fn positive(term: Term<'_>) -> NifResult<u64> {
    match term.decode()? {
        0 => Err(Error::BadArg),
        value => Ok(value),
    }
}
