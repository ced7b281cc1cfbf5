//! Tests verdicts on ranks that left before the others were done: they destroyed their groups, ended in order, raised an
//! exception, or were ended by a signal.

use super::*;
use crate::unnoted::{failing, with_exit};
use rcomm_recorder::model::RankStatus;

/// A record whose program left its groups at `seconds`, and had issued this.
fn left(rank: Rank, ops: &[(f64, State)], seconds: f64) -> Dump {
    let mut dump = record(rank, 4, ops);
    let status = dump.status.as_mut().expect("the record has a status");
    status.phase = RankStatus::LEFT.to_owned();
    status.phase_since_ns = at(seconds);
    dump
}

#[test]
fn a_rank_that_left_its_groups_before_its_peers_were_done_is_named_however_late_its_process_ended()
{
    let mut dumps = failing(1.4, 1.6, None);
    let done = [(0.0, State::Done(0.1))];
    for rank_1 in [
        closed(left(1, &done, 1.4), 9.0),
        dead(left(1, &done, 1.4), 9.0),
    ] {
        dumps[1] = rank_1;
        let report = judge(&dumps, 40.0);
        assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
        let finding = &report.findings[0];
        let expected =
            "the process of rank 1 is gone: it never issued all_reduce #2 on group default_pg";
        assert!(finding.sentence.starts_with(expected), "{finding:?}");
        assert!(
            finding.next.contains("left before its peers"),
            "{finding:?}"
        );
    }
    // Nothing shows that a rank which was about to come had anything to do with the failure.
    dumps[1] = dead(record(1, 4, &done), 9.0);
    assert!(judge(&dumps, 40.0).findings.is_empty());
    // While it lives, it is the one that does not come.
    dumps[1] = alive(left(1, &done, 1.4), 9.0);
    for rank in [0, 2, 3] {
        dumps[rank] = alive(dumps[rank].clone(), 9.0);
    }
    let policy = Policy {
        snapshot: true,
        now_ns: Some(at(9.0)),
        ..Policy::default()
    };
    let report = analyze(&dumps, &policy);
    assert_eq!(root(&report), (Verdict::Stuck, Code::E101, &[1][..]));
}

#[test]
fn ranks_that_issued_one_more_than_most_are_named_where_the_others_left() {
    let done = [(0.0, State::Done(0.1))];
    let more = [done[0], (1.0, State::Failed(1.4))];
    let dumps = [
        dead(record(0, 4, &more), 1.6),
        closed(left(1, &done, 1.3), 1.5),
        dead(left(2, &done, 1.4), 1.6),
        closed(left(3, &done, 1.3), 2.5),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Mismatch, Code::E104, &[0][..]));
    let finding = &report.findings[0];
    let expected = "rank 0 issued all_reduce #2 on group default_pg, and ranks 1-3 left without it: it failed when they \
                    did";
    assert!(finding.sentence.starts_with(expected), "{finding:?}");
    assert_eq!(finding.alternatives, [vec![0], vec![1, 2, 3]]);
}

