//! The manifest's tree: moving runs of entries into groups, and what is read of groups to expire or to clear them.
//!
//! Persisting, rebalancing, retention inside groups and clearing away are one at a time, in turn: whichever ends, the next one
//! in line that has something to do begins, so none of them waits for more than the other three. Every answer has a deadline,
//! every failure a time for its retry; meanwhile the others have their turn. Fragments are applied all the time: they come at
//! the end, and what the others touch is in front of it.

use std::sync::Arc;

use log_format::manifest::{Entry, Group, Kind, Root};

use super::status::ProblemKind;
use super::{Effect, Failure, Phase, StoredObject, UploadMachine};
use crate::manifest::cut_back::CutBack;
use crate::manifest::trim::{self, LeadingGroups, Look};
use crate::manifest::{edit, rebalance};
mod clearing;
mod opening;

use clearing::Condemned;
use opening::Evidence;
pub(super) use opening::Left;

/// Groups that may wait for a persist: they are kept in memory until then, to be cleared away if it never comes.
const FRESH_MAX: usize = 4;
/// Objects that may wait for the persist that no longer names them before retention goes on.
const GARBAGE_MAX: usize = 2_048;
/// Failures in a row that are a problem, if each could pass by itself.
const PASSING_IS_A_PROBLEM_AFTER: u32 = 3;

/// Who may change the manifest, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Turn {
    Retention,
    Rebalance,
    Clearing,
    #[default]
    Persist,
}

impl Turn {
    fn next(self) -> Self {
        match self {
            Self::Retention => Self::Rebalance,
            Self::Rebalance => Self::Clearing,
            Self::Clearing => Self::Persist,
            Self::Persist => Self::Retention,
        }
    }
}

/// What became of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// There was nothing to do, or it is not time yet.
    Not,
    /// Something was done, and nothing is waited for.
    Done,
    /// An answer is waited for.
    Waits,
}

#[derive(Debug, Clone)]
enum Work {
    Put { position: usize, group: Arc<Group> },
    Descend { entry: Entry },
    Clear,
    Open { entry: Entry },
}

#[derive(Debug, Clone)]
struct UnderWay {
    ticket: u64,
    deadline_ms: u64,
    work: Work,
}

#[derive(Debug, Clone, Default)]
struct Retry {
    failures: u32,
    at_ms: Option<u64>,
}

impl Retry {
    /// Whether it is not time yet.
    fn waits(&self, now_ms: u64) -> bool {
        self.at_ms.is_some_and(|at| at > now_ms)
    }
}

/// A group that was made since the last persist.
#[derive(Debug, Clone)]
pub(super) struct Fresh {
    pub(super) entry: Entry,
    pub(super) group: Arc<Group>,
    end_offset: u64,
}

/// See the module's page.
#[derive(Debug, Clone, Default)]
pub(super) struct Tree {
    under_way: Option<UnderWay>,
    turn: Turn,
    put: Retry,
    descent: Retry,
    clearing: Retry,
    opening: Retry,
    /// That the group which `opening` tries to read is not to be had.
    evidence: Evidence,
    /// The persisted manifest, being cut back to where the local log starts.
    cutting: Option<(Arc<Root>, CutBack)>,
    leading: LeadingGroups,
    fresh: Vec<Fresh>,
    /// Until the persist that replaces their manifest.
    condemned: Vec<Entry>,
    /// To be cleared away, last one first. Not longer than a root and three groups.
    to_clear: Vec<Condemned>,
}

impl Tree {
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_none()
    }

    pub(super) fn is_rebalancing(&self) -> bool {
        matches!(
            &self.under_way,
            Some(UnderWay {
                work: Work::Put { .. },
                ..
            })
        )
    }

    pub(super) fn fresh(&self) -> &[Fresh] {
        &self.fresh
    }

    pub(super) fn has_work(&self) -> bool {
        !self.is_idle() || !self.to_clear.is_empty()
    }

    /// The groups made since the last persist and what they name, each with its end.
    pub(super) fn fresh_objects(&self) -> impl Iterator<Item = (StoredObject, u64)> + '_ {
        self.fresh.iter().flat_map(|fresh| {
            let own = (StoredObject::of(&fresh.entry), fresh.end_offset);
            std::iter::once(own).chain(super::objects(&fresh.group.entries, fresh.end_offset))
        })
    }
}

impl UploadMachine {
    /// Whether nobody is changing the manifest.
    pub(super) fn mutator_is_idle(&self) -> bool {
        self.persist.is_idle() && self.tree.is_idle()
    }

    /// Gives everybody their turn until somebody waits for an answer or nobody has anything to do.
    pub(super) fn maybe_mutate(&mut self) {
        let mut idle = 0;
        while idle < 4 && self.mutator_is_idle() && matches!(self.phase, Phase::Running) {
            self.tree.turn = self.tree.turn.next();
            let taken = match self.tree.turn {
                Turn::Retention => self.maybe_trim(),
                Turn::Rebalance => self.maybe_rebalance(),
                Turn::Clearing => self.maybe_clear(),
                Turn::Persist => self.maybe_persist(),
            };
            idle = match taken {
                Taken::Not => idle + 1,
                Taken::Done | Taken::Waits => 0,
            };
        }
    }

