mod ended;
mod unknown;

use super::*;
use crate::live::simulate::{Simulation, Situation};
use crate::live::source::{Liveness, Observation, Poll, Seen, SourceError};
use rcomm_recorder::model::{Entry, EntryState, OpType, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::{Dump, DumpGroup, Recorder, RingReader};
use rcomm_verdict::{
    Code, GroupRef, Input, InstanceReport, InstanceState, Policy, Report, SeqKind, Verdict, analyze,
};
use std::sync::Arc;
use std::time::Duration;

/// A judge without rules: its report has no findings, and one instance, as old as the oldest, for all operations that
/// are not retired.
fn judge_without_rules(dumps: &[Arc<Dump>], policy: &Policy) -> Report {
    let open = dumps
        .iter()
        .flat_map(|dump| &dump.entries)
        .filter(|e| !e.retired)
        .map(|e| e.time_created_ns)
        .min();
    let in_flight = open.map(|since| InstanceReport {
        group: GroupRef {
            name: "g".into(),
            desc: "g".into(),
            ranks: [].into(),
        },
        seq: 1,
        seq_kind: SeqKind::CollectiveSeqId,
        op: "all_reduce".into(),
        bytes: 0,
        least_bytes: None,
        joined: vec![],
        missing: vec![],
        unknown: vec![],
        state: InstanceState::Waiting,
        error: None,
        age_ms: policy.now_ns.map(|now| (now - since) as f64 / 1e6),
        overdue: true,
    });
    Report {
        schema: Report::SCHEMA.into(),
        verdict: Verdict::Running,
        findings: vec![],
        problems: vec![],
        end: None,
        input: Input {
            files: dumps.len(),
            ranks_expected: policy.world_size.unwrap_or(0) as usize,
            ranks_read: dumps.len(),
            may_have_more: false,
            entries: 0,
            logs: None,
        },
        groups: vec![],
        ranks: vec![],
        in_flight: in_flight.into_iter().collect(),
        waits: vec![],
        stacks: vec![],
        now: vec![],
    }
}

fn moment(seconds: f64) -> Moment {
    let elapsed = Duration::from_secs_f64(seconds);
    Moment {
        elapsed,
        wall_ns: elapsed.as_nanos() as i64,
    }
}

fn live() -> Live {
    Live::new(
        LiveOptions::default(),
        judge_without_rules,
        vec!["test".into()],
    )
}

fn poll(dumps: Vec<Dump>) -> Result<Poll, SourceError> {
    let observations = dumps
        .into_iter()
        .map(|dump| Observation {
            rank: dump.identity.rank.expect("simulated dumps know their rank"),
            part: 0,
            liveness: Liveness::Alive,
            seen: Seen::Changed(Box::new(dump)),
        })
        .collect();
    Ok(Poll {
        observations,
        ..Poll::default()
    })
}

fn unchanged(ranks: impl Iterator<Item = Rank>) -> Result<Poll, SourceError> {
    unchanged_as_of(ranks, 0.0)
}

fn unchanged_as_of(ranks: impl Iterator<Item = Rank>, seconds: f64) -> Result<Poll, SourceError> {
    let observations = ranks
        .map(|rank| Observation {
            rank,
            part: 0,
            liveness: Liveness::Alive,
            seen: Seen::Unchanged {
                heartbeat_ns: 0,
                as_of_ns: (seconds * 1e9) as i64,
            },
        })
        .collect();
    Ok(Poll {
        observations,
        ..Poll::default()
    })
}

#[test]
fn nothing_is_judged_again_while_nothing_changes() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    // Between two operations nothing is pending, so nothing can become overdue.
    live.observe(0, poll(simulation.dumps_at(45_000_000)), moment(0.045));
    assert!(live.refresh(moment(0.045)).is_some());
    live.observe(0, unchanged(0..4), moment(1.0));
    assert!(live.refresh(moment(1.0)).is_none());
    live.observe(0, unchanged(0..4), moment(5.9));
    assert!(live.refresh(moment(6.0)).is_none());
}

