//! Tests findings on several causes, on all ranks of a host, and on ranks that may be victims of others.

use crate::job::{State, alive, at, dead, fails, record, stopped};
use crate::root;
use rcomm_recorder::model::{FailureKind, OpType, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Analysis, Code, Policy, Problem, Report, Unread, Verdict, analyze};

const RANKS: Rank = 6;

/// The record of a rank with these groups, all of whose operations are on the last of them.
fn in_groups(rank: Rank, groups: &[(u32, &str, &[Rank])], operations: &[(f64, State)]) -> Dump {
    let mut dump = record(rank, RANKS, operations);
    for &(id, name, ranks) in groups {
        let mut made = dump.groups[0].clone();
        made.info.id = id;
        made.info.name = name.to_owned();
        made.info.desc = name.to_owned();
        made.info.ranks = ranks.into();
        dump.groups.push(made);
    }
    for entry in &mut dump.entries {
        entry.group = groups.len() as u32;
    }
    alive(dump, 20.0)
}

#[test]
fn a_finding_counts_only_the_ranks_that_wait_because_of_it() {
    let waits = [(1.0, State::Pending)];
    let tp: (u32, &str, &[Rank]) = (1, "tp", &[0, 1, 2]);
    let dp: (u32, &str, &[Rank]) = (2, "dp", &[2, 3]);
    let pp: (u32, &str, &[Rank]) = (3, "pp", &[4, 5]);
    // Ranks 0 and 1 wait for rank 2, which waits for rank 3; rank 4 waits for rank 5.
    let dumps = [
        in_groups(0, &[tp], &waits),
        in_groups(1, &[tp], &waits),
        in_groups(2, &[tp, dp], &waits),
        in_groups(3, &[dp], &[]),
        in_groups(4, &[pp], &waits),
        in_groups(5, &[pp], &[]),
    ];
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(20.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    let finding_of = |rank: Rank| {
        let mut findings = report.findings.iter();
        let finding = findings.find(|finding| finding.culprit_ranks == [rank]);
        finding.expect("each cause has a finding")
    };
    assert_eq!(
        (finding_of(3).code, finding_of(5).code),
        (Code::E101, Code::E101)
    );
    let sentence = &finding_of(3).sentence;
    assert!(
        sentence.contains(", and 3 of 6 ranks wait because of it"),
        "{sentence}"
    );
    // Without the other cause, these are all ranks that wait.
    let report = analyze(&dumps[..4], &policy);
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains(", and 3 of 6 ranks wait in all"),
        "{sentence}"
    );
}

/// The rings of four ranks, two on each of two hosts, of which those of host n1 never issue the second operation:
/// ranks 0 and 1 wait in it, or it failed on them at `failed`.
fn on_two_hosts(failed: Option<f64>) -> [Dump; 4] {
    let second = failed.map_or(State::Pending, State::Failed);
    let waits = [(0.0, State::Done(0.1)), (1.0, second)];
    [0, 1, 2, 3].map(|rank| {
        let mut dump = record(rank, 4, if rank < 2 { &waits } else { &waits[..1] });
        dump.identity.host = format!("n{}", rank / 2);
        dump
    })
}

fn judge_live(dumps: &[Dump]) -> Report {
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(10.0)),
        ..Policy::default()
    };
    analyze(dumps, &policy)
}

#[test]
fn the_ranks_of_a_host_that_are_gone_are_one_finding() {
    for (failed, waiting) in [
        (None, "2 ranks have waited 9.0 s"),
        (Some(1.5), "2 ranks waited 500 ms, until it failed"),
    ] {
        let [rank0, rank1, rank2, rank3] = on_two_hosts(failed);
        let dumps = [
            alive(rank0, 10.0),
            alive(rank1, 10.0),
            dead(rank2, 1.2),
            dead(rank3, 1.2),
        ];
        let report = judge_live(&dumps);
        assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[2, 3][..]));
        assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
        let expected = format!(
            "the processes of ranks 2 and 3 are gone, all of host n1: they never issued all_reduce #2 on group \
             default_pg, where {waiting}"
        );
        assert_eq!(report.findings[0].sentence, expected);
    }
}

