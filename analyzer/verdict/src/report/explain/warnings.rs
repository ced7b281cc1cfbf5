//! What costs time or room, and what may hang: warnings.

use super::Prose;

pub(super) const W150: Prose = Prose {
    meaning: "A rank's record or endpoint stopped answering while the job is being watched. What is shown for it is its \
             last answer, with its age. It is a warning, because the network between you and the rank may be at fault \
             and not the rank.",
    causes: &[
        "the process ended, or its host is gone",
        "the host is overloaded, or the network between the reader and the rank is",
        "a debugger or SIGSTOP holds the process (its ring can still be read on its host)",
    ],
    actions: &[
        "read its ring on its host: `rcomm-fr rings show`; that needs no answer from the process",
        "check the process and the host; if it is gone, expect E150 or E102 from its peers soon",
    ],
};

pub(super) const W160: Prose = Prose {
    meaning: "The ring holds less than one step, has overwritten what the analysis needs, or lacks records: threads \
             wrote to one place of it at the same time, its folder was full, or the process ended while it wrote. After \
             a hang the record may then begin after its cause.",
    causes: &[
        "the ring has the size of a smaller model: operations per step grew with layers or groups",
        "many small point-to-point operations (pipelines) share the ring with the collectives",
        "a dump of another recorder with its default of 2,000 entries",
    ],
    actions: &[
        "size the ring for at least three steps: RCOMM_RING_ENTRIES here, TORCH_FR_BUFFER_SIZE for PyTorch (entries, \
         not bytes)",
        "if the program reports its steps, the finding gives the number of operations in one",
    ],
};

pub(super) const W220: Prose = Prose {
    meaning: "A rank is repeatedly the last to arrive at its collectives, and the others wait for it. The share is the \
             part of the job's time that they lost because of the rank. In the intervals in which the job lost most \
             time, the rank cost most so often that this happens by chance in less than one of 10,000 jobs whose ranks \
             are alike (a live view that has just reported the rank needs less), and it cost twice as much as any \
             other rank. Not counted are idle time in the schedule of a pipeline, waits for a slow link, and a delay \
             that was counted in one collective and is carried into the next.",
    causes: &[
        "a host that is slower: CPU contention, a shared file system, thermal or power limits",
        "uneven work: longer sequences, more experts, another pipeline stage",
        "work that one rank does alone: logging, checkpointing, metrics",
        "a slow link, if only the groups that cross it are late",
    ],
    actions: &[
        "if all ranks of one host are late, suspect the host; if one is, its device or its work",
        "compare clocks, power and temperature of that device with its neighbors'",
        "if it is always rank 0, look for work that only rank 0 does",
    ],
};

pub(super) const W230: Prose = Prose {
    meaning: "Ranks of one group move very different amounts of data in the recorded operations. Nothing is wrong by \
             itself, but an exchange is as slow as its largest member, so the others wait. If durations were measured, \
             the price is what equal parts would save in exchanges (all_to_all): the time after the last member \
             arrived, less the share that an average member needs. Gathers of uneven parts have no price: they take as \
             long as all parts together.",
    causes: &[
        "token routing that favors few experts",
        "shards of very different sizes: embeddings, vocabulary, uneven layers",
        "sequences that are bucketed by length on some ranks only",
    ],
    actions: &[
        "see which ranks are above the median and what they hold",
        "balance the routing (capacity, auxiliary loss) or the sharding",
    ],
};

pub(super) const W240: Prose = Prose {
    meaning: "At least half of the ranks spend a tenth of their time or more in rows of operations so small that \
             latency is what they cost; the rank in the finding is an example. Fusing them usually gives time back at \
             no risk. If durations were measured, the price is what one operation for each row would save on that \
             rank: the shortest duration of the row, for each operation but one.",
    causes: &[
        "one collective per parameter, without buckets",
        "metrics and flags reduced one at a time in every step",
        "object or barrier calls inside the inner loop",
    ],
    actions: &[
        "coalesce: one bucket of a few megabytes, one reduction for all metrics",
        "move the remaining small ones out of the step, or make them asynchronous",
    ],
};

