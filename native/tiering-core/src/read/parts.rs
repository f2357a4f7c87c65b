//! The bytes of a chunk where they were fetched to.
//!
//! Owns their order. A chunk that reaches over several blocks is handed on as it lies there: to put it together would cost more
//! than all else that is done to it, and whoever sends it sends parts as well.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

/// Bytes in parts, in order. No part is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts(Vec<Bytes>);

impl Parts {
    /// Bytes in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// No bytes at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds what follows.
    pub fn push(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.0.push(part);
        }
    }

    /// The parts themselves.
    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        self.0.iter()
    }

    /// The bytes in this range, shared; `None` if it reaches past the end.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let mut found = Self::default();
        let mut begin = 0;
        for part in &self.0 {
            let end = begin + part.len();
            let (from, to) = (range.start.max(begin), range.end.min(end));
            if from < to {
                found.push(part.slice(from - begin..to - begin));
            }
            begin = end;
        }
        (range.start <= range.end && range.end <= begin).then_some(found)
    }

    /// All of them in one: shared if they are, copied if not.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match self.0.as_slice() {
            [] => Bytes::new(),
            [one] => one.clone(),
            many => {
                let mut whole = BytesMut::with_capacity(self.len());
                many.iter().for_each(|part| whole.extend_from_slice(part));
                whole.freeze()
            }
        }
    }
}

impl From<Bytes> for Parts {
    fn from(bytes: Bytes) -> Self {
        let mut parts = Self::default();
        parts.push(bytes);
        parts
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_slice_of_parts_is_the_slice_of_the_whole(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..6), from in 0usize..30, to in 0usize..30) {
            let whole = parts.concat();
            let mut all = Parts::default();
            parts.into_iter().for_each(|part| all.push(part.into()));
            prop_assert_eq!(all.len(), whole.len());
            prop_assert_eq!(all.is_empty(), whole.is_empty());
            prop_assert_eq!(&all.to_bytes()[..], &whole[..]);
            let slice = all.slice(from..to);
            let sliced = slice.as_ref().map(Parts::to_bytes);
            prop_assert_eq!(sliced.as_deref(), whole.get(from..to));
            prop_assert!(slice.is_none_or(|slice| slice.iter().all(|part| !part.is_empty())));
        }
    }

    #[test]
    fn one_part_is_shared() {
        let bytes = Bytes::from_static(b"chunk");
        let parts = Parts::from(bytes.clone());
        assert_eq!(parts.to_bytes().as_ptr(), bytes.as_ptr());
        assert!(Parts::from(Bytes::new()).is_empty());
    }
}
