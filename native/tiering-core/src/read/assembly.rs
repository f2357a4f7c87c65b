//! Cuts in-order bytes into chunks.
//!
//! Owns the bytes between the last chunk cut and the end of what has come without a gap, and every check of a chunk
//! against its fragment. Does not own where the bytes come from, nor what happens when they are wrong.

use std::collections::VecDeque;

use bytes::Bytes;
use log_format::chunk::{ChunkHeader, HEADER_BYTES};
use log_format::crc::crc32_of;
use log_format::fragment;

use super::effect::{Chunk, FragmentRef};
use super::parts::Parts;
/// Position of the first chunk in a fragment object.
pub(super) const DATA_START: u64 = fragment::HEADER_BYTES as u64;

/// What can be cut now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// A chunk that passed every check.
    Chunk(Chunk),
    /// The bytes so far end inside the next chunk.
    NeedBytes,
    /// Every chunk of the fragment was cut.
    FragmentEnd,
    /// Every chunk that the manifest names was cut, and the object goes on: the manifest was cut back to where the local log
    /// starts, in the middle of what had been uploaded.
    Overhang,
    /// The header contradicts itself, the manifest or the chunk before.
    Corrupt(String),
    /// The data does not match the CRC in the header.
    CrcMismatch(String),
}

/// The cutter's place in one fragment.
#[derive(Debug)]
pub(super) struct Assembly {
    blocks: VecDeque<Bytes>,
    buffered_bytes: u64,
    fragment: FragmentRef,
    position: u64,
    expected_offset: u64,
    head: Option<ChunkHeader>,
    verify_crc: bool,
}

impl Assembly {
    /// At byte `position` of the fragment object, where the chunk `expected_offset` starts.
    pub(super) fn new(
        fragment: FragmentRef,
        position: u64,
        expected_offset: u64,
        verify_crc: bool,
    ) -> Self {
        Self {
            blocks: VecDeque::new(),
            buffered_bytes: 0,
            fragment,
            position,
            expected_offset,
            head: None,
            verify_crc,
        }
    }

    /// Id of the next chunk to cut.
    pub(super) const fn expected_offset(&self) -> u64 {
        self.expected_offset
    }

    /// First offset of the fragment that is being cut.
    pub(super) const fn first_offset(&self) -> u64 {
        self.fragment.first_offset
    }

    /// Where the next chunk starts in the fragment object.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// Bytes held.
    pub(super) const fn buffered_bytes(&self) -> u64 {
        self.buffered_bytes
    }

    /// Length of the next chunk, once its header is here.
    pub(super) fn next_chunk_bytes(&self) -> Option<u64> {
        self.head.as_ref().map(ChunkHeader::total_bytes)
    }

    /// The bytes that follow those held.
    pub(super) fn push(&mut self, block: Bytes) {
        if !block.is_empty() {
            self.buffered_bytes += block.len() as u64;
            self.blocks.push_back(block);
        }
    }

    /// Goes on in the fragment after this one.
    pub(super) fn enter(&mut self, next: FragmentRef) {
        debug_assert_eq!(self.expected_offset, next.first_offset);
        self.fragment = next;
        self.position = DATA_START;
    }

    /// Forgets the bytes held; the next ones start at `position()` again.
    pub(super) fn rewind(&mut self) {
        self.blocks = VecDeque::new();
        self.buffered_bytes = 0;
        self.head = None;
    }

    /// Goes back to an earlier fragment, where the chunk `expected_offset` starts at `position`.
    pub(super) fn go_back(&mut self, fragment: FragmentRef, position: u64, expected_offset: u64) {
        self.fragment = fragment;
        self.go_back_to(position, expected_offset);
    }

    /// Goes back to `position` in this fragment, where the chunk `expected_offset` starts.
    pub(super) fn go_back_to(&mut self, position: u64, expected_offset: u64) {
        (self.position, self.expected_offset) = (position, expected_offset);
        self.rewind();
    }

