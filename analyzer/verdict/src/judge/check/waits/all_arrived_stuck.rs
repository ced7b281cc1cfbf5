//! E135: every member is in the operation, the members' calls agree, and none has finished. E101, if some members came
//! after the time-out of the others: then the members were never in the operation together. E120, if both halves of a
//! message are posted and their tags may differ.
//!
//! In an E135 the program did its part, so the cause is the fabric, a device or the library. The check finds something
//! only if the operation has had time to finish and no other cause was found. A peer that is missing elsewhere, or a
//! member that merely finished first, explains such a wait better.

use super::tags;
use crate::align::pending::on_device;
use crate::align::{Presence, RecordIx, UnknownReason};
use crate::judge::channels::{Common, lag_of, lag_of_messages};
use crate::judge::check::Check;
use crate::judge::check::calls::p2p_size_mismatch::both_ends;
use crate::judge::check::calls::unequal_parts::{SIZES_UNKNOWN, hides_sizes};
use crate::judge::context::{Context, FindingDraft};
use crate::judge::waits::missed::peer_rank;
use crate::judge::waits::wait_graph::{Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::format::{format_ranks, format_time};
use crate::report::{Code, Finding};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

pub(crate) struct AllArrivedStuck;

impl Check for AllArrivedStuck {
    fn codes(&self) -> &'static [Code] {
        &[Code::E101, Code::E120, Code::E135]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let full = ctx
            .wait_roots
            .iter()
            .filter_map(|wait_root| match wait_root {
                &WaitRoot::Full(place) => Some(place),
                _ => None,
            });
        let stuck =
            full.filter(|&place| no_member_finished(ctx, place) && ctx.is_long_complete(place));
        let mut tagged = BTreeSet::new();
        stuck
            .filter_map(|place| match tags::tagged(ctx, place) {
                // Both ends may wait, each at a place of its own.
                Some(ends) => tagged.insert(ends).then(|| tags::draft(ctx, place, ends)),
                None => Some(came_too_late(ctx, place).unwrap_or_else(|| draft(ctx, place))),
            })
            .collect()
    }
}

/// Whether the records show that no member has finished the collective of a place, or that both halves of every message
/// of a batch are posted.
fn no_member_finished(ctx: &Context<'_>, place: usize) -> bool {
    // On the rank of an outdated record, the operation may have finished since. A newer record of a rank that waits in
    // a collective shows that it has not finished on all ranks.
    let outdated = outdated(ctx, inside(ctx, place));
    if outdated.len() == ctx.graph.arrived[place].len() {
        return false;
    }
    let (group, seq) = match ctx.graph.places[place] {
        // Of a group whose members are guessed, a rank without a record may be one that never came.
        Place::Collective { group, .. }
            if !ctx.aligned.groups[group].members_recorded
                && (ctx.aligned.may_have_more
                    || ctx.aligned.ranks_read() < ctx.aligned.expected.len()) =>
        {
            return false;
        }
        Place::Collective { group, seq } => (group, seq),
        // If the ring has dropped the other half of a message, it is not known whether the two met.
        Place::Batch {
            group,
            record,
            pending,
        } => {
            let mut halves = ctx.halves(record, pending).iter();
            return outdated.is_empty()
                && halves.all(|&half| both_ends(ctx, group, record, half).is_some());
        }
    };
    (0..ctx.aligned.groups[group].ranks.len()).all(|member| {
        // An operation that a member's ring has dropped may have completed there, or the member may be in an older one.
        let Presence::Issued(index) = ctx.aligned.presence(group, member, seq) else {
            return false;
        };
        let lane = ctx.aligned.lane(group, member);
        lane.is_none_or(|(record, lane)| !ctx.aligned.status_op(record, lane, index).completed())
    })
}

/// The ranks among these whose records were taken too early: they may have continued since.
fn outdated(ctx: &Context<'_>, ranks: Vec<Rank>) -> Vec<Rank> {
    let is_outdated =
        |record: RecordIx| ctx.aligned.lacks_newest(record) == Some(UnknownReason::Outdated);
    let ranks = ranks.into_iter();
    ranks
        .filter(|&rank| ctx.aligned.records_of(rank).any(is_outdated))
        .collect()
}

