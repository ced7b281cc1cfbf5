//! Tests verdicts on rings whose recorder notes no failures, as that of PyTorch's hooks: only the operations show what
//! went wrong.

use super::*;
use crate::job::left_by_plug_in;

/// The rings of four ranks, of which all but rank 1 fail in their second operation at `failed`. `second_of_1` is the
/// second operation of rank 1. All processes gave their last signs of life at `ended`.
pub(crate) fn failing(failed: f64, ended: f64, second_of_1: Option<(f64, State)>) -> Vec<Dump> {
    let fails = [(0.0, State::Done(0.1)), (1.0, State::Failed(failed))];
    let first = fails[0];
    let rank_1: Vec<_> = std::iter::once(first).chain(second_of_1).collect();
    let dump_of = |rank| record(rank, 4, if rank == 1 { &rank_1 } else { &fails[..] });
    (0..4).map(|rank| dead(dump_of(rank), ended)).collect()
}

#[test]
fn a_rank_that_came_after_its_peers_had_timed_out_is_late_and_they_are_not_at_fault() {
    let mut dumps = failing(31.0, 31.2, Some((34.0, State::Failed(34.1))));
    dumps[1] = dead(dumps[1].clone(), 34.3);
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    let expected = "rank 1 had not arrived in all_reduce #2 on group default_pg when it timed out after 30 s on ranks \
                    0, 2 and 3, at 13:00:31 UTC; it came 3.0 s later";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
}

#[test]
fn a_time_out_that_the_program_caught_explains_what_fails_at_once_after_it() {
    let came = [(34.0, State::Failed(34.1))];
    let mut dumps = failing(31.0, 31.2, Some(came[0]));
    for rank in [0, 2, 3] {
        let ops = [
            (0.0, State::Done(0.1)),
            (1.0, State::Failed(31.0)),
            (41.0, State::Failed(41.1)),
        ];
        dumps[rank as usize] = dead(record(rank, 4, &ops), 41.3);
    }
    dumps[1] = dead(dumps[1].clone(), 41.2);
    let report = judge(&dumps, 50.0);
    assert_eq!(root(&report).1, Code::E101);
    let finding = &report.findings[0];
    assert_eq!(finding.culprit_ranks, [1]);
    let expected = "rank 1 had not arrived in all_reduce #2 on group default_pg when it timed out";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
}

#[test]
fn a_rank_that_ended_in_order_before_its_peers_were_done_is_named() {
    let mut dumps = failing(1.4, 1.6, None);
    dumps[1] = closed(dumps[1].clone(), 1.5);
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let finding = &report.findings[0];
    let expected = "the process of rank 1 is gone: it never issued all_reduce #2 on group default_pg, where 3 ranks \
                    waited for 400 ms; it last issued all_reduce #1 on group default_pg; it ended in order";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
}

#[test]
fn the_phase_that_all_ranks_named_last_is_stated_where_nothing_shows_how_they_ended() {
    let between = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let mut dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &between), 1.5))
        .collect();
    for dump in &mut dumps {
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = "raised ValueError: bad batch".to_owned();
    }
    let unknown = "all 2 ranks' processes are gone, with the last sign of life at 13:00:01 UTC; none was in an \
                   operation, and how this happened is not recorded";
    let report = judge(&dumps, 40.0);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let phase = "; each was in phase `raised ValueError: bad batch`";
    assert_eq!(end(&report).1, format!("{unknown}{phase}"));
    dumps[1]
        .status
        .as_mut()
        .expect("the record has a status")
        .phase
        .clear();
    assert_eq!(end(&judge(&dumps, 40.0)).1, unknown);
}

/// Notes in the record that the process exited by itself, with which code and when.
pub(crate) fn with_exit(mut dump: Dump, code: u8, then: f64) -> Dump {
    let status = dump.status.as_mut().expect("the record has a status");
    status.exit = Some(ProcessExit {
        time_ns: at(then),
        code,
    });
    dump
}

#[test]
fn processes_that_exit_with_0_ended_in_order_whether_they_closed_their_rings_or_not() {
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| with_exit(dead(record(rank, 2, &between), 1.5), 0, 1.5))
        .collect();
    let report = judge(&dumps, 40.0);
    let expected = "all 2 ranks ended in order, the last at 13:00:01 UTC";
    assert_eq!(end(&report), (EndKind::Ended, expected));
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Ended, 0));
}

