//! Tests the verdicts on jobs that go on: after a failure that the program caught, beside an operation that it holds
//! open, and while their rings are read.

use crate::job::{State, alive, at, closed, dead, fails, record};
use crate::{judge, root};
use rcomm_recorder::model::{
    Entry, EntryState, FailedOperation, FailureKind, OpType, Peer, ProcessGroupInfo, Rank,
};
use rcomm_recorder::publish::{Dump, DumpGroup, ThreadInfo};
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

/// Ranks 0 and 2 give up in their second operation at 4 s, since rank 1 comes only at 7 s. Then each rank goes on with
/// its operations in `later`.
fn caught(later: [&[(f64, State)]; 3]) -> Vec<Dump> {
    let gave_up = [(0.0, State::Done(0.1)), (1.0, State::Failed(4.0))];
    let late = [(0.0, State::Done(0.1)), (7.0, State::Failed(7.1))];
    let ranks = [&gave_up, &late, &gave_up].into_iter().zip(later);
    ranks
        .zip(0..)
        .map(|((first, later), rank)| {
            let operations: Vec<_> = first.iter().chain(later).copied().collect();
            let mut dump = record(rank, 3, &operations);
            if rank != 1 {
                dump = fails(dump, FailureKind::Timeout, &[1], 4.0);
                dump.failures[0].operation = Some(FailedOperation {
                    op: OpType::AllReduce,
                    seq: 2,
                    is_p2p: false,
                    record_id: 2,
                });
            }
            dump
        })
        .collect()
}

fn judge_live(dumps: Vec<Dump>, now: f64) -> Report {
    let dumps: Vec<Dump> = dumps.into_iter().map(|dump| alive(dump, now)).collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(&dumps, &policy)
}

#[test]
fn a_time_out_that_all_ranks_have_overcome_is_history() {
    let later_done = [(8.0, State::Done(8.1)), (9.0, State::Done(9.1))];
    let report = judge_live(caught([&later_done, &later_done, &later_done]), 40.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Healthy, 0));
    // The same holds once the job has ended, in order or with all processes at once.
    let dumps = caught([&later_done, &later_done, &later_done]).into_iter();
    let ended: Vec<Dump> = dumps.clone().map(|dump| closed(dump, 10.0)).collect();
    assert_eq!(judge(&ended, 40.0).verdict, Verdict::Ended);
    let killed: Vec<Dump> = dumps.map(|dump| dead(dump, 10.0)).collect();
    assert!(judge(&killed, 40.0).findings.is_empty());
}

#[test]
fn a_time_out_counts_as_long_as_a_rank_concerned_has_not_gone_on() {
    let later_done = [(8.0, State::Done(8.1))];
    for later in [
        [&later_done[..], &[], &later_done],
        [&[], &later_done, &[]],
        [&[], &[], &[]],
    ] {
        let report = judge_live(caught(later), 40.0);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    }
}

#[test]
fn a_hang_after_a_time_out_that_was_overcome_is_judged_by_itself() {
    let later = [(8.0, State::Done(8.1)), (9.0, State::Pending)];
    let report = judge_live(caught([&later, &later, &later[..1]]), 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
}

/// Adds a second group, of these ranks, and the threads 0, `main`, and 1, `other`.
fn add_group_and_threads(dump: &mut Dump, group: &str, ranks: [Rank; 2]) {
    dump.groups.push(DumpGroup {
        info: ProcessGroupInfo {
            id: 1,
            name: "1".to_owned(),
            desc: group.to_owned(),
            ranks: ranks.into(),
        },
        place: None,
        status: None,
    });
    dump.threads = ["main", "other"]
        .map(|name| ThreadInfo {
            id: name.to_owned(),
            name: name.to_owned(),
        })
        .into();
}

/// The records of two ranks with an all_reduce each second, the last one at `last`, all of which complete. At 0.5 s,
/// thread 0 of rank 0 issues a receive from rank 1 on a group of its own, which stays open. `thread` issues all others.
fn with_open_receive(last: u32, thread: u32) -> Vec<Dump> {
    let done = |second: u32| (f64::from(second), State::Done(f64::from(second) + 0.1));
    let operations: Vec<_> = (0..=last).map(done).collect();
    let mut ranks = [record(0, 2, &operations), record(1, 2, &operations)];
    for dump in &mut ranks {
        add_group_and_threads(dump, "control", [0, 1]);
        for entry in &mut dump.entries {
            entry.thread = Some(thread);
        }
    }
    let entries = &mut ranks[0].entries;
    let receive = Entry {
        group: 1,
        op: OpType::Recv,
        state: EntryState::Started,
        retired: false,
        is_p2p: true,
        p2p_seq_id: 1,
        collective_seq_id: 0,
        peer: Peer::Rank(1),
        time_created_ns: at(0.5),
        time_discovered_started_ns: at(0.5),
        time_discovered_completed_ns: 0,
        thread: Some(0),
        ..entries[0].clone()
    };
    entries.insert(1, receive);
    for (entry, number) in entries.iter_mut().zip(1..) {
        entry.record_id = number;
    }
    ranks.into()
}

#[test]
fn a_receive_that_a_working_rank_holds_open_is_no_hang() {
    let report = judge_live(with_open_receive(30, 0), 31.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Running);
}

#[test]
fn an_open_receive_is_a_cause_once_its_rank_does_nothing_else() {
    // For ten seconds the thread of the receive has completed nothing.
    let report = judge_live(with_open_receive(30, 0), 40.5);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E120, &[1][..]));
    // The same holds for a thread that did something else long before, and that waits while another thread works.
    let mut dumps = with_open_receive(39, 1);
    dumps[0].entries[0].thread = Some(0);
    let report = judge_live(dumps, 40.5);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E120, &[1][..]));
}

