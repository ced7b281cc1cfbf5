//! Tests what the records of connections show: who is cut off from whom, and whether the store is lost.

use crate::job::{State, alive, at, fails, record};
use crate::root;
use rcomm_recorder::model::{FailureKind, LinkEnd, PeerLink, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Finding, Policy, Report, Verdict, analyze};

const RANKS: Rank = 4;
/// When the links break, in seconds as for [`at`].
const CUT: f64 = 2.0;
/// When the ranks sampled their connections last.
const SAMPLED: f64 = 8.0;

/// The records of ranks that all came to the second all_reduce, which none has finished.
fn dumps() -> Vec<Dump> {
    let waits = [(0.0, State::Done(0.1)), (1.9, State::Pending)];
    let dump = |rank| {
        let mut dump = record(rank, RANKS, &waits);
        dump.identity.host = format!("n{rank}");
        alive(dump, 9.0)
    };
    (0..RANKS).map(dump).collect()
}

/// A connection with its last sign of life at this moment, and with nothing on its way.
fn alive_until(to: Rank, then: f64) -> PeerLink {
    PeerLink {
        heard_ns: at(then),
        sampled_ns: at(SAMPLED),
        interval_ms: 1_000,
        ..PeerLink::to(LinkEnd::Rank(to))
    }
}

/// Connects all ranks. Connections for which `is_cut` holds in either direction have been silent since the cut.
fn connect(dumps: &mut [Dump], is_cut: impl Fn(Rank, Rank) -> bool) {
    for (from, dump) in (0..).zip(dumps) {
        let others = (0..RANKS).filter(|&to| to != from);
        dump.peers = others
            .map(|to| match is_cut(from, to) || is_cut(to, from) {
                true => alive_until(to, CUT),
                false => alive_until(to, SAMPLED - 0.5),
            })
            .collect();
    }
}

fn first_finding(dumps: &[Dump]) -> Finding {
    analyze(dumps, &Policy::default()).findings.remove(0)
}

#[test]
fn a_rank_that_the_others_do_not_hear_while_they_hear_each_other_is_cut_off() {
    let mut dumps = dumps();
    connect(&mut dumps, |from, _| from == 2);
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E152, &[2][..]));
    assert_eq!(
        report.findings[0].sentence,
        "rank 2 (host n2) and ranks 0, 1 and 3 heard nothing from each other after 13:00:02 UTC, while \
         ranks 0, 1 and 3 received from each other"
    );
    // The record of the rank that is cut off may be lost with its host.
    dumps.remove(2);
    assert_eq!(first_finding(&dumps).culprit_ranks, [2]);
    // The order of the files does not matter.
    dumps.reverse();
    assert_eq!(first_finding(&dumps).culprit_ranks, [2]);
}

#[test]
fn ranks_that_end_their_connections_after_a_silence_are_not_cut_off_by_that() {
    let mut dumps = dumps();
    connect(&mut dumps, |from, _| from == 2);
    // The links between ranks 0, 1 and 3 worked until these failed and reset them.
    for dump in &mut dumps {
        let links = dump.peers.iter_mut();
        for link in links.filter(|link| link.heard_ns > at(CUT)) {
            link.errno = 104;
        }
    }
    // Rank 2 and rank 3 left no record: one silent link shows which end is at fault only because other links worked.
    dumps.truncate(2);
    dumps[1].peers.retain(|link| link.end != LinkEnd::Rank(2));
    let finding = first_finding(&dumps);
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E152, &[2][..]),
        "{}",
        finding.sentence
    );
}

#[test]
fn a_link_between_two_ranks_that_others_reach_accuses_neither() {
    let mut dumps = dumps();
    connect(&mut dumps, |from, to| (from, to) == (1, 2));
    let finding = first_finding(&dumps);
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E152, &[][..])
    );
    assert_eq!(finding.alternatives, [[1], [2]]);
}

#[test]
fn a_link_that_may_work_in_one_direction_is_told_by_what_arrived() {
    let mut dumps = dumps();
    connect(&mut dumps, |from, _| from == 2);
    for (from, dump) in (0..).zip(&mut dumps) {
        for link in &mut dump.peers {
            let crosses = from == 2 || link.end == LinkEnd::Rank(2);
            if crosses {
                // Whatever rank 2 sent arrived; of what was sent to it, 10 bytes did not.
                (link.sent, link.received, link.unacknowledged) = match from {
                    2 => (100, 90, 1),
                    _ => (100, 100, 1),
                };
            }
        }
    }
    let finding = first_finding(&dumps);
    assert!(
        finding.sentence.ends_with(
            "what was sent from there arrived, what was sent there did not: the links may work in one direction only"
        ),
        "{}",
        finding.sentence
    );
}

