//! W220: a rank or a whole host repeatedly arrives late. N306: ranks take turns at being late, or wait for processors.
//!
//! Reports nothing if there is an error. [`Lateness`] has found which ranks are late and what that costs.

use crate::align::retiring_is_all;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::lateness::{ERROR_RATE, Late, Lateness, Pattern, Starved, percentile};
use crate::report::format::{format_lateness, format_percent, format_ranks, grouped};
use crate::report::{Code, Problem, Severity};
use rcomm_recorder::model::Rank;

pub(crate) struct Straggler;

impl Check for Straggler {
    fn codes(&self) -> &'static [Code] {
        &[Code::W220]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if has_errors(so_far) {
            return Vec::new();
        }
        match &ctx.lateness.pattern {
            Pattern::Ranks(late) => late.iter().map(|late| late_rank(ctx, late)).collect(),
            Pattern::Hosts(late) => late.iter().map(|late| late_host(ctx, late)).collect(),
            Pattern::ByTurns | Pattern::Starved(_) | Pattern::None => Vec::new(),
        }
    }
}

/// Whether an error was found: then the time that the job lost before does not matter.
fn has_errors(drafts: &[FindingDraft]) -> bool {
    let mut drafts = drafts.iter();
    drafts.any(|draft| draft.code.severity() == Severity::Error)
}

/// N306 if ranks take turns at being late, or come late because they wait for a processor; else `None`.
pub(crate) fn note_jitter(ctx: &Context<'_>) -> Option<Problem> {
    let sentence = match &ctx.lateness.pattern {
        Pattern::ByTurns => by_turns(ctx.lateness),
        Pattern::Starved(starved) => {
            let each: Vec<String> = starved
                .iter()
                .map(|rank| without_processor(ctx, rank))
                .collect();
            format!(
                "{}: the host has more to run than processors; look at its load, and at how many processors the job \
                may use, not at a rank",
                each.join("; ")
            )
        }
        Pattern::Ranks(_) | Pattern::Hosts(_) | Pattern::None => return None,
    };
    Some(Problem::new(Code::N306, "", sentence))
}

/// A clause on a rank that came late because it waited for a processor.
fn without_processor(ctx: &Context<'_>, starved: &Starved) -> String {
    let full_record = &ctx.aligned.records[starved.record];
    format!(
        "rank {}{} was last most often, which cost {}, but its threads had to wait for a processor for {} in that time",
        full_record.rank,
        on_host(&full_record.identity.host),
        format_lateness(starved.cost_ms),
        format_lateness(starved.waited_ms),
    )
}

/// A part of a sentence, like ` on host a`; empty if the host is not known.
fn on_host(host: &str) -> String {
    match host {
        "" => String::new(),
        host => format!(" on host {host}"),
    }
}

/// The sentence on ranks that take turns at being late.
fn by_turns(lateness: &Lateness) -> String {
    let tally = &lateness.by_rank;
    format!(
        "ranks take turns at being late, which costs {} of the job's time in all: look at the hosts' load and the \
            network, not at one rank; in the {} worst intervals of {}, {} of {} ranks cost most in turn, none in \
            more than half of them",
        format_percent(tally.total_ms() / lateness.span_ms),
        tally.stretches,
        format_lateness(tally.stretch_ms),
        tally.units_at_worst(),
        lateness.ranks_compared,
    )
}

/// Why the lateness is not chance, for `ruled_out`.
fn no_chance(
    late: &Late,
    stretches: usize,
    stretch_ms: f64,
    compared: usize,
    units: &str,
) -> String {
    format!(
        "chance: of the {stretches} intervals of {} in which the job lost most time, it cost most in {}; if the \
        {compared} {units} were alike, that would happen in less than one of {} jobs",
        format_lateness(stretch_ms),
        late.stretches,
        grouped((1.0 / ERROR_RATE).round() as u64)
    )
}

