//! The user's bound on the remote tier.

use super::*;
use crate::trusted_time::Doubt;

fn bytes(max_bytes: u64) -> Event {
    Event::RetentionChanged(RetentionBound {
        max_bytes: Some(max_bytes),
        max_age_ms: None,
    })
}

fn age(max_age_ms: u64) -> Event {
    Event::RetentionChanged(RetentionBound {
        max_bytes: None,
        max_age_ms: Some(max_age_ms),
    })
}

#[test]
fn what_retention_drops_is_deleted_only_after_the_persist_that_no_longer_names_it() {
    let mut rig = Rig::persisted();
    rig.send(bytes(2 * CHUNK_BYTES));
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
    rig.quiet();
    rig.wait_until_due();
    assert_eq!(rig.now, 2_000, "an edit like any other");
    assert_eq!(rig.put_root(Ok(101)).first_offset, 20);
    rig.quiet_of_deletes();
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    rig.published();
    assert_eq!(rig.deleted(), [fragment(0, 1)]);
    assert_eq!(rig.machine.counters().fragments_deleted, 1);
}

impl Rig {
    #[track_caller]
    pub(super) fn quiet_of_deletes(&self) {
        assert!(
            !self
                .effects
                .iter()
                .any(|effect| matches!(effect, Effect::Delete { .. }))
        );
    }
}

#[test]
fn retention_may_empty_the_manifest_and_uploading_goes_on_where_it_was() {
    let mut rig = Rig::persisted();
    rig.send(bytes(0));
    rig.wait_until_due();
    let root = rig.put_root(Ok(101));
    assert_eq!(*root, Root::empty_at(40));
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    rig.published();
    assert_eq!(rig.deleted(), [fragment(0, 1), fragment(20, 2)]);
    rig.committed(50, 0);
    assert_eq!(rig.take_scan().1, 40);
}

#[test]
fn what_is_not_persisted_yet_is_not_dropped() {
    let mut rig = Rig::with_two_fragments();
    rig.send(bytes(0));
    let root = rig.put_root(Ok(100));
    assert_eq!(root.entries.len(), 2);
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    assert_eq!(rig.published().1, 1);
    rig.quiet();
    assert_eq!(rig.machine.status().manifest_entries, 0);
}

#[test]
fn bug_71_retention_during_a_persist_neither_disturbs_it_nor_deletes_under_it() {
    let mut rig = Rig::with_two_fragments();
    rig.put_root(Ok(100));
    rig.commit((100, 0), CommitOutcome::Committed { revision: 1 });
    rig.published();
    rig.drain(70, 0);
    rig.upload(3);
    rig.upload(4);
    let Effect::PutRoot {
        generation, root, ..
    } = rig.next()
    else {
        panic!()
    };
    rig.send(bytes(4 * CHUNK_BYTES));
    assert_eq!(rig.machine.status().manifest_first_offset, 40);
    rig.send(Event::RootPut {
        generation,
        outcome: Ok(101),
    });
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    assert_eq!(rig.published(), (Arc::clone(&root), 2));
    assert_eq!(root.entries.len(), 4, "as it was when the persist began");
    // Its fragments are still named.
    rig.quiet();
    rig.wait_until_due();
    assert_eq!(rig.put_root(Ok(102)).first_offset, 40);
    rig.commit((102, 2), CommitOutcome::Committed { revision: 3 });
    rig.published();
    assert_eq!(
        rig.deleted(),
        [fragment(0, 1), fragment(20, 2), root_object(100)]
    );
}

#[test]
fn age_wakes_the_machine_when_the_oldest_fragment_expires() {
    let mut rig = Rig::persisted();
    rig.send(age(10_000));
    assert_eq!(rig.machine.poll_timeout(), None, "no clock, no age");
    // Timestamps are chunk ids: the first fragment ends at 10, the second at 30.
    rig.machine.set_time(rig.now, Ok(5_000));
    rig.send(Event::Tick);
    assert_eq!(rig.machine.poll_timeout(), Some(5_011));
    rig.wait_until_due();
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
    rig.wait_until_due();
    assert_eq!(rig.put_root(Ok(101)).first_offset, 20);
    rig.commit((101, 1), CommitOutcome::Committed { revision: 2 });
    rig.published();
    assert_eq!(rig.deleted(), [fragment(0, 1)]);
    assert_eq!(
        rig.machine.poll_timeout(),
        None,
        "the newest stays, and rests"
    );
    rig.wait(1_000_000);
    assert_eq!(rig.machine.status().manifest_entries, 1);
}

