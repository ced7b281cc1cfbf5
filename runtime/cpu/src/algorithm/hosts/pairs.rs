//! All_to_all over several hosts: one message from each host to each other host.
//!
//! For each pair of hosts, one rank on each of the two carries the parts between them. The pairs of a host are divided
//! among its ranks.
//!
//! 1. The ranks of a host show each other their inputs. Each copies the parts for itself, and the parts that it carries
//!    to other hosts.
//! 2. The carriers send and receive, one message for each pair of hosts and direction.
//! 3. The carriers show the messages that they have received, and each rank copies the parts for itself.
//!
//! If the sizes of the parts differ, they are exchanged in the same three steps before the data.

use super::HostTransports;
use super::host_exchange::HostExchange;
use super::rooted::Sizes;
use super::spread::overlap;
use crate::channels::Transfer;
use crate::collective::{Inputs, Outputs, Position};
use crate::mesh::layout::Layout;
use crate::transport::shm::SLOT;
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::copy;
use std::ops::Range;

/// Whether the lists of the parts' sizes, which the ranks exchange if the sizes differ, fit into a slot on every host.
pub(super) fn sizes_fit_slot(layout: &Layout, size: usize) -> bool {
    let ranks = (0..layout.hosts()).map(|host| layout.ranks_of(host).len());
    let counts = size.checked_mul(ranks.max().unwrap_or(0));
    counts.is_some_and(|counts| counts <= SLOT / 8)
}

/// The parts that this rank carries to another host, or from it.
struct Message {
    /// The other host.
    host: usize,
    /// The rank of the other host with which this rank exchanges messages.
    peer: usize,
    bytes: Vec<u8>,
}

/// A part, or adjacent parts, that the rank at `index` of this host shows: `len` bytes, from the offset `start` of all
/// bytes that it shows.
struct Shown {
    index: usize,
    start: usize,
    len: usize,
}

pub(super) fn all_to_all(
    via: &mut HostTransports<'_>,
    position: Position,
    inputs: &Inputs<'_>,
    mut outputs: Outputs<'_>,
    sizes: Sizes,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let (layout, size) = (via.layout, position.size);
    let starts = starts_on_host(via, size, inputs, sizes, policy)?;
    let len_of = |index: usize, to: usize| starts[index][to + 1] - starts[index][to];
    copy(outputs.part_mut(position.rank), inputs.part(position.rank));
    let mut sent: Vec<Message> = carried_by(layout, layout.index_on_host())
        .map(|host| Message::new(layout, host))
        .collect();
    // The parts that this rank copies into its messages: the part, the message's index, the part's end in the message.
    let mut to_carry: Vec<(Shown, usize, usize)> = Vec::new();
    for (message_index, message) in sent.iter_mut().enumerate() {
        let mut len = 0;
        for (index, starts) in starts.iter().enumerate() {
            for &to in layout.ranks_of(message.host) {
                let shown = Shown {
                    index,
                    start: starts[to],
                    len: len_of(index, to),
                };
                len += shown.len;
                to_carry.push((shown, message_index, len));
            }
        }
        message.bytes.resize(len, 0);
    }
    let received = find_received(via, &starts, &sent, sizes, policy)?;
    let own = layout.index_on_host();
    show_inputs(
        via,
        position,
        inputs,
        &starts,
        policy,
        &mut |slots, window| {
            for (shown, message_index, end) in &to_carry {
                let into = &mut sent[*message_index].bytes[end - shown.len..*end];
                if shown.index != own {
                    copy_shown(shown, slots.slot(shown.index), &window, into);
                }
            }
            for (index, &from) in layout.neighbors().iter().enumerate() {
                let shown = Shown {
                    index,
                    start: starts[index][position.rank],
                    len: len_of(index, position.rank),
                };
                if index != own {
                    copy_shown(&shown, slots.slot(index), &window, outputs.part_mut(from));
                }
            }
        },
    )?;
    for message in &mut sent {
        let before: usize = (0..own)
            .flat_map(|index| {
                layout
                    .ranks_of(message.host)
                    .iter()
                    .map(move |&to| (index, to))
            })
            .map(|(index, to)| len_of(index, to))
            .sum();
        let mut rest = &mut message.bytes[before..];
        for &to in layout.ranks_of(message.host) {
            let (part, after) = rest.split_at_mut(inputs.part(to).len());
            copy(part, inputs.part(to));
            rest = after;
        }
    }
    let mut arrived: Vec<Message> = sent
        .iter()
        .zip(&received.lens)
        .map(|(message, &len)| Message {
            bytes: vec![0; len],
            ..*message
        })
        .collect();
    let mut transfers = Vec::with_capacity(2 * sent.len());
    for (sent, arrived) in sent.iter().zip(&mut arrived) {
        transfers.push(Transfer::send(sent.peer, &sent.bytes));
        transfers.push(Transfer::receive(arrived.peer, &mut arrived.bytes));
    }
    via.channels.drive(&mut transfers, policy)?;
    drop(transfers);
    hand_out(via, &received, &arrived, &mut outputs, policy)
}

