//! Failures inside an exchange whose sizes no record holds.
//!
//! A member that names other sizes than its peers expect may complete its part and go on, while the operation of a peer
//! that receives too much fails; gloo ends the whole process of such a peer. Where the records lack the sizes of each
//! pair, the rank that failed may be such a peer.

use crate::align::pending::on_device;
use crate::align::{GroupIx, event};
use crate::judge::check::calls::unequal_parts::{SIZES_UNKNOWN, hides_sizes};
use crate::judge::context::{Context, FindingDraft};
use rcomm_recorder::model::Rank;

/// The signal of a process that aborts, SIGABRT.
const ABORTED: i32 = 6;

/// The exit code of a process that aborts, where its parent is a shell.
const ABORTED_CODE: i32 = 128 + ABORTED;

/// Blames no rank for the end of its process inside the collective `seq` of a group if the collective is an exchange on
/// hosts whose sizes are not recorded, and a process may have aborted because of them. A process that ends because it
/// raised an exception, or in any other way than by aborting, does not end because of sizes, and neither does one that
/// waits for a device.
pub(super) fn leave_end_open(
    ctx: &Context<'_>,
    group: GroupIx,
    seq: u32,
    draft: &mut FindingDraft,
) {
    let has_cause = |rank: &Rank| ended_otherwise(ctx, *rank);
    let have_causes = !draft.culprits.is_empty() && draft.culprits.iter().all(has_cause);
    let backend = |call| &ctx.aligned.shared.calls.get(call).signature.backend;
    let call = event::usual_call(ctx.aligned, group, seq);
    if !have_causes && !call.is_some_and(|call| on_device(backend(call))) {
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

/// Whether the process of a rank did not end because it aborted: it raised an exception, it was ended for want of
/// memory, or it is known to have ended by another signal or exit code.
fn ended_otherwise(ctx: &Context<'_>, rank: Rank) -> bool {
    let mut records = ctx.aligned.records_of(rank);
    if records.any(|record| ctx.raised(record).is_some()) {
        return true;
    }
    let exit = ctx.life.gone(rank).and_then(|gone| gone.exit);
    exit.is_some_and(|exit| match (exit.signal, exit.exit_code) {
        _ if exit.out_of_memory == Some(true) => true,
        (Some(signal), _) => signal != ABORTED,
        (None, Some(code)) => code != ABORTED_CODE,
        (None, None) => false,
    })
}
