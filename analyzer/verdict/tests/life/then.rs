//! Tests what a report says of the ranks that it does not blame, and of how the job ended.

use crate::job::{State, alive, at, dead, launch, record};
use crate::launched::judge_launched;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Severity, analyze};

/// The codes and the culprits of the errors that are no consequences.
fn errors(report: &Report) -> Vec<(Code, Vec<Rank>)> {
    let all = report.findings.iter();
    let roots = all.filter(|one| one.severity == Severity::Error && one.caused_by.is_none());
    roots
        .map(|one| (one.code, one.culprit_ranks.clone()))
        .collect()
}

#[test]
fn ranks_that_gave_up_are_not_called_there_beside_a_process_that_is_gone() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(3.0))];
    let dumps = [
        alive(record(0, 4, &inside), 10.0),
        alive(record(1, 4, &failed), 10.0),
        dead(record(2, 4, &inside), 2.0),
        alive(record(3, 4, &failed), 10.0),
    ];
    let report = analyze(&dumps, &Policy::default());
    let sentence = &report.findings[0].sentence;
    assert_eq!(errors(&report), [(Code::E150, vec![2])]);
    assert!(sentence.contains("3 ranks were inside, too"), "{sentence}");
}

#[test]
fn a_rank_that_ended_because_its_wait_failed_is_a_consequence() {
    let late = [(0.0, State::Done(0.1))];
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(4.0))];
    let dumps: Vec<Dump> = vec![
        alive(record(0, 4, &inside), 12.0),
        alive(record(1, 4, &inside), 12.0),
        alive(record(2, 4, &late), 12.0),
        dead(record(3, 4, &failed), 4.5),
    ];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(12.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(errors(&report), [(Code::E101, vec![2])]);
}

#[test]
fn signs_of_life_of_others_are_not_stated_where_no_rank_is_named() {
    let late = [(0.0, State::Done(0.1))];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.5))];
    let dumps: Vec<Dump> = (0..4)
        .map(|rank| match rank {
            1 => dead(record(rank, 4, &late), 2.0),
            _ => dead(record(rank, 4, &failed), 2.0),
        })
        .collect();
    let exits = [(Some(1), None, 2.0); 4];
    for report in [
        analyze(&dumps, &Policy::default()),
        judge_launched(&dumps, launch(None, &exits)),
    ] {
        for finding in report
            .findings
            .iter()
            .filter(|one| one.culprit_ranks.is_empty())
        {
            let sentence = &finding.sentence;
            assert!(!sentence.contains("4 others"), "{sentence}");
        }
    }
}
