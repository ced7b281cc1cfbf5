//! Tests that a rank is not called slow because it waited for another.

use crate::job::{Call, job};
use rcomm_recorder::model::{OpType, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Verdict, analyze};

/// Ranks 1 to 3 of a job of four share a group, in which rank 1 is late by 50 ms in each step: before, it waits that
/// long for rank 0 in `first`, an operation of these two.
fn cascade(first: OpType) -> Vec<Dump> {
    const STEPS: usize = 60;
    const FIRST: Call = Call::AllReduce { group: 0, line: 10 };
    const SECOND: Call = Call::AllReduce { group: 1, line: 20 };
    let program = |rank: Rank| -> Vec<Call> {
        let step: &[Call] = match rank {
            0 => &[FIRST],
            1 => &[FIRST, SECOND],
            _ => &[SECOND],
        };
        step.repeat(STEPS)
    };
    let programs: Vec<Vec<Call>> = (0..4).map(program).collect();
    let mut dumps = job("nccl", &programs);
    for (rank, dump) in (0u32..).zip(&mut dumps) {
        dump.groups[0].info.ranks = [0, 1].into();
        dump.groups[0].info.desc = "pair".to_owned();
        dump.groups[1].info.ranks = [1, 2, 3].into();
        let mut steps = [0i64; 2];
        for entry in &mut dump.entries {
            let group = entry.group as usize;
            let begin_ms = steps[group] * 70;
            steps[group] += 1;
            if group == 0 {
                entry.op = first;
            }
            // When the rank comes, and when all leave, ms after the step began.
            let (issued, left) = match (group, rank) {
                (0, 0) => (50, 51),
                (0, _) => (0, 51),
                (_, 1) => (51, 52),
                (_, _) => (0, 52),
            };
            let at = |ms: i64| 1_699_966_800_000_000_000 + (begin_ms + ms) * 1_000_000;
            entry.time_created_ns = at(issued);
            entry.time_discovered_started_ns = at(issued);
            entry.time_discovered_completed_ns = at(left);
            entry.duration_ms = Some((left - issued) as f32);
        }
    }
    dumps
}

#[test]
fn a_rank_that_waited_for_one_without_a_record_is_not_called_slow() {
    let mut dumps = cascade(OpType::AllReduce);
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    assert_eq!((report.verdict, finding.code), (Verdict::Slow, Code::W220));
    assert_eq!(finding.culprit_ranks, [0], "{}", finding.sentence);
    dumps.remove(0);
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.findings, [], "{:?}", report.findings);
}

#[test]
fn a_rank_that_waited_for_the_root_of_a_broadcast_is_not_called_slow() {
    let report = analyze(&cascade(OpType::Broadcast), &Policy::default());
    let mut culprits = report
        .findings
        .iter()
        .flat_map(|finding| &finding.culprit_ranks);
    assert!(culprits.all(|&rank| rank == 0), "{:?}", report.findings);
}
