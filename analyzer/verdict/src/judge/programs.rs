//! Compares the programs of two ranks from where they first differ.

use crate::align::record::Op;
use crate::align::{GroupIx, RecordIx};
use crate::judge::context::Context;
use crate::report::format::{format_ranks, is_undescribed};
use rcomm_recorder::model::{OpType, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// The number of common steps shown before the first difference.
const BEFORE: usize = 1;
/// The number of steps of each program shown from the first difference on.
const AFTER: usize = 4;
/// The number of common steps shown before the first difference, for programs over all groups.
const BEFORE_IN_ALL: usize = 2;
/// The number of steps of each program shown from the first difference on, for programs over all groups.
const AFTER_IN_ALL: usize = 6;

/// The ranks of these records, which issued `call` under number `seq`: one line for each call site and its caller,
/// since the call itself is often in a wrapper that all share.
pub(crate) fn sites(
    ctx: &Context<'_>,
    group: GroupIx,
    seq: u32,
    records: &[RecordIx],
    call: u32,
) -> Vec<String> {
    let mut by_site: BTreeMap<Option<String>, Vec<Rank>> = BTreeMap::new();
    for &record in records {
        let position = position_of(ctx, record, group, seq);
        let frames = position.map(|position| ctx.own_frames(ctx.aligned.op(record, position)));
        let mut frames = frames.into_iter().flatten();
        let site = frames.next().map(|frame| {
            let called = frames.next();
            let called = called.map(|frame| format!(", called from {}", Context::name_site(frame)));
            format!(
                "{}{}",
                Context::name_site(frame),
                called.unwrap_or_default()
            )
        });
        let ranks = by_site.entry(site).or_default();
        ranks.push(ctx.aligned.records[record].rank);
    }
    let described = ctx.aligned.shared.calls.get(call).describe();
    let line = |(site, mut ranks): (Option<String>, Vec<Rank>)| {
        ranks.sort_unstable();
        let site = site.map_or(String::new(), |site| format!(" at {site}"));
        format!("{}: {described} #{seq}{site}", format_ranks(&ranks))
    };
    by_site.into_iter().map(line).collect()
}

/// The call site of a collective in parentheses, like ` (train.py:88)`; empty if it was not recorded.
pub(crate) fn at_site(ctx: &Context<'_>, group: GroupIx, seq: u32, record: RecordIx) -> String {
    let position = position_of(ctx, record, group, seq);
    position.map_or(String::new(), |position| {
        ctx.at_site(ctx.aligned.op(record, position))
    })
}

/// The steps of two ranks in a group from just before number `seq` on, as a unified diff: a line begins with ` ` for a
/// step of both, `-` for one of `usual` only, `+` for one of `odd` only.
pub(crate) fn next_steps(
    ctx: &Context<'_>,
    group: GroupIx,
    seq: u32,
    usual: RecordIx,
    odd: RecordIx,
) -> Vec<String> {
    let rank = |record: RecordIx| ctx.aligned.records[record].rank;
    let mut lines = vec![
        format!("--- rank {}", rank(usual)),
        format!("+++ rank {}", rank(odd)),
    ];
    let (usual, odd) = (steps(ctx, usual, group, seq), steps(ctx, odd, group, seq));
    lines.extend(difference(ctx, (&[], &usual), (&[], &odd)));
    lines
}

/// A point in the program of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) record: RecordIx,
    /// Position in the record's operations.
    pub(crate) position: u32,
}

/// The steps of two ranks in all their groups from just before these points on, in order of issue, as a diff like that
/// of [`next_steps`]. `usual` and `odd` are the ranks whose programs these are.
pub(crate) fn orders(
    ctx: &Context<'_>,
    (usual, first): (&[Rank], Point),
    (odd, second): (&[Rank], Point),
) -> Vec<String> {
    let mut lines = vec![
        format!("--- {}", format_ranks(usual)),
        format!("+++ {}", format_ranks(odd)),
    ];
    let (first, second) = (steps_in_all(ctx, first), steps_in_all(ctx, second));
    lines.extend(difference(ctx, (usual, &first), (odd, &second)));
    lines
}

/// Whether two ranks issued the same operations over all groups around these points and after them.
pub(crate) fn same_order(ctx: &Context<'_>, one: Point, other: Point) -> bool {
    let (one, other) = (steps_in_all(ctx, one), steps_in_all(ctx, other));
    let (one, other) = (one.steps, other.steps);
    one.len() == other.len() && one.iter().zip(&other).all(|(a, b)| is_same_step(ctx, a, b))
}

