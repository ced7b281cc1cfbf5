//! Tests verdicts on several records of each process: what each of them holds counts.

use crate::job::{State, alive, at, fails, record};
use rcomm_recorder::model::{FailureKind, LinkEnd, PeerLink, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Finding, Policy, analyze};

const RANKS: Rank = 4;

fn first_finding(dumps: &[Dump]) -> Finding {
    let findings = analyze(dumps, &Policy::default()).findings;
    findings.into_iter().next().expect("there is a finding")
}

/// A connection that was sampled at one moment and had its last sign of life at another.
fn link(to: Rank, heard: f64, sampled: f64) -> PeerLink {
    PeerLink {
        heard_ns: at(heard),
        sampled_ns: at(sampled),
        interval_ms: 1_000,
        ..PeerLink::to(LinkEnd::Rank(to))
    }
}

fn on_host_of(rank: Rank, mut dump: Dump) -> Dump {
    dump.identity.host = format!("n{rank}");
    dump
}

/// The dumps that the ranks wrote at a time-out, while rank 2 was cut off from the others, and their rings, which were
/// read after the network had healed.
fn records_of_a_healed_cut() -> Vec<Dump> {
    let both = |rank: Rank| {
        let waits = [(0.0, State::Done(0.1)), (1.9, State::Pending)];
        let mut dump = on_host_of(rank, record(rank, RANKS, &waits));
        dump.identity.dump_time_ns = at(8.0);
        let mut dump = fails(dump, FailureKind::Timeout, &[], 8.0);
        let failed = [(0.0, State::Done(0.1)), (1.9, State::Failed(8.0))];
        let ring = on_host_of(rank, record(rank, RANKS, &failed));
        let mut ring = alive(fails(ring, FailureKind::Timeout, &[], 8.0), 60.0);
        for other in (0..RANKS).filter(|&other| other != rank) {
            let is_cut = rank == 2 || other == 2;
            dump.peers
                .push(link(other, if is_cut { 2.0 } else { 7.5 }, 8.0));
            ring.peers.push(link(other, 59.5, 60.0));
        }
        [dump, ring]
    };
    (0..RANKS).flat_map(both).collect()
}

#[test]
fn the_links_at_the_fault_count_although_a_newer_ring_has_healed_ones() {
    let mut dumps = records_of_a_healed_cut();
    for _ in 0..2 {
        let finding = first_finding(&dumps);
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E152, &[2][..]),
            "{}",
            finding.sentence
        );
        dumps.reverse();
    }
    let without_dumps: Vec<Dump> = dumps
        .iter()
        .filter(|dump| !dump.identity.reason.is_empty())
        .cloned()
        .collect();
    assert_eq!(without_dumps.len(), RANKS as usize);
    assert_ne!(first_finding(&without_dumps).code, Code::E152);
}

#[test]
fn links_of_a_fault_after_which_the_ranks_went_on_explain_nothing() {
    let mut dumps = records_of_a_healed_cut();
    for (rank, ring) in (0..RANKS).zip(dumps.iter_mut().skip(1).step_by(2)) {
        let went_on = [
            (0.0, State::Done(0.1)),
            (1.9, State::Failed(8.0)),
            (9.0, State::Done(9.1)),
            (10.0, State::Pending),
        ];
        ring.entries = record(rank, RANKS, &went_on).entries;
    }
    assert_ne!(first_finding(&dumps).code, Code::E152);
}

#[test]
fn records_of_two_processes_of_a_rank_are_not_joined() {
    let mut dumps = records_of_a_healed_cut();
    for dump in dumps.iter_mut().step_by(2) {
        dump.identity.pid += 1_000;
    }
    assert_ne!(first_finding(&dumps).code, Code::E152);
}

#[test]
fn a_failure_and_its_operation_that_the_newer_ring_has_lost_come_from_the_dump() {
    let mut dumps = Vec::new();
    for rank in 0..2 {
        let at_fault = match rank {
            0 => vec![(0.0, State::Done(0.1)), (1.0, State::Pending)],
            _ => vec![(0.0, State::Done(0.1))],
        };
        let mut dump = record(rank, 2, &at_fault);
        dump.identity.dump_time_ns = at(31.0);
        if rank == 0 {
            dump = fails(dump, FailureKind::Timeout, &[1], 31.0);
        }
        // A small ring, which has wrapped since.
        let mut ring = alive(record(rank, 2, &[(40.0, State::Pending)]), 45.0);
        ring.entries[0].record_id = 7;
        ring.entries[0].collective_seq_id = 7;
        dumps.extend([dump, ring]);
    }
    let report = analyze(&dumps, &Policy::default());
    let finding = report
        .findings
        .iter()
        .find(|finding| finding.code == Code::E101);
    let finding = finding.unwrap_or_else(|| panic!("{:?}", report.findings));
    assert_eq!(finding.culprit_ranks, [1]);
    assert!(
        finding
            .sentence
            .contains("rank 1 had not arrived in all_reduce #2"),
        "{}",
        finding.sentence
    );
    let note = report
        .problems
        .iter()
        .find(|problem| problem.sentence.contains("left aside"));
    assert!(
        note.is_some_and(|note| note.sentence.contains("it has what only this one held")),
        "{:?}",
        report.problems
    );
}
