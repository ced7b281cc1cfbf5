//! Tests verdicts on dumps of a part of the ranks: what the others did is not known.

use crate::job::{State, alive, at, closed, dead, fails, record};
use rcomm_recorder::model::{EntryState, FailureKind, ProcessGroupInfo, Rank};
use rcomm_recorder::publish::{Dump, DumpGroup, Recorder};
use rcomm_verdict::{Analysis, Code, Finding, Policy, Problem, Severity, Verdict, analyze};

/// The dump by gloo's own recorder of a rank of four: it names the members of the world only, an operation that has
/// ended is `retired`, and no state changes.
fn by_gloo(rank: Rank, operations: &[(f64, State)]) -> Dump {
    let mut dump = record(rank, 4, operations);
    dump.recorder = Recorder::NativeGloo;
    dump.status = None;
    dump.signatures[0].backend = "gloo".to_owned();
    dump.groups[0].info.name.clear();
    for entry in &mut dump.entries {
        entry.state = EntryState::Scheduled;
        entry.time_discovered_started_ns = 0;
        entry.time_discovered_completed_ns = 0;
    }
    dump
}

/// Moves the operations of a dump to a group whose members it does not name.
fn on_group(mut dump: Dump, name: &str) -> Dump {
    dump.groups.push(DumpGroup {
        info: ProcessGroupInfo {
            id: 1,
            name: name.to_owned(),
            desc: name.to_owned(),
            ranks: [].into(),
        },
        place: None,
        status: None,
    });
    for entry in &mut dump.entries {
        entry.group = 1;
    }
    dump
}

/// The policy for files that were written 60 s after 13:00.
fn written() -> Policy {
    Policy {
        now_ns: Some(at(60.0)),
        ..Policy::default()
    }
}

fn errors(findings: &[Finding]) -> Vec<&Finding> {
    let errors = findings.iter();
    errors
        .filter(|finding| finding.severity == Severity::Error)
        .collect()
}

#[test]
fn a_group_whose_members_are_guessed_may_have_one_that_left_no_dump() {
    // Rank 1 may be a member of both groups, and wait elsewhere: its dump and that of rank 0 are missing.
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps = [
        on_group(by_gloo(2, &waits), "a"),
        on_group(by_gloo(3, &waits), "b"),
    ];
    for policy in [Policy::default(), written()] {
        let report = analyze(&dumps, &policy);
        assert_eq!(errors(&report.findings), Vec::<&Finding>::new());
        assert_eq!(report.verdict, Verdict::Inconclusive);
    }
}

#[test]
fn an_operation_that_has_ended_is_no_wait_for_ranks_without_a_dump() {
    let done = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    for ranks in [vec![2], vec![0, 1, 3]] {
        let dumps: Vec<Dump> = ranks.iter().map(|&rank| by_gloo(rank, &done)).collect();
        let report = analyze(&dumps, &written());
        assert_eq!(errors(&report.findings), Vec::<&Finding>::new());
        assert_eq!(report.verdict, Verdict::Inconclusive);
        let mut notes = report.problems.iter().map(|Problem { code, .. }| *code);
        assert!(notes.any(|code| code == Code::N301));
    }
}

#[test]
fn most_ranks_without_a_dump_are_not_called_a_lost_host() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let report = analyze(&[record(3, 4, &waits)], &written());
    let [finding] = errors(&report.findings)[..] else {
        panic!("{:?}", report.findings)
    };
    assert_eq!(finding.code, Code::E102);
    assert!(finding.confidence <= 0.5, "{}", finding.confidence);
    assert!(!finding.sentence.contains("host"), "{}", finding.sentence);
    assert!(!finding.next.contains("host of"), "{}", finding.next);
    assert!(finding.alternatives.contains(&vec![3]));
}

#[test]
fn a_file_that_was_written_before_the_others_came_does_not_show_that_its_rank_did_not() {
    let late = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let waits = [late[0], late[1], (20.0, State::Pending)];
    // The dumps state no time, as PyTorch's. The file of rank 1 was written before or after the others came.
    for (written, code) in [(2.0, Code::E102), (60.0, Code::E101)] {
        let mut analysis = Analysis::new(Policy::default());
        for rank in 0..4 {
            let operations = if rank == 1 { &late[..] } else { &waits };
            let mut dump = record(rank, 4, operations);
            dump.recorder = Recorder::Hook;
            dump.status = None;
            let then = if rank == 1 { written } else { 60.0 };
            analysis.note_written(Some(at(then)));
            analysis.add(&dump);
        }
        let report = analysis.finish();
        let [finding] = errors(&report.findings)[..] else {
            panic!("{:?}", report.findings)
        };
        assert_eq!((finding.code, &finding.culprit_ranks[..]), (code, &[1][..]));
        let never = finding.sentence.contains("never issued");
        assert_eq!(never, code == Code::E101, "{}", finding.sentence);
        assert_eq!(finding.confidence > 0.75, code == Code::E101);
    }
}

