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
    let (plan, violation) = noticed.expect("the mistake shows");
    assert!(violation.contains("exactly once"), "{violation}");
    assert_eq!(run(plan).violation, None);
}
