//! Tests records of ranks that were taken when others had just come to wait for them, long before the others' records,
//! and records that were asked for in a running job.

use crate::job::{State, at, fails, record};
use rcomm_recorder::model::{Entry, EntryState, FailureKind, OpType, Peer, Rank, Signature};
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Analysis, Code, Extent, Policy, Report, Verdict};

/// When the wait begins, s.
const BEGIN: f64 = 20.0;
/// When the records of the ranks that wait were taken, s.
const LATE: f64 = 320.0;

/// An operation each second until the one at [`BEGIN`], in which the rank waits if it `came`.
fn operations(came: bool) -> Vec<(f64, State)> {
    let done = (0..20).map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)));
    let waits = came.then_some((BEGIN, State::Pending));
    done.chain(waits).collect()
}

/// The record of a rank of six with a time-out of 10 minutes: PyTorch's, or one of ours that states when it was taken.
fn of_rank(rank: Rank, operations: &[(f64, State)], taken: f64, states_time: bool) -> Dump {
    let mut dump = record(rank, 6, operations);
    for entry in &mut dump.entries {
        entry.timeout_ms = 600_000;
    }
    if states_time {
        dump.identity.dump_time_ns = at(taken);
    } else {
        dump.recorder = Recorder::Nccl;
        dump.status = None;
        dump.identity.host.clear();
        dump.identity.pid = 0;
        dump.signatures[0].backend = "nccl".to_owned();
    }
    dump
}

/// The report on these dumps, each with the time at which its file was written, s.
fn judge(dumps: &[(Dump, f64)]) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    for (dump, written) in dumps {
        let states_time = dump.identity.dump_time_ns > 0;
        analysis.note_written((!states_time).then_some(at(*written)));
        analysis.add(dump);
    }
    analysis.finish()
}

fn highest_against(report: &Report, rank: Rank) -> f64 {
    let findings = report.findings.iter();
    findings
        .filter(|finding| finding.culprit_ranks.contains(&rank))
        .map(|finding| finding.confidence)
        .fold(0.0, f64::max)
}

#[test]
fn a_record_taken_as_a_wait_began_does_not_show_that_its_rank_never_came() {
    for states_time in [false, true] {
        for taken in [-0.5, 0.5, 4.0, 8.0, 40.0].map(|after| BEGIN + after) {
            // Rank 3 is dead and left no record, or waits like the others.
            for dead in [true, false] {
                let dumps: Vec<(Dump, f64)> = (0..6)
                    .filter(|&rank| rank != 3 || !dead)
                    .map(|rank| {
                        let then = if rank == 1 { taken } else { LATE };
                        let operations = operations(rank != 1);
                        (of_rank(rank, &operations, then, states_time), then)
                    })
                    .collect();
                let report = judge(&dumps);
                let confidence = highest_against(&report, 1);
                let highest = match taken > BEGIN + 5.0 && !dead {
                    true => 0.75,
                    false => 0.5,
                };
                assert!(
                    confidence <= highest,
                    "{states_time} {taken} {dead}: {confidence} {:?}",
                    report.findings
                );
                if dead {
                    assert!(highest_against(&report, 3) <= 0.5, "{:?}", report.findings);
                }
            }
        }
    }
}

#[test]
fn a_record_taken_as_a_wait_began_does_not_show_that_its_rank_never_started_an_operation() {
    // Rank 1 has issued the operation, and its device has not reached it.
    let dumps: Vec<(Dump, f64)> = (0..3)
        .map(|rank| {
            let then = if rank == 1 { BEGIN + 0.5 } else { LATE };
            let mut dump = of_rank(rank, &operations(true), then, false);
            if let Some(last) = dump.entries.last_mut().filter(|_| rank == 1) {
                last.state = EntryState::Scheduled;
                last.time_discovered_started_ns = 0;
            }
            (dump, then)
        })
        .collect();
    let report = judge(&dumps);
    let confidence = highest_against(&report, 1);
    assert!(confidence <= 0.5, "{confidence} {:?}", report.findings);
}

