//! A reader must not take what its node does not know of for a gap: that would be noticed.

use sim::plan::Plan;
use sim::run;

/// About one seed in a thousand shows it. The first of these does, so that the test is quick.
const SEEDS: std::ops::RangeInclusive<u64> = 1_001..=4_000;

#[test]
fn a_gap_that_is_believed_of_an_old_manifest_is_noticed() {
    let noticed = SEEDS.into_iter().find_map(|seed| {
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
