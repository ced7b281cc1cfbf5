//! Tests the verdicts on how a job lives and ends, from the rings of its ranks.

mod again;
mod at_once;
mod beside;
mod causes;
mod early_files;
mod exchanges;
mod failed;
mod few_dumps;
mod file_times;
mod goes_on;
mod job;
mod joined;
mod last_to_wait;
mod launched;
mod left;
mod links;
mod pauses;
mod quiet;
mod stopped;
mod then;
mod timed_out;
mod together;
mod two_runs;
mod unmade;
mod unnoted;
mod unproven;
mod unsure;
mod windows;

use job::{State, alive, at, closed, dead, fails, launch, record};
use launched::judge_launched;
use rcomm_recorder::model::{Failure, FailureKind, ProcessExit, Rank};
use rcomm_recorder::publish::{Dump, LaunchRecord};
use rcomm_verdict::{Code, EndKind, Extent, LaterAttempt, Policy, Report, Verdict, analyze};

/// The report, which must be the same post mortem and live.
fn judge(dumps: &[Dump], now: f64) -> Report {
    let after = analyze(dumps, &Policy::default());
    let live = analyze(
        dumps,
        &Policy {
            snapshot: true,
            now_ns: Some(at(now)),
            ..Policy::default()
        },
    );
    assert_eq!(after, live);
    after
}

/// The verdict, and the code and the culprits of the first finding.
fn root(report: &Report) -> (Verdict, Code, &[Rank]) {
    let first = report.findings.first().expect("the report has a finding");
    (report.verdict, first.code, &first.culprit_ranks)
}

/// How the job ended, and the sentence that states it.
fn end(report: &Report) -> (EndKind, &str) {
    let end = report.end.as_ref().expect("the job is over");
    (end.how, &end.sentence)
}

#[test]
fn a_job_that_closed_its_records_has_ended() {
    let operations = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let dumps: Vec<Dump> = (0..3)
        .map(|rank| closed(record(rank, 3, &operations), 2.0 + f64::from(rank)))
        .collect();
    let report = judge(&dumps, 3600.0);
    assert_eq!(report.verdict, Verdict::Ended);
    assert_eq!(report.exit_code(), 0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(
        end(&report),
        (
            EndKind::Ended,
            "all 3 ranks ended in order, the last at 13:00:04 UTC"
        )
    );
}

#[test]
fn a_job_that_was_terminated_in_the_middle_is_no_hang() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let between = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = [&inside[..], &inside, &between]
        .iter()
        .zip(0..)
        .map(|(operations, rank)| dead(record(rank, 3, operations), 1.2 + f64::from(rank) / 10.0))
        .collect();
    let report = judge(&dumps, 3600.0);
    assert_eq!(report.verdict, Verdict::Cancelled);
    assert_eq!(report.exit_code(), 0);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(
        end(&report),
        (
            EndKind::Cancelled,
            "all 3 ranks ended together at 13:00:01 UTC, none in order: they were probably terminated from outside; \
             ranks 0 and 1 were inside all_reduce #2 on group default_pg"
        )
    );
}

#[test]
fn a_wait_of_unknown_age_is_no_sure_hang_when_the_job_was_terminated() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let late = [(0.0, State::Done(0.1))];
    let ranks = [&waits[..], &late, &waits].into_iter().zip(0..);
    let dumps: Vec<Dump> = ranks
        .map(|(operations, rank)| {
            let mut dump = dead(record(rank, 3, operations), 1.2);
            // A recorder without a watchdog gives no signs of life.
            dump.status = None;
            dump
        })
        .collect();
    let report = judge(&dumps, 100.0);
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E101, &[1][..])
    );
    assert!(finding.confidence <= 0.5, "{}", finding.confidence);
    assert!(
        finding
            .doubts
            .iter()
            .any(|doubt| doubt.contains("terminated while they worked")),
        "{:?}",
        finding.doubts
    );
}

#[test]
fn a_hang_that_was_cancelled_keeps_its_cause_and_its_age() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let late = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = [&waits[..], &late, &waits]
        .iter()
        .zip(0..)
        .map(|(operations, rank)| dead(record(rank, 3, operations), 21.0))
        .collect();
    let report = judge(&dumps, 3600.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.starts_with(
            "rank 1 never issued all_reduce #2 on group default_pg; 2 ranks have waited 20 s"
        ),
        "{sentence}"
    );
    assert!(
        sentence.ends_with("; then all processes ended together, the last at 13:00:21 UTC"),
        "{sentence}"
    );
    assert_eq!(report.findings[0].age_ms, None, "nothing ages any more");
    assert_eq!(report.exit_code(), 1);
}

