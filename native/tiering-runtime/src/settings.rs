//! Settings of one engine: defaults, validation, and secrets that do not print.
//!
//! Owns what a value may be; `settings.tsv` is the same as text, for the check that compares it with the shell's table. Does not
//! own where a value comes from: the shell reads the broker's configuration.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::log::LogLevel;

/// A value that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value, for the signer only.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<redacted>")
    }
}

/// Settings of one engine, checked by [`Config::validate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Name of the bucket.
    pub bucket: String,
    /// Region of the bucket, also named in signatures.
    pub region: String,
    /// `http://` or `https://` base address of a store that is not AWS.
    pub endpoint: Option<String>,
    /// Whether the bucket goes into the path instead of the host name.
    pub path_style: bool,
    /// What every key starts with, without the slash at its end.
    pub prefix: String,
    /// Static key id; without one the SDK's chain (environment, profile, web identity, container, instance) is asked.
    pub access_key_id: Option<String>,
    /// Static secret; belongs to the key id.
    pub secret_access_key: Option<Secret>,
    /// Session token of temporary static keys.
    pub session_token: Option<Secret>,
    /// PEM file with the only authorities to trust; without one the system's are trusted.
    pub tls_ca_file: Option<PathBuf>,
    /// Name of this cluster, written into object metadata.
    pub cluster: String,
    /// Payload bytes at which a fragment is cut.
    pub fragment_size_bytes: u64,
    /// Age at which a fragment is cut although it is small (0 = never).
    pub fragment_max_age_ms: u64,
    /// Fragments after which the manifest is persisted.
    pub persist_threshold: u32,
    /// Time after which a changed manifest is persisted.
    pub persist_interval_ms: u64,
    /// Entries of one kind in a row that move from a manifest's root into a group.
    pub rebalance_threshold: u32,
    /// Byte rate of all transfers together; `None` = unlimited.
    pub max_transfer_bytes_per_sec: Option<u64>,
    /// Burst of that rate; `None` = what a fifth of a second allows.
    pub max_transfer_burst_bytes: Option<u64>,
    /// Transfers that run at the same time on this node.
    pub max_concurrent_transfers: usize,
    /// Clocks of this node and of the store that differ by more do not agree on what is too old; 0: the store's is not asked.
    pub max_clock_skew_ms: u64,
    /// What time the host believes it is, which is not what the system's clock says if that has jumped; `None`: as that says.
    pub system_time_ms: Option<i64>,
    /// Longest silence of the store within one request.
    pub request_timeout_ms: u64,
    /// Longest time to connect, TLS included.
    pub connect_timeout_ms: u64,
    /// Longest time of one fragment transfer, waiting for admission not counted.
    pub transfer_deadline_ms: u64,
    /// Threads of the runtime.
    pub worker_threads: usize,
    /// How far those threads are behind the one that opens the engine.
    pub worker_niceness: u8,
    /// Size of one ranged GET.
    pub read_request_size_bytes: u64,
    /// Bytes that one reader may have fetched ahead.
    pub read_ahead_bytes: u64,
    /// Bytes that all readers of the node may hold together, what they share in the cache included.
    pub read_memory_bytes: u64,
    /// A folder of this node alone, to keep blocks in that memory is too small for; `None` = only memory.
    pub read_cache_path: Option<PathBuf>,
    /// Bytes that may be kept in that folder.
    pub read_cache_size_bytes: u64,
    /// Whether chunk data from the remote tier is checked against the chunk's own CRC.
    pub verify_crc_on_read: bool,
    /// From which level on events become lines of the log.
    pub log_level: LogLevel,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            bucket: String::new(),
            region: "us-east-1".to_owned(),
            endpoint: None,
            path_style: false,
            prefix: "rabbitmq/stream".to_owned(),
            access_key_id: None,
            secret_access_key: None,
            session_token: None,
            tls_ca_file: None,
            cluster: String::new(),
            fragment_size_bytes: 64 << 20,
            fragment_max_age_ms: 300_000,
            persist_threshold: 5,
            persist_interval_ms: 2_000,
            rebalance_threshold: 1_024,
            max_transfer_bytes_per_sec: None,
            max_transfer_burst_bytes: None,
            max_concurrent_transfers: 8,
            max_clock_skew_ms: 300_000,
            system_time_ms: None,
            request_timeout_ms: 30_000,
            connect_timeout_ms: 5_000,
            transfer_deadline_ms: 180_000,
            worker_threads: 2,
            worker_niceness: 10,
            read_request_size_bytes: 4 << 20,
            read_ahead_bytes: 128 << 20,
            read_memory_bytes: 256 << 20,
            read_cache_path: None,
            read_cache_size_bytes: 10 << 30,
            verify_crc_on_read: true,
            log_level: LogLevel::Off,
        }
    }
}

