//! Defines what a row of the table of faults consists of: the fault, the ranks, and the expected results.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The rank that the fault is applied to, unless a row names another.
const CULPRIT: &[u32] = &[2];
/// Number of ranks of a job, unless a row has another.
pub(crate) const RANKS: u32 = 4;

/// A fault of a process, which a rank applies to itself, or the driver to another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Act {
    Kill,
    Abort,
    Exit,
    Panic,
    Terminate,
    Interrupt,
    /// The signal of an access to memory that is not mapped.
    Segfault,
    /// It exits with status 0, without a shutdown.
    Leave,
    Freeze,
    /// It sleeps until it is killed.
    Sleep,
    /// It computes until it is killed.
    Spin,
    /// It asks for more memory than it may have.
    Exhaust,
}

impl Act {
    const ALL: [Self; 12] = [
        Self::Kill,
        Self::Abort,
        Self::Exit,
        Self::Panic,
        Self::Terminate,
        Self::Interrupt,
        Self::Segfault,
        Self::Leave,
        Self::Freeze,
        Self::Sleep,
        Self::Spin,
        Self::Exhaust,
    ];

    /// Whether the process of a rank ends by the act.
    pub(crate) fn ends_the_process(self) -> bool {
        !matches!(self, Self::Freeze | Self::Sleep | Self::Spin)
    }
}

/// A call that all ranks make in every step, besides their collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Extra {
    /// Each rank sends to the next one.
    Messages,
    /// Each rank writes to the window of the next one and signals it.
    Window,
    /// Every rank gathers an object of every rank.
    Objects,
    MonitoredBarrier,
    /// Two groups are split off and dropped.
    Split,
}

impl Extra {
    const ALL: [Self; 5] = [
        Self::Messages,
        Self::Window,
        Self::Objects,
        Self::MonitoredBarrier,
        Self::Split,
    ];
}

/// When a rank applies its fault to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum At {
    /// Before it joins.
    Start,
    /// Between two operations.
    Between,
    /// After it has issued an operation, before it waits for it.
    Call,
    /// After its last operation, before it shuts down.
    End,
}

impl At {
    const ALL: [Self; 4] = [Self::Start, Self::Between, Self::Call, Self::End];
}

macro_rules! by_name {
    ($type:ty) => {
        impl FromStr for $type {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, String> {
                let found = Self::ALL
                    .into_iter()
                    .find(|value| format!("{value:?}") == name);
                found.ok_or_else(|| format!("{name:?} is none of {:?}", Self::ALL))
            }
        }
    };
}
by_name!(Act);
by_name!(Extra);
by_name!(At);

/// How the ranks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// The driver starts them on one host. They share memory, and rank 0 serves the store.
    Memory,
    /// As with [`Memory`](Self::Memory), but the ranks communicate over TCP.
    Tcp,
    /// `rcomm-run` starts them, and serves the store.
    Launcher,
    /// The driver starts each in a separate network namespace, as on different hosts.
    Hosts,
}

/// What the driver does to the network of a rank's host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Nothing arrives in either direction, silently.
    BothWays,
    /// Nothing arrives at the host.
    Inward,
    /// Nothing that the host sends arrives.
    Outward,
    /// The host's link has no carrier.
    LinkDown,
    /// The host is cut off, and the rank's process is killed: the peers see no end of the connections.
    Vanished,
    /// Every connection is reset.
    Reset,
    /// The connections between the rank's host and the one before it are reset.
    Connections,
    /// Nothing arrives from the host before the rank's, nor there from the rank's host.
    Pair,
    /// The host is cut off for half of the time-out.
    Healed,
    /// The host is cut off again and again, for 50 ms each time.
    Loss,
    /// Every packet is late by 40 ms.
    Delay,
}

/// The state of `/dev/shm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shm {
    /// It has a single page.
    Full,
    /// It has room for a part of the rings.
    Tiny,
    ReadOnly,
    /// Another user owns the directory in which this user's rings would be.
    Squatted,
}

/// Damage to a ring file in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    Deleted,
    Truncated,
    /// A part of it is overwritten with arbitrary bytes.
    Scribbled,
}

