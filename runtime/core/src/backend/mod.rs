//! The interface between a group and what moves the bytes: a [`Backend`] starts or runs operations; a [`Pending`]
//! is an operation that was started.
//!
//! A backend gives no sequence numbers (it gets them in a [`Call`]), records no operations and makes no dumps: the
//! group does. It guarantees three things. Operations of a group happen in the order of their turns. A buffer is
//! returned only when neither code nor a device can still access it. And every wait ends, by completion, deadline or
//! abort.

mod communicator;
mod copies;
pub mod fake;
mod later;
#[allow(unsafe_code)]
pub(crate) mod memory;
pub mod support;
mod window;
pub mod wrapper;

pub use communicator::{CommMemory, CommState};
pub use later::Later;
pub use window::{BackendWindow, Registration};

use crate::config::Config;
use crate::op::Op;
use crate::op::buffer::{Buffer, DeviceKind};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::hints::Hints;
use crate::store::Store;
use rcomm_recorder::model::{DType, Frame, OpType, ProcessGroupInfo, Rank};
use rcomm_recorder::publish::{Secret, Tls};
use rcomm_recorder::record::FlightRecorder;
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The state that a world's backends share. It is made once, before the first group.
#[derive(Clone)]
pub struct WorldContext {
    /// This process's rank in the world.
    pub rank: Rank,
    /// The number of ranks in the world.
    pub world_size: u32,
    /// Rank among the processes of this host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Processes of the job on this host, if the launcher sets it.
    pub local_world_size: Option<u32>,
    /// The job's name, equal on all ranks.
    pub job: String,
    /// The number of the attempt, from 0.
    pub attempt: u32,
    /// The world's store, under a prefix for backends.
    pub store: Arc<dyn Store>,
    /// The job secret. Both ends of every data connection must prove that they know it.
    pub secret: Secret,
    /// This rank's TLS identity; `None` if the job does not use TLS.
    pub tls: Option<Tls>,
    /// The configuration of the world.
    pub config: Arc<Config>,
    /// The rank's flight recorder, in which a backend records the state of its connections; `None` in tests.
    pub recorder: Option<Arc<FlightRecorder>>,
    /// The time by which the world must be made. A backend that opens does not wait for the store beyond it.
    pub deadline: Deadline,
    /// Takes what a backend need not do before its first group is made.
    pub later: Later,
}

/// The group that a backend serves.
#[derive(Clone)]
pub struct GroupContext {
    /// Name, description, members (global ranks in order of group rank).
    pub info: ProcessGroupInfo,
    /// This process's rank in the group.
    pub group_rank: u32,
    /// A number that is the same on all members and that no two live groups of the world with a
    /// common member share: it separates their traffic on shared connections.
    pub wire_id: u64,
    /// The world's store, under a prefix for this group and backend.
    pub store: Arc<dyn Store>,
    /// The hints of the options with which the group was made. Its calls have them too, unless they are given others.
    pub hints: Hints,
}

impl GroupContext {
    /// The number of ranks in the group.
    pub fn size(&self) -> u32 {
        // Ranks are `u32`, so a group of distinct ranks has at most that many.
        self.info.ranks.len() as u32
    }
}

/// Makes the backends of a world's groups. The configuration selects a factory by its name.
///
/// # Thread safety
/// A world has a factory of its own. Several threads may make groups at the same time.
pub trait BackendFactory: Send + Sync {
    /// The name of the backend, in configurations and in records.
    fn name(&self) -> &'static str;

    /// The kind of device whose memory the backend takes.
    fn device(&self) -> DeviceKind;

    /// Connects this rank to the members of a group.
    ///
    /// # Blocking
    /// May wait for the other members, until `deadline`. A backend may also connect only in its first operation.
    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>>;

    /// The facts by which other ranks find this one: keys of [`WorldContext::store`], and values. The world writes
    /// them, in one request with its own keys, before it makes the first group.
    fn announcement(&self) -> Vec<(String, Vec<u8>)> {
        Vec::new()
    }

    /// Compares the `value` of all members of a group, under the number `wire_id`: the value of the first
    /// member that calls counts. Returns `None` where this backend cannot compare faster than the store.
    /// The world calls this on its first backend, whichever backend the group will use.
    ///
    /// # Blocking
    /// Until the hosts of all members are known, or the deadline. Does not wait for the members' calls.
    ///
    /// # Errors
    /// Those of the store.
    fn agree(
        &self,
        wire_id: u64,
        value: &[u8],
        ranks: &[Rank],
        group_rank: u32,
        deadline: Deadline,
    ) -> Result<Option<Agreement>> {
        let _ = (wire_id, value, ranks, group_rank, deadline);
        Ok(None)
    }