pub(super) const W250: Prose = Prose {
    meaning: "The slowest operations that still succeeded came close to the group's time-out. If a checkpoint or a file \
             system is a little slower, the operation that waits for it may be ended as a hang although nothing is \
             wrong.",
    causes: &[
        "a time-out chosen for steady state, met by start-up, checkpointing or evaluation",
        "groups with different time-outs: the shortest one fires first and hides the cause",
        "growth: the same job on more ranks or with larger inputs",
    ],
    actions: &[
        "raise the group's time-out to several times the slowest success in the finding",
        "or shorten the slow phase: shard the checkpoint, warm up before the first collective",
    ],
};

pub(super) const W260: Prose = Prose {
    meaning: "A finding rests on the order of two times on different hosts, and they are closer together than the \
             error of the difference of the clocks, which is estimated from the collectives, or that difference cannot \
             be estimated. Everything that orders events of different hosts by time is less certain; verdicts that \
             rest on sequence numbers are not affected.",
    causes: &[
        "time synchronization is off, or not yet settled after boot",
        "a virtual machine that was suspended or migrated",
        "files of different times were read together",
    ],
    actions: &[
        "check chrony or ntp on the hosts that the finding names",
        "read lateness from waits (W220) and not from wall clocks until then",
    ],
};

pub(super) const W270: Prose = Prose {
    meaning: "Ranks issued two operations of one group from the same two places of the source, but some in one order \
             and some in the other. Operation, type and size agree, so no backend refuses them: each rank's first \
             operation met the others' second, and the results are mixed up without an error. Only the recorded call \
             sites show it. Both places are known as places that all ranks come through together, and after the \
             crossing all are together again.",
    causes: &[
        "two threads that issue on one group: which comes first is chance on each rank",
        "hooks or callbacks that run in an order of their own: gradients, prefetching, checkpointing",
        "a branch that depends on data and calls the same functions in another order",
        "iteration over a set or a dictionary whose order differs from process to process",
    ],
    actions: &[
        "give each thread a group of its own, or issue all operations of a group from one thread",
        "sort what the program iterates over, so that all ranks have one order",
        "to catch the next one as it happens, run with RCOMM_DEBUG=detail: it names both places at once",
    ],
};

pub(super) const W280: Prose = Prose {
    meaning: "Two groups share ranks, and some of these ranks issue an operation of the one before an operation of the \
             other, some the other way round. Nothing hangs so far, since the device had room for both at once, or the \
             first had ended before the second was needed. If it has no room, each of the two operations waits for a \
             rank that waits for the other one (E130).",
    causes: &[
        "two streams or threads that each use a group of their own, without an order between them",
        "overlap of communication with computation that is scheduled by data or by load",
        "a branch that only some ranks take, ahead of the operation on one of the groups",
    ],
    actions: &[
        "issue the operations of both groups in one order on all ranks",
        "or let the second wait for the end of the first, by an event or a wait of the host",
        "the finding shows both orders side by side, with the places in the source",
    ],
};

pub(super) const W290: Prose = Prose {
    meaning: "Two ranks each send to the other before they post the receive for what the other sends, on one queue of a \
             device and not in a batch. A send may wait until its receive is there. These messages were small enough \
             to be buffered, so the job runs; a larger message, another transport or another release of the library \
             makes both ranks wait for each other (E120).",
    causes: &[
        "send and receive in the same order on both sides, where one side should receive first",
        "an exchange of neighbors that was tested with small tensors only",
        "single calls of isend and irecv on a device, where the order of issue is the order of execution",
    ],
    actions: &[
        "post both in one batch (batch_isend_irecv), or in one group call",
        "or let one of the two sides receive before it sends",
    ],
};
