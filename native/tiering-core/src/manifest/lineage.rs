//! Which of a stream's roots is the newest, by what they say about themselves.
//!
//! Owns the order. For who has nothing but the bucket: as long as there is a metadata store, its pointer says it.

/// Where a root stands among the roots of its stream; the newest is the largest.
///
/// A recovered stream counts its epochs from the beginning, so the number of recoveries comes first. A root that says less than
/// others, because an earlier version of the plugin wrote it, is older than those that came after it: its numbers are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Lineage {
    /// How often the stream was recovered from the bucket before.
    pub recoveries: u64,
    /// Epoch of the writer.
    pub epoch: u64,
    /// Revision of the pointer that it follows: roots of one writer.
    pub follows: u64,
    /// When the store got it, for roots that say nothing else: those of one writer before it said what they follow.
    pub modified_ms: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_is_of_the_last_recovery_then_of_the_last_writer_then_of_its_last_persist() {
        let lineage = |recoveries, epoch, follows, modified_ms| Lineage {
            recoveries,
            epoch,
            follows,
            modified_ms,
        };
        let in_order = [
            lineage(0, 3, 0, 5),
            lineage(0, 3, 0, 6),
            lineage(0, 3, 9, 1),
            // A writer that was deposed may have put its last root after the next writer's first.
            lineage(0, 4, 1, 0),
            lineage(1, 0, 0, 0),
            lineage(1, 1, 2, 0),
        ];
        assert!(in_order.is_sorted());
        assert!(in_order.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