const DOUBT: Doubt = Doubt {
    node_ms: 1_000_000,
    skew_ms: Some(900_000),
};

#[test]
fn while_clocks_do_not_agree_nothing_is_too_old_and_it_is_a_problem_only_if_something_would_be() {
    let mut rig = Rig::persisted();
    rig.machine.set_time(rig.now, Err(DOUBT));
    rig.send(age(10_000_000));
    assert_eq!(rig.problem_now(), None, "nothing would be");
    rig.send(age(10_000));
    assert_eq!(rig.machine.status().manifest_first_offset, 0);
    assert_eq!(rig.problem_now(), Some("clock"));
    let text = rig.machine.status().problem.map(|problem| problem.text);
    assert_eq!(
        text.as_deref(),
        Some(
            "this node's clock is 900 s ahead of the store's: nothing is deleted because of its age until they agree"
        )
    );
    // Nothing else happens, and it is checked again.
    assert_eq!(rig.machine.poll_timeout(), Some(rig.now + 60_000));
    rig.wait_until_due();
    assert_eq!(rig.machine.status().manifest_first_offset, 0);
    rig.machine.set_time(rig.now, Ok(1_000));
    rig.send(Event::Tick);
    assert_eq!(rig.problem_now(), None);
    assert_eq!(rig.machine.status().manifest_first_offset, 0, "too young");
    rig.machine.set_time(rig.now, Ok(10_011));
    rig.send(Event::Tick);
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
}

#[test]
fn while_clocks_do_not_agree_retention_by_size_goes_on() {
    let mut rig = Rig::persisted();
    rig.machine.set_time(rig.now, Err(DOUBT));
    rig.send(bytes(2 * CHUNK_BYTES));
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
    assert_eq!(rig.problem_now(), None);
}

#[test]
fn a_record_from_the_future_is_checked_again_and_goes_with_what_is_behind_it() {
    let mut root = root_of(0, &[20, 20, 20]);
    root.entries[0].last_timestamp_ms = 1 << 50;
    root.first_last_timestamp_ms = 1 << 50;
    let mut rig = Rig::confirmed(&root);
    rig.machine.set_time(rig.now, Ok(5_000));
    rig.send(age(10_000));
    // Timestamps are offsets: the one behind it begins at 20.
    let again = rig.machine.poll_timeout().unwrap();
    assert!(again <= rig.now + 60_000, "{again}");
    rig.machine.set_time(rig.now, Ok(10_020));
    rig.send(Event::Tick);
    assert_eq!(rig.machine.status().manifest_first_offset, 0);
    rig.machine.set_time(rig.now, Ok(10_021));
    rig.send(Event::Tick);
    assert_eq!(rig.machine.status().manifest_first_offset, 20);
}

#[test]
fn after_a_recovery_offsets_of_the_old_manifest_do_not_count_as_persisted() {
    let mut rig = Rig::resumed(&root_of(0, &[20, 20]));
    rig.committed(30, 10);
    rig.end_scan(ScanEnd::RemoteAhead {
        local_first_offset: 10,
        local_next_offset: 30,
    });
    rig.effects
        .retain(|effect| matches!(effect, Effect::Scan { .. }));
    rig.scan();
    rig.upload(3);
    rig.send(bytes(0));
    // What is left of the old one, and what was uploaded since.
    assert_eq!(rig.machine.status().manifest_entries, 2);
}

/// Found by the simulator (seed 2656): the persisted edit was published as confirmed, and local retention trimmed by a timeline
/// that the local log had lost.
#[test]
fn nothing_is_dropped_before_the_local_log_is_seen_to_continue_the_manifest() {
    let mut rig = Rig::resumed(&crate::manifest::edit::tests::root_of(0, &[10, 10, 10]));
    rig.send(Event::RetentionChanged(RetentionBound {
        max_bytes: Some(0),
        max_age_ms: None,
    }));
    rig.committed(40, 0);
    rig.wait(5_000);
    let persists = |rig: &Rig| {
        rig.effects
            .iter()
            .any(|effect| matches!(effect, Effect::PutRoot { .. }))
    };
    assert!(!persists(&rig), "{:?}", rig.effects);
    rig.scan();
    rig.wait(5_000);
    assert!(persists(&rig), "{:?}", rig.effects);
}
