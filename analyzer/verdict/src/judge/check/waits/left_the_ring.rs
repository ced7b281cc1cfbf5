//! E101 by the groups' status: a rank never issued a collective in which its peers wait, and the peers' rings have
//! dropped that collective.

use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft, OpRef};
use crate::judge::records::unkept::Unkept;
use crate::report::format::{count_ranks, format_ranks};
use crate::report::{Code, Finding, SeqKind};

pub(crate) struct LeftTheRing;

impl Check for LeftTheRing {
    fn codes(&self) -> &'static [Code] {
        &[Code::E101]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let shown = |unkept: &&Unkept| {
            let is_same_collective = |draft: &FindingDraft| {
                let op_ref = draft.at.as_ref();
                op_ref.is_some_and(|op_ref| {
                    op_ref.group == unkept.group && op_ref.seq == u64::from(unkept.seq)
                })
            };
            !unkept.absent.is_empty() && !so_far.iter().any(is_same_collective)
        };
        ctx.unkept
            .iter()
            .filter(shown)
            .map(|unkept| draft(ctx, unkept))
            .collect()
    }
}

/// The finding on the ranks that are absent in such a collective.
fn draft(ctx: &Context<'_>, unkept: &Unkept) -> FindingDraft {
    let group = ctx.group_name(unkept.group);
    let waiting = count_ranks(unkept.waiting.len(), "has", "have");
    let sentence = format!(
        "{} never issued #{} on group {group}; {waiting} issued it and not completed it, by the status of the group: the \
         rings have overwritten it since",
        format_ranks(&unkept.absent),
        unkept.seq
    );
    let next = format!(
        "find out why {} left out that collective: a branch of the program, or an exception that was caught",
        format_ranks(&unkept.absent)
    );
    let mut draft = FindingDraft::from(Finding::not_joined(unkept.absent.clone(), sentence));
    draft.confidence = if unkept.waiting.len() >= unkept.absent.len() {
        0.85
    } else {
        0.6
    };
    if unkept.waiting.len() * 3 <= unkept.absent.len() {
        // A few ranks may have issued what no other rank was to issue.
        draft.alternatives.push(unkept.waiting.clone());
    }
    draft.next = next;
    draft.at = Some(OpRef {
        group: unkept.group,
        seq: u64::from(unkept.seq),
        kind: SeqKind::CollectiveSeqId,
        op: "collective".to_owned(),
    });
    draft
}
