//! Tests verdicts on PyTorch's dumps of two runs in one folder, and on those of one run that look like two: these dumps
//! state no job.

use crate::job::{State, at, record};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_verdict::{Analysis, Code, Policy, Report};

/// A dump by PyTorch, and when its file was written.
type File = (Dump, f64);

/// The dump by PyTorch of a rank, without the name of its job.
fn dump(recorder: Recorder, rank: Rank, ranks: Rank, operations: &[(f64, State)]) -> Dump {
    let mut dump = record(rank, ranks, operations);
    dump.recorder = recorder;
    dump.status = None;
    dump.identity.world_size = None;
    dump.identity.host.clear();
    dump.identity.pid = 0;
    let mut other = dump.signatures[0].clone();
    (other.input_sizes, other.output_sizes) = (vec![vec![32]], vec![vec![32]]);
    dump.signatures.push(other);
    for (entry, number) in dump.entries.iter_mut().zip(0..) {
        entry.record_id = number;
        entry.timeout_ms = 600_000;
    }
    dump
}

fn by_nccl(rank: Rank, ranks: Rank, operations: &[(f64, State)]) -> Dump {
    dump(Recorder::Nccl, rank, ranks, operations)
}

/// This many completed operations, one each second from `from` on.
fn done(from: f64, count: u32) -> Vec<(f64, State)> {
    paced(from, count, 1.0)
}

/// This many completed operations from `from` on, `pace` s apart.
fn paced(from: f64, count: u32, pace: f64) -> Vec<(f64, State)> {
    let each = (0..count).map(|number| from + pace * f64::from(number));
    each.map(|then| (then, State::Done(then + 0.1))).collect()
}

/// The same, and one that is pending.
fn waits(from: f64, count: u32) -> Vec<(f64, State)> {
    let last = (from + f64::from(count), State::Pending);
    done(from, count).into_iter().chain([last]).collect()
}

/// The report as of 740 s.
fn judge(files: impl IntoIterator<Item = File>) -> Report {
    judge_by(Some(at(740.0)), files)
}

/// The report as of this time, ns, or as of the newest in the files.
fn judge_by(now_ns: Option<i64>, files: impl IntoIterator<Item = File>) -> Report {
    let mut analysis = Analysis::new(Policy {
        now_ns,
        ..Policy::default()
    });
    for (dump, written) in files {
        analysis.note_written(Some(at(written)));
        analysis.add(&dump);
    }
    analysis.finish()
}

/// The code and the culprits of the first finding.
fn first(report: &Report) -> (Code, &[Rank]) {
    let finding = report.findings.first().expect("the report has a finding");
    (finding.code, &finding.culprit_ranks)
}

/// The number of notes on records that were left aside because they are of an earlier run.
fn of_earlier_run(report: &Report) -> usize {
    let problems = report.problems.iter();
    let of_run = |text: &str| text.contains("of an earlier run; to judge that run");
    problems
        .filter(|problem| problem.code == Code::N300 && of_run(&problem.sentence))
        .count()
}

/// Gives the group of a dump other members, and all its operations to it.
fn on_dp(mut dump: Dump, members: &[Rank]) -> Dump {
    let mut made = dump.groups[0].clone();
    made.info.id = 1;
    made.info.name = "1".to_owned();
    made.info.desc = "dp".to_owned();
    made.info.ranks = members.into();
    dump.groups.push(made);
    for entry in &mut dump.entries {
        entry.group = 1;
    }
    dump
}

#[test]
fn a_rank_that_lists_other_members_and_comes_late_is_of_the_same_run() {
    for late in [15.0, 18.0, 21.0, 31.0] {
        let files = (0..4).map(|rank| {
            let (members, then): (&[Rank], f64) = match rank {
                3 => (&[0, 3], late),
                _ => (&[0, 1, 2, 3], 1.0),
            };
            (
                on_dp(by_nccl(rank, 4, &waits(then, 0)), members),
                605.0 + then,
            )
        });
        let report = judge(files);
        assert_eq!(first(&report), (Code::E105, &[3][..]), "{late} s late");
        assert_eq!(of_earlier_run(&report), 0);
    }
}

