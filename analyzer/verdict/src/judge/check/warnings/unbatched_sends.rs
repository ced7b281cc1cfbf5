//! W290: ranks send to each other before they post the matching receives, and no error was found.
//!
//! On a device the messages of two ranks run in the order in which they were issued, unless they are one batch. A send
//! may wait for its receive. If both ranks issue their send first, only a buffer lets the sends end: with a larger
//! message both wait for each other. Once they do, E120 names it.

use crate::align::p2p::{Counterpart, Half, Pair, done};
use crate::align::pending::on_device;
use crate::align::record::Op;
use crate::align::{GroupIx, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::format_ranks;
use crate::report::{Code, Severity};
use rcomm_recorder::model::{OpType, Rank};
use std::collections::BTreeMap;

pub(crate) struct UnbatchedSends;

impl Check for UnbatchedSends {
    fn codes(&self) -> &'static [Code] {
        &[Code::W290]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let is_error = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(is_error) {
            return Vec::new();
        }
        let mut keys: Vec<_> = ctx.messages.pairs.keys().copied().collect();
        keys.retain(|(_, (source, destination))| source < destination);
        keys.sort_unstable();
        let opposite = keys.into_iter().filter_map(|(group, (one, other))| {
            let forward = ctx.messages.pairs.get(&(group, (one, other)))?;
            let back = ctx.messages.pairs.get(&(group, (other, one)))?;
            opposite(ctx, group, [one, other], [forward, back])
        });
        let mut of_kind: BTreeMap<u32, Vec<Opposite>> = BTreeMap::new();
        for pair in opposite {
            let family = ctx.aligned.groups[pair.group].family;
            of_kind.entry(family).or_default().push(pair);
        }
        of_kind.values().map(|pairs| draft(ctx, pairs)).collect()
    }
}

/// Two ranks that sent to each other before either posted the receive for the other's send.
struct Opposite {
    group: GroupIx,
    records: [RecordIx; 2],
    /// The position of the first such send of each rank.
    sends: [u32; 2],
    /// The number of times that both sent before they received.
    times: usize,
}

/// The sends of two members of a group to each other that both issued before they received. `None` if there are none,
/// if their messages are not known for certain, or if no device carries the messages.
fn opposite(
    ctx: &Context<'_>,
    group: GroupIx,
    members: [u32; 2],
    [forward, back]: [&Pair; 2],
) -> Option<Opposite> {
    let aligned = ctx.aligned;
    let [one, other] = members.map(|member| aligned.lane(group, member as usize));
    let [one, other] = [one?.0, other?.0];
    let device = |record: RecordIx, half: &Half| {
        let call = aligned.op(record, half.position).call;
        on_device(&aligned.shared.calls.get(call).signature.backend)
    };
    let is_certain = forward.certain && back.certain && one != other;
    if !is_certain || !forward.sends.first().is_some_and(|half| device(one, half)) {
        return None;
    }
    let mut found: Option<Opposite> = None;
    for (index, &send) in forward.sends.iter().enumerate() {
        // What the first rank receives next, after its send.
        let next = back
            .receives
            .partition_point(|half| half.position < send.position);
        let (Some(&receive), Counterpart::Posted(met)) = (
            back.receives.get(next),
            ctx.messages.receive_of(forward, index),
        ) else {
            continue;
        };
        let Counterpart::Posted(answer) = ctx.messages.send_of(back, next) else {
            continue;
        };
        let halves = [(one, send), (one, receive), (other, answer), (other, met)];
        let waits = answer.position < met.position;
        let ended = halves
            .iter()
            .all(|&(record, half)| done(aligned, record, half));
        let unbatched = halves
            .iter()
            .all(|&(record, half)| is_unbatched(ctx, record, half));
        if !waits || !ended || !unbatched {
            continue;
        }
        match &mut found {
            Some(found) => found.times += 1,
            None => {
                found = Some(Opposite {
                    group,
                    records: [one, other],
                    sends: [send.position, answer.position],
                    times: 1,
                });
            }
        }
    }
    found
}

/// Whether a message was posted outside of any batch: no marker closes it, and neither the operation before it nor the
/// one after it is a message with its number.
///
/// A schedule of a pipeline may post batches of one message, whose order it ensures by other means.
fn is_unbatched(ctx: &Context<'_>, record: RecordIx, half: Half) -> bool {
    let ops = &ctx.aligned.records[record].ops;
    let op = &ops[half.position as usize];
    let same = |other: &Op| {
        let posted = other.kind.is_p2p() || other.kind == OpType::Coalesced;
        posted && other.group == op.group && other.p2p_seq == op.p2p_seq
    };
    let neighbors = [half.position.checked_sub(1), half.position.checked_add(1)];
    let mut neighbors = neighbors.into_iter().flatten();
    half.status_op == half.position
        && !neighbors.any(|neighbor| ops.get(neighbor as usize).is_some_and(same))
}

/// The finding on pairs of ranks in groups of one kind, of which the first is the example.
fn draft(ctx: &Context<'_>, pairs: &[Opposite]) -> FindingDraft {
    let example = &pairs[0];
    let rank = |record: RecordIx| ctx.aligned.records[record].rank;
    let [a, b] = example.records.map(rank);
    let times: usize = pairs.iter().map(|pair| pair.times).sum();
    let describe = |end: usize| {
        let record = example.records[end];
        let op = ctx.aligned.op(record, example.sends[end]);
        format!("{}{}", ctx.describe_op(record, op), ctx.at_site(op))
    };
    let mut ranks: Vec<Rank> = pairs
        .iter()
        .flat_map(|pair| pair.records.map(rank))
        .collect();
    ranks.sort_unstable();
    ranks.dedup();
    let more = match (pairs.len(), times) {
        (1, 1) => String::new(),
        (1, n) => format!("; they did so {n} times"),
        (number, n) => format!(
            "; {number} pairs of {} did so {n} times",
            format_ranks(&ranks)
        ),
    };
    let mut draft = FindingDraft::new(
        Code::W290,
        format!(
            "ranks {a} and {b} each send to the other before they post the receive for what it sends: {}, and {}; \
             only a buffer let both sends end{more}",
            describe(0),
            describe(1),
        ),
    );
    draft.confidence = 0.85;
    for (&record, &send) in example.records.iter().zip(&example.sends) {
        draft
            .evidence
            .push(ctx.evidence(record, send, example.group));
    }
    let first = ctx.aligned.op(example.records[0], example.sends[0]);
    draft.frames = ctx.frames_of(example.records[0], first, "last_seen");
    draft.next = "post the send and the receive in one batch (batch_isend_irecv, or one group call), or let one of the \
                  two ranks receive first"
        .to_owned();
    draft.at = Some(ctx.op_ref_of_message(example.records[0], example.group, example.sends[0]));
    draft
}
