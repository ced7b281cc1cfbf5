//! E130: ranks wait on each other across groups.
//!
//! In a cycle all ranks wait, so no rank is idle. But usually one rank took two steps of the program in another order
//! than all others. So for each rank of the cycle, and each place where it is missed, the ranks of the job vote. This
//! check counts how many of them take that step first, and how many take first the step in which the rank waits. The
//! rank that is outvoted most is the culprit, and the cycle is the proof. If the votes are even, the rank's own past
//! decides, provided that it is regular; both sides remain alternatives. A rank with a single peer to compare with,
//! which contradicts it, is the culprit if no other rank of the cycle is contradicted.
//!
//! A rank that has issued later operations, but still not the one that its peers wait for, did not swap two steps but
//! left one out: then the finding is E103. If other groups had come as far as usual when it did issue that one, it has
//! issued too much before.

use crate::align::RecordIx;
use crate::align::event::ProgramEvent;
use crate::align::pending::PendingKind;
use crate::judge::check::Check;
use crate::judge::check::waits::reopened;
use crate::judge::context::{Context, FindingDraft, OpRef};
use crate::judge::program_order::{Votes, past, vote};
use crate::judge::programs::{self, Point};
use crate::judge::waits::missed::{event_at, event_for};
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::Code;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

pub(crate) struct CrossGroupDeadlock;

impl Check for CrossGroupDeadlock {
    fn codes(&self) -> &'static [Code] {
        &[Code::E130, Code::E103]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let mut drafts = Vec::new();
        for wait_root in &ctx.wait_roots {
            let WaitRoot::Cycle { ranks, places } = wait_root else {
                continue;
            };
            let known = places
                .iter()
                .any(|&place| explained(place + ctx.graph.ranks))
                || ranks.iter().any(|&rank| explained(rank));
            if !known {
                drafts.push(draft(ctx, ranks, places));
            }
        }
        if drafts.is_empty() && !so_far.iter().any(|draft| draft.is_root) {
            drafts.extend(reopened::finding_beside(ctx));
        }
        drafts
    }
}

/// A rank whose order of two steps differs from that of most other ranks, or from that of its own past.
pub(super) struct MinorityRank {
    pub(super) node: Node,
    votes: Votes,
    /// Whether the votes were even, and the rank's own past decided.
    by_past: bool,
    /// Place where the rank is missed.
    pub(super) missed_at: usize,
    /// Place where the rank waits instead.
    pub(super) waits_at: usize,
}

impl MinorityRank {
    /// Whether at least two ranks put the steps the other way round, and more do so than put them as this rank does.
    pub(super) fn is_outvoted(&self) -> bool {
        self.votes.first >= 2 && self.votes.first > self.votes.second
    }
}

/// The finding on a cycle of ranks and places. It blames no rank if none is in the minority, or more than half are.
fn draft(ctx: &Context<'_>, ranks: &[Node], places: &[usize]) -> FindingDraft {
    let cycle = shortest_cycle(ctx, ranks, places);
    let minority = strongest_minority(ctx, ranks, places);
    let mut draft = if minority.is_empty() || minority.len() * 2 > ranks.len() {
        ambiguous(ctx, ranks, places)
    } else {
        let mut draft = blamed(ctx, &minority);
        if minority.iter().any(|odd| odd.by_past) {
            draft.confidence = 0.6;
            draft.alternatives = sides(ctx, ranks, places);
            draft.doubts.push(
                "two sides of equal size: only the rank's own past shows which order is usual"
                    .into(),
            );
        } else if minority
            .iter()
            .all(|one| one.votes.first + one.votes.second < 2)
        {
            draft.confidence = draft.confidence.min(0.6);
            draft.alternatives = sides(ctx, ranks, places);
            draft.doubts.push(
                "a single other rank shows another order, and may be the one that left it".into(),
            );
        }
        draft
    };
    show_cycle(ctx, &mut draft, &cycle, places);
    draft.targets = ranks.to_vec();
    draft
}

/// Adds the ranks of a cycle to a finding, and the operations in which they wait to its evidence.
pub(super) fn show_cycle(
    ctx: &Context<'_>,
    draft: &mut FindingDraft,
    cycle: &[Node],
    places: &[usize],
) {
    draft.cycle = ctx.ranks(cycle);
    let finding_group = draft.at.as_ref().map(|op_ref| op_ref.group);
    for &place in places_of(ctx, cycle, places).iter().take(16) {
        let group = ctx.group_at(place);
        let mut evidence = ctx.evidence_of_place(place, 1);
        for entry in &mut evidence {
            entry.group = (finding_group != Some(group)).then(|| ctx.group_ref(group));
        }
        draft.evidence.extend(evidence);
    }
    draft
        .ruled_out
        .push("not_joined: every rank of the cycle itself waits".to_owned());
}

