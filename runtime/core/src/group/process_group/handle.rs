//! [`ProcessGroup`]: a program's handle to a group.

use super::group::{Group, Timing};
use super::issue::CallOptions;
use crate::backend::{Backend, Done};
use crate::group::p2p::coalesced_ops;
use crate::group::spare::SpareOps;
use crate::group::work::Work;
use crate::op::Op;
use crate::op::buffer::DeviceKind;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, Result};
use crate::op::hints::Hints;
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::{ProcessGroupStatus, Rank};
use rcomm_recorder::record::{CallSite, CallSiteId};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A set of ranks that communicate.
///
/// This is a handle: it is cheap to clone, and clones refer to the same group. All members must issue the same
/// collectives in the same order. Ranks in arguments are ranks of the group.
///
/// # Blocking
/// Methods named after an operation return when its result is there. If that takes longer than the time-out,
/// they return an error once this rank has written its dump and asked the other ranks for their status.
/// Methods ending in `_async` return at once with a [`Work`].
///
/// # Errors
/// After an error that [`is_recoverable`](Error::is_recoverable), which in most cases was found before
/// anything was sent, the group is still usable. Any other error has aborted the group on this rank: pending
/// and later operations fail with its reason.
///
/// # What `Ok` means
/// This rank's part is done: its results are there, and its memory may be used again. With the CPU backend, a
/// collective is `Ok` only where every member has called it; if all members share memory, all agree on its outcome. A
/// send is `Ok` once its memory may be used again: a small message may not have arrived by then, and may never be
/// received.
///
/// A rank that calls an operation after another member has given up the group gets an error, never `Ok`. That holds for
/// every collective, for a send to that member, and for a receive from it, even if its message had been sent before. A
/// member that left cleanly (its world was shut down, or its group dropped) has not given up: what it sent can be
/// received. A rank that was in a collective all that time because its process was stopped (for example, by a signal)
/// gets an error too if another member has given up that collective, and `Ok` if all others had completed it.
///
/// Over sockets no rank waits, after its part, for the others to end theirs, so outcomes of one collective can differ:
/// - A rank may be done, and `Ok`, before another one gives up or dies: it only sends (the root of a broadcast, a rank
///   of a reduction that is not its root), or everything that it needs has arrived while another member still waits for
///   a late rank.
/// - A rank may be done while another one gives up, until the reason of the latter is in the store and its connections
///   are closed. This takes as long as two requests to the store, for which the rank that gives up waits 0.4 s at most.
/// - A rank that was stopped and continues learns of the member that gave up from their connection, or from the store.
///   It learns this from the store alone only once its collective has lasted for a second, or past its own deadline. It
///   may be `Ok` if it has no connection with that member and continues earlier, or if the store does not reply.
///
/// In each of these cases the group has failed, and the next collective of the rank that is `Ok` fails.
///
/// # Thread safety
/// Any thread may issue operations. Collectives of one group run in the order in which they are issued, so
/// threads that issue them must keep to one order, the same on all ranks.
#[derive(Clone)]
pub struct ProcessGroup {
    pub(crate) group: Arc<Group>,
    /// The time-out of this handle's calls, instead of the group's.
    timeout: Option<Duration>,
    /// Hints passed to the backend with this handle's calls.
    hints: Hints,
    /// Call site recorded for this handle's calls, instead of the caller's line in Rust.
    site: Option<CallSite>,
}

impl ProcessGroup {
    pub(crate) fn over(group: Arc<Group>) -> Self {
        Self {
            timeout: None,
            hints: group.hints.clone(),
            group,
            site: None,
        }
    }

    /// The group's name, the same on all members.
    pub fn name(&self) -> &str {
        &self.group.info.name
    }

