//! E110, E111, E112, E114: members of a group issued different calls under one sequence number.
//!
//! Only the first difference of each rank in a group counts; later ones follow from it.
//! [`disagreement`](crate::judge::disagreement) decides which side is right. If the right side is known, and the calls
//! of another side after the difference match when they are shifted or reordered, [`shifted`](super::shifted) makes the
//! finding on that side.

use crate::align::signature::CallDifference;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::disagreement::{AgreeingMembers, Disagreement, Ground, Shift, shift};
use crate::judge::programs;
use crate::report::Code;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;

pub(crate) struct Mismatch;

impl Check for Mismatch {
    fn codes(&self) -> &'static [Code] {
        &[Code::E110, Code::E111, Code::E112, Code::E114]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        ctx.disagreements
            .iter()
            .filter_map(|disagreement| judge(ctx, disagreement))
            .collect()
    }
}

/// The finding on the sides that differ and whose later calls do not match when shifted or reordered; on all sides if
/// none is known to be right. `None` if there are no such sides.
fn judge(ctx: &Context<'_>, disagreement: &Disagreement) -> Option<FindingDraft> {
    let wrong: Vec<&AgreeingMembers> = disagreement
        .parts
        .iter()
        .skip(1)
        .filter(|part| {
            disagreement.ground == Ground::Nothing
                || part
                    .records
                    .iter()
                    .all(|&record| shift(ctx.aligned, disagreement, record) == Shift::None)
        })
        .collect();
    let first = wrong.first()?;
    let calls = &ctx.aligned.shared.calls;
    let difference = wrong
        .iter()
        .filter_map(|part| calls.difference(disagreement.parts[0].call, part.call))
        .min()
        .unwrap_or(disagreement.difference);
    let code = match difference {
        CallDifference::Op => Code::E110,
        CallDifference::Dtype => Code::E111,
        CallDifference::Size => Code::E112,
        CallDifference::Argument => Code::E114,
    };
    let culprits: Vec<Rank> = sorted(wrong.iter().flat_map(|part| part.ranks.iter().copied()));
    let site = |part: &AgreeingMembers| {
        let record = part.records.first();
        record.map_or(String::new(), |&record| {
            programs::at_site(ctx, disagreement.group, disagreement.seq, record)
        })
    };
    let issued =
        |part: &AgreeingMembers| format!("{}{}", calls.get(part.call).describe(), site(part));
    let odd = calls.get(first.call).describe();
    let here = site(first);
    // If both sides called from the same line of the source, it is named once.
    let right = if site(&disagreement.parts[0]) == here {
        calls.get(disagreement.parts[0].call).describe()
    } else {
        issued(&disagreement.parts[0])
    };
    let group = ctx.group_name(disagreement.group);
    let op_ref = ctx.op_ref(disagreement.group, disagreement.seq);
    let others = disagreement.parts[0].ranks.len();
    let mut draft = if disagreement.ground == Ground::Nothing {
        let sides: Vec<String> = disagreement
            .parts
            .iter()
            .map(|part| format!("{} issued {}", format_ranks(&part.ranks), issued(part)))
            .collect();
        let sentence = format!(
            "members of group {group} disagree on #{}: {}; which side is wrong is not known",
            op_ref.seq,
            sides.join(", ")
        );
        let mut draft = FindingDraft::new(code, sentence);
        draft.alternatives = disagreement
            .parts
            .iter()
            .map(|part| part.ranks.clone())
            .collect();
        draft
    } else {
        let others = match others {
            1 => format_ranks(&disagreement.parts[0].ranks),
            n => format!("{n} ranks"),
        };
        let as_this = format!("as #{} on group {group}", op_ref.seq);
        let sentence = match wrong.as_slice() {
            [_] => format!(
                "{} issued {odd} {as_this}{here}, where {others} issued {right}",
                format_ranks(&culprits),
            ),
            several => {
                let each = several.iter().take(MOST_SIDES).map(|part| {
                    let call = calls.get(part.call).describe();
                    format!("{} issued {call}", format_ranks(&part.ranks))
                });
                let more = match several.len().saturating_sub(MOST_SIDES) {
                    0 => String::new(),
                    more => format!(" and {more} others something else"),
                };
                let each = each.collect::<Vec<_>>().join(", ");
                format!(
                    "{each}{more} {as_this}, where {others} issued {}",
                    calls.get(disagreement.parts[0].call).describe()
                )
            }
        };
        let mut draft = FindingDraft::new(code, sentence);
        draft.culprits = culprits.clone();
        if disagreement.ground == Ground::Past {
            draft.alternatives = disagreement
                .parts
                .iter()
                .map(|part| part.ranks.clone())
                .collect();
        }
        draft
    };
    draft.confidence = confidence(ctx, disagreement);
    draft.ruled_out = grounds(ctx, disagreement, difference);
    if difference == CallDifference::Op
        && disagreement.ground != Ground::Nothing
        && !goes_on(ctx, disagreement)
    {
        draft.doubts.push(format!(
            "{} may have left out the {} of the others: these have issued nothing after it",
            format_ranks(&culprits),
            calls.get(disagreement.parts[0].call).op_name()
        ));
    }
    describe(ctx, disagreement, &wrong, &mut draft);
    draft.at = Some(op_ref);
    Some(draft)
}

/// At most this many sides that differ from the right one are described one by one.
const MOST_SIDES: usize = 3;

