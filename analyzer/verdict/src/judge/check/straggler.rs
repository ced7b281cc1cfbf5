//! W220: a rank, or a whole host, arrives late again and again.
//!
//! Asked only where nothing is stuck. One late arrival is chance and a little lateness is noise: what
//! counts are arrivals so late that they exceed the usual spread, at least [`TIMES`] of them,
//! whose net cost is a share of the job's time worth a warning.

use super::Check;
use crate::align::retiring_is_all;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::lateness::{Lateness, RankLateness};
use crate::report::words::{format_ranks, format_time};
use crate::report::{Code, Severity};
use rcomm_recorder::model::Rank;
use std::collections::BTreeMap;

pub(super) struct Straggler;

/// So many late arrivals are no chance.
const TIMES: usize = 3;
/// Nor are two, where each cost so much and one not much more than the other, ms.
const BOTH_MS: f32 = 50.0;
/// So many times the usual spread is late.
const STANDS_OUT: f64 = 10.0;
/// Less than this is never late, ms.
const LEAST_MS: f64 = 1.0;

impl Check for Straggler {
    fn codes(&self) -> &'static [Code] {
        &[Code::W220]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far
            .iter()
            .any(|draft| draft.code.severity() == Severity::Error)
        {
            return Vec::new();
        }
        let lateness = ctx.lateness;
        if lateness.span_ms <= 0.0 {
            return Vec::new();
        }
        let ranks = lateness.ranks.iter().enumerate();
        let ranks: Vec<FindingDraft> = ranks
            .filter_map(|(record, rank)| late_rank(ctx, lateness, record, rank))
            .collect();
        let hosts = late_hosts(ctx, lateness);
        if hosts.is_empty() { ranks } else { hosts }
    }
}

/// Whether one of a host's ranks bears what the host costs. It makes its host's others late for the rest
/// of the job, and they cost next to nothing; the ranks of a host that is late as a whole share the cost,
/// or bear none of it, where each comes with another of its host.
fn one_bears_it(rank_costs_ms: &[f64], host_cost_ms: f64) -> bool {
    let most = rank_costs_ms.iter().copied().fold(0.0, f64::max);
    let bearers = rank_costs_ms.iter().filter(|&&cost| cost * 2.0 >= most);
    bearers.count() == 1 && most * 10.0 >= host_cost_ms
}

fn late_rank(
    ctx: &Context<'_>,
    lateness: &Lateness,
    record: usize,
    rank: &RankLateness,
) -> Option<FindingDraft> {
    let late = (lateness.usual_ms * STANDS_OUT).max(LEAST_MS);
    let mut outstanding: Vec<f32> = rank
        .lost
        .iter()
        .copied()
        .filter(|&lost| f64::from(lost) > late)
        .collect();
    let share = rank.cost_ms / lateness.span_ms;
    let alike = match outstanding[..] {
        [a, b] => a.min(b) >= BOTH_MS && a.min(b) * 2.0 >= a.max(b),
        _ => outstanding.len() >= TIMES,
    };
    if !alike || share < ctx.policy.straggler_share {
        return None;
    }
    let nth = outstanding.len() / 2;
    let (_, typical, _) = outstanding.select_nth_unstable_by(nth, f32::total_cmp);
    let typical = f64::from(*typical);
    let whole = &ctx.aligned.records[record];
    let by_clock = retiring_is_all(whole.recorder).then(|| {
        let other = ctx
            .aligned
            .records
            .iter()
            .find(|other| other.rank != whole.rank);
        let other = other.map_or(whole.rank, |other| other.rank);
        ([whole.rank, other], (typical * 1e6) as i64)
    });
    let host = if whole.identity.host.is_empty() {
        String::new()
    } else {
        format!(" on host {}", whole.identity.host)
    };
    let sentence = format!(
        "rank {}{host} comes late again and again: {} of {} collectives waited for it, typically {}; that is {} of \
         the job's time",
        whole.rank,
        outstanding.len(),
        rank.instances,
        format_time(typical),
        percent(share),
    );
    let mut draft = FindingDraft::new(Code::W220, sentence);
    draft.confidence = (0.6 + 0.05 * outstanding.len() as f64).min(0.95);
    draft.culprits = vec![whole.rank];
    draft.by_clock = by_clock;
    draft.ruled_out.push(format!(
        "noise: the other ranks of the same collectives come within {:.2} ms of each other",
        lateness.usual_ms
    ));
    if let Some(op) = latest(ctx, record) {
        draft.frames = ctx.frames_of(record, op, "last_seen");
        draft.next = format!(
            "profile what rank {} does before {}{}",
            whole.rank,
            ctx.describe_op(record, op),
            ctx.at_site(op)
        );
        let position = whole.ops.iter().position(|other| std::ptr::eq(other, op));
        let lane = &ctx.aligned.lanes[record][usize::from(op.group)];
        if let Some(position) = position {
            let mut evidence = ctx.evidence(record, position as u32, lane.group);
            evidence.group = Some(ctx.group_ref(lane.group));
            draft.evidence.push(evidence);
        }
    }
    Some(draft)
}

