//! The bars and the range of the timeline, and the parts of coalesced calls.

use super::common::{options, recorded, showing};
use rcomm_analyzer::Snapshot;
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::Liveness;
use rcomm_recorder::model::{Entry, EntryState, OpType};
use rcomm_recorder::publish::Dump;
use rcomm_top::page::{Body, Lane};
use rcomm_top::state::event::Event;
use rcomm_top::state::{Options, State, update};
use rcomm_top::view::text;
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

/// A recorded healthy job in which rank 0 has issued further operations: copies of its last one, changed by `change`.
fn with_more<const N: usize>(change: impl FnOnce(Entry) -> [Entry; N]) -> Snapshot {
    let mut snapshot = recorded(Situation::Healthy);
    let mut ranks = snapshot.ranks.to_vec();
    let mut dump = Dump::clone(&ranks[0].dumps[0]);
    let mut last = dump.entries.last().expect("the rank issued").clone();
    last.record_id += 1;
    dump.entries.extend(change(last));
    ranks[0].dumps[0] = Arc::new(dump);
    snapshot.ranks = ranks.into();
    snapshot
}

/// PyTorch's recorder for NCCL notes the state and the end of a coalesced call only at the marker that closes it.
#[test]
fn the_parts_of_a_coalesced_call_end_with_it() {
    let call = |marker_state| {
        with_more(|last| {
            let part = Entry {
                op: OpType::Recv,
                is_p2p: true,
                p2p_seq_id: 19,
                state: EntryState::Scheduled,
                retired: false,
                time_created_ns: last.time_created_ns + 1_000_000,
                time_discovered_completed_ns: 0,
                ..last.clone()
            };
            let completed = marker_state == EntryState::Completed;
            let marker = Entry {
                record_id: part.record_id + 1,
                op: OpType::Coalesced,
                state: marker_state,
                retired: completed,
                time_discovered_completed_ns: match completed {
                    true => part.time_created_ns + 600_000,
                    false => 0,
                },
                ..part.clone()
            };
            [part, marker]
        })
    };
    let part_of = |snapshot: Snapshot| {
        let mut state = showing(snapshot, (100, 30));
        let lane = lane_of(&mut state, 0);
        let part = lane.spans.into_iter().find(|span| span.op == "recv");
        let part = part.expect("the part has a bar");
        super::common::press(&mut state, ":rank 0<enter>");
        let screen = text::of(&state);
        let row = screen.lines().find(|line| line.contains("recv"));
        let row = row.unwrap_or_else(|| panic!("no row:\n{screen}"));
        (part, row.to_owned())
    };
    let (part, row) = part_of(call(EntryState::Completed));
    assert!(!part.pending, "{part:?}");
    assert_eq!(part.to_ns, Some(part.from_ns + 600_000));
    assert!(row.contains("completed"), "{row}");
    let (part, row) = part_of(call(EntryState::Scheduled));
    assert!(part.pending && part.to_ns.is_none(), "{part:?}");
    assert!(row.contains("queued"), "{row}");
}

#[test]
fn the_range_ends_after_the_last_event_also_of_an_operation_issued_before_others() {
    let mut ended_ns = 0;
    let snapshot = with_more(|last| {
        let long = Entry {
            time_created_ns: last.time_created_ns + 1_000_000,
            time_discovered_completed_ns: last.time_created_ns + 9_000_000_000,
            ..last
        };
        let short = Entry {
            record_id: long.record_id + 1,
            time_created_ns: long.time_created_ns + 1_000_000,
            time_discovered_completed_ns: long.time_created_ns + 2_000_000,
            ..long.clone()
        };
        ended_ns = long.time_discovered_completed_ns;
        [long, short]
    });
    let mut state = showing(snapshot, (100, 30));
    let lane = lane_of(&mut state, 0);
    let Body::Timeline(timeline) = &state.page.panes[0].body else {
        panic!("no timeline: {lane:?}");
    };
    assert!(timeline.to_ns > ended_ns, "{}", timeline.to_ns - ended_ns);
}

#[test]
fn a_replay_shows_the_whole_of_short_records() {
    let width_of = |options: Options| {
        let snapshot = recorded(Situation::StuckRank);
        let mut short = snapshot.clone();
        let mut ranks = short.ranks.to_vec();
        for view in &mut ranks {
            let mut dump = Dump::clone(&view.dumps[0]);
            let count = dump.entries.len();
            dump.entries.drain(..count - 2);
            view.dumps[0] = Arc::new(dump);
        }
        short.ranks = ranks.into();
        let mut state = State::new(options, (100, 30), snapshot.at);
        update(&mut state, Event::Observed(Arc::new(short)));
        state.scale.width_ns
    };
    let usual = width_of(options());
    let replay = Options {
        dumps: true,
        still: true,
        ..options()
    };
    let fitted = width_of(replay);
    assert!(fitted > 0 && fitted < usual, "{fitted} of {usual}");
}

#[test]
fn the_operation_that_a_rank_waits_in_is_drawn_over_what_is_queued_behind_it() {
    let mut snapshot = recorded(Situation::StuckRank);
    let wait = snapshot.report.waits[0].clone();
    let mut ranks = snapshot.ranks.to_vec();
    let view = ranks.iter_mut().find(|view| view.rank == wait.rank);
    let view = view.expect("the rank was read");
    let mut dump = Dump::clone(&view.dumps[0]);
    let mut queued = dump.entries.last().expect("the rank issued").clone();
    queued.record_id += 1;
    queued.collective_seq_id += 7;
    queued.time_created_ns += 1_000_000;
    dump.entries.push(queued);
    view.dumps[0] = Arc::new(dump);
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (100, 30));
    let lane = lane_of(&mut state, wait.rank);
    let calls: Vec<&str> = lane.spans.iter().rev().map(|span| &*span.call).collect();
    let number = |seq: u64| format!("#{seq} ");
    assert!(calls[0].starts_with(&number(wait.seq)), "{calls:?}");
    assert!(calls[1].starts_with(&number(wait.seq + 7)), "{calls:?}");
}
