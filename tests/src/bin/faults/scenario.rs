//! The table of faults: the fault, the rank, and the expected results.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The rank that the fault is applied to, unless a row names another.
const CULPRIT: &[u32] = &[2];
/// Number of ranks of every job here.
pub(crate) const RANKS: u32 = 4;

/// A fault that a rank applies to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Act {
    Kill,
    Abort,
    Exit,
    Panic,
    Terminate,
    Freeze,
    Sleep,
    Spin,
    Exhaust,
}

impl Act {
    const ALL: [Self; 9] = [
        Self::Kill,
        Self::Abort,
        Self::Exit,
        Self::Panic,
        Self::Terminate,
        Self::Freeze,
        Self::Sleep,
        Self::Spin,
        Self::Exhaust,
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
    ($of:ty) => {
        impl FromStr for $of {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, String> {
                let found = Self::ALL.into_iter().find(|it| format!("{it:?}") == name);
                found.ok_or_else(|| format!("{name:?} is none of {:?}", Self::ALL))
            }
        }
    };
}
by_name!(Act);
by_name!(At);

/// How the ranks are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// By themselves; they share memory, and rank 0 serves the store.
    Memory,
    /// The same over TCP.
    Tcp,
    /// By `rcomm-run`, which serves the store.
    Launcher,
    /// Each in a separate network namespace, as on different hosts.
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
    /// Its link has no carrier.
    LinkDown,
    /// Cut off, and its process killed: its peers see no end of the connections.
    Vanished,
    /// Every connection is reset.
    Reset,
    /// Cut off for half of the time-out.
    Healed,
    /// Cut off again and again, for 50 ms each.
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

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Each of the ranks does this to itself.
    Itself(Act, At),
    /// The launcher is killed or stopped, and then this happens to the rank; with `None`, a launcher that was stopped
    /// is resumed after the time-out of operations.
    Launcher(Act, Option<Act>),
    /// The launcher, which serves the store, is stopped, and then all ranks need the store.
    Store,
    /// Something happens to the network of the rank's host.
    Network(Cut),
    /// The job starts with this state of `/dev/shm`, and the rank is killed.
    Memory(Shm),
    /// The rings' folder cannot be written to, and the rank is killed.
    RingFolder,
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
    /// Readers of all rings and endpoints run; this happens to them, if anything.
    Observers(Option<Act>),
    /// The wall clock of the rank's host jumps by this many seconds, and then the rank is killed.
    Clock(i64),
    /// Another user of the host does what it can to the job.
    OtherUser,
    /// The disk of the dumps does not respond, and the rank freezes.
    DiskStalls,
    /// The FIFO that asks the rank for dumps is written to all the time.
    Pipe,
}

/// The expected result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// Every other rank gets an error in time that names the culprits; the verdict names them too.
    Named,
    /// The same for the ranks on the larger side of a cut; the rank that was cut off gets an error as well.
    CutOff,
    /// The job runs on, with right results, to its end.
    Healthy,
    /// The job cannot start: each other rank gets an error whose text contains this.
    Refused(&'static str),
    /// Every rank gets an error in time that names the store and no rank; so does the verdict, with E153.
    StoreLost,
    /// The processes of all ranks end in time. Their errors are not checked.
    Ended,
    /// Only the culprit fails, with a text that contains this, or the job runs to its end.
    OnlyCulprit(&'static str),
}

/// One row: a fault, the ranks that it affects, and the expected result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) start: Start,
    pub(crate) fault: Fault,
    pub(crate) culprits: &'static [u32],
    pub(crate) expect: Expect,
    /// Whether it is one of the short list.
    pub(crate) short: bool,
    /// Whether store, data connections and endpoints use TLS.
    pub(crate) tls: bool,
}

const fn row(name: &'static str, start: Start, fault: Fault, expect: Expect) -> Scenario {
    Scenario {
        name,
        start,
        fault,
        culprits: CULPRIT,
        expect,
        short: false,
        tls: false,
    }
}

impl Scenario {
    const fn of(mut self, culprits: &'static [u32]) -> Self {
        self.culprits = culprits;
        self
    }

    const fn short(mut self) -> Self {
        self.short = true;
        self
    }

    const fn tls(mut self) -> Self {
        self.tls = true;
        self
    }
}

