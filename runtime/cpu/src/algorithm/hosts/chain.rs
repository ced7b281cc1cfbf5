//! Reductions along a chain of hosts: each host receives the combined data of the hosts before it, and
//! combines the data of its ranks with it.
//!
//! The data is processed in *blocks*. Every rank that has a stripe of a block forwards it in *chunks*: the slots of one
//! phase hold a chunk of each stripe. In one phase the ranks of a host show each other the inputs of a chunk. While a
//! host combines a chunk, the host before it combines the next one. On the last host the stripe is complete. A reduce
//! sends it from there to the root, and a reduce_scatter sends each rank its part. An all_reduce sends it back to the
//! first host; each host forwards the bytes as they arrive, and the ranks of each host put their stripes together.
//!
//! Two ranks cannot wait for each other. In the phases of a block, bytes flow only from each host to the next, which
//! receives the bytes of a phase as soon as it reaches that phase. Results are sent between phases: a rank enters the
//! next phase only when it has its results and has sent on those that it forwards.

use super::HostTransports;
use crate::channels::Transfer;
use crate::collective::part_of;
use crate::collective::{Combination, Data, Inputs, Position};
use crate::transport::shm::SLOT;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::{Partial, copy};
use std::ops::Range;

/// Maximum size of a block in bytes: large enough to hide the latency of the chain of hosts, and small enough to stay
/// in a last-level cache until it is complete.
const BLOCK: usize = 8 << 20;

/// The memory that reductions along the hosts reuse.
#[derive(Default)]
pub(super) struct Chain {
    /// The partial result of a chunk, as the host before sends it.
    before: Vec<u8>,
    /// The partial result with the data of this host's ranks.
    after: Vec<u8>,
    /// Inputs that were widened to `f32`.
    wide: Vec<u8>,
    /// Complete results, on the last host.
    results: Vec<u8>,
}

/// The division of a slot: `len` bytes for each stripe, which hold one chunk of it.
#[derive(Clone, Copy)]
struct ChunkLayout {
    stripes: usize,
    len: usize,
}

impl ChunkLayout {
    fn new(stripes: usize, longest: usize) -> Self {
        // Whole cache lines of 64 bytes.
        let max_len = (SLOT / stripes) & !63;
        Self {
            stripes,
            len: max_len.min(longest.next_multiple_of(64)).max(64),
        }
    }

    fn chunks(self, longest: usize) -> impl Iterator<Item = Range<usize>> {
        (0..longest.div_ceil(self.len)).map(move |chunk| chunk * self.len..(chunk + 1) * self.len)
    }

    fn offset(self, stripe: usize) -> usize {
        stripe * self.len
    }

    fn used(self) -> usize {
        self.stripes * self.len
    }
}

/// Limits `range` to the bytes of a part of this length.
fn clip(range: &Range<usize>, len: usize) -> Range<usize> {
    range.start.min(len)..range.end.min(len)
}

/// Size of a block in bytes: whole elements.
fn block_len(by: Combination) -> usize {
    BLOCK / by.element() * by.element()
}

impl Chain {
    pub(super) fn all_reduce(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        data: &mut [u8],
        by: Combination,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let index = via.layout.index_on_host();
        for block in data.chunks_mut(block_len(by)) {
            let stripes = stripes(via, block.len(), by);
            self.fold_block(via, position, block, &stripes, by, policy)?;
            if let Some(mine) = stripes.get(index).cloned() {
                if is_last(via) {
                    block[mine.clone()].copy_from_slice(&self.results);
                }
                send_back(via, &mut block[mine], policy)?;
            }
            put_together(via, block, &stripes, policy)?;
        }
        Ok(())
    }

    /// Works like `all_reduce`, but the last host sends the results to the root only.
    pub(super) fn reduce(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        mut data: Data<'_>,
        by: Combination,
        root: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let index = via.layout.index_on_host();
        let last = via.layout.hosts() - 1;
        let (len, step) = (data.bytes().len(), block_len(by));
        for start in (0..len).step_by(step) {
            let range = start..len.min(start + step);
            let stripes = stripes(via, range.len(), by);
            let block = &data.bytes()[range.clone()];
            self.fold_block(via, position, block, &stripes, by, policy)?;
            let mut transfers = Vec::new();
            if is_last(via) && index < stripes.len() && position.rank != root {
                transfers.push(Transfer::send(root, &self.results));
            }
            if let Data::Write(data) = &mut data {
                let mut rest = &mut data[range];
                for (stripe, range) in stripes.iter().enumerate() {
                    let (part, after) = rest.split_at_mut(range.len());
                    rest = after;
                    let from = via.layout.ranks_of(last)[stripe];
                    if from == position.rank {
                        part.copy_from_slice(&self.results);
                    } else {
                        transfers.push(Transfer::receive(from, part));
                    }
                }
            }
            via.channels.drive(&mut transfers, policy)?;
        }
        Ok(())
    }

