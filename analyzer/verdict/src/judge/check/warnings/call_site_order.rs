//! W270: ranks issue the same sequence numbers of a group from different places of the source, in crossed order.
//!
//! Two threads that share a group, or two branches of the program, issue in an order that differs from rank to rank.
//! If the operations agree, no backend notices: the data of one operation meets that of the other. Only the places
//! from which they were issued show it. A program may well issue one operation from several places, so a crossing
//! counts only where all of this holds:
//!
//! * all members come through both places together: under other numbers every member issued from the one, and
//!   from the other;
//! * from the first number that differs on, the odd ranks issue from the same places as the others, each as often, and
//!   afterward all issue from the same place again. This never happens to a rank that left an operation out.

use crate::align::record::NONE;
use crate::align::{GroupIx, Lane, RecordIx};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::programs;
use crate::report::Code;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, HashMap, HashSet};

pub(crate) struct CallSiteOrder;

impl Check for CallSiteOrder {
    fn codes(&self) -> &'static [Code] {
        &[Code::W270]
    }

    fn run(&self, ctx: &Context<'_>, _so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if ctx.aligned.shared.stacks.is_empty() {
            return Vec::new();
        }
        let places = Places::new(ctx);
        let groups = ctx.aligned.groups.len();
        let shared = &ctx.aligned.shared;
        let crossings = shared.map(groups, |group| crossing(ctx, &places, group));
        // If the operations themselves differ, a mismatch is reported instead.
        let differs = |crossing: &Crossing| {
            let mut known = ctx.disagreements.iter();
            known.any(|known| known.group == crossing.group && known.seq <= crossing.last)
        };
        crossings
            .into_iter()
            .flatten()
            .filter(|crossing| !differs(crossing))
            .map(|crossing| draft(ctx, &crossing))
            .collect()
    }
}

/// Places are compared in at most this many frames, from the call outward: the call itself is often in a wrapper that
/// all share.
const DEPTH: usize = 4;

/// The longest stretch of numbers that counts as one crossing.
const LONGEST: u32 = 64;

/// For each stack: its innermost frames of the program, [`NONE`] where it has fewer.
struct Places(Vec<[u32; DEPTH]>);

impl Places {
    /// The places of all stacks.
    fn new(ctx: &Context<'_>) -> Self {
        let stacks = 0..ctx.aligned.shared.stacks.len();
        Self(
            stacks
                .map(|stack| {
                    let mut frames = ctx.own_frame_ids(stack as u32);
                    std::array::from_fn(|_| frames.next().unwrap_or(NONE))
                })
                .collect(),
        )
    }

    /// The frame of a stack at this depth; `None` if there is no such frame.
    fn frame(&self, stack: u32, depth: usize) -> Option<u32> {
        let place = *self.0.get(stack as usize)?.get(depth)?;
        (place != NONE).then_some(place)
    }
}

/// One number of a group: the stack of each member's call, [`NONE`] where its record has none or has several calls.
struct Row {
    seq: u32,
    stacks: Vec<u32>,
}

/// The numbers of a group by the stacks from which members issued them.
#[derive(Default)]
struct Rows {
    /// The numbers for which the members' stacks differ, or one is unknown, ascending.
    differ: Vec<Row>,
    /// Stacks from which all members issued some number.
    alike: HashSet<u32>,
    /// The numbers that all members issued from one stack, with that stack.
    together: HashMap<u32, u32>,
}

/// The rows of a group. `None` if all members issued every number from one stack, if no member issued any, or if the
/// numbers have too many gaps.
fn rows(ctx: &Context<'_>, group: GroupIx, members: &[(RecordIx, &Lane)]) -> Option<Rows> {
    let (low, high) = ctx.aligned.recorded_seqs(group)?;
    let entries: usize = members.iter().map(|(_, lane)| lane.collectives.len()).sum();
    // There are more numbers than entries: the dumps are damaged, or hold only active operations.
    if (high - low) as usize > entries {
        return None;
    }
    let stack_of = |&(record, lane): &(RecordIx, &Lane), seq: u32| {
        let index = ctx.aligned.find(record, lane, seq).ok();
        let single = index.filter(|&index| ctx.aligned.block(record, lane, index).len() == 1);
        single.map_or(NONE, |index| {
            ctx.aligned.op(record, lane.collectives[index]).stack
        })
    };
    // Member by member: the records of a large job do not fit into a processor's caches.
    let (reference, others) = members.split_first()?;
    let reference: Vec<u32> = (low..=high).map(|seq| stack_of(reference, seq)).collect();
    let mut differs = vec![false; reference.len()];
    for member in others {
        for ((seq, &stack), differs) in (low..=high).zip(&reference).zip(&mut differs) {
            *differs |= stack_of(member, seq) != stack;
        }
    }
    if !differs.contains(&true) {
        return None;
    }
    let mut rows = Rows::default();
    for ((seq, &stack), &differs) in (low..=high).zip(&reference).zip(&differs) {
        if differs {
            let stacks = members.iter().map(|member| stack_of(member, seq)).collect();
            rows.differ.push(Row { seq, stacks });
        } else if stack != NONE {
            rows.alike.insert(stack);
            rows.together.insert(seq, stack);
        }
    }
    Some(rows)
}

