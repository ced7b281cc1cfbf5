//! Tests that a call that has failed is shown as failed, with its error, and not as waiting, and who is accused when
//! a rank died after a call had failed.

use crate::job::{State, alive, at, dead, fails, record};
use rcomm_recorder::model::{FailureKind, OpType, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, InstanceState, Policy, Report, Verdict, analyze, causes, status_entry};

/// A live report on three ranks, of which rank 1 was killed in the second operation. `state` is that of the operation
/// on the others.
fn judge_live(state: State) -> Report {
    let killed = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let others = [(0.0, State::Done(0.1)), (1.0, state)];
    let dump_of = |rank| match rank {
        1 => dead(record(1, 3, &killed), 1.01),
        rank => {
            let dump = alive(record(rank, 3, &others), 20.0);
            match state {
                State::Failed(when) => with_text(fails(dump, FailureKind::PeerGone, &[1], when)),
                _ => dump,
            }
        }
    };
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(20.0)),
        ..Policy::default()
    };
    analyze(&(0..3).map(dump_of).collect::<Vec<_>>(), &policy)
}

fn with_text(mut dump: Dump) -> Dump {
    for failure in &mut dump.failures {
        failure.text = "rank 1 is gone".into();
    }
    dump
}

#[test]
fn a_call_that_has_failed_is_not_counted_as_waiting() {
    let report = judge_live(State::Failed(1.04));
    assert_eq!(report.verdict, Verdict::Stuck);
    let group = &report.groups[0];
    assert_eq!((group.in_flight, group.oldest_ms), (0, None));
    for rank in [0, 2] {
        assert_eq!(report.ranks[rank].pending, 0);
        assert_eq!(report.failure(rank as u32), Some("rank 1 is gone"));
    }
    assert_eq!(report.pending().count(), 0);
    let [operation] = &report.in_flight[..] else {
        panic!("one operation is listed: {:?}", report.in_flight);
    };
    assert_eq!(operation.state, InstanceState::Failed);
    assert_eq!(operation.error.as_deref(), Some("rank 1 is gone"));
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("2 ranks were inside, too"), "{sentence}");
    assert!(report.has_failed());
    assert_eq!(report.word(), "failed");
}

/// For each rank that waits, the ranks that it waits for.
fn waits(report: &Report) -> Vec<(Rank, &[Rank])> {
    let waits = report.waits.iter();
    waits.map(|wait| (wait.rank, &wait.on[..])).collect()
}

#[test]
fn the_others_inside_wait_for_the_one_that_is_gone() {
    for state in [State::Failed(1.04), State::Pending] {
        let report = judge_live(state);
        assert_eq!(report.findings[0].victim_ranks, [0, 2]);
        assert_eq!(waits(&report), [(0, &[1][..]), (2, &[1][..])]);
    }
}

#[test]
fn ranks_that_are_still_in_a_call_wait() {
    let report = judge_live(State::Pending);
    assert_eq!(report.groups[0].in_flight, 1);
    assert_eq!(report.ranks[0].pending, 1);
    assert_eq!(report.failure(0), None);
    assert_eq!(report.in_flight[0].state, InstanceState::Running);
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("2 ranks are still there"), "{sentence}");
    assert!(!report.has_failed());
    assert_eq!(report.word(), "stuck");
}

#[test]
fn a_rank_that_went_on_after_a_time_out_and_died_is_accused() {
    // Rank 1 timed out in a group of its own with rank 2, went on with all ranks, and was killed.
    for about in [&[][..], &[2]] {
        let paced = (0..10).map(|number| 10.0 * f64::from(number));
        let done: Vec<_> = paced.map(|then| (then, State::Done(then + 0.1))).collect();
        let dumps = [0, 1, 2, 3].map(|rank| {
            if rank != 1 {
                let operations = [&done[..], &[(100.0, State::Failed(101.0))]].concat();
                let dump = record(rank, 4, &operations);
                return fails(dump, FailureKind::PeerGone, &[1], 101.0);
            }
            let side = [(0.0, State::Failed(5.0))];
            let mut dump = fails(record(rank, 4, &side), FailureKind::Timeout, about, 5.0);
            let operations = [&side[..], &done, &[(100.0, State::Pending)]].concat();
            dump.entries = record(rank, 4, &operations).entries;
            for entry in &mut dump.entries[1..] {
                entry.collective_seq_id -= 1;
            }
            let mut made = dump.groups[0].clone();
            (made.info.id, made.info.name) = (1, "1".to_owned());
            (made.info.desc, made.info.ranks) = ("side".to_owned(), [1, 2].into());
            dump.groups.push(made);
            dump.entries[0].group = 1;
            dump.failures[0].group = Some(1);
            dump
        });
        let report = analyze(&dumps, &Policy::default());
        let first = report.findings.first().expect("the report has a finding");
        assert_eq!(
            (first.code, &first.culprit_ranks[..]),
            (Code::E150, &[1][..]),
            "{about:?}: {first:?}"
        );
    }
}