    /// Whether the process of a rank of the world is known to have ended. The default returns `false`.
    ///
    /// # Blocking
    /// For at most `limit`.
    fn is_lost(&self, rank: Rank, limit: Duration) -> bool {
        let _ = (rank, limit);
        false
    }
}

/// The result of a rank's [`BackendFactory::agree`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// This rank was the first, or the first gave the same value.
    Same,
    /// The first gave this value, which is truncated if it is long.
    Other(Vec<u8>),
}

/// A function that opens a backend for a world.
pub type OpenBackend = Box<dyn FnOnce(&WorldContext) -> Result<Arc<dyn BackendFactory>> + Send>;

/// The backends that every [`World`](crate::World) of a type can open.
pub trait BackendSet {
    /// The backends that a world of this configuration needs, in the order in which they are opened. The first is
    /// opened before this rank publishes its address. It takes host memory, and the world itself uses it where ranks
    /// must compare or agree on values.
    fn backends(config: &Config) -> Vec<OpenBackend>;

    /// Prepares the process for these backends. Called first when a world is made, before the runtime starts a thread.
    ///
    /// # Errors
    /// Those of a backend: the world is then not made.
    fn prepare(config: &Config) -> Result<()> {
        let _ = config;
        Ok(())
    }
}

/// The parameters that a group passes to its backend with an operation.
#[derive(Clone, Debug)]
pub struct Call {
    /// The sequence number (`collective_seq_id`, or `p2p_seq_id`), for error messages and comparisons of ranks.
    pub seq: u64,
    /// Position in the order of this backend's collectives: 1, 2, 3, ... without gaps. Of any two, the one with the
    /// smaller turn comes first, whichever thread arrives first. 0 for sends and receives: they wait for no
    /// collective, and those that are issued to or from one peer keep their order of issue.
    pub turn: u64,
    /// The moment at which the operation fails with `Timeout`.
    pub deadline: Deadline,
    /// The caller's hints, which a backend may ignore.
    pub hints: Hints,
}

/// The result of an operation, without the contents of its buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Done {
    /// How long it ran, where the backend measures.
    pub duration: Option<Duration>,
    /// The sender's rank in the group, for a receive from any rank.
    pub source: Option<u32>,
    /// The driver's number of the CUDA graph into which an issued operation was captured. Nothing more is
    /// known of the operation then.
    pub graph_id: Option<u64>,
}

/// The state of an issued operation.
#[derive(Clone, Debug)]
pub enum Progress {
    /// The operation was issued and has not started.
    Queued,
    /// The operation runs.
    Started,
    /// Ended without an error; final.
    Completed(Done),
    /// Ended with an error; final.
    Failed(Error),
}

impl Progress {
    /// Whether the operation has ended, with or without an error.
    pub const fn has_ended(&self) -> bool {
        matches!(self, Self::Completed(_) | Self::Failed(_))
    }
}

/// A queue of work on a device, which [`Pending::wait_stream`] makes wait.
///
/// A backend implements it for its own type of streams, and finds that type again by [`as_any`](Self::as_any).
pub trait Stream: fmt::Debug + Send + Sync {
    /// The stream as its own type.
    fn as_any(&self) -> &dyn Any;
}

impl<S: Stream + ?Sized> Stream for Arc<S> {
    fn as_any(&self) -> &dyn Any {
        (**self).as_any()
    }
}

/// An operation that was issued.
///
/// # Thread safety
/// The caller and the watchdog use it at the same time.
pub trait Pending: Send + Sync {
    /// The state of the operation. Does not wait.
    fn progress(&self) -> Progress;

    /// Waits until the operation has ended or the deadline has passed; returns the state at that moment.
    fn wait(&self, deadline: Deadline) -> Progress;

    /// Makes a stream of a device wait for the end of the operation. The host does not wait.
    ///
    /// # Errors
    /// `Unsupported` if the operation does not run on a stream, or runs on a stream of another type.
    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("the operation runs on no stream for which {stream:?} could wait"),
        ))
    }

    /// The operation with its buffers, once, after it has ended and the backend provably no longer uses the
    /// buffers. `None` until then, and always if the backend cannot prove it.
    fn reclaim(&self) -> Option<Op<'static>>;

    /// This handle as a value of its own type, for the backend that gets it in [`Backend::issue_again`] and uses it if
    /// the type is its own. `None` if the backend has no use for it, as by default.
    fn into_any(self: Arc<Self>) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
}

/// A listener for the progress of an issued operation.
///
/// # Blocking
/// Called on a thread of the backend or on the one that issues, possibly under the backend's locks:
/// implementations are short and wait for no other thread.
pub trait Observer: Send + Sync {
    /// The operation has started.
    fn started(&self);

