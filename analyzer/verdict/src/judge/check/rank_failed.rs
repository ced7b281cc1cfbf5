//! E150: a rank failed by itself: its process is gone, or an operation of its own ended with an error.
//!
//! A process that is gone left its ring behind, and others wait for what it will not issue. An
//! operation that fails at its time-out is a victim's, and when one rank dies its peers' operations
//! fail soon after: so a recorded error is held against its rank only if it came long before the
//! time-out, before every other rank's, and nothing else explains why the others wait.

use super::Check;
use crate::align::record::Op;
use crate::judge::case::{Case, Draft};
use crate::judge::missed::first_missed;
use crate::judge::sink::Sink;
use crate::judge::wait_graph::{Node, Place};
use crate::report::Code;
use crate::report::words::{count_ranks, name_ranks, name_time};
use rcomm_recorder::model::{EntryState, Rank};

/// The owner of a ring is gone, and others wait for it.
pub(super) struct ProcessGone;

impl Check for ProcessGone {
    fn codes(&self) -> &'static [Code] {
        &[Code::E150]
    }

    fn run(&self, case: &Case<'_>, so_far: &[Draft]) -> Vec<Draft> {
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let mut drafts = Vec::new();
        for sink in &case.sinks {
            match *sink {
                Sink::Idle(node) if !explained(node) => drafts.extend(gone_draft(case, node)),
                Sink::Full(place) if !explained(place + case.graph.ranks) => {
                    drafts.extend(gone_inside(case, place));
                }
                _ => {}
            }
        }
        drafts
    }
}

/// Everybody came, and the process of some of them is gone, so nobody finishes. Where all are gone they
/// were killed together, because of the hang.
fn gone_inside(case: &Case<'_>, place: usize) -> Option<Draft> {
    let inside = &case.graph.arrived[place];
    let record = |node: Node| case.record_at(place, node);
    let gone: Vec<Node> = inside
        .iter()
        .copied()
        .filter(|&node| record(node).is_some_and(|at| case.aligned.records[at].died()))
        .collect();
    if gone.is_empty() || gone.len() * 2 > inside.len() {
        return None;
    }
    let culprits = case.ranks(&gone);
    let spot = case.spot_of_place(place);
    let mut draft = Draft::new(
        Code::E150,
        format!(
            "{} gone while inside {} #{} on group {}; {} still there",
            match culprits.as_slice() {
                [one] => format!("the process of rank {one} is"),
                many => format!("the processes of {} are", name_ranks(many)),
            },
            spot.op,
            spot.seq,
            case.group_name(spot.group),
            count_ranks(inside.len() - gone.len(), "is", "are"),
        ),
    );
    draft.confidence = 0.9;
    draft.evidence = gone
        .iter()
        .take(3)
        .filter_map(|&node| match case.graph.places[place] {
            Place::Collective { group, seq } => case.evidence_of(node, group, seq),
            Place::Batch { .. } => None,
        })
        .collect();
    for at in gone.iter().filter_map(|&node| record(node)).take(3) {
        if let Some(op) = case.last_op(at) {
            draft.frames.extend(case.frames_of(at, op, "last_seen"));
        }
    }
    draft
        .ruled_out
        .push("all_arrived_stuck: not every process that came is still there".to_owned());
    draft.next = format!(
        "look for the end of {}: its log, its exit code, the kernel's log of its host",
        name_ranks(&culprits)
    );
    draft.targets = gone;
    draft.targets.push(place + case.graph.ranks);
    draft.culprits = culprits;
    draft.at = Some(spot);
    Some(draft)
}

fn gone_draft(case: &Case<'_>, node: Node) -> Option<Draft> {
    let rank = case.rank(node);
    let mut records = case.aligned.records_of(rank);
    let record = records.find(|&record| case.aligned.records[record].died())?;
    let (place, _) = first_missed(case, node)?;
    let spot = case.spot_of_place(place);
    let waiting = count_ranks(case.graph.arrived[place].len(), "waits", "wait");
    let waited = case
        .waited_ms(place)
        .map_or(String::new(), |ms| format!(" for {}", name_time(ms)));
    let what = match case.graph.places[place] {
        Place::Collective { .. } => "never issued",
        Place::Batch { .. } => "never answered",
    };
    let mut draft = Draft::new(
        Code::E150,
        format!(
            "the process of rank {rank} is gone: it {what} {} #{} on group {}, where {waiting}{waited}; {}",
            spot.op,
            spot.seq,
            case.group_name(spot.group),
            case.last_seen(record)
        ),
    );
    draft.age_ms = case.waited_ms(place);
    draft.confidence = 0.97;
    draft.culprits = vec![rank];
    draft.evidence = case.evidence_of_place(place, 2);
    draft
        .evidence
        .extend(case.evidence_of_newest(record, spot.group));
    if let Some(op) = case.last_op(record) {
        draft.frames = case.frames_of(record, op, "last_seen");
    }
    draft
        .ruled_out
        .push("not_joined: nobody is there any more to come late".to_owned());
    draft.next = format!(
        "look for the end of rank {rank}: its log, its exit code, the kernel's log of its host"
    );
    draft.targets = vec![node];
    draft.at = Some(spot);
    Some(draft)
}