    /// The purpose of the group ([`GroupOptions::desc`](crate::GroupOptions::desc)); `undefined` if it was
    /// not given.
    pub fn desc(&self) -> &str {
        &self.group.info.desc
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> u32 {
        self.group.group_rank
    }

    /// The number of ranks in the group.
    pub fn size(&self) -> u32 {
        self.group.size()
    }

    /// The members' ranks in the world, in the order of their ranks in the group.
    pub fn ranks(&self) -> &[Rank] {
        &self.group.info.ranks
    }

    /// A member's rank in the world, by its rank in the group; `None` if there is no such member.
    pub fn global_rank(&self, group_rank: u32) -> Option<Rank> {
        self.group.info.global_rank_of(group_rank)
    }

    /// A member's rank in the group, by its rank in the world; `None` if there is no such member.
    pub fn group_rank(&self, rank: Rank) -> Option<u32> {
        self.group.info.group_rank_of(rank)
    }

    /// The backend for this kind of device, if the group has one.
    pub fn backend(&self, device: DeviceKind) -> Option<&Arc<dyn Backend>> {
        let lane = self.group.lanes.iter().find(|lane| lane.device == device);
        lane.map(|lane| &lane.backend)
    }

    /// The number of operations with a [`Work`] that have not ended.
    pub fn pending(&self) -> u64 {
        self.group.pending().load(Ordering::Acquire)
    }

    /// The group's progress on this rank. Takes no lock.
    pub fn status(&self) -> ProcessGroupStatus {
        self.group.status()
    }

    /// The time-out of operations that are called through this handle, without
    /// [extensions](Self::extend_timeout).
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| self.group.timeout())
    }

    /// Sets the group's time-out for operations that this rank issues from now on: in whole milliseconds, and at least
    /// 1 ms. A handle from [`within`](Self::within) keeps its own.
    pub fn set_timeout(&self, timeout: Duration) {
        self.group.set_timeout(timeout);
    }

    /// Sets whether the group measures, on this rank, how long the operations run that are issued from now on. On the
    /// host, measuring reads the clock up to three times for each operation. The NCCL backend measures on the device,
    /// with one more event for each operation. A new group does not measure, except on the NCCL backend if
    /// `RCOMM_NCCL_TIMING` is set.
    ///
    /// # Errors
    /// `Unsupported` for `Timing::On` if a backend of the group neither runs its operations on the host's threads nor
    /// measures itself ([`Backend::can_be_timed`]).
    pub fn set_timing(&self, timing: Timing) -> Result<()> {
        self.group.set_timing(timing)
    }

    /// Adds this much time to the time-out of operations issued from now on, until the first collective that has
    /// additional time has ended: for a step that is known to be slow, such as the first one. Several calls add up, and
    /// end together. The time is added to the time-out of the group or the handle, on this rank only.
    pub fn extend_timeout(&self, extra: Duration) {
        self.group.extend_timeout(extra);
    }

    /// How much time [`extend_timeout`](Self::extend_timeout) adds to the next operation's time-out.
    pub fn timeout_extension(&self) -> Duration {
        self.group.timeout_extension()
    }

    /// The same group, with another time-out for operations that are called through the returned handle:
    /// `group.within(Duration::from_secs(5)).barrier()`.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self {
            timeout: Some(timeout),
            ..self.clone()
        }
    }

    /// The same group, with hints to the backend for calls through the returned handle, instead of those with which the
    /// group was made: `group.hinted(Hints::NONE.wait(WaitHint::Long)).barrier()`. See [`Hints`] for their effects.
    #[must_use]
    pub fn hinted(&self, hints: Hints) -> Self {
        Self {
            hints,
            ..self.clone()
        }
    }

    /// The same group, with this call site recorded for operations that are called through the returned
    /// handle: for callers in other languages, whose source line Rust cannot determine.
    ///
    /// `site` must be one that this world's recorder has interned
    /// ([`intern_call_site`](rcomm_recorder::record::FlightRecorder::intern_call_site)).
    #[must_use]
    pub fn called_at(&self, site: CallSiteId) -> Self {
        Self {
            site: Some(CallSite::Id(site)),
            ..self.clone()
        }
    }

    /// The options of the calls through this handle.
    pub(crate) fn options(&self) -> CallOptions<'_> {
        CallOptions {
            timeout: self.timeout(),
            hints: &self.hints,
            site: self.site,
        }
    }

    /// How long the backend's library expects a collective to take on the device, by its own model of the machine: for
    /// schedulers, which compare times. Nothing is sent or recorded, and the buffers stay as they are. All members call
    /// it with the same collective.
    ///
    /// # Blocking
    /// While the library connects to the other members, for [`timeout`](Self::timeout) at most.
    ///
    /// # Errors
    /// `InvalidArgument` as for the collective itself. `Unsupported` where the backend or its library has no model of
    /// it: of the included backends only NCCL's has one. `Timeout`, after which the group is unusable. `Closed` or
    /// `Aborted` if the group takes no more operations.
    pub fn estimate(&self, op: &Op<'_>) -> Result<Duration> {
        self.group.estimate(op, Deadline::In(self.timeout()))
    }

    /// The reason why the group takes no more operations; `None` while it takes them.
    pub fn refusal(&self) -> Option<&Error> {
        self.group.refusal()
    }

    /// Aborts the group for this reason: pending operations fail soon, later ones at once.
    ///
    /// May be called from any thread, while others are stuck in the group. Members that wait for this
    /// rank, now or later, get an error with the same reason, of which at most 704 bytes are kept.
    pub fn abort(&self, reason: &str) {
        let error = Error::aborted(self.group.global_rank(), reason);
        tracing::warn!(group = self.group.label(), reason, "group aborted");
        self.group.close(None, error.in_group(self.group.label()));
    }

    /// Waits for pending operations, then frees the group's connections. Later operations are refused.
    ///
    /// # Blocking
    /// For [`timeout`](Self::timeout) at most.
    ///
    /// # Errors
    /// `Timeout` if an operation is still pending then; another handle can still abort the group. The backend's error
    /// if it cannot close its connections. A group that was closed or aborted before is no error.
    pub fn destroy(self) -> Result<()> {
        let timeout = self.timeout();
        self.group.shut_down(Deadline::In(timeout).started())
    }

    #[track_caller]
    pub(crate) fn run(&self, mut op: Op<'_>) -> Result<Done> {
        let site = Location::caller();
        self.group.run(&mut op, self.options(), site)
    }

    /// Issues an operation. `unpack` makes the result of the returned `Work` from the operation that has completed.
    #[track_caller]
    pub(crate) fn submit<T>(
        &self,
        op: Op<'static>,
        unpack: impl FnOnce(Op<'static>, Done) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        let site = Location::caller();
        let in_flight = self.group.submit(op, self.options(), site, None)?;
        Ok(Work::new(in_flight, unpack))
    }

    /// Works like [`submit`](Self::submit), in the memory of an operation that has ended, if one is free.
    #[track_caller]
    pub(crate) fn submit_again<T>(
        &self,
        op: Op<'static>,
        spare: &mut SpareOps,
        unpack: impl FnOnce(Op<'static>, Done) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        let site = Location::caller();
        let in_flight = self.group.submit(op, self.options(), site, Some(spare))?;
        Ok(Work::new(in_flight, unpack))
    }

    /// The handle of a block without operations. It has ended, since there is nothing to do.
    pub(crate) fn submit_empty(&self) -> Result<Work<Vec<Op<'static>>>> {
        let block = Op::Coalesced(Vec::new());
        let in_flight = self.group.submit_nothing(block, self.options())?;
        Ok(Work::new(in_flight, coalesced_ops))
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("desc", &self.desc())
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .finish()
    }
}