#[test]
fn a_rank_that_was_missed_for_seconds_may_have_been_at_work_also_if_the_job_was_cancelled_then() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps: Vec<Dump> = [&waits[..], &waits[..1], &waits]
        .iter()
        .zip(0..)
        .map(|(operations, rank)| dead(record(rank, 3, operations), 9.0))
        .collect();
    let report = judge(&dumps, 3600.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    assert!(finding.confidence <= 0.75, "{finding:?}");
    let expected =
        "rank 1 waited in no operation: a checkpoint or other work of the program looks the same";
    assert!(
        finding
            .doubts
            .iter()
            .any(|doubt| doubt.starts_with(expected)),
        "{finding:?}"
    );
}

#[test]
fn a_rank_that_was_killed_inside_an_operation_leads_before_those_that_failed_by_it() {
    let killed = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let fails = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.04))];
    let dump_of = |rank| match rank {
        1 => dead(record(1, 3, &killed), 1.01),
        rank => dead(record(rank, 3, &fails), 1.1),
    };
    let report = judge(&(0..3).map(dump_of).collect::<Vec<_>>(), 3600.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    assert_eq!(report.exit_code(), 1);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains("inside all_reduce #2 on group default_pg"),
        "{sentence}"
    );
    let end = report.end.as_ref().expect("the job is over");
    assert_eq!((end.how, &end.first_ranks), (EndKind::Crashed, &vec![1]));
}

#[test]
fn the_rank_that_went_first_leads_where_the_others_waited_for_it() {
    let gone = [(0.0, State::Done(0.1))];
    let waited = [(0.0, State::Done(0.1)), (1.0, State::Failed(31.0))];
    let dump_of = |rank| match rank {
        2 => dead(record(2, 4, &gone), 0.9),
        rank => dead(record(rank, 4, &waited), 31.5),
    };
    let report = judge(&(0..4).map(dump_of).collect::<Vec<_>>(), 3600.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[2][..]));
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
}

#[test]
fn ranks_that_died_of_a_time_out_are_not_the_cause() {
    let waited = [(0.0, State::Done(0.1)), (1.0, State::Failed(31.0))];
    let late = [(0.0, State::Done(0.1))];
    let dump_of = |rank| match rank {
        1 => dead(record(1, 3, &late), 35.0),
        rank => dead(record(rank, 3, &waited), 31.5),
    };
    let report = judge(&(0..3).map(dump_of).collect::<Vec<_>>(), 3600.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains("first the processes of ranks 0 and 2, all by 13:00:35 UTC"),
        "{sentence}"
    );
}

#[test]
fn how_a_job_ended_is_unknown_if_its_processes_are_gone_between_operations() {
    let operations = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..3)
        .map(|rank| dead(record(rank, 3, &operations), f64::from(rank) * 20.0 + 1.0))
        .collect();
    let report = judge(&dumps, 3600.0);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    assert_eq!(end(&report).0, EndKind::Unknown);
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(report.exit_code(), 2);
}

#[test]
fn while_a_process_lives_the_job_is_not_over_and_an_end_is_judged_once_it_has_settled() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let judge_at = |now: f64| {
        let dump_of = |rank| match rank {
            1 => dead(record(1, 3, &inside), 1.01),
            rank => alive(record(rank, 3, &inside), now),
        };
        let dumps: Vec<Dump> = (0..3).map(dump_of).collect();
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(now)),
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    // The others may be about to end as well.
    let soon = judge_at(1.5);
    assert_eq!((soon.verdict, soon.findings.len()), (Verdict::Running, 0));
    let report = judge_at(2.5);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
    assert!(report.end.is_none());
}

#[test]
fn a_rank_that_ended_inside_an_operation_waits_for_no_rank_that_may_still_come() {
    let done = (0.0, State::Done(0.1));
    // Rank 1 was killed in the operation just after it had arrived; rank 2 has not arrived yet.
    let dumps = [
        alive(record(0, 3, &[done, (1.0, State::Pending)]), 2.5),
        dead(record(1, 3, &[done, (1.0, State::Pending)]), 1.01),
        alive(record(2, 3, &[done]), 2.5),
    ];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(2.5)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
}