/// An operation ended with an error although nobody was missing.
pub(super) struct OperationFailed;

/// An operation that ended within this share of its time-out was not ended by it.
const BEFORE_TIMEOUT: f64 = 0.9;
/// Errors nearer to the first than this may be that one's echo or its cause, ns.
const TOGETHER_NS: i64 = 50_000_000;

/// One failed operation.
pub(super) struct Failure {
    record: usize,
    position: u32,
    /// When, common time, ns.
    at_ns: i64,
}

impl Check for OperationFailed {
    fn codes(&self) -> &'static [Code] {
        &[Code::E150]
    }

    fn run(&self, case: &Case<'_>, so_far: &[Draft]) -> Vec<Draft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let mut failures: Vec<Failure> = (0..case.aligned.records.len())
            .filter_map(|record| first_failure(case, record))
            .collect();
        failures.sort_by_key(|failure| (failure.at_ns, case.aligned.records[failure.record].rank));
        let Some(first) = failures.first() else {
            return Vec::new();
        };
        let together = failures
            .iter()
            .take_while(|other| other.at_ns - first.at_ns <= TOGETHER_NS);
        let ranks: Vec<Rank> = together
            .map(|failure| case.aligned.records[failure.record].rank)
            .collect();
        vec![failed_draft(case, first, &ranks, failures.len())]
    }
}

/// The first operation of a record that failed long before its time-out, if its group went no further.
pub(super) fn first_failure(case: &Case<'_>, record: usize) -> Option<Failure> {
    let pending = case.graph.pending[record].iter();
    pending
        .map(|one| (one.position, case.aligned.op(record, one.position)))
        .filter(|(_, op)| op.state == EntryState::Failed)
        .filter_map(|(position, op)| {
            let limit = case.aligned.shared.calls.get(op.call).timeout_ms as f64;
            let took = f64::from(op.wait_ms()?);
            let early = limit == 0.0 || took < limit * BEFORE_TIMEOUT;
            early.then(|| Failure {
                record,
                position,
                at_ns: ended_ns(case, record, op),
            })
        })
        .min_by_key(|failure| failure.at_ns)
}

fn ended_ns(case: &Case<'_>, record: usize, op: &Op) -> i64 {
    let own = op.completed_ns().unwrap_or(op.created_ns);
    own.saturating_sub(case.aligned.offsets_ns[record])
}

fn failed_draft(case: &Case<'_>, first: &Failure, together: &[Rank], all: usize) -> Draft {
    let op = case.aligned.op(first.record, first.position);
    let rank = case.aligned.records[first.record].rank;
    let lane = &case.aligned.lanes[first.record][usize::from(op.group)];
    let took = op.wait_ms().map_or(String::new(), |ms| {
        format!(" after {}", name_time(f64::from(ms)))
    });
    let spot = if op.kind.is_p2p() {
        case.spot_of_message(first.record, lane.group, first.position)
    } else {
        case.spot(lane.group, op.seq)
    };
    let who = match together {
        [_] => format!("rank {rank}"),
        many => format!("one of {}", name_ranks(many)),
    };
    let mut draft = Draft::new(
        Code::E150,
        format!(
            "{} failed on {who}{took}, long before its time-out, and nobody was missing there",
            case.describe_op(first.record, op)
        ),
    );
    if let [only] = together {
        draft.culprits = vec![*only];
        draft.confidence = if all == 1 { 0.8 } else { 0.6 };
    } else {
        draft.alternatives = together.iter().take(16).map(|&rank| vec![rank]).collect();
        draft.confidence = 0.4;
    }
    draft
        .evidence
        .push(case.evidence(first.record, first.position, lane.group));
    draft.frames = case.frames_of(first.record, op, "last_seen");
    draft
        .ruled_out
        .push("not_joined, missing_dump: every member that is waited for was there".to_owned());
    draft.next = format!("read the log of rank {rank} at that moment: the error is there");
    draft.targets.extend(case.graph.node(rank));
    if let Some(place) = case.graph.collective(lane.group, op.seq) {
        draft.targets.push(place + case.graph.ranks);
    }
    draft.at = Some(spot);
    draft
}