/// A setting with a value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{setting}: {text}")]
pub struct ConfigError {
    /// Which setting.
    pub setting: &'static str,
    /// What is wrong with it; never holds a secret.
    pub text: String,
}

/// Positions in a fragment's index are 32 bits wide and a fragment overshoots by up to a chunk, so stay far below 4 GiB.
const FRAGMENT_SIZE_BYTES_MAX: u64 = 1 << 30;
/// A key is at most 1024 bytes in S3, and a stream id alone can be 540.
const PREFIX_BYTES_MAX: usize = 700;
const DAY_MS: u64 = 24 * 3600 * 1000;

/// What a number may be. The shell's bounds are narrower: these keep the engine from values that it cannot work with.
struct Range {
    setting: &'static str,
    min: u64,
    max: u64,
    /// `None`: not limited.
    value: fn(&Config) -> Option<u64>,
}

const RANGES: [Range; 18] = [
    range("fragment_size_bytes", 1, FRAGMENT_SIZE_BYTES_MAX, |c| {
        Some(c.fragment_size_bytes)
    }),
    range("persist_threshold", 1, 10_000, |c| {
        Some(u64::from(c.persist_threshold))
    }),
    range("persist_interval_ms", 1, DAY_MS, |c| {
        Some(c.persist_interval_ms)
    }),
    range("rebalance_threshold", 2, 1_024, |c| {
        Some(u64::from(c.rebalance_threshold))
    }),
    range("fragment_max_age_ms", 0, 365 * DAY_MS, |c| {
        Some(c.fragment_max_age_ms)
    }),
    range("max_transfer_bytes_per_sec", 1, 1 << 50, |c| {
        c.max_transfer_bytes_per_sec
    }),
    range("max_transfer_burst_bytes", 1, 1 << 50, |c| {
        c.max_transfer_burst_bytes
    }),
    range("max_concurrent_transfers", 1, 1_024, |c| {
        Some(c.max_concurrent_transfers as u64)
    }),
    range("max_clock_skew_ms", 0, DAY_MS, |c| {
        Some(c.max_clock_skew_ms)
    }),
    range("request_timeout_ms", 1, DAY_MS, |c| {
        Some(c.request_timeout_ms)
    }),
    range("connect_timeout_ms", 1, DAY_MS, |c| {
        Some(c.connect_timeout_ms)
    }),
    range("transfer_deadline_ms", 1, DAY_MS, |c| {
        Some(c.transfer_deadline_ms)
    }),
    range("worker_threads", 1, 256, |c| Some(c.worker_threads as u64)),
    range("worker_niceness", 0, 19, |c| {
        Some(u64::from(c.worker_niceness))
    }),
    range("read_request_size_bytes", 4_096, 1 << 30, |c| {
        Some(c.read_request_size_bytes)
    }),
    range("read_ahead_bytes", 4_096, 1 << 40, |c| {
        Some(c.read_ahead_bytes)
    }),
    range("read_memory_bytes", 1 << 20, 1 << 50, |c| {
        Some(c.read_memory_bytes)
    }),
    range("read_cache_size_bytes", 1 << 20, 1 << 60, |c| {
        Some(c.read_cache_size_bytes)
    }),
];

