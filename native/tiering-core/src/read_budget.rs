//! Who gets the node's read memory next, and what has to go for it.
//!
//! One budget, one rule. Everything that was fetched counts: what is on its way, what readers hold, what the host was handed and
//! has not let go of, what the cache keeps. Who needs memory gets what is free; else the cache gives up what nobody uses; else
//! readers whose consumers rest give back what those have not asked for; else it waits. Those who wait are served by what they
//! were given so far, not by how often they ask: a reader with many requests gets no more than one with few.
//!
//! Owns the queue and the choice. Does not own the count (what is in use comes as an argument), the memory, nor the clock.

use std::collections::BTreeMap;

/// A consumer that has taken nothing for so long rests: long against the gaps of one that reads, short against a consumer's wait.
pub const REST_MS: u64 = 50;

/// What nobody gives back for so long is in the host's hands. Whoever waits is then served beyond the budget, one request at a
/// time: a host that keeps what it was handed must not stop everybody else for ever.
pub const PATIENCE_MS: u64 = 1_000;

/// The host is asked to let go of garbage this often at most.
pub const CALL_IN_MS: u64 = 200;

/// When to look again while what was asked back has not come.
const TICK_MS: u64 = 10;

/// Most readers that are asked to give back at once.
const TAKE_BACK_MAX: usize = 256;

/// The place of one request in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket {
    /// What its reader had been given when it came, on the scale that all share.
    start: u64,
    id: u64,
}

#[derive(Debug, Clone, Copy)]
struct Ask {
    reader: u64,
    bytes: u64,
    since_ms: u64,
}

/// What one reader has, as far as it can be taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Which reader.
    pub reader: u64,
    /// Bytes that are here or on their way for it and that its consumer has not taken.
    pub held_bytes: u64,
    /// What its consumer does.
    pub consumer: ConsumerState,
    /// It was asked to give back and has not done so yet.
    pub gives_back: bool,
}

impl Holder {
    /// Whether its consumer rests.
    #[must_use]
    pub const fn rests(&self, now_ms: u64) -> bool {
        match self.consumer {
            ConsumerState::Quiet { since_ms } => since_ms.saturating_add(REST_MS) <= now_ms,
            ConsumerState::Waits => false,
        }
    }
}

/// What a consumer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConsumerState {
    /// It asked, got nothing, and waits.
    Waits,
    /// It took something at this time, or was told then that there is something, and has not asked since.
    Quiet {
        /// Since when.
        since_ms: u64,
    },
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nobody waits.
    Idle,
    /// This request has its memory.
    Grant(Ticket),
    /// The cache is to give up so much of what nobody uses.
    Evict {
        /// How much.
        bytes: u64,
    },
    /// These readers are to give back all they hold.
    TakeBack {
        /// Which.
        readers: Vec<u64>,
    },
    /// The host is to be reminded of what it holds without need.
    CallIn,
    /// Nothing can be done before something is given back, or before this time.
    Wait {
        /// When to ask again at the latest.
        until_ms: u64,
    },
}

/// The queue for a node's read memory.
#[derive(Debug)]
pub struct ReadBudget {
    capacity_bytes: u64,
    asks: BTreeMap<Ticket, Ask>,
    /// What each reader was given, on the scale of tickets; of those who matter.
    given: BTreeMap<u64, u64>,
    /// The ticket served last.
    served: u64,
    last_id: u64,
    called_in_ms: Option<u64>,
}

