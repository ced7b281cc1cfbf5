//! E114 and E112: one member of a collective sends sizes that another member does not expect, or not exactly one member
//! considers itself the root.
//!
//! In an exchange each member names a size for each other member: the size that rank 2 sends to rank 5 must be the one
//! that rank 5 receives from rank 2. If the record holds these sizes (split sizes, or one tensor for each member),
//! every pair is compared; if it holds only sums, the sum of all sends must be the sum of all receives. In a gather or
//! a scatter exactly one member is the root, and only the root names all parts. Only places where members wait are
//! checked: an exchange that completed was right.

use crate::align::signature::Call;
use crate::align::{GroupIx, Presence, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::wait_graph::Place;
use crate::report::Code;
use crate::report::format::format_ranks;
use rcomm_recorder::model::{Layout, OpType, Parts, Pattern, Rank};

pub(crate) struct UnequalParts;

/// Larger exchanges are compared by their sums only: the number of pairs grows with the square of the members.
const MAX_MEMBERS: usize = 2048;

impl Check for UnequalParts {
    fn codes(&self) -> &'static [Code] {
        &[Code::E112, Code::E114]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let mut drafts = Vec::new();
        for (place, operation) in ctx.graph.places.iter().enumerate() {
            let &Place::Collective { group, seq } = operation else {
                continue;
            };
            let known = |draft: &FindingDraft| draft.targets.contains(&(place + ctx.graph.ranks));
            if so_far.iter().any(known) || ctx.disagreement_at(place).is_some() {
                continue;
            }
            let instance = InstanceCalls::new(ctx, group, seq);
            let found = match instance.op().map(OpType::pattern) {
                Some(Pattern::AllToAll) => exchange(&instance),
                Some(Pattern::Gather | Pattern::Scatter) => roots(ctx, &instance),
                Some(
                    Pattern::AllReduce
                    | Pattern::Reduce
                    | Pattern::Broadcast
                    | Pattern::Barrier
                    | Pattern::AllGather
                    | Pattern::ReduceScatter
                    | Pattern::Send
                    | Pattern::Recv
                    | Pattern::Block
                    | Pattern::Agreement
                    | Pattern::OneSided
                    | Pattern::Unknown,
                )
                | None => None,
            };
            drafts.extend(found.map(|found| draft(ctx, &instance, place, found)));
        }
        drafts
    }
}

/// What the members issued for one collective.
struct InstanceCalls<'a> {
    group: GroupIx,
    seq: u32,
    ranks: &'a [Rank],
    /// For each member: the record, the position in it, and the call; `None` if no record shows that the member issued
    /// the collective.
    calls: Vec<Option<(RecordIx, u32, &'a Call)>>,
}

impl<'a> InstanceCalls<'a> {
    fn new(ctx: &'a Context<'_>, group: GroupIx, seq: u32) -> Self {
        let aligned = ctx.aligned;
        let ranks = &aligned.groups[group].ranks;
        let calls = (0..ranks.len()).map(|member| {
            let (record, lane) = aligned.lane(group, member)?;
            let Presence::Issued(index) = aligned.presence(group, member, seq) else {
                return None;
            };
            let position = lane.collectives[index];
            let call = aligned.shared.calls.get(aligned.op(record, position).call);
            Some((record, position, call))
        });
        Self {
            group,
            seq,
            ranks,
            calls: calls.collect(),
        }
    }

    /// The operation, by the first member that issued it; `None` if no record shows it.
    fn op(&self) -> Option<OpType> {
        self.calls
            .iter()
            .flatten()
            .next()
            .map(|(_, _, call)| call.op)
    }

    /// Whether every member has issued the collective.
    fn is_full(&self) -> bool {
        self.calls.iter().all(Option::is_some)
    }
}

/// A disagreement on sizes or on the root, from which the finding is made.
struct Found {
    code: Code,
    /// Members at fault; empty if that is unknown.
    culprits: Vec<usize>,
    /// Sets of members; one of the sets is at fault.
    alternatives: Vec<Vec<usize>>,
    confidence: f64,
    /// The fault as a clause, for the end of a sentence that begins with the operation.
    fault: String,
    /// Members whose entries are the evidence.
    proof: Vec<usize>,
}