/// The other hosts whose messages the rank at `index` of this host carries.
fn carried_by(layout: &Layout, index: usize) -> impl Iterator<Item = usize> {
    let (own, here) = (layout.host(), layout.neighbors().len());
    (0..layout.hosts()).filter(move |&host| host != own && host % here == index)
}

impl Message {
    fn new(layout: &Layout, host: usize) -> Self {
        let ranks = layout.ranks_of(host);
        Self {
            host,
            peer: ranks[layout.host() % ranks.len()],
            bytes: Vec::new(),
        }
    }
}

/// Copies the bytes of a part that are in `window` from `slot` into the part.
fn copy_shown(shown: &Shown, slot: &[u8], window: &Range<usize>, into: &mut [u8]) {
    if let Some((in_part, in_window)) = overlap(shown.start, shown.len, window) {
        copy(&mut into[in_part], &slot[in_window]);
    }
}

/// For each rank of this host: where its part for each rank starts in its input, and where the last one ends.
fn starts_on_host(
    via: &mut HostTransports<'_>,
    size: usize,
    inputs: &Inputs<'_>,
    sizes: Sizes,
    policy: &mut WaitPolicy<'_>,
) -> Result<Vec<Vec<usize>>, Failure> {
    let host_exchange = &mut *via.host_exchange;
    let here = host_exchange.size();
    let own: Vec<u64> = (0..size).map(|to| inputs.part(to).len() as u64).collect();
    if sizes == Sizes::Even || here == 1 {
        return Ok(vec![starts(own.iter().copied()); here]);
    }
    let own = encode(own.iter().copied());
    host_exchange.fill(own.len(), |slot, _| slot.copy_from_slice(&own));
    host_exchange.run_agreed_phase(&[], own.len(), policy)?;
    let of_rank = |index| starts(decode(&host_exchange.slot(index)[..size * 8]));
    Ok((0..here).map(of_rank).collect())
}

/// Where parts of these lengths start, one after the other, and where the last one ends.
fn starts(lens: impl Iterator<Item = u64>) -> Vec<usize> {
    let mut starts = vec![0usize];
    let mut end = 0usize;
    for len in lens {
        end = end.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
        starts.push(end);
    }
    starts
}

fn encode(counts: impl Iterator<Item = u64>) -> Vec<u8> {
    counts.flat_map(u64::to_le_bytes).collect()
}

fn decode(bytes: &[u8]) -> impl Iterator<Item = u64> {
    let (counts, _) = bytes.as_chunks::<8>();
    counts.iter().map(|count| u64::from_le_bytes(*count))
}

/// The parts that the ranks of this host receive from other hosts.
struct Received {
    /// The length of each message that this rank receives.
    lens: Vec<usize>,
    /// The parts for this rank, with the ranks that they are from.
    parts: Vec<(usize, Shown)>,
    /// The largest number of bytes that a rank of this host shows.
    longest: usize,
}

