//! Groups that could not be made: a rank records that as a failure without a group and without an operation.

use super::job::{State, closed, dead, fails, record};
use super::{judge, root};
use rcomm_recorder::model::{Failure, FailureKind, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Verdict};

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

#[test]
fn a_rank_that_lost_another_while_it_made_a_group_did_not_end_first() {
    let waits = [(1.0, State::Failed(1.09))];
    // Rank 2 could not make the group of the world, and rank 3 was about to make one with it. Then rank 3 ends at once,
    // and rank 2 takes longer.
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
        FailureKind::PeerGone,
        &[2],
        1.0,
        "group pair: rank 2 is gone: its connection ended",
    );
    let lost = |rank| fails(record(rank, 4, &waits), FailureKind::PeerGone, &[2], 1.09);
    let dumps = [
        dead(lost(0), 2.7),
        dead(lost(1), 2.7),
        closed(unready, 2.6),
        dead(pair, 1.1),
    ];
    let report = judge(&dumps, 3600.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
    let roots = report
        .findings
        .iter()
        .filter(|finding| finding.caused_by.is_none());
    assert_eq!(roots.count(), 1, "{:?}", report.findings);
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
