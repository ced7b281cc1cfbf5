//! The newest operations of each rank, for the timeline of the page.

use super::SnapshotSelector;
use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::Json;
use axum::extract::{Query, State};
use rcomm_analyzer::filter::{Filter, Subject};
use rcomm_analyzer::format::GroupNames;
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{GroupRef, Snapshot, ended_ns, seq_of, status_entry};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use serde::{Deserialize, Serialize};

/// Target for the number of operations in an answer, divided equally among the ranks. An answer may exceed it: the
/// share of a rank is at least 4 operations, and each of its dumps, one for each recorder, may have that many.
const TARGET_SLICES: usize = 20_000;

#[derive(Debug, Deserialize)]
pub(crate) struct TimelineQuery {
    /// Selects the operations, in the filter language.
    #[serde(default)]
    filter: String,
    /// Seconds from the start of the timeline to the newest event; 10 by default.
    seconds: Option<f64>,
    /// This and the next two select the snapshot, as in [`SnapshotSelector`].
    at: Option<u64>,
    upload: Option<String>,
    job: Option<String>,
}

/// One operation on one rank.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Slice {
    /// Time of the issue in µs after the start of the timeline; negative if it was before.
    start: i64,
    /// Duration in µs; `None` if no end is recorded.
    length: Option<i64>,
    /// Index into `groups` of the [`Timeline`].
    group: usize,
    /// Index into `ops` of the [`Timeline`].
    op: usize,
    /// `p2p_seq_id` of a send, a receive or the end of a batch of them, else `collective_seq_id`.
    seq: u64,
    state: EntryState,
    /// Id of the CUDA graph that contains the operation. The operation runs whenever the graph is launched; launches
    /// are not recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    graph_id: Option<u64>,
}

/// One lane of the timeline: the operations of one dump, oldest first. A rank with several recorders has a lane for
/// each.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Lane {
    rank: Rank,
    host: String,
    /// When the record ends, in µs after the start of the timeline: its process is gone, so operations without an end
    /// do not continue. Absent if the process lives or may live.
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<i64>,
    slices: Vec<Slice>,
}

/// The answer: the operations of all ranks. Empty if none is recorded.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(crate) struct Timeline {
    /// Start of the timeline, wall clock, ns since the epoch; as text, since it exceeds JavaScript's
    /// exact integers.
    origin_ns: String,
    /// Length in µs, up to the newest event or, if the job hangs, to the time of the newest dump.
    length: i64,
    /// Names of the groups.
    groups: Vec<String>,
    /// Names of the operations.
    ops: Vec<String>,
    lanes: Vec<Lane>,
    /// Number of operations left out because of the limit: the oldest of each dump.
    omitted: usize,
}

pub(crate) async fn timeline(
    State(app): State<AppState>,
    Query(query): Query<TimelineQuery>,
) -> Result<Json<Timeline>, Refusal> {
    let filter = Filter::parse(&query.filter).map_err(|error| Refusal::Query(error.to_string()))?;
    let seconds = query.seconds.unwrap_or(10.0);
    if !(0.001..=1e6).contains(&seconds) {
        return Err(Refusal::Query(format!(
            "`seconds` is {seconds}, expected 0.001 to 1000000"
        )));
    }
    let selector = SnapshotSelector {
        at: query.at,
        upload: query.upload,
        job: query.job,
    };
    let snapshot = selector.snapshot(&app).await?;
    Ok(Json(build_timeline(
        &snapshot,
        &filter,
        (seconds * 1e9) as i64,
    )))
}

/// The index of `value` in `list`, to which it is added if it is new.
fn index_in<T: PartialEq>(list: &mut Vec<T>, value: T) -> usize {
    let known = list.iter().position(|other| *other == value);
    known.unwrap_or_else(|| {
        list.push(value);
        list.len() - 1
    })
}