#[test]
fn a_process_that_exits_with_an_error_is_named_with_its_code() {
    let between = [(0.0, State::Done(0.1))];
    let dump_of = |rank| closed(record(rank, 3, &between), 1.5);
    let dumps = [
        dump_of(0),
        with_exit(dead(record(1, 3, &between), 1.5), 3, 1.5),
        dump_of(2),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let expected = "the job was over at 13:00:01 UTC: the process of rank 1 ended first; rank 1 exited with code 3";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
    // The finding appears at once, not only after the others have gone on for long.
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(3.0)),
        ..Policy::default()
    };
    let [first, mut failed, last] = dumps;
    let status = failed.status.as_mut().expect("the record has a status");
    status.phase = "raised ValueError: bad batch".to_owned();
    let beside = [
        first.clone(),
        failed.clone(),
        alive(record(2, 3, &between), 3.0),
    ];
    let report = analyze(&beside, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
    let report = judge(&[first, failed, last], 40.0);
    let expected = "the process of rank 1 is gone: it was in phase `raised ValueError: bad batch`; no operation of it \
                    was unfinished; it exited with code 3";
    assert!(
        report.findings[0].sentence.starts_with(expected),
        "{:?}",
        report.findings[0]
    );
}

#[test]
fn processes_that_exit_together_were_not_terminated_from_outside() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| with_exit(dead(record(rank, 2, &inside), 1.5), 1, 1.5))
        .collect();
    let report = judge(&dumps, 40.0);
    let expected = "all 2 ranks ended by 13:00:01 UTC, none in order; rank 0 exited with code 1";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
}

#[test]
fn a_process_that_exits_by_itself_ended_before_those_that_were_killed() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |rank| dead(record(rank, 3, &inside), 1.5);
    let dumps = [
        dump_of(0),
        with_exit(dead(record(1, 3, &inside[..1]), 1.2), 1, 1.2),
        dump_of(2),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(end(&report).0, EndKind::Crashed);
    assert_eq!(
        report.end.as_ref().map(|end| &end.first_ranks[..]),
        Some(&[1][..])
    );
    // A rank that was killed long before may be why another exits.
    let dumps = [
        dead(record(0, 3, &inside[..1]), 1.2),
        dump_of(1),
        with_exit(dump_of(2), 1, 9.0),
    ];
    let first = judge(&dumps, 40.0).end.map(|end| end.first_ranks);
    assert_ne!(first, Some(vec![2]));
}

#[test]
fn a_rank_that_was_terminated_after_a_failure_is_not_said_to_have_ended_first() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.4))];
    let harmed = || dead(record(0, 4, &failed), 1.4);
    let other = |rank, last| dead(record(rank, 4, &inside), last);
    let first = |dumps: &[Dump]| {
        let report = judge(dumps, 40.0);
        let end = report.end.expect("the job is over");
        assert_eq!(end.how, EndKind::Crashed);
        (end.first_ranks, end.sentence)
    };
    // The other two gave signs of life after rank 0 had failed.
    let ended = [harmed(), other(1, 1.2), other(2, 3.0), other(3, 3.0)];
    let expected = "the job was over at 13:00:03 UTC: the process of rank 1 ended first";
    assert_eq!(first(&ended), (vec![1], expected.to_owned()));
    let ended = [harmed(), other(1, 1.2), other(2, 1.3), other(3, 3.0)];
    let expected = "the job was over at 13:00:03 UTC; one of ranks 1 and 2 ended first, and the records do not show \
                    which";
    assert_eq!(first(&ended), (vec![], expected.to_owned()));
    let ended = [harmed(), other(1, 2.9), other(2, 3.0), other(3, 3.0)];
    let expected =
        "the job was over at 13:00:03 UTC; the records do not show whose process ended first";
    assert_eq!(first(&ended), (vec![], expected.to_owned()));
}

#[test]
fn a_rank_that_was_asked_to_end_is_not_accused_in_place_of_the_one_that_aborted() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |rank| record(rank, 3, &inside);
    // Rank 1 aborted, which leaves no exit code. A handler of SIGTERM ended the others.
    let asked = |rank, last| with_exit(dead(dump_of(rank), last), 143, last);
    let dumps = [asked(0, 1.7), dead(dump_of(1), 1.2), asked(2, 1.8)];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    // Either of two that noted nothing may have aborted.
    let dumps = [dead(dump_of(0), 1.1), dead(dump_of(1), 1.2), asked(2, 1.8)];
    let report = judge(&dumps, 40.0);
    let expected = "the job was over at 13:00:01 UTC; one of ranks 0 and 1 ended first, and the records do not show \
                    which";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    // If all were asked to end, that came from outside.
    let dumps = [asked(0, 1.6), asked(1, 1.7), asked(2, 1.8)];
    assert_eq!(judge(&dumps, 40.0).verdict, Verdict::Cancelled);
}

#[test]
fn a_rank_that_sigterm_ended_is_not_taken_for_the_first_where_another_noted_the_failure() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.4))];
    let asked = |rank| with_exit(dead(record(rank, 4, &inside), 1.45), 143, 1.45);
    // Rank 2 was killed, rank 1 noticed that, and the launcher ended the others.
    let dumps = [
        asked(0),
        with_exit(dead(record(1, 4, &failed), 1.5), 1, 1.5),
        dead(record(2, 4, &inside), 1.2),
        asked(3),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
}

