//! Tests dumps that were taken at different moments of one job.

use crate::job::{Call, job};
use rcomm_recorder::model::EntryState;
use rcomm_verdict::{Policy, Verdict, analyze};

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
