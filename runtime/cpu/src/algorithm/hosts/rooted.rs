//! Gather and scatter over several hosts: one message between the root and each other host.

use super::HostTransports;
use super::spread::overlap;
use crate::channels::Transfer;
use crate::collective::{Inputs, Outputs, Position};
use crate::transport::shm::SLOT;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::copy;

/// Whether all ranks know the sizes of all parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sizes {
    /// The sizes are equal.
    Even,
    /// Each rank knows only the sizes of the parts that it sends or receives.
    Listed,
}

/// Every rank shows its part to one rank of its host. On the root's host that is the root; elsewhere it is the first
/// rank, which sends the parts of its host to the root in one message.
pub(super) fn gather(
    via: &mut HostTransports<'_>,
    position: Position,
    input: &[u8],
    outputs: Option<Outputs<'_>>,
    (root, sizes): (usize, Sizes),
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let layout = via.layout;
    let (root_host, root_index) = layout.host_and_index(root);
    let is_roots_host = layout.host() == root_host;
    let collector = if is_roots_host { root_index } else { 0 };
    let lens = lens_on_host(via, input.len(), sizes, policy)?;
    let Some(mut outputs) = outputs else {
        let mut message = Vec::new();
        let mut parts = Vec::new();
        if layout.index_on_host() == collector {
            message.resize(lens.iter().sum(), 0);
            parts = split(&mut message, &lens);
        }
        collect(via, input, (collector, &lens), &mut parts, policy)?;
        if layout.index_on_host() != collector {
            return Ok(());
        }
        return via
            .channels
            .drive(&mut [Transfer::send(root, &message)], policy);
    };
    let mut parts = Vec::with_capacity(lens.len());
    let mut others: Vec<Vec<&mut [u8]>> = (0..layout.hosts()).map(|_| Vec::new()).collect();
    for (rank, part) in outputs.parts(position.size).into_iter().enumerate() {
        match layout.host_and_index(rank).0 {
            host if host == root_host => parts.push(part),
            host => others[host].push(part),
        }
    }
    collect(via, input, (collector, &lens), &mut parts, policy)?;
    let len_of = |parts: &Vec<&mut [u8]>| parts.iter().map(|part| part.len()).sum();
    let mut messages: Vec<Vec<u8>> = others.iter().map(|parts| vec![0; len_of(parts)]).collect();
    let mut transfers = Vec::with_capacity(layout.hosts());
    for (host, message) in messages.iter_mut().enumerate() {
        if host != root_host {
            transfers.push(Transfer::receive(layout.ranks_of(host)[0], message));
        }
    }
    via.channels.drive(&mut transfers, policy)?;
    drop(transfers);
    for (parts, message) in others.iter_mut().zip(&messages) {
        let mut rest = &message[..];
        for part in parts {
            let (own, after) = rest.split_at(part.len());
            copy(part, own);
            rest = after;
        }
    }
    Ok(())
}

/// The root sends each other host its parts in one message to the host's first rank. Then one rank of each host, the
/// root on its own, shows the parts to the others.
pub(super) fn scatter(
    via: &mut HostTransports<'_>,
    inputs: Option<&Inputs<'_>>,
    output: &mut [u8],
    (root, sizes): (usize, Sizes),
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let layout = via.layout;
    let (root_host, root_index) = layout.host_and_index(root);
    let is_roots_host = layout.host() == root_host;
    let source = if is_roots_host { root_index } else { 0 };
    let lens = lens_on_host(via, output.len(), sizes, policy)?;
    let mut message = Vec::new();
    if let Some(inputs) = inputs {
        let of_host = |host: usize| -> Vec<u8> {
            let parts = layout.ranks_of(host).iter().map(|&rank| inputs.part(rank));
            parts.collect::<Vec<_>>().concat()
        };
        let messages: Vec<Vec<u8>> = (0..layout.hosts()).map(of_host).collect();
        let mut transfers: Vec<Transfer<'_>> = (0..layout.hosts())
            .filter(|&host| host != root_host)
            .map(|host| Transfer::send(layout.ranks_of(host)[0], &messages[host]))
            .collect();
        via.channels.drive(&mut transfers, policy)?;
        drop(transfers);
        message = messages.into_iter().nth(root_host).unwrap_or_default();
    } else if layout.index_on_host() == source {
        message.resize(lens.iter().sum(), 0);
        let receive = Transfer::receive(root, &mut message);
        via.channels.drive(&mut [receive], policy)?;
    }
    hand_out(via, (source, &lens), &message, output, policy)
}

