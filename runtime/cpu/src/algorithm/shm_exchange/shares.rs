//! All_reduce and reduce: every rank combines its share of each chunk.

use super::CHUNK;
use super::phase::PhaseContext;
use crate::collective::part_of;
use crate::collective::{Combination, Data, Position};
use crate::transport::shm::{INLINE, Traffic};
use crate::wait::Failure;
use rcomm_core::arithmetic::{self, copy};
use std::ops::Range;

/// The maximum size in bytes of an operation with [`Traffic::Exchange`]. A longer operation has phases in which some
/// ranks have no share, and so write none of the memory that they have just read: from 512 KiB on it would take a
/// quarter longer.
const MAX_EXCHANGE: usize = 256 << 10;

/// The traffic of an operation of `len` bytes.
fn traffic_of(len: usize) -> Traffic {
    if len <= MAX_EXCHANGE {
        Traffic::Exchange
    } else {
        Traffic::OneWay
    }
}

/// The division of an all_reduce or reduce: in each chunk every rank combines one part of all inputs, which is its
/// share of the result.
///
/// In phase c a slot holds, for each rank other than the writer, the part of chunk c that the other rank combines, and
/// then the writer's share of the result of chunk c - 1. The last phase has only shares of the result.
#[derive(Clone, Copy)]
struct Shares {
    /// Bytes of the operation.
    len: usize,
    /// Number of ranks.
    size: usize,
    /// Bytes of an element.
    element: usize,
}

impl Shares {
    fn chunks(self) -> usize {
        self.len.div_ceil(CHUNK)
    }

    /// The range of the operation's bytes that `rank` combines in a chunk.
    fn part(self, rank: usize, chunk: usize) -> Range<usize> {
        let start = (chunk * CHUNK).min(self.len);
        let len = (self.len - start).min(CHUNK);
        let part = part_of(rank, self.size, len, self.element);
        start + part.start..start + part.end
    }

    /// Bytes in a slot for each part of a chunk: the longest part, rounded up to whole cache lines.
    fn width(self, chunk: usize) -> usize {
        let parts = (0..self.size).map(|rank| self.part(rank, chunk).len());
        parts.max().unwrap_or(0).next_multiple_of(64)
    }

    /// The offset of `reader`'s part of a chunk in the slot of `writer`.
    fn input_offset(self, reader: usize, writer: usize, chunk: usize) -> usize {
        (reader - usize::from(reader > writer)) * self.width(chunk)
    }

    /// The offset of the share of the previous chunk in the slots of a phase.
    fn share_offset(self, phase: usize) -> usize {
        if phase < self.chunks() {
            (self.size - 1) * self.width(phase)
        } else {
            0
        }
    }

    /// Bytes of a slot that are used in a phase.
    fn used(self, phase: usize) -> usize {
        let share = phase.checked_sub(1).map_or(0, |chunk| self.width(chunk));
        self.share_offset(phase) + share
    }
}

impl PhaseContext<'_, '_> {
    #[inline]
    pub(super) fn all_reduce(&mut self, data: &mut [u8], by: Combination) -> Result<(), Failure> {
        if data.len() <= self.max_whole {
            self.all_reduce_whole(data, by)
        } else {
            self.all_reduce_shares(data, by)
        }
    }