/// The probability, 0..1, that the finding is right: that the side blamed is the wrong one, if the right side is known.
pub(super) fn confidence(ctx: &Context<'_>, disagreement: &Disagreement) -> f64 {
    // torchcomms does not number the collectives of each communicator. `comm_counter` numbers them, and if a ring has
    // wrapped it estimates with which number the ring begins.
    let has_guessed_numbers = |&record: &usize| {
        let record = &ctx.aligned.records[record];
        record.recorder == Recorder::Torchcomms && record.wrapped()
    };
    if disagreement
        .parts
        .iter()
        .flat_map(|part| &part.records)
        .any(has_guessed_numbers)
    {
        return 0.4;
    }
    let confidence = match disagreement.ground {
        Ground::Largest => {
            let members: usize = disagreement.parts.iter().map(|part| part.ranks.len()).sum();
            if disagreement.parts[0].ranks.len() * 3 >= members * 2 {
                0.97
            } else {
                0.85
            }
        }
        Ground::FarLarger => 0.85,
        Ground::Consistency | Ground::Siblings => 0.9,
        Ground::Past => 0.65,
        Ground::Nothing => 0.5,
    };
    if disagreement.completed {
        confidence * 0.8
    } else {
        confidence
    }
}

/// The reasons for the finding: why the other side is right if two may be equally large, and which other findings are
/// ruled out.
fn grounds(
    ctx: &Context<'_>,
    disagreement: &Disagreement,
    difference: CallDifference,
) -> Vec<String> {
    let decided_by = match disagreement.ground {
        Ground::Siblings => Some("the groups that play the same part agree with the other side"),
        Ground::Past => Some("the group's own past continues with the other side"),
        Ground::Consistency => Some("input and output of the other side fit"),
        Ground::Largest | Ground::FarLarger | Ground::Nothing => None,
    };
    let are_equal = disagreement.parts[0].ranks.len() == disagreement.parts[1].ranks.len();
    let sides = match are_equal {
        true => "two equal sides",
        false => "which side is larger is not recorded",
    };
    let reason = decided_by.map(|decided_by| format!("{sides}: {decided_by}"));
    let mut reasons = Vec::from_iter(reason);
    match difference {
        CallDifference::Dtype => reasons.push("op_mismatch: all issued the same operation".into()),
        CallDifference::Size => {
            reasons.push("op_mismatch, dtype_mismatch: operation and type agree".into())
        }
        CallDifference::Argument => {
            reasons.push("size_mismatch: operation, type and size agree".into())
        }
        CallDifference::Op if goes_on(ctx, disagreement) => {
            reasons
                .push("skipped_collective: no later operations match when they are shifted".into());
        }
        CallDifference::Op => {}
    }
    let missing = ctx
        .graph
        .collective(disagreement.group, disagreement.seq)
        .map_or(0, |place| ctx.graph.missing[place].len());
    if missing == 0 {
        reasons.push("not_joined: every member that left a record issued this number".into());
    }
    reasons
}

/// Whether a rank of the right side has issued a later collective; without one, a shift of the other side's calls
/// cannot be seen.
fn goes_on(ctx: &Context<'_>, disagreement: &Disagreement) -> bool {
    disagreement.parts[0].records.iter().any(|&record| {
        let mut lanes = ctx.aligned.lanes[record].iter();
        let lane = lanes.find(|lane| lane.group == disagreement.group);
        lane.is_some_and(|lane| {
            let index = ctx.aligned.find(record, lane, disagreement.seq);
            index.is_ok_and(|index| lane.collectives.len() > index + 1)
        })
    })
}

/// Adds the evidence, frames, diff, targets and next step that all findings on a disagreement have.
pub(super) fn describe(
    ctx: &Context<'_>,
    disagreement: &Disagreement,
    wrong: &[&AgreeingMembers],
    draft: &mut FindingDraft,
) {
    let entry = |record: usize| {
        let lane = ctx.aligned.lanes[record]
            .iter()
            .find(|lane| lane.group == disagreement.group)?;
        let index = ctx.aligned.find(record, lane, disagreement.seq).ok()?;
        Some(lane.collectives[index])
    };
    for part in std::iter::once(&disagreement.parts[0]).chain(wrong.iter().copied()) {
        let Some(&record) = part.records.first() else {
            continue;
        };
        let Some(position) = entry(record) else {
            continue;
        };
        draft
            .evidence
            .push(ctx.evidence(record, position, disagreement.group));
        let seq = disagreement.seq;
        let sites = programs::sites(ctx, disagreement.group, seq, &part.records, part.call);
        draft.diff.extend(sites);
    }
    let first = wrong.first().and_then(|part| part.records.first());
    if let (Some(&usual), Some(&odd)) = (disagreement.parts[0].records.first(), first) {
        let steps = programs::next_steps(ctx, disagreement.group, disagreement.seq, usual, odd);
        draft.diff.extend(steps);
    }
    if let Some(&record) = wrong.first().and_then(|part| part.records.first())
        && let Some(position) = entry(record)
    {
        let op = ctx.aligned.op(record, position);
        draft.frames = ctx.frames_of(
            record,
            op,
            if op.completed() {
                "last_seen"
            } else {
                Context::waiting_or_failed(op)
            },
        );
        let rank = ctx.aligned.records[record].rank;
        draft.next = match ctx.call_site(op) {
            Some(frame) => format!(
                "compare what rank {rank} does at {} with the other ranks' call",
                Context::name_site(frame)
            ),
            None => format!(
                "look for a branch in the program that rank {rank} takes and the others do not, before #{} on \
                 group {}",
                disagreement.seq,
                ctx.group_name(disagreement.group)
            ),
        };
    }
    if let Some(place) = ctx.graph.collective(disagreement.group, disagreement.seq) {
        draft.targets.push(place + ctx.graph.ranks);
    }
    for part in wrong {
        draft
            .targets
            .extend(part.ranks.iter().filter_map(|&rank| ctx.graph.node(rank)));
    }
}

/// These ranks, ascending, each once.
fn sorted(ranks: impl Iterator<Item = Rank>) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = ranks.collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}
