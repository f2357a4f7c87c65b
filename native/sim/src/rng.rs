//! Chance, from a seed: xoshiro256++ seeded by splitmix64. Its own, so that no release of another crate changes a trace.

/// A generator; the same seed gives the same numbers for ever.
#[derive(Debug, Clone)]
pub struct Rng([u64; 4]);

/// Mixes a word; also good for spreading seeds.
#[must_use]
pub const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Rng {
    /// From a seed; `purpose` keeps generators of one seed apart.
    #[must_use]
    pub const fn new(seed: u64, purpose: u64) -> Self {
        let a = mix(seed ^ mix(purpose));
        let b = mix(a);
        let c = mix(b);
        Self([a, b, c, mix(c)])
    }

    /// The next 64 bits.
    pub const fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform in `low..=high`.
    pub const fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }

    /// Uniform in `0..count`.
    pub const fn below(&mut self, count: usize) -> usize {
        (self.next() % (count as u64)) as usize
    }

    /// True in so many of 10,000 cases.
    pub const fn chance(&mut self, per_10k: u32) -> bool {
        self.next() % 10_000 < per_10k as u64
    }
}
