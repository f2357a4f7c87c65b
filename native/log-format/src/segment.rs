//! Osiris segment files: their header and their names.
//!
//! ```text
//! 0   4   magic "OSIL"
//! 4   4   version u32 = 1
//! 8   -   chunks, back to back, see [`chunk`](crate::chunk)
//! ```

/// First eight bytes of every segment file.
pub const SEGMENT_HEADER: [u8; 8] = *b"OSIL\0\0\0\x01";
/// Position of the first chunk in a segment file.
pub const HEADER_BYTES: usize = 8;

const SUFFIX: &str = ".segment";

/// Name of the segment whose first chunk has this id.
#[must_use]
pub fn file_name(first_offset: u64) -> String {
    format!("{first_offset:020}{SUFFIX}")
}

/// First chunk id of a segment file, from its name; `None` for any other file.
#[must_use]
pub fn parse_file_name(name: &str) -> Option<u64> {
    parse_offset20(name.strip_suffix(SUFFIX)?)
}

/// Exactly twenty decimal digits that fit a `u64`.
pub(crate) fn parse_offset20(digits: &str) -> Option<u64> {
    if digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names() {
        assert_eq!(file_name(42), "00000000000000000042.segment");
        for bad in [
            "",
            "42.segment",
            "00000000000000000042.index",
            "+0000000000000000042.segment",
            "99999999999999999999.segment",
        ] {
            assert_eq!(parse_file_name(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(offset: u64) {
            prop_assert_eq!(parse_file_name(&file_name(offset)), Some(offset));
        }

        #[test]
        fn any_name_never_panics(name in ".*") {
            if let Some(offset) = parse_file_name(&name) {
                prop_assert_eq!(file_name(offset), name);
            }
        }
    }
}
