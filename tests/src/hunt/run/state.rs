//! The state of a job that runs: the events to come, and how far hosts, devices and operations are.

use crate::hunt::program::Act;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A collective, by group and number; or a message, by group, ends and number.
pub(super) type Key = (usize, Option<(u32, u32)>, u64);

/// What happens at some time. Operations of a rank are given by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// The host of a rank goes on with its program.
    Host(Rank),
    /// The device of a rank has finished a computation, or may begin its next task.
    Device(Rank),
    /// An operation ends on all ranks that take part in it.
    Done(Key),
    /// The time-out of a rank's operation passes.
    TimeOut(Rank, usize),
    /// A rank notices in an operation that the process of another rank has ended.
    Lost(Rank, usize, Rank),
    /// SIGSTOP stops a process.
    Stop(Rank),
    /// SIGKILL ends a process.
    Kill(Rank),
    /// A process exits with code 1.
    Exit(Rank),
    /// A process aborts.
    Abort(Rank),
    /// The launcher ends the other ranks, since one has failed.
    Launcher,
    /// The launcher is asked to end the job.
    Asked,
    /// A process gets SIGTERM.
    Terminate(Rank),
    /// The members of an operation find that their calls differ.
    Refuse(Key),
}

/// What the host of a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    /// It carries out the acts of its program.
    Runs,
    /// It waits for the operation with this index.
    Waits(usize),
    /// It waits for its device.
    Syncs,
    /// It carries out no more acts.
    Over,
}

/// What a device does, in the order in which the host has issued it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Task {
    /// The device computes for this long, ns.
    Compute(i64),
    /// The device comes to the operation with this index.
    Begin(usize),
    /// The device waits for the end of the operation with this index.
    Await(usize),
    /// The device does nothing more.
    Hang,
}

/// One rank and its progress.
pub(super) struct Runner {
    pub(super) acts: Vec<Act>,
    /// The index of the next act.
    pub(super) next: usize,
    pub(super) host: Host,
    /// What the device has yet to do.
    pub(super) tasks: VecDeque<Task>,
    /// Whether the device computes.
    pub(super) is_busy: bool,
    /// Operations that the program has not waited for.
    pub(super) open: Vec<usize>,
    /// The numbers of collectives and of messages (`true`) of each group so far.
    pub(super) counts: HashMap<(usize, bool), u64>,
    /// As `counts`, where a batch counts once.
    pub(super) numbers: HashMap<(usize, bool), u64>,
    /// The number of messages so far by group, sender and receiver; sends (`true`) and receives are counted apart.
    pub(super) ends: HashMap<(usize, u32, u32, bool), u64>,
}

/// Who has come to an operation.
#[derive(Default)]
pub(super) struct Meeting {
    /// The ranks, each with the index of its operation and when it came.
    pub(super) came: BTreeMap<Rank, (usize, i64)>,
    /// Whether the operation has ended on all ranks.
    pub(super) is_done: bool,
    /// Whether the event of its end is planned.
    pub(super) is_planned: bool,
}
