//! What time it is, for decisions that cannot be taken back: deletion by age.
//!
//! Two clocks have to agree before anything is too old. The node's, which starts at what the host believes and cannot jump: it
//! continues by the monotonic clock, and follows the system's by a hundredth of the time that passes, as the Erlang virtual machine's
//! does. And the store's, as its answers say it, carried on by the monotonic clock. It is as late as the earlier of the two says.
//!
//! Owns the judgement. Does not own any clock: what they say comes in as arguments. Why so: docs/decisions/0024.

use std::fmt;

/// The node's clock follows the system's by one part in so many.
const SLEW: u64 = 100;
/// The system's clock is followed at most so often, or a hundredth would be less than a millisecond.
const FOLLOW_EVERY_MS: u64 = 1_000;
/// However long nobody has asked, one look at the system's clock moves the node's by no more than a hundredth of this.
const FOLLOW_MOST_MS: u64 = 60_000;

/// Why nobody knows what time it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt {
    /// What the node's clock says, in milliseconds since the epoch.
    pub node_ms: i64,
    /// How far the node's clock is ahead of the store's; `None` if no answer of the store has said the time.
    pub skew_ms: Option<i64>,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.skew_ms {
            None => f.write_str("no answer of the store has said what time it is"),
            Some(skew_ms) => {
                let (s, way) = (
                    skew_ms.unsigned_abs() / 1_000,
                    if skew_ms > 0 { "ahead of" } else { "behind" },
                );
                write!(f, "this node's clock is {s} s {way} the store's")
            }
        }
    }
}

/// The clocks of one node, and what can be believed of them. Times are milliseconds: `now_ms` of a clock that never steps and
/// stands still while the machine sleeps, all others since the epoch.
#[derive(Debug, Clone)]
pub struct TrustedTime {
    max_skew_ms: u64,
    /// When the node's clock was last set, and to what.
    at_ms: u64,
    node_ms: i64,
    /// How far the system's clock is ahead of the node's.
    system_ahead_ms: i64,
    /// How far the store's clock is ahead of `now_ms`.
    store_ahead_ms: Option<i64>,
}

impl TrustedTime {
    /// `host_ms` is what the host believes now. Clocks that differ by more than `max_skew_ms` do not agree; 0: the store is not
    /// asked.
    #[must_use]
    pub const fn new(now_ms: u64, host_ms: i64, max_skew_ms: u64) -> Self {
        Self {
            max_skew_ms,
            at_ms: now_ms,
            node_ms: host_ms,
            system_ahead_ms: 0,
            store_ahead_ms: None,
        }
    }

    /// The system's clock says this now. It may have jumped.
    pub fn system_says(&mut self, now_ms: u64, system_ms: i64) {
        let node_ms = self.node_ms(now_ms);
        let ahead_ms = system_ms.saturating_sub(node_ms);
        self.system_ahead_ms = ahead_ms;
        let elapsed_ms = now_ms.saturating_sub(self.at_ms);
        if elapsed_ms < FOLLOW_EVERY_MS {
            return;
        }
        let most_ms = signed(elapsed_ms.min(FOLLOW_MOST_MS) / SLEW);
        let followed_ms = ahead_ms.clamp(-most_ms, most_ms);
        self.at_ms = now_ms;
        self.node_ms = node_ms.saturating_add(followed_ms);
        self.system_ahead_ms = ahead_ms.saturating_sub(followed_ms);
    }

    /// An answer of the store says this now: that it is this late, or up to a second and the way of the answer later.
    pub fn store_says(&mut self, now_ms: u64, store_ms: i64) {
        self.store_ahead_ms = Some(store_ms.saturating_sub(signed(now_ms)));
    }

