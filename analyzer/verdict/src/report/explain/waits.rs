//! Waits that no rank ends, and processes and connections that fail: E120 to E153.

use super::Prose;

pub(super) const E120: Prose = Prose {
    meaning: "A send or a receive waits for its other half, and the peer has not posted it, or its device has not \
             started it. Messages are paired by group, source, destination and order, so the finding names the first \
             message without a partner. If there are other groups with the same description (`desc`), such as the \
             other pipelines, their messages can show which of the two ranks left one out, posted one too many, or \
             took another order. Rank numbers in the operation are those of the group. Backends that run on the CPU \
             (gloo, MPI, rcomm's `cpu`) also compare tags, which no record holds: there, a send and a receive that \
             pair by order and do not end may have different tags, and the finding blames no rank, but has both as \
             alternatives.",
    causes: &[
        "pipeline stages disagree on the schedule: number of micro-batches, warm-up, direction",
        "the peer raised an exception, or skipped code, before its half of a batch of sends and receives",
        "a wrong peer: a global rank was used where a rank of the group was meant, or the reverse",
        "two ranks both send first with a backend whose send waits for the receive",
        "a tag that differs between the two ends, such as a micro-batch number that one of them counts from 1",
    ],
    actions: &[
        "look at the peer's last recorded call, which shows what it did instead",
        "post both directions in one batch, or fix the order (even ranks send first)",
        "check the peer number against the group's list of ranks in the report",
        "compare the tags of the send and of the receive, if both are posted",
    ],
};

pub(super) const E121: Prose = Prose {
    meaning: "Both halves of a message were posted and they disagree on the number of bytes, or, if both halves \
             failed, on the element type. Some backends complete one side and never the other, so no watchdog on the \
             completed side fires.",
    causes: &[
        "activations whose shape depends on the batch, with the receiver assuming the usual one",
        "a dtype that differs between the stages",
        "messages that are off by one: the receiver takes the previous or the next tensor",
    ],
    actions: &[
        "compare both sizes in the evidence with the shapes that the schedule expects",
        "send the shape first, or make it constant by padding",
    ],
};

pub(super) const E130: Prose = Prose {
    meaning: "Ranks wait for each other across several groups, in a cycle: each waits in an operation of one group, \
             and is missed by another of them in an operation of another group. If all of them left records, no rank \
             is late, none is dead, and no operation is wrong by itself; the ranks disagree only on the order in which \
             they use the groups. A rank without a record may complete the cycle: the finding then names a rank whose \
             order differs from that of the others.",
    causes: &[
        "groups are used in another order on some ranks (tensor before data parallel here, after it there)",
        "two threads or streams issue operations on groups that share ranks",
        "blocking waits between a training group and a transfer or evaluation group",
    ],
    actions: &[
        "follow `cycle` in the finding: the order of two neighboring calls of one rank has to change",
        "use one global order of groups on every rank, from one thread",
        "if the order of one rank differs from that of all others like it, the finding names that rank: fix its order",
    ],
};

pub(super) const E135: Prose = Prose {
    meaning: "Every member has issued the operation, or both halves of a message are posted, and nothing that is \
             recorded differs. Each has started it as far as starts are recorded, and none has finished. The program \
             did its part, unless split sizes that the records lack do not fit. If it did, the cause is below it: the \
             fabric, a device, a driver, the communication library, or the stream that the operation was queued on.",
    causes: &[
        "a network port or a cable: link flaps, a lost path, a firewall between two hosts",
        "a device that fell off the bus or stalls silently (Xid errors, throttling)",
        "a kernel queued earlier on the same stream that never ends",
        "several communicators on one device that starve each other",
    ],
    actions: &[
        "read kernel and fabric logs of the members' hosts at that time (dmesg, port counters)",
        "run a two-host bandwidth test over the pairs of that group and bisect",
        "rerun with the library's own debug log on; try another transport to exclude one layer",
    ],
};

pub(super) const E140: Prose = Prose {
    meaning: "The watchdog of a rank, its thread that ends operations at their deadline, stopped making its rounds. \
             States in that rank's record may then be out of date: an operation may have completed without having been \
             seen. It is a finding of its own, because it is not evidence of a hung collective.",
    causes: &[
        "the interpreter's lock is held by native code for a long time",
        "the watchdog is stuck inside a call to the driver or the library",
        "the host is out of CPU or memory: cgroup limits, swapping",
    ],
    actions: &[
        "take native stacks of that process (gdb, py-spy --native): which thread holds what",
        "treat that rank's states as older than they look until it runs again",
    ],
};