    /// Combines a block along the hosts; each rank combines its stripe. On the last host the results are in
    /// `results` afterwards, which are empty elsewhere.
    fn fold_block(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        block: &[u8],
        stripes: &[Range<usize>],
        by: Combination,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let inputs: Vec<&[u8]> = stripes.iter().map(|range| &block[range.clone()]).collect();
        self.results.clear();
        self.fold(via, position, &inputs, by, policy)
    }

    /// Combines one part for each stripe along the hosts. On the last host this rank's result is appended
    /// to `results`.
    fn fold(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        inputs: &[&[u8]],
        by: Combination,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let index = via.layout.index_on_host();
        let longest = inputs.iter().map(|input| input.len()).max().unwrap_or(0);
        let layout = ChunkLayout::new(inputs.len(), longest);
        for range in layout.chunks(longest) {
            if via.host_exchange.size() > 1 {
                via.host_exchange.fill(layout.used(), |slot, copier| {
                    let others = inputs.iter().enumerate();
                    for (stripe, input) in others.filter(|(stripe, _)| *stripe != index) {
                        let piece = &input[clip(&range, input.len())];
                        copier.copy(&mut slot[layout.offset(stripe)..][..piece.len()], piece);
                    }
                });
                via.host_exchange
                    .run_agreed_phase(&[], layout.used(), policy)?;
            }
            if let Some(input) = inputs.get(index) {
                let piece = &input[clip(&range, input.len())];
                self.combine_chunk(via, position, piece, layout.offset(index), by, policy)?;
            }
        }
        Ok(())
    }

    /// Processes one chunk of this rank's stripe: receives the combined data of the previous hosts, combines the data
    /// of this host's ranks with it in order, and sends the result to the next host, or keeps it on the last host.
    /// `piece` is this rank's input; the inputs of the others are at `offset` in their slots.
    fn combine_chunk(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        piece: &[u8],
        offset: usize,
        by: Combination,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let (host, stripe) = (via.layout.host(), via.layout.index_on_host());
        let partial = Partial::new(by.op, by.dtype);
        let partial_len = partial.len(piece.len());
        if host > 0 {
            self.before.resize(partial_len, 0);
            let from = via.layout.ranks_of(host - 1)[stripe];
            let mut transfers = [Transfer::receive(from, &mut self.before)];
            via.channels.drive(&mut transfers, policy)?;
        }
        let host_exchange = &*via.host_exchange;
        let inputs = (0..host_exchange.size()).map(|index| match index == stripe {
            true => piece,
            false => &host_exchange.slot(index)[offset..][..piece.len()],
        });
        let inputs: Vec<&[u8]> = inputs.collect();
        let before = (host > 0).then_some(&self.before[..]);
        self.after.resize(partial_len, 0);
        partial.step(before, &inputs, &mut self.after, &mut self.wide);
        if is_last(via) {
            let start = self.results.len();
            self.results.resize(start + piece.len(), 0);
            partial.finish(&mut self.after, position.size, &mut self.results[start..]);
            return Ok(());
        }
        let to = via.layout.ranks_of(host + 1)[stripe];
        let mut transfers = [Transfer::send(to, &self.after)];
        via.channels.drive(&mut transfers, policy)
    }

