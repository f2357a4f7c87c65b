//! What is kept; what was used longest ago goes first.
//!
//! Owns the order and the count. Recency is the right measure here: readers go through history one after the other at about the
//! same pace, so what one has fetched the next wants soon, and then nobody for a long time. A cache that waits for a second use
//! before it keeps something would refuse just what the second reader wants.

use std::sync::Arc;

use bytes::Bytes;
use lru::LruCache;

use super::PartKey;
use crate::buffer_pool::PooledBuffer;
use crate::read_memory::Memory;

/// What an entry costs beside its bytes: key, links, counts.
const ENTRY_BYTES: u64 = 256;

/// Parts that are looked at in one search for some that nobody uses.
const SEARCHED_MAX: usize = 4_096;

/// Bytes of a part with the memory that is counted for them, which goes back when the last one who sees them lets go.
#[derive(Debug)]
pub(super) struct Held {
    data: Data,
    _memory: Memory,
}

#[derive(Debug)]
enum Data {
    /// A whole buffer.
    Pooled(PooledBuffer),
    Plain(Bytes),
}

impl Held {
    pub(super) fn pooled(buffer: PooledBuffer, memory: Memory) -> Arc<Self> {
        Arc::new(Self {
            data: Data::Pooled(buffer),
            _memory: memory,
        })
    }

    pub(super) fn plain(bytes: Bytes, memory: Memory) -> Arc<Self> {
        Arc::new(Self {
            data: Data::Plain(bytes),
            _memory: memory,
        })
    }

    /// The bytes, for as long as somebody wants them.
    pub(super) fn bytes(self: &Arc<Self>) -> Bytes {
        Bytes::from_owner(Seen(Arc::clone(self)))
    }

    fn as_slice(&self) -> &[u8] {
        match &self.data {
            Data::Pooled(buffer) => buffer,
            Data::Plain(bytes) => bytes,
        }
    }
}

/// Held by somebody besides the cache.
struct Seen(Arc<Held>);

impl AsRef<[u8]> for Seen {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

/// Parts of objects in memory.
#[derive(Debug)]
pub(super) struct Store {
    parts: LruCache<PartKey, Arc<Held>>,
    bytes: u64,
    capacity_bytes: u64,
}

impl Store {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            parts: LruCache::unbounded(),
            bytes: 0,
            capacity_bytes,
        }
    }

    /// Bytes kept, with what keeping them costs.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn get(&mut self, key: &PartKey) -> Option<Bytes> {
        self.parts.get(key).map(Held::bytes)
    }

    /// Keeps a part; returns what had to go for it, to be dropped where that may take time.
    pub(super) fn put(&mut self, key: PartKey, part: Arc<Held>) -> Vec<Arc<Held>> {
        self.bytes += cost(&part);
        let mut gone = Vec::new();
        if let Some(before) = self.parts.put(key, part) {
            self.bytes -= cost(&before);
            gone.push(before);
        }
        while self.bytes > self.capacity_bytes {
            let Some((_, part)) = self.parts.pop_lru() else {
                break;
            };
            self.bytes -= cost(&part);
            gone.push(part);
        }
        gone
    }

    /// Forgets a part; returns it, to be dropped where that may take time.
    pub(super) fn remove(&mut self, key: &PartKey) -> Option<Arc<Held>> {
        let part = self.parts.pop(key)?;
        self.bytes -= cost(&part);
        Some(part)
    }

    /// Forgets parts of so many bytes that nobody uses, or what there is of them. Those that somebody uses cost nothing to keep,
    /// and count as used just now.
    pub(super) fn evict(&mut self, bytes: u64) -> Vec<Arc<Held>> {
        let (mut gone, mut gone_bytes) = (Vec::new(), 0);
        for _ in 0..self.parts.len().min(SEARCHED_MAX) {
            if gone_bytes >= bytes {
                break;
            }
            let Some((key, part)) = self.parts.pop_lru() else {
                break;
            };
            if Arc::strong_count(&part) > 1 {
                self.parts.put(key, part);
                continue;
            }
            self.bytes -= cost(&part);
            gone_bytes += part.as_slice().len() as u64;
            gone.push(part);
        }
        gone
    }
}

/// Bytes of parts that are forgotten.
pub(super) fn bytes_of(parts: &[Arc<Held>]) -> u64 {
    parts.iter().map(|part| part.as_slice().len() as u64).sum()
}

fn cost(part: &Held) -> u64 {
    part.as_slice().len() as u64 + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::Part;
    use super::*;
    use crate::clock::Clock;
    use crate::read_memory::ReadMemory;
    use crate::stats::Stats;

    fn key(number: u64) -> PartKey {
        PartKey {
            object: Arc::from("object"),
            part: Part::Block(number),
        }
    }

    fn part(memory: &ReadMemory, length: usize) -> Arc<Held> {
        Held::plain(vec![0; length].into(), memory.take_now(length as u64))
    }

    #[tokio::test]
    async fn what_was_used_longest_ago_goes_first_and_the_count_is_exact() {
        let memory = ReadMemory::new(1 << 20, Clock::start(), Arc::new(Stats::default()));
        let mut store = Store::new(3 * (100 + ENTRY_BYTES));
        for number in 0..3 {
            assert!(store.put(key(number), part(&memory, 100)).is_empty());
        }
        assert!(store.get(&key(0)).is_some());
        assert_eq!(store.put(key(3), part(&memory, 100)).len(), 1);
        assert!(store.get(&key(1)).is_none() && store.get(&key(0)).is_some());
        assert_eq!(store.bytes(), 3 * (100 + ENTRY_BYTES));
        assert_eq!(store.put(key(3), part(&memory, 50)).len(), 1);
        assert_eq!(store.bytes(), 250 + 3 * ENTRY_BYTES);
        assert_eq!(memory.used_bytes(), 250);
        // The oldest one is in use.
        let used = store.get(&key(2)).expect("kept");
        for number in [0, 3] {
            store.get(&key(number));
        }
        assert_eq!(store.evict(1).len(), 1);
        assert!(store.get(&key(0)).is_none());
        assert_eq!(store.evict(1_000).len(), 1, "what is used stays");
        drop(used);
        assert_eq!(memory.used_bytes(), 100);
        store.remove(&key(2));
        assert!(store.remove(&key(2)).is_none());
        assert_eq!((store.bytes(), memory.used_bytes()), (0, 0));
    }
}
