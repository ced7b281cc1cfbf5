//! Failures inside an exchange whose sizes no record holds.
//!
//! A member that names other sizes than its peers expect may complete its part and go on, while the operation of a peer
//! that receives too much fails; gloo ends the whole process of such a peer. Where the records lack the sizes of each
//! pair, the rank that failed may be such a peer.

use crate::align::pending::on_device;
use crate::align::{GroupIx, event};
use crate::judge::check::calls::unequal_parts::hides_sizes;
use crate::judge::context::{Context, FindingDraft};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::RankEnd;

/// The highest confidence of a finding on a rank that failed inside such an exchange.
const SIZES_UNKNOWN: f64 = 0.5;

/// The signals with which others end a process: SIGHUP, SIGINT, SIGKILL and SIGTERM.
const FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// Blames no rank for the end of its process inside the collective `seq` of a group if the collective is an exchange on
/// hosts whose sizes are not recorded. A process that was ended from outside, or for want of memory, did not end because
/// of sizes, and neither does one that waits for a device.
pub(super) fn leave_end_open(
    ctx: &Context<'_>,
    group: GroupIx,
    seq: u32,
    draft: &mut FindingDraft,
) {
    let exit = |rank: &Rank| ctx.life.gone(*rank)?.exit;
    let mut exits = draft.culprits.iter().filter_map(exit);
    let backend = |call| &ctx.aligned.shared.calls.get(call).signature.backend;
    let call = event::usual_call(ctx.aligned, group, seq);
    if !exits.any(|exit| is_from_outside(&exit))
        && !call.is_some_and(|call| on_device(backend(call)))
    {
        leave_open(ctx, group, seq, draft);
    }
}

/// Blames no rank for a failure inside the collective `seq` of a group if the collective is an exchange whose sizes are
/// not recorded.
pub(super) fn leave_open(ctx: &Context<'_>, group: GroupIx, seq: u32, draft: &mut FindingDraft) {
    if !hides_sizes(ctx, group, seq) {
        return;
    }
    draft.confidence = draft.confidence.min(SIZES_UNKNOWN);
    draft.doubts.push(
        "the sizes that each pair of ranks exchanges there are not recorded: a rank that names other sizes than its peers \
         expect may be at fault, and the one that failed may have suffered from it"
            .to_owned(),
    );
    let failed = std::mem::take(&mut draft.culprits);
    let members = ctx.aligned.groups[group].ranks.iter().copied();
    let others = members.filter(|rank| !failed.contains(rank));
    let others: Vec<Vec<Rank>> = others.map(|rank| vec![rank]).collect();
    if draft.alternatives.is_empty() && !failed.is_empty() {
        draft.alternatives.push(failed);
    }
    let known = draft.alternatives.clone();
    let others = others.into_iter().filter(|other| !known.contains(other));
    draft.alternatives.extend(others);
    draft.alternatives.truncate(16);
    draft
        .next
        .push_str("; compare the split sizes that all members pass there");
}

/// Whether a process was ended from outside, or for want of memory.
fn is_from_outside(exit: &RankEnd) -> bool {
    let by_signal = exit
        .signal
        .is_some_and(|signal| FROM_OUTSIDE.contains(&signal));
    by_signal || exit.out_of_memory == Some(true)
}