#[test]
fn the_newest_group_without_a_name_is_not_the_world() {
    // Each dump holds the group that was made last, of ranks 0 and 1. Rank 1 called a barrier of the world instead of
    // the second operation of its pair.
    let done = [(0.0, State::Done(0.1))];
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps: Vec<Dump> = (0..4)
        .map(|rank| {
            let operations = if rank == 1 { &done[..] } else { &waits };
            let pair = if rank < 2 { "a" } else { "b" };
            let mut dump = on_group(by_gloo(rank, operations), pair);
            dump.groups[0].info.ranks = [0, 1].into();
            dump.groups[0].info.desc.clear();
            dump.groups[1].info.desc = "pair".to_owned();
            if rank == 1 {
                let mut barrier = by_gloo(1, &[(1.0, State::Pending)]);
                barrier.groups[0].info.ranks = [].into();
                barrier.groups[0].info.name = "0".to_owned();
                barrier.groups[0].info.id = 2;
                dump.groups.push(barrier.groups.remove(0));
                let mut entry = barrier.entries.remove(0);
                (entry.record_id, entry.group) = (2, 2);
                dump.entries.push(entry);
            }
            dump
        })
        .collect();
    let report = analyze(&dumps, &written());
    for finding in errors(&report.findings) {
        let accused = finding.confidence > 0.6 && finding.culprit_ranks != [1];
        assert!(
            !accused || finding.culprit_ranks.is_empty(),
            "{}",
            finding.sentence
        );
        if let Some(group) = finding
            .group
            .as_ref()
            .filter(|group| group.desc == "default_pg")
        {
            assert_eq!(&*group.ranks, [0, 1, 2, 3]);
        }
    }
    assert!(!report.findings.is_empty());
}

#[test]
fn the_job_that_was_left_last_is_judged_although_an_older_one_left_more_records() {
    let of_job = |mut dump: Dump, job: &str| {
        dump.identity.job = job.to_owned();
        dump
    };
    let done = [(0.0, State::Done(0.1))];
    let older = (0..3).map(|rank| of_job(closed(record(rank, 3, &done), 2.0), "older"));
    // Rank 2 hangs the newer job, and left nothing.
    let waits = [(50.0, State::Done(50.1)), (51.0, State::Pending)];
    let newer = (0..2).map(|rank| {
        let mut dump = of_job(record(rank, 3, &waits), "newer");
        dump.identity.dump_time_ns = at(80.0);
        dump
    });
    let dumps: Vec<Dump> = older.chain(newer).collect();
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.verdict, Verdict::Stuck, "{:?}", report.problems);
    let mut problems = report.problems.iter();
    assert!(problems.any(|problem| problem.sentence.contains("of job older")));
}

/// The report on the dumps of these ranks of a job, written a minute later. Rank 3 waits in a group of ranks 3 and 7,
/// or all wait in the world.
fn judge_few(ranks: &[Rank], world: Rank, in_pair: bool, change: impl Fn(&mut Dump)) -> Finding {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dump_of = |&rank: &Rank| {
        let does_wait = !in_pair || rank == 3;
        let mut dump = record(rank, world, if does_wait { &waits } else { &waits[..1] });
        dump.status = None;
        dump.identity.host.clear();
        if in_pair && rank == 3 {
            let mut pair = dump.groups[0].clone();
            (pair.info.id, pair.info.name) = (1, "pp".to_owned());
            pair.info.ranks = [3, 7].into();
            dump.groups.push(pair);
            let pending = &mut dump.entries[1];
            (pending.group, pending.collective_seq_id) = (1, 1);
        }
        change(&mut dump);
        dump
    };
    let dumps: Vec<Dump> = ranks.iter().map(dump_of).collect();
    let findings = analyze(&dumps, &written()).findings;
    let first = errors(&findings).into_iter().next().cloned();
    first.expect("a rank is missed")
}

#[test]
fn a_host_whose_ranks_no_other_waits_for_is_not_said_to_be_gone() {
    let finding = judge_few(&[2, 3, 4, 5], 8, true, |_| ());
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E102, &[7][..])
    );
}

