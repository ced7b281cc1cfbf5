//! W160: a ring overwrites records that the analysis needs, or could not keep records.
//!
//! A ring that has wrapped is the normal case and is not reported, with two exceptions. Either it has overwritten the
//! operation that the rank is in, or the entries that show whether the rank arrived where others wait. Or the program
//! reports its steps, and one step has more operations than the ring holds. Records that the ring never held, or holds
//! only in part, are always reported.

use crate::align::UnknownReason;
use crate::align::pending::front_is_lost;
use crate::align::record::Record;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::Missing;
use crate::report::Code;
use crate::report::format::{count, format_ranks};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

pub(crate) struct RingTooSmall;

impl Check for RingTooSmall {
    fn codes(&self) -> &'static [Code] {
        &[Code::W160]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let mut drafts = Vec::new();
        drafts.extend(short_rings(ctx));
        drafts.extend(lost_records(ctx));
        drafts
    }
}

/// The finding on rings that have overwritten entries that the analysis needs, or that hold less than a step; `None` if
/// there are none.
fn short_rings(ctx: &Context<'_>) -> Option<FindingDraft> {
    let waited_for: BTreeSet<Rank> = ctx
        .graph
        .missing
        .iter()
        .flatten()
        .filter(|&&(_, why)| why == Missing::Unknown(UnknownReason::HistoryLost))
        .map(|&(node, _)| ctx.rank(node))
        .collect();
    let mut short: Vec<&Record> = Vec::new();
    let mut needed: Option<u64> = None;
    // If only the newest entries were read, the size of the ring is unknown.
    let newest = ctx.policy.newest.unwrap_or(usize::MAX);
    let wrapped = |record: &&Record| record.wrapped() && record.ops.len() < newest;
    for record in ctx.aligned.records.iter().filter(wrapped) {
        let step_operations =
            operations_of_a_step(record).filter(|&operations| operations > record.ops.len() as u64);
        needed = needed.max(step_operations);
        if step_operations.is_some() || front_is_lost(record) || waited_for.contains(&record.rank) {
            short.push(record);
        }
    }
    let mut ranks: Vec<Rank> = short.iter().map(|record| record.rank).collect();
    ranks.dedup();
    let entries = short.iter().map(|record| record.ops.len()).min()?;
    let why = match needed {
        Some(step) => format!("a step of the program has about {step}"),
        None => {
            let do_now = if ranks.len() == 1 {
                "rank does"
            } else {
                "ranks do"
            };
            format!("those that would show what the {do_now} now were overwritten")
        }
    };
    let holds = match ranks.len() {
        1 => format!(
            "the ring of {} holds only its newest {entries} operations",
            format_ranks(&ranks)
        ),
        _ => format!(
            "of the rings of {} the smallest holds only its newest {entries} operations",
            format_ranks(&ranks)
        ),
    };
    let mut draft = FindingDraft::new(Code::W160, format!("{holds}, and {why}"));
    draft.confidence = 0.9;
    let enough = needed.unwrap_or(entries as u64).saturating_mul(4);
    draft.next = format!(
        "give the ring room for {} operations (RCOMM_RING_ENTRIES; TORCH_FR_BUFFER_SIZE for PyTorch's recorder)",
        enough.next_power_of_two()
    );
    Some(draft)
}

/// The average number of operations in a step so far; `None` before step 2. It is too small after a resume from a
/// checkpoint, and too large by what was issued before the first step.
fn operations_of_a_step(record: &Record) -> Option<u64> {
    let step = u64::try_from(record.status.as_ref()?.step).ok()?;
    let issued = record.first_id.saturating_add(record.ops.len() as u64);
    (step >= 2).then(|| issued / (step + 1))
}

/// The finding on recorders that could not keep records; `None` if there are none.
fn lost_records(ctx: &Context<'_>) -> Option<FindingDraft> {
    let lost = |record: &&Record| {
        let dropped = record.status.as_ref().map_or(0, |status| status.dropped);
        (dropped > 0).then_some(dropped)
    };
    let records: Vec<&Record> = ctx
        .aligned
        .records
        .iter()
        .filter(|record| lost(record).is_some())
        .collect();
    if records.is_empty() {
        return None;
    }
    let total: u64 = records.iter().filter_map(lost).sum();
    let mut ranks: Vec<Rank> = records.iter().map(|record| record.rank).collect();
    ranks.dedup();
    let mut draft = FindingDraft::new(
        Code::W160,
        format!(
            "{} of {} {} lost: threads wrote to one place of the ring at the same time, the ring's folder was full, or \
             the process ended while it wrote",
            count(total, "record"),
            format_ranks(&ranks),
            if total == 1 { "was" } else { "were" }
        ),
    );
    draft.confidence = 1.0;
    draft.next = "make sure that the ring's folder has space; in a larger ring (RCOMM_RING_ENTRIES) threads meet less \
                  often"
        .to_owned();
    Some(draft)
}
