//! Tests the sentences on ranks that issued two operations in a different order from their peers, where each such rank
//! has its own pair of groups.

use crate::job::{Call, job};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Code, Policy, Report, analyze};

const TP: Call = Call::AllReduce { group: 0, line: 10 };
const DP: Call = Call::AllReduce { group: 1, line: 20 };

/// The records of ranks in a grid of two columns: each has a group `tp` with its row and a group `dp` with its column.
/// Each rank has completed three operations on `tp` and three on `dp`, alternately; then the ranks in `crossed` wait in
/// `dp`, and all others in `tp`.
fn grid(rows: u32, crossed: &[u32]) -> Vec<Dump> {
    let ranks = 0..2 * rows;
    let programs = ranks.map(|rank| {
        let last = if crossed.contains(&rank) { DP } else { TP };
        vec![TP, DP, TP, DP, TP, DP, last]
    });
    let mut dumps = job("gloo", &programs.collect::<Vec<_>>());
    for (rank, dump) in (0..).zip(&mut dumps) {
        let (row, column): (u32, u32) = (rank / 2, rank % 2);
        dump.identity.world_size = Some(2 * rows);
        let groups = [
            (format!("row{row}"), "tp", vec![2 * row, 2 * row + 1]),
            (
                format!("column{column}"),
                "dp",
                (0..rows).map(|row| 2 * row + column).collect(),
            ),
        ];
        for (group, (name, desc, ranks)) in dump.groups.iter_mut().zip(groups) {
            group.info.name = name;
            group.info.desc = desc.to_owned();
            group.info.ranks = ranks.into();
        }
        let last = dump.entries.last_mut().expect("a rank has operations");
        last.state = EntryState::Started;
        last.retired = false;
        last.time_discovered_completed_ns = 0;
    }
    dumps
}

fn judge(dumps: &[Dump]) -> Report {
    analyze(dumps, &Policy::default())
}

#[test]
fn each_rank_that_crossed_is_named_with_its_own_groups() {
    let report = judge(&grid(2, &[1, 2]));
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E130, &[1, 2][..])
    );
    let expected = "rank 1 went to all_reduce #4 on group dp/column1 (train.py:20) before all_reduce #4 on group \
                    tp/row0, and rank 2 went to all_reduce #4 on group dp/column0 (train.py:20) before all_reduce #4 \
                    on group tp/row1, where their peers wait: a wait cycle; 2 of 4 ranks put them the other way round";
    assert!(
        finding.sentence.starts_with(expected),
        "{}",
        finding.sentence
    );
    let next = "compare the order in which rank 1 issues all_reduce #4 on group dp/column1 and all_reduce #4 on group \
                tp/row0 with another rank's";
    assert_eq!(finding.next, next);
}

/// The dumps of [`grid`] as gloo's own recorder writes them, without completions. The last operations of the ranks in
/// `done` have ended, which only `retired` shows.
fn by_gloo(rows: u32, crossed: &[u32], done: &[u32]) -> Vec<Dump> {
    let mut dumps = grid(rows, crossed);
    for (rank, dump) in (0..).zip(&mut dumps) {
        dump.recorder = Recorder::NativeGloo;
        for entry in &mut dump.entries {
            entry.state = EntryState::Scheduled;
            entry.time_discovered_started_ns = 0;
            entry.time_discovered_completed_ns = 0;
        }
        let last = dump.entries.last_mut().expect("a rank has operations");
        last.retired = done.contains(&rank);
    }
    dumps
}

#[test]
fn waits_that_lead_to_operations_that_all_have_joined_are_no_cycle() {
    // Rank 0 waits for rank 1 in their row. Rank 1 waits in its column for ranks 3, 5 and 7: their newest operations
    // are those of their rows, which all members have joined.
    let report = judge(&by_gloo(4, &[1], &[2, 3, 4, 5, 6, 7]));
    let mut sentences = report.findings.iter().map(|finding| &finding.sentence);
    assert_eq!(sentences.find(|text| text.contains("wait cycle")), None);
    // Ranks 1 and 3 both went to the operation of their column first, and ranks 0 and 2 wait for them in their rows:
    // no wait leads back, either.
    let report = judge(&by_gloo(4, &[1, 3], &[4, 5, 6, 7]));
    let mut sentences = report.findings.iter().map(|finding| &finding.sentence);
    assert_eq!(sentences.find(|text| text.contains("wait cycle")), None);
}
