//! Tests verdicts on PyTorch's dumps, which state no time: the times of their files show how old they are.

use super::*;
use rcomm_recorder::publish::Recorder;
use rcomm_verdict::Analysis;

/// A dump by PyTorch's NCCL recorder, on a host whose clock is this far ahead, s.
fn by_pytorch(rank: Rank, operations: &[(f64, State)], ahead: f64) -> Dump {
    let shifted: Vec<(f64, State)> = operations
        .iter()
        .map(|&(issued, state)| {
            let state = match state {
                State::Done(then) => State::Done(then + ahead),
                other => other,
            };
            (issued + ahead, state)
        })
        .collect();
    let mut dump = record(rank, 2, &shifted);
    dump.recorder = Recorder::Nccl;
    dump.status = None;
    dump.identity.host.clear();
    dump.identity.pid = 0;
    dump.identity.world_size = None;
    dump.signatures[0].backend = "nccl".to_owned();
    dump
}

/// The report on two dumps, each with the time at which its file was written, s.
fn judge_files(dumps: &[(Dump, f64)]) -> Report {
    let mut analysis = Analysis::new(Policy::default());
    for (dump, written) in dumps {
        analysis.note_written(Some(at(*written)));
        analysis.add(dump);
    }
    analysis.finish()
}

#[test]
fn a_look_at_a_running_job_is_no_hang_if_the_clock_of_one_host_is_ahead() {
    let done: Vec<(f64, State)> = (0..10)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    let waits = [&done[..], &[(10.0, State::Pending)]].concat();
    let ahead = 40.0;
    let look = |written: f64| {
        judge_files(&[
            (by_pytorch(0, &waits, 0.0), written),
            (by_pytorch(1, &done, ahead), written + ahead),
        ])
    };
    let running = look(10.2);
    assert_eq!(running.findings, [], "{:?}", running.findings);
    assert_ne!(running.verdict, Verdict::Stuck);
    assert_eq!(
        root(&look(40.0)),
        (Verdict::Stuck, Code::E101, &[1][..]),
        "files that are half a minute younger than the wait show a hang"
    );
}

#[test]
fn the_last_sign_of_a_dead_rank_is_not_when_other_ranks_dumps_were_taken() {
    let done: Vec<(f64, State)> = (0..10)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    let waits = [&done[..], &[(10.0, State::Pending)]].concat();
    let report = judge_files(&[
        (by_pytorch(0, &waits, 0.0), 40.0),
        (dead(record(1, 2, &done), 10.2), 40.0),
    ]);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
    let finding = &report.findings[0];
    let since = finding.since.as_ref().map(ToString::to_string);
    let since = since.expect("the finding states since when");
    assert!(!since.contains("before the records were taken"), "{since}");
    assert!(!finding.sentence.contains(" for "), "{}", finding.sentence);
}

#[test]
fn an_operation_that_only_some_ranks_completed_is_no_healthy_job() {
    let done = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let judge = |written: f64| {
        judge_files(&[
            (by_pytorch(0, &done, 0.0), written),
            (by_pytorch(1, &inside, 0.0), written),
        ])
    };
    let late = judge(60.0);
    assert_eq!(
        (late.verdict, &late.findings[..]),
        (Verdict::Inconclusive, &[][..])
    );
    let mut notes = late
        .problems
        .iter()
        .map(|problem| problem.sentence.as_str());
    let expected = "is unfinished in the record of rank 1, and others completed it 60 s before";
    assert!(
        notes.any(|note| note.contains(expected)),
        "{:?}",
        late.problems
    );
    // The watchdog of rank 1 had not noticed the completion yet.
    let soon = judge(2.0);
    assert_eq!(
        (soon.verdict, soon.findings.len()),
        (Verdict::Healthy, 0),
        "{:?}",
        soon.problems
    );
}

#[test]
fn a_rank_with_nothing_pending_beside_a_much_earlier_dump_is_no_healthy_job() {
    let early = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let done: Vec<(f64, State)> = (0..10)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    // Rank 1 may hang since 9 s, and rank 0 wait for it since then.
    let judge = |written: f64| {
        judge_files(&[
            (by_pytorch(0, &early, 0.0), 1.2),
            (by_pytorch(1, &done, 0.0), written),
        ])
    };
    let report = judge(60.0);
    assert_eq!(
        (report.verdict, report.findings.len()),
        (Verdict::Inconclusive, 0)
    );
    let mut notes = report
        .problems
        .iter()
        .map(|problem| problem.sentence.as_str());
    let expected = "the record of rank 0 was taken earlier";
    assert!(
        notes.any(|note| note.starts_with(expected)),
        "{:?}",
        report.problems
    );
    assert_eq!(judge(9.5).verdict, Verdict::Healthy);
}

