//! Tests that a log alone names no rank of a process group as one of the job.

use super::judge_lines;
use rcomm_analyzer::Code;

#[test]
fn ranks_within_a_group_are_no_ranks_of_the_job() {
    let no_rank: [u32; 0] = [];
    let blamed = |lines: &[String]| {
        let finding = judge_lines(lines).findings.remove(0);
        assert_eq!(finding.alternatives, Vec::<Vec<u32>>::new(), "{finding:?}");
        (finding.code, finding.culprit_ranks, finding.sentence)
    };
    // Time-outs: without a label, or a group, the rank is that within some group of the process.
    let timed_out = |rank: u32, numel: u64| {
        format!(
            "[E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective operation timeout: \
             WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for \
             600020 milliseconds before timing out."
        )
    };
    let three = [timed_out(0, 512), timed_out(1, 512), timed_out(2, 64)];
    let (code, ranks, sentence) = blamed(&three);
    assert_eq!((code, ranks), (Code::N302, no_rank.to_vec()));
    let expected = "ranks 0-2 of a process group timed out in all_reduce #7, and the log does not show which ranks of \
                    the job these are";
    assert!(sentence.starts_with(expected), "{sentence}");
    // As many different ranks as the job has are all ranks of the job.
    let size = |size: u32| format!("world_size {size}");
    let all = [&[size(3)][..], &three].concat();
    let (code, ranks, _) = blamed(&all);
    assert_eq!((code, ranks), (Code::E112, vec![2]));
    let some = [&[size(4)][..], &three].concat();
    assert_eq!(blamed(&some).1, no_rank);
    // A group of all ranks does not make the ranks within another one those of the job.
    let timed_out_in = |group: &str, rank: u32, numel: u64| {
        let head = format!("[E ProcessGroupNCCL.cpp:475] [PG ID 1 PG GUID {group} Rank {rank}]");
        timed_out(rank, numel).replace("[E ProcessGroupNCCL.cpp:475]", &head)
    };
    let of_all = (0..8).map(|rank| timed_out_in("9", rank, 512));
    let of_half = (0..4).map(|rank| timed_out_in("2", rank, if rank == 3 { 64 } else { 512 }));
    let lines: Vec<String> = std::iter::once(size(8))
        .chain(of_all)
        .chain(of_half)
        .collect();
    assert_eq!(blamed(&lines).1, no_rank);
}

#[test]
fn ranks_that_compared_their_calls_are_those_of_a_group() {
    let differ = |label: &str, own: u32, other: u32| {
        format!(
            "{label}RuntimeError: Detected mismatch between collectives on ranks. Rank {own} is running collective: \
             CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[8], TensorDtypes=Float), but Rank \
             {other} is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[8], \
             TensorDtypes=Float)."
        )
    };
    let alternatives = |lines: &[String]| {
        let finding = judge_lines(lines).findings.remove(0);
        assert_eq!((finding.code, finding.culprit_ranks), (Code::E110, vec![]));
        finding.alternatives
    };
    let none: Vec<Vec<u32>> = Vec::new();
    let both = [vec![0], vec![1]];
    // In a group of ranks 0 and 5, rank 0 of the job compares its call with rank 5, which is rank 1 of the group.
    assert_eq!(alternatives(&[differ("", 0, 1)]), none);
    assert_eq!(alternatives(&[differ("[rank0]: ", 0, 1)]), none);
    assert_eq!(alternatives(&[differ("[rank1]: ", 1, 0)]), both);
    let size = "world_size 2".to_owned();
    assert_eq!(alternatives(&[size, differ("", 0, 1)]), both);
}

#[test]
fn a_desync_report_names_ranks_of_its_group() {
    let report = |newest: u64| {
        [
            "[rank4]:[E515 18:36:47.343377708 ProcessGroupNCCL.cpp:1937] Rank 0".to_owned(),
            "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:".to_owned(),
            "\t   [1] finished collective #182, but didn't join collective #183 (count from 1)".to_owned(),
            "\t - Snapshot of ranks' latest states:".to_owned(),
            format!("\t   #{newest} started ranks:"),
            "\t     [0] started ALLREDUCE".to_owned(),
        ]
    };
    let culprits = |lines: &[String]| {
        let finding = judge_lines(lines).findings.remove(0);
        assert_eq!(finding.code, Code::E101, "{finding:?}");
        finding.culprit_ranks
    };
    let no_rank: [u32; 0] = [];
    assert_eq!(culprits(&report(183)), no_rank);
    let of_two = [&["world_size 2".to_owned()][..], &report(183)].concat();
    assert_eq!(culprits(&of_two), [1]);
    // A line says the same of rank 0 in the group of all ranks.
    let progress = "[rank0]:[E515 18:36:47.343391940 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 0]  \
                    failure detected by watchdog at work sequence id: 183 PG status: last enqueued work: 183, last \
                    completed work: 182";
    let of_world = [&report(183)[..], &[progress.to_owned()]].concat();
    assert_eq!(culprits(&of_world), [1]);
}

#[test]
fn a_desync_report_on_a_group_adds_nothing_to_that_on_the_job() {
    let report = |late: u32, after: u64, inside: u32| {
        [
            "[rank4]:[E515 18:36:47.343377708 ProcessGroupNCCL.cpp:1937] Rank 0".to_owned(),
            "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:".to_owned(),
            format!(
                "\t   [{late}] finished collective #{after}, but didn't join collective #{} (count from 1)",
                after + 1
            ),
            "\t - Snapshot of ranks' latest states:".to_owned(),
            format!("\t   #{} started ranks:", after + 1),
            format!("\t     [{inside}] started ALLREDUCE"),
        ]
    };
    let size = ["world_size 8".to_owned()];
    let finding = |lines: &[String]| judge_lines(lines).findings.remove(0);
    let both = [&size[..], &report(1, 4, 0), &report(5, 182, 7)].concat();
    assert_eq!(finding(&both).culprit_ranks, [5]);
    let progress = "[rank0]:[E515 18:36:47.343391940 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 0]  \
                    failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: 5, last \
                    completed work: 4";
    let by_chance = [&size[..], &report(1, 4, 0), &[progress.to_owned()]].concat();
    let found = finding(&by_chance);
    assert_eq!(found.culprit_ranks, Vec::<u32>::new());
    assert!(found.confidence <= 0.5, "{found:?}");
    assert!(found.next.contains("rank 1 of the group"), "{found:?}");
    assert!(
        found.log[0].text.contains("rank 1 of the group"),
        "{found:?}"
    );
}