    /// The operation has ended: [`Pending::progress`] returns how.
    fn ended(&self);

    /// Where the program issued the operation; `None` if that is not recorded. Allocates: for errors and debugging.
    fn call_site(&self) -> Option<Frame> {
        None
    }
}

/// The reason of an abort.
#[derive(Clone, Debug)]
pub struct AbortReason {
    /// The error with which everything pending ends.
    pub error: Error,
    /// The time-out of the group's operations; `None` if it is unknown.
    pub timeout: Option<Duration>,
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

/// Carries out the operations of one group.
///
/// Every turn is used once, by `issue` or by `run`. A turn has passed also if its operation ends with an error or
/// the backend refuses it.
///
/// # Thread safety
/// `issue` is called in order of turns, one at a time. `run` may be called by several threads at once
/// and waits for its turn. `abort` may be called at any time.
pub trait Backend: Send + Sync {
    /// The backend's name, as in records.
    fn name(&self) -> &'static str;

    /// Starts `op`.
    ///
    /// A backend calls `observer` if it can. If it does not, the group polls [`Pending::progress`].
    ///
    /// # Blocking
    /// Waits for no peer.
    ///
    /// # Errors
    /// `Unsupported` for what this backend cannot do; after an abort, the error of the abort. The buffers are dropped.
    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>>;

    /// Works like [`issue`](Self::issue). `former` is the handle of an operation of this group that has ended, and
    /// whose memory the backend may use for this one. It may be a handle that this backend did not make. By default it
    /// is dropped.
    ///
    /// # Blocking
    /// Same as [`issue`](Self::issue).
    ///
    /// # Errors
    /// Those of [`issue`](Self::issue).
    fn issue_again(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
        former: Arc<dyn Pending>,
    ) -> Result<Arc<dyn Pending>> {
        drop(former);
        self.issue(op, call, observer)
    }

    /// Runs `op` on the caller's thread, over the caller's memory.
    ///
    /// The backend no longer uses any of the buffers when this returns, also with an error. The provided method issues
    /// the operation over copies that the backend owns; a fast backend implements this method itself.
    ///
    /// It calls `observer.started` at the start of an operation that had to wait for its turn, may call it for any
    /// other, and never calls `observer.ended`.
    ///
    /// # Blocking
    /// Until the end of the operation, the call's deadline, or an abort.
    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        copies::run(self, op, call, observer)
    }

    /// Makes everything pending, and everything later, fail soon with this reason.
    ///
    /// # Blocking
    /// Waits for nothing that depends on a peer. Safe to call again.
    fn abort(&self, reason: &AbortReason);

    /// Waits until everything issued has ended, then closes this group's side.
    ///
    /// # Errors
    /// `Timeout` if something is still pending at the deadline.
    fn shutdown(&self, deadline: Deadline) -> Result<()>;

    /// How long after its deadline an operation that was [`issue`](Self::issue)d may take to fail, with what
    /// the backend knows of the ranks that it waited for. After this time the group's watchdog ends the operation,
    /// with an error that names no rank. The default is zero, for a backend that leaves deadlines to the watchdog.
    fn ends_overdue_within(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether operations run on the host's threads, so that the time from their start to their end, as the group sees
    /// both, is how long they ran. The default is no, for a backend that sees starts and ends late.
    fn runs_on_host(&self) -> bool {
        false
    }

    /// Whether the time that operations run can be measured: by the group, if they [run on the
    /// host](Self::runs_on_host), or by a backend that says so.
    fn can_be_timed(&self) -> bool {
        self.runs_on_host()
    }

    /// Sets whether a backend that measures itself measures the operations that are issued from now on, for
    /// [`Done::duration`]. A group switches this on only if all its backends [can be timed](Self::can_be_timed).
    fn set_timing(&self, is_on: bool) {
        let _ = is_on;
    }

    /// Makes a backend for a subset of this group, where that is cheaper than connecting again. All members of the new
    /// group call it.
    ///
    /// # Errors
    /// `Unsupported` where it is not cheaper.
    fn split(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let _ = (group, deadline);
        Err(self.refuse(OpType::Split.name()))
    }

    /// Takes part in a split of this group as a member of none of its parts: a backend may need all
    /// members for it. Does nothing unless [`split`](Self::split) is offered.
    fn decline_split(&self, deadline: Deadline) -> Result<()> {
        let _ = deadline;
        Ok(())
    }

    /// Makes a backend for the remaining members, from one that was aborted. All remaining members call it.
    ///
    /// # Errors
    /// `Unsupported` where it is not cheaper than connecting again.
    fn shrink(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let _ = (group, deadline);
        Err(self.refuse("shrink"))
    }

    /// Prepares memory so that later operations on it are faster.
    ///
    /// The memory must have an owner ([`Buffer::owner`]), which the registration keeps alive.
    fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        let _ = memory;
        Err(self.refuse("registered memory"))
    }

