//! Tests that a process is not at fault that ended because it had waited, and that one of many which end at once is not
//! singled out.

use super::*;
use crate::launched::judge_launched;
use rcomm_recorder::publish::LaunchSignal;

const BETWEEN: (f64, State) = (0.0, State::Done(0.1));

/// The ranks that findings which are no consequences accuse with a confidence above one half.
fn accused(report: &Report) -> Vec<Rank> {
    let likely = report
        .findings
        .iter()
        .filter(|finding| finding.caused_by.is_none() && finding.confidence > 0.5);
    likely
        .flat_map(|finding| finding.culprit_ranks.clone())
        .collect()
}

/// The same record, of a process that noted its exit.
fn exits(mut dump: Dump, code: u8, then: f64) -> Dump {
    let status = dump.status.as_mut().expect("the record has a status");
    status.exit = Some(ProcessExit {
        time_ns: at(then),
        code,
    });
    dump
}

/// The same record, of a process on another host.
fn on_host(mut dump: Dump, host: &str) -> Dump {
    dump.identity.host = host.to_owned();
    dump
}

#[test]
fn the_first_of_several_that_abort_at_a_time_out_is_not_at_fault() {
    // The watchdog of NCCL's backend aborts each process, some seconds apart, with the operation unfinished.
    let waits = [BETWEEN, (1.0, State::Pending)];
    let ends = [32.0, 35.0, 38.5];
    let dumps: Vec<Dump> = (0..)
        .zip(ends)
        .map(|(rank, ended)| {
            let mut dump = dead(record(rank, 3, &waits), ended);
            dump.signatures[0].backend = "nccl".to_owned();
            dump
        })
        .collect();
    let report = judge(&dumps, 100.0);
    assert_eq!(accused(&report), [0; 0], "{:?}", report.findings);
}

#[test]
fn a_rank_that_timed_out_and_exited_is_not_at_fault_beside_one_that_was_stopped() {
    let inside = [BETWEEN, (1.0, State::Pending)];
    let timed_out = [BETWEEN, (1.0, State::Failed(31.0))];
    // The launcher kills the stopped rank at the end.
    let dumps = [
        dead(record(0, 3, &inside), 1.2),
        exits(dead(record(1, 3, &timed_out), 31.1), 1, 31.9),
        exits(dead(record(2, 3, &timed_out), 31.1), 1, 31.3),
    ];
    let ends = [
        (None, Some(9), 42.0),
        (Some(1), None, 31.9),
        (Some(1), None, 31.3),
    ];
    let mut launched = launch(None, &ends);
    launched.ranks[0].sent = [(15, 31.8), (9, 41.9)]
        .map(|(signal, then)| LaunchSignal {
            signal,
            time_ns: at(then),
        })
        .to_vec();
    let report = judge_launched(&dumps, launched);
    let innocent = accused(&report).iter().all(|&rank| rank == 0);
    assert!(innocent, "{:?}", report.findings);
}

#[test]
fn of_ranks_that_end_at_once_those_that_a_peer_noticed_are_not_singled_out() {
    let inside = [BETWEEN, (1.0, State::Pending)];
    let lost = [BETWEEN, (1.0, State::Failed(1.21))];
    let notices = |by: Rank, about: Rank| {
        let dump = dead(record(by, 4, &lost), 1.22);
        fails(dump, FailureKind::PeerGone, &[about], 1.21)
    };
    // Rank 2 neither lost a peer nor was lost: a signal ended it, and may have ended rank 1 as well.
    let dumps = [
        notices(0, 1),
        dead(record(1, 4, &inside[..1]), 1.2),
        dead(record(2, 4, &inside[..1]), 1.2),
        notices(3, 1),
    ];
    let report = judge(&dumps, 100.0);
    assert_eq!(accused(&report), [0; 0], "{:?}", report.findings);
    let alternatives = &report.findings[0].alternatives;
    assert_eq!(*alternatives, [vec![1], vec![2]], "{:?}", report.findings);
    // Where all others lost it, it ended first.
    let dumps = [
        notices(0, 1),
        dead(record(1, 4, &inside[..1]), 1.2),
        notices(2, 1),
        notices(3, 1),
    ];
    let report = judge(&dumps, 100.0);
    assert_eq!(accused(&report), [1], "{:?}", report.findings);
}

#[test]
fn clocks_that_nothing_relates_show_no_order_of_ends() {
    // No operation has completed on both hosts, and the clock of one is nine seconds behind.
    let waits = [(9.9, State::Pending)];
    let asked = |rank: Rank, host: &str, ops: &[(f64, State)], then: f64| {
        exits(on_host(dead(record(rank, 2, ops), then), host), 143, then)
    };
    let dumps = [asked(0, "n0", &waits, 10.2), asked(1, "n1", &[], 1.2)];
    let report = judge(&dumps, 100.0);
    assert_eq!(report.verdict, Verdict::Cancelled, "{:?}", report.findings);
    // One that raised explains that the other was asked to end.
    let raised = exits(on_host(dead(record(0, 2, &waits), 10.2), "n0"), 1, 10.2);
    let report = judge(&[raised, dumps[1].clone()], 100.0);
    let innocent = accused(&report).iter().all(|&rank| rank == 0);
    assert!(innocent, "{:?}", report.findings);
}