/// The sizes that a member sends to each member, or receives from each, as its record holds them.
enum PairSizes<'a> {
    /// Numbers of elements.
    Splits(&'a [u64]),
    /// Shapes of tensors.
    Shapes(&'a [Vec<u64>]),
}

/// The sizes that a member sends to each member, or receives from each; `None` if its record has no such sizes.
fn pair_sizes(call: &Call, members: usize, sends: bool) -> Option<PairSizes<'_>> {
    let signature = &call.signature;
    let (splits, sizes) = if sends {
        (&signature.input_splits, &signature.input_sizes)
    } else {
        (&signature.output_splits, &signature.output_sizes)
    };
    if splits.len() == members {
        return Some(PairSizes::Splits(splits));
    }
    let is_list = (call.op.pattern(), call.op.layout()) == (Pattern::AllToAll, Layout::List);
    (is_list && sizes.len() == members).then_some(PairSizes::Shapes(sizes))
}

/// The number of elements that a member sends to each member, or receives from each; `None` if its record has no such
/// sizes.
fn parts(call: &Call, members: usize, sends: bool) -> Option<Vec<u64>> {
    let elements = |shape: &Vec<u64>| {
        shape
            .iter()
            .fold(1u64, |product, &n| product.saturating_mul(n))
    };
    Some(match pair_sizes(call, members, sends)? {
        PairSizes::Splits(splits) => splits.to_vec(),
        PairSizes::Shapes(shapes) => shapes.iter().map(elements).collect(),
    })
}

/// The highest confidence of a finding on an exchange of which a record lacks the sizes of pairs.
pub(in crate::judge::check) const SIZES_UNKNOWN: f64 = 0.5;

/// Whether a collective has sizes for each pair of members, and the record of a member that issued it lacks them. A
/// member may then have named a size that its peer does not expect, and no record shows it.
pub(in crate::judge::check) fn hides_sizes(ctx: &Context<'_>, group: GroupIx, seq: u32) -> bool {
    let instance = InstanceCalls::new(ctx, group, seq);
    let members = instance.ranks.len();
    let lacks = |call: &Call| {
        let mut sides = [true, false].into_iter();
        sides.any(|sends| pair_sizes(call, members, sends).is_none())
    };
    let mut calls = instance.calls.iter().flatten();
    calls.any(|(_, _, call)| call.op.parts() == Parts::PerPair && lacks(call))
}

/// The disagreement on the sizes of an exchange: of a pair, or else of the sums; `None` if the records show none.
fn exchange(instance: &InstanceCalls<'_>) -> Option<Found> {
    let members = instance.ranks.len();
    if members <= MAX_MEMBERS
        && let Some(found) = pairs(instance, members)
    {
        return Some(found);
    }
    sums(instance)
}

/// Compares what each member sends to each other with what that one expects, where both records hold it; `None` if no
/// pair differs.
fn pairs(instance: &InstanceCalls<'_>, members: usize) -> Option<Found> {
    let parts_of_all = |sends: bool| -> Vec<Option<Vec<u64>>> {
        let calls = instance.calls.iter();
        calls
            .map(|issued| issued.and_then(|(_, _, call)| parts(call, members, sends)))
            .collect()
    };
    let (sent, taken) = (parts_of_all(true), parts_of_all(false));
    let mut conflicts: Vec<(usize, usize, u64, u64)> = Vec::new();
    for (from, sent) in sent.iter().enumerate() {
        for (to, taken) in taken.iter().enumerate() {
            if let (Some(sent), Some(taken)) = (sent, taken)
                && sent[to] != taken[from]
            {
                conflicts.push((from, to, sent[to], taken[from]));
            }
        }
    }
    let &(from, to, sends, takes) = conflicts.first()?;
    let is_split = instance.calls.iter().flatten().any(|(_, _, call)| {
        !call.signature.input_splits.is_empty() || !call.signature.output_splits.is_empty()
    });
    let (culprits, alternatives) = blame(&conflicts, members);
    let more = match conflicts.len() {
        1 => String::new(),
        2 => " (1 more pair disagrees)".to_owned(),
        n => format!(" ({} more pairs disagree)", n - 1),
    };
    Some(Found {
        code: if is_split { Code::E114 } else { Code::E112 },
        confidence: if culprits.is_empty() { 0.5 } else { 0.9 },
        culprits,
        alternatives,
        fault: format!(
            "rank {} sends {sends} elements to {}, which expects {takes}{more}",
            instance.ranks[from],
            match from == to {
                true => "itself".to_owned(),
                false => format!("rank {}", instance.ranks[to]),
            }
        ),
        proof: vec![from, to],
    })
}