#[test]
fn lost_records_that_form_a_block_by_chance_are_no_host_beyond_doubt() {
    // Of 70 ways to lose four records of eight, six look like two hosts of two ranks.
    let finding = judge_few(&[2, 3, 4, 5], 8, false, |_| ());
    assert_eq!(
        (finding.code, finding.confidence),
        (Code::E102, 0.5),
        "{finding:?}"
    );
    assert_eq!(finding.culprit_ranks, [0, 1, 6, 7]);
    assert!(!finding.sentence.contains(" hosts "), "{finding:?}");
    assert!(
        finding.next.starts_with("look for a crash of "),
        "{finding:?}"
    );
    let mut doubts = finding.doubts.iter();
    assert!(
        doubts.any(|doubt| doubt.contains("none finished")),
        "{finding:?}"
    );
    // Of 70 ways, two look like a host of four.
    let finding = judge_few(&[0, 1, 2, 3], 8, false, |_| ());
    assert_eq!(finding.culprit_ranks, [4, 5, 6, 7]);
    assert_eq!(finding.confidence, 0.85, "{finding:?}");
}

#[test]
fn a_rank_without_a_record_is_less_suspect_where_the_device_of_another_may_hang() {
    let by_device = |shows_starts: bool| {
        judge_few(&[0, 1, 2, 4], 5, false, |dump| {
            dump.recorder = Recorder::Nccl;
            dump.signatures[0].backend = "nccl".to_owned();
            for entry in dump.entries.iter_mut().filter(|_| !shows_starts) {
                entry.time_discovered_started_ns = 0;
                entry.state = match entry.state {
                    EntryState::Started => EntryState::Scheduled,
                    other => other,
                };
            }
        })
    };
    for (shows_starts, confidence) in [(true, 0.75), (false, 0.55)] {
        let finding = by_device(shows_starts);
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E102, &[3][..])
        );
        assert_eq!(finding.confidence, confidence, "{finding:?}");
    }
}

#[test]
fn a_process_that_is_left_over_of_an_older_job_does_not_hide_the_dumps_of_a_later_one() {
    let of_job = |mut dump: Dump, job: &str, begun: f64| {
        dump.identity.job = job.to_owned();
        dump.identity.begun_ns = at(begun);
        dump
    };
    let waits = [(50.0, State::Done(50.1)), (51.0, State::Pending)];
    let left = |begun| {
        let ring = alive(record(1, 4, &[(0.0, State::Done(0.1))]), 300.0);
        of_job(ring, "left", begun)
    };
    let judge = |left: Dump| {
        let of_rank = |rank: Rank| {
            let operations = if rank == 2 { &waits[..1] } else { &waits };
            let mut dump = of_job(record(rank, 4, operations), "hung", 40.0);
            dump.identity.dump_time_ns = at(80.0);
            dump
        };
        let dumps: Vec<Dump> = (0..4).map(of_rank).chain([left]).collect();
        analyze(&dumps, &Policy::default())
    };
    let report = judge(left(0.0));
    let finding = &report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::E101, &[2][..])
    );
    let mut problems = report.problems.iter();
    assert!(problems.any(|problem| problem.sentence.contains("of job left")));
    // A job that began later is the one that runs.
    let report = judge(left(200.0));
    let mut problems = report.problems.iter();
    assert!(problems.any(|problem| problem.sentence.contains("of job hung")));
}

#[test]
fn a_smaller_job_that_ran_on_a_host_of_a_living_one_is_not_judged_in_its_place() {
    let of_job = |mut dump: Dump, job: &str, begun: f64| {
        dump.identity.job = job.to_owned();
        dump.identity.begun_ns = at(begun);
        dump
    };
    // The other seven ranks are on other hosts.
    let waits = [(50.0, State::Done(50.1)), (51.0, State::Pending)];
    let lives = of_job(alive(record(0, 8, &waits), 300.0), "large", 0.0);
    let test = (0..2).map(|rank| {
        let waits = [(210.0, State::Done(210.1)), (211.0, State::Pending)];
        of_job(dead(record(rank, 2, &waits), 212.0), "test", 200.0)
    });
    let dumps: Vec<Dump> = test.chain([lives]).collect();
    let report = analyze(&dumps, &Policy::default());
    assert_eq!(report.input.ranks_expected, 8);
    let mut problems = report.problems.iter();
    assert!(problems.any(|problem| problem.sentence.contains("of job test")));
}

/// The report on a job of this many ranks, of which the first left a dump: they issued two collectives, and these
/// differ from the others in the size of the second.
fn of_two_sides(ranks: Rank, dumped: Rank, odd: &[Rank], change: impl Fn(&mut Dump)) -> Finding {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let dumps = (0..dumped).map(|rank| {
        let mut dump = record(rank, ranks, &waits);
        let mut other = dump.signatures[0].clone();
        (other.input_sizes, other.output_sizes) = (vec![vec![32]], vec![vec![32]]);
        dump.signatures.push(other);
        dump.entries[1].signature = u32::from(odd.contains(&rank));
        change(&mut dump);
        dump
    });
    let report = analyze(&dumps.collect::<Vec<_>>(), &written());
    let mut findings = report.findings.into_iter();
    let found = findings.find(|finding| finding.code == Code::E112);
    found.expect("the sizes differ")
}

