//! E120: the peer of a send or receive never posted the other half, or posted it and its device has not started it.
//!
//! Either the peer waits for no other rank: then this message is the first thing that it left out. Or the peer waits,
//! within the same group, for the rank that posted the message: then both are in a cycle that only the missing half
//! would end.

use super::not_posted::not_posted;
use crate::align::pending::on_device;
use crate::align::record::{ANY, NONE, Op};
use crate::align::{GroupIx, Lane, RecordIx, event};
use crate::judge::check::Check;
use crate::judge::check::waits::at_work::may_still_come;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::missed::{first_missed, peer_rank};
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::{format_ranks, format_time};
use rcomm_recorder::model::OpType;
use std::collections::BTreeMap;

pub(crate) struct P2pUnmatched;

impl Check for P2pUnmatched {
    fn codes(&self) -> &'static [Code] {
        &[Code::E120]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let mut drafts = Vec::new();
        // Ranks that wait for no other and are first missed in a message.
        let mut by_place: BTreeMap<usize, Vec<(Node, Missing)>> = BTreeMap::new();
        for wait_root in &ctx.wait_roots {
            match wait_root {
                &WaitRoot::Idle(node) if !explained(node) => {
                    if let Some((place, why)) = first_missed(ctx, node)
                        && matches!(ctx.graph.places[place], Place::Batch { .. })
                        && !ctx.failed_at_once(place)
                    {
                        by_place.entry(place).or_default().push((node, why));
                    }
                }
                WaitRoot::Cycle { ranks, places } => {
                    let known = places
                        .iter()
                        .any(|&place| explained(place + ctx.graph.ranks));
                    if !known && !ranks.iter().any(|&rank| explained(rank)) {
                        drafts.extend(in_cycle(ctx, ranks, places));
                    }
                }
                _ => {}
            }
        }
        for (place, nodes) in by_place {
            let any_of_them =
                nodes.iter().all(|&(_, why)| why == Missing::Candidate) && nodes.len() > 1;
            let is_held = |&(_, why): &(Node, Missing)| matches!(why, Missing::Held(_));
            let culprits: Vec<Node> = nodes.iter().map(|&(node, _)| node).collect();
            let omission = match (any_of_them, nodes.iter().all(is_held)) {
                (true, _) => Omission::AnyOf,
                (false, true) => Omission::NotStarted,
                (false, false) => Omission::NotPosted,
            };
            drafts.push(draft(ctx, place, &culprits, omission));
        }
        drafts
    }
}