    /// What time it is at least, or why that cannot be said.
    ///
    /// The store's clock needs one of the node's two to agree with it. The system's alone is enough, because it is the earliest
    /// of all three that counts then: after the machine has slept, or was set right, only the node's own is off.
    ///
    /// # Errors
    /// If the store has not said the time, or says another one.
    pub fn now(&self, now_ms: u64) -> Result<i64, Doubt> {
        let node_ms = self.node_ms(now_ms);
        if self.max_skew_ms == 0 {
            return Ok(node_ms);
        }
        let Some(store_ms) = self.store_ms(now_ms) else {
            return Err(Doubt {
                node_ms,
                skew_ms: None,
            });
        };
        let agrees = |ms: i64| ms.abs_diff(store_ms) <= self.max_skew_ms;
        let system_ms = node_ms.saturating_add(self.system_ahead_ms);
        if agrees(node_ms) {
            Ok(node_ms.min(store_ms))
        } else if agrees(system_ms) {
            Ok(node_ms.min(store_ms).min(system_ms))
        } else {
            Err(Doubt {
                node_ms,
                skew_ms: Some(node_ms.saturating_sub(store_ms)),
            })
        }
    }

    /// What the store's clock says now, if it has ever been heard.
    #[must_use]
    pub fn store_ms(&self, now_ms: u64) -> Option<i64> {
        Some(self.store_ahead_ms?.saturating_add(signed(now_ms)))
    }

    /// What the node's clock says now.
    #[must_use]
    pub fn node_ms(&self, now_ms: u64) -> i64 {
        self.node_ms
            .saturating_add(signed(now_ms.saturating_sub(self.at_ms)))
    }

    /// How far the node's clock is ahead of the store's.
    #[must_use]
    pub fn skew_ms(&self, now_ms: u64) -> Option<i64> {
        Some(self.node_ms(now_ms).saturating_sub(self.store_ms(now_ms)?))
    }
}

fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST_MS: i64 = 1_800_000_000_000;
    const DAY_MS: i64 = 24 * 3_600 * 1_000;
    const SKEW_MS: u64 = 300_000;

    fn agreed() -> TrustedTime {
        let mut time = TrustedTime::new(0, HOST_MS, SKEW_MS);
        time.system_says(0, HOST_MS);
        time.store_says(0, HOST_MS - 900);
        time
    }

    #[test]
    fn the_earlier_of_two_clocks_that_agree_counts() {
        let mut time = agreed();
        assert_eq!(time.now(10_000), Ok(HOST_MS + 10_000 - 900));
        time.store_says(10_000, HOST_MS + 10_000 + 200_000);
        assert_eq!(time.now(10_000), Ok(HOST_MS + 10_000));
    }

    #[test]
    fn a_step_of_the_system_s_clock_forth_and_back_moves_nothing() {
        for step_ms in [30 * DAY_MS, -30 * DAY_MS] {
            let mut time = agreed();
            for second in 1..=12 {
                let now_ms = second * 1_000;
                time.system_says(now_ms, HOST_MS + signed(now_ms) + step_ms);
                let error_ms = time.now(now_ms).unwrap() - (HOST_MS + signed(now_ms));
                assert!(error_ms.abs() <= 1_100, "{error_ms}");
            }
            time.system_says(13_000, HOST_MS + 13_000);
            assert!(time.now(13_000).unwrap().abs_diff(HOST_MS + 13_000) <= 1_100);
        }
    }

    #[test]
    fn also_when_the_store_s_clock_steps_with_it() {
        let mut time = agreed();
        time.system_says(5_000, HOST_MS + 30 * DAY_MS);
        time.store_says(5_000, HOST_MS + 30 * DAY_MS);
        assert_eq!(time.now(5_000), Ok(HOST_MS + 5_050), "the node's own");
    }

    #[test]
    fn a_look_after_a_long_time_believes_no_more_than_one_after_a_minute() {
        let mut time = agreed();
        let week_ms = 7 * DAY_MS;
        time.system_says(week_ms as u64, HOST_MS + 2 * week_ms);
        assert_eq!(time.node_ms(week_ms as u64), HOST_MS + week_ms + 600);
    }

    #[test]
    fn clocks_that_differ_are_waited_for() {
        // The node starts with a clock that is 30 days ahead.
        let mut time = TrustedTime::new(0, HOST_MS + 30 * DAY_MS, SKEW_MS);
        time.system_says(0, HOST_MS + 30 * DAY_MS);
        let doubt = time.now(0).unwrap_err();
        assert_eq!(doubt.skew_ms, None);
        assert_eq!(
            doubt.to_string(),
            "no answer of the store has said what time it is"
        );
        time.store_says(0, HOST_MS);
        let doubt = time.now(0).unwrap_err();
        assert_eq!(doubt.skew_ms, Some(30 * DAY_MS));
        assert_eq!(doubt.node_ms, HOST_MS + 30 * DAY_MS);
        assert_eq!(
            doubt.to_string(),
            "this node's clock is 2592000 s ahead of the store's"
        );
        // Set right while the node runs: the store's is the earlier one, and the system's vouches for it.
        time.system_says(500, HOST_MS + 500);
        assert_eq!(time.now(500), Ok(HOST_MS + 500));
        time.store_says(500, HOST_MS + 200_000);
        assert_eq!(time.now(500), Ok(HOST_MS + 500), "by the earliest of three");
    }

    #[test]
    fn a_store_that_is_wrong_is_waited_for() {
        let mut time = agreed();
        time.store_says(0, HOST_MS + DAY_MS);
        let doubt = time.now(0).unwrap_err();
        assert_eq!(
            doubt.to_string(),
            "this node's clock is 86400 s behind the store's"
        );
        time.store_says(1_000, HOST_MS - DAY_MS);
        assert!(time.now(1_000).is_err());
        time.store_says(2_000, HOST_MS + 2_000);
        assert_eq!(time.now(2_000), Ok(HOST_MS + 2_000));
    }

    #[test]
    fn a_machine_that_has_slept_goes_on_by_its_own_clock() {
        let mut time = agreed();
        // Ten hours of sleep: the monotonic clock has seen one second.
        let slept_ms = 36_000_000;
        time.system_says(1_000, HOST_MS + 1_000 + slept_ms);
        time.store_says(1_000, HOST_MS + 1_000 + slept_ms);
        assert_eq!(time.now(1_000), Ok(HOST_MS + 1_010));
        assert_eq!(time.skew_ms(1_000), Some(10 - slept_ms));
        // The stamps of its records are by the virtual machine's clock, which is as far behind and catches up as slowly.
        time.system_says(101_000, HOST_MS + 101_000 + slept_ms);
        assert_eq!(time.node_ms(101_000), HOST_MS + 101_010 + 600);
    }

    #[test]
    fn a_store_that_is_not_asked_is_not_waited_for() {
        let mut time = TrustedTime::new(0, HOST_MS, 0);
        assert_eq!(time.now(5), Ok(HOST_MS + 5));
        time.system_says(1_000, HOST_MS + DAY_MS);
        assert_eq!(time.now(1_000), Ok(HOST_MS + 1_010), "nor does it jump");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Pass(u64),
        System(i64),
        Store(i64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let off =
            prop_oneof![3 => -2_000i64..2_000, 1 => any::<i64>(), 1 => -40 * DAY_MS..40 * DAY_MS];
        let step = prop_oneof![
            2 => (1u64..100_000).prop_map(Step::Pass),
            2 => off.clone().prop_map(Step::System),
            1 => off.prop_map(Step::Store),
        ];
        prop::collection::vec(step, 1..100)
    }

    proptest! {
        #[test]
        fn whatever_the_clocks_do_it_is_never_later_than_a_hundredth_and_than_the_store_says(steps in steps()) {
            let mut time = TrustedTime::new(0, HOST_MS, SKEW_MS);
            let mut now_ms = 0;
            for step in steps {
                match step {
                    Step::Pass(ms) => now_ms += ms,
                    Step::System(off_ms) => time.system_says(now_ms, HOST_MS.saturating_add(signed(now_ms)).saturating_add(off_ms)),
                    Step::Store(off_ms) => time.store_says(now_ms, HOST_MS.saturating_add(signed(now_ms)).saturating_add(off_ms)),
                }
                let true_ms = HOST_MS + signed(now_ms);
                let drift_ms = time.node_ms(now_ms).abs_diff(true_ms);
                prop_assert!(drift_ms <= now_ms / SLEW, "{drift_ms} of {now_ms}");
                if let Ok(ms) = time.now(now_ms) {
                    prop_assert!(Some(ms) <= time.store_ms(now_ms) && ms <= time.node_ms(now_ms));
                }
            }
        }
    }
}
