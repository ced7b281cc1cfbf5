//! Tests verdicts that know from the launcher how the processes ended.

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
fn a_program_that_aborts_its_group_because_the_launcher_was_interrupted_has_not_failed() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.3))];
    let interrupted = |aborted: f64| -> Vec<Dump> {
        let raises = |rank| {
            let dump = dead(record(rank, 2, &inside), 1.4);
            let mut dump = fails(dump, FailureKind::Abort, &[rank], aborted);
            dump.failures[0].text = "raised KeyboardInterrupt".to_owned();
            dump
        };
        (0..2).map(raises).collect()
    };
    let exits = [(Some(130), None, 1.6); 2];
    let judge = |dumps: &[Dump]| judge_launched(dumps, launch(Some((2, 1.2)), &exits));
    // A terminal sends its signal to all processes at once: a rank may note it before the launcher does.
    for aborted in [1.15, 1.3] {
        let report = judge(&interrupted(aborted));
        assert_eq!(report.verdict, Verdict::Cancelled, "{:?}", report.findings);
    }
    // A program that had aborted its group before is at fault.
    let report = judge(&interrupted(0.9));
    assert_eq!(report.verdict, Verdict::Crashed, "{:?}", report.findings);
}

#[test]
fn a_phase_that_began_when_the_launcher_was_interrupted_is_not_what_a_rank_did_before() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Failed(9.4))];
    let sentence = |since: f64| {
        let mut dumps = [
            dead(record(0, 2, &waits), 9.4),
            dead(record(1, 2, &waits[..1]), 9.3),
        ];
        let status = dumps[1].status.as_mut().expect("the record has a status");
        status.phase = "waits for a key".to_owned();
        status.phase_since_ns = at(since);
        let exits = [(Some(130), None, 9.5); 2];
        let report = judge_launched(&dumps, launch(Some((2, 9.0)), &exits));
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
        report.findings[0].sentence.clone()
    };
    assert!(sentence(0.5).contains(", phase `waits for a key`"));
    assert!(!sentence(9.2).contains("phase"));
}

#[test]
fn a_peer_that_is_lost_because_the_launcher_was_asked_to_end_has_not_failed() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.4))];
    let between = [(0.0, State::Done(0.1))];
    let lost = fails(
        dead(record(0, 2, &waits), 1.4),
        FailureKind::PeerGone,
        &[1],
        1.4,
    );
    let dumps = [lost, dead(record(1, 2, &between), 1.2)];
    let ends = [(Some(1), None, 1.5), (None, Some(15), 1.3)];
    let report = judge_launched(&dumps, launch(Some((15, 1.2)), &ends));
    assert_eq!(report.verdict, Verdict::Cancelled, "{:?}", report.findings);
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
fn after_exits_with_success_the_verdict_is_ended_whatever_the_rings_show() {
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
    // Rank 2 used the memory, and ended later than rank 3, once its memory was free.
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

/// The report on a running job, with a launch record.
fn judge_running(dumps: &[Dump], launch: LaunchRecord, now: f64) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        launches: vec![launch],
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

#[test]
fn ranks_that_exited_with_success_are_not_lost_although_they_removed_their_rings() {
    let between = [(0.0, State::Done(0.1))];
    let dumps = [alive(record(0, 4, &between), 20.0)];
    let mut launch = launch(None, &[(Some(0), None, 1.0); 4]);
    launch.ranks[0].end = None;
    let report = judge_running(&dumps, launch.clone(), 20.0);
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Healthy, 0));
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    // Others wait for rank 1, which has ended: the finding says how it ended.
    let inside = [(0.0, State::Done(0.1)), (2.0, State::Pending)];
    let dumps: Vec<Dump> = [0, 2, 3]
        .map(|rank| alive(record(rank, 4, &inside), 20.0))
        .into();
    for rank in [2, 3] {
        launch.ranks[rank].end = None;
    }
    let report = judge_running(&dumps, launch, 20.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E102, &[1][..]));
    let sentence = &report.findings[0].sentence;
    let start = "rank 1 left no readable record; it exited with code 0; 3 ranks have waited 18 s";
    assert!(sentence.starts_with(start), "{sentence}");
}

