//! E130 and E103 from records in which it is a guess which operations are unfinished.
//!
//! Gloo's own recorder shows no completions. An operation that all members have joined may be over or stuck, and waits
//! that lead to it are no proof of a cause. Where other waits form a cycle, the order of the program still shows who
//! left it.

use crate::align::record::Record;
use crate::align::retiring_is_all;
use crate::judge::check::waits::cross_group_deadlock::{
    MinorityRank, blamed, show_cycle, strongest_minority,
};
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::{Missing, Node};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::format::{count, format_ranks};
use std::collections::{HashMap, VecDeque};

/// The finding on ranks that left the order of the others, if the waits lead to operations that all members have
/// joined. It concerns records in which only `retired` shows that an operation is over. Whether such an operation was
/// reopened rightly is a guess.
///
/// `None` if the waits lead to no such operation, if a record shows completions, if there are too many waits, if a rank
/// of the minority is not clearly outvoted, or if none is in a cycle.
pub(super) fn finding_beside(ctx: &Context<'_>) -> Option<FindingDraft> {
    // With more waits than this, the orders are not compared: it would take too long.
    const MAX_WAITS: usize = 1 << 12;
    let reopened = ctx.wait_roots.iter().filter_map(|root| match root {
        &WaitRoot::Full(place) => Some(place),
        _ => None,
    });
    let reopened: Vec<usize> = reopened.collect();
    if reopened.is_empty() {
        return None;
    }
    let waits: usize = ctx.graph.missing.iter().map(Vec::len).sum();
    let vague = |record: &Record| retiring_is_all(record.recorder);
    if waits > MAX_WAITS || !ctx.aligned.records.iter().all(vague) {
        return None;
    }
    let ranks: Vec<Node> = (0..ctx.graph.ranks)
        .filter(|&node| ctx.graph.waits(node))
        .collect();
    let places: Vec<usize> = (0..ctx.graph.places.len()).collect();
    let mut odd = strongest_minority(ctx, &ranks, &places);
    if !odd.iter().all(MinorityRank::is_outvoted) {
        return None;
    }
    odd.retain(|rank| cycle_through(ctx, rank).is_some());
    let cycle = cycle_through(ctx, odd.first()?)?;
    let mut draft = blamed(ctx, &odd);
    show_cycle(ctx, &mut draft, &cycle, &places);
    draft.confidence = draft.confidence.min(BESIDE_REOPENED);
    draft.doubts.push(doubt(ctx, &reopened));
    draft.targets = odd.iter().map(|rank| rank.node).collect();
    Some(draft)
}

/// The doubt that the ranks at these places may be stuck there.
fn doubt(ctx: &Context<'_>, reopened: &[usize]) -> String {
    /// At most this many places are named; the others are counted.
    const SHOWN: usize = 4;
    let stuck = reopened.iter().take(SHOWN).map(|&place| {
        let op_ref = ctx.op_ref_of_place(place);
        format!(
            "{} may be stuck in {} #{} on group {}",
            format_ranks(&ctx.ranks(&ctx.graph.arrived[place])),
            op_ref.op,
            op_ref.seq,
            ctx.group_name(op_ref.group)
        )
    });
    let mut stuck: Vec<String> = stuck.collect();
    if reopened.len() > SHOWN {
        let more = reopened.len() - SHOWN;
        stuck.push(format!(
            "others in {}",
            count(more as u64, "further operation")
        ));
    }
    format!(
        "gloo records no completions: {}; all members have joined {}",
        stuck.join(", "),
        if reopened.len() == 1 { "it" } else { "these" }
    )
}

/// The highest confidence of a finding on a cycle if another operation may be stuck as well.
const BESIDE_REOPENED: f64 = 0.75;

/// The ranks of a shortest cycle, a rank of the minority first: each waits where the next is known to be missing, and
/// the last waits where the first is missed. `None` if there is no such cycle.
fn cycle_through(ctx: &Context<'_>, odd: &MinorityRank) -> Option<Vec<Node>> {
    // For each place, the rank that waits in it and comes before it in the cycle.
    let mut before: HashMap<usize, Node> = HashMap::from([(odd.waits_at, odd.node)]);
    // For each rank, the place where it is missed.
    let mut missed_at: HashMap<Node, usize> = HashMap::new();
    let mut queue = VecDeque::from([odd.waits_at]);
    while let Some(place) = queue.pop_front() {
        if place == odd.missed_at {
            let mut cycle = vec![before[&place]];
            while let Some(place) = cycle.last().and_then(|node| missed_at.get(node)) {
                cycle.push(before[place]);
            }
            cycle.reverse();
            return Some(cycle);
        }
        for &(node, why) in &ctx.graph.missing[place] {
            let is_known = matches!(why, Missing::Absent | Missing::Held(_));
            if !is_known || node == odd.node || missed_at.contains_key(&node) {
                continue;
            }
            missed_at.insert(node, place);
            for &next in &ctx.graph.waits_in[node] {
                before.entry(next).or_insert_with(|| {
                    queue.push_back(next);
                    node
                });
            }
        }
    }
    None
}
