//! Checksums that a writer claims.
//!
//! Owns the comparison with the bytes that arrived, for every kind S3 knows. Does not own what
//! follows from it.

use http::HeaderMap;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::{S3Result, dto, s3_error};

/// Checksums that the client claims, in headers or in a trailer.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    pub crc32: Option<String>,
    crc32c: Option<String>,
    crc64nvme: Option<String>,
    sha1: Option<String>,
    sha256: Option<String>,
    md5: Option<String>,
}

impl Claims {
    pub(crate) fn of(input: &dto::PutObjectInput) -> Self {
        Self {
            crc32: input.checksum_crc32.clone(),
            crc32c: input.checksum_crc32c.clone(),
            crc64nvme: input.checksum_crc64nvme.clone(),
            sha1: input.checksum_sha1.clone(),
            sha256: input.checksum_sha256.clone(),
            md5: input.content_md5.clone(),
        }
    }

    pub(crate) fn add_trailer(&mut self, trailer: &HeaderMap) {
        let get = |name| {
            trailer
                .get(name)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned)
        };
        for (claim, name) in [
            (&mut self.crc32, "x-amz-checksum-crc32"),
            (&mut self.crc32c, "x-amz-checksum-crc32c"),
            (&mut self.crc64nvme, "x-amz-checksum-crc64nvme"),
            (&mut self.sha1, "x-amz-checksum-sha1"),
            (&mut self.sha256, "x-amz-checksum-sha256"),
        ] {
            if claim.is_none() {
                *claim = get(name);
            }
        }
    }

    pub(crate) fn check(&self, body: &[u8]) -> S3Result<()> {
        let mut hasher = ChecksumHasher {
            crc32: self.crc32.is_some().then(Crc32::new),
            crc32c: self.crc32c.is_some().then(Crc32c::new),
            sha1: self.sha1.is_some().then(Sha1::new),
            sha256: self.sha256.is_some().then(Sha256::new),
            crc64nvme: self.crc64nvme.is_some().then(Crc64Nvme::new),
        };
        hasher.update(body);
        let real = hasher.finalize();
        let right = self.crc32 == real.checksum_crc32
            && self.crc32c == real.checksum_crc32c
            && self.crc64nvme == real.checksum_crc64nvme
            && self.sha1 == real.checksum_sha1
            && self.sha256 == real.checksum_sha256;
        let right = right
            && self.md5.as_ref().is_none_or(|claim| {
                let mut md5 = Md5::new();
                md5.update(body);
                *claim == base64(md5.finalize().as_ref())
            });
        if right {
            Ok(())
        } else {
            Err(s3_error!(
                BadDigest,
                "a checksum that was sent does not fit the bytes"
            ))
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group
            .iter()
            .fold(0u32, |bits, byte| (bits << 8) | u32::from(*byte))
            << (8 * (3 - group.len()));
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) & 63;
            text.push(if digit <= group.len() {
                char::from(DIGITS[index as usize])
            } else {
                '='
            });
        }
    }
    text
}