#[test]
fn an_empty_record_taken_before_a_wait_began_does_not_show_that_its_rank_never_came() {
    // The first operation of the ranks is the one that they wait in, so no operation relates their clocks.
    for (taken, is_early) in [(BEGIN - 10.0, true), (LATE, false)] {
        let dumps: Vec<(Dump, f64)> = (0..6)
            .map(|rank| {
                let then = if rank == 1 { taken } else { LATE };
                let waits: &[_] = if rank == 1 {
                    &[]
                } else {
                    &[(BEGIN, State::Pending)]
                };
                (of_rank(rank, waits, then, false), then)
            })
            .collect();
        let report = judge(&dumps);
        let confidence = highest_against(&report, 1);
        match is_early {
            true => assert!(confidence <= 0.5, "{confidence} {:?}", report.findings),
            false => assert!(confidence > 0.9, "{confidence} {:?}", report.findings),
        }
        // The clock of the record is not known, so its time proves nothing.
        let mut notes = report.problems.iter();
        let seems = notes.any(|note| note.sentence.contains("rank 1 seems to have been taken"));
        assert_eq!(seems, is_early, "{:?}", report.problems);
    }
}

#[test]
fn an_operation_that_ranks_completed_after_a_dump_is_no_wait_of_its_rank() {
    // Rank 0 pauses for 20 s. Rank 2 is asked for its dump early, rank 0 in its pause, and rank 1 when all have gone
    // on.
    let until = |seconds: u32| -> Vec<(f64, State)> {
        let resumed = BEGIN + 20.0;
        let done = (0..20).map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)));
        let next = (20..seconds).map(|second| {
            let issued = if second == 20 {
                BEGIN
            } else {
                f64::from(second) + 20.0
            };
            (
                issued,
                State::Done(f64::from(second).max(BEGIN) + resumed - BEGIN + 0.1),
            )
        });
        done.chain(next).collect()
    };
    let dump = |rank, operations: &[(f64, State)], taken| of_rank(rank, operations, taken, true);
    let in_it = operations(true);
    for ends in [20, 21, 30] {
        let mut dumps = [
            (dump(0, &operations(false), BEGIN + 13.0), BEGIN + 13.0),
            (dump(1, &until(ends), BEGIN + 31.0), BEGIN + 31.0),
            (dump(2, &in_it, BEGIN + 5.1), BEGIN + 5.1),
        ];
        for (dump, _) in &mut dumps {
            dump.identity.world_size = Some(3);
            dump.groups[0].info.ranks = (0..3).collect();
        }
        let report = judge(&dumps);
        match ends {
            20 => assert_eq!(report.verdict, Verdict::Stuck, "{:?}", report.findings),
            _ => assert_eq!(report.findings, [], "{ends}"),
        }
    }
}

#[test]
fn a_record_of_a_pair_of_which_the_other_was_asked_earlier_is_of_the_same_run() {
    // Ranks 2 and 3 were asked for their dumps long before ranks 0 and 1, rank 2 before rank 3.
    let until = |seconds: u32| -> Vec<(f64, State)> {
        (0..seconds)
            .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
            .collect()
    };
    let dumps: Vec<(Dump, f64)> = [(0, 40), (1, 40), (2, 10), (3, 12)]
        .into_iter()
        .map(|(rank, seconds)| {
            let taken = f64::from(seconds) - 0.5;
            let mut dump = of_rank(rank, &until(seconds), taken, true);
            dump.identity.world_size = Some(4);
            let pair = rank / 2;
            let info = &mut dump.groups[0].info;
            info.ranks = [2 * pair, 2 * pair + 1].into();
            (info.name, info.desc) = (format!("{}", pair + 1), "dp".to_owned());
            (dump, taken)
        })
        .collect();
    let report = judge(&dumps);
    assert_eq!(report.input.ranks_read, 4, "{:?}", report.problems);
    assert_eq!(report.findings, []);
}

#[test]
fn one_late_file_does_not_make_the_records_of_a_short_time_out_early() {
    let dumps: Vec<(Dump, f64)> = (0..6)
        .map(|rank| {
            let then = if rank == 5 { BEGIN + 24.0 } else { BEGIN + 4.0 };
            let mut dump = of_rank(rank, &operations(rank != 1), then, false);
            for entry in &mut dump.entries {
                entry.timeout_ms = 3500;
            }
            (dump, then)
        })
        .collect();
    let report = judge(&dumps);
    let finding = &report.findings[0];
    assert_eq!(finding.code, Code::E101, "{}", finding.sentence);
    assert_eq!(finding.culprit_ranks, [1], "{}", finding.sentence);
    let mut notes = report.problems.iter();
    assert!(
        !notes.any(|note| note.sentence.contains("taken earlier")),
        "{:?}",
        report.problems
    );
}

