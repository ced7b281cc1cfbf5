//! W280: some ranks use two groups in the opposite order, and no error was found.
//!
//! A device may run the operations of all its groups one after the other. If a rank issues number `s` of one group
//! before number `t` of another, and a rank in both groups does the opposite, the two can end up waiting for each
//! other: a deadlock that has not happened yet. Once it has, E130 names it.
//!
//! Only operations that need every member are compared, and only those of groups on a device: on a host, threads that
//! use one group each wait only in that group.

use crate::align::pending::on_device;
use crate::align::{GroupIx, Lane, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::programs::{self, Point};
use crate::report::format::format_ranks;
use crate::report::{Code, Severity};
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

pub(crate) struct GroupOrder;

impl Check for GroupOrder {
    fn codes(&self) -> &'static [Code] {
        &[Code::W280]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        // If there is an error, an order that may lead to one does not matter.
        let is_error = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(is_error) {
            return Vec::new();
        }
        let pairs = shared_pairs(ctx);
        let inversions = ctx.aligned.shared.map(pairs.len(), |index| {
            let (pair, lanes) = &pairs[index];
            invert(ctx, *pair, lanes)
        });
        // Groups of one kind cross alike: one finding for all of them.
        let mut of_kind: BTreeMap<[u32; 2], Vec<Inversion>> = BTreeMap::new();
        for inversion in inversions.into_iter().flatten() {
            let families = inversion
                .groups
                .map(|group| ctx.aligned.groups[group].family);
            of_kind.entry(families).or_default().push(inversion);
        }
        of_kind
            .values()
            .map(|inversions| draft(ctx, inversions))
            .collect()
    }
}

/// A rank's lanes in both groups.
type Lanes<'a> = (RecordIx, [&'a Lane; 2]);

/// At most this many groups of a rank are compared with each other.
const MOST_GROUPS: usize = 32;

/// Pairs of groups on a device that have at least two records in common, with the lanes of these in them.
fn shared_pairs<'a>(ctx: &'a Context<'_>) -> Vec<([GroupIx; 2], Vec<Lanes<'a>>)> {
    let mut found: Vec<([GroupIx; 2], Lanes<'a>)> = Vec::new();
    for (record, lanes) in ctx.aligned.lanes.iter().enumerate() {
        let is_on_device = |lane: &&Lane| {
            let first = lane.collectives.first();
            first.is_some_and(|&position| {
                let call = ctx.aligned.op(record, position).call;
                on_device(&ctx.aligned.shared.calls.get(call).signature.backend)
            })
        };
        let mut device_lanes: Vec<&Lane> = lanes
            .iter()
            .filter(is_on_device)
            .take(MOST_GROUPS)
            .collect();
        device_lanes.sort_by_key(|lane| lane.group);
        for (index, &one) in device_lanes.iter().enumerate() {
            for &other in device_lanes[index + 1..]
                .iter()
                .filter(|other| other.group != one.group)
            {
                found.push(([one.group, other.group], (record, [one, other])));
            }
        }
    }
    // Most pairs of a large job are of one rank: a map would have an entry for each of them.
    found.sort_by_key(|&(pair, _)| pair);
    let pairs = found.chunk_by(|(one, _), (other, _)| one == other);
    pairs
        .filter(|of_pair| of_pair.len() > 1)
        .map(|of_pair| {
            let lanes = of_pair.iter().map(|&(_, lanes)| lanes).collect();
            (of_pair[0].0, lanes)
        })
        .collect()
}

/// Two operations that some ranks issue in the one order and some in the other.
struct Inversion {
    groups: [GroupIx; 2],
    seqs: [u32; 2],
    /// The records in which the first group's operation comes before the second's, then those in which it comes after,
    /// each with the positions of the two.
    sides: [Vec<(RecordIx, [Option<u32>; 2])>; 2],
}

/// For each operation of the first group: its number, and the newest number of the second group before it, 0 if there
/// is none. Operations are left out while a wrapped ring does not show that number.
fn order_of(ctx: &Context<'_>, &(record, [one, other]): &Lanes<'_>) -> Vec<(u32, u32)> {
    let aligned = ctx.aligned;
    let meets = |&&position: &&u32| aligned.op(record, position).kind.needs_all_members();
    let is_complete = !aligned.records[record].wrapped();
    let mut others = other.collectives.iter().filter(meets).peekable();
    let mut newest = is_complete.then_some(0);
    let mut found: Vec<(u32, u32)> = Vec::with_capacity(one.collectives.len());
    for &position in one.collectives.iter().filter(meets) {
        while let Some(&before) = others.next_if(|&&before| before < position) {
            newest = Some(aligned.seq(record, before));
        }
        let seq = aligned.seq(record, position);
        // Of a coalesced block, only the first entry counts.
        if let Some(newest) = newest
            && found.last().is_none_or(|&(last, _)| last < seq)
        {
            found.push((seq, newest));
        }
    }
    found
}

/// The first inversion of two groups; `None` if all ranks issue their operations in one order.
fn invert(ctx: &Context<'_>, groups: [GroupIx; 2], lanes: &[Lanes<'_>]) -> Option<Inversion> {
    let orders: Vec<Vec<(u32, u32)>> = lanes.iter().map(|lanes| order_of(ctx, lanes)).collect();
    let longest = orders.iter().max_by_key(|order| order.len())?;
    let differs = |order: &Vec<(u32, u32)>| {
        let mut usual = longest.iter().peekable();
        order.iter().find_map(|&(seq, newest)| {
            while usual.next_if(|(other, _)| *other < seq).is_some() {}
            let &&(other, expected) = usual.peek()?;
            (other == seq && expected != newest).then_some(seq)
        })
    };
    let first = orders.iter().filter_map(differs).min()?;
    let newest = |order: &Vec<(u32, u32)>| {
        let index = order.binary_search_by_key(&first, |&(seq, _)| seq).ok()?;
        Some(order[index].1)
    };
    // On some ranks the first group's operation comes before number `second` of the other group, on others after it.
    let least = orders.iter().filter_map(newest).min()?;
    let later = orders.iter().filter_map(newest).filter(|&seq| seq > least);
    let second = later.min()?;
    let mut sides = [Vec::new(), Vec::new()];
    for (&(record, [one, other]), order) in lanes.iter().zip(&orders) {
        let Some(newest) = newest(order) else {
            continue;
        };
        let position = |lane: &Lane, seq: u32| {
            let index = ctx.aligned.find(record, lane, seq).ok()?;
            Some(lane.collectives[index])
        };
        let places = [position(one, first), position(other, second)];
        sides[usize::from(newest >= second)].push((record, places));
    }
    Some(Inversion {
        groups,
        seqs: [first, second],
        sides,
    })
}

