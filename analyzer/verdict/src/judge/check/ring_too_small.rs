//! W160: a ring forgets faster than the questions that are asked of it, or could not keep records.
//!
//! A ring that has wrapped is the normal case, so that alone is no finding. It is one where the ring
//! has dropped the very operation that the rank is in, or what tells whether the rank came to a place
//! where others wait; where the program names its steps and one has more operations than the ring
//! holds; and where records were lost because writers met.

use super::Check;
use crate::align::Why;
use crate::align::pending::front_is_lost;
use crate::align::record::Record;
use crate::judge::case::{Case, Draft};
use crate::judge::wait_graph::Missing;
use crate::report::Code;
use crate::report::words::name_ranks;
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

pub(super) struct RingTooSmall;

impl Check for RingTooSmall {
    fn codes(&self) -> &'static [Code] {
        &[Code::W160]
    }

    fn run(&self, case: &Case<'_>, _so_far: &[Draft]) -> Vec<Draft> {
        let mut drafts = Vec::new();
        drafts.extend(short_rings(case));
        drafts.extend(lost_records(case));
        drafts
    }
}

fn short_rings(case: &Case<'_>) -> Option<Draft> {
    let asked: BTreeSet<Rank> = case
        .graph
        .missing
        .iter()
        .flatten()
        .filter(|&&(_, why)| why == Missing::Unknown(Why::HistoryLost))
        .map(|&(node, _)| case.rank(node))
        .collect();
    let mut short: Vec<&Record> = Vec::new();
    let mut needed: Option<u64> = None;
    // Where not all was given, nothing can be said of what the ring has.
    let newest = case.policy.newest.unwrap_or(usize::MAX);
    let wrapped = |one: &&Record| one.wrapped() && one.ops.len() < newest;
    for record in case.aligned.records.iter().filter(wrapped) {
        let step = operations_of_a_step(record).filter(|&step| step > record.ops.len() as u64);
        needed = needed.max(step);
        if step.is_some() || front_is_lost(record) || asked.contains(&record.rank) {
            short.push(record);
        }
    }
    let mut ranks: Vec<Rank> = short.iter().map(|record| record.rank).collect();
    ranks.dedup();
    let entries = short.iter().map(|record| record.ops.len()).min()?;
    let why = match needed {
        Some(step) => format!("one step of the program has about {step}"),
        None => "what tells where they are is no longer there".to_owned(),
    };
    let several = if ranks.len() == 1 { "" } else { "s" };
    let mut draft = Draft::new(
        Code::W160,
        format!(
            "the ring{several} of {} hold{} the newest {entries} operations only; {why}",
            name_ranks(&ranks),
            if ranks.len() == 1 { "s" } else { "" }
        ),
    );
    draft.confidence = 0.9;
    let enough = needed.unwrap_or(entries as u64).saturating_mul(4);
    draft.next = format!(
        "give the ring room for {} operations (RCOMM_RING_ENTRIES, TORCH_FR_BUFFER_SIZE)",
        enough.next_power_of_two()
    );
    Some(draft)
}

/// How many operations a step of the program has, where it names its steps.
///
/// A job that goes on from a checkpoint counts steps that this record never saw: then the number is
/// too small, never too large.
fn operations_of_a_step(record: &Record) -> Option<u64> {
    let step = u64::try_from(record.status.as_ref()?.step).ok()?;
    let issued = record.first_id.saturating_add(record.ops.len() as u64);
    (step >= 2).then(|| issued / (step + 1))
}

fn lost_records(case: &Case<'_>) -> Option<Draft> {
    let lost = |record: &&Record| {
        let dropped = record.status.as_ref().map_or(0, |status| status.dropped);
        (dropped > 0).then_some(dropped)
    };
    let records: Vec<&Record> = case
        .aligned
        .records
        .iter()
        .filter(|r| lost(r).is_some())
        .collect();
    if records.is_empty() {
        return None;
    }
    let total: u64 = records.iter().filter_map(lost).sum();
    let mut ranks: Vec<Rank> = records.iter().map(|record| record.rank).collect();
    ranks.dedup();
    let mut draft = Draft::new(
        Code::W160,
        format!(
            "the recorder of {} could not keep {total} record{}: several threads wrote at once",
            name_ranks(&ranks),
            if total == 1 { "" } else { "s" }
        ),
    );
    draft.confidence = 1.0;
    draft.next =
        "give the ring more room (RCOMM_RING_ENTRIES): writers then meet more rarely".to_owned();
    Some(draft)
}