/// The W220 on a late rank.
fn late_rank(ctx: &Context<'_>, late: &Late) -> FindingDraft {
    let lateness = ctx.lateness;
    let record = late.unit;
    let full_record = &ctx.aligned.records[record];
    let of_rank = &lateness.ranks[record];
    let price_ms = lateness.by_rank.price(record);
    let typical = percentile(&of_rank.lost, 0.5).unwrap_or(0.0);
    let host = on_host(&full_record.identity.host);
    // If one long halt makes up most of the price, the sentence says so.
    let dearest_ms = lateness.by_rank.dearest(record);
    let at_once = match dearest_ms * 2.0 > price_ms {
        true => format!(", of which {} at once", format_lateness(dearest_ms)),
        false => String::new(),
    };
    let sentence = format!(
        "rank {}{host} is repeatedly last: it newly delayed {} of {} collectives, typically by {}, in all by \
         {}{at_once}; that is {} of the job's time",
        full_record.rank,
        of_rank.lost.len(),
        of_rank.instances,
        format_lateness(typical),
        format_lateness(price_ms),
        format_percent(price_ms / lateness.span_ms),
    );
    let mut draft = FindingDraft::new(Code::W220, sentence);
    draft.confidence = (0.6 + 0.05 * of_rank.lost.len() as f64).min(0.95);
    draft.culprits = vec![full_record.rank];
    draft.price_ms = Some(price_ms);
    draft.by_clock = by_clock(ctx, record, typical);
    draft.ruled_out = ruled_out(lateness, late);
    if let Some(op) = after_longest_gap(ctx, record) {
        draft.frames = ctx.frames_of(record, op, "last_seen");
        draft.next = format!(
            "profile what rank {} does before {}{}",
            full_record.rank,
            ctx.describe_op(record, op),
            ctx.at_site(op)
        );
        let position = full_record
            .ops
            .iter()
            .position(|other| std::ptr::eq(other, op));
        let lane = &ctx.aligned.lanes[record][usize::from(op.group)];
        if let Some(position) = position {
            let mut evidence = ctx.evidence(record, position as u32, lane.group);
            evidence.group = Some(ctx.group_ref(lane.group));
            draft.evidence.push(evidence);
        }
    }
    draft
}

/// The late rank, another rank, and the typical gap, ns, if the finding rests on clocks alone: the recorder has neither
/// durations nor completions. Else `None`.
fn by_clock(ctx: &Context<'_>, record: usize, typical_ms: f64) -> Option<([Rank; 2], i64)> {
    let full_record = &ctx.aligned.records[record];
    let mut records = ctx.aligned.records.iter();
    let other = records.find(|other| other.rank != full_record.rank);
    let other = other.map_or(full_record.rank, |other| other.rank);
    retiring_is_all(full_record.recorder)
        .then_some(([full_record.rank, other], (typical_ms * 1e6) as i64))
}

/// What the finding on a late rank rules out.
fn ruled_out(lateness: &Lateness, late: &Late) -> Vec<String> {
    let tally = &lateness.by_rank;
    let (stretches, stretch_ms) = (tally.stretches, tally.stretch_ms);
    let mut reasons = vec![no_chance(
        late,
        stretches,
        stretch_ms,
        lateness.ranks_compared,
        "ranks",
    )];
    // The noise is unknown if no collective had three ranks that can be compared.
    if let Some(usual) = lateness.usual_ms {
        reasons.push(format!(
            "noise: the second and the third last to come are typically {} apart",
            format_lateness(usual)
        ));
    }
    reasons
}

/// The completed operation, other than a message, before which the rank spent the longest time outside of operations,
/// as an example; `None` if there is none.
fn after_longest_gap<'a>(
    ctx: &'a Context<'_>,
    record: usize,
) -> Option<&'a crate::align::record::Op> {
    let ops = &ctx.aligned.records[record].ops;
    // The longer the time before the call, the later the rank was.
    let pairs = ops
        .windows(2)
        .filter(|pair| pair[1].completed() && !pair[1].kind.is_p2p());
    let gap = |pair: &&[crate::align::record::Op]| {
        let end = pair[0].completed_ns().unwrap_or(pair[0].created_ns);
        pair[1].created_ns.saturating_sub(end)
    };
    pairs.max_by_key(gap).map(|pair| &pair[1])
}

/// The W220 on a late host.
fn late_host(ctx: &Context<'_>, late: &Late) -> FindingDraft {
    let lateness = ctx.lateness;
    let host = lateness.hosts.name(late.unit);
    let ranks = lateness.hosts.ranks(late.unit).to_vec();
    let tally = &lateness.by_host;
    let price_ms = tally.price(late.unit);
    let sentence = format!(
        "the ranks of host {host} are repeatedly last ({}): they newly delayed {} collectives, in all by {}; that is \
         {} of the job's time",
        format_ranks(&ranks),
        lateness.host_losses[&late.unit],
        format_lateness(price_ms),
        format_percent(price_ms / lateness.span_ms),
    );
    let mut draft = FindingDraft::new(Code::W220, sentence);
    draft.confidence = 0.85;
    draft.price_ms = Some(price_ms);
    let (stretches, hosts) = (tally.stretches, lateness.hosts.count());
    draft.ruled_out = vec![
        no_chance(late, stretches, tally.stretch_ms, hosts, "hosts"),
        format!(
            "one rank alone: none of the host's {} ranks bears most of it",
            ranks.len()
        ),
    ];
    draft.next = format!("look at host {host}: load, clocks, temperature, its network");
    draft.culprits = ranks;
    draft
}