/// The record of one of two ranks, taken at `now_ns`: sixteen barriers, one every 50 ms, which all completed.
fn idle(rank: Rank, now_ns: i64) -> Dump {
    let mut dump = Dump {
        recorder: Recorder::Rcomm,
        groups: vec![DumpGroup {
            info: ProcessGroupInfo {
                id: 0,
                name: "0".to_owned(),
                desc: "default_pg".to_owned(),
                ranks: [0, 1].into(),
            },
            place: None,
            status: None,
        }],
        signatures: vec![Signature {
            backend: "cpu".to_owned(),
            op_name: "barrier".to_owned(),
            ..Signature::default()
        }],
        ..Dump::default()
    };
    dump.identity.rank = Some(rank);
    dump.identity.world_size = Some(2);
    dump.identity.dump_time_ns = now_ns;
    dump.entries = (1..=16)
        .map(|number| Entry {
            record_id: number,
            collective_seq_id: number,
            p2p_seq_id: 0,
            op_id: number,
            group: 0,
            signature: 0,
            stack: None,
            op: OpType::Barrier,
            state: EntryState::Completed,
            retired: true,
            is_p2p: false,
            peer: Peer::None,
            root: None,
            reduce_op: None,
            time_created_ns: number as i64 * 50_000_000,
            time_discovered_started_ns: 0,
            time_discovered_completed_ns: number as i64 * 50_000_000 + 1,
            duration_ms: None,
            graph_id: None,
            timeout_ms: 0,
            thread: None,
        })
        .collect();
    dump
}

#[test]
fn a_job_that_stops_communicating_is_judged_again() {
    let began = 0.845;
    let dumps = (0..2)
        .map(|rank| idle(rank, (began * 1e9) as i64))
        .collect();
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
    live.observe(0, poll(dumps), moment(began));
    let snapshot = live
        .refresh(moment(began))
        .expect("the first poll gives a snapshot");
    assert_eq!(snapshot.report.verdict, Verdict::Running);
    for (later, judged) in [(8.0, false), (10.5, true), (12.0, false), (15.6, true)] {
        live.observe(
            0,
            unchanged_as_of(0..2, began + later),
            moment(began + later),
        );
        let report = live
            .refresh(moment(began + later))
            .map(|snapshot| snapshot.report);
        assert_eq!(report.is_some(), judged, "{later}");
        if let Some(report) = report {
            assert_eq!(report.verdict, Verdict::Inconclusive, "{later}");
            assert!(report.silence().is_some(), "{later}");
        }
    }
}

#[test]
fn pending_operations_are_judged_again_when_they_become_overdue() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let now = simulation.fault_ns() as f64 / 1e9 + 1.0;
    let mut live = live();
    live.observe(
        0,
        poll(simulation.dumps_at((now * 1e9) as i64)),
        moment(now),
    );
    let snapshot = live
        .refresh(moment(now))
        .expect("the first poll gives a snapshot");
    assert_eq!(snapshot.report.in_flight.len(), 1);
    let due = live.poll_due(moment(now)).expect("an operation is pending");
    let due = due.as_secs_f64();
    assert!(due > now + 3.0 && due < now + 5.0, "due {due}, now {now}");
    // Time alone makes nothing overdue, since the operation may have ended.
    assert_eq!(live.urgency(moment(due + 60.0)), Urgency::No);
    live.observe(0, unchanged(0..16), moment(due - 0.1));
    assert_eq!(live.urgency(moment(due - 0.1)), Urgency::No);
    live.observe(0, unchanged(0..16), moment(due));
    assert_eq!(live.urgency(moment(due)), Urgency::First);
    assert!(live.refresh(moment(due)).is_some());
    assert_eq!(live.urgency(moment(due)), Urgency::No);
    // The other waiting ranks issued their operations a little later.
    live.observe(0, unchanged(0..16), moment(due + 1.0));
    assert_eq!(live.urgency(moment(due + 1.0)), Urgency::More);
    assert!(live.refresh(moment(due + 1.0)).is_some());
    // After that only ages change.
    live.observe(0, unchanged(0..16), moment(due + 5.0));
    assert_eq!(live.urgency(moment(due + 5.0)), Urgency::No);
    live.observe(0, unchanged(0..16), moment(due + 6.0));
    assert_eq!(live.urgency(moment(due + 6.0)), Urgency::Usual);
}