#[test]
fn a_silent_link_between_two_ranks_alone_accuses_neither() {
    let mut dumps = dumps();
    for dump in &mut dumps[..2] {
        let other = 1 - dump.identity.rank.unwrap();
        dump.peers = vec![alive_until(other, CUT)];
    }
    let finding = first_finding(&dumps);
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E152, &[][..])
    );
}

#[test]
fn connections_that_were_reset_at_both_ends_are_a_fault_of_the_network() {
    let mut dumps = dumps();
    connect(&mut dumps, |_, _| false);
    let reset = |dumps: &mut [Dump], from: Rank, to: Rank| {
        let links = dumps[from as usize].peers.iter_mut();
        for link in links.filter(|link| link.end == LinkEnd::Rank(to)) {
            (link.errno, link.sampled_ns) = (104, at(7.0));
        }
    };
    for other in [0, 1, 3] {
        reset(&mut dumps, other, 2);
    }
    // A process that ended would have reset its connections, too, and recorded nothing.
    assert_ne!(first_finding(&dumps).code, Code::E152);
    for other in [0, 1, 3] {
        reset(&mut dumps, 2, other);
    }
    assert_eq!(first_finding(&dumps).culprit_ranks, [2]);
}

#[test]
fn a_process_that_answers_after_its_connection_broke_is_not_called_gone() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.1))];
    let judge = |text: &str| {
        let dump = |rank| {
            let dump = record(rank, 3, &failed);
            let mut dump = fails(dump, FailureKind::PeerGone, &[1], 1.1);
            text.clone_into(&mut dump.failures[0].text);
            dump
        };
        // Rank 1 left no record.
        analyze(&[dump(0), dump(2)], &Policy::default())
    };
    let blames_the_end = |report: &Report| {
        let mut findings = report.findings.iter();
        findings.any(|finding| finding.code == Code::E150)
    };
    assert!(blames_the_end(&judge(
        "rank 1 is gone: its connection ended"
    )));
    let broke = "the connection to rank 1 ended, but its process still runs";
    let report = judge(&format!("{broke}: connection reset"));
    assert!(!blames_the_end(&report), "{:?}", report.findings);
    let text = format!("{report:?}");
    assert!(!text.contains("the process of rank 1 is gone"), "{text}");
}

#[test]
fn links_with_signs_of_life_explain_nothing() {
    let mut dumps = dumps();
    connect(&mut dumps, |_, _| false);
    let without = analyze(&self::dumps(), &Policy::default());
    assert_eq!(analyze(&dumps, &Policy::default()), without);
    assert_eq!(without.findings[0].code, Code::E135);
}

#[test]
fn a_store_that_leaves_most_ranks_without_an_answer_is_lost() {
    let mut dumps = dumps();
    let asks = |dump: &mut Dump, end| {
        dump.peers = vec![PeerLink {
            waited_since_ns: at(4.0),
            ..PeerLink::to(end)
        }];
    };
    let lost = |dumps: &[Dump]| {
        let findings = analyze(dumps, &Policy::default()).findings;
        findings
            .into_iter()
            .find(|finding| finding.code == Code::E153)
    };
    asks(&mut dumps[1], LinkEnd::StoreAtRank(0));
    assert!(lost(&dumps).is_none(), "one rank may be cut off itself");
    for dump in &mut dumps[2..] {
        asks(dump, LinkEnd::StoreAtRank(0));
    }
    let finding = lost(&dumps).unwrap();
    assert_eq!(finding.culprit_ranks, [0]);
    assert!(
        finding.sentence.starts_with(
            "the store, which rank 0 serves, had not answered 3 of the 3 ranks that asked it \
             (ranks 1-3) since 13:00:04 UTC"
        ),
        "{}",
        finding.sentence
    );
    assert!(finding.caused_by.is_some());
}

#[test]
fn a_host_that_aborts_its_connections_is_named_although_other_links_broke_too() {
    let mut dumps = dumps();
    connect(&mut dumps, |_, _| false);
    let break_link = |dumps: &mut [Dump], from: Rank, to: Rank, errno| {
        let links = dumps[from as usize].peers.iter_mut();
        for link in links.filter(|link| link.end == LinkEnd::Rank(to)) {
            (link.errno, link.sampled_ns) = (errno, at(7.0));
        }
    };
    break_link(&mut dumps, 2, 0, 103);
    break_link(&mut dumps, 2, 1, 103);
    // The ranks that fail then reset the connections between them.
    for (from, to) in [(0, 1), (1, 0), (1, 3), (3, 1)] {
        break_link(&mut dumps, from, to, 104);
    }
    let finding = first_finding(&dumps);
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E152, &[2][..])
    );
    assert_eq!(
        finding.sentence,
        "the host of rank 2 (host n2) aborted its connections to ranks 0 and 1 at 13:00:07 UTC"
    );
}