const fn range(
    setting: &'static str,
    min: u64,
    max: u64,
    value: fn(&Config) -> Option<u64>,
) -> Range {
    Range {
        setting,
        min,
        max,
        value,
    }
}

impl Config {
    /// Checks every value.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_place()?;
        self.check_prefix()?;
        self.check_credentials()?;
        RANGES.iter().try_for_each(|range| range.check(self))
    }

    fn check_place(&self) -> Result<(), ConfigError> {
        check("bucket", !self.bucket.is_empty(), "must be set")?;
        check(
            "bucket",
            is_plain(&self.bucket, "-_."),
            "only letters, digits, '-', '_' and '.' are possible",
        )?;
        check("region", !self.region.is_empty(), "must be set")?;
        check(
            "region",
            is_plain(&self.region, "-_"),
            "only letters, digits, '-' and '_' are possible",
        )?;
        let usable = self.endpoint.as_deref().is_none_or(|endpoint| {
            endpoint
                .strip_prefix("http://")
                .or_else(|| endpoint.strip_prefix("https://"))
                .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_graphic()))
        });
        check(
            "endpoint",
            usable,
            "must be an address that starts with http:// or https://",
        )
    }

    fn check_prefix(&self) -> Result<(), ConfigError> {
        let prefix = &self.prefix;
        check(
            "prefix",
            (1..=PREFIX_BYTES_MAX).contains(&prefix.len()),
            "must have 1 to 700 characters",
        )?;
        check(
            "prefix",
            is_plain(prefix, "-_./="),
            "only letters, digits, '-', '_', '.', '=' and '/' are possible",
        )?;
        let parts_fit = prefix
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..");
        check(
            "prefix",
            parts_fit,
            "must not start or end with '/', nor hold an empty, '.' or '..' part",
        )
    }

    fn check_credentials(&self) -> Result<(), ConfigError> {
        let both = self.access_key_id.is_some() == self.secret_access_key.is_some();
        check(
            "access_key_id",
            both,
            "key id and secret must be set together",
        )?;
        let has_keys = self.session_token.is_none() || self.access_key_id.is_some();
        check("session_token", has_keys, "needs key id and secret")
    }

    /// [`Self::request_timeout_ms`] as a duration.
    #[must_use]
    pub const fn request_timeout(&self) -> Duration {
        Duration::from_millis(self.request_timeout_ms)
    }

    /// [`Self::connect_timeout_ms`] as a duration.
    #[must_use]
    pub const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }
}

fn is_plain(value: &str, besides: &str) -> bool {
    value
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || besides.contains(c))
}

fn check(setting: &'static str, holds: bool, text: &str) -> Result<(), ConfigError> {
    if holds {
        Ok(())
    } else {
        Err(ConfigError {
            setting,
            text: text.to_owned(),
        })
    }
}