#[test]
fn one_rank_that_differs_from_many_is_blamed_although_others_left_no_dump() {
    for (ranks, dumped) in [(64, 32), (16, 9)] {
        let finding = of_two_sides(ranks, dumped, &[5], |_| ());
        assert_eq!(finding.culprit_ranks, [5], "{}", finding.sentence);
        assert!(finding.confidence < 0.9, "{}", finding.confidence);
    }
}

#[test]
fn no_side_is_blamed_that_ranks_without_a_dump_may_make_as_large_as_the_other() {
    for (ranks, dumped, odd, sides) in [
        (6, 5, &[0, 2, 4][..], [vec![0, 2, 4], vec![1, 3]]),
        (4, 3, &[1], [vec![0, 2], vec![1]]),
    ] {
        let finding = of_two_sides(ranks, dumped, odd, |_| ());
        assert_eq!(finding.culprit_ranks, [0; 0], "{}", finding.sentence);
        assert_eq!(finding.alternatives, sides);
    }
    // With the last dump, one side is larger.
    let finding = of_two_sides(4, 4, &[1], |_| ());
    assert_eq!(finding.culprit_ranks, [1], "{}", finding.sentence);
}

#[test]
fn a_rank_that_never_came_is_on_no_side_unless_it_lives() {
    let come_late = |lives: bool| {
        of_two_sides(8, 8, &[0, 1, 2], |dump| {
            if dump.identity.rank == Some(7) {
                dump.entries.truncate(1);
            }
            if lives {
                *dump = alive(std::mem::take(dump), 60.0);
            }
        })
    };
    assert_eq!(come_late(false).culprit_ranks, [0, 1, 2]);
    assert_eq!(come_late(true).culprit_ranks, [0; 0]);
}

#[test]
fn a_rank_that_is_missed_for_less_than_a_step_is_not_accused_where_another_left_no_dump() {
    // The death of rank 3 made the others write dumps; rank 1 was at work then.
    for (taken, accused) in [(1.4, false), (20.0, true)] {
        let dumps = [0, 1, 2].map(|rank| {
            let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
            let mut dump = match rank {
                1 => record(rank, 4, &waits[..1]),
                _ => fails(record(rank, 4, &waits), FailureKind::PeerGone, &[3], taken),
            };
            dump.identity.dump_time_ns = at(taken);
            dump
        });
        let report = analyze(&dumps, &Policy::default());
        let accuses = |finding: &&Finding| finding.culprit_ranks == [1];
        let Some(finding) = report.findings.iter().find(accuses) else {
            panic!("{:?}", report.findings)
        };
        assert_eq!(finding.code, Code::E101);
        assert_eq!(finding.confidence > 0.5, accused, "{}", finding.confidence);
    }
}

#[test]
fn a_rank_without_a_dump_that_a_time_out_names_may_have_waited_for_another_without_one() {
    for (unread, accused) in [(vec![1], true), (vec![1, 2], false)] {
        let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(31.0))];
        let ranks = (0..4).filter(|rank| !unread.contains(rank));
        let dumps: Vec<Dump> = ranks
            .map(|rank| fails(record(rank, 4, &failed), FailureKind::Timeout, &[1], 31.0))
            .collect();
        let report = analyze(&dumps, &Policy::default());
        let [finding] = errors(&report.findings)[..] else {
            panic!("{:?}", report.findings)
        };
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::E101, &[1][..])
        );
        assert_eq!(finding.confidence > 0.5, accused, "{}", finding.confidence);
        let may_be: Vec<Rank> = finding.alternatives.concat();
        assert_eq!(may_be, if accused { vec![] } else { vec![2] });
    }
}

#[test]
fn a_rank_that_timed_out_and_left_is_not_the_one_that_was_lost_first() {
    // Rank 2 was stopped. Rank 1 gave up waiting for it and left, and so the others lost rank 1.
    let failed = |then| [(0.0, State::Done(0.1)), (1.0, State::Failed(then))];
    let dumps = [
        fails(
            record(0, 4, &failed(31.2)),
            FailureKind::PeerGone,
            &[1],
            31.2,
        ),
        fails(record(1, 4, &failed(31.0)), FailureKind::Timeout, &[], 31.0),
        fails(
            record(3, 4, &failed(31.2)),
            FailureKind::PeerGone,
            &[1],
            31.2,
        ),
    ];
    let report = analyze(&dumps, &Policy::default());
    let found: Vec<_> = report
        .findings
        .iter()
        .map(|finding| (finding.code, &finding.culprit_ranks[..]))
        .collect();
    assert_eq!(found, [(Code::E102, &[2][..])]);
}
