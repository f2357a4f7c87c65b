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

/// If nobody is served for so long, what is missing is in the host's hands. Whoever waits is then served beyond the budget, one request after
/// the other: a host that keeps what it was handed must not stop everybody else for ever.
pub const PATIENCE_MS: u64 = 1_000;

/// Time between two requests that are served beyond the budget.
pub const BEYOND_MS: u64 = 100;

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
    /// When a request was last served within the budget, and when one beyond it since then.
    within_ms: u64,
    beyond_ms: Option<u64>,
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
            within_ms: 0,
            beyond_ms: None,
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
            (self.within_ms, self.beyond_ms) = (now_ms, None);
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
        let is_due = |last_ms: Option<u64>, after_ms: u64| {
            last_ms.is_none_or(|last_ms| now_ms >= last_ms.saturating_add(after_ms))
        };
        if is_alone {
            return self.grant(ticket);
        }
        // As long as others are served the turn comes.
        let stuck_since_ms = Some(head.since_ms.max(self.within_ms));
        if is_due(stuck_since_ms, PATIENCE_MS) && is_due(self.beyond_ms, BEYOND_MS) {
            self.beyond_ms = Some(now_ms);
            return self.grant(ticket);
        }
        if is_due(self.called_in_ms, CALL_IN_MS) {
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
        let head_waits = (holders.iter())
            .any(|holder| holder.reader == head.reader && holder.consumer == ConsumerState::Waits);
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn waits(reader: u64, held_bytes: u64) -> Holder {
        Holder {
            reader,
            held_bytes,
            consumer: ConsumerState::Waits,
            gives_back: false,
        }
    }

    fn quiet(reader: u64, held_bytes: u64, since_ms: u64) -> Holder {
        Holder {
            consumer: ConsumerState::Quiet { since_ms },
            ..waits(reader, held_bytes)
        }
    }

    #[test]
    fn what_is_free_is_given_and_then_what_nobody_uses_and_then_what_rests() {
        let mut budget = ReadBudget::new(100);
        assert_eq!(budget.step(0, 0, true, Vec::new), Step::Idle);
        let ticket = budget.ask(1_000, 1, 40);
        let step = budget.step(1_000, 90, true, Vec::new);
        assert_eq!(step, Step::Evict { bytes: 30 });
        // Nobody uses nothing; three rest, one of them for long, and one has just taken something.
        let holders = || {
            vec![
                waits(1, 0),
                quiet(2, 20, 1_000 - REST_MS),
                quiet(3, 20, 10),
                quiet(4, 20, 999),
            ]
        };
        let readers = vec![3, 2];
        let step = budget.step(1_000, 90, false, holders);
        assert_eq!(step, Step::TakeBack { readers });
        // On its way back: waited for, and nobody else is asked.
        let holders = || {
            let gives_back = true;
            vec![
                Holder {
                    gives_back,
                    ..quiet(3, 40, 10)
                },
                quiet(5, 20, 0),
            ]
        };
        let step = budget.step(1_001, 90, false, holders);
        assert!(matches!(step, Step::Wait { .. }), "{step:?}");
        assert_eq!(budget.step(1_002, 60, false, Vec::new), Step::Grant(ticket));
        assert_eq!(budget.step(1_002, 100, false, Vec::new), Step::Idle);
    }

    #[test]
    fn half_a_chunk_each_is_a_chunk_for_the_first() {
        let mut budget = ReadBudget::new(100);
        let first = budget.ask(0, 1, 30);
        for reader in 2..=5 {
            budget.ask(0, reader, 30);
        }
        let holders = || (1..=5).map(|reader| waits(reader, 20)).collect();
        let readers = vec![5, 4];
        let step = budget.step(0, 100, false, holders);
        assert_eq!(step, Step::TakeBack { readers });
        assert_eq!(budget.step(1, 60, false, holders), Step::Grant(first));
    }

    #[test]
    fn a_chunk_that_is_larger_than_everything_is_served_beyond_it_when_nobody_else_has_anything() {
        let mut budget = ReadBudget::new(100);
        let ticket = budget.ask(0, 1, 30);
        let step = budget.step(0, 90, false, || vec![waits(1, 90), waits(2, 0)]);
        assert_eq!(step, Step::Grant(ticket));
        let ticket = budget.ask(0, 1, 300);
        assert_eq!(budget.step(0, 0, false, Vec::new), Step::Grant(ticket));
    }

    #[test]
    fn what_the_host_keeps_is_called_in_and_does_not_stop_everybody_for_ever() {
        let mut budget = ReadBudget::new(100);
        let first = budget.ask(0, 1, 30);
        let second = budget.ask(0, 2, 30);
        let (mut now_ms, mut calls, mut granted) = (0, 0, Vec::new());
        while budget.waiting() > 0 {
            match budget.step(now_ms, 100, false, Vec::new) {
                Step::CallIn => calls += 1,
                Step::Grant(ticket) => granted.push((now_ms, ticket)),
                Step::Wait { until_ms } => now_ms = until_ms,
                step => panic!("{step:?}"),
            }
        }
        let then_ms = PATIENCE_MS + BEYOND_MS;
        assert_eq!(granted, [(PATIENCE_MS, first), (then_ms, second)]);
        assert_eq!(calls, 1 + PATIENCE_MS / CALL_IN_MS);
    }

    #[test]
    fn a_long_queue_that_is_being_served_is_no_reason_to_go_beyond_the_budget() {
        let mut budget = ReadBudget::new(100);
        let tickets: Vec<_> = (0..20).map(|reader| budget.ask(0, reader, 30)).collect();
        for (number, ticket) in tickets.into_iter().enumerate() {
            // Something comes back twice a second.
            let now_ms = 10_000 + 500 * number as u64;
            if number > 0 {
                for wait_ms in [100, 300, 499] {
                    let step = budget.step(now_ms - 500 + wait_ms, 100, false, Vec::new);
                    assert!(!matches!(step, Step::Grant(_)), "{number}: {step:?}");
                }
            }
            assert_eq!(
                budget.step(now_ms, 70, false, Vec::new),
                Step::Grant(ticket)
            );
        }
    }

    #[test]
    fn who_asks_often_gets_no_more_than_who_asks_seldom() {
        let mut budget = ReadBudget::new(0);
        let (mut given, mut readers) = ([0; 3], BTreeMap::new());
        let mut now_ms = 0;
        // Two ask for 4 MiB each time, the first of them 32 times at once; the third for half a MiB.
        let first = [0; 32].into_iter().chain([1, 2]);
        for reader in first {
            let bytes = if reader == 2 { MIB / 2 } else { 4 * MIB };
            readers.insert(budget.ask(0, reader, bytes), (reader, bytes));
        }
        for _ in 0..600 {
            now_ms += PATIENCE_MS;
            let ticket = loop {
                match budget.step(now_ms, 1, false, Vec::new) {
                    Step::Grant(ticket) => break ticket,
                    Step::CallIn | Step::Wait { .. } => now_ms += PATIENCE_MS,
                    step => panic!("{step:?}"),
                }
            };
            let (reader, bytes) = readers[&ticket];
            given[reader as usize] += bytes;
            readers.insert(budget.ask(0, reader, bytes), (reader, bytes));
        }
        let most = given.iter().max().copied().unwrap_or_default();
        assert!(
            given.iter().all(|given| given + 8 * MIB >= most),
            "{given:?}"
        );
    }

    #[test]
    fn what_is_given_up_holds_nobody_up() {
        let mut budget = ReadBudget::new(100);
        let first = budget.ask(0, 1, 90);
        let second = budget.ask(0, 2, 10);
        budget.cancel(first);
        budget.cancel(first);
        assert_eq!(budget.step(0, 90, false, Vec::new), Step::Grant(second));
        assert_eq!(budget.waiting(), 0);
    }
}
