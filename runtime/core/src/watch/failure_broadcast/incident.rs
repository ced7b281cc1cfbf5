//! [`Incident`]: the state of one fault, shared by the watchdog and the thread that uses the store.

use crate::op::error::Error;
use crate::op::info::OpInfo;
use crate::watch::failure_broadcast::RollCall;
use crate::watch::status_exchange::{StatusQuery, StatusReplies};
use rcomm_recorder::model::{ProcessGroupInfo, Rank};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One fault of this rank: what its alarm says, and what the other ranks have answered.
pub(crate) struct Incident {
    info: ProcessGroupInfo,
    wire_id: u64,
    seq: u64,
    is_p2p: bool,
    /// The error, as text.
    pub(super) cause: String,
    /// The part of `cause` that is the same on every rank that detects the fault.
    pub(super) finding: String,
    /// Members whose processes are known to have ended: their status is not waited for.
    gone: Vec<Rank>,
    /// Members to which a connection was lost: their processes may have ended.
    lost: Vec<Rank>,
    /// The ranks for which this rank waited until its time-out.
    waited_for: Vec<Rank>,
    timeout: Duration,
    progress: Mutex<IncidentProgress>,
    changed: Condvar,
}

/// The progress of the thread that uses the store.
#[derive(Default)]
pub(super) struct IncidentProgress {
    /// Whether the attempt to raise the alarm has ended, with or without success.
    pub(super) raise_ended: bool,
    /// Whether that attempt has ended because the store did not answer in time.
    pub(super) raise_unanswered: bool,
    /// Since when each look has shown that a signal has stopped the process that serves the store.
    pub(super) store_stopped_since: Option<Instant>,
    /// The other ranks' status, or why it is not known; `None` until the exchange has ended.
    pub(super) answers: Option<StatusReplies>,
    /// Whether the store's connection failed during the alarm, and another request after it failed too. Whether the
    /// process that serves the store has ended is not known.
    pub(super) store_lost: bool,
}

impl IncidentProgress {
    /// Whether the store has not replied to the alarm, so far or in time.
    pub(super) fn awaits_store(&self) -> bool {
        !self.raise_ended || self.raise_unanswered
    }
}

impl Incident {
    /// A fault of the operation `op_info`. `finding` is the part of the error that is the same on every rank.
    pub(crate) fn new(
        info: &ProcessGroupInfo,
        wire_id: u64,
        op_info: &OpInfo,
        finding: &str,
        error: &Error,
    ) -> Arc<Self> {
        let ranks_if = |condition: bool| match condition {
            true => error.ranks().to_vec(),
            false => Vec::new(),
        };
        Arc::new(Self {
            info: info.clone(),
            wire_id,
            cause: error.to_string(),
            finding: finding.to_owned(),
            gone: ranks_if(error.are_gone()),
            lost: ranks_if(error.is_loss() && !error.are_gone()),
            waited_for: ranks_if(error.is_time_out()),
            timeout: op_info.timeout,
            seq: op_info.seq,
            is_p2p: op_info.is_p2p,
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// A fault of this rank that belongs to no operation: the other ranks make dumps, and are not asked for
    /// their status.
    pub(crate) fn of_rank(cause: &str) -> Arc<Self> {
        let info = ProcessGroupInfo {
            id: ProcessGroupInfo::UNKNOWN_ID,
            name: String::new(),
            desc: String::new(),
            ranks: Arc::default(),
        };
        Arc::new(Self {
            info,
            wire_id: 0,
            seq: 0,
            is_p2p: false,
            cause: cause.to_owned(),
            finding: cause.to_owned(),
            gone: Vec::new(),
            lost: Vec::new(),
            waited_for: Vec::new(),
            timeout: Duration::ZERO,
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// The members of the operation.
    pub(super) fn members(&self) -> &[Rank] {
        &self.info.ranks
    }

    /// The request for the status of the operation's members. `is_stopped` returns whether a signal has stopped a rank;
    /// `roll_call` is the newest that this rank has made or joined.
    pub(super) fn query<'a>(
        &'a self,
        is_stopped: &'a dyn Fn(Rank) -> bool,
        roll_call: Option<RollCall>,
    ) -> StatusQuery<'a> {
        StatusQuery {
            members: &self.info.ranks,
            wire_id: self.wire_id,
            seq: self.seq,
            is_p2p: self.is_p2p,
            gone: &self.gone,
            lost: &self.lost,
            is_stopped,
            roll_call,
            waited_for: &self.waited_for,
            timeout: self.timeout,
        }
    }

    /// Changes the progress and wakes the waiting threads.
    pub(super) fn update(&self, change: impl FnOnce(&mut IncidentProgress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Waits until `until` holds, for at most `timeout`; returns the progress in either case.
    pub(super) fn wait(
        &self,
        timeout: Duration,
        until: impl Fn(&IncidentProgress) -> bool,
    ) -> MutexGuard<'_, IncidentProgress> {
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(progress, timeout, |progress| !until(progress));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