/// The culprits and alternatives of conflicts between pairs. One member that is part of all conflicts is the culprit;
/// several such members are an alternative each. Both are empty if there is no such member.
fn blame(conflicts: &[(usize, usize, u64, u64)], members: usize) -> (Vec<usize>, Vec<Vec<usize>>) {
    let mut part_of = vec![0usize; members];
    for &(from, to, ..) in conflicts {
        part_of[from] += 1;
        part_of[to] += usize::from(from != to);
    }
    let in_all: Vec<usize> = (0..members)
        .filter(|&member| part_of[member] == conflicts.len())
        .collect();
    match in_all.as_slice() {
        [] => (Vec::new(), Vec::new()),
        [one] => (vec![*one], Vec::new()),
        several => (
            Vec::new(),
            several.iter().map(|&member| vec![member]).collect(),
        ),
    }
}

/// Compares the sum of all sends with the sum of all receives, which shows a difference also where the records lack the
/// sizes of pairs. `None` if the sums are equal, or if the sizes of a member are not recorded.
fn sums(instance: &InstanceCalls<'_>) -> Option<Found> {
    if !instance.is_full() {
        return None;
    }
    let calls = || {
        instance
            .calls
            .iter()
            .flatten()
            .map(|&(_, _, call)| &call.signature)
    };
    if calls().any(|call| call.input_sizes.is_empty() || call.output_sizes.is_empty()) {
        return None;
    }
    let sizes: Vec<(u64, u64)> = calls()
        .map(|call| (call.input_elements(), call.output_elements()))
        .collect();
    let total = |side: fn(&(u64, u64)) -> u64| sizes.iter().map(side).fold(0, u64::saturating_add);
    let (sent, taken) = (total(|size| size.0), total(|size| size.1));
    if sent == taken {
        return None;
    }
    // If more than half of the members issued the same sizes, the others are at fault.
    let usual = sizes
        .iter()
        .copied()
        .max_by_key(|size| sizes.iter().filter(|other| *other == size).count())?;
    let odd: Vec<usize> = (0..sizes.len())
        .filter(|&member| sizes[member] != usual)
        .collect();
    let decided = odd.len() * 2 < sizes.len();
    Some(Found {
        code: Code::E112,
        confidence: if decided { 0.85 } else { 0.5 },
        proof: odd
            .iter()
            .copied()
            .chain((0..sizes.len()).filter(|member| !odd.contains(member)))
            .take(2)
            .collect(),
        culprits: if decided { odd } else { Vec::new() },
        alternatives: Vec::new(),
        fault: format!("all members together send {sent} elements and expect {taken}"),
    })
}

/// Members whose calls name parts that are not empty: the root, and every other member that considers itself the root.
fn roots_of(instance: &InstanceCalls<'_>) -> Vec<usize> {
    let names_parts = |call: &Call| {
        let signature = &call.signature;
        let sizes = if call.op.pattern() == Pattern::Gather {
            &signature.output_sizes
        } else {
            &signature.input_sizes
        };
        let elements = sizes
            .iter()
            .flatten()
            .fold(1u64, |product, &n| product.saturating_mul(n));
        !sizes.is_empty() && elements > 0
    };
    let calls = instance.calls.iter().enumerate();
    calls
        .filter(|(_, issued)| issued.is_some_and(|(_, _, call)| names_parts(call)))
        .map(|(member, _)| member)
        .collect()
}

/// The disagreement on the root of a gather or a scatter. `None` if exactly one member considers itself the root, or if
/// the recorder names the parts on every member. `None` also if no member's parts are named and the root is not known
/// from the past or a member has not arrived.
fn roots(ctx: &Context<'_>, instance: &InstanceCalls<'_>) -> Option<Found> {
    let found = roots_of(instance);
    let past = past_root(ctx, instance);
    let known: Vec<usize> = instance
        .calls
        .iter()
        .enumerate()
        .filter(|(_, issued)| issued.is_some())
        .map(|(member, _)| member)
        .collect();
    match found.as_slice() {
        [_] => None,
        // A recorder that names the parts on every member identifies no root.
        several if several.len() == known.len() && several.len() > 2 => None,
        [] if !instance.is_full() || past.is_none() => None,
        [] => Some(Found {
            code: Code::E114,
            culprits: past.into_iter().collect(),
            alternatives: Vec::new(),
            confidence: 0.6,
            fault: "no member considers itself the root".to_owned(),
            proof: past.into_iter().collect(),
        }),
        several => {
            let ranks: Vec<Rank> = several
                .iter()
                .map(|&member| instance.ranks[member])
                .collect();
            let wrong: Vec<usize> = several
                .iter()
                .copied()
                .filter(|&member| past.is_some_and(|past| past != member))
                .collect();
            let decided = !wrong.is_empty() && wrong.len() < several.len();
            Some(Found {
                code: Code::E114,
                confidence: if decided { 0.8 } else { 0.5 },
                culprits: if decided { wrong } else { Vec::new() },
                alternatives: several.iter().map(|&member| vec![member]).collect(),
                fault: format!("{} each consider themselves the root", format_ranks(&ranks)),
                proof: several.to_vec(),
            })
        }
    }
}

