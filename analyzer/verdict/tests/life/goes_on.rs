//! Tests the verdicts on jobs that go on: after a failure that the program caught, beside an operation that it holds
//! open, and while their rings are read.

use crate::job::{State, alive, at, closed, dead, fails, record};
use crate::{judge, root};
use rcomm_recorder::model::{
    Entry, EntryState, FailedOperation, FailureKind, OpType, Peer, ProcessGroupInfo,
};
use rcomm_recorder::publish::{Dump, DumpGroup, ThreadInfo};
use rcomm_verdict::{Code, Policy, Report, Verdict, analyze};

/// Ranks 0 and 2 give up in their second operation at 4 s, since rank 1 comes only at 7 s; then all three go on with
/// these operations, each with when it was issued and its state.
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

fn live(dumps: Vec<Dump>, now: f64) -> Report {
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
    let on = [(8.0, State::Done(8.1)), (9.0, State::Done(9.1))];
    let report = live(caught([&on, &on, &on]), 40.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Healthy, 0));
    // So it is once the job has ended, and it does not hide which process ended first.
    let whole = caught([&on, &on, &on]).into_iter();
    let ended: Vec<Dump> = whole.clone().map(|dump| closed(dump, 10.0)).collect();
    assert_eq!(judge(&ended, 40.0).verdict, Verdict::Ended);
    let cut: Vec<Dump> = whole.map(|dump| dead(dump, 10.0)).collect();
    assert!(judge(&cut, 40.0).findings.is_empty());
}

#[test]
fn a_time_out_counts_as_long_as_a_rank_concerned_has_not_gone_on() {
    let on = [(8.0, State::Done(8.1))];
    for later in [[&on[..], &[], &on], [&[], &on, &[]], [&[], &[], &[]]] {
        let report = live(caught(later), 40.0);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    }
}

#[test]
fn a_hang_after_a_time_out_that_was_overcome_is_judged_by_itself() {
    let on = [(8.0, State::Done(8.1)), (9.0, State::Pending)];
    let report = live(caught([&on, &on, &on[..1]]), 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
}

/// The record of rank 0 of 2 with all_reduces once a second up to the one at `last`, which all complete, and from 0.5 s
/// on a receive from rank 1 on a group of its own. Thread 0 issued the receive, `thread` all others.
fn with_open_receive(last: u32, thread: u32) -> Vec<Dump> {
    let done = |second: u32| (f64::from(second), State::Done(f64::from(second) + 0.1));
    let operations: Vec<_> = (0..=last).map(done).collect();
    let mut ranks = [record(0, 2, &operations), record(1, 2, &operations)];
    for dump in &mut ranks {
        dump.groups.push(DumpGroup {
            info: ProcessGroupInfo {
                id: 1,
                name: "1".to_owned(),
                desc: "control".to_owned(),
                ranks: [0, 1].into(),
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
    let report = live(with_open_receive(30, 0), 31.0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Running);
}

#[test]
fn an_open_receive_is_a_cause_once_its_rank_does_nothing_else() {
    // For ten seconds its thread has completed nothing; nor, long before, has a thread that waits while another works.
    for (last, thread) in [(30, 0), (39, 1)] {
        let report = live(with_open_receive(last, thread), 40.5);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E120, &[1][..]));
    }
}

#[test]
fn rings_of_living_processes_are_judged_as_a_snapshot() {
    let here = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let ranks = || [record(0, 2, &here), record(1, 2, &here[..1])];
    let at_once = |now: f64| {
        let dumps = ranks().map(|dump| alive(dump, now));
        let policy = Policy {
            snapshot_of_rings: true,
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    let young = at_once(1.03);
    assert!(young.findings.is_empty(), "{:?}", young.findings);
    assert_eq!((young.verdict, young.exit_code()), (Verdict::Running, 0));
    assert_eq!(root(&at_once(7.0)), (Verdict::Stuck, Code::E101, &[1][..]));
}
