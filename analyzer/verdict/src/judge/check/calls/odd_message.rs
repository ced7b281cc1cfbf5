//! E120: a rank left out a send or a receive, posted one too many, or went to another step first. E121: a rank posted a
//! message of another size, and the records do not show for certain which halves belong together. The rank's siblings
//! show the deviation: the ranks with the same part in groups of the same family.
//!
//! The records of the two ends are not enough: each end waits for the other, and later messages of the two, of other
//! sizes, are matched instead of the one left out. So this check runs before those that compare the ends.

use super::p2p_size_mismatch::both_ends;
use crate::align::p2p::Half;
use crate::align::{GroupIx, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::siblings::{self, Deviation, Odd};
use crate::judge::waits::missed::peer_rank;
use crate::judge::waits::wait_graph::{Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::{count, format_ranks, format_time};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet};

pub(crate) struct OddMessage;

impl Check for OddMessage {
    fn codes(&self) -> &'static [Code] {
        &[Code::E120, Code::E121]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let accused = |rank: &Rank| so_far.iter().any(|draft| draft.culprits.contains(rank));
        let mut earliest: BTreeMap<RecordIx, (Odd, MessageEnd)> = BTreeMap::new();
        let ends = waiting_ends(ctx);
        let open: BTreeSet<RecordIx> = ends
            .iter()
            .filter(|end| !end.met)
            .map(|end| end.record)
            .collect();
        for end in ends {
            let rank = ctx.aligned.records[end.record].rank;
            if ctx.graph.node(rank).is_none_or(explained) {
                continue;
            }
            // Guessed members do not show which part a rank has.
            if !ctx.aligned.groups[end.group].members_recorded {
                continue;
            }
            let Some(odd) = siblings::odd(ctx.aligned, end.record, end.group, end.peer) else {
                continue;
            };
            // If both halves are posted, and their pairing is certain, `p2p_size_mismatch` compares their sizes.
            let resized = matches!(odd.deviation, Deviation::Resized { .. });
            if resized && end.paired {
                continue;
            }
            // A rank that is at fault itself does not show what others should have done.
            if odd.siblings.iter().all(accused) {
                continue;
            }
            // With a single sibling, the comparison decides only if this message does not fit its other half, and all
            // waiting messages of the sibling fit theirs.
            if odd.siblings.len() < 2 && (end.met || open.contains(&odd.shown_by.0)) {
                continue;
            }
            let known = earliest.entry(end.record).or_insert((odd.clone(), end));
            if odd.position < known.0.position {
                *known = (odd, end);
            }
        }
        earliest
            .into_values()
            .filter_map(|(odd, end)| draft(ctx, &odd, end))
            .collect()
    }
}

/// One end of a message that does not complete: a rank, and its peer at the other end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct MessageEnd {
    /// Whether both halves are posted, certainly belong together, and have the same size.
    met: bool,
    /// Whether both halves are posted, and their pairing is certain.
    paired: bool,
    group: GroupIx,
    record: RecordIx,
    /// The peer, as a member of the group.
    peer: u32,
    /// Record and position of the half that waits, whichever end posted it.
    waiting: (RecordIx, u32),
}

/// At most this many ends are compared with siblings.
const MAX_ENDS: usize = 256;

/// Both ends of the waiting messages, one for each group, record and peer, at most [`MAX_ENDS`]. Ends whose halves do
/// not fit come first.
fn waiting_ends(ctx: &Context<'_>) -> Vec<MessageEnd> {
    let mut ends: BTreeMap<(GroupIx, RecordIx, u32), MessageEnd> = BTreeMap::new();
    for place in &ctx.graph.places {
        let &Place::Batch {
            group,
            record,
            pending,
        } = place
        else {
            continue;
        };
        for &half in ctx.halves(record, pending) {
            for end in ends_of(ctx, group, record, half).into_iter().flatten() {
                let known = ends.entry((group, end.record, end.peer)).or_insert(end);
                *known = end.min(*known);
            }
        }
    }
    let ends: BTreeSet<MessageEnd> = ends.into_values().collect();
    ends.into_iter().take(MAX_ENDS).collect()
}

/// Both ends of the message of a half, first the end that posted it. The other is `None` if its rank left no record;
/// both are `None` if the peer is not known.
fn ends_of(
    ctx: &Context<'_>,
    group: GroupIx,
    record: RecordIx,
    half: Half,
) -> [Option<MessageEnd>; 2] {
    let aligned = ctx.aligned;
    let ranks = &aligned.groups[group].ranks;
    let member = |rank| ranks.iter().position(|&other| other == rank);
    let Some(peer) = peer_rank(aligned, group, record, half.position) else {
        return [None, None];
    };
    let (Some(me), Some(other)) = (member(aligned.records[record].rank), member(peer)) else {
        return [None, None];
    };
    let end = |record: RecordIx, peer: usize| MessageEnd {
        met: fits(ctx, group, record, half),
        paired: both_ends(ctx, group, record, half).is_some(),
        group,
        record,
        peer: peer as u32,
        waiting: (record, half.position),
    };
    let mine = end(record, other);
    let theirs = aligned
        .record_in(group, peer)
        .map(|peer_record| MessageEnd {
            record: peer_record,
            peer: me as u32,
            ..mine
        });
    [Some(mine), theirs]
}

