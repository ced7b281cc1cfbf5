//! What ranks issue, or leave out: E101 to E114.

use super::Prose;

pub(super) const E101: Prose = Prose {
    meaning: "A rank left a readable record, and did not join the operation that its peers wait in: by the record it \
             never issued the operation, or issued it and its device has not started it, or issued it only after the \
             peers' time-out. As far as is recorded, that rank itself waits for no other, so the chain of waits \
             ends there. The ranks that wait there are victims, however alarming their own time-out messages look. \
             Logs, and the launch counts in reports of NCCL's RAS subsystem, can show the same.",
    causes: &[
        "its input pipeline stalled: a slow or dead file system, a hung data loader worker",
        "an exception before the call: the program caught it, or has not ended yet because its teardown waits",
        "control flow that depends on data: one rank took another branch, or left the loop earlier",
        "work that only one rank does (checkpoint, evaluation, logging) took longer than the time-out",
        "a very long kernel: the program waits for the device before the call, or the operation waits for the kernel \
         on its stream",
    ],
    actions: &[
        "look at that rank first: the finding names its last recorded call, and its phase if the program reports one",
        "if it still runs, take its stacks (py-spy, gdb) before anything is killed",
        "read that rank's own log around the time of its last call, not its peers' logs",
        "if it was merely slow, raise the time-out of that group, or do the slow work where no rank waits for it",
    ],
};

pub(super) const E102: Prose = Prose {
    meaning: "An expected rank left no readable record, or one that ends too early, and nothing that the others \
             recorded explains why they wait. Their waits lead to it: they are in an operation that needs this \
             rank, and no record shows whether it came there. Ranks with consecutive numbers, and all ranks of a \
             host, are one finding. A missing record proves less than a record does: the rank may have come, and wait \
             like the others.",
    causes: &[
        "the process was killed before it could write: out of memory, a host lost, a preempted pod",
        "its dump went to node-local storage that died with the allocation",
        "it hung in a place where it could not answer the request for a dump",
        "the files were collected from some of the hosts only",
    ],
    actions: &[
        "ask the scheduler and the kernel log of that rank's host: exit code, OOM killer, Xid errors",
        "look for its ring on that host: `rcomm-fr rings list`; a ring outlives its process",
        "collect again with `rcomm-fr collect`, whose manifest lists each rank that gave no record, and why",
    ],
};

pub(super) const E103: Prose = Prose {
    meaning: "From one point on a rank's operations match those of its peers shifted by one (or by k): what it calls \
             number 41 is what the others call number 42. It left an operation out. If types or sizes differ from \
             there on, that is only a consequence. A rank is also reported if it went on to later operations of other \
             groups while its peers wait in an operation that it left out.",
    causes: &[
        "a conditional collective: `if loss.isfinite(): all_reduce(...)` with a condition that differs by rank",
        "an early `continue` or `return` in the training loop on one rank",
        "ranks with a different number of batches, parameters with gradients, or pipeline stages",
        "an exception handler that skips the rest of a step",
    ],
    actions: &[
        "read the diff in the finding: it shows the operations of both sides around the first difference",
        "make the decision together: reduce the condition first, then branch on the result",
        "for uneven inputs use a join protocol, or drop the last uneven batch on all ranks",
    ],
};

pub(super) const E104: Prose = Prose {
    meaning: "A rank issued an operation that no other member of the group did, and everything after it matches the \
             peers' operations shifted by one (or by k). The extra call pairs with the others' next one, so the group \
             disagrees, or hangs, from there on. If it was the last one, nothing follows it: it fails once most of the \
             others have left without it.",
    causes: &[
        "a debugging barrier or a metric reduction inside a `rank == 0` branch",
        "a retry that repeats a collective on the one rank that saw an error",
        "one batch more than the others have, where the last one fails",
        "a library that synchronizes lazily on first use, reached by one rank only",
    ],
    actions: &[
        "look at the culprit's call site at that sequence number: the finding names it if it was recorded",
        "move the call out of the rank-dependent branch, or give it a group of its own",
        "a retry must be agreed on by all members before any of them repeats a collective",
    ],
};

