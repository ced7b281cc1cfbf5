//! A rank whose call has failed is not shown as waiting.

mod common;

use common::{recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{InstanceState, Report};
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
    assert!(screen.contains("x    x    x    x"), "{screen}");
    assert!(screen.contains("failed in all_reduce #49"), "{screen}");
    assert!(!screen.contains(" waits in "), "{screen}");
    common::press(&mut state, "4");
    let screen = text::of(&state);
    assert!(
        screen.contains("failed") && screen.contains("rank 21 is gone"),
        "{screen}"
    );
    assert!(!screen.contains("waiting"), "{screen}");
    common::press(&mut state, &format!(":rank {waiting}<enter>"));
    let screen = text::of(&state);
    assert!(
        screen.contains("its call failed: rank 21 is gone"),
        "{screen}"
    );
}