/// The finding on a cycle within one group with a message whose other half is missing; `None` for any other cycle, or
/// if a rank may have left out a collective instead.
pub(super) fn in_cycle(
    ctx: &Context<'_>,
    ranks: &[Node],
    places: &[usize],
) -> Option<FindingDraft> {
    let group_of = |place: usize| match ctx.graph.places[place] {
        Place::Collective { group, .. } | Place::Batch { group, .. } => group,
    };
    let group = group_of(*places.first()?);
    if places.iter().any(|&place| group_of(place) != group) {
        return None;
    }
    let open: Vec<usize> = places
        .iter()
        .copied()
        .filter(|&place| matches!(ctx.graph.places[place], Place::Batch { .. }))
        .collect();
    let absent = |places: &[usize]| {
        let missing = places.iter().flat_map(|&place| &ctx.graph.missing[place]);
        let absent = missing.filter(|(node, why)| *why == Missing::Absent && ranks.contains(node));
        let mut absent: Vec<Node> = absent.map(|&(node, _)| node).collect();
        absent.sort_unstable();
        absent.dedup();
        absent
    };
    let mut culprits = absent(&open);
    let first = open
        .iter()
        .copied()
        .min_by_key(|&place| (ctx.waiting_since(place), place))?;
    // Ranks that do the same elsewhere may show which rank left its half out.
    let odd = super::cross_group_deadlock::strongest_minority(ctx, ranks, places);
    // Another check reports a rank that left out a collective.
    let in_collective = |rank: &super::cross_group_deadlock::MinorityRank| {
        matches!(ctx.graph.places[rank.missed_at], Place::Collective { .. })
    };
    if !odd.is_empty() && odd.len() * 2 <= ranks.len() && odd.iter().any(in_collective) {
        return None;
    }
    let decided = !odd.is_empty() && odd.len() < ranks.len();
    // Other ranks may be missed in a collective of the same cycle. If the message does not follow what such messages
    // followed before, the rank that posted it may have left out the collective.
    let are_missed_in_collective = || {
        let collectives = places
            .iter()
            .filter(|&&place| matches!(ctx.graph.places[place], Place::Collective { .. }));
        let mut missing = collectives.flat_map(|&place| &ctx.graph.missing[place]);
        missing.any(|(node, _)| ranks.contains(node) && !culprits.contains(node))
    };
    if !decided
        && are_missed_in_collective()
        && (is_out_of_turn(ctx, first) || comes_too_early(ctx, first, places))
    {
        return None;
    }
    let in_collective =
        |&place: &usize| matches!(ctx.graph.places[place], Place::Collective { .. });
    let has_single_culprit = culprits.len() == 1 && places.iter().any(in_collective);
    if !decided && !has_single_culprit {
        return Some(undecided(ctx, ranks, places, first, &culprits));
    }
    if decided {
        culprits = odd.iter().map(|rank| rank.node).collect();
        culprits.sort_unstable();
    }
    let first = open
        .iter()
        .copied()
        .filter(|&place| {
            ctx.graph.missing[place]
                .iter()
                .any(|(node, _)| culprits.contains(node))
        })
        .min_by_key(|&place| (ctx.waiting_since(place), place))
        .unwrap_or(first);
    let mut draft = draft(ctx, first, &culprits, Omission::NotPosted);
    let cycle = super::cross_group_deadlock::shortest_cycle(ctx, ranks, places);
    if !decided {
        // The other end may have left the collective out and posted a message that no rank expects.
        draft.confidence = 0.6;
        draft.alternatives = ctx
            .ranks(ranks)
            .into_iter()
            .take(16)
            .map(|rank| vec![rank])
            .collect();
        draft.doubts.push(format!(
            "which rank left the order of the program is not known{}",
            each_did(ctx, &cycle, places)
        ));
    }
    draft.cycle = ctx.ranks(&cycle);
    draft.targets = ranks.to_vec();
    Some(draft)
}

/// What each rank of a cycle did instead of what its peers wait for, as the end of a sentence; empty if it is not known.
fn each_did(ctx: &Context<'_>, cycle: &[Node], places: &[usize]) -> String {
    let does = |&node: &Node| {
        let waits = ctx.graph.waits_in[node].iter();
        let mut waits = waits.filter(|place| places.contains(place));
        let place = waits.next()?;
        Some(format!(
            "rank {} {}",
            ctx.rank(node),
            posted_first(ctx, *place)?
        ))
    };
    let mut each: Vec<String> = cycle.iter().take(SHOWN).filter_map(does).collect();
    if cycle.len() > SHOWN {
        each.push("and so on".to_owned());
    }
    match each.is_empty() {
        true => String::new(),
        false => format!(": {}", each.join(", ")),
    }
}

/// The finding on ranks of one group that wait for each other, where no other rank shows which of them is wrong.
fn undecided(
    ctx: &Context<'_>,
    ranks: &[Node],
    places: &[usize],
    first: usize,
    absent: &[Node],
) -> FindingDraft {
    let mut draft = draft(ctx, first, absent, Omission::NotPosted);
    let cycle = super::cross_group_deadlock::shortest_cycle(ctx, ranks, places);
    draft.cycle = ctx.ranks(&cycle);
    let group = ctx.group_name(ctx.group_at(first));
    let all_ranks = format_ranks(&ctx.ranks(ranks));
    let each = each_did(ctx, &cycle, places);
    draft.sentence = format!(
        "{all_ranks} wait for each other on group {group}{each}; which of them took the wrong order or the wrong peer \
         is not known"
    );
    draft.next = format!(
        "compare the peers and the order of the sends and receives that {all_ranks} post, or post both in one batch"
    );
    draft.ruled_out = vec!["not_joined: every rank of the cycle itself waits".to_owned()];
    // The ranks that are not absent remain possible: one may have left out another step and so posted its message too
    // early.
    let others = ranks.iter().filter(|node| !absent.contains(node));
    draft.alternatives = absent
        .iter()
        .chain(others)
        .take(16)
        .map(|&node| vec![ctx.rank(node)])
        .collect();
    draft.culprits.clear();
    draft.frames.clear();
    draft.confidence = 0.5;
    draft.targets = ranks.to_vec();
    draft
}

/// At most this many ranks of a cycle are described one by one.
const SHOWN: usize = 4;