/// Two numbers for which some ranks exchanged the places of the source: they issued each from where the others issued
/// the other one.
struct Crossing {
    group: GroupIx,
    /// The first number that is crossed, and the one under which the odd ranks issue from where the others issued the
    /// first.
    seqs: [u32; 2],
    /// The last number of the stretch.
    last: u32,
    /// Records of the ranks that agree with most, and of the odd ones.
    sides: [Vec<RecordIx>; 2],
    /// Whether more than half of the members are on the first side.
    decided: bool,
    /// The frame in which the places differ, counted from the call outward.
    depth: usize,
}

/// The first crossing in a group, at the innermost depth that shows one; `None` if there is none.
fn crossing(ctx: &Context<'_>, places: &Places, group: GroupIx) -> Option<Crossing> {
    let lanes = ctx.aligned.groups[group].lanes.iter().flatten();
    let members: Vec<(RecordIx, &Lane)> = lanes
        .map(|&(record, lane)| (record, &ctx.aligned.lanes[record][lane]))
        .collect();
    if members.len() < 2 {
        return None;
    }
    let rows = rows(ctx, group, &members)?;
    (0..DEPTH).find_map(|depth| crossing_at(places, depth, group, &members, &rows))
}

/// The first crossing in a group by the frames at one depth; `None` if there is none.
fn crossing_at(
    places: &Places,
    depth: usize,
    group: GroupIx,
    members: &[(RecordIx, &Lane)],
    rows: &Rows,
) -> Option<Crossing> {
    let place = |stack: u32| places.frame(stack, depth);
    let mut common: HashSet<u32> = rows
        .alike
        .iter()
        .filter_map(|&stack| place(stack))
        .collect();
    let mut apart: BTreeMap<u32, Apart> = BTreeMap::new();
    for row in &rows.differ {
        let places: Vec<Option<u32>> = row.stacks.iter().map(|&stack| place(stack)).collect();
        match places[0] {
            Some(first) if places.iter().all(|&place| place == Some(first)) => {
                common.insert(first);
            }
            _ => drop(apart.insert(row.seq, Apart::new(places)?)),
        }
    }
    if apart.is_empty() || common.len() < 2 {
        return None;
    }
    // The place from which most members issued a number, and this member's place; `None` if the records do not show it.
    let places_of = |seq: u32, member: usize| -> Option<[u32; 2]> {
        if let Some(row) = apart.get(&seq) {
            return Some([row.usual, row.places[member]?]);
        }
        let stack = rows.together.get(&seq).copied().or_else(|| {
            let index = rows.differ.binary_search_by_key(&seq, |row| row.seq).ok()?;
            Some(rows.differ[index].stacks[member])
        });
        Some([place(stack?)?; 2])
    };
    let elsewhere = |seq: u32, member: usize| {
        places_of(seq, member).is_some_and(|[usual, place]| usual != place)
    };
    let mut odd: BTreeMap<[u32; 3], Vec<RecordIx>> = BTreeMap::new();
    for (member, &(record, _)) in members.iter().enumerate() {
        let begins = |&seq: &u32| {
            let before = seq
                .checked_sub(1)
                .is_some_and(|before| elsewhere(before, member));
            elsewhere(seq, member) && !before
        };
        let mut starts = apart.keys().copied().filter(begins);
        if let Some(crossed) =
            starts.find_map(|seq| stretch(seq, &common, |seq| places_of(seq, member)))
        {
            odd.entry(crossed).or_default().push(record);
        }
    }
    let ([first, second, last], odd) = odd.pop_first()?;
    let row = apart.get(&first)?;
    let agreeing = members.iter().zip(&row.places);
    let agreeing = agreeing.filter(|(_, place)| **place == Some(row.usual));
    let agreeing: Vec<RecordIx> = agreeing.map(|((record, _), _)| *record).collect();
    Some(Crossing {
        group,
        seqs: [first, second],
        last,
        decided: agreeing.len() * 2 > members.len(),
        sides: [agreeing, odd],
        depth,
    })
}

/// The places from which members issued one number, if there are several.
struct Apart {
    /// The place of each member's call; `None` where its record has none.
    places: Vec<Option<u32>>,
    /// The place of most calls; of equally frequent ones, the one that comes first in the order of members.
    usual: u32,
}

impl Apart {
    /// `None` if no place is known.
    fn new(places: Vec<Option<u32>>) -> Option<Self> {
        let mut counts: Vec<(u32, usize)> = Vec::new();
        for &place in places.iter().flatten() {
            match counts.iter_mut().find(|(known, _)| *known == place) {
                Some((_, count)) => *count += 1,
                None => counts.push((place, 1)),
            }
        }
        // `max_by_key` returns the last of equal ones, which in reverse order is the first.
        let &(usual, _) = counts.iter().rev().max_by_key(|(_, count)| *count)?;
        Some(Self { places, usual })
    }
}

