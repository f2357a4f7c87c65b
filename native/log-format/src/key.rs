//! Object keys.
//!
//! ```text
//! <prefix>/<stream id>/data/<first offset, 20 digits>.<uid>.fragment
//! <prefix>/<stream id>/metadata/<first offset, 20 digits>.<uid>.group | .kgroup | .mgroup
//! <prefix>/<stream id>/metadata/root.<epoch>.<uid>.manifest
//! ```
//!
//! `uid` is 32 random bits as 8 lower-case hexadecimal digits, new for every upload. The epoch has no leading zeros.

use crate::manifest::Kind;
use crate::segment::parse_offset20;

/// Where this installation's objects are in the bucket, unless configured otherwise.
pub const DEFAULT_PREFIX: &str = "rabbitmq/stream";

/// All keys below one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySpace {
    /// Empty, or ending in a slash.
    prefix: String,
}

/// A key taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedKey {
    /// Which stream the object belongs to.
    pub stream_id: String,
    /// Which object it is.
    pub object: Object,
}

/// An object of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// A fragment.
    Fragment {
        /// Its first offset.
        first_offset: u64,
        /// Random part of its key.
        uid: u32,
    },
    /// A group.
    Group {
        /// Its height; never [`Kind::Fragment`].
        kind: Kind,
        /// Its first offset.
        first_offset: u64,
        /// Random part of its key.
        uid: u32,
    },
    /// A manifest root.
    Root {
        /// Epoch of the writer.
        epoch: u64,
        /// Random part of its key.
        uid: u32,
    },
}

impl KeySpace {
    /// Keys below `prefix`; slashes at its ends do not count.
    #[must_use]
    pub fn new(prefix: &str) -> Self {
        let trimmed = prefix.trim_matches('/');
        Self {
            prefix: if trimmed.is_empty() {
                String::new()
            } else {
                format!("{trimmed}/")
            },
        }
    }

    /// What every key starts with: empty, or ending in a slash.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// What the keys of one stream start with; ends in a slash, so that no other stream's keys do.
    #[must_use]
    pub fn stream_prefix(&self, stream_id: &str) -> String {
        format!("{}{stream_id}/", self.prefix)
    }

    /// Key of a fragment.
    #[must_use]
    pub fn fragment(&self, stream_id: &str, first_offset: u64, uid: u32) -> String {
        self.object(stream_id, Object::Fragment { first_offset, uid })
    }

    /// Key of a root.
    #[must_use]
    pub fn root(&self, stream_id: &str, epoch: u64, uid: u32) -> String {
        self.object(stream_id, Object::Root { epoch, uid })
    }

    /// Key of a group; of a fragment if that is the kind.
    #[must_use]
    pub fn group(&self, stream_id: &str, kind: Kind, first_offset: u64, uid: u32) -> String {
        self.object(
            stream_id,
            Object::Group {
                kind,
                first_offset,
                uid,
            },
        )
    }

    /// Key of any object.
    #[must_use]
    pub fn object(&self, stream_id: &str, object: Object) -> String {
        let prefix = &self.prefix;
        match object {
            Object::Fragment { first_offset, uid }
            | Object::Group {
                kind: Kind::Fragment,
                first_offset,
                uid,
            } => {
                format!("{prefix}{stream_id}/data/{first_offset:020}.{uid:08x}.fragment")
            }
            Object::Group {
                kind,
                first_offset,
                uid,
            } => {
                let suffix = match kind {
                    Kind::MegaGroup => "mgroup",
                    Kind::KiloGroup => "kgroup",
                    Kind::Group | Kind::Fragment => "group",
                };
                format!("{prefix}{stream_id}/metadata/{first_offset:020}.{uid:08x}.{suffix}")
            }
            Object::Root { epoch, uid } => {
                format!("{prefix}{stream_id}/metadata/root.{epoch}.{uid:08x}.manifest")
            }
        }
    }

