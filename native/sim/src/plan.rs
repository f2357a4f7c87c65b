//! What one run is asked for, and the kinds of trouble that it may make: a failure is shrunk by taking kinds away.

use tiering_core::read;
use tiering_core::upload::{Backoff, Proof, RetryPolicy, Settings};

use crate::rng::Rng;

/// A kind of trouble. Each can be left out of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Trouble {
    /// A request is lost before it has any effect.
    LostBefore,
    /// The answer to a request is lost, the effect is not.
    LostAfter,
    /// A passing error of the store.
    Transient,
    /// An error of the store that stays for a while.
    Stalled,
    /// An answer that takes longer than its deadline.
    Slow,
    /// Bytes that are not what was stored.
    Corrupt,
    /// Fewer bytes than asked for.
    Short,
    /// A deletion of several objects that deletes some.
    PartialDelete,
    /// A local log that cannot be read for a moment.
    Scan,
    /// A broadcast that does not arrive.
    NewsLost,
    /// An answer that comes twice.
    Duplicate,
    /// The store is not there for a while.
    StoreOutage,
    /// The store refuses everything for a while.
    Denied,
    /// The metadata store is not there for a while.
    MetadataOutage,
    /// A machine is dropped with everything that it waits for.
    Crash,
    /// Another node becomes the writer.
    LeaderChange,
    /// All nodes lose the end of a log.
    DataLoss,
    /// A stream is deleted.
    Deletion,
    /// The user's retention trims local logs.
    UserRetention,
    /// The user's retention trims the remote tier.
    Bound,
    /// There are consumers.
    Consumers,
    /// More than one stream.
    ManyStreams,
    /// A clock of a node or of the store is wrong for a while.
    ClockStep,
    /// A record is stamped by a clock that is far ahead.
    FutureStamp,
    /// Somebody before the store answers in its place for a while: mostly what passes, now and then what looks like damage.
    Impostor,
}

/// All of them, mildest last: shrinking tries to leave them out from the first.
pub const TROUBLES: [Trouble; 25] = [
    Trouble::ManyStreams,
    Trouble::Consumers,
    Trouble::DataLoss,
    Trouble::Deletion,
    Trouble::LeaderChange,
    Trouble::Crash,
    Trouble::UserRetention,
    Trouble::Bound,
    Trouble::StoreOutage,
    Trouble::Denied,
    Trouble::Impostor,
    Trouble::MetadataOutage,
    Trouble::ClockStep,
    Trouble::FutureStamp,
    Trouble::Duplicate,
    Trouble::NewsLost,
    Trouble::Scan,
    Trouble::PartialDelete,
    Trouble::Short,
    Trouble::Corrupt,
    Trouble::Slow,
    Trouble::Stalled,
    Trouble::Transient,
    Trouble::LostBefore,
    Trouble::LostAfter,
];

/// What to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Decides everything.
    pub seed: u64,
    /// Steps before the quiet end.
    pub steps: u64,
    /// Kinds of trouble that are left out, by bit.
    pub without: u32,
    /// Faults after this many are left out.
    pub max_faults: u64,
    /// Whether to keep a readable trace.
    pub trace: bool,
    /// A mistake of the shell, to show that it is noticed: a gap between the tiers is believed of a manifest that may be old.
    pub believe_gaps: bool,
}

impl Plan {
    /// Everything that can go wrong, for so many steps.
    #[must_use]
    pub const fn new(seed: u64, steps: u64) -> Self {
        Self {
            seed,
            steps,
            without: 0,
            max_faults: u64::MAX,
            trace: false,
            believe_gaps: false,
        }
    }

    /// Whether a kind of trouble may happen.
    #[must_use]
    pub const fn allows(&self, trouble: Trouble) -> bool {
        self.without & (1 << trouble as u32) == 0
    }

    /// The same without a kind of trouble.
    #[must_use]
    pub const fn leave_out(self, trouble: Trouble) -> Self {
        Self {
            without: self.without | 1 << trouble as u32,
            ..self
        }
    }
}

/// What differs from run to run.
#[derive(Debug, Clone)]
pub struct Knobs {
    /// Nodes.
    pub nodes: usize,
    /// Settings of upload machines.
    pub upload: Settings,
    /// Settings of read machines.
    pub read: read::Settings,
    /// Length at which local segments are closed.
    pub segment_bytes: usize,
    /// Longest usual way to a store and back, half of it.
    pub latency_ms: u64,
    /// Chunks per publishing.
    pub burst: u64,
    /// Chance of each kind of fault, in 10,000.
    pub rates: [u32; 32],
}

impl Knobs {
    /// From the seed.
    #[must_use]
    pub fn new(rng: &mut Rng) -> Self {
        let mut pick = |choices: &[u64]| choices[rng.below(choices.len())];
        let backoff = |base_ms, cap_ms| Backoff { base_ms, cap_ms };
        // A new setting is no reason to touch this.
        #[allow(clippy::needless_update)]
        let upload = Settings {
            fragment_size_bytes: pick(&[60, 200, 500, 1_500]),
            fragment_max_chunks: pick(&[2, 5, 50]) as u32,
            fragment_max_age_ms: pick(&[0, 40, 300]),
            persist_threshold: pick(&[1, 2, 5]) as u32,
            persist_interval_ms: pick(&[20, 200, 800]),
            max_in_flight_transfers: pick(&[1, 2, 4, 8]) as usize,
            transfer_deadline_ms: pick(&[300, 1_500]),
            answer_deadline_ms: pick(&[150, 600]),
            scan_max_chunks: pick(&[1, 4, 40]) as usize,
            // 1024: no groups at all; 2 and 3 make mega-groups of a few fragments.
            rebalance_threshold: pick(&[1_024, 2, 2, 3, 4, 6, 8]) as u32,
            retry: RetryPolicy {
                transient: backoff(2, 200),
                stalled: backoff(20, 600),
                control: backoff(10, 500),
                recovery: backoff(50, 1_500),
            },
            // As many answers as chance does not bring about, so that whatever is given up here is given up wrongly.
            proof: Proof {
                answers: 8,
                over_ms: 400,
            },
            ..Settings::default()
        };
        let read = read::Settings {
            read_request_bytes: pick(&[100, 400, 2_000]),
            read_ahead_bytes: pick(&[300, 1_000, 8_000]),
            first_request_bytes: pick(&[64, 300]),
            block_bytes: pick(&[1, 50]),
            max_depth: pick(&[1, 2, 4]) as usize,
            max_ready_chunks: pick(&[1, 4, 50]) as usize,
            verify_crc: true,
            backoff_min_ms: 5,
            backoff_max_ms: 200,
            stall_deadline_ms: pick(&[600, 3_000]),
            manifest_deadline_ms: 1_000,
            max_missing_attempts: 12,
        };
        let mut rates = [0; 32];
        let wild = pick(&[1, 1, 4]);
        for rate in &mut rates {
            *rate = (pick(&[0, 30, 100, 300]) * wild) as u32;
        }
        Self {
            nodes: pick(&[1, 2, 3, 3]) as usize,
            upload,
            read,
            segment_bytes: pick(&[300, 1_000, 4_000]) as usize,
            latency_ms: pick(&[1, 5, 25]),
            burst: pick(&[1, 3, 8]),
            rates,
        }
    }
}