#[test]
fn a_look_at_a_running_job_is_no_hang_if_no_operation_relates_the_clocks() {
    // Only unfinished operations are in the dumps, and the clock of rank 1 is an hour ahead.
    let report = judge_files(&[
        (by_pytorch(0, &[(10.0, State::Pending)], 0.0), 10.3),
        (by_pytorch(1, &[(10.0, State::Pending)], 3600.0), 3610.3),
    ]);
    assert_eq!(report.findings, [], "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
}

#[test]
fn a_rank_that_may_still_be_inside_an_operation_is_not_said_to_have_an_early_record() {
    let done: Vec<(f64, State)> = (0..5)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    // Rank 0 completed #5 and waits in #6; all files are of one moment.
    let waits = [&done[..], &[(5.0, State::Pending)]].concat();
    let inside = [&done[..4], &[(4.0, State::Pending)]].concat();
    for written in [60.0, 700.0] {
        let report = judge_files(&[
            (by_pytorch(0, &waits, 0.0), written),
            (by_pytorch(1, &inside, 0.0), written),
        ]);
        assert_eq!(report.verdict, Verdict::Inconclusive);
        let notes: Vec<&str> = report
            .problems
            .iter()
            .map(|problem| problem.sentence.as_str())
            .collect();
        let says = |text| notes.iter().any(|note| note.contains(text));
        assert!(
            says("is unfinished in the record of rank 1, and others completed it"),
            "{notes:?}"
        );
        assert!(!says("was taken earlier than the others'"), "{notes:?}");
    }
}

#[test]
fn records_with_the_highest_sequence_numbers_are_read() {
    let done = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let waits = [&done[..], &[(2.0, State::Pending)]].concat();
    for above in [0, 1] {
        let of_rank = |rank: Rank, operations: &[(f64, State)]| {
            let mut dump = by_pytorch(rank, operations, 0.0);
            for entry in &mut dump.entries {
                // The newest operation that both completed has the highest number of 32 bits, or one more.
                entry.collective_seq_id += u64::from(u32::MAX) - 2 + above;
            }
            (dump, 60.0)
        };
        let report = judge_files(&[of_rank(0, &waits), of_rank(1, &done)]);
        assert_eq!(report.input.ranks_read, 2);
    }
}

#[test]
fn of_two_worlds_of_which_all_ranks_left_files_the_one_that_left_them_last_is_judged() {
    // The ranks of one job hang from 1 s on. Those of the other, older job issued their last operations later.
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let ended: Vec<(f64, State)> = (0..6)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    let older = (0..3).map(|rank| {
        let mut dump = by_pytorch(rank, &ended, 0.0);
        dump.groups[0].info.ranks = (0..3).collect();
        (dump, 6.0)
    });
    let mut dumps: Vec<(Dump, f64)> = older.collect();
    dumps.push((by_pytorch(0, &waits, 0.0), 200.0));
    dumps.push((by_pytorch(1, &waits[..1], 0.0), 200.0));
    assert_eq!(
        root(&judge_files(&dumps)),
        (Verdict::Stuck, Code::E101, &[1][..])
    );
    // Copies are all written at one time.
    for (_, written) in &mut dumps {
        *written = 200.0;
    }
    assert_eq!(judge_files(&dumps).input.ranks_read, 3);
}

#[test]
fn undated_dumps_of_which_one_was_taken_earlier_prove_no_rank_missing() {
    let done: Vec<(f64, State)> = (0..10)
        .map(|second| (f64::from(second), State::Done(f64::from(second) + 0.1)))
        .collect();
    let waits = [&done[..], &[(10.0, State::Pending)]].concat();
    let of_three = |rank, ops: &[(f64, State)]| {
        let mut dump = by_pytorch(rank, ops, 0.0);
        dump.groups[0].info.ranks = (0..3).collect();
        dump
    };
    let confidence = |third: &[(f64, State)]| {
        let dumps = [of_three(0, &waits), of_three(1, &done), of_three(2, third)];
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
        report.findings[0].confidence
    };
    assert!(confidence(&waits) > 0.9);
    assert!(confidence(&done[..7]) <= 0.5);
}
