//! The table of faults.

use crate::scenario::{Act, At, Cut, Damage, Expect, Extra, Fault, Hit, Scenario, Shm, Start, row};
use Act::{
    Abort, Exhaust, Exit, Freeze, Interrupt, Kill, Leave, Panic, Segfault, Sleep, Spin, Terminate,
};
use At::{Between, Call, End};
use Expect::{Apart, CutOff, Ended, Healthy, Named, Refused, StoreLost};
use Fault::{InInit, InShutdown, Itself, Network, Pause};
use Start::{Hosts, Launcher, Memory, Tcp};

/// All rows, in the order in which they run.
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
    row("segfault", Memory, Itself(Segfault, Between), Named),
    row("leave", Memory, Itself(Leave, Between), Named),
    row("kill-one-of-two", Memory, Itself(Kill, Between), Named)
        .of(&[1])
        .ranks(2),
    row("freeze-one-of-two", Tcp, Itself(Freeze, Between), Named)
        .of(&[1])
        .ranks(2),
    row("kill-three", Memory, Itself(Kill, Between), Named).of(&[1, 2, 3]),
    row("freeze-three", Memory, Itself(Freeze, Between), Named).of(&[1, 2, 3]),
    row("pause-short", Memory, Pause(1_500), Healthy),
    row("pause-all", Memory, Pause(1_500), Healthy).of(&[0, 1, 2, 3]),
    row("pause-long", Memory, Pause(6_000), Named),
    row("pause-long-tcp", Tcp, Pause(6_000), Named),
    row("orphan-freeze", Memory, Itself(Freeze, Between), Named).with_orphans(),
    row("orphan-freeze-tcp", Tcp, Itself(Freeze, Between), Named).with_orphans(),
    row("messages-freeze", Memory, Itself(Freeze, Between), Named).with(Extra::Messages),
    row("messages-kill", Tcp, Itself(Kill, Between), Named).with(Extra::Messages),
    row("window-freeze", Memory, Itself(Freeze, Between), Named).with(Extra::Window),
    row("window-kill", Tcp, Itself(Kill, Between), Named).with(Extra::Window),
    row("objects-freeze", Memory, Itself(Freeze, Between), Named).with(Extra::Objects),
    row("objects-kill", Tcp, Itself(Kill, Between), Named).with(Extra::Objects),
    row("monitored-freeze", Memory, Itself(Freeze, Between), Named).with(Extra::MonitoredBarrier),
    row("monitored-kill", Tcp, Itself(Kill, Between), Named).with(Extra::MonitoredBarrier),
    row("split-freeze", Memory, Itself(Freeze, Between), Named).with(Extra::Split),
    row("split-kill", Tcp, Itself(Kill, Between), Named).with(Extra::Split),
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
    row(
        "launcher-terminate",
        Launcher,
        Fault::Launcher(Terminate, None),
        Ended,
    ),
    row(
        "launcher-interrupt",
        Launcher,
        Fault::Launcher(Interrupt, None),
        Ended,
    ),
    row("slow-store-freeze", Launcher, Fault::SlowStore, Named),
    row("end-kill", Memory, Itself(Kill, End), Named).short(),
    row("end-freeze", Memory, Itself(Freeze, End), Named),
    row("end-kill-last", Tcp, InShutdown(Hit::Process(Kill)), Named),
    row(
        "end-freeze-last",
        Tcp,
        InShutdown(Hit::Process(Freeze)),
        Named,
    ),
    row(
        "end-cut",
        Hosts,
        InShutdown(Hit::Network(Cut::BothWays)),
        // Not `CutOff`: a shutdown closes the connections of groups before it waits, so no record shows that the links
        // are silent. Rank 2 is named as one that did not come, and itself names the rank with the store.
        Named,
    ),
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
    row("start-secret", Memory, Fault::Secret, Refused("rank 2")),
    row(
        "init-kill",
        Memory,
        InInit(Hit::Process(Kill)),
        Refused("rank 2"),
    ),
    row(
        "init-freeze",
        Memory,
        InInit(Hit::Process(Freeze)),
        Refused("rank 2"),
    ),
    row(
        "init-freeze-launched",
        Launcher,
        InInit(Hit::Process(Freeze)),
        Refused("rank 2"),
    ),
    row(
        "init-cut",
        Hosts,
        InInit(Hit::Network(Cut::BothWays)),
        Refused("rank 2"),
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
    row("cut-store-host-inward", Hosts, Network(Cut::Inward), CutOff).of(&[0]),
    row(
        "cut-store-host-outward",
        Hosts,
        Network(Cut::Outward),
        CutOff,
    )
    .of(&[0]),
    row("cut-pair", Hosts, Network(Cut::Pair), Apart).of(&[2, 1]),
    row("connections", Hosts, Network(Cut::Connections), Apart).of(&[2, 1]),
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
    row("rings-read-only", Memory, Fault::ReadOnlyRings, Named),
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