/// The finding on ranks of the minority, of which there is at least one: E103 if each left out a step, else E130.
pub(super) fn blamed(ctx: &Context<'_>, minority: &[MinorityRank]) -> FindingDraft {
    let culprits: Vec<Rank> = minority.iter().map(|odd| ctx.rank(odd.node)).collect();
    let first = &minority[0];
    let (op_ref, waits_in) = (
        ctx.op_ref_of_place(first.missed_at),
        ctx.op_ref_of_place(first.waits_at),
    );
    let name = |op_ref: &OpRef| {
        format!(
            "{} #{} on group {}",
            op_ref.op,
            op_ref.seq,
            ctx.group_name(op_ref.group)
        )
    };
    let here = waits_here(ctx, first);
    let steps = steps(ctx, minority);
    let swapped = steps.iter().map(|step| {
        format!(
            "{} went to {}{} before {}",
            format_ranks(&step.ranks),
            name(&step.waits_in),
            step.site,
            name(&step.missed)
        )
    });
    let peers = match culprits.len() {
        1 => "its peers",
        _ => "their peers",
    };
    let sentence = format!(
        "{}, where {peers} wait: a wait cycle; {} of {} ranks put them the other way round",
        in_words(swapped.collect(), &culprits, &steps),
        first.votes.first,
        first.votes.first + first.votes.second,
    );
    let skipped = minority.iter().all(|odd| left_out(ctx, odd));
    let (code, sentence) = if skipped {
        let left_out = steps.iter().map(|step| {
            format!(
                "{} left out {} and went on to {}{}",
                format_ranks(&step.ranks),
                name(&step.missed),
                name(&step.waits_in),
                step.site
            )
        });
        let sentence = format!(
            "{}, where {}",
            in_words(left_out.collect(), &culprits, &steps),
            if culprits.len() == 1 {
                "it waits for those that wait for it"
            } else {
                "they wait for those that wait for them"
            }
        );
        (Code::E103, sentence)
    } else {
        (Code::E130, sentence)
    };
    let mut draft = FindingDraft::new(code, sentence);
    let voters = (first.votes.first + first.votes.second) as f64;
    draft.confidence = (0.5 + 0.45 * (first.votes.first as f64 / voters.max(1.0))).min(0.95);
    for odd in minority.iter().take(4) {
        let Some(record) = ctx.record_at(odd.waits_at, odd.node) else {
            continue;
        };
        if let Some(op) = ctx.last_op(record) {
            draft
                .frames
                .extend(ctx.frames_of(record, op, Context::waiting_or_failed(op)));
        }
    }
    draft.next = format!(
        "compare the order in which {} {} {} and {} with another rank's",
        format_ranks(&steps[0].ranks),
        if steps[0].ranks.len() == 1 {
            "issues"
        } else {
            "issue"
        },
        name(&waits_in),
        name(&op_ref)
    );
    if let (Some(usual), Some(minority)) = (first.votes.shown_by, here) {
        let rank = |point: Point| [ctx.aligned.records[point.record].rank];
        let (usual, minority) = ((&rank(usual)[..], usual), (&rank(minority)[..], minority));
        draft.diff = programs::orders(ctx, usual, minority);
    }
    draft.culprits = culprits;
    draft.at = Some(op_ref);
    draft
}

/// Ranks that took the same two steps in another order than most.
struct Step {
    ranks: Vec<Rank>,
    missed: OpRef,
    waits_in: OpRef,
    /// Where the first of the ranks issued the operation in which it waits, like ` (train.py:61)`; empty if that is not
    /// recorded.
    site: String,
}

/// The steps of the ranks of the minority. Ranks that wait at the same place, and are missed at the same place, share
/// one.
fn steps(ctx: &Context<'_>, minority: &[MinorityRank]) -> Vec<Step> {
    let mut by_places: Vec<(usize, usize, Step)> = Vec::new();
    for odd in minority {
        let rank = ctx.rank(odd.node);
        let same = by_places.iter_mut().find(|(missed_at, waits_at, _)| {
            (*missed_at, *waits_at) == (odd.missed_at, odd.waits_at)
        });
        if let Some((.., step)) = same {
            step.ranks.push(rank);
            continue;
        }
        let site = waits_here(ctx, odd).map_or(String::new(), |here| {
            ctx.at_site(ctx.aligned.op(here.record, here.position))
        });
        let step = Step {
            ranks: vec![rank],
            missed: ctx.op_ref_of_place(odd.missed_at),
            waits_in: ctx.op_ref_of_place(odd.waits_at),
            site,
        };
        by_places.push((odd.missed_at, odd.waits_at, step));
    }
    by_places.into_iter().map(|(.., step)| step).collect()
}