/// A stretch of the steps of a rank's program.
struct Excerpt {
    steps: Vec<ProgramStep>,
    /// Whether the record shows more steps after these.
    goes_on: bool,
}

/// One operation of a rank's program.
struct ProgramStep {
    /// The family of the operation's group.
    family: u32,
    kind: OpType,
    call: u32,
    /// The call without its group: `all_reduce #7`.
    call_text: String,
    /// The call without the parts that may differ between ranks that do the same: `all_reduce`.
    common: String,
    /// The place in the source, like ` (train.py:61)`.
    site: String,
    group: GroupIx,
    /// Whether the text names the group.
    names_group: bool,
}

impl ProgramStep {
    /// The step as text, on these groups.
    fn text(&self, ctx: &Context<'_>, groups: &BTreeSet<GroupIx>) -> String {
        format!(
            "{}{}{}",
            self.call_text,
            self.group_text(ctx, groups),
            self.site
        )
    }

    /// The step as text, if the same step of another rank has another number or call site.
    fn common_text(&self, ctx: &Context<'_>, groups: &BTreeSet<GroupIx>) -> String {
        match self.names_group {
            true => format!("{}{}", self.common, self.group_text(ctx, groups)),
            false => format!("{}{}", self.common, self.site),
        }
    }

    /// The end of the text, like ` on group dp`; empty if the text names no group.
    fn group_text(&self, ctx: &Context<'_>, groups: &BTreeSet<GroupIx>) -> String {
        match (self.names_group, groups.len()) {
            (false, _) => String::new(),
            (true, ..=1) => format!(" on group {}", ctx.group_name(self.group)),
            (true, _) => {
                let groups: Vec<_> = groups.iter().map(|&group| ctx.group_ref(group)).collect();
                // Numbers alone could be taken for one name.
                let plural = if groups.iter().all(is_undescribed) {
                    "s"
                } else {
                    ""
                };
                format!(" on group{plural} {}", ctx.names.fold(&groups))
            }
        }
    }

    /// The groups of the step's family that these ranks have; only the step's own if no rank is given.
    fn groups_of(&self, ctx: &Context<'_>, ranks: &[Rank]) -> BTreeSet<GroupIx> {
        let mut groups = BTreeSet::from([self.group]);
        for record in ranks.iter().filter_map(|&rank| ctx.aligned.record_of(rank)) {
            let used = ctx.aligned.lanes[record].iter().map(|lane| lane.group);
            groups.extend(used.filter(|&group| ctx.aligned.groups[group].family == self.family));
        }
        groups
    }
}

/// Whether two ranks do the same in these steps.
fn is_same_step(ctx: &Context<'_>, a: &ProgramStep, b: &ProgramStep) -> bool {
    let calls = &ctx.aligned.shared.calls;
    a.family == b.family
        && match a.kind.is_p2p() {
            // The peers differ from rank to rank.
            true => a.kind == b.kind,
            false => calls.difference(a.call, b.call).is_none(),
        }
}

/// The lines of the diff of two excerpts, each of the program of these ranks.
fn difference(
    ctx: &Context<'_>,
    (usual_ranks, usual): (&[Rank], &Excerpt),
    (odd_ranks, odd): (&[Rank], &Excerpt),
) -> Vec<String> {
    let ends = |excerpt: &Excerpt, at: usize| at == excerpt.steps.len() && excerpt.goes_on;
    let cut = |a: usize, b: usize| ends(usual, a) || ends(odd, b);
    let (usual, odd) = (usual.steps.as_slice(), odd.steps.as_slice());
    // `common[a][b]` is the length of the longest common subsequence of `usual[a..]` and `odd[b..]`.
    let mut common = vec![vec![0u8; odd.len() + 1]; usual.len() + 1];
    for a in (0..usual.len()).rev() {
        for b in (0..odd.len()).rev() {
            common[a][b] = if is_same_step(ctx, &usual[a], &odd[b]) {
                common[a + 1][b + 1] + 1
            } else {
                common[a + 1][b].max(common[a][b + 1])
            };
        }
    }
    let mut lines = Vec::new();
    let (mut a, mut b) = (0, 0);
    // The diff ends where an excerpt was cut off: the next step of the other may come in this program, too.
    while (a < usual.len() || b < odd.len()) && !cut(a, b) {
        if a < usual.len() && b < odd.len() && is_same_step(ctx, &usual[a], &odd[b]) {
            let (step, other) = (&usual[a], &odd[b]);
            let mut groups = step.groups_of(ctx, usual_ranks);
            groups.extend(other.groups_of(ctx, odd_ranks));
            let text = match (&step.call_text, &step.site) == (&other.call_text, &other.site) {
                true => step.text(ctx, &groups),
                false => step.common_text(ctx, &groups),
            };
            lines.push(format!("  {text}"));
            (a, b) = (a + 1, b + 1);
        } else if b == odd.len() || (a < usual.len() && common[a + 1][b] >= common[a][b + 1]) {
            lines.push(format!(
                "- {}",
                distinct_text(ctx, &usual[a], usual_ranks, odd)
            ));
            a += 1;
        } else {
            lines.push(format!(
                "+ {}",
                distinct_text(ctx, &odd[b], odd_ranks, usual)
            ));
            b += 1;
        }
    }
    lines
}