/// The root of the newest of the group's 8 previous operations of the same kind in which exactly one recorded member
/// names parts; `None` if there is none.
fn past_root(ctx: &Context<'_>, instance: &InstanceCalls<'_>) -> Option<usize> {
    let op = instance.op()?;
    let &(record, ..) = instance.calls.iter().flatten().next()?;
    let lane = ctx.aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == instance.group)?;
    let earlier = lane
        .collectives
        .iter()
        .rev()
        .map(|&position| ctx.aligned.op(record, position));
    let earlier = earlier.filter(|earlier| earlier.kind == op && earlier.seq < instance.seq);
    let mut roots = earlier
        .take(8)
        .map(|earlier| roots_of(&InstanceCalls::new(ctx, instance.group, earlier.seq)));
    roots.find_map(|roots| match roots.as_slice() {
        [root] => Some(*root),
        _ => None,
    })
}

/// The finding on a disagreement at a place.
fn draft(
    ctx: &Context<'_>,
    instance: &InstanceCalls<'_>,
    place: usize,
    found: Found,
) -> FindingDraft {
    let op_ref = ctx.op_ref(instance.group, instance.seq);
    let ranks_of = |members: &[usize]| -> Vec<Rank> {
        let mut ranks: Vec<Rank> = members
            .iter()
            .map(|&member| instance.ranks[member])
            .collect();
        ranks.sort_unstable();
        ranks
    };
    let culprits = ranks_of(&found.culprits);
    let who = if culprits.is_empty() {
        "; which side is wrong is not known".to_owned()
    } else {
        format!("; the others disagree with {}", format_ranks(&culprits))
    };
    let first = found.culprits.first().or(found.proof.first());
    let first = first.and_then(|&member| instance.calls[member]);
    let site = first.map_or(String::new(), |(record, position, _)| {
        ctx.at_site(ctx.aligned.op(record, position))
    });
    let mut draft = FindingDraft::new(
        found.code,
        format!(
            "the members of group {} disagree on {} #{}{site}: {}{who}",
            ctx.group_name(instance.group),
            op_ref.op,
            op_ref.seq,
            found.fault
        ),
    );
    draft.confidence = found.confidence;
    draft.alternatives = found
        .alternatives
        .iter()
        .take(16)
        .map(|members| ranks_of(members))
        .collect();
    let mut proof = found.proof;
    proof.dedup();
    for &member in &proof {
        if let Some((record, position, _)) = instance.calls[member] {
            draft
                .evidence
                .push(ctx.evidence(record, position, instance.group));
            let op = ctx.aligned.op(record, position);
            draft
                .frames
                .extend(ctx.frames_of(record, op, Context::waiting_or_failed(op)));
        }
    }
    draft
        .ruled_out
        .push("op_mismatch, dtype_mismatch: operation and type agree".to_owned());
    let compared = match culprits.as_slice() {
        [] => "each member passes".to_owned(),
        culprits => format!("{} and the other members pass", format_ranks(culprits)),
    };
    let is_all_to_all = matches!(instance.op().map(OpType::pattern), Some(Pattern::AllToAll));
    draft.next = match is_all_to_all {
        true => format!(
            "compare the sizes that {compared} there; exchange them first if they depend on data"
        ),
        false => {
            format!("compare the roots that {compared} there: all members must pass the same one")
        }
    };
    draft.targets.push(place + ctx.graph.ranks);
    draft
        .targets
        .extend(culprits.iter().filter_map(|&rank| ctx.graph.node(rank)));
    draft.culprits = culprits;
    draft.at = Some(op_ref);
    draft
}
