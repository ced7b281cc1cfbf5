//! Tests of verdicts on a job that was started again under its name, beside the rings of its earlier run.

use super::*;

const JOB: &str = "train-77";

/// The earlier run, of `ranks` ranks: rank 1 was stuck when all were killed.
fn earlier(ranks: Rank) -> Vec<Dump> {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let of = |rank| {
        let operations = if rank == 1 { &between[..] } else { &waits };
        named(dead(record(rank, ranks, operations), 16.0))
    };
    (0..ranks).map(of).collect()
}

fn named(mut dump: Dump) -> Dump {
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

/// The number of records that were left aside because the job was started again.
fn left_aside(report: &Report) -> usize {
    let again = "before job train-77 was started again at 13:00:20 UTC";
    let problems = report.problems.iter();
    problems
        .filter(|it| it.code == Code::N300 && it.sentence.contains(again))
        .count()
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
            let report = analyze(&earlier(4), &policy);
            assert_eq!(report.verdict, Verdict::Ended, "{:?}", report.findings);
            assert_eq!(end(&report), (EndKind::Ended, sentence));
            assert_eq!(left_aside(&report), 4);
        }
    }
}

#[test]
fn ranks_that_start_again_do_not_wait_for_a_process_of_the_run_before() {
    let done = [(21.0, State::Done(21.1))];
    // Ranks 0 to 2 have made their rings, rank 3 has not.
    let mut dumps: Vec<Dump> = (0..3)
        .map(|rank| named(alive(record(rank, 4, &[]), 29.0)))
        .collect();
    dumps.extend(earlier(4).pop());
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
    assert_eq!((left_aside(&report), report.input.ranks_read), (1, 3));
    // A smaller run is judged by itself, although the earlier one has more records, and made more attempts.
    let mut dumps: Vec<Dump> = earlier(4).into_iter().skip(2).collect();
    for dump in &mut dumps {
        dump.identity.attempt = 2;
    }
    dumps.extend((0..2).map(|rank| named(alive(record(rank, 2, &done), 29.0))));
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
    let mut dumps: Vec<Dump> = earlier(4).into_iter().skip(1).collect();
    // Rank 2 of the newest run, of three ranks, has replaced the ring of the earlier run; the others have not yet.
    dumps.remove(1);
    dumps.push(named(alive(record(2, 3, &done), 29.0)));
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
    // The run of the records: a rank may be a child of the process that the launcher started.
    launch.started_ns = at(-1.0);
    let report = judge_launched(&earlier(4), launch.clone());
    assert_eq!(left_aside(&report), 0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    // Clocks of other hosts show nothing.
    launch.started_ns = at(20.0);
    launch.host = "n1".to_owned();
    let report = judge_launched(&earlier(4), launch.clone());
    assert_eq!(left_aside(&report), 0);
    // Nor does another job.
    launch.host = "n0".to_owned();
    launch.job = "train-78".to_owned();
    let report = judge_launched(&earlier(4), launch);
    assert_eq!(left_aside(&report), 0);
}

#[test]
fn a_launch_that_ended_does_not_end_later_processes_of_its_job() {
    // The newest run was started without the launcher.
    let waits = [(40.0, State::Done(40.1)), (41.0, State::Pending)];
    let between = [(40.0, State::Done(40.1))];
    let dumps = [
        named(alive(record(0, 2, &waits), 61.0)),
        named(alive(record(1, 2, &between), 61.0)),
    ];
    let launch = started_again(&[(Some(0), None, 30.0); 2], 2);
    let report = judge_launched(&dumps, launch);
    assert_eq!(report.end, None);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}
