//! W240: collectives too small to be worth their latency take a considerable part of the job's time.
//!
//! Small collectives are normal: norms, flags, barriers. They are wasteful if they come in long rows of one operation
//! on one group, which one larger operation could replace, and if the rank spends a considerable share of its time in
//! them. Both are required: a program with only a few small operations is not reported.

use crate::align::record::{Op, Record};
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::{count, format_ranks};
use crate::report::{Code, Severity};
use rcomm_recorder::model::Rank;

pub(crate) struct TinyCollectives;

/// Up to this size, bytes, latency and not bandwidth decides the duration.
pub(super) const TINY: u64 = 16 << 10;
/// A row of at least this many operations counts: it could have been one operation.
const MIN_ROW: usize = 8;
/// A rank with fewer operations in all such rows together is not reported.
const MIN_OPERATIONS: usize = 512;
/// A rank that spends a smaller share of its time in such rows is not reported.
const MIN_SHARE: f64 = 0.1;

/// What one rank spends on rows of small collectives.
struct Waste<'a> {
    rows: usize,
    /// The number of operations in all rows.
    operations: usize,
    /// The share of the rank's time that it spends in them, 0..1.
    share: f64,
    /// What one operation for each row would save, ms; `None` if the backend did not measure how long each operation
    /// took.
    saved_ms: Option<f64>,
    example: &'a Op,
}

impl Check for TinyCollectives {
    fn codes(&self) -> &'static [Code] {
        &[Code::W240]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let is_error = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(is_error) {
            return Vec::new();
        }
        let records = &ctx.aligned.records;
        let shared = ctx.aligned.shared;
        let calls = shared.calls.all().iter();
        let is_tiny: Vec<bool> = calls.map(|call| call.bytes() <= TINY).collect();
        let wastes = shared.map(records.len(), |index| {
            Some((index, waste(&is_tiny, &records[index])?))
        });
        let wasteful: Vec<(usize, Waste<'_>)> = wastes.into_iter().flatten().collect();
        // If fewer than half of the ranks waste time in this way, the others wait for them: W220 reports such ranks.
        if wasteful.len() * 2 < records.len() {
            return Vec::new();
        }
        draft(ctx, &wasteful).into_iter().collect()
    }
}

/// What the rank of a record spends on rows of small collectives; `None` if it is too little to be reported. `is_tiny`:
/// for each call, whether it is small.
fn waste<'a>(is_tiny: &[bool], record: &'a Record) -> Option<Waste<'a>> {
    let tiny = |op: &Op| op.kind.needs_all_members() && op.completed() && is_tiny[op.call as usize];
    let alike = |a: &Op, b: &Op| tiny(a) && tiny(b) && a.kind == b.kind && a.group == b.group;
    let (mut rows, mut operations, mut spent_ms) = (0, 0, 0.0);
    let mut example = None;
    let mut saved_ms = Some(0.0);
    for row in record.ops.chunk_by(alike) {
        if row.len() < MIN_ROW || !tiny(&row[0]) {
            continue;
        }
        rows += 1;
        operations += row.len();
        spent_ms += row
            .iter()
            .filter_map(Op::wait_ms)
            .map(f64::from)
            .sum::<f64>();
        saved_ms = saved_ms.zip(saved_in(row)).map(|(sum, saved)| sum + saved);
        example = example.or(row.first());
    }
    let span = record
        .newest_ns()
        .saturating_sub(record.ops.first()?.created_ns) as f64
        / 1e6;
    // Operations in flight at the same time are each counted in full, so the sum may exceed the span.
    let share = (spent_ms / span).min(1.0);
    (operations >= MIN_OPERATIONS && span > 0.0 && share >= MIN_SHARE).then_some(Waste {
        rows,
        operations,
        share,
        saved_ms,
        example: example?,
    })
}

/// What one operation instead of this row would save, ms. The shortest operation of the row did not wait for a late
/// rank, so its duration is the latency of each. `None` if a duration was not measured.
fn saved_in(row: &[Op]) -> Option<f64> {
    let shortest = row.iter().map(|op| op.duration_ms).reduce(f32::min)?;
    (shortest >= 0.0).then(|| f64::from(shortest) * (row.len() - 1) as f64)
}

/// The finding on these records. Which rank spends most changes from one snapshot to the next, so all are named, and
/// the rank with the lowest number is the example.
fn draft(ctx: &Context<'_>, wasteful: &[(usize, Waste<'_>)]) -> Option<FindingDraft> {
    let rank_of = |record: &usize| ctx.aligned.records[*record].rank;
    let (record, waste) = wasteful.iter().min_by_key(|(record, _)| rank_of(record))?;
    let record = *record;
    let full_record = &ctx.aligned.records[record];
    let lane = &ctx.aligned.lanes[record][usize::from(waste.example.group)];
    let mut ranks: Vec<Rank> = wasteful.iter().map(|(record, _)| rank_of(record)).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let shares = wasteful.iter().map(|(_, waste)| waste.share);
    let least = shares.reduce(f64::min)?;
    let (spend, their, example) = match ranks.len() {
        1 => ("spends", "its", String::new()),
        _ => ("spend", "their", format!("rank {} ", full_record.rank)),
    };
    let mut draft = FindingDraft::new(
        Code::W240,
        format!(
            "{} {spend} {:.0} % of {their} time or more in small collectives that come in rows of one kind: {example}in {} \
             of them in {}, such as {} of {} bytes",
            format_ranks(&ranks),
            least * 100.0,
            waste.operations,
            count(waste.rows as u64, "row"),
            ctx.describe_op(record, waste.example),
            ctx.aligned.shared.calls.get(waste.example.call).bytes(),
        ),
    );
    draft.confidence = 0.8;
    draft.price_ms = waste.saved_ms;
    draft.frames = ctx.frames_of(record, waste.example, "last_seen");
    let position = full_record
        .ops
        .iter()
        .position(|op| std::ptr::eq(op, waste.example));
    if let Some(position) = position {
        let mut evidence = ctx.evidence(record, position as u32, lane.group);
        evidence.group = Some(ctx.group_ref(lane.group));
        draft.evidence.push(evidence);
    }
    let site = ctx.call_site(waste.example);
    let site = site.map(|frame| format!(" at {}", Context::name_site(frame)));
    draft.next = format!(
        "put the operations of a row{} into one: a bucket, or one coalesced call",
        site.unwrap_or_default()
    );
    Some(draft)
}
