//! Tests findings on orders of issue that do no visible harm: crossed call sites (W270), inverted groups (W280) and
//! opposite sends (W290). Also tests findings on a rank whose collectives are shifted against those of the others
//! (E103, E104, E113), and an operation that only the status of its group shows.

mod ahead;
mod crossed;
mod job;
mod late;
mod moments;

use job::{Call, job};
use rcomm_recorder::model::{EntryState, ProcessGroupStatus};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Finding, Policy, Verdict, analyze};

fn order_warnings(dumps: &[Dump]) -> Vec<Finding> {
    let report = analyze(dumps, &Policy::default());
    let is_order_warning =
        |finding: &Finding| matches!(finding.code, Code::W270 | Code::W280 | Code::W290);
    report
        .findings
        .into_iter()
        .filter(is_order_warning)
        .collect()
}

/// A job in which each rank issues one all_reduce after the other, from its lines of the source.
fn from_lines(lines: &[&[u32]]) -> Vec<Dump> {
    let programs = lines.iter().map(|lines| {
        let calls = lines.iter().map(|&line| Call::AllReduce { group: 0, line });
        calls.collect()
    });
    job("nccl", &programs.collect::<Vec<_>>())
}

#[test]
fn two_calls_that_a_rank_crosses_are_named_with_their_places() {
    let usual: &[u32] = &[10, 20, 10, 20, 10, 20];
    let found = order_warnings(&from_lines(&[
        usual,
        usual,
        &[10, 20, 20, 10, 10, 20],
        usual,
    ]));
    let [finding] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(
        (finding.code, finding.culprit_ranks.as_slice()),
        (Code::W270, &[2][..])
    );
    assert!(
        finding.sentence.starts_with(
            "rank 2 issued #3 and #4 on group default_pg from train.py:20 and train.py:10, ranks 0, 1 and 3 from \
             train.py:10 and train.py:20:"
        ),
        "{}",
        finding.sentence
    );
}

#[test]
fn of_two_ranks_that_cross_neither_is_blamed() {
    let found = order_warnings(&from_lines(&[&[10, 20, 10, 20, 10], &[10, 20, 20, 10, 10]]));
    let [finding] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(finding.code, Code::W270);
    assert!(finding.culprit_ranks.is_empty());
    assert_eq!(finding.alternatives.len(), 2);
}

#[test]
fn a_crossing_is_seen_through_a_wrapper_that_all_calls_go_through() {
    let usual: &[u32] = &[1010, 1020, 1010, 1020, 1010, 1020];
    let found = order_warnings(&from_lines(&[
        usual,
        usual,
        &[1010, 1020, 1020, 1010, 1010, 1020],
    ]));
    let [finding] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(
        (finding.code, finding.culprit_ranks.as_slice()),
        (Code::W270, &[2][..])
    );
    assert!(
        finding
            .sentence
            .contains("from train.py:1020 and train.py:1010"),
        "{}",
        finding.sentence
    );
}

#[test]
fn ranks_that_take_turns_do_not_cross() {
    // `if rank == turn { reduce(mine) } else { reduce(zeros) }`
    assert_eq!(
        order_warnings(&from_lines(&[&[10, 20, 5], &[20, 10, 5]])),
        []
    );
    assert_eq!(
        order_warnings(&from_lines(&[
            &[10, 20, 20, 5],
            &[20, 10, 20, 5],
            &[20, 20, 10, 5]
        ])),
        []
    );
    // A rank without data issues from line 20 instead of 10: rank 1 in the first operation, rank 0 in the third.
    assert_eq!(
        order_warnings(&from_lines(&[&[10, 30, 20, 30, 10], &[20, 30, 10, 30, 10]])),
        []
    );
}

#[test]
fn a_call_that_was_left_out_is_no_crossing() {
    let usual: &[u32] = &[10, 20, 30, 10, 20, 30, 10, 20, 30];
    let skipped: &[u32] = &[10, 20, 30, 20, 30, 10, 20, 30];
    assert_eq!(
        order_warnings(&from_lines(&[usual, usual, usual, skipped])),
        []
    );
}

/// Three steps, each on the world, `group` 0, and then on `group` 1 of the same ranks. The rank `odd` inverts the
/// second step.
fn in_two_groups(backend: &str, odd: usize) -> Vec<Dump> {
    let programs: Vec<Vec<Call>> = (0..3)
        .map(|rank| {
            let mut groups = [0, 1, 0, 1, 0, 1];
            if rank == odd {
                groups.swap(2, 3);
            }
            groups
                .map(|group| Call::AllReduce {
                    group,
                    line: 10 + group,
                })
                .to_vec()
        })
        .collect();
    job(backend, &programs)
}

