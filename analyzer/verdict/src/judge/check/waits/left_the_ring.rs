//! E101 by the groups' status: a rank never issued a collective that its peers wait in, which has left their rings.

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
        let shown = |one: &&Unkept| {
            let same = |draft: &FindingDraft| {
                let at = draft.at.as_ref();
                at.is_some_and(|at| at.group == one.group && at.seq == u64::from(one.seq))
            };
            !one.absent.is_empty() && !so_far.iter().any(same)
        };
        ctx.unkept
            .iter()
            .filter(shown)
            .map(|one| draft(ctx, one))
            .collect()
    }
}

fn draft(ctx: &Context<'_>, one: &Unkept) -> FindingDraft {
    let group = ctx.group_name(one.group);
    let waiting = count_ranks(one.waiting.len(), "has", "have");
    let sentence = format!(
        "{} never issued #{} on group {group}; {waiting} issued it and not completed it, by the status of the group: the \
         rings have dropped it since",
        format_ranks(&one.absent),
        one.seq
    );
    let next = format!(
        "find out why {} left out that collective: a branch of the program, or an exception that was caught",
        format_ranks(&one.absent)
    );
    let mut draft = FindingDraft::from(Finding::not_joined(one.absent.clone(), sentence));
    draft.confidence = if one.waiting.len() >= one.absent.len() {
        0.85
    } else {
        0.6
    };
    if one.waiting.len() * 3 <= one.absent.len() {
        // A few may have issued what no other rank was to issue.
        draft.alternatives.push(one.waiting.clone());
    }
    draft.next = next;
    draft.at = Some(OpRef {
        group: one.group,
        seq: u64::from(one.seq),
        kind: SeqKind::CollectiveSeqId,
        op: "collective".to_owned(),
    });
    draft
}
