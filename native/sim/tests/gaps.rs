//! A reader must not take what its node does not know of for a gap: that would be noticed.

use sim::plan::Plan;
use sim::run;

/// More than enough: about one seed in ten shows it.
const SEEDS: u64 = 400;

#[test]
fn a_gap_that_is_believed_of_an_old_manifest_is_noticed() {
    let noticed = (1..=SEEDS).find_map(|seed| {
        let plan = Plan::new(seed, 5_000);
        let mistaken = Plan {
            believe_gaps: true,
            ..plan
        };
        run(mistaken).violation.map(|violation| (plan, violation))
    });
    let shows = |violation: &str| violation.contains("exactly once");
    assert!(
        noticed
            .as_ref()
            .is_some_and(|(_, violation)| shows(violation)),
        "{noticed:?}"
    );
    // And the same run without the mistake is well.
    let without = noticed.and_then(|(plan, _)| run(plan).violation);
    assert_eq!(without, None);
}
