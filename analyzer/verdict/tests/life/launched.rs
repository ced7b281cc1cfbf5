//! Tests of verdicts that know the launcher's account of how the processes ended.

use super::*;

/// The report after the end, with a launch record.
pub(crate) fn judge_launched(dumps: &[Dump], launch: LaunchRecord) -> Report {
    let policy = Policy {
        launches: vec![launch],
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

#[test]
fn the_launcher_knows_who_asked_for_the_end() {
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &between), 1.0))
        .collect();
    let report = judge_launched(&dumps, launch(Some((15, 1.0)), &[(None, Some(15), 1.1); 2]));
    assert_eq!(report.verdict, Verdict::Cancelled);
    assert_eq!(
        end(&report),
        (
            EndKind::Cancelled,
            "all 2 ranks were terminated from outside (the launcher received SIGTERM) at 13:00:01 UTC"
        )
    );
}

#[test]
fn a_rank_that_takes_its_time_to_end_when_asked_was_no_hang() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    // Rank 1 gives its last sign of life when it is asked to end, and ends eleven seconds later.
    let dumps: Vec<Dump> = [(&waits[..], 1.6), (&between, 1.5), (&waits, 1.6)]
        .into_iter()
        .zip(0..)
        .map(|((operations, last), rank)| dead(record(rank, 3, operations), last))
        .collect();
    let ends = [1.7, 12.5, 1.7].map(|then| (None, Some(15), then));
    let report = judge_launched(&dumps, launch(Some((15, 1.5)), &ends));
    assert_eq!(report.verdict, Verdict::Cancelled, "{:?}", report.findings);
    // If the launcher receives the signal eleven seconds into this wait, the job hung before.
    let report = judge_launched(
        &dumps,
        launch(
            Some((15, 12.0)),
            &ends.map(|(code, signal, _)| (code, signal, 12.5)),
        ),
    );
    assert_eq!(report.verdict, Verdict::Stuck);
}

#[test]
fn a_stopped_rank_that_is_killed_later_than_the_others_end_hides_no_hang() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = [(&waits[..], 6.1), (&between, 1.5), (&waits, 6.1)]
        .into_iter()
        .zip(0..)
        .map(|((operations, last), rank)| dead(record(rank, 3, operations), last))
        .collect();
    // The launcher waits for two seconds before it kills.
    let ends = [(15, 6.1), (9, 8.1), (15, 6.1)].map(|(signal, then)| (None, Some(signal), then));
    let report = judge_launched(&dumps, launch(Some((15, 6.05)), &ends));
    assert_eq!(report.verdict, Verdict::Stuck, "{:?}", report.end);
    assert_eq!(report.findings[0].culprit_ranks, [1]);
}

#[test]
fn the_launcher_knows_the_exit_code_of_the_rank_that_went_first() {
    let between = [(0.0, State::Done(0.1))];
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps = [
        dead(record(0, 2, &inside), 1.2),
        dead(record(1, 2, &between), 1.0),
    ];
    let mut launch = launch(None, &[(None, Some(15), 1.4), (Some(3), None, 1.05)]);
    launch.ranks[0]
        .sent
        .push(rcomm_recorder::publish::LaunchSignal {
            signal: 15,
            time_ns: at(1.3),
        });
    let report = judge_launched(&dumps, launch);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("; it exited with code 3"), "{sentence}");
}

#[test]
fn exits_with_success_are_the_verdict_ended_whatever_the_rings_show() {
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &between), 1.0))
        .collect();
    let report = judge_launched(&dumps, launch(None, &[(Some(0), None, 1.1); 2]));
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Ended, 0));
}

#[test]
fn the_order_in_which_ranks_end_that_the_kernel_killed_for_memory_means_nothing() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = [&waits[..], &waits, &between, &waits]
        .into_iter()
        .zip(0..)
        .map(|(operations, rank)| dead(record(rank, 4, operations), 1.2))
        .collect();
    // Rank 2 used the memory, and ended last, once it was free.
    let ends = [(1, 0, 4.0), (1, 0, 4.0), (0, 9, 1.6), (0, 9, 1.3)].map(|(code, signal, then)| {
        let code = Some(code).filter(|code| *code > 0);
        (code, Some(signal).filter(|signal| *signal > 0), then)
    });
    let mut launch = launch(None, &ends);
    for rank in &mut launch.ranks[2..] {
        let end = rank.end.as_mut().expect("the rank has ended");
        end.out_of_memory = Some(true);
    }
    let report = judge_launched(&dumps, launch);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
}