/// What a rank did instead of what its peers wait for, like `posted send #5 to rank 4 first` or `is in all_reduce #7`.
/// `None` if no message of the batch is to or from a rank that is missing there.
fn posted_first(ctx: &Context<'_>, place: usize) -> Option<String> {
    let Place::Batch {
        group,
        record,
        pending,
    } = ctx.graph.places[place]
    else {
        let op_ref = ctx.op_ref_of_place(place);
        return Some(format!("is in {} #{}", op_ref.op, op_ref.seq));
    };
    let aligned = ctx.aligned;
    let halves = ctx.halves(record, pending);
    let half = halves.iter().find(|half| {
        let peer = peer_rank(aligned, group, record, half.position);
        let node = peer.and_then(|peer| ctx.graph.node(peer));
        let missing = &ctx.graph.missing[place];
        node.is_some_and(|node| missing.iter().any(|&(other, _)| other == node))
    })?;
    let op = aligned.op(record, half.position);
    let peer = peer_rank(aligned, group, record, half.position)?;
    let (mine, towards) = if op.kind == OpType::Send {
        ("send", "to")
    } else {
        ("receive", "from")
    };
    // The messages of a batch have no order.
    let first = if halves.len() == 1 { " first" } else { "" };
    let new_peer = match is_new_peer(ctx, group, record, half.position) {
        true => format!(", its first {mine} {towards} that rank"),
        false => String::new(),
    };
    Some(format!(
        "posted {mine} #{} {towards} rank {peer}{first}{new_peer}",
        op.p2p_seq
    ))
}

/// Whether a rank turned to this peer for the first time, after it had exchanged messages in this group and direction
/// with others only. `false` if its record may lack older messages.
fn is_new_peer(ctx: &Context<'_>, group: GroupIx, record: RecordIx, position: u32) -> bool {
    let aligned = ctx.aligned;
    let mut lanes = aligned.lanes[record].iter();
    let Some(lane) = lanes.find(|lane| lane.group == group) else {
        return false;
    };
    let op = aligned.op(record, position);
    let earlier = lane
        .messages
        .iter()
        .take_while(|&&message| message < position);
    let mut of_kind = earlier
        .map(|&message| aligned.op(record, message))
        .filter(|other| other.kind == op.kind)
        .peekable();
    let full_record = &aligned.records[record];
    !full_record.wrapped()
        && !full_record.only_active
        && of_kind.peek().is_some()
        && of_kind.all(|other| other.peer != op.peer)
}

/// Whether the receiver of a message may take it from any source: the receive says so, or the receiver of a send has
/// posted such receives.
fn is_from_any(ctx: &Context<'_>, place: usize, op: &Op) -> bool {
    let receives = |member: u32| {
        let key = (ctx.group_at(place), member);
        ctx.messages.any.contains_key(&key)
    };
    if op.kind == OpType::Send {
        receives(op.peer)
    } else {
        op.peer == ANY
    }
}

/// The record that posted the batch of a place, the position of the batch's first message, and the record's lane in
/// that group. `None` if the place is a collective.
fn batch_at<'a>(ctx: &'a Context<'_>, place: usize) -> Option<(RecordIx, u32, &'a Lane)> {
    let Place::Batch {
        group,
        record,
        pending,
    } = ctx.graph.places[place]
    else {
        return None;
    };
    let mut lanes = ctx.aligned.lanes[record].iter();
    let lane = lanes.find(|lane| lane.group == group)?;
    Some((record, ctx.first_of_batch(record, pending), lane))
}

/// Whether no earlier message of the same direction and peer followed an operation like the one that this batch
/// follows. `false` if there were no earlier ones, or if the batch follows none.
fn is_out_of_turn(ctx: &Context<'_>, place: usize) -> bool {
    let aligned = ctx.aligned;
    let Some((record, first, lane)) = batch_at(ctx, place) else {
        return false;
    };
    let count_before =
        |list: &[u32], position: u32| list.partition_point(|&other| other < position);
    // The newest operation of the group before a message, leaving out the message's own batch.
    let before = |message: u32| {
        let seq = aligned.op(record, message).p2p_seq;
        let collectives = &lane.collectives[..count_before(&lane.collectives, message)];
        let messages = lane.messages[..count_before(&lane.messages, message)]
            .iter()
            .rev();
        let mut others = messages.filter(|&&position| {
            let op = aligned.op(record, position);
            op.p2p_seq != seq && op.kind.is_p2p()
        });
        let newest = collectives.last().max(others.next())?;
        let op = aligned.op(record, *newest);
        Some((op.kind, op.peer, op.call))
    };
    let wanted = aligned.op(record, first);
    let similar = lane.messages[..count_before(&lane.messages, first)]
        .iter()
        .rev();
    let similar = similar.filter(|&&position| {
        let op = aligned.op(record, position);
        op.kind == wanted.kind && op.peer == wanted.peer
    });
    let past: Vec<_> = similar
        .take(PAST_MESSAGES)
        .filter_map(|&position| before(position))
        .collect();
    before(first).is_some_and(|now| !past.is_empty() && !past.contains(&now))
}

