//! Direct exchange: each rank sends its bytes for another rank directly to that rank, all pairs at the same time.
//!
//! A *part* is the share of a reduction that one rank combines. A *segment* is the piece of a part that is exchanged
//! before it is combined, small enough to still be in the cache then. In an all-reduce, the results of one segment are
//! sent together with the contributions to the next.

use crate::channels::{Channels, Transfer};
use crate::collective::part_of;
use crate::collective::{Combination, Data, Inputs, Outputs, Position};
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic;
use std::ops::Range;

/// Bytes of a segment.
const SEGMENT: usize = 256 << 10;

/// The other ranks, starting with the next one, so that not all ranks start with rank 0.
fn others(position: Position) -> impl Iterator<Item = usize> {
    let Position { rank, size, .. } = position;
    (1..size).map(move |step| (rank + step) % size)
}

/// The bytes of segment `index` of `range`; empty if `range` has fewer segments.
fn segment(range: &Range<usize>, index: usize) -> Range<usize> {
    let start = (range.start + index * SEGMENT).min(range.end);
    start..(start + SEGMENT).min(range.end)
}

/// The number of segments of a part of `longest` bytes.
fn segments(longest: usize) -> usize {
    longest.div_ceil(SEGMENT)
}

pub(super) fn all_reduce(
    channels: &mut Channels,
    position: Position,
    data: &mut [u8],
    by: Combination,
    scratch: &mut Vec<u8>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Position { rank, size, .. } = position;
    let len = data.len();
    let parts: Vec<_> = (0..size)
        .map(|rank| part_of(rank, size, len, by.element()))
        .collect();
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    let rounds = segments(longest);
    scratch.resize(SEGMENT.min(longest) * (size - 1), 0);
    // Round r exchanges the contributions to segment r and the results of segment r - 1.
    for round in 0..=rounds {
        let mine = segment(&parts[rank], round);
        {
            let mut transfers = Vec::with_capacity(4 * size);
            let mut rest = &mut scratch[..];
            if round < rounds && !mine.is_empty() {
                for peer in others(position) {
                    let (into, after) = rest.split_at_mut(mine.len());
                    rest = after;
                    transfers.push(Transfer::receive(peer, into));
                }
            }
            // The segment whose results are sent in this round; empty in round 0.
            let previous = |range: &Range<usize>| match round {
                0 => range.start..range.start,
                _ => segment(range, round - 1),
            };
            // The part of each other rank consists of results, then results that arrive in this round, then bytes that
            // this rank still has to send. Of its own part, this rank sends the results of the previous segment.
            let (mut contributions, mut arriving) = (Vec::new(), Vec::new());
            let mut result: &[u8] = &[];
            let mut rest = &mut *data;
            for (peer, range) in parts.iter().enumerate() {
                let (part, after) = rest.split_at_mut(range.len());
                rest = after;
                let local = 0..range.len();
                let arrives = previous(&local);
                let (up_to_results, later) = part.split_at_mut(arrives.end);
                if peer == rank {
                    result = &up_to_results[arrives];
                    continue;
                }
                let new = segment(&local, round);
                let offset = local.len() - later.len();
                contributions.push((peer, &later[new.start - offset..new.end - offset]));
                arriving.push((peer, &mut up_to_results[arrives]));
            }
            for (peer, bytes) in contributions {
                transfers.push(Transfer::send(peer, bytes));
            }
            for (peer, bytes) in arriving {
                transfers.push(Transfer::send(peer, result));
                transfers.push(Transfer::receive(peer, bytes));
            }
            channels.drive(&mut transfers, policy)?;
        }
        if round < rounds && !mine.is_empty() {
            let width = mine.len();
            let inputs = in_order(scratch, width, position);
            arithmetic::combine_in_place(by.op, by.dtype, &mut data[mine], rank, &inputs, None);
        }
    }
    Ok(())
}

/// Returns the other ranks' contributions in order of ranks; in `scratch` they are in the order of [`others`].
fn in_order(scratch: &[u8], width: usize, position: Position) -> Vec<&[u8]> {
    let Position { rank, size, .. } = position;
    (0..size)
        .filter(|&peer| peer != rank)
        .map(|peer| {
            let index = (peer + size - rank) % size - 1;
            &scratch[index * width..(index + 1) * width]
        })
        .collect()
}