    /// The deadline of what is under way, or the time of the next retry.
    pub(super) fn tree_deadline_ms(&self) -> Option<u64> {
        if let Some(under_way) = &self.tree.under_way {
            return Some(under_way.deadline_ms);
        }
        let retries = [
            &self.tree.put,
            &self.tree.descent,
            &self.tree.clearing,
            &self.tree.opening,
        ];
        let next = retries.into_iter().filter_map(|retry| retry.at_ms).min();
        next.filter(|_| self.persist.is_idle())
    }

    /// Whether retention inside groups waits to read one again.
    pub(super) fn descent_waits(&self) -> bool {
        self.tree.descent.at_ms.is_some()
    }

    /// Whether a recovery waits to read a group again.
    pub(super) fn opening_waits(&self) -> bool {
        self.tree.opening.at_ms.is_some()
    }

    /// Whether so much waits for its deletion that retention waits for a persist.
    pub(super) fn garbage_is_full(&self) -> bool {
        self.garbage.len() >= GARBAGE_MAX
    }

    fn begin(&mut self, work: Work) -> u64 {
        let ticket = self.ticket();
        let deadline_ms = self
            .now_ms
            .saturating_add(self.settings.transfer_deadline_ms);
        self.tree.under_way = Some(UnderWay {
            ticket,
            deadline_ms,
            work,
        });
        ticket
    }

    fn read_group(&mut self, work: Work, entry: &Entry) -> Taken {
        let generation = self.begin(work);
        self.effects.push_back(Effect::GetGroup {
            generation,
            kind: entry.kind,
            first_offset: entry.first_offset,
            uid: entry.uid,
        });
        Taken::Waits
    }

    // Retention.

    fn maybe_trim(&mut self) -> Taken {
        if self.diverged || self.unconfirmed {
            return self.no_descent();
        }
        let look = trim::look(
            &self.manifest,
            &self.tree.leading,
            self.bound,
            self.wall_now_ms(),
            self.persisted.next_offset,
        );
        let full = self.garbage_is_full();
        match look {
            Look::Need(entry) if !full => {
                if self.tree.descent.waits(self.now_ms) {
                    return Taken::Not;
                }
                self.tree.descent.at_ms = None;
                self.read_group(Work::Descend { entry }, &entry)
            }
            Look::Trim(edit, gone) if !full => {
                self.tree.descent.at_ms = None;
                if edit::apply(&mut self.manifest, edit).is_err() {
                    return Taken::Not;
                }
                for (entry, end_offset) in gone {
                    self.tree.leading.remove(&entry);
                    self.garbage.insert(StoredObject::of(&entry), end_offset);
                }
                self.note_edit();
                Taken::Done
            }
            Look::Keep => self.no_descent(),
            Look::Need(_) | Look::Trim(..) => {
                self.tree.descent.at_ms = None;
                self.persist_first()
            }
        }
    }

    /// There is more to do, but only after a persist.
    fn persist_first(&mut self) -> Taken {
        match std::mem::replace(&mut self.persist.at_once, true) {
            true => Taken::Not,
            false => Taken::Done,
        }
    }

    /// No group is to be read, so that one was not readable is nobody's problem any more.
    fn no_descent(&mut self) -> Taken {
        self.tree.descent = Retry::default();
        self.group_problem_is_over();
        Taken::Not
    }

    // Rebalance.

    fn maybe_rebalance(&mut self) -> Taken {
        let full = self.tree.fresh.len() >= FRESH_MAX;
        let threshold = self.rebalance_threshold();
        let Some(run) = rebalance::next_run(&self.manifest.entries, threshold) else {
            self.tree.put = Retry::default();
            self.group_problem_is_over();
            return Taken::Not;
        };
        if full {
            self.tree.put.at_ms = None;
            return self.persist_first();
        }
        if self.tree.put.waits(self.now_ms) {
            return Taken::Not;
        }
        let Some(group) = rebalance::group_of(&self.manifest, run).map(Arc::new) else {
            return Taken::Not;
        };
        self.tree.put.at_ms = None;
        let next_offset = super::end_of(&self.manifest, run.position + run.length);
        let generation = self.begin(Work::Put {
            position: run.position,
            group: Arc::clone(&group),
        });
        self.effects.push_back(Effect::PutGroup {
            generation,
            next_offset,
            group,
        });
        Taken::Waits
    }

    pub(super) fn rebalance_threshold(&self) -> usize {
        usize::try_from(self.settings.rebalance_threshold).unwrap_or(usize::MAX)
    }