impl Range {
    fn check(&self, config: &Config) -> Result<(), ConfigError> {
        let Self {
            setting, min, max, ..
        } = self;
        let Some(value) = (self.value)(config) else {
            return Ok(());
        };
        check(
            setting,
            (*min..=*max).contains(&value),
            &format!("{value} is not between {min} and {max}"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usable() -> Config {
        Config {
            bucket: "streams".to_owned(),
            ..Config::default()
        }
    }

    #[test]
    fn defaults_need_a_bucket_only() {
        assert_eq!(
            Config::default().validate().map_err(|e| e.setting),
            Err("bucket")
        );
        assert_eq!(usable().validate(), Ok(()));
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let refused = |change: fn(&mut Config)| {
            let mut config = usable();
            change(&mut config);
            config.validate().map_err(|e| e.setting).err()
        };
        assert_eq!(
            refused(|c| c.endpoint = Some("store:9000".to_owned())),
            Some("endpoint")
        );
        assert_eq!(refused(|c| c.prefix = "/a".to_owned()), Some("prefix"));
        assert_eq!(refused(|c| c.prefix = "a/../b".to_owned()), Some("prefix"));
        assert_eq!(
            refused(|c| c.access_key_id = Some("AK".to_owned())),
            Some("access_key_id")
        );
        assert_eq!(
            refused(|c| c.session_token = Some(Secret::new("t"))),
            Some("session_token")
        );
        assert_eq!(
            refused(|c| c.fragment_size_bytes = 8 << 30),
            Some("fragment_size_bytes")
        );
        assert_eq!(
            refused(|c| c.rebalance_threshold = 1),
            Some("rebalance_threshold")
        );
        assert_eq!(
            refused(|c| c.max_concurrent_transfers = 0),
            Some("max_concurrent_transfers")
        );
    }

    #[test]
    fn a_range_holds_its_default_and_is_closed_at_both_ends() {
        for range in &RANGES {
            assert!(range.min <= range.max, "{}", range.setting);
            let default = (range.value)(&usable());
            assert!(
                default.is_none_or(|value| (range.min..=range.max).contains(&value)),
                "{}: default {default:?}",
                range.setting
            );
        }
        let mut config = usable();
        config.read_cache_size_bytes = (1 << 20) - 1;
        assert_eq!(
            config.validate().map_err(|e| e.to_string()),
            Err(
                "read_cache_size_bytes: 1048575 is not between 1048576 and 1152921504606846976"
                    .to_owned()
            )
        );
        config.read_cache_size_bytes = (1 << 60) + 1;
        assert_eq!(
            config.validate().map_err(|e| e.setting),
            Err("read_cache_size_bytes")
        );
        config.read_cache_size_bytes = 1 << 60;
        assert_eq!(config.validate(), Ok(()));
    }

    /// Defaults and ranges as text, for scripts/check-settings, which compares them with the shell's and the page's.
    fn described() -> String {
        let default = Config::default();
        let shown = |value: Option<String>| value.unwrap_or_else(|| "none".to_owned());
        let mut rows: Vec<String> = [
            (
                "bucket",
                Some(default.bucket.clone()).filter(|name| !name.is_empty()),
            ),
            ("region", Some(default.region.clone())),
            ("endpoint", default.endpoint.clone()),
            ("path_style", Some(default.path_style.to_string())),
            ("prefix", Some(default.prefix.clone())),
            ("access_key_id", default.access_key_id.clone()),
            (
                "tls_ca_file",
                default
                    .tls_ca_file
                    .as_ref()
                    .map(|path| path.display().to_string()),
            ),
            (
                "read_cache_path",
                default
                    .read_cache_path
                    .as_ref()
                    .map(|path| path.display().to_string()),
            ),
            (
                "verify_crc_on_read",
                Some(default.verify_crc_on_read.to_string()),
            ),
        ]
        .into_iter()
        .map(|(setting, value)| format!("{setting}\t{}\t-\t-\n", shown(value)))
        .collect();
        rows.extend(RANGES.iter().map(|range| {
            let value = (range.value)(&default).map(|value| value.to_string());
            format!(
                "{}\t{}\t{}\t{}\n",
                range.setting,
                shown(value),
                range.min,
                range.max
            )
        }));
        rows.concat()
    }

    #[test]
    fn the_written_table_is_the_one_in_use() {
        let described = described();
        assert_eq!(
            include_str!("settings.tsv"),
            described,
            "settings.tsv must be:\n{described}"
        );
    }

    #[test]
    fn secrets_do_not_print() {
        let mut config = usable();
        config.access_key_id = Some("AKID".to_owned());
        config.secret_access_key = Some(Secret::new("very secret"));
        config.session_token = Some(Secret::new("token secret"));
        assert!(!format!("{config:?}").contains("secret\""), "{config:?}");
        assert!(!format!("{config:#?}").contains("very secret"));
    }
}