    /// The part for a rank is combined by the ranks that have the same index on their hosts as that rank (modulo the
    /// number of stripes, on hosts with more ranks than stripes). The last host sends each rank its result.
    pub(super) fn reduce_scatter(
        &mut self,
        via: &mut HostTransports<'_>,
        position: Position,
        inputs: &Inputs<'_>,
        output: &mut [u8],
        by: Combination,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let (layout, index) = (via.layout, via.layout.index_on_host());
        let count = layout.fewest_ranks();
        // For each stripe: the ranks whose parts are combined along it, one in each round.
        let mut items: Vec<Vec<usize>> = vec![Vec::new(); count];
        for rank in 0..position.size {
            items[layout.host_and_index(rank).1 % count].push(rank);
        }
        let rounds = items.iter().map(Vec::len).max().unwrap_or(0);
        let part = |stripe: usize, round: usize| {
            let rank = items[stripe].get(round);
            rank.map_or(&[][..], |&rank| inputs.part(rank))
        };
        let last = layout.hosts() - 1;
        let mine = own_round(&items, position.rank);
        let mut output = Some(output);
        let mut round = 0;
        while round < rounds {
            self.results.clear();
            let first = round;
            let mut folded = 0;
            // Rounds are run together until they give about one block of results.
            while round < rounds && (round == first || folded < BLOCK) {
                let parts: Vec<&[u8]> = (0..count).map(|stripe| part(stripe, round)).collect();
                self.fold(via, position, &parts, by, policy)?;
                folded += parts.iter().map(|part| part.len()).max().unwrap_or(0);
                round += 1;
            }
            let mut transfers = Vec::new();
            if index < count && layout.host() == last {
                let mut rest = &self.results[..];
                for &rank in items[index].iter().take(round).skip(first) {
                    let (part, after) = rest.split_at(inputs.part(rank).len());
                    rest = after;
                    if rank != position.rank {
                        transfers.push(Transfer::send(rank, part));
                    } else if let Some(output) = output.take() {
                        copy(output, part);
                    }
                }
            }
            let from = layout.ranks_of(last)[index % count];
            if (first..round).contains(&mine)
                && from != position.rank
                && let Some(output) = output.take()
            {
                transfers.push(Transfer::receive(from, output));
            }
            via.channels.drive(&mut transfers, policy)?;
        }
        Ok(())
    }
}

/// Returns the round in which this rank's part is combined.
fn own_round(items: &[Vec<usize>], rank: usize) -> usize {
    let found = items
        .iter()
        .find_map(|ranks| ranks.iter().position(|&other| other == rank));
    found.unwrap_or(0)
}

/// Whether this rank is on the last host of the chain.
fn is_last(via: &HostTransports<'_>) -> bool {
    via.layout.host() + 1 == via.layout.hosts()
}

/// The stripes of a block of `len` bytes.
fn stripes(via: &HostTransports<'_>, len: usize, by: Combination) -> Vec<Range<usize>> {
    let count = via.layout.fewest_ranks();
    (0..count)
        .map(|stripe| part_of(stripe, count, len, by.element()))
        .collect()
}

/// Sends the results of this rank's stripe from the last host to the first. Each host forwards them as they arrive.
fn send_back(
    via: &mut HostTransports<'_>,
    stripe: &mut [u8],
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let (layout, host, index) = (via.layout, via.layout.host(), via.layout.index_on_host());
    let peer_on = |host: usize| layout.ranks_of(host)[index];
    let previous = host.checked_sub(1).map(peer_on);
    let transfer = match previous {
        Some(previous) if is_last(via) => Transfer::send(previous, stripe),
        _ => Transfer::relay(peer_on(host + 1), previous, stripe),
    };
    via.channels.drive(&mut [transfer], policy)
}

/// The ranks of a host show each other their stripes of a block, and each copies the other stripes into its `block`.
pub(super) fn put_together(
    via: &mut HostTransports<'_>,
    block: &mut [u8],
    stripes: &[Range<usize>],
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let host_exchange = &mut *via.host_exchange;
    if host_exchange.size() == 1 {
        return Ok(());
    }
    let index = host_exchange.index();
    let longest = stripes.iter().map(Range::len).max().unwrap_or(0);
    for start in (0..longest).step_by(SLOT) {
        let range = start..longest.min(start + SLOT);
        let piece = |stripe: &Range<usize>| {
            let range = clip(&range, stripe.len());
            stripe.start + range.start..stripe.start + range.end
        };
        if let Some(mine) = stripes.get(index) {
            let mine = &block[piece(mine)];
            host_exchange.fill(range.len(), |slot, copier| {
                copier.copy(&mut slot[..mine.len()], mine);
            });
        }
        host_exchange.run_agreed_phase(&[], range.len(), policy)?;
        let others = stripes.iter().enumerate();
        for (owner, stripe) in others.filter(|(owner, _)| *owner != index) {
            let piece = piece(stripe);
            let shown = &host_exchange.slot(owner)[..piece.len()];
            copy(&mut block[piece], shown);
        }
    }
    Ok(())
}