/// The timeline from `window_ns` before the newest event on, of the operations that match the filter. Pending
/// operations are on it however old they are.
fn build_timeline(snapshot: &Snapshot, filter: &Filter, window_ns: i64) -> Timeline {
    let ends = snapshot.dumps().flat_map(|(_, dump)| {
        let newest = dump.entries.iter().rev().take(64);
        newest.map(|entry| {
            entry
                .time_created_ns
                .max(entry.time_discovered_completed_ns)
        })
    });
    let Some(end) = ends.max() else {
        return Timeline::default();
    };
    let is_settled = |status: &Entry| status.state >= EntryState::Completed || status.retired;
    let now = snapshot
        .dumps()
        .map(|(_, dump)| dump.identity.dump_time_ns)
        .max();
    let mut pending = snapshot.report.pending();
    let hangs = pending.any(|instance| instance.overdue && instance.age_ms.is_some());
    // While the job hangs, the timeline grows to the present, and its last operations stay in view.
    let last = if hangs {
        now.unwrap_or(end).max(end)
    } else {
        end
    };
    let origin = end.saturating_sub(window_ns);
    let mut timeline = Timeline {
        origin_ns: origin.to_string(),
        length: last.saturating_sub(origin) / 1000,
        ..Timeline::default()
    };
    let names = GroupNames::of(&snapshot.report);
    let share = (TARGET_SLICES / snapshot.ranks.len().max(1)).max(4);
    let host_of =
        |rank: Rank| -> &str { snapshot.rank(rank).map_or("", |view| view.host.as_ref()) };
    let is_gone = |rank: Rank| {
        let view = snapshot.rank(rank);
        view.is_some_and(|view| view.liveness == Liveness::Dead)
    };
    for (rank, dump) in snapshot.counted() {
        let groups: Vec<GroupRef> = dump
            .groups
            .iter()
            .map(|group| GroupRef {
                name: group.info.name.clone(),
                desc: group.info.desc.clone(),
                ranks: group.info.ranks.clone(),
            })
            .collect();
        let mut slices = Vec::new();
        for entry in dump.entries.iter().rev() {
            let status = status_entry(dump, entry);
            let last_event_ns = status
                .time_discovered_completed_ns
                .max(entry.time_created_ns);
            if last_event_ns < origin && is_settled(status) {
                continue;
            }
            let Some(group) = groups.get(entry.group as usize) else {
                continue;
            };
            let seq = seq_of(entry);
            let ranks = [rank];
            let host_of_rank = |rank: Rank| host_of(rank);
            let subject = Subject {
                ranks: &ranks,
                group: Some(group),
                op: Some(entry.op.name()),
                host_of: Some(&host_of_rank),
                seq: Some(seq),
                ..Subject::default()
            };
            if !filter.matches(&subject) {
                continue;
            }
            if slices.len() == share {
                timeline.omitted += 1;
                continue;
            }
            let ended = ended_ns(dump, entry);
            slices.push(Slice {
                start: entry.time_created_ns.saturating_sub(origin) / 1000,
                length: (ended > 0)
                    .then(|| ended.saturating_sub(entry.time_created_ns).max(0) / 1000),
                group: index_in(&mut timeline.groups, names.name(group)),
                op: index_in(&mut timeline.ops, entry.op.name().to_owned()),
                seq,
                state: status.state,
                graph_id: entry.graph_id,
            });
        }
        slices.reverse();
        if !slices.is_empty() {
            timeline.lanes.push(Lane {
                rank,
                host: host_of(rank).to_owned(),
                end: is_gone(rank)
                    .then(|| dump.identity.dump_time_ns.saturating_sub(origin) / 1000),
                slices,
            });
        }
    }
    timeline
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{InstanceState, Live, LiveOptions, Moment, analyze};
    use rcomm_recorder::model::{FailedOperation, Failure, FailureKind, OpType};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn timeline_of(filter: &str, ranks: u32) -> Timeline {
        let filter = Filter::parse(filter).expect("the filter is valid");
        build_timeline(&snapshot(ranks), &filter, 2_000_000_000)
    }

    fn snapshot(ranks: u32) -> Snapshot {
        let simulation = Simulation::new(Situation::StuckRank, ranks, 0);
        let ns = simulation.fault_ns() + 8_000_000_000;
        let at = Moment {
            elapsed: Duration::from_nanos(ns as u64),
            wall_ns: ns,
        };
        let mut source = SimulatedSource::new(simulation, move || ns);
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        live.observe(0, source.poll(Instant::now()), at);
        live.refresh(at)
            .expect("the first look finds something new")
    }

    #[test]
    fn pending_operations_have_no_length() {
        let timeline = timeline_of("group:dp_5", 16);
        let is_pending = |lane: &&Lane| lane.slices.iter().any(|slice| slice.length.is_none());
        let pending: Vec<_> = timeline
            .lanes
            .iter()
            .filter(is_pending)
            .map(|lane| lane.rank)
            .collect();
        assert_eq!(pending, [5]);
        assert_eq!(timeline.groups, ["dp_5"]);
        // The timeline ends at the present, 8 s after the fault, and not at the last event.
        assert!(timeline.length > 7_000_000, "{}", timeline.length);
    }

    #[test]
    fn a_timeline_whose_operations_have_all_failed_ends_with_the_last_event() {
        let mut snapshot = snapshot(4);
        let length = |snapshot: &Snapshot| {
            build_timeline(snapshot, &Filter::default(), 2_000_000_000).length
        };
        assert!(length(&snapshot) > 7_000_000);
        let report = Arc::make_mut(&mut snapshot.report);
        for instance in &mut report.in_flight {
            instance.state = InstanceState::Failed;
        }
        assert_eq!(length(&snapshot), 2_000_000);
    }

    #[test]
    fn the_lane_of_a_process_that_is_gone_ends_with_its_record() {
        let mut snapshot = snapshot(4);
        let ends = |snapshot: &Snapshot| -> Vec<Option<i64>> {
            let timeline = build_timeline(snapshot, &Filter::default(), 2_000_000_000);
            timeline.lanes.iter().map(|lane| lane.end).collect()
        };
        assert_eq!(ends(&snapshot), [None; 4]);
        let view = &mut Arc::make_mut(&mut snapshot.ranks)[2];
        view.liveness = Liveness::Dead;
        let dump = Arc::make_mut(&mut view.dumps[0]);
        let newest = dump.entries.last().expect("the rank has operations");
        dump.identity.dump_time_ns = newest.time_created_ns + 5_000_000;
        let start = build_timeline(&snapshot, &Filter::default(), 2_000_000_000).lanes[2]
            .slices
            .last()
            .map(|slice| slice.start);
        assert_eq!(ends(&snapshot)[2], start.map(|start| start + 5_000));
    }

    #[test]
    fn a_failed_operation_ends_when_its_failure_was_recorded() {
        let mut snapshot = snapshot(4);
        let dump = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.ranks)[2].dumps[0]);
        let newest = dump.entries.last_mut().expect("the rank has operations");
        newest.state = EntryState::Failed;
        newest.time_discovered_completed_ns = 0;
        let mut failure = Failure::new(FailureKind::PeerGone, &[1], 2, "its connection ended");
        failure.operation = Some(FailedOperation {
            op: newest.op,
            seq: newest.collective_seq_id,
            is_p2p: false,
            record_id: newest.record_id,
        });
        failure.time_ns = newest.time_created_ns + 5_000_000;
        let before = build_timeline(&snapshot, &Filter::default(), 2_000_000_000);
        let dump = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.ranks)[2].dumps[0]);
        dump.failures.push(failure);
        let after = build_timeline(&snapshot, &Filter::default(), 2_000_000_000);
        let newest_of = |timeline: &Timeline| {
            let lane = timeline.lanes.iter().find(|lane| lane.rank == 2);
            let slice = lane.and_then(|lane| lane.slices.last());
            slice.map(|slice| (slice.state, slice.length))
        };
        assert_eq!(newest_of(&before), Some((EntryState::Failed, None)));
        assert_eq!(newest_of(&after), Some((EntryState::Failed, Some(5_000))));
    }

    #[test]
    fn only_operations_of_a_graph_carry_its_id() {
        let mut snapshot = snapshot(4);
        let dump = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.ranks)[2].dumps[0]);
        let newest = dump.entries.last_mut().expect("the rank has operations");
        newest.graph_id = Some(7);
        let timeline = build_timeline(&snapshot, &Filter::default(), 2_000_000_000);
        let json = serde_json::to_value(&timeline).expect("the timeline can be written as JSON");
        let lanes = json["lanes"]
            .as_array()
            .expect("the value is a list")
            .iter();
        let slices = lanes.flat_map(|lane| lane["slices"].as_array().expect("the value is a list"));
        let graphs: Vec<_> = slices.filter_map(|slice| slice.get("graph_id")).collect();
        assert_eq!(graphs, [7]);
    }

    #[test]
    fn messages_and_the_ends_of_their_batches_have_their_own_sequence_numbers() {
        for op in [OpType::Send, OpType::Coalesced] {
            assert_own_number(op);
        }
    }

    fn assert_own_number(op: OpType) {
        let mut snapshot = snapshot(4);
        let dump = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.ranks)[2].dumps[0]);
        let newest = dump.entries.last_mut().expect("the rank has operations");
        (newest.op, newest.is_p2p) = (op, true);
        newest.p2p_seq_id = newest.collective_seq_id + 1000;
        let expected = newest.p2p_seq_id;
        let filter = Filter::parse(&format!("seq:{expected}")).expect("the filter is valid");
        let timeline = build_timeline(&snapshot, &filter, 2_000_000_000);
        let numbers: Vec<u64> = timeline
            .lanes
            .iter()
            .flat_map(|lane| lane.slices.iter().map(|slice| slice.seq))
            .collect();
        assert_eq!(numbers, [expected]);
    }

    #[test]
    fn an_answer_is_bounded_and_counts_omitted_operations() {
        let timeline = timeline_of("", 1024);
        let slices: usize = timeline.lanes.iter().map(|lane| lane.slices.len()).sum();
        assert!(
            slices <= TARGET_SLICES && timeline.omitted > 0,
            "{slices} {}",
            timeline.omitted
        );
    }
}
