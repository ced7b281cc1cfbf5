//! Jobs with several causes: each finding counts the ranks that wait because of it.

use crate::job::{State, alive, at, record};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, analyze};

const RANKS: Rank = 6;

/// The record of a rank with these groups, all of whose operations are on the last of them.
fn in_groups(rank: Rank, groups: &[(u32, &str, &[Rank])], operations: &[(f64, State)]) -> Dump {
    let mut dump = record(rank, RANKS, operations);
    for &(id, name, ranks) in groups {
        let mut made = dump.groups[0].clone();
        made.info.id = id;
        made.info.name = name.to_owned();
        made.info.desc = name.to_owned();
        made.info.ranks = ranks.into();
        dump.groups.push(made);
    }
    for entry in &mut dump.entries {
        entry.group = groups.len() as u32;
    }
    alive(dump, 20.0)
}

#[test]
fn a_finding_counts_only_the_ranks_that_wait_because_of_it() {
    let waits = [(1.0, State::Pending)];
    let tp: (u32, &str, &[Rank]) = (1, "tp", &[0, 1, 2]);
    let dp: (u32, &str, &[Rank]) = (2, "dp", &[2, 3]);
    let pp: (u32, &str, &[Rank]) = (3, "pp", &[4, 5]);
    // Ranks 0 and 1 wait for rank 2, which waits for rank 3; rank 4 waits for rank 5.
    let dumps = [
        in_groups(0, &[tp], &waits),
        in_groups(1, &[tp], &waits),
        in_groups(2, &[tp, dp], &waits),
        in_groups(3, &[dp], &[]),
        in_groups(4, &[pp], &waits),
        in_groups(5, &[pp], &[]),
    ];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(20.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    let of = |rank: Rank| {
        let mut findings = report.findings.iter();
        let finding = findings.find(|one| one.culprit_ranks == [rank]);
        finding.expect("each cause has a finding")
    };
    assert_eq!((of(3).code, of(5).code), (Code::E101, Code::E101));
    let sentence = &of(3).sentence;
    assert!(
        sentence.contains(", and 3 of 6 ranks wait because of it"),
        "{sentence}"
    );
    // Without the other cause, these are all that wait.
    let report = analyze(&dumps[..4], &policy);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains(", and 3 of 6 ranks wait in all"),
        "{sentence}"
    );
}
