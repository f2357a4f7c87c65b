//! Manifests against models that are too simple to be wrong: a list of ranges that is filtered, and linear search.

use log_format::manifest::{MAX_ENTRY_SIZE_BYTES, MAX_TOTAL_SIZE_BYTES, NO_TIMESTAMP, Root};
use proptest::prelude::*;
use tiering_core::fragment_assembly::FragmentPlan;
use tiering_core::manifest::edit::{self, EditError};
use tiering_core::manifest::{invariants, retention, search};
use tiering_core::upload::RetentionBound;

/// A fragment as the user thinks of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
    size: u64,
    first_ms: i64,
    last_ms: i64,
    uid: u32,
}

/// What is there, and where it goes on if that is nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Model {
    pieces: Vec<Piece>,
    next: u64,
}

impl Model {
    /// The only manifest that says exactly this.
    fn root(&self) -> Root {
        let first = self.pieces.first();
        let mut root = Root::empty_at(first.map_or(self.next, |piece| piece.start));
        root.next_offset = self.next;
        root.first_timestamp_ms = first.map_or(NO_TIMESTAMP, |piece| piece.first_ms);
        root.first_last_timestamp_ms = first.map_or(NO_TIMESTAMP, |piece| piece.last_ms);
        for piece in &self.pieces {
            root.total_size_bytes += u128::from(piece.size);
            root.entries.push(log_format::manifest::Entry {
                first_offset: piece.start,
                first_timestamp_ms: piece.first_ms,
                last_timestamp_ms: piece.last_ms,
                kind: log_format::manifest::Kind::Fragment,
                size_bytes: piece.size,
                uid: piece.uid,
            });
        }
        root
    }

    fn total(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.size).sum()
    }

    /// Retention as the user states it: while there is too much, or the oldest is too old, the oldest goes.
    fn retain(&mut self, max_bytes: Option<u64>, max_age_ms: Option<u64>, now_ms: i64) -> usize {
        let before = self.pieces.len();
        while let Some(oldest) = self.pieces.first() {
            let too_much = max_bytes.is_some_and(|max| self.total() > max);
            let age_ms = i128::from(now_ms) - i128::from(oldest.last_ms);
            let too_old = max_age_ms.is_some_and(|max| age_ms > i128::from(max));
            // By age the newest stays, as osiris keeps its last segment.
            if !(too_much || too_old && self.pieces.len() > 1) {
                break;
            }
            self.pieces.remove(0);
        }
        before - self.pieces.len()
    }
}

fn plan(piece: &Piece) -> FragmentPlan {
    FragmentPlan {
        first_offset: piece.start,
        next_offset: piece.end,
        first_timestamp_ms: piece.first_ms,
        last_timestamp_ms: piece.last_ms,
        size_bytes: piece.size,
        payload_bytes: piece.size,
        chunk_count: 1,
        spans: Vec::new(),
        index: Vec::new(),
        chunks_crc: 0,
    }
}

/// Pieces that follow each other from `start`, with a clock that never steps back.
fn pieces(start: u64, shapes: &[(u64, u64, i64)]) -> Vec<Piece> {
    let (mut next, mut clock) = (start, 1_000);
    let piece = |(number, (length, size, ms)): (usize, &(u64, u64, i64))| {
        let piece = Piece {
            start: next,
            end: next + length,
            size: *size,
            first_ms: clock,
            last_ms: clock + ms,
            uid: number as u32,
        };
        (next, clock) = (piece.end, piece.last_ms);
        piece
    };
    shapes.iter().enumerate().map(piece).collect()
}

fn shapes(most: usize) -> impl Strategy<Value = Vec<(u64, u64, i64)>> {
    prop::collection::vec((1u64..50, 0u64..1_000, 0i64..100), 0..most)
}

