//! What the tasks do that bring parts: requests to the store, or a file.
//!
//! Owns the cutting of an answer into blocks as it comes, and the deadline of each block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;

use super::flights::Landing;
use super::{BLOCK_BYTES, Inner, Part, PartKey, Source};
use crate::buffer_pool::PooledBuffer;
use crate::remote_tier::{RangeSink, StoreError, StoreErrorKind};

/// Longest time between two blocks of an answer. A store that goes silent is noticed by its client before; this is for one
/// that trickles, which holds a reader up just as long. What came before stays, and the rest is asked for again.
const BLOCK_DEADLINE: Duration = Duration::from_secs(20);

/// Brings blocks that follow each other by one request; from this node's disk one block, which the store is asked for if it is
/// not there after all.
pub(super) async fn bring(
    inner: Arc<Inner>,
    keys: Vec<PartKey>,
    source: Source,
    mut landing: Landing,
) {
    if let (Source::Disk, Some(disk), Some(key)) = (source, &inner.disk, keys.first()) {
        if let Some(bytes) = disk.read(key).await {
            inner.stats.read_cache_disk_hits.increment();
            return landing.land(bytes);
        }
        inner.stats.read_cache_misses.increment();
    }
    fetch_blocks(inner, keys, landing).await;
}

/// Brings an index or a group.
pub(super) async fn lookup(
    inner: Arc<Inner>,
    request: impl Future<Output = Result<Bytes, StoreError>> + Send + 'static,
    mut landing: Landing,
) {
    let _turn = inner.requests.acquire().await;
    match request.await {
        Ok(bytes) => {
            inner.stats.read_fetched_bytes.add(bytes.len() as u64);
            landing.land(bytes);
        }
        Err(error) => landing.fail(&error),
    }
}

async fn fetch_blocks(inner: Arc<Inner>, keys: Vec<PartKey>, landing: Landing) {
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
    let mut cutter = Cutter {
        inner: Arc::clone(&inner),
        keys: keys.into_iter(),
        landing,
        block: None,
        filled_bytes: 0,
        landed: Arc::new(AtomicU64::new(0)),
    };
    let landed = Arc::clone(&cutter.landed);
    let outcome = {
        let request = inner.tier.stream_range(&object, range, &mut cutter);
        let mut request = std::pin::pin!(request);
        loop {
            let before = landed.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                outcome = &mut request => break outcome,
                () = tokio::time::sleep(BLOCK_DEADLINE) => {
                    if landed.load(Ordering::Relaxed) == before {
                        let text = format!("no block for {} s", BLOCK_DEADLINE.as_secs());
                        break Err(StoreError::new(StoreErrorKind::Timeout, text));
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
    keys: std::vec::IntoIter<PartKey>,
    landing: Landing,
    block: Option<PooledBuffer>,
    filled_bytes: usize,
    landed: Arc<AtomicU64>,
}

impl Cutter {
    fn land(&mut self, bytes: Bytes) {
        self.landed.fetch_add(1, Ordering::Relaxed);
        if let (Some(disk), Some(key)) = (&self.inner.disk, self.keys.next())
            && self.landing.keeps()
        {
            disk.write(key, bytes.clone());
        }
        self.landing.land(bytes);
    }

    /// The answer is complete: the object ends here, or all blocks are here.
    fn end(mut self) {
        if let Some(block) = self.block.take()
            && self.filled_bytes > 0
        {
            // No more memory than bytes: it is counted by them.
            self.land(Bytes::copy_from_slice(&block[..self.filled_bytes]));
        }
        let text = "the range is outside of the object";
        self.landing
            .fail(&StoreError::new(StoreErrorKind::InvalidRange, text));
    }
}

impl RangeSink for Cutter {
    fn push(&mut self, mut bytes: Bytes) {
        self.inner.stats.read_fetched_bytes.add(bytes.len() as u64);
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
                self.land(block.freeze(end));
            } else {
                self.filled_bytes = end;
                self.block = Some(block);
            }
        }
    }
}