#[test]
fn pending_operations_are_shown_at_once_and_blame_no_rank_before_they_are_overdue() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let (fault, culprit) = (simulation.fault_ns() as f64 / 1e9, simulation.culprit());
    for (timeout_ms, overdue_after) in [(600_000, 5.0), (0, 5.0), (3000, 1.5)] {
        let mut live = Live::new(
            LiveOptions::default(),
            rcomm_verdict::analyze,
            vec!["test".into()],
        );
        let mut dumps = simulation.dumps_at(((fault + 1.0) * 1e9) as i64);
        for entry in dumps.iter_mut().flat_map(|dump| &mut dump.entries) {
            entry.timeout_ms = timeout_ms;
        }
        live.observe(0, poll(dumps), moment(fault + 1.0));
        let report = live
            .refresh(moment(fault + 1.0))
            .expect("the first poll gives a snapshot")
            .report;
        assert_eq!(
            (report.verdict, report.findings.len(), report.waits.len()),
            (Verdict::Running, 0, 0),
            "{timeout_ms}"
        );
        let waiting: Vec<_> = (report.in_flight.iter())
            .filter(|instance| instance.missing.contains(&culprit))
            .collect();
        assert!(!waiting.is_empty(), "{timeout_ms}: {:?}", report.in_flight);
        for instance in report.in_flight.iter() {
            let age = instance.age_ms.expect("times are known");
            let is_young = !instance.overdue && age <= 1000.0;
            assert!(is_young, "{timeout_ms}: {instance:?}");
        }
        assert!(report.groups.iter().any(|group| group.in_flight > 0));
        assert!(report.ranks.iter().any(|rank| rank.pending > 0));
        let due = live
            .poll_due(moment(fault + 1.0))
            .expect("an operation is pending");
        let due = due.as_secs_f64();
        let earliest = fault + overdue_after;
        assert!(
            (earliest - 0.1..earliest + 0.3).contains(&due),
            "{timeout_ms}: {due}"
        );
        live.observe(0, unchanged_as_of(0..16, due), moment(due));
        assert_eq!(live.urgency(moment(due)), Urgency::First);
        let report = live
            .refresh(moment(due))
            .expect("an operation that became overdue gives a snapshot")
            .report;
        assert_eq!(
            (report.verdict, &report.findings[0].culprit_ranks[..]),
            (Verdict::Stuck, &[culprit][..]),
            "{timeout_ms}"
        );
        assert!(report.in_flight[0].overdue);
    }
}

#[test]
fn a_job_that_goes_on_is_running_between_its_operations() {
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
    let mut look = |seconds: f64, began: Option<f64>| {
        let dumps = (0..2).map(|rank| {
            let mut dump = idle(rank, (seconds * 1e9) as i64);
            for entry in &mut dump.entries {
                let later_ns = (began.unwrap_or(0.0) * 1e9) as i64;
                entry.time_created_ns += later_ns;
                entry.time_discovered_completed_ns += later_ns;
            }
            dump
        });
        let seen = match began {
            Some(_) => poll(dumps.collect()),
            None => unchanged_as_of(0..2, seconds),
        };
        live.observe(0, seen, moment(seconds));
        let snapshot = live.refresh(moment(seconds));
        (
            snapshot.map(|snapshot| snapshot.report.verdict),
            live.due().map(|due| due.as_secs_f64().round()),
        )
    };
    // The last operation was completed at 0.8 s, then at 3.8 s.
    assert_eq!(look(1.0, Some(0.0)), (Some(Verdict::Running), Some(11.0)));
    assert_eq!(look(4.0, Some(3.0)), (Some(Verdict::Running), Some(14.0)));
    assert_eq!(look(8.0, None).0, None);
    // Then it has been quiet for as long as this view calls a job of such a pace silent.
    assert_eq!(look(14.0, None).0, Some(Verdict::Inconclusive));
}

