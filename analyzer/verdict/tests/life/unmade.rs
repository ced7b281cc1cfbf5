//! Tests groups that could not be made: a rank records that as a failure without a group and without an operation.

use super::job::{State, alive, closed, dead, fails, record};
use super::{judge, root};
use rcomm_recorder::model::{Failure, FailureKind, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

/// Adds to the record of a rank that it could not make a group at this time.
fn with_unmade_group(
    mut dump: Dump,
    kind: FailureKind,
    about: &[Rank],
    then: f64,
    text: &str,
) -> Dump {
    let rank = dump.identity.rank.unwrap_or_default();
    dump.failures.push(Failure {
        id: dump.failures.len() as u64 + 1,
        time_ns: super::at(then),
        ..Failure::new(kind, about, rank, text)
    });
    dump
}

/// The report on four ranks. Rank 2 could not make the group of the world. Rank 3 could not make a group with rank 2,
/// which it recorded as a failure of this kind. Rank 2 ends at 1.5 s, rank 3 at `ended`. The others fail at `failed`.
fn of_an_unready_rank(kind: FailureKind, ended: f64, failed: f64) -> Report {
    let waits = [(1.0, State::Failed(failed))];
    let mut unready = with_unmade_group(
        record(2, 4, &[]),
        FailureKind::Backend,
        &[],
        0.95,
        "cannot prepare a group's thread: Too many open files (os error 24)",
    );
    unready.groups.clear();
    let pair = with_unmade_group(
        record(3, 4, &[]),
        kind,
        &[2],
        1.0,
        "group pair: rank 2 is gone: its connection ended",
    );
    let lost = |rank| fails(record(rank, 4, &waits), FailureKind::PeerGone, &[2], failed);
    let dumps = [
        dead(lost(0), failed + 1.6),
        dead(lost(1), failed + 1.6),
        closed(unready, 1.5),
        dead(pair, ended),
    ];
    judge(&dumps, 3600.0)
}

#[test]
fn a_rank_that_lost_another_while_it_made_a_group_is_not_at_fault() {
    // The others may have waited too briefly to blame a rank, or long enough. Rank 3 may end before rank 2, or with
    // the others.
    let crashed = (Verdict::Crashed, Code::E150, &[2][..]);
    let late = (Verdict::Stuck, Code::E101, &[2][..]);
    for (kind, ended, failed, expected) in [
        (FailureKind::PeerGone, 1.1, 1.09, crashed),
        (FailureKind::PeerGone, 1.1, 2.6, crashed),
        (FailureKind::PeerGone, 4.2, 2.6, crashed),
        (FailureKind::Timeout, 1.1, 2.6, late),
        (FailureKind::Timeout, 4.2, 2.6, crashed),
    ] {
        let report = of_an_unready_rank(kind, ended, failed);
        assert_eq!(root(&report), expected, "{:?}", report.findings);
        let roots = report
            .findings
            .iter()
            .filter(|finding| finding.caused_by.is_none());
        assert_eq!(roots.count(), 1, "{:?}", report.findings);
        let sentence = &report.findings[0].sentence;
        let says_why = sentence.contains("; it ended in order after an error: cannot prepare");
        assert!(expected == late || says_why, "{sentence}");
    }
    // A failure of another kind explains no absence: rank 3 is missed as well, once the wait has lasted.
    let report = of_an_unready_rank(FailureKind::Backend, 9.8, 8.0);
    let mut findings = report.findings.iter();
    assert!(
        findings.any(|finding| finding.culprit_ranks == [3]),
        "{:?}",
        report.findings
    );
}

#[test]
fn a_group_that_was_made_at_the_second_try_explains_nothing_later() {
    let between = [(2.0, State::Done(2.1)), (3.0, State::Done(3.1))];
    let inside = [between[0], between[1], (4.0, State::Failed(4.1))];
    let tried = |dump| {
        with_unmade_group(
            dump,
            FailureKind::PeerGone,
            &[2],
            1.0,
            "group pair: no answer",
        )
    };
    let lost = |rank| fails(record(rank, 3, &inside), FailureKind::PeerGone, &[1], 4.1);
    let dumps = [
        dead(tried(lost(0)), 4.3),
        dead(record(1, 3, &between), 3.9),
        dead(lost(2), 4.3),
    ];
    let report = judge(&dumps, 3600.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    // With rank 1 alive to the end and no loss of it, nothing is left that names rank 2.
    let dumps = [0, 1, 2].map(|rank| {
        let dump = record(rank, 3, &between);
        closed(if rank == 0 { tried(dump) } else { dump }, 5.0)
    });
    let report = judge(&dumps, 3600.0);
    assert_eq!(report.verdict, Verdict::Ended, "{:?}", report.findings);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

/// The ranks that are blamed for their absence from an operation in which rank 0 of five waits. `lost` has for each
/// rank from 1 on the ranks that it lost while it made a group.
fn blamed_for(lost: [&[Rank]; 4]) -> Vec<Rank> {
    let dumps: Vec<Dump> = (0..5)
        .map(|rank: Rank| {
            if rank == 0 {
                return alive(record(0, 5, &[(1.0, State::Pending)]), 100.0);
            }
            let dump = alive(record(rank, 5, &[]), 100.0);
            match lost[rank as usize - 1] {
                [] => dump,
                about => with_unmade_group(dump, FailureKind::Timeout, about, 2.0, "no answer"),
            }
        })
        .collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(super::at(100.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    let mut findings = report.findings.iter();
    let found = findings.find(|finding| finding.code == Code::E101);
    found.map_or(Vec::new(), |finding| finding.culprit_ranks.clone())
}

#[test]
fn of_ranks_that_lost_each_other_only_those_are_excused_that_lost_one_to_blame() {
    // A chain leads to rank 4.
    assert_eq!(blamed_for([&[2], &[3], &[4], &[]]), [4]);
    // A pair, and a ring of three: none of these is known to be the cause.
    assert_eq!(blamed_for([&[2], &[1], &[], &[]]), [1, 2, 3, 4]);
    assert_eq!(blamed_for([&[2], &[3], &[1], &[]]), [1, 2, 3, 4]);
    // Of a ring that also lost rank 4, rank 4 is the cause.
    assert_eq!(blamed_for([&[2], &[3], &[1, 4], &[]]), [4]);
}
