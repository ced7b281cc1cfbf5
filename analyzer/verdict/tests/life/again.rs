//! Tests verdicts on a job that was started again under its name, beside the rings of its earlier run.

use super::*;

const JOB: &str = "train-77";

/// The earlier run, of `ranks` ranks: rank 1 was stuck when all were killed.
fn earlier_run(ranks: Rank) -> Vec<Dump> {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let dump_of = |rank| {
        let operations = if rank == 1 { &between[..] } else { &waits };
        with_job_name(dead(record(rank, ranks, operations), 16.0))
    };
    (0..ranks).map(dump_of).collect()
}

fn with_job_name(mut dump: Dump) -> Dump {
    dump.identity.job = JOB.to_owned();
    dump
}

/// The launch record of the newest run, which started at 13:00:20 UTC on the host of the records.
fn started_again(ends: &[(Option<i32>, Option<i32>, f64)], ranks: Rank) -> LaunchRecord {
    let mut launch = launch(None, ends);
    launch.job = JOB.to_owned();
    launch.host = "n0".to_owned();
    launch.started_ns = at(20.0);
    launch.world_size = ranks;
    for rank in &mut launch.ranks {
        rank.pid = 500 + rank.rank;
    }
    launch
}

/// Which records were left aside because the job was started again; empty if none were.
fn left_aside(report: &Report) -> &str {
    let again = "before job train-77 was started again at 13:00:20 UTC";
    let mut problems = report.problems.iter();
    let note = problems.find(|note| note.code == Code::N300 && note.sentence.contains(again));
    let whose = note.and_then(|note| note.sentence.split_once(" left aside: "));
    whose.map_or("", |(records, _)| records)
}

#[test]
fn a_run_that_ended_well_is_not_joined_with_the_rings_of_the_run_before() {
    let well = (Some(0), None, 30.0);
    // The newest run may have another number of ranks, whatever a source counted in the rings.
    for (ranks, sentence) in [
        (4, "all 4 ranks ended in order, the last at 13:00:30 UTC"),
        (3, "all 3 ranks ended in order, the last at 13:00:30 UTC"),
        (8, "all 8 ranks ended in order, the last at 13:00:30 UTC"),
    ] {
        let ends = vec![well; ranks as usize];
        for (snapshot, world_size) in [(false, None), (true, Some(4))] {
            let policy = Policy {
                snapshot,
                now_ns: snapshot.then(|| at(40.0)),
                world_size,
                launches: vec![started_again(&ends, ranks)],
                ..Policy::default()
            };
            let report = analyze(&earlier_run(4), &policy);
            assert_eq!(report.verdict, Verdict::Ended, "{:?}", report.findings);
            let (how, sentence_of_end) = end(&report);
            assert_eq!(how, EndKind::Ended);
            let rings =
                "; no ring of this run is left, since ranks that end in order remove theirs";
            assert_eq!(sentence_of_end.strip_suffix(rings), Some(sentence));
            assert_eq!(left_aside(&report), "the records of ranks 0-3 were");
        }
    }
}

#[test]
fn ranks_that_start_again_do_not_wait_for_a_process_of_the_run_before() {
    let done = [(21.0, State::Done(21.1))];
    // Ranks 0 to 2 have made their rings, rank 3 has not.
    let mut dumps: Vec<Dump> = (0..3)
        .map(|rank| with_job_name(alive(record(rank, 4, &[]), 29.0)))
        .collect();
    dumps.extend(earlier_run(4).pop());
    let mut launch = started_again(&[(None, None, 0.0); 4], 4);
    launch.ranks.iter_mut().for_each(|rank| rank.end = None);
    let judge = |dumps: &[Dump], launch: &LaunchRecord| {
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(29.0)),
            launches: vec![launch.clone()],
            ..Policy::default()
        };
        analyze(dumps, &policy)
    };
    let report = judge(&dumps, &launch);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    assert_eq!(left_aside(&report), "the record of rank 3 was");
    assert_eq!(report.input.ranks_read, 3);
    // A smaller run is judged by itself, although the earlier one has more records, and made more attempts.
    let mut dumps: Vec<Dump> = earlier_run(4).into_iter().skip(2).collect();
    for dump in &mut dumps {
        dump.identity.attempt = 2;
    }
    dumps.extend((0..2).map(|rank| with_job_name(alive(record(rank, 2, &done), 29.0))));
    launch.ranks.truncate(2);
    launch.world_size = 2;
    let report = judge(&dumps, &launch);
    assert_eq!(report.verdict, Verdict::Healthy, "{:?}", report.findings);
    let input = &report.input;
    assert_eq!((input.ranks_expected, input.ranks_read), (2, 2));
}