#[test]
fn ranks_that_took_part_and_have_no_ring_run_on_another_host_unless_a_ring_cannot_be_read() {
    let seen_here = || {
        on_two_hosts(None)
            .into_iter()
            .take(2)
            .map(|dump| alive(dump, 10.0))
    };
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(10.0)),
        ..Policy::default()
    };
    let mut analysis = Analysis::new(policy);
    for dump in seen_here() {
        analysis.add(&dump);
    }
    let report = analysis.report();
    assert_eq!(root(&report), (Verdict::Stuck, Code::E102, &[2, 3][..]));
    let finding = &report.findings[0];
    let expected = "ranks 2 and 3 took part before and have no rings here; 2 ranks have waited 9.0 s in all_reduce #2 \
                    on group default_pg for them";
    assert_eq!(finding.sentence, expected);
    assert!(
        finding
            .next
            .starts_with("read the records of ranks 2 and 3 too"),
        "{finding:?}"
    );
    let cut = Problem::unreadable_dump("2.0.ring", "the ring was cut");
    analysis.add_problem(cut, Unread::Whole);
    let sentence = &analysis.report().findings[0].sentence;
    assert!(sentence.contains("left no readable record"), "{sentence}");
}

#[test]
fn the_ranks_of_a_host_that_are_stopped_are_one_finding_with_the_host_of_the_processes() {
    let [rank0, rank1, rank2, rank3] = on_two_hosts(None);
    let dumps = [
        alive(rank0, 10.0),
        alive(rank1, 10.0),
        stopped(rank2, 1.2, 10.0),
        stopped(rank3, 1.2, 10.0),
    ];
    let report = judge_live(&dumps);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E151, &[2, 3][..]));
    let finding = &report.findings[0];
    let expected = "the processes of ranks 2 and 3, all of host n1, have been stopped by a signal since 13:00:01 UTC: they \
                    never issued all_reduce #2 on group default_pg, where 2 ranks have waited 9.0 s";
    assert_eq!(finding.sentence, expected);
    let next = "find out who stopped them; `kill -CONT 102 103` on host n1 lets them go on, unless a debugger holds \
                them";
    assert_eq!(finding.next, next);
}

#[test]
fn what_to_do_next_names_the_host_of_a_process_in_a_job_of_several() {
    let mut dumps = on_two_hosts(None).map(|dump| alive(dump, 10.0));
    // Rank 3 waits as well.
    dumps[3].entries = dumps[0].entries.clone();
    dumps[2].identity.pid = 4711;
    let report = judge_live(&dumps);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[2][..]));
    let next = &report.findings[0].next;
    assert!(
        next.starts_with("look at what rank 2, process 4711 on host n1, does"),
        "{next}"
    );
}

#[test]
fn a_rank_that_has_not_made_the_group_may_be_a_victim_of_another_that_made_it_out_of_turn() {
    let waits = [(1.0, State::Pending)];
    let first: (u32, &str, &[Rank]) = (1, "1", &[0, 1]);
    let second: (u32, &str, &[Rank]) = (1, "1", &[2, 3]);
    let done = [(1.0, State::Done(1.1))];
    let judge = |others: [Dump; 2]| {
        let dumps: Vec<Dump> = others
            .into_iter()
            .chain([
                in_groups(2, &[second], &waits),
                in_groups(3, &[], &[]),
                in_groups(4, &[], &done),
                in_groups(5, &[], &done),
            ])
            .collect();
        let policy = Policy {
            snapshot: true,
            now_ns: Some(at(20.0)),
            ..Policy::default()
        };
        analyze(&dumps, &policy)
    };
    let report = judge([0, 1].map(|rank| in_groups(rank, &[first], &done)));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[][..]));
    let finding = &report.findings[0];
    assert_eq!(finding.alternatives, [vec![3], vec![2]]);
    let expected =
        "rank 3 never issued all_reduce #1 on group 1 of 2,3, and has not made that group; ";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
    assert!(finding.ruled_out.is_empty(), "{finding:?}");
    // Without another group of that name, rank 3 is late or hangs before it makes the group.
    let report = judge([0, 1].map(|rank| in_groups(rank, &[], &done)));
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[3][..]));
    assert_eq!(report.findings[0].alternatives, [vec![2]]);
}