    /// Undoes [`register`](Self::register). When this returns without an error, all operations that were issued before
    /// and need the registration have ended.
    fn deregister(&self, registration: Registration) -> Result<()> {
        let _ = registration;
        Err(self.refuse("registered memory"))
    }

    /// Memory for a window or for collectives, all zero, that other members can reach fastest.
    ///
    /// It is freed with the last buffer over it; [`ProcessGroup::allocate`](crate::ProcessGroup::allocate)
    /// describes what happens to operations that still run on it then.
    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        let _ = (dtype, len);
        Err(self.refuse("memory for windows"))
    }

    /// Makes `memory` readable and writable by the other members. All members call it, each with its
    /// own part; parts may differ in length, not in element type.
    ///
    /// # Blocking
    /// Until all members have called it, or the deadline.
    fn new_window(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        let _ = (memory, deadline);
        Err(self.refuse(OpType::NewWindow.name()))
    }

    /// The index of the first element of `memory` that is a NaN; `None` if there is none, or the backend cannot
    /// look. For debugging: the host waits for the operations that run on this memory.
    fn find_nan(&self, memory: &Buffer<'_>) -> Result<Option<u64>> {
        let _ = memory;
        Ok(None)
    }

    /// Releases the device memory of the group's communicators that can be made again, for example while a program
    /// generates between two phases of training. Operations are refused until [`resume`](Self::resume). All members
    /// call it.
    ///
    /// # Blocking
    /// Until all operations have ended and all members have called it, or the deadline.
    ///
    /// # Errors
    /// `Unsupported` where the backend or its library cannot; `Timeout`, after which the group is unusable.
    fn suspend(&self, deadline: Deadline) -> Result<()> {
        let _ = deadline;
        Err(self.refuse("the release of memory"))
    }

    /// Undoes [`suspend`](Self::suspend). All members call it. It waits and fails as `suspend` does.
    fn resume(&self, deadline: Deadline) -> Result<()> {
        let _ = deadline;
        Err(self.refuse("the release of memory"))
    }

    /// The device memory of the group's communicators on this rank.
    ///
    /// # Errors
    /// `Unsupported` where the backend or its library does not report it.
    fn comm_memory(&self) -> Result<CommMemory> {
        Err(self.refuse("the memory of communicators"))
    }

    /// The number of splits of the group that this backend has begun on this rank, also of those in which the rank was
    /// in no part; 0 if it makes new communicators for the parts.
    fn split_count(&self) -> u64 {
        0
    }

    /// How long the backend's library expects a collective to take on the device, by its own model of the machine:
    /// nothing is sent, and the buffers stay as they are. All members call it with the same collective, since the
    /// library may connect for it. Use [`ProcessGroup::estimate`](crate::ProcessGroup::estimate), which checks the
    /// collective first.
    ///
    /// # Blocking
    /// While the library connects to the other members, until the deadline.
    ///
    /// # Errors
    /// `Unsupported` where the backend or its library has no model of this operation; `Timeout`, after which the group
    /// is unusable.
    fn estimate(&self, op: &Op<'_>, deadline: Deadline) -> Result<Duration> {
        let _ = (op, deadline);
        Err(self.refuse("estimates of times"))
    }

    /// The known state of the backend's communicators, for a dump.
    ///
    /// # Blocking
    /// For at most a second; waits for no peer.
    fn comm_state(&self) -> Vec<CommState> {
        Vec::new()
    }

    /// NCCL's number of the communicator of all members, which NCCL's logs, monitor and profilers show; `None` if there
    /// is no such communicator, or it does not exist yet. Does not wait.
    fn communicator(&self) -> Option<u64> {
        None
    }

    /// Tells the backend that another rank has reported a failure of the group. That rank may stop its part of an
    /// operation, and a library may still report a success on this rank: from now on the backend verifies a success
    /// before it reports one. Does not wait.
    fn failed_elsewhere(&self) {}

    /// Whether the process must end, once the dump is written, after an operation of this backend has failed: true if
    /// the remains of the operation would harm what the process does next.
    fn ends_process(&self) -> bool {
        false
    }

    /// The error `Unsupported` for a `feature` that this backend does not offer.
    fn refuse(&self, feature: &str) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            format!("backend {} does not offer {feature}", self.name()),
        )
    }
}
