//! Tests time-outs that name different ranks, in operations and in the meeting that ends the job: who waited for whom.

use crate::job::{State, alive, at, closed, dead, fails, record, stopped};
use crate::{judge, root};
use rcomm_recorder::model::{Failure, FailureKind, OpType, Peer, ProcessExit, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

const RANKS: Rank = 4;

/// The report on ranks whose second all_reduce timed out after 30 s. `others` holds each rank but rank 2, when the
/// operation timed out there, and the rank that this time-out names, if it is recorded; `second` is what rank 2 issued
/// after its first one.
fn judge_time_outs(others: [(Rank, f64, Option<Rank>); 3], second: &[(f64, State)]) -> Report {
    let rank_2: Vec<_> = [FIRST].iter().chain(second).copied().collect();
    judge_with(others, record(2, RANKS, &rank_2))
}

/// The all_reduce with which all ranks begin.
const FIRST: (f64, State) = (0.0, State::Done(0.1));

/// Like [`judge_time_outs`], with this record of rank 2.
fn judge_with(others: [(Rank, f64, Option<Rank>); 3], rank_2: Dump) -> Report {
    let waited = others.map(|(rank, then, about)| {
        let dump = record(rank, RANKS, &[FIRST, (1.0, State::Failed(then))]);
        match about {
            Some(about) => fails(dump, FailureKind::Timeout, &[about], then),
            None => dump,
        }
    });
    let mut dumps: Vec<Dump> = waited.into_iter().collect();
    dumps.push(rank_2);
    analyze(&dumps, &Policy::default())
}

#[test]
fn a_rank_inside_the_operation_that_timed_out_is_not_the_one_that_had_not_arrived() {
    // A chain of waits: rank 3 waits for rank 1, and ranks 1 and 0 wait for rank 2.
    let late = [(40.0, State::Failed(40.1))];
    for others in [
        [(3, 31.0, Some(1)), (1, 31.1, Some(2)), (0, 31.2, Some(2))],
        // Ranks 1 and 0 adopted the report of rank 3, which names rank 1; or they recorded no failure.
        [(3, 31.0, Some(1)), (1, 31.1, Some(1)), (0, 31.2, Some(1))],
        [(3, 31.0, Some(1)), (1, 31.1, None), (0, 31.2, None)],
    ] {
        let report = judge_time_outs(others, &late);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
        let sentence = &report.findings[0].sentence;
        let expected = "rank 2 had not arrived in all_reduce #2 on group default_pg";
        assert!(sentence.starts_with(expected), "{sentence}");
    }
}

#[test]
fn a_rank_that_had_issued_the_operation_is_not_said_to_be_absent_from_it() {
    // Rank 2 was stopped after it had issued the operation, and its own deadline passed meanwhile.
    let others = [(3, 31.0, Some(1)), (1, 31.1, Some(2)), (0, 31.2, Some(2))];
    let report = judge_time_outs(others, &[(1.0, State::Failed(61.0))]);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[2][..]));
    let sentence = &report.findings[0].sentence;
    let expected = "the process of rank 2 was stopped or without processor time inside all_reduce #2 on group \
                    default_pg, which ended there 30 s after its time-out; ranks 0 and 1 waited for rank 2 and gave up \
                    at 13:00:31 UTC";
    assert!(sentence.starts_with(expected), "{sentence}");
    // On rank 2 the operation failed soon after its deadline, as on the others: what it had sent may be lost, or what
    // others had sent to it.
    let report = judge_time_outs(others, &[(1.0, State::Failed(33.0))]);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E135, &[][..]));
    let sentence = &report.findings[0].sentence;
    let expected = "all_reduce #2 on group default_pg timed out on ranks 0 and 1, which waited for rank 2, at 13:00:31 \
                    UTC; rank 2 had issued it, too, and the records do not show whose part was missing";
    assert!(sentence.starts_with(expected), "{sentence}");
}