/// What the driver does to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hit {
    /// The act is applied to the rank's process.
    Process(Act),
    /// The network of the rank's host is cut.
    Network(Cut),
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Each of the culprits does this to itself.
    Itself(Act, At),
    /// The launcher gets the signal of the first act, and then the rank that of the second. With `None`, nothing
    /// happens to the rank, and a launcher that was stopped is resumed after the time-out of operations.
    Launcher(Act, Option<Act>),
    /// The launcher, which serves the store, runs only a tenth of the time, and the rank freezes.
    SlowStore,
    /// The ranks are stopped for this time, in milliseconds, and then continued.
    Pause(u64),
    /// The rank is hit while it waits in its init for the last rank.
    InInit(Hit),
    /// The rank is hit after its last operation; then it shuts down, as the others already do.
    InShutdown(Hit),
    /// The rank has another secret than the other ranks.
    Secret,
    /// The launcher, which serves the store, is stopped, and then all ranks need the store.
    Store,
    /// Something happens to the network of the rank's host.
    Network(Cut),
    /// The job starts with this state of `/dev/shm`, and the rank is killed.
    Memory(Shm),
    /// There is a file in place of the rings' folder, and the rank is killed.
    RingFolder,
    /// The rings' folder is on a read-only file system, and the rank is killed.
    ReadOnlyRings,
    /// The dumps' folder is full, and the rank freezes.
    DumpFolder,
    /// The rank may have only this many files open.
    Descriptors(u64),
    /// The rank's ring is damaged while it runs, and then the rank is killed.
    Ring(Damage),
    /// The rank is not started.
    Absent,
    /// The rank was given another world size.
    WorldSize,
    /// A second process has the rank's number.
    Duplicate,
    /// A rank of another job connects to the store.
    Foreign,
    /// The rank is started late by this time, in milliseconds.
    Late(u64),
    /// Readers of all rings and endpoints run. The act, if there is one, is applied to them.
    Observers(Option<Act>),
    /// The wall clock of the rank's host jumps by this many seconds, and then the rank is killed.
    Clock(i64),
    /// Another user of the host does what it can to the job.
    OtherUser,
    /// The disk of the dumps does not respond, and the rank freezes.
    DiskStalls,
    /// The FIFO that asks the rank for dumps is written to every 50 ms, for half of the time-out.
    Pipe,
}

/// The expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Every other rank gets an error in time that names the culprits; the verdict names them too.
    Named,
    /// As [`Named`](Self::Named) for the ranks on the larger side of a cut, with E152; the rank that was cut off gets
    /// an error as well.
    CutOff,
    /// Two ranks cannot reach each other: every rank gets an error in time that names ranks and calls no third one
    /// gone, and the verdict has E152 and no culprits besides the two.
    Apart,
    /// The job runs on, with right results, to its end.
    Healthy,
    /// The job cannot start: each other rank gets an error whose text contains these words.
    Refused(&'static str),
    /// Every rank gets an error in time that names the store and no rank; so does the verdict, with E153.
    StoreLost,
    /// The processes of all ranks end in time. Their errors are not checked.
    Ended,
    /// Only the culprit fails, with a text that contains these words, or the job runs to its end.
    OnlyCulprit(&'static str),
}

/// One row: a fault, the ranks that it affects, and the expected result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) start: Start,
    pub(crate) fault: Fault,
    /// The ranks at fault.
    pub(crate) culprits: &'static [u32],
    pub(crate) expect: Expect,
    /// Whether the row is in the short list.
    pub(crate) short: bool,
    /// Whether store, data connections and endpoints use TLS.
    pub(crate) tls: bool,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// What the ranks do in every step besides their collectives.
    pub(crate) extra: Option<Extra>,
    /// Whether the job starts again while processes of the first one are left.
    pub(crate) with_orphans: bool,
}

pub(crate) const fn row(
    name: &'static str,
    start: Start,
    fault: Fault,
    expect: Expect,
) -> Scenario {
    Scenario {
        name,
        start,
        fault,
        culprits: CULPRIT,
        expect,
        short: false,
        tls: false,
        ranks: RANKS,
        extra: None,
        with_orphans: false,
    }
}

impl Scenario {
    pub(crate) const fn of(mut self, culprits: &'static [u32]) -> Self {
        self.culprits = culprits;
        self
    }

    pub(crate) const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    pub(crate) const fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    pub(crate) const fn ranks(mut self, ranks: u32) -> Self {
        self.ranks = ranks;
        self
    }

    pub(crate) const fn with(mut self, extra: Extra) -> Self {
        self.extra = Some(extra);
        self
    }

    pub(crate) const fn with_orphans(mut self) -> Self {
        self.with_orphans = true;
        self
    }

    /// Whether the culprits' processes end by the fault.
    pub(crate) fn kills(&self) -> bool {
        match self.fault {
            Fault::Itself(act, _)
            | Fault::Launcher(_, Some(act))
            | Fault::InInit(Hit::Process(act))
            | Fault::InShutdown(Hit::Process(act)) => act.ends_the_process(),
            Fault::Network(cut) => cut == Cut::Vanished,
            Fault::Memory(_)
            | Fault::RingFolder
            | Fault::ReadOnlyRings
            | Fault::Ring(_)
            | Fault::Clock(_) => true,
            _ => false,
        }
    }
}
