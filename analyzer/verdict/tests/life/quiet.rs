//! Tests jobs in which nothing is pending or wrong, and that are not called healthy: a rank failed and no other waits
//! for it yet, or ranks have stopped communicating.

use crate::job::{State, alive, at, closed, dead, fails, launch, record};
use crate::root;
use rcomm_recorder::model::{FailureKind, ProcessExit, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Finding, Policy, Report, Verdict, analyze};

fn judge_live(dumps: &[Dump], now: f64) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(now)),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

/// An all_reduce each half second from `first` to `last`, all of which complete.
fn paced(first: u32, last: u32) -> Vec<(f64, State)> {
    let issued = (first * 2..=last * 2).map(|half_seconds| f64::from(half_seconds) / 2.0);
    issued
        .map(|issued| (issued, State::Done(issued + 0.1)))
        .collect()
}

/// The note on a job that is not called healthy.
fn note(report: &Report) -> &str {
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    assert_eq!(
        (report.verdict, report.exit_code()),
        (Verdict::Inconclusive, 2)
    );
    report.silence().expect("the report has a note")
}

#[test]
fn a_rank_that_raised_is_shown_before_another_waits_for_it() {
    let operations = paced(0, 10);
    let job = |since: f64| {
        let mut dumps: Vec<Dump> = (0..3)
            .map(|rank| alive(record(rank, 3, &operations), 11.0))
            .collect();
        let status = dumps[1].status.as_mut().expect("the record has a status");
        status.phase = "raised ValueError: bad batch".to_owned();
        status.phase_since_ns = at(since);
        dumps
    };
    let expected = "rank 1 is in phase `raised ValueError: bad batch`, as an exception that leaves a program is \
                    recorded; no rank has waited for it for long";
    let report = judge_live(&job(10.5), 11.0);
    assert!(note(&report).starts_with(expected), "{report:?}");
    // The note is the same beside an operation of the others that is under way.
    let mut dumps = job(10.5);
    for dump in &mut dumps {
        dump.groups.push(dump.groups[0].clone());
        dump.groups[1].info.id = 1;
        dump.groups[1].info.name = "1".to_owned();
        dump.groups[1].info.ranks = [0, 2].into();
    }
    let pending = record(0, 3, &[(10.8, State::Pending)]).entries.remove(0);
    for index in [0, 2] {
        let mut entry = pending.clone();
        (entry.group, entry.record_id) = (1, 22);
        dumps[index].entries.push(entry);
    }
    assert!(note(&judge_live(&dumps, 11.0)).starts_with(expected));
    // The rank that raised first may be why another did.
    let mut both = job(10.5);
    both[0].status = both[1].status.clone();
    let later = both[0].status.as_mut().expect("the record has a status");
    later.phase_since_ns = at(10.7);
    let expected = "rank 1 is in phase `raised ValueError: bad batch`, as an exception that leaves a program is \
                    recorded; rank 0 ended so, too; no rank has waited for them for long";
    let report = judge_live(&both, 11.0);
    assert!(note(&report).starts_with(expected), "{report:?}");
    // A program that issued operations since has caught the exception.
    assert_eq!(judge_live(&job(9.0), 11.0).verdict, Verdict::Healthy);
}

#[test]
fn a_process_that_is_gone_is_shown_before_another_waits_for_it() {
    let operations = paced(0, 10);
    let dump_of = |rank| record(rank, 3, &operations);
    let dumps = |gone: Dump| [alive(dump_of(0), 12.0), gone, alive(dump_of(2), 12.0)];
    let expected = "the process of rank 1 is gone, and no record shows that it ended in order; no rank has waited for \
                    it for long";
    let report = judge_live(&dumps(dead(dump_of(1), 11.0)), 12.0);
    assert!(note(&report).starts_with(expected), "{report:?}");
    // Once all processes are gone, the job is ending.
    let mut noted = launch(None, &[(None, Some(9), 11.5); 3]);
    for process in &mut noted.ranks {
        process.end = None;
    }
    let launched = Policy {
        launches: vec![noted],
        snapshot: true,
        now_ns: Some(at(11.8)),
        ..Policy::default()
    };
    let all_gone: Vec<Dump> = (0..3).map(|rank| dead(dump_of(rank), 11.5)).collect();
    let expected = "the processes of ranks 0-2 are gone, and no record shows that they ended in order; no rank has \
                    waited for them for long, as far as is recorded: the job is ending";
    assert_eq!(note(&analyze(&all_gone, &launched)), expected);
    // A process that exited with an error is named once the others had time to end as well.
    let mut failed = dead(dump_of(1), 11.5);
    let status = failed.status.as_mut().expect("the record has a status");
    status.exit = Some(ProcessExit {
        time_ns: at(11.5),
        code: 3,
    });
    let expected = "the process of rank 1 is gone, and it did not end in order; rank 1 exited with code 3; no rank";
    let report = judge_live(&dumps(failed.clone()), 12.0);
    assert!(note(&report).starts_with(expected), "{report:?}");
    assert_eq!(
        judge_live(&dumps(failed), 13.0).findings[0].code,
        Code::E150
    );
    // A process that ended in order is no fault.
    assert_eq!(
        judge_live(&dumps(closed(dump_of(1), 11.0)), 12.0).verdict,
        Verdict::Healthy
    );
}

