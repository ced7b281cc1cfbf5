//! Tests a stage of a pipeline that has left a collective out, and whose program is ahead of its device.

use crate::job::{Call, job};
use rcomm_recorder::model::EntryState;
use rcomm_verdict::{Policy, Verdict, analyze};

#[test]
fn the_peer_of_a_stage_that_left_a_collective_out_is_not_said_to_owe_a_message() {
    const ALL: Call = Call::AllReduce { group: 0, line: 10 };
    // Rank 0 sends to rank 1 six times in each step, at the end of which all ranks average.
    let messages = |step: u64, call: fn(u64) -> Call| -> Vec<Call> {
        (0..6).map(|nth| call(step * 6 + nth + 1)).collect()
    };
    let send = |step| messages(step, |batch| Call::Send { peer: 1, batch });
    let receive = |step| messages(step, |batch| Call::Receive { peer: 0, batch });
    let sends = [send(0), vec![ALL], send(1), vec![ALL]].concat();
    // Rank 1 left the second all_reduce out. It waits for the first message of the next step, and has issued the
    // all_reduce behind that.
    let next = vec![Call::Receive { peer: 0, batch: 13 }, ALL];
    let receives = [receive(0), vec![ALL], receive(1), next].concat();
    let others = vec![ALL, ALL];
    let mut dumps = job("nccl", &[sends, receives, others.clone(), others]);
    for (dump, unfinished) in dumps.iter_mut().zip([1, 2, 1, 1]) {
        let done = dump.entries.len() - unfinished;
        for entry in &mut dump.entries[done..] {
            entry.state = EntryState::Scheduled;
            entry.retired = false;
            entry.time_discovered_started_ns = 0;
            entry.time_discovered_completed_ns = 0;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    assert_eq!(report.verdict, Verdict::Stuck);
    assert!(
        !finding.culprit_ranks.contains(&0),
        "{} {}",
        finding.confidence,
        finding.sentence
    );
    assert!(
        finding.alternatives.contains(&vec![1]) || finding.culprit_ranks == [1],
        "{:?}",
        finding.alternatives
    );
}
