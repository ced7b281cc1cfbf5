//! W230: some ranks of a group move far more bytes than the others.
//!
//! Only operations whose members may differ in size count (an exchange between experts, a gather of pieces of any
//! length), and of these only instances that the first member completed and all members recorded. Rooted operations do
//! not count, since they are always uneven. Small amounts of data and few instances are ignored.

use super::tiny_collectives::TINY;
use crate::align::signature::Call;
use crate::align::{Aligned, GroupIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::{bytes, format_ranks};
use crate::report::{Code, Severity};
use rcomm_recorder::model::{OpType, Parts, Pattern, Rank};

pub(crate) struct UnevenBytes;

/// A member that moves at least this many times the median may be reported.
const TIMES_MEDIAN: u64 = 4;
/// A smaller excess over the median, bytes, costs little time on any link.
const LEAST_EXCESS: u64 = 64 << 20;
/// With fewer instances, members may differ by chance.
const LEAST_INSTANCES: usize = 16;

impl Check for UnevenBytes {
    fn codes(&self) -> &'static [Code] {
        &[Code::W230]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let is_error = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(is_error) {
            return Vec::new();
        }
        let groups = ctx.aligned.groups.len();
        let judged = ctx.aligned.shared.map(groups, |group| judge(ctx, group));
        judged.into_iter().flatten().collect()
    }
}

/// The finding on members of a group that move far more than the median; `None` if there are none.
fn judge(ctx: &Context<'_>, group: GroupIx) -> Option<FindingDraft> {
    let Moved {
        bytes: moved,
        instances,
        saved_ms,
    } = moved_bytes(ctx.aligned, group)?;
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
            "{} moved up to {} in {instances} operations of group {} that may be uneven; the median member moved {}",
            format_ranks(&culprits),
            bytes(most),
            ctx.group_name(group),
            bytes(median)
        ),
    );
    draft.confidence = 0.9;
    draft.price_ms = saved_ms;
    draft.next = format!(
        "see what {} {}: routing to few experts, or uneven shards",
        format_ranks(&culprits),
        if culprits.len() == 1 { "holds" } else { "hold" }
    );
    draft.culprits = culprits;
    Some(draft)
}

/// What the members of a group moved in the instances that may be uneven, that the first member completed and that all
/// recorded.
struct Moved {
    /// The bytes of each member.
    bytes: Vec<u64>,
    instances: usize,
    /// What equal parts would save in the exchanges, ms; `None` without exchanges, or if a duration was not measured.
    saved_ms: Option<f64>,
}

/// What the members of a group moved. `None` if there are fewer than [`LEAST_INSTANCES`] instances or fewer than three
/// members, or if a member's record is missing.
fn moved_bytes(aligned: &Aligned<'_>, group: GroupIx) -> Option<Moved> {
    let lanes: Vec<_> = aligned.groups[group]
        .lanes
        .iter()
        .copied()
        .collect::<Option<_>>()?;
    let &(first, first_lane) = lanes.first()?;
    let reference = &aligned.lanes[first][first_lane];
    let mut moved = vec![0u64; lanes.len()];
    let mut instances = 0;
    let mut saved_ms: Option<f64> = None;
    let mut is_measured = true;
    for &position in &reference.collectives[..reference.pending_from] {
        let op = aligned.op(first, position);
        if !may_be_uneven(op.kind) {
            continue;
        }
        let row: Option<Vec<(&Call, f32)>> = lanes
            .iter()
            .map(|&(record, lane)| {
                let lane = &aligned.lanes[record][lane];
                let index = aligned.find(record, lane, op.seq).ok()?;
                let op = aligned.op(record, lane.collectives[index]);
                Some((aligned.shared.calls.get(op.call), op.duration_ms))
            })
            .collect();
        let Some(row) = row else {
            continue;
        };
        instances += 1;
        for (sum, (call, _)) in moved.iter_mut().zip(&row) {
            let (sent, received) = sizes(call);
            *sum = sum.saturating_add(sent.saturating_add(received));
        }
        if op.kind.pattern() == Pattern::AllToAll {
            let saved = saved_in(&row);
            is_measured &= saved.is_some();
            saved_ms = Some(saved_ms.unwrap_or(0.0) + saved.unwrap_or(0.0));
        }
    }
    (instances >= LEAST_INSTANCES && lanes.len() > 2).then_some(Moved {
        bytes: moved,
        instances,
        saved_ms: saved_ms.filter(|_| is_measured),
    })
}

/// The bytes that a member sends and receives.
fn sizes(call: &Call) -> (u64, u64) {
    let signature = &call.signature;
    (signature.input_bytes(), signature.output_bytes())
}

/// What equal parts would save in an exchange, ms; `None` if a member's duration was not measured. From the arrival of
/// the last member on, the exchange takes as long as its largest member needs, in proportion to what it sends or
/// receives. Gathers take as long as all parts together and gain nothing; small exchanges cost latency only.
fn saved_in(row: &[(&Call, f32)]) -> Option<f64> {
    let shortest = row.iter().map(|&(_, ms)| ms).reduce(f32::min)?;
    let needs = row.iter().map(|(call, _)| {
        let (sent, received) = sizes(call);
        sent.max(received)
    });
    let most = needs.clone().max()?;
    let mean = needs.map(|bytes| bytes as f64).sum::<f64>() / row.len() as f64;
    let saved = match most <= TINY {
        true => 0.0,
        false => f64::from(shortest) * (1.0 - mean / most as f64),
    };
    (shortest >= 0.0).then_some(saved)
}

/// Whether the members of such an operation may differ in the sizes that they send or receive.
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
        let operations = OpType::ALL.iter().copied();
        let uneven: Vec<&str> = operations
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
