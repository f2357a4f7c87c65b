//! Edits between the roots of growing, grouped, expiring and cut back manifests; and edits that are not for them.

use proptest::prelude::*;

use super::*;
use crate::manifest::edit::{self, tests::root_of};
use crate::manifest::trim::tests::Forest;

const fn pointer(revision: u64) -> Pointer {
    Pointer {
        epoch: 1,
        uid: 7,
        revision,
    }
}

const FROM: Pointer = pointer(4);
const TO: Pointer = pointer(5);

fn followed(root: &Root, bytes: &[u8]) -> Result<Root, Refused> {
    follow(Some((FROM, root)), FROM, TO, bytes)
}

#[derive(Debug, Clone)]
enum Step {
    Append(u64, u64),
    Rebalance(usize),
    Expire(usize),
    CutBack(u64),
    Persist,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (1u64..4, 1u64..50).prop_map(|(length, size)| Step::Append(length, size)),
        4 => Just(Step::Persist),
        2 => (2usize..5).prop_map(Step::Rebalance),
        2 => (0usize..8).prop_map(Step::Expire),
        1 => (1u64..20).prop_map(Step::CutBack),
    ];
    prop::collection::vec(step, 1..80)
}

/// The roots that are persisted on the way, the first of them empty.
fn persisted(steps: Vec<Step>) -> Vec<Root> {
    let mut forest = Forest::new();
    let mut roots = vec![forest.root.clone()];
    for step in steps.into_iter().chain([Step::Persist]) {
        match step {
            Step::Append(length, size) => forest.append(length, size),
            Step::Rebalance(threshold) => forest.rebalance(threshold),
            Step::Expire(count) => forest.expire(count),
            Step::CutBack(by) => forest.cut_back(forest.root.next_offset.saturating_sub(by)),
            Step::Persist => roots.push(forest.root.clone()),
        }
    }
    roots
}

proptest! {
    #[test]
    fn what_leads_from_one_persisted_root_to_the_next_gives_its_bytes(steps in steps()) {
        for pair in persisted(steps).windows(2) {
            let (from, to) = (&pair[0], &pair[1]);
            let bytes = between(from, to).unwrap();
            let result = followed(from, &bytes).unwrap();
            prop_assert_eq!(result.encode(), to.encode());
            // What is new is all that was sent.
            let mut sent = RootEdit::decode(&bytes).unwrap().changes.into_iter().flat_map(|change| change.entries);
            prop_assert!(sent.all(|entry| !from.entries.contains(&entry)));
        }
    }

    #[test]
    fn a_damaged_edit_leads_to_the_persisted_root_or_nowhere(steps in steps(), at: prop::sample::Index, bit in 0u8..8, cut: bool) {
        let roots = persisted(steps);
        let (from, to) = (&roots[roots.len() - 2], &roots[roots.len() - 1]);
        let mut bytes = between(from, to).unwrap();
        let at = at.index(bytes.len());
        if cut {
            bytes.truncate(at);
        } else {
            bytes[at] ^= 1 << bit;
        }
        // What takes nothing out and puts nothing in may be anywhere.
        prop_assert!(followed(from, &bytes).is_err_and(|refused| refused != Refused::Gap) || followed(from, &bytes).as_ref() == Ok(to));
    }

    #[test]
    fn an_edit_of_another_manifest_leads_to_its_own_end_or_nowhere(mine in steps(), other in steps(), forged: bool) {
        let (roots, others) = (persisted(mine), persisted(other));
        for pair in others.windows(2) {
            let bytes = between(&pair[0], &pair[1]).unwrap();
            for root in &roots {
                if forged {
                    // Told under the name of what is known: its bytes have to stand for themselves.
                    let result = followed(root, &bytes);
                    prop_assert!(result.is_err() || result.as_ref() == Ok(&pair[1]));
                } else {
                    prop_assert_eq!(follow(Some((pointer(3), root)), FROM, TO, &bytes), Err(Refused::Gap));
                }
            }
        }
    }

    #[test]
    fn any_bytes_lead_nowhere(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let root = root_of(0, &[5, 5]);
        prop_assert!(followed(&root, &bytes).is_err());
        let bytes = [&b"OSIE\0\0\0\x01"[..], &bytes].concat();
        prop_assert!(followed(&root, &bytes).is_err());
    }
}