#[test]
fn a_rank_that_sigterm_ended_alone_is_named_though_a_launcher_ended_the_others_by_it_too() {
    let inside = [(0.0, State::Done(0.1)), (1.0, State::Pending)];
    let failed = [(0.0, State::Done(0.1)), (1.0, State::Failed(1.21))];
    let asked = |rank, ops: &[_], then| with_exit(dead(record(rank, 3, ops), then), 143, then);
    let dumps = [
        asked(0, &failed, 1.25),
        asked(1, &inside[..1], 1.2),
        asked(2, &failed, 1.26),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    // A signal to all reaches all before any notices that another has ended.
    let dumps = [
        asked(0, &failed, 1.205),
        asked(1, &inside[..1], 1.2),
        asked(2, &failed, 1.206),
    ];
    assert_eq!(judge(&dumps, 40.0).verdict, Verdict::Cancelled);
}

#[test]
fn no_rank_is_named_where_one_exception_ended_the_program_on_all() {
    let between = [(0.0, State::Done(0.1))];
    let mut dumps: Vec<Dump> = [1.2, 3.5, 1.4]
        .iter()
        .zip(0..)
        .map(|(&then, rank)| with_exit(dead(record(rank, 3, &between), then), 1, then))
        .collect();
    for dump in &mut dumps {
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = "raised ValueError: no such file".to_owned();
    }
    let report = judge(&dumps, 40.0);
    let expected = "all 3 ranks ended by 13:00:03 UTC, none in order; rank 0 exited with code 1; each was in phase \
                    `raised ValueError: no such file`";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    // Where one raised another, that one may be the cause.
    let status = dumps[2].status.as_mut().expect("the record has a status");
    status.phase = "raised KeyError: 3".to_owned();
    assert!(!judge(&dumps, 40.0).findings.is_empty());
}

#[test]
fn a_rank_whose_exception_came_before_the_others_failed_is_named_however_late_its_process_ended() {
    let done = [(0.0, State::Done(0.1))];
    let more = [done[0], (1.0, State::Failed(1.024))];
    let raises = |rank, ops: &[_], what: &str, since| {
        let mut dump = with_exit(dead(record(rank, 3, ops), 1.9), 1, 1.9);
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = format!("raised {what}");
        status.phase_since_ns = at(since);
        dump
    };
    let dumps = [
        raises(0, &more, "RuntimeError: connection closed", 1.03),
        raises(1, &done, "OSError: disk full", 1.02),
        raises(2, &more, "RuntimeError: connection closed", 1.04),
    ];
    let report = judge(&dumps, 40.0);
    assert_eq!(root(&report), (Verdict::Crashed, Code::E150, &[1][..]));
    let sentence = &report.findings[0].sentence;
    assert!(
        sentence.contains("phase `raised OSError: disk full`"),
        "{sentence}"
    );
}

#[test]
fn ranks_that_signals_ended_before_the_others_failed_did_not_cancel_the_job() {
    let inside = [(0.0, State::Done(0.1))];
    let failed = [inside[0], (1.0, State::Failed(1.21))];
    let asked = |rank, ops: &[_], then| with_exit(dead(record(rank, 3, ops), then), 143, then);
    let dumps = [
        asked(0, &failed, 1.25),
        asked(1, &inside, 1.2),
        asked(2, &inside, 1.2),
    ];
    let report = judge(&dumps, 40.0);
    let expected = "the job was over at 13:00:01 UTC; one of ranks 1 and 2 ended first, and the records do not show which";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
}

#[test]
fn no_rank_is_named_where_all_ended_by_an_error_of_their_own() {
    let done = [(0.0, State::Done(0.1))];
    let exits = |code| {
        let dumps: Vec<Dump> = (0..3)
            .map(|rank| with_exit(dead(record(rank, 3, &done), 1.5), code, 1.5))
            .collect();
        judge(&dumps, 40.0)
    };
    let report = exits(3);
    let expected = "all 3 ranks ended by 13:00:01 UTC, none in order; rank 0 exited with code 3";
    assert_eq!(end(&report), (EndKind::Crashed, expected));
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn of_two_ranks_of_which_one_left_neither_is_sure_to_be_at_fault() {
    let done = [(0.0, State::Done(0.1))];
    let more = [done[0], (1.0, State::Failed(1.4))];
    let left = |rank, ops: &[_]| {
        let mut dump = record(rank, 2, ops);
        let status = dump.status.as_mut().expect("the record has a status");
        status.phase = RankStatus::LEFT.to_owned();
        status.phase_since_ns = at(1.3);
        dump
    };
    let dumps = [dead(record(0, 2, &more), 1.6), closed(left(1, &done), 1.5)];
    let report = judge(&dumps, 40.0);
    let finding = &report.findings[0];
    assert_eq!(finding.alternatives, [vec![1], vec![0]]);
    assert!(finding.confidence <= 0.6, "{finding:?}");
}