pub(super) fn reduce_scatter(
    channels: &mut Channels,
    position: Position,
    inputs: &Inputs<'_>,
    output: &mut [u8],
    by: Combination,
    scratch: &mut Vec<u8>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Position { rank, size, .. } = position;
    let lens: Vec<usize> = (0..size).map(|rank| inputs.part(rank).len()).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    scratch.resize(SEGMENT.min(lens[rank]) * (size - 1), 0);
    for round in 0..segments(longest) {
        let mine = segment(&(0..lens[rank]), round);
        let mut transfers = Vec::with_capacity(2 * size);
        let mut rest = &mut scratch[..];
        for peer in others(position) {
            let (into, after) = rest.split_at_mut(mine.len());
            rest = after;
            let theirs = segment(&(0..lens[peer]), round);
            transfers.push(Transfer::receive(peer, into));
            transfers.push(Transfer::send(peer, &inputs.part(peer)[theirs]));
        }
        channels.drive(&mut transfers, policy)?;
        drop(transfers);
        if mine.is_empty() {
            continue;
        }
        let mut contributions = in_order(scratch, mine.len(), position);
        contributions.insert(rank, &inputs.part(rank)[mine.clone()]);
        arithmetic::combine(by.op, by.dtype, &contributions, &mut output[mine], None);
    }
    Ok(())
}

/// Every rank combines its part; all but the root send it to the root.
pub(super) fn reduce(
    channels: &mut Channels,
    position: Position,
    data: Data<'_>,
    by: Combination,
    root: usize,
    scratch: &mut Vec<u8>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Position { rank, size, .. } = position;
    let len = data.bytes().len();
    let parts: Vec<_> = (0..size)
        .map(|rank| part_of(rank, size, len, by.element()))
        .collect();
    let mut result = vec![0; parts[rank].len()];
    {
        let bytes = data.bytes();
        let inputs = parts.iter().map(|range| &bytes[range.clone()]).collect();
        let inputs = Inputs::List(inputs);
        reduce_scatter(
            channels,
            position,
            &inputs,
            &mut result,
            by,
            scratch,
            policy,
        )?;
    }
    match data {
        Data::Read(_) => channels.drive(&mut [Transfer::send(root, &result)], policy),
        Data::Write(bytes) => {
            let mut transfers = Vec::with_capacity(size);
            let mut rest = bytes;
            for (peer, range) in parts.iter().enumerate() {
                let (part, after) = rest.split_at_mut(range.len());
                rest = after;
                if peer == rank {
                    part.copy_from_slice(&result);
                } else {
                    transfers.push(Transfer::receive(peer, part));
                }
            }
            channels.drive(&mut transfers, policy)
        }
    }
}

pub(super) fn all_gather(
    channels: &mut Channels,
    position: Position,
    input: &[u8],
    mut outputs: Outputs<'_>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let mut transfers: Vec<_> = others(position)
        .map(|peer| Transfer::send(peer, input))
        .collect();
    for (peer, part) in outputs.parts(position.size).into_iter().enumerate() {
        if peer == position.rank {
            part.copy_from_slice(input);
        } else {
            transfers.push(Transfer::receive(peer, part));
        }
    }
    channels.drive(&mut transfers, policy)
}

pub(super) fn all_to_all(
    channels: &mut Channels,
    position: Position,
    inputs: &Inputs<'_>,
    mut outputs: Outputs<'_>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let mut transfers: Vec<_> = others(position)
        .map(|peer| Transfer::send(peer, inputs.part(peer)))
        .collect();
    for (peer, part) in outputs.parts(position.size).into_iter().enumerate() {
        if peer == position.rank {
            part.copy_from_slice(inputs.part(peer));
        } else {
            transfers.push(Transfer::receive(peer, part));
        }
    }
    channels.drive(&mut transfers, policy)
}

pub(super) fn gather(
    channels: &mut Channels,
    position: Position,
    input: &[u8],
    outputs: Option<Outputs<'_>>,
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Some(mut outputs) = outputs else {
        return channels.drive(&mut [Transfer::send(root, input)], policy);
    };
    let mut transfers = Vec::with_capacity(position.size);
    for (peer, part) in outputs.parts(position.size).into_iter().enumerate() {
        if peer == position.rank {
            part.copy_from_slice(input);
        } else {
            transfers.push(Transfer::receive(peer, part));
        }
    }
    channels.drive(&mut transfers, policy)
}

pub(super) fn scatter(
    channels: &mut Channels,
    position: Position,
    inputs: Option<&Inputs<'_>>,
    output: &mut [u8],
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let Some(inputs) = inputs else {
        return channels.drive(&mut [Transfer::receive(root, output)], policy);
    };
    output.copy_from_slice(inputs.part(position.rank));
    let mut transfers: Vec<_> = others(position)
        .map(|peer| Transfer::send(peer, inputs.part(peer)))
        .collect();
    channels.drive(&mut transfers, policy)
}