/// A sentence lists at most this many steps.
const MOST_STEPS: usize = 2;

/// One clause from the clauses on `steps`. Of more than [`MOST_STEPS`], it only names the other culprits.
fn in_words(clauses: Vec<String>, culprits: &[Rank], steps: &[Step]) -> String {
    let described = steps.iter().take(MOST_STEPS).flat_map(|step| &step.ranks);
    let described: Vec<Rank> = described.copied().collect();
    let others = culprits.iter().filter(|rank| !described.contains(rank));
    let others: Vec<Rank> = others.copied().collect();
    let mut text = clauses[..clauses.len().min(MOST_STEPS)].join(", and ");
    if !others.is_empty() {
        let rest = format!(", and so did {} on groups of theirs", format_ranks(&others));
        text.push_str(&rest);
    }
    text
}

/// The operation in which a rank of the minority waits; `None` if its record does not show it.
fn waits_here(ctx: &Context<'_>, odd: &MinorityRank) -> Option<Point> {
    let record = ctx.record_at(odd.waits_at, odd.node)?;
    let index = position_of(ctx, record, odd.waits_at)?;
    let position = ctx.graph.pending[record][index].position;
    Some(Point { record, position })
}

/// Whether a rank issued more operations after the one that it waits in, but still not the one that its peers wait for.
fn left_out(ctx: &Context<'_>, odd: &MinorityRank) -> bool {
    let Some(record) = ctx.record_at(odd.waits_at, odd.node) else {
        return false;
    };
    let Some(here) = position_of(ctx, record, odd.waits_at) else {
        return false;
    };
    match position_of(ctx, record, odd.missed_at) {
        None => here + 1 < ctx.graph.pending[record].len(),
        // The rank used that number much later, for the next operation of this kind.
        Some(there) => there > here + 2 && !is_in_place(ctx, odd, record, there),
    }
}

/// Whether the operation that a rank's peers wait for, which is pending at this index of its record, has its usual place
/// there: then the rank has issued too much before it. That is so if a group of another family, on which each step
/// issues something, has come as far before it as with the rank that shows the usual order.
fn is_in_place(ctx: &Context<'_>, odd: &MinorityRank, record: RecordIx, there: usize) -> bool {
    let aligned = ctx.aligned;
    let Some(usual) = odd.votes.shown_by else {
        return false;
    };
    let families =
        [odd.missed_at, odd.waits_at].map(|place| aligned.groups[ctx.group_at(place)].family);
    // The newest numbers on the first group of each other family before an operation.
    let before = |record: RecordIx, position: u32| -> BTreeMap<u32, u32> {
        let lanes = aligned.lanes[record].iter().rev();
        let newest = lanes.filter_map(|lane| {
            let family = aligned.groups[lane.group].family;
            let number = lane.collectives.partition_point(|&other| other < position);
            let newest = lane.collectives.get(number.checked_sub(1)?)?;
            Some((family, aligned.seq(record, *newest)))
        });
        newest
            .filter(|(family, _)| !families.contains(family))
            .collect()
    };
    let here = before(record, ctx.graph.pending[record][there].position);
    let at_usual = before(usual.record, usual.position);
    let op = aligned.op(usual.record, usual.position);
    let lane = &aligned.lanes[usual.record][usize::from(op.group)];
    let last = op.seq.checked_sub(1);
    let last = last.and_then(|seq| aligned.find(usual.record, lane, seq).ok());
    let Some(last) = last.map(|index| before(usual.record, lane.collectives[index])) else {
        return false;
    };
    let moves =
        |(family, newest): &(&u32, &u32)| last.get(family).is_some_and(|last| last < *newest);
    let mut moving = at_usual.iter().filter(moves);
    moving.any(|(family, newest)| here.get(family) == Some(newest))
}

