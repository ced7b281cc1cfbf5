//! W230: some ranks of a group move far more bytes than the others.
//!
//! Only operations whose members may differ in size count (an exchange between experts, a gather of pieces of any
//! length), and of these only instances that the first member completed and all members recorded. Rooted operations are
//! always uneven. Small amounts of data and few instances are ignored.

use super::Check;
use crate::align::{Aligned, GroupIx};
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::{bytes, format_ranks};
use crate::report::{Code, Severity};
use rcomm_recorder::model::{OpType, Parts, Pattern, Rank};

pub(super) struct UnevenBytes;

/// A member that moves this many times the median is reported.
const TIMES_MEDIAN: u64 = 4;
/// A smaller excess over the median, bytes, costs little time on any link.
const LEAST_EXCESS: u64 = 64 << 20;
/// Fewer instances may differ by chance.
const LEAST_INSTANCES: usize = 16;

impl Check for UnevenBytes {
    fn codes(&self) -> &'static [Code] {
        &[Code::W230]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let stuck = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(stuck) {
            return Vec::new();
        }
        (0..ctx.aligned.groups.len())
            .filter_map(|group| judge(ctx, group))
            .collect()
    }
}

fn judge(ctx: &Context<'_>, group: GroupIx) -> Option<FindingDraft> {
    let (moved, instances) = moved_bytes(ctx.aligned, group)?;
    let mut sorted = moved.clone();
    sorted.sort_unstable();
    let median = sorted[(sorted.len() - 1) / 2];
    let heavy = |&&(_, moved): &&(Rank, u64)| {
        moved >= median.saturating_mul(TIMES_MEDIAN) && moved - median >= LEAST_EXCESS
    };
    let ranks = ctx.aligned.groups[group].ranks.iter().copied();
    let by_rank: Vec<(Rank, u64)> = ranks.zip(moved).collect();
    let mut culprits: Vec<Rank> = by_rank
        .iter()
        .filter(heavy)
        .map(|&(rank, _)| rank)
        .collect();
    culprits.sort_unstable();
    let most = by_rank
        .iter()
        .filter(heavy)
        .map(|&(_, moved)| moved)
        .max()?;
    let mut draft = FindingDraft::new(
        Code::W230,
        format!(
            "{} moved up to {} in {instances} operations of group {} that may be uneven, the median member {}",
            format_ranks(&culprits),
            bytes(most),
            ctx.group_name(group),
            bytes(median)
        ),
    );
    draft.confidence = 0.9;
    draft.next = format!(
        "see what {} hold: routing to few experts, or uneven shards",
        format_ranks(&culprits)
    );
    draft.culprits = culprits;
    Some(draft)
}

/// Bytes that each member moved in the instances that may be uneven, that the first member completed and that all
/// recorded, and the number of these instances. `None` if there are fewer than [`LEAST_INSTANCES`], fewer than three
/// members, or a member's record is missing.
fn moved_bytes(aligned: &Aligned<'_>, group: GroupIx) -> Option<(Vec<u64>, usize)> {
    let lanes: Vec<_> = aligned.groups[group]
        .lanes
        .iter()
        .copied()
        .collect::<Option<_>>()?;
    let &(first, first_lane) = lanes.first()?;
    let reference = &aligned.lanes[first][first_lane];
    let mut moved = vec![0u64; lanes.len()];
    let mut instances = 0;
    for &position in &reference.collectives[..reference.pending_from] {
        let op = aligned.op(first, position);
        if !may_be_uneven(op.kind) {
            continue;
        }
        let row: Option<Vec<u64>> = lanes
            .iter()
            .map(|&(record, lane)| {
                let lane = &aligned.lanes[record][lane];
                let at = aligned.find(record, lane, op.seq).ok()?;
                let call = aligned.op(record, lane.collectives[at]).call;
                let signature = &aligned.shared.calls.get(call).signature;
                Some(
                    signature
                        .input_bytes()
                        .saturating_add(signature.output_bytes()),
                )
            })
            .collect();
        if let Some(row) = row {
            instances += 1;
            for (sum, bytes) in moved.iter_mut().zip(row) {
                *sum = sum.saturating_add(bytes);
            }
        }
    }
    (instances >= LEAST_INSTANCES && lanes.len() > 2).then_some((moved, instances))
}

fn may_be_uneven(op: OpType) -> bool {
    // Recorders write exchanges of even and of uneven parts under one name.
    let is_exchange = op.pattern() == Pattern::AllToAll;
    let is_gathered = matches!(op.pattern(), Pattern::AllGather | Pattern::ReduceScatter);
    is_exchange || (is_gathered && op.parts() != Parts::Equal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanges_and_gathers_of_pieces_of_any_length_may_be_uneven() {
        let all = OpType::ALL.iter().copied();
        let uneven: Vec<&str> = all
            .filter(|&op| may_be_uneven(op))
            .map(OpType::name)
            .collect();
        assert_eq!(
            uneven,
            [
                "all_gather_v",
                "reduce_scatter_v",
                "all_to_all",
                "all_to_all_single",
                "all_to_all_v_single"
            ]
        );
    }
}