    /// Every rank shows all of its data, and combines the data of all ranks.
    #[inline]
    fn all_reduce_whole(&mut self, data: &mut [u8], by: Combination) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let len = data.len();
        let is_inline = len <= INLINE;
        if is_inline {
            self.run_inline_phase(data)?;
        } else {
            self.shm_exchange.expect(traffic_of(len));
            self.copier.copy(self.shm_exchange.next_slot(len), data);
            self.run_phase(len)?;
        }
        let shm_exchange = &*self.shm_exchange;
        let other = |index: usize| {
            let peer = index + usize::from(index >= rank);
            match is_inline {
                true => shm_exchange.inline(peer, len),
                false => &shm_exchange.slot(peer)[..len],
            }
        };
        with_inputs(size - 1, other, |others| {
            arithmetic::combine_in_place(by.op, by.dtype, data, rank, others, None);
        });
        Ok(())
    }

    /// Every rank combines its share of each chunk, and copies the other ranks' shares.
    fn all_reduce_shares(&mut self, data: &mut [u8], by: Combination) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let len = data.len();
        let shares = Shares {
            len,
            size,
            element: by.element(),
        };
        self.shm_exchange.expect(traffic_of(len));
        for phase in 0..=shares.chunks() {
            self.show_inputs(shares, phase, data);
            self.run_phase(shares.used(phase))?;
            let peers = self.others();
            let copier = &mut *self.copier;
            let (slots, next) = self.shm_exchange.slots_and_next(shares.used(phase + 1));
            if let Some(chunk) = phase.checked_sub(1) {
                for peer in peers {
                    let range = shares.part(peer, chunk);
                    let share = &slots.slot(peer)[shares.share_offset(phase)..][..range.len()];
                    copy(&mut data[range], share);
                }
            }
            if phase < shares.chunks() {
                let mine = shares.part(rank, phase);
                let width = mine.len();
                let share = &mut next[shares.share_offset(phase + 1)..][..width];
                let other = |index: usize| {
                    let peer = index + usize::from(index >= rank);
                    &slots.slot(peer)[shares.input_offset(rank, peer, phase)..][..width]
                };
                with_inputs(size - 1, other, |others| {
                    let out = &mut data[mine];
                    if copier.streams(width) {
                        arithmetic::combine_in_place(by.op, by.dtype, out, rank, others, None);
                        copier.copy(share, out);
                    } else {
                        arithmetic::combine_in_place(
                            by.op,
                            by.dtype,
                            out,
                            rank,
                            others,
                            Some(share),
                        );
                    }
                });
            }
        }
        Ok(())
    }

    /// Writes this rank's inputs for the other ranks into its slot of the next phase.
    fn show_inputs(&mut self, shares: Shares, phase: usize, data: &[u8]) {
        if phase == shares.chunks() {
            return;
        }
        let peers = self.others();
        let slot = self.shm_exchange.next_slot(shares.used(phase));
        for peer in peers {
            let piece = &data[shares.part(peer, phase)];
            let start = shares.input_offset(peer, self.position.rank, phase);
            self.copier.copy(&mut slot[start..][..piece.len()], piece);
        }
    }

    /// Works like `all_reduce_shares`, but only the root copies the shares.
    pub(super) fn reduce(
        &mut self,
        mut data: Data<'_>,
        by: Combination,
        root: usize,
    ) -> Result<(), Failure> {
        let Position { rank, size, .. } = self.position;
        let shares = Shares {
            len: data.bytes().len(),
            size,
            element: by.element(),
        };
        self.shm_exchange.expect(traffic_of(shares.len));
        // The ranks run a phase even if there are no bytes to combine.
        for phase in 0..=shares.chunks() {
            self.show_inputs(shares, phase, data.bytes());
            self.run_phase(shares.used(phase))?;
            let (slots, next) = self.shm_exchange.slots_and_next(shares.used(phase + 1));
            if let Some(chunk) = phase.checked_sub(1)
                && let Data::Write(data) = &mut data
            {
                for peer in (0..size).filter(|&peer| peer != root) {
                    let range = shares.part(peer, chunk);
                    let share = &slots.slot(peer)[shares.share_offset(phase)..][..range.len()];
                    copy(&mut data[range], share);
                }
            }
            if phase < shares.chunks() {
                let mine = shares.part(rank, phase);
                let width = mine.len();
                let share = &mut next[shares.share_offset(phase + 1)..][..width];
                let input = |peer: usize| match peer == rank {
                    true => &data.bytes()[mine.clone()],
                    false => &slots.slot(peer)[shares.input_offset(rank, peer, phase)..][..width],
                };
                with_inputs(size, input, |inputs| {
                    arithmetic::combine(by.op, by.dtype, inputs, share, None);
                });
                if let Data::Write(data) = &mut data {
                    copy(&mut data[mine], share);
                }
            }
        }
        Ok(())
    }
}

/// Calls `use_inputs` with `count` inputs, which are collected on the stack if they are few.
#[inline]
pub(super) fn with_inputs<'a>(
    count: usize,
    input: impl Fn(usize) -> &'a [u8],
    use_inputs: impl FnOnce(&[&'a [u8]]),
) {
    const FEW: usize = 8;
    if count == 1 {
        use_inputs(&[input(0)]);
    } else if count == 2 {
        use_inputs(&[input(0), input(1)]);
    } else if count <= FEW {
        let mut few: [&[u8]; FEW] = [&[]; FEW];
        for (index, entry) in few[..count].iter_mut().enumerate() {
            *entry = input(index);
        }
        use_inputs(&few[..count]);
    } else {
        let many: Vec<&[u8]> = (0..count).map(input).collect();
        use_inputs(&many);
    }
}