/// The text of a step of these ranks. If a step of the other program reads alike but is not the same, size and members
/// are added.
fn distinct_text(
    ctx: &Context<'_>,
    step: &ProgramStep,
    ranks: &[Rank],
    others: &[ProgramStep],
) -> String {
    let text = step.text(ctx, &step.groups_of(ctx, ranks));
    let groups = &ctx.aligned.groups;
    let twin = |other: &ProgramStep| {
        (&other.call_text, &other.site) == (&step.call_text, &step.site)
            && groups[other.group].desc == groups[step.group].desc
            && !is_same_step(ctx, step, other)
    };
    if !others.iter().any(twin) {
        return text;
    }
    let members = format_ranks(&groups[step.group].ranks);
    let call = ctx.aligned.shared.calls.get(step.call);
    let elements = call.signature.input_elements();
    format!("{text}, {elements} elements, group of {members}")
}

/// The steps of a record in a group from just before number `seq` on; empty if the record does not hold that number.
fn steps(ctx: &Context<'_>, record: RecordIx, group: GroupIx, seq: u32) -> Excerpt {
    let mut lanes = ctx.aligned.lanes[record].iter();
    let lane = lanes.find(|lane| lane.group == group);
    let found = lane.and_then(|lane| Some((lane, ctx.aligned.find(record, lane, seq).ok()?)));
    let Some((lane, index)) = found else {
        return Excerpt {
            steps: Vec::new(),
            goes_on: false,
        };
    };
    let shown = lane.collectives[index.saturating_sub(BEFORE)..].iter();
    let length = index.min(BEFORE) + AFTER;
    let goes_on = shown.len() > length;
    let steps = shown
        .take(length)
        .map(|&position| {
            let op = ctx.aligned.op(record, position);
            let described = ctx.aligned.shared.calls.get(op.call).describe();
            let (seq, site) = (ctx.recorded_seq(group, op.seq), ctx.at_site(op));
            ProgramStep {
                family: ctx.aligned.groups[group].family,
                kind: op.kind,
                call: op.call,
                // Without the number, a call that only moved reads alike on both sides.
                call_text: format!("{described} #{seq}"),
                common: described,
                site,
                group,
                names_group: false,
            }
        })
        .collect();
    Excerpt { steps, goes_on }
}

/// The steps of a record in all groups from just before this point on.
fn steps_in_all(ctx: &Context<'_>, point: Point) -> Excerpt {
    let Point { record, position } = point;
    let lanes = &ctx.aligned.lanes[record];
    let step = |op: &Op| {
        let group = lanes[usize::from(op.group)].group;
        let name = ctx.aligned.shared.calls.get(op.call).op_name();
        ProgramStep {
            family: ctx.aligned.groups[group].family,
            kind: op.kind,
            call: op.call,
            call_text: ctx.describe_call(record, op),
            common: name.to_owned(),
            site: ctx.at_site(op),
            group,
            names_group: true,
        }
    };
    let is_step = |op: &&Op| op.kind != OpType::Coalesced;
    let ops = &ctx.aligned.records[record].ops;
    let (before, after) = ops.split_at((position as usize).min(ops.len()));
    let before = before.iter().rev().filter(is_step).take(BEFORE_IN_ALL);
    let mut steps: Vec<ProgramStep> = before.map(step).collect();
    steps.reverse();
    let mut after = after.iter().filter(is_step);
    steps.extend(after.by_ref().take(AFTER_IN_ALL).map(step));
    let goes_on = after.next().is_some();
    Excerpt { steps, goes_on }
}

/// The position of a collective of a group in a record; `None` if the record does not hold it.
pub(crate) fn position_of(
    ctx: &Context<'_>,
    record: RecordIx,
    group: GroupIx,
    seq: u32,
) -> Option<u32> {
    let lane = ctx.aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group)?;
    let index = ctx.aligned.find(record, lane, seq).ok()?;
    Some(lane.collectives[index])
}
