//! Tests jobs of which no process is left and others noticed some ends: one signal may have ended them all.

use crate::job::{State, at, dead, fails, record};
use crate::{end, judge, root};
use rcomm_recorder::model::{FailureKind, ProcessExit, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, EndKind, Report, Verdict};

const DONE: (f64, State) = (0.0, State::Done(0.1));
const WAITS: [(f64, State); 2] = [DONE, (1.0, State::Pending)];

/// The ring of a rank that lost others at this time, and gave its last sign of life then or later.
fn lost(rank: Rank, others: &[Rank], lost: f64, last: f64) -> Dump {
    let failed = [DONE, (1.0, State::Failed(lost))];
    let dump = fails(
        record(rank, 4, &failed),
        FailureKind::PeerGone,
        others,
        lost,
    );
    dead(dump, last)
}

/// The rings of four ranks that were terminated together at 1.2 s: rank 2 just had the time to notice the end of rank
/// 1.
fn terminated() -> [Dump; 4] {
    [
        dead(record(0, 4, &WAITS), 1.1),
        dead(record(1, 4, &WAITS), 1.15),
        lost(2, &[1], 1.21, 1.21),
        dead(record(3, 4, &WAITS), 1.18),
    ]
}

/// The confidence with which a report blames ranks.
fn blame(report: &Report) -> f64 {
    let mut blaming = report.findings.iter();
    let first = blaming.find(|finding| !finding.culprit_ranks.is_empty());
    first.map_or(0.0, |finding| finding.confidence)
}

#[test]
fn a_rank_that_ended_with_all_others_is_not_blamed_because_one_noticed_its_end() {
    let report = judge(&terminated(), 40.0);
    assert!(blame(&report) <= 0.5, "{:?}", report.findings);
    // The ring of rank 3 is lost: it may have ended before.
    let [first, second, third, _] = terminated();
    let report = judge(&[first, second.clone(), third.clone()], 40.0);
    assert!(blame(&report) <= 0.5, "{:?}", report.findings);
    assert_eq!(
        report.findings[0].alternatives,
        [vec![0], vec![1], vec![3]],
        "{:?}",
        report.findings
    );
    // Nor is the ring of rank 0 there.
    let report = judge(&[second, third], 40.0);
    assert!(blame(&report) <= 0.5, "{:?}", report.findings);
    assert_eq!(report.findings[0].alternatives, [vec![0], vec![1], vec![3]]);
}

/// The report on two ranks, of which rank 1 lost rank 0 and gave its last sign of life at this time.
fn judge_two(last: f64, exit: Option<ProcessExit>) -> Report {
    let failed = [DONE, (1.0, State::Failed(1.21))];
    let lost = fails(record(1, 2, &failed), FailureKind::PeerGone, &[0], 1.21);
    let mut lost = dead(lost, last);
    let status = lost.status.as_mut().expect("the record has a status");
    status.exit = exit;
    judge(&[dead(record(0, 2, &WAITS), 1.15), lost], 40.0)
}