/// Follows a member from the first number at which its place differs until it has issued from every place as often as
/// the others. Returns this number, the number under which it first issues from the place where the others issued the
/// first, and the last number. `None` if that is not a crossing within [`LONGEST`] numbers.
fn stretch(
    first: u32,
    common: &HashSet<u32>,
    places_of: impl Fn(u32) -> Option<[u32; 2]>,
) -> Option<[u32; 3]> {
    let [first_usual, _] = places_of(first)?;
    let mut balance: HashMap<u32, i32> = HashMap::new();
    let (mut moved, mut agreed) = (HashSet::new(), Vec::new());
    let mut second = None;
    for seq in first..first.saturating_add(LONGEST) {
        let [usual, place] = places_of(seq)?;
        if usual == place {
            agreed.push(usual);
            continue;
        }
        moved.extend([usual, place]);
        if second.is_none() && place == first_usual {
            second = Some(seq);
        }
        *balance.entry(usual).or_default() += 1;
        *balance.entry(place).or_default() -= 1;
        if balance.values().any(|&open| open != 0) {
            continue;
        }
        // If all members issued from a further place in between, the two calls are in different parts of the program,
        // which is not a crossing.
        let inside = agreed.iter().all(|place| moved.contains(place));
        let known = moved.iter().all(|place| common.contains(place));
        let [usual_after, place_after] = places_of(seq.checked_add(1)?)?;
        let together_after = usual_after == place_after;
        return (inside && known && together_after).then_some([first, second?, seq]);
    }
    None
}

/// The finding on a crossing; it blames the odd ranks if they are known to be the minority.
fn draft(ctx: &Context<'_>, crossing: &Crossing) -> FindingDraft {
    let ranks = |records: &[RecordIx]| -> Vec<Rank> {
        let mut ranks: Vec<Rank> = records
            .iter()
            .map(|&record| ctx.aligned.records[record].rank)
            .collect();
        ranks.sort_unstable();
        ranks
    };
    let [usual, odd] = crossing.sides.each_ref().map(|side| ranks(side));
    let from = |records: &[RecordIx]| {
        let record = records.first().copied().unwrap_or_default();
        crossing
            .seqs
            .map(|seq| place_of(ctx, crossing, seq, record))
            .join(" and ")
    };
    let [first, second] = crossing.seqs;
    let group = ctx.group_name(crossing.group);
    let mut draft = FindingDraft::new(
        Code::W270,
        format!(
            "{} issued #{first} and #{second} on group {group} from {}, {} from {}: the operations agree and so nothing \
             failed, but the data of the one met those of the other",
            format_ranks(&odd),
            from(&crossing.sides[1]),
            format_ranks(&usual),
            from(&crossing.sides[0]),
        ),
    );
    if crossing.decided {
        draft.culprits = odd;
        draft.confidence = 0.9;
    } else {
        draft.alternatives = vec![odd, usual];
        draft.confidence = 0.7;
    }
    for side in crossing.sides.iter().rev() {
        let Some(&record) = side.first() else {
            continue;
        };
        for seq in crossing.seqs {
            let Some(position) = programs::position_of(ctx, record, crossing.group, seq) else {
                continue;
            };
            draft
                .evidence
                .push(ctx.evidence(record, position, crossing.group));
            let op = ctx.aligned.op(record, position);
            draft
                .diff
                .extend(programs::sites(ctx, crossing.group, seq, side, op.call));
        }
    }
    if let Some(&record) = crossing.sides[1].first()
        && let Some(position) = programs::position_of(ctx, record, crossing.group, first)
    {
        let op = ctx.aligned.op(record, position);
        draft.frames = ctx.frames_of(record, op, "last_seen");
    }
    draft.ruled_out = vec![
        "order_mismatch: operation, type and size agree under every one of these numbers"
            .to_owned(),
        "skipped_collective: after these numbers all issue from the same places again".to_owned(),
    ];
    draft.next = format!(
        "give each thread a group of its own, or issue from one thread; if no threads share group {group}, look for a \
         branch that orders the two calls by data"
    );
    draft.at = Some(ctx.op_ref(crossing.group, first));
    draft
}

/// The place from which a rank issued a number, like `train.py:88`, in the frame in which the places differ; empty if
/// unknown.
fn place_of(ctx: &Context<'_>, crossing: &Crossing, seq: u32, record: RecordIx) -> String {
    let position = programs::position_of(ctx, record, crossing.group, seq);
    let frames = position.map(|position| ctx.own_frames(ctx.aligned.op(record, position)));
    let mut frames = frames.into_iter().flatten().map(Context::name_site);
    frames.nth(crossing.depth).unwrap_or_default()
}
