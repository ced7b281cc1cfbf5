//! E103, E104, E113: from some number on, a rank's calls match the others' only when shifted or reordered.
//!
//! A rank that left out one collective is one ahead of its peers from then on; a rank that issued an extra one is one
//! behind; a rank that swapped two matches again after both. A collective counts as left out or extra only if at least
//! one later operation matches in this way; otherwise the finding is a plain [mismatch](super::mismatch).

use super::mismatch::{confidence, describe};
use crate::align::RecordIx;
use crate::align::record::{NONE, Op};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::disagreement::{AgreeingMembers, Disagreement, Ground, Shift, shift};
use crate::judge::programs;
use crate::report::Code;
use crate::report::format::format_ranks;
use std::collections::BTreeMap;

pub(crate) struct Shifted;

impl Check for Shifted {
    fn codes(&self) -> &'static [Code] {
        &[Code::E103, Code::E104, Code::E113]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        ctx.disagreements
            .iter()
            .flat_map(|disagreement| judge(ctx, disagreement))
            .collect()
    }
}

/// One finding for each shift that a wrong side shows; empty if no side is known to be right.
fn judge(ctx: &Context<'_>, disagreement: &Disagreement) -> Vec<FindingDraft> {
    if disagreement.ground == Ground::Nothing {
        return Vec::new();
    }
    let mut by_shift: BTreeMap<Shift, Vec<&AgreeingMembers>> = BTreeMap::new();
    for part in disagreement.parts.iter().skip(1) {
        let shifts: Vec<Shift> = part
            .records
            .iter()
            .map(|&record| shift(ctx.aligned, disagreement, record))
            .collect();
        if let Some(&first) = shifts.iter().find(|&&shift| shift != Shift::None) {
            by_shift.entry(first).or_default().push(part);
        }
    }
    by_shift
        .into_iter()
        .map(|(shift, parts)| draft(ctx, disagreement, shift, &parts))
        .collect()
}

/// The finding on `parts`, the wrong sides that show this shift.
fn draft(
    ctx: &Context<'_>,
    disagreement: &Disagreement,
    shift: Shift,
    parts: &[&AgreeingMembers],
) -> FindingDraft {
    let mut culprits: Vec<u32> = parts
        .iter()
        .flat_map(|part| part.ranks.iter().copied())
        .collect();
    culprits.sort_unstable();
    let calls = &ctx.aligned.shared.calls;
    let first_seq = first_by_sites(ctx, disagreement, shift, parts[0]);
    let call_of = |part: &AgreeingMembers| {
        let record = part
            .records
            .first()
            .filter(|_| first_seq != disagreement.seq);
        let op = record.and_then(|&record| op_at(ctx, disagreement, record, first_seq));
        calls.get(op.map_or(part.call, |op| op.call)).describe()
    };
    let right = call_of(&disagreement.parts[0]);
    let odd = call_of(parts[0]);
    let (others, they) = match disagreement.parts[0].ranks.as_slice() {
        [rank] => (format_ranks(&[*rank]), "it"),
        several => (format!("{} ranks", several.len()), "they"),
    };
    let who = format_ranks(&culprits);
    let first = parts[0].records.first();
    let site = first.map_or(String::new(), |&record| {
        programs::at_site(ctx, disagreement.group, first_seq, record)
    });
    let group = ctx.group_name(disagreement.group);
    let op_ref = ctx.op_ref(disagreement.group, first_seq);
    let seq = op_ref.seq;
    let (code, sentence, ruled_out) = match shift {
        Shift::Skipped(n) => (
            Code::E103,
            if n == 1 {
                format!(
                    "{who} left out {right} #{seq} on group {group}: the collectives that follow{site} are one ahead"
                )
            } else {
                format!(
                    "{who} left out {n} collectives on group {group}, beginning with {right} #{seq}: those that follow{site} \
                     are {n} ahead"
                )
            },
            "op_mismatch: the later operations match once they are shifted",
        ),
        Shift::Extra(n) => (
            Code::E104,
            if n == 1 {
                format!(
                    "{who} issued {odd} as #{seq} on group {group}{site}, which {others} did not: {they} issued {right}"
                )
            } else {
                format!(
                    "{who} issued {n} collectives on group {group}, beginning with {odd} #{seq}{site}, which \
                     {others} did not"
                )
            },
            "op_mismatch: the later operations match once they are shifted",
        ),
        Shift::ReorderedOrShifted(_) => (
            Code::E113,
            format!(
                "{who} issued other collectives than the others on group {group} from #{seq} on: {odd} first{site}, where \
                 the others issued {right}; in another order, or with one left out or added"
            ),
            "",
        ),
        _ => (
            Code::E113,
            format!(
                "{who} issued the collectives on group {group} in another order, beginning with #{seq}: {odd} first{site}, where the others issued {right}"
            ),
            match shift {
                Shift::Reordered(_) => "skipped_collective: the same operations are all there",
                _ => "",
            },
        ),
    };
    let mut draft = FindingDraft::new(code, sentence);
    draft.culprits = culprits;
    draft.confidence = confidence(ctx, disagreement);
    if disagreement.ground == Ground::Past {
        draft.alternatives = disagreement
            .parts
            .iter()
            .map(|part| part.ranks.clone())
            .collect();
    }
    if ruled_out.is_empty() {
        draft.confidence = draft.confidence.min(0.8);
        draft.doubts.push(format!(
            "what is recorded after that also fits if {who} left a collective out, or issued one more"
        ));
    } else {
        draft.ruled_out.push(ruled_out.to_owned());
    }
    describe(ctx, disagreement, parts, &mut draft);
    draft.at = Some(op_ref);
    draft
}

/// The number of the first collective that was left out or is extra. Call sites may show that it comes before the first
/// difference: the calls of a few collectives may agree by chance, for example those of exchanges, whose sizes may
/// differ. Without such call sites, it is the number of the first difference.
fn first_by_sites(
    ctx: &Context<'_>,
    disagreement: &Disagreement,
    shift: Shift,
    odd: &AgreeingMembers,
) -> u32 {
    // At most this many collectives before the first difference are compared.
    const REACH: u32 = 8;
    let offset = match shift {
        Shift::Skipped(n) => n as i64,
        Shift::Extra(n) => -(n as i64),
        Shift::Reordered(_) | Shift::ReorderedOrShifted(_) | Shift::None => {
            return disagreement.seq;
        }
    };
    let (Some(&odd), Some(&right)) = (odd.records.first(), disagreement.parts[0].records.first())
    else {
        return disagreement.seq;
    };
    let site = |record: usize, seq: i64| {
        let op = op_at(ctx, disagreement, record, u32::try_from(seq).ok()?)?;
        (op.stack != NONE).then_some(op.stack)
    };
    let is_moved = |back: &u32| {
        let seq = i64::from(disagreement.seq) - i64::from(*back);
        let here = site(odd, seq);
        here.is_some() && here != site(right, seq) && here == site(right, seq + offset)
    };
    let moved = (1..=REACH).take_while(is_moved).count() as u32;
    disagreement.seq - moved
}

/// The collective of this number in a record; `None` if the record does not hold it.
fn op_at<'a>(
    ctx: &'a Context<'_>,
    disagreement: &Disagreement,
    record: RecordIx,
    seq: u32,
) -> Option<&'a Op> {
    let mut lanes = ctx.aligned.lanes[record].iter();
    let lane = lanes.find(|lane| lane.group == disagreement.group)?;
    let index = ctx.aligned.find(record, lane, seq).ok()?;
    Some(ctx.aligned.op(record, lane.collectives[index]))
}
