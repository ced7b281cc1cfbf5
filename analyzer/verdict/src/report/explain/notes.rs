//! What was not read, was lost, or is left open: notes.

use super::Prose;

pub(super) const N300: Prose = Prose {
    meaning: "An input was left aside, and the job may be complete without it. Most often a file does not belong with \
             the others: another job or attempt, another shape of the world, or an older time; read with the others, \
             it would blame them for being ahead of it. Other inputs that are left aside are files without records, \
             paths that do not exist, links that lead to nothing or to a folder that is not searched, and logs and \
             stacks, which a summary cannot hold. Files of several recorders of one process, as of a host's and a \
             device's backend, are read together; of two files of one recorder the complete one is kept, or the newer \
             one if both are complete or both are cut. A record that was taken earlier than those of other ranks, or \
             may have been, is read, and named here: what its rank has done since then is not known. Files that were \
             read as those of another rank than their names state are named here, too.",
    causes: &[
        "the dump folder was not emptied between two runs",
        "a restart with another world size wrote to the same folder as the first attempt",
        "files of several jobs were collected into one folder",
        "the ranks' dumps were written at different moments",
        "a link was copied without what it leads to, or leads to a folder that is not among the arguments",
    ],
    actions: &[
        "check that the named file really is from elsewhere; if so there is nothing to do",
        "give the folder to which a link leads as an argument, too",
        "give every run its own folder, with the job and the attempt in its name",
        "take the records of all ranks at one moment",
    ],
};

pub(super) const N301: Prose = Prose {
    meaning: "A file is cut short, damaged, or no dump at all. Whatever could be salvaged was used, and everything else \
             was analyzed as usual. Files that try to build objects or to exhaust memory are refused as well; nothing \
             in a file is ever executed. Also named here are folders that cannot be listed, ranks that left no \
             readable record and that no finding blames, and operations of a process with several devices that cannot \
             be assigned to its ranks. A live view names here the ranks that it cannot read, and why.",
    causes: &[
        "the process was killed while it wrote: the rank at fault is often the one with the cut file",
        "the disk was full, or the quota was reached",
        "a file that is something else: a log, a partial copy",
    ],
    actions: &[
        "copy it again from the source if you can; check the disk on that host",
        "look for the rank's ring, which needs no writing at the end: `rcomm-fr rings list`",
    ],
};

pub(super) const N302: Prose = Prose {
    meaning: "The ring has overwritten what would decide the verdict, or a log that was read without records does not \
             hold it. An operation that a ring no longer holds may have been issued all the same, so the analysis \
             reports that it does not know, and accuses no rank on that ground.",
    causes: &[
        "a small ring with many operations per step",
        "the dump was taken long after the fault, while other groups went on",
        "ranks with very different numbers of operations: the busiest one forgets first",
    ],
    actions: &[
        "raise the size of the ring for the next run (see W160)",
        "let time-outs trigger the dump by themselves, so that it is taken at once",
    ],
};

pub(super) const N303: Prose = Prose {
    meaning: "Files of several format versions were read together. Versions are compared by number (2.10 is newer than \
             2.9) and each file is read by its own rules. What only newer files hold is known only of the ranks that \
             wrote them.",
    causes: &[
        "ranks run different PyTorch versions: images that were not updated together",
        "a mixed job, with records of more than one recorder",
    ],
    actions: &[
        "check that all hosts run the same image; different library versions in one job are a cause of hangs themselves",
        "nothing has to be converted for the analysis",
    ],
};

pub(super) const N304: Prose = Prose {
    meaning: "Operations are pending in these records, none of them explains a hang by itself, and the records do not \
             show whether they ended later: the records may be a look at a job that ran on, or what was left of one \
             that hung.",
    causes: &[
        "dumps of a recorder that does not note when it wrote them, as PyTorch's",
        "the ranks were asked one after the other, while the job went on",
        "the dumps were asked for before any operation was overdue",
    ],
    actions: &[
        "take a second look and compare: `rcomm-fr diff BEFORE AFTER`",
        "if it is a look at a running job, say so with --snapshot",
        "if you know when the records were taken, name that time with --as-of",
    ],
};

pub(super) const N305: Prose = Prose {
    meaning: "The records of all ranks were read, every operation in them has ended, or none was recorded, and \
             nothing is wrong with them. If the job hung nevertheless, it hung outside of what was recorded. A \
             running job has this note, with the verdict `inconclusive`, when no rank has issued an operation for 20 \
             times as long as any pause between its newest operations, and for at least twice `--overdue` (10 s \
             unless set); when single ranks have issued none for so long, wait in none, and others go on; when some \
             members of a group have made it and others have not; and when a rank failed for which no other has waited \
             for long: an exception, an error, or a process that is gone.",
    causes: &[
        "the program was in code that does not communicate: input, a checkpoint, a lock, a device kernel",
        "the operation that hung is of a library or a group that does not record",
        "ranks wait in the call that makes a group, which records nothing until all members have come",
        "the records were taken before the hang, or after the job had ended",
    ],
    actions: &[
        "take the stacks of all ranks while the job hangs: py-spy, gdb, key `t` of rcomm-top",
        "compare the time of the records with the time of the hang",
    ],
};

pub(super) const N306: Prose = Prose {
    meaning: "Ranks arrive late, and the others wait, but each time it is another rank: of the intervals in which the \
             job lost most time, no rank cost most in more than half. A loaded host, a hypervisor that takes \
             processors away, or a network delays all ranks in this way. No rank is at fault. The share in the note is \
             the part of the job's time that was lost in all. The note also appears if one rank was last most often, \
             but the threads that issue and run its operations were ready to run, and had no processor, for at least \
             half as long as the others waited for it (rcomm's recorder measures that).",
    causes: &[
        "more threads than processors on a host; other jobs on it",
        "steal time of a virtual machine; a quota of processor time",
        "work of unequal size that changes from step to step: sequences of different length, experts",
        "garbage collection that runs at another time on each rank",
    ],
    actions: &[
        "look at load, steal time and throttling of the hosts",
        "bind ranks to processors of their own",
        "if the work itself varies, balance it over the ranks of a step",
    ],
};