#[test]
fn only_what_follows_is_taken() {
    let (from, to) = (root_of(0, &[5]), root_of(0, &[5, 5]));
    let bytes = between(&from, &to).unwrap();
    assert_eq!(followed(&from, &bytes), Ok(to.clone()));
    assert_eq!(follow(None, FROM, TO, &bytes), Err(Refused::Gap), "pending");
    let older = pointer(3);
    let other_key = Pointer { uid: 8, ..FROM };
    let other_epoch = Pointer { epoch: 0, ..FROM };
    for known in [older, other_key, other_epoch] {
        let result = follow(Some((known, &from)), FROM, TO, &bytes);
        assert_eq!(result, Err(Refused::Gap), "{known:?}");
    }
    for known in [TO, pointer(6), Pointer { epoch: 2, ..FROM }] {
        let result = follow(Some((known, &to)), FROM, TO, &bytes);
        assert_eq!(result, Err(Refused::Stale), "{known:?}");
    }
    // Of the right name, but of other content: of the same shape, and of another.
    let mut foreign = from.clone();
    foreign.entries[0].uid += 1;
    assert_eq!(followed(&foreign, &bytes), Err(Refused::Checksum));
    assert_eq!(
        followed(&root_of(0, &[5, 3]), &bytes),
        Err(Refused::Record(RootError::Order(2)))
    );
    assert_eq!(followed(&Root::empty_at(0), &bytes), Err(Refused::Misfit));
}

#[test]
fn an_edit_that_would_be_long_is_not_made() {
    let most = (MAX_EDIT_BYTES - 65) / 34;
    let empty = Root::empty_at(0);
    let to = root_of(0, &vec![1; most]);
    let bytes = between(&empty, &to).unwrap();
    assert_eq!(followed(&empty, &bytes), Ok(to));
    assert_eq!(between(&empty, &root_of(0, &vec![1; most + 1])), None);
}

#[test]
fn what_a_persist_changes_is_little() {
    // A thousand entries become a group, with what came behind them meanwhile.
    let mut forest = Forest::new();
    for _ in 0..1_100 {
        forest.append(1, 1);
    }
    let before = forest.root.clone();
    forest.rebalance(1_024);
    forest.append(1, 1);
    let edit = between(&before, &forest.root).unwrap();
    assert_eq!(edit.len(), 53 + 2 * (12 + 34));
    // The oldest go and others come, with hundreds between them.
    let mut forest = Forest::new();
    for _ in 0..900 {
        forest.append(1, 1);
    }
    let before = forest.root.clone();
    forest.expire(5);
    forest.append(1, 1);
    let edit = between(&before, &forest.root).unwrap();
    assert_eq!(edit.len(), 53 + 12 + (12 + 34));
    assert_eq!(followed(&before, &edit), Ok(forest.root));
}

#[test]
fn a_root_that_is_too_long_is_left_to_be_fetched() {
    let long = root_of(0, &vec![1; ROOT_ENTRIES_MAX + 1]);
    let mut dropped = long.clone();
    edit::drop_leading(&mut dropped, 1).unwrap();
    assert_eq!(between(&long, &dropped), None);
    assert_eq!(between(&dropped, &long), None);
    let mut less = dropped.clone();
    edit::drop_leading(&mut less, 1).unwrap();
    let bytes = between(&dropped, &less).unwrap();
    assert_eq!(followed(&dropped, &bytes), Ok(less));
    assert_eq!(followed(&long, &bytes), Err(Refused::Gap));
}