#[test]
fn a_rank_that_was_asked_to_end_before_all_others_ended_may_have_been_the_first() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.4))];
    let harmed = |rank| with_exit(dead(record(rank, 4, &failed), 1.5), 1, 1.5);
    let asked = || with_exit(dead(record(2, 4, &inside), 1.2), 143, 1.2);
    // A signal ended rank 2 alone. Rank 1 died later, and noted nothing.
    let died = dead(record(1, 4, &inside[..1]), 1.45);
    let report = judge(&[harmed(0), died, asked(), harmed(3)], 40.0);
    let end = report.end.as_ref().expect("the job is over");
    assert_eq!(end.first_ranks, [0; 0], "{}", end.sentence);
    assert!(
        end.sentence.contains("one of ranks 1 and 2"),
        "{}",
        end.sentence
    );
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    // Each on a host of its own.
    let died = dead(record(1, 4, &inside[..1]), 2.0);
    let mut dumps = [harmed(0), died, asked(), harmed(3)];
    for (number, dump) in dumps.iter_mut().enumerate() {
        dump.identity.host = format!("n{number}");
    }
    let report = judge(&dumps, 40.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    // All others failed because of it.
    let report = judge(&[harmed(0), harmed(1), asked(), harmed(3)], 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
}

/// The record of a rank whose program ended with the exception of SIGINT at this time.
fn interrupted(mut dump: Dump, since: f64) -> Dump {
    let status = dump.status.as_mut().expect("the record has a status");
    status.phase = "raised KeyboardInterrupt".to_owned();
    status.phase_since_ns = at(since);
    dump
}

#[test]
fn ranks_that_were_all_interrupted_were_cancelled_however_long_each_took_to_end() {
    let done = (0.0, State::Done(0.1));
    let inside = [done, (1.0, State::Pending)];
    // Rank 0 returns from its wait, and sees the interrupt, only once rank 1 is gone.
    let dumps = [
        interrupted(dead(record(0, 3, &inside), 9.5), 9.0),
        interrupted(dead(record(1, 3, &[done]), 8.5), 1.5),
        interrupted(dead(record(2, 3, &[done]), 3.0), 1.5),
    ];
    let report = judge(&dumps, 40.0);
    let expected = "all 3 ranks ended by 13:00:09 UTC, none in order; each was in phase `raised KeyboardInterrupt`; \
                    rank 0 was inside all_reduce #2 on group default_pg";
    assert_eq!(end(&report), (EndKind::Cancelled, expected));
    assert_eq!(report.verdict, Verdict::Cancelled);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    // While some are on their way to their ends, those that have ended are not at fault.
    let [first, second, third] = dumps;
    let living = |rank, operations: &[(f64, State)]| {
        interrupted(alive(record(rank, 3, operations), 12.0), 1.5)
    };
    let beside = [living(0, &inside), living(1, &[done]), third];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(12.0)),
        ..Policy::default()
    };
    let report = analyze(&beside, &policy);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    // A rank that ended by something else is named.
    let dumps = [first, second, dead(record(2, 3, &[done]), 1.2)];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
    // A wait that had lasted long before the interrupt was a hang.
    let waits = [done, (1.0, State::Pending)];
    let dumps = [
        interrupted(dead(record(0, 3, &waits), 27.0), 26.0),
        interrupted(dead(record(1, 3, &[done]), 26.5), 25.0),
        interrupted(dead(record(2, 3, &waits), 29.0), 26.0),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let then = "; then the processes ended, as a signal asked them to, all by 13:00:29 UTC";
    assert!(report.findings[0].sentence.ends_with(then), "{report:?}");
    // The waits end with errors once the process of the rank that they wait for is gone.
    let failed = [done, (1.0, State::Failed(26.6))];
    let [first, second, third] = [
        record(0, 3, &failed),
        dumps[1].clone(),
        record(2, 3, &failed),
    ];
    let dumps = [
        interrupted(dead(first, 27.0), 26.6),
        second,
        interrupted(dead(third, 29.0), 26.6),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn failures_that_follow_from_an_interrupt_of_all_ranks_accuse_none() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.9))];
    // Rank 1 leaves its program first.
    let ended = |rank: Rank, kind: FailureKind, failed_at: f64| {
        let last = if rank == 1 { 1.8 } else { 2.0 };
        let dump = interrupted(dead(record(rank, 3, &failed), last), 1.5);
        match kind {
            FailureKind::PeerGone if rank == 1 => dump,
            FailureKind::PeerGone => fails(dump, kind, &[1], failed_at),
            _ => {
                let mut dump = fails(dump, kind, &[rank], failed_at);
                dump.failures[0].text = "raised KeyboardInterrupt".to_owned();
                dump
            }
        }
    };
    for (kind, failed_at) in [
        (FailureKind::PeerGone, 1.9),
        (FailureKind::Abort, 1.55),
        (FailureKind::Abort, 1.45),
    ] {
        let report = judge(&[0, 1, 2].map(|rank| ended(rank, kind, failed_at)), 40.0);
        assert_eq!(report.verdict, Verdict::Cancelled, "{:?}", report.findings);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
    // A program that had aborted its group before is at fault.
    let report = judge(
        &[0, 1, 2].map(|rank| ended(rank, FailureKind::Abort, 1.2)),
        40.0,
    );
    assert_eq!(report.findings[0].code, Code::E150, "{report:?}");
}