#[test]
fn a_world_with_living_processes_comes_before_a_more_complete_one_without() {
    let done = [(21.0, State::Done(21.1))];
    let mut dumps: Vec<Dump> = earlier_run(4).into_iter().skip(1).collect();
    // Rank 2 of the newest run, of three ranks, has replaced the ring of the earlier run; the others have not yet.
    dumps.remove(1);
    dumps.push(with_job_name(alive(record(2, 3, &done), 29.0)));
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(29.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    let input = &report.input;
    assert_eq!((input.ranks_expected, input.ranks_read), (3, 1));
}

#[test]
fn records_of_this_run_and_of_other_hosts_stay() {
    let well = (Some(0), None, 30.0);
    let mut launch = started_again(&[well; 4], 4);
    // The launch is that of the records, with other process ids: a rank may be a child of the process that the launcher
    // started.
    launch.started_ns = at(-1.0);
    let report = judge_launched(&earlier_run(4), launch.clone());
    assert_eq!(left_aside(&report), "");
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    // Clocks of other hosts show nothing.
    launch.started_ns = at(20.0);
    launch.host = "n1".to_owned();
    let report = judge_launched(&earlier_run(4), launch.clone());
    assert_eq!(left_aside(&report), "");
    // Nor does another job.
    launch.host = "n0".to_owned();
    launch.job = "train-78".to_owned();
    let report = judge_launched(&earlier_run(4), launch);
    assert_eq!(left_aside(&report), "");
}

#[test]
fn a_launch_that_ended_does_not_end_later_processes_of_its_job() {
    // The newest run was started without the launcher.
    let waits = [(40.0, State::Done(40.1)), (41.0, State::Pending)];
    let between = [(40.0, State::Done(40.1))];
    let dumps = [
        with_job_name(alive(record(0, 2, &waits), 61.0)),
        with_job_name(alive(record(1, 2, &between), 61.0)),
    ];
    let launch = started_again(&[(Some(0), None, 30.0); 2], 2);
    let report = judge_launched(&dumps, launch);
    assert_eq!(report.end, None);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

/// The dump with this time, s, as that at which its ring was made.
fn begun(mut dump: Dump, seconds: f64) -> Dump {
    dump.identity.begun_ns = at(seconds);
    dump
}

/// The ranks of the run that began at 20 s, each alive at 29 s after one operation.
fn newer_run(ranks: std::ops::Range<Rank>, size: Rank) -> impl Iterator<Item = Dump> {
    let done = [(21.0, State::Done(21.1))];
    ranks.map(move |rank| begun(with_job_name(alive(record(rank, size, &done), 29.0)), 20.0))
}

fn judge_live(dumps: &[Dump], world_size: u32) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(29.0)),
        // A source counts the ranks in all rings.
        world_size: Some(world_size),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

#[test]
fn without_a_launcher_the_rings_of_the_run_before_are_recognized_by_their_times() {
    // Rank 3 of the newest run has not made its ring yet, or the newest run has only three ranks.
    for size in [4, 3] {
        let mut dumps: Vec<Dump> = newer_run(0..3, size).collect();
        dumps.extend(earlier_run(4).pop().map(|dump| begun(dump, -1.0)));
        let report = judge_live(&dumps, 4);
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let expected = match size {
            3 => Verdict::Healthy,
            _ => Verdict::Inconclusive,
        };
        assert_eq!(report.verdict, expected, "{size}");
        assert_eq!(report.input.ranks_expected, size as usize);
        assert_eq!(report.input.ranks_read, 3);
        let aside = "the record of rank 3 was left aside: its newest sign of life is from 13:00:16 UTC, before the \
                     first of the others began, at 13:00:20 UTC";
        let mut problems = report.problems.iter();
        assert!(
            problems.any(|note| note.sentence.starts_with(aside)),
            "{:?}",
            report.problems
        );
    }
}

#[test]
fn another_job_beside_a_run_that_was_started_again_does_not_state_its_size() {
    let earlier = earlier_run(4).into_iter();
    let mut dumps: Vec<Dump> = earlier.map(|dump| begun(dump, -1.0)).collect();
    dumps.extend(newer_run(0..2, 2));
    let mut other = alive(record(7, 8, &[(21.0, State::Done(21.1))]), 29.0);
    other.identity.job = "another".to_owned();
    dumps.push(begun(other, 20.0));
    let report = judge_live(&dumps, 4);
    assert_eq!(report.input.ranks_expected, 2, "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Healthy, "{:?}", report.findings);
}

#[test]
fn the_closing_of_a_ring_is_its_newest_sign_of_life() {
    let mut dumps: Vec<Dump> = newer_run(0..3, 4).collect();
    let done = [(0.0, State::Done(0.1))];
    // The newest heartbeat is from 16 s.
    let mut earlier = closed(with_job_name(record(3, 4, &done)), 16.0);
    earlier.closed_ns = at(17.0);
    dumps.push(begun(earlier, -1.0));
    let report = judge_live(&dumps, 4);
    let aside =
        "its newest sign of life is from 13:00:17 UTC, before the first of the others began";
    let mut problems = report.problems.iter();
    assert!(
        problems.any(|note| note.sentence.contains(aside)),
        "{:?}",
        report.problems
    );
}

#[test]
fn one_note_names_all_ranks_whose_records_were_left_aside() {
    let mut analysis = rcomm_verdict::Analysis::new(Policy {
        snapshot: true,
        now_ns: Some(at(29.0)),
        ..Policy::default()
    });
    for (index, dump) in newer_run(0..4, 4).enumerate() {
        analysis.add_from(&format!("new/{index}"), &dump, Extent::Whole);
    }
    for (index, dump) in earlier_run(4).into_iter().enumerate() {
        analysis.add_from(&format!("old/{index}"), &begun(dump, -1.0), Extent::Whole);
    }
    let report = analysis.finish();
    let notes: Vec<_> = report
        .problems
        .iter()
        .filter(|problem| problem.code == Code::N300)
        .collect();
    let [note] = notes.as_slice() else {
        panic!("one note, {notes:?}");
    };
    assert!(
        note.sentence
            .starts_with("the records of ranks 0-3 were left aside: their newest"),
        "{note:?}"
    );
    let paths: Vec<&str> = note.paths().collect();
    assert_eq!(paths, ["old/0", "old/1", "old/2", "old/3"]);
}

#[test]
fn a_rank_that_died_while_the_others_lived_is_of_their_run() {
    let mut dumps: Vec<Dump> = earlier_run(4)
        .into_iter()
        .map(|dump| begun(dump, -1.0))
        .collect();
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    // A ring may be made late, while the others live.
    dumps[0] = begun(with_job_name(alive(record(0, 4, &waits), 29.0)), 5.0);
    let report = judge_live(&dumps, 4);
    assert_eq!(report.input.ranks_read, 4);
}

#[test]
fn clocks_of_several_hosts_tell_runs_apart_only_roughly() {
    let of_other_host = |ended: f64| {
        let mut dump = with_job_name(dead(
            record(3, 4, &[(ended - 1.0, State::Done(ended))]),
            ended,
        ));
        dump.identity.host = "n1".to_owned();
        begun(dump, ended - 2.0)
    };
    for (ended, read) in [(0.0, 4), (-60.0, 3)] {
        let mut dumps: Vec<Dump> = newer_run(0..3, 4).collect();
        dumps.push(of_other_host(ended));
        assert_eq!(judge_live(&dumps, 4).input.ranks_read, read, "{ended}");
    }
}

#[test]
fn the_end_of_a_job_says_which_attempt_it_was_and_which_has_begun() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let last = |rank: Rank| if rank == 1 { 1.5 } else { 4.0 };
    let crashed = |attempt: u32, later: Option<(u32, &[Rank])>| {
        let dumps = (0..4).map(|rank| {
            let mut dump = with_job_name(dead(record(rank, 4, &waits), last(rank)));
            dump.identity.attempt = attempt;
            dump
        });
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(12.0)),
            later_attempt: later.map(|(attempt, ranks)| LaterAttempt {
                attempt,
                ranks: ranks.to_vec(),
            }),
            ..Policy::default()
        };
        let report = analyze(&dumps.collect::<Vec<_>>(), &policy);
        assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
        let sentences = [&report.findings[0].sentence, end(&report).1];
        sentences.map(|sentence| {
            let (before, sentence) = sentence.split_once(": ").unwrap_or_default();
            let (_, after) = sentence.split_once("; this was ").unwrap_or_default();
            match before.starts_with("attempt") {
                true => before.to_owned(),
                false => after.to_owned(),
            }
        })
    };
    let both = |expected: &str| [expected.to_owned(), expected.to_owned()];
    assert_eq!(crashed(0, None), both(""));
    assert_eq!(crashed(2, None), both("attempt 2"));
    assert_eq!(
        crashed(0, Some((1, &[0, 1, 2, 3]))),
        both("attempt 1 has begun, and ranks 0-3 run and have no ring yet; of attempt 0")
    );
    assert_eq!(
        crashed(1, Some((2, &[3]))),
        both("attempt 2 has begun, and rank 3 runs and has no ring yet; of attempt 1")
    );
    // An attempt that is not later has nothing to do with the end.
    assert_eq!(crashed(1, Some((1, &[3]))), both("attempt 1"));
}
