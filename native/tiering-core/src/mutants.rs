//! Deliberate mistakes: each is a decision of this crate taken wrongly, so that the simulator can show that it would notice.
//!
//! Without the feature `mutants` the macro is `false`, and nothing of this is in the program.

/// Whether this mistake is to be made now.
macro_rules! mutant {
    ($name:ident) => {{
        #[cfg(feature = "mutants")]
        let active = $crate::mutants::is_active($crate::mutants::Mutant::$name);
        #[cfg(not(feature = "mutants"))]
        let active = false;
        active
    }};
}
pub(crate) use mutant;

#[cfg(feature = "mutants")]
pub use active::{Mutant, activate, is_active};

#[cfg(feature = "mutants")]
mod active {
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Number of the active mutant plus one; 0 = none.
    static ACTIVE: AtomicUsize = AtomicUsize::new(0);

    macro_rules! mutants {
        ($($(#[$doc:meta])* $name:ident,)*) => {
            /// The mistakes.
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub enum Mutant { $($(#[$doc])* $name,)* }

            impl Mutant {
                /// All of them.
                pub const ALL: &'static [Self] = &[$(Self::$name,)*];
            }
        };
    }

    mutants! {
        /// The root is published when it is in the bucket, before the pointer names it.
        PublishBeforeCommit,
        /// The pointer is asked to move without the root being there: its upload's failure counts as done.
        CommitWithoutRoot,
        /// A fragment enters the manifest when it is sent, not when it has arrived.
        PersistBeforeTransfer,
        /// A fragment that failed for a reason that stays is dropped.
        DropFailedFragment,
        /// Whatever has arrived enters the manifest, in the order of arrival.
        ApplyOutOfOrder,
        /// Results of transfers from before a recovery count, and their references are used again.
        IgnoreGeneration,
        /// A fragment that waits for its retry has no timer.
        ForgetRetryTimer,
        /// The persist interval has no timer.
        ForgetPersistTimer,
        /// What retention drops is deleted at once.
        DeleteBeforePersist,
        /// A commit whose outcome is unknown counts as done.
        UnknownCommitIsSuccess,
        /// A root that is not there counts as an empty manifest.
        MissingRootIsEmpty,
        /// An unavailable metadata store counts as a stream that never persisted.
        UnavailableIsNotFound,
        /// Fragments are sent without an anchor.
        SkipAnchor,
        /// The manifest's next offset is one too high.
        NextOffsetOffByOne,
        /// A pointer of a higher epoch does not depose.
        IgnoreEpoch,
        /// An empty local log is a reason to start over.
        ResetOnEmptyLog,
        /// The chunk in front of the place where the manifest ends is not compared with the manifest.
        SkipSeam,
        /// A failed scan is skipped over: draining goes on at the committed chunk.
        SkipFailedScan,
        /// After a conflict the edits go on from the manifest in memory.
        KeepManifestOnConflict,
        /// The old root is deleted although the new one is not committed.
        DeleteOldRootEarly,
        /// The replaced root is deleted with the persist that replaces it, under the hands of a replica that fetches it.
        DeleteReplacedRootAtOnce,
        /// The garbage of a lost race is deleted at once, and with it what the pointer may name.
        DeleteGarbageOnConflict,
        /// One fragment more than the bound asks for is dropped.
        RetainTooMuch,
        /// Retention forgets to take what it dropped off the total.
        RetainKeepsTotal,
        /// The last entry of a root is never dropped.
        RetainLastEntry,
        /// By age even the newest fragment is dropped.
        ExpireNewest,
        /// A fragment with a timestamp from the future counts as too old.
        FutureStampIsOld,
        /// A step of the system's clock is believed.
        BelieveClockSteps,
        /// The store's clock is ignored.
        IgnoreStoreClock,
        /// The answer of a transfer that had one already is applied again.
        ApplyDuplicate,
        /// A recovery happens although its reason is gone.
        NeverCallOffRecovery,
        /// The edits of a failed persist are forgotten.
        ForgetEditsOfFailedPersist,
        /// What expires inside groups is deleted at once, and the groups that it uses up.
        DeleteGroupBeforePersist,
        /// What has expired inside a group before is looked at, and taken off the total, once more.
        ExpireInGroupTwice,
        /// With the oldest fragments of a leading group the whole group is dropped.
        DropWholeLeadingGroup,
        /// A group that expires in part does not move the manifest's beginning.
        KeepBeginningInGroup,
        /// A group whose upload, or whose reading, is not answered is waited for without a deadline.
        ForgetGroupDeadline,
        /// A group that is not readable is not asked for again.
        ForgetGroupRetry,
        /// An answer for an earlier group counts for the one under way.
        IgnoreGroupTicket,
        /// A group is named by the root before it is in the bucket.
        NameGroupBeforePut,
        /// A group takes the place of everything from its run on, also of what was appended while it was on its way.
        RebalanceSwallowsAppend,
        /// A group that is not readable when the manifest is cut back is given up at once.
        GiveUpUnreadableGroup,
        /// When the manifest is cut back, a store that does not answer counts as one that says that the group is gone.
        CountEveryFailureAsEvidence,
        /// An edit is applied to whatever manifest is known, and what comes out is not compared.
        ApplyEditUnchecked,
        /// Persisting does not wait for a rebalance under way.
        PersistDuringRebalance,
        /// The index's positions count from the object's start.
        IndexPositionOffByHeader,
        /// The reader goes on one fragment too far at a fragment's end.
        ReaderSkipsFragment,
        /// The reader does not check the chunks' CRC.
        ReaderIgnoresCrc,
        /// The reader takes a short answer for a whole one.
        ReaderDropsShortRest,
        /// The reader starts over at the fragment's start after its object is gone.
        ReaderRepeatsAfterGone,
        /// The reader does not ask again after a fault.
        ReaderForgetsRetry,
        /// An offset below the local log's first is looked for there.
        RouteLocalBelowFloor,
        /// `first` is the local log's first, whatever the remote tier has.
        RouteFirstIsLocal,
        /// The entry after the one that holds the offset.
        SearchOffByOne,
        /// The entry after the first that is new enough.
        TimestampSearchOffByOne,
    }

    /// Makes the mistake from now on, in the whole process; `None`: none.
    pub fn activate(mutant: Option<Mutant>) {
        ACTIVE.store(
            mutant.map_or(0, |mutant| mutant as usize + 1),
            Ordering::SeqCst,
        );
    }

    /// Whether the mistake is to be made.
    #[must_use]
    pub fn is_active(mutant: Mutant) -> bool {
        ACTIVE.load(Ordering::Relaxed) == mutant as usize + 1
    }
}
