//! Yields every operation of a repeatedly read rank once, after it has ended, unless it was overwritten before. Says
//! whether one that ended was successful.
//!
//! Each recorder of a rank numbers its operations by record id, in order of issue. The cursor stores the highest id
//! that it has seen; operations that were pending when they were seen are looked up again by id until they have ended
//! or are overwritten.

use rcomm_analyzer::Snapshot;
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::{Dump, Recorder};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Maximum number of pending operations tracked per recorder; further ones are never yielded.
const MAX_PENDING: usize = 16 * 1024;

/// Identity of one recorder's records: rank, recorder, attempt of the job, and process id.
pub(crate) type RecorderKey = (Rank, Recorder, u32, u32);

pub(crate) fn recorder_key(rank: Rank, dump: &Dump) -> RecorderKey {
    let id = &dump.identity;
    (rank, dump.recorder, id.attempt, id.pid)
}

/// Position in the records of one recorder.
#[derive(Debug, Default)]
pub(crate) struct RecorderCursor {
    /// Every id up to here has been seen.
    up_to: u64,
    /// Ids up to `up_to` whose operations were pending at the last read.
    pending: BTreeSet<u64>,
    /// The dump of the last read; the same dump is skipped.
    last: Option<Arc<Dump>>,
}

/// Positions in the records of all ranks of a live view.
#[derive(Debug, Default)]
pub(crate) struct NewEntries {
    read: HashMap<RecorderKey, RecorderCursor>,
    /// See [`NewEntries::unread`].
    unread: u64,
}

impl NewEntries {
    /// Number of operations that were overwritten before they were seen to end, and so never yielded.
    pub(crate) fn unread(&self) -> u64 {
        self.unread
    }

    /// Calls `each` for every operation that ended since the last call, with its rank and dump.
    pub(crate) fn take<'a>(
        &mut self,
        snapshot: &'a Snapshot,
        mut each: impl FnMut(Rank, &'a Dump, &'a Entry),
    ) {
        let mut present = HashSet::new();
        for view in snapshot.ranks.iter() {
            for dump in view.counted() {
                let key = recorder_key(view.rank, dump);
                present.insert(key);
                let read = self.read.entry(key).or_default();
                if read
                    .last
                    .as_ref()
                    .is_some_and(|last| Arc::ptr_eq(last, dump))
                {
                    continue;
                }
                self.unread += read.advance(dump, |entry| each(view.rank, dump, entry));
                read.last = Some(dump.clone());
            }
        }
        self.read.retain(|key, _| present.contains(key));
    }
}

impl RecorderCursor {
    /// Calls `each` for every operation that ended since the last call. Returns the number of
    /// operations that were overwritten before they were seen to end.
    pub(crate) fn advance<'a>(&mut self, dump: &'a Dump, mut each: impl FnMut(&'a Entry)) -> u64 {
        let entries = &dump.entries;
        // Ids ascend in a valid dump; an entry that violates this may be skipped.
        let index_of = |id: u64| entries.binary_search_by_key(&id, |entry| entry.record_id);
        let mut unread = 0;
        self.pending.retain(|&id| match index_of(id) {
            Ok(index) if is_settled(&entries[index]) => {
                each(&entries[index]);
                false
            }
            Ok(_) => true,
            Err(_) => {
                unread += 1;
                false
            }
        });
        if let Some(first) = entries.first().filter(|_| self.up_to > 0) {
            unread += first.record_id.saturating_sub(self.up_to + 1);
        }
        let fresh = entries.partition_point(|entry| entry.record_id <= self.up_to);
        for entry in &entries[fresh..] {
            self.up_to = self.up_to.max(entry.record_id);
            if is_settled(entry) {
                each(entry);
            } else if self.pending.len() < MAX_PENDING {
                self.pending.insert(entry.record_id);
            }
        }
        unread
    }

    /// Whether all of the `begun` operations of a recorder have ended and been seen.
    #[cfg(feature = "program-spans")]
    pub(crate) fn is_settled_up_to(&self, begun: u64) -> bool {
        self.pending.is_empty() && self.up_to >= begun
    }

    /// The oldest id that may still be yielded.
    #[cfg(feature = "program-spans")]
    pub(crate) fn oldest_wanted(&self) -> u64 {
        self.pending.first().copied().unwrap_or(self.up_to + 1)
    }
}

fn is_settled(entry: &Entry) -> bool {
    entry.state >= EntryState::Completed || entry.retired
}

/// Whether an operation that ended was successful.
pub(crate) fn is_completed(dump: &Dump, entry: &Entry) -> bool {
    match entry.state {
        EntryState::Completed => true,
        EntryState::Failed => false,
        // PyTorch's gloo recorder marks completed operations only as retired.
        _ => dump.recorder == Recorder::NativeGloo,
    }
}