    /// Cuts the next chunk.
    pub(super) fn cut(&mut self) -> Cut {
        let data_end = DATA_START.saturating_add(self.fragment.data_bytes);
        if self.position == data_end && self.head.is_none() {
            return if self.expected_offset == self.fragment.next_offset {
                Cut::FragmentEnd
            } else {
                Cut::Corrupt(format!(
                    "fragment {} ends at offset {} instead of {}",
                    self.fragment.first_offset, self.expected_offset, self.fragment.next_offset
                ))
            };
        }
        if self.expected_offset == self.fragment.next_offset && self.head.is_none() {
            return Cut::Overhang;
        }
        let header = match self.head {
            Some(header) => header,
            None => match self.read_header(data_end) {
                Ok(Some(header)) => *self.head.insert(header),
                Ok(None) => return Cut::NeedBytes,
                Err(text) => return Cut::Corrupt(text),
            },
        };
        let total_bytes = header.total_bytes();
        if self.buffered_bytes < total_bytes {
            return Cut::NeedBytes;
        }
        let Some(bytes) = usize::try_from(total_bytes)
            .ok()
            .and_then(|total| self.take(total))
        else {
            return Cut::Corrupt(format!("chunk {} is too large", header.chunk_id));
        };
        if self.verify_crc && !crc_matches(&header, &bytes) {
            return Cut::CrcMismatch(format!(
                "chunk {} of fragment {}: data does not match its CRC",
                header.chunk_id, self.fragment.first_offset
            ));
        }
        let chunk = Chunk {
            header,
            position: self.position,
            bytes,
        };
        self.head = None;
        self.position += total_bytes;
        // read_header checked that the sum exists and is in the fragment.
        self.expected_offset = header.next_offset().unwrap_or(self.fragment.next_offset);
        Cut::Chunk(chunk)
    }

    /// The next header if all of it is here, checked for everything but its data.
    fn read_header(&self, data_end: u64) -> Result<Option<ChunkHeader>, String> {
        let place = || {
            format!(
                "fragment {} at byte {}",
                self.fragment.first_offset, self.position
            )
        };
        let left_bytes = data_end.saturating_sub(self.position);
        if left_bytes < HEADER_BYTES as u64 {
            return Err(format!(
                "{}: {left_bytes} bytes are left, less than a chunk",
                place()
            ));
        }
        let mut raw = [0; HEADER_BYTES];
        if !self.peek(&mut raw) {
            return Ok(None);
        }
        let header = ChunkHeader::decode(&raw).map_err(|error| format!("{}: {error}", place()))?;
        if header.chunk_id != self.expected_offset {
            return Err(format!(
                "{}: chunk {} instead of {}",
                place(),
                header.chunk_id,
                self.expected_offset
            ));
        }
        match header.next_offset() {
            Some(next) if next > header.chunk_id && next <= self.fragment.next_offset => {}
            _ => {
                return Err(format!(
                    "{}: chunk {} has {} records",
                    place(),
                    header.chunk_id,
                    header.num_records
                ));
            }
        }
        // Checked before anything is kept for it: a damaged size must not make the reader gather bytes for nothing.
        if header.total_bytes() > left_bytes {
            return Err(format!(
                "{}: chunk {} reaches past the end of its fragment",
                place(),
                header.chunk_id
            ));
        }
        Ok(Some(header))
    }

    fn peek(&self, target: &mut [u8]) -> bool {
        if self.buffered_bytes < target.len() as u64 {
            return false;
        }
        let bytes = self.blocks.iter().flat_map(|block| block.iter());
        target
            .iter_mut()
            .zip(bytes)
            .for_each(|(to, from)| *to = *from);
        true
    }

    /// The next `total` bytes, as they came.
    fn take(&mut self, total: usize) -> Option<Parts> {
        self.buffered_bytes = self.buffered_bytes.checked_sub(total as u64)?;
        let mut parts = Parts::default();
        let mut left = total;
        while left > 0 {
            let front = self.blocks.front_mut()?;
            if front.len() > left {
                parts.push(front.split_to(left));
                return Some(parts);
            }
            left -= front.len();
            parts.push(self.blocks.pop_front()?);
        }
        Some(parts)
    }
}

fn crc_matches(header: &ChunkHeader, bytes: &Parts) -> bool {
    let start = HEADER_BYTES + usize::from(header.filter_bytes);
    let end = usize::try_from(header.data_bytes)
        .ok()
        .and_then(|length| start.checked_add(length));
    end.and_then(|end| bytes.slice(start..end))
        .is_some_and(|data| crc32_of(data.iter().map(|part| &part[..])) == header.data_crc)
}

#[cfg(test)]
mod tests {
    use log_format::chunk::ChunkType;
    use log_format::crc::crc32;

    use super::*;

    fn chunk(chunk_id: u64, num_records: u32, data: &[u8]) -> Vec<u8> {
        let header = ChunkHeader {
            chunk_type: ChunkType::User,
            num_entries: 1,
            num_records,
            timestamp_ms: 5,
            epoch: 1,
            chunk_id,
            data_crc: crc32(data),
            data_bytes: u32::try_from(data.len()).expect("short"),
            trailer_bytes: 2,
            filter_bytes: 3,
        };
        [&header.encode()[..], b"fff", data, b"tt"].concat()
    }