pub(super) const E150: Prose = Prose {
    meaning: "The rank recorded an error itself, or was killed, or its process is gone while its ring was left behind. \
             The rank will not do what its peers wait for; what they wait in, or failed in, is listed with it.",
    causes: &[
        "an exception in the program, often in a part that does not communicate at all",
        "the kernel's OOM killer, a job limit, a preempted node",
        "a crash in native code or a device error",
    ],
    actions: &[
        "read that rank's own log and exit code: the cause is there, not in its peers' time-outs",
        "ask the host: dmesg for the OOM killer and Xid errors, the scheduler for preemption",
        "restart the job only once you know that it will not meet the same fault again",
    ],
};

pub(super) const E151: Prose = Prose {
    meaning: "Others wait for a rank whose process is there and does nothing: the system reports that a signal or a \
             debugger has stopped it, or its watchdog, which makes one to ten rounds a second, has not run for seconds \
             while those of its peers have. The rank may have been stopped between two operations or inside one that \
             all its peers have joined. A stopped rank records nothing more. If all its peers have completed the last \
             operation of its record, the finding calls that operation its last event: whether the rank had left it, \
             too, is not known. If every process of the job is stopped, all are named together, also when no \
             operation is pending.",
    causes: &[
        "SIGSTOP, Ctrl-Z or a scheduler that suspends jobs",
        "a debugger or a tracer that is attached to the process",
        "a container whose processor quota is used up, a host that is out of memory and swaps",
    ],
    actions: &[
        "see the state of the process: `ps -o stat,wchan -p PID` (T = stopped, t = held by a debugger)",
        "let it go on with `kill -CONT PID`, or detach the debugger",
        "if the system reports no stop, look at the load, the quota and the memory of its host",
    ],
};

pub(super) const E152: Prose = Prose {
    meaning: "Connections between ranks had no sign of life for more than two of the intervals at which idle \
             connections give one; or both ends recorded that an error of the network broke a connection; or the \
             system of one host aborted connections; or a log shows that the network could not reach the other end: no \
             route, no answer to a connection, a transfer that was given up after all its retries. The systems at both \
             ends of an idle connection answer each other whatever the processes do, so if records show the silence, \
             no stopped or busy process is the cause. The ranks that still received from each other show which side is \
             cut off; if they do not, both ends are alternatives. If the records of both ends show that what one sent \
             arrived and what the other sent did not, the link may work in one direction only. From a log the finding \
             names the side that reported it and the address that it could not reach, and the process there may be \
             alive.",
    causes: &[
        "a link, a route or a switch port that is down or flaps; a cable, an adapter, a subnet manager",
        "a firewall or a security group that drops the ports of the job, often in one direction only",
        "the wrong interface: the address belongs to a network that the hosts do not share",
        "the other host has crashed, lost its power or was taken away by its scheduler",
    ],
    actions: &[
        "look whether the processes at the other end live, and what they log at that time",
        "try the address from that host (ping, ib_write_bw); check `ip -s link`, `dmesg` and the counters of the \
         link's errors",
        "if one direction works, look for filters and for asymmetric routes",
        "choose the interface for all hosts alike (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)",
    ],
};

pub(super) const E153: Prose = Prose {
    meaning: "Most ranks that ask the job's store have a request that was not answered for seconds; a store that works \
             answers in microseconds. It is served by a rank, usually rank 0, or by a process that is no rank, usually \
             the launcher. Running operations do not need it, but new groups, the exchange of status at a failure and \
             the end of the job do. If another finding explains why the store's host does nothing, this one is its \
             consequence.",
    causes: &[
        "the process that serves the store is stopped or has ended, or its host is down",
        "the store's host is cut off from the others",
        "the launcher's host swaps, or a debugger holds the launcher",
    ],
    actions: &[
        "look at the process that serves the store, the rank that the finding names or else the launcher: \
         `ps -o stat,wchan -p PID`",
        "look at the network of its host",
    ],
};
