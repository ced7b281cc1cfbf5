//! E121: both halves of a message are posted, and their sizes differ, both in elements and in bytes; or both halves
//! failed, and their element types differ.

use crate::align::p2p::{Counterpart, Half};
use crate::align::pending::PendingKind;
use crate::align::record::Op;
use crate::align::signature::Calls;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::{Node, Place};
use crate::report::Code;
use rcomm_recorder::model::{EntryState, OpType};
use std::collections::BTreeSet;

pub(crate) struct P2pSizeMismatch;

impl Check for P2pSizeMismatch {
    fn codes(&self) -> &'static [Code] {
        &[Code::E121]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let by_siblings = so_far.iter().filter(|draft| draft.code == Code::E120);
        let explained: BTreeSet<Node> = by_siblings
            .flat_map(|draft| draft.targets.iter().copied())
            .collect();
        let explained = |record: usize| {
            let node = ctx.graph.node(ctx.aligned.records[record].rank);
            node.is_some_and(|node| explained.contains(&node))
        };
        let mut drafts = Vec::new();
        let mut seen: BTreeSet<(usize, u32, usize, u32)> = BTreeSet::new();
        for place in &ctx.graph.places {
            let &Place::Batch {
                group,
                record,
                pending,
            } = place
            else {
                continue;
            };
            let PendingKind::Batch { halves } = &ctx.graph.pending[record][pending].kind else {
                continue;
            };
            for &half in halves {
                let Some((sender, send, receiver, receive)) = both_ends(ctx, group, record, half)
                else {
                    continue;
                };
                // A message that a rank left out (E120) shifts all later ones of the pair.
                if explained(sender) || explained(receiver) {
                    continue;
                }
                if seen.insert((sender, send.position, receiver, receive.position)) {
                    drafts.extend(judge(ctx, group, (sender, send), (receiver, receive)));
                }
            }
        }
        drafts
    }
}

/// The record and half of the sender, then of the receiver; `None` unless both are posted and their pairing is certain.
pub(crate) fn both_ends(
    ctx: &Context<'_>,
    group: usize,
    record: usize,
    half: Half,
) -> Option<(usize, Half, usize, Half)> {
    let aligned = ctx.aligned;
    let op = aligned.op(record, half.position);
    let ranks = &aligned.groups[group].ranks;
    let me = ranks
        .iter()
        .position(|&rank| rank == aligned.records[record].rank)? as u32;
    let peer = crate::align::p2p::peer_of(op, me, ranks.len() as u32)?;
    let peer_record = aligned.record_in(group, ranks[peer as usize])?;
    let sends = op.kind == OpType::Send;
    let ends = if sends { (me, peer) } else { (peer, me) };
    let pair = ctx.messages.pairs.get(&(group, ends))?;
    if !pair.certain {
        return None;
    }
    let list = if sends { &pair.sends } else { &pair.receives };
    let index = list
        .binary_search_by_key(&half.position, |half| half.position)
        .ok()?;
    let other = if sends {
        ctx.messages.receive_of(pair, index)
    } else {
        ctx.messages.send_of(pair, index)
    };
    let Counterpart::Posted(other) = other else {
        return None;
    };
    Some(if sends {
        (record, half, peer_record, other)
    } else {
        (peer_record, other, record, half)
    })
}

/// The element type of a message as recorded; empty if none was recorded.
fn type_of(calls: &Calls, op: &Op) -> String {
    let signature = &calls.get(op.call).signature;
    let types = signature.input_dtypes.iter();
    let first = types.chain(&signature.output_dtypes).next();
    first.cloned().unwrap_or_default()
}

