use super::kept::trim;
use super::*;
use crate::finding::Code;
use crate::policy::Policy;
use crate::report::{Input, InstanceReport, InstanceState};
use crate::report::{Report, Verdict};
use crate::simulate::{Simulation, Situation};
use crate::source::{Liveness, Observation, Poll, Seen, SourceError};
use crate::{GroupRef, SeqKind};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::Dump;
use std::sync::Arc;
use std::time::Duration;

/// Counts what it is given: one finding-free report, everything unfinished as one instance.
fn count(dumps: &[Arc<Dump>], policy: &Policy) -> Report {
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
        joined: vec![],
        missing: vec![],
        unknown: vec![],
        state: InstanceState::Waiting,
        age_ms: policy.now_ns.map(|now| (now - since) as f64 / 1e6),
    });
    Report {
        schema: Report::SCHEMA.into(),
        verdict: Verdict::Running,
        findings: vec![],
        problems: vec![],
        input: Input {
            files: dumps.len(),
            ranks_expected: policy.world_size.unwrap_or(0) as usize,
            ranks_read: dumps.len(),
            entries: 0,
        },
        groups: vec![],
        ranks: vec![],
        in_flight: in_flight.into_iter().collect(),
        waits: vec![],
        stacks: vec![],
    }
}

fn at(seconds: f64) -> Moment {
    let elapsed = Duration::from_secs_f64(seconds);
    Moment {
        elapsed,
        wall_ns: elapsed.as_nanos() as i64,
    }
}

fn live() -> Live {
    Live::new(LiveOptions::default(), count, vec!["test".into()])
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
    let observations = ranks
        .map(|rank| Observation {
            rank,
            part: 0,
            liveness: Liveness::Alive,
            seen: Seen::Unchanged {
                heartbeat_ns: 0,
                as_of_ns: 0,
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
    // Between two operations: nothing is pending, so nothing can become overdue.
    live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.045));
    assert!(live.refresh(at(0.045)).is_some());
    live.observe(0, unchanged(0..4), at(1.0));
    assert!(live.refresh(at(1.0)).is_none());
    live.observe(0, unchanged(0..4), at(5.9));
    assert!(live.refresh(at(6.0)).is_none());
}

#[test]
fn what_is_pending_is_judged_again_when_it_becomes_overdue() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let now = simulation.fault_ns() as f64 / 1e9 + 1.0;
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at((now * 1e9) as i64)), at(now));
    let snapshot = live.refresh(at(now)).expect("first look");
    assert_eq!(snapshot.report.in_flight.len(), 1);
    let due = live.look_again(at(now)).expect("something is pending");
    let due = due.as_secs_f64();
    assert!(due > now + 3.0 && due < now + 5.0, "due {due}, now {now}");
    // Time alone makes nothing overdue: the operation may be over by now.
    assert_eq!(live.urgency(at(due + 60.0)), Urgency::No);
    live.observe(0, unchanged(0..16), at(due - 0.1));
    assert_eq!(live.urgency(at(due - 0.1)), Urgency::No);
    live.observe(0, unchanged(0..16), at(due));
    assert_eq!(live.urgency(at(due)), Urgency::First);
    assert!(live.refresh(at(due)).is_some());
    assert_eq!(live.urgency(at(due)), Urgency::No);
    // The others of its group issued theirs a little later.
    live.observe(0, unchanged(0..16), at(due + 1.0));
    assert_eq!(live.urgency(at(due + 1.0)), Urgency::More);
    assert!(live.refresh(at(due + 1.0)).is_some());
    // From then on only ages change.
    live.observe(0, unchanged(0..16), at(due + 5.0));
    assert_eq!(live.urgency(at(due + 5.0)), Urgency::No);
    live.observe(0, unchanged(0..16), at(due + 6.0));
    assert_eq!(live.urgency(at(due + 6.0)), Urgency::Usual);
}

