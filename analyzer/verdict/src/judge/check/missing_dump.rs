//! E102: a rank left no readable record, and what the others wait in points at it.
//!
//! Absence is evidence, but weak: the file may be lost while the rank waits like the others. So the
//! rank is accused only if no readable rank explains the waits. With several such ranks, the one that
//! was missed first is named, and the others stay possible. A rank that left the order of the program
//! explains the waits too: the one without a record may be the missing link of a cycle.

use super::Check;
use super::cross_group_deadlock::{blamed, oddest};
use super::rank_failed::first_failure;
use crate::align::record::Record;
use crate::judge::case::{Case, Draft};
use crate::judge::missed::first_missed;
use crate::judge::sink::Sink;
use crate::judge::wait_graph::{Node, Place};
use crate::report::Code;
use crate::report::words::{count_ranks, name_ranks, name_time};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::BTreeMap;

pub(super) struct MissingDump;

impl Check for MissingDump {
    fn codes(&self) -> &'static [Code] {
        &[Code::E102, Code::E103, Code::E130]
    }

    fn run(&self, case: &Case<'_>, so_far: &[Draft]) -> Vec<Draft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let by_order = out_of_order(case);
        let mut by_place: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
        for sink in &case.sinks {
            let &Sink::Unread(node) = sink else { continue };
            if let Some((place, _)) = first_missed(case, node) {
                by_place.entry(place).or_default().push(node);
            }
        }
        let mut places: Vec<(usize, Vec<Node>)> = by_place.into_iter().collect();
        places.sort_by_key(|&(place, _)| (case.waiting_since(place).unwrap_or(i64::MAX), place));
        let several = places.len() > 1;
        let all: Vec<Vec<Rank>> = places.iter().map(|(_, nodes)| case.ranks(nodes)).collect();
        let drafts = places.iter().enumerate().map(|(nth, (place, nodes))| {
            let mut draft = draft(case, *place, nodes);
            if several {
                draft.confidence = if nth == 0 { 0.4 } else { 0.3 };
                draft.is_root = nth == 0;
                if nth == 0 {
                    draft.alternatives.extend(all[1..].iter().take(16).cloned());
                    draft.by_clock = gap(case, places[0].0, places[1].0);
                    draft.ruled_out.push(
                        "no certainty: other ranks without a record are waited for too; this one was missed first"
                            .to_owned(),
                    );
                }
            }
            if by_order.is_some() {
                draft.confidence = 0.3;
                draft.is_root = false;
            }
            draft
        });
        let mut drafts: Vec<Draft> = drafts.collect();
        if let (Some(mut odd), false) = (by_order, drafts.is_empty()) {
            odd.targets.extend(
                drafts
                    .iter()
                    .flat_map(|draft| draft.targets.iter().copied()),
            );
            odd.alternatives
                .extend(drafts.iter().take(16).map(|draft| draft.culprits.clone()));
            drafts.insert(0, odd);
        }
        drafts
    }
}

/// Who waited first at each of two places, and how much later the second was, ns.
fn gap(case: &Case<'_>, first: usize, second: usize) -> Option<([Rank; 2], i64)> {
    let rank = |place: usize| {
        case.graph.arrived[place]
            .first()
            .map(|&node| case.rank(node))
    };
    let gap = case
        .waiting_since(second)?
        .saturating_sub(case.waiting_since(first)?);
    Some(([rank(first)?, rank(second)?], gap))
}

/// A readable rank that left the order of the program: it explains the waits for a rank without a
/// record, which may well wait for it in turn.
fn out_of_order(case: &Case<'_>) -> Option<Draft> {
    const MOST: usize = 1 << 14;
    let asked: usize = case.graph.missing.iter().map(Vec::len).sum();
    // torchcomms names no peers: the order of its messages proves nothing.
    let nameless = |record: &Record| record.recorder == Recorder::Torchcomms;
    if case.aligned.records.iter().any(nameless) {
        return None;
    }
    if !case
        .sinks
        .iter()
        .any(|sink| matches!(sink, Sink::Unread(_)))
        || asked > MOST
    {
        return None;
    }
    let ranks: Vec<Node> = (0..case.graph.ranks)
        .filter(|&node| !case.graph.waits_in[node].is_empty())
        .collect();
    let places: Vec<usize> = (0..case.graph.places.len()).collect();
    let odd = oddest(case, &ranks, &places);
    if odd.is_empty() || odd.len() * 2 > ranks.len() {
        return None;
    }
    let mut draft = blamed(case, &odd);
    draft.confidence = 0.5;
    draft.targets = odd.iter().map(|one| one.node).collect();
    draft
        .ruled_out
        .push("missing_dump: a readable rank explains the waits".to_owned());
    Some(draft)
}