#[test]
fn a_view_that_looks_too_rarely_does_not_call_the_job_stuck() {
    let simulation = Simulation::new(Situation::Healthy, 16, 0);
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_verdict::analyze,
        vec!["test".into()],
    );
    // At every poll, all ranks are in the first operation of a step.
    for now in [4.602, 9.802, 60.002] {
        live.observe(
            0,
            poll(simulation.dumps_at((now * 1e9) as i64)),
            moment(now),
        );
        let late = moment(now + 30.0);
        let snapshot = live
            .refresh(late)
            .expect("changed observations give a snapshot");
        assert_eq!(snapshot.report.verdict, Verdict::Running, "{now}");
        assert_eq!(live.urgency(moment(now + 60.0)), Urgency::No);
    }
}

#[test]
fn a_jump_of_the_local_clock_changes_no_age_and_hides_no_hang() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let fault = simulation.fault_ns() as f64 / 1e9;
    for jump in [-86_400.0, -10.0, 10.0, 86_400.0] {
        let mut live = live();
        let after_jump = |seconds: f64| Moment {
            elapsed: Duration::from_secs_f64(seconds),
            wall_ns: ((seconds + jump) * 1e9) as i64,
        };
        for (after, overdue) in [(1.0, false), (4.0, false), (6.0, true)] {
            let now = fault + after;
            let dumps = simulation.dumps_at((now * 1e9) as i64);
            live.observe(0, poll(dumps), after_jump(now));
            let snapshot = live
                .refresh(after_jump(now))
                .expect("changed records give a snapshot");
            let age = snapshot.report.in_flight[0]
                .age_ms
                .expect("times are known");
            assert_eq!(
                age >= 5e3,
                overdue,
                "jump {jump}, {after} s after the fault"
            );
        }
    }
}

#[test]
fn members_of_a_group_are_stored_once_for_all_ranks() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    let dumps = || {
        let mut dumps = simulation.dumps_at(45_000_000);
        for group in dumps.iter_mut().flat_map(|dump| &mut dump.groups) {
            group.info.ranks = group.info.ranks.to_vec().into();
        }
        dumps
    };
    let members = |snapshot: &Snapshot, rank| {
        let dump = snapshot
            .rank(rank)
            .and_then(RankView::first_dump)
            .expect("the rank was read");
        dump.groups[0].info.ranks.clone()
    };
    live.observe(0, poll(dumps()), moment(0.1));
    let first = live
        .refresh(moment(0.1))
        .expect("the first poll gives a snapshot");
    live.observe(0, poll(dumps()), moment(1.0));
    let second = live
        .refresh(moment(1.0))
        .expect("changed observations give a snapshot");
    assert!(Arc::ptr_eq(&members(&first, 0), &members(&first, 3)));
    assert!(Arc::ptr_eq(&members(&first, 0), &members(&second, 2)));
}

#[test]
fn a_silent_rank_is_named_and_its_old_record_is_not_judged() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), moment(0.1));
    assert_eq!(
        live.refresh(moment(0.1))
            .expect("the first poll gives a snapshot")
            .report
            .input
            .files,
        4
    );
    let mut later =
        unchanged((0..4).filter(|&rank| rank != 2)).expect("the observations succeeded");
    later.observations.push(Observation {
        rank: 2,
        part: 0,
        liveness: Liveness::Unknown,
        seen: Seen::Failed("connection refused".into()),
    });
    live.observe(0, Ok(later), moment(7.0));
    let snapshot = live
        .refresh(moment(7.0))
        .expect("a rank that fell silent gives a snapshot");
    assert_eq!(snapshot.report.input.files, 3);
    let finding = &snapshot.report.findings[0];
    assert_eq!(
        (finding.code, &finding.culprit_ranks[..]),
        (Code::W150, &[2][..])
    );
    assert!(
        finding.sentence.contains("connection refused"),
        "{}",
        finding.sentence
    );
    assert_eq!(snapshot.report.exit_code(), 1);
    let view = snapshot.rank(2).expect("the rank is still shown");
    assert!(view.silent && view.first_dump().is_some());
}

