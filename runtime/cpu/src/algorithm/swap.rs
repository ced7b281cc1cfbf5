//! The all_reduce of two ranks: each sends all of its data, and both combine.
//!
//! If each rank combined one half and sent the result, the number of bytes would be the same, with one more
//! exchange. The first bytes are sent directly after the header, which saves another round trip.

use super::ChannelEngine;
use super::agree::Participants;
use crate::channels::{Swap, Transfer};
use crate::collective::Combination;
use crate::collective::op_header::{self, OpHeader};
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic;

/// Maximum number of bytes that are sent before the other rank's header is known: all bytes of a small buffer, and few
/// enough to discard if the ranks do not agree.
const AHEAD: usize = 256 << 10;
/// Maximum size in bytes of the buffer for received data that is not combined yet.
const SCRATCH: usize = 256 << 10;

impl ChannelEngine {
    /// Agrees on `op_header` with the other rank, then runs the all_reduce.
    pub(super) fn swap(
        &mut self,
        mut op_header: OpHeader,
        data: &mut [u8],
        by: Combination,
        rank: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let (channels, agreement, scratch) =
            (&mut self.channels, &mut self.agreement, &mut self.scratch);
        let peer = 1 - rank;
        let ahead = data.len().min(AHEAD);
        op_header.inline = ahead as u32;
        let participants = Participants {
            members: &self.members,
            index: rank,
        };
        let sent =
            agreement.exchange_pair(channels, participants, op_header, &data[..ahead], policy)?;
        let theirs = agreement.op_headers()[peer].inline as usize;
        if let Err(found) = op_header::compare(agreement.op_headers()) {
            let mut discarded = vec![0; theirs];
            let mut transfers = [
                Transfer::send_rest(peer, &data[..ahead], sent),
                Transfer::receive(peer, &mut discarded),
            ];
            channels.drive(&mut transfers, policy)?;
            return Err(Failure::Mismatch(
                channels.global(found.rank),
                found.message,
            ));
        }
        if theirs != ahead {
            return Err(Failure::Garbled(
                channels.global(peer),
                format!("{theirs} bytes with its op header instead of {ahead}"),
            ));
        }
        scratch.resize(SCRATCH.min(data.len()), 0);
        let combine = |ours: &mut [u8], theirs: &[u8]| {
            arithmetic::combine_in_place(by.op, by.dtype, ours, rank, &[theirs], None);
        };
        let swap = Swap::new(peer, data, sent, scratch, &combine);
        channels.drive(&mut [Transfer::Swap(swap)], policy)
    }
}
