//! E102: a rank left no readable record, or one that ends too early, and the waits of others lead to it.
//!
//! Absence is weak evidence: the file may be lost while the rank waits like the others. So the rank is a culprit only
//! if no readable rank explains the waits. With several such ranks, the one that was missed first is named, and the
//! others remain alternatives. A readable rank that left the order of the program explains the waits too, and is
//! reported first, as E103 or E130: the rank without a record may complete a cycle.

use super::cross_group_deadlock::{blamed, strongest_minority};
use crate::align::pending::on_device;
use crate::align::record::Record;
use crate::align::{UnknownReason, event};
use crate::judge::block::Block;
use crate::judge::check::Check;
use crate::judge::check::failures::exits::{how_they_ended, look_at_exit};
use crate::judge::check::failures::rank_failed::first_failure;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::elsewhere::took_part;
use crate::judge::life::harm::failed_early_ns;
use crate::judge::waits::missed::first_missed;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::{count_ranks, format_ranks, format_time};
use rcomm_recorder::model::{Parts, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct MissingDump;

impl Check for MissingDump {
    fn codes(&self) -> &'static [Code] {
        &[Code::E102, Code::E103, Code::E130]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let by_order = out_of_order(ctx);
        let ran_on = ran_on_meanwhile(ctx);
        let mut by_place: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
        for wait_root in &ctx.wait_roots {
            let &WaitRoot::Unread(node) = wait_root else {
                continue;
            };
            // Entries that a ring has dropped are not a missing record: N302 reports them, and no rank is blamed.
            if is_missed_for(ctx, node, UnknownReason::HistoryLost)
                || ran_on && is_missed_for(ctx, node, UnknownReason::Outdated)
            {
                continue;
            }
            if let Some((place, _)) = first_missed(ctx, node) {
                by_place.entry(place).or_default().push(node);
            }
        }
        for nodes in by_place.values_mut() {
            // Ranks without a record are suspected before ranks whose records end too early.
            let is_read = |node: &Node| ctx.aligned.record_of(ctx.rank(*node)).is_some();
            if !nodes.iter().all(is_read) {
                nodes.retain(|node| !is_read(node));
            }
        }
        let mut places: Vec<(usize, Vec<Node>)> = by_place.into_iter().collect();
        places.sort_by_key(|&(place, _)| (ctx.waiting_since(place).unwrap_or(i64::MAX), place));
        if let (Some((first, _)), Some(block)) = (places.first(), Block::of_absent(ctx)) {
            // Ranks that form a block are gone together: which of them was missed first does not matter.
            places = vec![(*first, block.nodes(ctx))];
        }
        let several = places.len() > 1;
        let culprit_sets: Vec<Vec<Rank>> =
            places.iter().map(|(_, nodes)| ctx.ranks(nodes)).collect();
        let drafts = places.iter().enumerate().map(|(nth, (place, nodes))| {
            let mut draft = draft(ctx, *place, nodes);
            if several {
                draft.confidence = if nth == 0 { 0.4 } else { 0.3 };
                draft.is_root = nth == 0;
                if nth == 0 {
                    draft
                        .alternatives
                        .extend(culprit_sets[1..].iter().take(16).cloned());
                    draft.by_clock = gap(ctx, places[0].0, places[1].0);
                    draft.doubts.push(
                        "other ranks without a record are waited for too; this one was missed first"
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
        let mut drafts: Vec<FindingDraft> = drafts.collect();
        if let (Some(mut minority), false) = (by_order, drafts.is_empty()) {
            minority.targets.extend(
                drafts
                    .iter()
                    .flat_map(|draft| draft.targets.iter().copied()),
            );
            minority
                .alternatives
                .extend(drafts.iter().take(16).map(|draft| draft.culprits.clone()));
            drafts.insert(0, minority);
        }
        drafts
    }
}

/// Whether others miss a rank, and at each place where they do, it is unknown for this reason whether the rank arrived.
fn is_missed_for(ctx: &Context<'_>, node: Node, reason: UnknownReason) -> bool {
    let missed = ctx.missed_at(node);
    !missed.is_empty() && (missed.iter()).all(|&(_, why)| why == Missing::Unknown(reason))
}

/// Whether so many records, more than a quarter, were taken too early that the job seems to have run on while its ranks
/// left them one after the other. Then a rank with such a record is not missed.
fn ran_on_meanwhile(ctx: &Context<'_>) -> bool {
    let records = ctx.aligned.records.len();
    let early = (0..records)
        .filter(|&record| ctx.aligned.lacks_newest(record) == Some(UnknownReason::Outdated));
    early.count() * 4 > records
}

/// A rank that waits at the first place, one that waits at the second, and the time from the beginning of the first
/// wait to that of the second, ns. `None` if a rank or a time is unknown.
fn gap(ctx: &Context<'_>, first: usize, second: usize) -> Option<([Rank; 2], i64)> {
    let rank = |place: usize| ctx.graph.arrived[place].first().map(|&node| ctx.rank(node));
    let gap = ctx
        .waiting_since(second)?
        .saturating_sub(ctx.waiting_since(first)?);
    Some(([rank(first)?, rank(second)?], gap))
}

/// The finding on readable ranks that left the order of the program: they explain the waits for a rank without a
/// record, which may itself wait for them. `None` if the waits lead to no rank without a record, if there are too many
/// waits, if a recorder names no peers, or if the ranks that left the order are none, or more than half of those that
/// wait.
fn out_of_order(ctx: &Context<'_>) -> Option<FindingDraft> {
    // With more waits than this, the orders are not compared: it would take too long.
    const MAX_WAITS: usize = 1 << 14;
    let waits: usize = ctx.graph.missing.iter().map(Vec::len).sum();
    // torchcomms records no peers, so the order of its messages proves nothing.
    let lacks_peers = |record: &Record| record.recorder == Recorder::Torchcomms;
    if ctx.aligned.records.iter().any(lacks_peers) {
        return None;
    }
    if !ctx
        .wait_roots
        .iter()
        .any(|wait_root| matches!(wait_root, WaitRoot::Unread(_)))
        || waits > MAX_WAITS
    {
        return None;
    }
    let ranks: Vec<Node> = (0..ctx.graph.ranks)
        .filter(|&node| ctx.graph.waits(node))
        .collect();
    let places: Vec<usize> = (0..ctx.graph.places.len()).collect();
    let minority = strongest_minority(ctx, &ranks, &places);
    if minority.is_empty() || minority.len() * 2 > ranks.len() {
        return None;
    }
    let mut draft = blamed(ctx, &minority);
    draft.confidence = 0.5;
    draft.targets = minority.iter().map(|odd| odd.node).collect();
    draft
        .ruled_out
        .push("missing_dump: a readable rank explains the waits".to_owned());
    Some(draft)
}

/// The E102 on ranks that are missed at a place.
fn draft(ctx: &Context<'_>, place: usize, nodes: &[Node]) -> FindingDraft {
    let op_ref = ctx.op_ref_of_place(place);
    let culprits = ctx.ranks(nodes);
    let waiting = ctx.graph.arrived[place].len();
    let waited = ctx.waited_ms(place).map_or("waited".to_owned(), |ms| {
        format!("waited {}", format_time(ms))
    });
    let has_record = culprits
        .iter()
        .any(|&rank| ctx.aligned.record_of(rank).is_some());
    let is_aside = ctx.only_aside(&culprits);
    let block = Block::of(ctx, &culprits).filter(|_| !is_aside);
    let elsewhere = took_part(ctx, &culprits);
    let block = block.filter(|_| !elsewhere);
    let together = block
        .as_ref()
        .map_or(String::new(), |block| format!(", {},", block.describe()));
    let sentence = format!(
        "{}{together} {}{}; {} in {} #{} on group {} for {}{}",
        format_ranks(&culprits),
        match culprits.len() {
            _ if has_record && lacks_start(ctx, place, nodes) => {
                "left a record in which the current operation has not begun"
            }
            _ if has_record => "left a record that ends before the current operation",
            _ if is_aside => "left no record but one that was left aside",
            1 if elsewhere => "took part before and has no ring here",
            _ if elsewhere => "took part before and have no rings here",
            _ => "left no readable record",
        },
        how_they_ended(ctx, &culprits),
        count_ranks(waiting, &format!("has {waited}"), &format!("have {waited}")),
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group),
        if culprits.len() == 1 { "it" } else { "them" },
        ctx.waiting_in_all(nodes, waiting),
    );
    let mut draft = FindingDraft::new(Code::E102, sentence);
    draft.age_ms = ctx.waits_ms(place);
    // If the rank had arrived and the operation were stuck, the others would have left the same records.
    draft.confidence = match &block {
        Some(block) => block.confidence(),
        None if is_aside || !is_only_explanation(ctx, place, &culprits) => 0.5,
        None if may_hide_a_device(ctx, place) => 0.55,
        None => 0.75,
    };
    if let Some(block) = block {
        draft.evidence = ctx.evidence_of_place(place, 3);
        draft
            .ruled_out
            .push("not_joined: no readable rank explains the wait".to_owned());
        draft.alternatives = block.alternatives();
        draft.next = block.next(&culprits);
        draft.targets = nodes.to_vec();
        draft.culprits = culprits;
        draft.at = Some(op_ref);
        return draft;
    }
    if elsewhere {
        draft.confidence = draft.confidence.min(0.5);
    }
    if nodes.len() > 1 {
        draft.alternatives = culprits.iter().take(16).map(|&rank| vec![rank]).collect();
    }
    let early = early_besides(ctx, place, nodes);
    if !early.is_empty() {
        let (record, it, one) = match early.len() {
            1 => ("record", "it", "that rank"),
            _ => ("records", "they", "one of them"),
        };
        draft.doubts.push(format!(
            "the {record} of {} ended too early to show whether {it} came, so the others may wait for {one}",
            format_ranks(&early)
        ));
        let early = early.iter().take(16);
        draft.alternatives.extend(early.map(|&rank| vec![rank]));
    }
    let failed = failed_there(ctx, place);
    if !failed.is_empty() {
        draft.doubts.push(format!(
            "the operation failed on {}, which may be the cause or a consequence",
            format_ranks(&failed)
        ));
        draft
            .alternatives
            .extend(failed.iter().map(|&rank| vec![rank]));
    }
    if let &[only] = ctx.graph.arrived[place].as_slice() {
        draft
            .doubts
            .push("a rank that waits alone may have come to what its peers never issue".to_owned());
        draft.alternatives.push(vec![ctx.rank(only)]);
    }
    let peers = exclusive_peers(ctx, &culprits);
    if !peers.is_empty() {
        let (own, culprit) = match culprits.len() {
            1 => ("its own record", "it"),
            _ => ("their own records", "them"),
        };
        draft.doubts.push(format!(
            "only {own} would show what {} did or left out with {culprit}",
            format_ranks(&peers)
        ));
    }
    let ended = ended_early(ctx, &culprits);
    if !ended.is_empty() {
        let culprit = match culprits.len() {
            1 => "the rank without a record",
            _ => "the ranks without a record",
        };
        let rank = match ended.len() {
            1 => "that rank itself",
            _ => "one of them",
        };
        draft.doubts.push(format!(
            "{} ended early: {culprit} may have waited for {rank}",
            format_ranks(&ended)
        ));
    }
    for rank in ended.into_iter().chain(peers).take(16) {
        if !draft.alternatives.iter().any(|known| *known == [rank]) {
            draft.alternatives.push(vec![rank]);
        }
    }
    draft.doubts.push(format!(
        "had {} issued it too, and none finished, the others would have left the same records",
        format_ranks(&culprits)
    ));
    draft.evidence = ctx.evidence_of_place(place, 3);
    draft
        .ruled_out
        .push("not_joined: no readable rank explains the wait".to_owned());
    draft.next = match elsewhere {
        true => format!(
            "read the records of {} too, on the hosts where they are (`rcomm-fr collect`, or rcomm-web on each): only \
             these show what the others wait for",
            format_ranks(&culprits)
        ),
        false if is_aside => format!(
            "read the note on the record that was left aside: if it is of this run, look at what {} did where it ends; \
             else look for a crash",
            format_ranks(&culprits)
        ),
        false if culprits.len() > ctx.aligned.ranks_read() => format!(
            "get the dumps of {} first: most ranks left none, so these may lie elsewhere",
            format_ranks(&culprits)
        ),
        false => {
            let (its, log) = match culprits.len() {
                1 => ("its", "log, its exit code, the kernel's log of its host"),
                _ => (
                    "their",
                    "logs, their exit codes, the kernel's logs of their hosts",
                ),
            };
            format!(
                "look for a crash of {}: {its} {log}",
                format_ranks(&culprits)
            )
        }
    };
    draft.targets = nodes.to_vec();
    draft.culprits = culprits;
    draft.at = Some(op_ref);
    look_at_exit(ctx, &mut draft);
    draft
}

/// Whether the other records leave almost no explanation but that the one culprit is gone. Four things must hold: no
/// other rank lacks a record or left one too early to show whether it arrived; at least three ranks wait for the
/// culprit in an operation that needs all members and has parts of one size; none of them failed there or ended early;
/// and no rank exchanges messages with it or shares a group of two with it.
fn is_only_explanation(ctx: &Context<'_>, place: usize, culprits: &[Rank]) -> bool {
    const WAITING: usize = 3;
    let Place::Collective { group, seq } = ctx.graph.places[place] else {
        return false;
    };
    let call = event::usual_call(ctx.aligned, group, seq);
    let compared = call.is_some_and(|call| {
        let call = ctx.aligned.shared.calls.get(call);
        match call.op.parts() {
            Parts::Equal => call.op.needs_all_members(),
            Parts::PerRank | Parts::PerPair => false,
        }
    });
    let absent = ctx.aligned.expected.iter();
    let absent = absent.filter(|&&rank| ctx.aligned.record_of(rank).is_none());
    compared
        && culprits.len() == 1
        && absent.count() == 1
        && ctx.graph.arrived[place].len() >= WAITING
        && failed_there(ctx, place).is_empty()
        && ctx.graph.missing[place].len() == 1
        && exclusive_peers(ctx, culprits).is_empty()
        && ended_early(ctx, culprits).is_empty()
}

/// Whether the operation of a place runs on devices, and no record shows where it has started: the device of a rank
/// that waits there may hang, and the rank without a record wait like the others.
fn may_hide_a_device(ctx: &Context<'_>, place: usize) -> bool {
    let Place::Collective { group, seq } = ctx.graph.places[place] else {
        return false;
    };
    let aligned = ctx.aligned;
    let call = event::usual_call(aligned, group, seq);
    let backend = call.map(|call| aligned.shared.calls.get(call).signature.backend.as_str());
    let mut lanes = aligned.groups[group].lanes.iter().flatten();
    backend.is_some_and(on_device)
        && lanes.all(|&(record, lane)| !aligned.lanes[record][lane].shows_starts)
}

/// The other ranks that are missing at a place according to records that were taken too early, ascending.
fn early_besides(ctx: &Context<'_>, place: usize, nodes: &[Node]) -> Vec<Rank> {
    let nodes: BTreeSet<Node> = nodes.iter().copied().collect();
    let missing = ctx.graph.missing[place].iter();
    let early = missing.filter(|(node, why)| {
        *why == Missing::Unknown(UnknownReason::Outdated) && !nodes.contains(node)
    });
    early.map(|&(node, _)| ctx.rank(node)).collect()
}

/// Whether these ranks issued the collective of a place, and their records were taken before it began there.
fn lacks_start(ctx: &Context<'_>, place: usize, nodes: &[Node]) -> bool {
    let Place::Collective { group, seq } = ctx.graph.places[place] else {
        return false;
    };
    nodes.iter().all(|&node| {
        let record = ctx.record_at(place, node);
        record.is_some_and(|record| ctx.graph.arrival(record, group, seq).is_some())
    })
}

/// Ranks on which the collective of this place failed before its time-out, ascending, at most 8; empty if the place is a
/// batch.
fn failed_there(ctx: &Context<'_>, place: usize) -> Vec<Rank> {
    const MAX_RANKS: usize = 8;
    if matches!(ctx.graph.places[place], Place::Batch { .. }) {
        return Vec::new();
    }
    let operations = ctx.ops_of(place).into_iter();
    let failed = operations.filter(|&(record, position)| {
        let op = ctx.aligned.op(record, position);
        failed_early_ns(ctx.aligned, record, op).is_some()
    });
    let mut failed: Vec<Rank> = failed
        .map(|(record, _)| ctx.aligned.records[record].rank)
        .collect();
    failed.sort_unstable();
    failed.truncate(MAX_RANKS);
    failed
}

/// Ranks that exchange messages with a culprit or share a group of two with it, ascending: no third rank recorded what
/// the two did.
fn exclusive_peers(ctx: &Context<'_>, culprits: &[Rank]) -> Vec<Rank> {
    let messages = ctx.messages.pairs.keys().map(|&(group, (one, other))| {
        let ranks = &ctx.aligned.groups[group].ranks;
        [one, other].map(|end| ranks.get(end as usize).copied())
    });
    let groups = ctx.aligned.groups.iter();
    let groups_of_two = groups.filter_map(|group| match *group.ranks {
        [one, other] => Some([Some(one), Some(other)]),
        _ => None,
    });
    let mut peers: Vec<Rank> = messages
        .chain(groups_of_two)
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

/// Other ranks that died, or on which an overdue operation failed before its time-out. Empty if these are more than
/// half of the ranks that were read.
fn ended_early(ctx: &Context<'_>, culprits: &[Rank]) -> Vec<Rank> {
    let records = ctx.aligned.records.iter().enumerate();
    let ended = records
        .filter(|&(index, record)| record.died() || first_failure(ctx, index).is_some())
        .map(|(_, record)| record.rank);
    let mut ended: Vec<Rank> = ended.filter(|rank| !culprits.contains(rank)).collect();
    ended.dedup();
    // The ranks may all have been ended because of the hang.
    if ended.len() * 2 > ctx.aligned.ranks_read() {
        ended.clear();
    }
    ended
}
