//! What objects say about themselves, so that the bucket alone is enough to bring a stream back.
//!
//! Owns names and limits of user metadata, both ways. ASCII only: other bytes are percent-encoded. Does not own what follows from
//! what an object says (`recovery`).

use std::collections::BTreeMap;

use log_format::manifest::Group;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::manifest::Lineage;

use crate::upload::UploadConfig;

/// S3 takes 2 KB of names and values in all; some stores count the prefix of a name, too.
const METADATA_BYTES_MAX: usize = 2_048;
const PREFIX_BYTES: usize = "x-amz-meta-".len();
/// In a fragment, these can be long; everything else is short.
const STREAM_BYTES_MAX: usize = 600;
const NAME_BYTES_MAX: usize = 400;
/// What is left as it is.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'/');

const VHOST: &str = "vhost";
const QUEUE: &str = "queue";
const ARGUMENTS: &str = "arguments";
const CLUSTER: &str = "cluster";
const EPOCH: &str = "epoch";
const FOLLOWS: &str = "follows";
const RECOVERIES: &str = "recoveries";
const ABANDONED_ROOT: &str = "abandoned-root";

/// Names and values of an object's user metadata.
pub(crate) type Fields = Vec<(&'static str, String)>;

/// Metadata of a fragment.
pub(crate) fn fragment(stream: &UploadConfig, cluster: &str, plan: &FragmentPlan) -> Fields {
    vec![
        ("stream", encode_up_to(&stream.stream_id, STREAM_BYTES_MAX)),
        (VHOST, encode_up_to(&stream.vhost, NAME_BYTES_MAX)),
        (QUEUE, encode_up_to(&stream.queue, NAME_BYTES_MAX)),
        (CLUSTER, encode_up_to(cluster, NAME_BYTES_MAX / 2)),
        (EPOCH, stream.epoch.to_string()),
        ("first-offset", plan.first_offset.to_string()),
        ("next-offset", plan.next_offset.to_string()),
        ("chunks", plan.chunk_count.to_string()),
        ("data-size", plan.size_bytes.to_string()),
    ]
}

/// Metadata of a group.
pub(crate) fn group(stream: &UploadConfig, group: &Group, next_offset: u64) -> Fields {
    vec![
        ("stream", encode_up_to(&stream.stream_id, STREAM_BYTES_MAX)),
        (EPOCH, stream.epoch.to_string()),
        ("first-offset", group.first_offset.to_string()),
        ("next-offset", next_offset.to_string()),
        ("entries", group.entries.len().to_string()),
    ]
}

/// Metadata of a root: what a stream needs to be declared again, and which root is the newest. A field is there as a whole or not
/// at all; names of any legal length fit.
pub(crate) fn root(about: &AboutStream, next_offset: u64, history: &RootHistory) -> Fields {
    let RootHistory {
        recoveries,
        epoch,
        follows,
        abandoned,
    } = *history;
    let abandoned =
        abandoned.map(|RootName { epoch, uid }| (ABANDONED_ROOT, format!("{epoch}.{uid:08x}")));
    let named = |name, value: &Option<String>| Some((name, encode(value.as_deref()?)));
    let by_importance = [
        Some((EPOCH, epoch.to_string())),
        Some(("next-offset", next_offset.to_string())),
        Some((FOLLOWS, follows.to_string())),
        Some((RECOVERIES, recoveries.to_string())),
        abandoned,
        named(VHOST, &about.vhost),
        named(QUEUE, &about.queue),
        named(ARGUMENTS, &about.arguments),
        named(CLUSTER, &about.cluster),
        Some(("version", env!("CARGO_PKG_VERSION").to_owned())),
        Some(("stream", encode(&about.stream_id))),
    ];
    let mut left = METADATA_BYTES_MAX;
    let mut fields = Vec::new();
    for (name, value) in by_importance.into_iter().flatten() {
        if let Some(rest) = left.checked_sub(PREFIX_BYTES + name.len() + value.len()) {
            left = rest;
            fields.push((name, value));
        }
    }
    fields
}

/// The stream that a root belongs to, as its root tells it. `None`: the root does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AboutStream {
    /// Id of the stream: unique per incarnation.
    pub stream_id: String,
    /// Virtual host of the queue.
    pub vhost: Option<String>,
    /// Name of the queue.
    pub queue: Option<String>,
    /// Arguments that the queue was declared with, as the shell encodes them.
    pub arguments: Option<String>,
    /// Name of the cluster.
    pub cluster: Option<String>,
}

impl AboutStream {
    /// What an upload says about its stream.
    pub(crate) fn of_upload(stream: &UploadConfig, cluster: &str) -> Self {
        Self {
            stream_id: stream.stream_id.clone(),
            vhost: Some(stream.vhost.clone()),
            queue: Some(stream.queue.clone()),
            arguments: Some(stream.arguments.clone()),
            cluster: Some(cluster.to_owned()),
        }
    }

    /// What the metadata of a root of this stream says.
    pub(crate) fn of(stream_id: &str, metadata: &BTreeMap<String, String>) -> Self {
        let decoded = |name| {
            let value = metadata.get(name)?;
            Some(percent_decode_str(value).decode_utf8().ok()?.into_owned())
        };
        Self {
            stream_id: stream_id.to_owned(),
            vhost: decoded(VHOST),
            queue: decoded(QUEUE),
            arguments: decoded(ARGUMENTS),
            cluster: decoded(CLUSTER),
        }
    }
}

