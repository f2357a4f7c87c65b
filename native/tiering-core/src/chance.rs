//! Chance that came in as an argument: a seed, stretched (splitmix64).
//!
//! Only good for spreading retries. The same seed gives the same waits, so that a test can replay a machine from its seed.

/// The generator.
#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// Equal jitter: uniformly between half of the delay and all of it.
    pub(crate) fn jitter(&mut self, delay_ms: u64) -> u64 {
        let half = delay_ms / 2;
        half + self.next() % (delay_ms - half + 1)
    }
}
