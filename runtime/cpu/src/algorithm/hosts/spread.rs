//! Broadcast and all_gather over several hosts.

use super::HostTransports;
use super::chain::put_together;
use crate::channels::Transfer;
use crate::collective::part_of;
use crate::collective::{Data, Outputs, Position};
use crate::transport::shm::SLOT;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::copy;
use std::ops::Range;

/// Maximum size in bytes of a block, which is sent from host to host before the ranks of a host put it together.
const BLOCK: usize = 4 << 20;

/// Broadcasts block by block. The ranks of the root's host get a block first. Then those of them that have a stripe
/// send that stripe to the next host, which forwards it as it arrives.
pub(super) fn broadcast(
    via: &mut HostTransports<'_>,
    mut data: Data<'_>,
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let (layout, hosts) = (via.layout, via.layout.hosts());
    let (source, root_index) = layout.host_and_index(root);
    let index = layout.index_on_host();
    let count = layout.fewest_ranks();
    let is_source = layout.host() == source;
    let peer_on = |host: usize| layout.ranks_of(host % hosts)[index];
    let next = (layout.host() + 1) % hosts;
    let len = data.bytes().len();
    for start in (0..len).step_by(BLOCK) {
        let range = start..len.min(start + BLOCK);
        let stripes: Vec<Range<usize>> = (0..count)
            .map(|stripe| part_of(stripe, count, range.len(), 1))
            .collect();
        if is_source {
            show(via, &mut data, &range, root_index, policy)?;
        }
        if let Some(stripe) = stripes.get(index) {
            let stripe = start + stripe.start..start + stripe.end;
            let to = (next != source).then(|| peer_on(next));
            let transfer = match (&mut data, to) {
                (data, Some(to)) if is_source => Transfer::send(to, &data.bytes()[stripe]),
                (Data::Write(data), to) if !is_source => {
                    Transfer::relay(peer_on(layout.host() + hosts - 1), to, &mut data[stripe])
                }
                _ => continue,
            };
            via.channels.drive(&mut [transfer], policy)?;
        }
        if let (false, Data::Write(data)) = (is_source, &mut data) {
            put_together(via, &mut data[range], &stripes, policy)?;
        }
    }
    Ok(())
}

/// The root shows a block to the ranks of its host.
fn show(
    via: &mut HostTransports<'_>,
    data: &mut Data<'_>,
    block: &Range<usize>,
    root: usize,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let host_exchange = &mut *via.host_exchange;
    if host_exchange.size() == 1 {
        return Ok(());
    }
    for start in block.clone().step_by(SLOT) {
        let range = start..block.end.min(start + SLOT);
        if let Data::Read(bytes) = data {
            host_exchange.fill(range.len(), |slot, copier| {
                copier.copy(slot, &bytes[range.clone()]);
            });
        }
        host_exchange.run_agreed_phase(&[], range.len(), policy)?;
        if let Data::Write(bytes) = data {
            let shown = &host_exchange.slot(root)[..range.len()];
            copy(&mut bytes[range], shown);
        }
    }
    Ok(())
}

/// Every rank sends its part to one rank of each other host: the rank with the same index on its host (modulo that
/// host's number of ranks). Then the ranks of each host show each other the parts that they have.
pub(super) fn all_gather(
    via: &mut HostTransports<'_>,
    position: Position,
    input: &[u8],
    mut outputs: Outputs<'_>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let (layout, index) = (via.layout, via.layout.index_on_host());
    let here = layout.neighbors().len();
    let mut transfers = Vec::new();
    for host in (0..layout.hosts()).filter(|&host| host != layout.host()) {
        let ranks = layout.ranks_of(host);
        transfers.push(Transfer::send(ranks[index % ranks.len()], input));
    }
    for (rank, part) in outputs.parts(position.size).into_iter().enumerate() {
        let (host, index_there) = layout.host_and_index(rank);
        if rank == position.rank {
            part.copy_from_slice(input);
        } else if host != layout.host() && index_there % here == index {
            transfers.push(Transfer::receive(rank, part));
        }
    }
    via.channels.drive(&mut transfers, policy)?;
    drop(transfers);
    let host_exchange = &mut *via.host_exchange;
    if host_exchange.size() == 1 {
        return Ok(());
    }
    // For each rank of this host: the ranks whose parts it has, in the order in which it shows them.
    let mut items: Vec<Vec<usize>> = vec![Vec::new(); here];
    for rank in 0..position.size {
        items[layout.host_and_index(rank).1 % here].push(rank);
    }
    let rounds = items.iter().map(Vec::len).max().unwrap_or(0);
    for round in 0..rounds {
        let shown: Vec<Option<usize>> = items
            .iter()
            .map(|ranks| ranks.get(round).copied())
            .collect();
        let lens = shown
            .iter()
            .flatten()
            .map(|&rank| outputs.part_mut(rank).len());
        let longest = lens.max().unwrap_or(0);
        for start in (0..longest).step_by(SLOT) {
            let range = start..longest.min(start + SLOT);
            let clip = |len: usize| range.start.min(len)..range.end.min(len);
            if let Some(rank) = shown[index] {
                let part = outputs.part_mut(rank);
                let piece = &part[clip(part.len())];
                host_exchange.fill(range.len(), |slot, copier| {
                    copier.copy(&mut slot[..piece.len()], piece);
                });
            }
            host_exchange.run_agreed_phase(&[], range.len(), policy)?;
            let others = shown.iter().enumerate();
            for (owner, rank) in others.filter(|(owner, _)| *owner != index) {
                let Some(rank) = *rank else { continue };
                let part = outputs.part_mut(rank);
                let range = clip(part.len());
                let piece = &host_exchange.slot(owner)[..range.len()];
                copy(&mut part[range], piece);
            }
        }
    }
    Ok(())
}

/// The bytes of a part, `len` bytes at `start`, that are in this window: as a range of the part, and as one of the
/// window.
pub(super) fn overlap(
    start: usize,
    len: usize,
    window: &Range<usize>,
) -> Option<(Range<usize>, Range<usize>)> {
    let (from, to) = (start.max(window.start), (start + len).min(window.end));
    (from < to).then(|| {
        (
            from - start..to - start,
            from - window.start..to - window.start,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_overlaps_the_windows_that_have_some_of_its_bytes() {
        assert_eq!(overlap(10, 5, &(0..10)), None);
        assert_eq!(overlap(10, 5, &(0..12)), Some((0..2, 10..12)));
        assert_eq!(overlap(10, 5, &(12..20)), Some((2..5, 0..3)));
        assert_eq!(overlap(10, 5, &(11..13)), Some((1..3, 0..2)));
        assert_eq!(overlap(10, 0, &(0..20)), None);
    }
}