/// The finding on inversions of groups of the same kinds, of which the first is the example.
fn draft(ctx: &Context<'_>, inversions: &[Inversion]) -> FindingDraft {
    let example = &inversions[0];
    let ranks = |side: &[(RecordIx, [Option<u32>; 2])]| -> Vec<Rank> {
        let mut ranks: Vec<Rank> = side
            .iter()
            .map(|(record, _)| ctx.aligned.records[*record].rank)
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    };
    // The smaller side deviates; of two equal ones neither does.
    let odd = usize::from(example.sides[1].len() < example.sides[0].len());
    let decided = example.sides[0].len() != example.sides[1].len();
    let (usual_side, odd_side) = (&example.sides[1 - odd], &example.sides[odd]);
    let op = |which: usize| {
        let (group, seq) = (example.groups[which], example.seqs[which]);
        format!(
            "{} #{seq} on group {}",
            ctx.usual_op(group, seq),
            ctx.group_name(group)
        )
    };
    let (usual, deviating) = (ranks(usual_side), ranks(odd_side));
    let more = match inversions.len() {
        1 => String::new(),
        2 => "; the same holds for one more pair of groups of these kinds".to_owned(),
        n => format!(
            "; the same holds for {} more pairs of groups of these kinds",
            n - 1
        ),
    };
    let verb = if deviating.len() == 1 {
        "issues"
    } else {
        "issue"
    };
    let mut draft = FindingDraft::new(
        Code::W280,
        format!(
            "{} {verb} {} before {}, {} the other way round: a device that runs one operation after the other would \
             wait in a cycle{more}",
            format_ranks(&deviating),
            op(odd),
            op(1 - odd),
            format_ranks(&usual),
        ),
    );
    draft.confidence = if decided { 0.85 } else { 0.75 };
    if decided {
        draft.culprits = deviating.clone();
    } else {
        draft.alternatives = vec![deviating.clone(), usual.clone()];
    }
    let mut points = Vec::new();
    for (side, first) in [(usual_side, 1 - odd), (odd_side, odd)] {
        let Some(&(record, places)) = side.first() else {
            continue;
        };
        for which in [first, 1 - first] {
            if let Some(position) = places[which] {
                draft
                    .evidence
                    .push(ctx.evidence(record, position, example.groups[0]));
            }
        }
        points.extend(places[first].map(|position| Point { record, position }));
    }
    if let [first, second] = points[..] {
        draft.diff = programs::orders(ctx, (&usual, first), (&deviating, second));
        let call = ctx.aligned.op(second.record, second.position);
        draft.frames = ctx.frames_of(second.record, call, "last_seen");
    }
    draft.next = format!(
        "issue the operations of groups {} and {} in one order on all ranks, or let the second wait for the end of \
         the first",
        ctx.group_name(example.groups[0]),
        ctx.group_name(example.groups[1]),
    );
    draft.at = Some(ctx.op_ref(example.groups[0], example.seqs[0]));
    draft
}
