//! What is kept, bounded by bytes; what was used longest ago goes first.
//!
//! Owns the order and the count. Recency is the right measure here: readers go through history one after the other at about the
//! same pace, so what one has fetched the next wants soon, and then nobody for a long time. A cache that waits for a second use
//! before it keeps something would refuse just what the second reader wants.

use bytes::Bytes;
use lru::LruCache;

use super::PartKey;

/// What an entry costs beside its bytes: key, links, counts.
const ENTRY_BYTES: u64 = 256;

/// Parts of objects in memory.
#[derive(Debug)]
pub(super) struct Store {
    parts: LruCache<PartKey, Bytes>,
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
        self.parts.get(key).cloned()
    }

    /// Keeps a part; returns what had to go for it, to be dropped where that may take time.
    pub(super) fn put(&mut self, key: PartKey, bytes: Bytes) -> Vec<Bytes> {
        self.bytes += cost(&bytes);
        let mut gone = Vec::new();
        if let Some(before) = self.parts.put(key, bytes) {
            self.bytes -= cost(&before);
            gone.push(before);
        }
        self.shrink(&mut gone);
        gone
    }

    /// Forgets a part; returns it, to be dropped where that may take time.
    pub(super) fn remove(&mut self, key: &PartKey) -> Option<Bytes> {
        let bytes = self.parts.pop(key)?;
        self.bytes -= cost(&bytes);
        Some(bytes)
    }

    pub(super) fn set_capacity(&mut self, capacity_bytes: u64) -> Vec<Bytes> {
        self.capacity_bytes = capacity_bytes;
        let mut gone = Vec::new();
        self.shrink(&mut gone);
        gone
    }

    fn shrink(&mut self, gone: &mut Vec<Bytes>) {
        while self.bytes > self.capacity_bytes {
            let Some((_, bytes)) = self.parts.pop_lru() else {
                return;
            };
            self.bytes -= cost(&bytes);
            gone.push(bytes);
        }
    }
}

const fn cost(bytes: &Bytes) -> u64 {
    bytes.len() as u64 + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::Part;
    use super::*;

    fn key(number: u64) -> PartKey {
        PartKey {
            object: Arc::from("object"),
            part: Part::Block(number),
        }
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_the_count_is_exact() {
        let mut store = Store::new(3 * (100 + ENTRY_BYTES));
        for number in 0..3 {
            assert!(store.put(key(number), vec![0; 100].into()).is_empty());
        }
        assert!(store.get(&key(0)).is_some());
        assert_eq!(store.put(key(3), vec![0; 100].into()).len(), 1);
        assert!(store.get(&key(1)).is_none() && store.get(&key(0)).is_some());
        assert_eq!(store.bytes(), 3 * (100 + ENTRY_BYTES));
        assert_eq!(store.put(key(3), vec![0; 50].into()).len(), 1);
        assert_eq!(store.bytes(), 250 + 3 * ENTRY_BYTES);
        store.remove(&key(3));
        store.remove(&key(3));
        assert_eq!(store.set_capacity(0).len(), 2);
        assert_eq!(store.bytes(), 0);
        assert_eq!(
            store.put(key(9), vec![0; 1].into()).len(),
            1,
            "no room at all"
        );
    }
}
