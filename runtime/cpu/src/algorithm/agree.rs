//! Sends all headers, with the bytes that follow each, to all ranks in ⌈log2 n⌉ messages per rank.
//!
//! The algorithm is Bruck's all-gather (1997). A *block* is one rank's header and its inline bytes.
//! Blocks are kept in the order own, own + 1, own + 2, ... (modulo n); in the round of distance d = 1,
//! 2, 4, ... a rank sends its first d blocks (as many as are missing, in the last round) d ranks back,
//! and appends the blocks that it receives from d ranks ahead. *Ranks* here are the participants, counted
//! from 0: all ranks of a group, or one rank of each host.

use crate::channels::{Channels, Transfer};
use crate::collective::op_header::{OP_HEADER_LEN, OpHeader};
use crate::wait::{Failure, WaitPolicy};

/// Bytes of the fields before the blocks of a message: magic, number of the exchange, distance, number of
/// blocks, and their total size in bytes.
const HEAD: usize = 24;
/// Bytes of a message with one header, without the data after the header.
const HEADER_MESSAGE: usize = HEAD + OP_HEADER_LEN;
/// Marks a message of this layout. Like all numbers it is little-endian on the wire: the bytes `1mcr`.
const MAGIC: u32 = 0x7263_6d31;
/// The longest message that is accepted, in bytes. Headers with lists for about ten thousand ranks fit.
const MAX_MESSAGE: usize = 1 << 30;

/// The exchange of headers, and the bytes after each, between participants; it keeps what the last exchange gave.
#[derive(Default)]
pub(super) struct Agreement {
    /// The header of each participant in the last exchange.
    op_headers: Vec<OpHeader>,
    /// Number of exchanges so far. It must be the same on all ranks and is checked in every message, so that ranks that
    /// run different steps detect it.
    exchanges: u64,
    /// Space for the head of the next message, then the blocks that this rank has so far.
    outgoing: Vec<u8>,
    /// The blocks that the last round has received.
    incoming: Vec<u8>,
    /// The offset in `outgoing` at which each block starts, and the end of the last block.
    starts: Vec<usize>,
    /// This rank's index among the participants of the last exchange.
    rank: usize,
}

/// The participants, as ranks of the group, and the position of this rank among them.
#[derive(Clone, Copy)]
pub(super) struct Participants<'a> {
    pub(super) members: &'a [usize],
    pub(super) index: usize,
}