#[test]
fn groups_in_the_inverted_order_are_named_though_all_operations_completed() {
    for odd in 0..3 {
        let found = order_warnings(&in_two_groups("nccl", odd));
        let [finding] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(
            (finding.code, finding.culprit_ranks.as_slice()),
            (Code::W280, &[odd as u32][..])
        );
        let issues = format!(
            "rank {odd} issues all_reduce #2 on group dp/1 before all_reduce #2 on group default_pg, "
        );
        assert!(
            finding.sentence.starts_with(&issues),
            "{}",
            finding.sentence
        );
    }
    assert_eq!(order_warnings(&in_two_groups("nccl", 3)), []);
}

#[test]
fn groups_of_a_cpu_backend_may_be_used_in_any_order() {
    assert_eq!(order_warnings(&in_two_groups("gloo", 1)), []);
}

#[test]
fn opposite_sends_are_named_unless_one_side_receives_first_or_both_are_batched() {
    let send = |peer, batch| Call::Send { peer, batch };
    let receive = |peer, batch| Call::Receive { peer, batch };
    let warnings_of =
        |backend: &str, sides: [[Call; 2]; 2]| order_warnings(&job(backend, &sides.map(Vec::from)));
    let found = warnings_of(
        "nccl",
        [[send(1, 1), receive(1, 2)], [send(0, 1), receive(0, 2)]],
    );
    let [finding] = found.as_slice() else {
        panic!("{found:?}")
    };
    assert_eq!(finding.code, Code::W290);
    assert!(
        finding
            .sentence
            .starts_with("ranks 0 and 1 each send to the other before"),
        "{}",
        finding.sentence
    );
    let in_order = [[send(1, 1), receive(1, 2)], [receive(0, 1), send(0, 2)]];
    assert_eq!(warnings_of("nccl", in_order), []);
    assert_eq!(
        warnings_of(
            "nccl",
            [[send(1, 1), receive(1, 1)], [send(0, 1), receive(0, 1)]]
        ),
        []
    );
    let on_host = [[send(1, 1), receive(1, 2)], [send(0, 1), receive(0, 2)]];
    assert_eq!(warnings_of("gloo", on_host), []);
}

/// Each rank issues one all_reduce for each of its numbers of elements; only the first two complete.
fn of_sizes(sizes: &[&[u64]]) -> Vec<Dump> {
    let calls = |sizes: &&[u64]| vec![Call::AllReduce { group: 0, line: 10 }; sizes.len()];
    let mut dumps = job("nccl", &sizes.iter().map(calls).collect::<Vec<_>>());
    for (dump, sizes) in dumps.iter_mut().zip(sizes) {
        for (entry, &size) in dump.entries.iter_mut().zip(*sizes) {
            let mut signature = dump.signatures[0].clone();
            (signature.input_sizes, signature.output_sizes) = (vec![vec![size]], vec![vec![size]]);
            entry.signature = dump.signatures.len() as u32;
            dump.signatures.push(signature);
            if entry.collective_seq_id > 2 {
                (entry.state, entry.retired) = (EntryState::Started, false);
                entry.time_discovered_completed_ns = 0;
            }
        }
    }
    dumps
}

#[test]
fn the_finding_on_a_rank_with_shifted_collectives_names_the_first_of_them() {
    let usual: &[u64] = &[1, 2, 3, 4, 5, 6, 7, 8];
    for (other, code, words) in [
        (
            &[1, 2, 4, 3, 5, 6, 7, 8][..],
            Code::E113,
            "rank 2 issued the collectives on group default_pg in another order, beginning with #3: ",
        ),
        (
            &[1, 2, 4, 5, 6, 7, 8, 9],
            Code::E103,
            "#3 on group default_pg: the collectives that follow (train.py:10) are one ahead",
        ),
        (
            &[1, 2, 5, 6, 7, 8, 9, 10],
            Code::E103,
            "rank 2 left out 2 collectives on group default_pg, beginning with all_reduce",
        ),
        (
            &[1, 2, 21, 22, 3, 4, 5, 6],
            Code::E104,
            "rank 2 issued 2 collectives on group default_pg, beginning with all_reduce",
        ),
    ] {
        let dumps = of_sizes(&[usual, usual, other, usual]);
        let first = analyze(&dumps, &Policy::default()).findings.remove(0);
        assert_eq!((first.code, &*first.culprit_ranks), (code, &[2][..]));
        assert!(first.sentence.contains(words), "{}", first.sentence);
    }
}

