//! Tests ranks that wait in accesses to windows: the waits lead to the peer.

use crate::job::{State, alive, dead, fails, record, stopped, with_access};
use crate::root;
use rcomm_recorder::model::{FailureKind, OpType, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Severity, Verdict, analyze};

const RANKS: Rank = 4;
/// When the records were read.
const NOW: f64 = 60.0;

/// The record of a rank that has completed the first all_reduce, and then issued what `then` adds.
fn after_the_first(rank: Rank, then: impl Fn(Dump) -> Dump) -> Dump {
    then(record(rank, RANKS, &[(0.0, State::Done(0.1))]))
}

fn in_the_second(rank: Rank) -> Dump {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    alive(record(rank, RANKS, &waits), NOW)
}

fn in_access(rank: Rank, op: OpType, peer: Rank) -> Dump {
    let waits = |dump| with_access(dump, op, peer, (1.0, State::Pending));
    alive(after_the_first(rank, waits), NOW)
}

/// Rank 0 is in the second all_reduce, and ranks 1 and 3 wait for rank 2 in accesses of this kind. `culprit` is the
/// record of rank 2.
fn job(op: OpType, culprit: Dump) -> Report {
    let dumps = [
        in_the_second(0),
        in_access(1, op, 2),
        culprit,
        in_access(3, op, 2),
    ];
    analyze(&dumps, &Policy::default())
}

/// The culprits of all errors, in ascending order.
fn accused(report: &Report) -> Vec<Rank> {
    let errors = report.findings.iter();
    let errors = errors.filter(|finding| finding.severity == Severity::Error);
    let mut ranks: Vec<Rank> = errors
        .flat_map(|finding| finding.culprit_ranks.clone())
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

#[test]
fn ranks_in_an_access_to_a_window_lead_to_its_peer() {
    let idle = || after_the_first(2, |dump| dump);
    for op in [OpType::WaitSignal, OpType::Put, OpType::Get, OpType::Signal] {
        let frozen = job(op, stopped(idle(), 1.0, NOW));
        assert_eq!(
            root(&frozen),
            (Verdict::Stuck, Code::E151, &[2][..]),
            "{op}"
        );
        let killed = job(op, dead(idle(), 1.0));
        assert_eq!(root(&killed).2, [2], "{op}");
        let late = job(op, alive(idle(), NOW));
        assert_eq!(root(&late), (Verdict::Stuck, Code::E101, &[2][..]), "{op}");
        for report in [frozen, killed, late] {
            assert_eq!(accused(&report), [2], "{op}: {:?}", report.findings);
            assert_eq!(report.findings[0].victim_ranks, [0, 1, 3], "{op}");
        }
    }
}

#[test]
fn a_wait_for_a_signal_of_a_rank_that_waits_itself_accuses_neither_alone() {
    // Rank 1 waits for a signal of rank 0, which has gone on to an all_reduce that needs rank 1.
    let dumps = [
        in_the_second(0),
        in_access(1, OpType::WaitSignal, 0),
        in_the_second(2),
        in_the_second(3),
    ];
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E130, &[][..]));
    let expected = "ranks 0 and 1 wait on each other in a cycle; which of them took the wrong order or left an \
                    operation out is not known";
    assert!(
        report.findings[0].sentence.starts_with(expected),
        "{:?}",
        report.findings[0]
    );
}

#[test]
fn a_rank_whose_signal_was_sent_waits_for_no_other() {
    let done = (0.2, State::Done(0.3));
    let makes = |rank| {
        after_the_first(rank, |dump| {
            with_access(dump, OpType::NewWindow, rank, done)
        })
    };
    let sends = |rank| {
        let mut dump = with_access(makes(rank), OpType::Signal, 1, (0.4, State::Done(0.5)));
        // The second all_reduce, as the third collective of the group.
        dump = with_access(dump, OpType::AllReduce, rank, (1.0, State::Pending));
        alive(dump, NOW)
    };
    let waits = |rank| {
        let dump = with_access(makes(rank), OpType::WaitSignal, 0, (1.0, State::Pending));
        alive(dump, NOW)
    };
    let mut dumps = [sends(0), waits(1), sends(2), sends(3)];
    for dump in &mut dumps {
        let collectives = dump
            .entries
            .iter_mut()
            .filter(|entry| entry.op.is_collective());
        for (entry, seq) in collectives.zip(1..) {
            entry.collective_seq_id = seq;
            entry.peer = rcomm_recorder::model::Peer::None;
        }
    }
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn of_ranks_whose_waits_for_signals_of_each_other_timed_out_neither_is_said_not_to_have_come() {
    let gave_up = |rank: Rank, peer: Rank, then: f64| {
        let waits = |dump| with_access(dump, OpType::WaitSignal, peer, (1.0, State::Failed(then)));
        fails(
            after_the_first(rank, waits),
            FailureKind::Timeout,
            &[peer],
            then,
        )
    };
    let dumps = [
        gave_up(0, 1, 31.0),
        gave_up(1, 0, 31.2),
        after_the_first(2, |dump| dump),
        after_the_first(3, |dump| dump),
    ];
    let report = analyze(&dumps, &Policy::default());
    for finding in &report.findings {
        assert!(
            !finding.sentence.contains("had not arrived"),
            "{}",
            finding.sentence
        );
        let accuses_one = finding.culprit_ranks.len() == 1 && finding.confidence >= 0.6;
        assert!(!accuses_one, "{finding:?}");
    }
}