#[test]
fn a_job_is_not_over_if_a_rank_left_no_record() {
    let inside = [(0.0, State::Pending)];
    let dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 3, &inside), 1.0))
        .collect();
    assert!(analyze(&dumps, &Policy::default()).end.is_none());
}

#[test]
fn an_end_is_not_judged_before_the_launcher_has_recorded_all_ranks() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |rank| dead(record(rank, 3, &inside), 1.1 + f64::from(rank) / 10.0);
    let dumps: Vec<Dump> = (0..3).map(dump_of).collect();
    let killed = |then| (None, Some(9), then);
    let mut launch = launch(None, &[killed(1.1), killed(1.2), killed(1.3)]);
    let ends: Vec<_> = launch.ranks.iter().map(|rank| rank.end).collect();
    let mut judge_with = |noted: usize, now: f64| {
        for (index, rank) in launch.ranks.iter_mut().enumerate() {
            rank.end = ends[index].filter(|_| index < noted);
        }
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(now)),
            launches: vec![launch.clone()],
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    // The end of rank 0 alone looks like that of the rank that went first.
    for noted in [0, 1, 2] {
        let report = judge_with(noted, 2.2);
        assert_eq!((report.verdict, report.end), (Verdict::Running, None));
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
    assert_eq!(judge_with(3, 2.2).verdict, Verdict::Cancelled);
    // A launcher that was killed together with its ranks records no further end.
    assert_eq!(judge_with(0, 2.4).verdict, Verdict::Cancelled);
}

#[test]
fn a_rank_that_gave_up_and_ended_is_no_cause_when_the_missing_one_comes_then() {
    let waited = [(0.0, State::Done(0.1)), (1.0, State::Failed(31.0))];
    let late = [(0.0, State::Done(0.1)), (35.0, State::Failed(35.1))];
    let dumps = [
        fails(
            dead(record(0, 2, &waited), 31.5),
            FailureKind::Timeout,
            &[1],
            31.0,
        ),
        fails(
            dead(record(1, 2, &late), 35.2),
            FailureKind::Abort,
            &[0],
            35.1,
        ),
    ];
    let exits = [(Some(1), None, 31.6), (Some(1), None, 35.3)];
    let report = judge_launched(&dumps, launch(None, &exits));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn the_fabric_is_not_blamed_before_it_has_had_time() {
    let judge_at = |now: f64| {
        let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
        let late = [(0.0, State::Done(0.1)), (8.0, State::Pending)];
        let dumps = [
            alive(record(0, 2, &waits), now),
            alive(record(1, 2, &late), now),
        ];
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(now)),
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    // Rank 0 has waited for seven seconds, but for rank 1.
    let soon = judge_at(8.1);
    assert_eq!((soon.verdict, soon.findings.len()), (Verdict::Running, 0));
    let report = judge_at(13.1);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E135, &[][..]));
}

#[test]
fn survivors_prove_that_a_rank_is_gone_that_left_no_record() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.1))];
    let dumps: Vec<Dump> = [0, 2]
        .map(|rank| fails(record(rank, 3, &failed), FailureKind::PeerGone, &[1], 1.1))
        .into();
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[1][..]));
    assert_eq!(
        report.findings[0].sentence,
        "the process of rank 1 is gone: ranks 0 and 2 lost it in all_reduce #2 on group default_pg at \
         13:00:01 UTC"
    );
}

#[test]
fn one_survivor_does_not_know_who_went_first_where_others_left_no_record() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.1))];
    let dump = fails(record(1, 4, &failed), FailureKind::PeerGone, &[3], 1.1);
    let report = analyze(&[dump], &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[][..]));
    let finding = &report.findings[0];
    assert_eq!(finding.alternatives, [[3], [0], [2]]);
    assert!(
        finding
            .sentence
            .starts_with("the process of rank 3 is gone: rank 1 lost it"),
        "{}",
        finding.sentence
    );
    assert!(
        finding
            .doubts
            .iter()
            .any(|doubt| doubt.contains("ranks 0 and 2"))
    );
}

#[test]
fn a_rank_that_came_after_the_time_out_is_named_by_those_that_waited() {
    let waited = [(0.0, State::Done(0.1)), (1.0, State::Failed(31.0))];
    let late = [(0.0, State::Done(0.1)), (35.0, State::Done(35.1))];
    let dump_of = |rank| match rank {
        1 => record(1, 3, &late),
        rank => fails(record(rank, 3, &waited), FailureKind::Timeout, &[1], 31.0),
    };
    let report = analyze(&(0..3).map(dump_of).collect::<Vec<_>>(), &Policy::default());
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(sentence.contains("; it came 4.0 s later"), "{sentence}");
}

