//! Failures inside an exchange of which a record lacks the sizes of pairs.
//!
//! A member that names other sizes than its peers expect may complete its part and continue, while the operation of a
//! peer that receives too much fails. gloo ends the whole process of such a peer. Where a record lacks the sizes of
//! pairs, the rank that failed may be such a peer.

use crate::align::pending::on_device;
use crate::align::{GroupIx, event};
use crate::judge::check::calls::unequal_parts::{SIZES_UNKNOWN, hides_sizes};
use crate::judge::context::{Context, FindingDraft};
use rcomm_recorder::model::Rank;

/// The signal of a process that aborts, SIGABRT.
const ABORTED: i32 = 6;

/// The exit code by which a shell reports that its child aborted.
const ABORTED_CODE: i32 = 128 + ABORTED;

/// Does what [`leave_open`] does, to a finding on processes that ended inside the collective `seq` of a group. Leaves
/// the finding as it is if every culprit is known to have ended in another way than by aborting, or if the collective
/// runs on a device. Wrong sizes end a process only on hosts, and only by an abort.
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

/// Takes the culprits from a finding on a failure inside the collective `seq` of a group, and makes them and the other
/// members alternatives, if [`hides_sizes`] holds for the collective.
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

/// Whether the process of a rank is known to have ended in another way than by aborting: it raised an exception, it was
/// ended because memory ran out, or it ended by another signal or exit code.
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
