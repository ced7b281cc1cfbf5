//! Tests verdicts on a rank that is missed for less than its time-out and waits for nothing: it may be at work.

use crate::job::{State, alive, at, record};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Analysis, Code, Finding, Policy, analyze};

/// Rank 0 of four is not in the operation that the others issued at 40 s. Before it, all ranks issued four a second;
/// with `pauses`, rank 0 came 12 s late to two of them. The time-out is 10 min.
fn missed(pauses: bool) -> Vec<Dump> {
    let of_rank = |rank: Rank| {
        let mut operations: Vec<(f64, State)> = (0..30)
            .map(|nth| {
                let second = f64::from(nth) * 0.25
                    + if pauses {
                        f64::from(nth / 10) * 12.0
                    } else {
                        0.0
                    };
                let late = pauses && rank > 0 && nth > 0 && nth % 10 == 0;
                let issued = if late { second - 12.0 } else { second };
                (issued, State::Done(second + 0.1))
            })
            .collect();
        if rank > 0 {
            operations.push((40.0, State::Pending));
        }
        let mut dump = record(rank, 4, &operations);
        for entry in &mut dump.entries {
            entry.timeout_ms = 600_000;
        }
        dump
    };
    (0..4).map(of_rank).collect()
}

fn live(pauses: bool, now: f64) -> Finding {
    let dumps: Vec<Dump> = missed(pauses)
        .into_iter()
        .map(|dump| alive(dump, now))
        .collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(&dumps, &policy).findings.remove(0)
}

/// The finding on dumps that state no time and whose files were written at this moment.
fn of_files(pauses: bool, written: f64) -> Finding {
    let mut analysis = Analysis::new(Policy::default());
    for mut dump in missed(pauses) {
        dump.recorder = Recorder::Nccl;
        dump.status = None;
        dump.signatures[0].backend = "nccl".to_owned();
        analysis.note_written(Some(at(written)));
        analysis.add(&dump);
    }
    analysis.finish().findings.remove(0)
}

/// The finding on dumps that state when they were taken.
fn of_dated(pauses: bool, taken: f64) -> Finding {
    let dumps: Vec<Dump> = missed(pauses)
        .into_iter()
        .map(|mut dump| {
            dump.recorder = Recorder::Nccl;
            dump.status = None;
            dump.signatures[0].backend = "nccl".to_owned();
            dump.identity.dump_time_ns = at(taken);
            dump
        })
        .collect();
    analyze(&dumps, &Policy::default()).findings.remove(0)
}

#[test]
fn a_rank_that_is_missed_for_a_short_time_is_named_with_a_confidence_that_grows() {
    let confidence = |finding: Finding| {
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E101, &[0][..])
        );
        let doubt = finding
            .doubts
            .iter()
            .any(|doubt| doubt.contains("a checkpoint or other work"));
        assert_eq!(doubt, finding.confidence < 0.9, "{:?}", finding.doubts);
        finding.confidence
    };
    let by_age = |seconds: f64| confidence(live(false, 40.0 + seconds));
    assert_eq!([12.0, 40.0, 70.0].map(by_age), [0.6, 0.75, 0.97]);
    let by_files = |seconds: f64| confidence(of_files(false, 40.0 + seconds));
    assert_eq!([20.0, 40.0, 600.0].map(by_files), [0.6, 0.75, 0.97]);
    let by_dumps = |seconds: f64| confidence(of_dated(false, 40.0 + seconds));
    assert_eq!([12.0, 40.0, 600.0].map(by_dumps), [0.6, 0.75, 0.97]);
}

#[test]
fn a_rank_that_paused_for_as_long_before_may_pause_again() {
    for finding in [live(true, 52.0), of_files(true, 56.0), of_dated(true, 52.0)] {
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E101, &[0][..])
        );
        assert!(finding.confidence <= 0.5, "{}", finding.confidence);
        let doubt = finding
            .doubts
            .iter()
            .find(|doubt| doubt.contains("paused for 12 s before"));
        assert!(doubt.is_some(), "{:?}", finding.doubts);
    }
    // It never paused for twice as long.
    assert!(live(true, 40.0 + 25.0).confidence > 0.5);
}

/// The confidence and the doubts of the finding on rank 0, which is missed for 12 s in the operation that rank 1 issued
/// at 40 s. Before, both ranks issued these operations. Their clocks agree.
fn missed_after(operations: &[[(f64, State); 2]]) -> (f64, String) {
    let of_rank = |rank: Rank| {
        let mut own: Vec<(f64, State)> =
            operations.iter().map(|both| both[rank as usize]).collect();
        if rank > 0 {
            own.push((40.0, State::Pending));
        }
        let mut dump = record(rank, 2, &own);
        for entry in &mut dump.entries {
            entry.timeout_ms = 600_000;
        }
        alive(dump, 52.0)
    };
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(52.0)),
        ..Policy::default()
    };
    let dumps: Vec<Dump> = (0..2).map(of_rank).collect();
    let finding = analyze(&dumps, &policy).findings.remove(0);
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E101, &[0][..])
    );
    (finding.confidence, finding.doubts.join("; "))
}

#[test]
fn a_rank_that_was_in_an_operation_or_for_which_none_waited_did_not_pause() {
    let at_once = |second: f64| [(second, State::Done(second + 0.1)); 2];
    let begin: Vec<_> = (0..8).map(|nth| at_once(f64::from(nth))).collect();
    let end = [at_once(39.0), at_once(39.5)];
    let judged =
        |between: &[[(f64, State); 2]]| missed_after(&[&begin[..], between, &end[..]].concat());
    // Rank 0 is late by 15 s.
    let paused = judged(&[
        [(24.0, State::Done(24.1)), (9.0, State::Done(24.1))],
        at_once(38.0),
    ]);
    assert_eq!(paused.0, 0.5, "{}", paused.1);
    // An operation lasts from 9 s to 38 s, and another, issued after it, ends at once.
    let inside = judged(&[[(9.0, State::Done(38.0)); 2], at_once(9.5)]);
    // All come to the next operation at 39 s, as after a compilation.
    let shared = judged(&[at_once(9.5)]);
    for (confidence, doubts) in [inside, shared] {
        assert_eq!(confidence, 0.6, "{doubts}");
        assert!(!doubts.contains("paused"), "{doubts}");
    }
}