pub(super) const E105: Prose = Prose {
    meaning: "Every record states the members of the groups that its rank made. Here ranks state different members \
             under one name, although one of them counts the other as a member; or they describe the group of one \
             name differently, and the order in which each made its groups shows which rank is odd. These ranks made \
             different groups, and what they issue on them never meets: torch.distributed needs all ranks of the \
             world to make each group, in one order; rcomm needs exactly the members. The statements are proof by \
             themselves, so the finding appears also when nothing is pending: NCCL connects a group at its first \
             operation, and a hang there leaves no entry in older recorders.",
    causes: &[
        "a list of ranks computed from data that differs by rank: a mesh shape, an environment variable, a config file",
        "new_group called in another order on some ranks, or under a condition",
        "a rank that left out one new_group call: from there on its groups have other names",
        "two versions of the program in one job",
    ],
    actions: &[
        "print the ranks that each process passes to new_group, and compare them",
        "make the groups in one order on all ranks; with torch.distributed call new_group also for those that a rank \
         is no member of, with rcomm on exactly the members",
        "make the groups from one description, such as a DeviceMesh, in place of calls by hand",
    ],
};

pub(super) const E110: Prose = Prose {
    meaning: "Members of one group issued different operations under the same sequence number. The side with most \
             members counts as the right one. If the largest sides are equally large, the one whose input and output \
             fit each other counts, else the one that issued what groups of the same kind did, else the one that \
             continues the group's own past; if none of that decides, the finding lists the sides and accuses none. \
             If one counts as right, and the later operations of the others match its own when they are shifted or \
             put in another order, that is E103, E104 or E113 instead.",
    causes: &[
        "ranks run different code: another version, another branch, another configuration",
        "two threads issue on one group, and their order differs between ranks",
        "the group was used by two subsystems (for example training and evaluation) at once",
    ],
    actions: &[
        "compare the call sites of both sides in the finding's diff",
        "check that every rank runs the same revision and the same configuration",
        "give each thread and each subsystem its own group",
    ],
};

pub(super) const E111: Prose = Prose {
    meaning: "Members issued the same operation with different element types. Most backends move bytes and do not \
             compare types: the result is a hang if the numbers of bytes differ, or silent corruption if they happen \
             to agree.",
    causes: &[
        "mixed precision is on for some ranks only, or an autocast region ends at different places",
        "a tensor created on one rank by a default (float32) and loaded on the others (bfloat16)",
        "a checkpoint restored in another precision on one rank",
    ],
    actions: &[
        "print the dtype at the call site that the finding names, on the culprit and on one peer",
        "cast on all ranks right before the call, from the configuration and not from the data",
    ],
};

pub(super) const E112: Prose = Prose {
    meaning: "Members issued the same operation with sizes that it does not allow to differ. Sizes that may differ \
             are not compared: the parts of gather_v and all_to_all, and what only the root has, which is the output of \
             a gather and the input of a scatter. In an exchange (all_to_all) each member must send what the other \
             expects: if recorded split sizes show a difference it is E114, if only the sizes of tensors do it is E112.",
    causes: &[
        "the last batch is smaller on some ranks, or sequences are padded to a local maximum",
        "a different number of parameters with gradients lands in one bucket",
        "sharding that does not divide evenly: another world size than the checkpoint's",
    ],
    actions: &[
        "compare the sizes in the evidence: which ranks are the odd ones, and by how much",
        "pad or drop so that all ranks agree, or use the variant that carries sizes (all_gather_v, all_to_all with \
         splits)",
    ],
};

pub(super) const E113: Prose = Prose {
    meaning: "A rank issued the same operations as its peers, in another order. Counting operations shows no \
             difference; yet each call meets the wrong one on the other side. If the records end before all agree \
             again, one may as well be missing or extra, and the finding says so.",
    causes: &[
        "two threads or streams issue on one group without an order between them",
        "iteration over an unordered set or dictionary of parameters or groups",
        "hooks that fire in the order in which gradients become ready, which differs by rank",
    ],
    actions: &[
        "fix the order at the call sites in the diff: sort by name, or issue from one thread",
        "give concurrent users a group each; order is only kept within one group",
    ],
};

pub(super) const E114: Prose = Prose {
    meaning: "Members agree on the operation, the type and the sizes that must be equal, but not on an argument: the \
             root, the reduction, or the split sizes of an exchange, in which one rank sends what another does not \
             expect. It is reported only where the records hold the argument, or where the sizes show that several \
             members, or none, consider themselves the root.",
    causes: &[
        "the root is given as a rank of the world on some members and of the group on others",
        "split sizes computed from local data, not exchanged beforehand",
        "the reduction chosen by a branch that depends on the rank",
    ],
    actions: &[
        "compare the arguments in the evidence, and see what most members passed",
        "for rooted operations check whether the API expects a global or a group rank",
        "exchange the split sizes first (a small all_to_all), then use them",
    ],
};