#[derive(Debug, Clone)]
enum Step {
    /// Continues the manifest by so much more than its end; 0 is right.
    Append(u64, u64, u64, i64),
    Drop(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let distance = prop_oneof![8 => Just(0u64), 1 => 1u64..9];
    let append = (distance, 1u64..50, 0u64..1_000, 0i64..100)
        .prop_map(|(distance, length, size, ms)| Step::Append(distance, length, size, ms));
    prop::collection::vec(
        prop_oneof![3 => append, 1 => (0usize..6).prop_map(Step::Drop)],
        0..80,
    )
}

proptest! {
    #[test]
    fn edits_do_what_they_do_to_a_list(start in 0u64..1_000, steps in steps()) {
        let mut model = Model { pieces: vec![], next: start };
        let mut root = model.root();
        let mut uid = 0;
        for step in steps {
            let before = root.clone();
            match step {
                Step::Append(distance, length, size, ms) => {
                    uid += 1;
                    let piece = Piece {
                        start: model.next + distance,
                        end: model.next + distance + length,
                        size,
                        first_ms: ms,
                        last_ms: ms + 1,
                        uid,
                    };
                    let outcome = edit::append(&mut root, &plan(&piece), uid);
                    if distance == 0 {
                        prop_assert_eq!(outcome, Ok(()));
                        model.pieces.push(piece);
                        model.next = piece.end;
                    } else {
                        let error = EditError::NotContiguous { expected: model.next, found: piece.start };
                        prop_assert_eq!(outcome, Err(error));
                    }
                    prop_assert!(invariants::contiguous_advance(&before, &root));
                }
                Step::Drop(count) => {
                    let outcome = edit::drop_leading(&mut root, count);
                    if count <= model.pieces.len() {
                        let dropped: Vec<u32> = model.pieces.drain(..count).map(|piece| piece.uid).collect();
                        let uids = outcome.map(|entries| entries.iter().map(|entry| entry.uid).collect::<Vec<_>>());
                        prop_assert_eq!(uids, Ok(dropped));
                    } else {
                        prop_assert!(outcome.is_err());
                    }
                }
            }
            prop_assert_eq!(&root, &model.root());
            prop_assert_eq!(root.check(), Ok(()));
            prop_assert!(invariants::prefix_monotonicity(&before, &root) && invariants::immutability(&before, &root));
            prop_assert!(invariants::coverage(&root) && invariants::accounting(&root) && invariants::ordering(&root));
        }
    }

    #[test]
    fn retention_drops_what_the_user_would(
        start in 0u64..100,
        shapes in shapes(30),
        max_bytes in prop::option::of(0u64..15_000),
        max_age_ms in prop::option::of(prop_oneof![4 => 0u64..2_000, 1 => Just(u64::MAX)]),
        ago in 0i64..3_000,
    ) {
        let all = pieces(start, &shapes);
        let next = all.last().map_or(start, |piece| piece.end);
        let mut model = Model { pieces: all, next };
        let mut root = model.root();
        let now_ms = 1_000 + ago;
        let bound = RetentionBound { max_bytes, max_age_ms };
        let count = retention::leading_to_drop(&root.entries, [], root.total_size_bytes, bound, Some(now_ms));
        prop_assert_eq!(count, model.retain(max_bytes, max_age_ms, now_ms));
        prop_assert!(edit::drop_leading(&mut root, count).is_ok());
        prop_assert_eq!(&root, &model.root());
        let again = retention::leading_to_drop(&root.entries, [], root.total_size_bytes, bound, Some(now_ms));
        prop_assert_eq!(again, 0, "one pass is enough");
    }

    #[test]
    fn searching_by_time_agrees_with_looking_at_every_fragment(start in 0u64..100, shapes in shapes(40), ms in 900i64..5_500) {
        let all = pieces(start, &shapes);
        let next = all.last().map_or(start, |piece| piece.end);
        let root = Model { pieces: all.clone(), next }.root();
        let linear = all.iter().find(|piece| piece.last_ms >= ms).map(|piece| (piece.uid, piece.end));
        let found = search::by_timestamp(&root, ms).map(|found| (found.entry.uid, found.end_offset));
        prop_assert_eq!(found, linear);
    }
}

#[test]
fn sizes_that_an_entry_or_a_root_cannot_tell_are_refused_and_nothing_changes() {
    let piece = |size| Piece {
        start: 0,
        end: 1,
        size,
        first_ms: 0,
        last_ms: 0,
        uid: 1,
    };
    let mut root = Root::empty_at(0);
    let refused = Err(EditError::Impossible(0));
    let too_big = plan(&piece(MAX_ENTRY_SIZE_BYTES + 1));
    assert_eq!(edit::append(&mut root, &too_big, 1), refused);
    let largest = plan(&piece(MAX_ENTRY_SIZE_BYTES));
    assert_eq!(edit::append(&mut root, &largest, 1), Ok(()));

    // A root with a group in front can be as large as its field tells; one byte more does not fit.
    root.entries[0].kind = log_format::manifest::Kind::Group;
    root.entries[0].size_bytes = 0;
    root.total_size_bytes = MAX_TOTAL_SIZE_BYTES;
    let next = Piece {
        start: 1,
        end: 2,
        ..piece(1)
    };
    let before = root.clone();
    let refused = Err(EditError::Impossible(1));
    assert_eq!(edit::append(&mut root, &plan(&next), 2), refused);
    assert_eq!(root, before);
}

#[test]
fn a_total_that_is_smaller_than_its_parts_is_not_made_negative() {
    let all = pieces(0, &[(5, 10, 0), (5, 10, 0)]);
    let mut root = Model {
        pieces: all,
        next: 10,
    }
    .root();
    root.total_size_bytes = 5;
    let before = root.clone();
    assert_eq!(
        edit::drop_leading(&mut root, 1),
        Err(EditError::NotDroppable(1))
    );
    assert_eq!(root, before);
}
