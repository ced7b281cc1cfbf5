//! Names the message that a rank did not post, and the calls of its program between which it is missing.

use crate::align::GroupIx;
use crate::judge::context::Context;
use crate::judge::waits::missed::peer_rank;
use rcomm_recorder::model::{OpType, Rank};

/// What ranks did not post for the rank that waits, like `no send for rank 0`, and, of one rank, between which calls of
/// the program, as far as their places are recorded, like `no further send for rank 0 before barrier #7 (train.py:61);
/// it posted its last one at train.py:58`. `half` is the kind of the message that waits.
pub(super) fn not_posted(
    ctx: &Context<'_>,
    group: GroupIx,
    culprits: &[Rank],
    waiting: Rank,
    half: OpType,
) -> String {
    let other_half = if half == OpType::Send {
        "receive"
    } else {
        "send"
    };
    let newest_of = |rank: Rank| {
        let record = ctx.aligned.record_in(group, rank)?;
        let is_other_half = |&position: &u32| {
            let op = ctx.aligned.op(record, position);
            op.kind.is_p2p()
                && op.kind != half
                && peer_rank(ctx.aligned, group, record, position) == Some(waiting)
        };
        let mut lanes = ctx.aligned.lanes[record].iter();
        let lane = lanes.find(|lane| lane.group == group)?;
        lane.messages.iter().copied().rev().find(is_other_half)
    };
    let further = match culprits.iter().any(|&rank| newest_of(rank).is_some()) {
        true => "further ",
        false => "",
    };
    let omitted = format!("no {further}{other_half} for rank {waiting}");
    let [rank] = culprits[..] else {
        return omitted;
    };
    let Some(record) = ctx.aligned.record_in(group, rank) else {
        return omitted;
    };
    let newest = ctx.beside_newest(record);
    let last = newest_of(rank);
    // The last such message may be the call that the rank is in or, of calls that do not block, a later one: then that
    // call does not show where the next message is missing.
    if let (Some((call, _)), Some(message)) = (&newest, last)
        && message >= *call
    {
        return omitted;
    }
    let beside = newest.map_or_else(String::new, |(_, text)| text);
    let last = last
        .and_then(|position| ctx.call_site(ctx.aligned.op(record, position)))
        .map(Context::name_site);
    match last {
        Some(site) => format!("{omitted}{beside}; it posted its last one at {site}"),
        None => format!("{omitted}{beside}"),
    }
}