/// Returns where the parts for this rank are in the messages from other hosts, and the lengths of the messages that
/// this rank carries. If sizes differ, the carriers exchange the sizes between hosts, and show them to the ranks of
/// their host.
fn find_received(
    via: &mut HostTransports<'_>,
    starts: &[Vec<usize>],
    sent: &[Message],
    sizes: Sizes,
    policy: &mut WaitPolicy<'_>,
) -> Result<Received, Failure> {
    let layout = via.layout;
    let (own, here) = (layout.index_on_host(), layout.neighbors().len());
    // How many parts the rank at an index of this host receives from each host whose message it carries.
    let counts_of = |index: usize| -> Vec<usize> {
        let hosts = carried_by(layout, index);
        hosts
            .map(|host| layout.ranks_of(host).len() * here)
            .collect()
    };
    let each = starts[own][1] as u64;
    let mut part_lens: Vec<Vec<u64>> = (0..here)
        .map(|index| vec![each; counts_of(index).iter().sum()])
        .collect();
    if sizes == Sizes::Listed {
        let ours: Vec<Vec<u8>> = sent
            .iter()
            .map(|message| {
                let to = layout.ranks_of(message.host);
                let lens = starts
                    .iter()
                    .flat_map(|starts| to.iter().map(|&to| (starts[to + 1] - starts[to]) as u64));
                encode(lens)
            })
            .collect();
        let received = counts_of(own).into_iter();
        let mut theirs: Vec<Vec<u8>> = received.map(|count| vec![0; count * 8]).collect();
        let mut transfers = Vec::with_capacity(2 * sent.len());
        for ((message, ours), theirs) in sent.iter().zip(&ours).zip(&mut theirs) {
            transfers.push(Transfer::send(message.peer, ours));
            transfers.push(Transfer::receive(message.peer, theirs));
        }
        via.channels.drive(&mut transfers, policy)?;
        drop(transfers);
        let theirs = theirs.concat();
        let used = part_lens.iter().map(|lens| lens.len() * 8).max();
        let used = used.unwrap_or(0);
        let host_exchange = &mut *via.host_exchange;
        host_exchange.fill(used, |slot, _| {
            slot[..theirs.len()].copy_from_slice(&theirs)
        });
        host_exchange.run_agreed_phase(&[], used, policy)?;
        for (index, lens) in part_lens.iter_mut().enumerate() {
            let bytes = match index == own {
                true => &theirs[..],
                false => host_exchange.slot(index),
            };
            for (len, read) in lens.iter_mut().zip(decode(bytes)) {
                *len = read;
            }
        }
    }
    let mut received = Received {
        lens: Vec::new(),
        parts: Vec::new(),
        longest: 0,
    };
    for (index, lens) in part_lens.into_iter().enumerate() {
        let starts = self::starts(lens.into_iter());
        let mut position = 0;
        for host in carried_by(layout, index) {
            let first = starts[position];
            for &from in layout.ranks_of(host) {
                let (start, end) = (starts[position + own], starts[position + own + 1]);
                let len = end - start;
                received.parts.push((from, Shown { index, start, len }));
                position += here;
            }
            if index == own {
                received.lens.push(starts[position] - first);
            }
        }
        received.longest = received.longest.max(starts[position]);
    }
    Ok(received)
}

/// The ranks of this host show each other their inputs. In each phase, `read_slots` is called with the slots, and the
/// range of each input that they show; on a host with one rank it is not called.
fn show_inputs(
    via: &mut HostTransports<'_>,
    position: Position,
    inputs: &Inputs<'_>,
    starts: &[Vec<usize>],
    policy: &mut WaitPolicy<'_>,
    read_slots: &mut dyn FnMut(&HostExchange, Range<usize>),
) -> Result<(), Failure> {
    let host_exchange = &mut *via.host_exchange;
    if host_exchange.size() == 1 {
        return Ok(());
    }
    let own = host_exchange.index();
    let ends = starts.iter().filter_map(|starts| starts.last().copied());
    let longest = ends.max().unwrap_or(0);
    for start in (0..longest).step_by(SLOT) {
        let window = start..longest.min(start + SLOT);
        host_exchange.fill(window.len(), |slot, _| {
            for (to, &start) in starts[own].iter().take(position.size).enumerate() {
                let part = inputs.part(to);
                if let Some((in_part, in_window)) = overlap(start, part.len(), &window) {
                    copy(&mut slot[in_window], &part[in_part]);
                }
            }
        });
        host_exchange.run_agreed_phase(&[], window.len(), policy)?;
        read_slots(host_exchange, window);
    }
    Ok(())
}

/// Gives each rank of this host its parts of the messages that have arrived.
fn hand_out(
    via: &mut HostTransports<'_>,
    received: &Received,
    arrived: &[Message],
    outputs: &mut Outputs<'_>,
    policy: &mut WaitPolicy<'_>,
) -> Result<(), Failure> {
    let own = via.layout.index_on_host();
    for (from, shown) in &received.parts {
        // The ranks have agreed on these sizes, so another size is an error of the peer.
        if shown.len != outputs.len(*from) {
            let message = format!("{} bytes instead of {}", shown.len, outputs.len(*from));
            return Err(Failure::Garbled(via.channels.global(*from), message));
        }
    }
    let messages: Vec<&[u8]> = arrived.iter().map(|message| &message.bytes[..]).collect();
    let joined = messages.concat();
    for (from, shown) in received
        .parts
        .iter()
        .filter(|(_, shown)| shown.index == own)
    {
        copy(
            outputs.part_mut(*from),
            &joined[shown.start..shown.start + shown.len],
        );
    }
    let host_exchange = &mut *via.host_exchange;
    if host_exchange.size() == 1 {
        return Ok(());
    }
    for start in (0..received.longest).step_by(SLOT) {
        let window = start..received.longest.min(start + SLOT);
        host_exchange.fill(window.len(), |slot, copier| {
            let piece = &joined[window.start.min(joined.len())..window.end.min(joined.len())];
            copier.copy(&mut slot[..piece.len()], piece);
        });
        host_exchange.run_agreed_phase(&[], window.len(), policy)?;
        for (from, shown) in received
            .parts
            .iter()
            .filter(|(_, shown)| shown.index != own)
        {
            let slot = host_exchange.slot(shown.index);
            copy_shown(shown, slot, &window, outputs.part_mut(*from));
        }
    }
    Ok(())
}
