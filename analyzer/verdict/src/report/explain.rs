//! The meaning, the usual causes and the next steps of each code, for `rcomm-fr explain`.
//!
//! The meaning is one paragraph; causes and actions are fragments without a full stop. Printers wrap them, so no text
//! here has line breaks. Sentences about a particular job come from the checks.

use crate::report::Code;

/// The explanation of one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The code.
    pub code: Code,
    /// What the code means and how the analysis detects it: one paragraph.
    pub meaning: &'static str,
    /// The usual causes, the most frequent first.
    pub causes: &'static [&'static str],
    /// The next steps, in this order.
    pub actions: &'static [&'static str],
}

/// The explanation of `code`.
#[expect(clippy::too_many_lines, reason = "a table: one arm a code")]
pub fn explain(code: Code) -> Explanation {
    let (meaning, causes, actions): (&str, &[&str], &[&str]) = match code {
        Code::E101 => (
            "A rank left a readable record, but the operation that its peers wait in is not in it: the \
             rank never issued it. That rank itself waits for no other, so the chain of waits \
             ends there. All others are victims, however alarming their own time-out messages look.",
            &[
                "its input pipeline stalled: a slow or dead file system, a hung data loader worker",
                "an exception was caught, or is held up in teardown, before the call",
                "control flow that depends on data: one rank took another branch, or left the loop earlier",
                "work that only one rank does (checkpoint, evaluation, logging) took longer than the time-out",
                "a very long kernel or a device synchronization ahead of the call on the host",
            ],
            &[
                "look at that rank first: its last recorded call and its phase are in the finding",
                "if it still runs, take its stacks (py-spy, gdb) before anything is killed",
                "read that rank's own log around the time of its last call, not its peers' logs",
                "if it was merely slow, raise the time-out of that group, or move the work off the path",
            ],
        ),
        Code::E102 => (
            "A rank that should be there left no readable record, and nothing that the others recorded \
             explains why they wait. The survivors' waits point to it: they all wait for an operation \
             whose only silent member is this rank. Ranks in a row, or all those of one host, are one \
             finding. Absence proves less than a record does, so the confidence is lower than that of \
             E101.",
            &[
                "the process was killed before it could write: out of memory, a node lost, a preempted pod",
                "its dump went to node-local storage that died with the allocation",
                "it hung in a place where it could not answer the request for a dump",
                "the files were collected from some of the nodes only",
            ],
            &[
                "ask the scheduler and the kernel log of that rank's host: exit code, OOM killer, Xid errors",
                "look for its ring on that host: `rcomm-fr rings list`; a ring outlives its process",
                "collect again with `rcomm-fr collect`, whose manifest names every absence",
            ],
        ),
        Code::E103 => (
            "From one point on a rank's operations match those of its peers shifted by one (or by k): \
             what it calls number 41 is what the others call number 42. It left an operation out. The \
             peers see a mismatch of type or size from there on, which is only the consequence.",
            &[
                "a conditional collective: `if loss.isfinite(): all_reduce(...)` with a condition that differs by rank",
                "an early `continue` or `return` in the training loop on one rank",
                "ranks with a different number of batches, parameters with gradients, or pipeline stages",
                "an exception handler that skips the rest of a step",
            ],
            &[
                "read the diff in the finding: it shows both programs around the first difference",
                "make the decision together: reduce the condition first, then branch on the result",
                "for uneven inputs use a join protocol, or drop the last uneven batch on all ranks",
            ],
        ),
        Code::E104 => (
            "A rank issued an operation that no other rank did, and everything after it matches the peers' \
             operations shifted by one (or by k). The extra call pairs with the others' next one, so the \
             group disagrees, or hangs, from there on.",
            &[
                "a debugging barrier or a metric reduction inside a `rank == 0` branch",
                "a retry that repeats a collective on the one rank that saw an error",
                "a library that synchronizes lazily on first use, reached by one rank only",
            ],
            &[
                "look at the culprit's call site at that sequence number: it is in the finding",
                "move the call out of the rank-dependent branch, or give it a group of its own",
                "a retry must be agreed on by all members before any of them repeats a collective",
            ],
        ),
        Code::E105 => (
            "Every record states the members of the groups that its rank made. Here ranks state different \
             members under one name, although one of them counts the other as a member. A group is made \
             by all ranks together, in the same order: these ranks made different groups, and what they \
             issue on them never meets. The statements are proof by themselves, so the finding appears \
             also when nothing is pending: NCCL connects a group at its first operation, and a hang there \
             leaves no entry in older recorders.",
            &[
                "a list of ranks computed from data that differs by rank: a mesh shape, an environment variable, a config file",
                "new_group called in another order on some ranks, or under a condition",
                "a rank that left out one new_group call: from there on its groups have other names",
                "two versions of the program in one job",
            ],
            &[
                "print the ranks that each process passes to new_group, and compare them",
                "make all groups on all ranks in one order, also those that a rank is no member of",
                "make the groups from one description, such as a DeviceMesh, in place of calls by hand",
            ],
        ),
        Code::E110 => (
            "Members of one group issued different operations under the same sequence number, and no \
             shift makes their later operations match. The majority is taken as the norm; with two \
             against two the finding lists both sides and accuses neither.",
            &[
                "ranks run different code: another version, another branch, another configuration",
                "two threads issue on one group, and their order differs between ranks",
                "the group was used by two subsystems (for example training and evaluation) at once",
            ],
            &[
                "compare the call sites of both sides in the finding's diff",
                "check that every rank runs the same revision and the same configuration",
                "give each thread and each subsystem its own group",
            ],
        ),
        Code::E111 => (
            "Members issued the same operation with different element types. Backends move bytes and do \
             not negotiate types: the result is a hang where sizes then differ, or silent corruption \
             where they happen to agree.",
            &[
                "mixed precision is on for some ranks only, or an autocast region ends at different places",
                "a tensor created on one rank by a default (float32) and loaded on the others (bfloat16)",
                "a checkpoint restored in another precision on one rank",
            ],
            &[
                "print the dtype at the call site that the finding names, on the culprit and on one peer",
                "cast on all ranks right before the call, from the configuration and not from the data",
            ],
        ),
        Code::E112 => (
            "Members issued the same operation with sizes that it does not allow to differ. What may \
             differ is known for each operation: uneven all-to-all, and the receiving side of gather or \
             scatter, are never reported here.",
            &[
                "the last batch is smaller on some ranks, or sequences are padded to a local maximum",
                "a different number of parameters with gradients lands in one bucket",
                "sharding that does not divide evenly: another world size than the checkpoint's",
            ],
            &[
                "compare the sizes in the evidence: which ranks are the odd ones, and by how much",
                "pad or drop so that all ranks agree, or use the variant that carries sizes (all_gather_v, all_to_all with splits)",
            ],
        ),
        Code::E113 => (
            "A rank issued the same operations as its peers, in another order. Nothing is missing and \
             nothing is extra, so counting operations shows no difference; yet each call meets the wrong \
             one on the other side.",
            &[
                "two threads or streams issue on one group without an order between them",
                "iteration over an unordered set or dictionary of parameters or groups",
                "hooks that fire in the order in which gradients become ready, which differs by rank",
            ],
            &[
                "fix the order at the call sites in the diff: sort by name, or issue from one thread",
                "give concurrent users a group each; order is only kept within one group",
            ],
        ),
        Code::E114 => (
            "Members agree on operation, type and size, but not on an argument that they must share: the \
             root, the reduction, or what one rank sends against what another expects. It is reported \
             only where the record holds the argument.",
            &[
                "the root is given as a rank of the world on some members and of the group on others",
                "split sizes computed from local data, not exchanged beforehand",
                "the reduction chosen by a branch that depends on the rank",
            ],
            &[
                "compare the arguments in the evidence; the majority shows the norm",
                "for rooted operations check whether the API expects a global or a group rank",
                "exchange the split sizes first (a small all_to_all), then use them",
            ],
        ),
        Code::E120 => (
            "A send or a receive waits for its other half, and the peer never posted it. Messages are \
             paired by group, source, destination and order, so this names the first one without a \
             partner. Where other groups of the same description have the same part, such as the other \
             pipelines, their messages show which of the two ranks left one out, posted one too many, or \
             took another order. Rank numbers in the operation are those of the group.",
            &[
                "pipeline stages disagree on the schedule: number of micro-batches, warm-up, direction",
                "the peer raised or skipped before its half of a batch of sends and receives",
                "a wrong peer: a global rank was used where a rank of the group was meant, or the reverse",
                "two ranks both send first with a backend whose send waits for the receive",
            ],
            &[
                "look at the peer's last recorded call: what did it do instead",
                "post both directions in one batch, or fix the order (even ranks send first)",
                "check the peer number against the group's list of ranks in the report",
            ],
        ),
        Code::E121 => (
            "Both halves of a message were posted and they disagree on the number of bytes. Some backends \
             complete one side and never the other, so no watchdog on the completed side fires.",
            &[
                "activations whose shape depends on the batch, with the receiver assuming the usual one",
                "a dtype that differs between the stages",
                "messages matched one off: the receiver takes the previous or the next tensor",
            ],
            &[
                "compare both sizes in the evidence with the shapes that the schedule expects",
                "send the shape first, or make it constant by padding",
            ],
        ),
        Code::E130 => (
            "Ranks wait on each other across several groups, in a circle: each is inside an operation of \
             one group while the next needs it in another. No rank is late, none is dead, and no \
             operation is wrong by itself; only the order in which the groups are used disagrees.",
            &[
                "groups are used in another order on some ranks (tensor before data parallel here, after it there)",
                "two threads or streams issue on overlapping groups",
                "blocking waits between a training group and a transfer or evaluation group",
            ],
            &[
                "follow `cycle` in the finding: the order of two neighboring calls of one rank has to change",
                "use one global order of groups on every rank, from one thread",
                "where the circle is one odd rank against its siblings, that rank is named: fix it there",
            ],
        ),
        Code::E135 => (
            "Every member is inside the same operation with the same arguments, and none has finished. \
             The program did its part. What is left is below it: the fabric, a device, a driver, the \
             communication library, or the stream that the operation was queued on.",
            &[
                "a network port or a cable: link flaps, a lost path, a firewall between two hosts",
                "a device that fell off the bus or stalls silently (Xid errors, throttling)",
                "a kernel queued earlier on the same stream that never ends",
                "several communicators on one device that starve each other",
            ],
            &[
                "read kernel and fabric logs of the members' hosts at that time (dmesg, port counters)",
                "run a two-host bandwidth test over the pairs of that group and bisect",
                "rerun with the library's own debug log on; try another transport to exclude one layer",
            ],
        ),
        Code::E140 => (
            "The thread inside the process that watches operations stopped making its rounds. States in \
             that rank's record are then stale: an operation may have completed without having been seen. \
             It is a finding of its own, because it is not evidence of a hung collective.",
            &[
                "the interpreter's lock is held by native code for a long time",
                "the watchdog is stuck inside a call to the driver or the library",
                "the host is out of CPU or memory: cgroup limits, swapping",
            ],
            &[
                "take native stacks of that process (gdb, py-spy --native): which thread holds what",
                "treat that rank's states as older than they look until it runs again",
            ],
        ),
        Code::E150 => (
            "The rank recorded an error itself, or was killed, or its process is gone while its ring was \
             left behind. Its peers wait for a rank that will not come back; their waits are listed as \
             consequences.",
            &[
                "an exception in the program, often in a part that does not communicate at all",
                "the kernel's OOM killer, a job limit, a preempted node",
                "a crash in native code or a device error",
            ],
            &[
                "read that rank's own log and exit code: the cause is there, not in its peers' time-outs",
                "ask the host: dmesg for the OOM killer and Xid errors, the scheduler for preemption",
                "restart the job only once you know that it will not meet the same fault again",
            ],
        ),
        Code::E151 => (
            "Others wait for a rank whose process is there and does nothing: the system reports that a signal \
             or a debugger has stopped it, or its watchdog, which makes a round ten times a second, has not \
             run for seconds while those of its peers have. The rank may have been stopped between two \
             operations or inside one that all its peers have joined.",
            &[
                "SIGSTOP, Ctrl-Z or a scheduler that suspends jobs",
                "a debugger or a tracer that is attached to the process",
                "a container whose processor quota is used up, a host that is out of memory and swaps",
            ],
            &[
                "see the state of the process: `ps -o stat,wchan -p PID` (T = stopped, t = held by a debugger)",
                "let it go on with `kill -CONT PID`, or detach the debugger",
                "if the system reports no stop, look at the load, the quota and the memory of its host",
            ],
        ),
        Code::E152 => (
            "Either connections between ranks had no sign of life for more than two of their intervals, or a log has \
             a report of the network that it cannot reach the other end: no route, no answer to a connection, a \
             transfer that was given up after all its retries. The systems at both ends of an idle connection \
             answer each other whatever the processes do, so where records show the silence no stopped or busy \
             process is the cause. The ranks that still heard each other show which side is cut off; where they \
             do not, both ends are alternatives. Where the records of both ends show that what one sent arrived \
             and what the other sent did not, the link works in one direction only. From a log the finding names \
             the side that reported it and the address that it could not reach, and the process there may be alive.",
            &[
                "a link, a route or a switch port that is down or flaps; a cable, an adapter, a subnet manager",
                "a firewall or a security group that drops the ports of the job, often in one direction only",
                "the wrong interface: the address belongs to a network that the hosts do not share",
                "the other host has crashed, lost its power or was taken away by its scheduler",
            ],
            &[
                "look whether the processes at the other end live, and what they log at that time",
                "try the address from that host (ping, ib_write_bw); check `ip -s link`, `dmesg` and the counters of \
                 the link's errors",
                "if one direction works, look for filters and for asymmetric routes",
                "choose the interface for all hosts alike (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME)",
            ],
        ),
        Code::E153 => (
            "Most ranks have a request to the job's store that was not answered for seconds; the store answers \
             in microseconds. It is served by rank 0 or by the launcher. Running operations do not need it, but \
             new groups, the exchange of status at a failure and the end of the job do. Where another finding \
             explains why the store's host does nothing, this is its consequence.",
            &[
                "the process that serves the store is stopped, has ended, or its host has",
                "the store's host is cut off from the others",
                "the launcher's host swaps, or a debugger holds the launcher",
            ],
            &[
                "look at the process that serves the store: rank 0, or the launcher (`ps -o stat,wchan -p PID`)",
                "look at the network of its host",
            ],
        ),
        Code::W150 => (
            "A rank's record or endpoint stopped answering while the job is being watched. What is shown \
             for it is its last answer, with its age. It is a warning, because the network between you \
             and the rank may be at fault and not the rank.",
            &[
                "the process ended, or its host is gone",
                "the host is overloaded, or the network between the reader and the rank is",
                "a debugger or SIGSTOP holds the process (its ring can still be read on the node)",
            ],
            &[
                "read its ring on the node: `rcomm-fr rings show`; that needs no answer from the process",
                "check the process and the host; if it is gone, expect E150 or E102 from its peers soon",
            ],
        ),
        Code::W160 => (
            "The ring keeps less than one step of history, or records were dropped because several \
             writers met in one slot. After a hang the record may then begin after its cause.",
            &[
                "the ring has the size of a smaller model: operations per step grew with layers or groups",
                "many small point-to-point operations (pipelines) share the ring with the collectives",
                "a dump of another recorder with its default of 2,000 entries",
            ],
            &[
                "size the ring for at least three steps: RCOMM_RING_ENTRIES here, TORCH_FR_BUFFER_SIZE for PyTorch (entries, not bytes)",
                "multiply by the number of operations in a step, which the finding gives",
            ],
        ),
        Code::W220 => (
            "A rank arrives late at its collectives again and again, and the others wait for it. If \
            durations are recorded, lateness is taken from them: in each operation the last to arrive \
            waits least. Otherwise it is taken from the times of issue, after the hosts' clocks are estimated \
            from the collectives, and differences within the error of this estimate are not reported. Arrivals \
            are not compared across messages. The time of the job is cut into stretches. Among those that lost \
            most, the rank must cost most in so many that this happens by chance in less than one of 10,000 \
            jobs, corrected for the number of ranks, and it must cost twice as much as any other rank. The \
            share is the part of the job's time that the others lost because of it.",
            &[
                "a host that is slower: CPU contention, a shared file system, thermal or power limits",
                "uneven work: longer sequences, more experts, another pipeline stage",
                "work that one rank does alone: logging, checkpointing, metrics",
                "a slow link, if only the groups that cross it are late",
            ],
            &[
                "if all ranks of one host are late, suspect the host; if one is, its device or its work",
                "compare clocks, power and temperature of that device with its neighbors'",
                "if it is always rank 0, look for work that only rank 0 does",
            ],
        ),
        Code::W230 => (
            "Ranks of one group move very different amounts of data over the recorded window. Nothing is \
             wrong by itself, but a collective is as slow as its largest member, so the others wait.",
            &[
                "token routing that favors few experts",
                "shards of very different sizes: embeddings, vocabulary, uneven layers",
                "sequences that are bucketed by length on some ranks only",
            ],
            &[
                "see which ranks are above the median and what they hold",
                "balance the routing (capacity, auxiliary loss) or the sharding",
            ],
        ),
        Code::W240 => (
            "A large part of the operations is so small that latency, and not bandwidth, is what they \
             cost. Fusing them usually gives time back at no risk.",
            &[
                "one collective per parameter, without buckets",
                "metrics and flags reduced one at a time in every step",
                "object or barrier calls inside the inner loop",
            ],
            &[
                "coalesce: one bucket of a few megabytes, one reduction for all metrics",
                "move the remaining small ones out of the step, or make them asynchronous",
            ],
        ),
        Code::W250 => (
            "The slowest operations that still succeeded came close to the group's time-out. The next \
             slow checkpoint or cold file system will be killed as a hang although nothing is wrong.",
            &[
                "a time-out chosen for steady state, met by start-up, checkpointing or evaluation",
                "groups with different time-outs: the shortest one fires first and hides the cause",
                "growth: the same job on more ranks or with larger inputs",
            ],
            &[
                "raise the group's time-out to several times the slowest success in the finding",
                "or shorten the slow phase: shard the checkpoint, warm up before the first collective",
            ],
        ),
        Code::W260 => (
            "The hosts' clocks disagree by more than the question allows. Everything that orders events \
             of different hosts by time is less certain; verdicts that rest on sequence numbers are not \
             affected.",
            &[
                "time synchronization is off, or not yet settled after boot",
                "a virtual machine that was suspended or migrated",
                "files of different times were read together",
            ],
            &[
                "check chrony or ntp on the hosts that the finding names",
                "read lateness from waits (W220) and not from wall clocks until then",
            ],
        ),
        Code::W270 => (
            "Ranks issued two operations of one group from the same two places of the source, but some in one \
             order and some in the other. Operation, type and size agree, so no backend refuses them: each \
             rank's first operation met the others' second, and the results are mixed up without an error. \
             Only the recorded call sites show it. Both places are known as places that all ranks come \
             through together, and after the crossing all are together again.",
            &[
                "two threads that issue on one group: which comes first is chance on each rank",
                "hooks or callbacks that run in an order of their own: gradients, prefetching, checkpointing",
                "a branch that depends on data and calls the same functions in another order",
                "iteration over a set or a dictionary whose order differs from process to process",
            ],
            &[
                "give each thread a group of its own, or issue all operations of a group from one thread",
                "sort what the program iterates over, so that all ranks have one order",
                "to catch the next one as it happens, run with RCOMM_DEBUG=detail: it names both places at once",
            ],
        ),
        Code::W280 => (
            "Two groups share ranks, and some of these ranks issue an operation of the one before an \
             operation of the other, some the other way round. Nothing hangs so far, since the \
             device had room for both at once, or the first had ended before the second was needed. Where it \
             has no room, each of the two operations waits for a rank that waits for the other one (E130).",
            &[
                "two streams or threads that each use a group of their own, without an order between them",
                "overlap of communication with computation that is scheduled by data or by load",
                "a branch that only some ranks take, ahead of the operation on one of the groups",
            ],
            &[
                "issue the operations of both groups in one order on all ranks",
                "or let the second wait for the end of the first, by an event or a wait of the host",
                "the finding shows both orders side by side, with the places in the source",
            ],
        ),
        Code::W290 => (
            "Two ranks each send to the other before they post the receive for what the other sends, \
             on one queue of a device and not in a batch. A send may wait until its receive is there. These \
             messages were small enough to be buffered, so the job runs; a larger message, another transport or \
             another release of the library makes both ranks wait for each other (E120).",
            &[
                "send and receive in the same order on both sides, where one side should receive first",
                "an exchange of neighbors that was tested with small tensors only",
                "single calls of isend and irecv on a device, where the order of issue is the order of execution",
            ],
            &[
                "post both in one batch (batch_isend_irecv), or in one group call",
                "or let one of the two sides receive before it sends",
            ],
        ),
        Code::N300 => (
            "A file does not belong with the others: another job or attempt, another shape of the world, \
             or an older time. It was left aside. Taken in, a stale file blames all others for being \
             ahead of it. Files of several recorders of one process, as of a host's and a device's backend, \
             are read together; of two files of one recorder the newer stays.",
            &[
                "the dump folder was not emptied between two runs",
                "a restart with another world size wrote to the same folder as the first attempt",
                "files of several jobs were collected into one folder",
            ],
            &[
                "check that the named file really is from elsewhere; if so there is nothing to do",
                "give every run its own folder, with the job and the attempt in its name",
            ],
        ),
        Code::N301 => (
            "A file is cut short, damaged, or no dump at all. Whatever could be salvaged was used and \
             everything else was analyzed as usual. Files that try to build objects or to exhaust memory \
             are refused here as well; nothing in a file is ever executed.",
            &[
                "the process was killed while it wrote: the rank at fault is often the one with the cut file",
                "the disk was full, or the quota was reached",
                "a file that is something else: a log, a partial copy",
            ],
            &[
                "copy it again from the source if you can; check the disk on that host",
                "look for the rank's ring, which needs no writing at the end: `rcomm-fr rings list`",
            ],
        ),
        Code::N302 => (
            "The ring had already overwritten what the question needs, or a log, without records, does not \
             hold it. Having fallen off the ring is not the same as never having happened, so the analysis \
             reports that it does not know and accuses no rank on that ground.",
            &[
                "a small ring with many operations per step",
                "the dump was taken long after the fault, while other groups went on",
                "ranks with very different numbers of operations: the busiest one forgets first",
            ],
            &[
                "raise the size of the ring for the next run (see W160)",
                "let time-outs trigger the dump by themselves, so that it is taken at once",
            ],
        ),
        Code::N303 => (
            "Files of several format versions were read together. Versions are compared by number (2.10 \
             is newer than 2.9) and each file is read by its own rules. What only newer files hold is \
             known for those ranks only.",
            &[
                "ranks run different PyTorch versions: images that were not updated together",
                "a mixed job, with records of more than one recorder",
            ],
            &[
                "check that all hosts run the same image; different library versions in one job are a cause of hangs themselves",
                "nothing has to be converted for the analysis",
            ],
        ),
        Code::N304 => (
            "Operations are pending in these records, none of them explains a hang by itself, and the records do \
             not show for how long: they may be a look at a job that ran on, or what was left of one that hung.",
            &[
                "dumps of a recorder that notes no time, as PyTorch's",
                "the ranks were asked one after the other, while the job went on",
            ],
            &[
                "take a second look and compare: `rcomm-fr diff BEFORE AFTER`",
                "if it is a look at a running job, say so with --snapshot",
                "if you know when the records were taken, name that time with --as-of",
            ],
        ),
        Code::N305 => (
            "The records of all ranks were read, every operation in them has ended, and nothing is wrong with \
             them. If the job hung nevertheless, it hung outside of what was recorded.",
            &[
                "the program was in code that does not communicate: input, a checkpoint, a lock, a device kernel",
                "the operation that hung is of a library or a group that does not record",
                "the records were taken before the hang, or after the job had ended",
            ],
            &[
                "take the stacks of all ranks while the job hangs: py-spy, gdb, key `t` of rcomm-top",
                "compare the time of the records with the time of the hang",
            ],
        ),
        Code::N306 => (
            "Ranks arrive late, and the others wait, but each time it is another rank: of the stretches of \
            time that lost most, no rank cost most in more than half. A loaded host, a hypervisor that takes \
            processors away, or a network delays all ranks in this way. No rank is at fault. The share is \
            the part of the job's time that was lost in all.",
            &[
                "more threads than processors on a host; other jobs on it",
                "steal time of a virtual machine; a quota of processor time",
                "work of unequal size that changes from step to step: sequences of different length, experts",
                "garbage collection that runs at another time on each rank",
            ],
            &[
                "look at load, steal time and throttling of the hosts",
                "bind ranks to processors of their own",
                "if the work itself varies, balance it over the ranks of a step",
            ],
        ),
    };
    Explanation {
        code,
        meaning,
        causes,
        actions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_an_explanation() {
        for &code in Code::ALL {
            let prose = explain(code);
            assert_eq!(prose.code, code);
            let words = prose.meaning.split_whitespace().count();
            assert!(words >= 20, "{code}: the meaning has only {words} words");
            assert!(prose.causes.len() >= 2, "{code}: too few causes");
            assert!(!prose.actions.is_empty(), "{code}: nothing to do");
        }
    }

    #[test]
    fn no_two_codes_share_an_explanation() {
        for (at, &code) in Code::ALL.iter().enumerate() {
            for &other in &Code::ALL[at + 1..] {
                assert_ne!(explain(code).meaning, explain(other).meaning);
            }
        }
    }
}