/// Index of a place among the pending operations of a record; `None` if it is not pending there.
fn position_of(ctx: &Context<'_>, record: usize, place: usize) -> Option<usize> {
    let pending = &ctx.graph.pending[record];
    pending
        .iter()
        .position(|pending| match (&pending.kind, &ctx.graph.places[place]) {
            (
                PendingKind::Collective { seq },
                Place::Collective {
                    group,
                    seq: awaited,
                },
            ) => pending.group == *group && seq == awaited,
            (
                PendingKind::Batch { .. },
                Place::Batch {
                    record: poster,
                    pending: index,
                    ..
                },
            ) => {
                *poster == record && ctx.graph.pending[record][*index].position == pending.position
            }
            _ => false,
        })
}

/// The sides of a cycle, at most 16. Ranks that wait in collectives of one number on groups of one family are on one
/// side, and so are ranks that wait in messages on groups of one family.
fn sides(ctx: &Context<'_>, ranks: &[Node], places: &[usize]) -> Vec<Vec<Rank>> {
    let mut sides: BTreeMap<Option<(u32, u64)>, Vec<Rank>> = BTreeMap::new();
    for &rank in ranks {
        let place = ctx.graph.waits_in[rank]
            .iter()
            .find(|place| places.contains(place));
        let side = place.map(|&place| match ctx.graph.places[place] {
            Place::Collective { group, seq } => (ctx.aligned.groups[group].family, u64::from(seq)),
            Place::Batch { group, .. } => (ctx.aligned.groups[group].family, u64::MAX),
        });
        sides.entry(side).or_default().push(ctx.rank(rank));
    }
    let mut sides: Vec<Vec<Rank>> = sides.into_values().collect();
    sides.sort();
    sides.truncate(16);
    sides
}

/// The operation in which a rank waits in one of these places; `None` if it waits in none of them.
fn waits_at(ctx: &Context<'_>, rank: Rank, places: &[usize]) -> Option<Point> {
    let node = ctx.graph.node(rank)?;
    let mut waits_in = ctx.graph.waits_in[node].iter();
    let &place = waits_in.find(|place| places.contains(place))?;
    let record = ctx.record_at(place, node)?;
    let index = position_of(ctx, record, place)?;
    let position = ctx.graph.pending[record][index].position;
    Some(Point { record, position })
}

/// The E130 on a cycle in which no rank is known to have left the order.
fn ambiguous(ctx: &Context<'_>, ranks: &[Node], places: &[usize]) -> FindingDraft {
    let in_cycle = ctx.ranks(ranks);
    let alternatives = sides(ctx, ranks, places);
    let groups: BTreeSet<_> = places.iter().map(|&place| ctx.group_at(place)).collect();
    let sentence = match groups.len() {
        0 | 1 => format!(
            "{} wait on each other in a cycle; which of them took the wrong order or left an operation out is not known",
            format_ranks(&in_cycle)
        ),
        _ => format!(
            "{} wait on each other in a cycle across groups; which of them took the wrong order is not known",
            format_ranks(&in_cycle)
        ),
    };
    let mut draft = FindingDraft::new(Code::E130, sentence);
    draft.confidence = 0.5;
    if let [one, other, ..] = &alternatives[..] {
        let waits_at = |rank: &Rank| waits_at(ctx, *rank, places);
        if let (Some(here), Some(there)) = (waits_at(&one[0]), waits_at(&other[0])) {
            let like = |side: &[Rank], point| -> Vec<Rank> {
                let ranks = side.iter().copied();
                let same = |other| programs::same_order(ctx, point, other);
                ranks
                    .filter(|rank| waits_at(rank).is_some_and(same))
                    .collect()
            };
            let (one, other) = (like(one, here), like(other, there));
            draft.diff = programs::orders(ctx, (&one, here), (&other, there));
        }
        draft.alternatives = alternatives;
    }
    let first = places
        .iter()
        .copied()
        .min_by_key(|&place| (ctx.waiting_since(place), place));
    draft.at = first.map(|place| ctx.op_ref_of_place(place));
    draft.next =
        "compare the order of the operations that these ranks issue on their groups".to_owned();
    draft
}

/// The ranks that are outvoted most. A rank that is outvoted less than half as clearly is a consequence of these and
/// left out.
pub(super) fn strongest_minority(
    ctx: &Context<'_>,
    ranks: &[Node],
    places: &[usize],
) -> Vec<MinorityRank> {
    let mut minority = minority_ranks(ctx, ranks, places);
    let against = |odd: &MinorityRank| odd.votes.first - odd.votes.second;
    let strongest = minority.iter().map(against).max().unwrap_or(0);
    minority.retain(|odd| against(odd) * 2 >= strongest);
    minority.sort_by_key(|odd| odd.node);
    minority.dedup_by_key(|odd| odd.node);
    minority
}

