//! Tests dumps that were taken at different moments of one job.

use crate::job::{Call, job};
use rcomm_recorder::model::EntryState;
use rcomm_verdict::{Code, Policy, Verdict, analyze};

#[test]
fn an_operation_that_only_older_dumps_show_as_unfinished_is_no_hang() {
    const WORLD: Call = Call::AllReduce { group: 0, line: 10 };
    const PAIR: Call = Call::AllReduce { group: 1, line: 20 };
    let early = vec![WORLD, PAIR, WORLD, PAIR, WORLD, PAIR];
    let late: Vec<Call> = early.iter().chain(&early).copied().collect();
    let mut dumps = job("gloo", &[early.clone(), early, late.clone(), late]);
    for (rank, dump) in (0u32..).zip(&mut dumps) {
        let pair = rank / 2;
        dump.groups[1].info.name = format!("pair{pair}");
        dump.groups[1].info.ranks = [2 * pair, 2 * pair + 1].into();
        if pair == 0 {
            let last = dump.entries.last_mut().expect("a rank has operations");
            last.state = EntryState::Started;
            last.retired = false;
            last.time_discovered_completed_ns = 0;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn one_older_dump_does_not_hide_that_all_others_are_stuck() {
    const WORLD: Call = Call::AllReduce { group: 0, line: 10 };
    const PAIR: Call = Call::AllReduce { group: 1, line: 20 };
    let programs = vec![vec![WORLD, PAIR, WORLD, PAIR, WORLD]; 8];
    let mut dumps = job("gloo", &programs);
    for (rank, dump) in (0u32..).zip(&mut dumps) {
        let pair = rank / 2;
        dump.groups[1].info.name = format!("pair{pair}");
        dump.groups[1].info.ranks = [2 * pair, 2 * pair + 1].into();
        // The dump of rank 7 still has the second operation on its pair as under way.
        let done = if rank == 7 { 3 } else { 4 };
        for entry in &mut dump.entries[done..] {
            entry.state = EntryState::Started;
            entry.retired = false;
            entry.time_discovered_completed_ns = 0;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    assert_eq!((report.verdict, finding.code), (Verdict::Stuck, Code::E135));
    let expected = "ranks 0-7 are all inside all_reduce #3 on group default_pg and none is known to have finished";
    assert!(
        finding.sentence.starts_with(expected),
        "{}",
        finding.sentence
    );
    let doubt =
        "the record of rank 7 was taken before those of others, and it may have finished since";
    assert!(finding.doubts.iter().any(|found| found == doubt));
}
