//! Segment files as osiris writes them, made once per benchmark.

use std::fs::{File, create_dir_all};
use std::io::{BufWriter, Error, Write};
use std::path::Path;

use log_format::chunk::{ChunkHeader, ChunkType};
use log_format::index::{self, IndexRecord};
use log_format::{crc, segment};

/// What to write.
#[derive(Debug, Clone, Copy)]
pub struct Corpus {
    /// Chunks in all.
    pub chunks: u64,
    /// Data bytes of each.
    pub data_bytes: u32,
    /// Bytes after which a segment is full.
    pub segment_bytes: u64,
}

impl Corpus {
    /// Chunk bytes in all.
    pub fn bytes(&self) -> u64 {
        self.chunks * (u64::from(self.data_bytes) + 48)
    }

    /// Writes segments and indexes; one record in each chunk.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        create_dir_all(directory)?;
        let data: Vec<u8> = (0..self.data_bytes)
            .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        let data_crc = crc::crc32(&data);
        let mut open: Option<(BufWriter<File>, BufWriter<File>, u64)> = None;
        for chunk_id in 0..self.chunks {
            if open
                .as_ref()
                .is_none_or(|(_, _, position)| *position >= self.segment_bytes)
            {
                let mut log =
                    BufWriter::new(File::create(directory.join(segment::file_name(chunk_id)))?);
                let mut records = BufWriter::new(File::create(
                    directory.join(format!("{chunk_id:020}.index")),
                )?);
                log.write_all(&segment::SEGMENT_HEADER)?;
                records.write_all(&index::INDEX_HEADER)?;
                open = Some((log, records, 8));
            }
            let Some((log, records, position)) = open.as_mut() else {
                continue;
            };
            let header = ChunkHeader {
                chunk_type: ChunkType::User,
                num_entries: 1,
                num_records: 1,
                timestamp_ms: 1_700_000_000_000 + chunk_id as i64,
                epoch: 1,
                chunk_id,
                data_crc,
                data_bytes: self.data_bytes,
                trailer_bytes: 0,
                filter_bytes: 0,
            };
            let record = IndexRecord {
                chunk_id,
                timestamp_ms: header.timestamp_ms,
                epoch: 1,
                position: u32::try_from(*position).map_err(Error::other)?,
                chunk_type: ChunkType::User,
            };
            log.write_all(&header.encode())?;
            log.write_all(&data)?;
            records.write_all(&record.encode())?;
            *position += header.total_bytes();
        }
        if let Some((mut log, mut records, _)) = open {
            log.flush()?;
            records.flush()?;
        }
        Ok(())
    }
}
