//! What objects say about themselves, so that the bucket alone is enough to rebuild a stream.
//!
//! Owns names and limits of user metadata. ASCII only: other bytes are percent-encoded, and long names are cut.

use std::collections::BTreeMap;

use log_format::manifest::Group;
use tiering_core::fragment_assembly::FragmentPlan;

use super::UploadConfig;

/// S3 takes 2 KB of names and values in all; these three can be long, everything else is short.
const STREAM_BYTES_MAX: usize = 600;
const NAME_BYTES_MAX: usize = 400;
const ABANDONED_ROOT: &str = "abandoned-root";

/// Metadata of a fragment.
pub(super) fn fragment(
    stream: &UploadConfig,
    cluster: &str,
    plan: &FragmentPlan,
) -> Vec<(&'static str, String)> {
    vec![
        ("stream", encode(&stream.stream_id, STREAM_BYTES_MAX)),
        ("vhost", encode(&stream.vhost, NAME_BYTES_MAX)),
        ("queue", encode(&stream.queue, NAME_BYTES_MAX)),
        ("cluster", encode(cluster, NAME_BYTES_MAX / 2)),
        ("epoch", stream.epoch.to_string()),
        ("first-offset", plan.first_offset.to_string()),
        ("next-offset", plan.next_offset.to_string()),
        ("chunks", plan.chunk_count.to_string()),
        ("data-size", plan.size_bytes.to_string()),
    ]
}

/// Metadata of a root. One that names history which was given up is named by all that come after it.
pub(super) fn root(
    stream: &UploadConfig,
    epoch: u64,
    next_offset: u64,
    abandoned: Option<RootName>,
) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("stream", encode(&stream.stream_id, STREAM_BYTES_MAX)),
        ("epoch", epoch.to_string()),
        ("next-offset", next_offset.to_string()),
    ];
    let RootName { epoch, uid } = match abandoned {
        Some(abandoned) => abandoned,
        None => return all,
    };
    all.push((ABANDONED_ROOT, format!("{epoch}.{uid:08x}")));
    all
}

/// A root of the same stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RootName {
    pub(super) epoch: u64,
    pub(super) uid: u32,
}

impl RootName {
    /// The abandoned root that a root names, if it names one.
    pub(super) fn of(metadata: &BTreeMap<String, String>) -> Option<Self> {
        let (epoch, uid) = metadata.get(ABANDONED_ROOT)?.split_once('.')?;
        Some(Self {
            epoch: epoch.parse().ok()?,
            uid: u32::from_str_radix(uid, 16).ok()?,
        })
    }
}

/// Metadata of a group.
pub(super) fn group(
    stream: &UploadConfig,
    group: &Group,
    next_offset: u64,
) -> Vec<(&'static str, String)> {
    vec![
        ("stream", encode(&stream.stream_id, STREAM_BYTES_MAX)),
        ("epoch", stream.epoch.to_string()),
        ("first-offset", group.first_offset.to_string()),
        ("next-offset", next_offset.to_string()),
        ("entries", group.entries.len().to_string()),
    ]
}

/// Percent-encodes all but unreserved characters and `/`, and stops before it gets longer than allowed.
fn encode(value: &str, bytes_max: usize) -> String {
    const HEX: [char; 16] = [
        '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F',
    ];
    let digit = |nibble: u8| HEX.get(usize::from(nibble)).copied().unwrap_or('0');
    let mut encoded = String::new();
    for character in value.chars() {
        let before = encoded.len();
        if character.is_ascii_alphanumeric() || "-_.~/".contains(character) {
            encoded.push(character);
        } else {
            let mut bytes = [0; 4];
            for byte in character.encode_utf8(&mut bytes).bytes() {
                encoded.extend(['%', digit(byte >> 4), digit(byte & 15)]);
            }
        }
        if encoded.len() > bytes_max {
            encoded.truncate(before);
            break;
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ascii_and_cut_between_characters() {
        assert_eq!(encode("/", 10), "/");
        assert_eq!(encode("a b%ä", 100), "a%20b%25%C3%A4");
        assert_eq!(encode("aäb", 6), "a");
        assert_eq!(encode("aäb", 7), "a%C3%A4");
    }

    #[test]
    fn a_root_names_the_one_that_was_abandoned() {
        let stream = UploadConfig {
            stream_id: "s".to_owned(),
            directory: "d".into(),
            epoch: 1,
            queue: "q".to_owned(),
            vhost: "/".to_owned(),
        };
        let read = |abandoned| {
            let all = root(&stream, 3, 9, abandoned);
            let all = all
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value));
            RootName::of(&all.collect())
        };
        let name = RootName {
            epoch: u64::MAX,
            uid: 0xab,
        };
        assert_eq!((read(Some(name)), read(None)), (Some(name), None));
        for nonsense in ["", "1", "1.", "x.1", "1.100000000", "1.2.3"] {
            let all = BTreeMap::from([(ABANDONED_ROOT.to_owned(), nonsense.to_owned())]);
            assert_eq!(RootName::of(&all), None, "{nonsense}");
        }
    }

    #[test]
    fn the_longest_metadata_fits() {
        let long = "\u{10ffff}".repeat(300);
        let stream = UploadConfig {
            stream_id: long.clone(),
            directory: "d".into(),
            epoch: u64::MAX,
            queue: long.clone(),
            vhost: long.clone(),
        };
        let plan = FragmentPlan {
            first_offset: u64::MAX,
            next_offset: u64::MAX,
            first_timestamp_ms: 0,
            last_timestamp_ms: 0,
            size_bytes: u64::MAX,
            payload_bytes: 0,
            chunk_count: u32::MAX,
            spans: Vec::new(),
            index: Vec::new(),
            chunks_crc: 0,
        };
        let all = fragment(&stream, &long, &plan);
        let total: usize = all
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        assert!(total < 2048, "{total}");
        assert!(all.iter().all(|(_, value)| value.is_ascii()));
    }
}
