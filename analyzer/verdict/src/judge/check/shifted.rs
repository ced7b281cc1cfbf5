//! E103, E104, E113: from some number on, a rank's calls match the others' shifted, or in another order.
//!
//! A rank that left out one collective is one ahead of its peers ever after; one that issued an extra
//! one is behind; one that swapped two is right again after both. Each needs at least one later
//! operation that matches so. Without it the finding is a plain
//! [mismatch](super::mismatch).

use super::Check;
use super::mismatch::{confidence, describe};
use crate::judge::case::{Case, Draft};
use crate::judge::disagreement::{Disagreement, Ground, Part, Shift, shift};
use crate::judge::programs;
use crate::report::Code;
use crate::report::words::name_ranks;
use std::collections::BTreeMap;

pub(super) struct Shifted;

impl Check for Shifted {
    fn codes(&self) -> &'static [Code] {
        &[Code::E103, Code::E104, Code::E113]
    }

    fn run(&self, case: &Case<'_>, _so_far: &[Draft]) -> Vec<Draft> {
        case.disagreements
            .iter()
            .flat_map(|one| judge(case, one))
            .collect()
    }
}

fn judge(case: &Case<'_>, one: &Disagreement) -> Vec<Draft> {
    if one.ground == Ground::Nothing {
        return Vec::new();
    }
    let mut by_shift: BTreeMap<Shift, Vec<&Part>> = BTreeMap::new();
    for part in one.parts.iter().skip(1) {
        let shifts: Vec<Shift> = part
            .records
            .iter()
            .map(|&record| shift(case.aligned, one, record))
            .collect();
        if let Some(&first) = shifts.iter().find(|&&shift| shift != Shift::None) {
            by_shift.entry(first).or_default().push(part);
        }
    }
    by_shift
        .into_iter()
        .map(|(shift, parts)| draft(case, one, shift, &parts))
        .collect()
}

fn draft(case: &Case<'_>, one: &Disagreement, shift: Shift, parts: &[&Part]) -> Draft {
    let mut culprits: Vec<u32> = parts
        .iter()
        .flat_map(|part| part.ranks.iter().copied())
        .collect();
    culprits.sort_unstable();
    let calls = &case.aligned.shared.calls;
    let right = calls.get(one.parts[0].call).describe();
    let odd = calls.get(parts[0].call).describe();
    let who = name_ranks(&culprits);
    let first = parts[0].records.first();
    let site = first.map_or(String::new(), |&record| {
        programs::at_site(case, one.group, one.seq, record)
    });
    let group = case.group_name(one.group);
    let spot = case.spot(one.group, one.seq);
    let seq = spot.seq;
    let (code, sentence, unlike) = match shift {
        Shift::Skipped(n) => (
            Code::E103,
            if n == 1 {
                format!(
                    "{who} left out {right} #{seq} on group {group}: what it issued from there on{site} is one ahead"
                )
            } else {
                format!(
                    "{who} left out {n} collectives from {right} #{seq} on group {group} on: what it issued from \
                     there on{site} is {n} ahead"
                )
            },
            "op_mismatch: later operations match shifted",
        ),
        Shift::Extra(n) => (
            Code::E104,
            if n == 1 {
                format!(
                    "{who} issued {odd} as #{seq} on group {group}{site}, which nobody else did: the others issued {right}"
                )
            } else {
                format!(
                    "{who} issued {n} collectives from {odd} #{seq} on group {group} on{site}, which nobody else did"
                )
            },
            "op_mismatch: later operations match shifted",
        ),
        _ => (
            Code::E113,
            format!(
                "{who} issued the collectives from #{seq} on group {group} on in another order: {odd} first{site}, where the others issued {right}"
            ),
            "skipped_collective: the same operations are all there",
        ),
    };
    let mut draft = Draft::new(code, sentence);
    draft.culprits = culprits;
    draft.confidence = confidence(case, one);
    if one.ground == Ground::Past {
        draft.alternatives = one.parts.iter().map(|part| part.ranks.clone()).collect();
    }
    draft.ruled_out.push(unlike.to_owned());
    describe(case, one, parts, &mut draft);
    draft.at = Some(spot);
    draft
}