/// What a root says of the roots before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RootHistory {
    /// How often the stream was recovered from the bucket.
    pub recoveries: u64,
    /// Epoch of the writer.
    pub epoch: u64,
    /// Revision of the pointer that the root follows.
    pub follows: u64,
    /// The root that names history which was given up.
    pub abandoned: Option<RootName>,
}

impl RootHistory {
    /// What the metadata of a root says; 0 for what it does not.
    pub(crate) fn of(metadata: &BTreeMap<String, String>) -> Self {
        let number = |name| metadata.get(name).and_then(|text| text.parse().ok());
        Self {
            recoveries: number(RECOVERIES).unwrap_or(0),
            epoch: number(EPOCH).unwrap_or(0),
            follows: number(FOLLOWS).unwrap_or(0),
            abandoned: RootName::of(metadata),
        }
    }

    /// Where the root stands among those of its stream. The epoch is that of its key, which cannot be changed by a copy.
    pub(crate) fn lineage(&self, epoch: u64, modified_ms: Option<i64>) -> Lineage {
        Lineage {
            recoveries: self.recoveries,
            epoch,
            follows: self.follows,
            modified_ms: modified_ms.unwrap_or(0),
        }
    }
}

/// A root of the same stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootName {
    /// Epoch in its key.
    pub epoch: u64,
    /// Random part of its key.
    pub uid: u32,
}

impl RootName {
    /// The abandoned root that a root names, if it names one.
    fn of(metadata: &BTreeMap<String, String>) -> Option<Self> {
        let (epoch, uid) = metadata.get(ABANDONED_ROOT)?.split_once('.')?;
        Some(Self {
            epoch: epoch.parse().ok()?,
            uid: u32::from_str_radix(uid, 16).ok()?,
        })
    }
}

fn encode(value: &str) -> String {
    utf8_percent_encode(value, ENCODED).to_string()
}

/// Stops before it gets longer than allowed.
fn encode_up_to(value: &str, bytes_max: usize) -> String {
    let mut encoded = String::new();
    let mut character_bytes = [0; 4];
    for character in value.chars() {
        let before = encoded.len();
        let character = character.encode_utf8(&mut character_bytes);
        encoded.extend(utf8_percent_encode(character, ENCODED));
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

    fn stream(names: &str) -> UploadConfig {
        UploadConfig {
            stream_id: names.to_owned(),
            directory: "d".into(),
            epoch: u64::MAX,
            queue: names.to_owned(),
            vhost: names.to_owned(),
            arguments: "AAAA".to_owned(),
        }
    }

    fn stored(fields: Fields) -> BTreeMap<String, String> {
        assert!(fields.iter().all(|(_, value)| value.is_ascii()));
        let bytes: usize = fields
            .iter()
            .map(|(name, value)| PREFIX_BYTES + name.len() + value.len())
            .sum();
        assert!(bytes <= METADATA_BYTES_MAX, "{bytes}");
        let fields = fields.into_iter();
        fields
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    #[test]
    fn names_are_ascii_and_cut_between_characters() {
        assert_eq!(encode_up_to("/", 10), "/");
        assert_eq!(encode_up_to("a b%ä", 100), "a%20b%25%C3%A4");
        assert_eq!(encode_up_to("aäb", 6), "a");
        assert_eq!(encode_up_to("aäb", 7), "a%C3%A4");
    }

    #[test]
    fn a_root_says_what_its_stream_needs_to_be_declared_again() {
        let about = AboutStream::of_upload(&stream("büro/% \u{10ffff}"), "rabbit@höst");
        let history = RootHistory {
            recoveries: 3,
            epoch: 7,
            follows: 42,
            abandoned: Some(RootName {
                epoch: u64::MAX,
                uid: 0xab,
            }),
        };
        let metadata = stored(root(&about, 9, &history));
        assert_eq!(AboutStream::of(&about.stream_id, &metadata), about);
        assert_eq!(RootHistory::of(&metadata), history);
        assert_eq!(metadata.get("next-offset").map(String::as_str), Some("9"));
        assert_eq!(RootHistory::of(&BTreeMap::new()), RootHistory::default());
    }

    #[test]
    fn nonsense_names_no_abandoned_root() {
        for nonsense in ["", "1", "1.", "x.1", "1.100000000", "1.2.3"] {
            let all = BTreeMap::from([(ABANDONED_ROOT.to_owned(), nonsense.to_owned())]);
            assert_eq!(RootName::of(&all), None, "{nonsense}");
        }
    }

    /// 255 bytes are the longest name that a protocol can carry; each is three characters here.
    #[test]
    fn the_longest_names_of_a_queue_fit_into_a_root_as_a_whole() {
        let name = "\u{ff}".repeat(127);
        let about = AboutStream::of_upload(&stream(&name), "c");
        let metadata = stored(root(&about, u64::MAX, &RootHistory::default()));
        let read = AboutStream::of(&name, &metadata);
        assert_eq!((read.vhost, read.queue), (about.vhost, about.queue));
        assert_eq!(read.arguments, about.arguments);
        // What has no room left is not there at all.
        assert_eq!(metadata.get("stream"), None);
    }

    #[test]
    fn the_longest_metadata_of_a_fragment_fits() {
        let long = "\u{10ffff}".repeat(300);
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
        stored(fragment(&stream(&long), &long, &plan));
    }
}