fn draft(case: &Case<'_>, place: usize, nodes: &[Node]) -> Draft {
    let spot = case.spot_of_place(place);
    let culprits = case.ranks(nodes);
    let waiting = case.graph.arrived[place].len();
    let waited = case.waited_ms(place).map_or("waited".to_owned(), |ms| {
        format!("waited {}", name_time(ms))
    });
    let read = culprits
        .iter()
        .any(|&rank| case.aligned.record_of(rank).is_some());
    let sentence = format!(
        "{} {}; {} in {} #{} on group {} for {}",
        name_ranks(&culprits),
        if read {
            "left a record that does not hold what it does now"
        } else {
            "left no readable record"
        },
        count_ranks(waiting, &format!("has {waited}"), &format!("have {waited}")),
        spot.op,
        spot.seq,
        case.group_name(spot.group),
        if culprits.len() == 1 { "it" } else { "them" },
    );
    let mut draft = Draft::new(Code::E102, sentence);
    draft.age_ms = case.waited_ms(place);
    // Had it been inside, and the operation stuck, the others would have left the same records.
    draft.confidence = 0.5;
    if nodes.len() > 1 {
        draft.alternatives = culprits.iter().take(16).map(|&rank| vec![rank]).collect();
    }
    let failed = failed_there(case, place);
    if !failed.is_empty() {
        draft.ruled_out.push(format!(
            "no certainty: the operation failed on {}, which may be the cause or an echo",
            name_ranks(&failed)
        ));
        draft
            .alternatives
            .extend(failed.iter().map(|&rank| vec![rank]));
    }
    if let &[alone] = case.graph.arrived[place].as_slice() {
        draft.ruled_out.push(
            "no certainty: a rank that waits alone may have come to what its peers never issue"
                .to_owned(),
        );
        draft.alternatives.push(vec![case.rank(alone)]);
    }
    let peers = known_to_nobody_else(case, &culprits);
    if !peers.is_empty() {
        draft.ruled_out.push(format!(
            "no certainty: what {} did or left out with it, only its own record would tell",
            name_ranks(&peers)
        ));
    }
    let ended = ended_early(case, &culprits);
    if !ended.is_empty() {
        draft.ruled_out.push(format!(
            "no certainty: {} ended early, and it may be what it waits for itself",
            name_ranks(&ended)
        ));
    }
    for rank in ended.into_iter().chain(peers).take(16) {
        if !draft.alternatives.iter().any(|known| *known == [rank]) {
            draft.alternatives.push(vec![rank]);
        }
    }
    draft.ruled_out.push(
        "no certainty: had it come there too, and nobody finished, the others would have left the same records"
            .to_owned(),
    );
    draft.evidence = case.evidence_of_place(place, 3);
    draft
        .ruled_out
        .push("not_joined: no readable rank explains the wait".to_owned());
    draft.next = format!(
        "look for a crash of {}: its log, its exit code, the kernel's log of its host",
        name_ranks(&culprits)
    );
    draft.targets = nodes.to_vec();
    draft.culprits = culprits;
    draft.at = Some(spot);
    draft
}

/// Ranks on which the collective that others wait in has failed.
fn failed_there(case: &Case<'_>, place: usize) -> Vec<Rank> {
    const MOST: usize = 8;
    let Place::Collective { group, seq } = case.graph.places[place] else {
        return Vec::new();
    };
    let failed = case.graph.arrived[place].iter().filter(|&&node| {
        let record = case.record_at(place, node);
        record.is_some_and(|record| {
            let lane = case.aligned.lanes[record]
                .iter()
                .find(|lane| lane.group == group);
            lane.is_some_and(|lane| {
                case.aligned.find(record, lane, seq).is_ok_and(|at| {
                    case.aligned.teller(record, lane, at).state == EntryState::Failed
                })
            })
        })
    });
    let mut failed: Vec<Rank> = failed.map(|&node| case.rank(node)).collect();
    failed.sort_unstable();
    failed.truncate(MOST);
    failed
}

/// Ranks that share with one of these what no third one takes part in: messages, and groups of two.
fn known_to_nobody_else(case: &Case<'_>, culprits: &[Rank]) -> Vec<Rank> {
    let messages = case.messages.pairs.keys().map(|&(group, (one, other))| {
        let ranks = &case.aligned.groups[group].ranks;
        [one, other].map(|end| ranks.get(end as usize).copied())
    });
    let groups = case.aligned.groups.iter();
    let twos = groups.filter_map(|group| match *group.ranks {
        [one, other] => Some([Some(one), Some(other)]),
        _ => None,
    });
    let mut peers: Vec<Rank> = messages
        .chain(twos)
        .filter_map(|ends| match ends {
            [Some(one), Some(other)] if culprits.contains(&one) => Some(other),
            [Some(one), Some(other)] if culprits.contains(&other) => Some(one),
            _ => None,
        })
        .filter(|rank| !culprits.contains(rank))
        .collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// Other ranks whose process is gone, or of which an operation failed by itself.
fn ended_early(case: &Case<'_>, culprits: &[Rank]) -> Vec<Rank> {
    let records = case.aligned.records.iter().enumerate();
    let ended = records
        .filter(|&(at, record)| record.died() || first_failure(case, at).is_some())
        .map(|(_, record)| record.rank);
    let mut ended: Vec<Rank> = ended.filter(|rank| !culprits.contains(rank)).collect();
    ended.dedup();
    // All may have been ended because of the hang.
    if ended.len() * 2 > case.aligned.ranks_read() {
        ended.clear();
    }
    ended
}
