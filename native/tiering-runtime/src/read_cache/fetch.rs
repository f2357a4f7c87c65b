//! What the tasks do that bring parts: requests to the store, or a file.
//!
//! Owns the cutting of an answer into blocks as it comes, and the deadline of its bytes. Every task waits for memory first, then
//! for its turn, and only then asks: what waits for us holds no connection.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};

use super::flights::{Landing, Life};
use super::store::Held;
use super::{BLOCK_BYTES, Inner, Part, PartKey, Source};
use crate::buffer_pool::PooledBuffer;
use crate::manifests::GROUP_BYTES_MAX;
use crate::read_memory::Memory;
use crate::remote_tier::{RangeSink, StoreError, StoreErrorKind};

/// Longest time without a byte of an answer. What came before stays, and the rest is asked for again. It is about bytes and not
/// about blocks: over a slow line that many share, a block may take as long as it takes.
const SILENCE_DEADLINE: Duration = Duration::from_secs(20);

/// What is reserved for an index or a group before its length is known; most are smaller, and more is waited for as it comes.
const LOOKUP_BYTES: u64 = 64 << 10;

/// Brings blocks that follow each other by one request; from this node's disk one block, which the store is asked for if it is
/// not there after all.
pub(super) async fn bring(
    inner: Arc<Inner>,
    reader: u64,
    keys: Vec<PartKey>,
    source: Source,
    mut landing: Landing,
) {
    let bytes = keys.len() as u64 * BLOCK_BYTES;
    let mut memory = inner.memory.ask(reader, bytes).await;
    if let (Source::Disk, Some(disk), Some(key)) = (source, &inner.disk, keys.first()) {
        if let Some(bytes) = disk.read(key).await {
            inner.stats.read_cache_disk_hits.increment();
            let memory = memory.split(bytes.len() as u64);
            return landing.land(Held::plain(bytes, memory));
        }
        inner.stats.read_cache_misses.increment();
    }
    fetch_blocks(inner, memory, keys, landing).await;
}

/// Brings an index, which is in this range of its object, or a group.
pub(super) async fn lookup(
    inner: Arc<Inner>,
    reader: u64,
    object: Arc<str>,
    range: Option<Range<u64>>,
    mut landing: Landing,
) {
    let memory = inner.memory.ask(reader, LOOKUP_BYTES).await;
    let _turn = inner.requests.acquire().await;
    let life = Arc::clone(landing.life());
    life.departs();
    let fetched = match range {
        Some(range) => fetch_whole(&inner, reader, &object, range, memory, &life).await,
        None => {
            let request = inner.tier.get(&object, GROUP_BYTES_MAX);
            request.await.map(|bytes| (bytes, memory))
        }
    };
    match fetched {
        Ok((bytes, mut memory)) => {
            inner.stats.read_fetched_bytes.add(bytes.len() as u64);
            memory.set(bytes.len() as u64);
            landing.land(Held::plain(bytes, memory));
        }
        Err(error) => landing.fail(&error),
    }
}

/// A range whose length is not known, as a whole. Memory for what goes beyond the first part is waited for while the answer is
/// held back.
async fn fetch_whole(
    inner: &Arc<Inner>,
    reader: u64,
    object: &str,
    range: Range<u64>,
    mut memory: Memory,
    life: &Arc<Life>,
) -> Result<(Bytes, Memory), StoreError> {
    let mut whole = Whole {
        bytes: BytesMut::new(),
        life: Arc::clone(life),
    };
    let mut request = inner.tier.stream_range(object, range, &mut whole);
    let mut granted_bytes = LOOKUP_BYTES;
    loop {
        let before_bytes = life.moved_bytes();
        tokio::select! {
            biased;
            outcome = &mut request => {
                drop(request);
                return outcome.map(|()| (whole.bytes.freeze(), memory));
            }
            () = grown(life, granted_bytes) => {
                let more_bytes = granted_bytes;
                let mut more = inner.memory.ask(reader, more_bytes).await;
                granted_bytes += more_bytes;
                memory.join(&mut more);
            }
            () = tokio::time::sleep(SILENCE_DEADLINE) => {
                if life.moved_bytes() == before_bytes {
                    return Err(silence());
                }
            }
        }
    }
}