    fn fragment(next_offset: u64, bytes: &[u8]) -> FragmentRef {
        FragmentRef {
            first_offset: 0,
            next_offset,
            first_timestamp_ms: 0,
            data_bytes: bytes.len() as u64,
            uid: 1,
        }
    }

    fn cut_one(next_offset: u64, bytes: &[u8]) -> Cut {
        let mut assembly = Assembly::new(fragment(next_offset, bytes), DATA_START, 0, true);
        assembly.push(Bytes::copy_from_slice(bytes));
        assembly.cut()
    }

    #[test]
    fn chunks_come_out_whole_however_the_bytes_were_split() {
        let bytes = [
            chunk(0, 2, b"hello"),
            chunk(2, 1, b""),
            chunk(3, 7, &[9; 100]),
        ]
        .concat();
        for block in 1..bytes.len() {
            let mut assembly = Assembly::new(fragment(10, &bytes), DATA_START, 0, true);
            let mut blocks = bytes.chunks(block);
            let mut cut = Vec::new();
            loop {
                match assembly.cut() {
                    Cut::Chunk(chunk) => cut.extend_from_slice(&chunk.bytes.to_bytes()),
                    Cut::NeedBytes => {
                        assembly.push(Bytes::copy_from_slice(blocks.next().expect("more bytes")))
                    }
                    Cut::FragmentEnd => break,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(cut, bytes, "blocks of {block}");
            assert_eq!(assembly.buffered_bytes(), 0);
        }
    }

    #[test]
    fn nothing_is_copied() {
        let bytes = Bytes::from([chunk(0, 1, b"abc"), chunk(1, 1, b"def")].concat());
        let end_of_first = bytes.len() / 2;
        for split in [bytes.len(), end_of_first, end_of_first - 5, 10] {
            let mut assembly = Assembly::new(fragment(2, &bytes), DATA_START, 0, true);
            assembly.push(bytes.slice(..split));
            assembly.push(bytes.slice(split..));
            let Cut::Chunk(first) = assembly.cut() else {
                panic!("no chunk")
            };
            let Cut::Chunk(second) = assembly.cut() else {
                panic!("no chunk")
            };
            let mut at = bytes.as_ptr();
            for part in first.bytes.iter().chain(second.bytes.iter()) {
                assert_eq!(part.as_ptr(), at, "split at {split}");
                at = at.wrapping_add(part.len());
            }
        }
    }

    #[test]
    fn a_flipped_bit_in_the_data_is_a_crc_mismatch() {
        let mut bytes = chunk(0, 1, b"abc");
        bytes[52] ^= 1;
        assert!(matches!(cut_one(1, &bytes), Cut::CrcMismatch(_)));
    }

    #[test]
    fn an_unexpected_chunk_id_is_corrupt() {
        assert!(matches!(cut_one(2, &chunk(1, 1, b"abc")), Cut::Corrupt(_)));
    }

    #[test]
    fn a_size_past_the_fragment_is_corrupt_before_any_byte_is_waited_for() {
        let mut bytes = chunk(0, 1, b"abc");
        bytes[36] = 0xff;
        assert!(matches!(cut_one(1, &bytes), Cut::Corrupt(_)));
    }

    #[test]
    fn no_records_and_more_records_than_the_fragment_has_are_corrupt() {
        assert!(matches!(cut_one(1, &chunk(0, 0, b"abc")), Cut::Corrupt(_)));
        assert!(matches!(cut_one(1, &chunk(0, 2, b"abc")), Cut::Corrupt(_)));
    }

    #[test]
    fn a_fragment_that_ends_at_another_offset_or_inside_a_chunk_is_corrupt() {
        let bytes = chunk(0, 1, b"abc");
        let mut assembly = Assembly::new(fragment(5, &bytes), DATA_START, 0, true);
        assembly.push(Bytes::from(bytes.clone()));
        assert!(matches!(assembly.cut(), Cut::Chunk(_)));
        assert!(matches!(assembly.cut(), Cut::Corrupt(_)));

        let mut odd = fragment(5, &bytes);
        odd.data_bytes += 10;
        let mut assembly = Assembly::new(odd, DATA_START, 0, true);
        assembly.push(Bytes::from(bytes));
        assert!(matches!(assembly.cut(), Cut::Chunk(_)));
        assert!(matches!(assembly.cut(), Cut::Corrupt(_)));
    }
}