#[test]
fn a_skip_that_also_fits_another_order_is_not_called_another_order() {
    // The first of the last four was left out; that the first two were swapped fits as well.
    let usual: &[u64] = &[1, 2, 3, 4, 3, 3, 3];
    let skipped: &[u64] = &[1, 2, 4, 3, 3, 3];
    let dumps = of_sizes(&[usual, usual, skipped, usual]);
    let first = analyze(&dumps, &Policy::default()).findings.remove(0);
    assert_eq!((first.code, &*first.culprit_ranks), (Code::E103, &[2][..]));
    // With as many calls as the others, the rank may have done either.
    let either: &[u64] = &[1, 2, 4, 3, 3, 3, 3];
    let dumps = of_sizes(&[usual, usual, either, usual]);
    let first = analyze(&dumps, &Policy::default()).findings.remove(0);
    assert_eq!((first.code, &*first.culprit_ranks), (Code::E113, &[2][..]));
    assert!(first.confidence <= 0.8, "{first:?}");
    assert_eq!(first.doubts.len(), 1, "{first:?}");
}

#[test]
fn a_job_with_an_operation_that_only_its_groups_status_shows_is_not_called_healthy() {
    // A program that does not wait for a collective goes on with messages, which overwrite it in the ring.
    let send = |peer| (1..=4).map(move |batch| Call::Send { peer, batch });
    let receive = |peer| (1..=4).map(move |batch| Call::Receive { peer, batch });
    let dumps = |completed: i64| {
        let mut dumps = job("nccl", &[send(1).collect(), receive(0).collect()]);
        for dump in &mut dumps {
            for entry in &mut dump.entries {
                entry.record_id += 10;
            }
            dump.groups[0].status = Some(ProcessGroupStatus {
                last_enqueued: 5,
                last_started: 5,
                last_completed: completed,
                ..ProcessGroupStatus::default()
            });
        }
        dumps
    };
    let report = analyze(&dumps(4), &Policy::default());
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let expected = "by the status of group default_pg, ranks 0 and 1 have issued an operation on it and not completed \
                    it, and the rings hold none that is pending";
    let mut problems = report.problems.iter();
    assert!(
        problems.any(|problem| problem.sentence == expected),
        "{report:?}"
    );
    let report = analyze(&dumps(5), &Policy::default());
    assert_eq!(report.verdict, Verdict::Healthy);
}

/// Two ranks that issue one all_reduce after the other, from these lines. The seventh of rank 1 is of another size, and
/// those of either rank from the seventh on have not begun.
fn with_another_size(lines: [&[u32]; 2]) -> Vec<Dump> {
    let mut dumps = from_lines(&lines);
    for (rank, dump) in dumps.iter_mut().enumerate() {
        let mut small = dump.signatures[0].clone();
        (small.input_sizes, small.output_sizes) = (vec![vec![1]], vec![vec![1]]);
        dump.signatures.push(small);
        for entry in &mut dump.entries[6..] {
            (entry.state, entry.retired) = (EntryState::Scheduled, false);
            entry.time_discovered_started_ns = 0;
            entry.time_discovered_completed_ns = 0;
        }
        if rank == 1 {
            dump.entries[6].signature = 3;
        }
    }
    dumps
}

#[test]
fn of_two_ranks_neither_is_blamed_where_one_takes_a_branch_for_the_first_time() {
    // Three all_reduces in each step, and one more of rank 1 after the second. The branch may be due, as an evaluation
    // after some steps is. So may be one in place of the usual call.
    let usual = [300; 9];
    let more = [300, 300, 300, 300, 300, 300, 310, 300, 300, 300];
    for lines in [[&usual[..], &more], [&usual, &more[..9]]] {
        let report = analyze(&with_another_size(lines), &Policy::default());
        assert_eq!(report.verdict, Verdict::Mismatch);
        let finding = &report.findings[0];
        assert_eq!(finding.culprit_ranks, [0; 0], "{finding:?}");
        assert_eq!(finding.alternatives, [vec![0], vec![1]]);
        assert!(finding.confidence <= 0.5, "{finding:?}");
    }
}

#[test]
fn a_rank_is_blamed_for_another_size_at_its_usual_line_whatever_its_callers_are() {
    // The ranks call from one line, or each comes to the call by a caller of its own.
    for lines in [[300, 300], [1300, 1400]] {
        let [first, second] = lines.map(|line| [line; 9]);
        let dumps = with_another_size([&first, &second]);
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(report.verdict, Verdict::Mismatch);
        let finding = &report.findings[0];
        assert_eq!(finding.culprit_ranks, [1], "{lines:?}, {finding:?}");
        assert!(finding.confidence > 0.5, "{finding:?}");
    }
}