/// Completes once more has come than was granted. It is polled whenever the request was.
async fn grown(life: &Life, granted_bytes: u64) {
    std::future::poll_fn(|_| match life.moved_bytes() > granted_bytes {
        true => std::task::Poll::Ready(()),
        false => std::task::Poll::Pending,
    })
    .await;
}

fn silence() -> StoreError {
    let text = format!("no byte for {} s", SILENCE_DEADLINE.as_secs());
    StoreError::new(StoreErrorKind::Timeout, text)
}

/// Keeps all of an answer.
struct Whole {
    bytes: BytesMut,
    life: Arc<Life>,
}

impl RangeSink for Whole {
    fn push(&mut self, bytes: Bytes) {
        self.life.moves(bytes.len() as u64);
        self.bytes.extend_from_slice(&bytes);
    }
}

async fn fetch_blocks(inner: Arc<Inner>, memory: Memory, keys: Vec<PartKey>, landing: Landing) {
    let (Some(first), Some(last)) = (keys.first(), keys.last()) else {
        return;
    };
    let (Part::Block(first_number), Part::Block(last_number)) = (first.part, last.part) else {
        return;
    };
    let object = Arc::clone(&first.object);
    let range = first_number * BLOCK_BYTES..(last_number + 1) * BLOCK_BYTES;
    // Waiting for our own limit is no fault, and no deadline runs.
    let _turn = inner.requests.acquire().await;
    let life = Arc::clone(landing.life());
    life.departs();
    let mut cutter = Cutter {
        inner: Arc::clone(&inner),
        memory,
        keys: keys.into_iter(),
        landing,
        block: None,
        filled_bytes: 0,
    };
    let outcome = {
        let request = inner.tier.stream_range(&object, range, &mut cutter);
        let mut request = std::pin::pin!(request);
        loop {
            let before_bytes = life.moved_bytes();
            tokio::select! {
                biased;
                outcome = &mut request => break outcome,
                () = tokio::time::sleep(SILENCE_DEADLINE) => {
                    if life.moved_bytes() == before_bytes {
                        break Err(silence());
                    }
                }
            }
        }
    };
    match outcome {
        Ok(()) => cutter.end(),
        Err(error) => cutter.landing.fail(&error),
    }
}

/// Cuts an answer into blocks as it comes. Each block has memory of its own, which goes back to the pool when it is pushed
/// out and nobody reads it any more.
struct Cutter {
    inner: Arc<Inner>,
    memory: Memory,
    keys: std::vec::IntoIter<PartKey>,
    landing: Landing,
    block: Option<PooledBuffer>,
    filled_bytes: usize,
}

impl Cutter {
    fn land(&mut self, part: Arc<Held>) {
        if let (Some(disk), Some(key)) = (&self.inner.disk, self.keys.next())
            && self.landing.keeps()
        {
            disk.write(key, part.bytes());
        }
        self.landing.land(part);
    }

    /// The answer is complete: the object ends here, or all blocks are here.
    fn end(mut self) {
        if let Some(block) = self.block.take()
            && self.filled_bytes > 0
        {
            // No more memory than bytes: it is counted by them.
            let bytes = Bytes::copy_from_slice(&block[..self.filled_bytes]);
            let memory = self.memory.split(bytes.len() as u64);
            self.land(Held::plain(bytes, memory));
        }
        let text = "the range is outside of the object";
        self.landing
            .fail(&StoreError::new(StoreErrorKind::InvalidRange, text));
    }
}

impl RangeSink for Cutter {
    fn push(&mut self, mut bytes: Bytes) {
        self.inner.stats.read_fetched_bytes.add(bytes.len() as u64);
        self.landing.life().moves(bytes.len() as u64);
        while !bytes.is_empty() && self.landing.owed() > 0 {
            let mut block = match self.block.take() {
                Some(block) => block,
                None => self.inner.pool.take(),
            };
            let length = bytes.len().min(block.len() - self.filled_bytes);
            let end = self.filled_bytes + length;
            block[self.filled_bytes..end].copy_from_slice(&bytes.split_to(length));
            if end == block.len() {
                self.filled_bytes = 0;
                let memory = self.memory.split(BLOCK_BYTES);
                self.land(Held::pooled(block, memory));
            } else {
                self.filled_bytes = end;
                self.block = Some(block);
            }
        }
    }
}