/// Whether the records show that all ranks at a place are inside the operation: each rank's lane shows starts, or no
/// device runs the lane's operations.
fn shows_arrival(ctx: &Context<'_>, place: usize) -> bool {
    let group = ctx.group_at(place);
    let shows = |record: RecordIx| {
        let mut lanes = ctx.aligned.lanes[record].iter();
        let lane = lanes.find(|lane| lane.group == group)?;
        let newest = lane.collectives.last().or(lane.messages.last())?;
        let call = ctx.aligned.op(record, *newest).call;
        let backend = &ctx.aligned.shared.calls.get(call).signature.backend;
        let needs_starts = ctx.aligned.records[record].recorder.sees_device() || on_device(backend);
        Some(lane.shows_starts || !needs_starts)
    };
    let mut arrived = ctx.graph.arrived[place].iter();
    arrived.all(|&node| ctx.record_at(place, node).and_then(shows) == Some(true))
}

/// The finding on ranks that issued a collective after the first of their peers had waited for its whole time-out.
/// `None` if there are none, if the first peer has no time-out, if it is not known how the clocks relate, or for a
/// message.
fn came_too_late(ctx: &Context<'_>, place: usize) -> Option<FindingDraft> {
    let Place::Collective { .. } = ctx.graph.places[place] else {
        return None;
    };
    let (first_ns, timeout_ms) = ctx.arrivals(place).min()?;
    let limit_ns = i64::try_from(timeout_ms).ok()?.saturating_mul(1_000_000);
    let nodes = &ctx.graph.arrived[place];
    let knows_clock = |record: RecordIx| ctx.aligned.clock_known[record];
    let all_known = (nodes.iter()).all(|&node| ctx.record_at(place, node).is_some_and(knows_clock));
    if limit_ns == 0 || !all_known {
        return None;
    }
    let late: Vec<(Node, i64)> = (nodes.iter().copied())
        .zip(ctx.arrivals(place))
        .map(|(node, (issued_ns, _))| (node, issued_ns.saturating_sub(first_ns)))
        .filter(|&(_, after_ns)| after_ns > limit_ns)
        .collect();
    let least_ns = late.iter().map(|&(_, after_ns)| after_ns).min()?;
    let op_ref = ctx.op_ref_of_place(place);
    let nodes: Vec<Node> = late.iter().map(|&(node, _)| node).collect();
    let culprits = ctx.ranks(&nodes);
    let which = if culprits.len() == 1 { "its" } else { "their" };
    let sentence = format!(
        "{} issued {} #{} on group {} {} after the first of {which} peers, whose time-out of {} had ended",
        format_ranks(&culprits),
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group),
        format_time(least_ns as f64 / 1e6),
        format_time(timeout_ms as f64),
    );
    let mut draft = FindingDraft::from(Finding::not_joined(culprits, sentence));
    draft.confidence = 0.9;
    draft.evidence = ctx.evidence_of_place(place, 2);
    draft.next = format!(
        "find out what {} did before that {}: a time-out longer than this would have covered it",
        format_ranks(&draft.culprits),
        op_ref.op
    );
    draft.targets = nodes;
    draft.at = Some(op_ref);
    Some(draft)
}

/// The ranks that issued the operation of a place or posted the other halves of its messages, ascending.
fn inside(ctx: &Context<'_>, place: usize) -> Vec<Rank> {
    let mut inside: Vec<Rank> = ctx.ranks(&ctx.graph.arrived[place]);
    if let Place::Batch {
        group,
        record,
        pending,
    } = ctx.graph.places[place]
    {
        // The other halves of all messages are posted.
        let halves = ctx.halves(record, pending).iter();
        inside
            .extend(halves.filter_map(|half| peer_rank(ctx.aligned, group, record, half.position)));
    }
    inside.sort_unstable();
    inside.dedup();
    inside
}