/// Whether the rank's past in the group predicts a collective of these places instead of this message. The prediction
/// is the step that followed the longest earlier run of steps equal to the newest ones.
fn comes_too_early(ctx: &Context<'_>, place: usize, places: &[usize]) -> bool {
    // A shorter run predicts nothing.
    const MIN_RUN: usize = 4;
    // Runs are not followed further back than this many steps.
    const MAX_RUN: usize = 64;
    let aligned = ctx.aligned;
    let Some((record, first, lane)) = batch_at(ctx, place) else {
        return false;
    };
    let steps = lane.collectives.iter().chain(&lane.messages).copied();
    let mut steps: Vec<u32> = steps
        .filter(|&position| {
            position < first && aligned.op(record, position).kind != OpType::Coalesced
        })
        .collect();
    steps.sort_unstable();
    let step = |index: usize| {
        let op = aligned.op(record, steps[index]);
        (op.kind, op.peer, op.call)
    };
    let Some(last) = steps.len().checked_sub(1) else {
        return false;
    };
    let run_to = |index: usize| {
        let run =
            (0..=index.min(MAX_RUN)).take_while(|&back| step(index - back) == step(last - back));
        (run.count(), index)
    };
    let Some((run, index)) = (0..last).map(run_to).max() else {
        return false;
    };
    let expected = aligned.op(record, steps[(index + 1).min(last)]);
    let calls = &aligned.shared.calls;
    run >= MIN_RUN
        && places.iter().any(|&other| match ctx.graph.places[other] {
            Place::Collective { group, seq } if group == lane.group => {
                event::usual_call(aligned, group, seq)
                    .is_some_and(|call| calls.difference(call, expected.call).is_none())
            }
            _ => false,
        })
}

/// The highest confidence of a finding on a message after whose call its rank continued.
const NOT_WAITED_FOR: f64 = 0.6;

/// Whether the thread that issued this message has completed an operation that it issued later, on a backend whose
/// operations run on hosts: then the call did not block. Operations on devices never block their threads.
fn went_on_after(ctx: &Context<'_>, record: RecordIx, position: u32) -> bool {
    let full_record = &ctx.aligned.records[record];
    let op = ctx.aligned.op(record, position);
    let backend = &ctx.aligned.shared.calls.get(op.call).signature.backend;
    if op.thread == NONE || full_record.recorder.sees_device() || on_device(backend) {
        return false;
    }
    let later = full_record.ops[position as usize + 1..].iter();
    let is_done = |other: &&Op| other.thread == op.thread && other.completed();
    later
        .filter(is_done)
        .any(|other| other.p2p_seq != op.p2p_seq || !other.is_p2p)
}

/// At most this many earlier messages are looked at.
const PAST_MESSAGES: usize = 64;

/// What the ranks that a message waits for have not done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Omission {
    /// The ranks did not post the message's other half.
    NotPosted,
    /// One of the ranks did not post the other half, and it is not known which.
    AnyOf,
    /// The devices of the ranks have not reached the other half, which the ranks posted.
    NotStarted,
}