use Act::{Abort, Exhaust, Exit, Freeze, Kill, Panic, Sleep, Spin, Terminate};
use At::{Between, Call, End};
use Expect::{CutOff, Ended, Healthy, Named, Refused, StoreLost};
use Fault::{Itself, Network};
use Start::{Hosts, Launcher, Memory, Tcp};

/// All rows, grouped by what the fault affects.
pub(crate) const SCENARIOS: &[Scenario] = &[
    row("kill", Memory, Itself(Kill, Between), Named).short(),
    row("kill-in-call", Memory, Itself(Kill, Call), Named),
    row("kill-tcp", Tcp, Itself(Kill, Between), Named),
    row("kill-in-call-tcp", Tcp, Itself(Kill, Call), Named),
    row("kill-tls", Tcp, Itself(Kill, Between), Named).tls(),
    row("kill-in-call-tls", Tcp, Itself(Kill, Call), Named).tls(),
    row("kill-launched", Launcher, Itself(Kill, Between), Named),
    row("abort", Memory, Itself(Abort, Between), Named),
    row("exit", Memory, Itself(Exit, Between), Named),
    row("panic", Memory, Itself(Panic, Between), Named),
    row("terminate", Memory, Itself(Terminate, Between), Named),
    row("out-of-memory", Memory, Itself(Exhaust, Between), Named),
    row("kill-two", Memory, Itself(Kill, Between), Named)
        .of(&[1, 3])
        .short(),
    row("kill-two-tcp", Tcp, Itself(Kill, Between), Named).of(&[1, 3]),
    row("freeze", Memory, Itself(Freeze, Between), Named),
    row("freeze-in-call", Memory, Itself(Freeze, Call), Named),
    row("freeze-tcp", Tcp, Itself(Freeze, Between), Named),
    row("freeze-tls", Tcp, Itself(Freeze, Between), Named).tls(),
    row("freeze-launched", Launcher, Itself(Freeze, Between), Named),
    row("freeze-two", Memory, Itself(Freeze, Between), Named).of(&[1, 3]),
    row("sleep", Memory, Itself(Sleep, Between), Named),
    row("spin", Memory, Itself(Spin, Between), Named),
    row("store-host-kill", Memory, Itself(Kill, Between), Named)
        .of(&[0])
        .short(),
    row("store-host-kill-tcp", Tcp, Itself(Kill, Call), Named).of(&[0]),
    row("store-host-exit", Memory, Itself(Exit, Between), Named).of(&[0]),
    row("store-host-freeze", Memory, Itself(Freeze, Between), Named)
        .of(&[0])
        .short(),
    row("store-host-freeze-tcp", Tcp, Itself(Freeze, Between), Named).of(&[0]),
    row("store-host-kill-tls", Tcp, Itself(Kill, Call), Named)
        .of(&[0])
        .tls(),
    row("store-host-freeze-tls", Tcp, Itself(Freeze, Between), Named)
        .of(&[0])
        .tls(),
    row(
        "rank-0-freeze-launched",
        Launcher,
        Itself(Freeze, Between),
        Named,
    )
    .of(&[0]),
    row(
        "launcher-freeze-then-kill",
        Launcher,
        Fault::Launcher(Freeze, Some(Kill)),
        Named,
    ),
    row(
        "launcher-freeze-then-freeze",
        Launcher,
        Fault::Launcher(Freeze, Some(Freeze)),
        Named,
    ),
    row(
        "launcher-freeze",
        Launcher,
        Fault::Launcher(Freeze, None),
        Healthy,
    ),
    row(
        "launcher-freeze-store-needed",
        Launcher,
        Fault::Store,
        StoreLost,
    )
    .of(&[]),
    row(
        "launcher-kill",
        Launcher,
        Fault::Launcher(Kill, None),
        Ended,
    )
    .short(),
    row("end-kill", Memory, Itself(Kill, End), Named).short(),
    row("end-freeze", Memory, Itself(Freeze, End), Named),
    row("end-kill-launched", Launcher, Itself(Kill, End), Named),
    row("end-freeze-launched", Launcher, Itself(Freeze, End), Named),
    row("end-store-host-kill", Memory, Itself(Kill, End), Named).of(&[0]),
    row("end-store-host-freeze", Memory, Itself(Freeze, End), Named).of(&[0]),
    row(
        "start-never",
        Memory,
        Fault::Absent,
        Refused("missing rank 2"),
    )
    .short(),
    row(
        "start-kill",
        Memory,
        Itself(Kill, At::Start),
        Refused("missing rank 2"),
    ),
    row(
        "start-freeze",
        Memory,
        Itself(Freeze, At::Start),
        Refused("missing rank 2"),
    ),
    row(
        "start-freeze-launched",
        Launcher,
        Itself(Freeze, At::Start),
        Refused("missing rank 2"),
    ),
    row(
        "start-world-size",
        Memory,
        Fault::WorldSize,
        Refused("world size"),
    ),
    row("start-duplicate", Memory, Fault::Duplicate, Healthy),
    row("start-foreign", Memory, Fault::Foreign, Healthy),
    row("start-late", Memory, Fault::Late(2_000), Healthy),
    row("cut", Hosts, Network(Cut::BothWays), CutOff),
    row("cut-tls", Hosts, Network(Cut::BothWays), CutOff).tls(),
    row("cut-inward", Hosts, Network(Cut::Inward), CutOff),
    row("cut-outward", Hosts, Network(Cut::Outward), CutOff),
    row("cut-store-host", Hosts, Network(Cut::BothWays), CutOff).of(&[0]),
    row("cut-store-host-tls", Hosts, Network(Cut::BothWays), CutOff)
        .of(&[0])
        .tls(),
    row("link-down", Hosts, Network(Cut::LinkDown), CutOff),
    row("host-vanished", Hosts, Network(Cut::Vanished), Named),
    row("reset", Hosts, Network(Cut::Reset), CutOff),
    row("reset-tls", Hosts, Network(Cut::Reset), CutOff).tls(),
    row("cut-healed", Hosts, Network(Cut::Healed), Healthy),
    row("cut-healed-tls", Hosts, Network(Cut::Healed), Healthy).tls(),
    row("loss", Hosts, Network(Cut::Loss), Healthy),
    row("delay", Hosts, Network(Cut::Delay), Healthy),
    row("shm-full", Memory, Fault::Memory(Shm::Full), Named),
    row("shm-tiny", Memory, Fault::Memory(Shm::Tiny), Named),
    row("shm-read-only", Memory, Fault::Memory(Shm::ReadOnly), Named),
    row("shm-squatted", Memory, Fault::Memory(Shm::Squatted), Named),
    row("ring-folder", Memory, Fault::RingFolder, Named).short(),
    row("dump-folder", Memory, Fault::DumpFolder, Named),
    row(
        "descriptors-12",
        Memory,
        Fault::Descriptors(12),
        Expect::OnlyCulprit("Too many open files"),
    ),
    row(
        "descriptors-16",
        Memory,
        Fault::Descriptors(16),
        Expect::OnlyCulprit("Too many open files"),
    ),
    row(
        "descriptors-20",
        Memory,
        Fault::Descriptors(20),
        Expect::OnlyCulprit("Too many open files"),
    ),
    row(
        "descriptors-24",
        Memory,
        Fault::Descriptors(24),
        Expect::OnlyCulprit("Too many open files"),
    ),
    row("ring-deleted", Memory, Fault::Ring(Damage::Deleted), Named),
    row(
        "ring-truncated",
        Memory,
        Fault::Ring(Damage::Truncated),
        Named,
    ),
    row(
        "ring-scribbled",
        Memory,
        Fault::Ring(Damage::Scribbled),
        Named,
    ),
    row("clock-back", Memory, Fault::Clock(-3_600), Named),
    row("clock-forward", Memory, Fault::Clock(3_600), Named),
    row("other-user", Memory, Fault::OtherUser, Healthy),
    row("other-user-tcp", Tcp, Fault::OtherUser, Healthy),
    row("disk-stalls", Memory, Fault::DiskStalls, Named),
    row("pipe", Memory, Fault::Pipe, Healthy),
    row("observers", Memory, Fault::Observers(None), Healthy),
    row(
        "observers-freeze",
        Memory,
        Fault::Observers(Some(Freeze)),
        Healthy,
    ),
    row(
        "observers-kill",
        Memory,
        Fault::Observers(Some(Kill)),
        Healthy,
    ),
];