/// Ranks 1 and 3 have a group, ranks 2 and 3 another. Rank 1 gives up in the first, where rank 3 is missing because it
/// waits for rank 2 in the second; rank 2 arrives late. `has_timed_out` is whether rank 3 recorded a time-out, too.
fn chain(has_timed_out: bool) -> Vec<Dump> {
    let dump_of = |rank: Rank, group: u32, operations: &[(f64, State)]| {
        let mut dump = record(rank, 4, operations);
        let mut groups = dump.groups.clone();
        for (id, name, ranks) in [(1, "dp", vec![1, 3]), (2, "tp", vec![2, 3])] {
            if ranks.contains(&rank) {
                let mut made = groups[0].clone();
                made.info.id = id;
                made.info.name = name.to_owned();
                made.info.desc = name.to_owned();
                made.info.ranks = ranks.into();
                groups.push(made);
            }
        }
        let row = groups
            .iter()
            .position(|listed| listed.info.id == group)
            .expect("the rank is in the group");
        for entry in &mut dump.entries {
            entry.group = row as u32;
        }
        dump.groups = groups;
        dump
    };
    let waited = [(1.0, State::Failed(31.0))];
    let mut first = fails(dump_of(1, 1, &waited), FailureKind::Timeout, &[3], 31.0);
    first.failures[0].group = Some(1);
    let mut second = dump_of(3, 2, &[(2.0, State::Failed(32.0))]);
    if has_timed_out {
        second = fails(second, FailureKind::Timeout, &[2], 32.0);
        second.failures[0].group = Some(2);
    }
    let late = dump_of(2, 2, &[(40.0, State::Done(40.1))]);
    vec![first, late, second]
}

#[test]
fn a_rank_that_waited_for_another_is_not_blamed_for_a_time_out() {
    for has_timed_out in [true, false] {
        let report = analyze(&chain(has_timed_out), &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
        let sentence = &report.findings[0].sentence;
        assert!(
            sentence.starts_with("rank 2 had not arrived in all_reduce #1 on group tp"),
            "{sentence}"
        );
    }
}

#[test]
fn complete_records_without_pending_operations_are_healthy() {
    let operations = [(0.0, State::Done(0.1))];
    let dumps: Vec<Dump> = (0..2).map(|rank| record(rank, 2, &operations)).collect();
    let report = analyze(&dumps, &Policy::default());
    assert_eq!((report.verdict, report.exit_code()), (Verdict::Healthy, 0));
    assert!(
        report
            .problems
            .iter()
            .any(|problem| problem.code == Code::N305)
    );
    let empty: Vec<Dump> = (0..2).map(|rank| record(rank, 2, &[])).collect();
    let report = analyze(&empty, &Policy::default());
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let partial = analyze(&dumps[..1], &Policy::default());
    assert_eq!(
        partial.verdict,
        Verdict::Inconclusive,
        "a rank was not read"
    );
}

/// The records of ranks that could not start. `sizes` has each rank with the world size that it was given, in order of
/// the failures.
fn refused(sizes: &[(Rank, u32)]) -> Vec<Dump> {
    let refused = |(&(rank, size), then)| {
        let mut dump = record(rank, size, &[]);
        // The job was refused before it had groups.
        dump.groups.clear();
        let text = "a world size differs";
        dump.failures.push(Failure {
            id: 1,
            time_ns: at(f64::from(then)),
            ..Failure::new(FailureKind::Backend, &[], rank, text)
        });
        closed(dump, 20.0)
    };
    sizes.iter().zip(0_u8..).map(refused).collect()
}

#[test]
fn a_rank_with_another_world_size_is_named_whoever_was_refused_first() {
    for sizes in [
        [(2, 5), (0, 4), (1, 4), (3, 4)],
        [(1, 4), (3, 4), (2, 5), (0, 4)],
    ] {
        let report = judge(&refused(&sizes), 3600.0);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[2][..]));
        assert_eq!(
            report.findings[0].sentence,
            "the ranks were given different world sizes: rank 2 a world size of 5, ranks 0, 1 and 3 a world size of 4"
        );
    }
    // Of two ranks, either may be wrong.
    let report = judge(&refused(&[(0, 2), (1, 3)]), 3600.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[][..]));
    assert_eq!(report.findings[0].alternatives, [[0], [1]]);
}
