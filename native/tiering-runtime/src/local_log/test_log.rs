//! Writes logs as osiris does, for tests.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::index::{INDEX_HEADER, IndexRecord};
use log_format::{crc, segment};

/// What to write.
#[derive(Debug, Clone)]
pub(crate) struct TestChunk {
    pub chunk_type: ChunkType,
    pub num_records: u32,
    pub filter: Vec<u8>,
    pub data: Vec<u8>,
    pub trailer: Vec<u8>,
}

impl TestChunk {
    pub(crate) fn user(num_records: u32, data: Vec<u8>) -> Self {
        Self {
            chunk_type: ChunkType::User,
            num_records,
            filter: Vec::new(),
            data,
            trailer: Vec::new(),
        }
    }
}

/// A chunk as it was written.
#[derive(Debug, Clone)]
pub(crate) struct Written {
    pub header: ChunkHeader,
    pub segment_offset: u64,
    pub position: u64,
    pub bytes: Vec<u8>,
}

/// A log that grows.
pub(crate) struct TestLog {
    pub directory: PathBuf,
    pub next_offset: u64,
    pub chunks: Vec<Written>,
    segment_offset: u64,
    segment: File,
    index: File,
    position: u64,
    /// Added to the timestamps of what is appended, which are the ids otherwise.
    pub later_ms: i64,
}

impl TestLog {
    pub(crate) fn create(directory: &Path, first_offset: u64) -> Self {
        let (segment, index) = Self::files(directory, first_offset);
        Self {
            directory: directory.to_owned(),
            next_offset: first_offset,
            chunks: Vec::new(),
            segment_offset: first_offset,
            segment,
            index,
            position: 8,
            later_ms: 0,
        }
    }

    fn files(directory: &Path, first_offset: u64) -> (File, File) {
        let path = directory.join(segment::file_name(first_offset));
        let open = |path: PathBuf, header: &[u8]| {
            let mut file = OpenOptions::new()
                .create_new(true)
                .append(true)
                .open(path)
                .expect("a new file");
            file.write_all(header).expect("written");
            file
        };
        (
            open(path.clone(), &segment::SEGMENT_HEADER),
            open(path.with_extension("index"), &INDEX_HEADER),
        )
    }

    pub(crate) fn roll(&mut self) {
        let (segment, index) = Self::files(&self.directory, self.next_offset);
        self.segment = segment;
        self.index = index;
        self.segment_offset = self.next_offset;
        self.position = 8;
    }

    /// Cuts the log off before the chunk with this number, as osiris does after a power cut. What is appended from now on is
    /// `later_ms` later.
    pub(crate) fn lose_from(&mut self, number: usize, later_ms: i64) {
        let lost = self.chunks.split_off(number);
        let first = lost.first().expect("something to lose");
        let last_segment = first.segment_offset;
        for chunk in &lost {
            if chunk.segment_offset > last_segment {
                let path = self
                    .directory
                    .join(segment::file_name(chunk.segment_offset));
                drop(std::fs::remove_file(path.with_extension("index")));
                drop(std::fs::remove_file(path));
            }
        }
        let path = self.directory.join(segment::file_name(last_segment));
        let open = |path: PathBuf, len: u64| {
            let file = OpenOptions::new().append(true).open(path).expect("opened");
            file.set_len(len).expect("cut");
            file
        };
        let kept = self
            .chunks
            .iter()
            .filter(|chunk| chunk.segment_offset == last_segment);
        let index_bytes = 8 + 29 * kept.count() as u64;
        self.segment = open(path.clone(), first.position);
        self.index = open(path.with_extension("index"), index_bytes);
        self.segment_offset = last_segment;
        self.position = first.position;
        self.next_offset = first.header.chunk_id;
        self.later_ms = later_ms;
    }

    pub(crate) fn append(&mut self, chunk: &TestChunk) -> u64 {
        let header = ChunkHeader {
            chunk_type: chunk.chunk_type,
            num_entries: u16::try_from(chunk.num_records).unwrap_or(u16::MAX),
            num_records: chunk.num_records,
            timestamp_ms: 1_700_000_000_000
                + i64::try_from(self.next_offset).expect("small")
                + self.later_ms,
            epoch: 1,
            chunk_id: self.next_offset,
            data_crc: crc::crc32(&chunk.data),
            data_bytes: u32::try_from(chunk.data.len()).expect("small"),
            trailer_bytes: u32::try_from(chunk.trailer.len()).expect("small"),
            filter_bytes: u8::try_from(chunk.filter.len()).expect("small"),
        };
        let bytes = [
            header.encode().as_slice(),
            &chunk.filter,
            &chunk.data,
            &chunk.trailer,
        ]
        .concat();
        self.segment.write_all(&bytes).expect("written");
        let record = IndexRecord {
            chunk_id: header.chunk_id,
            timestamp_ms: header.timestamp_ms,
            epoch: header.epoch,
            position: u32::try_from(self.position).expect("small"),
            chunk_type: header.chunk_type,
        };
        self.index.write_all(&record.encode()).expect("written");
        let (segment_offset, position) = (self.segment_offset, self.position);
        self.position += bytes.len() as u64;
        self.next_offset = header.next_offset().expect("small");
        self.chunks.push(Written {
            header,
            segment_offset,
            position,
            bytes,
        });
        header.chunk_id
    }

    /// Appends `count` chunks of one record with `data_bytes` each.
    pub(crate) fn append_many(&mut self, count: usize, data_bytes: usize) {
        for number in 0..count {
            let fill = u8::try_from((self.next_offset as usize + number) % 251).unwrap_or(0);
            self.append(&TestChunk::user(1, vec![fill; data_bytes]));
        }
    }

    pub(crate) fn last_chunk_id(&self) -> u64 {
        self.chunks.last().map_or(0, |chunk| chunk.header.chunk_id)
    }

    /// Removes segments below the one with this name, as retention does.
    pub(crate) fn trim(&self, below: u64) {
        for chunk in &self.chunks {
            if chunk.segment_offset < below {
                let path = self
                    .directory
                    .join(segment::file_name(chunk.segment_offset));
                drop(std::fs::remove_file(path.with_extension("index")));
                drop(std::fs::remove_file(path));
            }
        }
    }
}