#[test]
fn the_marker_that_closes_a_call_is_looked_for_among_the_next_entries_only() {
    for (between, found) in [(1_000, true), (2_000, false)] {
        let mut dump = record(0, 2, &vec![(0.0, State::Pending); between + 2]);
        for entry in &mut dump.entries {
            entry.collective_seq_id = 1;
        }
        let last = dump.entries.last_mut().expect("the dump has entries");
        last.op = OpType::Coalesced;
        let marker = last.record_id;
        let first = &dump.entries[0];
        let shown = status_entry(&dump, first).record_id;
        assert_eq!(shown == marker, found, "{between} entries between");
    }
}

#[test]
fn an_error_that_is_about_no_operation_hides_no_consequences_of_another() {
    let mut report = judge_live(State::Failed(1.04));
    report.waits.clear();
    let links = causes::consequences(&report, &[1]);
    let failed: Vec<&[Rank]> = links.iter().map(|link| &link.ranks[..]).collect();
    assert_eq!(failed, [[0, 2]]);
    let mut first = report.findings[0].clone();
    (first.group, first.seq) = (None, None);
    report.findings.insert(0, first);
    assert_eq!(causes::consequences(&report, &[1]), links);
}

/// The ranks that the first finding accuses in a job of four ranks. Rank 3 never issues the second operation. Ranks 0
/// and 1 issue it, and ranks that lost rank 2 record it; `second` is the operation of rank 1, and of rank 2 if it left
/// a record, whose process is gone or not known to be.
fn accused(second: (f64, State), of_lost: Option<bool>) -> (Code, Vec<Rank>) {
    let done = (0.0, State::Done(0.1));
    let lost = |rank, operation: (f64, State)| {
        let dump = record(rank, 4, &[done, operation]);
        match operation.1 {
            State::Failed(when) => fails(dump, FailureKind::PeerGone, &[2], when),
            _ => dump,
        }
    };
    let mut dumps = vec![
        lost(0, (30.0, State::Failed(30.1))),
        lost(1, second),
        record(3, 4, &[done]),
    ];
    if let Some(is_dead) = of_lost {
        let dump = record(2, 4, &[done, (29.9, State::Pending)]);
        dumps.push(match is_dead {
            true => dead(dump, 30.0),
            false => dump,
        });
    }
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    (finding.code, finding.culprit_ranks.clone())
}

#[test]
fn who_had_not_come_yet_is_not_blamed_for_the_loss_of_another() {
    let by_loss = (Code::E150, vec![2]);
    let soon = (29.9, State::Failed(30.1));
    for of_lost in [None, Some(true), Some(false)] {
        assert_eq!(accused(soon, of_lost), by_loss, "{of_lost:?}");
        // Rank 1 has not learned of the loss.
        let waits = (29.9, State::Pending);
        assert_eq!(accused(waits, of_lost), by_loss, "{of_lost:?}");
    }
    // Rank 1 had waited for rank 3 long before rank 2 was lost.
    let long = (1.0, State::Pending);
    assert_eq!(accused(long, None), (Code::E101, vec![3]));
}

#[test]
fn the_operation_of_a_process_that_is_gone_is_not_called_a_wait() {
    let done = (0.0, State::Done(0.1));
    let fail = |rank| {
        let dump = record(rank, 4, &[done, (1.0, State::Failed(30.1))]);
        fails(dump, FailureKind::PeerGone, &[2], 30.1)
    };
    let killed = dead(record(2, 4, &[done, (1.0, State::Pending)]), 30.0);
    let dumps = [fail(0), fail(1), killed, record(3, 4, &[done])];
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.findings[0].culprit_ranks, [3]);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains("3 ranks waited until it failed"),
        "{sentence}"
    );
}

#[test]
fn a_recorded_mismatch_explains_the_losses_that_follow_it() {
    let done = (0.0, State::Done(0.1));
    let failed = |rank, when, kind, others: &[Rank]| {
        let dump = record(rank, 3, &[done, (1.0, State::Failed(when))]);
        fails(dump, kind, others, when)
    };
    // Rank 2, whose record is lost, passed other arguments than rank 1; or rank 1 did.
    let mut dumps = [
        failed(0, 1.6, FailureKind::PeerGone, &[2]),
        failed(1, 1.1, FailureKind::Mismatch, &[2]),
    ];
    dumps[1].failures[0].text = "rank 1 passes 8 elements, rank 2 passes 9".into();
    let report = analyze(&dumps, &Policy::default());
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E150, &[][..])
    );
    assert_eq!(finding.alternatives, [[1], [2]]);
    assert_eq!(
        finding.sentence,
        "rank 1 recorded that its call differs from that of rank 2 in all_reduce #2 on group default_pg at 13:00:01 \
         UTC: rank 1 passes 8 elements, rank 2 passes 9; which of them is wrong is not known"
    );
    // A rank that was lost before did not end because of the mismatch.
    dumps[0] = failed(0, 1.05, FailureKind::PeerGone, &[2]);
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.findings[0].culprit_ranks, [2]);
}