#[test]
fn ranks_of_a_post_mortem_never_fall_silent() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = Live::new(
        LiveOptions::post_mortem(),
        judge_without_rules,
        vec!["dumps".into()],
    );
    live.observe(0, poll(simulation.dumps_at(45_000_000)), moment(0.1));
    assert!(live.refresh(moment(0.1)).is_some());
    assert!(live.refresh(moment(86_400.0)).is_none());
}

#[test]
fn a_source_that_fails_is_shown_with_its_error_and_its_ranks_fall_silent() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), moment(0.1));
    live.refresh(moment(0.1));
    let gone = SourceError::Unusable {
        place: "x".into(),
        reason: "gone".into(),
    };
    live.observe(0, Err(gone), moment(8.0));
    let snapshot = live
        .refresh(moment(8.0))
        .expect("an error gives a snapshot");
    assert_eq!(
        snapshot.sources[0].error.as_deref(),
        Some("cannot use x: gone")
    );
    assert_eq!(snapshot.report.findings[0].culprit_ranks, [0, 1, 2, 3]);
}

#[test]
fn a_large_record_keeps_its_newest_and_every_pending_operation() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let mut dump = simulation
        .dumps_at(simulation.fault_ns() + 1_000_000_000)
        .remove(0);
    let (before, open) = (dump.entries.len(), dump.entries.last().cloned());
    dump.keep_newest(64);
    assert!(dump.entries.len() == 64 && before > 64);
    assert_eq!(dump.entries.last().cloned(), open);
    dump.entries[0].retired = false;
    dump.entries[0].state = EntryState::Started;
    dump.keep_newest(8);
    assert_eq!(dump.entries.len(), 64);
}

#[test]
fn ranks_of_one_host_are_numbered_on_it() {
    let simulation = Simulation::new(Situation::Healthy, 16, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), moment(0.1));
    let snapshot = live
        .refresh(moment(0.1))
        .expect("the first poll gives a snapshot");
    let view = snapshot.rank(11).expect("the snapshot has the rank");
    assert_eq!((view.host.as_ref(), view.local_rank), ("n001", 3));
}

#[test]
fn ages_in_sentences_follow_the_clock_of_the_report() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let now = simulation.fault_ns() as f64 / 1e9 + 20.0;
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_verdict::analyze,
        vec!["test".into()],
    );
    live.observe(
        0,
        poll(simulation.dumps_at((now * 1e9) as i64)),
        moment(now),
    );
    let report = live
        .refresh(moment(now))
        .expect("the first poll gives a snapshot")
        .report;
    let finding = &report.findings[0];
    let (age_in_report_ms, age) = (
        finding.age_ms.expect("the finding has an age"),
        report.in_flight[0].age_ms,
    );
    assert!((age_in_report_ms - age.expect("times are known")).abs() < 1.0);
    let then = format!(" {:.0} s,", age_in_report_ms / 1e3);
    let later = format!(" {:.0} s,", (age_in_report_ms + 90e3) / 1e3);
    assert!(finding.sentence.contains(&then), "{}", finding.sentence);
    assert_eq!(finding.sentence_after(0.0), finding.sentence);
    assert_eq!(
        finding.sentence_after(90e3),
        finding.sentence.replace(&then, &later)
    );
}

#[test]
fn hours_of_polls_keep_no_more_than_the_newest_operations() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0).with_window(200);
    let options = LiveOptions {
        record_budget: 100,
        ..LiveOptions::default()
    };
    let mut live = Live::new(options, judge_without_rules, vec!["test".into()]);
    for round in 1..1_000 {
        let now = f64::from(round) * 20.0 + 0.045;
        live.observe(
            0,
            poll(simulation.dumps_at((now * 1e9) as i64)),
            moment(now),
        );
        let snapshot = live
            .refresh(moment(now))
            .expect("changed observations give a snapshot");
        // One operation may be pending, and all later ones are kept with it.
        assert!(
            snapshot.entries() <= 4 * 104,
            "{round}: {}",
            snapshot.entries()
        );
    }
    let kept: usize = live
        .kept
        .slots
        .values()
        .map(|slot| slot.dump.as_ref().map_or(0, |dump| dump.entries.capacity()))
        .sum();
    assert!(kept <= 4 * 2 * 104, "{kept}");
    assert_eq!(live.kept.slots.len(), 4);
}