#[test]
fn a_rank_is_blamed_if_others_outlived_its_end() {
    // The rank that noticed it lived on, or noted an exit of its own, or another one lived on.
    let blamed = (Verdict::Crashed, Code::E150, &[0][..]);
    assert_eq!(root(&judge_two(1.5, None)), blamed);
    let exit = ProcessExit {
        time_ns: at(1.22),
        code: 1,
    };
    assert_eq!(root(&judge_two(1.21, Some(exit))), blamed);
    let [_, second, third, _] = terminated();
    let lives = dead(record(3, 4, &WAITS), 1.5);
    let harmed = lost(0, &[1], 1.22, 1.22);
    let report = judge(&[harmed, second, third, lives], 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
}

#[test]
fn a_rank_is_blamed_if_all_of_many_others_noticed_its_end() {
    let unnamed = |rank| dead(record(rank, 4, &[DONE, (1.0, State::Failed(1.22))]), 1.22);
    let [_, second, third, _] = terminated();
    // All others name it, or some noticed an end and name none.
    for first in [lost(0, &[1], 1.22, 1.22), unnamed(0)] {
        let fourth = lost(3, &[1], 1.22, 1.22);
        let report = judge(&[first, second.clone(), third.clone(), fourth], 40.0);
        assert_eq!(
            root(&report),
            (Verdict::Crashed, Code::E150, &[1][..]),
            "{report:?}"
        );
    }
    // One of the others did not, or names another rank.
    let [first, .., fourth] = terminated();
    for (first, fourth) in [
        (first, unnamed(3)),
        (lost(0, &[1], 1.22, 1.22), fourth),
        (lost(0, &[2], 1.22, 1.22), unnamed(3)),
    ] {
        let report = judge(&[first, second.clone(), third.clone(), fourth], 40.0);
        assert!(blame(&report) <= 0.5, "{:?}", report.findings);
    }
}

#[test]
fn of_three_ranks_that_lost_each_other_in_turn_none_is_blamed() {
    let lost = |rank, other, then| {
        let failed = [DONE, (1.0, State::Failed(then))];
        let dump = record(rank, 3, &failed);
        dead(fails(dump, FailureKind::PeerGone, &[other], then), then)
    };
    let dumps = [
        dead(record(0, 3, &WAITS), 1.15),
        lost(1, 0, 1.21),
        lost(2, 1, 1.22),
    ];
    let report = judge(&dumps, 40.0);
    assert!(blame(&report) <= 0.5, "{:?}", report.findings);
}

#[test]
fn a_doubt_on_a_signal_that_ended_all_denies_no_sign_of_life() {
    // Rank 1 gave a sign of life after it had lost rank 0, though not long after.
    let report = judge_two(1.25, None);
    let doubt = "the records do not show that others lived on long after they had lost rank 0: one signal may have \
                 ended all processes";
    assert!(
        report.findings[0].doubts.iter().any(|found| found == doubt),
        "{:?}",
        report.findings
    );
}

#[test]
fn of_two_ranks_none_is_said_to_have_ended_first_if_both_ended_at_once() {
    let report = judge_two(1.21, None);
    let expected = "the job was over at 13:00:01 UTC: the process of rank 0 ended before others, and one signal may \
                    have ended them all";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
    assert!(blame(&report) <= 0.5, "{:?}", report.findings);
}

#[test]
fn of_two_ranks_that_others_lost_one_after_the_other_none_is_blamed() {
    let judge_lost_at = |second: f64| {
        let dumps = [
            lost(0, &[1], 1.21, 3.0),
            dead(record(1, 4, &WAITS), 1.2),
            dead(record(2, 4, &WAITS), 1.25),
            lost(3, &[2], second, 3.0),
        ];
        judge(&dumps, 40.0)
    };
    // A launcher may have terminated rank 2 half a second later, because rank 1 had ended.
    let report = judge_lost_at(1.7);
    let first = &report.findings[0];
    assert_eq!(
        (first.code, &first.culprit_ranks[..]),
        (Code::E150, &[][..])
    );
    assert_eq!(first.alternatives, [vec![1], vec![2]]);
    // Where they were lost at once, both were killed.
    let report = judge_lost_at(1.26);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1, 2][..]));
}

#[test]
fn no_wait_is_measured_by_the_clock_of_another_host_once_no_process_is_left() {
    // The job was terminated right after it began. The clock of host n1 is five seconds ahead, nothing relates it to
    // that of n0, and the ring of rank 3 is lost.
    let on_n1 = |mut dump: Dump| {
        dump.identity.host = "n1".to_owned();
        dump
    };
    let dumps = [
        dead(record(0, 4, &[(1.0, State::Pending)]), 1.1),
        dead(record(1, 4, &[]), 1.1),
        on_n1(dead(record(2, 4, &[(6.0, State::Pending)]), 6.1)),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(report.findings, [], "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn a_rank_that_ended_before_its_first_collective_shares_the_clock_of_its_host() {
    // Ranks 0 and 1 are on one host, ranks 2 and 3 on another, whose clock is five seconds ahead, as a collective of
    // ranks 0, 2 and 3 shows. Rank 1 ended before it had issued anything, and the others soon after.
    let waiting = |rank: Rank, host: &str, ahead: f64| {
        let operations = [
            (ahead, State::Done(0.1 + ahead)),
            (1.0 + ahead, State::Pending),
        ];
        let mut dump = record(rank, 4, &operations);
        let mut group = dump.groups[0].clone();
        (group.info.id, group.info.name) = (1, "dp".to_owned());
        group.info.ranks = [0, 2, 3].into();
        dump.groups.push(group);
        dump.entries[0].group = 1;
        dump.entries[1].collective_seq_id = 1;
        dump.identity.host = host.to_owned();
        dead(dump, 4.0 + ahead)
    };
    let dumps = [
        waiting(0, "n0", 0.0),
        dead(record(1, 4, &[]), 1.2),
        waiting(2, "n1", 5.0),
        waiting(3, "n1", 5.0),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
}
