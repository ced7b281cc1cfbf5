//! Tests operations that failed as soon as they were issued: they do not show that another rank is late, and those that
//! were refused were never issued.

use crate::job::{State, alive, at, closed, dead, fails, record};
use crate::{judge, root};
use rcomm_recorder::model::{FailureKind, OpType, Peer};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

fn judge_live(dumps: Vec<Dump>, now: f64) -> Report {
    let dumps: Vec<Dump> = dumps.into_iter().map(|dump| alive(dump, now)).collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(&dumps, &policy)
}

const DONE: (f64, State) = (0.0, State::Done(0.1));

#[test]
fn an_operation_that_failed_at_once_does_not_accuse_a_rank_that_had_not_come() {
    let failed = [DONE, (1.0, State::Failed(1.005))];
    let ranks = [&failed[..], &[DONE], &[DONE]].into_iter().zip(0..);
    let dumps = ranks
        .map(|(operations, rank)| record(rank, 3, operations))
        .collect();
    let report = judge_live(dumps, 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[0][..]));
    let finding = &report.findings[0];
    let expected = "all_reduce #2 on group default_pg failed on rank 0 after 5 ms, long before its time-out; ranks 1 \
                    and 2 had not come there yet";
    assert_eq!(finding.sentence, expected);
    assert_eq!(
        finding.ruled_out,
        ["not_joined: the wait was too short to show that a rank was late"]
    );
    // The failed operation does not accuse the peer of a message, either.
    let mut dumps = vec![record(0, 2, &failed), record(1, 2, &[DONE])];
    let send = &mut dumps[0].entries[1];
    (send.op, send.is_p2p, send.peer) = (OpType::Send, true, Peer::Rank(1));
    (send.collective_seq_id, send.p2p_seq_id) = (0, 1);
    let report = judge_live(dumps, 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[0][..]));
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.ends_with("; rank 1 had not come there yet"),
        "{sentence}"
    );
}

#[test]
fn a_rank_whose_recorded_error_names_another_is_not_accused_alone() {
    let failed = [DONE, (1.0, State::Failed(1.005))];
    let first = record(0, 3, &failed);
    let first = fails(first, FailureKind::Mismatch, &[2], 1.005);
    let dumps = vec![first, record(1, 3, &[DONE]), record(2, 3, &[DONE])];
    let report = judge_live(dumps, 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[][..]));
    let finding = &report.findings[0];
    assert_eq!(finding.alternatives, [[0], [2]]);
    let end = "; the error that rank 0 recorded names rank 2";
    assert!(finding.sentence.ends_with(end), "{}", finding.sentence);
}

#[test]
fn a_rank_that_an_error_names_is_an_alternative_however_many_failed_together() {
    let failed = [DONE, (1.0, State::Failed(1.005))];
    let mut dumps: Vec<Dump> = (0..17).map(|rank| record(rank, 18, &failed)).collect();
    dumps.push(record(17, 18, &[DONE]));
    dumps[0] = fails(dumps[0].clone(), FailureKind::Mismatch, &[17], 1.005);
    let report = judge_live(dumps, 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[][..]));
    let alternatives = &report.findings[0].alternatives;
    assert_eq!(alternatives.len(), 16);
    assert!(alternatives.contains(&vec![17]), "{alternatives:?}");
}

#[test]
fn a_wait_of_a_moment_is_not_stated_beside_a_process_that_is_gone() {
    let failed = [DONE, (1.0, State::Failed(1.005))];
    let ranks = [&failed[..], &[DONE], &failed].into_iter().zip(0..);
    let mut dumps: Vec<Dump> = ranks
        .map(|(operations, rank)| dead(record(rank, 3, operations), 1.5))
        .collect();
    dumps[1] = closed(dumps[1].clone(), 0.9);
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(!sentence.contains(" ms"), "{sentence}");
}

/// The record of a rank whose call number 2 PyTorch refused, with its later operations, of which the first got the same
/// number.
fn with_refused(rank: u32, later: &[(f64, State)]) -> Dump {
    let refused = [DONE, (1.0, State::Failed(1.9))];
    let operations: Vec<_> = refused.iter().chain(later).copied().collect();
    let mut dump = record(rank, 3, &operations);
    dump.entries[1].retired = false;
    for entry in &mut dump.entries[2..] {
        entry.collective_seq_id -= 1;
    }
    dump
}

#[test]
fn a_call_that_was_refused_does_not_count_as_issued() {
    let later_done = [(2.0, State::Done(2.1)), (3.0, State::Done(3.1))];
    let done: Vec<_> = [DONE].into_iter().chain(later_done).collect();
    let waits: Vec<_> = done
        .iter()
        .copied()
        .chain([(4.0, State::Pending)])
        .collect();
    let job = |last: &[(f64, State)]| {
        let later: Vec<_> = later_done.iter().chain(last).copied().collect();
        vec![
            record(0, 3, &waits),
            with_refused(1, &later),
            record(2, 3, &waits),
        ]
    };
    let report = judge_live(job(&[(4.0, State::Pending)]), 4.5);
    assert_eq!(report.verdict, Verdict::Running, "{:?}", report.findings);
    let report = judge_live(job(&[]), 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains("never issued all_reduce #4")
            && sentence.contains("it last issued all_reduce #3"),
        "{sentence}"
    );
}

#[test]
fn the_last_call_of_a_program_that_its_refusal_ended_does_not_count_as_issued() {
    let waits = [DONE, (1.0, State::Pending)];
    let job = |retired: bool| {
        let mut refused = record(1, 3, &[DONE, (1.0, State::Failed(1.001))]);
        refused.entries[1].retired = retired;
        let status = refused.status.as_mut().expect("the record has a status");
        status.phase = "raised ValueError: bad tensor".to_owned();
        status.phase_since_ns = at(1.002);
        vec![record(0, 3, &waits), refused, record(2, 3, &waits)]
    };
    let report = judge_live(job(false), 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let expected = "rank 1 never issued all_reduce #2 on group default_pg; 2 ranks have waited 19 s; it last issued \
                    all_reduce #1 on group default_pg, phase `raised ValueError: bad tensor`";
    assert_eq!(report.findings[0].sentence, expected);
    // A call that was issued and failed counts as issued.
    assert_ne!(judge_live(job(true), 20.0).findings[0].code, Code::E101);
}
