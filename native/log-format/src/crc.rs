//! CRC-32 (zlib polynomial): of bytes, and of the concatenation of parts whose CRCs are known.
//!
//! Combining is what lets a fragment's checksum be known before one byte of it is read: the header scan adds up the CRCs
//! that the publisher's node wrote. It runs once or twice per chunk, so it is table-driven: the length is taken apart into
//! base-256 digits, and each digit that is not zero costs one multiplication in GF(2)\[x\] modulo the polynomial.
//!
//! Bit 31 of a `u32` is the coefficient of x^0, as everywhere with this CRC.

/// CRC-32 of `bytes`.
#[must_use]
pub fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// CRC-32 of these parts, one after the other.
#[must_use]
pub fn crc32_of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    parts.into_iter().for_each(|part| crc.update(part));
    crc.finalize()
}

/// CRC-32 of `A ++ B`, given the CRCs of `A` and `B` and the length of `B`.
#[must_use]
pub fn combine(a: u32, b: u32, b_len: u64) -> u32 {
    shift(a, b_len) ^ b
}

/// As S3 wants it in `x-amz-checksum-crc32`: base64 of the four bytes, big-endian.
#[must_use]
pub fn to_base64(crc: u32) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    // 32 bits are five whole sextets and two bits; base64 pads the last group of one byte with four zero bits and "==".
    let bits = u64::from(crc) << 4;
    let mut text = String::with_capacity(8);
    for sextet in (0..6).rev() {
        text.push(char::from(ALPHABET[((bits >> (6 * sextet)) & 63) as usize]));
    }
    text.push_str("==");
    text
}

/// The inverse of [`to_base64`]; `None` for anything that it does not write.
#[must_use]
pub fn from_base64(text: &str) -> Option<u32> {
    let digits = text.strip_suffix("==")?.as_bytes();
    if digits.len() != 6 {
        return None;
    }
    let mut bits = 0u64;
    for digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u64::from(value);
    }
    if bits & 15 == 0 {
        u32::try_from(bits >> 4).ok()
    } else {
        None
    }
}

const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 0x8000_0000;

/// `POWERS[k][d]` = x^(8 * d * 256^k): what `d * 256^k` more bytes multiply a CRC with.
static POWERS: [[u32; 256]; 8] = powers();
/// `REDUCE[i][b]`: byte `i` of the upper half of a product, brought back below x^32.
static REDUCE: [[u32; 256]; 4] = reductions();

/// The CRC after `zeros` more zero bytes, without the pre- and post-conditioning (which cancels out in [`combine`]).
fn shift(crc: u32, zeros: u64) -> u32 {
    let mut crc = crc;
    let mut rest = zeros;
    for power in &POWERS {
        if rest == 0 {
            break;
        }
        let digit = (rest & 255) as usize;
        if digit != 0 {
            crc = multiply(crc, power[digit]);
        }
        rest >>= 8;
    }
    crc
}

/// Product modulo the polynomial: a carry-less 32 x 32 multiplication by nibbles, then one table step per byte of the upper half.
fn multiply(a: u32, b: u32) -> u32 {
    let b1 = u64::from(b);
    let (b2, b4, b8) = (b1 << 1, b1 << 2, b1 << 3);
    let (b3, b5, b6) = (b1 ^ b2, b1 ^ b4, b2 ^ b4);
    let b7 = b3 ^ b4;
    let times = [
        0,
        b1,
        b2,
        b3,
        b4,
        b5,
        b6,
        b7,
        b8,
        b8 ^ b1,
        b8 ^ b2,
        b8 ^ b3,
        b8 ^ b4,
        b8 ^ b5,
        b8 ^ b6,
        b8 ^ b7,
    ];
    let mut product = 0u64;
    for nibble in 0..8 {
        product ^= times[(a >> (4 * nibble) & 15) as usize] << (4 * nibble);
    }
    // Bit 62 is x^0 now; move it to bit 63, so that the upper word is below x^32 and the lower word is what to reduce.
    product <<= 1;
    let high = product as u32;
    (product >> 32) as u32
        ^ REDUCE[0][(high & 255) as usize]
        ^ REDUCE[1][(high >> 8 & 255) as usize]
        ^ REDUCE[2][(high >> 16 & 255) as usize]
        ^ REDUCE[3][(high >> 24) as usize]
}