impl Agreement {
    /// Exchanges headers, and the bytes `inline` after each, with the other ranks; `op_header.inline` is their number.
    /// The caller compares the headers.
    pub(super) fn exchange(
        &mut self,
        channels: &mut Channels,
        participants: Participants<'_>,
        op_header: OpHeader,
        inline: &[u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let (rank, size) = (participants.index, participants.members.len());
        self.rank = rank;
        self.exchanges += 1;
        self.outgoing.clear();
        self.outgoing.resize(HEAD, 0);
        self.outgoing.extend_from_slice(&op_header.encode());
        self.outgoing.extend_from_slice(inline);
        self.starts.clear();
        self.starts.extend([HEAD, self.outgoing.len()]);

        let mut distance = 1;
        while distance < size {
            let blocks = distance.min(size - distance);
            let back = participants.members[(rank + size - distance) % size];
            let ahead = participants.members[(rank + distance) % size];
            self.round(channels, distance, blocks, back, ahead, policy)?;
            distance *= 2;
        }

        self.op_headers.clear();
        for index in 0..size {
            let block = &self.outgoing[self.starts[(index + size - rank) % size]..];
            let op_header = block.first_chunk().and_then(OpHeader::decode);
            let op_header =
                op_header.ok_or_else(|| garbled(channels, participants.members[index]))?;
            self.op_headers.push(op_header);
        }
        Ok(())
    }

    /// Sends the first `blocks` blocks to the member `back`, and appends as many that the member `ahead` sends.
    fn round(
        &mut self,
        channels: &mut Channels,
        distance: usize,
        blocks: usize,
        back: usize,
        ahead: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let end = self.starts[blocks];
        let expected = head(self.exchanges, distance, blocks, 0);
        let ours = head(self.exchanges, distance, blocks, end - HEAD);
        self.outgoing[..HEAD].copy_from_slice(&ours);

        let mut theirs = [0; HEAD];
        let mut transfers = [
            Transfer::send(back, &self.outgoing[..end]),
            Transfer::receive(ahead, &mut theirs),
        ];
        channels.drive_until(&mut transfers, policy, |transfers| transfers[1].is_done())?;
        let sent = transfers[0].sent();
        let length = length_after_head(channels, ahead, &theirs, &expected, blocks)?;
        self.incoming.clear();
        self.incoming.resize(length, 0);
        let mut transfers = [
            Transfer::send_rest(back, &self.outgoing[..end], sent),
            Transfer::receive(ahead, &mut self.incoming),
        ];
        channels.drive(&mut transfers, policy)?;

        let base = self.outgoing.len();
        let mut offset = 0;
        for _ in 0..blocks {
            let block = self
                .incoming
                .get(offset..)
                .and_then(|rest| rest.first_chunk());
            let op_header = block.and_then(OpHeader::decode);
            let op_header = op_header.ok_or_else(|| garbled(channels, ahead))?;
            offset += OP_HEADER_LEN + op_header.inline as usize;
            self.starts.push(base + offset);
        }
        if offset != length {
            return Err(garbled(channels, ahead));
        }
        self.outgoing.extend_from_slice(&self.incoming);
        Ok(())
    }

    /// Works like [`exchange`](Self::exchange) between two ranks, but sends `after_header` directly after this rank's
    /// header, and does not read the bytes after the other rank's. Returns how many bytes of `after_header` were sent.
    pub(super) fn exchange_pair(
        &mut self,
        channels: &mut Channels,
        participants: Participants<'_>,
        op_header: OpHeader,
        after_header: &[u8],
        policy: &mut WaitPolicy<'_>,
    ) -> Result<usize, Failure> {
        self.rank = participants.index;
        self.exchanges += 1;
        let peer = participants.members[1 - participants.index];
        let mut ours = [0; HEADER_MESSAGE];
        ours[..HEAD].copy_from_slice(&head(
            self.exchanges,
            1,
            1,
            OP_HEADER_LEN + after_header.len(),
        ));
        ours[HEAD..].copy_from_slice(&op_header.encode());
        let mut theirs = [0; HEADER_MESSAGE];
        let mut transfers = [
            Transfer::send_with_head(peer, &ours, after_header, 0),
            Transfer::receive(peer, &mut theirs),
        ];
        channels.drive_until(&mut transfers, policy, |transfers| {
            transfers[0].sent() >= HEADER_MESSAGE && transfers[1].is_done()
        })?;
        let sent = transfers[0].sent() - HEADER_MESSAGE;
        let (start, block) = theirs.split_at(HEAD);
        let expected = head(self.exchanges, 1, 1, 0);
        let length = length_after_head(channels, peer, start, &expected, 1)?;
        let theirs = block.first_chunk().and_then(OpHeader::decode);
        let theirs = theirs.filter(|op_header| OP_HEADER_LEN + op_header.inline as usize == length);
        let theirs = theirs.ok_or_else(|| garbled(channels, peer))?;
        self.op_headers.clear();
        self.op_headers.extend([op_header, theirs]);
        self.op_headers.rotate_left(participants.index);
        Ok(sent)
    }

    /// The header of each participant in the last exchange.
    pub(super) fn op_headers(&self) -> &[OpHeader] {
        &self.op_headers
    }

    /// The inline data after the header of the participant `rank` in the last [`exchange`](Self::exchange).
    pub(super) fn inline(&self, rank: usize) -> &[u8] {
        let size = self.op_headers.len();
        let block = (rank + size - self.rank) % size;
        &self.outgoing[self.starts[block] + OP_HEADER_LEN..self.starts[block + 1]]
    }

    /// The list of counts after the header of the participant `rank` in the last [`exchange`](Self::exchange).
    pub(super) fn counts(&self, rank: usize) -> Vec<u64> {
        let (counts, _) = self.inline(rank).as_chunks::<8>();
        counts
            .iter()
            .map(|count| u64::from_le_bytes(*count))
            .collect()
    }
}

/// Checks the head of a message from `peer`, and returns how many bytes follow it.
fn length_after_head(
    channels: &Channels,
    peer: usize,
    head: &[u8],
    expected: &[u8; HEAD],
    blocks: usize,
) -> Result<usize, Failure> {
    let (start, length) = head.split_at(HEAD - 4);
    if start != &expected[..HEAD - 4] {
        return Err(Failure::Garbled(
            channels.global(peer),
            "a message that belongs to another operation".into(),
        ));
    }
    let length = length.first_chunk().copied().map_or(0, u32::from_le_bytes) as usize;
    if length < blocks * OP_HEADER_LEN || length > MAX_MESSAGE {
        return Err(Failure::Garbled(
            channels.global(peer),
            format!("{blocks} op headers in {length} bytes"),
        ));
    }
    Ok(length)
}

/// Encodes the head of a message with `length` bytes of blocks.
fn head(exchange: u64, distance: usize, blocks: usize, length: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4..12].copy_from_slice(&exchange.to_le_bytes());
    head[12..16].copy_from_slice(&(distance as u32).to_le_bytes());
    head[16..20].copy_from_slice(&(blocks as u32).to_le_bytes());
    head[20..].copy_from_slice(&(length as u32).to_le_bytes());
    head
}

fn garbled(channels: &Channels, rank: usize) -> Failure {
    Failure::Garbled(channels.global(rank), "a malformed op header".into())
}