/// The E135 on a place. It names the channel, link or host that lags, where NCCL's records show one.
fn draft(ctx: &Context<'_>, place: usize) -> FindingDraft {
    let op_ref = ctx.op_ref_of_place(place);
    let inside = inside(ctx, place);
    let waited = ctx
        .waited_ms(place)
        .map_or(String::new(), |ms| format!(" after {}", format_time(ms)));
    let lag = match ctx.graph.places[place] {
        Place::Collective { group, seq } => lag_of(ctx, group, seq),
        Place::Batch {
            group,
            record,
            pending,
        } => {
            let halves = ctx.halves(record, pending).iter();
            let ends = halves.filter_map(|&half| both_ends(ctx, group, record, half));
            let ends = ends.flat_map(|(from, send, to, receive)| {
                [(from, send.position), (to, receive.position)]
            });
            lag_of_messages(ctx, group, &ends.collect())
        }
    };
    let host_of = |rank| {
        let record = ctx.aligned.record_of(rank)?;
        let host = &ctx.aligned.records[record].identity.host;
        (!host.is_empty()).then(|| host.clone())
    };
    let why = lag.as_ref().and_then(|lag| lag.describe(host_of));
    let hides_sizes = match ctx.graph.places[place] {
        Place::Collective { group, seq } => hides_sizes(ctx, group, seq),
        Place::Batch { .. } => false,
    };
    let unknown = match hides_sizes {
        true => "the fabric, a device, the library, or split sizes that do not fit",
        false => "the fabric, a device or the library",
    };
    let why = why.unwrap_or_else(|| unknown.to_owned());
    // A lag is measured in the operation itself.
    let is_inside = lag.is_some() || shows_arrival(ctx, place);
    let are = match (is_inside, inside.len() == 1) {
        (true, true) => "is inside",
        (true, false) => "are all inside",
        (false, true) => "has issued",
        (false, false) => "have all issued",
    };
    let outdated = outdated(ctx, inside.clone());
    let has = match outdated.is_empty() {
        true => "has",
        false => "is known to have",
    };
    let sentence = format!(
        "{} {are} {} #{} on group {} and none {has} finished{waited}: {why}",
        format_ranks(&inside),
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group)
    );
    let mut draft = FindingDraft::new(Code::E135, sentence);
    draft.age_ms = ctx.waits_ms(place);
    let names_link =
        (lag.as_ref()).is_some_and(|lag| lag.link.is_some() || lag.common(host_of).is_some());
    draft.confidence = match (names_link, is_inside) {
        (true, _) => 0.85,
        (false, true) => 0.7,
        (false, false) => 0.6,
    };
    draft.evidence = ctx.evidence_of_place(place, 2);
    let posted = match ctx.graph.places[place] {
        Place::Collective { .. } => "not_joined: every member has issued it",
        Place::Batch { .. } => "p2p_unmatched: both halves of every message are posted",
    };
    if is_inside {
        draft.ruled_out.push(posted.to_owned());
    } else {
        draft.doubts.push(
            "the records hold no start times, so the device of one of them may not have come to it"
                .to_owned(),
        );
    }
    if !outdated.is_empty() {
        let (records, were, they) = match outdated.len() {
            1 => ("record", "was", "it"),
            _ => ("records", "were", "they"),
        };
        draft.doubts.push(format!(
            "the {records} of {} {were} taken before those of others, and {they} may have finished since",
            format_ranks(&outdated)
        ));
    }
    if hides_sizes {
        draft.confidence = draft.confidence.min(SIZES_UNKNOWN);
        draft.doubts.push(
            "the sizes that each pair of ranks exchanges there are not recorded: they may not fit"
                .to_owned(),
        );
    }
    let agree = match hides_sizes {
        true => "op_mismatch, dtype_mismatch: operation and type agree",
        false => "op_mismatch, dtype_mismatch, size_mismatch: the calls agree",
    };
    draft.ruled_out.push(agree.to_owned());
    let needs_steps = lag.as_ref().is_some_and(|lag| lag.needs_steps());
    draft
        .doubts
        .extend(lag.as_ref().and_then(|lag| lag.doubt()));
    let common = lag.as_ref().and_then(|lag| lag.common(host_of));
    draft.next = match (common, lag.and_then(|lag| lag.link)) {
        (Some((_, Common::From(rank) | Common::To(rank))), _) => {
            format!("look at the network card of rank {rank}, its cable and its switch port")
        }
        (Some((_, Common::FromHost(host) | Common::ToHost(host))), _) => {
            format!("look at the network of host {host}: its cards, cables and switch ports")
        }
        (None, Some(link)) => format!(
            "look at the path from rank {} to rank {}: their network cards, cables and switch ports",
            link.from, link.to
        ),
        (None, None) => format!(
            "look at links and devices of {}: errors of the network cards, of the switches, of the GPUs",
            format_ranks(&inside)
        ),
    };
    if needs_steps {
        draft.next.push_str(
            "; the plug-in recorded no steps of the transfers: with RCOMM_NCCL_EVENTS=steps, the next such hang \
             is reported with the rank that does not send or receive",
        );
    }
    draft.targets = vec![place + ctx.graph.ranks];
    draft.at = Some(op_ref);
    draft
}