#[test]
fn a_hung_job_is_not_older_than_a_small_one_that_ran_while_it_hung() {
    let hung = (0..8).map(|rank| {
        let operations = if rank == 4 {
            done(1.0, 10)
        } else {
            waits(1.0, 10)
        };
        (by_nccl(rank, 8, &operations), 620.0)
    });
    let small = (0..2).map(|rank| (by_nccl(rank, 2, &done(61.0, 10)), 90.0));
    let report = judge(hung.chain(small));
    assert_eq!(first(&report), (Code::E101, &[4][..]));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn only_the_old_file_is_left_aside_where_a_rank_comes_late() {
    let old = |rank| (by_nccl(rank, 8, &done(-86_400.0, 100)), -80_000.0);
    let waiting = (0..6).map(|rank| (by_nccl(rank, 8, &waits(1.0, 0)), 605.0));
    let mut late = by_nccl(6, 8, &waits(31.0, 0));
    late.entries[0].signature = 1;
    let report = judge(waiting.chain([(late, 606.0), old(7)]));
    assert_eq!(first(&report), (Code::E112, &[6][..]));
    assert_eq!(of_earlier_run(&report), 1);
    let aside = report
        .problems
        .iter()
        .find(|problem| problem.code == Code::N300);
    let sentence = aside.map_or("", |problem| &problem.sentence);
    assert!(
        sentence.starts_with("the record of rank 7 was"),
        "{sentence}"
    );
}

#[test]
fn ranks_whose_clocks_are_wrong_are_of_the_same_run() {
    // Each with the ranks whose clocks differ, by how much, and the rank that has not come.
    for (ranks, skewed, skew, missing) in [
        (4, 3..4, -120.0, 0),
        (8, 6..8, 90.0, 1),
        (8, 0..4, -25.0, 5),
    ] {
        let files = (0..ranks).map(|rank| {
            let skew = if skewed.contains(&rank) { skew } else { 0.0 };
            let operations = if rank == missing {
                done(skew, 10)
            } else {
                waits(skew, 10)
            };
            (by_nccl(rank, ranks, &operations), 620.0)
        });
        let report = judge(files);
        assert_eq!(first(&report), (Code::E101, &[missing][..]));
        assert_eq!(of_earlier_run(&report), 0);
    }
    // The clocks of half or a quarter of the ranks are wrong, one of which has not come: none is left aside.
    for skewed in [4..8, 6..8] {
        let files = (0..8).map(|rank| {
            let skew = if skewed.contains(&rank) { -110.0 } else { 0.0 };
            let operations = if rank == 7 {
                done(skew, 10)
            } else {
                waits(skew, 10)
            };
            (by_nccl(rank, 8, &operations), 620.0)
        });
        let report = judge(files);
        assert_eq!(first(&report).1, [7]);
        assert_eq!(of_earlier_run(&report), 0);
    }
}

#[test]
fn ranks_whose_clocks_are_far_ahead_are_of_the_same_run() {
    // One host, or half of them; each file has the time of its host, or all that of a server whose clock is right. The
    // ranks may have completed little together, and the dumps of some versions do not state when operations ended.
    for (ranks, ahead, missing) in [(4, 3..4, 3), (8, 7..8, 7), (8, 4..8, 7)] {
        for ((by_server, states_ends), (count, skew)) in
            [(true, true), (false, true), (false, false)]
                .into_iter()
                .flat_map(|file| [(10, 3600.0), (2, 3600.0), (1, 1300.0)].map(|ops| (file, ops)))
        {
            let files = (0..ranks).map(|rank| {
                let skew = if ahead.contains(&rank) { skew } else { 0.0 };
                let operations = if rank == missing {
                    done(skew, count)
                } else {
                    waits(skew, count)
                };
                let mut dump = by_nccl(rank, ranks, &operations);
                if !states_ends {
                    for entry in &mut dump.entries {
                        entry.time_discovered_completed_ns = 0;
                    }
                }
                (dump, if by_server { 620.0 } else { 620.0 + skew })
            });
            let report = judge_by(None, files);
            assert_eq!(
                (first(&report), of_earlier_run(&report)),
                ((Code::E101, &[missing][..]), 0),
                "{ahead:?} of {ranks}, {count} operations, {skew} s, {by_server}, {states_ends}"
            );
        }
    }
}

#[test]
fn a_record_that_is_only_older_may_be_of_a_host_whose_clock_is_wrong() {
    let files = (0..8).map(|rank| match rank {
        7 => (by_nccl(rank, 8, &done(-1300.0, 1)), -680.0),
        _ => (by_nccl(rank, 8, &waits(0.0, 1)), 620.0),
    });
    let report = judge_by(None, files);
    let notes: Vec<&str> = report
        .problems
        .iter()
        .map(|problem| problem.sentence.as_str())
        .collect();
    assert!(
        notes
            .iter()
            .any(|note| note.ends_with("or the clock of its host is wrong")),
        "{notes:?}"
    );
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn files_that_are_days_older_are_left_aside_also_if_they_are_more() {
    let files = (0..8).map(|rank| match rank {
        6.. => (by_nccl(rank, 8, &waits(1.0, 5)), 620.0),
        _ => (by_nccl(rank, 8, &done(-200_000.0, 2)), -199_990.0),
    });
    let report = judge_by(None, files);
    let start = "the records of ranks 0-5 were left aside";
    let end = "they are of an earlier run, or clocks of hosts are wrong";
    let mut notes = report.problems.iter();
    assert!(
        notes.any(|note| note.sentence.starts_with(start) && note.sentence.ends_with(end)),
        "{:?}",
        report.problems
    );
}

#[test]
fn a_file_that_was_written_early_by_a_clock_that_is_ahead_is_of_the_same_run() {
    // By then the job had completed fewer operations, or none.
    for count in [6, 1, 0] {
        let files = (0..4).map(|rank| match rank {
            3 => (
                by_nccl(rank, 4, &waits(40.0, count)),
                40.2 + f64::from(count),
            ),
            2 => (by_nccl(rank, 4, &done(0.0, 10)), 18.0),
            _ => (by_nccl(rank, 4, &waits(0.0, 10)), 18.0),
        });
        assert_eq!(of_earlier_run(&judge(files)), 0, "{count} operations");
    }
}

#[test]
fn a_ring_that_was_emptied_does_not_show_a_second_run() {
    // All wrote a file, emptied their rings and went on; some of them wrote another file.
    let early = |rank| (by_nccl(rank, 4, &done(1.0, 10)), 12.0);
    let later = |rank| {
        let mut dump = by_nccl(rank, 4, &waits(101.0, 10));
        for entry in &mut dump.entries {
            entry.collective_seq_id += 100;
        }
        (dump, 730.0)
    };
    let report = judge((0..4).map(early).chain((0..2).map(later)));
    assert_eq!(of_earlier_run(&report), 0);
    // One ended before, and left the only file of that time.
    let report = judge([early(3)].into_iter().chain((0..3).map(later)));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn a_group_that_is_made_after_the_ring_was_emptied_does_not_show_a_second_run() {
    let files = (0..4).map(|rank| (by_nccl(rank, 4, &done(1.0, 10)), 12.0));
    // All but rank 3 wrote another file, which shows the new group from its first operation on.
    let later = (0..3).map(|rank| {
        let dump = by_nccl(rank, 4, &waits(101.0, 10));
        (on_dp(dump, &[0, 1, 2, 3]), 730.0)
    });
    let report = judge(files.chain(later));
    assert_eq!(first(&report), (Code::E101, &[3][..]));
    assert!((report.findings[0].confidence - 0.5).abs() < 1e-6);
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn files_of_many_earlier_times_are_left_aside_together() {
    // Each rank has left a file of another earlier run, which came further.
    let earlier = (0..12).map(|rank| {
        let from = -1000.0 * f64::from(rank + 1);
        (by_nccl(rank, 12, &done(from, 20)), from + 30.0)
    });
    let later = (0..12).map(|rank| {
        let operations = if rank == 0 {
            done(1.0, 4)
        } else {
            waits(1.0, 4)
        };
        (by_nccl(rank, 12, &operations), 700.0)
    });
    let report = judge(earlier.chain(later));
    assert_eq!(first(&report), (Code::E101, &[0][..]));
    // The six oldest count as one time.
    assert_eq!(of_earlier_run(&report), 7);
    let together = "the records of ranks 6-11 were left aside";
    let mut notes = report.problems.iter();
    assert!(
        notes.any(|note| note.sentence.starts_with(together)),
        "{:?}",
        report.problems
    );
}

#[test]
fn files_without_a_time_are_not_of_an_earlier_run() {
    let mut analysis = Analysis::new(Policy::default());
    for rank in 0..4 {
        let skew = if rank == 3 { -50.0 } else { 0.0 };
        let operations = if rank == 0 {
            done(skew, 10)
        } else {
            waits(skew, 10)
        };
        analysis.add(&by_nccl(rank, 4, &operations));
    }
    let report = analysis.finish();
    assert_eq!(first(&report), (Code::E101, &[0][..]));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn numbers_of_two_recorders_are_not_compared() {
    let nccl = (0..4).map(|rank| (by_nccl(rank, 4, &done(1.0, 100)), 101.5));
    let gloo = (0..4).map(|rank| {
        let operations = if rank == 3 {
            done(125.0, 1)
        } else {
            waits(125.0, 1)
        };
        let mut dump = dump(Recorder::Hook, rank, 4, &operations);
        for signature in &mut dump.signatures {
            signature.backend = "gloo".to_owned();
        }
        (dump, 731.0)
    });
    let report = judge(nccl.chain(gloo));
    assert_eq!(first(&report), (Code::E101, &[3][..]));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn a_group_that_was_made_twice_does_not_show_a_second_run() {
    let files = (0..4).map(|rank| {
        let skew = if rank == 3 { -25.0 } else { 0.0 };
        let again = if rank == 1 {
            done(skew + 6.0, 4)
        } else {
            waits(skew + 6.0, 4)
        };
        let operations = [done(skew, 4), again].concat();
        let mut dump = by_nccl(rank, 4, &operations);
        let mut made = dump.groups[0].clone();
        made.info.id = 1;
        dump.groups.push(made);
        for entry in &mut dump.entries[4..] {
            entry.group = 1;
            entry.collective_seq_id -= 4;
        }
        (dump, 620.0)
    });
    let report = judge(files);
    assert_eq!(first(&report), (Code::E101, &[1][..]));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn one_operation_of_another_size_does_not_show_a_second_run() {
    let files = (0..8).map(|rank| {
        let skew = if rank < 4 { -25.0 } else { 0.0 };
        let operations = if rank == 1 {
            done(skew, 8)
        } else {
            waits(skew, 8)
        };
        let mut dump = by_nccl(rank, 8, &operations);
        dump.entries[2].signature = u32::from(rank == 0);
        (dump, 620.0)
    });
    let report = judge(files);
    assert_eq!(first(&report), (Code::E101, &[1][..]));
    assert_eq!(of_earlier_run(&report), 0);
}

#[test]
fn files_that_an_earlier_run_has_left_are_not_judged_with_later_ones() {
    // The earlier run left the files of most ranks, or one of a rank of which the later run wrote one too.
    let later = |ranks: std::ops::Range<Rank>| {
        ranks.map(|rank| {
            let operations = if rank == 0 {
                done(1.0, 4)
            } else {
                waits(1.0, 4)
            };
            (by_nccl(rank, 8, &operations), 700.0)
        })
    };
    let report_with = |earlier: std::ops::Range<Rank>, ranks, count, signature| {
        let files = earlier.map(|rank| {
            let mut dump = by_nccl(rank, 8, &paced(-60.0, count, 1.5));
            for entry in &mut dump.entries {
                entry.signature = signature;
            }
            (dump, -25.0)
        });
        judge(files.chain(later(ranks)))
    };
    for (earlier, ranks, count, signature) in [
        // It came further.
        (3..8, 0..3, 20, 0),
        // It issued other operations.
        (3..8, 0..3, 4, 1),
        // A process began anew.
        (2..8, 0..3, 3, 0),
    ] {
        let report = report_with(earlier.clone(), ranks, count, signature);
        assert_eq!(
            of_earlier_run(&report),
            1,
            "{earlier:?}, {count} operations"
        );
        let blamed = report
            .findings
            .iter()
            .flat_map(|finding| &finding.culprit_ranks);
        assert!(
            blamed.clone().all(|&rank| rank == 0),
            "{:?}",
            blamed.collect::<Vec<_>>()
        );
        assert_eq!(first(&report), (Code::E101, &[0][..]));
    }
    // One that came less far may be of ranks whose clocks are wrong.
    assert_eq!(of_earlier_run(&report_with(3..8, 0..3, 3, 0)), 0);
}