/// The finding on the ranks for which the batch of a place waits.
fn draft(ctx: &Context<'_>, place: usize, nodes: &[Node], omission: Omission) -> FindingDraft {
    let any_of_them = omission == Omission::AnyOf;
    let culprits = ctx.ranks(nodes);
    let Place::Batch {
        group,
        record,
        pending,
    } = ctx.graph.places[place]
    else {
        return FindingDraft::new(Code::E120, String::new());
    };
    let waiting = ctx.aligned.records[record].rank;
    // In a batch, this is the message whose other half the culprit did not post.
    let position = ctx
        .halves(record, pending)
        .iter()
        .map(|half| half.position)
        .find(|&position| {
            peer_rank(ctx.aligned, group, record, position)
                .is_some_and(|peer| culprits.contains(&peer))
        })
        .unwrap_or(ctx.first_of_batch(record, pending));
    let op_ref = ctx.op_ref_of_message(record, group, position);
    let op = ctx.aligned.op(record, position);
    let half = if op.kind == OpType::Send {
        "receive"
    } else {
        "send"
    };
    let waited = match (ctx.waited_ms(place).map(format_time), ctx.waits_ms(place)) {
        (Some(time), Some(_)) => format!("has waited {time}"),
        (Some(time), None) => format!("waited {time}"),
        (None, _) => "waits".to_owned(),
    };
    let went_on = omission != Omission::NotStarted && went_on_after(ctx, record, position);
    let have = if culprits.len() == 1 { "has" } else { "have" };
    let did = match omission {
        Omission::NotPosted | Omission::AnyOf => format!("never posted the {half}"),
        Omission::NotStarted => format!("posted but {have} not started the {half}"),
    };
    let call = ctx.describe_op(record, op);
    let whose = format_ranks(&culprits);
    // If the wait or the job is over, it is not known how long ago the wait began.
    let ago = ctx.waits_ms(place).filter(|_| ctx.life.lives_on());
    let mut sentence = match (went_on, ago.map(format_time)) {
        (false, _) => format!("{whose} {did} that rank {waiting} {waited} for in {call}"),
        (true, Some(time)) => format!(
            "{whose} {did} for {call}, which rank {waiting} issued {time} ago by a call that did not block"
        ),
        (true, None) => {
            format!(
                "{whose} {did} for {call}, which rank {waiting} issued by a call that did not block"
            )
        }
    };
    if let [rank] = culprits[..]
        && let Some(peer_record) = ctx.aligned.record_in(group, rank)
    {
        sentence.push_str(&format!("; {}", ctx.last_seen(peer_record)));
    }
    let mut draft = FindingDraft::new(Code::E120, sentence);
    draft.age_ms = ctx.waits_ms(place);
    draft.confidence = if any_of_them { 0.5 } else { 0.9 };
    draft.evidence.push(ctx.evidence(record, position, group));
    for &rank in culprits.iter().take(4) {
        if let Some(peer_record) = ctx.aligned.record_in(group, rank) {
            draft
                .evidence
                .extend(ctx.evidence_of_newest(peer_record, group));
            draft.frames.extend(ctx.frames_of_newest(peer_record));
        }
    }
    if omission == Omission::NotStarted {
        draft.next = format!(
            "look at the device of {}: what it ran before that {half} has not ended",
            format_ranks(&culprits)
        );
    } else {
        draft
            .ruled_out
            .push("p2p_size_mismatch: the other half is not there to compare".to_owned());
        draft.next = format!(
            "find out why {} posted {}",
            format_ranks(&culprits),
            not_posted(ctx, group, &culprits, waiting, op.kind)
        );
    }
    draft.targets = nodes.to_vec();
    if is_from_any(ctx, place, op) {
        // The waiting rank may have posted one message too many.
        draft.confidence = draft.confidence.min(0.6);
        draft.alternatives = vec![culprits.clone(), vec![waiting]];
        draft.doubts.push(format!(
            "a receive from any source does not show which rank was to send, nor whether rank {waiting} \
             posted one too many"
        ));
    }
    if went_on {
        draft.confidence = draft.confidence.min(NOT_WAITED_FOR);
        draft.doubts.push(format!(
            "rank {waiting} went on after that call: whether it waits for its end now, or \
             issued one too many, is not recorded"
        ));
        if !any_of_them && draft.alternatives.is_empty() {
            draft.alternatives = vec![culprits.clone(), vec![waiting]];
        }
    }
    // A rank whose device has not reached its half, or that is in another operation, is not at work between two.
    let is_at_work =
        omission != Omission::NotStarted && nodes.iter().all(|&node| !ctx.graph.waits(node));
    let at_work = is_at_work.then(|| may_still_come(ctx, place, &culprits));
    if let Some(at_work) = at_work.flatten() {
        draft.confidence = draft.confidence.min(at_work.confidence);
        draft.doubts.push(at_work.doubt(&culprits));
    }
    if any_of_them {
        draft.alternatives = culprits.iter().take(16).map(|&rank| vec![rank]).collect();
    } else {
        draft.culprits = culprits;
    }
    draft.at = Some(op_ref);
    draft
}