/// Adds a message, or the marker that closes a batch of them, 8 s before the wait begins.
fn add_message(dump: &mut Dump, (op, name): (OpType, &str), peer: Peer, state: EntryState) {
    let signature = dump.signatures.len() as u32;
    dump.signatures.push(Signature {
        op_name: name.to_owned(),
        ..dump.signatures[0].clone()
    });
    let completed_ns = match state {
        EntryState::Completed => at(BEGIN - 7.9),
        _ => 0,
    };
    let started_ns = match state {
        EntryState::Scheduled => 0,
        _ => at(BEGIN - 8.0),
    };
    dump.entries.push(Entry {
        record_id: dump.entries.len() as u64 + 1,
        p2p_seq_id: 1,
        op_id: dump.entries.len() as u64 + 1,
        signature,
        op,
        state,
        retired: completed_ns > 0,
        is_p2p: true,
        peer,
        time_created_ns: at(BEGIN - 8.0),
        time_discovered_started_ns: started_ns,
        time_discovered_completed_ns: completed_ns,
        ..dump.entries[0].clone()
    });
}

#[test]
fn a_message_that_was_answered_does_not_show_that_its_peer_was_missed_before() {
    let dumps: Vec<(Dump, f64)> = (0..6)
        .map(|rank| {
            let then = if rank == 1 { BEGIN + 2.0 } else { LATE };
            let mut calls = operations(false);
            calls.truncate(10);
            if rank >= 3 {
                calls.push((BEGIN, State::Pending));
            }
            let mut dump = of_rank(rank, &calls, then, false);
            let (send, receive) = ((OpType::Send, "send"), (OpType::Recv, "recv"));
            match rank {
                // The batch waits for rank 2 alone.
                0 => {
                    add_message(&mut dump, send, Peer::Rank(1), EntryState::Scheduled);
                    add_message(&mut dump, receive, Peer::Rank(2), EntryState::Scheduled);
                    let marker = (OpType::Coalesced, "coalesced");
                    add_message(&mut dump, marker, Peer::None, EntryState::Started);
                }
                1 => add_message(&mut dump, receive, Peer::Rank(0), EntryState::Completed),
                _ => {}
            }
            (dump, then)
        })
        .collect();
    let report = judge(&dumps);
    let confidence = highest_against(&report, 1);
    assert!(confidence <= 0.5, "{confidence} {:?}", report.findings);
}

#[test]
fn a_record_taken_long_after_a_wait_began_shows_that_its_rank_never_came() {
    for states_time in [false, true] {
        let dumps: Vec<(Dump, f64)> = (0..6)
            .map(|rank| {
                let then = if rank == 1 { BEGIN + 200.0 } else { LATE };
                let operations = operations(rank != 1);
                (of_rank(rank, &operations, then, states_time), then)
            })
            .collect();
        let report = judge(&dumps);
        assert!(highest_against(&report, 1) > 0.9, "{:?}", report.findings);
    }
}

/// The record of a rank of six that states when it was taken: an operation each second, the newest of which is pending.
fn asked_at(rank: Rank, taken: f64) -> Dump {
    let newest = taken.floor() as u32;
    let done = (0..newest).map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)));
    let operations: Vec<(f64, State)> = done.chain([(f64::from(newest), State::Pending)]).collect();
    let mut dump = of_rank(rank, &operations, taken, true);
    dump.identity.reason = "requested at its endpoint".to_owned();
    dump
}

/// When the records of a running job may have been taken, s, by rank.
const MOMENTS: [fn(Rank) -> f64; 3] = [
    |rank| 20.06 + f64::from(rank) / 100.0,
    |rank| 20.06 + 12.0 * f64::from(rank),
    |rank| if rank == 1 { 20.06 } else { 47.06 },
];