    /// Takes a key apart; `None` for anything that this module does not write, so that nobody deletes it.
    #[must_use]
    pub fn parse(&self, key: &str) -> Option<ParsedKey> {
        let (stream_id, rest) = key.strip_prefix(&self.prefix)?.split_once('/')?;
        let (folder, name) = rest.split_once('/')?;
        if stream_id.is_empty() {
            return None;
        }
        let mut parts = name.split('.');
        let object = match (
            folder,
            parts.next()?,
            parts.next()?,
            parts.next()?,
            parts.next(),
        ) {
            ("data", offset, uid, "fragment", None) => Object::Fragment {
                first_offset: parse_offset20(offset)?,
                uid: parse_uid(uid)?,
            },
            ("metadata", "root", epoch, uid, Some("manifest")) if parts.next().is_none() => {
                Object::Root {
                    epoch: parse_epoch(epoch)?,
                    uid: parse_uid(uid)?,
                }
            }
            ("metadata", offset, uid, suffix, None) => {
                let kind = match suffix {
                    "group" => Kind::Group,
                    "kgroup" => Kind::KiloGroup,
                    "mgroup" => Kind::MegaGroup,
                    _ => return None,
                };
                Object::Group {
                    kind,
                    first_offset: parse_offset20(offset)?,
                    uid: parse_uid(uid)?,
                }
            }
            _ => return None,
        };
        Some(ParsedKey {
            stream_id: stream_id.to_owned(),
            object,
        })
    }
}

impl Default for KeySpace {
    fn default() -> Self {
        Self::new(DEFAULT_PREFIX)
    }
}

fn parse_uid(text: &str) -> Option<u32> {
    let digits = text.len() == 8
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if digits {
        u32::from_str_radix(text, 16).ok()
    } else {
        None
    }
}

fn parse_epoch(text: &str) -> Option<u64> {
    let digits =
        text == "0" || !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = "__my-stream_1745252105682952932";

    #[test]
    fn known_keys() {
        let keys = KeySpace::default();
        assert_eq!(
            keys.fragment(STREAM, 42, 0xab),
            "rabbitmq/stream/__my-stream_1745252105682952932/data/00000000000000000042.000000ab.fragment"
        );
        assert_eq!(
            keys.root("s", 7, 0xffff_ffff),
            "rabbitmq/stream/s/metadata/root.7.ffffffff.manifest"
        );
        assert_eq!(
            keys.group("s", Kind::KiloGroup, 1, 2),
            "rabbitmq/stream/s/metadata/00000000000000000001.00000002.kgroup"
        );
        assert_eq!(keys.stream_prefix("s"), "rabbitmq/stream/s/");
        assert_eq!(KeySpace::new("/a/b/").prefix(), "a/b/");
        assert_eq!(KeySpace::new("/").stream_prefix("s"), "s/");
    }

    #[test]
    fn foreign_keys_are_not_ours() {
        let keys = KeySpace::new("p");
        for key in [
            "p",
            "p/s",
            "p//data/00000000000000000042.000000ab.fragment",
            "q/s/data/00000000000000000042.000000ab.fragment",
            "p/s/data/42.000000ab.fragment",
            "p/s/data/00000000000000000042.000000AB.fragment",
            "p/s/data/00000000000000000042.000000ab.fragment.bak",
            "p/s/data/x/00000000000000000042.000000ab.fragment",
            "p/s/metadata/root.07.000000ab.manifest",
            "p/s/metadata/root.+7.000000ab.manifest",
            "p/s/metadata/root..000000ab.manifest",
            "p/s/metadata/root.7.000000ab.manifest.x",
            "p/s/metadata/00000000000000000042.000000ab.fragment",
        ] {
            assert_eq!(keys.parse(key), None, "{key}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(stream_id in "[A-Za-z0-9_=-]{1,40}", height in 0u8..5, number: u64, uid: u32, prefix in "(/?[a-z]{0,5}){0,3}") {
            let object = match height {
                0 => Object::Fragment { first_offset: number, uid },
                4 => Object::Root { epoch: number, uid },
                _ => Object::Group { kind: Kind::from_byte(height).unwrap(), first_offset: number, uid },
            };
            let keys = KeySpace::new(&prefix);
            let key = keys.object(&stream_id, object);
            prop_assert!(key.starts_with(&keys.stream_prefix(&stream_id)));
            prop_assert_eq!(keys.parse(&key), Some(ParsedKey { stream_id, object }));
        }

        #[test]
        fn any_key_parses_to_itself_or_not_at_all(key in "p/(s/)?(data|metadata)/[0-9a-f.rootmanifestkg]{0,40}") {
            let keys = KeySpace::new("p");
            if let Some(parsed) = keys.parse(&key) {
                prop_assert_eq!(keys.object(&parsed.stream_id, parsed.object), key);
            }
        }
    }
}