/// Whether the other half is posted, certainly belongs to this one, and has the same size.
fn fits(ctx: &Context<'_>, group: GroupIx, record: RecordIx, half: Half) -> bool {
    let size = |(record, half): (RecordIx, Half)| {
        let call = ctx.aligned.op(record, half.position).call;
        ctx.aligned.shared.calls.key(call).size
    };
    both_ends(ctx, group, record, half).is_some_and(|(sender, send, receiver, receive)| {
        size((sender, send)) == size((receiver, receive))
    })
}

/// The finding on a rank that deviates from its siblings; `None` if it has none.
fn draft(ctx: &Context<'_>, odd: &Odd, end: MessageEnd) -> Option<FindingDraft> {
    let aligned = ctx.aligned;
    let rank = aligned.records[odd.record].rank;
    let peer = *aligned.groups[end.group].ranks.get(end.peer as usize)?;
    let op_ref = ctx.op_ref_of_message(end.waiting.0, end.group, end.waiting.1);
    let code = match odd.deviation {
        Deviation::Resized { .. } => Code::E121,
        Deviation::LeftOut { .. } | Deviation::NotFirst { .. } | Deviation::Extra { .. } => {
            Code::E120
        }
    };
    let mut draft = FindingDraft::new(code, sentence(ctx, odd, end, peer));
    draft.confidence = match (odd.siblings.len(), odd.siblings_alike) {
        (2.., 0) => 0.92,
        _ => 0.75,
    };
    draft.culprits = vec![rank];
    draft.evidence = vec![
        ctx.evidence(odd.record, odd.position, end.group),
        ctx.evidence(odd.shown_by.0, odd.shown_by.1, end.group),
    ];
    draft
        .evidence
        .push(ctx.evidence(end.waiting.0, end.waiting.1, end.group));
    let op = aligned.op(odd.record, odd.position);
    draft.frames = ctx.frames_of(odd.record, op, "there");
    draft.ruled_out.push(format!(
        "rank {peer}: {} with the same part in their groups post what rank {peer} waits for",
        format_ranks(&odd.siblings)
    ));
    draft.next = format!(
        "compare what rank {rank} posts to and from rank {peer} with the same step of rank {}",
        odd.siblings.first()?
    );
    draft.at = Some(op_ref);
    draft.targets = targets(ctx, rank, peer);
    Some(draft)
}

/// The sentence of the finding. `peer` is the rank at the other end.
fn sentence(ctx: &Context<'_>, odd: &Odd, end: MessageEnd, peer: u32) -> String {
    let aligned = ctx.aligned;
    let rank = aligned.records[odd.record].rank;
    let group = ctx.group_name(end.group);
    let step = aligned.op(odd.record, odd.position);
    let step = format!("{}{}", ctx.describe_op(odd.record, step), ctx.at_site(step));
    let sibling_step = aligned.op(odd.shown_by.0, odd.shown_by.1);
    let site = ctx.at_site(sibling_step);
    let half = |sends: bool| {
        if sends {
            format!("send to rank {peer} on group {group}")
        } else {
            format!("receive from rank {peer} on group {group}")
        }
    };
    let siblings = format_ranks(&odd.siblings);
    let deviation = match odd.deviation {
        Deviation::LeftOut { sends } => format!(
            "rank {rank} left out a {} and went on to {step}: {siblings}, with the same part in their groups, \
             posted one more{site}",
            half(sends)
        ),
        Deviation::NotFirst { sends } => format!(
            "rank {rank} went to {step} before, or without, the {} that {siblings}, with the same part in their \
             groups, posted first{site}",
            half(sends)
        ),
        Deviation::Extra { sends } => format!(
            "rank {rank} posted a {} too many, {step}: {siblings}, with the same part in their groups, posted none \
             there",
            half(sends)
        ),
        Deviation::Resized { sends } => format!(
            "rank {rank} posted a {} of another size, {} in {step}: {siblings}, with the same part in their groups, \
             post {}",
            half(sends),
            elements(ctx, odd.record, odd.position),
            elements(ctx, odd.shown_by.0, odd.shown_by.1)
        ),
    };
    let (record, position) = end.waiting;
    let waiting = aligned.records[record].rank;
    if waiting == rank {
        return deviation;
    }
    let place = ctx
        .graph
        .node(waiting)
        .and_then(|node| ctx.graph.waits_in[node].first());
    let waited = place.and_then(|&place| ctx.waited_ms(place));
    let waited = waited.map_or("waits".to_owned(), |ms| {
        format!("has waited {}", format_time(ms))
    });
    let op = aligned.op(record, position);
    format!(
        "{deviation}; rank {waiting} {waited} in {}",
        ctx.describe_op(record, op)
    )
}

/// The size of a message, like `512 elements`.
fn elements(ctx: &Context<'_>, record: RecordIx, position: u32) -> String {
    let call = ctx.aligned.op(record, position).call;
    let size = ctx.aligned.shared.calls.key(call).size;
    size.map_or("no size".to_owned(), |size| count(size, "element"))
}

/// The nodes of both ends, and of all ranks that wait with one of them in a cycle.
fn targets(ctx: &Context<'_>, rank: u32, peer: u32) -> Vec<Node> {
    let mut targets: Vec<Node> = [rank, peer]
        .into_iter()
        .filter_map(|rank| ctx.graph.node(rank))
        .collect();
    for wait_root in &ctx.wait_roots {
        if let WaitRoot::Cycle { ranks, .. } = wait_root
            && ranks.iter().any(|node| targets.contains(node))
        {
            targets.extend(ranks);
        }
    }
    targets.sort_unstable();
    targets.dedup();
    targets
}
