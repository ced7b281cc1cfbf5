//! Finds what a rank that others wait for would have done next.
//!
//! A rank that others wait for may be missed at several places: its tensor-parallel peer waits in an all_reduce, the
//! next stage in a receive, all others at the end of the step. The rank left the order of the program at only one of
//! these places. The ranks that continued show which place comes first; if they do not, the earliest wait counts.

use crate::align::event::{self, ProgramEvent};
use crate::align::p2p::peer_of;
use crate::align::{Aligned, RecordIx};
use crate::judge::context::Context;
use crate::judge::program_order::vote;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use std::cmp::Reverse;

/// At most this many places, those with the earliest waits, are compared.
const MAX_PLACES: usize = 24;

/// The place that a rank would have reached first of all those where it is missed, and why it is missing there; `None`
/// if the rank is not missed.
pub(crate) fn first_missed(ctx: &Context<'_>, node: Node) -> Option<(usize, Missing)> {
    let mut places = ctx.missed_at(node);
    // A certain absence takes precedence over a possible one.
    if places.iter().any(|&(_, why)| why != Missing::Candidate) {
        places.retain(|&(_, why)| why != Missing::Candidate);
    }
    // A wait that was too short shows nothing.
    if places.iter().any(|&(place, _)| !ctx.failed_at_once(place)) {
        places.retain(|&(place, _)| !ctx.failed_at_once(place));
    }
    places.sort_by_key(|&(place, _)| (ctx.waiting_since(place).unwrap_or(i64::MAX), place));
    places.truncate(MAX_PLACES);
    let rank = ctx.rank(node);
    let events: Vec<Option<ProgramEvent>> = places
        .iter()
        .map(|&(place, _)| event_for(ctx, place, rank))
        .collect();
    let wins: Vec<i64> = (0..places.len())
        .map(|index| {
            let others = (0..places.len()).filter(|&other| other != index);
            let score = others.map(|other| match (events[index], events[other]) {
                (Some(a), Some(b)) if a != b => {
                    let reference = ctx
                        .record_at(places[index].0, node)
                        .or_else(|| witness(ctx, places[index].0));
                    let votes = reference
                        .map(|reference| vote(ctx.aligned, ctx.messages, reference, a, b))
                        .unwrap_or_default();
                    (votes.first as i64 - votes.second as i64).signum()
                }
                _ => 0,
            });
            score.sum()
        })
        .collect();
    let best = (0..places.len()).max_by_key(|&nth| (wins[nth], Reverse(nth)))?;
    Some(places[best])
}

/// The record of a rank that waits at a place, for use instead of the missing rank's: both ranks are at this point of
/// the program. `None` if no such record covers the group.
fn witness(ctx: &Context<'_>, place: usize) -> Option<RecordIx> {
    ctx.graph.arrived[place]
        .iter()
        .find_map(|&node| ctx.record_at(place, node))
}

/// The operation that `rank` would have to issue at a place; `None` if no record shows it.
pub(crate) fn event_for(ctx: &Context<'_>, place: usize, rank: u32) -> Option<ProgramEvent> {
    let aligned = ctx.aligned;
    match ctx.graph.places[place] {
        Place::Collective { group, seq } => {
            let reference = aligned
                .record_in(group, rank)
                .or_else(|| witness(ctx, place))?;
            Some(event::collective(aligned, reference, group, seq))
        }
        Place::Batch {
            group,
            record,
            pending,
        } => {
            let halves = ctx.halves(record, pending);
            let position = halves
                .iter()
                .map(|half| half.position)
                .find(|&position| peer_rank(aligned, group, record, position) == Some(rank));
            event::other_half(aligned, record, group, position?)
        }
    }
}

/// The rank at the other end of a message; `None` if it is not recorded, or the message is a receive from any source.
pub(crate) fn peer_rank(
    aligned: &Aligned<'_>,
    group: usize,
    record: RecordIx,
    position: u32,
) -> Option<u32> {
    let ranks = &aligned.groups[group].ranks;
    let me = ranks
        .iter()
        .position(|&rank| rank == aligned.records[record].rank)? as u32;
    let peer = peer_of(aligned.op(record, position), me, ranks.len() as u32)?;
    ranks.get(peer as usize).copied()
}

/// The operation that a rank issued at the place where it waits; `None` if it left no record that shows it.
pub(crate) fn event_at(ctx: &Context<'_>, place: usize, rank: u32) -> Option<ProgramEvent> {
    let aligned = ctx.aligned;
    match ctx.graph.places[place] {
        Place::Collective { group, seq } => Some(event::collective(
            aligned,
            aligned.record_in(group, rank)?,
            group,
            seq,
        )),
        Place::Batch {
            group,
            record,
            pending,
        } => event::message(aligned, record, group, ctx.first_of_batch(record, pending)),
    }
}