#[test]
fn an_error_that_a_rank_has_just_recorded_is_shown() {
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.9))];
    let job = |kind| {
        let ranks = 0..2;
        let dumps = ranks.map(|rank| match rank {
            0 => {
                let mut dump = fails(record(0, 2, &failed), kind, &[], 1.9);
                dump.entries.truncate(1);
                dump.failures[0].text = "no space left".to_owned();
                alive(dump, 2.0)
            }
            rank => alive(record(rank, 2, &failed[..1]), 2.0),
        });
        dumps.collect::<Vec<_>>()
    };
    let report = judge_live(&job(FailureKind::Backend), 2.0);
    let expected = "rank 0 recorded an error at 13:00:01 UTC: no space left; nothing that is recorded waits because of \
                    it";
    assert_eq!(note(&report), expected);
    // A group that was closed is no error.
    let report = judge_live(&job(FailureKind::Cancelled), 2.0);
    assert_eq!(report.verdict, Verdict::Healthy);
}

/// Adds a group of these ranks.
fn with_group(mut dump: Dump, name: &str, ranks: &[Rank]) -> Dump {
    let mut group = dump.groups[0].clone();
    group.info.id = 1;
    group.info.name = "1".to_owned();
    group.info.desc = name.to_owned();
    group.info.ranks = ranks.into();
    dump.groups.push(group);
    dump
}

#[test]
fn ranks_that_wait_in_the_call_that_makes_a_group_are_not_called_healthy() {
    // Ranks 0 and 1 have stopped after the start, and the others go on in operations of their own group.
    let few = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let go_on: Vec<_> = few.into_iter().chain(paced(2, 19)).collect();
    let job = |change_first: fn(Dump) -> Dump| {
        let mut dumps: Vec<Dump> = (0..4)
            .map(|rank| record(rank, 4, if rank < 2 { &few } else { &go_on }))
            .map(|dump| with_group(dump, "dp", &[2, 3]))
            .collect();
        for dump in &mut dumps[..2] {
            dump.groups.truncate(1);
        }
        for dump in &mut dumps[2..] {
            for entry in &mut dump.entries[2..] {
                entry.group = 1;
                entry.collective_seq_id -= 2;
            }
        }
        let first = change_first(dumps[0].clone());
        dumps[0] = first;
        dumps
            .into_iter()
            .map(|dump| alive(dump, 20.0))
            .collect::<Vec<_>>()
    };
    // Nothing shows that ranks 0 and 1 do anything unusual: two operations show no pace.
    assert_eq!(
        judge_live(&job(|dump| dump), 20.0).verdict,
        Verdict::Healthy
    );
    // Rank 0 has made a group that rank 1 has not.
    let report = judge_live(&job(|dump| with_group(dump, "tp", &[0, 1])), 20.0);
    let expected = "group tp/1 has been made by rank 0 and not by rank 1; ranks 0 and 1 have issued no operation \
                    since 13:00:01 UTC, and wait in none that is recorded: they may wait in the call that makes a \
                    group";
    assert!(note(&report).starts_with(expected), "{report:?}");
    // If others wait for them, ranks 0 and 1 may still wait in that call, and for a rank that does not make it.
    let mut dumps = job(|dump| with_group(dump, "tp", &[0, 1]));
    for dump in &mut dumps[2..] {
        let waiting = [few[0], few[1], (12.0, State::Pending)];
        let mut waits = record(3, 4, &waiting).entries.remove(2);
        dump.entries.truncate(12);
        waits.record_id = 13;
        dump.entries.push(waits);
    }
    let report = judge_live(&dumps, 20.0);
    let finding = report
        .findings
        .iter()
        .find(|finding| finding.culprit_ranks == [0, 1]);
    let finding = finding.expect("ranks 0 and 1 are missing");
    assert!(finding.confidence <= 0.6, "{finding:?}");
    let doubt = "group tp/1 has been made by rank 0 and not by rank 1: ranks 0 and 1 may wait in the call that makes \
                 it, which is not recorded, and for a rank that does not call it";
    assert!(
        finding.doubts.iter().any(|text| text == doubt),
        "{finding:?}"
    );
    // A moment after the group was made, this shows nothing.
    let dumps: Vec<Dump> = [Some(()), None]
        .into_iter()
        .zip(0..)
        .map(|(makes, rank)| match makes {
            Some(()) => with_group(record(rank, 2, &few), "tp", &[0, 1]),
            None => record(rank, 2, &few),
        })
        .map(|dump| alive(dump, 2.0))
        .collect();
    assert_eq!(judge_live(&dumps, 2.0).verdict, Verdict::Healthy);
}