/// Whether each of the two sizes also occurs at the other end: then the halves may belong to two different messages.
fn both_usual(
    ctx: &Context<'_>,
    group: usize,
    send: (usize, Half),
    receive: (usize, Half),
) -> bool {
    let aligned = ctx.aligned;
    let size = |record: usize, half: &Half| {
        let call = aligned.op(record, half.position).call;
        aligned.shared.calls.key(call).size
    };
    let ranks = &aligned.groups[group].ranks;
    let member = |record: usize| {
        let rank = aligned.records[record].rank;
        ranks.iter().position(|&other| other == rank)
    };
    let (Some(source), Some(destination)) = (member(send.0), member(receive.0)) else {
        return false;
    };
    let key = (group, (source as u32, destination as u32));
    ctx.messages.pairs.get(&key).is_some_and(|pair| {
        let (sent, received) = (size(send.0, &send.1), size(receive.0, &receive.1));
        pair.receives
            .iter()
            .any(|half| size(receive.0, half) == sent)
            && pair.sends.iter().any(|half| size(send.0, half) == received)
    })
}

/// The finding on the two halves of a message; `None` if they fit, or if a size is not recorded.
fn judge(
    ctx: &Context<'_>,
    group: usize,
    send: (usize, Half),
    receive: (usize, Half),
) -> Option<FindingDraft> {
    let aligned = ctx.aligned;
    let calls = &aligned.shared.calls;
    let sent = calls.key(aligned.op(send.0, send.1.position).call);
    let received = calls.key(aligned.op(receive.0, receive.1.position).call);
    let (Some(sent_size), Some(received_size)) = (sent.size, received.size) else {
        return None;
    };
    let bytes =
        |record: usize, half: Half| calls.get(aligned.op(record, half.position).call).bytes();
    let same_bytes = bytes(send.0, send.1) == bytes(receive.0, receive.1);
    // Most backends accept equal bytes of another type. If one refused them, both halves failed.
    let failed = [send, receive]
        .iter()
        .all(|&(record, half)| aligned.op(record, half.status_op).state == EntryState::Failed);
    let types = (failed
        && sent.dtype.is_some()
        && received.dtype.is_some()
        && sent.dtype != received.dtype)
        .then(|| {
            (
                type_of(calls, aligned.op(send.0, send.1.position)),
                type_of(calls, aligned.op(receive.0, receive.1.position)),
            )
        });
    if types.is_none() && (sent_size == received_size || same_bytes) {
        return None;
    }
    let (source, destination) = (
        aligned.records[send.0].rank,
        aligned.records[receive.0].rank,
    );
    let op_ref = ctx.op_ref_of_message(send.0, group, send.1.position);
    let site = |record: usize, half: Half| ctx.at_site(aligned.op(record, half.position));
    let (sent_text, received_text) = match &types {
        Some((sent, received)) => (
            format!("{sent_size} {sent}"),
            format!("{received_size} {received}"),
        ),
        None => (format!("{sent_size} elements"), received_size.to_string()),
    };
    let sentence = format!(
        "rank {source} sends {sent_text} to rank {destination} as send #{} on group {}{}, whose receive expects \
         {received_text}{}",
        op_ref.seq,
        ctx.group_name(group),
        site(send.0, send.1),
        site(receive.0, receive.1),
    );
    let mut draft = FindingDraft::new(Code::E121, sentence);
    draft.confidence = 0.95;
    draft.culprits = vec![source.min(destination), source.max(destination)];
    draft.culprits.dedup();
    if types.is_none() && both_usual(ctx, group, send, receive) {
        draft.confidence = 0.5;
        draft.alternatives = draft.culprits.iter().map(|&rank| vec![rank]).collect();
        draft.culprits.clear();
        draft.doubts.push(
            "both sizes are usual between these ranks: one of the two may have left out a message, or posted one too \
             many, before"
                .to_owned(),
        );
    }
    draft.evidence = vec![
        ctx.evidence(send.0, send.1.position, group),
        ctx.evidence(receive.0, receive.1.position, group),
    ];
    draft
        .ruled_out
        .push("p2p_unmatched: both halves are posted".to_owned());
    for (record, half) in [send, receive] {
        let op = aligned.op(record, half.position);
        let frames = ctx.frames_of(record, op, Context::waiting_or_failed(op));
        draft.frames.extend(frames);
    }
    draft.next = format!(
        "compare the buffer that rank {source} sends with the one that rank {destination} receives into"
    );
    for rank in [source, destination] {
        draft.targets.extend(ctx.graph.node(rank));
    }
    draft.at = Some(op_ref);
    Some(draft)
}
