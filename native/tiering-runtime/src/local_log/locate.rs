//! Finds the chunk with a given id: which segment file, and where in it.
//!
//! Owns the use of file names and of osiris' index files, which are hints only: a chunk header has the last word.

use std::fs::File;
use std::io;
use std::path::Path;

use log_format::chunk::{ChunkHeader, HEADER_BYTES};
use log_format::index::{self, IndexRecord};
use log_format::segment;
use tiering_core::upload::{ScanEnd, Witness};

use super::read_at_most;

/// An open segment file and a place in it.
#[derive(Debug)]
pub(super) struct Cursor {
    pub(super) file: File,
    /// Name of the file.
    pub(super) segment_offset: u64,
    /// Of the next chunk.
    pub(super) position: u64,
    /// Id of the next chunk.
    pub(super) next_offset: u64,
    /// Of the file, as last seen.
    pub(super) len_bytes: u64,
}

/// Where looking for the chunk with a given id ended.
enum Sought {
    /// There; with the header of the chunk in front of it, if that is in the same file.
    There { front: Option<ChunkHeader> },
    /// The file ends below it.
    Below,
    /// It is inside a chunk.
    Inside,
    /// What is in front of it is not a log.
    Damaged(String),
}

/// Where a scan can start, or why it cannot.
pub(super) enum Opened {
    At(Cursor),
    End(ScanEnd),
}

impl Cursor {
    /// The segment file with this name, at its first chunk; `None` if there is no such file.
    pub(super) fn open(directory: &Path, segment_offset: u64) -> Result<Option<Self>, String> {
        let name = segment::file_name(segment_offset);
        let explain = |error: io::Error| format!("{name}: {error}");
        let file = match File::open(directory.join(&name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(explain(error)),
        };
        let len_bytes = file.metadata().map_err(explain)?.len();
        let mut header = [0; segment::HEADER_BYTES];
        let read = read_at_most(&file, &mut header, 0).map_err(explain)?;
        // A file that was created this moment has no header yet, and no chunk either.
        if read == header.len() && header != segment::SEGMENT_HEADER {
            return Err(format!("{name}: not a segment file of a known version"));
        }
        let position = segment::HEADER_BYTES as u64;
        Ok(Some(Self {
            file,
            segment_offset,
            position,
            next_offset: segment_offset,
            len_bytes,
        }))
    }

    /// Whether the file ends here; looks again at its length if it seems so.
    pub(super) fn is_at_end(&mut self) -> Result<bool, String> {
        Ok(!self.reaches(self.position + 1)?)
    }

    /// Whether the file is at least this long; looks again if it seems not to be.
    pub(super) fn reaches(&mut self, end: u64) -> Result<bool, String> {
        if self.len_bytes < end {
            let metadata = self
                .file
                .metadata()
                .map_err(|error| self.explain(&error.to_string()))?;
            self.len_bytes = metadata.len();
        }
        Ok(self.len_bytes >= end)
    }

    pub(super) fn explain(&self, text: &str) -> String {
        format!(
            "{} at {}: {text}",
            segment::file_name(self.segment_offset),
            self.position
        )
    }

    /// Moves to the chunk with id `offset`, over the one in front of it; or to the end of the file if that is below it.
    fn seek(&mut self, directory: &Path, offset: u64) -> Result<Sought, String> {
        let before = offset.checked_sub(1);
        if let Some(record) =
            before.and_then(|before| index_record(directory, self.segment_offset, before))
        {
            let there = self.header_at(u64::from(record.position));
            if let Ok(Some(Ok(header))) = there
                && header.chunk_id == record.chunk_id
            {
                self.position = u64::from(record.position);
                self.next_offset = record.chunk_id;
            }
        }
        let mut front = None;
        while self.next_offset < offset {
            let header = match self.header_at(self.position)? {
                Some(Ok(header)) => header,
                Some(Err(text)) => return Ok(Sought::Damaged(text)),
                None => return Ok(Sought::Below),
            };
            let next_offset = header.next_offset().filter(|next| *next > header.chunk_id);
            let (Some(next_offset), true) = (next_offset, header.chunk_id == self.next_offset)
            else {
                let text = format!(
                    "chunk {} where {} should be",
                    header.chunk_id, self.next_offset
                );
                return Ok(Sought::Damaged(self.explain(&text)));
            };
            if next_offset > offset {
                return Ok(Sought::Inside);
            }
            self.position += header.total_bytes();
            self.next_offset = next_offset;
            front = Some(header);
        }
        Ok(Sought::There { front })
    }

    /// The header at this position, or why what is there is none; `None` if the file ends before or in it.
    fn header_at(&self, position: u64) -> Result<Option<Result<ChunkHeader, String>>, String> {
        let mut bytes = [0; HEADER_BYTES];
        let read = read_at_most(&self.file, &mut bytes, position)
            .map_err(|error| self.explain(&error.to_string()))?;
        if read < HEADER_BYTES {
            return Ok(None);
        }
        let decoded = ChunkHeader::decode(&bytes);
        Ok(Some(
            decoded.map_err(|error| self.explain(&error.to_string())),
        ))
    }
}

/// The chunk of this segment that ends where the next segment starts; `None` if there is none that does. Retention may have
/// removed the file since. Or it is damaged at its end: a log that lost its end is cut off at the damage before it grows again,
/// so that is not what has happened here, and there is nothing else to be learned from it.
fn last_chunk_before(
    directory: &Path,
    segment_offset: u64,
    offset: u64,
) -> Result<Option<ChunkHeader>, String> {
    let Some(mut cursor) = Cursor::open(directory, segment_offset)? else {
        return Ok(None);
    };
    match cursor.seek(directory, offset)? {
        Sought::There { front } => Ok(front),
        Sought::Below | Sought::Inside | Sought::Damaged(_) => Ok(None),
    }
}

/// The last index record at or below `offset`; `None` if the index is of no help.
fn index_record(directory: &Path, segment_offset: u64, offset: u64) -> Option<IndexRecord> {
    let name = segment::file_name(segment_offset);
    let file = File::open(directory.join(name).with_extension("index")).ok()?;
    let record_count = file
        .metadata()
        .ok()?
        .len()
        .checked_sub(index::HEADER_BYTES as u64)?
        / index::RECORD_BYTES as u64;
    let record_at = |number: u64| {
        let mut bytes = [0; index::RECORD_BYTES];
        let position = index::HEADER_BYTES as u64 + number * index::RECORD_BYTES as u64;
        let read = read_at_most(&file, &mut bytes, position).ok()?;
        (read == bytes.len())
            .then(|| IndexRecord::decode(&bytes).ok())
            .flatten()
    };
    // Invariant: records below `low` are at or below the offset, those from `high` on are above it.
    let (mut low, mut high) = (0, record_count);
    while low < high {
        let middle = low + (high - low) / 2;
        if record_at(middle)?.chunk_id <= offset {
            low = middle + 1
        } else {
            high = middle
        }
    }
    record_at(low.checked_sub(1)?)
}

/// First offsets of all segment files, ascending. A directory that is not there has none.
fn segments(directory: &Path) -> Result<Vec<u64>, String> {
    let explain = |error: io::Error| format!("{}: {error}", directory.display());
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(explain(error)),
    };
    let mut offsets = Vec::new();
    for entry in entries {
        let name = entry.map_err(explain)?.file_name();
        offsets.extend(name.to_str().and_then(segment::parse_file_name));
    }
    offsets.sort_unstable();
    Ok(offsets)
}