#[test]
fn a_rank_that_has_just_gone_on_in_the_operation_that_timed_out_was_stopped_in_it() {
    let others = [(3, 31.0, Some(1)), (1, 31.1, Some(2)), (0, 31.2, Some(2))];
    let rank_2 = |state, now| alive(record(2, RANKS, &[FIRST, (1.0, state)]), now);
    // Its ring is read before its own time-out is recorded, or what the others had sent completes the operation.
    for (state, how) in [
        (
            State::Pending,
            "which had not ended there 30 s after its time-out",
        ),
        (
            State::Done(61.0),
            "which ended there 30 s after its time-out",
        ),
    ] {
        let report = judge_with(others, rank_2(state, 61.0));
        assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[2][..]));
        let sentence = &report.findings[0].sentence;
        assert!(sentence.contains(how), "{sentence}");
    }
    // The process is still stopped, and the others have ended.
    let rank_2_stopped = record(2, RANKS, &[FIRST, (1.0, State::Pending)]);
    let report = judge_with(others, stopped(rank_2_stopped, 1.0, 61.0));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[2][..]));
    // Soon after the others gave up, it may be about to.
    let report = judge_with(others, rank_2(State::Pending, 32.0));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E135, &[][..]));
}

/// The report on ranks that gave up waiting for the others in the meeting that ends the job: each rank, when it gave
/// up, and the ranks that its time-out names.
fn judge_end(ranks: Rank, time_outs: &[(Rank, f64, &[Rank])]) -> Report {
    let gave_up = |&(rank, then, about): &(Rank, f64, &[Rank])| {
        let mut dump = record(rank, ranks, &[(0.0, State::Done(0.1))]);
        dump.failures.push(Failure {
            id: 1,
            time_ns: at(then),
            ..Failure::new(FailureKind::Timeout, about, rank, "it did not come")
        });
        closed(dump, then + 1.0)
    };
    let dumps: Vec<Dump> = time_outs.iter().map(gave_up).collect();
    analyze(&dumps, &Policy::default())
}

#[test]
fn a_rank_that_is_cut_off_at_the_end_does_not_make_its_peers_culprits() {
    let (named_by_2, named_by_others): (&[Rank], &[Rank]) = (&[0], &[2]);
    // Rank 2 gave up first, or last.
    for then in [32.0, 34.0] {
        let report = judge_end(
            RANKS,
            &[
                (0, 33.0, named_by_others),
                (1, 33.1, named_by_others),
                (2, then, named_by_2),
                (3, 32.9, named_by_others),
            ],
        );
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
        let sentence = &report.findings[0].sentence;
        let expected = "rank 2 had not arrived when ranks 0, 1 and 3 gave up, at 13:00:32 UTC";
        assert!(sentence.starts_with(expected), "{sentence}");
    }
}

#[test]
fn ranks_that_gave_up_on_each_other_at_the_end_are_all_possible_culprits() {
    // Of two ranks, either may be cut off; of four, each one that another names.
    let two: [(Rank, f64, &[Rank]); 2] = [(0, 32.0, &[1]), (1, 32.1, &[0])];
    let four: [(Rank, f64, &[Rank]); 4] = [
        (0, 32.0, &[2, 3]),
        (1, 32.1, &[2, 3]),
        (2, 32.2, &[0]),
        (3, 32.3, &[0]),
    ];
    let (two, four) = (judge_end(2, &two), judge_end(4, &four));
    for (report, possible) in [(two, [0, 1].as_slice()), (four, &[0, 2, 3])] {
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[][..]));
        let finding = &report.findings[0];
        let possible: Vec<Vec<Rank>> = possible.iter().map(|&rank| vec![rank]).collect();
        assert_eq!(finding.alternatives, possible, "{finding:?}");
        assert!(
            finding.sentence.contains("the records do not show which"),
            "{finding:?}"
        );
    }
}

