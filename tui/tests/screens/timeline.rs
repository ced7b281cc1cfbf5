//! The bars of the timeline.

use super::common::{options, recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::Liveness;
use rcomm_top::page::{Body, Lane};
use rcomm_top::state::event::Event;
use rcomm_top::state::{Options, State, update};
use std::sync::Arc;

/// The lane of a rank on the screen with the timeline.
fn lane_of(state: &mut State, rank: u32) -> Lane {
    super::common::press(state, "7");
    match &state.page.panes[0].body {
        Body::Timeline(timeline) => {
            let lane = timeline.lanes.iter().find(|lane| lane.rank == rank);
            lane.cloned().expect("the rank has a lane")
        }
        other => panic!("no timeline: {other:?}"),
    }
}

#[test]
fn pending_operations_end_with_a_record_that_is_not_continued() {
    let snapshot = recorded(Situation::StuckRank);
    let waiting = snapshot.report.waits[0].rank;
    let mut alive = showing(snapshot.clone(), (100, 30));
    let pending = |lane: Lane| -> Vec<Option<i64>> {
        let pending = lane.spans.iter().filter(|span| span.pending);
        pending.map(|span| span.to_ns).collect()
    };
    assert_eq!(pending(lane_of(&mut alive, waiting)), [None]);
    let mut gone = snapshot.clone();
    let mut ranks = gone.ranks.to_vec();
    let view = ranks.iter_mut().find(|view| view.rank == waiting);
    let view = view.expect("the rank was read");
    view.liveness = Liveness::Dead;
    let ended_ns = view.dumps[0].identity.dump_time_ns;
    gone.ranks = ranks.into();
    let mut state = showing(gone, (100, 30));
    assert_eq!(pending(lane_of(&mut state, waiting)), [Some(ended_ns)]);
    let replay = Options {
        dumps: true,
        still: true,
        ..options()
    };
    let mut state = State::new(replay, (100, 30), snapshot.at);
    update(&mut state, Event::Observed(Arc::new(snapshot)));
    assert_eq!(pending(lane_of(&mut state, waiting)), [Some(ended_ns)]);
}