/// The ranks that are outvoted, or whose own past decided against them, each with a place where it is missed and one
/// where it waits; a rank may occur several times. If there are none, the one rank that has one vote for its order and
/// one against it, if no other rank is contradicted.
fn minority_ranks(ctx: &Context<'_>, ranks: &[Node], places: &[usize]) -> Vec<MinorityRank> {
    let inside: HashSet<Node> = ranks.iter().copied().collect();
    let within: HashSet<usize> = places.iter().copied().collect();
    let mut counted: HashMap<(ProgramEvent, ProgramEvent), Votes> = HashMap::new();
    let mut minority: Vec<MinorityRank> = Vec::new();
    let mut contradicted: Vec<MinorityRank> = Vec::new();
    for &place in places {
        for &(node, why) in &ctx.graph.missing[place] {
            if !inside.contains(&node) || why == Missing::Candidate {
                continue;
            }
            let rank = ctx.rank(node);
            let Some(record) = ctx.record_at(place, node) else {
                continue;
            };
            let Some(expected) = event_for(ctx, place, rank) else {
                continue;
            };
            for &wait_place in &ctx.graph.waits_in[node] {
                if !within.contains(&wait_place) {
                    continue;
                }
                let Some(done) = event_at(ctx, wait_place, rank) else {
                    continue;
                };
                let mut votes_before = |done: ProgramEvent| {
                    let count = || vote(ctx.aligned, ctx.messages, record, expected, done);
                    *counted.entry((expected, done)).or_insert_with(count)
                };
                let mut votes = votes_before(done);
                // If the votes on this message are even, those on the collective before the message decide: that
                // collective has its place in the program, too, and more ranks issue it.
                if votes.first == votes.second
                    && let (ProgramEvent::Collective { .. }, ProgramEvent::Message(posted)) =
                        (expected, done)
                    && let Some(before) = posted.follows()
                    && before != expected
                {
                    let earlier = votes_before(before);
                    if earlier.first > earlier.second {
                        votes = earlier;
                    }
                }
                let by_past = votes.first == votes.second
                    && past(ctx.aligned, record, expected, done) == Some(true);
                let odd = MinorityRank {
                    node,
                    votes,
                    by_past,
                    missed_at: place,
                    waits_at: wait_place,
                };
                if votes.first > votes.second || by_past {
                    minority.push(odd);
                } else if votes.first > 0 {
                    contradicted.push(odd);
                }
            }
        }
    }
    // One vote against one proves something only if no other rank is contradicted.
    let first = contradicted.first().map(|odd| odd.node);
    let is_only_one = |odd: &MinorityRank| Some(odd.node) == first && odd.votes.second <= 1;
    if minority.is_empty() && contradicted.iter().all(is_only_one) {
        minority = contradicted;
    }
    minority.sort_by_key(|odd| {
        (
            odd.node,
            std::cmp::Reverse(odd.votes.first - odd.votes.second),
            odd.missed_at,
        )
    });
    minority
}

/// The ranks of a shortest cycle through the first of `ranks`: each waits for the next. Only the first rank if there is
/// no cycle through it.
pub(super) fn shortest_cycle(ctx: &Context<'_>, ranks: &[Node], places: &[usize]) -> Vec<Node> {
    let Some(&start) = ranks.first() else {
        return Vec::new();
    };
    let inside: HashSet<Node> = ranks
        .iter()
        .copied()
        .chain(places.iter().map(|&place| place + ctx.graph.ranks))
        .collect();
    let mut before: HashMap<Node, Node> = HashMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(node) = queue.pop_front() {
        for next in ctx.graph.successors(node) {
            if next == start {
                let mut path = vec![node];
                let mut step = node;
                while let Some(&previous) = before.get(&step) {
                    path.push(previous);
                    step = previous;
                }
                path.reverse();
                path.retain(|&node| node < ctx.graph.ranks);
                return path;
            }
            if inside.contains(&next) && next != start && !before.contains_key(&next) {
                before.insert(next, node);
                queue.push_back(next);
            }
        }
    }
    vec![start]
}

/// The places where the ranks of a cycle wait, in the order of the cycle.
fn places_of(ctx: &Context<'_>, cycle: &[Node], places: &[usize]) -> Vec<usize> {
    let place_of = |node: &Node| {
        ctx.graph.waits_in[*node]
            .iter()
            .copied()
            .find(|place| places.contains(place))
    };
    let mut of_cycle: Vec<usize> = cycle.iter().filter_map(place_of).collect();
    let mut listed = HashSet::new();
    of_cycle.retain(|place| listed.insert(*place));
    of_cycle
}