#[test]
fn a_rank_that_exits_with_success_before_its_peers_are_done_ended_first() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.1))];
    let fails = |rank| dead(record(rank, 4, &failed), 1.2);
    let ends =
        [(1, 1.5), (0, 0.9), (1, 1.5), (1, 1.5)].map(|(code, then)| (Some(code), None, then));
    let launch = launch(None, &ends);
    let dumps = [0, 2, 3].map(fails);
    for now in [3.0, 3600.0] {
        let report = judge_running(&dumps, launch.clone(), now);
        assert_eq!(
            (report.verdict, report.findings.len()),
            (Verdict::Crashed, 0)
        );
        assert_eq!(
            end(&report).1,
            "the job was over at 13:00:01 UTC: the process of rank 1 ended first; rank 1 exited with code 0"
        );
    }
    // Rank 1 left its ring, as a process that calls `_exit` does, and the others recorded that they lost it.
    let lost = |rank| job::fails(fails(rank), FailureKind::PeerGone, &[1], 1.1);
    let between = dead(record(1, 4, &failed[..1]), 0.8);
    let dumps = [lost(0), between, lost(2), lost(3)];
    let report = judge_launched(&dumps, launch);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let finding = &report.findings[0];
    for part in [
        "; it exited with code 0",
        "that of the 3 others from 13:00:01",
    ] {
        assert!(finding.sentence.contains(part), "{}", finding.sentence);
    }
    assert!(finding.next.contains("exit code 0"), "{}", finding.next);
}

#[test]
fn ranks_that_are_gone_wait_for_no_rank_without_a_record() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.1))];
    let dumps = [0, 2, 3].map(|rank| dead(record(rank, 4, &failed), 1.3));
    for now in [3.0, 3600.0] {
        let report = judge(&dumps, now);
        assert_eq!(report.verdict, Verdict::Inconclusive);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let note = &report.problems[0].sentence;
        assert_eq!(
            note,
            "rank 1 left no readable record; no process of the others is left: the last sign of life is from 13:00:01 \
             UTC; it took part in operations before, so its ring is on another host, or it left none: read the \
             records of all hosts"
        );
    }
    // A wait that was a hang while they lived stays one, of the age that it had at their end.
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps = [0, 2, 3].map(|rank| dead(record(rank, 4, &inside), 31.0));
    let report = judge(&dumps, 3600.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E102, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("3 ranks have waited 30 s"), "{sentence}");
}

#[test]
fn processes_that_abort_together_were_not_terminated_from_outside() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &inside), 1.9))
        .collect();
    // SIGKILL may come from outside, SIGABRT is a process's own.
    for (signal, verdict, expected) in [
        (
            9,
            Verdict::Cancelled,
            "all 2 ranks were terminated by SIGKILL at 13:00:02 UTC",
        ),
        (
            6,
            Verdict::Crashed,
            "all 2 ranks ended by 13:00:02 UTC, none in order; rank 0 was killed by SIGABRT",
        ),
    ] {
        let report = judge_launched(&dumps, launch(None, &[(None, Some(signal), 2.0); 2]));
        assert_eq!(report.verdict, verdict);
        assert!(end(&report).1.starts_with(expected), "{:?}", report.end);
    }
}

#[test]
fn a_launcher_that_noted_no_end_was_killed_or_stopped() {
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &between), 1.0))
        .collect();
    let mut launch = launch(None, &[(None, Some(9), 1.0); 2]);
    (launch.launcher_pid, launch.host) = (77, "n0".to_owned());
    for rank in &mut launch.ranks {
        rank.end = None;
    }
    let report = judge_running(&dumps, launch, 3600.0);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    assert_eq!(
        end(&report).1,
        "all 2 ranks' processes are gone, with the last sign of life at 13:00:01 UTC; none was in an operation, and \
         how this happened is not recorded; their launcher, process 77 on n0, noted none of these ends: it was killed \
         or stopped before them"
    );
}

#[test]
fn a_rank_that_runs_and_has_not_joined_is_named_with_its_process() {
    let dumps = [0, 1].map(|rank| alive(record(rank, 3, &[]), 20.0));
    let mut launch = launch(None, &[(None, None, 1.0); 3]);
    launch.host = "n0".to_owned();
    for rank in &mut launch.ranks {
        (rank.end, rank.pid) = (None, 100 + rank.rank);
    }
    let report = judge_running(&dumps, launch, 20.0);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let note = &report.problems[0].sentence;
    assert_eq!(
        note,
        "rank 2 left no readable record; the launcher started rank 2 as process 102 on n0 and has noted no end of it: \
         look at what it does before it joins the job (py-spy dump --pid 102)"
    );
    // Once rank 2 has ended, the note says how.
    let dumps = [0, 1].map(|rank| dead(record(rank, 3, &[]), 20.0));
    let ends = [(None, Some(15), 20.0); 3];
    let report = judge_launched(&dumps, job::launch(Some((15, 20.0)), &ends));
    assert_eq!(report.verdict, Verdict::Cancelled);
    let note = &report.problems[0].sentence;
    assert_eq!(
        note,
        "rank 2 left no readable record; rank 2 was killed by SIGTERM"
    );
}