#[test]
fn a_rank_that_falls_silent_while_others_go_on_is_shown() {
    let (short, long) = (paced(0, 10), paced(0, 50));
    let of_all: Vec<Dump> = (0..3)
        .map(|rank| {
            with_group(
                record(rank, 3, if rank == 1 { &short } else { &long }),
                "dp",
                &[0, 2],
            )
        })
        .map(|mut dump| {
            for entry in dump.entries.iter_mut().skip(21) {
                entry.group = 1;
                entry.collective_seq_id -= 21;
            }
            dump
        })
        .collect();
    let at_time = |now: f64| {
        let until = |dump: &Dump| {
            let mut dump = dump.clone();
            dump.entries.retain(|entry| entry.time_created_ns < at(now));
            alive(dump, now)
        };
        judge_live(&of_all.iter().map(until).collect::<Vec<_>>(), now)
    };
    assert_eq!(at_time(19.2).verdict, Verdict::Healthy);
    let report = at_time(30.2);
    let expected = "rank 1 has issued no operation since 13:00:10 UTC, and waits in none that is recorded, while \
                    others go on; the longest pause before was 500 ms: it may hang in code that records nothing; its \
                    stack shows where";
    assert_eq!(note(&report), expected);
}

#[test]
fn a_job_of_few_operations_that_has_fallen_silent_is_not_called_healthy() {
    let operations = [(0.0, State::Done(0.1))];
    let job = |now: f64| {
        let dumps = (0..2).map(|rank| alive(record(rank, 2, &operations), now));
        judge_live(&dumps.collect::<Vec<_>>(), now)
    };
    assert_eq!(job(9.0).verdict, Verdict::Healthy);
    let report = job(12.0);
    let expected = "no rank has issued an operation since 13:00:00 UTC, and none is pending: the job may hang in code \
                    that records nothing; the stacks of its ranks show where";
    assert_eq!(note(&report), expected);
}

const DONE: (f64, State) = (0.0, State::Done(0.1));

/// The records of four ranks, with the operations of rank 1, whose phase begins at 1.2 s, and those of the others.
fn named_phase(phase: &str, of_1: &[(f64, State)], of_others: &[(f64, State)]) -> Vec<Dump> {
    let dump_of = |rank| {
        let dump = record(rank, 4, if rank == 1 { of_1 } else { of_others });
        alive(dump, 2.3)
    };
    let mut dumps: Vec<Dump> = (0..4).map(dump_of).collect();
    let status = dumps[1].status.as_mut().expect("the record has a status");
    status.phase = phase.to_owned();
    status.phase_since_ns = at(1.2);
    dumps
}

#[test]
fn a_rank_whose_program_an_exception_has_left_is_named_before_the_others_are_overdue() {
    const RAISED: &str = "raised ValueError: bad batch";
    let wait = [DONE, (1.0, State::Pending)];
    let dumps = named_phase(RAISED, &[DONE], &wait);
    let report = judge_live(&dumps, 2.3);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let expected = "rank 1 never issued all_reduce #2 on group default_pg; 3 ranks have waited 1.3 s; it last issued \
                    all_reduce #1 on group default_pg, phase `raised ValueError: bad batch`";
    assert_eq!(report.findings[0].sentence, expected);
    // The exception may be about to end the process.
    assert!(judge_live(&dumps, 2.1).findings.is_empty());
    // The process, which takes long to end, has closed its connections.
    let failed = [DONE, (1.0, State::Failed(1.4))];
    let report = judge_live(&named_phase(RAISED, &[DONE], &failed), 2.3);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    // The exception may have its cause in another rank that is missing, or that is gone.
    let mut dumps = named_phase(RAISED, &[DONE], &wait);
    dumps[2] = named_phase("", &[DONE], &[DONE]).remove(2);
    assert!(judge_live(&dumps, 2.3).findings.is_empty());
    let mut dumps = named_phase(RAISED, &[DONE], &failed);
    dumps[2] = dead(record(2, 4, &[DONE]), 1.19);
    let report = judge_live(&dumps, 2.3);
    let names_it = |finding: &Finding| finding.culprit_ranks.contains(&1);
    assert!(!report.findings.iter().any(names_it), "{report:?}");
    // The exception is not why an operation failed that had failed before it.
    let before = [DONE, (1.0, State::Failed(1.1))];
    let report = judge_live(&named_phase(RAISED, &[DONE], &before), 2.3);
    assert_ne!(
        report.findings.first().map(|first| first.code),
        Some(Code::E101)
    );
}

#[test]
fn a_rank_that_may_come_in_another_phase_or_after_an_exception_is_not_named_before_the_others_are_overdue()
 {
    let wait = [DONE, (1.0, State::Pending)];
    for phase in ["evaluation", "raised KeyboardInterrupt"] {
        let report = judge_live(&named_phase(phase, &[DONE], &wait), 2.3);
        assert!(report.findings.is_empty(), "{report:?}");
    }
    // The program has caught the exception, since it has issued another operation.
    let more = [DONE, (1.9, State::Done(2.0))];
    let wait = [more[0], more[1], (2.1, State::Pending)];
    let report = judge_live(&named_phase("raised ValueError", &more, &wait), 2.3);
    assert!(report.findings.is_empty(), "{report:?}");
}