/// The newest collective in which the rank waited least of all it took part in, as an example.
fn latest<'a>(ctx: &'a Context<'_>, record: usize) -> Option<&'a crate::align::record::Op> {
    let ops = &ctx.aligned.records[record].ops;
    // Where it spent the longest time before the call, it was late for the call.
    let pairs = ops
        .windows(2)
        .filter(|pair| pair[1].completed() && !pair[1].kind.is_p2p());
    let gap = |pair: &&[crate::align::record::Op]| {
        let end = pair[0].completed_ns().unwrap_or(pair[0].created_ns);
        pair[1].created_ns.saturating_sub(end)
    };
    pairs.max_by_key(gap).map(|pair| &pair[1])
}

/// A host costs what it was late for as a whole, where several of its ranks met others; and where one
/// met others at a time, what a rank of it costs, if they all cost about the same.
fn late_hosts(ctx: &Context<'_>, lateness: &Lateness) -> Vec<FindingDraft> {
    let late_ms = (lateness.usual_ms * STANDS_OUT).max(LEAST_MS);
    let mut members: BTreeMap<&str, Vec<(Rank, &RankLateness)>> = BTreeMap::new();
    for (record, rank) in ctx.aligned.records.iter().zip(&lateness.ranks) {
        let host = record.identity.host.as_str();
        if !host.is_empty() {
            members.entry(host).or_default().push((record.rank, rank));
        }
    }
    let mut drafts = Vec::new();
    for (host, members) in members {
        let (mut net_ms, mut times) = lateness.hosts.get(host).copied().unwrap_or_default();
        let mut ranks: Vec<Rank> = members.iter().map(|&(rank, _)| rank).collect();
        ranks.dedup();
        let mut apart: Vec<(f64, usize)> = members
            .iter()
            .map(|(_, rank)| {
                let late = rank.lost.iter().filter(|&&lost| f64::from(lost) > late_ms);
                (rank.cost_ms, late.count())
            })
            .collect();
        apart.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let [least, .., most] = apart[..]
            && least.0 * 2.0 >= most.0
            && apart.iter().all(|&(_, late)| late >= TIMES)
        {
            let (cost_ms, late) = apart[apart.len() / 2];
            net_ms = net_ms.max(0.0) + cost_ms;
            times += late;
        }
        let share = net_ms / lateness.span_ms;
        let costs: Vec<f64> = apart.iter().map(|&(cost_ms, _)| cost_ms).collect();
        // Where there is no other host, there is no rank that this one is late for.
        if times < TIMES
            || ranks.len() < 2
            || ranks.len() == ctx.aligned.ranks_read()
            || share < ctx.policy.straggler_share
            || net_ms / times as f64 <= late_ms
            || one_bears_it(&costs, net_ms)
        {
            continue;
        }
        let sentence = format!(
            "all of host {host} comes late again and again ({}): {times} collectives waited for it; that is {} of the \
             job's time",
            format_ranks(&ranks),
            percent(share),
        );
        let mut draft = FindingDraft::new(Code::W220, sentence);
        draft.confidence = 0.85;
        draft.ruled_out.push(format!(
            "one rank alone: all {} ranks of the host are late",
            ranks.len()
        ));
        draft.next = format!("look at host {host}: load, clocks, temperature, its network");
        draft.culprits = ranks;
        drafts.push(draft);
    }
    drafts
}

fn percent(share: f64) -> String {
    format!("{:.1} %", (share * 100.0).min(100.0))
}