/// Times that retention may remove the very file that was just listed.
const RACES_MAX: u32 = 3;

/// Finds the chunk with id `offset`. If the one in front of it is to have a certain timestamp, and is there and has another,
/// the log is not the one that was meant; the witness says then whether it ever was.
pub(super) fn open_at(
    directory: &Path,
    offset: u64,
    front_timestamp_ms: Option<i64>,
    witness: Option<Witness>,
) -> Result<Opened, String> {
    let opened = find(directory, offset, front_timestamp_ms)?;
    let (Opened::End(end), Some(witness)) = (&opened, witness) else {
        return Ok(opened);
    };
    let (ScanEnd::RemoteAhead {
        local_first_offset, ..
    }
    | ScanEnd::Diverged { local_first_offset }) = *end
    else {
        return Ok(opened);
    };
    if local_first_offset <= witness.chunk_id
        && !is_related(directory, local_first_offset, witness)?
    {
        return Ok(Opened::End(ScanEnd::Unrelated { local_first_offset }));
    }
    Ok(opened)
}

/// Whether the log was that of the remote tier once, as its first chunk shows.
fn is_related(directory: &Path, first_offset: u64, witness: Witness) -> Result<bool, String> {
    let cursor = Cursor::open(directory, first_offset)?
        .ok_or_else(|| "a segment vanished while it was looked at".to_owned())?;
    let first = cursor.header_at(cursor.position)?.transpose()?;
    Ok(first.is_some_and(|first| witness.is_related_to(&first)))
}

fn find(directory: &Path, offset: u64, front_timestamp_ms: Option<i64>) -> Result<Opened, String> {
    for _ in 0..RACES_MAX {
        let segments = segments(directory)?;
        let Some(&local_first_offset) = segments.first() else {
            return Ok(Opened::End(ScanEnd::Empty));
        };
        let below = segments.partition_point(|&first_offset| first_offset <= offset);
        let Some(&segment_offset) = below.checked_sub(1).and_then(|last| segments.get(last)) else {
            return Ok(Opened::End(ScanEnd::LocalAhead { local_first_offset }));
        };
        let Some(mut cursor) = Cursor::open(directory, segment_offset)? else {
            continue;
        };
        if segments.len() == 1 && cursor.is_at_end()? {
            return Ok(Opened::End(ScanEnd::Empty));
        }
        let front = match cursor.seek(directory, offset)? {
            Sought::There { front } => front,
            Sought::Inside => return Ok(Opened::End(ScanEnd::Diverged { local_first_offset })),
            Sought::Damaged(text) => return Err(text),
            Sought::Below if below < segments.len() => {
                return Err(cursor.explain("the next segment is missing"));
            }
            Sought::Below => {
                return Ok(Opened::End(ScanEnd::RemoteAhead {
                    local_first_offset,
                    local_next_offset: cursor.next_offset,
                }));
            }
        };
        if let Some(expected_ms) = front_timestamp_ms {
            let previous = below.checked_sub(2).and_then(|at| segments.get(at));
            let front = match (front, previous) {
                (None, Some(&previous)) => last_chunk_before(directory, previous, offset)?,
                (front, _) => front,
            };
            if front.is_some_and(|front| front.timestamp_ms != expected_ms) {
                return Ok(Opened::End(ScanEnd::Diverged { local_first_offset }));
            }
        }
        return Ok(Opened::At(cursor));
    }
    Err(format!(
        "{}: segments vanish faster than they can be opened",
        directory.display()
    ))
}
