//! E104 where a few ranks issued a last collective, and most members left without it.

use crate::align::{GroupIx, Presence, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::life::End;
use crate::judge::life::harm::collectives_failed_early;
use crate::judge::life::raised::has_left_groups;
use crate::report::format::format_ranks;
use crate::report::{Code, EndKind};
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

/// The confidence: the others may have left one out as well.
const CONFIDENCE: f64 = 0.6;

/// Reports the ranks whose last collective failed when the other members left, if those are most of the group, and each
/// ended in order or left its groups. If they are fewer, they have left too early, which is E150.
pub(crate) struct ExtraAtEnd;

impl Check for ExtraAtEnd {
    fn codes(&self) -> &'static [Code] {
        &[Code::E104]
    }

    fn run(&self, ctx: &Context<'_>, _: &[FindingDraft]) -> Vec<FindingDraft> {
        let is_open = |end: &End| end.kind == EndKind::Crashed && end.first.is_empty();
        if !ctx.life.end.as_ref().is_none_or(is_open) {
            return Vec::new();
        }
        let mut failed: BTreeMap<(GroupIx, u32), Vec<(RecordIx, u32)>> = BTreeMap::new();
        for (record, position, group) in collectives_failed_early(ctx.aligned) {
            let seq = ctx.aligned.op(record, position).seq;
            failed
                .entry((group, seq))
                .or_default()
                .push((record, position));
        }
        let drafts = failed.iter();
        drafts
            .filter_map(|(&(group, seq), issued)| draft(ctx, group, seq, issued))
            .collect()
    }
}

/// The finding on a collective that failed for those who had issued it; `None` if it does not show this fault.
fn draft(
    ctx: &Context<'_>,
    group: GroupIx,
    seq: u32,
    issued: &[(RecordIx, u32)],
) -> Option<FindingDraft> {
    let aligned = ctx.aligned;
    let culprits: Vec<Rank> = issued
        .iter()
        .map(|&(record, _)| aligned.records[record].rank)
        .collect();
    let members = aligned.groups[group].ranks.iter().copied().enumerate();
    let (left, others): (Vec<_>, Vec<_>) = members.partition(|&(member, rank)| {
        let has_left = ctx.life.ended_in_order(rank) || has_left_groups(aligned, rank);
        has_left && aligned.presence(group, member, seq) == Presence::Absent
    });
    let left: Vec<Rank> = left.into_iter().map(|(_, rank)| rank).collect();
    if left.len() <= culprits.len() || others.len() != culprits.len() {
        return None;
    }
    let op_ref = ctx.op_ref(group, seq);
    let &(record, position) = issued.first()?;
    let op = aligned.op(record, position);
    let who = format_ranks(&culprits);
    let without = format_ranks(&left);
    let sentence = format!(
        "{who} issued {} #{} on group {}{}, and {without} left without it: it failed when they did",
        op_ref.op,
        op_ref.seq,
        ctx.group_name(group),
        ctx.at_site(op),
    );
    let mut draft = FindingDraft::new(Code::E104, sentence);
    draft.confidence = CONFIDENCE;
    draft.doubts.push(format!(
        "{without} may have left it out, and not {who} issued one too many"
    ));
    draft.next = format!(
        "look at why {who} issued it: a branch that only some ranks take, or one batch more than the others have"
    );
    draft.targets = left
        .iter()
        .filter_map(|&rank| ctx.graph.node(rank))
        .collect();
    draft.alternatives = vec![culprits.clone(), left];
    draft.culprits = culprits;
    draft.evidence = vec![ctx.evidence(record, position, group)];
    draft.frames = ctx.frames_of(record, op, Context::waiting_or_failed(op));
    draft.at = Some(op_ref);
    Some(draft)
}