#[test]
fn a_rank_that_came_to_the_end_after_the_others_had_given_up_is_the_one_that_was_missing() {
    // The time-out of rank 1, 30 s, began when rank 0 had gone.
    let (named_by_0, named_by_1): (&[Rank], &[Rank]) = (&[1], &[0]);
    let report = judge_end(2, &[(0, 32.0, named_by_0), (1, 70.0, named_by_1)]);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn a_rank_that_still_waited_in_an_operation_at_the_end_is_no_culprit_although_others_gave_up_on_it()
{
    // Ranks 0 and 3 give up on rank 1 and end. Rank 1 waits in another group for rank 2, which works on, and gives up
    // at 35 s.
    let first = (0.0, State::Done(0.1));
    let ended = |rank| {
        let mut dump = record(rank, RANKS, &[first]);
        dump.failures.push(Failure {
            id: 1,
            time_ns: at(32.0),
            ..Failure::new(FailureKind::Timeout, &[1], rank, "it did not come")
        });
        closed(dump, 33.0)
    };
    let waits = record(1, RANKS, &[first, (5.0, State::Failed(35.0))]);
    let mut dumps = vec![
        ended(0),
        fails(waits, FailureKind::Timeout, &[2], 35.0),
        record(2, RANKS, &[first]),
        ended(3),
    ];
    for dump in &mut dumps[1..3] {
        let mut pair = dump.groups[0].clone();
        pair.info.id = 1;
        pair.info.name = "pair".to_owned();
        pair.info.desc = "pair".to_owned();
        pair.info.ranks = [1, 2].as_slice().into();
        dump.groups.push(pair);
    }
    dumps[1].entries[1].group = 1;
    dumps[1].entries[1].collective_seq_id = 1;
    dumps[1].failures[0].group = Some(1);
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
}

/// The record of a rank that waited for a message of rank `from` when it gave up, at `then`.
fn receives(rank: Rank, from: Rank, then: f64) -> Dump {
    let mut dump = record(rank, RANKS, &[FIRST, (1.0, State::Failed(then))]);
    let entry = &mut dump.entries[1];
    (entry.op, entry.is_p2p) = (OpType::Recv, true);
    (entry.collective_seq_id, entry.p2p_seq_id) = (1, 1);
    entry.peer = Peer::Rank(from);
    fails(dump, FailureKind::Timeout, &[from], then)
}

#[test]
fn a_rank_that_waited_for_another_message_of_the_group_is_not_the_cause() {
    // Rank 3 waits for rank 2, which waits for rank 1, which waits for rank 0. No collective is between the messages.
    for times in [[31.0, 31.1, 31.2], [31.2, 31.1, 31.0]] {
        let waits = (1..RANKS).zip(times);
        let mut dumps: Vec<Dump> = waits
            .map(|(rank, then)| receives(rank, rank - 1, then))
            .collect();
        dumps.push(record(0, RANKS, &[FIRST]));
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E120, &[0][..]));
    }
}

#[test]
fn a_late_rank_that_its_launcher_ended_after_a_time_out_is_not_said_to_have_ended_by_itself() {
    let done = (0.0, State::Done(0.1));
    let dump_of = |rank: Rank| {
        let late = rank == 1;
        let operations = [done, (1.0, State::Failed(9.0))];
        let mut dump = record(rank, 3, &operations[..if late { 1 } else { 2 }]);
        for entry in &mut dump.entries {
            entry.timeout_ms = 8_000;
        }
        let ended = if late { 9.8 } else { 9.6 };
        let mut dump = dead(dump, ended);
        let status = dump.status.as_mut().expect("the record has a status");
        status.exit = Some(ProcessExit {
            code: if late { 143 } else { 1 },
            time_ns: at(ended),
        });
        dump
    };
    let report = judge(&(0..3).map(dump_of).collect::<Vec<_>>(), 60.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}