#[test]
fn a_rank_that_was_asked_to_end_long_before_the_others_ended_first() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |rank| {
        let mut dump = record(rank, 3, &inside);
        dump.signatures[0].backend = "nccl".to_owned();
        dump
    };
    let asked = |rank, last| with_exit(dead(dump_of(rank), last), 143, last);
    // Rank 1 was preempted; the others waited for it until they were asked to end, too.
    for others in [
        [asked(0, 130.0), asked(2, 130.1)],
        [asked(0, 130.0), asked(2, 130.0)],
        [
            interrupted(dead(dump_of(0), 130.3), 130.0),
            interrupted(dead(dump_of(2), 130.2), 130.1),
        ],
    ] {
        let [first, last] = others;
        let report = judge(&[first, asked(1, 10.0), last], 200.0);
        assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    }
    // Each end lets the next rank note its signal: all were asked together.
    let chain = [asked(0, 3.0), asked(1, 5.5), asked(2, 8.0)];
    assert_eq!(judge(&chain, 200.0).verdict, Verdict::Cancelled);
}

#[test]
fn ranks_whose_operation_failed_at_once_are_not_said_to_wait() {
    let operations = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.04))];
    let beside = |rank| alive(record(rank, 3, &operations), 3.0);
    let gone = dead(record(1, 3, &operations[..1]), 0.9);
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(3.0)),
        ..Policy::default()
    };
    let report = analyze(&[beside(0), gone, beside(2)], &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
    let expected = "the process of rank 1 is gone: it never issued all_reduce #2 on group default_pg, where 2 ranks \
                    waited until it failed; it last issued all_reduce #1";
    let sentence = &report.findings[0].sentence;
    assert!(sentence.starts_with(expected), "{sentence}");
}

#[test]
fn of_processes_that_are_gone_while_another_lives_none_is_said_to_be_the_first() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps = [
        dead(record(0, 3, &inside), 1.3),
        dead(record(1, 3, &inside[..1]), 1.2),
        alive(record(2, 3, &inside), 20.0),
    ];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(20.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(report.verdict, Verdict::Stuck);
    for finding in report
        .findings
        .iter()
        .filter(|finding| finding.code == Code::E150)
    {
        assert!(finding.confidence <= 0.5, "{finding:?}");
        assert_eq!(finding.alternatives, [vec![0], vec![1]]);
    }
}

#[test]
fn rings_without_signs_of_life_show_neither_when_nor_in_which_order_processes_ended() {
    let done = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let dumps: Vec<Dump> = (0..4)
        .map(|rank| left_by_plug_in(record(rank, 4, &done[..1 + rank as usize % 2])))
        .collect();
    let report = judge(&dumps, 40.0);
    let unknown = "all 4 ranks' processes are gone; how and when this happened is not recorded";
    assert_eq!(end(&report), (EndKind::Unknown, unknown));
    assert_eq!(report.verdict, Verdict::Inconclusive);
    // What an abort left failed need not have failed early: the program's time-out is not recorded.
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.4))];
    let dump_of = |rank| record(rank, 4, if rank == 0 { &failed } else { &done });
    let dumps: Vec<Dump> = (0..4).map(|rank| left_by_plug_in(dump_of(rank))).collect();
    let report = judge(&dumps, 40.0);
    assert_eq!(end(&report), (EndKind::Unknown, unknown));
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn a_wait_in_rings_without_signs_of_life_has_no_length() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |rank| record(rank, 4, if rank == 1 { &inside[..1] } else { &inside });
    let dumps: Vec<Dump> = (0..4).map(|rank| left_by_plug_in(dump_of(rank))).collect();
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    let expected = "rank 1 never issued all_reduce #2 on group default_pg; 3 ranks waited; ";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
    let expected = "; no process is left, and when they ended is not recorded";
    assert!(finding.sentence.ends_with(expected), "{finding:?}");
}