#[test]
fn dumps_that_were_asked_for_in_a_running_job_are_no_hang() {
    for taken in MOMENTS {
        let dumps: Vec<(Dump, f64)> = (0..6)
            .map(|rank| (asked_at(rank, taken(rank)), 0.0))
            .collect();
        let report = judge(&dumps);
        assert_eq!(report.findings, []);
        assert_eq!(report.verdict, Verdict::Inconclusive);
        let mut notes = report.problems.iter();
        let note = notes.find(|note| note.code == Code::N304).expect("a note");
        let age = [
            "the oldest for 60 ms when its",
            "the oldest for 110 ms when its",
        ];
        assert!(
            age.iter().any(|age| note.sentence.contains(age)),
            "{}",
            note.sentence
        );
    }
}

#[test]
fn a_file_that_was_cut_makes_no_hang_of_dumps_that_were_asked_for() {
    let verdict = |taken: f64| {
        let mut analysis = Analysis::new(Policy::default());
        for rank in 0..6 {
            let mut dump = of_rank(rank, &operations(true), taken, true);
            dump.identity.reason = "requested".to_owned();
            let extent = match rank {
                1 => {
                    // What a dump states about itself follows its operations.
                    dump.entries.pop();
                    dump.identity.dump_time_ns = 0;
                    dump.identity.reason.clear();
                    Extent::Cut
                }
                _ => Extent::Whole,
            };
            analysis.add_from("", &dump, extent);
        }
        analysis.finish().verdict
    };
    assert_eq!(verdict(BEGIN + 0.5), Verdict::Inconclusive);
    assert_eq!(verdict(BEGIN + 40.0), Verdict::Stuck);
}

#[test]
fn dumps_that_were_asked_for_are_a_hang_if_a_wait_was_long_or_a_fault_is_known() {
    let verdict = |reason: &str, taken: f64, fails_on_rank_0: bool| {
        let dumps: Vec<(Dump, f64)> = (0..6)
            .map(|rank| {
                let mut dump = of_rank(rank, &operations(rank != 1), taken, true);
                dump.identity.reason = reason.to_owned();
                if fails_on_rank_0 && rank == 0 {
                    dump = fails(dump, FailureKind::Timeout, &[1], taken);
                }
                (dump, 0.0)
            })
            .collect();
        let report = judge(&dumps);
        let named: Vec<Rank> = report
            .findings
            .iter()
            .flat_map(|it| it.culprit_ranks.clone())
            .collect();
        (report.verdict, named)
    };
    let stuck = (Verdict::Stuck, vec![1]);
    // Operations that have waited for long are a hang, whatever the reason; so are young ones if a fault was the
    // reason, or is recorded.
    assert_eq!(verdict("requested", BEGIN + 40.0, false), stuck);
    assert_eq!(verdict("signal of rank 7", BEGIN + 0.5, false), stuck);
    assert_eq!(verdict("requested", BEGIN + 0.5, true), stuck);
    assert_eq!(
        verdict("requested", BEGIN + 0.5, false),
        (Verdict::Inconclusive, vec![])
    );
}

#[test]
fn ranks_that_issued_different_operations_are_named_in_young_dumps_too() {
    let dumps: Vec<(Dump, f64)> = (0..6)
        .map(|rank| {
            let mut dump = asked_at(rank, 20.06);
            if let Some(last) = dump.entries.last_mut().filter(|_| rank == 1) {
                last.op = OpType::Broadcast;
            }
            (dump, 0.0)
        })
        .collect();
    let report = judge(&dumps);
    assert_eq!(report.verdict, Verdict::Mismatch);
    assert_eq!(report.findings[0].culprit_ranks, [1]);
}

#[test]
fn ranks_are_not_said_to_have_waited_for_longer_than_their_own_dumps_show() {
    // The dump of the rank that did not come was taken a minute after those of the ranks that wait for it.
    let dumps: Vec<(Dump, f64)> = (0..6)
        .map(|rank| {
            let taken = if rank == 1 { BEGIN + 66.0 } else { BEGIN + 6.0 };
            (of_rank(rank, &operations(rank != 1), taken, true), 0.0)
        })
        .collect();
    let report = judge(&dumps);
    let finding = &report.findings[0];
    assert_eq!(finding.culprit_ranks, [1]);
    assert!(finding.confidence > 0.9, "{:?}", finding.doubts);
    assert!(
        finding.sentence.contains("5 ranks have waited 6.0 s"),
        "{}",
        finding.sentence
    );
}