impl ReadBudget {
    /// A budget of so many bytes.
    #[must_use]
    pub const fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            asks: BTreeMap::new(),
            given: BTreeMap::new(),
            served: 0,
            last_id: 0,
            called_in_ms: None,
        }
    }

    /// All of it.
    #[must_use]
    pub const fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.asks.len()
    }

    /// A reader needs memory.
    pub fn ask(&mut self, now_ms: u64, reader: u64, bytes: u64) -> Ticket {
        self.last_id += 1;
        let start = (self.given.get(&reader).copied().unwrap_or(0)).max(self.served);
        self.given.insert(reader, start.saturating_add(bytes));
        let ticket = Ticket {
            start,
            id: self.last_id,
        };
        let ask = Ask {
            reader,
            bytes,
            since_ms: now_ms,
        };
        self.asks.insert(ticket, ask);
        ticket
    }

    /// It is not needed any more.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.asks.remove(&ticket);
        self.forget();
    }

    /// The next step, with `used_bytes` in use now. `evictable` says whether the cache may have something that nobody uses;
    /// `holders` is asked for only if nothing else helps.
    pub fn step(
        &mut self,
        now_ms: u64,
        used_bytes: u64,
        evictable: bool,
        holders: impl FnOnce() -> Vec<Holder>,
    ) -> Step {
        let Some((&ticket, &head)) = self.asks.first_key_value() else {
            return Step::Idle;
        };
        let wanted_bytes = used_bytes.saturating_add(head.bytes);
        let missing_bytes = wanted_bytes.saturating_sub(self.capacity_bytes);
        if missing_bytes == 0 || used_bytes == 0 {
            return self.grant(ticket);
        }
        if evictable {
            return Step::Evict {
                bytes: missing_bytes,
            };
        }
        let holders = holders();
        let mut coming_bytes = (holders.iter())
            .filter(|holder| holder.gives_back)
            .fold(0_u64, |sum, holder| sum.saturating_add(holder.held_bytes));
        let was_coming = coming_bytes > 0;
        let mut readers = Vec::new();
        for victim in self.victims(now_ms, &head, &holders) {
            if coming_bytes >= missing_bytes || readers.len() >= TAKE_BACK_MAX {
                break;
            }
            coming_bytes = coming_bytes.saturating_add(victim.held_bytes);
            readers.push(victim.reader);
        }
        if !readers.is_empty() {
            return Step::TakeBack { readers };
        }
        let tick = Step::Wait {
            until_ms: now_ms.saturating_add(TICK_MS),
        };
        if was_coming {
            return tick;
        }
        let own_bytes = (holders.iter())
            .find(|holder| holder.reader == head.reader)
            .map_or(0, |holder| holder.held_bytes);
        // A chunk that does not fit beside itself: there is nobody to wait for.
        let is_alone = own_bytes.saturating_mul(2) > used_bytes;
        if is_alone || now_ms.saturating_sub(head.since_ms) >= PATIENCE_MS {
            return self.grant(ticket);
        }
        let is_due =
            (self.called_in_ms).is_none_or(|last_ms| now_ms >= last_ms.saturating_add(CALL_IN_MS));
        if is_due {
            self.called_in_ms = Some(now_ms);
            return Step::CallIn;
        }
        tick
    }

    /// Who is to give back for `head`, in this order: who has rested longest; then, if the head's consumer has nothing, those
    /// who have nothing either and come after it, the last first: half a chunk each would be a chunk for nobody.
    fn victims(&self, now_ms: u64, head: &Ask, holders: &[Holder]) -> Vec<Holder> {
        let can_give = |holder: &&Holder| {
            holder.reader != head.reader && holder.held_bytes > 0 && !holder.gives_back
        };
        let rests_since = |holder: &Holder| match holder.consumer {
            ConsumerState::Quiet { since_ms } if holder.rests(now_ms) => Some(since_ms),
            ConsumerState::Quiet { .. } | ConsumerState::Waits => None,
        };
        let mut resting: Vec<(u64, Holder)> = (holders.iter())
            .filter(can_give)
            .filter_map(|holder| Some((rests_since(holder)?, *holder)))
            .collect();
        resting.sort_by_key(|(since_ms, holder)| (*since_ms, holder.reader));
        let mut victims: Vec<Holder> = resting.into_iter().map(|(_, holder)| holder).collect();
        let head_waits = (holders.iter()).any(|holder| {
            holder.reader == head.reader && holder.consumer == ConsumerState::Waits
        });
        if head_waits {
            let mut waiting: BTreeMap<u64, Holder> = (holders.iter())
                .filter(can_give)
                .filter(|holder| holder.consumer == ConsumerState::Waits)
                .map(|holder| (holder.reader, *holder))
                .collect();
            let behind = self.asks.values().rev();
            victims.extend(behind.filter_map(|ask| waiting.remove(&ask.reader)));
        }
        victims
    }

    fn grant(&mut self, ticket: Ticket) -> Step {
        self.asks.remove(&ticket);
        self.served = self.served.max(ticket.start);
        self.forget();
        Step::Grant(ticket)
    }

    /// What was given without anybody having to wait for it is nobody's debt.
    fn forget(&mut self) {
        if self.asks.is_empty() {
            self.given.clear();
            self.called_in_ms = None;
        } else if self.given.len() > 2 * self.asks.len() + 64 {
            let served = self.served;
            self.given.retain(|_, given| *given > served);
        }
    }
}
