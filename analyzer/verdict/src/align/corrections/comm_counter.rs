//! Sequence numbers for a recorder that has a single counter for all operations.
//!
//! torchcomms numbers all operations of a process together, sends and receives of all communicators included, so its
//! `collective_seq_id` does not identify a collective across ranks. Here the collectives of each communicator in a
//! record, its lane, are counted separately. If the ring has wrapped, the count starts at an unknown number. Such a
//! lane is aligned with a peer's by the newest completed collectives, and moved a few places if fewer calls differ
//! there.

use crate::align::record::Record;
use crate::align::shared::Shared;
use rcomm_recorder::publish::Recorder;
use std::collections::BTreeMap;

/// Shifts are tried that differ by at most this much from the one that gives the newest completed operations of both
/// lanes the same number. Of shifts that fit equally well, the one nearest to that counts.
const REACH: i64 = 4;
/// A shift is judged by at most this many of the newest operations.
const DEPTH: usize = 256;

/// Rewrites the sequence numbers of torchcomms' records. The recorded number goes to `p2p_seq`, which that recorder
/// leaves at 0.
pub(crate) fn number_by_communicator(shared: &Shared, records: &mut [Record]) {
    let mut lanes: BTreeMap<u32, Vec<Counted>> = BTreeMap::new();
    for (index, record) in records.iter_mut().enumerate() {
        if record.recorder != Recorder::Torchcomms {
            continue;
        }
        let mut counted: Vec<Counted> = record
            .groups
            .iter()
            .map(|_| Counted {
                record: index,
                complete: !record.wrapped(),
                ..Counted::default()
            })
            .collect();
        for (position, op) in record.ops.iter_mut().enumerate() {
            op.p2p_seq = op.seq;
            if op.kind.is_p2p() {
                continue;
            }
            let lane = &mut counted[usize::from(op.group)];
            lane.positions.push(position);
            if op.completed() {
                lane.completed = lane.positions.len();
            }
        }
        for (lane, local) in counted.into_iter().zip(&record.groups) {
            lanes.entry(local.group).or_default().push(lane);
        }
    }
    for lanes in lanes.values_mut() {
        number(shared, records, lanes);
    }
}

/// The collectives of one communicator in one record.
#[derive(Default)]
struct Counted {
    record: usize,
    positions: Vec<usize>,
    /// The number of positions up to and including the newest completed one.
    completed: usize,
    /// Whether the ring has dropped nothing, so that the count starts at 1.
    complete: bool,
}

/// Numbers the collectives of one communicator, whose lanes are those of all records.
fn number(shared: &Shared, records: &mut [Record], lanes: &mut [Counted]) {
    // The reference is the longest complete lane, else the longest of all.
    let best = lanes.iter().enumerate().max_by_key(|(index, lane)| {
        (
            lane.complete,
            lane.positions.len(),
            std::cmp::Reverse(*index),
        )
    });
    let Some((reference, _)) = best else { return };
    let bases: Vec<i64> = lanes
        .iter()
        .map(|lane| {
            if lane.complete || std::ptr::eq(lane, &lanes[reference]) {
                1
            } else {
                1 + fit(shared, records, lane, &lanes[reference])
            }
        })
        .collect();
    // A lane may begin before the reference: shift all numbers to keep them positive.
    let lift = 1 - bases.iter().copied().min().unwrap_or(1).min(1);
    for (lane, base) in lanes.iter().zip(bases) {
        for (n, &position) in lane.positions.iter().enumerate() {
            let seq = base + lift + n as i64;
            records[lane.record].ops[position].seq = u32::try_from(seq).unwrap_or(u32::MAX);
        }
    }
}

/// The index in the reference of the lane's first operation; negative if it is older than the reference's first.
fn fit(shared: &Shared, records: &[Record], lane: &Counted, reference: &Counted) -> i64 {
    let newest = reference.completed as i64 - lane.completed as i64;
    let call = |lane: &Counted, index: usize| records[lane.record].ops[lane.positions[index]].call;
    let misfits = |shift: i64| {
        let overlap = lane.positions.len().min(DEPTH);
        let from = lane.positions.len() - overlap;
        (from..lane.positions.len())
            .filter(|&index| {
                let counterpart = usize::try_from(index as i64 + shift).ok();
                counterpart
                    .filter(|&counterpart| counterpart < reference.positions.len())
                    .is_some_and(|counterpart| {
                        shared
                            .calls
                            .difference(call(lane, index), call(reference, counterpart))
                            .is_some()
                    })
            })
            .count()
    };
    (-REACH..=REACH)
        .map(|step| (misfits(newest + step), step.abs(), step))
        .min()
        .map_or(newest, |(_, _, step)| newest + step)
}