#[test]
fn a_view_that_looks_too_rarely_does_not_call_the_job_stuck() {
    let simulation = Simulation::new(Situation::Healthy, 16, 0);
    let mut live = Live::new(LiveOptions::default(), crate::analyze, vec!["test".into()]);
    // Everybody is inside the first operation of a step, at every look.
    for now in [4.602, 9.802, 60.002] {
        live.observe(0, poll(simulation.dumps_at((now * 1e9) as i64)), at(now));
        let late = at(now + 30.0);
        let snapshot = live.refresh(late).expect("everything changed");
        assert_eq!(snapshot.report.verdict, Verdict::Running, "{now}");
        assert_eq!(live.urgency(at(now + 60.0)), Urgency::No);
    }
}

#[test]
fn a_clock_that_jumps_here_ages_nothing_and_hides_nothing() {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    let fault = simulation.fault_ns() as f64 / 1e9;
    for jump in [-86_400.0, -10.0, 10.0, 86_400.0] {
        let mut live = live();
        let here = |seconds: f64| Moment {
            elapsed: Duration::from_secs_f64(seconds),
            wall_ns: ((seconds + jump) * 1e9) as i64,
        };
        for (after, overdue) in [(1.0, false), (4.0, false), (6.0, true)] {
            let now = fault + after;
            live.observe(0, poll(simulation.dumps_at((now * 1e9) as i64)), here(now));
            let snapshot = live.refresh(here(now)).expect("records changed");
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
fn members_of_a_group_are_held_once_whoever_tells_them() {
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
        let dump = snapshot.rank(rank).and_then(RankView::dump).expect("read");
        dump.groups[0].info.ranks.clone()
    };
    live.observe(0, poll(dumps()), at(0.1));
    let first = live.refresh(at(0.1)).expect("first look");
    live.observe(0, poll(dumps()), at(1.0));
    let second = live.refresh(at(1.0)).expect("all changed");
    assert!(Arc::ptr_eq(&members(&first, 0), &members(&first, 3)));
    assert!(Arc::ptr_eq(&members(&first, 0), &members(&second, 2)));
}

#[test]
fn a_silent_rank_is_named_and_its_old_record_is_not_judged() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
    assert_eq!(live.refresh(at(0.1)).expect("first").report.input.files, 4);
    let mut later = unchanged((0..4).filter(|&rank| rank != 2)).expect("made above");
    later.observations.push(Observation {
        rank: 2,
        part: 0,
        liveness: Liveness::Unknown,
        seen: Seen::Failed("connection refused".into()),
    });
    live.observe(0, Ok(later), at(7.0));
    let snapshot = live.refresh(at(7.0)).expect("a rank fell silent");
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
    let view = snapshot.rank(2).expect("still shown");
    assert!(view.silent && view.dump().is_some());
}

#[test]
fn ranks_of_a_post_mortem_never_fall_silent() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = Live::new(LiveOptions::post_mortem(), count, vec!["dumps".into()]);
    live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
    assert!(live.refresh(at(0.1)).is_some());
    assert!(live.refresh(at(86_400.0)).is_none());
}

#[test]
fn a_source_that_fails_is_shown_with_its_error_and_its_ranks_fall_silent() {
    let simulation = Simulation::new(Situation::Healthy, 4, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
    live.refresh(at(0.1));
    let gone = SourceError::Unusable {
        place: "x".into(),
        reason: "gone".into(),
    };
    live.observe(0, Err(gone), at(8.0));
    let snapshot = live.refresh(at(8.0)).expect("an error is news");
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
    trim(&mut dump, 64);
    assert!(dump.entries.len() == 64 && before > 64);
    assert_eq!(dump.entries.last().cloned(), open);
    dump.entries[0].retired = false;
    dump.entries[0].state = EntryState::Started;
    trim(&mut dump, 8);
    assert_eq!(dump.entries.len(), 64);
}

#[test]
fn ranks_of_one_host_are_numbered_on_it() {
    let simulation = Simulation::new(Situation::Healthy, 16, 0);
    let mut live = live();
    live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
    let snapshot = live.refresh(at(0.1)).expect("first look");
    let view = snapshot.rank(11).expect("known");
    assert_eq!((view.host.as_ref(), view.local_rank), ("n001", 3));
}