const fn times_x(a: u32) -> u32 {
    if a & 1 == 1 {
        a >> 1 ^ POLYNOMIAL
    } else {
        a >> 1
    }
}

const fn slow_multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut b, mut bit) = (0, b, 32);
    while bit > 0 {
        bit -= 1;
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = times_x(b);
    }
    product
}

const fn powers() -> [[u32; 256]; 8] {
    let mut table = [[0; 256]; 8];
    let mut step = ONE >> 8; // x^8: one byte
    let mut k = 0;
    while k < 8 {
        table[k][0] = ONE;
        let mut digit = 1;
        while digit < 256 {
            table[k][digit] = slow_multiply(table[k][digit - 1], step);
            digit += 1;
        }
        step = slow_multiply(table[k][255], step);
        k += 1;
    }
    table
}

const fn reductions() -> [[u32; 256]; 4] {
    let mut table = [[0; 256]; 4];
    let mut byte = 0;
    while byte < 4 {
        let mut value = 0;
        while value < 256 {
            // The word stands for itself times x^32.
            let mut word = (value as u32) << (8 * byte);
            let mut bit = 0;
            while bit < 32 {
                word = times_x(word);
                bit += 1;
            }
            table[byte][value] = word;
            value += 1;
        }
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn check_value() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(to_base64(crc32(b"123456789")), "y/Q5Jg==");
        assert_eq!(from_base64("y/Q5Jg=="), Some(0xcbf4_3926));
        assert_eq!(from_base64("y/Q5Jh=="), None);
    }

    #[test]
    fn the_tables_are_what_their_names_say() {
        // Made by the compiler in production; made here once more, and looked at one by one.
        let (powers, reductions) = (powers(), reductions());
        assert_eq!((powers, reductions), (POWERS, REDUCE));
        for (k, row) in powers.iter().enumerate() {
            assert_eq!(row[0], ONE);
            let next = powers.get(k + 1).map(|next| next[1]);
            assert!(next.is_none_or(|next| next == multiply(row[255], row[1])));
            for (digit, power) in row.iter().enumerate().skip(1) {
                assert_eq!(*power, slow_multiply(row[digit - 1], row[1]));
            }
        }
        let x_8 = ONE >> 8;
        for byte in 0..=255u32 {
            let carried = (0..32).fold(byte, |word, _| times_x(word));
            assert_eq!(reductions[0][byte as usize], carried);
            assert_eq!(multiply(byte, x_8), slow_multiply(byte, x_8));
        }
    }

    #[test]
    fn text_that_is_no_checksum_is_none() {
        for text in ["", "==", "AAAAAA", "AAAAA==", "AAAAAAA==", "A AAAA==", "é"] {
            assert_eq!(from_base64(text), None, "{text}");
        }
        assert_eq!(from_base64("+/+/+w=="), Some(0xfbff_bffb));
    }

    #[test]
    fn empty_parts_change_nothing() {
        assert_eq!(combine(0, 7, 0), 7);
        assert_eq!(combine(crc32(b"a"), crc32(b""), 0), crc32(b"a"));
        assert_eq!(combine(crc32(b""), crc32(b"a"), 1), crc32(b"a"));
    }

    proptest! {
        #[test]
        fn combine_is_concatenation(a in prop::collection::vec(any::<u8>(), 0..700), b in prop::collection::vec(any::<u8>(), 0..700)) {
            let whole = [a.clone(), b.clone()].concat();
            prop_assert_eq!(combine(crc32(&a), crc32(&b), b.len() as u64), crc32(&whole));
        }

        #[test]
        fn combine_agrees_with_the_library_for_any_length(a: u32, b: u32, len: u64) {
            let mut hasher = crc32fast::Hasher::new_with_initial_len(a, 1);
            hasher.combine(&crc32fast::Hasher::new_with_initial_len(b, len));
            prop_assert_eq!(combine(a, b, len), hasher.finalize());
        }

        #[test]
        fn base64_round_trip(crc: u32) {
            prop_assert_eq!(from_base64(&to_base64(crc)), Some(crc));
        }
    }
}
