//! A rank whose call has failed, or whose process is gone, is not shown as waiting; filters by state; and how many
//! ranks a message needs.

mod common;

use common::{recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{Code, InstanceState, Report, SeqKind};
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::Dump;
use rcomm_top::view::text;
use std::sync::Arc;

#[test]
fn a_rank_whose_call_has_failed_is_marked_as_failed_with_its_error() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let error = || Some("rank 21 is gone: its connection ended".to_owned());
    for instance in &mut report.in_flight {
        instance.state = InstanceState::Failed;
        instance.error = error();
    }
    for rank in &mut report.ranks {
        (rank.pending, rank.failure) = (0, error());
    }
    let waiting = report.waits[0].rank;
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    let screen = text::of(&state);
    assert!(screen.contains("xxxx!xxxx"), "{screen}");
    assert!(screen.contains("failed in all_reduce #49"), "{screen}");
    assert!(!screen.contains(" waits in "), "{screen}");
    common::press(&mut state, "4");
    let screen = text::of(&state);
    assert!(
        screen.contains("failed") && screen.contains("rank 21 is gone"),
        "{screen}"
    );
    assert!(!screen.contains("waiting"), "{screen}");
    // It was issued 102 s ago, and has failed since.
    assert!(!screen.contains("102 s"), "{screen}");
    common::press(&mut state, &format!(":rank {waiting}<enter>"));
    let screen = text::of(&state);
    assert!(
        screen.contains("its call failed: rank 21 is gone"),
        "{screen}"
    );
}

#[test]
fn a_filter_by_state_finds_what_has_failed_also_if_its_ranks_are_at_fault() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let accused = report.findings[0].group.clone();
    for instance in &mut report.in_flight {
        // An operation that fails at once is never overdue.
        (instance.state, instance.overdue) = (InstanceState::Failed, false);
    }
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    let accused = state.label_of(&accused.expect("the finding names its group"));
    common::press(&mut state, "2/state:failed<enter>");
    let failed = text::of(&state);
    assert!(failed.contains(&format!("! {accused} ")), "{failed}");
    assert!(failed.contains("\nx "), "{failed}");
    common::press(&mut state, "z");
    assert_eq!(state.page.rows(0), failed.matches("\nx ").count() + 1);
    common::press(
        &mut state,
        "/<backspace><backspace><backspace><backspace><backspace><backspace>stuck<enter>",
    );
    assert_eq!(state.filter.text(), "state:stuck");
    assert_eq!(state.page.rows(0), 0, "{}", text::of(&state));
    // Problems only.
    common::press(&mut state, "<esc><esc>z4");
    let screen = text::of(&state);
    assert!(
        screen.contains("\nx ") && screen.contains(" failed "),
        "{screen}"
    );
}

#[test]
fn a_filter_for_what_runs_finds_what_is_queued_in_every_view() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let operations = report.in_flight.len();
    for instance in &mut report.in_flight {
        instance.state = InstanceState::Queued;
    }
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    for (word, rows) in [
        ("running", operations),
        ("queued", operations),
        ("waiting", 0),
    ] {
        common::press(&mut state, &format!(":filter state:{word}<enter>4o"));
        assert_eq!(state.page.rows(0), rows, "{word}: {}", text::of(&state));
        common::press(&mut state, "o");
    }
}

#[test]
fn a_job_whose_ranks_have_all_failed_because_one_is_gone_is_not_called_stuck() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    assert!(text::of(&showing(snapshot.clone(), (120, 40))).contains(" STUCK for "));
    report.findings[0].code = Code::E150;
    for rank in &mut report.ranks {
        (rank.pending, rank.failure) = (0, Some("rank 21 is gone".to_owned()));
    }
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (120, 40)));
    assert!(screen.contains(" FAILED for "), "{screen}");
    assert!(!screen.contains("STUCK"), "{screen}");
}

#[test]
fn no_rank_waits_for_the_culprit_once_all_have_failed() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    for rank in &mut report.ranks {
        (rank.pending, rank.failure) = (0, Some("rank 21 is gone".to_owned()));
    }
    let culprit = report.waits[0].on[0];
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    common::press(&mut state, &format!(":rank {culprit}<enter>"));
    let screen = text::of(&state);
    assert!(screen.contains(" waited for it directly"), "{screen}");
    assert!(!screen.contains("wait for it"), "{screen}");
}

#[test]
fn no_operation_of_a_process_that_is_gone_is_called_pending() {
    let mut snapshot = recorded(Situation::StuckRank);
    let waiting = snapshot.report.waits[0].rank;
    let mut ranks = snapshot.ranks.to_vec();
    let view = ranks.iter_mut().find(|view| view.rank == waiting);
    view.expect("the rank has a record").liveness = Liveness::Dead;
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (120, 40));
    // The timeline has the selected rank's newest operation above it.
    common::press(&mut state, &format!("7/rank:{waiting}<enter>("));
    let screen = text::of(&state);
    assert!(
        screen.contains("not ended: its process is gone"),
        "{screen}"
    );
    assert!(!screen.contains("pending for"), "{screen}");
}

#[test]
fn a_time_that_only_a_failed_operation_has_does_not_hide_the_others() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut ranks = snapshot.ranks.to_vec();
    for dump in &mut ranks[0].dumps {
        let mut changed = Dump::clone(dump);
        for entry in &mut changed.entries {
            entry.duration_ms = None;
        }
        let newest = changed.entries.last_mut().expect("the rank has a record");
        (newest.state, newest.duration_ms) = (EntryState::Failed, Some(18.0));
        *dump = Arc::new(changed);
    }
    let rank = ranks[0].rank;
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (120, 40));
    common::press(&mut state, &format!(":rank {rank}<enter>"));
    let screen = text::of(&state);
    assert!(screen.contains("took"), "{screen}");
    let completed = screen.lines().find(|line| line.contains("completed"));
    assert!(
        completed.is_some_and(|line| line.contains(" ms ")),
        "{screen}"
    );
}

#[test]
fn a_message_is_complete_with_two_ranks() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    report.in_flight.truncate(1);
    let message = &mut report.in_flight[0];
    (message.op, message.seq_kind) = ("recv".to_owned(), SeqKind::P2pSeqId);
    message.joined.truncate(1);
    message.missing.truncate(1);
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    common::press(&mut state, "4");
    let screen = text::of(&state);
    let row = screen.lines().find(|line| line.contains("recv"));
    assert!(row.is_some_and(|row| row.contains(" 1/2 ")), "{screen}");
}
