//! What a stream's tasks do and what they end with. Every task ends in an event, also one that was cancelled or died.

use tiering_core::upload::{Event, Failure, ScanBatch, ScanEnd, StoredObject};

use super::deletions::Deleted;
use crate::local_log::Scanner;
use crate::object_metadata::RootHistory;

/// What a task does, to answer for it if it cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Scan { generation: u64 },
    GetRoot { generation: u64 },
    Transfer { generation: u64, transfer: u64 },
    PutRoot { generation: u64 },
    PutGroup { generation: u64 },
    GetGroup { generation: u64 },
    Delete,
}

impl Task {
    /// The answer of a task that did not give one.
    pub(super) fn lost(self, text: &str) -> Option<Event> {
        let failure = Failure::Transient(text.to_owned());
        Some(match self {
            Self::Scan { generation } => {
                let end = ScanEnd::Failed {
                    reason: text.to_owned(),
                };
                Event::Scanned {
                    generation,
                    batch: ScanBatch {
                        chunks: Vec::new(),
                        end,
                    },
                }
            }
            Self::GetRoot { generation } => Event::RootRead {
                generation,
                outcome: Err(failure),
            },
            Self::Transfer {
                generation,
                transfer,
            } => Event::TransferDone {
                generation,
                transfer,
                outcome: Err(failure),
            },
            Self::PutRoot { generation } => Event::RootPut {
                generation,
                outcome: Err(failure),
            },
            Self::PutGroup { generation } => Event::GroupPut {
                generation,
                outcome: Err(failure),
            },
            Self::GetGroup { generation } => Event::GroupRead {
                generation,
                outcome: Err(failure),
            },
            // What waits is not the machine's.
            Self::Delete => Event::Tick,
        })
    }
}

/// What a task ended with.
pub(super) enum Done {
    Event(Event),
    RootRead(Event, RootHistory),
    Scanned(Scanner, Event),
    Stored(Event, Vec<StoredObject>),
    Deleted(Deleted),
}