    pub(super) fn on_group_put(&mut self, generation: u64, outcome: Result<u32, Failure>) {
        let awaited = |under_way: &mut UnderWay| {
            under_way.ticket == generation && matches!(under_way.work, Work::Put { .. })
        };
        let Some(UnderWay {
            work: Work::Put { position, group },
            ..
        }) = self.tree.under_way.take_if(awaited)
        else {
            return;
        };
        match outcome {
            Ok(uid) => self.group_put(position, group, uid),
            Err(failure) => {
                let text = format!("group at offset {} is not stored", group.first_offset);
                self.group_failed(|tree| &mut tree.put, &text, &failure);
            }
        }
    }

    fn group_put(&mut self, position: usize, group: Arc<Group>, uid: u32) {
        self.tree.put = Retry::default();
        self.group_problem_is_over();
        match group.kind {
            Kind::Fragment => {}
            Kind::Group => self.counters.groups_created += 1,
            Kind::KiloGroup => self.counters.kilo_groups_created += 1,
            Kind::MegaGroup => self.counters.mega_groups_created += 1,
        }
        match edit::replace(&mut self.manifest, position, &group, uid) {
            Ok(entry) => {
                let end_offset = super::end_of(&self.manifest, position + 1);
                self.tree.fresh.push(Fresh {
                    entry,
                    group,
                    end_offset,
                });
                self.note_edit();
            }
            // Cannot happen: nobody else touches what is in front of the manifest's end. If it does, another group is made.
            Err(_) => {
                let object = StoredObject::Group {
                    kind: group.kind,
                    first_offset: group.first_offset,
                    uid,
                };
                self.garbage.insert(object, group.first_offset);
            }
        }
    }

    // Reading.

    pub(super) fn on_group_read(&mut self, generation: u64, outcome: Result<Group, Failure>) {
        let awaited = |under_way: &mut UnderWay| {
            under_way.ticket == generation && !matches!(under_way.work, Work::Put { .. })
        };
        match self.tree.under_way.take_if(awaited) {
            Some(UnderWay {
                work: Work::Descend { entry },
                ..
            }) => self.descended(entry, outcome),
            Some(UnderWay {
                work: Work::Open { entry },
                ..
            }) => self.opened_for_cut(entry, outcome),
            Some(UnderWay {
                work: Work::Clear, ..
            }) => self.opened(outcome),
            Some(_) | None => {}
        }
    }

    fn descended(&mut self, entry: Entry, outcome: Result<Group, Failure>) {
        let outcome = outcome.and_then(|group| {
            let inserted = self.tree.leading.insert(entry, Arc::new(group));
            inserted.map_err(|text| Failure::Corrupt(text.to_owned()))
        });
        match outcome {
            Ok(()) => {
                self.tree.descent = Retry::default();
                self.group_problem_is_over();
            }
            Err(failure) => {
                let text = format!("group at offset {} is not readable", entry.first_offset);
                self.group_failed(|tree| &mut tree.descent, &text, &failure);
            }
        }
    }

    fn group_failed(&mut self, retry: fn(&mut Tree) -> &mut Retry, what: &str, failure: &Failure) {
        self.counters.group_failures += 1;
        let doublings = retry(&mut self.tree).failures;
        let delay_ms = self
            .chance
            .jitter(self.settings.retry.control.delay_ms(doublings));
        let retry = retry(&mut self.tree);
        retry.failures = doublings.saturating_add(1);
        retry.at_ms = Some(self.now_ms.saturating_add(delay_ms.max(1)));
        let (passing, text) = (matches!(failure, Failure::Transient(_)), failure.text());
        if !passing || doublings + 1 >= PASSING_IS_A_PROBLEM_AFTER {
            self.problems
                .set(ProblemKind::Group, format!("{what}: {text}"));
        }
    }

    fn group_problem_is_over(&mut self) {
        let tree = &self.tree;
        if [&tree.put, &tree.descent, &tree.opening]
            .iter()
            .all(|retry| retry.failures == 0)
        {
            self.problems.clear(ProblemKind::Group);
        }
    }

    // From outside.

    /// Answers that did not come.
    pub(super) fn expire_tree(&mut self) {
        let now_ms = self.now_ms;
        let Some(under_way) = &self.tree.under_way else {
            return;
        };
        if under_way.deadline_ms > now_ms {
            return;
        }
        let ticket = under_way.ticket;
        let lost = || Failure::Stalled("no answer in time".to_owned());
        self.on_group_put(ticket, Err(lost()));
        self.on_group_read(ticket, Err(lost()));
    }

    /// A persist has gone through: groups made before it are durable, and groups that it replaced are nobody's.
    pub(super) fn tree_persisted(&mut self) {
        self.tree.fresh.clear();
        let condemned = std::mem::take(&mut self.tree.condemned);
        let condemned = condemned.into_iter().map(|entry| Condemned {
            entry,
            opened: false,
        });
        self.tree.to_clear.extend(condemned);
    }

    /// The manifest is being left behind.
    pub(super) fn abandon_tree(&mut self) {
        let tree = std::mem::take(&mut self.tree);
        self.tree = Tree {
            turn: tree.turn,
            condemned: tree.condemned,
            to_clear: tree.to_clear,
            ..Tree::default()
        };
        self.problems.clear(ProblemKind::Group);
    }
}