#[test]
fn a_thread_that_only_receives_holds_up_no_rank_that_goes_on_in_another_thread() {
    let report = judge_live(with_open_receive(39, 1), 40.5);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Running);
    assert_eq!(report.in_flight.len(), 1, "{:?}", report.in_flight);
    // A rank that then hangs elsewhere does not wait in that receive.
    let mut dumps = with_open_receive(30, 1);
    let last = dumps[0].entries.pop().expect("the record has operations");
    let waits = dumps[1]
        .entries
        .last_mut()
        .expect("the record has operations");
    assert_eq!(waits.collective_seq_id, last.collective_seq_id);
    (waits.state, waits.retired) = (EntryState::Started, false);
    waits.time_discovered_completed_ns = 0;
    let report = judge_live(dumps, 40.5);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[0][..]));
    // If the whole job falls silent, the receive does not hide that.
    let report = judge_live(with_open_receive(30, 1), 60.5);
    let expected = "no rank has issued an operation since 13:00:30 UTC, and none is pending but a receive in a thread \
                    that does nothing else; the longest pause before was 1.0 s: the job may hang";
    let silence = report.silence().expect("the report has a note");
    assert!(silence.starts_with(expected), "{silence}");
}

#[test]
fn a_receive_that_a_rank_left_open_at_its_end_is_no_hang() {
    // Rank 0 has ended in order, and so has rank 1, or it goes on.
    let [first, second] = with_open_receive(10, 0)
        .try_into()
        .expect("the job has two ranks");
    let ended = closed(first, 21.0);
    let report = judge(&[ended.clone(), closed(second.clone(), 21.0)], 40.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Ended);
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(40.0)),
        ..Policy::default()
    };
    let report = analyze(&[ended, alive(second, 40.0)], &policy);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn rings_of_living_processes_are_judged_as_a_snapshot() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let ranks = || [record(0, 2, &waits), record(1, 2, &waits[..1])];
    let judge_at = |now: f64| {
        let dumps = ranks().map(|dump| alive(dump, now));
        let policy = Policy {
            snapshot_of_rings: true,
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    let young = judge_at(1.03);
    assert!(young.findings.is_empty(), "{:?}", young.findings);
    assert_eq!((young.verdict, young.exit_code()), (Verdict::Running, 0));
    assert_eq!(root(&judge_at(7.0)), (Verdict::Stuck, Code::E101, &[1][..]));
}

/// Two ranks with an all_reduce each half second, the last one at 10 s.
fn paced() -> Vec<Dump> {
    let operations: Vec<_> = (0..=20)
        .map(|half_seconds| f64::from(half_seconds) / 2.0)
        .map(|issued| (issued, State::Done(issued + 0.1)))
        .collect();
    vec![record(0, 2, &operations), record(1, 2, &operations)]
}

#[test]
fn a_job_that_has_stopped_communicating_is_not_called_healthy() {
    let mut dumps = paced();
    for dump in &mut dumps[1..] {
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = "save".to_owned();
    }
    let report = judge_live(dumps, 41.0);
    assert_eq!(
        (report.verdict, report.exit_code()),
        (Verdict::Inconclusive, 2)
    );
    let silence = report.silence().expect("the report has a note");
    let expected = "no rank has issued an operation since 13:00:10 UTC, and none is pending; the longest pause before \
                    was 500 ms; rank 1 is in phase `save`";
    assert!(silence.starts_with(expected), "{silence}");
}

#[test]
fn a_job_without_an_operation_is_said_to_have_none_yet() {
    let mut dumps: Vec<Dump> = (0..2).map(|rank| record(rank, 2, &[])).collect();
    for dump in &mut dumps {
        dump.identity.begun_ns = at(1.0);
    }
    let report = judge_live(dumps, 16.0);
    assert_eq!(
        (report.verdict, report.exit_code()),
        (Verdict::Inconclusive, 2)
    );
    let expected = "no rank has issued an operation since the last rank began to record, at 13:00:01 UTC: the job is \
                    starting, or hangs";
    let silence = report.silence().expect("the report has a note");
    assert!(silence.starts_with(expected), "{silence}");
}

#[test]
fn a_pause_is_no_silence_if_it_is_short_or_not_unusual_or_the_ranks_are_gone() {
    // Less than twice `overdue`, and less than 20 pauses.
    for now in [10.5, 19.0] {
        let report = judge_live(paced(), now);
        assert_eq!(report.verdict, Verdict::Healthy, "{now}");
    }
    // After a pause of 2.5 s, one of 31 s is not unusual: it is less than 20 times as long.
    let operations: Vec<_> = (0..=20)
        .map(|index| f64::from(index) / 2.0 - if index < 4 { 2.0 } else { 0.0 })
        .map(|issued| (issued, State::Done(issued + 0.1)))
        .collect();
    let dumps = vec![record(0, 2, &operations), record(1, 2, &operations)];
    assert_eq!(judge_live(dumps, 41.0).verdict, Verdict::Healthy);
    // Ranks that are gone are silent for another reason.
    let dumps = paced()
        .into_iter()
        .map(|dump| closed(dump, 11.0))
        .collect::<Vec<_>>();
    assert_eq!(judge(&dumps, 41.0).verdict, Verdict::Ended);
}

/// Three ranks, of which ranks 0 and 2 wait from 2 s on for rank 1 in their third all_reduce. Thread 0 of rank 1 issued
/// the first two; its thread `thread` issues one each second from 3 s on, on a group of ranks 1 and 2.
fn thread_beside(thread: u32) -> Vec<Dump> {
    let first = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let waits = [first[0], first[1], (2.0, State::Pending)];
    let beats: Vec<_> = (3..12)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    let culprit: Vec<_> = first.iter().chain(&beats).copied().collect();
    let rank_2: Vec<_> = waits.iter().chain(&beats).copied().collect();
    let mut ranks = [
        record(0, 3, &waits),
        record(1, 3, &culprit),
        record(2, 3, &rank_2),
    ];
    for (dump, beats_from) in ranks.iter_mut().zip([usize::MAX, 2, 3]) {
        add_group_and_threads(dump, "beats", [1, 2]);
        for (index, entry) in dump.entries.iter_mut().enumerate() {
            entry.thread = Some(0);
            if index >= beats_from {
                entry.group = 1;
                entry.collective_seq_id = (index - beats_from + 1) as u64;
                entry.thread = Some(if beats_from == 2 { thread } else { 1 });
            }
        }
    }
    ranks.into()
}

#[test]
fn operations_of_another_thread_are_not_what_a_missing_rank_did_last() {
    let report = judge_live(thread_beside(1), 12.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    assert!(
        finding
            .sentence
            .contains("it last issued all_reduce #2 on group default_pg"),
        "{finding:?}"
    );
    assert!(
        finding.next.starts_with("look at what rank 1 does"),
        "{finding:?}"
    );
}

#[test]
fn a_missing_rank_that_goes_on_is_not_said_to_be_where_it_last_was() {
    let report = judge_live(thread_beside(0), 12.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    assert!(
        finding.next.starts_with(
            "find out why rank 1 has not issued that all_reduce: it goes on, with 9 operations"
        ),
        "{finding:?}"
    );
}

#[test]
fn operations_that_a_missing_rank_issues_before_the_one_that_it_misses_do_not_show_that_it_goes_on()
{
    // The others issue five at once; rank 1 comes a moment later, and hangs after the fourth.
    let burst = |from: f64, number: i32| -> Vec<_> {
        let times = (0..number).map(|index| from + f64::from(index) / 100.0);
        times
            .map(|issued| (issued, State::Done(issued + 0.1)))
            .collect()
    };
    let mut waits = burst(1.0, 4);
    waits.push((1.04, State::Pending));
    let late = burst(1.05, 4);
    let ranks = [&waits, &late, &waits].into_iter().zip(0..);
    let mut dumps: Vec<Dump> = ranks
        .map(|(operations, rank)| record(rank, 3, operations))
        .collect();
    for dump in &mut dumps {
        add_group_and_threads(dump, "other", [1, 2]);
        dump.entries
            .iter_mut()
            .for_each(|entry| entry.thread = Some(0));
    }
    let report = judge_live(dumps, 12.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let next = &report.findings[0].next;
    assert!(next.starts_with("look at what rank 1 does"), "{next}");
    // If the missing rank has issued nothing on the group, all its operations show that it goes on.
    let mut dumps = thread_beside(1);
    dumps[1].entries.retain(|entry| entry.group == 1);
    for dump in &mut dumps {
        dump.entries
            .retain(|entry| entry.group == 1 || entry.collective_seq_id == 3);
        for (entry, number) in dump.entries.iter_mut().zip(1..) {
            entry.record_id = number;
            if entry.group == 0 {
                entry.collective_seq_id = 1;
            }
        }
    }
    let report = judge_live(dumps, 12.0);
    let next = &report.findings[0].next;
    assert!(
        next.starts_with("find out why rank 1 has not issued that all_reduce: it goes on"),
        "{next}"
    );
    // Operations in another group that came long ago do not show it, either.
    let mut dumps = thread_beside(0);
    for dump in &mut dumps {
        dump.entries.retain(|entry| entry.time_created_ns < at(7.5));
    }
    let report = judge_live(dumps, 30.0);
    let next = &report.findings[0].next;
    assert!(next.starts_with("look at what rank 1 does"), "{next}");
}

#[test]
fn a_wait_that_a_time_out_has_ended_grows_no_older() {
    let gave_up = [(0.0, State::Done(0.1)), (1.0, State::Failed(4.0))];
    let ranks = [&gave_up[..], &gave_up[..1], &gave_up];
    let dumps = ranks.into_iter().zip(0..);
    let report = judge_live(
        dumps
            .map(|(operations, rank)| record(rank, 3, operations))
            .collect(),
        40.0,
    );
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    assert!(
        finding
            .sentence
            .contains("2 ranks waited 3.0 s, until it failed"),
        "{finding:?}"
    );
    assert_eq!(finding.age_ms, None);
}

#[test]
fn a_send_and_a_receive_that_do_not_match_may_have_different_tags() {
    let report_of = |completed: bool| {
        let [mut first, mut second] = with_open_receive(1, 0)
            .try_into()
            .expect("the job has two ranks");
        first.entries.truncate(2);
        let receive = first.entries[1].clone();
        second.entries.truncate(1);
        second.entries.push(Entry {
            op: OpType::Send,
            state: if completed {
                EntryState::Completed
            } else {
                EntryState::Started
            },
            retired: completed,
            peer: Peer::Rank(0),
            time_discovered_completed_ns: if completed { at(0.6) } else { 0 },
            ..receive
        });
        judge_live(vec![first, second], 40.5)
    };
    for (completed, expected) in [
        (
            true,
            "rank 0 has waited 40 s in recv #1 from rank 1 on group control/1, although the send #1 to rank 0 on group \
             control/1 has completed on rank 1: their tags, which are not recorded, may differ",
        ),
        (
            false,
            "rank 1 is in send #1 to rank 0 on group control/1 and rank 0 in recv #1 from rank 1 on group control/1, \
             and neither has finished: their tags, which are not recorded, may differ",
        ),
    ] {
        let report = report_of(completed);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E120, &[][..]));
        let [finding] = &report.findings[..] else {
            panic!("one message has one finding: {:?}", report.findings);
        };
        assert_eq!(finding.alternatives, [vec![1], vec![0]]);
        assert_eq!(finding.sentence, expected);
    }
}

#[test]
fn an_operation_whose_error_was_caught_is_no_wait_in_a_later_hang() {
    let before = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.2))];
    let after = (2..6).map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)));
    let passed: Vec<_> = before.into_iter().chain(after).collect();
    let waits: Vec<_> = passed
        .iter()
        .copied()
        .chain([(6.0, State::Pending)])
        .collect();
    let dumps = || {
        let ranks = [&waits, &passed, &waits].into_iter().zip(0..);
        ranks
            .map(|(operations, rank)| record(rank, 3, operations))
            .collect::<Vec<_>>()
    };
    let report = judge_live(dumps(), 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    // Nor does the caught error show which process ended first.
    let ended: Vec<Dump> = dumps().into_iter().map(|dump| dead(dump, 6.5)).collect();
    assert_eq!(judge(&ended, 40.0).verdict, Verdict::Cancelled);
}