/// The sizes in bytes of the parts of the ranks of this host, of which this rank's is `own`.
fn lens_on_host(
    via: &mut HostTransports<'_>,
    own: usize,
    sizes: Sizes,
    policy: &mut WaitPolicy<'_>,
) -> Result<Vec<usize>, Failure> {
    let host_exchange = &mut *via.host_exchange;
    let here = host_exchange.size();
    if sizes == Sizes::Even || here == 1 {
        return Ok(vec![own; here]);
    }
    host_exchange.run_agreed_phase(&(own as u64).to_le_bytes(), 0, policy)?;
    let len_of = |index: usize| {
        let line = host_exchange.line(index, 8).first_chunk();
        line.map_or(0, |bytes| u64::from_le_bytes(*bytes) as usize)
    };
    Ok((0..here).map(len_of).collect())
}

/// Splits `bytes` into parts of these sizes, one after the other.
fn split<'a>(mut bytes: &'a mut [u8], lens: &[usize]) -> Vec<&'a mut [u8]> {
    let mut parts = Vec::with_capacity(lens.len());
    for &len in lens {
        let (part, rest) = bytes.split_at_mut(len);
        parts.push(part);
        bytes = rest;
    }
    parts
}

/// Puts the inputs of this host's ranks into `parts` on the collector; the others have no `parts`.
fn collect(
    via: &mut HostTransports<'_>,
    input: &[u8],
    (collector, lens): (usize, &[usize]),
    parts: &mut [&mut [u8]],
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let host_exchange = &mut *via.host_exchange;
    let own = host_exchange.index();
    let shown = lens
        .iter()
        .enumerate()
        .filter(|(index, _)| *index != collector);
    let longest = shown.map(|(_, &len)| len).max().unwrap_or(0);
    for start in (0..longest).step_by(SLOT) {
        let window = start..longest.min(start + SLOT);
        let clip = |len: usize| window.start.min(len)..window.end.min(len);
        if own != collector {
            let piece = &input[clip(input.len())];
            host_exchange.fill(window.len(), |slot, copier| {
                copier.copy(&mut slot[..piece.len()], piece);
            });
        }
        host_exchange.run_agreed_phase(&[], window.len(), policy)?;
        let others = parts.iter_mut().enumerate();
        for (index, part) in others.filter(|(index, _)| *index != own) {
            let range = clip(part.len());
            let piece = &host_exchange.slot(index)[..range.len()];
            copy(&mut part[range], piece);
        }
    }
    if let Some(part) = parts.get_mut(own) {
        copy(part, input);
    }
    Ok(())
}

/// Gives each rank of this host its part of `message`, which the rank at index `source` has.
fn hand_out(
    via: &mut HostTransports<'_>,
    (source, lens): (usize, &[usize]),
    message: &[u8],
    output: &mut [u8],
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let host_exchange = &mut *via.host_exchange;
    let own = host_exchange.index();
    let own_start: usize = lens[..own].iter().sum();
    if own == source {
        copy(output, &message[own_start..][..output.len()]);
    }
    if host_exchange.size() == 1 {
        return Ok(());
    }
    let len: usize = lens.iter().sum();
    for start in (0..len).step_by(SLOT) {
        let window = start..len.min(start + SLOT);
        if own == source {
            host_exchange.fill(window.len(), |slot, copier| {
                copier.copy(slot, &message[window.clone()]);
            });
        }
        host_exchange.run_agreed_phase(&[], window.len(), policy)?;
        if own != source
            && let Some((in_part, in_window)) = overlap(own_start, output.len(), &window)
        {
            copy(&mut output[in_part], &host_exchange.slot(source)[in_window]);
        }
    }
    Ok(())
}
