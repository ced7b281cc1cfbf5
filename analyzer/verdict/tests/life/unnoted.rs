//! Tests of verdicts on rings whose recorder notes no failures, as that of PyTorch's hooks: only the operations show
//! what went wrong.

use super::*;

/// The rings of four ranks of which all but rank 1 fail in their second operation at `failed`.
fn failing(failed: f64, ended: f64, second_of_1: Option<(f64, State)>) -> Vec<Dump> {
    let fails = [(0.0, State::Done(0.1)), (1.0, State::Failed(failed))];
    let first = fails[0];
    let of_1: Vec<_> = std::iter::once(first).chain(second_of_1).collect();
    let of = |rank| record(rank, 4, if rank == 1 { &of_1 } else { &fails[..] });
    (0..4).map(|rank| dead(of(rank), ended)).collect()
}

#[test]
fn a_rank_that_came_after_its_peers_had_timed_out_is_late_and_they_are_not_at_fault() {
    let mut dumps = failing(31.0, 31.2, Some((34.0, State::Failed(34.1))));
    dumps[1] = dead(dumps[1].clone(), 34.3);
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
    let finding = &report.findings[0];
    let said = "rank 1 had not arrived in all_reduce #2 on group default_pg when it timed out after 30 s on ranks 0, 2 and 3, \
                at 13:00:31 UTC; it came 3.0 s later";
    assert!(finding.sentence.starts_with(said), "{finding:?}");
}

#[test]
fn a_rank_that_ended_in_order_before_its_peers_were_done_is_named() {
    let mut dumps = failing(1.4, 1.6, None);
    dumps[1] = closed(dumps[1].clone(), 1.5);
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let finding = &report.findings[0];
    let said = "the process of rank 1 is gone: it never issued all_reduce #2 on group default_pg, where 3 ranks waited for \
                400 ms; it last issued all_reduce #1 on group default_pg; it ended in order";
    assert!(finding.sentence.starts_with(said), "{finding:?}");
}

#[test]
fn the_phase_that_all_ranks_named_last_is_told_where_nothing_shows_how_they_ended() {
    let between = [(0.0, State::Done(0.1)), (1.0, State::Done(1.1))];
    let mut dumps: Vec<Dump> = (0..2)
        .map(|rank| dead(record(rank, 2, &between), 1.5))
        .collect();
    for dump in &mut dumps {
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = "ended without destroy_process_group()".to_owned();
    }
    let unknown = "no process of all 2 ranks was left after 13:00:01 UTC; none was in an operation, and how they ended is \
                   not recorded";
    let report = judge(&dumps, 40.0);
    assert_eq!(report.verdict, Verdict::Inconclusive);
    let phase = "; each was in phase `ended without destroy_process_group()`";
    assert_eq!(end(&report).1, format!("{unknown}{phase}"));
    dumps[1]
        .status
        .as_mut()
        .expect("the record has a status")
        .phase
        .clear();
    assert_eq!(end(&judge(&dumps, 40.0)).1, unknown);
}