#[test]
fn a_skipped_collective_is_ruled_out_only_if_the_others_went_on() {
    let judge = |later: &[(f64, State)]| {
        let operations: Vec<_> = [(0.0, State::Done(0.1)), (1.0, State::Pending)]
            .into_iter()
            .chain(later.iter().copied())
            .collect();
        let dumps: Vec<Dump> = (0..RANKS)
            .map(|rank| {
                let mut dump = in_groups(rank, &[], &operations);
                if rank == 1 {
                    dump.entries.truncate(2);
                    let mut other = dump.signatures[0].clone();
                    other.op_name = "broadcast".to_owned();
                    dump.signatures.push(other);
                    dump.entries[1].signature = 1;
                    dump.entries[1].op = OpType::Broadcast;
                    dump.entries[1].root = Some(0);
                }
                dump
            })
            .collect();
        analyze(&dumps, &Policy::default())
    };
    let skipped = |text: &String| text.starts_with("skipped_collective");
    let stuck = judge(&[]);
    assert_eq!(root(&stuck), (Verdict::Mismatch, Code::E110, &[1][..]));
    let finding = &stuck.findings[0];
    assert!(!finding.ruled_out.iter().any(skipped), "{finding:?}");
    let expected =
        "rank 1 may have left out the all_reduce of the others: these have issued nothing after it";
    assert!(
        finding.doubts.iter().any(|text| text == expected),
        "{finding:?}"
    );
    let ahead = judge(&[(2.0, State::Pending)]);
    let finding = &ahead.findings[0];
    assert_eq!(finding.code, Code::E110);
    assert!(finding.ruled_out.iter().any(skipped), "{finding:?}");
    assert!(finding.doubts.is_empty(), "{finding:?}");
}

#[test]
fn a_process_that_is_gone_leads_where_a_rank_that_may_still_come_is_missing_too() {
    let waits = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let ranks = [&waits[..], &waits[..1], &waits[..1], &waits];
    let numbered = ranks.into_iter().zip(0..);
    let dumps: Vec<Dump> = numbered
        .map(|(operations, rank)| match rank {
            2 => dead(record(rank, 4, operations), 1.5),
            _ => alive(record(rank, 4, operations), 20.0),
        })
        .collect();
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(20.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &[2][..]));
    let late = &report.findings[1];
    assert_eq!((late.code, &late.culprit_ranks[..]), (Code::E101, &[1][..]));
    let expected = "rank 2 is missing there, too, and its process is gone";
    assert!(late.doubts.iter().any(|text| text == expected), "{late:?}");
}

/// Adds the losses of ranks to a record, each with its time.
fn loses(dump: Dump, lost: impl Iterator<Item = (Rank, f64)>) -> Dump {
    let mut dump = lost.fold(dump, |dump, (rank, then)| {
        fails(dump, FailureKind::PeerGone, &[rank], then)
    });
    for (failure, id) in dump.failures.iter_mut().zip(1..) {
        failure.id = id;
    }
    dump
}

#[test]
fn the_ranks_of_a_host_that_is_gone_are_all_blamed() {
    // Half of the survivors notice the last rank first.
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(2.0))];
    for lost in [vec![4, 5, 6, 7], vec![6, 7]] {
        let survivors = (0..8).filter(|rank| !lost.contains(rank));
        let dumps = survivors.map(|rank| {
            let times = (0..).map(|nth: u32| 2.0 + f64::from(nth) / 1e3);
            let mut order = lost.clone();
            if rank % 2 == 1 {
                order.reverse();
            }
            loses(record(rank, 8, &failed), order.into_iter().zip(times))
        });
        let report = analyze(&dumps.collect::<Vec<_>>(), &Policy::default());
        assert_eq!(root(&report), (Verdict::Stuck, Code::E150, &lost[..]));
        assert_eq!(report.word(), "failed");
    }
}

#[test]
fn a_rank_that_is_lost_later_in_another_group_may_have_left_because_of_the_first() {
    let failed = [(1.0, State::Failed(2.0))];
    let (even, odd): (&[Rank], &[Rank]) = (&[0, 2], &[1, 3]);
    let later = |when: f64| {
        let mut ends_early = in_groups(3, &[(1, "odd", odd)], &[(1.0, State::Pending)]);
        ends_early.identity.dump_time_ns = at(1.5);
        let loser = |rank, group, lost, then| {
            let mut dump = loses(
                in_groups(
                    rank,
                    &[(1, group, if group == "odd" { odd } else { even })],
                    &failed,
                ),
                [(lost, then)].into_iter(),
            );
            dump.failures[0].group = Some(1);
            dump
        };
        let dumps = [
            loser(0, "even", 2, 2.0),
            loser(1, "odd", 3, when),
            ends_early,
        ];
        let dumps = dumps.map(|mut dump| {
            dump.identity.reason = "failure".to_owned();
            dump.identity.world_size = Some(4);
            dump.groups[0].info.ranks = (0..4).collect();
            dump
        });
        let report = analyze(&dumps, &Policy::default());
        let finding = report.findings.into_iter().next();
        let finding = finding.expect("two ranks are lost");
        assert_eq!(finding.code, Code::E150);
        (finding.culprit_ranks, finding.doubts.join("\n"))
    };
    let (culprits, doubts) = later(2.4);
    assert_eq!(culprits, [2]);
    assert!(doubts.contains("rank 3 went later"), "{doubts}");
    assert_eq!(later(2.002).0, [2, 3]);
}
